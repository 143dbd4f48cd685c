"""The weight plan: tensors of each bucket, their order and offsets. Pure data, no torch.

A plan is computed once from the model's rule table and the parallel layout. It is the same on every rank (compare
`fingerprint`), so all ranks enter the same collectives in the same order. Each bucket has one sender. Senders take
turns bucket by bucket, so that each fills one while others send. Experts, which are cheapest to send, come before a
sender's part of the shared tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from mslime.config.errors import ConfigError
from mslime.config.layout import ParallelLayout
from mslime.convert.encoding import Encoded
from mslime.convert.hf import HFCheckpoint
from mslime.convert.safetensors_files import SAFETENSORS_DTYPES, TORCH_DTYPES, TensorPlan, batches
from mslime.convert.table import BoundRule, RuleTable
from mslime.convert.tensor_layouts import Shape

if TYPE_CHECKING:
    import torch


# The trainer ranks that send weights, and the ranks from which each gathers: pure arithmetic of the layout.
#
# A stage has one sender for each block of expert-parallel ranks. With as many senders as expert-parallel ranks, experts
# are not gathered: each rank sends its own. Only the first copy of a stage's experts takes part. Shared tensors
# (attention, norms, embeddings) are distributed over the senders, each of which gathers them from its own
# tensor-parallel ranks.


@dataclass(frozen=True)
class Senders:
    """The senders of every stage.

    Attributes:
        layout: the trainer's.
        per_stage: senders of one stage; divides the expert-parallel size.
    """

    layout: ParallelLayout
    per_stage: int = 1

    def __post_init__(self) -> None:
        assert self.layout.ep % self.per_stage == 0, (self.layout, self.per_stage)

    @classmethod
    def at_most(cls, layout: ParallelLayout, senders: int) -> Senders:
        """As many senders as the layout allows, at most `senders` over all stages, and at least one per stage."""
        share = max(1, senders // layout.pp)
        return cls(layout, max(n for n in range(1, layout.ep + 1) if layout.ep % n == 0 and n <= share))

    @property
    def block(self) -> int:
        """Expert-parallel ranks whose experts one sender sends."""
        return self.layout.ep // self.per_stage

    def ranks(self, stage: int) -> tuple[int, ...]:
        """Global ranks of a stage's senders: the first of each block."""
        step = self.block * self.layout.etp
        return tuple(self.layout.leader(stage) + sender * step for sender in range(self.per_stage))

    def everyone(self) -> tuple[int, ...]:
        """Global ranks of all senders, in order."""
        return tuple(rank for stage in range(self.layout.pp) for rank in self.ranks(stage))

    def tensor_ranks(self, sender: int) -> tuple[int, ...]:
        """Global ranks that hold the shards of shared tensors for a sender, in tensor-parallel order."""
        first = sender - sender % self.layout.tp
        return tuple(range(first, first + self.layout.tp))

    def expert_ranks(self, sender: int) -> tuple[int, ...]:
        """Global ranks whose experts a sender sends; the expert-tensor-parallel rank varies fastest."""
        return tuple(range(sender, sender + self.block * self.layout.etp))

    def all_expert_ranks(self, stage: int) -> tuple[int, ...]:
        """Global ranks of one copy of all experts of a stage; the expert-tensor-parallel rank varies fastest."""
        first = self.layout.leader(stage)
        return tuple(range(first, first + self.layout.expert_size))


DTYPE_BYTES = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1, "int32": 4, "int64": 8,
}  # fmt: skip
ALONE_FROM = 0.25
"""Smallest fraction of a bucket's limit that gets a separate bucket: a request costs about as much as packing and
converting that much."""
Unit = tuple[tuple[BoundRule, ...], ...]
"""Slots that must travel in one bucket, each with the rule of every expert-parallel rank in the gather."""


