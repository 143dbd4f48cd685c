"""Responses in the report: a few of a few steps, each token coloured by the weight version that sampled it.

All text of a run is escaped here, and what is shown is bounded: steps, responses of each, length, bytes in all.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from mslime.config.errors import UserError
from mslime.observe.samples import Sample, facts, file_of, pieces, recorded_steps, telling, versions_of, visible

STEPS, EVALUATIONS, SETS = 3, 2, 3
CHARACTERS_A_SIDE, TOKENS_A_SIDE = 600, 300
BYTES = 200_000
SURPRISING = -3.0
"""Log-prob below which a token is underlined: the sampler gave it less than one in twenty."""
_TRAINING, _EVALUATION = ("best", "worst", "longest", "truncated", "continued", "any"), ("best", "worst", "truncated")
HEAD = (
    "Tokens have the colour of the weights that sampled them; underlined ones had a probability below one in twenty; "
    "grey text was sampled by no policy. Others, and all tokens: <code>mslime samples RUN</code>."
)


def samples_section(run_dir: Path) -> tuple[str, str]:
    """(the section, what is missing): one of the two is empty."""
    parts: list[str] = []
    left = BYTES
    try:
        for title, rows, is_open in _chosen(run_dir):
            cards: list[str] = []
            for row in rows:
                card = _card(row)
                if len(card) <= left:
                    cards.append(card)
                    left -= len(card)
            if cards:
                opened = " open" if is_open else ""
                grid = f'<div class="grid">{"".join(cards)}</div>'
                parts.append(f'<details class="step"{opened}><summary>{title}</summary>{grid}</details>')
    except UserError as error:
        return "", f"responses ({error.field}: {error.rule})"
    if not parts:
        return "", "responses (rollouts/)"
    lead = f'<p class="lead">{HEAD}</p>'
    return f'<section id="samples-section"><h2>Samples</h2>{lead}{"".join(parts)}</section>', ""


def _chosen(run_dir: Path) -> Iterable[tuple[str, list[Sample], bool]]:
    """(title, responses, whether they are shown at once) of the steps that are shown, the newest first."""
    steps = _spread(recorded_steps(run_dir), STEPS)
    for step in reversed(steps):
        rows = _one_of_each(telling(file_of(run_dir, step)), _TRAINING)
        yield f"step {step}", rows, step == steps[-1]
    evaluations = _spread(recorded_steps(run_dir, evaluation=True), EVALUATIONS)
    for step in reversed(evaluations):
        rows = telling(file_of(run_dir, step, evaluation=True))
        sets = list(dict.fromkeys(row.get("set", "") for row in rows))[:SETS]
        few = [row for name in sets for row in _one_of_each([r for r in rows if r.get("set", "") == name], _EVALUATION)]
        yield f"evaluation after step {step}", few, step == evaluations[-1]


def _spread(steps: Sequence[int], count: int) -> list[int]:
    """At most `count` of the steps, the first and the last among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _one_of_each(rows: Sequence[Sample], kinds: Sequence[str]) -> list[Sample]:
    """The first row of each kind, none twice; `any` only where there is nothing else."""
    shown: list[Sample] = []
    for kind in kinds:
        if kind == "any" and shown:
            break
        own = next((row for row in rows if kind in row["kinds"] and row not in shown), None)
        shown += [own] if own is not None else []
    return shown


def _card(row: Sample) -> str:
    kind = ", ".join(row["kinds"])
    title = " · ".join([*filter(None, [row.get("set")]), f"group {row['group']}, response {row['index']}"])
    known = " · ".join(facts(row))
    return (
        f'<article class="card sample"><h3>{_safe(kind)} <small>{_safe(title)}</small></h3><p>{_safe(known)}</p>'
        f'<pre class="prompt">{_safe(_cut(row["prompt"]))}</pre><pre class="answer">{_coloured(row)}</pre></article>'
    )


def _coloured(row: Sample) -> str:
    """The response as spans of one weight version, and of one surprising token within them."""
    versions = versions_of(row)
    tokens = pieces(row)
    if len(tokens) > 2 * TOKENS_A_SIDE:
        gap = (f" [... {len(tokens) - 2 * TOKENS_A_SIDE} tokens not shown ...] ", None, False, None)
        tokens = [*tokens[:TOKENS_A_SIDE], gap, *tokens[-TOKENS_A_SIDE:]]
    out: list[str] = []
    for (version, trained), together in itertools.groupby(tokens, key=lambda token: token[1:3]):
        text = "".join(_token(piece, log_prob) for piece, _, _, log_prob in together)
        if version is None:
            out.append(f'<span class="plain">{text}</span>')
            continue
        colour = versions.index(version) % 8
        note = "" if trained else ", not trained"
        out.append(
            f'<span class="by{colour}{"" if trained else " untrained"}" title="weights {version}{note}">{text}</span>'
        )
    if len(versions) > 1:
        legend = " ".join(f'<span class="by{i % 8}">weights {version}</span>' for i, version in enumerate(versions))
        out.append(f"\n<small>{legend}</small>")
    return "".join(out)


def _token(text: str, log_prob: float | None) -> str:
    if log_prob is None or log_prob >= SURPRISING or not text:
        return _safe(text)
    return f'<u title="log-prob {log_prob:.2f}">{_safe(text)}</u>'


def _cut(text: str) -> str:
    out = len(text) - 2 * CHARACTERS_A_SIDE
    return text if out <= 0 else f"{text[:CHARACTERS_A_SIDE]} [... {out} characters ...] {text[-CHARACTERS_A_SIDE:]}"


def _safe(text: str) -> str:
    return html.escape(visible(str(text)))
