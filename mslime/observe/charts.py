"""What the report draws: each chart names its metrics, and `chart_data` fills it from the rows of a run.

A chart whose metrics were never recorded yields None, and the page says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Row = Mapping[str, Any]

MAX_POINTS = 400
MAX_HEAT_COLUMNS = 120
DERIVED = ("rest", "idle/engines", "idle/trainers")
"""Names that the report computes itself, from the step's parts and from the timeline."""


@dataclass(frozen=True)
class Series:
    """One line, bar part or band.

    Attributes:
        metric: its name in `metrics.jsonl`.
        label: what the legend says.
        colour: index into the page's palette.
        smooth: draw a moving average over the raw line when there are many points.
        band: metrics of the lower and upper edge of a band around the line.
        dashed: for bounds and extremes.
    """

    metric: str
    label: str
    colour: int
    smooth: bool = False
    band: tuple[str, str] | None = None
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        id: anchor in the page.
        title, caption: heading, and one line on what it means.
        unit: of the y axis.
        kind: lines, stack (bars that add up) or heat (rows by layer).
        series: what is drawn.
        y_min, y_max: fixed ends of the y axis; None follows the data.
        log: use a logarithmic axis when values span more than a factor of 30.
    """

    id: str
    title: str
    caption: str
    unit: str
    kind: Literal["lines", "stack", "heat"] = "lines"
    series: Sequence[Series] = field(default_factory=tuple[Series, ...])
    y_min: float | None = 0.0
    y_max: float | None = None
    log: bool = False


BLUE, RED, GREEN, PINK, AMBER, SKY, GREY = range(7)

SECTIONS: dict[str, tuple[Chart, ...]] = {
    "Learning": (
        Chart(
            "reward",
            "Reward",
            "Mean over the responses that a step trained on.",
            "reward",
            series=(Series("reward/mean", "mean", BLUE, smooth=True),),
            y_min=None,
        ),
        Chart(
            "accuracy",
            "Held-out accuracy",
            "Prompts that are never trained on.",
            "share of prompts",
            series=(),
            y_max=1.0,
        ),
        Chart(
            "length",
            "Response length",
            "Mean, with the 10th to 90th percentile shaded.",
            "tokens",
            series=(
                Series(
                    "rollout/response_len_mean",
                    "mean",
                    BLUE,
                    band=("rollout/response_len_p10", "rollout/response_len_p90"),
                ),
                Series("rollout/response_len_max", "longest", GREY, dashed=True),
            ),
        ),
        Chart(
            "entropy",
            "Entropy",
            "Of the next-token distribution; a collapse to zero ends exploration.",
            "nats",
            series=(Series("loss/entropy", "entropy", GREEN),),
        ),
        Chart(
            "loss",
            "Loss",
            "What was minimised. In reinforcement learning its level says little.",
            "loss",
            series=(
                Series("loss/total", "total", BLUE, smooth=True),
                Series("loss/nll", "negative log-likelihood", RED),
            ),
            y_min=None,
        ),
        Chart(
            "grad-norm",
            "Gradient norm",
            "Before clipping.",
            "norm",
            series=(Series("grad_norm", "gradient norm", BLUE, smooth=True),),
            log=True,
        ),
    ),
    "Off-policy": (
        Chart(
            "mismatch",
            "Mismatch KL",
            "KL(sampler || trainer) per token: engine differences and staleness together.",
            "nats",
            series=(
                Series("mismatch/kl", "KL, k3 estimate", RED, smooth=True),
                Series("mismatch/abs_max", "largest difference of log-probs", GREY, dashed=True),
            ),
            log=True,
        ),
        Chart(
            "staleness",
            "Staleness",
            "Weight versions between sampling a token and training on it.",
            "versions",
            series=(Series("staleness/mean", "mean", BLUE), Series("staleness/max", "oldest", RED, dashed=True)),
        ),
        Chart(
            "correction",
            "Corrected tokens",
            "Share of tokens that a bound touched.",
            "share of tokens",
            series=(
                Series("correction/clipped_fraction", "weight bounded", BLUE),
                Series("correction/masked_fraction", "masked by the correction", RED),
                Series("loss/clip_fraction", "ratio clipped", GREEN),
            ),
        ),
        Chart(
            "weight",
            "Correction weight",
            "Mean weight, and effective over actual sample size; both are 1 on policy.",
            "weight",
            series=(
                Series("correction/mean_weight", "mean weight", BLUE),
                Series("correction/effective_share", "effective share", AMBER),
            ),
            y_min=None,
        ),
    ),
    "Routing replay": (
        Chart(
            "agreement-layers",
            "Route agreement by layer",
            "Share of replayed experts that the trainer's own router would have chosen.",
            "layer",
            "heat",
        ),
        Chart(
            "agreement",
            "Route agreement",
            "Over all layers, the layer that agrees least, and what was replayed.",
            "share",
            series=(
                Series("replay/agreement", "all layers", BLUE),
                Series("replay/agreement_min_layer", "lowest layer", RED),
                Series("replay/coverage", "coverage", GREY, dashed=True),
            ),
            y_min=None,
            y_max=1.0,
        ),
    ),
    "Tokens": (
        Chart(
            "ledger",
            "Ledger",
            "Every token the step had in its hands, by what became of it.",
            "tokens",
            "stack",
            (
                Series("ledger/trained_tokens", "trained", BLUE),
                Series("ledger/masked_tokens", "masked", AMBER),
                Series("ledger/dropped_tokens", "dropped", RED),
                Series("ledger/pending_tokens", "pending", GREY),
            ),
        ),
        Chart(
            "partial",
            "Partial rollouts",
            "Responses stopped in mid-generation, and those continued later.",
            "responses",
            series=(Series("rollout/aborted", "aborted", RED), Series("rollout/recycled", "continued", GREEN)),
        ),
    ),
    "Time": (
        Chart(
            "step-time",
            "Step time",
            "Where the trainer's wall time went.",
            "seconds",
            "stack",
            (
                Series("perf/wait_seconds", "wait for rollout", GREY),
                Series("perf/log_prob_seconds", "log-probs", SKY),
                Series("perf/train_seconds", "train", RED),
                Series("weights/seconds", "weights", GREEN),
                Series("perf/eval_seconds", "eval", PINK),
                Series("perf/checkpoint_seconds", "checkpoint", AMBER),
                Series("rest", "other", BLUE),
            ),
        ),
        Chart(
            "idle",
            "Idle time",
            "Mean share of a step in which an engine or a trainer rank did nothing.",
            "share of the step",
            series=(Series("idle/engines", "engines", BLUE), Series("idle/trainers", "trainers", RED)),
            y_max=1.0,
        ),
        Chart(
            "throughput",
            "Throughput",
            "Tokens a second while generating and while training.",
            "tokens/s",
            series=(
                Series("rollout/tokens_per_s", "generated", BLUE),
                Series("perf/train_tokens_per_s", "trained", RED),
            ),
        ),
        Chart(
            "weight-sync",
            "Weight sync",
            "Duration, and how long the engines stood still.",
            "seconds",
            series=(
                Series("weights/seconds", "sync", GREEN),
                Series("weights/pause_seconds", "engines paused", RED, dashed=True),
            ),
        ),
    ),
}


def chart_data(chart: Chart, rows: Sequence[Row]) -> dict[str, Any] | None:
    """The drawing of `chart` as plain JSON, or None when none of its metrics is in `rows`."""
    if chart.id == "accuracy":
        chart = _with_eval_sets(chart, rows)
    if chart.kind == "heat":
        return _heat_data(chart, rows)
    if chart.id == "step-time":
        rows = [{**row, "rest": _rest(row, chart)} for row in rows]
    series = [s for s in chart.series if any(row.get(s.metric) is not None for row in rows)]
    if not series:
        return None
    wanted = [name for s in series for name in (s.metric, *(s.band or ()))]
    rows, every = _thin(_with_any(rows, wanted), wanted, MAX_POINTS)
    return {
        **_frame(chart),
        "every": every,
        "steps": [row["step"] for row in rows],
        "log": chart.log and _spans_decades([row.get(name) for row in rows for name in wanted]),
        "series": [_series_data(s, rows) for s in series],
    }


def _frame(chart: Chart) -> dict[str, Any]:
    return {
        "id": chart.id,
        "title": chart.title,
        "unit": chart.unit,
        "kind": chart.kind,
        "yMin": chart.y_min,
        "yMax": chart.y_max,
    }


def _series_data(series: Series, rows: Sequence[Row]) -> dict[str, Any]:
    band = None
    if series.band is not None and any(row.get(series.band[0]) is not None for row in rows):
        band = [[_number(row.get(name)) for row in rows] for name in series.band]
    return {
        "label": series.label,
        "colour": series.colour,
        "smooth": series.smooth,
        "dashed": series.dashed,
        "band": band,
        "values": [_number(row.get(series.metric)) for row in rows],
    }


def _with_eval_sets(chart: Chart, rows: Sequence[Row]) -> Chart:
    """One line for each held-out set's accuracy, and for its pass@k."""
    shown = r"eval/[^/]+/(accuracy|pass@(?!1$)\d+)"
    names = dict.fromkeys(name for row in rows for name in row if re.fullmatch(shown, name))
    sets = list(dict.fromkeys(name.split("/")[1] for name in names))
    series: list[Series] = []
    for name in names:
        _, eval_set, score = name.split("/")
        label = eval_set if score == "accuracy" else f"{eval_set} {score}"
        series.append(Series(name, label, sets.index(eval_set) % GREY, dashed=score != "accuracy"))
    return Chart(chart.id, chart.title, chart.caption, chart.unit, series=series, y_max=chart.y_max)


