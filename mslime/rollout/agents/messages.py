"""Chat messages in one form for all dialects, comparison of copies, and errors of a request.

A client's history only selects a recorded turn, so meaningless content is removed: null and unknown keys, cache
markers, empty parts. The remainder is compared exactly: a mismatch costs a sequence, a wrong match would train on
tokens that the model never saw.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from mslime.config.errors import UserError
from mslime.rollout.workflow import NoRoomError

# Errors of a request to a rollout's model. A server writes them in the form of the client's dialect.


class ChatError(UserError):
    """An invalid request. A repeat would fail again."""


class ContextFull(ChatError, NoRoomError):
    """The messages leave no room for a reply. Recorded turns stay.

    Attributes:
        tokens, most: size of the messages, and its limit; clients parse them from the API's error text.
    """

    tokens = most = 0

    @classmethod
    def of(cls, value: str, rule: str, tokens: int, most: int) -> ContextFull:
        """An error with its numbers."""
        error = cls("messages", value, rule, "send fewer messages, or shorter ones")
        error.tokens, error.most = tokens, most
        return error


class LimitReached(ChatError, NoRoomError):
    """The rollout has used up its limit of turns, sequences, tokens or time; `field` is the setting."""


class SessionOver(ChatError):
    """The rollout has ended, and accepts no more turns."""


ROLES = ("system", "user", "assistant", "tool")
Tools = Sequence[Mapping[str, Any]]
"""Tool definitions in the form of chat completions: {type: function, function: {name, description, parameters}}."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call.

    Attributes:
        id: identifies the call for the client.
        arguments: canonical JSON if they are JSON, else the text unchanged.
        native: id written by the model itself, in formats that have one; templates receive this one.
    """

    id: str
    name: str
    arguments: str
    native: str = ""


@dataclass(frozen=True)
class Message:
    """A message.

    Attributes:
        role: one of `ROLES`.
        reasoning: of an assistant's message; None: the sender did not include it.
        answers: id of the call that a tool's message answers.
        echo: name of the turn that the message claims to copy, in dialects that support it. Not compared.
    """

    role: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    answers: str = ""
    echo: str = ""


def canonical_json(text: str) -> str:
    """Canonical form of a JSON text; any other text unchanged."""
    return _known_json(text) if len(text) <= _KEPT else _canonical_json(text)


def _canonical_json(text: str) -> str:
    value = parsed_json(text or "{}")
    return text if value is NO_JSON else json.dumps(value, sort_keys=True, separators=(",", ":"))


NO_JSON = object()
"""Sentinel for the value of a text that is not JSON."""


def parsed_json(text: str, otherwise: Any = NO_JSON) -> Any:
    """Value of a text from a model or a client; `otherwise` if it is not JSON, or nested too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def first_json(text: str, at: int = 0) -> tuple[Any, int] | None:
    """The JSON value that starts at `at`, and its end; None if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


_KEPT = 1024
"""Longest text, in characters, to cache. Each request reads the history again; longer texts may hold a whole file."""
_known_json = lru_cache(4096)(_canonical_json)


def whole_text(text: str) -> str:
    """Replace halves of characters (surrogates), which tokenizers refuse, by U+FFFD. Python's texts contain them if
    they were read from bytes or JSON that are not Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def as_ordinary(text: str, special: Iterable[str]) -> str:
    """Break spelled-out special tokens with a blank, so they stay text: a tool's output must not end the model's turn,
    or begin one."""
    for token in special:
        if token in text:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def is_copy(sent: Message, recorded: Message) -> bool:
    """Whether `sent` is a copy of `recorded`. Absent reasoning and absent ids of calls are no contradiction."""
    if (recorded.role, recorded.text, recorded.answers) != (sent.role, sent.text, sent.answers):
        return False
    if sent.reasoning is not None and sent.reasoning != (recorded.reasoning or ""):
        return False
    return len(sent.calls) == len(recorded.calls) and all(map(_is_call_copy, sent.calls, recorded.calls))


def _is_call_copy(sent: ToolCall, recorded: ToolCall) -> bool:
    named = not sent.id or sent.id == recorded.id
    return named and (sent.name, sent.arguments) == (recorded.name, recorded.arguments)


def echoes(sent: Sequence[Message]) -> set[str]:
    """Names of recorded turns and calls in the messages."""
    return {name for m in sent for name in (m.echo, m.answers, *(call.id for call in m.calls)) if name}


