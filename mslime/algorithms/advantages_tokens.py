"""Advantages of tokens, from log-probs, values or sums over all ranks. Calls no collective directly.

The trainer calls `token_advantages` once per rollout, after its log-prob passes and before the first gradient. Time
counts trained tokens only: an environment's tokens between two turns cause no discount and have no reward. It ends with
each sequence, or continues through the other sequences of the rollout (`algorithm.credit: turns`), which may lie on
other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mslime.config.algorithm import AlgorithmConfig
from mslime.config.base import KLType

WHITEN_EPS = 1e-8
"""Added to the variance before the square root."""

Reduce = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Sums (or maximises) a vector over all data-parallel ranks. A collective: every rank calls it equally often."""


@dataclass(frozen=True)
class TokenColumns:
    """One data-parallel rank's part of one optimizer step: N tokens of B sequences laid end to end.

    Attributes:
        lengths: [B] int64, sum N.
        mask: [N] bool, trained tokens.
        advantages: [N] float32, of the token's rollout; 0 if the advantage comes from token rewards.
        rewards: [N] float32, each on the token that earned it; for reinforce_pp and gae.
        policy_log_probs: [N] float32, log pi_old; for a KL in the reward and for distillation.
        reference_log_probs, teacher_log_probs: [N] float32, likewise.
        values: [N] float32, the critic's value of the state in which token t was sampled; for gae.
        pieces: [P, 3] int64 (length, number, number of the next piece or -1): the sequences, split where the time of
            their rollout continues in another one. Numbers of a rollout's pieces follow its time; each piece has a
            trained token. None: time ends with each sequence.
        num_pieces: of all ranks and steps.
    """

    lengths: NDArray[np.int64]
    mask: NDArray[np.bool_]
    advantages: NDArray[np.float32]
    rewards: NDArray[np.float32] | None = None
    policy_log_probs: NDArray[np.float32] | None = None
    reference_log_probs: NDArray[np.float32] | None = None
    teacher_log_probs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    pieces: NDArray[np.int64] | None = None
    num_pieces: int = 0


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages and returns of tokens, 0 outside the mask.

    Attributes:
        advantages: [N] float32.
        returns: [N] float32, the critic's targets; None without gae.
    """

    advantages: NDArray[np.float32]
    returns: NDArray[np.float32] | None = None


def is_token_level(algorithm: AlgorithmConfig) -> bool:
    """Whether advantages depend on tokens, and `token_advantages` must be called."""
    token_rewards = algorithm.advantage in ("reinforce_pp", "gae")
    return token_rewards or algorithm.whitens or _kl_in_reward(algorithm) or algorithm.opd_coef > 0


def needs_policy_log_probs(algorithm: AlgorithmConfig) -> bool:
    """Whether `token_advantages` compares the policy with the reference or the teacher."""
    return _kl_in_reward(algorithm) or algorithm.opd_coef > 0


def token_advantages(
    steps: Sequence[TokenColumns], algorithm: AlgorithmConfig, sum_over_ranks: Reduce
) -> list[TokenAdvantages]:
    """Advantages of all optimizer steps of a rollout, in this order:

    1. token rewards r_t, less kl_coef times the KL to the reference when `kl_in` is reward;
    2. gae: `gae`; reinforce_pp: sum of gamma^k r_{t+k} (arXiv 2501.03262); otherwise the rollout's advantage, plus the
       (undiscounted) KL terms from t on, which is the return of an outcome reward on the last token;
    3. whitening over the trained tokens of all ranks and steps, if `whiten`;
    4. less opd_coef * (log pi_old - log teacher) (on-policy distillation), in nats whatever the whitening did.
    """
    found = [_one_step(columns, algorithm, sum_over_ranks) for columns in steps]
    masks = [columns.mask for columns in steps]
    raw = [advantages for advantages, _ in found]
    if algorithm.whitens:
        raw = whiten(raw, masks, sum_over_ranks)
    result: list[TokenAdvantages] = []
    for columns, advantages, (_, returns) in zip(steps, raw, found, strict=True):
        if algorithm.opd_coef != 0:
            advantages = advantages - _kl_cost(columns, columns.teacher_log_probs, algorithm.opd_coef, "k1")
        result.append(TokenAdvantages(advantages.astype(np.float32), returns))
    return result


def _one_step(
    columns: TokenColumns, algorithm: AlgorithmConfig, add: Reduce
) -> tuple[NDArray[np.float64], NDArray[np.float32] | None]:
    """(advantages [N] before whitening, returns)."""
    given = np.where(columns.mask, columns.advantages, 0.0).astype(np.float64)
    penalty = None
    if _kl_in_reward(algorithm):
        penalty = _kl_cost(columns, columns.reference_log_probs, algorithm.kl_coef, algorithm.kl_type)
    if algorithm.advantage not in ("reinforce_pp", "gae"):
        return (given if penalty is None else given - discounted_returns(penalty, columns, 1.0, add)), None
    assert columns.rewards is not None, f"{algorithm.advantage} needs token rewards"
    rewards = columns.rewards.astype(np.float64)
    rewards = rewards if penalty is None else rewards - penalty
    if algorithm.advantage == "reinforce_pp":
        return discounted_returns(rewards, columns, algorithm.gamma, add), None
    assert columns.values is not None, "gae needs the critic's values"
    advantages = gae(rewards, columns.values, columns, algorithm.gamma, algorithm.gae_lambda, add)
    return advantages, np.where(columns.mask, advantages + columns.values, 0.0).astype(np.float32)


def discounted_returns(
    rewards: NDArray[np.floating], columns: TokenColumns, gamma: float, sum_over_ranks: Reduce = np.asarray
) -> NDArray[np.float64]:
    """sum over k >= 0 of gamma^k r_{t+k}, [N] float64, over trained tokens; 0 elsewhere. A collective with pieces."""
    trained, counts = _trained(columns)
    out = np.zeros(len(columns.mask))
    out[trained] = _sums_in_time(_credited(rewards, columns, trained), counts, gamma, columns, sum_over_ranks)
    return out


def gae(
    rewards: NDArray[np.floating],
    values: NDArray[np.floating],
    columns: TokenColumns,
    gamma: float,
    lam: float,
    sum_over_ranks: Reduce = np.asarray,
) -> NDArray[np.float64]:
    """Generalised advantage estimates (arXiv 1506.02438, eq. 16), [N] float64, over trained tokens; 0 elsewhere.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t + 1 is the next trained token of
    the sequence, or of the rollout where it has pieces, and V is 0 after the last one. Two collectives with pieces.
    """
    trained, counts = _trained(columns)
    value = values[trained].astype(np.float64)
    following = np.append(value[1:], 0.0)
    last = np.cumsum(counts)[counts > 0] - 1
    following[last] = 0.0
    if columns.pieces is not None:
        following[last] = _following(_firsts(value, counts), columns, sum_over_ranks)
    deltas = _credited(rewards, columns, trained) + gamma * following - value
    out = np.zeros(len(columns.mask))
    out[trained] = _sums_in_time(deltas, counts, gamma * lam, columns, sum_over_ranks)
    return out


def _sums_in_time(
    values: NDArray[np.float64], counts: NDArray[np.int64], factor: float, columns: TokenColumns, add: Reduce
) -> NDArray[np.float64]:
    """`discounted_sums` of the trained tokens [M], continued through the pieces of a rollout if it has any."""
    sums = discounted_sums(values, counts, factor)
    if columns.pieces is None:
        return sums
    decay = np.power(factor, counts.astype(np.float64))
    own = np.zeros((2, columns.num_pieces))
    own[:, columns.pieces[:, 1]] = _firsts(sums, counts), np.where(columns.pieces[:, 2] >= 0, decay, 0.0)
    first, decay_on = add(own.reshape(-1)).reshape(own.shape)
    for number in range(columns.num_pieces - 2, -1, -1):  # the next piece in time has the next number
        first[number] += decay_on[number] * first[number + 1]
    later = np.where(columns.pieces[:, 2] >= 0, first[columns.pieces[:, 2]], 0.0)
    to_end = np.repeat(np.cumsum(counts), counts) - np.arange(len(values))
    return sums + np.power(factor, to_end.astype(np.float64)) * np.repeat(later, counts)


def _following(firsts: NDArray[np.float64], columns: TokenColumns, add: Reduce) -> NDArray[np.float64]:
    """[P] `firsts` [P] of the next pieces in time, on any rank; 0 for a last piece."""
    assert columns.pieces is not None
    every = np.zeros(columns.num_pieces)
    every[columns.pieces[:, 1]] = firsts
    every = add(every)
    return np.where(columns.pieces[:, 2] >= 0, every[columns.pieces[:, 2]], 0.0)


def _firsts(values: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """[P] the first of each piece's `counts` in `values` [M]."""
    return values[np.cumsum(counts) - counts]