def _rest(row: Row, chart: Chart) -> float | None:
    """Wall time of the step that no part explains."""
    if row.get("perf/step_seconds") is None:
        return None
    known = sum(row.get(s.metric) or 0.0 for s in chart.series)
    return max(row["perf/step_seconds"] - known, 0.0)


def _heat_data(chart: Chart, rows: Sequence[Row]) -> dict[str, Any] | None:
    names = {name for row in rows for name in row if re.fullmatch(r"replay/agreement_layer_\d+", name)}
    ordered = sorted(names, key=lambda name: int(name.rsplit("_", 1)[1]))
    rows, every = _thin(_with_any(rows, ordered), ordered, MAX_HEAT_COLUMNS)
    if not rows:
        return None
    return {
        **_frame(chart),
        "every": every,
        "steps": [row["step"] for row in rows],
        "layers": [n.rsplit("_", 1)[1] for n in ordered],
        "values": [[_number(row.get(name)) for row in rows] for name in ordered],
    }


def _thin(rows: Sequence[Row], names: Sequence[str], limit: int) -> tuple[list[Row], int]:
    """At most `limit` rows, and how many rows each of them stands for, at the last of their steps."""
    size = -(-len(rows) // limit)
    if size <= 1:
        return list(rows), 1
    chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [{"step": chunk[-1]["step"], **{name: _together(chunk, name) for name in names}} for chunk in chunks], size


def _with_any(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    return [row for row in rows if any(row.get(name) is not None for name in names)]


def _together(rows: Sequence[Row], name: str) -> float | None:
    """Mean of a metric over rows; of a maximum, the maximum."""
    values = [row[name] for row in rows if row.get(name) is not None]
    if not values:
        return None
    return max(values) if name.endswith("max") else sum(values) / len(values)


def _number(value: float | None) -> float | None:
    """Six significant digits: enough for a picture, and a third of the page's size."""
    return None if value is None else float(f"{value:.6g}")


def _spans_decades(values: Sequence[float | None]) -> bool:
    known = [v for v in values if v is not None]
    return bool(known) and min(known) > 0 and max(known) / min(known) > 30
