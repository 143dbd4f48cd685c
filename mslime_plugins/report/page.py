"""`mslime report RUN`: one offline HTML page about a run, from its files so far.

It works for unfinished runs and incomplete records; the page lists missing data.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import socket
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from mslime.config.errors import UserError
from mslime.config.lora import DIRECTORY
from mslime.config.schema import RunConfig
from mslime.observe import metrics, timeline
from mslime.observe.metrics import LOCK, lives_here, owner_in
from mslime.observe.names import Row, by_step
from mslime.observe.progress import format_seconds
from mslime.observe.timeline import Span
from mslime_plugins.report.charts import Chart, chart_data
from mslime_plugins.report.headline import BETWEEN, headline_tiles, run_facts
from mslime_plugins.report.lanes import idle_by_step, timeline_data
from mslime_plugins.report.samples_page import samples_data, samples_section
from mslime_plugins.report.sections import DrawnCharts, choose_charts
from mslime_plugins.report.verdict import Tone, irregular, judge_run

FILE_NAME = "report.html"
Cards = Sequence[tuple[Chart, dict[str, Any]]]
"""Charts with their drawings."""


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write RUN/report.html, or `out`, and return its path.

    Raises:
        UserError: the directory or its metrics are missing, or a file in it is broken.
    """
    recorded = read_run(run_dir)
    config_text = text_or_empty(run_dir / "config.yaml")
    title = html.escape(run_name(run_dir, read_config(config_text)))
    page = page_of(brand="mslime run report", title=title, **_parts(run_dir, recorded, config_text))
    return write_page(out or run_dir / FILE_NAME, page)


def run_name(run_dir: Path, config: Mapping[str, Any]) -> str:
    """Name of a run."""
    return str(config.get("name") or run_dir.resolve().name)


def _policy(script: str) -> str:
    """Content security policy of the page: run this one script, and no network. Names and metrics of a run cannot run
    scripts."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'"


def read_run(run_dir: Path) -> Sequence[Row]:
    """The rows of a run's metrics as in the file; `rows.by_step` reduces them to one per step."""
    path = run_dir / metrics.FILE_NAME
    if not run_dir.is_dir():
        raise UserError("run directory", str(run_dir), "does not exist", "name the directory outputs/NAME of a run")
    found = metrics.read_metrics(path)
    if not found:
        why = "is empty" if path.exists() else "is missing"
        raise UserError(
            str(path),
            None,
            f"the run has recorded no step yet: {metrics.FILE_NAME} {why}",
            "wait for the first step, or check the run's log",
        )
    return found


def with_idle(rows: Sequence[Row], spans: Sequence[Span]) -> list[Row]:
    """The rows with the idle shares of their steps."""
    idle = idle_by_step(spans)
    return [{**row, **idle.get(row["step"], {})} for row in rows]


def _parts(run_dir: Path, recorded: Sequence[Row], config_text: str) -> dict[str, str]:
    spans = timeline.read_spans(run_dir)
    rows = with_idle(by_step(recorded), spans)
    steps, config, drawn = (
        timeline_data(spans),
        read_config(config_text),
        choose_charts(lambda chart: chart_data(chart, rows)),
    )
    generates = not config or config["train"]["task"] == "rl"
    samples, no_samples = samples_data(run_dir) if generates else (None, "")
    missing = [*drawn.missing, *([no_samples] if no_samples else []), *([] if steps else [timeline.FILE_NAME])]
    chapters = {title: chart_section(title, cards) for title, cards in drawn.sections.items()}
    first, *others = chapters or {"": ""}
    sections = {first: chapters.get(first, ""), "Samples": samples_section(samples) if samples else ""} | {
        title: chapters[title] for title in others
    }
    sections |= {"Timeline": _TIMELINE if steps else "", "Not drawn": not_drawn(drawn, missing)}
    return {
        "facts": facts_list(run_facts(config, rows)),
        "lead": _verdict(run_dir, rows, config, drawn, irregular(recorded)) + _tiles(rows, config),
        "contents": contents({title: drawn.sections.get(title, []) for title, text in sections.items() if text}),
        "sections": "".join(sections.values()),
        "rest": _configuration(config_text),
        "data": as_script_data(drawn.charts, steps, samples),
    }


# Page parts


