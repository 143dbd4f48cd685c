"""A kept response token by token, for the report and the terminal: sampler, use in training, turns and tool calls."""

from __future__ import annotations

import base64
import heapq
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mslime.observe.samples import (
    RoutesLine,
    SampleLine,
    SegmentLine,
    file_of,
    read_samples,
    read_trainer_lines,
    trainer_file_of,
)  # fmt: skip

TOOL_CALLS = (
    (r"<tool_call>", r"</tool_call>"),  # Qwen, GLM, Hermes
    (r"<minimax:tool_call>", r"</minimax:tool_call>"),
    (r"<\|tool_calls_section_begin\|>", r"<\|tool_calls_section_end\|>"),  # Kimi
    (r"<\uff5ctool\u2581calls\u2581begin\uff5c>", r"<\uff5ctool\u2581calls\u2581end\uff5c>"),  # DeepSeek
    (r"<\|channel\|>commentary to=", r"<\|call\|>"),  # gpt-oss
    (r"\[TOOL_CALLS\]", r"</s>"),  # Mistral
    (r"<\|python_tag\|>", r"<\|eom_id\|>"),  # Llama
)
"""Patterns of the marks around a tool call in the families' templates; a truncated call extends to the turn's end."""
_CALL = re.compile("|".join(f"{begin}.*?(?:{end}|$)" for begin, end in TOOL_CALLS), re.DOTALL)


@dataclass(frozen=True)
class Token:
    """One token of a response, or a placeholder for tokens that the file omits.

    Attributes:
        position: in the response.
        id: token id; None for a placeholder.
        version, age, engine: of the weights that sampled it; None, None and empty if no policy did.
        trained: whether it enters the loss.
        log_prob, trainer_log_prob: of the sampler and of the trainer, natural log; None if unknown.
        support: ids that it was drawn from; None for a draw from the whole vocabulary.
        experts: by MoE layer id, if routes are kept.
        turn: number of the turn, from 1 on: tokens sampled between texts from outside, and the text after them.
        outside: whether it comes from a tool or environment instead of a policy.
        in_call: whether it is part of a tool call.
    """

    text: str
    position: int
    id: int | None
    version: int | None
    age: int | None
    engine: str
    trained: bool
    log_prob: float | None = None
    trainer_log_prob: float | None = None
    support: int | None = None
    experts: dict[int, list[int]] | None = None
    turn: int = 0
    outside: bool = False
    in_call: bool = False

    @property
    def difference(self) -> float | None:
        """Trainer minus sampler, in nats; None if one of the two is unknown."""
        if self.log_prob is None or self.trainer_log_prob is None:
            return None
        return self.trainer_log_prob - self.log_prob


def tokens_of(row: SampleLine) -> list[Token]:
    """The response, token by token; omitted tokens are one placeholder without an id. A line without texts of tokens is
    one placeholder."""
    if "texts" not in row:
        return [Token(row["response"], 0, None, None, None, "", trained=True)]
    left_out, routes, calls = row["left_out"], _experts(row.get("routes")), _in_calls(row)
    trainers = row.get("trainer_log_probs") or [None] * len(row["log_probs"])
    supports = row.get("support_sizes") or [0] * len(row["log_probs"])
    columns = zip(row["texts"], row["ids"], row["log_probs"], trainers, supports, calls, strict=True)
    sources = _turns(row["segments"])
    turn, source = next(sources, (0, None))
    out: list[Token] = []
    at = 0
    for text, token_id, log_prob, trainer, support, in_call in columns:
        if left_out is not None and at == left_out[0]:
            out.append(_gap(left_out[1] - at, at, out[-1] if out else None))
            at = left_out[1]
        while source is not None and source["end"] <= at:
            turn, source = next(sources, (turn, None))
        assert source is not None, f"token {at} lies in no segment"
        experts = routes[at] if at < len(routes) and (left_out is None or at < left_out[0]) else None
        out.append(
            Token(
                text, at, token_id, source["version"], source["age"], source["engine"], source["trained"], log_prob,
                trainer, support or None, experts, turn, source["version"] is None, in_call,
            )
        )  # fmt: skip
        at += 1
    return out


def _gap(count: int, at: int, before: Token | None) -> Token:
    """A placeholder for omitted tokens; it belongs to the previous turn."""
    turn, outside = (before.turn, before.outside) if before is not None else (0, False)
    words = f" [... {count} tokens left out ...] "
    return Token(words, at, None, None, None, "", trained=False, turn=turn, outside=outside)


def by_source(tokens: Sequence[Token]) -> list[list[Token]]:
    """Tokens grouped by turn, or by the text from outside after it, in order."""
    return [list(together) for _, together in itertools.groupby(tokens, key=lambda t: (t.turn, t.outside))]


