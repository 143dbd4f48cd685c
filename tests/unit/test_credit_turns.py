"""Credit along the turns of a rollout, over all its sequences, against loops in float64; what must not change it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.algorithms.advantages import STD_EPS, GroupRewards
from mslime.algorithms.advantages_tokens import Reduce
from mslime.backends.megatron.step.reductions import completed
from mslime.config.errors import ConfigError
from mslime.config.schema import RunConfig
from mslime.data.sample import Group, Sample, check_invariants, rollouts_in_time, sequence_times
from mslime.data.shard import TrainShard
from mslime.run.assemble import assemble, grouped_rewards
from tests.fixtures.columns import repacked
from tests.unit.test_algorithms_advantages_tokens import on_ranks
from tests.unit.test_assemble import make_config


@dataclass
class Said:
    """A turn of the model and what the environment answered: token ids that no other turn has."""

    sequence: int
    tokens: list[int]
    answered: list[int]
    steps: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])  # (place among all of it, reward)
    masked: bool = False


Rollout = tuple[float, list[Said]]


def made_up(rng: np.random.Generator, turns: int, sequences: int, ids: itertools.count[int]) -> Rollout:
    """A rollout whose turns lie in some sequences, with rewards also on what the environment answered."""
    said: list[Said] = []
    for _ in range(turns):
        n, answered = int(rng.integers(1, 5)), int(rng.integers(0, 3))
        places = [int(p) for p in np.flatnonzero(rng.random(n + answered) < 0.4)]
        said.append(
            Said(
                int(rng.integers(sequences)),
                list(itertools.islice(ids, n)),
                list(itertools.islice(ids, answered)),
                [(place, float(np.round(rng.normal(), 2))) for place in places],
                bool(rng.random() < 0.2),
            )
        )
    return float(np.round(rng.normal(), 2)), said


def samples_of(group: int, number: int, rollout: Rollout, size: int, order: list[int] | None = None) -> list[Sample]:
    """Its sequences, each with a prompt of two tokens; `order` permutes them."""
    reward, said = rollout
    used = sorted({turn.sequence for turn in said})
    samples: list[Sample] = []
    for k, sequence in enumerate(used):
        sample = Sample.from_prompt(group, number + k * size, [1, 2])
        for at, turn in enumerate(said):
            if turn.sequence == sequence:
                start, n = len(sample), len(turn.tokens)
                sample.extend(turn.tokens, log_probs=[-1.0] * n, versions=[(0, 0, n)], engine="e")
                sample.extend(turn.answered)
                sample.turns.append((start, at + 1))
                sample.process_rewards += [(start + place, r) for place, r in turn.steps]
                if turn.masked:
                    sample.mask_span(start, start + n)
        sample.reward, sample.rollout_id = reward, number if len(used) > 1 else None
        check_invariants(sample)
        samples.append(sample)
    return [samples[i] for i in order] if order else samples


def by_token(config: RunConfig, groups: list[Group]) -> dict[int, float]:
    """The final advantage of each trained token of the step, by token id, from simulated data-parallel ranks.

    A value of the critic is a function of the token that it is about.
    """
    (shards,) = assemble(groups, config, version=0).shards
    shards = [replace(s, values=np.sin(s.tokens).astype(np.float32)) for s in shards]

    def work(rank: int, add: Reduce) -> TrainShard:
        return completed([shards[rank]], config.algorithm, add, add)[0][0]

    final = on_ranks(len(shards), work)
    found: dict[int, float] = {}
    for shard in final:
        assert isinstance(shard, TrainShard)
        found |= dict(
            zip(shard.tokens[shard.loss_mask].tolist(), shard.advantages[shard.loss_mask].tolist(), strict=True)
        )
    return found


def config_of(advantage: str, credit: str = "turns", dp: int = 1, **algorithm: object) -> RunConfig:
    fields = {"gamma": 0.9, "gae_lambda": 0.8} if advantage == "gae" else {"gamma": 0.9}
    return make_config(
        algorithm={"advantage": advantage, "credit": credit, "whiten": False, **fields, **algorithm},
        cluster={"device": "cpu", "trainer_ranks": dp},
        train={"max_tokens_per_micro_batch": 16},
    )


ADVANTAGES = ["grpo", "reinforce_pp", "gae"]


def reference(groups: list[list[Rollout]], advantage: str) -> dict[int, float]:
    """The same in float64, one token after the other along each rollout's turns."""
    out: dict[int, float] = {}
    for group in groups:
        steps = [r for _, said in group for turn in said for _, r in turn.steps]
        rewards = [reward for reward, _ in group]
        for reward, said in group:
            tokens: list[int] = []  # the trained ones, in time
            earned: list[float] = []
            normalised: list[tuple[int, float]] = []  # (trained tokens up to the step's end, its reward)
            for turn in said:
                whole = turn.tokens + turn.answered
                for place, token in enumerate(whole):
                    if place < len(turn.tokens) and not turn.masked:
                        tokens.append(token)
                        earned.append(0.0)
                    for r in (r for p, r in turn.steps if p == place):
                        if earned:
                            earned[-1] += r
                        std = np.std(steps, ddof=1) if len(steps) > 1 else 0.0
                        normalised.append((len(tokens), (r - np.mean(steps)) / (std + STD_EPS)))
            if not tokens:
                continue
            earned[-1] += reward
            for k, token in enumerate(tokens):
                if advantage == "grpo":
                    whole_one = (reward - np.mean(rewards)) / (np.std(rewards, ddof=1) + STD_EPS)
                    out[token] = whole_one + sum(r for upto, r in normalised if upto > k)
                elif advantage == "reinforce_pp":
                    out[token] = sum(0.9**i * r for i, r in enumerate(earned[k:]))
                else:
                    values = [*(float(np.float32(np.sin(t))) for t in tokens), 0.0]
                    deltas = [earned[i] + 0.9 * values[i + 1] - values[i] for i in range(len(tokens))]
                    out[token] = sum((0.9 * 0.8) ** i * d for i, d in enumerate(deltas[k:]))
    return out


