"""Policy loss, corrections and their statistics against a slow NumPy reference, whole and split over ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mslime.algorithms.corrections import needs_old_log_probs
from mslime.algorithms.losses import LossOutput, PolicyLossInputs, client_loss, policy_loss, sft_loss
from mslime.algorithms.policies import LOSSES, TokenLoss
from mslime.algorithms.statistics import SUM_NAMES, LossStatistics, _block, finalise, mean_weight
from mslime.algorithms.token_batch import Reduce, kl_estimate
from mslime.config.algorithm import PRESETS, AlgorithmConfig, CorrectionConfig
from mslime.config.errors import ConfigError
from mslime.config.serve import LossChoice

from . import algorithms_reference as reference
from .algorithms_reference import Tokens, random_tokens

LENGTHS = [5, 1, 9, 4, 12]


def as_inputs(
    t: Tokens, rows: np.ndarray | slice = slice(None), dtype: torch.dtype = torch.float64
) -> PolicyLossInputs:
    """The torch inputs of some rows; the sequence and segment numbering stays that of the whole step."""

    def column(values: np.ndarray) -> Tensor:
        return torch.tensor(values[rows], dtype=dtype)

    return PolicyLossInputs(
        log_probs=column(t.log_probs).requires_grad_(), behaviour_log_probs=column(t.behaviour),
        advantages=column(t.advantages), mask=torch.tensor(t.mask[rows]), weights=column(t.weights),
        sequence_index=torch.tensor(t.sequence[rows]), num_sequences=int(t.sequence.max()) + 1,
        old_log_probs=column(t.old), reference_log_probs=column(t.reference),
        entropy=column(t.entropy).requires_grad_(), segment_index=torch.tensor(t.segment[rows]),
        num_segments=int(t.segment.max()) + 1, ages=torch.tensor(t.ages[rows]),
        positions=torch.tensor(t.positions[rows]),
    )  # fmt: skip


def algorithm(correction: CorrectionConfig | None = None, **fields: object) -> AlgorithmConfig:
    values = {"kl_coef": 0.1, "entropy_coef": 0.01, "correction": correction or CorrectionConfig(), **fields}
    return AlgorithmConfig(**values)  # pyright: ignore[reportArgumentType]


def check_against_reference(t: Tokens, config: AlgorithmConfig) -> None:
    got, want = finalise(policy_loss(as_inputs(t), config).statistics), reference.policy_loss(t, config)
    for name, value in want.items():
        if name in got or value:
            assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@st.composite
def corrections(draw: st.DrawFn) -> CorrectionConfig:
    action = draw(st.sampled_from(["truncate", "clip", "mask", "drop", "none"]))
    rejects = action in ("mask", "drop")
    metric = draw(st.sampled_from(["ratio", "k1", "k2", "k3", "binary_kl", "tv"])) if rejects else "ratio"
    lows = [0.05, 0.7] if action == "clip" else [None, -0.1 if metric == "k1" else 0.05, 0.6]
    return CorrectionConfig(
        preset=None, level=draw(st.sampled_from(["token", "segment", "sequence", "geometric"])),
        reference=draw(st.sampled_from(["recompute", "rollout"])), action=action,
        metric=metric, policy=draw(st.sampled_from(["old", "current"])), low=draw(st.sampled_from(lows)),
        high=draw(st.sampled_from([0.8, 1.1, 2.0])), kept_weight=draw(st.sampled_from(["ratio", "one", "token"])),
        negative_advantage_only=rejects and draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    correction=corrections(),
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.02, 0.4, 3.0]),
    dual=st.sampled_from([None, 3.0]),
    kl=st.sampled_from(["k1", "k2", "k3", "low_var"]),
    kl_in=st.sampled_from(["loss", "reward"]),
    unbiased=st.booleans(),
)
def test_loss_and_metrics_equal_the_reference(correction, seed, spread, dual, kl, kl_in, unbiased) -> None:
    tokens = random_tokens(np.random.default_rng(seed), LENGTHS, spread)
    config = algorithm(correction, clip_dual=dual, kl_type=kl, kl_in=kl_in, kl_unbiased=unbiased)
    check_against_reference(tokens, config)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_equals_the_reference(preset: str) -> None:
    for spread in (0.003, 0.05, 0.7):
        tokens = random_tokens(np.random.default_rng(7), LENGTHS, spread, mask_share=1.0)
        check_against_reference(tokens, algorithm(CorrectionConfig(preset=preset)))


def test_log_ratios_beyond_the_clamp_stay_finite_and_equal_the_reference() -> None:
    tokens = random_tokens(np.random.default_rng(3), LENGTHS, 40.0)
    for preset in PRESETS:
        check_against_reference(tokens, algorithm(CorrectionConfig(preset=preset)))


class ThreadAllReduce:
    """Sums a tensor over `size` threads that each call it once a round: an all-reduce without processes."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=20)
        self._parts: dict[int, Tensor] = {}

    def for_rank(self, rank: int) -> Reduce:
        def reduce(values: Tensor) -> Tensor:
            self._parts[rank] = values
            self._barrier.wait()
            total = torch.stack([self._parts[r] for r in sorted(self._parts)]).sum(0)
            self._barrier.wait()
            return total

        return reduce


