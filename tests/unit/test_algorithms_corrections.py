"""Corrections by segment and by age, trust regions by direction, sequences that leave, and every preset by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.algorithms.losses import policy_loss
from mslime.algorithms.statistics import finalise
from mslime.config.algorithm import PRESETS, CorrectionConfig
from mslime.config.errors import ConfigError

from .algorithms_reference import Tokens, random_tokens
from .test_algorithms_losses import LENGTHS, algorithm, as_inputs, check_against_reference, corrections


def weights_of(tokens: Tokens, correction: CorrectionConfig) -> np.ndarray:
    """The weights that the gradient of plain REINFORCE shows, over those of no correction (advantages 1)."""
    inputs = as_inputs(tokens)
    config = algorithm(correction, loss="reinforce", kl_coef=0.0, entropy_coef=0.0)
    policy_loss(inputs, config).loss.backward()
    return -inputs.log_probs.grad.numpy() / tokens.advantages / tokens.weights


def two_segments(rho: list[float], pi_over_mu: list[float] | None = None, advantage: float = 1.0) -> Tokens:
    """One response of four tokens, two of age 3 and two of age 0. `rho`: pi_old over mu; pi is pi_old or given."""
    tokens = random_tokens(np.random.default_rng(0), [4], 0.0, mask_share=1.0)
    mu = np.full(4, np.log(0.3))
    old = mu + np.log(rho)
    current = old if pi_over_mu is None else mu + np.log(pi_over_mu)
    return replace(
        tokens, log_probs=current, old=old, behaviour=mu, advantages=np.full(4, advantage), weights=np.full(4, 0.25),
        ages=np.array([3, 3, 0, 0]),
    )  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(
    correction=corrections(),
    seed=st.integers(0, 2**31),
    max_age=st.sampled_from([0, 1, 3]),
    old_weight=st.sampled_from([0.0, 0.25]),
    outward=st.booleans(),
)
def test_ages_and_directions_equal_the_reference(correction, seed, max_age, old_weight, outward) -> None:
    fields = {**correction.as_dict(), "max_age": max_age, "old_weight": old_weight}
    if correction.action in ("mask", "drop") and correction.level == "token":
        fields["outward_only"] = outward
    tokens = random_tokens(np.random.default_rng(seed), LENGTHS, 0.4)
    check_against_reference(tokens, algorithm(CorrectionConfig(**fields)))


@pytest.mark.parametrize(
    ("preset", "rho", "expected"),
    [
        ("tis", [1.0, 0.5, 2.0, 3.0], [1.0, 0.5, 2.0, 2.0]),
        ("seq_tis", [1.0, 0.5, 2.0, 1.5], [1.5, 1.5, 1.5, 1.5]),
        ("mis", [1.0, 0.4, 1.5, 3.0], [1.0, 0.0, 1.5, 0.0]),
        ("seq_mis", [1.0, 2.0, 2.0, 1.0], [0.0] * 4),
        ("seq_mis", [1.0, 2.0, 1.0, 1.0], [2.0] * 4),
        ("icepop", [1.0, 0.4, 4.0, 5.5], [1.0, 0.0, 4.0, 0.0]),
        ("kpop", [1.0, 3.0, 0.01, 1.0], [1.0, 2.0, 0.01, 1.0]),  # 0.9 and 0.003 against 0.3: KL at most 1.2
        ("geo_rs", [1.02, 1.0, 1.0, 1.0], [1.02, 1.0, 1.0, 1.0]),  # the geometric mean is 1.005
        ("geo_rs", [1.05, 1.0, 1.0, 1.0], [0.0] * 4),  # 1.0123
        ("k3_rs", [1.2, 1.0, 1.0, 1.0], [1.2, 1.0, 1.0, 1.0]),  # mean k3 0.0044
        ("k3_rs", [1.4, 1.0, 1.0, 1.0], [0.0] * 4),  # 0.0159
        ("veto", [1e-5, 1.0, 1.0, 3.0], [0.0] * 4),
        ("veto", [1e-3, 1.0, 1.0, 3.0], [1e-3, 1.0, 1.0, 2.0]),
        ("areal_decoupled", [1.0, 0.1, 4.9, 5.1], [1.0, 0.1, 4.9, 0.0]),
        ("none", [1.0, 0.1, 4.9, 5.1], [1.0] * 4),
    ],
)
def test_presets_by_hand(preset: str, rho: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(weights_of(two_segments(rho), CorrectionConfig(preset=preset)), expected, rtol=1e-9)


def test_kpop_masks_by_divergence_and_not_by_ratio() -> None:
    tokens = two_segments([1.0, 1.0, 1.0, 1.0])
    mu, pi = np.log([0.999, 0.001, 0.5, 0.5]), np.log([0.05, 0.0001, 0.25, 0.5])
    tokens = replace(tokens, behaviour=mu, old=pi, log_probs=pi)
    got = weights_of(tokens, CorrectionConfig(preset="kpop"))
    assert got[0] == 0 and got[1] == pytest.approx(0.1), "a tenfold ratio of rare tokens is no divergence"
    assert (
        CorrectionConfig(preset="icepop").low == 0.5 and weights_of(tokens, CorrectionConfig(preset="icepop"))[1] == 0
    )


@pytest.mark.parametrize("preset", [p for p in PRESETS if p not in ("none",)])
def test_presets_leave_on_policy_tokens_alone(preset: str) -> None:
    np.testing.assert_allclose(weights_of(two_segments([1.0] * 4), CorrectionConfig(preset=preset)), 1.0)


def test_each_segment_has_the_product_of_its_own_ratios() -> None:
    correction = CorrectionConfig(preset="tis", level="segment", high=10.0)
    tokens = two_segments([2.0, 1.5, 0.5, 0.5])
    tokens = replace(tokens, segment=np.array([0, 0, 1, 1]))
    np.testing.assert_allclose(weights_of(tokens, correction), [3.0, 3.0, 0.25, 0.25])


def test_old_segments_are_masked_or_weigh_less_and_keep_their_denominators() -> None:
    tokens = two_segments([1.0, 1.5, 1.0, 1.5])
    masked = CorrectionConfig(preset="tis", max_age=2)
    np.testing.assert_allclose(weights_of(tokens, masked), [0, 0, 1, 1.5])
    np.testing.assert_allclose(weights_of(tokens, CorrectionConfig(preset="tis", max_age=3)), [1, 1.5, 1, 1.5])
    lighter = CorrectionConfig(preset="tis", max_age=2, old_weight=0.5)
    np.testing.assert_allclose(weights_of(tokens, lighter), [0.5, 0.75, 1, 1.5])
    metrics = finalise(policy_loss(as_inputs(tokens), algorithm(masked)).statistics)
    assert metrics["correction/masked_fraction"] == 0.5 and metrics["correction/masked_sequences"] == 0
    assert metrics["loss/policy"] == pytest.approx(-0.25 * 2.5)


def test_a_bound_by_age_holds_in_bypass_mode_and_without_any_action() -> None:
    for preset in ("bypass", "none"):
        inputs = as_inputs(two_segments([1.0] * 4))
        config = algorithm(CorrectionConfig(preset=preset, max_age=2), kl_coef=0.0, entropy_coef=0.0)
        policy_loss(inputs, config).loss.backward()
        assert (inputs.log_probs.grad.numpy() == 0).tolist() == [True, True, False, False]


def test_dppo_masks_only_what_the_advantage_has_pushed_out() -> None:
    away, back = [1.0, 2.0, 0.2, 1.0], [1.0, 0.2, 2.0, 1.0]
    correction = CorrectionConfig(preset="dppo_tv")
    for advantage, far in ((1.0, away), (-1.0, back)):
        tokens = two_segments([1.0] * 4, far, advantage)
        np.testing.assert_allclose(weights_of(tokens, correction), [1.0, 0.0, far[2], 1.0])


def test_opsm_reports_the_fraction_of_sequences_whole_and_split() -> None:
    tokens = random_tokens(np.random.default_rng(1), [4, 8, 2, 6], 0.0, mask_share=1.0)
    far = np.where(tokens.sequence < 2, tokens.behaviour - 0.3, tokens.behaviour)
    tokens = replace(tokens, log_probs=far, old=far, advantages=np.full(20, -1.0))
    metrics = finalise(policy_loss(as_inputs(tokens), algorithm(CorrectionConfig(preset="opsm"))).statistics)
    assert metrics["correction/masked_sequences"] == pytest.approx(2 / 4)
    assert metrics["correction/masked_fraction"] == pytest.approx(12 / 20)


def test_weights_carry_no_gradient() -> None:
    tokens = random_tokens(np.random.default_rng(5), LENGTHS, 0.4)
    for preset in PRESETS:
        inputs = as_inputs(replace(tokens, advantages=np.zeros(sum(LENGTHS))))
        policy_loss(inputs, algorithm(CorrectionConfig(preset=preset), kl_coef=0.0)).loss.backward()
        assert not inputs.log_probs.grad.any()


def test_a_rejection_changes_the_numerator_only() -> None:
    tokens = two_segments([1.0, 1.0, 9.0, 1.0])
    metrics = finalise(policy_loss(as_inputs(tokens), algorithm(CorrectionConfig(preset="icepop"))).statistics)
    assert metrics["loss/policy"] == pytest.approx(-0.25 * 3), "three quarters, not three thirds"


@pytest.mark.parametrize("fields", [
    {"outward_only": True}, {"preset": "geo_rs", "outward_only": True}, {"max_age": -1},
    {"max_age": 1, "old_weight": 1.0},
])  # fmt: skip
def test_senseless_bounds_by_age_and_direction_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises((ConfigError, ValueError)):
        CorrectionConfig(**fields)  # pyright: ignore[reportArgumentType]


def test_by_age_and_position_are_means_over_their_own_tokens() -> None:
    tokens = replace(two_segments([1.0, 1.5, 1.0, 3.0]), positions=np.array([0, 63, 64, 5000]))
    metrics = finalise(policy_loss(as_inputs(tokens), algorithm(CorrectionConfig())).statistics)
    k3 = [0.0, 0.5 - np.log(1.5), 0.0, 2 - np.log(3.0)]
    assert metrics["mismatch/kl_age_3"] == pytest.approx((k3[0] + k3[1]) / 2)
    assert metrics["mismatch/kl_age_0"] == pytest.approx((k3[2] + k3[3]) / 2)
    assert metrics["mismatch/kl_position_0"] == pytest.approx((k3[0] + k3[1]) / 2)
    assert metrics["mismatch/kl_position_64"] == 0 and "mismatch/kl_position_256" not in metrics
    assert metrics["mismatch/kl_position_4096"] == pytest.approx(k3[3])


def test_ages_beyond_the_last_bucket_are_counted_in_it() -> None:
    tokens = replace(two_segments([1.0, 1.5, 1.0, 1.0]), ages=np.array([8, 200, 7, 0]))
    metrics = finalise(policy_loss(as_inputs(tokens), algorithm(CorrectionConfig())).statistics)
    assert metrics["mismatch/kl_age_8"] == pytest.approx((0.5 - np.log(1.5)) / 2)


@pytest.mark.parametrize(("percent", "q"), [("01", 0.01), ("50", 0.5), ("99", 0.99)])
def test_ratio_percentiles_are_within_a_bin_of_the_quantile(percent: str, q: float) -> None:
    rng = np.random.default_rng(0)
    tokens = random_tokens(rng, [4000], 0.0, mask_share=1.0)
    tokens = replace(tokens, log_probs=tokens.old + rng.normal(0.05, 0.1, 4000))
    metrics = finalise(policy_loss(as_inputs(tokens), algorithm()).statistics)
    exact = np.sort(tokens.log_probs - tokens.old)[int(np.ceil(q * 4000)) - 1]
    assert abs(np.log(metrics[f"loss/ratio_p{percent}"]) - exact) <= 0.08 * abs(exact) + 1e-7


def test_a_correction_that_needs_what_the_shard_lacks_says_so() -> None:
    inputs = replace(as_inputs(two_segments([1.0] * 4)), ages=None, segment_index=None)
    with pytest.raises(AssertionError, match="ages"):
        policy_loss(inputs, algorithm(CorrectionConfig(max_age=1)))
    with pytest.raises(AssertionError, match="segments"):
        policy_loss(inputs, algorithm(CorrectionConfig(level="segment")))
