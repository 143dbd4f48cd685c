"""Rollouts of several sequences: who trains what, and that the ledger knows of every token."""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mslime.backends.sglang.generating import GenerateRequest
from mslime.config.data import EvalSetConfig
from mslime.config.errors import RolloutError
from mslime.config.reward import RewardConfig
from mslime.data.sample import Group, Sample, SampleStatus, check_invariants
from mslime.data.source import Prompt
from mslime.rollout.rewards.scorer import RewardScorer
from mslime.rollout.state import save_state
from mslime.run.assemble import assemble
from tests.unit.rollout_fakes import FakeScorer, FakeSlowEngine, make_service, publish, run_config, write_prompts
from tests.unit.user_episodes import OTHER_PROMPT

LENGTH = 9


def named(function: str) -> str:
    return f"tests.unit.user_episodes:{function}"


def engine() -> FakeSlowEngine:
    return FakeSlowEngine(lambda group, index: LENGTH)


def sampled(sample: Sample) -> list[int]:
    """Positions that the engine sampled: its tokens are 100 and more, but for those of the tests' prompts."""
    return [t for t in range(sample.prompt_length, len(sample)) if sample.tokens[t] >= 100]


async def one_step(directory: Path, function: str, **rollout: object) -> list[Group]:
    service = make_service(run_config(directory, function=named(function), **rollout), engine())
    batch = await service.take(0)
    await service.close()
    return batch.groups


async def test_a_shared_turn_is_trained_once_in_the_sequence_that_it_was_sampled_in(tmp_path: Path) -> None:
    for group in await one_step(tmp_path, "branches"):
        assert [[s.index for s in parts] for parts in group.rollouts()] == [[0, 2], [1, 3]]
        for trunk, other in group.rollouts():
            assert trunk.rollout == other.rollout and trunk.reward == other.reward is not None
            at = trunk.prompt_length + 3
            assert other.tokens[:at].tolist() == trunk.tokens[:at].tolist()
            assert np.flatnonzero(trunk.loss_mask).tolist() == sampled(trunk)
            assert np.flatnonzero(other.loss_mask).tolist() == [at + 2, at + 3]
            assert other.log_probs[:at].tolist() == trunk.log_probs[:at].tolist()
            for sample in (trunk, other):
                check_invariants(sample)
                assert sample.routes is not None and len(sample.routes) == len(sample) - 1


@pytest.mark.parametrize("function", ["returns_only_the_branch", "returns_a_branch_of_a_branch"])
async def test_a_shared_turn_is_trained_in_the_branch_where_its_first_sequence_is_not_returned(
    tmp_path: Path, function: str
) -> None:
    service = make_service(run_config(tmp_path, function=named(function)), engine())
    batch = await service.take(0)
    for sample in batch.samples:
        assert np.flatnonzero(sample.loss_mask).tolist() == sampled(sample)
        assert {s.trainable for s in sample.segments if s.version is not None} == {True}
    lost = (LENGTH - 0) + (function == "returns_a_branch_of_a_branch")  # the trunk's second turn, and one cut off
    assert service.ledger.dropped["unused"] % lost == 0 and service.ledger.dropped["unused"] > 0
    await service.close()


async def test_turns_that_several_branches_hold_are_trained_in_the_first_that_holds_each(tmp_path: Path) -> None:
    service = make_service(run_config(tmp_path, function=named("returns_two_branches_of_a_trunk")), engine())
    batch = await service.take(0)
    for one, two in (parts for group in batch.groups for parts in group.rollouts()):
        at = one.prompt_length
        assert np.flatnonzero(one.loss_mask).tolist() == sampled(one), "the first turn and its own"
        assert np.flatnonzero(two.loss_mask).tolist() == sampled(two)[3:], "the second turn and its own"
        assert [n for _, n in one.turns] == [1, 3] and two.turns == [(at + 4, 2), (at + 8, 4)]
        check_invariants(one)
        check_invariants(two)
    assert service.ledger.dropped["unused"] == len(batch.samples) // 2, "one token, which no branch holds"
    await service.close()


