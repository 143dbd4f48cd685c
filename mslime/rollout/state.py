"""Groups on disk: one .npz file of plain arrays and a JSON header, read back without pickle.

The columns of all samples are concatenated, written and read sample by sample, so a service's data is never in memory
twice. Label and metadata go into the header, so they must be JSON values. A file that `save_state` did not write is
refused with its name.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from mslime.config.errors import CheckpointError, DataError
from mslime.data.checkpoints import FileSum, SummedFile
from mslime.data.routes import Routes, Supports
from mslime.data.sample import Group, Sample, SampleStatus, Segment, check_invariants

FORMAT = 1
Columns = Mapping[str, Sequence[NDArray[Any]]]
"""Parts of every column, in the order of the samples; they are the samples' own arrays, not copies."""
_COLUMNS: dict[str, str] = {"tokens": "int32", "loss_mask": "bool", "log_probs": "float32"}
_PLAIN = (
    "group_id", "index", "prompt_length", "label", "metadata", "reward", "process_rewards", "turns", "scores",
    "rollout_id", "response", "aborts", "error",
)  # fmt: skip
_PIECE_BYTES = 1 << 20
_FOREIGN = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, EOFError,
    MemoryError, RecursionError, NotImplementedError, BadZipFile,
)  # fmt: skip


@dataclass(frozen=True)
class PackedGroups:
    """A snapshot of groups, which may continue to grow (`save_beside`).

    Attributes:
        headers: a JSON list. columns: as in `pack_groups`.
    """

    headers: str
    columns: Mapping[str, list[NDArray[Any]]]

    @classmethod
    def of(cls, groups: Sequence[Group]) -> PackedGroups:
        """Take the snapshot. Raises DataError if a label or metadata value is not JSON."""
        headers, columns = pack_groups(groups)
        return cls(_json(headers), columns)

    @classmethod
    def begun(cls, groups: Sequence[Group]) -> PackedGroups:
        """The groups as they were before anything was generated; see `begun_anew`."""
        headers = [_begun_header(g) for g in groups]
        return cls(_json(headers), {"prompts": [g.prompt for g in groups]})

    @staticmethod
    def joined(parts: Sequence[PackedGroups]) -> tuple[list[dict[str, Any]], dict[str, list[NDArray[Any]]]]:
        """(headers, columns) of all parts, concatenated."""
        columns: dict[str, list[NDArray[Any]]] = {}
        for part in parts:
            for name, arrays in part.columns.items():
                columns.setdefault(name, []).extend(arrays)
        return [header for part in parts for header in json.loads(part.headers)], columns


NO_GROUPS = PackedGroups("[]", {})


def pack_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], dict[str, list[NDArray[Any]]]]:
    """(one header per group, columns) that `unpack_groups` turns back into equal groups."""
    samples = [s for g in groups for s in g.samples]
    columns: dict[str, list[NDArray[Any]]] = {name: [vars(s)[name] for s in samples] for name in _COLUMNS}
    columns["teacher_log_probs"] = [s.teacher_log_probs for s in samples if s.teacher_log_probs is not None]
    routes = [s.routes for s in samples if s.routes is not None]
    columns["experts"] = [piece.reshape(-1) for r in routes for piece in r.pieces]
    columns["route_mask"] = [r.mask for r in routes]
    supports = [s.supports for s in samples if s.supports is not None]
    columns["support_ids"] = [s.ids for s in supports]
    columns["support_sizes"] = [s.sizes.astype(np.int32) for s in supports]
    columns["prompts"] = [g.prompt for g in groups]
    return [{**_begun_header(g), "samples": [_header(s) for s in g.samples]} for g in groups], columns


def unpack_groups(headers: Sequence[Mapping[str, Any]], columns: StoredColumns) -> list[Group]:
    """Inverse of `pack_groups`."""
    return [_group(h, columns) for h in headers]


def _begun_header(g: Group) -> dict[str, Any]:
    """Header of a group without its rollouts."""
    return {
        "group_id": g.group_id,
        "source": g.source,
        "size": g.size,
        "prompt": len(g.prompt),
        "label": g.samples[0].label,
        "metadata": g.metadata,
        "failures": g.failures,
        "chat": None if g.messages is None else {"messages": g.messages, "tools": g.tools},
    }


def _group(h: Mapping[str, Any], stored: StoredColumns) -> Group:
    samples = [_sample(s, stored) for s in h["samples"]]
    # Files older than rollout functions have metadata per sample only; it could not change then.
    metadata = h.get("metadata", samples[0].metadata if samples else {})
    group = Group(h["group_id"], samples, h["source"], h.get("failures", 0), metadata)
    if "prompt" in h:  # missing in files older than rollouts of several sequences
        group.prompt, group.size = stored.cut("prompts", h["prompt"]).astype(np.int32), h["size"]
        group.messages, group.tools = (h["chat"] or {}).get("messages"), (h["chat"] or {}).get("tools")
    return group


