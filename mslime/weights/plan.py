"""The weight plan: which tensors travel in which bucket, in which order, at which offset. Pure data, no torch.

A plan is computed once from the model's rule table and the parallel layout; it is the same on every rank (compare
`fingerprint`), so that all ranks enter the same collectives in the same order. Stages follow each other; within a stage
the shared tensors (gathered over tensor parallelism) come before the experts (gathered over expert parallelism).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mslime.config.errors import ConfigError
from mslime.config.layout import ParallelLayout
from mslime.convert.kinds import Shape
from mslime.convert.table import BoundRule, RuleTable

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
Unit = tuple[tuple[BoundRule, ...], ...]
"""What must travel in one bucket: slots, each with the rule of every expert-parallel rank."""


@dataclass(frozen=True)
class Slot:
    """One tensor of the buffer that every rank of the gather group packs.

    Attributes:
        names: canonical Megatron name that the rank at each expert-parallel index packs here; one if not an expert.
        shape: local shape, the same on every rank of the group.
        offset: first element in the rank's buffer.
    """

    names: tuple[str, ...]
    shape: Shape
    offset: int

    @property
    def numel(self) -> int:
        """Elements of one rank's shard."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Entry:
    """A Hugging Face tensor of the bucket that is sent, or one expert's slice of a stacked one.

    Attributes:
        name: in the checkpoint.
        shape: of the tensor or slice.
        offset: first element in the flat buffer.
    """

    name: str
    shape: Shape
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """What one gather, one conversion and one broadcast move.

    Attributes:
        index: position in the plan.
        stage: pipeline stage that owns the tensors; its leader sends.
        expert: gathered over the expert grid (EP x ETP) instead of the tensor-parallel group.
        dtype: of every tensor on the wire, as torch names it.
        slots: what each rank packs, in order.
        pieces: what conversion makes of the slots, in order; slices where the checkpoint stacks experts.
        entries: what the leader sends, in order; the same as `pieces` where nothing is stacked.
    """

    index: int
    stage: int
    expert: bool
    dtype: str
    slots: tuple[Slot, ...]
    pieces: tuple[Entry, ...]
    entries: tuple[Entry, ...]

    @property
    def local_numel(self) -> int:
        """Elements that each rank of the gather group packs."""
        return self.slots[-1].offset + self.slots[-1].numel

    @property
    def hf_numel(self) -> int:
        """Elements that are sent."""
        return self.entries[-1].offset + self.entries[-1].numel

    @property
    def hf_bytes(self) -> int:
        """Bytes that are sent."""
        return self.hf_numel * DTYPE_BYTES[self.dtype]

    def describe(self) -> str:
        """For messages: `bucket 3 (stage 0, 12 tensors from x to y)`."""
        first, last = self.entries[0].name, self.entries[-1].name
        return f"bucket {self.index} (stage {self.stage}, {len(self.entries)} tensors from {first} to {last})"


