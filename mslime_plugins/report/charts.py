"""Charts with their metrics, filled by `chart_data` from the rows of a run; `sections` lists them.

A chart without recorded metrics yields None; `drawn` selects from the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mslime.observe.names import Row, open_parts

MAX_POINTS = 400
MAX_HEAT_COLUMNS = 120


@dataclass(frozen=True)
class Series:
    """One line, bar part or band.

    Attributes:
        metric: its name in `metrics.jsonl`.
        label: in the legend.
        colour: index into the page's palette.
        smooth: draw a moving average over the raw line if there are many points.
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
        title, caption: heading, and one line of explanation.
        unit: of the y axis.
        kind: lines, stack (bars that add up) or heat (rows by layer).
        series: lines, bar parts or bands.
        each: templates of `names.METRICS` with open parts, and the label of a line for each matching metric.
        without: regular expression of metrics that `each` excludes.
        y_min, y_max: fixed ends of the y axis; None follows the data.
        log: use a logarithmic axis if values span more than a factor of 30.
        repeats: the chart with the same line, if this one has only one line.
        always: draw it even if its values never change.
    """

    id: str
    title: str
    caption: str
    unit: str
    kind: Literal["lines", "stack", "heat"] = "lines"
    series: Sequence[Series] = field(default_factory=tuple[Series, ...])
    each: Mapping[str, str] = field(default_factory=dict[str, str])
    without: str = ""
    y_min: float | None = 0.0
    y_max: float | None = None
    log: bool = False
    repeats: str = ""
    always: bool = False


BLUE, RED, GREEN, PINK, AMBER, SKY, GREY, VIOLET = range(8)


def chart_data(chart: Chart, rows: Sequence[Row]) -> dict[str, Any] | None:
    """The drawing of `chart` as plain JSON, or None if none of its metrics is in `rows`."""
    if chart.kind == "heat":
        return _heat_data(chart, rows)
    drawn = [*chart.series, *_open_series(chart, rows)]
    series = [s for s in drawn if any(row.get(s.metric) is not None for row in rows)]
    if not series:
        return None
    wanted = [name for s in series for name in (s.metric, *(s.band or ()))]
    rows, every = thin(with_any(rows, wanted), wanted, MAX_POINTS)
    return {
        **_frame(chart),
        "every": every,
        "steps": [row["step"] for row in rows],
        "log": chart.log and spans_decades([row.get(name) for row in rows for name in wanted]),
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


def _open_series(chart: Chart, rows: Sequence[Row]) -> list[Series]:
    """A line for each metric in `rows` that matches one of the chart's templates.

    The first open part of a template, the held-out set or the age, sets the colour; further templates are dashed.
    """
    series: list[Series] = []
    colours: dict[str, int] = {}
    for index, (template, label) in enumerate(chart.each.items()):
        for name, parts in filled(template, rows):
            if re.fullmatch(chart.without, name):
                continue
            colour = colours.setdefault(next(iter(parts.values())), len(colours) % GREY)
            series.append(Series(name, label.format(**parts), colour, dashed=index > 0))
    return series


def filled(template: str, rows: Sequence[Row]) -> list[tuple[str, dict[str, str]]]:
    """(name, open parts) of the metrics in `rows` that match a template of `names.METRICS`; numbers in order."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = [(name, parts) for name in names if (parts := open_parts(template, name)) is not None]
    numbered = all(part.isdigit() for _, parts in found for part in parts.values())
    return sorted(found, key=lambda one: [int(part) for part in one[1].values()]) if numbered else found


def _heat_data(chart: Chart, rows: Sequence[Row]) -> dict[str, Any] | None:
    (template,) = chart.each
    found = filled(template, rows)
    names = [name for name, _ in found]
    rows, every = thin(with_any(rows, names), names, MAX_HEAT_COLUMNS)
    if not rows:
        return None
    return {
        **_frame(chart),
        "every": every,
        "steps": [row["step"] for row in rows],
        "layers": [next(iter(parts.values())) for _, parts in found],
        "values": [[_number(row.get(name)) for row in rows] for name in names],
    }


def _number(value: float | None) -> float | None:
    """Six significant digits: enough for a picture, and a third of the page's size."""
    return None if value is None else float(f"{value:.6g}")


def spans_decades(values: Sequence[float | None]) -> bool:
    """Whether values need a logarithmic axis."""
    known = [v for v in values if v is not None]
    return bool(known) and min(known) > 0 and max(known) / min(known) > 30


def with_any(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows with at least one of the metrics."""
    return [row for row in rows if any(row.get(name) is not None for name in names)]


def thin(rows: Sequence[Row], names: Sequence[str], limit: int) -> tuple[list[Row], int]:
    """At most `limit` rows, each for several rows at the last of their steps, and how many rows each represents."""
    size = -(-len(rows) // limit)
    if size <= 1:
        return list(rows), 1
    chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
    return [{"step": chunk[-1]["step"], **{name: _together(chunk, name) for name in names}} for chunk in chunks], size


def _together(rows: Sequence[Row], name: str) -> float | None:
    """Mean of a metric over rows; for an extreme, the extreme."""
    values = [row[name] for row in rows if row.get(name) is not None]
    if not values:
        return None
    if name.endswith(("max", "min")):
        return max(values) if name.endswith("max") else min(values)
    return sum(values) / len(values)
