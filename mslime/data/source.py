"""Prompts from JSONL and parquet files, drawn in a resumable order.

Opening a source reads every selected row once and refuses the first bad one by file and line, so that a broken row
ends a run before it starts and not days into it. Afterwards JSONL rows stay on disk behind an index of byte offsets,
and of a parquet file only the columns in use are held. The order of an epoch is a permutation drawn from (seed, epoch),
so an epoch number and a cursor are the whole state.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from mslime.config.errors import DataError, nearest
from mslime.config.schema import DataConfig
from mslime.data.sample import Sample, SampleStatus
from mslime.data.tokenizer import Tokenizer

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


class RowFile(Protocol):
    """Rows of one file, by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str:
        """`file:line` of a row."""
        ...

    def fingerprint(self) -> str:
        """Changes when the rows do, not when the file moves."""
        ...


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


class JsonlFile:
    """A JSONL file behind an index of byte offsets. Blank lines are no rows. Raises DataError on a broken line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        offsets: list[int] = []
        lines: list[int] = []
        crc, position = 0, 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    _parse_line(line, f"{path}:{number}")
                    offsets.append(position)
                    lines.append(number)
                    crc = zlib.crc32(line, crc)
                position += len(line)
        self._offsets, self._lines = np.asarray(offsets, np.int64), np.asarray(lines, np.int64)
        self._crc = crc
        self._file = path.open("rb")

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._file.seek(int(self._offsets[index]))
        return _parse_line(self._file.readline(), self.where(index))

    def where(self, index: int) -> str:
        """`file:line` of a row, counting lines from 1."""
        return f"{self._path}:{self._lines[index]}"

    def fingerprint(self) -> str:
        """Checksum over all rows."""
        return f"jsonl-{len(self)}-{self._crc:08x}"


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object in one line. Raises DataError naming the line."""
    try:
        row: object = json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
        shown = line[:80].decode("utf-8", "replace").rstrip()
        raise DataError(where, shown, f"is not valid JSON ({error})", "mend or delete the line") from error
    if not isinstance(row, dict):
        raise DataError(where, row, "every line must be a JSON object with the prompt in one of its keys",
                        'write lines such as {"prompt": "...", "label": "..."}')  # fmt: skip
    return cast("dict[str, Any]", row)


class ParquetFile:
    """The wanted columns of a parquet file, held as compact arrow arrays. Raises DataError on a missing column."""

    def __init__(self, path: Path, keys: Sequence[str]) -> None:
        # pyarrow has no type stubs.
        parquet: Any = importlib.import_module("pyarrow.parquet")
        self._path = path
        try:
            columns = cast("list[str]", parquet.read_schema(path).names)
            for key in keys:
                if key not in columns:
                    raise _missing_key(str(path), key, columns)
            self._table: Any = parquet.read_table(path, columns=list(keys))
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            if isinstance(error, DataError):
                raise
            raise DataError(str(path), path.stat().st_size, f"is not a readable parquet file ({error})",
                            "write it again, or give a JSONL file") from error  # fmt: skip

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return cast("dict[str, Any]", self._table.slice(index, 1).to_pylist()[0])

    def where(self, index: int) -> str:
        """`file:row` of a row, counting rows from 0."""
        return f"{self._path}:row {index}"

    def fingerprint(self) -> str:
        """Row count, columns and size in memory."""
        return f"parquet-{len(self)}-{','.join(self._table.column_names)}-{self._table.nbytes}"


def _missing_key(where: str, key: str, present: Sequence[str]) -> DataError:
    return DataError(where, sorted(present), f"has no key {key!r} {nearest(key, present)}".rstrip(),
                     "add the key to the row, or name the right one with data.prompt_key, data.label_key or "
                     "data.metadata_key (null: none)")  # fmt: skip


