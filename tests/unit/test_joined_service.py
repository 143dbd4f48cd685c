"""Several rollout managers behind one front do what one service does. Engines are fakes, managers of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mslime.config.data import EvalSetConfig
from mslime.config.errors import DataError, EngineError, RewardError, TrainerError
from mslime.config.schema import RunConfig
from mslime.data.ledger import Ledger
from mslime.data.sample import Group, Sample, check_invariants
from mslime.data.source import open_prompts
from mslime.observe.progress import RolloutCounts
from mslime.rollout.generation import EngineLimits
from mslime.rollout.manager import Manager, ManagerReport, share_of
from mslime.rollout.service import LocalHandle, RolloutService, StepBatch
from mslime.rollout.state import open_state, unpack_groups
from tests.fixtures.least import least, refused
from tests.unit.rollout_fakes import (
    MODEL,
    FakeDyingEngines,
    FakeScorer,
    FakeSlowEngine,
    FakeTokenizer,
    make_service,
    run_config,
    short,
    ticks,
    uneven,
)

DEADLINE_S = 60


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def asked(managers: Sequence[Manager]) -> list[LocalHandle[Manager]]:
    """Managers of this process."""
    return [LocalHandle(manager) for manager in managers]


def make_joined(
    config: RunConfig, engines: Sequence[FakeSlowEngine], scorers: Sequence[Any] | None = None, **hooks: Any
) -> RolloutService:
    """A front of as many managers as there are engines."""
    tokenizer = FakeTokenizer()
    scorers = scorers or [FakeScorer() for _ in engines]
    managers = [
        Manager(config, engine, tokenizer, scorer, MODEL, EngineLimits())
        for engine, scorer in zip(engines, scorers, strict=True)
    ]
    source = open_prompts(config.data, config.seed, tokenizer)
    return RolloutService(
        config.rollout, config.deadlines.rollout_step_s, asked(managers), source, MODEL.max_positions, **hooks
    )


async def publish(service: RolloutService, engines: Sequence[FakeSlowEngine], version: int) -> None:
    """What the loop does after a training step."""
    await service.pause_for_update()
    for engine in engines:
        engine.version = version
    await service.resume_after_update(version)


async def steps(service: RolloutService, engines: Sequence[FakeSlowEngine], first: int, last: int) -> list[StepBatch]:
    """Steps `first` to `last - 1`, the first of which has its weights already."""
    batches: list[StepBatch] = []
    for step in range(first, last):
        batches.append(await service.take(step))
        for sample in batches[-1].samples:
            check_invariants(sample)
        await publish(service, engines, step + 1)
    return batches


def ids_of(batches: Sequence[StepBatch]) -> list[list[int]]:
    return [[group.group_id for group in batch.groups] for batch in batches]


def counted(batch: StepBatch) -> dict[str, float]:
    """The metrics that no clock has a part in."""
    return {name: value for name, value in batch.metrics.items() if not name.endswith("_per_s")}


def columns(sample: Sample) -> tuple[Any, ...]:
    assert sample.routes is not None
    arrays = (sample.tokens, sample.log_probs, sample.loss_mask, sample.routes.experts, sample.routes.mask)
    return tuple(array.tolist() for array in arrays)


async def test_synchronous_steps_of_several_managers_are_those_of_one(tmp_path: Path) -> None:
    config = run_config(tmp_path, max_staleness=0)
    alone, three = FakeSlowEngine(short), [FakeSlowEngine(short) for _ in range(3)]
    expected = await steps(make_service(config, alone), [alone], 0, 4)
    joined = make_joined(config, three)
    found = await steps(joined, three, 0, 4)
    assert ids_of(found) == ids_of(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert counted(ours) == counted(theirs)
        assert [columns(s) for s in ours.samples] == [columns(s) for s in theirs.samples]
        assert [g.source for g in ours.groups] == [g.source for g in theirs.groups]
    assert all(engine.requests for engine in three), "every manager has a part"
    await joined.close()


@pytest.mark.parametrize("pause_mode", ["abort", "retract"])
async def test_what_works_ahead_keeps_the_bound_the_books_and_every_prompt_once(
    tmp_path: Path, pause_mode: str
) -> None:
    config = run_config(tmp_path, max_staleness=2, pause_mode=pause_mode, on_stale="mask")
    engines = [FakeSlowEngine(uneven) for _ in range(3)]
    joined = make_joined(config, engines)
    await publish(joined, engines, 0)
    found = await steps(joined, engines, 0, 6)
    assert all(batch.metrics["staleness/max"] <= 2 for batch in found)
    trained = sum(s.trainable_tokens for batch in found for s in batch.samples)
    assert trained == sum(batch.metrics["ledger/trained_tokens"] for batch in found)
    ids = [i for batch in ids_of(found) for i in batch]
    assert len(set(ids)) == len(ids) == 6 * 4
    assert max(ids) < joined.joined.next_group_id <= (6 + 1 + 2) * 4, "no more are begun than one gate allows"
    for batch in found:
        m = batch.metrics
        spent = m["ledger/trained_tokens"] + m["ledger/masked_tokens"] + m["ledger/dropped_tokens"]
        assert m["ledger/generated_tokens"] >= 0 and spent <= m["ledger/generated_tokens"] + 10_000
    homes: dict[str, set[int]] = {}
    for index, engine in enumerate(engines):
        for request in engine.requests:
            homes.setdefault(request.session_id, set()).add(index)
    assert all(len(home) == 1 for home in homes.values()), "a group stays with its manager"
    await joined.close()


class FakeSlowerEngine(FakeSlowEngine):
    """Takes twenty times as long for a token."""

    async def before_token(self, request: Any) -> None:
        await ticks(19)


class FakeHinderedEngine(FakeSlowEngine):
    """Makes a token only while another one has been given three times as many responses."""

    def __init__(self, other: FakeSlowEngine) -> None:
        super().__init__(short)
        self.other = other

    async def before_token(self, request: Any) -> None:
        aborts = self._aborts
        while begun(self.other) < 3 * begun(self) and aborts == self._aborts:
            await ticks(1)


def begun(engine: FakeSlowEngine) -> int:
    """Responses that it was asked for."""
    return len({request.session_id for request in engine.requests})


async def test_a_faster_manager_gives_more_groups(tmp_path: Path) -> None:
    config = run_config(tmp_path, max_staleness=1)
    fast = FakeSlowEngine(short)
    engines = [fast, FakeHinderedEngine(fast)]
    joined = make_joined(config, engines)
    await publish(joined, engines, 0)
    await steps(joined, engines, 0, 6)
    assert begun(fast) > begun(engines[1]) > 0
    await joined.close()


def held_in(path: Path) -> tuple[dict[str, Any], list[Group]]:
    with open_state(path) as (state, stored):
        return state, unpack_groups(state["groups"], stored)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
async def test_another_number_of_managers_resumes_exactly(tmp_path: Path, before: int, after: int) -> None:
    """The state in mid-run, with groups accepted, interrupted in the middle of a response, and not begun."""

    def made(config: RunConfig, engines: list[FakeSlowEngine]) -> RolloutService:
        return make_service(config, engines[0]) if len(engines) == 1 else make_joined(config, engines)

    config = run_config(tmp_path, max_staleness=2)
    engines = [FakeSlowEngine(uneven) for _ in range(before)]
    service = made(config, engines)
    await publish(service, engines, 0)
    trained = [i for batch in ids_of(await steps(service, engines, 0, 3)) for i in batch]
    # Until one is in the middle of a response, with tokens of the newest weights.
    while not any(3 in versions and left > 9 for e in engines for versions, left in e.at_work.values()):
        await ticks(1)
    await service.save(tmp_path / "state.npz", next_step=3, interrupt=True)
    await service.close()
    state, held = held_in(tmp_path / "state.npz")
    cut = [s for g in held for s in g.samples if not s.status.finished]
    assert any(segment.version == 3 for s in cut for segment in s.segments), "the engines gave what they had"

    others = [FakeSlowEngine(uneven) for _ in range(after)]
    again = made(config, others)
    again.version = 3
    await again.load(tmp_path / "state.npz")
    await again.save(tmp_path / "again.npz", next_step=3)
    state_again, held_again = held_in(tmp_path / "again.npz")
    for name in ("accepted", "version", "next_group_id", "ledger", "source"):
        assert state_again[name] == state[name], name
    assert +np.array(list(state_again["counters"].values())).sum() == sum(state["counters"].values())
    by_id, by_id_again = ({g.group_id: g for g in groups} for groups in (held, held_again))
    assert by_id.keys() == by_id_again.keys()
    for group_id, group in by_id.items():
        assert [columns(s) for s in group.samples if s.response_length] == [
            columns(s) for s in by_id_again[group_id].samples if s.response_length
        ]
    await publish(again, others, 3)
    more = await steps(again, others, 3, 6)
    ids = [*trained, *(i for batch in ids_of(more) for i in batch)]
    assert len(set(ids)) == len(ids) == 6 * 4 and set(by_id) & set(ids[12:])
    total = Ledger.from_state(state["ledger"]).trained
    assert more[0].metrics["ledger/generated_tokens"] >= 0
    await again.save(tmp_path / "end.npz", next_step=6)
    end, _ = held_in(tmp_path / "end.npz")
    new = sum(batch.metrics["ledger/trained_tokens"] for batch in more)
    assert Ledger.from_state(end["ledger"]).trained == total + new
    await again.close()


async def test_groups_that_are_accepted_already_count_at_the_gate_after_a_resume(tmp_path: Path) -> None:
    config = run_config(tmp_path, max_staleness=1, groups_per_step=8)
    engine = FakeSlowEngine(short)
    service = make_service(config, engine)
    await publish(service, [engine], 0)
    while len(service.tracker.accepted) < 16:
        await ticks(1)
    service.tracker.accepted = [g for g in service.tracker.accepted if g.group_id % 2 == 0]
    service.tracker.ledger.drop(service.ledger.pending - sum(s.trainable_tokens for g in service.tracker.held()
                                                     for s in g.samples), "lost")  # fmt: skip
    await service.save(tmp_path / "state.npz", next_step=0)
    await service.close()
    engines = [FakeSlowEngine(short), FakeSlowEngine(short)]
    joined = make_joined(config, engines)
    await joined.load(tmp_path / "state.npz")
    await publish(joined, engines, 0)
    while joined.joined.next_group_id < 24:
        await ticks(1)
    await ticks(30)
    assert joined.joined.next_group_id == 24, "16 may be begun or accepted, 8 are accepted already"
    await joined.close()


async def test_groups_of_another_process_can_be_masked(tmp_path: Path) -> None:
    """Ray hands arrays over that cannot be written to."""
    config = run_config(tmp_path, max_staleness=1)
    engine = FakeSlowEngine(short)
    service = make_service(config, engine)
    await publish(service, [engine], 0)
    while len(service.tracker.accepted) < 8:
        await ticks(1)
    groups = service.tracker.accepted
    for sample in (s for g in groups for s in g.samples):
        sample.loss_mask.setflags(write=False)
    manager = Manager(config, engine, FakeTokenizer(), FakeScorer(), MODEL, EngineLimits())
    await manager.continue_with(0, groups[:4], groups[4:])
    assert manager.tracker.ledger.pending == sum(s.trainable_tokens for g in groups for s in g.samples) > 0
    for sample in (s for g in manager.tracker.held() for s in g.samples):
        assert sample.mask_all() > 0
    await service.close()


async def test_the_outline_holds_every_prompt_of_all_managers(tmp_path: Path) -> None:
    config = run_config(tmp_path, max_staleness=2)
    engines = [FakeSlowEngine(uneven) for _ in range(2)]
    joined = make_joined(config, engines)
    await publish(joined, engines, 0)
    trained = ids_of([await joined.take(0)])[0]
    (tmp_path / "o.npz").write_bytes(await joined.outline())
    made = joined.joined.next_group_id
    await joined.close()
    alone = FakeSlowEngine(uneven)
    resumed = make_service(config, alone)
    await resumed.load(tmp_path / "o.npz")
    assert {g.group_id for g in resumed.tracker.held()} == set(range(made)) - set(trained)
    assert resumed.joined.next_group_id == made and resumed.ledger.dropped["lost"] > 0


async def test_groups_that_are_given_back_are_taken_again_or_dropped(tmp_path: Path) -> None:
    config = run_config(tmp_path, max_staleness=0)
    engines = [FakeSlowEngine(short) for _ in range(2)]
    joined = make_joined(config, engines)
    first = await joined.take(0)
    assert not await joined.give_back(first.groups[:2]), "a first failure ends the run"
    again = await joined.take(0)
    assert ids_of([again]) == ids_of([first])
    assert await joined.give_back(again.groups[:2]), "a second one drops the groups"
    third = await joined.take(0)
    assert ids_of([third]) == [[2, 3, 4, 5]] and third.metrics["ledger/dropped/failed_tokens"] == 14
    await joined.save(tmp_path / "s.npz", next_step=0)
    state, held = held_in(tmp_path / "s.npz")
    assert sorted(g.group_id for g in held) == [2, 3, 4, 5] and state["accepted"] == 4
    await joined.close()


async def test_an_evaluation_is_shared_out_by_row_and_scored_as_by_one_manager(tmp_path: Path) -> None:
    config = run_config(tmp_path, max_staleness=0)
    held_out = EvalSetConfig(name="e", path=f"{config.data.prompts[0]}@[:7]", samples_per_prompt=2)
    told: list[list[int]] = []
    alone, three = FakeSlowEngine(uneven_rows), [FakeSlowEngine(uneven_rows) for _ in range(3)]

    def reward(sample: Sample) -> float:
        return float((sample.group_id + sample.index) % 2)

    one = make_service(config, alone, FakeScorer(reward))
    joined = make_joined(
        config, three, [FakeScorer(reward) for _ in three],
        on_evaluated=lambda name, groups: told.append([g.group_id for g in groups]),
    )  # fmt: skip
    expected, found = await one.evaluate(held_out), await joined.evaluate(held_out)
    head = {"eval/e/seconds"}
    assert {k: v for k, v in found.metrics().items() if k not in head} == {
        k: v for k, v in expected.metrics().items() if k not in head
    }
    assert found.prompts == 7 and told == [list(range(7))]
    for index, engine in enumerate(three):
        rows = {int(r.session_id.rsplit("-", 1)[-1]) for r in engine.requests}
        assert rows == set(range(index, 7, 3))
    await joined.close()


def uneven_rows(group: str, index: int) -> int:
    return 4 + index


@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_reward_that_raises_at_one_manager_ends_the_step_with_all_at_rest(
    tmp_path: Path, staleness: int
) -> None:
    def broken(sample: Sample) -> float:
        raise RewardError("reward.function", "f", "it raised", "mend it")

    config = run_config(tmp_path, max_staleness=staleness)
    engines = [FakeSlowEngine(uneven), (FakeSlowerEngine if staleness else FakeSlowEngine)(uneven)]
    joined = make_joined(config, engines, [FakeScorer(), FakeScorer(broken)])
    await publish(joined, engines, 0)
    taken: list[StepBatch] = []
    with pytest.raises(RewardError, match="it raised"):
        for step in range(10):  # the other manager alone may fill a step, where it may work ahead
            taken += await steps(joined, engines, step, step + 1)
    assert [engine.running for engine in engines] == [0, 0]
    await joined.save(tmp_path / "s.npz", next_step=len(taken), interrupt=True)
    state, held = held_in(tmp_path / "s.npz")
    alive = sum(s.trainable_tokens for g in held for s in g.samples)
    assert Ledger.from_state(state["ledger"]).pending == alive
    known = [*(g.group_id for g in held), *(group for ids in ids_of(taken) for group in ids)]
    assert sorted(known) == list(range(joined.joined.next_group_id))
    await joined.close()


async def test_a_manager_whose_engines_have_died_ends_the_run(tmp_path: Path) -> None:
    config = run_config(tmp_path, max_staleness=1)
    engines = [FakeSlowEngine(uneven), FakeDyingEngines(uneven, [5, 9])]
    joined = make_joined(config, engines)
    await publish(joined, engines, 0)
    with pytest.raises(EngineError, match="was told to die"):
        await joined.take(0)
    await joined.save(tmp_path / "s.npz", next_step=0)
    assert {g.group_id for g in held_in(tmp_path / "s.npz")[1]} == set(range(joined.joined.next_group_id))
    await joined.close()


class FakeLostManager(Manager):
    """Its process dies when the first group has ended."""

    async def moved(self) -> ManagerReport:
        await super().moved()
        raise TrainerError("rollout: moved", "rollout manager 1", "the process died", "read its log")


async def test_a_manager_that_dies_ends_the_step_at_once_with_its_name(tmp_path: Path) -> None:
    config, tokenizer = run_config(tmp_path, max_staleness=0), FakeTokenizer()
    engines = [FakeSlowEngine(short), FakeSlowEngine(short)]
    kinds = (Manager, FakeLostManager)
    managers = [
        kind(config, engine, tokenizer, FakeScorer(), MODEL, EngineLimits())
        for kind, engine in zip(kinds, engines, strict=True)
    ]
    source = open_prompts(config.data, config.seed, tokenizer)
    joined = RolloutService(
        config.rollout, config.deadlines.rollout_step_s, asked(managers), source, MODEL.max_positions
    )
    with pytest.raises(TrainerError, match="rollout manager 1"):
        await joined.take(0)
    await joined.close()


async def test_a_prompt_without_room_for_a_response_ends_the_step_and_loses_none_before_it(tmp_path: Path) -> None:
    config = run_config(tmp_path, max_staleness=0, groups_per_step=6)
    engines = [FakeSlowEngine(short), FakeSlowEngine(short)]
    tokenizer = FakeTokenizer()
    managers = [Manager(config, e, tokenizer, FakeScorer(), MODEL, EngineLimits()) for e in engines]
    source = open_prompts(config.data, config.seed, tokenizer)
    joined = RolloutService(config.rollout, config.deadlines.rollout_step_s, asked(managers), source, longest_input=3)
    assert ids_of(await steps(joined, engines, 0, 1)) == [[0, 1, 2, 3, 4, 5]]
    with pytest.raises(DataError, match="leaves no room"):  # P10, after P9 for the same manager
        await joined.take(1)
    await joined.save(tmp_path / "s.npz", next_step=1)
    assert sorted(g.group_id for g in held_in(tmp_path / "s.npz")[1]) == [6, 7, 8, 9]
    await joined.close()


async def test_a_late_step_counts_the_groups_of_all_managers(tmp_path: Path) -> None:
    deadlines = {"rollout_step_s": 0.3, "engine_control_s": 5}
    config = run_config(tmp_path, max_staleness=0, deadlines=deadlines, max_response_tokens=200)
    engines = [FakeSlowEngine(lambda group, index: 10**6), FakeSlowEngine(lambda group, index: 10**6)]
    engines[0].paused = engines[1].paused = "retract"  # nothing comes
    joined = make_joined(config, engines)
    with pytest.raises(EngineError, match=r"0 of 4 groups.*4 groups running.*2 engines alive"):
        await joined.take(0)
    await joined.close()


class FakeTardyManager(Manager):
    """Its reports are long on their way."""

    async def moved(self) -> ManagerReport:
        report = await super().moved()
        await ticks(40)
        return report


async def test_a_report_of_before_the_last_step_is_ignored(tmp_path: Path) -> None:
    """Groups that end while a step is taken are reported of when the next one has begun, with the last one's counts."""
    config, tokenizer = run_config(tmp_path, max_staleness=0, over_sampling=2.0), FakeTokenizer()
    engines = [FakeSlowEngine(uneven), FakeSlowEngine(uneven)]
    managers = [FakeTardyManager(config, e, tokenizer, FakeScorer(), MODEL, EngineLimits()) for e in engines]
    source = open_prompts(config.data, config.seed, tokenizer)
    joined = RolloutService(
        config.rollout, config.deadlines.rollout_step_s, asked(managers), source, MODEL.max_positions
    )
    assert [len(ids) for ids in ids_of(await steps(joined, engines, 0, 5))] == [4] * 5
    await joined.close()


