"""Statistics of a loss as flat vectors that are summed over ranks and micro-batches; `finalise` computes the metrics.

Sums are float64 and bins are fixed, so the numbers are the same in every layout. Two vectors are reduced: `sums` by SUM
and `maxima` by MAX, over the data-parallel and context-parallel ranks. `mslime.observe.names` defines each metric's
denominator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

import torch
from torch import Tensor

from mslime.algorithms.token_batch import LOSS_SETTING
from mslime.config.errors import ConfigError

SUM_NAMES = (
    "tokens", "total", "policy", "kl", "entropy", "clipped_below", "clipped_above", "ppo_kl",
    "mismatch_tokens", "mismatch_k1", "mismatch_k3",
    "weight", "weight_squared", "weight_clipped", "weight_masked", "correction_tokens", "sequences", "sequences_masked",
    "nll", "value_tokens", "value", "value_clipped", "return", "return_squared", "residual", "residual_squared",
    "kl_tokens", "entropy_tokens", "entropy_of_tokens", "policy_tokens", "user_reports",
)  # fmt: skip
MAX_NAMES = ("mismatch_abs", "ratio_above")

BINS = 256
FIRST_EDGE, LAST_EDGE = 1e-7, 20.0
"""Bins of |log ratio|: bin 0 holds all below FIRST_EDGE, the others are log-spaced up to LAST_EDGE (7.8% wide)."""

AGES = 9
"""Buckets by age in versions: 0 to 7, and everything older."""
POSITIONS = (0, 64, 256, 1024, 4096, 16384)
"""First positions of the buckets by position after a response's first trained token."""

USER_METRICS = 16
"""Most metrics that a user's policy loss may report."""

_BLOCKS = {
    "mismatch_bins": BINS,
    "ratio_bins": 2 * BINS,  # of signed log r, ascending
    "age_tokens": AGES,
    "age_k3": AGES,
    "age_clipped": AGES,
    "age_entropy": AGES,
    "position_tokens": len(POSITIONS),
    "position_k3": len(POSITIONS),
    "position_clipped": len(POSITIONS),
    "position_entropy": len(POSITIONS),
    "user": USER_METRICS,
}
_STARTS = dict(zip(_BLOCKS, itertools.accumulate(_BLOCKS.values(), initial=len(SUM_NAMES)), strict=False))
_LENGTH = len(SUM_NAMES) + sum(_BLOCKS.values())
_LOG_STEP = math.log(LAST_EDGE / FIRST_EDGE) / (BINS - 1)
_EDGES = [FIRST_EDGE * math.exp(index * _LOG_STEP) for index in range(BINS)]
"""Upper edge of each bin of |log ratio|."""


def other_metrics(names: tuple[str, ...], others: tuple[str, ...]) -> ConfigError:
    """Error for a user's loss that reports different metrics for different tokens."""
    return ConfigError(
        LOSS_SETTING, f"{', '.join(names)} and {', '.join(others)}", "reports different metrics by micro-batch",
        "return the same metrics in every call, 0 for none",
    )  # fmt: skip