@dataclass(frozen=True)
class WeightPlan:
    """All buckets of a model, in sending order."""

    layout: ParallelLayout
    buckets: tuple[Bucket, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of one whole sync on the wire."""
        return sum(bucket.hf_bytes for bucket in self.buckets)

    def stage_buckets(self, stage: int) -> tuple[Bucket, ...]:
        """Buckets of one pipeline stage, in order."""
        return tuple(bucket for bucket in self.buckets if bucket.stage == stage)

    def fingerprint(self) -> str:
        """Equal on two ranks exactly when their plans are equal."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def build_plan(
    table: RuleTable,
    layout: ParallelLayout,
    stage_layers: Sequence[Sequence[int]],
    dtype: str,
    bucket_bytes: int,
) -> WeightPlan:
    """The plan of one model in one layout.

    Args:
        table: the model's conversion rules.
        layout: the trainer's parallel sizes.
        stage_layers: global layer ids of each pipeline stage (all of its virtual chunks).
        dtype: of the tensors on the wire, as torch names it (`bfloat16`); the engine's. Rules may pin their own.
        bucket_bytes: upper bound on what a bucket sends; a single tensor (one expert of every rank; all experts of a
            layer where the checkpoint stacks them) may exceed it.

    Raises:
        ConfigError: the dtype is not a weight dtype.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError("weights.dtype", dtype, f"must be one of {', '.join(DTYPE_BYTES)}", "use the engine's dtype")
    assert len(stage_layers) == layout.pp, (stage_layers, layout)
    held = sorted(layer for layers in stage_layers for layer in layers)
    assert held == sorted({rule.layer for rule in table.bound.values()} - {-1}), f"stages hold layers {held}"
    stages = {layer: stage for stage, layers in enumerate(stage_layers) for layer in layers}
    owned_by: list[list[BoundRule]] = [[] for _ in range(layout.pp)]
    for rule in table.bound.values():
        if rule.exported:
            owned_by[_stage_of(rule, stages, layout.pp)].append(rule)
    buckets: list[Bucket] = []
    for stage, owned in enumerate(owned_by):
        for expert in (False, True):
            size = layout.etp if expert else layout.tp
            for wire_dtype in dict.fromkeys(rule.dtype or dtype for rule in owned):
                rules = [rule for rule in owned if rule.is_expert == expert and (rule.dtype or dtype) == wire_dtype]
                units: Iterable[Unit] = _expert_units(rules, layout.ep) if expert else (((rule,),) for rule in rules)
                for run in _fill(units, bucket_bytes // DTYPE_BYTES[wire_dtype]):
                    buckets.append(_bucket(len(buckets), stage, expert, wire_dtype, run, size))
    return WeightPlan(layout, tuple(buckets))


def _stage_of(rule: BoundRule, stages: Mapping[int, int], pp: int) -> int:
    if rule.layer >= 0:
        return stages[rule.layer]
    return 0 if rule.name.startswith("embedding.") else pp - 1


def _expert_units(rules: Sequence[BoundRule], ep: int) -> Iterator[Unit]:
    """Slots of `ep` rules that lie at the same place on every expert-parallel rank: local expert i of each.

    All slots of a stacked tensor come as one unit, because they make one tensor.
    """
    by_place: dict[tuple[int, str], dict[int, BoundRule]] = {}
    for rule in rules:
        by_place.setdefault((rule.layer, rule.name.rsplit(f".{rule.expert}.", 1)[1]), {})[rule.expert] = rule
    experts = max((rule.expert for rule in rules), default=-1) + 1
    assert experts % ep == 0, f"{experts} experts on {ep} expert-parallel ranks"
    per_rank = experts // ep
    for layer in dict.fromkeys(rule.layer for rule in rules):
        places = [by_expert for (where, _), by_expert in by_place.items() if where == layer]
        slots = [
            [tuple(by_expert[rank * per_rank + local] for rank in range(ep)) for local in range(per_rank)]
            for by_expert in places
        ]
        yield from (tuple(place) for place in slots if place[0][0].stack)
        loose = [place for place in slots if not place[0][0].stack]
        yield from ((place[local],) for local in range(per_rank) for place in loose)


def _hf_numel(unit: Unit) -> int:
    return sum(math.prod(shape) for slot in unit for rule in slot for shape in rule.kind.hf_shapes)


def _fill(units: Iterable[Unit], limit: int) -> Iterator[list[Unit]]:
    """Consecutive units of at most `limit` elements in sum; a unit that is larger stands alone."""
    run: list[Unit] = []
    size = 0
    for unit in units:
        numel = _hf_numel(unit)
        if run and size + numel > limit:
            yield run
            run, size = [], 0
        run.append(unit)
        size += numel
    if run:
        yield run


def _bucket(index: int, stage: int, expert: bool, dtype: str, run: Sequence[Unit], tp_size: int) -> Bucket:
    slots: list[Slot] = []
    pieces: list[Entry] = []
    entries: dict[str, Entry] = {}
    packed = sent = 0
    for slot in (slot for unit in run for slot in unit):
        slots.append(Slot(tuple(rule.name for rule in slot), slot[0].local_shape(tp_size), packed))
        packed += slots[-1].numel
        for rule in slot:
            for name, whole, piece in zip(rule.hf_names, rule.hf_shapes, rule.kind.hf_shapes, strict=True):
                if name not in entries:
                    entries[name] = Entry(name, whole, sent)
                    sent += entries[name].numel
                first = entries[name].offset + (rule.expert * math.prod(piece) if rule.stack else 0)
                pieces.append(Entry(name, piece, first))
    return Bucket(index, stage, expert, dtype, tuple(slots), tuple(pieces), tuple(entries.values()))
