"""Prompts, drawn in a resumable order: from files of rows, or from a user's function.

Opening a source reads every selected row once and rejects the first invalid one by file and line: a broken row ends a
run before it starts, not days later. The order of an epoch is a permutation drawn from (seed, epoch), so an epoch
number and a cursor are the whole state.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from mslime.config.data import DataConfig
from mslime.config.errors import ConfigError, DataError, nearest, reading
from mslime.data.conversation import as_messages, is_chat, normalised, tools_of
from mslime.data.row_files import RowFile, field_of, open_rows, plain
from mslime.data.tokenizer import Tokenizer
from mslime.extensions import calling, load_function

_CHARACTERS_OF_A_TOKEN = 512
"""Upper bound of a vocabulary's mean characters per token: a longer text is too long without tokenisation."""

_OPENING = 256  # characters that contain the tokens with which a tokenizer begins a text

_SLICE = re.compile(r"^(?P<path>.*)@\[\s*(?P<start>[+-]?\d+)?\s*:\s*(?P<stop>[+-]?\d+)?\s*\]$")


@dataclass(frozen=True)
class RowContent:
    """Content of a row.

    Attributes:
        prompt: text or chat messages; the whole conversation with `data.messages_key`.
        label: None if there is no label key.
        metadata: the row's metadata, if a key for it is configured.
        where: `file:line` (JSONL) or `file:row` (parquet), for messages.
        tools: definitions for the chat template, if a key for them is configured.
    """

    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    where: str
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Prompt:
    """One row, tokenised.

    Attributes:
        tokens: prompt token ids, never empty.
        label: passed to the reward unchanged; None if there is no label key.
        metadata: the row's metadata, if a key for it is configured.
        where: `file:line` (JSONL) or `file:row` (parquet), for messages.
        text: decoded tokens, in the chat template if there is one; empty if only tokens are known.
        messages: the prompt as chat messages, if it uses the chat template; else None.
        tools: of the row, if a key for them is configured.
    """

    tokens: list[int]
    label: Any
    metadata: dict[str, Any]
    where: str
    text: str = ""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


def split_slice(spec: str) -> tuple[Path, slice]:
    """`path@[a:b]` as path and slice, with Python's meaning of open and negative ends; `path` alone is the whole file.

    Raises DataError for a slice that is not two optional integers.
    """
    if "@[" not in spec:
        return Path(spec), slice(None)
    match = _SLICE.match(spec)
    if match is None:
        raise DataError("data.prompts", spec, "a slice is `path@[a:b]`, where a and b are integers or empty", "for "
                        "example train.jsonl@[:1000] or train.jsonl@[-200:]")  # fmt: skip
    start, stop = (int(match[end]) if match[end] else None for end in ("start", "stop"))
    return Path(match["path"]), slice(start, stop)


def keys_of_rows(config: DataConfig) -> list[str]:
    """Keys that every row must have."""
    mine = (config.messages_key,) if config.messages_key else (config.prompt_key, config.label_key)
    return [key for key in (*mine, config.tools_key, config.metadata_key) if key is not None]


def tokenised(row: RowContent, config: DataConfig, tokenizer: Tokenizer) -> Prompt:
    """The prompt of a row. Raises DataError if it cannot be rendered or tokenised."""
    with reading(DataError, row.where, "the tokenizer cannot encode the prompt", "fix or delete the row"):
        messages = list(as_messages(row.prompt)) if config.apply_chat_template else None
        if messages is not None:
            offered = {"tools": row.tools} if row.tools else {}
            text = tokenizer.render(messages, {**config.chat_template_kwargs, **offered})
            tokens = tokenizer.encode(text, special_tokens=False)  # the template wrote special tokens
        else:
            text = cast("str", row.prompt)
            tokens = tokenizer.encode(text, special_tokens=not _is_opened(text, tokenizer))
    if not tokens:
        rule = "the prompt has no tokens"
        raise DataError(row.where, row.prompt, rule, "delete the row, or write a prompt into it")
    return Prompt(tokens, row.label, row.metadata, row.where, text, messages, row.tools)


def _is_opened(text: str, tokenizer: Tokenizer) -> bool:
    """Whether a text begins with the tokenizer's own prefix, as a text saved after rendering does."""
    opening = tokenizer.encode("", special_tokens=True)
    return bool(opening) and tokenizer.encode(text[:_OPENING], special_tokens=False)[: len(opening)] == opening


