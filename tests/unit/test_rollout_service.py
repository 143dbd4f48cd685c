"""One loop for every staleness: what is submitted, interrupted, continued, masked and trained. Engines are fakes."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mslime.backends.sglang.client import EngineDied
from mslime.backends.sglang.generating import GenerateRequest
from mslime.config.data import EvalSetConfig
from mslime.config.errors import DataError, EngineError, RewardError
from mslime.data.sample import Group, Sample, SampleStatus, check_invariants
from mslime.observe.progress import RolloutCounts, summary_line
from mslime.rollout import state
from tests.fixtures.supports import rows_of
from tests.unit.rollout_fakes import (
    EXPERTS,
    MOE_LAYERS,
    FakeDyingEngines,
    FakeScorer,
    FakeSlowEngine,
    make_service,
    publish,
    run_config,
    short,
    support_at,
    ticks,
    uneven,
)

DEADLINE_S = 30


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def tokens_of(groups: list[Group]) -> int:
    return sum(s.trainable_tokens for g in groups for s in g.samples)


def check_sample(sample: Sample) -> None:
    """Tokens, log-probs, routes and segments of a sample are those that FakeSlowEngine made at these positions."""
    check_invariants(sample)
    n, p = len(sample), sample.prompt_length
    assert sample.tokens[p:].tolist() == [100 + t for t in range(p, n)]
    for segment in sample.segments[1:]:
        t = np.arange(segment.start, segment.end)
        np.testing.assert_allclose(sample.log_probs[t], -t / 1000 - segment.version, rtol=1e-5)
    assert sample.routes is not None and len(sample.routes) == n - 1
    for column, layer in enumerate(MOE_LAYERS):
        expected = [[(t + layer) % EXPERTS, (t + 1) % EXPERTS] for t in range(n - 1)]
        assert sample.routes.experts[:, column].tolist() == expected


async def test_synchronous_steps_are_on_policy_and_hold_every_prompt_once(tmp_path: Path):
    engine = FakeSlowEngine(short)
    service = make_service(run_config(tmp_path, max_staleness=0), engine)
    seen: list[str] = []
    for step in range(3):
        batch = await service.take(step)
        assert (batch.step, batch.version, len(batch.groups)) == (step, step, 4)
        assert engine.running == 0, "nothing is generated while the trainer works"
        assert {seg.version for s in batch.samples for seg in s.segments[1:]} == {step}
        assert batch.metrics["staleness/max"] == 0 and batch.metrics["ledger/pending_tokens"] == 0
        assert batch.metrics["ledger/trained_tokens"] == tokens_of(batch.groups) == 4 * (3 + 4)
        for sample in batch.samples:
            check_sample(sample)
        seen += [g.source.rsplit(":", 1)[1] for g in batch.groups]
        await publish(service, engine, step + 1)
    assert seen == [str(i) for i in range(1, 13)]
    assert engine.flushes == 3 and engine.paused is None


async def test_prompts_skipped_as_too_long_are_reported(tmp_path: Path):
    engine, config = FakeSlowEngine(short), run_config(tmp_path, max_staleness=0)
    data = config.data.model_copy(update={"max_prompt_tokens": len("P0")})
    service = make_service(config.model_copy(update={"data": data}), engine)
    skipped: list[float] = []
    for step in range(3):
        skipped.append((await service.take(step)).metrics["data/skipped_rows"])
        await publish(service, engine, step + 1)
    assert skipped == [0, 0, 30], "P10 to P39"


class FakeGroupScorer(FakeScorer):
    """Gives the samples of a group 0, 1 and so on, when it may; remembers what it was asked."""

    per_group = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[Sample]] = []
        self.may = asyncio.Event()
        self.may.set()

    async def score(self, sample: Sample) -> float | None:
        raise AssertionError("samples are scored with their group")

    async def score_group(self, samples: Sequence[Sample]) -> list[float | None]:
        self.asked.append(list(samples))
        assert all(s.status.finished for s in samples)
        await self.may.wait()
        return [float(i) for i in range(len(samples))]


async def test_a_reward_of_groups_is_asked_once_for_each_when_all_of_it_is_finished(tmp_path: Path):
    engine, scorer = FakeSlowEngine(lambda group, index: 4 + 30 * index), FakeGroupScorer()
    config = run_config(tmp_path, max_staleness=0, over_sampling=2.0, groups_per_step=2)
    service = make_service(config, engine, scorer)
    for step in range(3):
        batch = await service.take(step)
        assert [s.reward for s in batch.samples] == [0.0, 1.0] * 2
        await publish(service, engine, step + 1)
    asked = [group[0].group_id for group in scorer.asked]
    assert len(asked) == len(set(asked)) >= 6 and all(len(group) == 2 for group in scorer.asked)
    held_out = EvalSetConfig(name="e", path=f"{config.data.prompts[0]}@[:3]", samples_per_prompt=4, temperature=1.0)
    result = await service.evaluate(held_out)
    assert result.mean_reward == 1.5 and result.accuracy == 0.75
    assert [len(group) for group in scorer.asked[-3:]] == [4] * 3


class FakeSlowJudge(FakeScorer):
    """Scores the first response of each group when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.asked = asyncio.Event(), 0

    async def score(self, sample: Sample) -> float | None:
        self.asked += 1
        if sample.index == 0:
            await self.may.wait()
        return await super().score(sample)