async def test_rewards_of_steps_stay_where_the_run_scores_the_rollout(tmp_path: Path) -> None:
    config = run_config(tmp_path, function=named("scores_a_step_alone"))
    service = make_service(config, engine(), RewardScorer(RewardConfig(kind="exact")))
    batch = await service.take(0)
    assert all((s.reward, s.process_rewards) == (0.0, [(s.prompt_length + 2, 0.5)]) for s in batch.samples)
    await service.close()


async def test_a_function_may_write_what_its_task_holds(tmp_path: Path) -> None:
    """Its siblings, and whoever begins the group again, begin with what the row says."""
    config = run_config(tmp_path, function=named("writes_what_it_is_given"))
    service = make_service(config, engine())
    row = Prompt([7, 8], ["label"], {}, "row", messages=[{"role": "user", "content": "Q"}], tools=[{"name": "t"}])
    service._source.next = lambda: row  # type: ignore[method-assign]
    for group in (await service.take(0)).groups:
        assert [s.metadata["seen"] for s in group.samples] == [["Q", "t", "label", 7]] * 2
        assert group.messages == [{"role": "user", "content": "Q"}] and group.tools == [{"name": "t"}]
        assert group.prompt.tolist() == [7, 8] and group.samples[0].label == ["label"]
    await service.close()


async def test_sub_agents_begin_with_prompts_of_their_own(tmp_path: Path) -> None:
    for group in await one_step(tmp_path, "sub_agents"):
        for parts in group.rollouts():
            prompts = {tuple(s.tokens[: s.prompt_length].tolist()) for s in parts}
            assert prompts == {tuple(OTHER_PROMPT), tuple(group.prompt.tolist())}
            assert all(s.status is SampleStatus.COMPLETED or s.response_length == 4 for s in parts)


async def test_an_episode_tells_rewards_of_steps_and_metrics(tmp_path: Path) -> None:
    scorer = FakeScorer()
    service = make_service(run_config(tmp_path, function=named("only_another_prompt")), engine(), scorer)
    batch = await service.take(0)
    await service.close()
    assert scorer.scored == 0 and batch.metrics["user/calls"] == 2.0
    assert batch.metrics["rollout/sequences_per_rollout"] == 1.0
    for sample in batch.samples:
        assert (sample.reward, sample.process_rewards) == (1.0, [(4, 0.5)])
        assert sample.tokens[:3].tolist() == OTHER_PROMPT and sample.response_length == 4


async def test_turns_are_numbered_over_all_sequences_and_each_is_known_where_it_was_generated(tmp_path: Path) -> None:
    for group in await one_step(tmp_path, "branches"):
        for trunk, other in group.rollouts():
            first = trunk.prompt_length
            assert trunk.turns[0] == (first, 1) and [at for at, _ in trunk.turns] == [first, first + 4]
            assert [at for at, _ in other.turns] == [first + 5]
            assert sorted(number for s in (trunk, other) for _, number in s.turns) == [1, 2, 3]
            assert other.turns[0][1] == 2  # the shorter one ended first


async def test_a_reward_on_a_shared_turn_is_its_turns_wherever_that_is_trained(tmp_path: Path) -> None:
    for group in await one_step(tmp_path, "rewards_a_shared_turn"):
        for other, trunk in group.rollouts():
            assert trunk.process_rewards == [(trunk.prompt_length + 2, 0.5)]
            assert other.process_rewards == [(len(other) - 1, 0.25)]
    for group in await one_step(tmp_path, "rewards_a_shared_turn_of_the_branch_alone"):
        for (other,) in group.rollouts():
            assert other.process_rewards == [(other.prompt_length + 2, 0.5)]
            assert [at for at, _ in other.turns] == [other.prompt_length, other.prompt_length + 5]


async def test_what_is_cut_or_masked_is_in_the_ledger(tmp_path: Path) -> None:
    service = make_service(run_config(tmp_path, function=named("cuts_and_masks")), engine())
    batch = await service.take(0)
    rollouts = len(batch.samples)
    assert service.ledger.masked["rollout"] >= 2 * rollouts and service.ledger.dropped["cut"] >= 2 * rollouts
    for sample in batch.samples:
        start = sample.prompt_length
        assert np.flatnonzero(sample.loss_mask).tolist() == [start + 2, start + 3, start + 5]
        check_invariants(sample)
    await service.close()


