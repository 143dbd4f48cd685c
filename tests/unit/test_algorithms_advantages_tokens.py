"""Advantages of tokens, against loops over one sequence in float64, and over simulated ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.algorithms.advantages_tokens import (
    WHITEN_EPS,
    Reduce,
    TokenColumns,
    advantage_metrics,
    discounted_sums,
    is_token_level,
    needs_policy_log_probs,
    token_advantages,
)
from mslime.config.algorithm import AlgorithmConfig

Sequence = dict[str, np.ndarray]


def make_sequence(rng: np.random.Generator, length: int, mask: np.ndarray | None = None) -> Sequence:
    """One sequence's columns; rewards also lie on tokens that are not trained."""
    mask = rng.random(length) < 0.6 if mask is None else mask
    return {
        "mask": mask,
        "advantages": np.where(mask, rng.normal(), 0).astype(np.float32),
        "rewards": np.where(rng.random(length) < 0.3, rng.normal(size=length), 0).astype(np.float32),
        "policy_log_probs": -rng.exponential(1, length).astype(np.float32),
        "reference_log_probs": -rng.exponential(1, length).astype(np.float32),
        "teacher_log_probs": -rng.exponential(1, length).astype(np.float32),
        "values": rng.normal(size=length).astype(np.float32),
    }


def columns_of(sequences: list[Sequence]) -> TokenColumns:
    joined = {
        name: np.concatenate([s[name] for s in sequences]) if sequences else np.zeros(0, np.float32)
        for name in make_sequence(np.random.default_rng(0), 1)
    }
    joined["mask"] = joined["mask"].astype(bool)
    return TokenColumns(lengths=np.asarray([len(s["mask"]) for s in sequences], np.int64), **joined)


def alone(values: np.ndarray) -> np.ndarray:
    return values


def algorithm(**fields: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(fields)


def reference_kl(s: Sequence, t: int, config: AlgorithmConfig) -> float:
    d = float(s["policy_log_probs"][t]) - float(s["reference_log_probs"][t])
    k3 = np.exp(-d) - 1 + d
    return {"k1": d, "k2": d * d / 2, "k3": k3, "low_var": min(k3, 10.0)}[config.kl_type]


def reference_advantages(s: Sequence, config: AlgorithmConfig) -> np.ndarray:
    """One sequence, one token at a time, without whitening."""
    trained = [t for t in range(len(s["mask"])) if s["mask"][t]]
    earned = dict.fromkeys(trained, 0.0)
    for t in range(len(s["mask"])):
        earners = [k for k in trained if k <= t]
        if earners and config.advantage in ("reinforce_pp", "gae"):
            earned[earners[-1]] += float(s["rewards"][t])
    if config.kl_in == "reward":
        for t in trained:
            earned[t] -= config.kl_coef * reference_kl(s, t, config)
    out = np.zeros(len(s["mask"]))
    for position, t in enumerate(trained):
        later = trained[position:]
        if config.advantage == "gae":
            value = 0.0
            for k, u in enumerate(later):
                following = float(s["values"][later[k + 1]]) if k + 1 < len(later) else 0.0
                delta = earned[u] + config.gamma * following - float(s["values"][u])
                value += (config.gamma * config.gae_lambda) ** k * delta
            out[t] = value
        else:
            gamma = config.gamma if config.advantage == "reinforce_pp" else 1.0
            out[t] = sum(gamma**k * earned[u] for k, u in enumerate(later))
            out[t] += float(s["advantages"][t]) if config.advantage != "reinforce_pp" else 0.0
        if config.opd_coef:
            out[t] -= config.opd_coef * (float(s["policy_log_probs"][t]) - float(s["teacher_log_probs"][t]))
    return out


CASES = [
    {"advantage": "reinforce_pp", "gamma": 0.9},
    {"advantage": "reinforce_pp", "kl_coef": 0.1, "kl_in": "reward", "kl_type": "k1"},
    {"advantage": "reinforce_pp_baseline", "kl_coef": 0.2, "kl_in": "reward", "kl_type": "k2"},
    {"advantage": "grpo", "kl_coef": 0.3, "kl_in": "reward"},
    {"advantage": "grpo", "opd_coef": 0.5},
    {"advantage": "none", "opd_coef": 1.0},
    {"advantage": "gae", "gamma": 0.97, "gae_lambda": 0.9},
    {"advantage": "gae", "gamma": 1.0, "gae_lambda": 1.0, "kl_coef": 0.1, "kl_in": "reward", "kl_type": "k3"},
    {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.0, "opd_coef": 0.1},
]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 12), max_size=5), st.sampled_from(CASES))
def test_tokens_get_what_a_loop_over_their_trained_successors_gives(seed, lengths, case) -> None:
    rng = np.random.default_rng(seed)
    sequences = [make_sequence(rng, n) for n in lengths]
    config = algorithm(**case, whiten=False)
    assert is_token_level(config)
    (found,) = token_advantages([columns_of(sequences)], config, alone)
    expected = np.concatenate([np.zeros(0), *(reference_advantages(s, config) for s in sequences)])
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-5, atol=1e-5)
    if config.advantage == "gae":
        mask = columns_of(sequences).mask
        bare = np.concatenate(
            [np.zeros(0), *(reference_advantages(s, config.model_copy(update={"opd_coef": 0.0})) for s in sequences)]
        )
        values = columns_of(sequences).values
        assert found.returns is not None and values is not None
        np.testing.assert_allclose(found.returns, np.where(mask, bare + values, 0), rtol=1e-5, atol=1e-5)
    else:
        assert found.returns is None