@pytest.mark.parametrize("partial", [True, False])
async def test_a_response_goes_on_after_an_update_while_its_sibling_is_scored(tmp_path: Path, partial: bool):
    judge, engine = FakeSlowJudge(), FakeSlowEngine(lambda group, index: 40 * index + 3)
    config = run_config(tmp_path, groups_per_step=1, max_staleness=1, partial=partial)
    service = make_service(config, engine, judge)
    await publish(service, engine, 0)
    while not judge.asked:
        await asyncio.sleep(0)
    before = len(engine.requests)
    await publish(service, engine, 1)
    while not (again := [r for r in engine.requests[before:] if "-g0-1-" in r.rid]):
        await asyncio.sleep(0)
    assert (again[0].routes_start > 0) == partial and not judge.may.is_set()
    judge.may.set()
    (group,) = (await service.take(0)).groups
    assert [s.reward for s in group.samples] == [0.0, 1.0] and service.ledger.generated >= 46
    for sample in group.samples:
        check_sample(sample)
    versions = [[s.version for s in sample.segments[1:]] for sample in group.samples]
    assert versions == ([[0], [0, 1]] if partial else [[1], [1]])
    await service.close()


async def test_a_group_whose_scoring_is_cut_off_is_kept_and_scored_after_a_resume(tmp_path: Path):
    engine, scorer, config = FakeSlowEngine(short), FakeGroupScorer(), run_config(tmp_path, max_staleness=0)
    scorer.may.clear()
    service = make_service(config, engine, scorer)
    taking = asyncio.create_task(service.take(0))
    while len(scorer.asked) < 4:
        await asyncio.sleep(0)
    await service.close()
    taking.cancel()
    assert not service.tracker.accepted and len(list(service.tracker.held())) == 4
    again = FakeGroupScorer()
    resumed = make_service(config, engine, again)
    await resumed.continue_from(*service.state_dict())
    batch = await resumed.take(0)
    assert [s.reward for s in batch.samples] == [0.0, 1.0] * 4 and len(again.asked) == 4


async def test_left_over_groups_are_interrupted_and_continued_with_their_old_columns(tmp_path: Path):
    engine = FakeSlowEngine(uneven)
    config = run_config(tmp_path, max_staleness=0, over_sampling=1.5, concurrency=100)
    service = make_service(config, engine)
    first = await service.take(0)
    assert engine.running == 0 and first.metrics["rollout/aborted"] == 4
    assert first.metrics["ledger/pending_tokens"] > 0
    await publish(service, engine, 1)
    asked = len(engine.requests)
    second = await service.take(1)
    continued = [r for r in engine.requests[asked:] if r.routes_start > 0]
    assert len(continued) == 4 and second.metrics["rollout/recycled"] == 4
    for request in continued:
        assert request.routes_start == len(request.input_ids) - 1, "only the missing routes are asked for"
        old = request.max_new_tokens + len(request.input_ids)
        assert old == 64 + next(i for i, t in enumerate(request.input_ids) if t >= 100), "the limit counts all parts"
    crossed = [s for s in second.samples if len(s.segments) == 3]
    assert crossed, "a response that began under version 0 ended under version 1"
    for sample in crossed:
        check_sample(sample)
        assert [seg.version for seg in sample.segments] == [None, 0, 1] and sample.aborts == 1
        assert [seg.trainable for seg in sample.segments] == [False, False, True], "version 0 is too old to train"
    assert second.metrics["staleness/max"] == 0 and second.metrics["ledger/masked/stale_tokens"] > 0


