"""Penalties for length and repetition, truncated responses out of the loss, rewards of held-out sets, data sources."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mslime.config.data import EvalSetConfig
from mslime.config.reward import RewardConfig
from mslime.data.sample import Group, Sample, SampleStatus
from mslime.rollout.rewards.scorer import overlong_penalty, repeated_share, shaped
from mslime.run.assemble import SourceNames, data_source
from tests.fixtures.columns import repacked
from tests.unit.rollout_fakes import FakeScorer, FakeSlowEngine, make_service, run_config, write_prompts


def test_the_overlong_penalty_is_equation_13_of_dapo():
    def reference(length: int, limit: int, cache: int) -> float:
        if length <= limit - cache:
            return 0.0
        if length <= limit:
            return ((limit - cache) - length) / cache
        return -1.0

    for limit, cache in ((20480, 4096), (10, 3), (5, 5), (7, 1)):
        for length in {0, 1, limit - cache, limit - cache + 1, limit - 1, limit, limit + 1, 2 * limit}:
            assert overlong_penalty(length, limit, cache) == pytest.approx(reference(length, limit, cache), abs=1e-12)


def test_the_repeated_share_counts_n_grams_that_occurred_before():
    def reference(tokens: list[int], n: int) -> float:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        return sum(g in grams[:i] for i, g in enumerate(grams)) / len(grams) if grams else 0.0

    draw = np.random.default_rng(0)
    for n in (1, 2, 3, 20):
        for length in (0, 1, 2, 5, 60):
            tokens = draw.integers(0, 3, length).astype(np.int32)
            assert repeated_share(tokens, n) == pytest.approx(reference(tokens.tolist(), n), abs=1e-12), (n, length)
    assert repeated_share(np.tile(np.arange(4, dtype=np.int32), 100), 4) == pytest.approx(1 - 4 / 397)


def test_penalties_are_added_with_their_factors_and_noted():
    sample = Sample.from_prompt(0, 0, [7, 7])
    sample.extend([5] * 9, log_probs=[-1.0] * 9, versions=[(0, 0, 9)], engine="e")
    config = RewardConfig.model_validate(
        {"overlong": {"buffer_tokens": 4, "factor": 0.5}, "repetition": {"ngram": 2, "factor": 2}}
    )
    assert shaped([sample], 1.0, config, 10) == pytest.approx(1.0 - 0.5 * 3 / 4 - 2 * 7 / 8)
    noted = {"overlong": pytest.approx(-0.375), "repetition": -1.75, "unshaped": 1.0}
    assert sample.scores == {f"reward/{name}/mean": value for name, value in noted.items()}
    assert shaped([sample], 1.0, RewardConfig(), 10) == 1.0


def test_penalties_are_those_of_the_worst_sequence_and_of_what_the_model_wrote():
    def grown(said: list[int], heard: list[int]) -> Sample:
        sample = Sample.from_prompt(0, 0, [7, 7])
        sample.extend(said, log_probs=[-1.0] * len(said), versions=[(0, 0, len(said))], engine="e")
        sample.extend(heard)
        return sample

    config = RewardConfig.model_validate({"overlong": {"buffer_tokens": 4}, "repetition": {"ngram": 2}})
    worst, last = grown([5] * 9, []), grown([1, 2, 3], [4] * 50)
    assert shaped([worst, last], 1.0, config, 10) == pytest.approx(1.0 - 3 / 4 - 7 / 8)
    assert shaped([last], 1.0, config, 10) == 1.0


async def test_penalties_do_not_keep_a_group_that_is_all_right(tmp_path: Path):
    config = run_config(tmp_path, max_response_tokens=10, group_size=3, dynamic_filter="zero_variance")
    penalties = {"overlong": {"buffer_tokens": 4, "factor": 0.3}, "repetition": {"ngram": 1, "factor": 0.1}}
    config = config.model_copy(update={"reward": RewardConfig.model_validate(penalties)})

    def one_wrong(sample: Sample) -> float:
        return float(sample.group_id % 2 == 0 or sample.index == 0)

    service = make_service(config, FakeSlowEngine(lambda group, index: 5 + 2 * index), FakeScorer(one_wrong))
    batch = await service.take(0)
    assert len({s.reward for s in batch.groups[0].samples}) == 3
    assert [g.group_id % 2 for g in batch.groups] == [1] * 4 and service.ledger.dropped["zero_variance"]
    await service.close()


def test_scores_survive_a_checkpoint_and_end_with_the_response():
    sample = Sample.from_prompt(0, 0, [1])
    sample.extend([5], log_probs=[-1.0], versions=[(0, 0, 1)], engine="e")
    sample.scores = {"user/x": 2.0}
    ((back,),) = [g.samples for g in repacked([Group(0, [sample])])]
    assert back.scores == {"user/x": 2.0}
    sample.restart()
    assert sample.scores == {}


def length_of(group: str, index: int) -> int:
    """Every second response runs into the limit of ten; in every fourth group all do."""
    return 30 if index % 2 or (group[0] == "g" and int(group[1:]) % 4 == 3) else 5


async def test_truncated_responses_count_in_their_group_and_none_of_their_tokens_is_trained(tmp_path: Path):
    config = run_config(tmp_path, max_response_tokens=10, mask_truncated=True)
    service = make_service(config, FakeSlowEngine(length_of))
    batch = await service.take(0)
    assert len(batch.groups) == 4 and all(g.group_id % 4 != 3 for g in batch.groups)
    for group in batch.groups:
        whole, cut = group.samples
        assert (whole.status, cut.status) == (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
        assert whole.trainable_tokens == 5 and cut.trainable_tokens == 0
        assert cut.response_length == 10 and cut.reward == 1.0
    assert batch.metrics["ledger/masked/truncated_tokens"] == service.ledger.masked["truncated"]
    assert batch.metrics["ledger/masked/truncated_tokens"] >= 4 * 10 + 20  # with a group that was cut whole
    assert batch.metrics["rollout/truncated_groups"] >= 1
    await service.close()


async def test_without_the_switch_truncated_responses_are_trained(tmp_path: Path):
    service = make_service(run_config(tmp_path, max_response_tokens=10), FakeSlowEngine(length_of))
    batch = await service.take(0)
    assert sum(s.trainable_tokens for s in batch.samples) == 3 * (5 + 10) + 20
    assert "rollout/truncated_groups" not in batch.metrics
    await service.close()


async def test_penalties_shape_training_and_leave_evaluations_alone(tmp_path: Path):
    config = run_config(tmp_path, max_response_tokens=10)
    reward = RewardConfig.model_validate({"overlong": {"buffer_tokens": 4}})
    config = config.model_copy(update={"reward": reward})
    own = FakeScorer(lambda s: 0.25)
    service = make_service(config, FakeSlowEngine(length_of), FakeScorer(lambda s: 1.0), eval_scorers={"other": own})
    batch = await service.take(0)
    assert {s.reward for s in batch.samples if s.status is SampleStatus.TRUNCATED} == {0.0}
    assert batch.metrics["reward/overlong/mean"] == pytest.approx(-5 / 8)
    path = str(write_prompts(tmp_path / "eval.jsonl", 3))
    plain = await service.evaluate(EvalSetConfig(name="plain", path=path, samples_per_prompt=2, temperature=1))
    other = await service.evaluate(EvalSetConfig(name="other", path=path))
    assert plain.metrics()["eval/plain/reward"] == 1.0 and other.metrics()["eval/other/reward"] == 0.25
    await service.close()


def test_data_sources_have_names_that_can_be_metrics_and_are_bounded():
    def named(source: object) -> str:
        sample = Sample.from_prompt(0, 0, [1])
        sample.metadata = {"data_source": source}
        return data_source(Group(0, [sample], "data/math.jsonl:3"), sample)

    assert [named(s) for s in ("", "  ", None, "a/b", "x y\n")] == [
        "math.jsonl",
        "math.jsonl",
        "math.jsonl",
        "a_b",
        "x_y",
    ]
    assert len(named("z" * 1000)) == 80
    names = SourceNames()
    assert [names(f"s{i}") for i in range(40)] == [f"s{i}" for i in range(32)] + ["other"] * 8
    assert names("s3") == "s3"