def on_ranks(size: int, work: Callable[[int, Reduce], LossOutput]) -> list[LossOutput]:
    together = ThreadAllReduce(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(rank, together.for_rank(rank)), range(size)))


def merged(outputs: list[LossOutput]) -> dict[str, float]:
    total = LossStatistics.zeros()
    for output in outputs:
        total = total.merge(output.statistics)
    return finalise(total)


@settings(max_examples=30, deadline=None)
@given(correction=corrections(), seed=st.integers(0, 2**31))
def test_whole_sequences_in_any_micro_batches_give_the_same_loss_and_metrics(correction, seed) -> None:
    rng = np.random.default_rng(seed)
    tokens, config = random_tokens(rng, LENGTHS, 0.5), algorithm(correction)
    micro_batch = rng.integers(0, 3, len(LENGTHS))[tokens.sequence]
    parts = [policy_loss(as_inputs(tokens, np.flatnonzero(micro_batch == m)), config) for m in range(3)]
    whole = policy_loss(as_inputs(tokens), config)
    assert sum(p.loss.item() for p in parts) == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-12)
    assert merged(parts) == pytest.approx(finalise(whole.statistics), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3", "low_var"])
@pytest.mark.parametrize("preset", ["tis", "seq_mis", "opsm"])
def test_gradient_is_the_derivative_of_the_reference(preset: str, kl_type: str) -> None:
    tokens = random_tokens(np.random.default_rng(11), [4, 6], 0.3)
    config = algorithm(CorrectionConfig(preset=preset, policy="old"), kl_type=kl_type)
    inputs = as_inputs(tokens)
    policy_loss(inputs, config).loss.backward()
    step = 1e-6
    for i in range(len(tokens.mask)):
        up, down = tokens.log_probs.copy(), tokens.log_probs.copy()
        up[i], down[i] = up[i] + step, down[i] - step
        high = reference.policy_loss(replace(tokens, log_probs=up), config)["loss/total"]
        low = reference.policy_loss(replace(tokens, log_probs=down), config)["loss/total"]
        assert inputs.log_probs.grad[i].item() == pytest.approx((high - low) / (2 * step), rel=1e-5, abs=1e-8)


def test_entropy_gradient_is_minus_its_weight_times_the_coefficient() -> None:
    tokens = random_tokens(np.random.default_rng(5), LENGTHS, 0.3)
    inputs = as_inputs(tokens)
    policy_loss(inputs, algorithm(entropy_coef=0.02)).loss.backward()
    torch.testing.assert_close(inputs.entropy.grad, -0.02 * torch.tensor(tokens.weights))


def test_without_old_log_probs_the_current_policy_is_the_old_one() -> None:
    tokens = random_tokens(np.random.default_rng(2), LENGTHS, 0.3)
    same = replace(tokens, old=tokens.log_probs)
    config = algorithm()
    explicit, implicit = as_inputs(same), replace(as_inputs(same), old_log_probs=None)
    a, b = policy_loss(explicit, config), policy_loss(implicit, config)
    a.loss.backward()
    b.loss.backward()
    assert finalise(a.statistics) == finalise(b.statistics)
    assert torch.equal(explicit.log_probs.grad, implicit.log_probs.grad)


def test_what_stands_outside_the_mask_never_reaches_loss_gradient_or_metrics() -> None:
    tokens = random_tokens(np.random.default_rng(2), LENGTHS, 0.3, mask_share=0.5)
    garbage = {
        name: np.where(tokens.mask, getattr(tokens, name), np.nan)
        for name in ("log_probs", "old", "behaviour", "reference", "entropy", "advantages")
    }
    for preset in PRESETS:
        config = algorithm(CorrectionConfig(preset=preset))
        clean, dirty = as_inputs(tokens), as_inputs(replace(tokens, **garbage))
        a, b = policy_loss(clean, config), policy_loss(dirty, config)
        b.loss.backward()
        assert finalise(a.statistics) == finalise(b.statistics)
        assert torch.isfinite(dirty.log_probs.grad).all()


def test_metrics_of_a_loss_are_sums_over_trained_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = random_tokens(np.random.default_rng(2), LENGTHS, 0.3, mask_share=0.5)
    mask, ones = torch.tensor(tokens.mask), torch.ones(len(tokens.mask))
    metrics = {"own": torch.where(mask, 2.5, torch.nan), "count": ones.long(), "is": ones.bool()}
    monkeypatch.setitem(LOSSES, "ppo", lambda batch, config: TokenLoss(-batch.log_probs, mask, mask, metrics))
    found = finalise(policy_loss(as_inputs(tokens), algorithm()).statistics)
    assert (found["user/own"], found["user/count"], found["user/is"]) == (2.5, 1, 1)


def test_a_trained_token_that_is_not_finite_shows_in_its_sums_bins_and_maxima() -> None:
    tokens = random_tokens(np.random.default_rng(2), LENGTHS, 0.3, mask_share=0.5)
    bad = np.flatnonzero(tokens.mask)[1]
    spoilt = {name: getattr(tokens, name).copy() for name in ("log_probs", "old", "entropy")}
    for column in spoilt.values():
        column[bad] = np.nan
    found = policy_loss(as_inputs(replace(tokens, **spoilt)), algorithm()).statistics
    sums = {name: float(found.sums[i]) for i, name in enumerate(SUM_NAMES)}
    assert all(np.isnan(sums[name]) for name in ("total", "mismatch_k1", "mismatch_k3", "entropy_of_tokens"))
    assert found.maxima.isnan().all() and sums["tokens"] == tokens.mask.sum()
    for block in ("mismatch_bins", "ratio_bins"):
        counts = _block(found, block)
        assert counts[-1] == 1 and sum(counts) == tokens.mask.sum()
    for by in ("age", "position"):
        assert sum(np.isnan(_block(found, f"{by}_k3"))) == sum(np.isnan(_block(found, f"{by}_entropy"))) == 1
        assert sum(_block(found, f"{by}_tokens")) == tokens.mask.sum()


def test_a_micro_batch_without_rows_gives_zero_loss_with_a_gradient_path() -> None:
    tokens = random_tokens(np.random.default_rng(2), LENGTHS, 0.3)
    for preset in PRESETS:
        inputs = as_inputs(tokens, np.zeros(0, int))
        output = policy_loss(inputs, algorithm(CorrectionConfig(preset=preset)))
        output.loss.backward()
        assert output.loss.item() == 0.0
        assert inputs.log_probs.grad.shape == (0,)
        assert finalise(output.statistics) == {"loss/total": 0.0, "loss/tokens": 0.0}


def test_opsm_drops_a_far_sequence_only_when_its_advantage_is_negative() -> None:
    """DeepSeek-V3.2, eq. 9: M = 0 iff A < 0 and mean log(mu / pi) > delta, over the whole sequence."""
    tokens = random_tokens(np.random.default_rng(1), [4, 4, 4], 0.0, mask_share=1.0)
    far = np.where(tokens.sequence < 2, tokens.behaviour - 0.3, tokens.behaviour)
    signs = np.array([-1.0, 1.0, -1.0])[tokens.sequence]
    tokens = replace(tokens, log_probs=far, old=far, advantages=signs)
    weights = reference.correction_weights(tokens, CorrectionConfig(preset="opsm"))
    assert (weights[tokens.sequence == 0] == 0).all()
    assert (weights[tokens.sequence > 0] > 0).all()
    check_against_reference(tokens, algorithm(CorrectionConfig(preset="opsm")))


@pytest.mark.parametrize(
    ("now", "before", "advantages"),
    [
        (-0.3, -0.3, [1.0, -3.0, 1.0, 0.5]),
        (-0.3, 0.0, [-1.0] * 4),
        (-0.3, None, [-1.0] * 4),
    ],
    ids=[
        "tokens of both signs are one sequence",
        "it sees the updated policy",
        "a recomputed old policy hides nothing",
    ],
)
def test_opsm_masks_a_sequence_that_has_gone_far_from_its_sampler(
    now: float, before: float | None, advantages: list[float]
) -> None:
    """slime and miles compare with their own recompute, where one step a rollout gives a divergence of exactly 0."""
    tokens = random_tokens(np.random.default_rng(1), [4], 0.0, mask_share=1.0)
    old = tokens.behaviour + (now if before is None else before)
    tokens = replace(tokens, log_probs=tokens.behaviour + now, old=old, advantages=np.array(advantages))
    inputs = replace(as_inputs(tokens), old_log_probs=None) if before is None else as_inputs(tokens)
    metrics = finalise(policy_loss(inputs, algorithm(CorrectionConfig(preset="opsm"))).statistics)
    assert metrics["correction/masked_fraction"] == metrics["correction/masked_sequences"] == 1.0


def test_with_the_rollout_as_reference_the_clipped_ratio_is_over_the_sampler() -> None:
    tokens = random_tokens(np.random.default_rng(4), LENGTHS, 0.4)
    bypass = finalise(policy_loss(as_inputs(tokens), algorithm(CorrectionConfig(reference="rollout"))).statistics)
    swapped = replace(tokens, old=tokens.behaviour)
    plain = finalise(policy_loss(as_inputs(swapped), algorithm(CorrectionConfig(preset="none"))).statistics)
    assert bypass["loss/policy"] == plain["loss/policy"]
    assert bypass["mismatch/kl"] > 0, "the mismatch is reported against the trainer's own log-probs all the same"


def test_normalised_weights_average_one_over_the_step() -> None:
    tokens = random_tokens(np.random.default_rng(4), LENGTHS, 0.4)
    config = algorithm(kl_coef=0.0, entropy_coef=0.0)
    plain = policy_loss(as_inputs(tokens), config)
    scale = 1.0 / mean_weight(plain.statistics)
    scaled = policy_loss(as_inputs(tokens), config, weight_scale=scale)
    w = reference.correction_weights(tokens, config.correction)[tokens.mask]
    assert scaled.loss.item() == pytest.approx(plain.loss.item() / w.mean(), rel=1e-12)


def test_ratio_p99_is_the_quantile_within_one_bin_and_never_beyond_the_largest() -> None:
    rng = np.random.default_rng(0)
    tokens = random_tokens(rng, [4000], 0.05, mask_share=1.0)
    metrics = finalise(policy_loss(as_inputs(tokens), algorithm()).statistics)
    exact = np.quantile(np.abs(tokens.old - tokens.behaviour), 0.99)
    assert exact <= np.log(metrics["mismatch/ratio_p99"]) * 1.0001 <= exact * 1.09
    assert np.log(metrics["mismatch/ratio_p99"]) <= metrics["mismatch/abs_max"] + 1e-12


def test_float32_inputs_agree_with_the_float64_reference() -> None:
    tokens = random_tokens(np.random.default_rng(8), [200, 300], 0.2)
    config = algorithm()
    got = policy_loss(as_inputs(tokens, dtype=torch.float32), config)
    assert got.loss.dtype == torch.float32
    assert got.loss.item() == pytest.approx(reference.policy_loss(tokens, config)["loss/total"], rel=1e-4)


def test_sft_loss_is_the_weighted_negative_log_likelihood() -> None:
    tokens = random_tokens(np.random.default_rng(8), LENGTHS, 0.2)
    log_probs = torch.tensor(tokens.log_probs, requires_grad=True)
    output = sft_loss(log_probs, torch.tensor(tokens.weights), torch.tensor(tokens.mask))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-(tokens.weights * tokens.log_probs)[tokens.mask].sum())
    np.testing.assert_allclose(log_probs.grad.numpy(), -tokens.weights)
    assert finalise(output.statistics)["loss/nll"] == pytest.approx(output.loss.item())


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_estimates_average_to_the_divergence_of_two_distributions(kind: str) -> None:
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    per_token = kl_estimate(torch.tensor(np.log(p)), torch.tensor(np.log(q)), kind)  # pyright: ignore
    assert (per_token.numpy() * p).sum() == pytest.approx((p * np.log(p / q)).sum(), rel=1e-12)