@pytest.mark.parametrize("max_staleness", [1, 2])
async def test_asynchronous_steps_work_ahead_within_the_gate_and_train_nothing_older(
    tmp_path: Path, max_staleness: int
):
    engine = FakeSlowEngine(uneven)
    service = make_service(run_config(tmp_path, max_staleness=max_staleness, on_stale="mask"), engine)
    ages: list[float] = []
    for step in range(6):
        batch = await service.take(step)
        assert (step + 1) * 4 <= service.joined.next_group_id <= (step + 1 + max_staleness) * 4
        ages.append(batch.metrics["staleness/max"])
        for sample in batch.samples:
            check_sample(sample)
        await ticks(50)  # the trainer works, and so do the engines
        await publish(service, engine, step + 1)
    assert max(ages) == max_staleness, ages
    await service.close()


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
async def test_a_weight_update_interrupts_with_pause_mode_abort_and_spans_versions_with_in_place(
    tmp_path: Path, mode: str
):
    engine = FakeSlowEngine(lambda group, index: 10 if group in ("g0", "g1") else 60)
    service = make_service(run_config(tmp_path, max_staleness=1, pause_mode=mode, groups_per_step=2), engine)
    await service.take(0)
    await ticks(10)
    await service.pause_for_update()
    assert engine.paused == ("retract" if mode == "abort" else mode)
    assert (engine.running == 0) == (mode == "abort")
    before = len(engine.requests)
    engine.version = 1
    await ticks(10)
    assert len(engine.requests) == before, "no request reaches a paused engine"
    await service.resume_after_update(1)
    assert engine.flushes == (mode != "in_place")
    batch = await service.take(1)
    for sample in batch.samples:
        check_sample(sample)
        assert [seg.version for seg in sample.segments] == [None, 0, 1] and sample.aborts == (mode == "abort")
    assert batch.metrics["rollout/aborted"] == 4 * (mode == "abort")
    await service.close()


async def test_a_stale_group_that_is_scored_while_the_step_is_closed_is_masked_too(tmp_path: Path):
    """Its reward arrives between the decision that the step has enough and the taking."""
    closing = asyncio.Event()

    class FakeSlowAbort(FakeSlowEngine):
        async def abort(self, owner: str = "") -> None:
            await super().abort()
            if self.version == 1:
                closing.set()
                await ticks(20)

    class FakeLateScorer(FakeScorer):
        async def score(self, sample: Sample) -> float | None:
            if sample.group_id == 1:
                await closing.wait()
            return await super().score(sample)

    engine = FakeSlowAbort(lambda group, index: {"g1": 6, "g5": 60}.get(group, 4))
    service = make_service(run_config(tmp_path, over_sampling=3.0, groups_per_step=2), engine, FakeLateScorer())
    await service.take(0)
    await publish(service, engine, 1)
    batch = await service.take(1)
    assert closing.is_set() and 1 in [g.group_id for g in [*batch.groups, *service.tracker.accepted]]
    assert batch.metrics["staleness/max"] == 0
    for sample in batch.samples:
        assert all(s.trainable == (s.version == 1) for s in sample.segments[1:])


async def test_stale_groups_are_dropped(tmp_path: Path):
    """Group 1 is slow: it is interrupted at version 0, which is too old at version 1."""
    engine = FakeSlowEngine(lambda group, index: 12 if group == "g1" else 4)
    config = run_config(tmp_path, max_staleness=0, over_sampling=2.0, groups_per_step=2, on_stale="drop")
    service = make_service(config, engine)
    await service.take(0)
    await publish(service, engine, 1)
    batch = await service.take(1)
    assert batch.metrics["ledger/dropped/stale_tokens"] > 0
    assert 1 not in [g.group_id for g in [*service.tracker.held(), *batch.groups]]


async def test_without_partial_rollouts_interrupted_groups_begin_again(tmp_path: Path):
    engine = FakeSlowEngine(uneven)
    service = make_service(run_config(tmp_path, over_sampling=1.5, partial=False), engine)
    first = await service.take(0)
    assert first.metrics["ledger/dropped/aborted_tokens"] > 0 and first.metrics["ledger/pending_tokens"] == 0
    await publish(service, engine, 1)
    for sample in (await service.take(1)).samples:
        assert [s.version for s in sample.segments] == [None, 1]


async def test_zero_variance_groups_are_replaced_by_others_and_booked(tmp_path: Path):
    engine = FakeSlowEngine(short)
    scorer = FakeScorer(lambda s: float(s.index) if s.group_id % 2 else 0.5)
    config = run_config(tmp_path, dynamic_filter="zero_variance", over_sampling=2.0)
    service = make_service(config, engine, scorer)
    batch = await service.take(0)
    assert all(g.group_id % 2 for g in batch.groups) and len(batch.groups) == 4
    assert batch.metrics["rollout/filtered_groups"] >= 3 and batch.metrics["reward/zero_variance_groups"] == 0
    assert batch.metrics["ledger/dropped/zero_variance_tokens"] == 7 * batch.metrics["rollout/filtered_groups"]


