"""A run on an externally started engine, which outlives the run."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from mslime.backends.sglang.server_process import EngineAddress, ServerProcess
from mslime.config.keys import EngineKeys
from mslime.config.resolved import engine_spec
from mslime.run.attached import RECORD
from tests.e2e.harness import Run, start_run
from tests.e2e.test_run import START_S, STEP_S, prompts, settings
from tests.engines.conftest import cpu_run

__all__ = ["prompts"]


def paused(engine: EngineAddress) -> bool:
    return httpx.get(engine.url + "/ready", timeout=30).status_code == 503


def kill_in_a_sync(run: Run, engine: EngineAddress) -> None:
    """Stop all processes when the engine is paused; kill it if it is still paused then, else let it continue."""
    pids = [run.process.pid, *(process.pid for process in run.look())]

    def signal_all(number: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    end = time.monotonic() + STEP_S
    while True:
        assert time.monotonic() < end, run.text()
        if paused(engine):
            signal_all(signal.SIGSTOP)
            if paused(engine):
                break
            signal_all(signal.SIGCONT)
        time.sleep(0.01)
    signal_all(signal.SIGKILL)
    run.process.wait()
    assert paused(engine)


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_an_engine_of_a_run_that_was_killed_in_a_sync_serves_the_next_one(
    tiny_qwen3_moe: Path, prompts: Path, tmp_path: Path, runs: list[Run]
) -> None:
    key = tmp_path / "key"
    key.write_text("the-admin-key\n")
    keys = EngineKeys("the-key", "the-admin-key")
    server = ServerProcess(engine_spec(cpu_run(tiny_qwen3_moe)), 0, tmp_path, keys=keys, routes=True)
    engine = server.start()
    try:
        sglang = {"urls": [engine.url], "api_key": "the-key", "admin_api_key": f"file:{key}"}
        values = settings(
            tiny_qwen3_moe, prompts, sglang=sglang, weights={"bucket_mib": 0.01}, checkpoint={"save_every": 0}
        )
        first = start_run(values | {"train": values["train"] | {"num_steps": 500}}, tmp_path)
        runs.append(first)
        first.wait_for(lambda: len(first.rows()) >= 1, START_S + STEP_S)
        kill_in_a_sync(first, engine)
        assert len(json.loads((first.directory / RECORD).read_text())) == 1

        second = start_run(values, tmp_path)
        runs.append(second)
        assert second.finish(START_S + 2 * STEP_S) == 0, second.text()
        assert len(second.rows()) == 2 and "bit for bit" in second.text()
        assert not paused(engine) and not (second.directory / RECORD).exists()
        assert "the-key" not in (second.directory / "config.yaml").read_text() + second.text()
        assert second.left_over() == []
    finally:
        server.stop()
