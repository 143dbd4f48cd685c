"""A renderer based on a checkpoint's own chat template, for families without their own renderer.

The tokens after a reply are found by difference: new messages are appended to a made-up conversation, and the
template's additional text is taken. This is only correct if the template writes them identically after every
conversation, which is tested for each sequence of roles. A template that would drop earlier reasoning, or numbers its
messages, is not extended but rendered anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

from mslime.config.errors import ConfigError
from mslime.rollout.agents.call_forms import FORMS, SPELLINGS
from mslime.rollout.agents.messages import ChatError, Tools, whole_text
from mslime.rollout.agents.parsing import THINKING, HarmonyParser, TaggedParser
from mslime.rollout.agents.renderer import Parsed, ParsedCall

SETTING = "rollout.renderer"
Messages = Sequence[Mapping[str, Any]]
_TOOL = {"type": "function", "function": {"name": "lookup", "description": "looks up", "parameters": {
    "type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}}}  # fmt: skip
_ARGUMENTS, _CALLED = {"key": "b"}, ("functions.lookup:0", "lookup")  # Kimi's ids contain the name
_HISTORIES: tuple[Messages, ...] = (
    ({"role": "user", "content": "hi"},),
    ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}),
    ({"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}),
)
_REPLY, _THOUGHT = "said", "pondered"
USUAL = (("tool",), ("tool", "tool"), ("user",), ("tool", "user"))
"""Usual roles of messages after a reply."""


class TemplateRenderer:
    """A `Renderer` over transformers' chat templates.

    Args:
        tokenizer: of transformers, with a chat template.
        thinking: keep: extend turns even if the template would drop earlier reasoning.
        harmony: replies are in gpt-oss' format.

    Attributes:
        calls_read: the template writes tool calls in a form that can be parsed.
        form: name of that form.

    Raises:
        ConfigError: there is no chat template, or it contains no end of a turn.
    """

    def __init__(self, tokenizer: Any, thinking: Literal["template", "keep"], harmony: bool = False) -> None:
        self.name = "harmony" if harmony else "template"
        self._tokenizer, self._keep = tokenizer, thinking == "keep"
        template = tokenizer.chat_template or ""
        if not isinstance(template, str) or not template:
            raise ConfigError(SETTING, self.name, "this tokenizer has no chat template",
                              "set model.tokenizer_path to a chat model's tokenizer")  # fmt: skip
        self._spelling, self.form = SPELLINGS[0], "Harmony" if harmony else ""
        self.stop_ids = self._openers = frozenset[int]()
        tags = _thinking(template)
        self._thinks = harmony or (tags is not None and not self._closes(tags))
        self._parser: TaggedParser | HarmonyParser = HarmonyParser(tokenizer) if harmony else self._tagged(tags)
        self.calls_read = self._reads_calls()
        self.stop_ids = self._find_stops()
        if not self.stop_ids:
            raise ConfigError(SETTING, self.name, "the chat template ends replies without a special token",
                              "write a renderer for it (docs/agents.md)")  # fmt: skip
        self.refused = cache(self._refused)
        if harmony and not self.calls_read:
            raise ConfigError(SETTING, self.name, "the chat template does not write calls in gpt-oss' format",
                              "remove the setting")  # fmt: skip

    def render(self, messages: Messages, tools: Tools) -> list[int]:
        """See `Renderer`. Refuses tools if their calls cannot be parsed."""
        if tools and not self.calls_read:
            raise ChatError("tools", f"{len(tools)} tools", "tool calls in this template's form cannot be parsed",
                            "set rollout.renderer to one that parses them (docs/agents.md)")  # fmt: skip
        try:
            return self._encode(self._text(messages, tools, True))
        except Exception as error:  # jinja's errors are Exceptions; the template may raise any of them
            raise _refused_messages(messages, error) from error

    def extend(self, before: Sequence[int], sampled: int, new: Messages, tools: Tools) -> list[int] | None:
        at = len(before) - sampled
        reply, prompt = list(before[at:]), list(before[:at])
        if self.refused(_kind(new)):
            return None
        parsed = self.parse(reply, prompt, tools)
        answered = [m.get("tool_call_id", "") for m in itertools.takewhile(lambda m: m["role"] == "tool", new)]
        if len(answered) != len(parsed.calls):
            return None  # some templates also write the id of the call that they answer
        calls = [(called, _name_of(called, i, parsed.calls)) for i, called in enumerate(answered)]
        reply_message = self._calling(*calls) if calls else self._plain()
        closed = self._closed(before, reply, prompt, reply_message, tools)
        suffix = None if closed is None else self._suffix(_HISTORIES[0], reply_message, new, tools)
        if closed is None or suffix is None:
            return None
        whole = closed + self._encode(suffix)
        return whole if whole[: len(before)] == list(before) else None

    def parse(self, sampled: Sequence[int], prompt: Sequence[int], tools: Tools) -> Parsed:
        ids = list(sampled)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self._parser.parse(ids, prompt, tools)

    def spell(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    # ------------------------------------------------------------------------------------------------ new messages

    def _closed(
        self,
        before: Sequence[int],
        reply: Sequence[int],
        prompt: Sequence[int],
        reply_message: Mapping[str, Any],
        tools: Tools,
    ) -> list[int] | None:
        """The tokens up to the end of the reply, which is added if a limit or a text ended it. None if the reply ended
        differently than the template would end it. A token that opens the next message belongs to that message."""
        end, stops = self._end(reply_message, tools), [i for i in reply if i in self.stop_ids]
        ends = self._openers if end is None else {end}
        if stops:
            last = len(stops) == 1 and reply[-1] in ends
            return (list(before) if end is not None else list(before[:-1])) if last else None
        if not ends or self._parser.reasons(reply, prompt):
            return None
        return list(before) if end is None else [*before, end]

    def _suffix(self, history: Messages, reply_message: Mapping[str, Any], new: Messages, tools: Tools) -> str | None:
        """The template's text for new messages after the end of a reply; None if they would change the text before."""
        head = self._head(history, reply_message, tools)
        whole = self._text_or_none([*history, reply_message, *new], tools, True)
        return whole[len(head) :] if head and whole is not None and whole.startswith(head) else None

    def _head(self, history: Messages, reply_message: Mapping[str, Any], tools: Tools) -> str:
        """The text up to the token that ends the reply, or that opens the next message; empty if there is none."""
        text = self._text_or_none([*history, reply_message], tools, False)
        if text is None:
            return ""
        end = self._end(reply_message, tools)
        if end is None:
            return text if self._openers else ""
        word = self.spell([end])
        return text[: text.rindex(word) + len(word)]

    def _end(self, reply_message: Mapping[str, Any], tools: Tools = ()) -> int | None:
        """The special token that ends a reply in the template; None if a reply ends only with the next message's
        opening token."""
        written = self._written(reply_message, tools or ([_TOOL] if "tool_calls" in reply_message else []))
        special, ids = self._special(), self._encode(written[1]) if written is not None else []
        return next((i for i in reversed(ids) if i in special), None)

    def _special(self) -> set[int]:
        """Special tokens, except the tags of calls and reasoning."""
        added = {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        return (added | set(self._tokenizer.all_special_ids)) - self._parser.tag_ids

    def _find_stops(self) -> frozenset[int]:
        """Tokens that end a turn: the template's own or, if there are none, those that open the next turn."""
        replies = ((self._plain(), ("user",)), (self._calling(("call_0",)), ("tool",)))
        ends = [self._end(reply_message) for reply_message, _ in replies]
        self._openers = frozenset(
            opener for (reply_message, kind), end in zip(replies, ends, strict=True) if end is None
            for opener in self._opener(reply_message, kind)
        )  # fmt: skip
        return frozenset(i for i in ends if i is not None) | self._openers

    def _closes(self, thinking: tuple[str, str]) -> bool:
        """Whether the prompt closes the reasoning before the model's reply: then there is none that could be
        dropped."""
        text = self._text_or_none(_HISTORIES[0], (), True)
        return text is not None and text.rstrip().endswith(thinking[1])

    def _opener(self, reply_message: Mapping[str, Any], kind: Sequence[str]) -> list[int]:
        """The special token, if any, with which messages of these roles begin after a reply."""
        new = [_made(role, i) for i, role in enumerate(kind)]
        tools = [_TOOL] if "tool_calls" in reply_message else []
        reply_message = {
            key: value for key, value in reply_message.items() if key != "reasoning_content"
        }  # may be dropped then
        text = self._text_or_none([*_HISTORIES[0], reply_message], tools, False)
        whole = self._text_or_none([*_HISTORIES[0], reply_message, *new], tools, False)
        if text is None or whole is None or not whole.startswith(text):
            return []
        ids = self._encode(whole[len(text) :])
        return [i for i in ids[:1] if i in self._special()]

    # ------------------------------------------------------------------------------------------ possible extensions

    def _refused(self, kind: tuple[str, ...]) -> str:
        """Reason why messages of these roles cannot be appended; empty if they can."""
        if not set(kind) <= {"system", "user", "tool"}:
            return "they include an assistant message"
        answers = list(itertools.takewhile(lambda role: role == "tool", kind))
        new = [_made(role, i) for i, role in enumerate(kind)]
        reply_message = (
            self._calling(*((f"call_{i}", "lookup") for i in range(len(answers)))) if answers else self._plain()
        )
        tools = [_TOOL] if answers else []
        if answers and not self.calls_read:
            return "tool calls in this template's form cannot be parsed"
        if self._thinks and not self._keep and _THOUGHT not in self._head(_HISTORIES[0], reply_message, tools):
            return "the template drops the reasoning of a reply"
        # some templates refuse system messages
        histories = [history for history in _HISTORIES if self._head(history, reply_message, tools)]
        suffixes = [self._suffix(history, reply_message, new, tools) for history in histories]
        if None in suffixes:
            return "the template rewrites the text before them"
        if len(set(suffixes)) > 1:
            return "the template's text depends on the earlier conversation"
        parts = [self._encode(self._head(_HISTORIES[0], reply_message, tools)), self._encode(str(suffixes[0]))]
        whole = self._encode(self._text([*_HISTORIES[0], reply_message, *new], tools, True))
        return "" if whole == parts[0] + parts[1] else "a token spans the end of the reply"

    def _tagged(self, thinking: tuple[str, str] | None) -> TaggedParser:
        """Parser of the template's form of calls; tries all spellings of its input."""
        for self._spelling in SPELLINGS:
            written = self._written(self._calling(_CALLED), [_TOOL])
            for form in FORMS:
                self._parser = TaggedParser(self._tokenizer, form, thinking)
                if written is not None and form.opens in written[1] and self._reads_calls():
                    self.form = form.name
                    return self._parser
        self._spelling = SPELLINGS[0]
        return TaggedParser(self._tokenizer, None, thinking)

    def _reads_calls(self) -> bool:
        """Whether a call that the template writes is parsed back correctly."""
        written = self._written(self._calling(_CALLED), [_TOOL])
        if written is None:
            return False
        read = self.parse(self._encode(written[1].rstrip()), self._encode(written[0]), [_TOOL])
        return [(c.name, c.arguments, c.status) for c in read.calls] == [("lookup", '{"key":"b"}', "ok")]

    def _written(self, reply_message: Mapping[str, Any], tools: Tools) -> tuple[str, str] | None:
        """(the text before a reply, the reply's text); None if the template refuses the conversation."""
        whole = self._text_or_none([*_HISTORIES[0], reply_message], tools, False)
        befores = [self._text_or_none(_HISTORIES[0], tools, prompt) for prompt in (True, False)]
        if whole is None:
            return None
        return next(
            ((before, whole[len(before) :]) for before in befores if before is not None and whole.startswith(before)),
            None,
        )

    def _plain(self) -> dict[str, Any]:
        return {"role": "assistant", "content": _REPLY, **self._reasoned()}

    def _calling(self, *calls: Sequence[str]) -> dict[str, Any]:
        """A reply with calls given as (id, name)."""
        made = [
            {"id": call[0], "type": "function", "function": {"name": call[-1], "arguments": _ARGUMENTS}}
            for call in calls
        ]
        return {"role": "assistant", "content": "", "tool_calls": made, **self._reasoned()}

    def _reasoned(self) -> dict[str, str]:
        return {} if self._keep or not self._thinks else {"reasoning_content": _THOUGHT}

    # -------------------------------------------------------------------------------------------------- the tokenizer

    def _text(self, messages: Messages, tools: Tools, prompt: bool) -> str:
        spelled = [self._spelling.apply(m) for m in messages]  # gpt-oss uses the key `thinking` for reasoning
        shown = [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in spelled]
        return self._tokenizer.apply_chat_template(
            shown, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
        )

    def _text_or_none(self, messages: Messages, tools: Tools, prompt: bool) -> str | None:
        """See `_text`; None if the template refuses the conversation."""
        try:
            return self._text(messages, tools, prompt)
        except Exception:  # jinja's errors are Exceptions; the template may raise any of them
            return None

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(whole_text(text), add_special_tokens=False)


def _name_of(called: str, at: int, calls: Sequence[ParsedCall]) -> str:
    """The tool of the call that an id names: the model's own id, or an id from here, which ends with the call's number;
    otherwise that of the call at the same index."""
    own = next((c.name for c in calls if c.id and c.id == called), "")
    number = called.rpartition("_")[2]
    ours = called.startswith("call_") and number.isdecimal() and int(number) < len(calls)
    return own or calls[int(number) if ours else at].name


def _thinking(template: str) -> tuple[str, str] | None:
    """The tags that a template writes around reasoning."""
    found = next((tags for tags in THINKING if tags[0] in template), None)
    return THINKING[0] if found is None and "reasoning_content" in template else found


def _kind(new: Messages) -> tuple[str, ...]:
    """The roles of messages; runs of equal roles are shortened to two."""
    roles = [str(m["role"]) for m in new]
    return tuple(r for i, r in enumerate(roles) if i < 2 or not roles[i - 2] == roles[i - 1] == r)


def _made(role: str, i: int) -> dict[str, Any]:
    message = {"role": role, "content": f"{role} {i}"}
    return {**message, "tool_call_id": f"call_{i}"} if role == "tool" else message


def _refused_messages(messages: Messages, error: Exception) -> ChatError:
    roles = ", ".join(str(m["role"]) for m in messages[-5:])
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return ChatError("messages", roles, f"the chat template cannot render them ({reason})", "fix the messages")
