"""Prompts from files of rows, drawn in a resumable order.

Opening a source reads every selected row once and refuses the first bad one by file and line, so that a broken row
ends a run before it starts and not days into it. The order of an epoch is a permutation drawn from (seed, epoch), so an
epoch number and a cursor are the whole state.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mslime.config.errors import DataError, reading
from mslime.config.schema import DataConfig
from mslime.data.rows import RowFile, field_of, open_rows, plain
from mslime.data.sample import Sample, SampleStatus
from mslime.data.tokenizer import Tokenizer

_CHARACTERS_OF_A_TOKEN = 512
"""No vocabulary has tokens of so many characters on average: what is longer is too long without being tokenised."""

_Row = tuple[str | list[dict[str, Any]], Any, dict[str, Any], str]
"""Prompt, label, metadata and `file:line` of a row."""

_SLICE = re.compile(r"^(?P<path>.*)@\[(?P<body>[^\[\]]*)\]$")


@dataclass(frozen=True)
class Prompt:
    """One row, tokenised.

    Attributes:
        tokens: prompt token ids, never empty.
        label: handed to the reward unchanged; None when there is no label key.
        metadata: the row's metadata, if a key for it is configured.
        where: `file:line` (JSONL) or `file:row` (parquet), for messages.
    """

    tokens: list[int]
    label: Any
    metadata: dict[str, Any]
    where: str


def split_slice(spec: str) -> tuple[Path, slice]:
    """`path@[a:b]` as path and slice, with Python's meaning of open and negative ends; `path` alone is the whole file.

    Raises DataError for a slice that is not two optional integers.
    """
    match = _SLICE.match(spec)
    if match is None:
        if "@[" in spec:
            raise _slice_error(spec)
        return Path(spec), slice(None)
    parts = match["body"].split(":")
    if len(parts) != 2 or not all(re.fullmatch(r"\s*[+-]?\d*\s*", p) and p.strip() not in ("+", "-") for p in parts):
        raise _slice_error(spec)
    start, stop = (int(p) if p.strip() else None for p in parts)
    return Path(match["path"]), slice(start, stop)


def _slice_error(spec: str) -> DataError:
    return DataError("data.prompts", spec, "a slice is `path@[a:b]` with integers or nothing for a and b", "for "
                     "example train.jsonl@[:1000] or train.jsonl@[-200:]")  # fmt: skip


class PromptSource:
    """Rows of several files, one epoch after the other, every row exactly once an epoch.

    Raises DataError while opening for a missing file, a bad slice, a broken line, a missing key, a prompt that is
    neither text nor messages, and for an empty selection; while drawing when every prompt of an epoch is too long.

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
        keys = [k for k in (config.prompt_key, config.label_key, config.metadata_key) if k is not None]
        for spec in specs:
            path, part = split_slice(spec)
            file = open_rows(path, keys)
            chosen = range(len(file))[part]
            if not chosen:
                rule = f"selects none of the {len(file)} rows" if len(file) else "holds no rows"
                raise DataError("data.prompts", spec, rule, "give a file with rows, and a slice inside it")
            rows += [(len(self._files), i) for i in chosen]
            self._files.append(file)
        if not rows:
            raise DataError("data.prompts", list(specs), "names no file", "give at least one .jsonl or .parquet file")
        self._rows: NDArray[np.int64] = np.asarray(rows, np.int64)
        for index in range(len(self)):
            self._fields(index)
        self.epoch, self.cursor, self.skipped = 0, 0, 0
        self._order = self._epoch_order(0)

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, index: int) -> Prompt:
        """Row `index` of the files in the order given, tokenised."""
        return self._tokenised(self._fields(index))

    def _tokenised(self, row: _Row) -> Prompt:
        prompt, label, metadata, where = row
        with reading(DataError, where, "the tokenizer cannot encode the prompt", "mend or delete the row"):
            if self._config.apply_chat_template:
                tokens = self._tokenizer.encode_chat(as_messages(prompt), self._config.chat_template_kwargs)
            else:
                tokens = self._tokenizer.encode(cast("str", prompt), special_tokens=True)
        if not tokens:
            raise DataError(where, prompt, "the prompt has no tokens", "delete the row, or write a prompt into it")
        return Prompt(tokens, label, metadata, where)

    def next(self) -> Prompt:
        """The next prompt; begins a new epoch when one ends. Prompts that are too long are skipped and counted."""
        limit = self._config.max_prompt_tokens or math.inf
        for _ in range(2 * len(self)):
            if self.cursor == len(self):
                self.epoch, self.cursor = self.epoch + 1, 0
                self._order = self._epoch_order(self.epoch)
            index = int(self._order[self.cursor])
            self.cursor += 1
            row = self._fields(index)
            if not _far_longer(row[0], limit):
                prompt = self._tokenised(row)
                if len(prompt.tokens) <= limit:
                    return prompt
            self.skipped += 1
        rule = f"every one of the {len(self)} prompts is longer"
        raise DataError("data.max_prompt_tokens", self._config.max_prompt_tokens, rule,
                        "raise data.max_prompt_tokens, or give shorter prompts")  # fmt: skip

    def prompt(self, index: int) -> tuple[str | list[dict[str, Any]], str]:
        """(text or messages, `file:line`) of a row, not tokenised."""
        prompt, _, _, where = self._fields(index)
        return prompt, where

    def labels(self) -> Iterator[tuple[str, Any]]:
        """(`file:line`, label) of every row in file order; nothing is tokenised."""
        for index in range(len(self)):
            _, label, _, where = self._fields(index)
            yield where, label

    def __iter__(self) -> Iterator[Prompt]:
        """Every row once in file order, whatever its length; the cursor does not move."""
        return (self.at(i) for i in range(len(self)))

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which `load_state_dict` continues: the next draw after it is the next draw here."""
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
        """Continue where `state` was taken. Raises DataError when files, slices, seed or shuffle are others."""
        mine = self.state_dict()
        for key in ("files", "rows", "seed", "shuffle"):
            if state[key] != mine[key] and not (key == "files" and _same_by_size(state[key], mine[key])):
                raise DataError(
                    "data.prompts",
                    mine[key],
                    f"the run was saved with other prompts or another order ({key} was {state[key]!r}), so the saved "
                    "position means nothing here",
                    "resume with the same files, slices, seed and shuffle, or start a run under another name",
                )
        self.epoch, self.cursor, self.skipped = state["epoch"], state["cursor"], state["skipped"]
        self._order = self._epoch_order(self.epoch)

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        """Row indices of one epoch in drawing order: a function of (seed, epoch) alone."""
        if not self._shuffle:
            return np.arange(len(self), dtype=np.int64)
        return np.random.default_rng([self._seed, epoch]).permutation(len(self))

    def _fields(self, index: int) -> _Row:
        """Prompt, label, metadata and `file:line` of a row. Raises DataError when one is not what it must be."""
        file_index, row_index = (int(i) for i in self._rows[index])
        file, config = self._files[file_index], self._config
        where = file.where(row_index)
        with reading(DataError, where, "the row cannot be read", "write the file again"):
            row = file[row_index]
        prompt: object = plain(field_of(row, config.prompt_key, where), repr(config.prompt_key), where)
        if not isinstance(prompt, str) and not (config.apply_chat_template and _is_chat(prompt)):
            rule = f"{config.prompt_key!r} must be a string" + (
                " or a list of {role, content} messages" if config.apply_chat_template else
                " (a list of messages needs data.apply_chat_template: true)")  # fmt: skip
            raise DataError(where, prompt, rule, "mend the row, or name another data.prompt_key")
        if not prompt:
            raise DataError(where, prompt, "the prompt is empty", "delete the row, or write a prompt into it")
        if isinstance(prompt, list):
            prompt = [_with_text(message, where) for message in cast("list[dict[str, Any]]", prompt)]
        metadata: object = field_of(row, config.metadata_key, where) if config.metadata_key is not None else {}
        if not isinstance(metadata, dict):
            raise DataError(where, metadata, f"{config.metadata_key!r} must be an object", "mend the row")
        label: Any = field_of(row, config.label_key, where) if config.label_key is not None else None
        plain([label, metadata], "labels and metadata", where)
        return cast("str | list[dict[str, Any]]", prompt), label, cast("dict[str, Any]", metadata), where


def _far_longer(prompt: str | Sequence[Mapping[str, Any]], limit: float) -> bool:
    """Whether a prompt has so many characters that it need not be tokenised to be skipped."""
    texts = [prompt] if isinstance(prompt, str) else [str(message.get("content")) for message in prompt]
    return sum(map(len, texts)) > limit * _CHARACTERS_OF_A_TOKEN


def _is_chat(value: object) -> bool:
    """A list of messages, each with a role and content."""
    if not isinstance(value, list):
        return False
    messages = cast("list[object]", value)
    return all(isinstance(m, dict) and "role" in m and "content" in m for m in messages)


def _with_text(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message whose content is text: parts of text are joined, since templates treat a list each in its own way."""
    content, way_out = message["content"], "write the text into content"
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if not isinstance(content, list):
        raise DataError(where, content, f"content of the {message['role']} message must be text", way_out)
    texts = list[str]()
    for part in cast("list[object]", content):
        kind = cast("dict[str, Any]", part).get("type") if isinstance(part, dict) else type(part).__name__
        text = cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(text, str):
            rule = f"content of the {message['role']} message has a part that is no text; mslime trains on text alone"
            raise DataError(where, kind, rule, "leave rows with images, audio or files out")
        texts.append(text)
    return {**message, "content": "".join(texts)}