@dataclass
class LossStatistics:
    """Accumulated statistics of some rows.

    Attributes:
        sums: [len(SUM_NAMES) + the blocks' bins] float64; add over micro-batches and ranks.
        maxima: [len(MAX_NAMES)] float64, at least 0; take the maximum over micro-batches and ranks.
        user_names: metrics of a user's loss, in the order of their sums. A rank without a loss (not the last pipeline
            stage) has none: it gets them from a rank with one (`reports_user_metrics`).
    """

    sums: Tensor
    maxima: Tensor
    user_names: tuple[str, ...] = ()

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> LossStatistics:
        """Statistics of no rows."""
        return cls(
            torch.zeros(_LENGTH, dtype=torch.float64, device=device),
            torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=device),
        )

    def merge(self, other: LossStatistics) -> LossStatistics:
        """Statistics of both sets of rows."""
        names = self.user_names or other.user_names
        if other.user_names and names != other.user_names:
            raise other_metrics(names, other.user_names)
        return LossStatistics(self.sums + other.sums, torch.maximum(self.maxima, other.maxima), names)

    def add(self, name: str, value: Tensor) -> None:
        """Add the 0-d `value` to the sum `name`."""
        self.sums[SUM_NAMES.index(name)] += value.detach().double()

    def add_mismatch_histogram(self, abs_log_ratio: Tensor, mask: Tensor) -> None:
        """Count values of |log rho|, [n], 0 outside the mask [n] bool, and keep their largest."""
        self._count("mismatch_bins", _bins(abs_log_ratio.double()), mask)
        self._largest("mismatch_abs", abs_log_ratio)

    def add_ratio_histogram(self, log_ratio: Tensor, mask: Tensor) -> None:
        """Count values of log r, [n], 0 outside the mask [n] bool, and keep their largest."""
        position = _bins(log_ratio.double().abs())
        self._count("ratio_bins", torch.where(log_ratio < 0, BINS - 1 - position, BINS + position), mask)
        self._largest("ratio_above", log_ratio)

    def add_by(self, by: Literal["age", "position"], values: Tensor, of_tokens: dict[str, Tensor]) -> None:
        """Sums of each column [n], `tokens`, `k3`, `clipped` or `entropy`, by the tokens' ages, [n] int64, or by their
        positions after the response's first trained token. The columns are 0 for tokens that are not trained.
        """
        if by == "age":
            bucket = values.clamp(0, AGES - 1)
        else:
            bucket = torch.searchsorted(_first_positions(values.device), values, right=True) - 1
        for name, column in of_tokens.items():
            self._count(f"{by}_{name}", bucket, column)

    def add_user_metrics(self, of_tokens: Mapping[str, Tensor]) -> None:
        """Add sums of [n] numbers by name, from a user's loss; they are 0 for tokens that are not trained.

        Raises:
            ConfigError: there are more than USER_METRICS.
        """
        if len(of_tokens) > USER_METRICS:
            raise ConfigError(LOSS_SETTING, len(of_tokens), f"reports more than {USER_METRICS} metrics",
                              "report fewer")  # fmt: skip
        self.user_names = tuple(sorted(of_tokens))
        for index, name in enumerate(self.user_names):
            self.sums[_STARTS["user"] + index] += of_tokens[name].detach().double().sum()
        if of_tokens:
            self.add("user_reports", torch.ones(()))

    @property
    def reports_user_metrics(self) -> bool:
        """Whether any of the summed ranks has `user_names`. Equal on all of them."""
        return bool(self.sums[SUM_NAMES.index("user_reports")] > 0)

    def _count(self, block: str, index: Tensor, values: Tensor) -> None:
        """Add `values` [n] to the bins `index` [n] of a block."""
        self.sums.index_add_(0, _STARTS[block] + index, values.detach().double())

    def _largest(self, name: str, values: Tensor) -> None:
        if values.numel():
            index = MAX_NAMES.index(name)
            self.maxima[index] = torch.maximum(self.maxima[index], values.detach().max().double())


@cache
def _first_positions(device: torch.device) -> Tensor:
    """POSITIONS on the device, once: a copy from the host waits for all work queued before it on a GPU's stream."""
    return torch.tensor(POSITIONS, device=device)


def _bins(size: Tensor) -> Tensor:
    """Bin of each |log ratio|, [n] float64 -> [n] int64; the last one for NaN and infinity."""
    position = torch.log(size / FIRST_EDGE) / _LOG_STEP + 1
    return position.floor().nan_to_num(nan=BINS - 1).clamp(0, BINS - 1).long()


def finalise(statistics: LossStatistics) -> dict[str, float]:
    """Metrics, under their names in `metrics.jsonl`, from statistics summed over the whole step.

    A quantity without rows (no reference policy, no behaviour log-probs) is left out rather than reported as zero.
    """
    values = _named_sums(statistics)
    out: dict[str, float] = {"loss/total": values["total"], "loss/tokens": values["tokens"]}
    if values["policy_tokens"]:
        out |= _policy(values, statistics)
    elif values["value_tokens"]:
        out |= _value(values)
    elif values["tokens"]:
        out["loss/nll"] = values["nll"]
    if values["kl_tokens"]:
        out["loss/kl"] = values["kl"]
    if values["entropy_tokens"]:
        out["loss/entropy"] = values["entropy"]
        out["entropy/mean"] = values["entropy_of_tokens"] / values["entropy_tokens"]
    if values["policy_tokens"]:
        sums = zip(statistics.user_names, _block(statistics, "user"), strict=False)
        out |= {f"user/{name}": total / values["policy_tokens"] for name, total in sums}
    return out | _mismatch(values, statistics) | _breakdowns(values, statistics) | _correction(values)


def mean_weight(statistics: LossStatistics) -> float:
    """Mean correction weight over the step, the divisor for `normalise` (1 when there is none, or all are masked)."""
    values = _named_sums(statistics)
    return values["weight"] / values["correction_tokens"] if values["weight"] > 0 else 1.0


