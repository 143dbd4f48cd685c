"""One step's loss and gradient, cut by the real scheduler and slicer, are the same float64 numbers in every layout.

The model is one free parameter a token, its log-probability: what a rank cannot see cannot reach the gradient.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from mslime.algorithms.losses import LossOutput, PolicyLossInputs, policy_loss
from mslime.algorithms.statistics import LossStatistics, finalise
from mslime.algorithms.token_batch import Reduce
from mslime.backends.megatron.step.batches import MicroBatch, RowLayout, build_micro_batch
from mslime.config.algorithm import AlgorithmConfig
from mslime.config.layout import ParallelLayout
from mslime.data.packing import build_shards
from mslime.data.sample import Sample
from mslime.data.shard import TrainShard

from .test_algorithms_losses import on_ranks

LAYOUTS = [
    # (DP, CP, tokens of a micro-batch, packed)
    (1, 1, 37, True),
    (1, 1, 1, False),
    (2, 1, 64, True),
    (3, 1, 40, True),
    (1, 2, 50, True),
    (2, 2, 30, True),
    (2, 4, 16, True),
    (1, 4, 100, False),
    (4, 2, 25, False),
    (16, 1, 64, True),  # more ranks than sequences: some train nothing
    (16, 2, 64, True),
]


def rollouts() -> list[Sample]:
    """Eleven responses of four prompts over three weight versions; one is all masked, one has a single token."""
    rng = np.random.default_rng(0)
    samples = []
    for index, response in enumerate([1, 30, 7, 12, 3, 25, 18, 9, 2, 14, 21]):
        sample = Sample.from_prompt(index // 3, index % 3, list(range(1, 3 + index % 5)))
        cuts = sorted({0, response // 3, response // 2, response})
        versions = [(v, a, b) for v, (a, b) in enumerate(itertools.pairwise(cuts))]
        log_probs = -rng.exponential(1.0, response).astype(np.float32)
        sample.extend(np.arange(response) + 100, log_probs=log_probs, versions=versions, engine="e")
        if index == 6:
            sample.mask_before(99)
        if index % 4 == 1:
            sample.extend([7, 8, 9])
            sample.extend([5, 6], log_probs=[-0.5, -2.0], versions=[(2, 0, 2)], engine="e")
        samples.append(sample)
    return samples


SAMPLES = rollouts()
STARTS = np.cumsum([0, *(len(s) for s in SAMPLES)])
ADVANTAGES = np.random.default_rng(1).normal(size=len(SAMPLES))


def columns(seed: int, spread: float) -> np.ndarray:
    """A log-probability for each token of all samples, near the behaviour's: [tokens] float64."""
    behaviour = np.concatenate([s.log_probs for s in SAMPLES]).astype(np.float64)
    return np.minimum(behaviour + np.random.default_rng(seed).normal(0, spread, len(behaviour)), -1e-3)


OLD, REFERENCE = columns(2, 0.05), columns(3, 0.3)


def of_shard(column: np.ndarray, shard: TrainShard) -> np.ndarray:
    """The entries of the shard's tokens."""
    return np.concatenate([column[:0], *(column[STARTS[i] : STARTS[i + 1]] for i in shard.sequence_ids)])


def inputs_of(batch: MicroBatch, shard: TrainShard, theta: Tensor) -> PolicyLossInputs:
    """Float64 inputs of one rank's rows, with log-probs read from `theta` at the tokens that they predict."""
    tokens = of_shard(np.arange(len(OLD)), shard)
    index = torch.from_numpy(batch.slicer.at_targets(tokens))

    def known(column: np.ndarray) -> Tensor:
        return torch.from_numpy(batch.slicer.at_targets(of_shard(column, shard)))

    return PolicyLossInputs(
        log_probs=theta[index], behaviour_log_probs=batch.behaviour_log_probs.double(),
        advantages=batch.advantages.double(), mask=batch.loss_mask, weights=batch.weights.double(),
        sequence_index=batch.sequence_index, num_sequences=batch.num_sequences, old_log_probs=known(OLD),
        reference_log_probs=known(REFERENCE), entropy=theta[index].square(), segment_index=batch.segment_index,
        num_segments=batch.num_segments, ages=batch.ages, positions=batch.positions,
    )  # fmt: skip


def step(
    config: AlgorithmConfig, dp: int, cp: int, budget: int, packed: bool
) -> tuple[float, np.ndarray, dict[str, float]]:
    """(loss, gradient [tokens], metrics) of the whole step in a layout."""
    (shards,) = build_shards(
        SAMPLES, ADVANTAGES, ParallelLayout(dp=dp, cp=cp), budget, loss_aggregation=config.loss_aggregation,
        packed=packed, version=3,
    )  # fmt: skip
    theta = torch.tensor(columns(4, 0.1), requires_grad=True)
    total, loss = LossStatistics.zeros(), torch.zeros((), dtype=torch.float64)
    for shard in shards:
        for index in range(len(shard.micro_batches)):

            def rank(c: int, reduce: Reduce, shard: TrainShard = shard, index: int = index) -> LossOutput:
                batch = build_micro_batch(shard, index, RowLayout(cp, c), packed=packed, device=torch.device("cpu"))
                return policy_loss(inputs_of(batch, shard, theta), config, reduce)

            for output in on_ranks(cp, rank):
                loss, total = loss + output.loss, total.merge(output.statistics)
    loss.backward()
    assert theta.grad is not None
    return loss.item(), theta.grad.numpy(), finalise(total)


CASES = {
    "ppo": {},
    "gspo": {"loss": "gspo", "correction": {"preset": "seq_tis"}},
    "gmpo": {"loss": "gmpo", "loss_aggregation": "token", "correction": {"preset": "geo_rs", "high": 1.2, "low": 0.9}},
    "kimi": {"loss": "kimi", "correction": {"preset": "opsm", "high": 0.01}},
    "cispo by segment": {"loss": "cispo", "correction": {"level": "segment", "high": 1.1}},
    "topr by age": {"loss": "topr", "correction": {"preset": "tis", "max_age": 1, "old_weight": 0.5}},
    "dppo_tv": {"loss": "dppo_tv", "clip_low": 0.01, "clip_high": 0.01, "loss_aggregation": "group"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_metrics_are_the_same_in_every_layout(name: str) -> None:
    config = AlgorithmConfig(**{"kl_coef": 0.1, "entropy_coef": 0.01, **CASES[name]})
    loss, gradient, metrics = step(config, 1, 1, 10_000, True)
    assert loss != 0 and np.count_nonzero(gradient) > 20
    for layout in LAYOUTS:
        other = step(config, *layout)
        assert other[0] == pytest.approx(loss, abs=1e-6, rel=1e-9), layout
        np.testing.assert_allclose(other[1], gradient, atol=1e-9, rtol=1e-9, err_msg=str(layout))
        assert other[2] == pytest.approx(metrics, abs=1e-9), layout


def test_the_layouts_hold_a_rank_with_no_trainable_token_and_an_untrained_sequence() -> None:
    (shards,) = build_shards(SAMPLES, ADVANTAGES, ParallelLayout(dp=16), 64)
    assert any(not s.loss_mask.any() and len(s.micro_batches) for s in shards)
    assert any(s.trainable_tokens == 0 for s in SAMPLES)
