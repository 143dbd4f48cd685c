"""Conversations as training sequences: rendered text, tokens, and the spans of the assistant that are trained.

The whole conversation is rendered once and tokenised once. A turn begins at the end of the generation prompt for the
messages before it. It ends with its end-of-turn token, which may be the first token of the next turn. If the template
has `{% generation %}` marks, they define both places. A row whose spans cannot be determined exactly is rejected.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from mslime.config.base import SftLossOn
from mslime.config.errors import DataError, reading
from mslime.data.tokenizer import Tokenizer

Span = tuple[int, int]

_THINKS = ("<think>\n", "<think>")
_OTHERWISE = (
    "set train.sft_loss_on to each (every assistant turn as a separate sequence) or to "
    "last, or use a template with {% generation %} marks"
)


@dataclass(frozen=True)
class SupervisedSequence:
    """A sequence with its trained parts.

    Attributes:
        text: the decoded text. characters: [start, end) of the trained parts in it.
        tokens: T ids. spans: [start, end) of the trained ones, in order; none begins at 0.
        response: the last trained part.
    """

    text: str
    characters: tuple[Span, ...]
    tokens: list[int]
    spans: tuple[Span, ...]

    @property
    def response(self) -> str:
        """Text of the last trained part."""
        return self.text[slice(*self.characters[-1])]

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return sum(end - start for start, end in self.spans)

    def cut(self, limit: int) -> SupervisedSequence:
        """The same with the first `limit` tokens; the text stays whole."""
        spans = tuple((start, min(end, limit)) for start, end in self.spans if start < limit)
        return replace(self, tokens=self.tokens[:limit], spans=spans)

    def marked(self) -> str:
        """The text with its trained parts in [[ ]]."""
        edges = [0, *itertools.chain.from_iterable(self.characters), len(self.text)]
        pieces = [self.text[a:b] for a, b in itertools.pairwise(edges)]
        return "".join(f"[[{piece}]]" if i % 2 else piece for i, piece in enumerate(pieces))


def supervised_turns(
    messages: Sequence[dict[str, Any]],
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
    where: str,
    loss_on: SftLossOn,
) -> list[SupervisedSequence]:
    """Sequences of a conversation: one, or one for each assistant turn.

    Args:
        options: for the chat template. where: the row, for messages.

    Raises:
        DataError: no turn is to be trained; the template cannot render the conversation or does not show turn
            boundaries; a token straddles a boundary; a turn does not end with a special token.
    """
    turns, wanted = wanted_turns(messages, where, loss_on)
    with reading(DataError, where, "the tokenizer cannot encode the conversation", "fix or delete the row"):
        if loss_on == "all":
            return [_sequence(messages, turns, wanted, options, tokenizer, where)]
        return [_sequence(messages[: i + 1], [j for j in turns if j <= i], [i], options, tokenizer, where)
                for i in wanted]  # fmt: skip


def wanted_turns(messages: Sequence[Mapping[str, Any]], where: str, loss_on: SftLossOn) -> tuple[list[int], list[int]]:
    """(indices of the assistant's messages, of those to train). Raises DataError if none is to be trained."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = [i for i in (turns[-1:] if loss_on == "last" else turns) if _is_wanted(messages[i], where)]
    if not wanted:
        raise DataError(where, [m["role"] for m in messages], "no assistant turn is selected for training",
                        "remove the row, or correct data.messages_key")  # fmt: skip
    return turns, wanted


def _is_wanted(message: Mapping[str, Any], where: str) -> bool:
    """Whether a turn is trained: not with `train: false` or `weight: 0`."""
    for key in ("train", "weight"):
        value = message.get(key, True)
        if value not in (0, 1):
            raise DataError(where, value, f"{key!r} of an assistant's turn must be 0 or 1, false or true",
                            "repeat rows to give them more weight")  # fmt: skip
        if not value:
            return False
    return True


def _sequence(
    messages: Sequence[dict[str, Any]],
    turns: Sequence[int],
    wanted: Sequence[int],
    options: Mapping[str, Any],
    tokenizer: Tokenizer,
    where: str,
) -> SupervisedSequence:
    """Render the conversation once, with the turns `wanted` as trained spans."""
    whole = {**options, "add_generation_prompt": False}
    text, marks = tokenizer.render(messages, whole), tokenizer.marks(messages, whole)
    if marks is None:
        characters = [_turn(messages, i, text, options, tokenizer, where) for i in wanted]
        if wanted[-1] == len(messages) - 1:
            text += _end_behind(messages, text, whole, tokenizer)
        characters = [_with_end(span, text, tokenizer) for span in characters]
    else:
        characters = _chosen(marks, turns, wanted, where)
    tokens = tokenizer.encode(text, special_tokens=False)  # the template wrote special tokens
    edges = _token_edges(text, sorted({at for span in characters for at in span}), tokens, tokenizer, where)
    spans = tuple((edges[start], edges[end]) for start, end in characters)
    if spans[0][0] == 0:
        raise DataError(where, text[:80], "no token precedes the first turn, so it cannot be predicted",
                        "begin the conversation with a user or system message")  # fmt: skip
    if marks is None:
        for (start, end), (_, last) in zip(characters, spans, strict=True):
            if tokens[last - 1] not in tokenizer.special_ids:
                raise DataError(
                    where, text[start:end][-40:], "the chat template ends the assistant's turn without a special "
                    "token, so the model would not learn to stop", "use a template that ends turns with a special "
                    "token, or one with {% generation %} marks",
                )  # fmt: skip
    return SupervisedSequence(text, tuple(characters), tokens, spans)


def _turn(
    messages: Sequence[dict[str, Any]], i: int, text: str, options: Mapping[str, Any], tokenizer: Tokenizer, where: str
) -> Span:
    """Character span of one assistant turn, after the generation prompt, including its end-of-turn token."""
    if i == 0:
        raise DataError(where, "assistant", "the first message is an assistant message",
                        "begin with a user or system message, or set `train: false` in the turn")  # fmt: skip
    before = tokenizer.render(messages[:i], {**options, "add_generation_prompt": True})
    through = tokenizer.render(messages[: i + 1], {**options, "add_generation_prompt": False})
    if not text.startswith(through):
        raise DataError(where, _difference(text, through), f"the chat template changes message {i + 1} when "
                        "other messages follow (many drop earlier thinking)", _OTHERWISE)  # fmt: skip
    thought = (
        "</think>" in str(messages[i].get("content")) and "</think>" not in through[len(before) - len(_THINKS[0]) :]
    )
    if not through.startswith(before) and before.endswith(_THINKS) and not thought:
        before = before[: before.rindex(_THINKS[0].strip())]  # the prompt opens a thinking block that the row lacks
    if not through.startswith(before):
        raise DataError(where, _difference(through, before), f"the chat template does not write message {i + 1} after "
                        "its own generation prompt", "set data.chat_template_kwargs to make both agree, or "
                        "use a template with {% generation %} marks")  # fmt: skip
    return len(before), len(before) + len(through[len(before) :].rstrip())


def _with_end(span: Span, text: str, tokenizer: Tokenizer) -> Span:
    """Extend a span without an end token by the special token behind it, such as GLM's `<|user|>` of the next turn."""
    start, end = span
    if _is_special(text[start:end], -1, tokenizer):
        return span
    return start, end + len(_first_special(text[end:], tokenizer))


def _end_behind(messages: Sequence[dict[str, Any]], text: str, options: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """The special token with which a next user turn would begin, for a last turn without an end token."""
    if _is_special(text.rstrip(), -1, tokenizer):
        return ""
    try:
        further = tokenizer.render([*messages, {"role": "user", "content": "x"}], options)
    except ValueError:
        return ""
    return _first_special(further[len(text) :], tokenizer) if further.startswith(text) else ""


def _is_special(text: str, at: int, tokenizer: Tokenizer) -> bool:
    tokens = tokenizer.encode(text, special_tokens=False)
    return bool(tokens) and tokens[at] in tokenizer.special_ids


def _first_special(text: str, tokenizer: Tokenizer) -> str:
    """Special token at the start of a text, other than a BOS; empty if there is none."""
    tokens = tokenizer.encode(text, special_tokens=False)[:1]
    if not tokens or tokens[0] not in tokenizer.special_ids or tokens[0] in tokenizer.encode("", special_tokens=True):
        return ""
    piece = tokenizer.decode(tokens, special_tokens=True)
    return piece if text.startswith(piece) else ""


def _difference(text: str, other: str) -> str:
    """Rest of `text` from the first difference to `other`."""
    at = next((k for k, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return text[max(0, at - 20) : at + 40]


def _chosen(marks: Sequence[Span], turns: Sequence[int], wanted: Sequence[int], where: str) -> list[Span]:
    """The template's marks for the turns `wanted`."""
    marked = [(start, end) for start, end in marks if end > start]
    if not marked:
        raise DataError(where, "{% generation %}", "the chat template marks nothing in this conversation",
                        "fix the template's marks, or the row")  # fmt: skip
    if len(wanted) == len(turns):
        return marked
    if len(marked) != len(turns):
        raise DataError(where, f"{len(marked)} marks", f"the chat template must mark one part for each of the "
                        f"{len(turns)} assistant turns to select turns", "train all turns, or use a "
                        "template that marks each turn once")  # fmt: skip
    return [marked[turns.index(i)] for i in wanted]


def _token_edges(
    text: str, edges: Sequence[int], tokens: Sequence[int], tokenizer: Tokenizer, where: str
) -> dict[int, int]:
    """Number of tokens before each character position. Raises DataError if a token straddles a position.

    Tokenisers' own offsets are unreliable: some leave out blanks. If the pieces between positions tokenise to the
    tokens of the whole, they give the borders. Otherwise (some tokenisers treat the start of a text differently) the
    text before each position must.
    """
    ends = [*edges, len(text)]
    pieces = [tokenizer.encode(text[a:b], special_tokens=False) for a, b in itertools.pairwise([0, *ends])]
    if list(itertools.chain.from_iterable(pieces)) == list(tokens):
        return dict(zip(ends, itertools.accumulate(map(len, pieces)), strict=True))
    found: dict[int, int] = {}
    for at in edges:
        head = tokenizer.encode(text[:at], special_tokens=False)
        if list(tokens[: len(head)]) != head:
            around = text[max(0, at - 20) : at + 20]
            raise DataError(where, around, "a token spans the boundary of the trained text, so the prompt alone "
                            "has other tokens", "begin the turn's content without blanks "
                            "or line breaks")  # fmt: skip
        found[at] = len(head)
    return found


# Chat messages in the common form that every template accepts.

_CONTENT_HINT = "write the text into content"


def is_chat(value: object) -> bool:
    """Whether a value is a list of messages, each with a role and content or tool calls."""
    if not isinstance(value, list):
        return False
    messages = [cast("dict[str, Any]", m) for m in cast("list[object]", value) if isinstance(m, dict)]
    valid = ["role" in message and ("content" in message or message.get("tool_calls")) for message in messages]
    return len(messages) == len(cast("list[object]", value)) and all(valid)


def as_messages(prompt: str | Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Chat messages of a prompt; text becomes a user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def normalised(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Normalise a message: content as text, tool arguments as objects, no empty keys.

    Templates treat lists of parts differently. OpenAI's format has JSON arguments, which templates would encode again.
    A table gives every message all keys, which templates test with `in`.

    Raises:
        DataError: content that is not text, or arguments that are not JSON.
    """
    found = {key: value for key, value in message.items() if value is not None}
    found["content"] = _text(message, where)
    if found.get("tool_calls"):
        found["tool_calls"] = [_with_arguments(call, where) for call in found["tool_calls"]]
    return found


def _text(message: Mapping[str, Any], where: str) -> str | None:
    """Content with its text parts joined; None beside tool calls."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    if not isinstance(content, list):
        raise DataError(where, content, f"content of the {message['role']} message must be text", _CONTENT_HINT)
    texts = list[str]()
    for part in cast("list[object]", content):
        kind = cast("dict[str, Any]", part).get("type") if isinstance(part, dict) else type(part).__name__
        text = cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            rule = f"content of the {message['role']} message has a part that is not text; mslime supports text only"
            raise DataError(where, kind, rule, "remove rows with images, audio or files")
        texts.append(text)
    return "".join(texts)


def _with_arguments(call: Any, where: str) -> Any:
    """A tool call with its arguments as an object."""
    with reading(DataError, where, "a tool call must be an object with a function", "fix or delete the row"):
        function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with reading(DataError, where, "the arguments of a tool call are not valid JSON", "fix or delete the row"):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def tools_of(value: Any, where: str) -> list[Any] | None:
    """Tool definitions from a list or its JSON text; None if there are none. Raises DataError."""
    if isinstance(value, str):
        with reading(DataError, where, "the tools are not valid JSON", "fix or delete the row"):
            value = json.loads(value)
    if not value:
        return None
    if not isinstance(value, list):
        raise DataError(where, value, "tools must be a list of definitions", "fix the row, or data.tools_key")
    return cast("list[Any]", _without_nulls(value))


def _without_nulls(value: Any) -> Any:
    """Remove keys without a value: a table gives every definition all keys."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in cast("dict[str, Any]", value).items() if v is not None}
    return [_without_nulls(v) for v in cast("list[Any]", value)] if isinstance(value, list) else value
