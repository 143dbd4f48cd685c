"""Rewards to loss and gradient in float64, over simulated ranks: one number in every layout.

From groups of rewarded samples through the driver's advantages, denominators and schedule, the trainer's completion of
advantages, the slicer and the policy loss, against a few lines over whole sequences. The model is a table of logits by
previous token, so that every token of every rank acts on the same parameters.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mslime.algorithms.losses import PolicyLossInputs, policy_loss
from mslime.backends.megatron.step.batches import RowLayout, build_micro_batch
from mslime.backends.megatron.step.reductions import completed
from mslime.config.schema import RunConfig
from mslime.data.sample import Group, Sample
from mslime.data.shard import TrainShard
from mslime.run.assemble import assemble
from tests.unit.test_algorithms_advantages_tokens import on_ranks

VOCAB = 12
MAX_RESPONSE = 40
LAYOUTS = [
    # (DP, CP, tokens of a micro-batch, packed)
    (1, 1, 1000, True),
    (1, 1, 30, True),
    (1, 1, 1, False),
    (2, 1, 50, True),
    (3, 1, 40, False),
    (1, 2, 33, True),
    (2, 2, 25, True),
    (2, 4, 16, True),
    (4, 2, 25, False),
    (32, 1, 64, True),  # more ranks than sequences: some train nothing
    (32, 2, 8, True),
]
CASES = [
    ("grpo", "token"), ("grpo", "sequence"), ("grpo", "rollout"), ("grpo", "group"), ("grpo", "constant"),
    ("rloo", "rollout"), ("maxrl", "token"), ("reinforce_pp_baseline", "group"), ("reinforce_pp", "token"),
]  # fmt: skip


def make_groups() -> list[Group]:
    """Four prompts: turns with gaps, a rollout of three parts, stale tokens, a sequence all masked, a single token."""
    rng = np.random.default_rng(0)
    groups: list[Group] = []
    for g in range(4):
        samples: list[Sample] = []
        for i, response in enumerate(rng.integers(1, 30, 4).tolist()):
            samples.append(make_sample(rng, g, i, response if (g, i) != (1, 1) else 1))
            samples[-1].reward = float(rng.integers(0, 3))
        groups.append(Group(g, samples, f"data/set_{g % 2}.jsonl:{g}"))
    for part in range(2):
        twin = make_sample(rng, 2, 10 + part, 7 + 9 * part)
        twin.rollout_id = groups[2].samples[0].rollout_id = 77
        twin.reward = groups[2].samples[0].reward
        groups[2].samples.append(twin)
    for i, rewards in enumerate([[0.0, 1.0], [1.0, 0.0]]):
        for sample, reward in zip(groups[i].samples, rewards, strict=False):
            sample.reward = reward
    groups[3].samples[2].mask_before(99)
    return groups


def make_sample(rng: np.random.Generator, group: int, index: int, response: int) -> Sample:
    sample = Sample.from_prompt(group, index, rng.integers(0, VOCAB, 3 + group).tolist())
    cut = response // 2
    versions = [(v, a, b) for v, a, b in [(4, 0, cut), (5, cut, response)] if b > a]
    sample.extend(rng.integers(0, VOCAB, response), log_probs=-rng.exponential(2, response), versions=versions)
    if index == 3:
        sample.extend(rng.integers(0, VOCAB, 4))
        sample.extend(rng.integers(0, VOCAB, 5), log_probs=-rng.exponential(2, 5), versions=[(5, 0, 5)])
    return sample


def make_config(advantage: str, aggregation: str, layout: tuple[int, int, int, bool]) -> RunConfig:
    dp, cp, budget, packed = layout
    return RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"prompts": ["unused.jsonl"]},
            "cluster": {"device": "cpu", "trainer_ranks": dp * cp},
            "megatron": {"context_parallel_size": cp},
            "rollout": {"max_response_tokens": MAX_RESPONSE},
            "train": {"max_tokens_per_micro_batch": budget, "packed": packed, "quadratic_tokens": 24576},
            "algorithm": {"advantage": advantage, "loss_aggregation": aggregation, "gamma": 0.97},
        }
    )


def table() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).normal(size=(VOCAB, VOCAB))).requires_grad_()


def over_layout(groups: list[Group], config: RunConfig) -> tuple[float, torch.Tensor, list[TrainShard]]:
    """(loss, gradient, completed shards) summed over simulated ranks and micro-batches."""
    (step,) = assemble(groups, config, version=6).shards
    dp, cp = config.layout.dp, config.layout.cp
    finished = on_ranks(dp, lambda rank, add: completed([step[rank]], config.algorithm, add, lambda v: v)[0][0])
    logits, losses = table(), []
    for shard in finished:
        assert isinstance(shard, TrainShard)
        for index in range(len(shard.micro_batches)):
            for cp_rank in range(cp):
                row_layout = RowLayout(cp, cp_rank)
                batch = build_micro_batch(
                    shard, index, row_layout, packed=config.train.packed, device=torch.device("cpu")
                )
                log_probs = torch.log_softmax(logits[batch.tokens[0]], -1)
                inputs = PolicyLossInputs(
                    log_probs=log_probs.gather(1, batch.labels[:, None])[:, 0],
                    behaviour_log_probs=batch.behaviour_log_probs, advantages=batch.advantages, mask=batch.loss_mask,
                    weights=batch.weights, sequence_index=batch.sequence_index, num_sequences=batch.num_sequences,
                )  # fmt: skip
                losses.append(policy_loss(inputs, config.algorithm).loss)
    loss = torch.stack(losses).sum()
    loss.backward()
    assert logits.grad is not None and logits.grad.dtype == torch.float64
    return loss.item(), logits.grad, finished  # pyright: ignore[reportReturnType]


def over_whole_sequences(groups: list[Group], config: RunConfig) -> tuple[float, torch.Tensor]:
    """The same from the definitions: advantages and denominators by loops, one sequence at a time."""
    samples = [s for g in groups for s in g.samples]
    raw = {id(s): reference_advantages(s, samples, config) for s in samples}
    if config.algorithm.whitens:
        every = np.concatenate([raw[id(s)][s.loss_mask] for s in samples])
        scale = np.sqrt(every.var(ddof=1) + 1e-8)
        raw = {key: (value - every.mean()) / scale for key, value in raw.items()}
    logits, total = table(), torch.zeros((), dtype=torch.float64)
    for s in samples:
        tokens = torch.from_numpy(s.tokens.astype(np.int64))
        log_probs = torch.log_softmax(logits[tokens[:-1]], -1).gather(1, tokens[1:, None])[:, 0]
        behaviour = torch.from_numpy(s.log_probs[1:]).double()
        weight = torch.exp(log_probs.detach() - behaviour).clamp(max=2.0)
        ratio = torch.exp(log_probs - log_probs.detach())
        mask = torch.from_numpy(s.loss_mask[1:])
        terms = -weight * ratio * torch.from_numpy(raw[id(s)][1:]) / denominator(s, samples, config)
        total = total + terms[mask].sum()
    total.backward()
    assert logits.grad is not None
    return total.item(), logits.grad


def rollout_key(s: Sample) -> tuple[int, int]:
    return s.group_id, 1000 + s.rollout_id if s.rollout_id is not None else s.index


def reference_advantages(s: Sample, samples: list[Sample], config: RunConfig) -> np.ndarray:
    name, out = config.algorithm.advantage, np.zeros(len(s))
    assert s.reward is not None
    if name == "reinforce_pp":
        trained = np.flatnonzero(s.loss_mask)
        out[trained] = s.reward * config.algorithm.gamma ** np.arange(len(trained))[::-1]
        return out
    votes = {rollout_key(o): o.reward for o in samples if o.group_id == s.group_id}
    rewards = np.array(list(votes.values()))
    n, centred = len(rewards), s.reward - rewards.mean()
    value = {
        "grpo": centred / (rewards.std(ddof=1) + 1e-6),
        "rloo": centred * n / (n - 1),
        "maxrl": centred / rewards.mean() if rewards.mean() else 0.0,
        "reinforce_pp_baseline": centred,
    }[name]
    return out + value


def denominator(s: Sample, samples: list[Sample], config: RunConfig) -> float:
    def tokens_of(chosen: list[Sample]) -> int:
        return sum(int(o.loss_mask.sum()) for o in chosen)

    live = [o for o in samples if o.loss_mask.any()]
    rollouts, groups = {rollout_key(o) for o in live}, {o.group_id for o in live}
    return {
        "token": tokens_of(live),
        "sequence": len(live) * tokens_of([s]),
        "rollout": len(rollouts) * tokens_of([o for o in live if rollout_key(o) == rollout_key(s)]),
        "group": len(groups) * tokens_of([o for o in live if o.group_id == s.group_id]),
        "constant": len(rollouts) * MAX_RESPONSE,
    }[config.algorithm.loss_aggregation] or 1


@pytest.mark.slow
@pytest.mark.parametrize(("advantage", "aggregation"), CASES)
def test_loss_and_gradient_are_the_same_for_every_dp_cp_micro_batch_and_packing(
    advantage: str, aggregation: str
) -> None:
    groups = make_groups()
    expected, gradient = over_whole_sequences(groups, make_config(advantage, aggregation, LAYOUTS[0]))
    scale = float(gradient.abs().max())
    assert scale > 1e-3
    first: tuple[float, torch.Tensor] | None = None
    idle = 0
    for layout in LAYOUTS:
        loss, found, shards = over_layout(groups, make_config(advantage, aggregation, layout))
        idle += sum(not shard.loss_mask.any() for shard in shards)
        assert loss == pytest.approx(expected, rel=1e-6, abs=1e-6 * scale), layout
        torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-6 * scale)
        first = first or (loss, found)
        assert loss == pytest.approx(first[0], rel=1e-6, abs=1e-9), layout
        torch.testing.assert_close(found, first[1], rtol=1e-6, atol=1e-9)
    assert idle > 0, "no rank was without a trained token"


@pytest.mark.parametrize(("advantage", "aggregation"), [("grpo", "rollout"), ("reinforce_pp", "token")])
def test_the_order_of_groups_and_samples_changes_nothing(advantage: str, aggregation: str) -> None:
    groups, config = make_groups(), make_config(advantage, aggregation, (2, 2, 25, True))
    loss, gradient, _ = over_layout(groups, config)
    turned = [Group(g.group_id, g.samples[::-1], g.source) for g in groups[::-1]]
    other, other_gradient, _ = over_layout(turned, config)
    assert other == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(other_gradient, gradient, rtol=1e-6, atol=1e-9)
