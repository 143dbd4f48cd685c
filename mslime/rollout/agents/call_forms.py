"""The forms in which model families write tool calls, and their parsers.

A form reads a block: the text from an opening tag to its closing tag. Tags arrive separately from text, so a tag that
an argument spells out with ordinary tokens is never taken for a real one. Nothing here raises: an unreadable call
becomes a call with a status.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from mslime.rollout.agents.messages import NO_JSON, Tools, canonical_json, first_json, parsed_json
from mslime.rollout.agents.renderer import ParsedCall

# Values of arguments that a model wrote without types, by the tool's JSON schema.
#
# Families that write an argument between tags write a text unchanged and any other value as JSON, so `5` may be either:
# the schema of the parameter decides.

Schema = Mapping[str, Any]
_KINDS: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null",
}  # fmt: skip


def parameters_of(name: str, tools: Tools) -> Mapping[str, Schema]:
    """Schemas of a tool's parameters by name; empty for a tool that is not offered, or has none."""
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            return cast("dict[str, Schema]", properties) if isinstance(properties, dict) else {}
    return {}


def typed(text: str, schema: object) -> Any:
    """The value that a text represents.

    Args:
        schema: of the parameter; None, or a schema without a type: JSON if the text is valid JSON, else the text.

    Raises:
        ValueError: it is not a value, and the schema allows no text.
    """
    kinds = _allowed(schema)
    value = parsed_json(text)
    if value is NO_JSON:
        return _unlike_json(text, kinds)
    return text if "string" in kinds and _kind(value) not in kinds - {"string"} else value


def _unlike_json(text: str, kinds: set[str]) -> Any:
    """Value of a text that is not JSON. Qwen3-Coder's first templates wrote Python's values: True, None, ['a']."""
    if not kinds or "string" in kinds:
        return text
    try:
        return json.loads(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no {' or '.join(sorted(kinds))}: {text:.80}") from error


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "")


def _allowed(schema: object) -> set[str]:
    """The types of values that a schema allows; empty: unspecified."""
    if not isinstance(schema, dict):
        return set()
    keywords = cast("dict[str, Any]", schema)
    kinds = keywords.get("type")
    if isinstance(kinds, str):
        found = {kinds}
    elif isinstance(kinds, list):
        found = {str(kind) for kind in cast("list[Any]", kinds)}
    elif isinstance(values := keywords.get("enum"), list):
        found = {_kind(value) for value in cast("list[Any]", values)}
    else:
        branches = [_allowed(branch) for branch in _listed(keywords.get("anyOf")) + _listed(keywords.get("oneOf"))]
        found = set[str]().union(*branches) if all(branches) else set[str]()
    return found | {"integer"} if "number" in found else found


