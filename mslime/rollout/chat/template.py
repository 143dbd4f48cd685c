"""A renderer made of a checkpoint's own chat template, for families without a renderer of their own.

What follows a reply is the text that the template adds to a made-up conversation when the new messages are appended to
it. That is right only where the template writes them after every conversation the same way, which is tried for each
sequence of roles: one that would drop earlier reasoning, or numbers its messages, is not extended but rendered anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, Protocol

from mslime.config.errors import ConfigError
from mslime.rollout.chat.errors import ChatError
from mslime.rollout.chat.messages import Tools
from mslime.rollout.chat.parsing import CALL, CALLED, THINK, THOUGHT, HarmonyParser, TaggedParser
from mslime.rollout.chat.renderer import Parsed

SETTING = "rollout.renderer"
Messages = Sequence[Mapping[str, Any]]
_TOOL = {"type": "function", "function": {"name": "lookup", "description": "looks up", "parameters": {
    "type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}}}  # fmt: skip
_ARGUMENTS = {"key": "b"}
_HISTORIES: tuple[Messages, ...] = (
    ({"role": "user", "content": "hi"},),
    ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}),
    ({"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}),
)
_SAID, _THOUGHT = "said", "pondered"
USUAL = (("tool",), ("tool", "tool"), ("user",), ("tool", "user"))
"""Roles that follow a reply, as agents send them."""


class Parser(Protocol):
    """Reads replies of one format."""

    def parse(self, sampled: Sequence[int], prompt: Sequence[int]) -> Parsed: ...
    def reasons(self, sampled: Sequence[int], prompt: Sequence[int]) -> bool: ...


class TemplateRenderer:
    """A `Renderer` over transformers' chat templates.

    Args:
        tokenizer: of transformers, with a chat template.
        thinking: keep: whether the template would drop earlier reasoning makes no difference.
        harmony: replies are in gpt-oss' format.

    Attributes:
        calls_read: the template writes calls of tools in a form that can be read back.

    Raises:
        ConfigError: there is no chat template, or nothing that ends a turn in it.
    """

    def __init__(self, tokenizer: Any, thinking: Literal["template", "keep"], harmony: bool = False) -> None:
        self.name = "harmony" if harmony else "template"
        self._tokenizer, self._keep = tokenizer, thinking == "keep"
        template = tokenizer.chat_template or ""
        if not isinstance(template, str) or not template:
            raise ConfigError(SETTING, self.name, "this tokenizer has no chat template",
                              "point model.tokenizer_path at a chat model's tokenizer")  # fmt: skip
        self._thinks = harmony or THINK in template or "reasoning_content" in template
        tags = [*((THINK, THOUGHT) if self._thinks else ()), *((CALL, CALLED) if CALL in template else ())]
        self._parser: Parser = HarmonyParser(tokenizer) if harmony else TaggedParser(tokenizer, tags)
        ends = [self._end(self._plain()), self._end(self._calling(("call_0",)))]
        self.stop_ids = frozenset(i for i in ends if i is not None)
        if not self.stop_ids:
            raise ConfigError(SETTING, self.name, "the chat template ends a reply with no special token",
                              "write a renderer for it, module:function (docs/agents.md)")  # fmt: skip
        self.refused = cache(self._refused)
        self.calls_read = self._reads_calls()
        if harmony and not self.calls_read:
            raise ConfigError(SETTING, self.name, "the chat template does not write calls in gpt-oss' format",
                              "leave the setting out")  # fmt: skip

    def render(self, messages: Messages, tools: Tools) -> list[int]:
        """See `Renderer`. Tools whose calls could not be read are refused."""
        if tools and not self.calls_read:
            raise ChatError("tools", f"{len(tools)} tools", "calls in this template's form are not read",
                            "name a renderer that reads them: rollout.renderer (docs/agents.md)")  # fmt: skip
        try:
            return self._encode(self._text(messages, tools, True))
        except Exception as error:  # jinja's errors are Exceptions; the template raises what it likes
            raise _refused_messages(messages, error) from error

    def extend(self, before: Sequence[int], sampled: int, new: Messages, tools: Tools) -> list[int] | None:
        """See `Renderer`."""
        at = len(before) - sampled
        reply, prompt = list(before[at:]), list(before[:at])
        if self.refused(_kind(new)):
            return None
        parsed = self.parse(reply, prompt, tools)
        answered = [m.get("tool_call_id", "") for m in itertools.takewhile(lambda m: m["role"] == "tool", new)]
        if len(answered) != len(parsed.calls):
            return None  # whom they answer is part of what some templates write
        calls = [(name, c.name) for name, c in zip(answered, parsed.calls, strict=True)]
        said = self._calling(*calls) if calls else self._plain()
        closed = self._closed(before, reply, prompt, said, tools)
        suffix = None if closed is None else self._suffix(_HISTORIES[0], said, new, tools)
        return None if closed is None or suffix is None else closed + self._encode(suffix)

    def parse(self, sampled: Sequence[int], prompt: Sequence[int], tools: Tools) -> Parsed:
        """See `Renderer`."""
        ids = list(sampled)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self._parser.parse(ids, prompt)

    def spell(self, ids: Sequence[int]) -> str:
        """See `Renderer`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    # ------------------------------------------------------------------------------------------------ the difference

    def _closed(
        self, before: Sequence[int], reply: Sequence[int], prompt: Sequence[int], said: Mapping[str, Any], tools: Tools
    ) -> list[int] | None:
        """The tokens up to the end of the reply, which is added where a limit or a text ended it; None where it ended
        otherwise than the template would end it."""
        end, stops = self._end(said, tools), [i for i in reply if i in self.stop_ids]
        if stops:
            return list(before) if stops == [end] and reply[-1] == end else None
        if end is None or self._parser.reasons(reply, prompt):
            return None
        return [*before, end]

    def _suffix(self, history: Messages, said: Mapping[str, Any], new: Messages, tools: Tools) -> str | None:
        """The text that the template writes after the end of a reply for new messages; None where it would write
        something before it otherwise."""
        head = self._head(history, said, tools)
        try:
            whole = self._text([*history, said, *new], tools, True)
        except Exception:  # jinja's errors are Exceptions; the template raises what it likes
            return None
        return whole[len(head) :] if head and whole.startswith(head) else None

    def _head(self, history: Messages, said: Mapping[str, Any], tools: Tools) -> str:
        """The text up to the token that ends the reply; empty where there is none."""
        try:
            text = self._text([*history, said], tools, False)
        except Exception:  # as above
            return ""
        end = self._end(said, tools)
        if end is None:
            return ""
        word = self.spell([end])
        return text[: text.rindex(word) + len(word)]

    def _end(self, said: Mapping[str, Any], tools: Tools = ()) -> int | None:
        """The special token that ends a reply in the template."""
        try:
            text = self._text([*_HISTORIES[0], said], tools or ([_TOOL] if "tool_calls" in said else []), False)
        except Exception:  # as above
            return None
        special = set(self._tokenizer.all_special_ids) | {
            i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }
        ids = self._encode(text)
        return next((i for i in reversed(ids) if i in special), None)

    # ---------------------------------------------------------------------------------------------- what is admitted

    def _refused(self, kind: tuple[str, ...]) -> str:
        """Why messages of these roles cannot be appended; empty when they can."""
        if not set(kind) <= {"system", "user", "tool"}:
            return "an assistant's message is among them"
        answers = list(itertools.takewhile(lambda role: role == "tool", kind))
        new = [_made(role, i) for i, role in enumerate(kind)]
        said = self._calling(*((f"call_{i}", "lookup") for i in range(len(answers)))) if answers else self._plain()
        tools = [_TOOL] if answers else []
        if answers and not self.calls_read:
            return "calls in this template's form are not read"
        if self._thinks and not self._keep and _THOUGHT not in self._head(_HISTORIES[0], said, tools):
            return "the template drops the reasoning of a reply"
        suffixes = [self._suffix(history, said, new, tools) for history in _HISTORIES]
        if None in suffixes:
            return "the template rewrites what comes before them"
        if len(set(suffixes)) > 1:
            return "what the template writes depends on the conversation before"
        parts = [self._encode(self._head(_HISTORIES[0], said, tools)), self._encode(str(suffixes[0]))]
        whole = self._encode(self._text([*_HISTORIES[0], said, *new], tools, True))
        return "" if whole == parts[0] + parts[1] else "tokens reach across the end of the reply"

    def _reads_calls(self) -> bool:
        """Whether a call that the template writes is read back."""
        said = self._calling(("call_0", "lookup"))
        try:
            before = self._text(_HISTORIES[0], [_TOOL], True)
            whole = self._text([*_HISTORIES[0], said], [_TOOL], False)
        except Exception:  # as above
            return False
        if not whole.startswith(before):
            return False
        read = self.parse(self._encode(whole[len(before) :].rstrip()), self._encode(before), [_TOOL])
        return [(c.name, c.arguments, c.status) for c in read.calls] == [("lookup", '{"key":"b"}', "ok")]

    def _plain(self) -> dict[str, Any]:
        return {"role": "assistant", "content": _SAID, **self._reasoned()}

    def _calling(self, *calls: Sequence[str]) -> dict[str, Any]:
        """A reply with calls of (id, name)."""
        made = [
            {"id": call[0], "type": "function", "function": {"name": call[-1], "arguments": _ARGUMENTS}}
            for call in calls
        ]
        return {"role": "assistant", "content": "", "tool_calls": made, **self._reasoned()}

    def _reasoned(self) -> dict[str, str]:
        return {} if self._keep or not self._thinks else {"reasoning_content": _THOUGHT}

    # -------------------------------------------------------------------------------------------------- the tokenizer

    def _text(self, messages: Messages, tools: Tools, prompt: bool) -> str:
        shown = [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else dict(m) for m in messages]
        return self._tokenizer.apply_chat_template(  # gpt-oss calls reasoning `thinking`
            shown, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _kind(new: Messages) -> tuple[str, ...]:
    """The roles of messages, of a run of equal ones two at most."""
    roles = [str(m["role"]) for m in new]
    return tuple(r for i, r in enumerate(roles) if i < 2 or not roles[i - 2] == roles[i - 1] == r)


def _made(role: str, i: int) -> dict[str, Any]:
    message = {"role": role, "content": f"{role} {i}"}
    return {**message, "tool_call_id": f"call_{i}"} if role == "tool" else message


def _refused_messages(messages: Messages, error: Exception) -> ChatError:
    roles = ", ".join(str(m["role"]) for m in messages[-5:])
    told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return ChatError("messages", roles, f"the chat template refuses them ({told})", "mend the messages")