async def test_a_dead_engine_hands_its_requests_to_the_other_and_nothing_held_is_lost(tmp_path: Path):
    engines = FakeDyingEngines(short, [10])
    service = make_service(run_config(tmp_path, max_staleness=0), engines)
    batch = await service.take(0)
    assert len(batch.groups) == 4 and len(engines.dead) == 1
    for sample in batch.samples:
        check_sample(sample)


async def test_when_no_engine_is_left_the_call_fails_and_finished_groups_stay(tmp_path: Path):
    engines = FakeDyingEngines(uneven, [20, 100])
    service = make_service(run_config(tmp_path, groups_per_step=6), engines)
    with pytest.raises(EngineError, match="told to die"):
        await service.take(0)
    finished = list(service.tracker.accepted)
    assert finished and service.ledger.pending == tokens_of(list(service.tracker.held()))
    engines.dead, engines._deaths = {}, []  # somebody started them again
    batch = await service.take(0)
    assert sorted(g.group_id for g in batch.groups) == [0, 1, 2, 3, 4, 5]
    assert all(any(g is old for g in batch.groups) for old in finished)


async def test_engines_that_died_before_a_weight_update_and_are_back_after_it_are_no_failure(tmp_path: Path):
    """All die while the trainer works, which nobody asks about until they are back."""
    engines = FakeDyingEngines(uneven, [])
    service = make_service(run_config(tmp_path, max_staleness=1), engines)
    await service.take(0)
    engines._deaths = [0, 0]
    while len(engines.dead) < 2 or service.manager._runner.failure is None:
        await asyncio.sleep(0)
    await service.pause_for_update()
    engines.dead = {}
    engines.version = 1
    await service.resume_after_update(1)
    batch = await service.take(1)
    assert len(batch.groups) == 4 and service.tracker.counters.total["failed_rollouts"] == 0
    for sample in batch.samples:
        check_sample(sample)


def fails_for_group_2(sample: Sample) -> float:
    if sample.group_id == 2:
        raise RewardError("reward rules:score", f"sample {sample.index}", "raised KeyError", "mend it")
    return float(sample.index)


async def test_a_failing_reward_ends_the_step_and_keeps_the_responses(tmp_path: Path):
    engine, scorer = FakeSlowEngine(short), FakeScorer(fails_for_group_2)
    service = make_service(run_config(tmp_path), engine, scorer)
    with pytest.raises(RewardError, match="KeyError"):
        await service.take(0)
    scorer.reward = lambda sample: float(sample.index)
    batch = await service.take(0)
    assert [s.reward for s in batch.samples] == [0, 1] * 4
    assert sum("-g2-0-" in r.rid for r in engine.requests) == 1, "scored again, not generated again"


async def test_samples_whose_reward_is_dropped_leave_their_group(tmp_path: Path):
    scorer = FakeScorer(lambda s: None if s.index == 0 or s.group_id == 1 else float(s.index))
    service = make_service(run_config(tmp_path, group_size=3), FakeSlowEngine(short), scorer)
    batch = await service.take(0)
    assert [g.group_id for g in batch.groups] == [0, 2, 3, 4], "group 1 had nothing left"
    assert all([s.index for s in g.samples] == [1, 2] for g in batch.groups)
    assert batch.metrics["ledger/dropped/reward_tokens"] == 4 * 3 + (3 + 4 + 5)


async def test_a_step_that_cannot_be_filled_ends_at_its_deadline_and_says_what_is_missing(tmp_path: Path):
    config = run_config(tmp_path, dynamic_filter="zero_variance", deadlines={"rollout_step_s": 0.3})
    service = make_service(config, FakeSlowEngine(short), FakeScorer(lambda s: 1.0))
    with pytest.raises(EngineError, match=r"(?s)0 of 4 groups.*rejected by the dynamic filter"):
        await service.take(0)
    await service.close()


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after an answer"])
async def test_an_engine_that_hangs_is_given_up_and_what_it_had_is_sampled_anew(tmp_path: Path, late: bool):
    class FakeHangingEngines(FakeDyingEngines):
        hangs, given_up, answered = True, asyncio.Event(), -math.inf

        async def before_token(self, request: GenerateRequest) -> None:
            if self.hangs and "-g5-" in request.rid:
                await self.given_up.wait()
                raise EngineDied("fake 0", "/abort_request", "not obeyed", "look at it")

        async def abort(self, owner: str = "") -> None:
            await super().abort()
            if late and self.answered == -math.inf:
                self.answered = time.monotonic()

        def give_up(self, since: float) -> None:
            if self.answered < since:
                self.dead["fake 0"] = EngineDied("fake 0", "/abort_request", "not obeyed", "look at it")
                self.hangs = False
                self.given_up.set()

    engines = FakeHangingEngines(short, [])
    config = run_config(tmp_path, over_sampling=1.5, deadlines={"rollout_step_s": 20, "engine_control_s": 0.2})
    service = make_service(config, engines)
    first = await service.take(0)
    assert len(first.groups) == 4 and list(engines.dead) == ["fake 0"]
    assert 5 in [g.group_id for g in service.tracker.held()], "it rests"
    await publish(service, engines, 1)
    second = await service.take(1)
    assert 5 in [g.group_id for g in second.groups]
    for sample in second.samples:
        check_sample(sample)
    await service.close()


