"""The charts of the report by section, in the order of a reader's questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mslime.observe.names import REST
from mslime_plugins.report.charts import AMBER, BLUE, GREEN, GREY, PINK, RED, SKY, VIOLET, Chart, Series

DERIVED = (REST, "idle/engines", "idle/trainers")
"""Names that the report computes itself, from the step's parts and from the timeline."""

_LEARNING = (
    Chart(
        "reward", "Reward", "Mean over the responses that a step trained on.", "reward",
        series=(Series("reward/mean", "mean", BLUE, smooth=True),), y_min=None, always=True,
    ),
    Chart(
        "accuracy", "Held-out accuracy", "Prompts that are never trained on.", "share of responses",
        each={"eval/{set}/accuracy": "{set}", "eval/{set}/pass@{k}": "{set} pass@{k}"}, without=r".*/pass@1",
        y_max=1.0, always=True,
    ),
    Chart(
        "held-out-loss", "Held-out loss", "Negative log-likelihood of rows that are never trained on.",
        "nats per token", each={"eval/{set}/nll": "{set}"}, y_min=None,
    ),
    Chart(
        "reward-sources", "Reward by data source", "Mean over the rollouts of each source.", "reward",
        each={"reward/source/{source}/mean": "{source}"}, y_min=None, repeats="reward",
    ),
    Chart(
        "groups", "Groups without a signal",
        "Share of groups whose rollouts all have the same reward, and the deviation within a group.", "share, reward",
        series=(
            Series("reward/zero_variance_share", "groups of equal rewards", RED, smooth=True),
            Series("reward/group_std", "standard deviation within a group", BLUE, smooth=True),
        ),
    ),
    Chart(
        "advantage", "Advantage", "Over trained tokens, as used by the loss; lowest to highest shaded.", "advantage",
        series=(
            Series("advantage/mean", "mean", BLUE, band=("advantage/min", "advantage/max")),
            Series("advantage/std", "standard deviation", AMBER),
        ),
        y_min=None,
    ),
    Chart(
        "length", "Response length", "Mean, with the 10th to 90th percentile shaded.", "tokens",
        series=(
            Series(
                "rollout/response_len_mean", "mean", BLUE, band=("rollout/response_len_p10", "rollout/response_len_p90")
            ),
            Series("rollout/response_len_max", "longest", GREY, dashed=True),
        ),
    ),
    Chart(
        "loss", "Loss", "The minimised loss. In reinforcement learning its level means little.", "loss",
        series=(
            Series("loss/total", "total", BLUE, smooth=True),
            Series("loss/nll", "negative log-likelihood", RED),
        ),
        y_min=None, always=True,
    ),
    Chart(
        "grad-norm", "Gradient norm", "Before clipping.", "norm",
        series=(Series("grad_norm", "gradient norm", BLUE, smooth=True),), log=True,
    ),
)  # fmt: skip

_POLICY = (
    Chart(
        "entropy", "Entropy", "Of the next-token distribution; a collapse to zero ends exploration.", "nats",
        series=(
            Series("entropy/mean", "mean over tokens", GREEN),
            Series("loss/entropy", "as the loss weighs tokens", GREY, dashed=True),
        ),
    ),
    Chart(
        "entropy-position", "Entropy by position", "By range of positions in the response.",
        "nats", each={"entropy/position_{start}": "from {start}"}, repeats="entropy",
    ),
    Chart(
        "clip", "Clipped tokens", "Share of trained tokens that the loss's trust region bounded, by side.",
        "share of tokens",
        series=(
            Series("loss/clip_fraction_below", "below: less likely than before", RED),
            Series("loss/clip_fraction_above", "above: more likely than before", BLUE),
        ),
    ),
    Chart(
        "clip-age", "Clipped tokens by age", "Age in weight versions; 8 is 8 and older.", "share of tokens",
        each={"loss/clip_fraction_age_{age}": "age {age}"}, repeats="clip",
    ),
    Chart(
        "clip-position", "Clipped tokens by position", "By range of positions in the response.",
        "share of tokens", each={"loss/clip_fraction_position_{start}": "from {start}"}, repeats="clip",
    ),
    Chart(
        "ratio", "Ratio", "Updated policy over the one that the loss compares it with; 1st to 99th percentile shaded.",
        "ratio",
        series=(Series("loss/ratio_p50", "median", BLUE, band=("loss/ratio_p01", "loss/ratio_p99")),),
        y_min=None,
    ),
    Chart(
        "kl", "KL", "To the reference policy, and of this step's update.", "nats",
        series=(
            Series("loss/kl", "to the reference", PINK, smooth=True),
            Series("loss/ppo_kl", "of the update, k3 estimate", SKY, smooth=True),
        ),
        y_min=None, log=True,
    ),
)  # fmt: skip

