"""The rollout actor around its service. A named stand-in of the service and of the assembly: nothing is generated."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mslime.data.sample_log import SampleLog
from mslime.rollout.service import StepBatch
from mslime.run import assemble as assembly
from mslime.run import run_rollouts
from mslime.run.assemble import AssembledStep
from mslime.run.run_rollouts import RunRollouts
from tests.fixtures.model_facts import model_facts
from tests.unit.test_assemble import make_config


class FakeService:
    """Has an empty step ready."""

    async def take(self, step: int) -> StepBatch:
        return StepBatch(step, step, [], {})

    async def outline(self) -> bytes:
        return b""


async def test_responses_go_on_while_a_step_is_assembled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answered = threading.Event()

    def slow_assemble(*args: Any) -> AssembledStep:
        assert answered.wait(20), "nothing else was done meanwhile"
        return AssembledStep([], {}, [], [])

    monkeypatch.setattr(assembly, "assemble", slow_assemble)
    config = make_config()
    of = RunRollouts(SimpleNamespace(config=config, model=None), None, [])  # type: ignore[arg-type]
    of.service = FakeService()  # type: ignore[assignment]
    of._samples = SampleLog("none", None)  # type: ignore[arg-type]
    monkeypatch.setattr(run_rollouts.samples, "file_of", lambda run_dir, step: tmp_path / "unused")

    async def another_response() -> None:
        await asyncio.sleep(0)
        answered.set()

    taken, _ = await asyncio.gather(of.take(0), another_response())
    assert taken.metrics == {}


@pytest.mark.parametrize(
    ("rollout", "cache", "tokens"),
    [({}, None, 128), ({"max_total_tokens": 100}, None, 42), ({}, 60, 22), ({"max_total_tokens": 17}, None, 0)],
)
def test_a_probe_fits_into_sequences_and_cache(rollout: dict[str, int], cache: int | None, tokens: int) -> None:
    asked: list[Any] = []

    class FakeEngines:
        async def probe(self, request: Any) -> dict[str, str]:
            asked.append(request)
            return {"http://e": "answer"}

    config = make_config(rollout=rollout, sglang={"max_total_tokens": cache})
    run = SimpleNamespace(config=config, model=model_facts(vocab_size=300), sends_routes=True)
    tokenizer = SimpleNamespace(encode=lambda text, special_tokens: [1, 999, *range(2, 300)])
    of = RunRollouts(run, tokenizer, [], "a")  # type: ignore[arg-type]
    of._engines = FakeEngines()  # type: ignore[assignment]
    assert asyncio.run(of.probe(5)) == ({"http://e": "answer"} if tokens else {})
    assert [(each.input_ids, each.version, each.want_routes, each.adapter) for each in asked] == [
        ([*range(1, tokens + 1)], 5, True, "a")
    ] * bool(tokens)
