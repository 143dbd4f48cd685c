"""How a filled bucket reaches the engines: what a transport is, and what it asks engines.

`config.transports` lists mslime's own. A user's is named `module:function` and called with a `Link`;
`contract.check_transport` tests whether it keeps what is promised here.
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
    """The engines, as far as a sender needs them. Control passes it in; `weights` imports no engine.

    Requests are records of the engine plug-in (`engine_plugin.wire`). Calls that weights wait for are futures, because
    an engine answers when it has done what it was asked. They raise WeightSyncError, in the engine's own words.
    """

    def describe(self, engine: Endpoint) -> EngineInfo:
        """What a running engine is. Raises WeightSyncError."""
        ...

    def ask(
        self, engine: EngineInfo, request: wire.Request | wire.OwnRequest, hint: str = ""
    ) -> Future[wire.Answer | wire.Loaded]:
        """Done when an engine has done what it is asked. `wire.Ping` asks whether it can take what its plug-in loads.

        Args:
            hint: what the user can do if the engine cannot do it.
        """
        ...

    def load(self, engine: EngineInfo, update: bytes) -> Future[wire.Loaded]:
        """Done when all ranks of an engine have loaded what `update` (`wire.update_request`) announces.

        The future raises ChangesRefused where changes are announced and the engine has loaded nothing of them.
        """
        ...

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        ...


def ask_all(
    engine_port: EnginePort, engines: Sequence[EngineInfo], request: wire.Request, deadline_s: float, hint: str = ""
) -> None:
    """Return when all engines have done what they are asked, before the first bucket. Raises WeightSyncError."""
    answers = [engine_port.ask(engine, request, hint) for engine in engines]
    all_done(answers, "connect", f"{len(engines)} engines", deadline_s)


@dataclass(frozen=True)
class Link:
    """What a transport is made with.

    Attributes:
        name: of this sender's connection; unique among the senders of all stages and runs that share an engine.
        backend: of process groups: `nccl` on GPUs, `gloo` on CPUs.
        deadline_s: for meeting the engines, and for each bucket.
        engine_port: the engines' requests. The caller closes them.
        group: what the names of all senders' connections begin with.
        rank: of this sender.
        directory: for weights in files (`weights.directory`); None: there is none.
        senders: names of the connections of all senders, by rank, in their order; empty: this one is alone.
        settings: of `weights`, which this transport alone reads (`config.transports.Traits.settings`).
        ranks: of the trainer.
        bucket_bytes: of a bucket, at most, unless a single tensor is larger.
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
    """A bucket on its way."""

    def wait(self) -> None:
        """Return when every engine has loaded the bucket.

        Raises:
            WeightSyncError: an engine refused it, the connection broke, or the deadline passed.
        """
        ...


@dataclass
class Loading:
    """A bucket that engines load, and an answer of each of them."""

    bucket: Bucket
    answers: Sequence[Future[Any]]

    def wait(self) -> None:
        """Return when every engine has loaded the bucket.

        Raises:
            WeightSyncError: from the engine that refused it, or when the deadline passes.
        """
        for refused in self.refused():
            raise naming(self.bucket.describe(), refused)

    def refused(self) -> list[ChangesRefused]:
        """Return when every engine has loaded the bucket, or has loaded nothing of the changes that it was sent.

        Raises:
            WeightSyncError: as `wait`, but for these refusals, which are returned.
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
        WeightSyncError: one failed, or they are not done in time.
    """
    done, waiting = wait(futures, timeout=deadline_s, return_when=FIRST_EXCEPTION)
    # An engine's own words first: a broken collective is only their echo.
    failures = [error for future in done if (error := future.exception()) is not None]
    for error in sorted(failures, key=lambda e: not isinstance(e, WeightSyncError)):
        if isinstance(error, WeightSyncError):
            raise error
        raise sync_error(phase, where, f"{type(error).__name__}: {error}") from error
    if waiting:
        raise sync_error(phase, where, f"not finished within {deadline_s:.0f} s")


def naming(what: str, error: BaseException) -> WeightSyncError:
    """The error about what was sent to an engine, out of the engine's answer."""
    rule = error.rule if isinstance(error, WeightSyncError) else repr(error)
    where = error.value if isinstance(error, WeightSyncError) else "engine"
    return sync_error("send", f"{what} to {where}", rule)


@dataclass(frozen=True)
class Moved:
    """What one sender's part of a sync has moved to each engine.

    Attributes:
        bytes: of weights.
        changed: elements that are different from the version before.
        elements: of all buckets whose changes are known.
    """

    bytes: int = 0
    changed: int = 0
    elements: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.bytes + other.bytes, self.changed + other.changed, self.elements + other.elements)


