"""Contents of checkpoints, from their headers alone, and differences of two checkpoints, tensor by tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from mslime.config.errors import CheckpointError
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.hf import HFCheckpoint
from mslime.convert.safetensors_files import TORCH_DTYPES, Advance, batches, torch_dtype
from mslime.convert.table import RuleTable
from mslime.convert.tensor_layouts import Shape
from mslime.convert.torch_dist import DistCheckpoint, ModelPlacement, is_torch_dist
from mslime.data.checkpoints import NAME, read_manifest
from mslime.offline.jobs import ConversionProgress, ReopensFiles, SilentProgress, Workers
from mslime.offline.to_hf import MegatronSource
from mslime.offline.to_megatron import HF_FILES

if TYPE_CHECKING:
    from torch import Tensor

    from mslime.data.checkpoints import Manifest


@dataclass(frozen=True)
class TensorSummary:
    """One stored tensor: its name, dtype as torch names it, shape and file (the first of several)."""

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
    """Result of `inspect`.

    Attributes:
        kind: of checkpoint, for people.
        entries: every stored tensor.
        facts: (name, value) in display order.
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
    """Summarise a checkpoint of either kind.

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
    fields = {name: value for name, value in manifest.extra.items() if isinstance(value, int | str | float)}
    return [
        ("layout", f"{manifest.layout} on {manifest.world_size} ranks"),
        *((name.replace("_", " "), str(value)) for name, value in fields.items()),
    ]


def _counted(entries: Sequence[TensorSummary], facts: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    files = len({entry.file for entry in entries})
    total = sum(entry.nbytes for entry in entries)
    return (*facts, ("tensors", f"{len(entries)} in {files} files"), ("bytes", f"{size_text(total)} ({total})"))


def _family(directory: Path) -> str:
    try:
        config = read_hf_config(directory)
        return get_family(config).architecture
    except CheckpointError as error:
        return f"unknown: {error.rule}"


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


# Comparison of two checkpoints of any kind, tensor by tensor, under Hugging Face names.

_TASK_BYTES = 256 << 20
Group = tuple[str, ...]
"""Names of tensors that are read together."""


@dataclass(frozen=True)
class Difference:
    """Difference of one tensor.

    Attributes:
        name: under Hugging Face names.
        what: `only in A`, `only in B`, `shape`, `dtype` (values equal) or `values`.
        detail: for people.
        largest: largest |A - B|; NaN if one of them is NaN.
    """

    name: str
    what: str
    detail: str
    largest: float = 0.0


class HFSide(ReopensFiles):
    """A Hugging Face checkpoint to compare; quantised weights are dequantised."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        info = self._opened.info
        self.shapes: dict[str, Shape] = {name: entry.shape for name, entry in info.items()}
        self.dtypes = {name: TORCH_DTYPES[entry.dtype] for name, entry in info.items()}
        self.groups: list[Group] = [(name,) for name in info]
        self.silent: frozenset[str] = frozenset()

    @cached_property
    def _opened(self) -> HFCheckpoint:
        return HFCheckpoint(self._directory)

    def read(self, group: Group) -> Mapping[str, Tensor]:
        """The tensors of a group by name."""
        return {name: self._opened.tensor(name) for name in group}


class MegatronSide(ReopensFiles):
    """A Megatron checkpoint to compare.

    Attributes:
        silent: names that a Hugging Face checkpoint may hold and that are not stored here.
    """

    def __init__(self, directory: Path, hf_config: Mapping[str, object], placement: ModelPlacement) -> None:
        self._directory, self._hf_config, self._placement = directory, dict(hf_config), placement
        source, table = self._opened
        units = source.units.values()
        self.shapes: dict[str, Shape] = {name: shape for unit in units for name, shape in unit.shapes.items()}
        self.dtypes = {name: source.dtype(unit) for unit in units for name in unit.shapes}
        self.groups: list[Group] = [tuple(unit.shapes) for unit in units]
        self.silent = frozenset({*table.aliases, *table.ignored})

    @cached_property
    def _opened(self) -> tuple[MegatronSource, RuleTable]:
        table = get_family(self._hf_config).rules(self._hf_config)
        return MegatronSource(self._directory, table, self._placement), table

    def read(self, group: Group) -> Mapping[str, Tensor]:
        """The tensors of a group by name."""
        source, _ = self._opened
        return source.read(source.units[group[0]])


Side = HFSide | MegatronSide


def _compare_groups(a: Side, b: Side, groups: Sequence[Group], advance: Advance) -> list[Difference]:
    found: list[Difference] = []
    for group in groups:
        left, right = _read(a, group), _read(b, group)
        for name in group:
            if name in left and name in right:
                found += _compare(name, left[name], right[name])
                advance(left[name].nbytes + right[name].nbytes)
    return found


def _read(side: Side, group: Group) -> Mapping[str, Tensor]:
    if isinstance(side, MegatronSide):
        return side.read(group)
    return side.read(tuple(name for name in group if name in side.shapes))


def compare(a: Side, b: Side, *, workers: int = 1, progress: ConversionProgress | None = None) -> list[Difference]:
    """All tensors that differ, by name; empty if the two are equal.

    Two Megatron sides must be of one model.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    progress = progress or SilentProgress()
    found = [
        *(Difference(name, "only in A", str(a.shapes[name])) for name in a.shapes.keys() - b.shapes.keys() - b.silent),
        *(Difference(name, "only in B", str(b.shapes[name])) for name in b.shapes.keys() - a.shapes.keys() - a.silent),
    ]
    common = a.shapes.keys() & b.shapes.keys()
    groups = [group for group in (b if isinstance(b, MegatronSide) else a).groups if any(n in common for n in group)]
    sizes = [sum(_nbytes(side, name) for side in (a, b) for name in group if name in common) for group in groups]
    progress.phase("compare", sum(sizes), 0)
    batched = list(batches(zip(groups, sizes, strict=True), _TASK_BYTES))
    with Workers(workers) as pool:
        for differences in pool.run(partial(_compare_groups, a, b), batched, progress.advance):
            found += differences
    return sorted(found, key=lambda difference: difference.name)


def _nbytes(side: Side, name: str) -> int:
    return math.prod(side.shapes[name]) * torch_dtype(side.dtypes[name]).itemsize


def _compare(name: str, a: Tensor, b: Tensor) -> list[Difference]:
    import torch

    if a.shape != b.shape:
        return [Difference(name, "shape", f"{tuple(a.shape)} and {tuple(b.shape)}", math.nan)]
    named = f"{str(a.dtype).removeprefix('torch.')} and {str(b.dtype).removeprefix('torch.')}"
    if a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)):
        return []
    gap = (a.double() - b.double()).abs()
    largest = float(gap.max()) if gap.numel() else 0.0
    if a.dtype == b.dtype:
        different = int((_bits(a) != _bits(b)).sum())
        return [Difference(name, "values", f"{different} of {a.numel()} elements", largest)]
    if largest == 0.0:
        return [Difference(name, "dtype", named)]
    return [Difference(name, "values", f"{named}, {int((gap != 0).sum())} of {a.numel()} elements", largest)]


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: equal NaNs are equal, and zeros of two signs are not."""
    import torch

    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
