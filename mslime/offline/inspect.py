"""What a checkpoint holds, from its headers alone: tensors, bytes, dtypes, files, layout, step and family."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mslime.config.errors import CheckpointError
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.files import TORCH_DTYPES, torch_dtype
from mslime.convert.hf import HFCheckpoint
from mslime.convert.tensor_layouts import Shape
from mslime.convert.torch_dist import DistCheckpoint, is_torch_dist
from mslime.data.manifest import NAME, read_manifest
from mslime.offline.to_megatron import HF_FILES

if TYPE_CHECKING:
    from mslime.data.manifest import Manifest


@dataclass(frozen=True)
class TensorSummary:
    """One stored tensor: its name, dtype as torch names it, shape and file (the first, when it lies in several)."""

    name: str
    dtype: str
    shape: Shape
    file: str

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Summary:
    """What `inspect` knows.

    Attributes:
        kind: of checkpoint, for people.
        entries: every stored tensor.
        facts: (what, value) in the order to show them.
    """

    kind: str
    entries: tuple[TensorSummary, ...]
    facts: tuple[tuple[str, str], ...]

    def by_dtype(self) -> list[tuple[str, int, int]]:
        """(dtype, tensors, bytes), the largest first."""
        tensors, nbytes = Counter[str](), Counter[str]()
        for entry in self.entries:
            tensors[entry.dtype] += 1
            nbytes[entry.dtype] += entry.nbytes
        return [(dtype, tensors[dtype], size) for dtype, size in nbytes.most_common()]


def inspect(directory: Path) -> Summary:
    """Look at a checkpoint of either kind.

    Raises:
        CheckpointError: it is neither, or damaged.
    """
    return _megatron(directory) if is_torch_dist(directory) else _hugging_face(directory)


def _hugging_face(directory: Path) -> Summary:
    checkpoint = HFCheckpoint(directory)
    entries = [
        TensorSummary(n, TORCH_DTYPES.get(i.dtype, i.dtype), i.shape, i.file) for n, i in checkpoint.stored.items()
    ]
    facts = [
        ("family", _family(directory)),
        ("quantised", checkpoint.quantisation or "no"),
        ("fits its config.json", _fits(directory, checkpoint)),
    ]
    return Summary("Hugging Face", tuple(entries), _counted(entries, facts))


def _megatron(directory: Path) -> Summary:
    checkpoint = DistCheckpoint(directory)
    entries = [
        TensorSummary(key, tensor.dtype, tensor.shape, tensor.chunks[0].file if tensor.chunks else "")
        for key, tensor in checkpoint.tensors.items()
    ]
    facts: list[tuple[str, str]] = []
    kind = "Megatron torch_dist"
    if (directory / HF_FILES / "config.json").exists():
        kind += ", converted"
        facts.append(("family", _family(directory / HF_FILES)))
    if (directory / NAME).exists():
        kind += ", of a training run"
        facts += _of_run(read_manifest(directory))
    optimizer = [entry for entry in entries if entry.name.startswith("optimizer.")]
    if optimizer:
        facts.append(("optimizer", f"{len(optimizer)} tensors, {size_text(sum(e.nbytes for e in optimizer))}"))
    facts.append(("objects beside tensors", str(len(checkpoint.objects))))
    return Summary(kind, tuple(entries), _counted(entries, facts))


def _of_run(manifest: Manifest) -> list[tuple[str, str]]:
    told = {name: value for name, value in manifest.extra.items() if isinstance(value, int | str | float)}
    return [
        ("layout", f"{manifest.layout} on {manifest.world_size} ranks"),
        *((name.replace("_", " "), str(value)) for name, value in told.items()),
    ]


def _counted(entries: Iterable[TensorSummary], facts: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    entries = list(entries)
    files = len({entry.file for entry in entries})
    total = sum(entry.nbytes for entry in entries)
    return (*facts, ("tensors", f"{len(entries)} in {files} files"), ("bytes", f"{size_text(total)} ({total})"))


def _family(directory: Path) -> str:
    try:
        config = read_hf_config(directory)
        return get_family(config).architecture
    except CheckpointError as error:
        return f"not known: {error.rule}"


def _fits(directory: Path, checkpoint: HFCheckpoint) -> str:
    try:
        config = read_hf_config(directory)
        get_family(config).rules(config).check_hf(checkpoint.shapes, str(directory))
    except CheckpointError as error:
        return f"no: {error.field}: {error.rule}"
    return "yes"


def size_text(nbytes: float) -> str:
    """Bytes for people: `1.3 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
