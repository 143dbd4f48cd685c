"""Transports: the interface by which filled buckets reach the engines, and the requests to engines.

`config.transports` lists mslime's own. A user's is named `module:function` and called with a `Link`;
`transport_contract.check_transport` tests it against this interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mslime.config.errors import ChangesRefused, WeightSyncError, sync_error
from mslime.config.keys import BucketVersion, Endpoint, EngineInfo
from mslime.config.transports import AUTO, choose, traits_of
from mslime.engine_plugin import wire
from mslime.extensions import check_parameters, load_function
from mslime.weights.weight_plan import Bucket

if TYPE_CHECKING:
    import torch


class EnginePort(Protocol):
    """Interface of the engines for a sender. The caller provides it; `weights` imports no engine.

    Requests are records of the engine plug-in (`engine_plugin.wire`). Calls that overlap with sending are futures,
    because an engine answers on completion. They raise WeightSyncError with the engine's message.
    """

    def describe(self, engine: Endpoint) -> EngineInfo:
        """Query a running engine's properties. Raises WeightSyncError."""
        ...

    def ask(
        self, engine: EngineInfo, request: wire.Request | wire.OwnRequest, hint: str = ""
    ) -> Future[wire.Answer | wire.Loaded]:
        """Send a request; the future is done when the engine has completed it. `wire.Ping` tests for the plug-in.

        Args:
            hint: advice for the user if the engine fails.
        """
        ...

    def load(self, engine: EngineInfo, update: bytes) -> Future[wire.Loaded]:
        """Done when all ranks of an engine have loaded what `update` (`wire.update_request`) announces.

        The future raises ChangesRefused if changes are announced and the engine has loaded none of them.
        """
        ...

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        ...


def ask_all(
    engine_port: EnginePort, engines: Sequence[EngineInfo], request: wire.Request, deadline_s: float, hint: str = ""
) -> None:
    """Send a request to all engines before the first bucket, and wait for it. Raises WeightSyncError."""
    answers = [engine_port.ask(engine, request, hint) for engine in engines]
    all_done(answers, "connect", f"{len(engines)} engines", deadline_s)


@dataclass(frozen=True)
class Link:
    """Arguments of a transport's constructor.

    Attributes:
        name: of this sender's connection; unique among the senders of all stages and runs that share an engine.
        backend: of process groups: `nccl` on GPUs, `gloo` on CPUs.
        deadline_s: for connecting with the engines, and for each bucket.
        engine_port: for requests to the engines. The caller closes it.
        group: prefix of the names of all senders' connections.
        rank: of this sender.
        directory: for weights in files (`weights.directory`); None: no directory.
        senders: names of the connections of all senders, by rank, in order; empty: this sender is the only one.
        settings: fields of `weights` that only this transport reads (`config.transports.Traits.settings`).
        ranks: number of trainer ranks.
        bucket_bytes: upper bound on a bucket, unless a single tensor is larger.
    """

    name: str
    backend: str
    deadline_s: float
    engine_port: EnginePort
    group: str = ""
    rank: int = 0
    directory: Path | None = None
    senders: Mapping[int, str] = field(default_factory=dict[int, str])
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    ranks: int = 1
    bucket_bytes: int = 0


class Pending(Protocol):
    """A bucket in flight."""

    def wait(self) -> None:
        """Return when every engine has loaded the bucket.

        Raises:
            WeightSyncError: an engine refused it, the connection broke, or the deadline passed.
        """
        ...