# ------------------------------------------------------------------------------------------ chat completions' form


def from_chat(value: object, where: str) -> Message:
    """Parse a message in the form of chat completions.

    Args:
        where: its position, for errors.

    Raises:
        ChatError: it is not a message, or has a part that is not text.
    """
    message = as_object(value, where)
    role = message.get("role")
    if role == "developer":
        role = "system"
    if role == "function":
        raise ChatError(f"{where}.role", role, "is not supported", "answer calls with role tool")
    if role not in ROLES:
        raise ChatError(f"{where}.role", role, f"must be one of {', '.join(ROLES)}", "correct the role")
    calls = tuple(
        _call(call, f"{where}.tool_calls[{i}]")
        for i, call in enumerate(as_list(message.get("tool_calls"), f"{where}.tool_calls"))
    )
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        reasoning = message.get("reasoning")
    return Message(
        role,
        text_of(message.get("content"), f"{where}.content"),
        calls,
        None if reasoning is None or role != "assistant" else as_text(reasoning, f"{where}.reasoning_content"),
        as_text(message.get("tool_call_id") or "", f"{where}.tool_call_id"),
    )


def _call(value: object, where: str) -> ToolCall:
    call = as_object(value, where)
    function = as_object(call.get("function"), f"{where}.function")
    name = as_text(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments)
    return ToolCall(as_text(call.get("id") or "", f"{where}.id"), name, canonical_json(as_text(arguments or "", where)))


def text_of(content: object, where: str) -> str:
    """Text of a content that is a text, a list of text parts, or null.

    Raises:
        ChatError: a part is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(as_list(content, where)))


def _part(value: object, where: str) -> str:
    part = as_object(value, where)
    kind = part.get("type")
    if kind == "refusal":
        return as_text(part.get("refusal"), f"{where}.refusal")
    if kind not in ("text", "input_text", "output_text"):
        raise ChatError(f"{where}.type", kind, "mslime supports text only", "remove images, audio and files")
    return as_text(part.get("text"), f"{where}.text")


def to_chat(message: Message) -> dict[str, Any]:
    """A reply in the form of chat completions; sent back unchanged it matches its record."""
    shown: dict[str, Any] = {"role": message.role, "content": message.text or None}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.calls:
        shown["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.calls
        ]
    return shown


# ------------------------------------------------------------------------------------------------ templates' form


def to_template(messages: Sequence[Message], native: Mapping[str, str]) -> list[dict[str, Any]]:
    """Messages in the form of chat templates: arguments are objects, absent values have no key.

    Args:
        native: the model's own call ids, by the client's ids.
    """
    return [_template_message(m, native) for m in messages]


def _template_message(m: Message, native: Mapping[str, str]) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": m.role, "content": m.text}
    if m.reasoning:
        shown["reasoning_content"] = m.reasoning
    if m.calls:
        shown["tool_calls"] = [_template_call(c, native) for c in m.calls]
    if m.answers:
        shown["tool_call_id"] = native.get(m.answers, m.answers)
    return shown


def _template_call(call: ToolCall, native: Mapping[str, str]) -> dict[str, Any]:
    found = parsed_json(call.arguments)
    arguments = found if isinstance(found, dict) else call.arguments
    name = {"name": call.name, "arguments": arguments}
    return {"id": call.native or native.get(call.id, call.id), "type": "function", "function": name}


# ----------------------------------------------------------------------------------------------- reading foreign JSON


def as_object(value: object, where: str) -> dict[str, Any]:
    """A JSON object. Raises ChatError for any other value."""
    if not isinstance(value, dict):
        raise ChatError(where, _shown(value), "must be an object", "see the API's reference")
    return cast("dict[str, Any]", value)


def as_list(value: object, where: str) -> list[Any]:
    """A JSON array; null is an empty one. Raises ChatError for any other value."""
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise ChatError(where, _shown(value), "must be an array", "see the API's reference")
    return list(cast("list[Any]", value))


def as_text(value: object, where: str) -> str:
    """A string. Raises ChatError for any other value."""
    if not isinstance(value, str):
        raise ChatError(where, _shown(value), "must be a string", "see the API's reference")
    return value


def _shown(value: object) -> str:
    return f"{value!r:.80}"
