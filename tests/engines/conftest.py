"""Session fixtures of the engine tests: one tiny checkpoint and one real SGLang server on it.

The server is shared by every test of the session. A test that pauses it resumes it, and a test that changes its weights
restores them with `SharedServer.restore`. After a failed test the server's state is unknown: the next test gets a new
server, so failures stay isolated.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.server_process import EngineAddress, ServerProcess
from mslime.config.keys import Endpoint
from mslime.config.model_facts import ModelFacts
from mslime.config.resolved import engine_spec
from mslime.config.schema import DeadlineConfig, RunConfig
from mslime.convert.families import get_family
from mslime.convert.lora_rules import make_adapters, served_modules
from tests.engines.daily import mark_nightly
from tests.fixtures.engine_calls import load_from_disk
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

DEADLINES = {"engine_start_s": 240, "engine_request_s": 60, "engine_control_s": 30, "weight_sync_s": 60}


def cpu_run(model: Path, **sections: Mapping[str, Any]) -> RunConfig:
    """A run on CPU with `model`; `sections` are merged over it."""
    values: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"prompts": ["unused.jsonl"]},
        "cluster": {"device": "cpu"},
        "sglang": {"max_total_tokens": 16384, "max_running_requests": 64},
        "deadlines": DEADLINES,
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return RunConfig.model_validate(values)


@dataclass
class SharedServer:
    """A running server and the checkpoint it was started with.

    Attributes:
        start: makes and starts such a server.
        doubtful: a test that used it has failed.
    """

    address: EngineAddress
    checkpoint: Path
    model: ModelFacts
    process: ServerProcess
    start: Callable[[], tuple[ServerProcess, EngineAddress]]
    doubtful: bool = False

    @property
    def url(self) -> str:
        """`http://127.0.0.1:port`."""
        return self.address.url

    @property
    def endpoint(self) -> Endpoint:
        """Its URL and keys."""
        return self.address.endpoint

    def client(self) -> EngineClient:
        """A client; `async with` it."""
        deadlines = DeadlineConfig.model_validate(DEADLINES)
        at = self.address
        # Without its identity: tests load other weights from disk, after which SGLang names its model by their path.
        return EngineClient(at.url, at.name, deadlines, self.model, at.log_path, at.keys)

    def restore(self) -> None:
        """Load the checkpoint's weights again, as version 0."""

        async def load() -> None:
            async with self.client() as client:
                await load_from_disk(client, self.checkpoint, 0)

        asyncio.run(load())

    def make_sound(self) -> None:
        """Replace the server, unless it lives and nothing is known against it."""
        if self.doubtful or not self.process.alive:
            self.process.stop()
            self.process, self.address = self.start()
            self.doubtful = False


def serve(checkpoint: Path, log_dir: Path, **sections: Mapping[str, Any]) -> SharedServer:
    """Start a server and wait for it; the caller stops `process`."""
    run, config = cpu_run(checkpoint, **sections), json.loads((checkpoint / "config.json").read_text())
    model = get_family(config).model_fields(config)
    routes = run.train.replay == "r3" and bool(model.moe_layer_ids)
    table = get_family(config).rules(config)
    adapted = served_modules(make_adapters(table, run.lora)) if run.syncs_adapters else ()

    def start() -> tuple[ServerProcess, EngineAddress]:
        process = ServerProcess(engine_spec(run, adapted), 0, log_dir, routes=routes)
        return process, process.start()

    process, address = start()
    return SharedServer(address, checkpoint, model, process, start)


@pytest.fixture(scope="session")
def tiny_qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random fp32 Qwen3-MoE checkpoint with its tokenizer."""
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("checkpoints") / "tiny-qwen3-moe")


@pytest.fixture(scope="session")
def tiny_qwen3_moe_bf16(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_qwen3_moe` cast to bfloat16, as published checkpoints are."""
    import torch
    from transformers import AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("checkpoints") / "tiny-qwen3-moe-bf16"
    shutil.copytree(tiny_qwen3_moe, directory)
    AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def sglang_server(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """A real SGLang server that serves `tiny_qwen3_moe` on CPU, with routes, log-probs and sampling masks."""
    server = serve(tiny_qwen3_moe, tmp_path_factory.mktemp("sglang"))
    yield server
    server.process.stop()


@pytest.fixture(autouse=True)
def sound_server(request: pytest.FixtureRequest) -> None:
    """Isolate the next test from the state that a failed test left behind."""
    if "sglang_server" in request.fixturenames:
        request.getfixturevalue("sglang_server").make_sound()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before pytest looks at the marks."""
    mark_nightly(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test throws doubt on the server that it used."""
    report = yield
    if report.failed and isinstance(server := item.funcargs.get("sglang_server"), SharedServer):
        server.doubtful = True
    return report
