"""From scored groups to shards, as the driver does it, for every advantage that a user can name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from mslime.config.errors import ConfigError, RewardError
from mslime.config.schema import RunConfig
from mslime.data.routes import Routes
from mslime.data.sample import Group, Sample
from mslime.data.shard import TrainShard
from mslime.observe.names import is_known
from mslime.run.assemble import assemble, assemble_supervised
from tests.fixtures.columns import repacked
from tests.fixtures.model_facts import model_facts

EIGHT_EXPERTS = model_facts(num_experts=8)


def make_config(**sections: dict[str, object]) -> RunConfig:
    base: dict[str, object] = {"model": {"path": "unused"}, "data": {"prompts": ["unused.jsonl"]}}
    train = {"quadratic_tokens": 24576, **sections.pop("train", {})}
    return RunConfig.model_validate({**base, "cluster": {"device": "cpu"}, "train": train, **sections})


def make_group(group: int, rewards: list[float], source: str = "data/math.jsonl:3") -> Group:
    samples: list[Sample] = []
    for index, reward in enumerate(rewards):
        sample = Sample.from_prompt(group, index, [1, 2, 3])
        sample.extend([5] * (index + 1), log_probs=[-1.0] * (index + 1), versions=[(2, 0, index + 1)], engine="e")
        sample.reward = reward
        samples.append(sample)
    return Group(group, samples, source)


def with_routes(group: Group, expert: int = 0) -> Group:
    """The group as one whose tokens all went to this expert of eight and to its neighbour, in each of three layers."""
    for sample in group.samples:
        rows = np.tile(np.asarray([expert, expert + 1], np.uint8), (len(sample) - 1, 3, 1))
        sample.routes = Routes(rows, np.ones(len(rows), np.bool_), (0, 1, 2))
    return group


def only_shard(groups: list[Group], config: RunConfig) -> TrainShard:
    ((shard,),) = assemble(groups, config, version=3).shards
    return shard


def advantages_by_sample(shard: TrainShard) -> list[float]:
    spans = dict(zip(shard.sequence_ids.tolist(), shard.spans(), strict=True))
    return [float(shard.advantages[spans[i][1] - 1]) for i in sorted(spans)]


@pytest.mark.parametrize(("advantage", "expected"), [
    ("grpo", [1.1547, -0.57735, -0.57735]), ("rloo", [1.0, -0.5, -0.5]), ("maxrl", [2.0, -1.0, -1.0]),
    ("reinforce_pp_baseline", [2 / 3, -1 / 3, -1 / 3]), ("reinforce_pp", [0.0, 0.0, 0.0]),
])  # fmt: skip
def test_the_named_advantage_reaches_the_shard(advantage: str, expected: list[float]) -> None:
    shard = only_shard([make_group(0, [1.0, 0.0, 0.0])], make_config(algorithm={"advantage": advantage}))
    assert advantages_by_sample(shard) == pytest.approx(expected, abs=1e-4)
    assert shard.rewards is not None and shard.rewards.sum() == 1.0 and shard.segment_ages is not None
    assert set(shard.segment_ages[shard.loss_mask].tolist()) == {1}


def test_groups_are_formed_by_group_id_and_parts_of_a_rollout_vote_once() -> None:
    whole = make_group(4, [1.0, 0.0, 0.0])
    for part in whole.samples[1:]:
        part.rollout_id = 9
    shard = only_shard([whole], make_config(algorithm={"advantage": "rloo"}))
    assert advantages_by_sample(shard) == [1.0, -1.0, -1.0]
    whole.samples[1].reward = 0.5
    with pytest.raises(RewardError, match="group 4"):
        assemble([whole], make_config(), version=0)


def test_a_sample_of_its_own_is_no_part_of_the_rollout_with_its_index_as_id() -> None:
    group = make_group(0, [1.0, 0.0, 0.0])
    group.samples[1].rollout_id = group.samples[2].rollout_id = 0
    shard = only_shard([group], make_config(algorithm={"advantage": "rloo"}))
    assert advantages_by_sample(shard) == [1.0, -1.0, -1.0]


def test_samples_without_a_trained_token_vote_and_are_not_sent() -> None:
    group = make_group(0, [1.0, 0.0, 0.5])
    group.samples[0].mask_before(99)
    config = make_config(algorithm={"advantage": "reinforce_pp_baseline", "whiten": False})
    assert advantages_by_sample(only_shard([group], config)) == [-0.5, 0.0]


def test_process_rewards_reach_grpo_and_reinforce_pp_and_are_refused_elsewhere() -> None:
    group = make_group(0, [1.0, 0.0, 0.0])
    group.samples[2].process_rewards = [(3, 1.0), (5, 0.0)]
    shard = only_shard([group], make_config(algorithm={"normalise_std": False}))
    start, end = dict(zip(shard.sequence_ids.tolist(), shard.spans(), strict=True))[2]
    assert shard.advantages[start:end] == pytest.approx([0, 0, 0, -1 / 3, -1 / 3 - 0.5, -1 / 3 - 0.5])
    raw = only_shard([group], make_config(algorithm={"advantage": "reinforce_pp"}))
    assert raw.rewards is not None and raw.rewards.sum() == 2.0
    with pytest.raises(RewardError, match="process rewards"):
        assemble([group], make_config(algorithm={"advantage": "rloo"}), version=0)


def test_metrics_of_a_step_have_known_names_and_count_rollouts() -> None:
    groups = [make_group(0, [1.0, 0.0, 0.0]), make_group(1, [0.5, 0.5, 0.5], "data/code.jsonl:1")]
    groups[0].samples[1].rollout_id = groups[0].samples[2].rollout_id = 5
    groups[1].samples[0].metadata["data_source"] = "code/easy"
    metrics = assemble(groups, make_config(), version=3).metrics
    assert all(is_known(name) for name in metrics), metrics
    expected = {
        "rollout/rollouts": 5, "reward/zero_variance_share": 0.5, "reward/group_std": 0.25,
        "reward/source/math.jsonl/mean": 0.5, "reward/source/math.jsonl/rollouts": 2,
        "reward/source/code.jsonl/rollouts": 2, "reward/source/code_easy/mean": 0.5,
        "advantage/max": pytest.approx(0.5**0.5, abs=1e-4),
        "advantage/mean": pytest.approx((1 - 2 - 3) * 0.5**0.5 / 12, abs=1e-4), "packing/micro_batches": 1,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == expected
    whitened = assemble(groups, make_config(algorithm={"advantage": "reinforce_pp"}), version=3).metrics
    assert "advantage/mean" not in whitened  # the trainer's to report


def test_supervised_batches_have_no_rewards_and_no_ages() -> None:
    samples = make_group(0, [1.0, 0.0]).samples
    for sample in samples:
        sample.reward = None
    ((shard,),) = assemble_supervised(samples, make_config(train={"task": "sft"}))
    assert shard.rewards is None and shard.segment_ages is None and (shard.advantages == 0).all()


def test_a_constant_denominator_is_rollouts_times_the_response_limit() -> None:
    algorithm = {"normalise_std": False, "loss_aggregation": "constant"}
    config = make_config(algorithm=algorithm, rollout={"max_response_tokens": 100})
    shard = only_shard([make_group(0, [1.0, 0.0, 0.0]), make_group(1, [0.0, 1.0])], config)
    assert np.unique(shard.weights[shard.loss_mask]) == pytest.approx([1 / 500])


def test_parts_and_process_rewards_survive_a_resume() -> None:
    group = make_group(0, [1.0, 0.0])
    group.samples[0].rollout_id, group.samples[0].process_rewards = 3, [(4, 0.5)]
    (back,) = repacked([group])
    assert [s.rollout_id for s in back.samples] == [3, None]
    assert back.samples[0].process_rewards == [(4, 0.5)] and back.samples[1].process_rewards == []


@pytest.mark.parametrize(("sections", "field"), [
    ({"critic": {"lr": 1e-4}}, "critic.lr"),
    ({"algorithm": {"advantage": "gae"}, "critic": {"warmup_steps": 100}}, "critic.warmup_steps"),
    ({"algorithm": {"advantage": "gae"}, "critic": {"min_lr": 1e-4}}, "critic.min_lr"),
    ({"algorithm": {"advantage": "gae"}, "critic": {"lr_warmup_steps": 100}}, "critic.lr_warmup_steps"),
    ({"algorithm": {"advantage": "none"}}, "algorithm.advantage"),
    ({"algorithm": {"opd_coef": 0.5}}, "model.teacher_path"),
    ({"algorithm": {"advantage": "rloo"}, "rollout": {"group_size": 1}}, "rollout.group_size"),
    ({"algorithm": {"advantage": "maxrl"}, "rollout": {"group_size": 1}}, "rollout.group_size"),
])  # fmt: skip
def test_advantages_without_what_they_need_are_refused(sections: dict[str, dict[str, object]], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        make_config(**sections)
    cause = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(cause, ConfigError) and cause.field == field and cause.hint


def test_reinforce_pp_takes_groups_of_one_and_distillation_takes_no_reward(tmp_path: Path) -> None:
    alone = make_config(algorithm={"advantage": "reinforce_pp"}, rollout={"group_size": 1})
    assert alone.algorithm.whitens
    taught = make_config(
        model={"path": "unused", "teacher_path": str(tmp_path)}, algorithm={"advantage": "none", "opd_coef": 1.0}
    )
    assert not taught.algorithm.whitens


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("balanced", [True, False])
def test_samples_of_other_experts_meet_where_ranks_share_experts_out(balanced: bool, steps: int) -> None:
    """Two prompts whose tokens go to the experts of one rank each: mixed, both ranks have work all the time."""
    kinds = [0, 0, 4, 4, 0, 4, 0, 4]  # in each half of the groups, two of each kind
    groups = [with_routes(make_group(g, [1.0] * 4), expert) for g, expert in enumerate(kinds)]
    config = make_config(
        cluster={"trainer_ranks": 2}, megatron={"expert_model_parallel_size": 2},
        train={"max_tokens_per_micro_batch": 14, "balance_experts": balanced, "optimizer_steps_per_rollout": steps},
    )  # fmt: skip
    lengths = [len(s) for g in groups for s in g.samples]
    work = assemble(groups, config, 3, model=EIGHT_EXPERTS)
    shards = [shard for step in work.shards for shard in step]
    assert len(shards) == 2 * steps
    assert all(shard.lengths[list(m)].sum() <= 14 for shard in shards for m in shard.micro_batches)
    assert sorted(int(i) for shard in shards for i in shard.sequence_ids) == list(range(len(lengths)))
    assert work.metrics["packing/expert_imbalance_least"] == pytest.approx(0, abs=1e-6)
    found = work.metrics["packing/expert_imbalance"]
    assert found < 0.05 if balanced else found > 0.08


def test_nothing_is_spread_where_nothing_is_known_of_experts() -> None:
    config = make_config(cluster={"trainer_ranks": 2}, megatron={"expert_model_parallel_size": 2})
    without = assemble([make_group(0, [1.0, 0.0])], config, 1, model=EIGHT_EXPERTS)
    one_rank = assemble([with_routes(make_group(0, [1.0, 0.0]))], make_config(), 1, model=EIGHT_EXPERTS)
    unknown = assemble([with_routes(make_group(0, [1.0, 0.0]))], config, 1)
    for work in (without, one_rank, unknown):
        assert not any(name.startswith("packing/expert") for name in work.metrics)