@pytest.mark.parametrize("chunk", [1, 2, 4, 128])
@pytest.mark.parametrize("factor", [0.0, 0.5, 0.99, 1.0])
def test_the_chunked_scan_is_the_recursion_at_every_length_around_a_chunk(chunk: int, factor: float) -> None:
    rng = np.random.default_rng(0)
    lengths = np.asarray([0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1, 3, 5 * chunk + 3, 0], np.int64)
    values = rng.normal(size=int(lengths.sum()))
    expected, start = np.zeros_like(values), 0
    for n in lengths:
        following = 0.0
        for t in range(start + n - 1, start - 1, -1):
            following = expected[t] = values[t] + factor * following
        start += n
    np.testing.assert_allclose(discounted_sums(values, lengths, factor, chunk), expected, rtol=1e-12, atol=1e-12)


def test_a_long_scan_does_not_lose_digits() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    found = discounted_sums(values, np.asarray([100_000], np.int64), 1.0)
    np.testing.assert_allclose(found, values[::-1].cumsum()[::-1], rtol=0, atol=1e-9)


def test_gae_with_lambda_one_is_the_return_less_the_value_and_with_zero_the_one_step_error() -> None:
    s = make_sequence(np.random.default_rng(1), 9, np.ones(9, bool))
    (one,) = token_advantages([columns_of([s])], algorithm(advantage="gae", whiten=False), alone)
    returns = s["rewards"].astype(np.float64)[::-1].cumsum()[::-1]
    np.testing.assert_allclose(one.advantages, returns - s["values"], atol=1e-5)
    np.testing.assert_allclose(one.returns, returns, atol=1e-5)


def test_environment_tokens_between_turns_cost_no_discount_and_their_rewards_go_to_the_turn_before() -> None:
    s = make_sequence(np.random.default_rng(2), 6, np.array([0, 1, 0, 0, 1, 0], bool))
    s["rewards"] = np.array([9, 0, 0.5, 0, 1, 0.25], np.float32)
    (found,) = token_advantages([columns_of([s])], algorithm(advantage="reinforce_pp", gamma=0.5, whiten=False), alone)
    assert found.advantages.tolist() == [0, 0.5 + 0.5 * 1.25, 0, 0, 1.25, 0]