def step_of(seed: int, sequences: int = 3) -> list[list[Rollout]]:
    rng, ids = np.random.default_rng(seed), itertools.count(100)
    return [[made_up(rng, int(rng.integers(1, 7)), sequences, ids) for _ in range(3)] for _ in range(2)]


def groups_of(rollouts: list[list[Rollout]], permute: np.random.Generator | None = None) -> list[Group]:
    groups: list[Group] = []
    for g, members in enumerate(rollouts):
        parts = [samples_of(g, i, rollout, len(members)) for i, rollout in enumerate(members)]
        if permute is not None:
            parts = [[part[k] for k in permute.permutation(len(part))] for part in parts]
        groups.append(Group(g, [s for part in parts for s in part], size=len(members)))
    return groups


def same(found: dict[int, float], wanted: dict[int, float]) -> None:
    assert found.keys() == wanted.keys()
    np.testing.assert_allclose([found[t] for t in wanted], list(wanted.values()), atol=2e-5)


@pytest.mark.parametrize("advantage", ADVANTAGES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), dp=st.sampled_from([1, 3]))
def test_credit_of_turns_is_that_of_a_loop_over_each_rollouts_turns_on_any_ranks(
    advantage: str, seed: int, dp: int
) -> None:
    rollouts = step_of(seed)
    same(by_token(config_of(advantage, dp=dp), groups_of(rollouts)), reference(rollouts, advantage))