def _open(path: Path, keys: Sequence[str]) -> RowFile:
    """Rows of a file by its suffix. Raises DataError for a missing file or an unknown suffix."""
    if not path.is_file():
        raise DataError("data.prompts", str(path), "no such file", "give the path of a .jsonl or .parquet file")
    if path.suffix == ".jsonl":
        return JsonlFile(path)
    if path.suffix == ".parquet":
        return ParquetFile(path, keys)
    raise DataError("data.prompts", str(path), f"suffix {path.suffix!r} is unknown", "prompts come from .jsonl and "
                    ".parquet files")  # fmt: skip


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
            file = _open(path, keys)
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
        prompt, label, metadata, where = self._fields(index)
        if self._config.apply_chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            tokens = self._tokenizer.encode_chat(messages, self._config.chat_template_kwargs)
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
            prompt = self.at(int(self._order[self.cursor]))
            self.cursor += 1
            if len(prompt.tokens) <= limit:
                return prompt
            self.skipped += 1
        rule = f"every one of the {len(self)} prompts is longer"
        raise DataError("data.max_prompt_tokens", self._config.max_prompt_tokens, rule,
                        "raise data.max_prompt_tokens, or give shorter prompts")  # fmt: skip

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
            if state[key] != mine[key]:
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

    def _fields(self, index: int) -> tuple[str | list[dict[str, Any]], Any, dict[str, Any], str]:
        """Prompt, label, metadata and `file:line` of a row. Raises DataError when one is not what it must be."""
        file_index, row_index = (int(i) for i in self._rows[index])
        file, config = self._files[file_index], self._config
        row, where = file[row_index], file.where(row_index)
        for key in (config.prompt_key, config.label_key, config.metadata_key):
            if key is not None and key not in row:
                raise _missing_key(where, key, list(row))
        prompt: object = row[config.prompt_key]
        if not isinstance(prompt, str) and not (config.apply_chat_template and _is_chat(prompt)):
            rule = f"{config.prompt_key!r} must be a string" + (
                " or a list of {role, content} messages" if config.apply_chat_template else
                " (a list of messages needs data.apply_chat_template: true)")  # fmt: skip
            raise DataError(where, prompt, rule, "mend the row, or name another data.prompt_key")
        if not prompt:
            raise DataError(where, prompt, "the prompt is empty", "delete the row, or write a prompt into it")
        metadata: object = row[config.metadata_key] if config.metadata_key is not None else {}
        if not isinstance(metadata, dict):
            raise DataError(where, metadata, f"{config.metadata_key!r} must be an object", "mend the row")
        label: Any = row[config.label_key] if config.label_key is not None else None
        return cast("str | list[dict[str, Any]]", prompt), label, cast("dict[str, Any]", metadata), where


def _is_chat(value: object) -> bool:
    """A list of messages, each with a role and content."""
    if not isinstance(value, list):
        return False
    messages = cast("list[object]", value)
    return all(isinstance(m, dict) and "role" in m and "content" in m for m in messages)


def supervised_sample(prompt: Prompt, index: int, tokenizer: Tokenizer) -> Sample:
    """A prompt with its label as the response and EOS at the end, all of it trainable: a row of supervised training.

    Behaviour log-probs are 0 and the version is 0: nobody sampled it. Raises DataError when the label is not text or
    the tokenizer has no EOS.
    """
    if not isinstance(prompt.label, str) or not prompt.label:
        raise DataError(prompt.where, prompt.label, "supervised training needs the response as text in data.label_key",
                        "write the response into the row, or name its key with data.label_key")  # fmt: skip
    if tokenizer.eos_token_id is None:
        raise DataError("model.tokenizer_path", None, "the tokenizer has no EOS, so a response cannot end",
                        "set eos_token in tokenizer_config.json")  # fmt: skip
    response = [*tokenizer.encode(prompt.label, special_tokens=False), tokenizer.eos_token_id]
    sample = Sample.from_prompt(index, 0, prompt.tokens, prompt.label)
    sample.metadata = dict(prompt.metadata)
    n = len(response)
    sample.extend(response, log_probs=np.zeros(n, np.float32), versions=[(0, 0, n)], engine="dataset")
    sample.status, sample.response = SampleStatus.COMPLETED, prompt.label
    return sample