async def test_an_engine_that_ignores_aborts_is_reported(tmp_path: Path):
    class FakeDeafEngine(FakeSlowEngine):
        async def abort(self, owner: str = "") -> None:
            return None

        async def before_token(self, request: GenerateRequest) -> None:
            if "-g5-" in request.rid:
                await asyncio.Event().wait()

    config = run_config(tmp_path, over_sampling=1.5, deadlines={"engine_control_s": 0.2})
    service = make_service(config, FakeDeafEngine(short))
    with pytest.raises(EngineError, match=r"2 requests.*did not stop"):
        await service.take(0)
    assert len(service.tracker.accepted) >= 4
    await service.close()


async def test_a_cancelled_take_loses_nothing(tmp_path: Path):
    engine = FakeSlowEngine(uneven)
    service = make_service(run_config(tmp_path, over_sampling=1.5), engine)
    waiting = asyncio.create_task(service.take(0))
    while not engine.running:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    batch = await service.take(0)
    assert len(batch.groups) == 4
    assert sorted(g.group_id for g in [*batch.groups, *service.tracker.held()]) == list(range(6))


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_a_resumed_service_continues_with_every_group_and_the_same_prompts(tmp_path: Path, max_staleness: int):
    config = run_config(tmp_path, max_staleness=max_staleness, over_sampling=1.5)
    engine = FakeSlowEngine(uneven)
    service = make_service(config, engine)
    taken = await service.take(0)
    await publish(service, engine, 1)
    await ticks(10)
    await service.drain()
    await service.save(tmp_path / "rollouts.npz")
    held = {g.group_id: [s.tokens.tolist() for s in g.samples] for g in service.tracker.held()}
    assert held and any(s.response_length for g in service.tracker.held() for s in g.samples)

    engine = FakeSlowEngine(uneven)
    other = make_service(config, engine, version=1)
    await other.load(tmp_path / "rollouts.npz")
    again = {g.group_id: [s.tokens.tolist() for s in g.samples] for g in other.tracker.held()}
    assert again == held and other.ledger.pending == service.ledger.pending and other.version == 1
    await service.close()

    seen = [g.group_id for g in taken.groups]
    for step in range(1, 5):
        batch = await other.take(step)
        for sample in batch.samples:
            check_sample(sample)
        seen += [g.group_id for g in batch.groups]
        await publish(other, engine, step + 1)
    rest = [g.group_id for g in other.tracker.held()]
    lost = set(range(other.joined.next_group_id)) - {*seen, *rest}
    assert len(seen) == len(set(seen)) == 20
    assert len(lost) == other.tracker.counters.total["stale_groups"], "a group is trained, held, or counted as too old"
    await other.close()


async def test_the_state_holds_groups_in_flight(tmp_path: Path):
    config = run_config(tmp_path, max_staleness=2)
    service = make_service(config, FakeSlowEngine(uneven))
    taken = {g.group_id for g in (await service.take(0)).groups}
    assert service.tracker.running
    everything = sorted(g.group_id for g in service.tracker.held())
    await service.save(tmp_path / "rollouts.npz")
    other = make_service(config, FakeSlowEngine(uneven))
    await other.load(tmp_path / "rollouts.npz")
    assert sorted(g.group_id for g in other.tracker.held()) == everything == sorted({*range(12)} - taken)
    await service.close()