_OFF_POLICY = (
    Chart(
        "mismatch", "Mismatch KL", "KL(sampler || trainer) per token: engine differences and staleness together.",
        "nats",
        series=(
            Series("mismatch/kl", "KL, k3 estimate", RED, smooth=True),
            Series("mismatch/abs_max", "largest difference of log-probs", GREY, dashed=True),
        ),
        log=True,
    ),
    Chart(
        "mismatch-k1", "Mismatch KL, signed", "The k1 estimate: unbiased, so it may dip below zero, and noisier.",
        "nats", series=(Series("mismatch/kl_k1", "KL, k1 estimate", RED, smooth=True),), y_min=None,
    ),
    Chart(
        "mismatch-age", "Mismatch KL by age", "Age in weight versions; 8 is 8 and older.", "nats",
        each={"mismatch/kl_age_{age}": "age {age}"}, log=True, repeats="mismatch",
    ),
    Chart(
        "mismatch-position", "Mismatch KL by position", "By range of positions in the response.",
        "nats", each={"mismatch/kl_position_{start}": "from {start}"}, log=True, repeats="mismatch",
    ),
    Chart(
        "mismatch-ratio", "Mismatch ratio", "99th percentile of trainer over sampler, or its inverse.", "ratio",
        series=(Series("mismatch/ratio_p99", "99th percentile", AMBER),), y_min=1.0, log=True,
    ),
    Chart(
        "staleness", "Staleness", "Weight versions between sampling a token and training on it.", "versions",
        series=(Series("staleness/mean", "mean", BLUE), Series("staleness/max", "oldest", RED, dashed=True)),
    ),
    Chart(
        "correction", "Corrected tokens", "Share of tokens and sequences that a correction bounded or masked.", "share",
        series=(
            Series("correction/clipped_fraction", "tokens: weight bounded", BLUE),
            Series("correction/masked_fraction", "tokens: masked", RED),
            Series("correction/masked_sequences", "sequences: masked whole", AMBER),
        ),
    ),
    Chart(
        "weight", "Correction weight", "Mean weight, and effective over actual sample size; both are 1 on policy.",
        "weight",
        series=(
            Series("correction/mean_weight", "mean weight", BLUE),
            Series("correction/effective_share", "effective share", AMBER),
        ),
        y_min=None,
    ),
)  # fmt: skip

_CRITIC = (
    Chart(
        "value", "Value loss", "Half the squared error of the critic.", "loss",
        series=(Series("loss/value", "value loss", BLUE, smooth=True),), log=True,
    ),
    Chart(
        "explained-variance", "Explained variance", "Of the returns, by the critic; 0 is no better than their mean.",
        "share", series=(Series("loss/explained_variance", "explained variance", GREEN),), y_min=None, y_max=1.0,
    ),
    Chart(
        "value-clip", "Clipped values", "Share of tokens whose value left the band around the one before the update.",
        "share of tokens", series=(Series("loss/value_clip_fraction", "clipped", RED),),
    ),
    Chart(
        "critic-grad-norm", "Gradient norm of the critic", "Before clipping.", "norm",
        series=(Series("critic/grad_norm", "gradient norm", BLUE, smooth=True),), log=True,
    ),
)  # fmt: skip

_REPLAY = (
    Chart(
        "agreement-layers", "Route agreement by layer",
        "Share of replayed tokens whose own router would have chosen the same experts.", "layer", "heat",
        each={"replay/agreement_layer_{layer}": "{layer}"},
    ),
    Chart(
        "agreement", "Route agreement", "Over all layers, the layer that agrees least, and coverage.", "share",
        series=(
            Series("replay/agreement", "all layers", BLUE),
            Series("replay/agreement_min_layer", "lowest layer", RED),
            Series("replay/coverage", "coverage", GREY, dashed=True),
        ),
        y_min=None, y_max=1.0,
    ),
)  # fmt: skip

_TOKENS = (
    Chart(
        "ledger", "Ledger", "Every token of the step, by its fate.", "tokens", "stack",
        (
            Series("ledger/trained_tokens", "trained", BLUE),
            Series("ledger/masked_tokens", "masked", AMBER),
            Series("ledger/dropped_tokens", "dropped", RED),
            Series("ledger/pending_tokens", "pending", GREY),
        ),
    ),
    Chart(
        "partial", "Partial rollouts", "Responses interrupted in generation, and continued ones.", "responses",
        series=(Series("rollout/aborted", "aborted", RED), Series("rollout/recycled", "continued", GREEN)),
    ),
    Chart(
        "packing", "Packing", "Padding, and the time that ranks wait for each other (estimated).", "share",
        series=(
            Series("packing/fill", "budgets filled", BLUE),
            Series("packing/padding", "padding", GREY),
            Series("packing/imbalance", "waiting", RED),
        ),
    ),
)  # fmt: skip