@dataclass(frozen=True)
class BufferSlot:
    """One tensor of the buffer that every member of the bucket packs.

    Attributes:
        names: canonical Megatron names; consecutive members pack the shards of each.
        shape: local shape, the same on every member.
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
class BucketEntry:
    """A Hugging Face tensor of the bucket that is sent, or one expert's slice of a stacked one.

    Attributes:
        name: in the checkpoint.
        shape: of the tensor or slice.
        offset: first element in the flat buffer.
        dtype: of the tensor, as torch names it, if the buffer is bytes; empty: that of the bucket.
    """

    name: str
    shape: Shape
    offset: int
    dtype: str = ""

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Elements of the flat buffer."""
        return self.numel * (DTYPE_BYTES[self.dtype] if self.dtype else 1)


@dataclass(frozen=True)
class Bucket:
    """Tensors moved by one gather, one conversion and one broadcast.

    Attributes:
        index: position in the plan.
        stage: pipeline stage that owns the tensors.
        sender: global rank that gathers, converts and sends.
        members: global ranks that hold the tensors, including the sender, in conversion order: the shards of a tensor
            are adjacent.
        dtype: of every tensor on the wire, as torch names it.
        slots: tensors that each member packs, in order.
        pieces: results of the conversion, in order; slices if the checkpoint stacks experts.
        entries: sent tensors, in order; the same as `pieces` if nothing is stacked.
        in_order: the members' packed buffers, one after the other, are the sent buffer, without conversion.
        packed_dtype: dtype of packing and conversion if the sent buffer is quantised (`encoded`) and `dtype` is
            `uint8`; else empty.
        unmoved: its tensors are consecutive in the plan's order of parameters, and none is moved to another bucket. If
            that is the memory order, a member's packed tensors are contiguous.
    """

    index: int
    stage: int
    sender: int
    members: tuple[int, ...]
    dtype: str
    slots: tuple[BufferSlot, ...]
    pieces: tuple[BucketEntry, ...]
    entries: tuple[BucketEntry, ...]
    in_order: bool
    packed_dtype: str = ""
    unmoved: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sent tensors, in order."""
        return tuple(entry.name for entry in self.entries)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the sent tensors, in order."""
        return tuple(entry.shape for entry in self.entries)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes of the sent tensors, in order."""
        return tuple(entry.dtype or self.dtype for entry in self.entries)

    @property
    def gathered_dtype(self) -> str:
        """Dtype in which members pack their shards."""
        return self.packed_dtype or self.dtype

    @property
    def converted_numel(self) -> int:
        """Elements after conversion, before quantisation."""
        last = self.pieces[-1]
        return last.offset + last.numel if self.packed_dtype else self.hf_numel

    def comes_in_parts(self, senders: Collection[int], engine_ranks: Iterable[int]) -> bool:
        """Whether `relay` members send their packed parts without a gather. All must be senders, the bucket must
        consist of their consecutive parts, and engines must have one rank, which assembles them.

        Args:
            senders: global ranks of all senders.
            engine_ranks: number of ranks of each engine.
        """
        several = self.in_order and len(self.members) > 1 and not self.packed_dtype
        return several and all(rank in senders for rank in self.members) and set(engine_ranks) == {1}

    @property
    def sharing(self) -> int:
        """Number of members that share each tensor."""
        return len(self.members) // len(self.slots[0].names)

    def packed_by(self, rank: int) -> tuple[str, ...]:
        """Canonical names that a member packs, one for each slot."""
        index = self.members.index(rank) // self.sharing
        return tuple(slot.names[index] for slot in self.slots)

    @property
    def local_numel(self) -> int:
        """Elements that each member packs."""
        return self.slots[-1].offset + self.slots[-1].numel

    @property
    def hf_numel(self) -> int:
        """Elements that are sent."""
        return self.entries[-1].offset + self.entries[-1].size

    @property
    def hf_bytes(self) -> int:
        """Bytes that are sent."""
        return self.hf_numel * DTYPE_BYTES[self.dtype]

    def describe(self) -> str:
        """For messages: `bucket 3 (stage 0, 12 tensors from x to y)`."""
        first, last = self.entries[0].name, self.entries[-1].name
        count = f"{len(self.entries)} tensors from {first} to {last}"
        return f"bucket {self.index} (stage {self.stage}, rank {self.sender}, {count})"


@dataclass(frozen=True)
class WeightPlan:
    """All buckets of a model, in sending order."""

    senders: Senders
    buckets: tuple[Bucket, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of one whole sync on the wire."""
        return sum(bucket.hf_bytes for bucket in self.buckets)

    def stage_buckets(self, stage: int) -> tuple[Bucket, ...]:
        """Buckets of one pipeline stage, in order."""
        return tuple(bucket for bucket in self.buckets if bucket.stage == stage)

    def buckets_of(self, rank: int) -> tuple[Bucket, ...]:
        """Buckets of which a rank packs a part, in order."""
        return tuple(bucket for bucket in self.buckets if rank in bucket.members)

    def fingerprint(self) -> str:
        """Equal on two ranks exactly when their plans are equal."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def build_plan(
    table: RuleTable,
    senders: Senders,
    stage_layers: Sequence[Sequence[int]],
    dtype: str,
    bucket_bytes: int,
    positions: Mapping[str, int] | None = None,
) -> WeightPlan:
    """The plan of one model in one layout.

    Args:
        table: the model's conversion rules.
        senders: the trainer's layout and its sending ranks.
        stage_layers: global layer ids of each pipeline stage (all of its virtual chunks).
        dtype: of the tensors on the wire, as torch names it (`bfloat16`); the engine's. Rules may pin their own.
        bucket_bytes: upper bound on what a bucket sends; a single tensor (one expert of every rank that is gathered
            from; all experts of a layer if the checkpoint stacks them) may exceed it.
        positions: order of parameters in their ranks' memory, by canonical name. They are sent in that order, so
            adjacent ones need no packing; without it in the model's order.

    Raises:
        ConfigError: the dtype is not a weight dtype.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError("weights.dtype", dtype, f"must be one of {', '.join(DTYPE_BYTES)}", "use the engine's dtype")
    layout = senders.layout
    assert len(stage_layers) == layout.pp, (stage_layers, layout)
    held = sorted(layer for layers in stage_layers for layer in layers)
    assert held == sorted({rule.layer for rule in table.bound.values()} - {-1}), f"stages hold layers {held}"
    stages = {layer: stage for stage, layers in enumerate(stage_layers) for layer in layers}
    owned_by: list[list[BoundRule]] = [[] for _ in range(layout.pp)]
    for rule in table.bound.values():
        if rule.exported:
            outside = 0 if rule.name.startswith("embedding.") else layout.pp - 1
            owned_by[stages[rule.layer] if rule.layer >= 0 else outside].append(rule)
    queues = [
        queue
        for stage, owned in enumerate(owned_by)
        for queue in _queues(senders, stage, owned, dtype, positions or {})
    ]
    limited = [[bucket for load in queue for bucket in load.buckets(bucket_bytes)] for queue in queues]
    turns = (bucket for turn in zip_longest(*limited) for bucket in turn if bucket is not None)
    return WeightPlan(senders, tuple(replace(bucket, index=index) for index, bucket in enumerate(turns)))


