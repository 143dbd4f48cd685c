"""Responses in the report: data for the page's script to show some responses token by token.

The script writes text as text and never as HTML. Amounts are bounded (steps, tokens, characters, total bytes), and the
page shows the bounds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mslime.config.errors import UserError
from mslime.observe.samples import SampleLine, recorded_steps
from mslime_plugins.report.sample_tokens import Token, facts, telling_of_step, tokens_of, visible

STEPS, EVALUATIONS = 8, 4
BYTES, EVALUATION_BYTES = 1_500_000, 500_000
TOKENS_A_SIDE, CHARACTERS_A_SIDE = 400, 2000
Chosen = dict[str, Any]
"""Data for the script, as JSON."""

_FRAME = """<section id="samples-section"><h2>Samples</h2><p class="lead">{lead}</p>
<figure class="card wide" id="samples"><div class="chooser">
<label>step <select data-of="step"></select></label><label>group <select data-of="group"></select></label>
<label>response <select data-of="sample"></select></label>
<fieldset><legend>colour by</legend>
<label><input type="radio" name="by" value="version" checked> weights</label>
<label><input type="radio" name="by" value="difference"> difference</label>
<label><input type="radio" name="by" value="mask"> mask</label></fieldset></div>
<p class="known"></p><div class="legend"></div><div class="sample"></div></figure></section>"""


def samples_section(data: Chosen) -> str:
    """The empty frame that the script fills; empty without responses."""
    return _FRAME.replace("{lead}", data["bound"]) if data["steps"] else ""


def samples_data(run_dir: Path) -> tuple[Chosen, str]:
    """(data for the script, a note on missing data)."""
    try:
        steps, left_out = _bounded(run_dir, STEPS, BYTES, evaluation=False)
        evaluations, more = _bounded(run_dir, EVALUATIONS, EVALUATION_BYTES, evaluation=True)
    except UserError as error:
        return {"steps": [], "bound": ""}, f"responses ({error.field}: {error.rule})"
    found, count = [*steps, *evaluations], sum(len(step["samples"]) for step in [*steps, *evaluations])
    summary = (
        f"{count} responses of {len(found)} steps and evaluations, selected by the run as most informative. At most "
        f"{STEPS} steps and {EVALUATIONS} evaluations are shown, with at most {(BYTES + EVALUATION_BYTES) / 1e6:g} MB"
        + (f" ({left_out + more} more did not fit)" if left_out + more else "")
        + f". Long responses show their first and last {TOKENS_A_SIDE} tokens. Hover over a token for its origin. On "
        "a terminal: <code>mslime inspect RUN</code>; other responses: <code>mslime samples RUN</code>."
    )
    return {"steps": found, "bound": summary}, "" if found else "responses (rollouts/)"


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, including the first and the last."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _bounded(run_dir: Path, most: int, total: int, *, evaluation: bool) -> tuple[list[Chosen], int]:
    """(at most this many steps with the responses that fit, newest first; number of the rest).

    Each step has the same share of the bytes, plus the unused bytes of newer ones.
    """
    chosen = _spread(recorded_steps(run_dir, evaluation=evaluation), most)
    out: list[Chosen] = []
    used = left_out = 0
    for place, step in enumerate(reversed(chosen), start=1):
        fitting: list[Chosen] = []
        for row in telling_of_step(run_dir, step, evaluation=evaluation):
            shown = sample_data(row)
            size = len(json.dumps(shown).replace("<", "\\u003c"))
            if used + size <= total * place // len(chosen):
                used += size
                fitting.append(shown)
            else:
                left_out += 1
        title = f"evaluation after step {step}" if evaluation else f"step {step}"
        out += [{"title": title, "samples": fitting}] if fitting else []
    return out, left_out


def sample_data(row: SampleLine) -> Chosen:
    """A response for the script: facts, sources, and its tokens as [text, source, position, id, log-prob, trainer's
    log-prob, in a tool call, size of the support]; [text, source] is a placeholder for omitted ones."""
    shown = tokens_of(row)
    if len(shown) > 2 * TOKENS_A_SIDE:
        words = f" [... {len(shown) - 2 * TOKENS_A_SIDE} tokens not shown ...] "
        gap = dataclasses.replace(shown[TOKENS_A_SIDE - 1], text=words, id=None)
        shown = [*shown[:TOKENS_A_SIDE], gap, *shown[-TOKENS_A_SIDE:]]
    sources: dict[tuple[Any, ...], int] = {}
    tokens = [_token(token, sources.setdefault(_source(token), len(sources))) for token in shown]
    keys = ("turn", "outside", "version", "age", "engine", "trained")
    reward = "" if row["reward"] is None else f" ({row['reward']:g})"
    return {
        "group": group_name(row),
        "name": visible(f"{row['index']}: {', '.join(row['kinds'])}{reward}"),
        "known": visible(" · ".join(facts(row))),
        "error": visible(row["error"]),
        "prompt": visible(_cut(row["prompt"])),
        "sources": [dict(zip(keys, source, strict=True)) for source in sources],
        "tokens": tokens,
        "routes": row.get("routes"),
    }


def group_name(row: SampleLine) -> str:
    """Name of the group: its number, and its held-out set."""
    return visible(f"{name}, {row['group']}" if (name := row.get("set")) else str(row["group"]))


def _source(token: Token) -> tuple[Any, ...]:
    return token.turn, token.outside, token.version, token.age, visible(token.engine), token.trained


def _token(token: Token, source: int) -> list[Any]:
    text = visible(token.text)
    if token.id is None:
        return [text, source]
    known = [token.position, token.id, token.log_prob, token.trainer_log_prob, int(token.in_call), token.support]
    return [text, source, *known]


def _cut(text: str) -> str:
    out = len(text) - 2 * CHARACTERS_A_SIDE
    return text if out <= 0 else f"{text[:CHARACTERS_A_SIDE]} [... {out} characters ...] {text[-CHARACTERS_A_SIDE:]}"