def as_messages(prompt: str | Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """A prompt as chat messages: a text is a user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _same_by_size(old: Sequence[str], new: Sequence[str]) -> bool:
    """Whether fingerprints of before contents were compared (`parquet-ROWS-...`) have the same numbers of rows."""
    pairs = list(zip(old, new, strict=False))
    return len(old) == len(new) and all(
        a == b or (a.startswith("parquet-") and a.split("-")[1] == b.split("-")[1]) for a, b in pairs
    )


def refuse_unsupervised(label: Any, where: str, tokenizer: Tokenizer) -> None:
    """Raise DataError when a row's label cannot be a response, or the tokenizer could not end one."""
    if not isinstance(label, str) or not label:
        raise DataError(where, label, "supervised training needs the response as text in data.label_key",
                        "write the response into the row, or name its key with data.label_key")  # fmt: skip
    if tokenizer.eos_token_id is None:
        raise DataError("model.tokenizer_path", None, "the tokenizer has no EOS, so a response cannot end",
                        "set eos_token in tokenizer_config.json")  # fmt: skip


def supervised_sample(prompt: Prompt, index: int, tokenizer: Tokenizer) -> Sample:
    """A prompt with its label as the response and EOS at the end, all of it trainable: a row of supervised training.

    Behaviour log-probs are 0 and the version is 0: nobody sampled it. Raises DataError when the label is not text or
    the tokenizer has no EOS.
    """
    refuse_unsupervised(prompt.label, prompt.where, tokenizer)
    assert tokenizer.eos_token_id is not None
    response = [*tokenizer.encode(prompt.label, special_tokens=False), tokenizer.eos_token_id]
    sample = Sample.from_prompt(index, 0, prompt.tokens, prompt.label)
    sample.metadata = dict(prompt.metadata)
    n = len(response)
    sample.extend(response, log_probs=np.zeros(n, np.float32), versions=[(0, 0, n)], engine="dataset")
    sample.status, sample.response = SampleStatus.COMPLETED, prompt.label
    return sample