def _listed(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


Piece = tuple[str, str]
"""A tag (may be empty), and the text after it."""


@dataclass(frozen=True)
class TagBlock:
    """Model output from an opening tag on.

    Attributes:
        pieces: the first one's tag opens the block; a closing tag is left out.
        closing: that closing tag; empty if the reply ended without.
    """

    pieces: Sequence[Piece]
    closing: str
    tools: Tools

    @property
    def raw(self) -> str:
        """The block as it was written."""
        return joined(self.pieces) + self.closing

    @property
    def body(self) -> str:
        """The text between its tags."""
        return joined(self.pieces).removeprefix(self.pieces[0][0])


@dataclass(frozen=True)
class ParsedCalls:
    """The calls of a block, and its text outside of calls."""

    calls: Sequence[ParsedCall]
    text: str = ""


@dataclass(frozen=True)
class CallForm:
    """A family's form of calls.

    Attributes:
        name: for logs.
        opens, closes: tags around a block. No closing tag: it extends to the next block, or to the end.
        within: other tags in it.
        read: parser of a block.
    """

    name: str
    opens: str
    closes: str
    within: tuple[str, ...] = ()
    read: Callable[[TagBlock], ParsedCalls] = field(kw_only=True)

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags of the form."""
        return tuple(tag for tag in (self.opens, self.closes, *self.within) if tag)


def joined(pieces: Sequence[Piece]) -> str:
    """The text of pieces, with their tags."""
    return "".join(tag + text for tag, text in pieces)


def call_of(name: str, arguments: str, raw: str, written_id: str = "") -> ParsedCall:
    """A call with arguments in JSON; empty text means no arguments."""
    found = parsed_json(arguments if arguments.strip() else "{}")
    return broken(raw, "invalid_json") if found is NO_JSON else _made(name, found, raw, written_id)


def object_call(text: str, raw: str) -> ParsedCall:
    """A call written as {"name": ..., "arguments": {...}}, optionally with an id."""
    found = parsed_json(text)
    return broken(raw, "invalid_json") if found is NO_JSON else _of_object(found, raw)


def broken(raw: str, status: str) -> ParsedCall:
    """A call that cannot be made."""
    return ParsedCall("", "", raw, status)


def _of_object(found: Any, raw: str) -> ParsedCall:
    if not isinstance(found, dict):
        return broken(raw, "malformed_structure")
    call = cast("dict[str, Any]", found)
    written_id = call.get("id")
    return _made(call.get("name"), call.get("arguments", {}), raw, written_id if isinstance(written_id, str) else "")


def _made(name: object, arguments: object, raw: str, written_id: str = "") -> ParsedCall:
    if not isinstance(arguments, dict):
        return broken(raw, "malformed_structure")
    if not isinstance(name, str) or not name:
        return broken(raw, "missing_name")
    try:
        spelled = json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError):
        return broken(raw, "invalid_json")
    return ParsedCall(name, canonical_json(spelled), raw, id=written_id)


# ----------------------------------------------------------------------------------------------- one call in a block


def _single(read: Callable[[TagBlock], ParsedCall], block: TagBlock) -> ParsedCalls:
    """A block that is one call, if it is closed."""
    return ParsedCalls([read(block) if block.closing else broken(block.raw, "unclosed_block")])


def _hermes(block: TagBlock) -> ParsedCall:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""
    return object_call(block.body, block.raw)


_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _coder(block: TagBlock) -> ParsedCall:
    """<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, of Qwen3-Coder."""
    function = _FUNCTION.fullmatch(block.body)
    if function is None or _PARAMETER.sub("", function[2]).strip():
        return broken(block.raw, "malformed_structure")
    written = [(found[1], found[2]) for found in _PARAMETER.finditer(function[2])]
    return _of_values(function[1].strip(), written, block)


_PAIR = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def _glm(block: TagBlock) -> ParsedCall:
    """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>, of GLM-4.5 and later."""
    (_, name), *pairs = block.pieces
    between = "".join(text for tag, text in pairs if tag.startswith("</"))
    whole = tuple(tag for tag, _ in pairs) == _PAIR * (len(pairs) // 4)
    if not whole or between.strip() or re.search(r"[\s<{]", name.strip()):
        return broken(block.raw, "malformed_structure")
    written = [(key.strip(), value) for (_, key), (_, value) in zip(pairs[0::4], pairs[2::4], strict=True)]
    return _of_values(name.strip(), written, block)


def _of_values(name: str, written: Sequence[tuple[str, str]], block: TagBlock) -> ParsedCall:
    """A call whose arguments are written one by one, without types."""
    if not name:
        return broken(block.raw, "missing_name")
    parameters = parameters_of(name, block.tools)
    try:
        values = {key: typed(text, parameters.get(key)) for key, text in written}
    except ValueError:
        return broken(block.raw, "invalid_json")
    return _made(name, values, block.raw)


# ------------------------------------------------------------------------------------------- several calls in a block


def _section(begin: str, end: str, read: Callable[[Sequence[Piece], str], ParsedCall], block: TagBlock) -> ParsedCalls:
    """A block with a pair of tags around each call."""
    calls, text = list[ParsedCall](), block.pieces[0][1]
    for pieces in _from_each(begin, block.pieces[1:]):
        tags = [tag for tag, _ in pieces]
        if begin not in tags:
            text += joined(pieces)
        elif end not in tags:
            calls.append(broken(joined(pieces), "unclosed_block"))
        else:
            at = tags.index(end)
            calls.append(read(pieces[:at], joined(pieces[:at]) + end))
            text += pieces[at][1] + joined(pieces[at + 1 :])
    return ParsedCalls(calls, text) if calls else _no_call(block)


def _no_call(block: TagBlock) -> ParsedCalls:
    return ParsedCalls([broken(block.raw, "malformed_structure" if block.closing else "unclosed_block")])


def _from_each(tag: str, pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """Split pieces at each of these tags; the first part precedes the first tag."""
    starts = [0, *(i for i, piece in enumerate(pieces) if piece[0] == tag and i), len(pieces)]
    return (pieces[start:end] for start, end in itertools.pairwise(starts) if end > start)


_FENCED = re.compile(r"([^\n]*)\n```json\n(.*)\n```\s*", re.DOTALL)


def _deepseek(pieces: Sequence[Piece], raw: str) -> ParsedCall:
    """function<sep>NAME, and the arguments in a block of code: DeepSeek-V3 and R1."""
    fenced = _FENCED.fullmatch(pieces[1][1]) if len(pieces) == 2 else None
    if fenced is None or pieces[0][1].strip() != "function":
        return broken(raw, "malformed_structure")
    return call_of(fenced[1].strip(), fenced[2], raw)


def _deepseek_bare(pieces: Sequence[Piece], raw: str) -> ParsedCall:
    """NAME<sep>{...}: DeepSeek-V3.1."""
    if len(pieces) != 2:
        return broken(raw, "malformed_structure")
    return call_of(pieces[0][1].strip(), pieces[1][1], raw)


def _kimi(pieces: Sequence[Piece], raw: str) -> ParsedCall:
    """functions.NAME:INDEX<argument_begin>{...}: Kimi-K2. The text before the arguments is the call's id."""
    if len(pieces) != 2:
        return broken(raw, "malformed_structure")
    written_id = pieces[0][1].strip()
    name = re.sub(r"(:|^)\d+$", "", written_id).removeprefix("functions.")
    return call_of(name, pieces[1][1], raw, written_id)


def _mistral_list(block: TagBlock) -> ParsedCalls:
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]: Mixtral, and Mistral up to its tokenizers' v7.

    A list that was cut off holds the calls that are whole.
    """
    text, calls = block.body, list[ParsedCall]()
    at = _past(r"\s*\[\s*", text, 0)
    while at:
        if (found := first_json(text, at)) is None:
            return ParsedCalls([*calls, broken(text[at:] if calls else block.raw, "invalid_json")])
        value, end = found
        calls.append(_of_object(value, text[at:end]))
        if closed := _past(r"\s*\]", text, end):
            return ParsedCalls(calls, text[closed:])
        at = _past(r"\s*,\s*", text, end)
        if not at:
            calls.append(broken(text[end:], "unclosed_block"))
    return ParsedCalls(calls or [broken(block.raw, "malformed_structure")])


def _past(pattern: str, text: str, at: int) -> int:
    """End of the match of a pattern at `at`; 0 if it does not match."""
    found = re.compile(pattern).match(text, at)
    return found.end() if found is not None else 0


def _mistral_named(block: TagBlock) -> ParsedCalls:
    """[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}, the id optional: Mistral from its tokenizers' v11 on."""
    (_, name), *others = block.pieces
    tags = [tag for tag, _ in others]
    if tags not in (["[ARGS]"], ["[CALL_ID]", "[ARGS]"]):
        return ParsedCalls([broken(block.raw, "malformed_structure")])
    arguments = others[-1][1]
    found = first_json(arguments, _past(r"\s*", arguments, 0))
    if found is None:
        return ParsedCalls([broken(block.raw, "invalid_json")])
    _, end = found
    written_id = others[0][1].strip() if len(others) == 2 else ""
    raw = block.raw.removesuffix(arguments[end:])
    return ParsedCalls([call_of(name.strip(), arguments[:end], raw, written_id)], arguments[end:])


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")