class Transport(ABC):
    """Moves filled buckets from one sender to all engines.

    A sender calls `connect` once; in each sync `begin`, for each of its buckets `prepare_bucket` and `start`, or
    `skip`, and `complete`; in the end, or after a failure, `disconnect`. Most transports need `connect`, `start` and
    `disconnect` only.

    Attributes:
        any_order: whether engines may get buckets of different senders in different orders: no engine waits for another
            one, or they put buckets into order themselves. Otherwise senders to several engines take turns.
    """

    any_order: bool = False

    @abstractmethod
    def connect(self, engines: Sequence[EngineInfo]) -> None:
        """Connect with the engines. Raises WeightSyncError if one of them refuses, or does not answer in time."""

    def begin(self, version: int, buckets: Sequence[Bucket]) -> None:  # noqa: B027
        """Buckets of this version follow. Called on every sender.

        Args:
            buckets: of all senders, in the order of the plan.

        Raises:
            WeightSyncError: they cannot be sent.
        """

    def comes_in_parts(self, bucket: Bucket) -> bool:
        """Whether engines put a bucket together: `start` and `skip` are then called on each of its members, with the
        part that it packs, and nobody gathers the bucket."""
        return False

    def prepare_bucket(self, bucket: Bucket, flat: torch.Tensor) -> None:  # noqa: B027
        """Do what needs no engine, before the sender has its turn. `start` follows, with the same bucket, unless the
        sync fails. Raises WeightSyncError."""

    @abstractmethod
    def start(self, bucket: Bucket, flat: torch.Tensor) -> Pending:
        """Begin to send `flat` [bucket.hf_numel]; it must not be written to before the wait is over.

        The sender waits for a bucket before it starts the next, and converts the next meanwhile.
        """

    def skip(self, bucket: Bucket) -> None:  # noqa: B027
        """Called in place of `start` for a bucket that cannot be sent, as the sync has failed: for engines that would
        wait for it. Raises WeightSyncError."""

    def complete(self) -> None:  # noqa: B027
        """Every sender's buckets have arrived. Called on every sender, unless the sync has failed on any rank. Raises
        WeightSyncError."""

    def moved(self) -> Moved | None:
        """What this sender has moved in the sync that is under way, or was the last; None: all of its buckets."""
        return None

    @abstractmethod
    def disconnect(self) -> None:
        """Leave the engines; safe to call twice, and after a failure."""


class Carrier(Transport):
    """A transport that also takes changes of a bucket, for `delta`, which makes it with `with_changes=True`: engines
    then note the version of each bucket that they load."""

    @abstractmethod
    def start(self, bucket: Bucket, flat: torch.Tensor) -> Loading: ...

    @abstractmethod
    def start_changes(
        self, bucket: Bucket, version: BucketVersion, index: torch.Tensor, value: torch.Tensor
    ) -> Loading:
        """Begin to send what is different from the version `version.base`.

        Args:
            index: [n] int32, places in the bucket.
            value: [n], the bucket's dtype: what is there now.
        """


class CollectiveTransport(Transport):
    """A transport in which all trainer ranks take part, also those that send nothing: each of them has one.

    `connect` only notes the engines and `start` only keeps a bucket. Before ranks enter a collective they agree that
    none has failed, so that none waits in it for one that does not come. In place of `complete` it has `load` and
    `deliver`.
    """

    any_order = True  # nothing is sent before all is filled

    @abstractmethod
    def offer(self) -> str:
        """What this rank sends to all others before `meet`; not collective. Raises WeightSyncError if it cannot."""

    @abstractmethod
    def meet(self, offers: Sequence[str]) -> None:
        """Connect with the other ranks: collective, after `connect`. Raises WeightSyncError.

        Args:
            offers: of all ranks, by rank.
        """

    @abstractmethod
    def load(self) -> None:
        """Make the kept buckets of a sync ready; not collective. Raises WeightSyncError."""

    @abstractmethod
    def deliver(self, ends: float) -> None:
        """Bring it to every engine: collective. Raises WeightSyncError, on every rank where it does on one.

        Args:
            ends: time (`time.monotonic`) after which no rank waits for an engine any more.
        """


def group_name(group: str, sender: int) -> str:
    """The name of the connection of a trainer rank with the engines."""
    return f"{group}-rank{sender}"


def transport_for(engines: Sequence[EngineInfo], engine_port: EnginePort, deadline_s: float) -> str:
    """What `auto` comes to with these engines.

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
            one_rank_each = False  # a server that somebody else has started, without the plug-in
    return choose(one_rank_each=one_rank_each)


MakeTransport = Callable[[Link], Transport]


def find_transport(spec: str) -> MakeTransport:
    """What makes the transport that `weights.transport` names.

    Raises:
        ConfigError: the function cannot be imported, or takes other arguments.
    """
    assert spec != AUTO, "transport_for says which one it is"
    make = load_function(traits_of(spec).made_by or spec, "weights.transport")
    check_parameters(make, spec, "weights.transport", "link")
    return make


def make_transport(spec: str, link: Link) -> Transport:
    """The transport that `weights.transport` names, for one sender.

    Raises:
        ConfigError: as `find_transport`.
        WeightSyncError: a user's function made something else.
    """
    made: object = find_transport(spec)(link)
    if not isinstance(made, Transport):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise WeightSyncError(
            "weights.transport", spec, f"returned a {type(made).__name__}, which is not a Transport",
            "derive its class from mslime.weights.transport.Transport",
        )  # fmt: skip
    return made