async def test_a_cancelled_turn_leaves_no_trace(tmp_path: Path) -> None:
    for group in await one_step(tmp_path, "cancels_a_turn"):
        for sample in group.samples:
            start = sample.prompt_length
            assert np.flatnonzero(sample.loss_mask).tolist() == [start, start + 1, start + 3, start + 4]
            assert sample.tokens[start + 2] == ord("X")


async def test_a_sequence_whose_last_turn_was_cancelled_keeps_its_earlier_ones(tmp_path: Path) -> None:
    for group in await one_step(tmp_path, "keeps_a_cancelled_turn"):
        for sample in group.samples:
            assert sample.status is SampleStatus.TRUNCATED and sampled(sample)[:2] == [2, 3]
            assert np.flatnonzero(sample.loss_mask).tolist() == sampled(sample)
            check_invariants(sample)


async def test_a_rollout_of_several_sequences_votes_once(tmp_path: Path) -> None:
    """Rewards 0 and 1 of two rollouts: GRPO's advantages are those of two, and the denominators are of rollouts."""
    config = run_config(tmp_path, function=named("branches"))
    service = make_service(config, engine())
    groups = (await service.take(0)).groups
    await service.close()
    made = assemble(groups, config, 0)
    assert made.advantages is not None
    of_rollout: dict[tuple[int, int], set[float]] = {}
    for sample, advantage in zip([s for g in groups for s in g.samples], made.advantages, strict=True):
        assert isinstance(advantage, float)
        of_rollout.setdefault((sample.group_id, sample.number), set()).add(round(advantage, 5))
    assert len(of_rollout) == 8 and all(len(found) == 1 for found in of_rollout.values())
    assert sorted({a for found in of_rollout.values() for a in found}) == [-0.70711, 0.70711]
    assert made.metrics["rollout/rollouts"] == 8


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rollout", [{}, {"max_staleness": 1}, {"partial": False}, {"on_stale": "reroll"}])
async def test_every_token_is_in_the_ledger_whatever_functions_do(
    tmp_path: Path, seed: int, rollout: dict[str, object]
) -> None:
    """`take` compares the ledger with what is held, and every sample with its invariants."""
    slow = FakeSlowEngine(lambda group, index: 1 + (7 * index + 5 * int(group[1:]) + seed) % 13)
    config = run_config(tmp_path, function=named("anything"), over_sampling=1.5, **rollout)
    config = config.model_copy(update={"seed": seed})
    service = make_service(config, slow)
    for step in range(4):
        for group in (await service.take(step)).groups:
            assert sorted(group.numbers) == [0, 1]
            trained = Counter((s.number, t) for s in group.samples for t in s.tokens[s.loss_mask].tolist())
            assert trained and all(s.status.finished for s in group.samples)
        header, columns = service.state_dict(step + 1)
        save_state(tmp_path / "state.npz", header, columns)
        await publish(service, slow, step + 1)
    await service.drain()
    header, columns = service.state_dict()
    save_state(tmp_path / "state.npz", header, columns)
    resumed = make_service(config, slow, version=service.version)
    await resumed.load(tmp_path / "state.npz")
    await service.close()
    assert (await resumed.take(4)).groups
    await resumed.close()


async def test_groups_of_several_sequences_are_read_as_they_were_written(tmp_path: Path) -> None:
    config = run_config(tmp_path, function=named("branches"), max_staleness=1)
    service = make_service(config, engine())
    await service.take(0)
    for _ in range(2000):
        await asyncio.sleep(0)
    await service.drain()
    before = [*service.tracker.accepted, *service.tracker.partial]
    assert any(len(g.samples) > 2 for g in before)
    await service.save(tmp_path / "state.npz")
    await service.close()
    resumed = make_service(config, engine())
    await resumed.load(tmp_path / "state.npz")
    for old, new in zip(before, [*resumed.tracker.accepted, *resumed.tracker.partial], strict=True):
        assert (new.size, new.prompt.tolist(), new.numbers) == (old.size, old.prompt.tolist(), old.numbers)
        for a, b in zip(old.samples, new.samples, strict=True):
            assert (a.index, a.rollout_id, a.prompt_length) == (b.index, b.rollout_id, b.prompt_length)
            assert (a.tokens == b.tokens).all() and (a.loss_mask == b.loss_mask).all()


