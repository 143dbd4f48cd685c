"""Groups on disk: one .npz file of plain arrays and a JSON header, read back without pickle.

The columns of all samples are laid end to end. Label and metadata go into the header, so they must be JSON values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mslime.config.errors import CheckpointError, DataError
from mslime.data.routes import Routes
from mslime.data.sample import Group, Sample, SampleStatus, Segment
from mslime.data.supports import Supports

FORMAT = 1
_COLUMNS = ("tokens", "loss_mask", "log_probs")


def pack_groups(groups: Sequence[Group]) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """(one header per group, arrays) that `unpack_groups` turns back into equal groups."""
    samples = [s for g in groups for s in g.samples]
    arrays: dict[str, NDArray[Any]] = {}
    for name in _COLUMNS:
        arrays[name] = _joined([vars(s)[name] for s in samples])
    arrays["teacher_log_probs"] = _joined([s.teacher_log_probs for s in samples if s.teacher_log_probs is not None])
    routes = [s.routes for s in samples if s.routes is not None]
    arrays["experts"] = _joined([r.experts.reshape(-1) for r in routes])
    arrays["route_mask"] = _joined([r.mask for r in routes])
    supports = [s.supports for s in samples if s.supports is not None]
    arrays["support_ids"] = _joined([s.ids for s in supports])
    arrays["support_sizes"] = _joined([np.diff(s.offsets) for s in supports])
    headers = [{"group_id": g.group_id, "source": g.source, "samples": [_header(s) for s in g.samples]} for g in groups]
    return headers, arrays


def unpack_groups(headers: Sequence[Mapping[str, Any]], arrays: Mapping[str, NDArray[Any]]) -> list[Group]:
    """The groups that `pack_groups` was given."""
    cut = _Cutter(arrays)
    return [Group(h["group_id"], [_sample(s, cut) for s in h["samples"]], h["source"]) for h in headers]


def save_state(path: Path, state: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a JSON-able state with its arrays; `path` holds the old file or the whole new one at any time.

    Raises:
        DataError: a label or metadata value is not JSON.
        OSError: the disk is full, for example; the old file stays.
    """
    try:
        text = json.dumps({"format": FORMAT, **state})
    except TypeError as error:
        raise DataError("data.metadata_key", str(error), "labels and metadata must be JSON values to be saved",
                        "store text, numbers, lists or objects in the prompt file") from error  # fmt: skip
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            columns: dict[str, Any] = {"header": np.frombuffer(text.encode(), np.uint8), **arrays}
            np.savez(file, **columns)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load_state(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What `save_state` was given. Raises CheckpointError when the file is missing, damaged or of another format."""
    way_out = "resume from another checkpoint, or start without rollout state"
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        state = json.loads(arrays.pop("header").tobytes())
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise CheckpointError(
            str(path), type(error).__name__, f"is not readable rollout state ({error})", way_out
        ) from error
    if state["format"] != FORMAT:
        raise CheckpointError(str(path), state["format"], f"was written in another format than {FORMAT}", way_out)
    return state, arrays


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0)


def _header(s: Sample) -> dict[str, Any]:
    """Everything of a sample that is not a column."""
    routes = s.routes
    return {
        "group_id": s.group_id,
        "index": s.index,
        "prompt_length": s.prompt_length,
        "length": len(s),
        "segments": [[g.start, g.end, g.version, g.engine, g.trainable] for g in s.segments],
        "routes": None if routes is None else _routes_header(routes),
        "support_ids": None if s.supports is None else len(s.supports.ids),
        "taught": s.teacher_log_probs is not None,
        "label": s.label,
        "metadata": s.metadata,
        "reward": s.reward,
        "process_rewards": s.process_rewards,
        "scores": s.scores,
        "rollout_id": s.rollout_id,
        "status": s.status.value,
        "response": s.response,
        "aborts": s.aborts,
        "error": s.error,
    }


def _routes_header(routes: Routes) -> dict[str, Any]:
    rows, _, top_k = routes.experts.shape
    return {"rows": rows, "layers": routes.layer_ids, "top_k": top_k, "dtype": str(routes.experts.dtype)}


def _sample(header: Mapping[str, Any], cut: _Cutter) -> Sample:
    h: dict[str, Any] = dict(header)
    taught = h.pop("taught", False)  # not in files from before teachers were served
    n, shape, support_ids = h.pop("length"), h.pop("routes"), h.pop("support_ids")
    routes = supports = None
    if shape is not None:
        dims = (shape["rows"], len(shape["layers"]), shape["top_k"])
        experts = cut("experts", int(np.prod(dims))).reshape(dims).astype(shape["dtype"])
        routes = Routes(experts, cut("route_mask", dims[0]).astype(np.bool_), tuple(shape["layers"]))
    if support_ids is not None:
        sizes = cut("support_sizes", n).astype(np.int64)
        ids = cut("support_ids", support_ids).astype(np.int32)
        supports = Supports(ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]))
    h["segments"] = [Segment(*s) for s in h["segments"]]
    h["process_rewards"] = [(at, reward) for at, reward in h.get("process_rewards", [])]
    h["status"] = SampleStatus(h["status"])
    h |= {name: cut(name, n) for name in _COLUMNS}
    if taught:
        h["teacher_log_probs"] = cut("teacher_log_probs", n)
    return Sample(**h, routes=routes, supports=supports)


class _Cutter:
    """Takes consecutive pieces off each array."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays, self._at = arrays, dict.fromkeys(arrays, 0)

    def __call__(self, name: str, count: int) -> NDArray[Any]:
        start = self._at[name]
        self._at[name] = start + count
        piece = self._arrays[name][start : start + count]
        assert len(piece) == count, f"{name} ends before its header says"
        return piece.copy()