def _turns(segments: Sequence[SegmentLine]) -> Iterator[tuple[int, SegmentLine]]:
    """(number of the turn, segment): text from outside ends a turn and belongs to it."""
    turn, outside = 0, True
    for segment in segments:
        sampled = segment["version"] is not None
        turn += sampled and outside
        outside = not sampled
        yield turn, segment


def _in_calls(row: SampleLine) -> list[bool]:
    """For each token in the line, whether it is part of a sampled tool call."""
    texts = row.get("texts", [])
    ends = list(itertools.accumulate(map(len, texts)))
    inside = bytearray(ends[-1] + 1 if ends else 1)  # 1 for each character of a call
    for call in _CALL.finditer("".join(texts)):
        inside[call.start() : call.end()] = b"\1" * (call.end() - call.start())
    starts = [0, *ends[:-1]]
    return [
        log_prob is not None and any(inside[start : max(end, start + 1)])
        for start, end, log_prob in zip(starts, ends, row["log_probs"], strict=True)
    ]


def _experts(routes: RoutesLine | None) -> list[dict[int, list[int]]]:
    """Experts by layer id, for each of the first tokens."""
    if routes is None:
        return []
    return [dict(zip(routes["layers"], row, strict=True)) for row in decoded(routes)]


def decoded(routes: RoutesLine) -> list[list[list[int]]]:
    """[tokens][layers][top-k] experts of a line's `routes`."""
    flat, size = base64.b64decode(routes["experts"]), routes["bytes"]
    ids = [int.from_bytes(flat[at : at + size], "little") for at in range(0, len(flat), size)]
    rows = [list(row) for row in zip(*[iter(ids)] * routes["top_k"], strict=True)]
    layers = len(routes["layers"])
    return [rows[at : at + layers] for at in range(0, len(rows), layers)]


# The recorded responses of a run for people: selection, order and description.


def telling(path: Path) -> list[SampleLine]:
    """The few most informative lines of the step, which are first in the file."""
    return list(itertools.takewhile(lambda row: row["kinds"], read_samples(path)))


def telling_of_step(run_dir: Path, step: int, *, evaluation: bool = False) -> list[SampleLine]:
    """`telling` of a step, each with the trainer's log-probs if known.

    Raises:
        UserError: a line of the step's files is not in this version's format.
    """
    rows, path = telling(file_of(run_dir, step, evaluation=evaluation)), trainer_file_of(run_dir, step)
    if evaluation or not path.exists():
        return rows
    found = {(r["group"], r["index"]): r["log_probs"] for r in read_trainer_lines(path)}
    for row in rows:
        known = found.get((row["group"], row["index"]))
        if known is not None and len(known) == len(row["log_probs"]):
            row["trainer_log_probs"] = known
    return rows


def ordered(rows: Iterable[SampleLine], order: str, count: int) -> list[SampleLine]:
    """The first `count` rows by one of ORDERS."""
    if order == "longest":
        return heapq.nlargest(count, rows, key=lambda row: row["response_tokens"])
    pick = heapq.nlargest if order == "best" else heapq.nsmallest
    return pick(count, rows, key=lambda row: row["reward"] or 0.0)


def versions_of(row: SampleLine) -> list[int]:
    """The weight versions that sampled a response, in order."""
    return list(dict.fromkeys(s["version"] for s in row["segments"] if s["version"] is not None))


def mean_log_prob(row: SampleLine) -> float | None:
    """Mean log-prob of the kept sampled tokens; None without any."""
    known = [value for value in row["log_probs"] if value is not None]
    return sum(known) / len(known) if known else None


def facts(row: SampleLine) -> list[str]:
    """Facts about a response beside its text, as short phrases."""
    out = [f"reward {row['reward']:g}" if row["reward"] is not None else "not scored"]
    out += [f"{name} {value:g}" for name, value in row["scores"].items() if value is not None]
    if row["advantage"] is not None:
        out.append(f"advantage {row['advantage']:+.3g}")
    if (mean := mean_log_prob(row)) is not None:
        out.append(f"mean log-prob {mean:.3f}")
    out.append(f"{row['response_tokens']} tokens, {row['status']}")
    if versions := versions_of(row):
        out.append(f"weights {', '.join(map(str, versions))}" + _ages(row))
    if row["label"] is not None:
        out.append(f"label {_short(row['label'])}")
    return out


def _ages(row: SampleLine) -> str:
    ages = {s["age"] for s in row["segments"] if s["age"] is not None}
    return f", age {min(ages)} to {max(ages)}" if len(ages) > 1 else f", age {min(ages)}" if ages - {0} else ""


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def visible(text: str) -> str:
    """Text made safe for a terminal: control characters, including those of direction, as their pictures."""
    return "".join(_picture(c) if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in text)


def _picture(character: str) -> str:
    code = ord(character)
    if character in "\n\t\u200c\u200d":  # the last two join emoji and letters
        return character
    return chr(0x2400 + code) if code < 32 else f"<U+{code:04X}>"