def test_a_separate_old_pass_is_asked_for_only_where_pi_old_is_not_the_current_policy() -> None:
    assert not needs_old_log_probs(CorrectionConfig(), 1)
    assert needs_old_log_probs(CorrectionConfig(), 2)
    assert needs_old_log_probs(CorrectionConfig(normalise=True), 1)
    assert not needs_old_log_probs(CorrectionConfig(reference="rollout"), 4)


@pytest.mark.parametrize("fields", [
    {"low": 3.0}, {"high": None}, {"action": "clip"}, {"action": "mask", "high": None}, {"metric": "k3"},
    {"negative_advantage_only": True}, {"normalise": True, "reference": "rollout"}, {"preset": "tiss"},
])  # fmt: skip
def test_senseless_corrections_are_refused_with_a_way_out(fields: dict[str, object]) -> None:
    with pytest.raises((ConfigError, ValueError), match="hint"):
        CorrectionConfig(**fields)  # pyright: ignore[reportArgumentType]


def test_fields_beside_a_preset_win_over_it_and_a_dump_reads_back() -> None:
    config = CorrectionConfig(preset="icepop", high=4.0)
    assert (config.low, config.high, config.action) == (0.5, 4.0, "mask")
    assert CorrectionConfig(**config.as_dict()) == config


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_a_clients_filler_on_rows_without_advantage_leaves_loss_and_gradient_finite(name: str) -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    filler, advantages = torch.tensor([-1.0, -9999.0]), torch.tensor([1.0, 0.0])
    choice = LossChoice(name=name)  # type: ignore[arg-type]
    loss = client_loss(choice, log_probs, torch.tensor([True, True]), torch.ones(2), advantages, filler).loss
    loss.backward()
    assert torch.isfinite(loss) and log_probs.grad is not None and torch.isfinite(log_probs.grad).all()
