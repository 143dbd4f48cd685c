"""The rollout actor around its service. A named stand-in of the service and of the assembly: nothing is generated."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mslime.control import assemble as assembly
from mslime.control import rollouts
from mslime.control.assemble import Assembled
from mslime.data.sample_log import SampleLog
from mslime.rollout.protocols import StepBatch
from tests.unit.test_assemble import make_config


class FakeService:
    """Has an empty step ready."""

    async def take(self, step: int) -> StepBatch:
        return StepBatch(step, step, [], {})

    async def outline(self) -> bytes:
        return b""


def test_responses_go_on_while_a_step_is_assembled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answered = threading.Event()

    def slow_assemble(*args: Any) -> Assembled:
        assert answered.wait(20), "nothing else was done meanwhile"
        return Assembled([], {}, [], [])

    monkeypatch.setattr(rollouts, "redirect_output", lambda path: None)
    monkeypatch.setattr(assembly, "assemble", slow_assemble)
    config = make_config()
    actor = rollouts.RolloutActor(SimpleNamespace(config=config), "unused.log")  # type: ignore[arg-type]
    actor._service = FakeService()  # type: ignore[assignment]
    actor._layers = []
    actor._source_name, actor._samples = str, SampleLog("none", None)  # type: ignore[assignment, arg-type]
    monkeypatch.setattr(rollouts.samples, "file_of", lambda run_dir, step: tmp_path / "unused")

    async def work() -> None:
        async def another_response() -> None:
            await asyncio.sleep(0)
            answered.set()

        taken, _ = await asyncio.gather(actor.take(0), another_response())
        assert taken.metrics == {}

    asyncio.run(work())
