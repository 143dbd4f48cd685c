"""Files of prompts as rows: JSONL (plain or gzipped), JSON lists, parquet files, and directories of them.

Every reader converts errors of foreign data into a DataError that names the file or row. Rows of large formats (JSONL,
parquet) stay on disk or in compact arrow arrays; a JSON list and a gzipped file are held in memory.
"""

from __future__ import annotations

import gzip
import importlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from mslime.config.errors import DataError, hub_download, nearest, reading

_ROW_HINT = "fix or delete the row"
_KINDS = ".jsonl, .jsonl.gz, .json and .parquet files, and directories of parquet or arrow files"


class JsonlFile:
    """A JSONL file with an index of byte offsets. Blank lines are not rows. Raises DataError for a broken line."""

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
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
        shown = line[:80].decode("utf-8", "replace").rstrip()
        raise DataError(where, shown, f"is not valid JSON ({error})", "fix or delete the line") from error
    if not isinstance(row, dict):
        raise DataError(where, row, "every line must be a JSON object with the prompt in one of its keys",
                        'write lines such as {"prompt": "...", "label": "..."}')  # fmt: skip
    return cast("dict[str, Any]", row)


class ListedRows:
    """Rows held in memory, of a `.json` list or a gzipped JSONL file."""

    def __init__(self, path: Path, rows: Sequence[tuple[int, dict[str, Any]]], unit: str) -> None:
        self._path, self._rows, self._unit = path, rows, unit

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index][1]

    def where(self, index: int) -> str:
        """`file:line` of a row, or `file:row` in a list."""
        return f"{self._path}:{self._unit}{self._rows[index][0]}"

    def fingerprint(self) -> str:
        """Checksum over all rows."""
        return f"rows-{len(self)}-{_checksum(row for _, row in self._rows):08x}"


def _gzipped(path: Path) -> ListedRows:
    with reading(DataError, str(path), "is not a readable gzip file", "write it again"), gzip.open(path) as file:
        if path.suffixes[-2:-1] == [".json"]:
            return _listed(path, file.read())
        lines = [(n, line) for n, line in enumerate(file, 1) if line.strip()]
    return ListedRows(path, [(n, _parse_line(line, f"{path}:{n}")) for n, line in lines], "")


def _listed(path: Path, content: bytes) -> ListedRows:
    """Rows of a `.json` file, which must be a list of objects. json.loads accepts a byte-order mark only in bytes."""
    hint = "write a list of objects, or one object per line into a .jsonl file"
    with reading(DataError, str(path), "is not valid JSON", hint):
        found: object = json.loads(content)
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in cast("list[object]", found)):
        kind = type(cast("object", found)).__name__
        raise DataError(str(path), kind, "a .json file must hold a list of objects", hint)
    return ListedRows(path, list(enumerate(cast("list[dict[str, Any]]", found))), "row ")


class TableRows:
    """Selected columns of parquet or arrow files, held as compact arrow arrays."""

    def __init__(self, path: Path, table: Any) -> None:
        self._path, self._table = path, table
        with reading(DataError, str(path), "holds values that cannot be read", "write the file again"):
            self._checksum = _checksum(row for batch in self._table.to_batches(1024) for row in batch.to_pylist())

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return cast("dict[str, Any]", self._table.slice(index, 1).to_pylist()[0])

    def where(self, index: int) -> str:
        """`file:row` of a row, counting rows from 0."""
        return f"{self._path}:row {index}"

    def fingerprint(self) -> str:
        """Checksum over all rows."""
        return f"rows-{len(self)}-{self._checksum:08x}"