@dataclass
class LoadingBucket:
    """A bucket being loaded by engines, with an answer from each of them."""

    bucket: Bucket
    answers: Sequence[Future[Any]]

    def wait(self) -> None:
        """Return when every engine has loaded the bucket.

        Raises:
            WeightSyncError: an engine refused it, or the deadline passed.
        """
        for refused in self.refused():
            raise naming(self.bucket.describe(), refused)

    def refused(self) -> list[ChangesRefused]:
        """Return when every engine has loaded the bucket, or rejected its changes.

        Raises:
            WeightSyncError: as in `wait`, except for these refusals, which are returned.
        """
        waiting: set[Future[Any]] = set(self.answers)
        refused: list[ChangesRefused] = []
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_EXCEPTION)
            for answer in done:
                error = answer.exception()
                if isinstance(error, ChangesRefused):
                    refused.append(error)
                elif error is not None:
                    raise naming(self.bucket.describe(), error)
        return refused


def all_done(futures: Sequence[Future[Any]], phase: str, where: str, deadline_s: float) -> None:
    """Return when all are done.

    Raises:
        WeightSyncError: one failed, or the deadline passed.
    """
    done, waiting = wait(futures, timeout=deadline_s, return_when=FIRST_EXCEPTION)
    # An engine's own error first: a broken collective is only a consequence of it.
    failures = [error for future in done if (error := future.exception()) is not None]
    for error in sorted(failures, key=lambda e: not isinstance(e, WeightSyncError)):
        if isinstance(error, WeightSyncError):
            raise error
        raise sync_error(phase, where, f"{type(error).__name__}: {error}") from error
    if waiting:
        raise sync_error(phase, where, f"not finished within {deadline_s:.0f} s")


def naming(label: str, error: BaseException) -> WeightSyncError:
    """The error for a failed bucket, with the engine's answer."""
    rule = error.rule if isinstance(error, WeightSyncError) else repr(error)
    where = error.value if isinstance(error, WeightSyncError) else "engine"
    return sync_error("send", f"{label} to {where}", rule)


@dataclass(frozen=True)
class MovedAmounts:
    """Amounts that one sender has moved to each engine in a sync.

    Attributes:
        bytes: of weights.
        changed: elements that differ from the last version.
        elements: of all buckets with known changes.
    """

    bytes: int = 0
    changed: int = 0
    elements: int = 0

    def __add__(self, other: MovedAmounts) -> MovedAmounts:
        return MovedAmounts(self.bytes + other.bytes, self.changed + other.changed, self.elements + other.elements)


