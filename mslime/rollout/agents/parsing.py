"""Parses a model's reply from token ids, for families of which mslime has only the chat template.

Tags that are vocabulary tokens are matched as tokens: spelled out with ordinary tokens they are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from mslime.rollout.agents.call_forms import CallForm, ParsedCalls, Piece, TagBlock, joined
from mslime.rollout.agents.messages import NO_JSON, Tools, canonical_json, parsed_json
from mslime.rollout.agents.renderer import Parsed, ParsedCall

THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Tags around reasoning, by family; the last are Mistral's."""


class TaggedParser:
    """Reads reasoning between tags, and calls in one form.

    Args:
        tokenizer: of transformers.
        form: the chat template's form of calls; other forms are text.
        thinking: the chat template's tags around reasoning; None: it has none.
    """

    def __init__(self, tokenizer: Any, form: CallForm | None, thinking: tuple[str, str] | None) -> None:
        self._tokenizer, self._form = tokenizer, form
        self._think, self._thought = thinking or ("", "")
        tags = [*(thinking or ()), *(form.tags if form is not None else ())]
        vocabulary = tokenizer.get_added_vocab()
        self._ids = {tokenizer.convert_tokens_to_ids(tag): tag for tag in tags if tag in vocabulary}
        self.tag_ids = frozenset(self._ids)
        spelled = [re.escape(tag) for tag in tags if tag not in vocabulary]
        self._spelled = re.compile(f"({'|'.join(spelled)})") if spelled else None

    def parse(self, sampled: Sequence[int], prompt: Sequence[int], tools: Tools) -> Parsed:
        """The parts of a reply, given its ids without those that end a turn."""
        reasoning, rest = self._reasoned([*self._pieces(sampled)], self.opens(prompt))
        text, calls = "", list[ParsedCall]()
        for part in self._parts(rest, tools):
            text += part if isinstance(part, str) else part.text if part.text.strip() else ""
            calls += () if isinstance(part, str) else part.calls
        tagged = bool(reasoning or calls)
        return Parsed(text.strip() if tagged else text, reasoning.strip(), tuple(calls))

    def opens(self, ids: Sequence[int]) -> bool:
        """Whether reasoning is open after these ids."""
        return self._last_thinking(ids[-64:]) == self._think != ""

    def reasons(self, sampled: Sequence[int], prompt: Sequence[int]) -> bool:
        """Whether reasoning is open after a reply."""
        last = self._last_thinking(sampled)
        return last == self._think if last else self.opens(prompt)

    def _last_thinking(self, ids: Sequence[int]) -> str:
        tags = [tag for tag, _ in self._pieces(ids) if tag and tag in (self._think, self._thought)]
        return tags[-1] if tags else ""

    def _reasoned(self, pieces: Sequence[Piece], opened: bool) -> tuple[str, Sequence[Piece]]:
        """Split a reply into its leading reasoning and the rest. Calls within reasoning are drafts; if reasoning is
        never closed, a call ends it."""
        reasoning = ""
        while opened or self._begins_reasoning(pieces):
            pieces, opened = pieces if opened else _untagged(pieces[1:]), False
            end = self._thought_ends(pieces)
            reasoning += joined(pieces[:end])
            pieces = _untagged(pieces[end:]) if end < len(pieces) and pieces[end][0] == self._thought else pieces[end:]
        return reasoning, pieces

    def _begins_reasoning(self, pieces: Sequence[Piece]) -> bool:
        return len(pieces) > 1 and not joined(pieces[:1]).strip() and pieces[1][0] == self._think

    def _thought_ends(self, pieces: Sequence[Piece]) -> int:
        """Index of the piece whose tag ends the open reasoning."""
        tags = [tag for tag, _ in pieces]
        ends = self._thought if self._thought in tags else self._form.opens if self._form is not None else ""
        return tags.index(ends) if ends and ends in tags else len(tags)

    def _parts(self, pieces: Sequence[Piece], tools: Tools) -> Iterator[str | ParsedCalls]:
        """Texts and blocks of calls, in order."""
        form, at = self._form, 0
        while at < len(pieces):
            if form is None or pieces[at][0] != form.opens:
                yield joined(pieces[at : at + 1])
                at += 1
                continue
            ends = [i for i in range(at + 1, len(pieces)) if pieces[i][0] == (form.closes or form.opens)]
            end = ends[0] if ends else len(pieces)
            closing = form.closes if ends else ""
            yield form.read(TagBlock(_of_form(pieces[at:end], form), closing, tools))
            if closing:
                yield pieces[end][1]
            at = end + bool(closing)

    def _pieces(self, ids: Sequence[int]) -> Iterator[Piece]:
        """(tag or nothing, the text after it), in order."""
        tag, run = "", list[int]()
        for i in ids:
            if i in self._ids:
                yield from self._split(tag, run)
                tag, run = self._ids[i], []
            else:
                run.append(i)
        yield from self._split(tag, run)

    def _split(self, tag: str, run: Sequence[int]) -> Iterator[Piece]:
        text = self._tokenizer.decode(list(run), skip_special_tokens=False) if run else ""
        parts = self._spelled.split(text) if self._spelled is not None else [text]
        yield from zip([tag, *parts[1::2]], parts[0::2], strict=True)


def _untagged(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces without their leading tag."""
    return [("", pieces[0][1]), *pieces[1:]]


def _of_form(pieces: Sequence[Piece], form: CallForm) -> list[Piece]:
    """Pieces of a block; tags of other forms become text."""
    found = list[Piece]()
    for tag, text in pieces:
        if found and tag not in form.tags:
            found[-1] = (found[-1][0], found[-1][1] + tag + text)
        else:
            found.append((tag, text))
    return found


class HarmonyParser:
    """Reads gpt-oss' format, in which a reply is several messages, each with a channel and optionally a recipient.

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
        self.tag_ids = frozenset[int]()

    def parse(self, sampled: Sequence[int], prompt: Sequence[int], tools: Tools) -> Parsed:
        """The parts of a reply, given its ids without those that end a turn."""
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
        """Whether the reply ends within a message: only an ended message can be continued."""
        return True

    def _messages(self, ids: Sequence[int]) -> Iterator[tuple[str, str]]:
        """(header, body) of each message. A reply starts within the header that the prompt began."""
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
    arguments = parsed_json(body or "{}")
    if not isinstance(arguments, dict):
        return ParsedCall("", "", body, "invalid_json" if arguments is NO_JSON else "malformed_structure")
    return ParsedCall(name, canonical_json(body), f"{header}<|message|>{body}")
