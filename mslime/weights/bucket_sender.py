"""A sender's filled buckets on their way: one at a time, in the order of the plan, while the next is filled.

Engines receive one bucket at a time. If two engines took broadcasts of two senders in different orders, they would
deadlock. So with several engines, a sender sends when the previous bucket in the plan has arrived, and the senders pass
the turn on. All waits are for buckets earlier in the plan, so there is no circular wait. If a transport needs no order
(`Transport.any_order`), senders take no turns.

On GPUs a sender and its transport use a separate stream, which waits only for each bucket's filling. On the filling
stream, a send would wait for later fills, and these for the send. The gather of the next bucket waits for other ranks,
whose sends wait for theirs, so ranks would deadlock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from queue import Queue
from typing import cast

import torch
import torch.distributed as dist

from mslime.config.errors import WeightSyncError, sync_error
from mslime.threads import in_thread
from mslime.weights.transport import Transport
from mslime.weights.weight_plan import Bucket, WeightPlan


class SendOrder:
    """The turn to send, passed from sender to sender together with the success so far.

    Args:
        plan: its buckets are sent in order.
        group: of the plan's senders, over gloo.
    """

    def __init__(self, plan: WeightPlan, group: dist.ProcessGroup) -> None:
        self._order, self._group = [bucket.sender for bucket in plan.buckets], group
        self._went_well = True
        self._passed_on: list[tuple[dist.Work | None, torch.Tensor]] = []

    def take(self, bucket: Bucket) -> bool:
        """Wait for this bucket's turn; returns whether all earlier buckets arrived.

        Raises:
            WeightSyncError: the previous sender is gone, or does not pass the turn on before the group's deadline.
        """
        before = self._order[bucket.index - 1] if bucket.index else bucket.sender
        if before != bucket.sender:
            outcome = torch.zeros(1, dtype=torch.uint8)
            try:
                dist.recv(outcome, before, group=self._group)
            except RuntimeError as error:
                raise sync_error("send", bucket.describe(), f"trainer rank {before}, which sends before this one, is "
                                 f"gone or late: {error}") from error  # fmt: skip
            self._went_well = bool(outcome.item())
        return self._went_well

    def pass_on(self, bucket: Bucket, went_well: bool) -> None:
        """Pass the turn to the next bucket's sender. Other ranks detect a dead sender.

        gloo completes a send when the receiver calls receive, after preparing its bucket; so only the last send is
        waited for.
        """
        self._went_well = went_well
        later = self._order[bucket.index + 1 :]
        if not later or later[0] == bucket.sender:
            return
        outcome = torch.tensor([went_well], dtype=torch.uint8)
        try:
            self._passed_on.append((dist.isend(outcome, later[0], group=self._group), outcome))
            for work, _ in self._passed_on if bucket.sender not in later else ():
                if work is not None:
                    work.wait()
        except RuntimeError:
            self._went_well = False


@dataclass
class PhaseSeconds:
    """Seconds of the phases of one rank's part in a sync.

    Attributes:
        fill: packing, gathering and converting.
        turn: waiting for the senders before.
        send: preparation by the transport, transfer, and loading in the engines.
        sent: (begin, end) of each bucket's sending, in seconds since the epoch.
    """

    fill: float = 0.0
    turn: float = 0.0
    send: float = 0.0
    sent: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])


@dataclass(frozen=True)
class _FilledBucket:
    bucket: Bucket
    flat: torch.Tensor | None
    event: torch.cuda.Event | None
    """On a GPU: recorded when `flat` is filled."""


@dataclass
class BucketSender:
    """Sends one rank's buckets of one sync, in a separate thread.

    Args:
        transport: connected to the engines.
        turns: None if the order between senders does not matter.
        ends: time (`time.monotonic`) after which no bucket is sent.
        deadline_s: the same deadline in seconds, for messages.
        seconds: its time is added to these.
        stream: a separate one, the same in every sync, because torch reuses freed memory per stream. None on CPUs.
        failure: an earlier error: nothing is sent then, but the turn is passed on.
    """

    transport: Transport
    turns: SendOrder | None
    ends: float
    deadline_s: float
    seconds: PhaseSeconds
    stream: torch.cuda.Stream | None
    failure: Exception | None = None
    _filled: Queue[_FilledBucket | None] = field(default_factory=lambda: Queue(1))

    def __post_init__(self) -> None:
        self._done = in_thread(self._deliver)

    def wait_for_buffer(self) -> None:
        """Return when the last bucket is being sent, so that the next may be filled: at most two are held."""
        self._filled.join()

    def put(self, bucket: Bucket, flat: torch.Tensor | None) -> None:
        """Queue a bucket after the earlier ones.

        Args:
            flat: [bucket.hf_numel], or this rank's part of that (`comes_in_parts`), filled on the current stream; None
                if filling failed.
        """
        event = None
        if self.stream is not None:
            event = cast("torch.cuda.Event", torch.cuda.current_stream().record_event())
        self._filled.put(_FilledBucket(bucket, flat, event))

    def close(self) -> Exception | None:
        """Wait until all is sent; returns the first failure."""
        self._filled.put(None)
        self._done.result()
        return self.failure

    def _deliver(self) -> None:
        with torch.cuda.stream(self.stream):  # type: ignore[arg-type]  # takes None, and then does nothing
            while (filled := self._filled.get()) is not None:
                self._filled.task_done()
                if self.stream is not None and filled.event is not None:
                    self.stream.wait_event(filled.event)
                self._deliver_bucket(filled.bucket, filled.flat)

    def _deliver_bucket(self, bucket: Bucket, flat: torch.Tensor | None) -> None:
        """Prepare a bucket, wait for its turn, send it until every engine has loaded it, and pass the turn on.

        This includes errors of a user's transport. This rank's first error is kept in `failure` and raised on every
        rank.
        """
        began = time.monotonic()
        if flat is not None and self.failure is None:
            try:
                self.transport.prepare_bucket(bucket, flat)
            except Exception as error:
                self.failure = error
        prepared = time.monotonic()
        all_arrived = True
        try:
            all_arrived = self.turns is None or self.turns.take(bucket)
        except WeightSyncError as error:
            self.failure, all_arrived = self.failure or error, False
        taken, at = time.monotonic(), time.time()
        sends = flat is not None and all_arrived and self.failure is None
        try:
            if flat is None or not sends:
                if taken < self.ends:
                    self.transport.skip(bucket)
            elif taken > self.ends:
                raise sync_error("send", bucket.describe(), f"the sync took over {self.deadline_s:.0f} s")
            else:
                self.transport.start(bucket, flat).wait()
        except Exception as error:
            self.failure = self.failure or error
        took = time.monotonic() - taken
        self.seconds.turn += taken - prepared
        self.seconds.send += prepared - began + took
        self.seconds.sent.append((at, at + took))
        if self.turns is not None:
            self.turns.pass_on(bucket, sends and self.failure is None)