@pytest.fixture
def held_archive(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """(begun, may): a checkpoint's file is written when it may."""
    begun, may, write = threading.Event(), threading.Event(), state._write_archive

    def hold(*args: Any) -> None:
        begun.set()
        assert may.wait(20)
        write(*args)

    monkeypatch.setattr(state, "_write_archive", hold)
    return begun, may


async def test_engines_generate_while_a_checkpoint_is_written_which_is_of_the_moment_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_archive: tuple[threading.Event, threading.Event]
):
    begun, may = held_archive
    config, engine = run_config(tmp_path, max_staleness=2), FakeSlowEngine(uneven)
    service = make_service(config, engine)
    await service.take(0)
    await ticks(10)
    keep, kept = service.tracker.kept, list[tuple[set[int], int]]()

    def note(next_step: int | None) -> Any:
        kept.append(({g.group_id for g in service.tracker.held()}, service.ledger.pending))
        return keep(next_step)

    monkeypatch.setattr(service.tracker, "kept", note)
    checkpoint = asyncio.create_task(service.save(tmp_path / "rollouts.npz", interrupt=True))
    while not begun.is_set():
        await asyncio.sleep(0)
    ((held, pending),) = kept
    taken = await service.take(1)  # of tokens that engines make meanwhile
    assert len(taken.groups) == 4 and not checkpoint.done()
    may.set()
    await checkpoint
    await service.close()
    again = make_service(config, FakeSlowEngine(uneven))
    await again.load(tmp_path / "rollouts.npz")
    assert {g.group_id for g in again.tracker.held()} == held and again.ledger.pending == pending > 0
    assert [len((await again.take(step)).groups) for step in (1, 2)] == [4, 4]
    await again.close()


TRUNCATED = {"top_p": 0.9, "top_k": 20, "min_p": 0.01}


def check_supports(sample: Sample) -> None:
    """Every sampled token has the support that its own version drew it from; no other token has one."""
    expected: list[list[int]] = []
    for s in sample.segments:
        version = s.version
        expected += [[] if version is None else support_at(t, version) for t in range(s.start, s.end)]
    assert rows_of(sample.supports) == expected


async def test_supports_of_interrupted_responses_are_kept_and_only_new_ones_are_added(tmp_path: Path):
    engine = FakeSlowEngine(uneven)
    config = run_config(tmp_path, max_staleness=0, over_sampling=1.5, **TRUNCATED)
    service = make_service(config, engine)
    first = await service.take(0)
    assert all((r.top_p, r.top_k, r.min_p) == (0.9, 20, 0.01) for r in engine.requests)
    await publish(service, engine, 1)
    await service.save(tmp_path / "rollouts.npz", interrupt=True)
    await service.close()

    engine = FakeSlowEngine(uneven)
    other = make_service(config, engine, version=1)
    await other.load(tmp_path / "rollouts.npz")
    second = await other.take(1)
    assert any(len(s.segments) == 3 for s in second.samples), "a response of version 0 ended under version 1"
    for sample in (*first.samples, *second.samples):
        check_sample(sample)
        check_supports(sample)
    trained = [(s.loss_mask, rows_of(s.supports) or []) for s in second.samples]
    sizes = [len(row) for mask, rows in trained for inside, row in zip(mask, rows, strict=True) if inside]
    assert second.metrics["rollout/support_tokens"] == len(sizes) and second.metrics["rollout/support_max"] == 3
    assert second.metrics["rollout/support_mean"] == pytest.approx(np.mean(sizes))
    await other.close()


async def test_new_prompts_are_handed_out_while_a_checkpoint_is_written(
    tmp_path: Path, held_archive: tuple[threading.Event, threading.Event]
):
    begun, may = held_archive
    engine = FakeSlowEngine(short)
    service = make_service(run_config(tmp_path, max_staleness=1), engine)
    await service.take(0)
    checkpoint = asyncio.create_task(service.save(tmp_path / "rollouts.npz", interrupt=True))
    while not begun.is_set():
        await asyncio.sleep(0)
    before = service.joined.next_group_id
    await publish(service, engine, 1)
    await ticks(40)
    try:
        assert service.joined.next_group_id > before and not checkpoint.done()
    finally:
        may.set()
    await checkpoint
    await service.close()


async def test_responses_that_began_before_truncated_sampling_keep_their_whole_vocabulary(tmp_path: Path):
    engine = FakeSlowEngine(uneven)
    service = make_service(run_config(tmp_path, max_staleness=0, over_sampling=1.5), engine)
    first = await service.take(0)
    assert all(s.supports is None for s in first.samples) and "rollout/support_mean" not in first.metrics
    await publish(service, engine, 1)
    await service.save(tmp_path / "rollouts.npz", interrupt=True)
    await service.close()
    engine = FakeSlowEngine(uneven)
    other = make_service(run_config(tmp_path, max_staleness=0, over_sampling=1.5, **TRUNCATED), engine, version=1)
    await other.load(tmp_path / "rollouts.npz")
    crossed = [s for s in (await other.take(1)).samples if len(s.segments) == 3]
    assert crossed
    for sample in crossed:
        check_invariants(sample)
        old = sample.segments[2].start
        assert sample.supports is not None and not sample.supports.sizes[:old].any()
        assert rows_of(sample.supports)[old:] == [support_at(t, 1) for t in range(old, len(sample))]
    await other.close()