def save_state(path: Path, state: Mapping[str, Any], columns: Columns) -> FileSum:
    """Write a JSON-able state with its columns atomically: `path` always holds the complete old or new file.

    Returns:
        The file's checksum, for the checkpoint that contains it.

    Raises:
        DataError: a label or metadata value is not JSON.
        OSError: the disk is full, for example; the old file stays.
    """
    return _save(path, _header_text(state), columns)


async def save_beside(path: Path, state: Mapping[str, Any], columns: Columns) -> FileSum:
    """`save_state` of the present state, written in a thread while the caller's event loop continues.

    Samples that grow meanwhile append after the columns, whose lengths are fixed now (`Sample.extend`).
    """
    return await asyncio.to_thread(_save, path, _header_text(state), columns)


def _save(path: Path, header: bytes, columns: Columns) -> FileSum:
    part = path.with_name(path.name + ".part")
    try:
        with SummedFile(part) as file:
            _write_archive(file, header, columns)
            file.sync()
        os.replace(part, path)
        return file.sum
    finally:
        part.unlink(missing_ok=True)


def state_bytes(state: Mapping[str, Any], columns: Columns) -> bytes:
    """The bytes that `save_state` would write. Raises the same DataError."""
    buffer = io.BytesIO()
    _write_archive(buffer, _header_text(state), columns)
    return buffer.getvalue()


def _header_text(state: Mapping[str, Any]) -> bytes:
    return _json({"format": FORMAT, **state}).encode()


def _json(values: object) -> str:
    try:
        return json.dumps(values)
    except TypeError as error:
        raise DataError("data.metadata_key", str(error), "labels and metadata must be JSON values to be saved",
                        "store text, numbers, lists or objects in the prompt file") from error  # fmt: skip


def _write_archive(file: Any, header: bytes, columns: Columns) -> None:
    with ZipFile(file, "w") as archive:
        for name, parts in {"header": [np.frombuffer(header, np.uint8)], **columns}.items():
            _write_column(archive, name, parts)


@contextmanager
def open_state(path: Path) -> Iterator[tuple[dict[str, Any], StoredColumns]]:
    """Open a file of `save_state`; columns are read as they are cut. Unpack them inside the block.

    Raises:
        CheckpointError: the file is missing, damaged or of another format, or the block found no valid state in it.
    """
    hint = "resume from another checkpoint, or start without rollout state"
    try:
        with ExitStack() as stack:
            stored = StoredColumns(path, stack)
            state: object = json.loads(stored.whole("header").tobytes())
            if not isinstance(state, dict):
                raise ValueError("its header is not a JSON object")
            known = cast("dict[str, Any]", state)
            if known["format"] != FORMAT:
                raise CheckpointError(str(path), known["format"], f"unsupported format; expected {FORMAT}", hint)
            yield known, stored
            stored.check_read()
    except (CheckpointError, DataError):
        raise
    except _FOREIGN as error:
        reason = f"is not readable rollout state ({error})"
        raise CheckpointError(str(path), type(error).__name__, reason, hint) from error


def _write_column(archive: ZipFile, name: str, parts: Sequence[NDArray[Any]]) -> None:
    """One `.npy` member, piece by piece."""
    dtype = np.result_type(*parts) if parts else np.dtype(np.float64)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (sum(map(len, parts)),)}
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array_header_1_0(cast(Any, member), header)
        gathered = bytearray()
        for part in parts:
            gathered += np.ascontiguousarray(part, dtype).view(np.uint8).data
            if len(gathered) >= _PIECE_BYTES:
                member.write(gathered)
                gathered = bytearray()
        member.write(gathered)