@dataclass(frozen=True)
class _Load:
    """Tensors of one kind that one rank sends.

    Attributes:
        sharing: members that share each tensor.
    """

    stage: int
    sender: int
    members: tuple[int, ...]
    sharing: int
    dtype: str
    units: tuple[Unit, ...]

    def buckets(self, limit_bytes: int) -> Iterator[Bucket]:
        """The units in buckets of at most this many bytes, without indices.

        Single-tensor buckets come first, so the others are gathered and converted during their sending.
        """
        limit = limit_bytes // DTYPE_BYTES[self.dtype]
        alone = [unit for unit in self.units if self._goes_alone(unit, limit)]
        others = [unit for unit in self.units if not self._goes_alone(unit, limit)]
        places = {id(unit): place for place, unit in enumerate(self.units)}
        for run in (*([unit] for unit in alone), *batches(((unit, _hf_numel(unit)) for unit in others), limit)):
            follow = places[id(run[-1])] - places[id(run[0])] == len(run) - 1
            yield _bucket(self, run, unmoved=follow and all(len(unit) == 1 for unit in run))

    def _goes_alone(self, unit: Unit, limit: int) -> bool:
        """Whether a shared tensor already in the right layout deserves its own bucket, without packing and conversion:
        embeddings."""
        ((rule, *others), *more) = unit
        lies_right = not (others or more or rule.is_expert) and rule.kind.in_order(self.sharing)
        return lies_right and _hf_numel(unit) >= ALONE_FROM * limit