def discounted_sums(
    values: NDArray[np.float64], lengths: NDArray[np.int64], factor: float, chunk: int = 128
) -> NDArray[np.float64]:
    """S_t = x_t + factor * S_{t+1} within each of the sequences of `lengths` that lie end to end in `values` [M]: [M].

    A scan in chunks: a matrix product inside all chunks at once, then one carry from chunk to chunk, over all sequences
    at once. The loop runs longest sequence / chunk times.
    """
    assert len(values) == int(lengths.sum()), (len(values), lengths)
    rows_of = -(-lengths // chunk)
    first_row = np.cumsum(rows_of) - rows_of
    ends = np.cumsum(lengths)
    from_end = np.repeat(ends, lengths) - 1 - np.arange(len(values))
    row = np.repeat(first_row, lengths) + from_end // chunk
    column = from_end % chunk
    grid = np.zeros((int(rows_of.sum()), chunk))
    grid[row, column] = values
    powers = factor ** np.arange(chunk + 1, dtype=np.float64)
    apart = np.subtract.outer(np.arange(chunk), np.arange(chunk))
    sums = grid @ np.where(apart >= 0, powers[np.abs(apart)], 0.0).T
    carry = np.zeros(len(grid))
    for k in range(1, int(rows_of.max(initial=0))):
        here = first_row[rows_of > k] + k
        carry[here] = sums[here - 1, -1] + powers[chunk] * carry[here - 1]
    return (sums + carry[:, None] * powers[1:])[row, column]


def whiten(
    advantages: Sequence[NDArray[np.float64]], masks: Sequence[NDArray[np.bool_]], sum_over_ranks: Reduce
) -> list[NDArray[np.float64]]:
    """(A - mean) / sqrt(variance + WHITEN_EPS) over all trained tokens of all parts and ranks; 0 outside the masks.

    The variance is the sample's (n - 1). Two collectives, whether or not this rank has a trained token.
    """
    kept = [a[m] for a, m in zip(advantages, masks, strict=True)]
    count, total = sum_over_ranks(
        np.asarray([sum(len(k) for k in kept), sum(float(k.sum()) for k in kept)], np.float64)
    )
    mean = total / max(count, 1.0)
    squares = sum_over_ranks(np.asarray([sum(float(((k - mean) ** 2).sum()) for k in kept)], np.float64))
    scale = 1.0 / np.sqrt(squares[0] / max(count - 1.0, 1.0) + WHITEN_EPS)
    return [np.where(m, (a - mean) * scale, 0.0) for a, m in zip(advantages, masks, strict=True)]


def advantage_metrics(
    advantages: Sequence[NDArray[np.floating]],
    masks: Sequence[NDArray[np.bool_]],
    sum_over_ranks: Reduce = np.asarray,
    max_over_ranks: Reduce = np.asarray,
) -> dict[str, float]:
    """`advantage/*` over the trained tokens of all parts and ranks; empty when there are none. Three collectives."""
    kept = np.concatenate([np.zeros(0), *(a[m] for a, m in zip(advantages, masks, strict=True))]).astype(np.float64)
    count, total = sum_over_ranks(np.asarray([len(kept), kept.sum()]))
    mean = total / max(count, 1.0)
    squares = sum_over_ranks(np.asarray([((kept - mean) ** 2).sum()]))
    extremes = max_over_ranks(np.asarray([kept.max(initial=-np.inf), (-kept).max(initial=-np.inf)]))
    if not count:
        return {}
    return {
        "advantage/mean": float(mean),
        "advantage/std": float(np.sqrt(squares[0] / count)),
        "advantage/min": float(-extremes[1]),
        "advantage/max": float(extremes[0]),
    }


def _kl_in_reward(algorithm: AlgorithmConfig) -> bool:
    return algorithm.kl_in == "reward" and algorithm.kl_coef > 0


def _kl_cost(
    columns: TokenColumns, other: NDArray[np.float32] | None, coef: float, kind: KLType
) -> NDArray[np.float64]:
    """coef times the estimate of KL(pi_old || other) of each trained token, [N].

    Imports torch only here: processes that shard rollouts also import this module.
    """
    import torch

    from mslime.algorithms.token_batch import kl_estimate

    assert columns.policy_log_probs is not None and other is not None, "needs both log-probs"
    p, q = (torch.as_tensor(x, dtype=torch.float64) for x in (columns.policy_log_probs, other))
    return coef * np.where(columns.mask, kl_estimate(p, q, kind).numpy(), 0.0)


def _trained(columns: TokenColumns) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(indices of the M trained tokens, number of them in each of the B sequences or P pieces)."""
    trained = np.flatnonzero(columns.mask)
    lengths = columns.lengths if columns.pieces is None else columns.pieces[:, 0]
    owner = np.repeat(np.arange(len(lengths)), lengths)
    counts = np.bincount(owner[trained], minlength=len(lengths))
    assert columns.pieces is None or counts.all(), "a piece without a trained token has no time"
    return trained, counts


def _credited(rewards: NDArray[np.floating], columns: TokenColumns, trained: NDArray[np.int64]) -> NDArray[np.float64]:
    """[M] rewards of the trained tokens. A reward on another token moves to the sequence's last trained one before it;
    without such a token it is left out.
    """
    lying = np.flatnonzero(rewards)
    owner = np.repeat(np.arange(len(columns.lengths)), columns.lengths)
    earner = np.searchsorted(trained, lying, side="right") - 1
    earned = (earner >= 0) & (owner[trained[np.maximum(earner, 0)]] == owner[lying]) if len(trained) else earner >= 0
    out = np.zeros(len(trained))
    np.add.at(out, earner[earned], rewards[lying[earned]])
    return out