class StoredColumns:
    """The columns of a file, each with its own stream that is read from front to back. Pickles inside are never
    opened."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        archive = stack.enter_context(ZipFile(path))
        self._streams: dict[str, tuple[Any, np.dtype[Any], int]] = {}
        for member in archive.namelist():
            stream: Any = stack.enter_context(archive.open(member))
            version = np.lib.format.read_magic(stream)
            if version not in ((1, 0), (2, 0)):
                raise ValueError(f"{member} is of an unknown version of the .npy format")
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(stream)
            if dtype.hasobject or len(shape) != 1 or fortran:
                raise ValueError(f"{member} must be a plain column")
            self._streams[member.removesuffix(".npy")] = (stream, dtype, shape[0])

    def whole(self, name: str) -> NDArray[Any]:
        """The rest of a column."""
        return self.cut(name, self._streams[name][2])

    def cut(self, name: str, count: int) -> NDArray[Any]:
        """The next `count` elements of a column, as a new array. Raises ValueError at its end."""
        stream, dtype, left = self._streams[name]
        if not 0 <= count <= left:
            raise ValueError(f"{name} is shorter than its header states")
        piece = np.empty(count, dtype)
        target: Any = piece.view(np.uint8).data if count else b""
        done = 0
        while done < len(target):
            read = stream.readinto(target[done:])
            if not read:
                raise EOFError(f"{name} is cut off")
            done += read
        self._streams[name] = (stream, dtype, left - count)
        return piece

    def check_read(self) -> None:
        """Check that every column was fully read. Raises ValueError if one holds more data than its samples."""
        for name, (stream, _, left) in self._streams.items():
            if left or stream.read(1):
                raise ValueError(f"{name} holds {left} elements more than its header states")


def _header(s: Sample) -> dict[str, Any]:
    """Header of a sample: all fields that are not columns."""
    shape = None
    if s.routes is not None:
        first, layers = s.routes.pieces[0], s.routes.layer_ids
        shape = {"rows": len(s.routes), "layers": layers, "top_k": first.shape[2], "dtype": str(first.dtype)}
    return {
        **{name: vars(s)[name] for name in _PLAIN},
        "length": len(s),
        "segments": [[g.start, g.end, g.version, g.engine, g.trainable] for g in s.segments],
        "routes": shape,
        "support_ids": None if s.supports is None else len(s.supports.ids),
        "taught": s.teacher_log_probs is not None,
        "status": s.status.value,
    }


def _sample(header: Mapping[str, Any], stored: StoredColumns) -> Sample:
    h: dict[str, Any] = dict(header)
    has_teacher = h.pop("taught", False)  # missing in files older than served teachers
    n, shape, support_ids = h.pop("length"), h.pop("routes"), h.pop("support_ids")
    routes = supports = None
    if shape is not None:
        dims = (shape["rows"], len(shape["layers"]), shape["top_k"])
        dtype = np.dtype(shape["dtype"])
        if dtype.kind != "u":
            raise ValueError(f"routes are of {dtype}")
        experts = stored.cut("experts", int(np.prod(dims))).reshape(dims).astype(dtype)
        mask = stored.cut("route_mask", dims[0]).astype(np.bool_)
        routes = Routes(experts, mask, tuple(int(layer) for layer in shape["layers"]))
    if support_ids is not None:
        sizes = stored.cut("support_sizes", n).astype(np.int64)
        ids = stored.cut("support_ids", support_ids).astype(np.int32)
        if (sizes < 0).any() or sizes.sum() != len(ids):
            raise ValueError(f"supports of {sizes.sum()} ids hold {len(ids)}")
        supports = Supports.of_sizes(ids, sizes)
    h["segments"] = [_segment(*s) for s in h["segments"]]
    h["process_rewards"] = [(int(at), float(reward)) for at, reward in h.get("process_rewards", [])]
    h["turns"] = [(int(start), int(number)) for start, number in h.get("turns", [])]
    h["status"] = SampleStatus(h["status"])
    h |= {name: stored.cut(name, n).astype(dtype, casting="same_kind") for name, dtype in _COLUMNS.items()}
    if has_teacher:
        h["teacher_log_probs"] = stored.cut("teacher_log_probs", n)
    return Sample(**h, routes=routes, supports=supports)


def _segment(start: int, end: int, version: int | None, engine: str, trainable: bool) -> Segment:
    if type(start) is not int or type(end) is not int or type(version) not in (int, type(None)) or start > end:
        raise ValueError(f"segment {start}..{end} of version {version}")
    if not isinstance(engine, str) or not isinstance(trainable, bool):
        raise TypeError(f"segment of {engine!r}, trainable {trainable!r}")
    return Segment(start, end, version, engine, trainable)


def check_stored(groups: Sequence[Group]) -> None:
    """Validate groups from a file. Raises AssertionError, TypeError or ValueError."""
    for group in groups:
        if type(group.group_id) is not int or type(group.failures) is not int or not isinstance(group.source, str):
            raise TypeError(f"group {group.group_id!r} of {group.source!r}")
        if type(group.size) is not int or group.size <= max(
            (s.index for s in group.samples if s.rollout_id is None), default=-1
        ):
            raise ValueError(f"group {group.group_id} is of {group.size!r} rollouts")
        if not isinstance(group.metadata, dict):
            raise TypeError(f"metadata of group {group.group_id} must be an object")
        if not group.samples or any(s.group_id != group.group_id for s in group.samples):
            raise ValueError(f"group {group.group_id} holds {[s.group_id for s in group.samples]}")
        for sample in group.samples:
            _check_values(sample)
            check_invariants(sample)


def _check_values(sample: Sample) -> None:
    """Check properties that `check_invariants` assumes for samples made by this program."""
    plain = {"group_id": int, "index": int, "prompt_length": int, "aborts": int, "response": str, "error": str}
    for name, kind in plain.items():
        if type(vars(sample)[name]) is not kind:
            raise TypeError(f"{name} {vars(sample)[name]!r} must be a {kind.__name__}")
    if not isinstance(sample.metadata, dict) or type(sample.rollout_id) not in (int, type(None)):
        raise TypeError("metadata must be an object, and rollout_id a number")
    if sample.reward is not None and (type(sample.reward) not in (int, float) or not np.isfinite(sample.reward)):
        raise ValueError(f"reward {sample.reward!r} must be a finite number")
    if (sample.tokens < 0).any() or (sample.supports is not None and (sample.supports.ids < 0).any()):
        raise ValueError("token ids must not be negative")
    if sample.supports is not None and sample.supports.repeats():
        raise ValueError("a support has an id twice")
