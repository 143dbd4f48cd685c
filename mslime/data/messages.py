"""Chat messages as people have them, in the one form in which every template takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from mslime.config.errors import DataError, reading

_JSON = "is not valid JSON"
_WAY_OUT = "write the text into content"


def is_chat(value: object) -> bool:
    """A list of messages, each with a role, and content or calls of tools."""
    if not isinstance(value, list):
        return False
    return all(isinstance(m, dict) and _is_message(cast("dict[str, Any]", m)) for m in cast("list[object]", value))


def _is_message(found: Mapping[str, Any]) -> bool:
    return "role" in found and ("content" in found or bool(found.get("tool_calls")))


def as_messages(prompt: str | Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """A prompt as chat messages: a text is a user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def normalised(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message whose content is text, whose calls of tools have objects as arguments, and that has no empty keys.

    Templates treat a list of parts each in its own way; OpenAI's format writes arguments as JSON, which templates would
    write as JSON once more; and a table gives every message the keys of all, at which templates look with `in`.

    Raises:
        DataError: content that is no text, or arguments that are not JSON.
    """
    found = {key: value for key, value in message.items() if value is not None}
    found["content"] = _text(message, where)
    if found.get("tool_calls"):
        found["tool_calls"] = [_with_arguments(call, where) for call in found["tool_calls"]]
    return found


def _text(message: Mapping[str, Any], where: str) -> str | None:
    """The content, with parts of text joined; None beside calls of tools."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return content
    if not isinstance(content, list):
        raise DataError(where, content, f"content of the {message['role']} message must be text", _WAY_OUT)
    texts = list[str]()
    for part in cast("list[object]", content):
        kind = cast("dict[str, Any]", part).get("type") if isinstance(part, dict) else type(part).__name__
        text = cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            rule = f"content of the {message['role']} message has a part that is no text; mslime trains on text alone"
            raise DataError(where, kind, rule, "leave rows with images, audio or files out")
        texts.append(text)
    return "".join(texts)


def _with_arguments(call: Any, where: str) -> Any:
    """A call of a tool with its arguments as an object."""
    with reading(DataError, where, "a call of a tool is an object with a function", "mend or delete the row"):
        function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        with reading(DataError, where, f"the arguments of a call of a tool: {_JSON}", "mend or delete the row"):
            function["arguments"] = json.loads(function["arguments"] or "{}")
    return {**call, "function": function}


def tools_of(value: Any, where: str) -> list[Any] | None:
    """Definitions of tools from a list, or from one written as JSON; None when there are none. Raises DataError."""
    if isinstance(value, str):
        with reading(DataError, where, f"the tools: {_JSON}", "mend or delete the row"):
            value = json.loads(value)
    if not value:
        return None
    if not isinstance(value, list):
        raise DataError(where, value, "tools must be a list of definitions", "mend the row, or data.tools_key")
    return cast("list[Any]", _without_nulls(value))


def _without_nulls(value: Any) -> Any:
    """A table gives every definition the keys of all: those without a value go."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in cast("dict[str, Any]", value).items() if v is not None}
    return [_without_nulls(v) for v in cast("list[Any]", value)] if isinstance(value, list) else value