_TIMELINE = """<section id="timeline-section"><h2>Timeline of one step</h2>
<p class="lead">Work of each part of the run. Gaps are idle time; concurrent work of other steps is shown too.</p>
<figure class="card wide" id="timeline">
<div class="stepper"><button type="button" data-move="-1" aria-label="previous step">&#8592;</button>
<label>step <output></output><input type="range" min="0" value="0" aria-label="step"></label>
<button type="button" data-move="1" aria-label="next step">&#8594;</button><span class="duration"></span></div>
<div class="legend"></div><div class="plot"></div></figure></section>"""


def chart_section(title: str, cards: Cards) -> str:
    """A heading and the frames of its charts, which the page's script fills."""
    frames: list[str] = []
    for chart, data in cards:
        caption = html.escape(chart.caption + (f" One point is {data['every']} steps." if data["every"] > 1 else ""))
        frames.append(
            f'<figure class="card" id="{chart.id}"><figcaption><h3>{html.escape(chart.title)}</h3>'
            f'<p>{caption}</p></figcaption><div class="legend"></div><div class="plot"></div></figure>'
        )
    return f'<section id="{_anchor(title)}"><h2>{title}</h2><div class="grid">{"".join(frames)}</div></section>'


def contents(sections: Mapping[str, Cards]) -> str:
    """Links to the sections and their cards."""
    lines: list[str] = []
    for title, cards in sections.items():
        links = "".join(f'<a href="#{chart.id}">{html.escape(chart.title)}</a>' for chart, _ in cards)
        lines.append(f'<li><a href="#{_anchor(title)}"><b>{html.escape(title)}</b></a>{links}</li>')
    return f'<nav aria-label="contents"><ul>{"".join(lines)}</ul></nav>'


def _anchor(title: str) -> str:
    return f"{title.lower().replace(' ', '-')}-section"


def not_drawn(drawn: DrawnCharts, missing: Sequence[str]) -> str:
    """The omitted charts and missing data, with the reason; empty if there are none."""
    parts = [
        ("Never changed", [f"{title} ({values})" for title, values in drawn.flat]),
        ("One line only", [f"{title} (see {other})" for title, other in drawn.repeated]),
        ("Not recorded in this run", missing),
    ]
    cells = "".join(
        f'<p class="missing"><b>{text}:</b> {html.escape(", ".join(names))}</p>' for text, names in parts if names
    )
    return f'<section id="not-drawn-section"><h2>Not drawn</h2>{cells}</section>' if cells else ""


def _verdict(run_dir: Path, rows: Sequence[Row], config: dict[str, Any], drawn: DrawnCharts, irregularity: str) -> str:
    findings, quiet = judge_run(rows, config["algorithm"]["loss"] if config else "")
    lines: list[str] = []
    if progress := progress_of(run_dir, rows, config["train"]["num_steps"] if config else None):
        tone, text, advice = map(html.escape, progress)
        lines.append(f'<li class="{tone}"><b>{text}</b> <span>{advice}</span></li>')
    if irregularity:
        lines.append(f'<li class="note"><b>{metrics.FILE_NAME}: {irregularity}.</b></li>')
    for finding in findings:
        target = finding.rule.chart if finding.rule.chart in drawn.ids else "not-drawn-section"
        advice = f" <span>{html.escape(finding.advice)}</span>" if finding.advice else ""
        limit = f" <small>shown if: {html.escape(finding.rule.threshold)}</small>" if finding.advice else ""
        link = f'<a href="#{target}">{html.escape(finding.rule.topic)}</a>'
        lines.append(f'<li class="{finding.tone}"><b>{html.escape(finding.text)}</b>{advice} {link}{limit}</li>')
    if quiet:
        lines.append(f'<li class="good">Within their thresholds: {html.escape(", ".join(quiet))}.</li>')
    return f'<section id="verdict-section"><h2>Verdict</h2><ul class="verdict">{"".join(lines)}</ul></section>'


def _tiles(rows: Sequence[Row], config: dict[str, Any]) -> str:
    return f'<div class="tiles">{"".join(_tile(*tile) for tile in headline_tiles(rows, config))}</div>'


def _configuration(text: str) -> str:
    cells = html.escape(text) or "config.yaml is not in the run directory"
    return (
        '<section id="configuration-section"><h2>Configuration</h2>'
        f"<details><summary>config.yaml</summary><pre>{cells}</pre></details></section>"
    )


def _tile(label: str, value: str, note: str) -> str:
    value = html.escape(value).replace(BETWEEN, "<i>&#8594;</i>")
    return f'<div class="tile"><span>{html.escape(label)}</span><b>{value}</b><small>{html.escape(note)}</small></div>'


