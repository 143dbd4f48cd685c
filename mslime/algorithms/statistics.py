"""What a loss reports, as flat vectors that ranks and micro-batches add up and `finalise` turns into numbers.

Sums are float64 and the histogram's bins are fixed, so that the numbers are the same in every layout. Two vectors
travel: `sums` under SUM and `maxima` under MAX, over the data-parallel and context-parallel ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

SUM_NAMES = (
    "tokens",
    "total",
    "policy",
    "kl",
    "entropy",
    "clipped_ratio",
    "ppo_kl",
    "mismatch_tokens",
    "mismatch_k1",
    "mismatch_k3",
    "weight",
    "weight_squared",
    "weight_clipped",
    "weight_masked",
    "correction_tokens",
    "nll",
    "kl_tokens",
    "entropy_tokens",
    "policy_tokens",
)
MAX_NAMES = ("mismatch_abs",)

BINS = 256
FIRST_EDGE, LAST_EDGE = 1e-7, 20.0
"""Bins of |log rho|: bin 0 holds everything below FIRST_EDGE, the others are log-spaced up to LAST_EDGE (7.8% wide)."""

_LOG_STEP = math.log(LAST_EDGE / FIRST_EDGE) / (BINS - 1)


@dataclass
class LossStatistics:
    """Accumulated statistics of some rows.

    Attributes:
        sums: [len(SUM_NAMES) + BINS] float64; add over micro-batches and ranks.
        maxima: [len(MAX_NAMES)] float64; take the maximum over micro-batches and ranks.
    """

    sums: Tensor
    maxima: Tensor

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> LossStatistics:
        """Statistics of no rows."""
        return cls(
            torch.zeros(len(SUM_NAMES) + BINS, dtype=torch.float64, device=device),
            torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=device),
        )

    def merge(self, other: LossStatistics) -> LossStatistics:
        """Statistics of both sets of rows."""
        return LossStatistics(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def add(self, name: str, value: Tensor) -> None:
        """Add the 0-d `value` to the sum `name`."""
        self.sums[SUM_NAMES.index(name)] += value.detach().double()

    def add_mismatch_histogram(self, abs_log_ratio: Tensor) -> None:
        """Count [n] values of |log rho|, and keep their largest."""
        if abs_log_ratio.numel() == 0:
            return
        self.maxima[MAX_NAMES.index("mismatch_abs")] = torch.maximum(self.maxima[0], abs_log_ratio.max().double())
        position = torch.log(abs_log_ratio.double() / FIRST_EDGE) / _LOG_STEP + 1
        index = position.floor().clamp(0, BINS - 1).long()
        self.sums[len(SUM_NAMES) :].index_add_(0, index, torch.ones_like(index, dtype=torch.float64))


def finalise(statistics: LossStatistics) -> dict[str, float]:
    """Reported numbers, under the stable names of `metrics.jsonl`, from statistics summed over the whole step.

    A quantity without rows (no reference policy, no behaviour log-probs) is left out rather than reported as zero.
    """
    values = _named_sums(statistics)
    out: dict[str, float] = {"loss/total": values["total"], "loss/tokens": values["tokens"]}
    if values["policy_tokens"]:
        out["loss/policy"] = values["policy"]
        out["loss/clip_fraction"] = values["clipped_ratio"] / values["policy_tokens"]
        out["loss/ppo_kl"] = values["ppo_kl"] / values["policy_tokens"]
    elif values["tokens"]:
        out["loss/nll"] = values["nll"]
    if values["kl_tokens"]:
        out["loss/kl"] = values["kl"]
    if values["entropy_tokens"]:
        out["loss/entropy"] = values["entropy"]
    return out | _mismatch(values, statistics) | _correction(values)


def _floats(values: Tensor) -> list[float]:
    return cast("list[float]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def _named_sums(statistics: LossStatistics) -> dict[str, float]:
    return dict[str, float](zip(SUM_NAMES, _floats(statistics.sums), strict=False))


def _mismatch(values: dict[str, float], statistics: LossStatistics) -> dict[str, float]:
    count = values["mismatch_tokens"]
    if not count:
        return {}
    largest = statistics.maxima[MAX_NAMES.index("mismatch_abs")].item()
    p99 = _quantile(_floats(statistics.sums[len(SUM_NAMES) :]), 0.99, largest)
    return {
        "mismatch/kl": values["mismatch_k3"] / count,
        "mismatch/kl_k1": values["mismatch_k1"] / count,
        "mismatch/abs_max": largest,
        "mismatch/ratio_p99": math.exp(min(p99, LAST_EDGE)),
    }


def _correction(values: dict[str, float]) -> dict[str, float]:
    count = values["correction_tokens"]
    if not count:
        return {}
    squared = values["weight_squared"]
    return {
        "correction/mean_weight": values["weight"] / count,
        "correction/clipped_fraction": values["weight_clipped"] / count,
        "correction/masked_fraction": values["weight_masked"] / count,
        "correction/effective_share": values["weight"] ** 2 / (count * squared) if squared else 0.0,
    }


def mean_weight(statistics: LossStatistics) -> float:
    """Mean correction weight over the step, what `normalise` divides by (1 when there is none, or all are masked)."""
    values = _named_sums(statistics)
    return values["weight"] / values["correction_tokens"] if values["weight"] > 0 else 1.0


def _quantile(counts: list[float], q: float, largest: float) -> float:
    """The q-quantile of |log rho| from the histogram: the upper edge of its bin, never beyond the largest value."""
    target, seen = q * sum(counts), 0.0
    for index, count in enumerate(counts):
        seen += count
        if seen >= target:
            return min(FIRST_EDGE * math.exp(index * _LOG_STEP), largest)
    return largest