async def test_an_evaluation_beside_training_is_of_one_version_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def at_once(call: Callable[..., Any], *args: Any) -> Any:
        """The engines' tokens are counted in passes of the loop, and a disk has a clock of its own."""
        return call(*args)

    monkeypatch.setattr(state.asyncio, "to_thread", at_once)

    class FakeCounting(FakeSlowEngine):
        held_out = 0

        async def before_token(self, request: GenerateRequest) -> None:
            self.held_out += "-e-" in request.rid

    engine = FakeCounting(lambda group, index: 40 if group.startswith("e-") else 4)
    config = run_config(tmp_path, max_staleness=2, groups_per_step=2)
    service = make_service(config, engine)
    held_out = EvalSetConfig(name="e", path=f"{config.data.prompts[0]}@[:3]", samples_per_prompt=2)
    evaluation = asyncio.create_task(service.evaluate(held_out))
    batch = await service.take(0)
    assert not evaluation.done() and len(batch.groups) == 2, "the step's groups do not wait for it"
    total = await service.save(tmp_path / "rollouts.npz", interrupt=True)
    assert total.size and not evaluation.done(), "a checkpoint interrupts its responses, which go on"
    result = await evaluation
    assert result.version == 0 and result.response_len_mean == 40

    hasty, begun = asyncio.create_task(service.evaluate(held_out)), engine.held_out
    while engine.held_out < begun + 12:  # of six responses: there are tokens of version 0
        await asyncio.sleep(0)
    await publish(service, engine, 1)
    with pytest.raises(AssertionError, match="replaced during the evaluation of e"):
        await hasty
    await service.close()


async def test_a_batch_that_was_ready_says_nothing_of_the_engines_speed(tmp_path: Path):
    engine = FakeSlowEngine(lambda group, index: 4 if int(group[1:]) < 4 else 40)
    service = make_service(run_config(tmp_path, max_staleness=2), engine)
    await service.take(0)
    while service.tracker.running:
        await asyncio.sleep(0)
    generated, ready = (await service.take(1)).metrics, (await service.take(2)).metrics
    assert generated["rollout/tokens_per_s"] > 0 and "batch was ready" not in summary_line(generated)
    assert ready["ledger/generated_tokens"] == 0 and "rollout/tokens_per_s" not in ready
    assert "batch was ready" in summary_line(ready)
    await service.close()


async def test_an_evaluation_waits_for_a_weight_update(tmp_path: Path):
    engine = FakeSlowEngine(short)
    config = run_config(tmp_path)
    service = make_service(config, engine)
    await service.pause_for_update()
    evaluation = asyncio.create_task(service.evaluate(EvalSetConfig(name="e", path=f"{config.data.prompts[0]}@[:3]")))
    await ticks(20)
    assert not engine.requests, "no request reaches a paused engine"
    await service.resume_after_update(1)
    assert (await evaluation).prompts == 3 and service.ledger.generated == 0


async def test_a_prompt_without_room_for_a_response_is_named(tmp_path: Path):
    service = make_service(run_config(tmp_path, max_total_tokens=2, max_response_tokens=1), FakeSlowEngine(short))
    with pytest.raises(DataError, match=r"prompts.jsonl:1 = .*no room for a response"):
        await service.take(0)


async def test_responses_end_at_the_length_limit(tmp_path: Path):
    service = make_service(run_config(tmp_path, max_response_tokens=5), FakeSlowEngine(lambda group, index: 50))
    batch = await service.take(0)
    assert all(s.status is SampleStatus.TRUNCATED and s.response_length == 5 for s in batch.samples)
    assert batch.metrics["rollout/truncated"] == 1 and batch.metrics["rollout/response_len_max"] == 5


async def test_progress_and_spans_are_told(tmp_path: Path):
    counts: list[RolloutCounts] = []
    spans: list[tuple[str, str, float, float, int]] = []
    service = make_service(
        run_config(tmp_path),
        FakeSlowEngine(short),
        on_progress=lambda *c: counts.append(RolloutCounts(*c)),
        on_span=lambda *span: spans.append(span),
    )
    await service.take(0)
    assert counts[-1] == RolloutCounts(needed=4, accepted=0, running=0), "a new step begins"
    assert max(c.running for c in counts) == 4 and max(c.accepted for c in counts) == 4
    assert max(c.done for c in counts) == 8
    assert sum(name == "generate" for _, name, *_ in spans) == 8
    assert all(start <= end and step == 0 for *_, start, end, step in spans)