def fitting(row: RowContent, config: DataConfig, tokenizer: Tokenizer) -> Prompt | None:
    """A row tokenised, or None if its prompt has more than `data.max_prompt_tokens` tokens."""
    limit = config.max_prompt_tokens or math.inf
    texts = [row.prompt] if isinstance(row.prompt, str) else [str(message.get("content")) for message in row.prompt]
    if sum(map(len, texts)) > limit * _CHARACTERS_OF_A_TOKEN:
        return None
    prompt = tokenised(row, config, tokenizer)
    return prompt if len(prompt.tokens) <= limit else None


def checked_row(row: RowContent, config: DataConfig) -> RowContent:
    """Row with valid prompt (text or messages, as configured), and with label and metadata that can be saved; contents
    of messages as text. Raises DataError.
    """
    prompt, where = row.prompt, row.where
    chat = config.apply_chat_template or config.messages_key is not None
    if not (isinstance(prompt, str) and config.messages_key is None) and not (chat and is_chat(prompt)):
        raise DataError(where, prompt, _kind_rule(config), "fix the row, or correct its key: data.prompt_key, "
                        "data.messages_key")  # fmt: skip
    if not prompt:
        raise DataError(where, prompt, "the prompt is empty", "delete the row, or write a prompt into it")
    if isinstance(prompt, list):
        prompt = [normalised(message, where) for message in prompt]
    metadata = cast("object", row.metadata)
    if not isinstance(metadata, dict):
        raise DataError(where, metadata, f"{config.metadata_key or 'metadata'!r} must be an object", "fix the row")
    plain([row.label, metadata], "labels and metadata", where)
    return replace(row, prompt=prompt)


