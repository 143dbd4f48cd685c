"""Every policy loss against the paper in NumPy float64, whole and split over ranks, with its gradient and its edges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.algorithms.losses import policy_loss, value_loss
from mslime.algorithms.policies import LOSSES
from mslime.algorithms.statistics import finalise
from mslime.config.algorithm import POLICY_LOSSES, PRESETS, AlgorithmConfig, CorrectionConfig

from . import algorithms_reference as reference
from . import losses_reference
from .algorithms_reference import Tokens, random_tokens
from .test_algorithms_losses import LENGTHS, as_inputs, corrections, merged, on_ranks
from .test_algorithms_losses import algorithm as with_penalties

STOPS_GRADIENTS = ("cispo", "topr", "dppo_tv", "reinforce")


def algorithm(loss: str, **fields: object) -> AlgorithmConfig:
    return AlgorithmConfig(**{"loss": loss, **fields})  # pyright: ignore[reportArgumentType]


@st.composite
def configs(draw: st.DrawFn, losses: tuple[str, ...] = tuple(LOSSES)) -> AlgorithmConfig:
    level = draw(st.sampled_from(["token", "sequence"]))
    return algorithm(
        draw(st.sampled_from(losses)), clip_low=draw(st.sampled_from([0.02, 0.2, 1.0])),
        clip_high=draw(st.sampled_from([0.01, 0.28, 4.0])), clip_dual=draw(st.sampled_from([None, 1.5])),
        topr={"level": level}, kimi={"level": level, "tau": 0.3},
        dppo={"ratio_cap": draw(st.sampled_from([1.2, 20.0]))}, ipo={"kl_tau": 0.05},
        correction={"preset": draw(st.sampled_from(["tis", "bypass", "seq_tis"]))},
    )  # fmt: skip


def test_the_page_about_algorithms_has_every_loss_and_preset_with_its_numbers() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    for name, start in [*((name, loss.defaults) for name, loss in POLICY_LOSSES.items()), *PRESETS.items()]:
        for bound in ("clip_low", "clip_high", "low", "high"):
            assert bound not in start or f"{start[bound]:g}" in rows[name], (name, bound)
    assert set(rows) >= {*LOSSES, *PRESETS}
    assert all(f"`{field}`" in text for field in CorrectionConfig.model_fields if field not in ("preset", "function"))


def step(seed: int, spread: float = 0.3, **kwargs: float) -> Tokens:
    return random_tokens(np.random.default_rng(seed), LENGTHS, spread, **kwargs)


def test_every_name_that_the_config_takes_is_a_loss_with_a_reference() -> None:
    assert set(LOSSES) == set(losses_reference.LOSSES) == set(POLICY_LOSSES)


@settings(max_examples=200, deadline=None)
@given(config=configs(), seed=st.integers(0, 2**31), spread=st.sampled_from([0.0, 0.02, 0.4, 3.0]))
@pytest.mark.slow
def test_every_loss_equals_its_paper(config: AlgorithmConfig, seed: int, spread: float) -> None:
    tokens = step(seed, spread)
    got = finalise(policy_loss(as_inputs(tokens), config).statistics)
    want = reference.policy_loss(tokens, config)
    for name in ("loss/policy", "loss/total", "correction/mean_weight"):
        assert got[name] == pytest.approx(want[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("kind", ["seq_tis", "bypass"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_the_derivative_of_the_paper_with_its_stopped_gradients(loss: str, kind: str) -> None:
    tokens = random_tokens(np.random.default_rng(11), [4, 6, 1], 0.3)
    config = algorithm(loss, kl_coef=0.0, correction={"preset": kind})
    inputs = as_inputs(tokens)
    policy_loss(inputs, config).loss.backward()
    for i in range(len(tokens.mask)):
        sides = []
        for shift in (1e-6, -1e-6):
            moved = tokens.log_probs.copy()
            moved[i] += shift
            fixed = tokens.log_probs if loss in STOPS_GRADIENTS else moved
            still = replace(tokens, log_probs=moved)
            sides.append(reference.policy_loss(still, config, fixed)["loss/policy"])
        assert inputs.log_probs.grad[i].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_correction_weight_scales_the_gradient_of_its_own_token(loss: str) -> None:
    tokens = step(12, 0.4)
    weights = reference.correction_weights(tokens, CorrectionConfig())
    with_weights, without = as_inputs(tokens), as_inputs(tokens)
    policy_loss(with_weights, algorithm(loss, correction={"preset": "tis"})).loss.backward()
    policy_loss(without, algorithm(loss, correction={"preset": "none"})).loss.backward()
    np.testing.assert_allclose(with_weights.log_probs.grad, weights * without.log_probs.grad.numpy(), rtol=1e-9)


@pytest.mark.parametrize("loss", ["ppo", "sapo", "ipo"])
def test_losses_without_stopped_gradients_pass_gradcheck(loss: str) -> None:
    tokens, config = step(3), algorithm(loss)

    def total(log_probs: torch.Tensor) -> torch.Tensor:
        return policy_loss(replace(as_inputs(tokens), log_probs=log_probs), config).loss

    assert torch.autograd.gradcheck(total, as_inputs(tokens).log_probs)


@settings(max_examples=120, deadline=None)
@given(
    config=st.one_of(configs(), corrections().map(with_penalties)), seed=st.integers(0, 2**31), ranks=st.integers(2, 4)
)
def test_responses_split_over_ranks_give_the_same_loss_gradient_and_metrics(config, seed, ranks) -> None:
    rng, tokens = np.random.default_rng(seed), step(seed, 0.5)
    owner = rng.integers(0, ranks, len(tokens.mask))
    owner[tokens.sequence == 2] = 0
    parts = [as_inputs(tokens, np.flatnonzero(owner == rank)) for rank in range(ranks)]
    whole_inputs = as_inputs(tokens)
    whole = policy_loss(whole_inputs, config)
    whole.loss.backward()
    outputs = on_ranks(ranks, lambda rank, reduce: policy_loss(parts[rank], config, reduce))
    for rank, output in enumerate(outputs):
        output.loss.backward()
        expected = whole_inputs.log_probs.grad[torch.tensor(owner == rank)]
        torch.testing.assert_close(parts[rank].log_probs.grad, expected)
    assert sum(o.loss.item() for o in outputs) == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-12)
    assert merged(outputs) == pytest.approx(finalise(whole.statistics), rel=1e-9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(config=configs(), seed=st.integers(0, 2**31))
def test_order_and_padding_of_rows_change_nothing(config, seed) -> None:
    rng, tokens = np.random.default_rng(seed), step(seed, 0.5)
    order = np.concatenate([rng.permutation(len(tokens.mask)), np.zeros(7, int)])
    shuffled, plain = as_inputs(tokens, order), as_inputs(tokens)
    padding = torch.arange(len(order)) >= len(tokens.mask)
    shuffled = replace(shuffled, mask=shuffled.mask & ~padding)
    a, b = policy_loss(plain, config), policy_loss(shuffled, config)
    a.loss.backward()
    b.loss.backward()
    assert finalise(b.statistics) == pytest.approx(finalise(a.statistics), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(shuffled.log_probs.grad[~padding], plain.log_probs.grad[torch.tensor(order)[~padding]])
    assert not shuffled.log_probs.grad[padding].any()


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_every_gradient_is_the_policy_gradient(loss: str) -> None:
    """At r = 1 nothing is clipped, and SAPO's gate, GSPO's ratio and the weights have slope or value 1."""
    tokens = step(9)
    same = replace(tokens, old=tokens.log_probs, behaviour=tokens.log_probs)
    inputs = as_inputs(same)
    config = algorithm(loss)
    output = policy_loss(inputs, config)
    output.loss.backward()
    expected = -tokens.weights * tokens.advantages
    np.testing.assert_allclose(inputs.log_probs.grad.numpy(), expected, rtol=1e-12, atol=1e-15)
    metrics = finalise(output.statistics)
    assert metrics["loss/clip_fraction"] == 0 and metrics["mismatch/kl"] == 0 and metrics["mismatch/ratio_p99"] == 1
    assert config.correction.reference == "rollout" or metrics["correction/effective_share"] == 1
    assert (metrics["loss/ratio_p01"], metrics["loss/ratio_p50"], metrics["loss/ratio_p99"]) == (1, 1, 1)


@pytest.mark.parametrize("loss", LOSSES)
def test_zero_advantages_leave_only_penalties(loss: str) -> None:
    inputs = as_inputs(replace(step(4), advantages=np.zeros(sum(LENGTHS))))
    policy_loss(inputs, algorithm(loss)).loss.backward()
    assert inputs.log_probs.grad.any() == (loss in ("kimi", "ipo"))


@pytest.mark.parametrize("preset", ["tis", "bypass"])
@pytest.mark.parametrize("loss", LOSSES)
def test_ratios_beyond_any_number_stay_finite(loss: str, preset: str) -> None:
    tokens = step(3, 200.0)
    inputs = as_inputs(tokens, dtype=torch.float32)
    output = policy_loss(inputs, algorithm(loss, correction={"preset": preset}))
    output.loss.backward()
    assert torch.isfinite(output.loss) and torch.isfinite(inputs.log_probs.grad).all()
    assert all(np.isfinite(v) for v in finalise(output.statistics).values())


def test_log_probs_that_are_not_numbers_reach_the_loss_where_the_trainer_stops_on_them() -> None:
    tokens = step(3, mask_share=1.0)
    output = policy_loss(as_inputs(replace(tokens, log_probs=np.full(sum(LENGTHS), np.nan))), algorithm("ppo"))
    assert np.isnan(finalise(output.statistics)["loss/total"])


@pytest.mark.parametrize("loss", LOSSES)
def test_all_masked_and_single_tokens(loss: str) -> None:
    one = random_tokens(np.random.default_rng(1), [1, 1, 1], 0.3, mask_share=1.0)
    got = finalise(policy_loss(as_inputs(one), algorithm(loss)).statistics)["loss/policy"]
    assert got == pytest.approx(reference.policy_loss(one, algorithm(loss))["loss/policy"], rel=1e-12)
    none = replace(one, mask=np.zeros(3, bool))
    inputs = as_inputs(none)
    output = policy_loss(inputs, algorithm(loss))
    output.loss.backward()
    assert output.loss.item() == 0 and not inputs.log_probs.grad.any()
    assert finalise(output.statistics) == {"loss/total": 0.0, "loss/tokens": 0.0}


def one_response(ratios: list[float], advantage: float) -> Tokens:
    """A response whose tokens have these ratios of pi to pi_old, all with the weight 1."""
    tokens = random_tokens(np.random.default_rng(0), [len(ratios)], 0.0, mask_share=1.0)
    old = np.full(len(ratios), np.log(0.2))
    return replace(
        tokens, log_probs=old + np.log(ratios), old=old, behaviour=old, advantages=np.full(len(ratios), advantage),
        weights=np.ones(len(ratios)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "advantage", "gradient"),
    [
        ("ppo", 1.0, [-0.5, -1.0, 0.0]),  # 2 is above 1.28
        ("ppo", -1.0, [0.0, 1.0, 2.0]),  # 0.5 is below 0.8
        ("gspo", 1.0, [-1.0, -1.0, -1.0]),  # the geometric mean of 0.5, 1, 2 is 1
        ("gmpo", 2.0, [-1.81381, -1.81381, 0.0]),  # exp((log 0.5 + 0 + 0.4) / 3) = 0.906907, and 2 is above e^0.4
        ("cispo", 1.0, [-0.5, -1.0, -2.0]),
        ("topr", -1.0, [1.0, 1.0, 1.0]),  # the product is 1
        ("topr", 1.0, [-1.0, -1.0, -1.0]),
        ("dppo_tv", 1.0, [-0.5, -1.0, -2.0]),  # 0.4 - 0.2 is not beyond 0.2
        ("reinforce", -1.0, [0.5, 1.0, 2.0]),
    ],
)
def test_gradients_by_hand(loss: str, advantage: float, gradient: list[float]) -> None:
    inputs = as_inputs(one_response([0.5, 1.0, 2.0], advantage))
    fields = {"clip_high": 0.21} if loss == "dppo_tv" else {}
    policy_loss(inputs, algorithm(loss, **fields)).loss.backward()
    np.testing.assert_allclose(inputs.log_probs.grad.numpy(), gradient, rtol=1e-5)


@pytest.mark.parametrize(("loss", "advantage", "below", "above"), [
    ("ppo", 1.0, 0, 1 / 3), ("ppo", -1.0, 1 / 3, 0), ("cispo", 1.0, 0, 0), ("gmpo", 1.0, 0, 1 / 3),
    ("gmpo", -1.0, 1 / 3, 0), ("dppo_tv", 1.0, 0, 1 / 3), ("ipo", 1.0, 0, 1 / 3), ("sapo", 1.0, 0, 0),
])  # fmt: skip
def test_clip_fractions_by_side(loss: str, advantage: float, below: float, above: float) -> None:
    bounds = {"clip_high": 0.15, "clip_low": 0.15} if loss in ("dppo_tv", "ipo") else {}
    metrics = finalise(
        policy_loss(as_inputs(one_response([0.5, 1.0, 2.0], advantage)), algorithm(loss, **bounds)).statistics
    )
    assert metrics["loss/clip_fraction_below"] == pytest.approx(below)
    assert metrics["loss/clip_fraction_above"] == pytest.approx(above)
    assert metrics["loss/clip_fraction"] == pytest.approx(below + above)


def test_dual_clip_counts_as_the_upper_side() -> None:
    tokens = one_response([0.9, 1.0, 4.0], -1.0)
    metrics = finalise(policy_loss(as_inputs(tokens), algorithm("ppo", clip_dual=3.0)).statistics)
    assert metrics["loss/policy"] == pytest.approx(0.9 + 1.0 + 3.0)
    assert metrics["loss/clip_fraction_above"] == pytest.approx(1 / 3)


def test_truncated_importance_weighted_reinforce_is_cispo_in_bypass_mode() -> None:
    """verl calls it bypass_pg_is: -min(pi / mu, 2) A log pi."""
    tokens = step(2, 0.6)
    config = algorithm("cispo", clip_low=1.0, clip_high=1.0, correction={"preset": "bypass"})
    got = finalise(policy_loss(as_inputs(tokens), config).statistics)["loss/policy"]
    capped = np.minimum(np.exp(tokens.log_probs - tokens.behaviour), 2.0)
    terms = -tokens.weights * capped * tokens.advantages * tokens.log_probs
    assert got == pytest.approx(terms[tokens.mask].sum(), rel=1e-9)


def test_a_loss_starts_from_its_own_numbers_and_given_ones_win() -> None:
    assert (algorithm("gspo").clip_low, algorithm("gspo").clip_high) == (3e-4, 4e-4)
    assert algorithm("gspo").loss_aggregation == "sequence"
    assert algorithm("gspo", clip_high=0.01).clip_high == 0.01
    assert algorithm("dppo_tv").correction.reference == "rollout"
    assert algorithm("dppo_tv", correction={"preset": "tis"}).correction == CorrectionConfig()
    assert algorithm("ipo", correction={"max_age": 2}).correction == CorrectionConfig(preset="bypass", max_age=2)
    assert algorithm("ppo") == AlgorithmConfig()
    for loss in LOSSES:
        config = algorithm(loss)
        assert AlgorithmConfig(**config.as_dict()) == config


def test_the_presets_dppo_tv_and_bypass_keep_what_the_loss_dppo_tv_keeps() -> None:
    tokens = one_response([0.5, 1.0, 2.0], 1.0)
    masked = algorithm("reinforce", correction={"preset": "dppo_tv", "high": 0.15})
    own = algorithm("dppo_tv", clip_high=0.15, clip_low=0.15)
    a, b = as_inputs(tokens), as_inputs(tokens)
    policy_loss(a, masked).loss.backward()
    policy_loss(b, own).loss.backward()
    torch.testing.assert_close(a.log_probs.grad, b.log_probs.grad)
    assert a.log_probs.grad[2] == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), clip=st.sampled_from([None, 0.05, 0.5]))
def test_value_loss_is_ppos_and_explained_variance_is_one_minus_what_is_left(seed: int, clip: float | None) -> None:
    rng = np.random.default_rng(seed)
    old, returns, weights = rng.normal(size=20), rng.normal(size=20), rng.uniform(size=20)
    values, mask = old + rng.normal(0, 0.3, 20), rng.random(20) < 0.8
    mask[:2] = True
    v = torch.tensor(values, requires_grad=True)
    columns = [torch.tensor(np.where(mask, c, np.nan)) for c in (old, returns, weights)]
    output = value_loss(v, *columns, torch.tensor(mask), clip)
    output.loss.backward()
    total, gradient = 0.0, np.zeros(20)
    for i in np.flatnonzero(mask):
        plain, bounded = (values[i] - returns[i]) ** 2, -1.0
        if clip is not None:
            near = old[i] + min(max(values[i] - old[i], -clip), clip)
            bounded = (near - returns[i]) ** 2 if near != values[i] else plain
        total += weights[i] / 2 * max(plain, bounded)
        gradient[i] = weights[i] * (values[i] - returns[i]) if plain >= bounded else 0.0
    assert output.loss.item() == pytest.approx(total, rel=1e-12)
    np.testing.assert_allclose(v.grad.numpy(), gradient, rtol=1e-9, atol=1e-12)
    metrics = finalise(output.statistics)
    left = np.var((returns - values)[mask]) / np.var(returns[mask])
    assert metrics["loss/explained_variance"] == pytest.approx(1 - left, abs=1e-9)
    assert metrics["loss/value"] == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_unbiased_kl_has_the_gradient_of_the_divergence_whoever_sampled(kind: str) -> None:
    """Summed over every token of a vocabulary under mu, the estimate and its gradient are those of KL(pi || ref)."""
    rng = np.random.default_rng(0)
    mu, ref = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    logits = torch.tensor(rng.normal(size=6), requires_grad=True)
    log_pi, log_ref = torch.log_softmax(logits, 0), torch.tensor(np.log(ref))
    divergence = (log_pi.exp() * (log_pi - log_ref)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    n = len(mu)
    inputs = as_inputs(random_tokens(rng, [n], 0.0, mask_share=1.0))
    inputs = replace(
        inputs, log_probs=log_pi, behaviour_log_probs=torch.tensor(np.log(mu)), old_log_probs=torch.tensor(np.log(mu)),
        reference_log_probs=log_ref, weights=torch.tensor(mu), advantages=torch.zeros(n, dtype=torch.float64),
    )  # fmt: skip
    config = algorithm("ppo", kl_coef=1.0, kl_type=kind, kl_unbiased=True)
    output = policy_loss(inputs, config)
    (got,) = torch.autograd.grad(output.loss, logits)
    assert output.loss.item() == pytest.approx(divergence.item(), rel=1e-9)
    torch.testing.assert_close(got, expected)


def test_kl_in_the_reward_is_reported_and_not_in_the_loss() -> None:
    tokens = step(5)
    in_loss = finalise(policy_loss(as_inputs(tokens), algorithm("ppo", kl_coef=0.3)).statistics)
    shaped = finalise(policy_loss(as_inputs(tokens), algorithm("ppo", kl_coef=0.3, kl_in="reward")).statistics)
    assert shaped["loss/kl"] == in_loss["loss/kl"] and shaped["loss/total"] == shaped["loss/policy"]
    assert in_loss["loss/total"] == pytest.approx(in_loss["loss/policy"] + 0.3 * in_loss["loss/kl"])


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_takes_every_correction(loss: str, preset: str) -> None:
    tokens = step(6, 0.4)
    config = algorithm(loss, correction={"preset": preset})
    got = finalise(policy_loss(as_inputs(tokens), config).statistics)
    assert got["loss/policy"] == pytest.approx(reference.policy_loss(tokens, config)["loss/policy"], rel=1e-9)
