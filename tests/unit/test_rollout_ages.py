"""Tokens that outlive the staleness bound, answers that name impossible weights, and responses at the context's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mslime.backends.sglang.client import EngineBusy
from mslime.backends.sglang.generating import GenerateRequest, GenerateResult
from mslime.config.errors import DataError, EngineError
from mslime.config.loader import build
from mslime.data.sample import Group, SampleStatus, check_invariants
from mslime.rollout.generation import EngineLimits
from mslime.rollout.group_tracker import GroupTracker
from mslime.rollout.service import RolloutService
from tests.unit.rollout_fakes import MODEL, FakeSlowEngine, make_service, publish, run_config, ticks


@pytest.mark.parametrize(
    ("settings", "decided"),
    [
        ({}, "mask"),
        ({"rollout": {"max_staleness": 1}}, "keep"),
        ({"rollout": {"max_staleness": 1}, "algorithm": {"correction": {"preset": "none"}}}, "mask"),
        ({"rollout": {"max_staleness": 1}, "algorithm": {"correction": {"preset": "bypass"}}}, "keep"),
        ({"rollout": {"max_staleness": 1, "on_stale": "drop"}}, "drop"),
        ({"rollout": {"on_stale": "keep"}}, "keep"),
    ],
)
def test_old_tokens_are_kept_by_default_where_something_corrects_for_their_age(
    settings: dict[str, Any], decided: str
) -> None:
    sections = {"model": {"path": "m"}, "data": {"prompts": ["p.jsonl"]}, **settings}
    assert build(sections).on_stale == decided


def one_long(group: str, index: int) -> int:
    """Group 1 takes as long as several steps of the others."""
    return 60 if group == "g1" else 3


async def _steps(service: RolloutService, engine: FakeSlowEngine, steps: int) -> tuple[dict[int, list[int]], float]:
    """Trained tokens and ages of group 1's responses, and the largest age in metrics, over some steps."""
    trained, oldest = dict[int, list[int]](), 0.0
    for step in range(steps):
        batch = await service.take(step)
        oldest = max(oldest, batch.metrics["staleness/max"])
        for sample in batch.samples:
            check_invariants(sample)
            if sample.group_id == 1:
                trained[sample.index] = [sample.response_length, sample.trainable_tokens]
        await ticks(10)
        await publish(service, engine, step + 1)
    return trained, oldest


@pytest.mark.parametrize("pause_mode", ["abort", "in_place"])
@pytest.mark.parametrize(("on_stale", "whole"), [("auto", True), ("mask", False)])
async def test_a_response_longer_than_the_bound_keeps_its_first_tokens(
    tmp_path: Path, on_stale: str, whole: bool, pause_mode: str
) -> None:
    engine = FakeSlowEngine(one_long)
    config = run_config(tmp_path, max_staleness=1, on_stale=on_stale, pause_mode=pause_mode)
    service = make_service(config, engine)
    trained, oldest = await _steps(service, engine, 12)
    assert set(trained) == {0, 1}, "group 1 was trained"
    assert all((tokens == length == 60) == whole for length, tokens in trained.values())
    assert (oldest > 1) == whole and (service.ledger.masked["stale"] == 0) == whole
    await service.close()


async def test_groups_are_tested_for_their_age_when_the_weights_change_and_not_at_every_finished_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested, original = list[Group](), GroupTracker.passes_age_test
    monkeypatch.setattr(
        GroupTracker, "passes_age_test", lambda self, group: tested.append(group) or original(self, group)
    )
    engine = FakeSlowEngine(lambda group, index: 2 + int(group[1:]) % 7)
    service = make_service(run_config(tmp_path, max_staleness=1, groups_per_step=20), engine)
    for step in range(2):
        await service.take(step)
        await publish(service, engine, step + 1)
    assert len(tested) <= service.joined.next_group_id + 2 * 40
    await service.close()


@pytest.mark.parametrize("off", [1, -1, 5])
async def test_tokens_of_weights_that_were_not_served_then_are_refused(tmp_path: Path, off: int) -> None:
    class FakeLyingEngine(FakeSlowEngine):
        def _result(self, request: GenerateRequest, versions: list[int], finish: Any) -> GenerateResult:
            return super()._result(request, [v + off for v in versions], finish)

    service = make_service(run_config(tmp_path), FakeLyingEngine(one_long), version=3)
    with pytest.raises(EngineError, match="weight versions"):
        await service.take(0)