@pytest.mark.parametrize("advantage", ADVANTAGES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_neither_the_order_of_sequences_nor_where_turns_lie_changes_their_credit(advantage: str, seed: int) -> None:
    rollouts, config = step_of(seed), config_of(advantage)
    wanted = by_token(config, groups_of(rollouts))
    same(by_token(config, groups_of(rollouts, np.random.default_rng(seed))), wanted)
    for split in (1, 2, 5):
        moved = [[(r, [replace(t, sequence=i % split) for i, t in enumerate(s)]) for r, s in g] for g in rollouts]
        same(by_token(config, groups_of(moved)), wanted)


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_rollouts_of_one_sequence_have_the_same_numbers_to_the_bit(advantage: str) -> None:
    groups = groups_of(step_of(3, sequences=1))
    assert by_token(config_of(advantage), groups) == by_token(config_of(advantage, "sequences"), groups)


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_by_default_each_sequence_is_a_time_of_its_own_that_the_rollouts_reward_ends(advantage: str) -> None:
    """Two rollouts of two sequences with a turn each, with a reward of 0.5 for the first turn of the first rollout."""
    first = (1.0, [Said(0, [10], [], [(0, 0.5)]), Said(1, [11], [])])
    second = (0.0, [Said(0, [12], [], [(0, 0.0)]), Said(1, [13], [])])
    found = {c: by_token(config_of(advantage, c), groups_of([[first, second]])) for c in ("sequences", "turns")}
    worked = {
        "grpo": [[1.414, 0.707, -1.414, -0.707], [1.414, 0.707, -1.414, -0.707]],
        "reinforce_pp": [[1.5, 1.0, 0.0, 0.0], [0.5 + 0.9 * 1.0, 1.0, 0.0, 0.0]],
    }
    if advantage in worked:
        for credit, wanted in zip(("sequences", "turns"), worked[advantage], strict=True):
            assert [found[credit][t] for t in (10, 11, 12, 13)] == pytest.approx(wanted, abs=1e-3)
    else:
        value = {t: float(np.sin(t)) for t in (10, 11)}
        assert found["sequences"][10] == pytest.approx(1.5 - value[10], abs=1e-5)
        assert found["turns"][10] == pytest.approx(0.5 + 0.9 * value[11] - value[10] + 0.72 * (1 - value[11]), abs=1e-5)


@pytest.mark.parametrize("old", ["recompute", "rollout"])
def test_a_kl_of_the_old_policy_in_the_reward_runs_along_the_turns_as_well(old: str) -> None:
    rollout = (1.0, [Said(0, [10], []), Said(1, [11], [])])
    other = (0.0, [Said(0, [12], [])])
    totals: dict[str, list[float]] = {}
    for credit in ("sequences", "turns"):
        config = config_of("grpo", credit, kl_in="reward", kl_coef=1.0, kl_type="k1", correction={"reference": old})
        ((shard,),) = assemble(groups_of([[rollout, other]]), config, version=0).shards
        policy = -1.0 if old == "rollout" else -1.5  # engines gave each token -1
        column = np.full(len(shard.tokens), policy, np.float32)
        given = None if old == "rollout" else column
        shard = replace(shard, old_log_probs=given, reference_log_probs=column - 0.25)
        ((final,), _) = completed([shard], config.algorithm, np.asarray, np.asarray)
        found = dict(zip(final.tokens.tolist(), final.advantages.tolist(), strict=False))
        totals[credit] = [found[t] - 0.70710 for t in (10, 11)]
    assert totals["sequences"] == pytest.approx([-0.25, -0.25], abs=1e-4)
    assert totals["turns"] == pytest.approx([-0.5, -0.25], abs=1e-4)


def test_a_turn_belongs_to_one_sequence_and_its_reward_is_sent_once() -> None:
    rollouts = step_of(11)
    groups = groups_of(rollouts)
    samples = [s for group in groups for s in group.samples]
    said = [turn for group in rollouts for _, turns in group for turn in turns]
    turns = [turn for rollout in rollouts_in_time(samples) for turn in rollout]
    assert len(turns) == len(said)
    ids = [samples[turn.sample].tokens[turn.start : turn.stop].tolist() for turn in turns]
    assert [[t for t in part if t >= 100] for part in ids] == [turn.tokens + turn.answered for turn in said]
    for rollout, parts in zip([r for g in rollouts for r in g], rollouts_in_time(samples), strict=True):
        whole = [time for time, s in zip(sequence_times(samples), samples, strict=True)
                 if any(samples[turn.sample] is s for turn in parts)]  # fmt: skip
        if len(whole) > 1 and any(not turn.masked for turn in rollout[1]):
            sent = sum(float(time.rewards.sum()) for time in whole if time.rewards is not None)
            first = next(i for i, turn in enumerate(rollout[1]) if not turn.masked)
            late = sum(r for turn in rollout[1][first:] for _, r in turn.steps)
            assert sent == pytest.approx(rollout[0] + late, abs=1e-5)


def test_sequences_of_which_no_turns_are_known_are_one_turn_each_in_their_order() -> None:
    samples = samples_of(0, 0, (1.0, [Said(0, [10, 11], []), Said(1, [12], [])]), 1)
    for sample in samples:
        sample.turns = []
    (turns,) = rollouts_in_time(samples)
    assert [(t.sample, t.start, t.stop, t.trained.tolist()) for t in turns] == [(0, 0, 4, [2, 3]), (1, 0, 3, [2])]


def test_turns_survive_a_resume_a_cut_and_an_adoption() -> None:
    group = groups_of([[(1.0, [Said(0, [10, 11], [12]), Said(0, [13], [14]), Said(0, [15], [])])]])[0]
    (sample,) = group.samples
    sample.process_rewards = [(3, 0.5), (6, 0.25)]
    ((back,),) = (group.samples for group in repacked([group]))
    assert back.turns == sample.turns == [(2, 1), (5, 2), (7, 3)]
    branch = sample.branch(1, 6)
    assert branch.turns == []
    branch.turns = [(6, 4)]
    branch.adopt(sample, 6)
    assert branch.turns == [(2, 1), (5, 2), (6, 4)] and branch.process_rewards == [(3, 0.5)]
    sample.cut(7)
    assert sample.turns == [(2, 1), (5, 2)]
    sample.process_rewards = []
    sample.restart()
    assert sample.turns == []


def centred_by_index(rewards: GroupRewards) -> object:
    from examples.extending.advantage import by_turn

    return by_turn(rewards)


def too_few_turns(rewards: GroupRewards) -> object:
    found = centred_by_index(rewards)
    return replace(found, values=found.values[1:])  # type: ignore[attr-defined]


def test_a_function_may_give_each_turn_a_number_wherever_the_turn_lies() -> None:
    first = (1.0, [Said(0, [10, 11], [5], [(0, 0.0)]), Said(1, [12], [], [(0, 1.0)])])
    second = (0.0, [Said(0, [13], [6], [(1, 0.5)]), Said(0, [14], [])])
    config = make_config(algorithm={"advantage": "examples.extending.advantage:by_turn"})
    ((shard,),) = assemble(groups_of([[first, second]]), config, version=0).shards
    found = dict(zip(shard.tokens.tolist(), shard.advantages.tolist(), strict=False))
    assert [found[t] for t in (10, 11, 12, 13, 14)] == pytest.approx([0.7, 0.7, 1.0, -0.7, -1.0])
    turns = grouped_rewards([s for group in groups_of([[first, second]]) for s in group.samples]).turns
    assert turns is not None
    assert [turns.rollout.tolist(), turns.index.tolist()] == [[0, 0, 1, 1], [0, 1, 0, 1]]
    wrong = make_config(algorithm={"advantage": f"{__name__}:too_few_turns"})
    with pytest.raises(ConfigError, match=r"(?s)shape \(3,\) for 4 turns.*GroupRewards.turns.rewards"):
        assemble(groups_of([[first, second]]), wrong, version=0)
