"""How a chat template wants the calls of an assistant's message to be given to it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallSpelling:
    """What is made of calls before a template sees them.

    Attributes:
        arguments_as_text: JSON text, for templates that put them together with texts, as DeepSeek's do; else objects.
        short_ids: nine letters and digits, as Mistral's templates demand.
    """

    arguments_as_text: bool = False
    short_ids: bool = False

    def apply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message as the template wants it."""
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
    """Nine letters and digits that stand for an id; those that a model wrote so are their own."""
    return name if re.fullmatch("[A-Za-z0-9]{9}", name) else hashlib.sha256(name.encode()).hexdigest()[:9]