async def test_counts_of_all_managers_are_told_together(tmp_path: Path) -> None:
    told: list[RolloutCounts] = []
    config = run_config(tmp_path, max_staleness=0)
    engines = [FakeSlowEngine(short), FakeSlowEngine(short)]
    joined = make_joined(config, engines, on_progress=lambda *counts: told.append(RolloutCounts(*counts)))
    await joined.take(0)
    assert RolloutCounts(needed=4, accepted=4, running=0, done=8) in told
    assert told[-1] == RolloutCounts(needed=4, accepted=0, running=0), "a new step begins"
    await joined.close()


def test_what_there_is_one_of_is_divided_or_counted_up() -> None:
    served = {"kind": "http", "http": {"url": "http://a:1", "concurrency": 30}}
    config = least(
        rollout={"managers": 3, "server": {"port": 9000}}, sglang={"num_engines": 3}, teacher={"concurrency": 64},
        reward={"parts": [{"name": "a", **served}, {"name": "b", "kind": "exact"}], "workers": 5},
        data={"prompts": ["p.jsonl"], "eval_sets": [{"name": "e", "path": "e.jsonl", "reward": served},
                                                   {"name": "f", "path": "f.jsonl"}]},
    )  # fmt: skip
    shares = [share_of(config, index) for index in range(3)]
    assert [share.rollout.server.port for share in shares] == [9000, 9001, 9002]
    for share in shares:
        assert share.teacher.concurrency == 21 and share.reward.workers == 5
        assert share.reward.parts[0].http.concurrency == 10 and share.reward.parts[1].judge.concurrency == 5
        first, second = share.data.eval_sets
        assert first.reward is not None and first.reward.http.concurrency == 10 and second.reward is None
        assert share.reward.http.concurrency == 5 and share.rollout.concurrency == 256
    assert [share_of(least(), index).rollout.server.port for index in range(2)] == [0, 0]


@pytest.mark.parametrize(("changed", "field"), [
    ({"rollout": {"managers": 3}, "sglang": {"num_engines": 2}}, "rollout.managers"),
    ({"rollout": {"managers": 3}, "sglang": {"urls": ["http://a:1", "http://b:1"]}}, "rollout.managers"),
    ({"rollout": {"managers": 2, "server": {"port": 65535}}, "sglang": {"num_engines": 2}}, "rollout.server.port"),
])  # fmt: skip
def test_managers_without_an_engine_or_a_port_are_refused(changed: dict[str, Any], field: str) -> None:
    assert refused(**changed).field == field