def on_ranks(count: int, work: Callable[[int, Reduce], object]) -> list[object]:
    """`work(rank, sum over ranks)` on simulated ranks that wait for each other in every sum."""
    barrier, parts, results = threading.Barrier(count, timeout=20), [np.zeros(0)] * count, [None] * count

    def run(rank: int) -> None:
        def add(values: np.ndarray) -> np.ndarray:
            parts[rank] = values
            barrier.wait()
            total = np.sum(parts, axis=0)
            barrier.wait()
            return total

        results[rank] = work(rank, add)  # pyright: ignore[reportCallIssue, reportArgumentType]

    threads = [threading.Thread(target=run, args=(r,)) for r in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert all(r is not None for r in results), "a rank failed or hung"
    return results  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("advantage", ["reinforce_pp", "reinforce_pp_baseline", "gae"])
def test_whitening_is_over_all_ranks_and_steps_also_when_a_rank_trains_nothing(advantage: str) -> None:
    rng = np.random.default_rng(3)
    sequences = [make_sequence(rng, int(n)) for n in rng.integers(1, 30, 12)]
    config = algorithm(advantage=advantage, gamma=0.95)
    raw = algorithm(advantage=advantage, gamma=0.95, whiten=False)
    plain = np.concatenate([token_advantages([columns_of([s])], raw, alone)[0].advantages for s in sequences])
    mask = np.concatenate([s["mask"] for s in sequences])
    centred = plain.astype(np.float64)
    centred = (centred - centred[mask].mean()) / np.sqrt(centred[mask].var(ddof=1) + WHITEN_EPS) * mask
    silent = {**make_sequence(rng, 5, np.zeros(5, bool))}
    deals = [[[sequences]], [[sequences[:5], sequences[5:]]], [[sequences[:7]], [sequences[7:]], [[silent]], [[]]]]
    for deal in deals:
        found = on_ranks(
            len(deal),
            lambda rank, add, deal=deal: token_advantages([columns_of(part) for part in deal[rank]], config, add),
        )
        joined = np.concatenate([step.advantages for rank in found for step in rank])  # pyright: ignore
        np.testing.assert_allclose(joined[: len(centred)], centred, rtol=2e-6, atol=2e-6)
        assert (joined[len(centred) :] == 0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([*CASES, {"advantage": "reinforce_pp"}]))
def test_padding_and_the_order_of_sequences_change_nothing(seed: int, case: dict[str, object]) -> None:
    rng = np.random.default_rng(seed)
    sequences = [make_sequence(rng, int(n)) for n in rng.integers(1, 10, 4)]
    config = algorithm(**case)
    (found,) = token_advantages([columns_of(sequences)], config, alone)
    padded = [
        {name: np.append(column, np.zeros(3, column.dtype)) for name, column in s.items()} for s in sequences[::-1]
    ]
    (other,) = token_advantages([columns_of(padded)], config, alone)
    pieces = np.split(other.advantages, np.cumsum([len(s["mask"]) for s in padded])[:-1])
    assert all((piece[-3:] == 0).all() for piece in pieces)
    joined = np.concatenate([piece[:-3] for piece in pieces[::-1]])
    np.testing.assert_allclose(joined, found.advantages, rtol=1e-5, atol=1e-6)


def test_distillation_pushes_towards_the_teacher_in_nats_after_whitening() -> None:
    s = make_sequence(np.random.default_rng(4), 8)
    base = algorithm(advantage="reinforce_pp")
    taught = algorithm(advantage="reinforce_pp", opd_coef=2.0)
    (a,), (b,) = (token_advantages([columns_of([s])], config, alone) for config in (base, taught))
    gap = (s["policy_log_probs"] - s["teacher_log_probs"]) * s["mask"]
    np.testing.assert_allclose(b.advantages - a.advantages, -2.0 * gap, atol=1e-5)


def test_nothing_trained_anywhere_is_no_division_by_zero() -> None:
    silent = columns_of([make_sequence(np.random.default_rng(5), 6, np.zeros(6, bool))])
    for advantage in ("grpo", "reinforce_pp", "gae"):
        (found,) = token_advantages([silent], algorithm(advantage=advantage, whiten=True), alone)
        assert (found.advantages == 0).all()
    assert advantage_metrics([silent.advantages], [silent.mask]) == {}


def test_one_trained_token_whitens_to_zero() -> None:
    one = columns_of([make_sequence(np.random.default_rng(6), 3, np.array([0, 0, 1], bool))])
    (found,) = token_advantages([one], algorithm(advantage="reinforce_pp"), alone)
    assert found.advantages.tolist() == [0, 0, 0]


def test_what_the_advantages_need_follows_the_config() -> None:
    assert not is_token_level(algorithm()) and not needs_policy_log_probs(algorithm())
    assert not is_token_level(algorithm(kl_coef=0.1)) and not is_token_level(algorithm(kl_in="reward"))
    assert needs_policy_log_probs(algorithm(kl_coef=0.1, kl_in="reward"))
    assert needs_policy_log_probs(algorithm(opd_coef=0.1)) and is_token_level(algorithm(whiten=True))
    assert not is_token_level(algorithm(advantage="reinforce_pp_baseline", whiten=False))


def test_metrics_are_of_trained_tokens_over_all_ranks() -> None:
    rng = np.random.default_rng(7)
    parts = [columns_of([make_sequence(rng, 20)]) for _ in range(3)]
    values = [replace(p, advantages=rng.normal(size=20).astype(np.float32)) for p in parts]
    kept = np.concatenate([v.advantages[v.mask] for v in values]).astype(np.float64)
    found = advantage_metrics([v.advantages for v in values], [v.mask for v in values])
    expected = {"mean": kept.mean(), "std": kept.std(), "min": kept.min(), "max": kept.max()}
    assert found == {f"advantage/{name}": pytest.approx(value) for name, value in expected.items()}