async def test_an_answer_that_does_not_fit_its_sample_is_an_engine_error(tmp_path: Path) -> None:
    class FakeForgetfulEngine(FakeSlowEngine):
        def _result(self, request: GenerateRequest, versions: list[int], finish: Any) -> GenerateResult:
            result = super()._result(request, versions, finish)
            return replace(result, routes=None if result.routes is None else result.routes[1:])

    service = make_service(run_config(tmp_path), FakeForgetfulEngine(one_long))
    with pytest.raises(EngineError, match="inconsistent answer"):
        await service.take(0)


class FakeBusyEngine(FakeSlowEngine):
    """Refuses the first requests as too busy."""

    def __init__(self, lengths: Callable[[str, int], int], refusals: int) -> None:
        super().__init__(lengths)
        self.refusals = refusals

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if self.refusals:
            self.refusals -= 1
            raise EngineBusy("fake", request.rid, "HTTP 503: the queue is full", "wait")
        return await super().generate(request)


async def test_what_waits_for_a_busy_engine_does_not_hold_up_a_weight_update(tmp_path: Path) -> None:
    engine = FakeBusyEngine(lambda group, index: 3, refusals=10**6)
    service = make_service(run_config(tmp_path, max_staleness=1), engine)
    taking = asyncio.create_task(service.take(0))
    await ticks(50)
    await service.pause_for_update()
    engine.refusals = 0
    await service.resume_after_update(0)
    assert len((await taking).groups) == 4
    await service.close()


async def test_an_engine_that_stays_busy_ends_the_step_with_its_words(tmp_path: Path) -> None:
    deadlines = {"rollout_step_s": 20, "engine_control_s": 5, "engine_request_s": 0.2}
    service = make_service(run_config(tmp_path, deadlines=deadlines), FakeBusyEngine(one_long, 10**6))
    with pytest.raises(EngineBusy, match="queue is full"):
        await service.take(0)


class FakeShortContextEngine(FakeSlowEngine):
    """A context of 64 tokens with SGLang's rules: inputs of 58 and more are refused, and generation ends at 62. Each
    response is interrupted once, when it has 56 to 61 tokens."""

    REFUSED, END = 58, 62

    def __init__(self, lengths: Callable[[str, int], int]) -> None:
        super().__init__(lengths)
        self.interrupted = dict[str, int]()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        n, response = len(request.input_ids), request.rid.rpartition("-")[0]
        if n >= self.REFUSED:
            raise EngineError("fake", request.rid, f"HTTP 400: Input length ({n} tokens) exceeds {self.REFUSED}", "-")
        if response in self.interrupted:
            return await super().generate(replace(request, max_new_tokens=min(request.max_new_tokens, self.END - n)))
        at = self.interrupted[response] = max(n + 1, 56 + len(self.interrupted) % 6)
        cut = await super().generate(replace(request, max_new_tokens=at - n))
        return replace(cut, finish="abort")


SHORT_CONTEXT = {
    "model": replace(MODEL, max_positions=64),
    "limits": EngineLimits(refused_input=FakeShortContextEngine.REFUSED),
}


async def test_a_response_that_is_interrupted_at_the_context_s_end_is_cut_and_trained(tmp_path: Path) -> None:
    engine = FakeShortContextEngine(lambda group, index: 80)
    config = run_config(tmp_path, max_response_tokens=70)
    batch = await make_service(config, engine, **SHORT_CONTEXT).take(0)
    assert sorted(len(s) for s in batch.samples) == [58, 59, 60, 61, 62, 62, 62, 62]
    assert all(s.status is SampleStatus.TRUNCATED and s.trainable_tokens for s in batch.samples)


@pytest.mark.parametrize(("length", "fits"), [(57, True), (58, False)])
async def test_a_prompt_that_the_engine_would_refuse_is_named_by_its_row(
    tmp_path: Path, length: int, fits: bool
) -> None:
    config = run_config(tmp_path, max_response_tokens=4)
    Path(config.data.prompts[0]).write_text(f'{{"prompt": "{"P" * length}", "label": ""}}\n' * 4)
    service = make_service(config, FakeShortContextEngine(lambda group, index: 2), **SHORT_CONTEXT)
    if fits:
        assert len((await service.take(0)).groups) == 4
        return
    with pytest.raises(DataError) as caught:
        await service.take(0)
    assert caught.value.field.endswith("prompts.jsonl:1")
