"""Headers of safetensors files, checked as the safetensors library checks them, without reading a weight.

The format: 8 bytes little-endian header length, JSON header, tensor data (huggingface.co/docs/safetensors, "Format";
rules: `Metadata::validate` of the library). What the library refuses is refused here: otherwise a damaged header would
be read as other weights.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mslime.config.errors import CheckpointError, reading
from mslime.convert.kinds import Shape

_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_HEADER_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
AGAIN = "download the checkpoint again, or point model.path at a complete one"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: its file, safetensors dtype (`BF16`, `F32`, ...), shape, first byte in the file."""

    file: str
    dtype: str
    shape: Shape
    start: int = -1


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of one safetensors file, whose length must be what its header promises.

    Raises:
        CheckpointError: the file is missing, truncated or not safetensors, or its header contradicts itself.
    """
    with reading(CheckpointError, str(path), "the file's header is not safetensors", AGAIN):
        length, size, header = _load(path)
        metadata = header.pop("__metadata__", None)
        assert metadata is None or isinstance(metadata, dict), "__metadata__ is no object"
        found = {name: _tensor(path, name, entry, length) for name, entry in header.items()}
        _check_layout(path, {name: (info, *header[name]["data_offsets"]) for name, info in found.items()}, length, size)
        return found


def _load(path: Path) -> tuple[int, int, dict[str, Any]]:
    """(bytes of the header, bytes of the file, the header)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise CheckpointError(str(path), f"{size} bytes", "the file is truncated or not safetensors", AGAIN)
            header = json.loads(file.read(length), object_pairs_hook=_once)
    except FileNotFoundError as error:
        raise CheckpointError(str(path), None, "the weight file is missing", AGAIN) from error
    assert isinstance(header, dict), "it is no object"
    return length, size, cast("dict[str, Any]", header)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names), "a name stands twice"
    return dict(pairs)


def _tensor(path: Path, name: str, entry: Any, length: int) -> TensorInfo:
    """One entry of the header, whose bytes must be those of its shape and dtype."""
    shape, dtype = entry["shape"], entry["dtype"]
    start, end = entry["data_offsets"]
    assert all(type(n) is int and n >= 0 for n in [*shape, start, end]), f"{name}: shape or offsets are no sizes"
    assert dtype in _HEADER_BITS, f"{name}: the dtype {dtype!r} is unknown"
    needed = math.prod(shape) * _HEADER_BITS[dtype]
    if (end - start) * 8 != needed:
        raise CheckpointError(
            f"{path}: {name}", f"{end - start} bytes", f"{dtype} of shape {shape} has {needed / 8:g} bytes", AGAIN
        )
    return TensorInfo(path.name, dtype, tuple(shape), 8 + length + start)


def _check_layout(path: Path, spans: dict[str, tuple[TensorInfo, int, int]], length: int, size: int) -> None:
    """Tensors lie one after the other, from the end of the header to the end of the file."""
    at = 0
    for name, (_, start, end) in sorted(spans.items(), key=lambda item: item[1][1:]):
        if start != at:
            raise CheckpointError(f"{path}: {name}", f"starts at byte {start}",
                                  f"the tensor before it ends at byte {at}: the header is damaged", AGAIN)  # fmt: skip
        at = end
    promised = 8 + length + at
    if size != promised:
        last = max(spans, key=lambda name: spans[name][2], default="")
        raise CheckpointError(
            f"{path}: {last}",
            f"{size} bytes",
            f"the header promises {promised} bytes: the file is truncated or damaged",
            AGAIN,
        )
