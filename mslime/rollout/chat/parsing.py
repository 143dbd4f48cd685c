"""What a model said, read from token ids, for families whose chat template is all that mslime has of them.

Tags that are tokens of the vocabulary are looked for as tokens: spelled out with ordinary ones they are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mslime.rollout.chat.messages import canonical_json
from mslime.rollout.chat.renderer import Parsed, ParsedCall

THINK, THOUGHT, CALL, CALLED = "<think>", "</think>", "<tool_call>", "</tool_call>"


class TaggedParser:
    """Reads `<think>...</think>`, and calls in Hermes' form, `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

    Args:
        tokenizer: of transformers.
        tags: those that the chat template writes; others are text.
    """

    def __init__(self, tokenizer: Any, tags: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        found = {tag: tokenizer.convert_tokens_to_ids(tag) for tag in tags}
        vocabulary = tokenizer.get_added_vocab()
        self._ids = {i: tag for tag, i in found.items() if tag in vocabulary}
        spelled = [re.escape(tag) for tag in tags if tag not in vocabulary]
        self._spelled = re.compile(f"({'|'.join(spelled)})") if spelled else None

    def parse(self, sampled: Sequence[int], prompt: Sequence[int]) -> Parsed:
        """The parts of a reply, of whose ids those that end a turn were taken off."""
        text, reasoning, raw = "", "", ""
        state, calls = THINK if self.opens(prompt) else "", list[ParsedCall]()
        for tag, part in self._pieces(sampled):
            if state == CALL:
                raw += tag + part
                if tag == CALLED:
                    calls.append(
                        read_call(raw.removeprefix(CALL).partition(CALLED)[0], raw[: raw.rindex(CALLED)] + tag)
                    )
                    state, text, raw = "", text + part, ""
            elif tag == CALL:
                state, raw = CALL, tag + part
            elif state == THINK and tag == THOUGHT:
                state, text = "", text + part
            elif state == THINK or (tag == THINK and not text.strip()):
                state, reasoning = THINK, reasoning + (tag if state == THINK else "") + part
            else:
                text += tag + part
        if raw:
            calls.append(ParsedCall("", "", raw, "unclosed_block"))
        tagged = bool(reasoning or calls)
        return Parsed(text.strip() if tagged else text, reasoning.strip(), tuple(calls))

    def opens(self, ids: Sequence[int]) -> bool:
        """Whether reasoning is open after these ids."""
        tags = [tag for tag, _ in self._pieces(ids[-64:]) if tag in (THINK, THOUGHT)]
        return tags[-1:] == [THINK]

    def reasons(self, sampled: Sequence[int], prompt: Sequence[int]) -> bool:
        """Whether reasoning is open after a reply."""
        tags = [tag for tag, _ in self._pieces(sampled) if tag in (THINK, THOUGHT)]
        return tags[-1] == THINK if tags else self.opens(prompt)

    def _pieces(self, ids: Sequence[int]) -> Iterator[tuple[str, str]]:
        """(tag or nothing, the text after it), in order."""
        tag, run = "", list[int]()
        for i in ids:
            if i in self._ids:
                yield from self._split(tag, run)
                tag, run = self._ids[i], []
            else:
                run.append(i)
        yield from self._split(tag, run)

    def _split(self, tag: str, run: Sequence[int]) -> Iterator[tuple[str, str]]:
        text = self._tokenizer.decode(list(run), skip_special_tokens=False) if run else ""
        parts = self._spelled.split(text) if self._spelled is not None else [text]
        yield from zip([tag, *parts[1::2]], parts[0::2], strict=True)


def read_call(text: str, raw: str) -> ParsedCall:
    """A call written as {"name": ..., "arguments": {...}}."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ParsedCall("", "", raw, "invalid_json")
    if not isinstance(found, dict) or not isinstance(found.get("arguments", {}), dict):
        return ParsedCall("", "", raw, "malformed_structure")
    if not isinstance(found.get("name"), str) or not found["name"]:
        return ParsedCall("", "", raw, "missing_name")
    return ParsedCall(found["name"], canonical_json(json.dumps(found.get("arguments", {}))), raw)


class HarmonyParser:
    """Reads gpt-oss' format, in which a reply is several messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{...}<|call|>, or <|channel|>final<|message|>...<|return|>. See OpenAI's "Harmony
    response format".
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        names = ("<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
        ids = [tokenizer.convert_tokens_to_ids(name) for name in names]
        self._start, self._message, *ends = ids
        self._ends = frozenset(ends)

    def parse(self, sampled: Sequence[int], prompt: Sequence[int]) -> Parsed:
        """The parts of a reply, of whose ids those that end a turn were taken off."""
        text, reasoning, calls = list[str](), list[str](), list[ParsedCall]()
        for header, body in self._messages(sampled):
            recipient = re.search(r"to=functions\.([^\s<]+)", header)
            if recipient is not None:
                calls.append(_harmony_call(recipient.group(1), body, header))
            elif "analysis" in header:
                reasoning.append(body)
            else:
                text.append(body)
        return Parsed("".join(text), "".join(reasoning), tuple(calls))

    def reasons(self, sampled: Sequence[int], prompt: Sequence[int]) -> bool:
        """Whether the reply ends within a message: only an ended one can be gone on from."""
        return True

    def _messages(self, ids: Sequence[int]) -> Iterator[tuple[str, str]]:
        """(header, body) of each message. A reply begins within the header that the prompt began."""
        part, header = list[int](), None
        for i in [*ids, self._start]:
            if i == self._message and header is None:
                header, part = self._text(part), []
            elif i == self._start or i in self._ends:
                if header is not None or part:
                    yield header or "", self._text(part)
                part, header = [], None
            else:
                part.append(i)

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def _harmony_call(name: str, body: str, header: str) -> ParsedCall:
    try:
        arguments = json.loads(body or "{}")
    except (ValueError, RecursionError):
        return ParsedCall("", "", body, "invalid_json")
    if not isinstance(arguments, dict):
        return ParsedCall("", "", body, "malformed_structure")
    return ParsedCall(name, canonical_json(body), f"{header}<|message|>{body}")