def _wanted(path: Path, columns: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Columns that hold the keys; of a nested key the outermost. Raises DataError for a missing one."""
    wanted = dict.fromkeys(key if key in columns else key.split(".")[0] for key in keys)
    for key in wanted:
        if key not in columns:
            raise missing_key(str(path), key, columns)
    return list(wanted)


def _checksum(rows: Iterator[Mapping[str, Any]]) -> int:
    crc = 0
    for row in rows:
        crc = zlib.crc32(json.dumps(row, sort_keys=True, default=str).encode(), crc)
    return crc


def _parquet(path: Path, files: Sequence[Path], keys: Sequence[str]) -> TableRows:
    parquet: Any = importlib.import_module("pyarrow.parquet")  # pyarrow has no type stubs
    with reading(DataError, str(path), "is not a readable parquet file", "write it again, or use a JSONL file"):
        columns = _wanted(path, parquet.read_schema(files[0]).names, keys)
        tables = [parquet.read_table(file, columns=columns) for file in files]
    return TableRows(path, _one_table(files, tables))


def _one_table(files: Sequence[Path], tables: Sequence[Any]) -> Any:
    """Join shards into one table; types that hold the same values (int32 and int64, null and any) are unified.

    Raises DataError naming the shard and column whose type does not match the shards before.
    """
    arrow: Any = importlib.import_module("pyarrow")
    schema = tables[0].schema
    for file, table in zip(files[1:], tables[1:], strict=True):
        for field in table.schema:
            if field.name not in schema.names:
                continue
            try:
                arrow.unify_schemas([arrow.schema([schema.field(field.name)]), arrow.schema([field])],
                                    promote_options="permissive")  # fmt: skip
            except (arrow.ArrowInvalid, arrow.ArrowTypeError) as error:
                rule = f"column {field.name!r} is {schema.field(field.name).type} in the files before it"
                raise DataError(str(file), str(field.type), rule, "write this file again with that type") from error
        schema = arrow.unify_schemas([schema, table.schema], promote_options="permissive")
    return arrow.concat_tables(tables, promote_options="permissive")


def _saved_dataset(path: Path, files: Sequence[Path], keys: Sequence[str]) -> TableRows:
    """Dataset from `datasets.save_to_disk`: arrow streams."""
    arrow: Any = importlib.import_module("pyarrow")
    with reading(DataError, str(path), "holds no readable arrow files", "save it again, or with ds.to_json(FILE)"):
        tables = [arrow.ipc.open_stream(arrow.memory_map(str(file))).read_all() for file in files]
        table = _one_table(files, tables)
        return TableRows(path, table.select(_wanted(path, table.column_names, keys)))


def _directory(path: Path, keys: Sequence[str]) -> RowFile:
    parquet, arrow = sorted(path.glob("*.parquet")), sorted(path.glob("*.arrow"))
    if parquet:
        return _parquet(path, parquet, keys)
    if arrow:
        return _saved_dataset(path, arrow, keys)
    splits = sorted(inner.name for inner in path.iterdir() if inner.is_dir())
    hint = f"name one of its directories: {', '.join(splits)}" if splits else "name a file"
    raise DataError("data.prompts", str(path), "is a directory without parquet or arrow files in it", hint)


def missing_key(where: str, key: str, present: Sequence[str]) -> DataError:
    """The error for a row without a key."""
    hint = "add the key to the row, or correct data.prompt_key, data.label_key or data.metadata_key"
    guess = nearest(key, present)
    return DataError(where, sorted(present), f"has no key {key!r}", f"{guess} {hint} (null: none)".lstrip())


def field_of(row: Mapping[str, Any], key: str, where: str) -> Any:
    """The value under a key, or under a path of keys: `reward_model.ground_truth`. Raises DataError."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise missing_key(where, key, list(row))
        value = cast("Mapping[str, Any]", value)[part]
    return value


def plain(value: Any, label: str, where: str) -> Any:
    """Return the value if JSON and UTF-8 can hold it, as checkpoints and engines require. Raises DataError."""
    rule = f"{label} must be JSON: text, numbers, lists or objects"
    with reading(DataError, where, rule, f"{_ROW_HINT}; write dates, decimals and bytes as text"):
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


RowFile: TypeAlias = JsonlFile | ListedRows | TableRows
"""Rows of one file, by index."""


def open_rows(path: Path, keys: Sequence[str]) -> RowFile:
    """Rows of a file or directory, by its kind. Raises DataError if it is missing, unknown or unreadable."""
    with reading(DataError, "data.prompts", "cannot be opened", f"use {_KINDS}"):
        if path.is_dir():
            return _directory(path, keys)
        if not path.is_file():
            raise _no_file(path)
        if path.name.endswith((".jsonl.gz", ".json.gz")):
            return _gzipped(path)
        if path.suffix == ".jsonl":
            return JsonlFile(path)
        if path.suffix == ".json":
            return _listed(path, path.read_bytes())
        if path.suffix == ".parquet":
            return _parquet(path, [path], keys)
    raise DataError("data.prompts", str(path), f"suffix {path.suffix!r} is not supported", f"use {_KINDS}")


def glance(path: Path, keys: Sequence[str]) -> None:
    """Cheap early checks: the file exists, and a first line of JSON has these keys. Raises DataError."""
    if not path.exists():
        raise _no_file(path)
    if path.suffix != ".jsonl" or not path.is_file():
        return
    with reading(DataError, "data.prompts", "cannot be opened", "use a readable file"), path.open("rb") as file:
        first = next(((n, line) for n, line in enumerate(file, 1) if line.strip()), None)
        if first is not None:
            where = f"{path}:{first[0]}"
            row = _parse_line(first[1], where)
            for key in keys:
                field_of(row, key, where)


def _no_file(path: Path) -> DataError:
    return DataError("data.prompts", str(path), "no such file", _fetched(path) or f"use {_KINDS}")


def _fetched(path: Path) -> str:
    """Hint for a path that looks like a Hugging Face Hub data set: how to download it."""
    command = "" if path.suffix else hub_download(path, "--repo-type dataset ")[0]
    return f"{command}, then use its files" if command else ""
