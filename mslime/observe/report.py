"""`mslime report RUN`: one HTML page about a run that needs no network, drawn from what the run has written so far.

Works on an unfinished run and on one that recorded less than everything: what is missing is named on the page.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import time
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from mslime.config.errors import UserError
from mslime.config.schema import RunConfig
from mslime.observe import metrics, timeline
from mslime.observe.charts import Chart, chart_data
from mslime.observe.progress import format_seconds
from mslime.observe.rows import Row, by_step, total
from mslime.observe.sections import SECTIONS
from mslime.observe.timeline import STEP, Span, idle_shares, merge_spans, step_window

FILE_NAME = "report.html"
MAX_TIMELINE_STEPS = 60
MAX_LANES = 12


def write_report(run_dir: Path) -> Path:
    """Write RUN/report.html and return its path.

    Raises:
        UserError: the directory or its metrics are missing, or a file in it is broken.
    """
    rows = _rows(run_dir)
    config_text = _text_or_empty(run_dir / "config.yaml")
    page = _fill(
        _template("report.html"),
        title=html.escape(_config(config_text).get("name") or run_dir.name),
        style=_template("report.css"),
        script=_template("report.js"),
        policy=_policy(_template("report.js")),
        **_parts(run_dir, rows, config_text),
    )
    path = run_dir / FILE_NAME
    fresh = path.with_suffix(".tmp")
    fresh.write_text(page, encoding="utf-8")
    fresh.replace(path)
    return path


def _policy(script: str) -> str:
    """What a browser may do with the page: run this one script, and reach nothing. Whatever a run is called and
    whatever its metrics hold, a browser would not run it."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'"


def _rows(run_dir: Path) -> list[Row]:
    """One row a step (`rows.by_step`)."""
    path = run_dir / metrics.FILE_NAME
    if not run_dir.is_dir():
        raise UserError("run directory", str(run_dir), "does not exist", "give the directory outputs/NAME of a run")
    found = by_step(metrics.read_metrics(path))
    if not found:
        why = "is empty" if path.exists() else "is missing"
        raise UserError(
            str(path),
            None,
            f"the run has recorded no step yet: {metrics.FILE_NAME} {why}",
            "wait for the first step, or look at the run's log for why it did not get there",
        )
    return found


def _parts(run_dir: Path, rows: Sequence[Row], config_text: str) -> dict[str, str]:
    drawings: list[dict[str, Any]] = []
    spans = timeline.read_spans(run_dir)
    idle = timeline.idle_by_step(spans)
    rows = [{**row, **idle.get(row["step"], {})} for row in rows]
    sections = "".join(_section(title, charts, rows, drawings) for title, charts in SECTIONS.items())
    steps = _timeline_data(spans)
    config = _config(config_text)
    return {
        "facts": _facts(config, rows),
        "tiles": "".join(_tile(*tile) for tile in _tiles(rows, config)),
        "sections": sections,
        "timeline": _TIMELINE_CARD if steps else _missing("Not recorded in this run", [timeline.FILE_NAME]),
        "config": html.escape(config_text) or "config.yaml is not in the run directory",
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "data": json.dumps({"charts": drawings, "timeline": steps}).replace("<", "\\u003c"),
    }


# Page parts


_TIMELINE_CARD = """<figure class="card wide" id="timeline">
<div class="stepper"><button type="button" data-move="-1" aria-label="previous step">&#8592;</button>
<label>step <output></output><input type="range" min="0" value="0" aria-label="step"></label>
<button type="button" data-move="1" aria-label="next step">&#8594;</button><span class="duration"></span></div>
<div class="legend"></div><div class="plot"></div></figure>"""