class PromptSource:
    """Rows of several files, one epoch after the other, every row exactly once an epoch.

    Raises DataError while opening for a missing file, a bad slice, a broken line, a missing key, a prompt that is
    neither text nor messages, and for an empty selection; while drawing if every prompt of an epoch is too long.

    Attributes:
        epoch: epochs completed. cursor: rows of the present epoch already drawn. skipped: rows left out so far because
            the prompt had more than `data.max_prompt_tokens` tokens.
    """

    def __init__(
        self, specs: Sequence[str], config: DataConfig, tokenizer: Tokenizer, seed: int, *, shuffle: bool | None = None
    ) -> None:
        self._config, self._tokenizer, self._seed = config, tokenizer, seed
        self._shuffle = config.shuffle if shuffle is None else shuffle
        self._files: list[RowFile] = []
        rows: list[tuple[int, int]] = []
        keys = keys_of_rows(config)
        for spec in specs:
            path, part = split_slice(spec)
            file = open_rows(path, keys)
            chosen = range(len(file))[part]
            if not chosen:
                rule = f"selects none of the {len(file)} rows" if len(file) else "holds no rows"
                raise DataError("data.prompts", spec, rule, "use a file with rows, and a slice within it")
            rows += [(len(self._files), i) for i in chosen]
            self._files.append(file)
        if not rows:
            raise DataError("data.prompts", list(specs), "names no file", "name at least one .jsonl or .parquet file")
        self._rows: NDArray[np.int64] = np.asarray(rows, np.int64)
        for index in range(len(self)):
            self.row(index)
        self.epoch, self.cursor, self.skipped = 0, 0, 0
        self._order = self._epoch_order(0)

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, index: int) -> Prompt:
        """Row `index` of the files in the order given, tokenised."""
        return self.tokenised(self.row(index))

    def tokenised(self, row: RowContent) -> Prompt:
        """The prompt of a row. Raises DataError if it cannot be rendered or tokenised."""
        return tokenised(row, self._config, self._tokenizer)

    def next(self) -> Prompt:
        """The next prompt; begins a new epoch when one ends. Prompts that are too long are skipped and counted."""
        for _ in range(2 * len(self)):
            prompt = self.fitting(self.row(self.draw()))
            if prompt is not None:
                return prompt
            self.skipped += 1
        rule = f"all {len(self)} prompts are longer"
        raise DataError("data.max_prompt_tokens", self._config.max_prompt_tokens, rule,
                        "raise data.max_prompt_tokens, or use shorter prompts")  # fmt: skip

    def draw(self) -> int:
        """The next row's index; begins a new epoch when one ends."""
        if self.cursor == len(self):
            self.epoch, self.cursor = self.epoch + 1, 0
            self._order = self._epoch_order(self.epoch)
        self.cursor += 1
        return int(self._order[self.cursor - 1])

    def fitting(self, row: RowContent) -> Prompt | None:
        """A row tokenised, or None if its prompt has more than `data.max_prompt_tokens` tokens."""
        return fitting(row, self._config, self._tokenizer)

    def labels(self) -> Iterator[tuple[str, Any]]:
        """(`file:line`, label) of every row in file order; nothing is tokenised."""
        for index in range(len(self)):
            row = self.row(index)
            yield row.where, row.label

    def __iter__(self) -> Iterator[Prompt]:
        """Every row once in file order, including too long ones; the cursor does not move."""
        return (self.at(i) for i in range(len(self)))

    def state_dict(self) -> dict[str, Any]:
        """State as plain values. After `load_state_dict` the next draw is the same as here."""
        return {
            "epoch": self.epoch,
            "cursor": self.cursor,
            "skipped": self.skipped,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "rows": len(self),
            "files": [f.fingerprint() for f in self._files],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises DataError if files, slices, seed or shuffle differ."""
        mine = self.state_dict()
        for key in ("files", "rows", "seed", "shuffle"):
            saved = state.get(key)
            if saved != mine[key] and not (key == "files" and saved and _same_by_size(saved, mine[key])):
                raise DataError(
                    "data.prompts",
                    mine[key],
                    f"the run was saved with other prompts or another order ({key} was {saved!r}), so the saved "
                    "position is not valid",
                    "resume with the same files, slices, seed and shuffle, or start a run under another name",
                )
        self.epoch, self.cursor, self.skipped = state["epoch"], state["cursor"], state["skipped"]
        self._order = self._epoch_order(self.epoch)

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """Row indices of one epoch in drawing order: a function of (seed, epoch) alone."""
        if not self._shuffle:
            return np.arange(len(self), dtype=np.int64)
        return np.random.default_rng([self._seed, epoch]).permutation(len(self))

    def row(self, index: int) -> RowContent:
        """Row `index`, not tokenised. Raises DataError if a part of it is invalid."""
        file_index, row_index = (int(i) for i in self._rows[index])
        file, config = self._files[file_index], self._config
        where = file.where(row_index)
        with reading(DataError, where, "the row cannot be read", "write the file again"):
            row = file[row_index]
        key = config.messages_key or config.prompt_key
        prompt = cast("str | list[dict[str, Any]]", plain(field_of(row, key, where), repr(key), where))
        metadata: Any = field_of(row, config.metadata_key, where) if config.metadata_key is not None else {}
        label: Any = None
        if config.label_key is not None and config.messages_key is None:
            label = field_of(row, config.label_key, where)
        tools = None if config.tools_key is None else tools_of(field_of(row, config.tools_key, where), where)
        return checked_row(RowContent(prompt, label, metadata, where, tools), config)


def _kind_rule(config: DataConfig) -> str:
    if config.messages_key is not None:
        return f"{config.messages_key!r} must be a list of {{role, content}} messages"
    return f"{config.prompt_key!r} must be a string" + (
        " or a list of {role, content} messages" if config.apply_chat_template else
        " (a list of messages needs data.apply_chat_template: true)")  # fmt: skip


def _same_by_size(old: Sequence[str], new: Sequence[str]) -> bool:
    """Whether old fingerprints without contents (`parquet-ROWS-...`) have the same numbers of rows."""
    pairs = list(zip(old, new, strict=False))
    return len(old) == len(new) and all(
        a == b or (a.startswith("parquet-") and a.split("-")[1] == b.split("-")[1]) for a, b in pairs
    )


# Training prompts from a user's function, `data.source`: items are validated and tokenised here.

SETTING = "data.source"
KEYS = ("prompt", "label", "metadata")
METHODS = ("__iter__", "state_dict", "load_state_dict")
ENVIRONMENTS = "environments"
"""Marks the state of a run without prompts."""
MOST_TOO_LONG = 1000
"""Consecutive prompts that may be too long before an error is raised."""


PromptStream: TypeAlias = "PromptSource | UserSource | NoPrompts"
"""Endless source of training prompts."""


def open_prompts(data: DataConfig, seed: int, tokenizer: Tokenizer) -> PromptStream:
    """Open the source of a run's training prompts: `data.prompts`, `data.source`, or none if environments have their
    own prompts. Raises UserError.
    """
    if data.source is None and not data.prompts:
        return NoPrompts()
    if data.source is None:
        return PromptSource(data.prompts, data, tokenizer, seed)
    return UserSource(data.source, data, tokenizer, seed)


class NoPrompts:
    """Source for runs whose environments have their own prompts: numbered groups with placeholder prompts.

    Attributes:
        drawn: groups so far. skipped: none.
    """

    skipped = 0

    def __init__(self) -> None:
        self.drawn = 0

    def next(self) -> Prompt:
        """A placeholder prompt of one token, which is never sent."""
        self.drawn += 1
        return Prompt([0], None, {}, f"environments:{self.drawn}")

    def state_dict(self) -> dict[str, Any]:
        """Number of drawn groups."""
        return {"source": ENVIRONMENTS, "drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises ConfigError if it is from a run with prompts."""
        if state.get("source") != ENVIRONMENTS:
            raise ConfigError(
                SETTING, None, f"the run was saved with {state.get('source') or 'files of data.prompts'}, and now "
                "environments provide the prompts", "resume with the same source, or start a run under another name",
            )  # fmt: skip
        self.drawn = int(state["drawn"])


class UserSource:
    """Prompts from a user's iterable object: mappings with `prompt` and optionally `label` and `metadata`.

    Raises ConfigError if the function fails or its object lacks a method; while drawing also DataError, for an item
    that is not a prompt, for an end, and if no prompt fits `data.max_prompt_tokens`.

    Attributes:
        drawn: items taken so far. skipped: number of items that were too long.
    """

    def __init__(self, spec: str, config: DataConfig, tokenizer: Tokenizer, seed: int) -> None:
        self._spec, self._config, self._tokenizer = spec, config, tokenizer
        make = cast("Callable[[DataConfig, int], Any]", load_function(spec, SETTING))
        with calling(spec, SETTING):
            self._source = make(config, seed)
        for method in METHODS:
            if not callable(getattr(self._source, method, None)):
                raise ConfigError(
                    SETTING, spec, f"returned a {type(self._source).__name__} without {method}",
                    "return an iterable object with state_dict and load_state_dict",
                )  # fmt: skip
        self._items: Iterator[object] | None = None  # begins after `load_state_dict`
        self.drawn, self.skipped = 0, 0

    def next(self) -> Prompt:
        """The next prompt that is not too long."""
        for _ in range(MOST_TOO_LONG):
            prompt = fitting(self._row(), self._config, self._tokenizer)
            if prompt is not None:
                return prompt
            self.skipped += 1
        raise DataError("data.max_prompt_tokens", self._config.max_prompt_tokens,
                        f"the last {MOST_TOO_LONG} prompts of {self._spec} are longer",
                        "raise it, or use shorter prompts")  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """The object's own state and the counts kept here."""
        with calling(self._spec, SETTING, "state_dict"):
            own = self._source.state_dict()
        try:
            own = json.loads(json.dumps(own, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(SETTING, self._spec, f"state_dict returned a value that is not JSON: {error}",
                              "return plain numbers, texts, lists and mappings") from error  # fmt: skip
        return {"source": self._spec, "drawn": self.drawn, "skipped": self.skipped, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises ConfigError if it is from another source."""
        if state.get("source") != self._spec:
            raise ConfigError(
                SETTING, self._spec, f"the run was saved with {state.get('source') or 'files of data.prompts'}",
                "resume with the same source, or start a run under another name",
            )  # fmt: skip
        with calling(self._spec, SETTING, "load_state_dict"):
            self._source.load_state_dict(state["own"])
        self.drawn, self.skipped = state["drawn"], state["skipped"]

    def _row(self) -> RowContent:
        where = f"{self._spec}:{self.drawn}"
        with calling(self._spec, SETTING, f"item {self.drawn}"):
            if self._items is None:
                self._items = iter(self._source)
            item = next(self._items, None)
        if item is None:
            raise DataError(SETTING, self._spec, f"ended after {self.drawn} prompts",
                            "repeat your data: training draws as many as it needs")  # fmt: skip
        self.drawn += 1
        return checked_row(_row_of(item, where), self._config)


def _row_of(item: object, where: str) -> RowContent:
    if not isinstance(item, Mapping):
        raise DataError(where, item, "an item of data.source must be a mapping with the key 'prompt'",
                        "yield for example {'prompt': '1+1=', 'label': '2'}")  # fmt: skip
    given = cast("Mapping[str, Any]", item)
    unknown = [str(key) for key in given if key not in KEYS]
    if unknown or "prompt" not in given:
        raise DataError(
            where, unknown or sorted(given), f"an item of data.source may only have the keys {', '.join(KEYS)}",
            f"{nearest((unknown or ['prompt'])[0], KEYS)} put anything else into metadata".lstrip(),
        )  # fmt: skip
    return RowContent(given["prompt"], given.get("label"), given.get("metadata") or {}, where)
