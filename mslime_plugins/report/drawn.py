"""Select the charts of a run to draw. The others are listed with the reason: flat, a repetition, no data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mslime_plugins.report.charts import Chart
from mslime_plugins.report.sections import SECTIONS

FLAT_POINTS = 3
"""Fewest points of a chart that can be flat."""
FLAT_WITHIN = 1e-6
"""Values within this difference, absolute and relative, are equal."""


@dataclass
class Drawn:
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
) -> Drawn:
    """Select the charts to draw.

    Args:
        fill: a chart's drawing, or None without data. runs: number of runs in it.
    """
    drawn = Drawn()
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