def _section(title: str, charts: Sequence[Chart], rows: Sequence[Row], drawings: list[dict[str, Any]]) -> str:
    """The cards of one section; data of what can be drawn is added to `drawings`."""
    cards: list[str] = []
    missing: list[str] = []
    for chart in charts:
        data = chart_data(chart, rows)
        if data is None:
            missing.append(chart.title)
            continue
        drawings.append(data)
        caption = html.escape(chart.caption + (f" One point is {data['every']} steps." if data["every"] > 1 else ""))
        cards.append(
            f'<figure class="card" id="{chart.id}"><figcaption><h3>{html.escape(chart.title)}</h3>'
            f'<p>{caption}</p></figcaption><div class="legend"></div><div class="plot"></div></figure>'
        )
    note = _missing("Not recorded in this run", missing) if missing else ""
    anchor = title.lower().replace(" ", "-")
    return f'<section id="{anchor}-section"><h2>{title}</h2><div class="grid">{"".join(cards)}</div>{note}</section>'


def _missing(text: str, names: Sequence[str]) -> str:
    return f'<p class="missing"><b>{text}:</b> {html.escape(", ".join(names))}</p>'


def _tile(label: str, value: str, note: str) -> str:
    return f'<div class="tile"><span>{html.escape(label)}</span><b>{value}</b><small>{html.escape(note)}</small></div>'


def _facts(config: dict[str, Any], rows: Sequence[Row]) -> str:
    """What was run, as short labelled facts."""
    facts: dict[str, str] = {}
    if config:
        model, mega, rollout = config["model"], config["megatron"], config["rollout"]
        facts["model"] = Path(model["path"]).name
        facts["trainer"] = _layout(mega, config["cluster"]["trainer_ranks"])
        if config["train"]["task"] == "rl":
            facts["batch"] = f"{rollout['groups_per_step']} prompts x {rollout['group_size']} responses"
            facts["max staleness"] = str(rollout["max_staleness"])
            facts["correction"] = str(config["algorithm"]["correction"]["preset"])
            facts["replay"] = str(config["train"]["replay"])
        else:
            facts["batch"] = f"{config['train']['sft_batch_size']} examples, supervised"
        facts["seed"] = str(config["seed"])
    started = next((row["time"] for row in rows if row.get("time") is not None), None)
    if started is not None:
        facts["first row"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(started))
    return "".join(f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in facts.items())


def _layout(megatron: dict[str, Any], trainer_ranks: int | None) -> str:
    """`4 ranks: TP2 PP1 EP2`, sizes of one left out."""
    sizes = {
        "TP": "tensor_model",
        "PP": "pipeline_model",
        "CP": "context",
        "EP": "expert_model",
        "ETP": "expert_tensor",
    }
    named = {short: megatron[f"{long}_parallel_size"] for short, long in sizes.items()}
    ranks = trainer_ranks or named["TP"] * named["PP"] * named["CP"]
    parts = [f"{short}{size}" for short, size in named.items() if size > 1]
    return f"{ranks} rank{'s' if ranks > 1 else ''}" + (f" ({' '.join(parts)})" if parts else "")