def _queues(
    senders: Senders, stage: int, owned: Sequence[BoundRule], dtype: str, positions: Mapping[str, int]
) -> list[list[_Load]]:
    """Each sender's tensors of a stage, in order."""
    dtypes = dict.fromkeys(rule.dtype or dtype for rule in owned)
    ranks = senders.ranks(stage)
    queues: list[list[_Load]] = [[] for _ in ranks]
    for wire_dtype in dtypes:
        rules = [rule for rule in owned if (rule.dtype or dtype) == wire_dtype]
        experts = list(_expert_units([rule for rule in rules if rule.is_expert], senders.layout.ep))
        loose = [unit for unit in experts if not unit[0][0].stack]
        stacked = [unit for unit in experts if unit[0][0].stack]
        shared = _shared_units(sorted((r for r in rules if not r.is_expert), key=lambda r: positions.get(r.name, 0)))
        dealt, dealt_stacked = _deal(shared, len(ranks)), _deal(stacked, len(ranks))
        for index, (queue, rank) in enumerate(zip(queues, ranks, strict=True)):
            block = slice(index * senders.block, (index + 1) * senders.block)
            own = [tuple(slot[block] for slot in unit) for unit in loose]
            own.sort(key=lambda unit: positions.get(unit[0][0].name, 0))
            etp, tp = senders.layout.etp, senders.layout.tp
            loads = (
                _Load(stage, rank, senders.expert_ranks(rank), etp, wire_dtype, tuple(own)),
                _Load(stage, rank, senders.all_expert_ranks(stage), etp, wire_dtype, dealt_stacked[index]),
                _Load(stage, rank, senders.tensor_ranks(rank), tp, wire_dtype, dealt[index]),
            )
            queue += [load for load in loads if load.units]
    return queues


def _deal(units: Sequence[Unit], senders: int) -> list[tuple[Unit, ...]]:
    """Consecutive runs of units of about the same size, one for each sender."""
    whole, sent = sum(map(_hf_numel, units)), 0
    runs: list[list[Unit]] = [[] for _ in range(senders)]
    for unit in units:
        middle = sent + _hf_numel(unit) / 2
        runs[min(int(middle * senders / whole), senders - 1)].append(unit)
        sent += _hf_numel(unit)
    return [tuple(run) for run in runs]


def _shared_units(rules: Iterable[BoundRule]) -> list[Unit]:
    """Each rule alone, or with the others of its bundle."""
    units: dict[tuple[int, str], list[tuple[BoundRule, ...]]] = {}
    for rule in rules:
        units.setdefault((rule.layer, rule.bundle or rule.name), []).append((rule,))
    return [tuple(slots) for slots in units.values()]


def _expert_units(rules: Sequence[BoundRule], ep: int) -> Iterator[Unit]:
    """Slots of `ep` rules at the same position on every expert-parallel rank: local expert i of each.

    All slots of a stacked tensor are one unit, because they form one tensor.
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


def _bucket(load: _Load, run: Sequence[Unit], unmoved: bool) -> Bucket:
    slots: list[BufferSlot] = []
    pieces: list[BucketEntry] = []
    entries: dict[str, BucketEntry] = {}
    packed = sent = 0
    for slot in (slot for unit in run for slot in unit):
        slots.append(BufferSlot(tuple(rule.name for rule in slot), slot[0].kind.local_shape(load.sharing), packed))
        packed += slots[-1].numel
        for rule in slot:
            for name, whole, piece in zip(rule.hf_names, rule.hf_shapes, rule.kind.hf_shapes, strict=True):
                if name not in entries:
                    entries[name] = BucketEntry(name, whole, sent)
                    sent += entries[name].numel
                first = entries[name].offset + (rule.expert * math.prod(piece) if rule.stack else 0)
                pieces.append(BucketEntry(name, piece, first))
    return Bucket(
        -1, load.stage, load.sender, load.members, load.dtype, tuple(slots), tuple(pieces), tuple(entries.values()),
        _is_in_order(load, run, pieces), unmoved=unmoved,
    )  # fmt: skip


def _is_in_order(load: _Load, run: Sequence[Unit], pieces: Sequence[BucketEntry]) -> bool:
    """Whether the members' concatenated packed buffers equal the concatenated pieces."""
    slots = [slot for unit in run for slot in unit]
    if len(load.members) > 1 and len(slots) > 1:
        return False
    if any(not rule.kind.in_order(load.sharing) for slot in slots for rule in slot):
        return False
    ends = [piece.offset + piece.numel for piece in pieces]
    return [piece.offset for piece in pieces] == [0, *ends[:-1]]