def _floats(values: Tensor) -> list[float]:
    return cast("list[float]", values.tolist())  # pyright: ignore[reportUnknownMemberType]


def _named_sums(statistics: LossStatistics) -> dict[str, float]:
    return dict[str, float](zip(SUM_NAMES, _floats(statistics.sums), strict=False))


def _block(statistics: LossStatistics, name: str) -> list[float]:
    start = _STARTS[name]
    return _floats(statistics.sums[start : start + _BLOCKS[name]])


def _policy(values: dict[str, float], statistics: LossStatistics) -> dict[str, float]:
    count, counts = values["policy_tokens"], _block(statistics, "ratio_bins")
    largest = statistics.maxima[MAX_NAMES.index("ratio_above")].item()
    edges = [-edge for edge in reversed([0.0, *_EDGES[:-1]])] + _EDGES
    out = {
        "loss/policy": values["policy"],
        "loss/clip_fraction": (values["clipped_below"] + values["clipped_above"]) / count,
        "loss/clip_fraction_below": values["clipped_below"] / count,
        "loss/clip_fraction_above": values["clipped_above"] / count,
        "loss/ppo_kl": values["ppo_kl"] / count,
    }
    for percent in (1, 50, 99):
        log_ratio = min(_quantile(counts, edges, percent / 100), largest)
        out[f"loss/ratio_p{percent:02}"] = math.exp(min(log_ratio, LAST_EDGE))
    return out


def _value(values: dict[str, float]) -> dict[str, float]:
    """Metrics of the critic; explained variance is 1 - Var(return - value) / Var(return) over the trained tokens."""
    count = values["value_tokens"]
    spread = values["return_squared"] / count - (values["return"] / count) ** 2
    left = values["residual_squared"] / count - (values["residual"] / count) ** 2
    return {
        "loss/value": values["value"],
        "loss/value_clip_fraction": values["value_clipped"] / count,
        "loss/explained_variance": 1.0 - left / spread if spread > 0 else 0.0,
    }


def _mismatch(values: dict[str, float], statistics: LossStatistics) -> dict[str, float]:
    count = values["mismatch_tokens"]
    if not count:
        return {}
    largest = statistics.maxima[MAX_NAMES.index("mismatch_abs")].item()
    p99 = min(_quantile(_block(statistics, "mismatch_bins"), _EDGES, 0.99), largest)
    return {
        "mismatch/kl": values["mismatch_k3"] / count,
        "mismatch/kl_k1": values["mismatch_k1"] / count,
        "mismatch/abs_max": largest,
        "mismatch/ratio_p99": math.exp(min(p99, LAST_EDGE)),
    }


def _breakdowns(values: dict[str, float], statistics: LossStatistics) -> dict[str, float]:
    """Metrics by age and by position: number of tokens, and means over them. A bucket without a token is left out."""
    out: dict[str, float] = {}
    for by, labels in (("age", range(AGES)), ("position", POSITIONS)):
        tokens, k3, clipped, entropy = (
            _block(statistics, f"{by}_{name}") for name in ("tokens", "k3", "clipped", "entropy")
        )
        for index, label in enumerate(labels):
            n = tokens[index]
            if n:
                out[f"loss/tokens_{by}_{label}"] = n
                out[f"mismatch/kl_{by}_{label}"] = k3[index] / n
                out[f"loss/clip_fraction_{by}_{label}"] = clipped[index] / n
            if n and values["entropy_tokens"]:
                out[f"entropy/{by}_{label}"] = entropy[index] / n
    return out


def _correction(values: dict[str, float]) -> dict[str, float]:
    count = values["correction_tokens"]
    if not count:
        return {}
    squared = values["weight_squared"]
    return {
        "loss/sequences": values["sequences"],
        "correction/mean_weight": values["weight"] / count,
        "correction/clipped_fraction": values["weight_clipped"] / count,
        "correction/masked_fraction": values["weight_masked"] / count,
        "correction/masked_sequences": values["sequences_masked"] / values["sequences"],
        "correction/effective_share": values["weight"] ** 2 / (count * squared) if squared else 0.0,
    }


def _quantile(counts: list[float], edges: list[float], q: float) -> float:
    """The q-quantile of a histogram: the upper edge of its bin."""
    target, seen = q * sum(counts), 0.0
    for count, edge in zip(counts, edges, strict=True):
        seen += count
        if count and seen >= target:
            return edge
    return edges[-1]