class Transport(ABC):
    """Moves filled buckets from one sender to all engines.

    A sender calls `connect` once. In each sync it calls `begin`, for each of its buckets `prepare_bucket` and `start`
    (or `skip`), and `complete`. At the end, or after a failure, it calls `disconnect`. Most transports need only
    `connect`, `start` and `disconnect`.

    Attributes:
        any_order: whether engines may get buckets of different senders in different orders, because they do not wait
            for each other or order buckets themselves. Otherwise senders to several engines take turns.
    """

    any_order: bool = False

    @abstractmethod
    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Connect with the engines. Raises WeightSyncError if one of them refuses, or does not answer in time."""

    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:  # noqa: B027
        """Prepare for the buckets of this version. Called on every sender.

        Args:
            buckets: of all senders, in the order of the plan.

        Raises:
            WeightSyncError: they cannot be sent.
        """

    def comes_in_parts(self, bucket: Bucket) -> bool:
        """Whether engines assemble a bucket from parts: `start` and `skip` are then called on each of its members with
        its packed part, without a gather."""
        return False

    def prepare_bucket(self, bucket: Bucket, flat: torch.Tensor) -> None:  # noqa: B027
        """Do work that needs no engine, before the sender's turn. `start` follows, with the same bucket, unless the
        sync fails. Raises WeightSyncError."""

    @abstractmethod
    def start(self, bucket: Bucket, flat: torch.Tensor) -> Pending:
        """Begin to send `flat` [bucket.hf_numel]; it must not be written to before the wait is over.

        The sender waits for a bucket before it starts the next, and meanwhile converts the next.
        """

    def skip(self, bucket: Bucket) -> None:  # noqa: B027
        """Called instead of `start` for a bucket that cannot be sent in a failed sync, for engines that would wait for
        it. Raises WeightSyncError."""

    def complete(self) -> None:  # noqa: B027
        """Finish the sync, after every sender's buckets have arrived. Called on every sender, unless any rank failed.
        Raises WeightSyncError."""

    def moved(self) -> MovedAmounts | None:
        """Amounts moved by this sender in the current or last sync; None: all of its buckets."""
        return None

    @abstractmethod
    def disconnect(self) -> None:
        """Leave the engines; safe to call twice, and after a failure."""


class ChangeCarrier(Transport):
    """A transport that can also carry changes of a bucket, for `delta`, which creates it with `with_changes=True`;
    engines then record the version of each loaded bucket."""

    @abstractmethod
    def start(self, bucket: Bucket, flat: torch.Tensor) -> LoadingBucket: ...

    @abstractmethod
    def start_changes(
        self, bucket: Bucket, version: BucketVersion, index: torch.Tensor, value: torch.Tensor
    ) -> LoadingBucket:
        """Begin to send the differences to the version `version.base`.

        Args:
            index: [n] int32, places in the bucket.
            value: [n], the bucket's dtype: the new values.
        """


class CollectiveTransport(Transport):
    """A transport with one instance on every trainer rank, including ranks that send nothing.

    `connect` only stores the engines and `start` only keeps a bucket. Before a collective, ranks agree that none has
    failed, so none waits for a missing rank. `load` and `deliver` replace `complete`.
    """

    any_order = True  # nothing is sent before all buckets are filled

    @abstractmethod
    def offer(self) -> str:
        """Data that this rank sends to all others before `connect_ranks`; not collective. Raises WeightSyncError if it
        cannot."""

    @abstractmethod
    def connect_ranks(self, offers: Sequence[str]) -> None:
        """Connect with the other ranks: collective, after `connect`. Raises WeightSyncError.

        Args:
            offers: return values of `offer`, by rank.
        """

    @abstractmethod
    def load(self) -> None:
        """Make the kept buckets of a sync ready; not collective. Raises WeightSyncError."""

    @abstractmethod
    def deliver(self, ends: float) -> None:
        """Send the buckets to every engine. Collective; raises WeightSyncError on every rank if it fails on one.

        Args:
            ends: time (`time.monotonic`) after which no rank waits for an engine any more.
        """


def group_name(group: str, sender: int) -> str:
    """The name of the connection of a trainer rank with the engines."""
    return f"{group}-rank{sender}"


def transport_for(engines: Sequence[EngineInfo], engine_port: EnginePort, deadline_s: float) -> str:
    """Resolve the transport `auto` for these engines.

    Raises:
        WeightSyncError: an engine does not answer.
    """
    one_rank_each = all(engine.ranks == 1 and not engine.drafts for engine in engines)
    if one_rank_each:
        try:
            ask_all(engine_port, engines, wire.Ping(), deadline_s)
        except WeightSyncError as error:
            if error.field != "weights.transport":
                raise
            one_rank_each = False  # an externally started server without the plug-in
    return choose(one_rank_each=one_rank_each)


MakeTransport = Callable[[Link], Transport]


def find_transport(spec: str) -> MakeTransport:
    """The constructor of the transport that `weights.transport` names.

    Raises:
        ConfigError: the function cannot be imported, or takes other arguments.
    """
    assert spec != AUTO, "transport_for returns it"
    make = load_function(traits_of(spec).made_by or spec, "weights.transport")
    check_parameters(make, spec, "weights.transport", "link")
    return make


def make_transport(spec: str, link: Link) -> Transport:
    """Create the transport that `weights.transport` names, for one sender.

    Raises:
        ConfigError: as in `find_transport`.
        WeightSyncError: a user's function returned another type.
    """
    made: object = find_transport(spec)(link)
    if not isinstance(made, Transport):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WeightSyncError(
            "weights.transport", spec, f"returned a {type(made).__name__}, which is not a Transport",
            "derive its class from mslime.weights.transport.Transport",
        )  # fmt: skip
    return made