def facts_list(facts: Mapping[str, str]) -> str:
    """Labelled facts."""
    cells = "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts.items())
    return f'<dl class="facts">{cells}</dl>'


def as_script_data(
    charts: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]] = (), samples: dict[str, Any] | None = None
) -> str:
    """Data for the page's script, as JSON that cannot end its element."""
    shown = samples["steps"] if samples else []
    return json.dumps({"charts": charts, "timeline": steps, "samples": shown}).replace("<", "\\u003c")


# Files


def page_of(**parts: str) -> str:
    """A complete page: `brand`, `title`, `facts`, `lead`, `contents`, `sections`, `rest` and `data` in one frame."""
    script = _template("report.js") + _template("samples.js")
    shared = {"style": _template("report.css"), "script": script, "policy": _policy(script)}
    return _fill(_template("page.html"), written=time.strftime("%Y-%m-%d %H:%M"), **shared, **parts)


def write_page(path: Path, page: str) -> Path:
    """Write the page, completely or not at all. Raises UserError if it cannot be written."""
    fresh = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(page, encoding="utf-8", errors="replace")
        fresh.replace(path)
    except OSError as error:
        raise UserError(str(path), error.strerror, "cannot be written", "choose another place with --out") from error
    return path


def read_config(text: str) -> dict[str, Any]:
    """The resolved configuration; empty if the run wrote none, or an unresolved one."""
    try:
        loaded = yaml.safe_load(text) if text else None
    except yaml.YAMLError as error:
        message = " ".join(str(error).split())[:200]
        raise UserError("config.yaml", message, "is not valid YAML", "repair it, or move it away") from error
    return loaded if isinstance(loaded, dict) and loaded.keys() >= RunConfig.model_fields.keys() else {}


def text_or_empty(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _template(name: str) -> str:
    return resources.files("mslime_plugins.report").joinpath(name).read_text(encoding="utf-8")


def _fill(template: str, **parts: str) -> str:
    """Replace each `{{name}}` once, in order of the template, so that markers inside of parts are not replaced."""
    pieces = template.split("{{")
    out = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        out += [parts[name], rest]
    return "".join(out)


# Whether a run is alive: by the process in its directory's lock, and by the age of its last row.

PACE_STEPS = 10
SLOW = 10
"""A row this many times older than a step takes is late: the step hangs, or does much other work."""


def progress_of(run_dir: Path, rows: Sequence[Row], planned: int | None) -> tuple[Tone, str, str] | None:
    """(tone, sentence, advice) for an incomplete run; None if it is complete, or its number of steps is unknown.

    Args:
        planned: `train.num_steps`.
    """
    last = rows[-1]["step"]
    if planned is None or last >= planned:
        return None
    times = [row["time"] for row in rows if row.get("time") is not None]
    age = max(time.time() - times[-1], 0.0) if times else None
    row_age = f"the last row is {format_seconds(age)} old" if age is not None else "rows have no time"
    owner = _owner(run_dir)
    process = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
    done = f"{last} of {planned} steps are done, {row_age}"
    if not owner:
        return "note", f"{done}; no lock in its directory names its process.", ""
    if owner.get("host") != socket.gethostname():
        return "note", f"{done}; this machine cannot see whether {process} still runs.", ""
    if not lives_here(owner):
        how_to_resume = "The same command continues it from its newest checkpoint; logs/driver.log shows how it ended."
        return "bad", f"The run has stopped: {done}, and {process} has ended.", how_to_resume
    paces = [b - a for a, b in pairwise([t for t in times if t >= owner["process_started"]])][-PACE_STEPS:]
    if age is not None and paces and age > SLOW * max(median(paces), 1.0):
        hangs = "logs/ shows the last operation of each process (docs/report.md)."
        return "note", f"{process} runs, but {done}: a step took {format_seconds(median(paces))}.", hangs
    eta = (
        f" Expected end in {format_seconds(max((planned - last) * fmean(paces) - (age or 0.0), 0.0))}." if paces else ""
    )
    return "good", f"The run is in progress: {done}, {process} runs.{eta}", ""


def _owner(run_dir: Path) -> dict[str, Any]:
    """Owner in the run's lock; an adapter's run has the lock of the run that contains it."""
    path = run_dir.resolve()
    path = path.parents[1] if path.parent.name == DIRECTORY and not (path / LOCK).exists() else path
    try:
        return owner_in((path / LOCK).read_bytes())
    except OSError:
        return {}