def encoded_plan(plan: WeightPlan, encoded: Encoded) -> WeightPlan:
    """The same buckets with quantised weights instead of plain ones; buckets without any stay unchanged.

    Weights are gathered plain, and sent with few bits and scales; `buckets.encode` fills the buffer. A sender quantises
    bucket by bucket after gather and conversion, so no rank holds the model twice. A weight and its scales go in one
    bucket, so an engine combines new weights with old scales only during the copy.
    """
    return replace(plan, buckets=tuple(_encoded_bucket(bucket, encoded) for bucket in plan.buckets))


def _encoded_bucket(bucket: Bucket, encoded: Encoded) -> Bucket:
    chosen = {entry.name for entry in bucket.entries} & encoded.names
    if not chosen:
        return bucket
    assert bucket.entries == bucket.pieces, "a stacked tensor is no matrix, so it is not quantised"
    short = SAFETENSORS_DTYPES[bucket.dtype]
    plans = [
        plan
        for entry in bucket.entries
        for plan in (
            encoded.encoding.plans(entry.name, short, entry.shape)
            if entry.name in chosen
            else (TensorPlan(entry.name, short, entry.shape),)
        )
    ]
    # Without gaps, wide elements first, so that each starts at a multiple of its size.
    entries: list[BucketEntry] = []
    at = 0
    for plan in sorted(plans, key=lambda plan: -DTYPE_BYTES[TORCH_DTYPES[plan.dtype]]):
        entries.append(BucketEntry(plan.name, plan.shape, at, TORCH_DTYPES[plan.dtype]))
        at += entries[-1].size
    return replace(bucket, dtype="uint8", packed_dtype=bucket.dtype, entries=tuple(entries))


# Checkpoint tensors that are not trained: multi-token-prediction layers, and copies inside them.
#
# An export writes them all again, so that an engine can continue to predict several tokens at a time. The layers are
# copied from the initial checkpoint. Their copies of the embedding and of the output layer are not: those repeat the
# trained ones, as every engine that shares them assumes.


@dataclass(frozen=True)
class CarriedTensors:
    """Untrained tensors of one checkpoint.

    Attributes:
        table: rules of the model.
        source: the checkpoint; None if the model has none.
        names: tensors of the untrained layers.
        copies: names under which the checkpoint repeats a trained tensor, by that tensor's name.
    """

    table: RuleTable
    source: HFCheckpoint | None
    names: tuple[str, ...]
    copies: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, table: RuleTable, directory: Path) -> CarriedTensors:
        """Read the names from the checkpoint's headers. Raises CheckpointError if it cannot be read."""
        if not table.untrained_names and not table.aliases:
            return cls(table, None, (), {})
        source = HFCheckpoint(directory)
        copies: dict[str, tuple[str, ...]] = {}
        for name, original in table.aliases.items():
            if name in source.info:
                copies[original] = (*copies.get(original, ()), name)
        return cls(table, source, tuple(name for name in source.info if name in table.untrained_names), copies)

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the untrained layers, in `dtype` or its own, read lazily."""
        import torch

        own = {name for rule in self.table.all_bound.values() if rule.dtype for name in rule.hf_names}
        for name in self.names:
            assert self.source is not None
            yield name, self.source.tensor(name).to(torch.float32 if name in own else dtype)