_TIME = (
    Chart(
        "step-time", "Step time", "Where the trainer's wall time went.", "seconds", "stack",
        (
            Series("perf/wait_seconds", "wait for rollout", GREY),
            Series("perf/log_prob_seconds", "log-probs", SKY),
            Series("perf/train_seconds", "train", RED),
            Series("perf/critic_seconds", "critic", VIOLET),
            Series("weights/seconds", "weights", GREEN),
            Series("perf/eval_seconds", "eval", PINK),
            Series("perf/checkpoint_seconds", "checkpoint", AMBER),
            Series(REST, "other", BLUE),
        ),
    ),
    Chart(
        "idle", "Idle time", "Mean share of a step in which an engine or a trainer rank did nothing.",
        "share of the step",
        series=(Series("idle/engines", "engines", BLUE), Series("idle/trainers", "trainers", RED)), y_max=1.0,
    ),
    Chart(
        "throughput", "Throughput", "Tokens a second while generating and while training.", "tokens/s",
        series=(
            Series("rollout/tokens_per_s", "generated", BLUE),
            Series("perf/train_tokens_per_s", "trained", RED),
        ),
    ),
    Chart(
        "weight-sync", "Weight sync",
        "Duration, pause of the engines, and the slowest sender's time by activity.", "seconds",
        series=(
            Series("weights/seconds", "sync", GREEN),
            Series("weights/pause_seconds", "engines paused", RED, dashed=True),
            Series("weights/fill_seconds", "fill buckets", BLUE),
            Series("weights/turn_seconds", "wait for turn", GREY),
            Series("weights/send_seconds", "send buckets", AMBER),
            Series("weights/probe_seconds", "probe", VIOLET),
        ),
    ),
)  # fmt: skip

SECTIONS: dict[str, tuple[Chart, ...]] = {
    "Learning": _LEARNING,
    "Policy update": _POLICY,
    "Off-policy": _OFF_POLICY,
    "Critic": _CRITIC,
    "Routing replay": _REPLAY,
    "Tokens": _TOKENS,
    "Time": _TIME,
}


# Select the charts of a run to draw. The others are listed with the reason: flat, a repetition, no data.

FLAT_POINTS = 3
"""Fewest points of a chart that can be flat."""
FLAT_WITHIN = 1e-6
"""Values within this difference, absolute and relative, are equal."""


@dataclass
class DrawnCharts:
    """Drawn and omitted charts.

    Attributes:
        sections: drawings by section; empty sections are omitted.
        flat: charts whose values never change, each with its values as text.
        repeated: charts with one line, each with the title of the chart that has the same line.
        missing: titles of charts without data.
    """

    sections: dict[str, list[tuple[Chart, dict[str, Any]]]] = field(default_factory=dict)
    flat: list[tuple[str, str]] = field(default_factory=list)
    repeated: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def charts(self) -> list[dict[str, Any]]:
        """The drawings, in order."""
        return [data for cards in self.sections.values() for _, data in cards]

    @property
    def ids(self) -> set[str]:
        """Ids of the drawn charts."""
        return {chart.id for cards in self.sections.values() for chart, _ in cards}


def choose_charts(
    fill: Callable[[Chart], dict[str, Any] | None],
    sections: Mapping[str, Sequence[Chart]] = SECTIONS,
    runs: int = 1,
) -> DrawnCharts:
    """Select the charts to draw.

    Args:
        fill: a chart's drawing, or None without data. runs: number of runs in it.
    """
    drawn = DrawnCharts()
    titles = {chart.id: chart.title for charts in sections.values() for chart in charts}
    data = {chart.id: fill(chart) for charts in sections.values() for chart in charts}
    for title, charts in sections.items():
        cards: list[tuple[Chart, dict[str, Any]]] = []
        for chart in charts:
            own = data[chart.id]
            if own is None:
                drawn.missing.append(chart.title)
            elif chart.repeats and len(own["series"]) <= runs and data[chart.repeats] is not None:
                drawn.repeated.append((chart.title, titles[chart.repeats]))
            elif not chart.always and (values := flat_values(own)):
                drawn.flat.append((chart.title, values))
            else:
                cards.append((chart, own))
        if cards:
            drawn.sections[title] = cards
    return drawn


def flat_values(data: dict[str, Any]) -> str:
    """The values of a constant drawing, as text; empty if one changes, or there are few points."""
    if data["kind"] == "heat":
        lines = [("", [value for row in data["values"] for value in row])]
    else:
        lines = [(s["label"], values) for s in data["series"] for values in (s["values"], *(s["band"] or ()))]
    levels: dict[str, set[float]] = {}
    for label, values in lines:
        known = [value for value in values if value is not None]
        if len(known) < FLAT_POINTS or max(known) - min(known) > FLAT_WITHIN * max(1.0, abs(known[0])):
            return ""
        levels.setdefault(label, set()).add(round(known[0], 6))
    if len(set().union(*levels.values())) == 1:
        return f"{next(iter(levels.popitem()[1])):.4g}"
    return ", ".join(f"{label} {' to '.join(f'{v:.4g}' for v in sorted(at))}" for label, at in levels.items())
