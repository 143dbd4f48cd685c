"""The trainer's side of a sync: one `WeightSender` on every trainer rank, called phase by phase by the driver.

All ranks call the same method at the same time. Every rank iterates over the buckets of which it holds a part. A thread
sends filled buckets (`bucket_sender`) while the sender fills the next. A failure on any rank is raised on every rank,
with that rank's message. A sender that cannot send continues to gather, so no rank waits for it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from mslime.config.errors import CheckpointError, WeightSyncError, sync_error
from mslime.config.keys import Endpoint, EngineInfo
from mslime.config.model_facts import declared_dtype
from mslime.config.transports import AUTO, FALLBACK
from mslime.convert.encoding import Encoded
from mslime.convert.families import read_hf_config
from mslime.convert.hf import ShardWriter, copy_side_files, number_shards, publish, staging_directory, write_index
from mslime.convert.safetensors_files import torch_dtype
from mslime.convert.table import RuleTable
from mslime.engine_plugin import wire
from mslime.tensor_sums import whole_sum
from mslime.weights.bucket_sender import BucketSender, PhaseSeconds, SendOrder
from mslime.weights.buckets import (
    convert,
    convert_alone,
    encode,
    gather,
    in_memory_order,
    named_tensors,
    pack,
)
from mslime.weights.groups import SyncGroups, exchange
from mslime.weights.transport import (
    CollectiveTransport,
    EnginePort,
    Link,
    MovedAmounts,
    Transport,
    find_transport,
    group_name,
    make_transport,
    transport_for,
)
from mslime.weights.weight_plan import Bucket, CarriedTensors, Senders, WeightPlan, build_plan, encoded_plan

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
NamedParams = Callable[[], Iterable[tuple[str, torch.Tensor]]]
Params = Mapping[str, torch.Tensor]
Finish = Callable[[Path, Path, str, Mapping[str, str], int], None]
"""Completes an export. Arguments: directory, source checkpoint, dtype, file of each tensor, total bytes."""


@dataclass(frozen=True)
class SyncOptions:
    """Settings of weight syncs.

    Attributes:
        dtype: on the wire, as torch names it; the engines' own.
        export_dtype: of exported checkpoints; None: that of the wire.
        bucket_bytes: upper bound on a bucket.
        backend: of the group with the engines: `nccl` or `gloo`.
        deadline_s: for every phase.
        name: unique among the runs that share an engine.
        transport: value of `weights.transport`.
        directory: for weights in files, of this run alone; None: no directory.
        encoded: weights that are sent quantised; None: all are sent plain.
        settings: of the transport (`config.transports.Traits.settings`).
    """

    dtype: str
    bucket_bytes: int
    backend: str
    deadline_s: float
    name: str = "mslime"
    export_dtype: str | None = None
    transport: str = FALLBACK
    directory: Path | None = None
    encoded: Encoded | None = None
    settings: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class SendReport:
    """Result of one sync, the same on every rank.

    Attributes:
        version: of the weights.
        bytes: that reached each engine.
        buckets: number of broadcasts.
        seconds: of the whole send, on the slowest rank.
        phases: seconds by phase, by sender's global rank.
        changed: fraction of the elements that changed since the last version; None if unknown.
        expected: if requested, the checksum of each tensor that an engine's ranks must report together (`wire.Sums`).
    """

    version: int
    bytes: int
    buckets: int
    seconds: float
    phases: Mapping[int, PhaseSeconds]
    changed: float | None
    expected: Mapping[str, str]


class WeightSender:
    """One trainer rank's part in every sync of a run.

    Args:
        table: the model's conversion rules.
        groups: from `make_groups`.
        params: returns this rank's parameters by canonical name; called for every sync.
        options: how to send.
        engine_port: the engines; None for exports alone. The sender closes them.
        on_bucket: called on senders with (buckets filled, buckets that it sends), for progress.
        values: maps these parameters to the values that are sent and exported; each is read when its bucket is filled.
        finish: completes an export, on one rank.

    Raises:
        CheckpointError: the model's parameters and the rules do not match.
        ConfigError: the transport is unknown.
    """

    def __init__(
        self,
        table: RuleTable,
        groups: SyncGroups,
        params: NamedParams,
        options: SyncOptions,
        engine_port: EnginePort | None = None,
        on_bucket: Callable[[int, int], None] | None = None,
        values: Callable[[Params], Params] = dict,
        finish: Finish | None = None,
    ) -> None:
        self._values, self._finish = values, finish or finish_checkpoint
        self._table, self._groups, self._params, self._options = table, groups, params, options
        self._engine_port, self._on_bucket = engine_port, on_bucket
        self._export_dtype = options.export_dtype or options.dtype
        if options.transport != AUTO:
            find_transport(options.transport)
        self._transport: Transport | None = None
        self._sent = False
        self._stream: torch.cuda.Stream | None = None  # of bucket senders
        self.engines: tuple[EngineInfo, ...] = ()
        plain = self._make_plan(options.dtype, groups.senders)
        self.plan = plain if options.encoded is None else encoded_plan(plain, options.encoded)
        self._gathered = {options.dtype: plain} if groups.senders.per_stage == 1 else {}

    def _make_plan(self, dtype: str, senders: Senders) -> WeightPlan:
        """Collective: every rank gets every stage's layers from the parameters themselves."""
        groups, layout = self._groups, self._groups.layout
        params = dict(self._params())
        mine = {name: tuple(param.shape) for name, param in params.items()}
        held = self._exchange((groups.stage, in_memory_order(params)))
        self._table.check_model(name for _, names in held for name in names)
        for name, shape in mine.items():
            rule = self._table.bind(name)
            expected = rule.kind.local_shape(layout.etp if rule.is_expert else layout.tp)
            assert shape == expected, f"{name} has shape {shape}, its rule gives {expected}"
        layers: list[set[int]] = [set() for _ in range(layout.pp)]
        for stage, names in held:
            layers[stage] |= {self._table.bind(name).layer for name in names} - {-1}
        positions = {name: at for _, names in held for at, name in enumerate(names)}
        plan = build_plan(
            self._table, senders, [sorted(stage) for stage in layers], dtype, self._options.bucket_bytes, positions
        )
        assert len(set(self._exchange(plan.fingerprint()))) == 1, "trainer ranks disagree about the weight plan"
        return plan

    def _exchange(self, mine: _T) -> list[_T]:
        """Every rank's value, in rank order."""
        try:
            return exchange(mine, self._groups.control)
        except RuntimeError as error:
            raise sync_error("exchange", f"trainer rank {self._groups.rank}", f"another trainer rank is gone: {error}",
                             "read the log of the first trainer rank that stopped") from error  # fmt: skip

    def _agreed(self, phase: str, failure: Exception | None, mine: _T) -> list[_T]:
        """Every rank's value, in rank order. Collective: the first failing rank's error is raised on every rank."""
        replies = self._exchange((_texts_of(failure), mine))
        for rank, (texts, _) in enumerate(replies):
            if texts is not None:
                rule, hint = texts
                raise sync_error(phase, f"trainer rank {rank}", rule, hint) from failure
        return [each for _, each in replies]

    def connect(self, engines: Sequence[Endpoint], group: str | None = None) -> None:
        """Connect with the engines: one group for each sender. Collective.

        Args:
            engines: running servers.
            group: prefix of the groups' names (see `group_name`); default: a new one. An engine rejects a name in use,
                also by a killed run.

        Raises:
            WeightSyncError: on every rank, naming the engine and its answer.
        """
        assert self._engine_port is not None, "a sender without engine_port only exports"
        if group is None:
            group = self._exchange(f"{self._options.name}-{uuid.uuid4().hex[:8]}")[0]
        transport = self._choose_transport(engines, self._engine_port)
        for sender in self._groups.senders.everyone():
            failure: WeightSyncError | None = None
            if sender == self._groups.rank:
                try:
                    self._connect_engines(self._engine_port, group, transport)
                except WeightSyncError as error:
                    failure = error
            self._agreed("connect", failure, None)
        replies = self._exchange((self.engines, isinstance(self._transport, CollectiveTransport)))
        self.engines = replies[0][0]
        if any(needs_all for _, needs_all in replies):
            self._join_all(self._engine_port, group, transport)

    def _join_all(self, engine_port: EnginePort, group: str, transport: str) -> None:
        """Create the transport on every rank and connect all ranks. Collective. Raises WeightSyncError on every
        rank."""
        offer, failure = "", None
        try:
            if self._transport is None:
                self._connect_engines(engine_port, group, transport)
            assert isinstance(self._transport, CollectiveTransport), "a transport is of one kind on every rank"
            offer = self._transport.offer()
        except WeightSyncError as error:
            failure = error
        offers = self._agreed("connect", failure, offer)
        try:
            assert isinstance(self._transport, CollectiveTransport)
            self._transport.connect_ranks(offers)
        except WeightSyncError as error:
            failure = error
        self._agreed("connect", failure, None)

    def _choose_transport(self, engines: Sequence[Endpoint], engine_port: EnginePort) -> str:
        """Query the engines' properties, and choose the transport. Collective. Raises WeightSyncError."""
        transport, failure = self._options.transport, None
        if self._groups.sends:
            try:
                self.engines = tuple(map(engine_port.describe, engines))
                if transport == AUTO:
                    transport = transport_for(self.engines, engine_port, self._options.deadline_s)
            except WeightSyncError as error:
                failure = error
        replies = self._agreed("connect", failure, transport)
        chosen = {replies[sender] for sender in self._groups.senders.everyone()}
        # Every sender queries the engines, and one may have been replaced meanwhile.
        transport = chosen.pop() if len(chosen) == 1 else FALLBACK
        if self._options.transport == AUTO and self._groups.rank == 0:
            _log.info("weights.transport auto: %s to %d engine(s)", transport, len(engines))
        return transport

    def _connect_engines(self, engine_port: EnginePort, group: str, transport: str) -> None:
        options, rank = self._options, self._groups.rank
        name = group_name(group, rank)
        senders = {sender: group_name(group, sender) for sender in self._groups.senders.everyone()}
        link = Link(
            name, options.backend, options.deadline_s, engine_port, group, rank, options.directory, senders,
            options.settings, self._groups.layout.world_size, options.bucket_bytes,
        )  # fmt: skip
        self._transport = make_transport(transport, link)
        self._transport.connect(self.engines)

    def send(self, version: int, verify: bool = False) -> SendReport:
        """Send every parameter to every engine. Collective; the engines' sessions must be open.

        Args:
            version: recorded in the report; engines get it when they are stamped.
            verify: also compute the checksums that the engines must report.

        Raises:
            WeightSyncError: on every rank, naming the rank, bucket and engine that failed.
        """
        assert self.engines, "connect comes before send"
        if not self._sent and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the first sync allocates NCCL's buffers outside of torch's memory
        self._sent = True
        started = time.monotonic()
        params, spent = self._values(dict(self._params())), PhaseSeconds()
        self._agreed("send", self._send_buckets(version, params, started, spent), None)
        transport, failure = self._transport, None
        if isinstance(transport, CollectiveTransport):
            self._agreed("send", _failure_of(transport.load), None)
            failure = _failure_of(lambda: transport.deliver(started + self._options.deadline_s))
        elif transport is not None:
            failure = _failure_of(transport.complete)
        everyone = self._agreed("complete", failure, (time.monotonic() - started, spent, self._moved()))
        moved = sum((each for _, _, each in everyone), MovedAmounts())
        return SendReport(
            version,
            moved.bytes,
            len(self.plan.buckets),
            max(elapsed for elapsed, _, _ in everyone),
            {rank: everyone[rank][1] for rank in self._groups.senders.everyone()},
            moved.changed / moved.elements if moved.elements else None,
            self._sums(params) if verify else {},
        )

    def _moved(self) -> MovedAmounts:
        """This rank's part of a sync: all of its buckets, unless its transport counts."""
        if self._transport is not None and (counted := self._transport.moved()) is not None:
            return counted
        mine = (bucket for bucket in self.plan.buckets if bucket.sender == self._groups.rank)
        return MovedAmounts(sum(bucket.hf_bytes for bucket in mine))

    def _send_buckets(
        self, version: int, params: Mapping[str, torch.Tensor], started: float, spent: PhaseSeconds
    ) -> Exception | None:
        """Fill and send this rank's buckets; returns the first failure after all gathers are over."""
        rank, deadline_s = self._groups.rank, self._options.deadline_s
        bucket_sender: BucketSender | None = None
        if self._groups.sends:
            transport = self._transport
            assert transport is not None, "connect comes before send"
            if self._stream is None and torch.cuda.is_initialized():
                self._stream = torch.cuda.Stream()
            turns = self._groups.turns if len(self.engines) > 1 and not transport.any_order else None
            order = SendOrder(self.plan, turns) if turns is not None else None
            refused = _failure_of(lambda: transport.begin(version, self.plan.buckets))
            bucket_sender = BucketSender(
                transport, order, started + deadline_s, deadline_s, spent, self._stream, refused
            )
        failure: Exception | None = None
        buckets = self.plan.buckets_of(rank)
        parts = {bucket.index for bucket in buckets if self._comes_in_parts(bucket)}
        mine, filled = {bucket.index for bucket in buckets if bucket.sender == rank} | parts, 0
        for bucket in buckets:
            own = bucket_sender if bucket.index in mine else None
            if own is not None:
                own.wait_for_buffer()
            begin, flat = time.monotonic(), None
            try:
                flat = pack(bucket, params, rank) if bucket.index in parts else self._fill(bucket, params)
            except WeightSyncError as error:
                failure = failure or error
            spent.fill += time.monotonic() - begin
            if own is None:
                continue
            own.put(bucket, flat)
            filled += 1
            if self._on_bucket is not None:
                self._on_bucket(filled, len(mine))
        not_sent = bucket_sender.close() if bucket_sender is not None else None
        return failure or not_sent

    def _comes_in_parts(self, bucket: Bucket) -> bool:
        """Whether every member of a bucket sends its part, the same on all of them."""
        return self._transport is not None and self._transport.comes_in_parts(bucket)

    def _sums(self, params: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """The checksum of every tensor that engines must report, by Hugging Face name. Collective.

        Buckets are filled again, so damage to a bucket in flight is detected.
        """
        sums, failure = dict[str, str](), None
        for bucket in self.plan.buckets_of(self._groups.rank):
            try:
                flat = self._fill(bucket, params)
            except WeightSyncError as error:
                failure = failure or error
                continue
            if flat is not None:
                named = named_tensors(bucket, flat)
                sums |= {name: wire.format_sum(*whole_sum(tensor)) for name, tensor in named}
        self._agreed("check", failure, None)
        return {name: each for found in self._exchange(sums) for name, each in found.items()}

    def _gathered_plan(self, dtype: str) -> WeightPlan:
        """The plan with one sender per stage, which gathers the whole stage. Collective at its first use."""
        if dtype not in self._gathered:
            self._gathered[dtype] = self._make_plan(dtype, Senders(self._groups.layout))
        return self._gathered[dtype]

    def _fill(self, bucket: Bucket, params: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The bucket's flat buffer on its sender, None elsewhere; collective over the bucket's members."""
        groups, encoded = self._groups, self._options.encoded
        if len(bucket.members) == 1 and not bucket.in_order:
            flat = convert_alone(bucket, params, self._table)
        else:
            local = pack(bucket, params, groups.rank)
            gathered = gather(bucket, local, groups.gathers.get(bucket.members), groups.rank)
            if gathered is None:
                return None
            flat = convert(bucket, gathered, self._table)
        return encode(bucket, flat, encoded) if encoded is not None and bucket.packed_dtype else flat

    def export(self, directory: Path, source: Path) -> None:
        """Write a Hugging Face checkpoint of the current weights. Collective.

        Args:
            directory: replaced as a whole when everything is written; on a file system that all leaders share.
            source: checkpoint whose config.json, tokenizer and multi-token-prediction layers are copied.

        Raises:
            WeightSyncError: on every rank, if a shard cannot be written or the source cannot be read.
        """
        staging = staging_directory(directory)
        if self._groups.rank == 0:
            staging.mkdir(parents=True, exist_ok=True)
            for left_over in staging.iterdir():
                left_over.unlink()
        self._exchange(None)
        plan, params = self._gathered_plan(self._export_dtype), self._values(dict(self._params()))
        failure: Exception | None = None
        carried = CarriedTensors(self._table, None, (), {})
        try:
            if self._groups.rank == self._groups.layout.leader(self._groups.stage):
                carried = CarriedTensors.of(self._table, source)
        except CheckpointError as error:
            failure = error
        self._agreed("export", failure, None)
        writer = ShardWriter(staging, f"stage{self._groups.stage}")
        failure = self._write_stage(writer, plan, params, carried)
        written: tuple[dict[str, str], int] = ({}, 0)
        try:
            written = writer.close() if failure is None else written
        except CheckpointError as error:
            failure = error
        self._agreed("export", failure, None)
        parts = self._exchange(written)
        if self._groups.rank == 0:
            files = {name: file for part, _ in parts for name, file in part.items()}
            self._finish(staging, source, self._export_dtype, files, sum(size for _, size in parts))
            publish(directory)
        self._exchange(None)

    def sums(self) -> dict[str, str]:
        """The checksum of every sent or exported tensor, as engines must report it (`wire.Sums`). Collective."""
        return self._sums(self._values(dict(self._params())))

    def _write_stage(
        self, writer: ShardWriter, plan: WeightPlan, params: Mapping[str, torch.Tensor], carried: CarriedTensors
    ) -> ValueError | None:
        """Write this stage's tensors; returns the first write failure after all gathers are over."""
        failure: ValueError | None = None
        for bucket in plan.buckets_of(self._groups.rank):
            try:
                flat = self._fill(bucket, params)
                for name, tensor in named_tensors(bucket, flat) if flat is not None and failure is None else ():
                    for alias in (name, *carried.copies.get(name, ())):
                        writer.add(alias, tensor)
            except ValueError as error:
                failure = failure or error
        try:
            if failure is None and self._groups.stage == self._groups.layout.pp - 1:
                for name, tensor in carried.tensors(torch_dtype(self._export_dtype)):
                    writer.add(name, tensor)
        except ValueError as error:
            failure = error
        return failure

    def disconnect(self) -> None:
        """Leave the engines; not collective, safe to call twice and after a failure."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.disconnect()
        if self._engine_port is not None:
            self._engine_port.close()
        self.engines = ()


def finish_checkpoint(staging: Path, source: Path, dtype: str, files: Mapping[str, str], nbytes: int) -> None:
    """Make a Hugging Face checkpoint of the shards in a directory (see `Finish`)."""
    copy_side_files(source, staging, declared_dtype(read_hf_config(source), dtype))
    write_index(staging, number_shards(staging, files), nbytes)


def _failure_of(call: Callable[[], None]) -> Exception | None:
    """Call it and return its exception, to be raised on every rank."""
    try:
        call()
    except Exception as error:  # includes errors of a user's transport
        return error
    return None


def _texts_of(failure: Exception | None) -> tuple[str, str] | None:
    """A rank's failure as text for other ranks, and its hint; None if there is none."""
    if failure is None:
        return None
    if not isinstance(failure, WeightSyncError):
        return repr(failure), ""
    if failure.field in ("weights.transport", "weights.directory"):
        return f"{failure.field} = {failure.value!r}: {failure.rule}", failure.hint
    return f"{failure.value}: {failure.rule}", failure.hint
