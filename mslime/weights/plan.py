"""The weight plan: which tensors travel in which bucket, in which order, at which offset. Pure data, no torch.

A plan is computed once from the model's rule table and the parallel layout; it is the same on every rank (compare
`fingerprint`), so that all ranks enter the same collectives in the same order. Stages follow each other; within a stage
the shared tensors (gathered over tensor parallelism) come before the experts (gathered over expert parallelism).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mslime.config.errors import ConfigError
from mslime.config.layout import ParallelLayout
from mslime.convert.kinds import Shape
from mslime.convert.table import BoundRule, RuleTable

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    """One Hugging Face tensor of the bucket that is sent: its name, shape and first element in the flat buffer."""

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
        entries: what the leader sends, in order.
    """

    index: int
    stage: int
    expert: bool
    dtype: str
    slots: tuple[Slot, ...]
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
        dtype: of the tensors on the wire, as torch names it (`bfloat16`); the engine's.
        bucket_bytes: upper bound on what a bucket sends; a single tensor (or one expert of every rank) may exceed it.

    Raises:
        ConfigError: the dtype is not a weight dtype.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError("weights.dtype", dtype, f"must be one of {', '.join(DTYPE_BYTES)}", "use the engine's dtype")
    assert len(stage_layers) == layout.pp, (stage_layers, layout)
    held = sorted(layer for layers in stage_layers for layer in layers)
    assert held == sorted({rule.layer for rule in table.bound.values()} - {-1}), f"stages hold layers {held}"
    buckets: list[Bucket] = []
    for stage in range(layout.pp):
        owned = [rule for rule in table.bound.values() if rule.exported and _stage_of(rule, stage_layers) == stage]
        shared = [(rule,) for rule in owned if not rule.is_expert]
        experts = list(_expert_slots([rule for rule in owned if rule.is_expert], layout.ep))
        for groups, expert in ((shared, False), (experts, True)):
            size = layout.etp if expert else layout.tp
            for run in _fill(groups, bucket_bytes // DTYPE_BYTES[dtype]):
                buckets.append(_bucket(len(buckets), stage, expert, dtype, run, size))
    return WeightPlan(layout, tuple(buckets))


def _stage_of(rule: BoundRule, stage_layers: Sequence[Sequence[int]]) -> int:
    if rule.layer >= 0:
        return next(stage for stage, layers in enumerate(stage_layers) if rule.layer in layers)
    return 0 if rule.name.startswith("embedding.") else len(stage_layers) - 1


def _expert_slots(rules: Sequence[BoundRule], ep: int) -> Iterator[tuple[BoundRule, ...]]:
    """Groups of `ep` rules that lie at the same place on every expert-parallel rank: local expert i of each."""
    by_place: dict[tuple[int, str], dict[int, BoundRule]] = {}
    for rule in rules:
        by_place.setdefault((rule.layer, rule.name.rsplit(f".{rule.expert}.", 1)[1]), {})[rule.expert] = rule
    experts = max((rule.expert for rule in rules), default=-1) + 1
    assert experts % ep == 0, f"{experts} experts on {ep} expert-parallel ranks"
    per_rank = experts // ep
    layers = dict.fromkeys(rule.layer for rule in rules)
    for layer in layers:
        places = [by_expert for (where, _), by_expert in by_place.items() if where == layer]
        for local in range(per_rank):
            for by_expert in places:
                yield tuple(by_expert[rank * per_rank + local] for rank in range(ep))


def _hf_numel(rules: Sequence[BoundRule]) -> int:
    return sum(math.prod(shape) for rule in rules for shape in rule.hf_shapes)


def _fill(groups: Sequence[tuple[BoundRule, ...]], limit: int) -> Iterator[list[tuple[BoundRule, ...]]]:
    """Consecutive groups of at most `limit` elements in sum; a group that is larger stands alone."""
    run: list[tuple[BoundRule, ...]] = []
    size = 0
    for group in groups:
        numel = _hf_numel(group)
        if run and size + numel > limit:
            yield run
            run, size = [], 0
        run.append(group)
        size += numel
    if run:
        yield run


def _bucket(
    index: int, stage: int, expert: bool, dtype: str, run: Sequence[tuple[BoundRule, ...]], tp_size: int
) -> Bucket:
    slots: list[Slot] = []
    entries: list[Entry] = []
    packed = sent = 0
    for group in run:
        slots.append(Slot(tuple(rule.name for rule in group), group[0].local_shape(tp_size), packed))
        packed += slots[-1].numel
        for rule in group:
            for name, shape in zip(rule.hf_names, rule.hf_shapes, strict=True):
                entries.append(Entry(name, shape, sent))
                sent += entries[-1].numel
    return Bucket(index, stage, expert, dtype, tuple(slots), tuple(entries))