async def test_a_group_that_always_fails_ends_a_run_once_and_is_dropped_by_the_resume(tmp_path: Path):
    service = make_service(run_config(tmp_path), FakeSlowEngine(short), FakeScorer(fails_for_group_2))
    with pytest.raises(RewardError, match="KeyError"):
        await service.take(0)
    await service.save(tmp_path / "s.npz", 0, interrupt=True)
    await service.close()

    resumed = make_service(run_config(tmp_path), FakeSlowEngine(short), FakeScorer(fails_for_group_2))
    await resumed.load(tmp_path / "s.npz")
    batch = await resumed.take(0)
    assert 2 not in [g.group_id for g in batch.groups] and len(batch.groups) == 4
    assert batch.metrics["rollout/failed_groups"] == 1 and resumed.ledger.dropped["failed"] > 0
    await resumed.close()


async def test_groups_that_were_taken_but_not_trained_are_in_the_saved_state(tmp_path: Path):
    service = make_service(run_config(tmp_path), FakeSlowEngine(short))
    taken = await service.take(0)
    before = (
        await service.save(tmp_path / "untrained.npz", next_step=0),
        await service.save(tmp_path / "trained.npz", next_step=1),
    )
    assert before[0] != before[1]
    for name, again in (("untrained", True), ("trained", False)):
        resumed = make_service(run_config(tmp_path), FakeSlowEngine(short))
        await resumed.load(tmp_path / f"{name}.npz")
        batch = await resumed.take(0)
        same = [g.group_id for g in batch.groups] == [g.group_id for g in taken.groups]
        assert same is again
        assert resumed.ledger.trained == sum(s.trainable_tokens for s in batch.samples) * (1 if again else 2)
        if again:
            moved = ("ledger/trained_tokens", "ledger/pending_tokens", "ledger/generated_tokens")
            assert all(batch.metrics[name] == taken.metrics[name] for name in moved), "the step's tracker are the same"
        await resumed.close()
    await service.close()


async def test_groups_given_back_are_taken_again_and_one_that_fails_twice_is_dropped(tmp_path: Path):
    service = make_service(run_config(tmp_path), FakeSlowEngine(short))
    first = await service.take(0)
    blamed = first.groups[1]
    assert not await service.give_back([blamed]), "the first failure ends the run"
    second = await service.take(0)
    assert [g.group_id for g in second.groups] == [g.group_id for g in first.groups]
    assert await service.give_back([blamed]), "the second one drops the group"
    third = await service.take(0)
    assert blamed not in third.groups and len(third.groups) == 4
    assert service.ledger.trained == sum(s.trainable_tokens for s in third.samples)
    await service.close()


async def test_an_outline_begins_unfinished_groups_again_and_keeps_the_books(tmp_path: Path):
    config = run_config(tmp_path, max_staleness=2, over_sampling=2.0)
    engine = FakeSlowEngine(uneven)
    service = make_service(config, engine)
    await service.take(0)
    outline, held = await service.outline(), sorted(g.group_id for g in service.tracker.held())
    prompts = {g.group_id: g.samples[0].tokens[: g.samples[0].prompt_length].tolist() for g in service.tracker.held()}
    (tmp_path / "o.npz").write_bytes(outline)
    await service.close()

    resumed = make_service(config, FakeSlowEngine(uneven))
    await resumed.load(tmp_path / "o.npz")
    assert sorted(g.group_id for g in resumed.tracker.held()) == held != []
    assert {g.group_id: g.samples[0].tokens.tolist() for g in resumed.tracker.held()} == prompts
    assert resumed.ledger.pending == 0 and resumed.joined.next_group_id == service.joined.next_group_id
    batch = await resumed.take(1)
    assert len(batch.groups) == 4
    await resumed.close()


async def test_a_group_that_breaks_an_invariant_is_left_out_of_a_checkpoint(tmp_path: Path):
    """It would be refused at every resume."""
    service = make_service(run_config(tmp_path), FakeSlowEngine(short))
    taken = await service.take(0)
    bad = taken.groups[0].samples[0]
    bad.log_probs = bad.log_probs + 5
    await service.save(tmp_path / "s.npz", next_step=0)
    resumed = make_service(run_config(tmp_path), FakeSlowEngine(short))
    await resumed.load(tmp_path / "s.npz")
    assert bad.group_id not in [g.group_id for g in resumed.tracker.held()] and resumed.ledger.dropped["failed"] > 0
    await service.close()


async def test_samples_that_the_trainer_let_go_of_are_freed_at_once(tmp_path: Path) -> None:
    """Not when Python next looks for circles, of which there are none: routes of a step are gigabytes."""
    engine = FakeSlowEngine(short)
    service = make_service(run_config(tmp_path, max_staleness=1), engine)
    await publish(service, engine, 0)
    gc.collect()
    gc.disable()
    try:
        freed = [weakref.ref(sample) for sample in (await service.take(0)).samples]
        await publish(service, engine, 1)
        await service.take(1)
        assert freed and not any(sample() for sample in freed)
    finally:
        gc.enable()
    await service.close()
