"""`mslime report A B ...`: runs side by side: numbers, overlaid charts by step, and differing settings."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mslime.config.errors import UserError
from mslime.observe.names import WHOLE, Row, by_step
from mslime.observe.timeline import read_spans
from mslime_plugins.report.charts import BLUE, Chart, Series, chart_data, spans_decades
from mslime_plugins.report.headline import headline_tiles, run_facts
from mslime_plugins.report.page import (
    as_script_data,
    chart_section,
    contents,
    not_drawn,
    page_of,
    read_config,
    read_run,
    run_name,
    text_or_empty,
    with_idle,
    write_page,
)
from mslime_plugins.report.sections import SECTIONS, DrawnCharts, choose_charts

FILE_NAME = "compare.html"
MAX_RUNS = 8
"""Most runs: the number of the page's colours."""
LINES_A_RUN = 2
UNLIKE = ("name", "output_dir")
"""Settings that always differ between two runs."""
_STEP = Chart("step-seconds", "Step time", "Wall time of a step.", "seconds", series=(Series(WHOLE, "step", BLUE),))


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs: its name on the page, rows with idle shares, configuration."""

    name: str
    rows: Sequence[Row]
    config: dict[str, Any]


def write_comparison(run_dirs: Sequence[Path], out: Path | None = None) -> Path:
    """Write one page about several runs, to `out` or the first run's compare.html, and return its path.

    Raises:
        UserError: a run has no metrics, or there are more runs than colours.
    """
    if len(run_dirs) > MAX_RUNS:
        raise UserError("report", len(run_dirs), f"compares at most {MAX_RUNS} runs", "name fewer")
    configs = [read_config(text_or_empty(path / "config.yaml")) for path in run_dirs]
    names = _names(run_dirs, configs)
    runs = [
        ComparedRun(name, with_idle(by_step(read_run(path)), read_spans(path)), c)
        for name, path, c in zip(names, run_dirs, configs, strict=True)
    ]
    drawn = _drawn(runs)
    differ = _settings(runs)
    sections = {title: chart_section(title, cards) for title, cards in drawn.sections.items()}
    sections |= {"Settings that differ": differ, "Not drawn": not_drawn(drawn, drawn.missing)}
    page = page_of(
        brand="mslime, runs side by side",
        title=html.escape(" · ".join(names)),
        facts="",
        lead=f'<div class="scroll">{_numbers(runs)}</div>',
        contents=contents({title: drawn.sections.get(title, []) for title, text in sections.items() if text}),
        sections="".join(sections.values()),
        rest="",
        data=as_script_data(drawn.charts),
    )
    return write_page(out or run_dirs[0] / FILE_NAME, page)


def _names(run_dirs: Sequence[Path], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The runs' names; for equal names, their directories."""
    names = [run_name(path, config) for path, config in zip(run_dirs, configs, strict=True)]
    return names if len(set(names)) == len(names) else [str(path) for path in run_dirs]


def _numbers(runs: Sequence[ComparedRun]) -> str:
    """Facts and headline numbers, one column per run."""
    columns = [
        {
            **run_facts(run.config, run.rows),
            **{label: value for label, value, _ in headline_tiles(run.rows, run.config)},
        }
        for run in runs
    ]
    return _table([run.name for run in runs], columns)


def _settings(runs: Sequence[ComparedRun]) -> str:
    """The settings that differ between runs; empty if there are none."""
    flat = [dict(_flattened(run.config)) for run in runs]
    columns = [
        {name: text for name, text in column.items() if any(other.get(name) != text for other in flat)}
        for column in flat
    ]
    if not any(columns):
        return ""
    table = _table([run.name for run in runs], columns)
    return (
        '<section id="settings-that-differ-section"><h2>Settings that differ</h2>'
        f'<div class="scroll">{table}</div></section>'
    )


def _flattened(config: Mapping[str, Any], head: str = "") -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            out += _flattened(value, f"{head}{key}.")
        elif head or key not in UNLIKE:
            out.append((f"{head}{key}", json.dumps(value)))
    return out


def _table(names: Sequence[str], columns: Sequence[Mapping[str, str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = ""
    for label in dict.fromkeys(label for column in columns for label in column):
        cells = "".join(f"<td>{html.escape(column.get(label, ''))}</td>" for column in columns)
        rows += f"<tr><th>{html.escape(label)}</th>{cells}</tr>"
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _drawn(runs: Sequence[ComparedRun]) -> DrawnCharts:
    """The charts of lines, and the step's time; charts of a single run are excluded."""
    sections = {title: [_plain(c) for c in charts if c.kind == "lines"] for title, charts in SECTIONS.items()}
    sections["Time"] = [_STEP, *sections["Time"]]
    return choose_charts(lambda chart: overlaid(chart, runs), {t: c for t, c in sections.items() if c}, len(runs))


def _plain(chart: Chart) -> Chart:
    """The chart without its bands and the caption about them."""
    bands = any(series.band for series in chart.series)
    series = [replace(one, band=None) for one in chart.series]
    return replace(chart, series=series, caption="") if bands else chart


def overlaid(chart: Chart, runs: Sequence[ComparedRun]) -> dict[str, Any] | None:
    """The drawing of a chart with the first lines of every run, each run in a colour; its second line is dashed.

    None when no run has the chart's metrics.
    """
    own = {index: data for index, run in enumerate(runs) if (data := chart_data(chart, run.rows)) is not None}
    if not own:
        return None
    steps = sorted({step for data in own.values() for step in data["steps"]})
    series: list[dict[str, Any]] = []
    for index, data in own.items():
        several = len(data["series"]) > 1
        for line, drawn in enumerate(data["series"][:LINES_A_RUN]):
            at = dict(zip(data["steps"], drawn["values"], strict=True))
            label = f"{runs[index].name}: {drawn['label']}" if several else runs[index].name
            shown = {"label": label, "colour": index, "dashed": line > 0}
            series.append({**drawn, **shown, "values": [at.get(step) for step in steps]})
    first = next(iter(own.values()))
    log = chart.log and spans_decades([value for s in series for value in s["values"]])
    every = max(data["every"] for data in own.values())
    return {**first, "steps": steps, "series": series, "log": log, "every": every}