def _tiles(rows: Sequence[Row], config: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(label, value as HTML, note) of the headline numbers; those without data are left out."""
    planned = config["train"]["num_steps"] if config else None
    last = rows[-1]["step"]
    state = "" if planned is None else "finished" if last >= planned else f"of {planned}: unfinished, or still running"
    tiles = [("steps", str(last), state)]
    accuracy = sorted({name for row in rows for name in row if name.startswith("eval/") and name.endswith("/accuracy")})
    for name in accuracy[:2]:
        tiles += _start_end(rows, name, f"accuracy, {name.split('/')[1]}", "first to last evaluation")
    tiles += _start_end(rows, "reward/mean", "reward", "first to last step")
    step_seconds = total(rows, "perf/step_seconds")
    times = [row["time"] for row in rows if row.get("time") is not None]
    if len(times) > 1:
        tiles.append(("wall time", format_seconds(times[-1] - times[0]), "first to last row"))
    if step_seconds and (waited := total(rows, "perf/wait_seconds")) is not None:
        tiles.append(("trainer waited", f"{100 * waited / step_seconds:.0f}%", "of its time, for rollouts"))
    if trained := total(rows, "ledger/trained_tokens"):
        tiles.append(
            ("tokens trained", _short(trained), f"of {_short(total(rows, 'ledger/generated_tokens') or 0)} generated")
        )
    return tiles


def _start_end(rows: Sequence[Row], name: str, label: str, note: str) -> list[tuple[str, str, str]]:
    values = [row[name] for row in rows if row.get(name) is not None]
    if not values:
        return []
    if len(values) == 1:
        return [(label, f"{values[0]:.2f}", "recorded once")]
    return [(label, f"{values[0]:.2f}<i>&#8594;</i>{values[-1]:.2f}", note)]


def _short(count: float) -> str:
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {suffix}"
    return f"{count:.0f}"


# Timeline


def _timeline_data(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """The last steps, each with its lanes; times in seconds from the step's start."""
    steps = sorted({span.step for span in spans if span.step > 0 or span.name == STEP})[-MAX_TIMELINE_STEPS:]
    windows = {step: window for step in steps if (window := step_window(spans, step))}
    return [
        _step_data(step, [s for s in spans if s.end > start and s.start < end], (start, end))
        for step, (start, end) in windows.items()
        if end > start
    ]


def _step_data(step: int, spans: Sequence[Span], window: tuple[float, float]) -> dict[str, Any]:
    shown = [s for s in spans if s.name != STEP]
    idle = idle_shares(shown, window)
    lanes, hidden = _shown_lanes({s.lane for s in shown})
    return {
        "step": step,
        "seconds": round(window[1] - window[0], 3),
        "hidden": hidden,
        "lanes": [
            {"name": lane, "idle": idle.get(lane) if _works(lane) else None, "spans": _lane_spans(shown, lane, window)}
            for lane in lanes
        ],
    }


def _shown_lanes(lanes: set[str]) -> tuple[list[str], int]:
    """Lanes in drawing order, at most MAX_LANES of a kind, and how many were left out."""
    kept: list[str] = []
    of_kind: Counter[str] = Counter()
    for lane in sorted(lanes, key=_lane_order):
        of_kind[_kind(lane)] += 1
        if of_kind[_kind(lane)] <= MAX_LANES:
            kept.append(lane)
    return kept, len(lanes) - len(kept)


def _kind(lane: str) -> str:
    return lane.rstrip("0123456789 -_")


def _works(lane: str) -> bool:
    """Whether being idle is a loss: engines and trainers, not the lanes that only say what was going on."""
    return _kind(lane) in ("engine", "trainer")


def _lane_order(lane: str) -> tuple[int, int, str]:
    """The driver's view first, then engines and trainers by number."""
    order = {"driver": 0, "rollout": 1, "engine": 2, "trainer": 3, "weights": 4}
    number = lane.removeprefix(_kind(lane)).strip(" -_")
    return order.get(_kind(lane), 5), int(number) if number else 0, lane


def _lane_spans(spans: Sequence[Span], lane: str, window: tuple[float, float]) -> list[list[Any]]:
    """[name, start, end, step] of a lane, cut to the window and counted from its start."""
    start, end = window
    own = merge_spans(s for s in spans if s.lane == lane)
    return [[s.name, round(max(s.start, start) - start, 4), round(min(s.end, end) - start, 4), s.step] for s in own]


# Files


def _config(text: str) -> dict[str, Any]:
    """The resolved configuration; empty when the run wrote none, or one that is not resolved."""
    loaded = yaml.safe_load(text) if text else None
    return loaded if isinstance(loaded, dict) and loaded.keys() >= RunConfig.model_fields.keys() else {}


def _text_or_empty(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _template(name: str) -> str:
    return resources.files("mslime.observe").joinpath(name).read_text(encoding="utf-8")


def _fill(template: str, **parts: str) -> str:
    """Replace each `{{name}}` once, in order of the template, so that no part is searched for markers of another."""
    pieces = template.split("{{")
    out = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        out += [parts[name], rest]
    return "".join(out)