@pytest.mark.parametrize(
    ("function", "told", "deadlines"),
    [
        ("fails_for_one", "the environment is gone", {}),
        ("hangs_for_one", "sent no request to the engines for 0.2 s", {"rollout_function_s": 0.2}),
    ],
)
async def test_a_failed_rollout_ends_the_run_or_does_not_count(
    tmp_path: Path, function: str, told: str, deadlines: dict[str, float], capfd: pytest.CaptureFixture[str]
) -> None:
    limits = {"rollout_step_s": 20, "engine_control_s": 5, **deadlines}
    settings = {"function": named(function), "group_size": 3, "deadlines": limits}
    service = make_service(run_config(tmp_path, **settings), engine())
    with pytest.raises(RolloutError, match=f"'group 1, response 0': .*{told}"):
        await service.take(0)
    await service.close()
    service = make_service(run_config(tmp_path, on_error="drop", **settings), engine())
    batch = await service.take(0)
    assert {g.group_id: g.numbers for g in batch.groups} == {0: [0, 1, 2], 1: [1, 2], 2: [0, 1, 2], 3: [0, 1, 2]}
    assert batch.metrics["rollout/failed_rollouts"] == 1 and service.ledger.dropped["failed"] == 2
    assert told in capfd.readouterr().out
    await service.close()


class FakeEngineOfHours(FakeSlowEngine):
    """Takes an hour of the event loop's clock for each token."""

    async def before_token(self, request: GenerateRequest) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time() + 3600
        loop.time = lambda: now  # type: ignore[method-assign]
        await asyncio.sleep(0)


async def test_time_at_the_engines_is_not_the_functions(tmp_path: Path) -> None:
    limits = {"rollout_step_s": 1e9, "engine_control_s": 5, "rollout_function_s": 60}
    config = run_config(tmp_path, function=named("branches"), groups_per_step=1, deadlines=limits)
    service = make_service(config, FakeEngineOfHours(lambda group, index: 5))
    assert len((await service.take(0)).groups) == 1
    await service.close()


async def test_a_failed_rollout_of_an_evaluation_counts_as_wrong(tmp_path: Path) -> None:
    held_out = write_prompts(tmp_path / "held_out.jsonl", 4)
    eval_set = EvalSetConfig(name="held_out", path=str(held_out), samples_per_prompt=2, temperature=1.0)
    settings = {"function": named("fails_for_one")}
    service = make_service(run_config(tmp_path, **settings), engine(), FakeScorer(lambda sample: 1.0))
    with pytest.raises(RolloutError, match="the environment is gone"):
        await service.evaluate(eval_set)
    await service.close()
    scorer = FakeScorer(lambda sample: 1.0)
    service = make_service(run_config(tmp_path, on_error="drop", **settings), engine(), scorer)
    result = await service.evaluate(eval_set)
    assert (result.accuracy, scorer.scored) == (7 / 8, 7)
    await service.close()


def test_a_sample_that_grows_turn_by_turn_is_not_copied_at_each_and_older_views_stay_as_they_were() -> None:
    sample = Sample.from_prompt(0, 0, list(range(1000)))
    columns, views = set[int](), list[tuple[NDArray[np.int32], list[int]]]()
    for turn in range(200):
        sample.extend([turn] * 4, log_probs=[-1.0] * 4, versions=[(0, 0, 4)], engine="e")
        sample.extend([7])
        columns.add(id(sample.tokens if sample.tokens.base is None else sample.tokens.base))
        views.append((sample.tokens, sample.tokens.tolist()))
        assert sample.sampled_tokens == sum(s.end - s.start for s in sample.segments if s.version is not None)
    assert len(columns) <= 4
    old = sample.tokens
    sample.cut(1003)
    assert sample.sampled_tokens == 3
    sample.extend([8, 8])
    for view, was in views:
        assert view.tolist() == was
    assert sample.tokens.tolist() == [*range(1000), 0, 0, 0, 8, 8] and old[-1] == 7
    check_invariants(sample)

    assert len(pickle.dumps(sample)) < 40_000