FORMS = (
    CallForm("Hermes", "<tool_call>", "</tool_call>", read=partial(_single, _hermes)),
    CallForm("Qwen3-Coder", "<tool_call>", "</tool_call>", read=partial(_single, _coder)),
    CallForm("GLM", "<tool_call>", "</tool_call>", _PAIR, read=partial(_single, _glm)),
    CallForm("DeepSeek-V3", *_DEEPSEEK, (*_DEEPSEEK_CALL, "<｜tool▁sep｜>"),
             read=partial(_section, *_DEEPSEEK_CALL, _deepseek)),
    CallForm("DeepSeek-V3.1", *_DEEPSEEK, (*_DEEPSEEK_CALL, "<｜tool▁sep｜>"),
             read=partial(_section, *_DEEPSEEK_CALL, _deepseek_bare)),
    CallForm("Kimi-K2", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
             (*_KIMI_CALL, "<|tool_call_argument_begin|>"), read=partial(_section, *_KIMI_CALL, _kimi)),
    CallForm("Mistral, as a list", "[TOOL_CALLS]", "", read=_mistral_list),
    CallForm("Mistral, by name", "[TOOL_CALLS]", "", ("[ARGS]", "[CALL_ID]"), read=_mistral_named),
)  # fmt: skip
"""All forms. A template's form is found by trial (`template.py`): no two forms read the same call."""


# Form in which a chat template expects the calls of an assistant's message.


@dataclass(frozen=True)
class CallSpelling:
    """Transformation of calls before they are passed to a template.

    Attributes:
        arguments_as_text: JSON text, for templates that concatenate it with texts, as DeepSeek's do; else objects.
        short_ids: nine letters and digits, as Mistral's templates require.
    """

    arguments_as_text: bool = False
    short_ids: bool = False

    def apply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a message to the template's form."""
        shown = dict(message)
        if "tool_calls" in shown:
            shown["tool_calls"] = [self._call(call) for call in shown["tool_calls"]]
        if self.short_ids and "tool_call_id" in shown:
            shown["tool_call_id"] = short_id(shown["tool_call_id"])
        return shown

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self.arguments_as_text and not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "id": short_id(call["id"]) if self.short_ids else call["id"], "function": function}


SPELLINGS: Sequence[CallSpelling] = (
    CallSpelling(), CallSpelling(True), CallSpelling(short_ids=True), CallSpelling(True, True)
)  # fmt: skip


def short_id(name: str) -> str:
    """Nine letters and digits for an id; ids that the model wrote in this form stay unchanged."""
    return name if re.fullmatch("[A-Za-z0-9]{9}", name) else hashlib.sha256(name.encode()).hexdigest()[:9]
