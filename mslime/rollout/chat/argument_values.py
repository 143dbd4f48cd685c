"""The values of arguments that a model wrote without their types, by the tool's JSON schema.

Families that write an argument between tags write a text as it is and anything else as JSON, so `5` may be either: the
schema of the parameter says which.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, cast

from mslime.rollout.chat.messages import NO_JSON, Tools, parsed_json

Schema = Mapping[str, Any]
_KINDS: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null",
}  # fmt: skip


def parameters_of(name: str, tools: Tools) -> Mapping[str, Schema]:
    """Schemas of a tool's parameters by name; none of a tool that is not offered, or says none."""
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            schema = function.get("parameters")
            properties = schema.get("properties") if isinstance(schema, dict) else None
            return cast("dict[str, Schema]", properties) if isinstance(properties, dict) else {}
    return {}


def typed(text: str, schema: object) -> Any:
    """The value that a text stands for.

    Args:
        schema: of the parameter; None, or one that names no type: JSON where it is some, else the text.

    Raises:
        ValueError: it is no value at all, and the schema allows no text.
    """
    kinds = _allowed(schema)
    value = parsed_json(text)
    if value is NO_JSON:
        return _unlike_json(text, kinds)
    return text if "string" in kinds and _kind(value) not in kinds - {"string"} else value


def _unlike_json(text: str, kinds: set[str]) -> Any:
    """The value of a text that is no JSON. Qwen3-Coder's first templates wrote Python's: True, None, ['a']."""
    if not kinds or "string" in kinds:
        return text
    try:
        return json.loads(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no {' or '.join(sorted(kinds))}: {text:.80}") from error


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "")


def _allowed(schema: object) -> set[str]:
    """The kinds of values that a schema allows; empty: it does not say."""
    if not isinstance(schema, dict):
        return set()
    said = cast("dict[str, Any]", schema)
    kinds = said.get("type")
    if isinstance(kinds, str):
        found = {kinds}
    elif isinstance(kinds, list):
        found = {str(kind) for kind in cast("list[Any]", kinds)}
    elif isinstance(values := said.get("enum"), list):
        found = {_kind(value) for value in cast("list[Any]", values)}
    else:
        branches = [_allowed(branch) for branch in _listed(said.get("anyOf")) + _listed(said.get("oneOf"))]
        found = set[str]().union(*branches) if all(branches) else set[str]()
    return found | {"integer"} if "number" in found else found


def _listed(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
