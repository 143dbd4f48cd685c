"""What one weight sync moves over each link, the least it can take, and a prediction of what it takes.

Read off the weight plan that the sync itself follows. Trainer ranks fill machines in order, engines the machines after
them. NCCL's broadcast is counted as its ring: every machine receives the bytes once and forwards them once. The
prediction walks through the schedule of `weights/sync.py` and `weights/courier.py` with rates that are settings; it
knows no noise, no congestion, and no part of a sync beside the sending: neither the pause of engines nor comparing.

`broadcast` sends one bucket at a time to all engine ranks; `ways.py` has the transports that differ from it in how a
bucket gets from its sender into an engine. With `relay` sender number i sends only to rank i mod T of the T that an
engine has on a machine, its lane, and that rank passes the bucket on within its machine, while the other lanes receive.
Where engines load by recorded copies it passes on shares, of several lanes' buckets at once
(`engine_plugin/rank_slices.py`); every rank is taken to keep the same share of every bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from mslime.config.choices import SHARES_AT_MOST
from mslime.config.cluster import ClusterConfig
from mslime.planner.filling import Filling, Rates, fill_on_shared_cores, gathered, local_bytes
from mslime.weights.plan import Bucket, WeightPlan

EXCHANGES, OBSERVED = 1, 2
"""In which all trainer ranks agree at the end of a sync by `broadcast`, and by transports that are told of whole syncs
(`WeightSender.send`)."""


@dataclass(frozen=True)
class Receiving:
    """What the engines do with a bucket.

    Attributes:
        engines: how many; more than one take all buckets in one order.
        share: of a bucket's bytes, what one GPU keeps.
        recorded: whether they load by recorded copies, not tensor by tensor.
        ranks: of each engine.
    """

    engines: int
    share: float
    recorded: bool
    ranks: int = 1

    def hands_on_shares(self, near: int) -> bool:
        """Whether `near` ranks of a machine give each other shares, and not whole buckets."""
        return self.recorded and near > 1 and near * self.share <= SHARES_AT_MOST

    def sent(self, near: int) -> float:
        """Of a bucket's bytes, what `relay` sends to each machine of an engine, that has `near` of its ranks."""
        machines, kept = self.ranks // near, min(1.0, near * self.share)
        return kept if self.recorded and machines > 1 and machines * kept <= SHARES_AT_MOST else 1.0


@dataclass(frozen=True)
class SenderSync:
    """What one sender's part of a sync moves.

    Attributes:
        rank: of the sender.
        number: its place among all senders.
        stage: its pipeline stage.
        buckets: gathers and broadcasts.
        sent: bytes that it broadcasts.
        gathered_near: bytes that it receives from ranks of its own machine, over NVLink.
        gathered_far: bytes that it receives from other machines, over its adapter.
        contributed: bytes that each other rank sends to it, at most.
    """

    rank: int
    number: int
    stage: int
    buckets: int
    sent: int
    gathered_near: int
    gathered_far: int
    contributed: int


@dataclass(frozen=True)
class SyncPrediction:
    """Seconds of one sync, by what the engines spend or wait for: one after the other, so that they add up.

    Attributes:
        fill: waiting, because no sender has filled the next bucket; at least what filling takes of shared cores.
        wire: broadcasts; with `relay`, waiting for a bucket that is on its way.
        load: copying what has arrived into parameters.
        latency: requests, starts of collectives, and the exchanges between ranks at the end.
        inside: `relay` only: taking a bucket out of its lane, and passing it on to the other ranks of the engine.
    """

    fill: float
    wire: float
    load: float
    latency: float
    inside: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """By name; `inside` only where there is some."""
        inside = {"inside": self.inside} if self.inside else {}
        return {"fill": self.fill, "wire": self.wire, **inside, "load": self.load, "latency": self.latency}

    @property
    def seconds(self) -> float:
        """Of the whole."""
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """The largest part."""
        return max(self.parts, key=lambda name: self.parts[name])


def sender_syncs(plan: WeightPlan, cluster: ClusterConfig) -> tuple[SenderSync, ...]:
    """The traffic of every sender that has something to send."""
    by_sender: dict[int, list[Bucket]] = {rank: [] for rank in plan.senders.everyone()}
    for bucket in plan.buckets:
        by_sender[bucket.sender].append(bucket)
    return tuple(
        _sender_sync(number, rank, buckets, cluster.gpus_per_node)
        for number, (rank, buckets) in enumerate(by_sender.items())
        if buckets
    )


def relayed(plan: WeightPlan, receiving: Receiving) -> WeightPlan:
    """What `relay` gathers of a plan: what comes in parts, from all who hold it at the same time, counts as its
    sender's."""
    senders = set(plan.senders.everyone())
    buckets = (
        replace(bucket, members=(bucket.sender,)) if bucket.comes_in_parts(senders, [receiving.ranks]) else bucket
        for bucket in plan.buckets
    )
    return replace(plan, buckets=tuple(buckets))


def lane_bytes(syncs: Iterable[SenderSync], near: int, sent: float = 1.0) -> dict[int, int]:
    """With `relay`: what each of an engine's ranks on a machine receives from senders, of those that receive anything.

    Args:
        near: those ranks (`near_ranks`).
        sent: see `Receiving.sent`.
    """
    lanes: dict[int, int] = {}
    for sender in syncs:
        lane = sender.number % near
        lanes[lane] = lanes.get(lane, 0) + int(sent * sender.sent)
    return lanes


def bounds(syncs: Sequence[SenderSync], rates: Rates, way: Way | None = None) -> dict[str, float]:
    """Lower bounds of a whole sync but by `relay`: every engine takes all bytes, one bucket at a time.

    Senders fill their buckets at the same time, hidden behind the sending of other buckets where that takes longer.

    Args:
        way: default: that of `broadcast`.
    """
    way = way or broadcast_way(rates)
    return {"fill": _least_fill(syncs, rates), "wire": way.move * sum(s.sent for s in syncs)}


def relay_bounds(
    syncs: Sequence[SenderSync], rates: Rates, receiving: Receiving, gpus_per_node: int
) -> dict[str, float]:
    """Lower bounds of a whole sync by `relay`.

    Wire: a lane is one adapter, and so is a sender, which sends to each machine of an engine what that keeps, or to all
    of them at once. Inside: what a GPU does not take from its adapter it takes over NVLink, of r on a
    machine the mean one (r - 1) / r of what it takes: its share, or all.
    """
    near = near_ranks(receiving.ranks, gpus_per_node)
    taken = sum(s.sent for s in syncs) * (receiving.share if receiving.hands_on_shares(near) else 1.0)
    sent, machines = receiving.sent(near), receiving.ranks // near
    leaving = max((s.sent for s in syncs), default=0) * (machines * sent if sent < 1 else 1.0)
    return {
        "fill": _least_fill(syncs, rates),
        "wire": max(leaving, *lane_bytes(syncs, near, sent).values(), 0) / rates.network,
        "inside": taken * (near - 1) / near / rates.nvlink,
    }


def _least_fill(syncs: Sequence[SenderSync], rates: Rates) -> float:
    return max((max(s.gathered_far / rates.network, s.gathered_near / rates.nvlink) for s in syncs), default=0.0)


@dataclass(frozen=True)
class Way:
    """How a bucket gets from its sender into an engine, but by `relay`: seconds that each step takes for a byte.

    Attributes:
        move: into an engine, which takes one bucket at a time; engines receive at the same time.
        prepare: what its sender does before, while others prepare, write and send theirs.
        write: what it does then with something that all senders share, one after the other.
        unpack: what an engine does more with it than loading it.
        keep: what its sender does when it has arrived, and the turn was passed on, before it takes its next.
        room: seconds in which a sender makes what its buckets go through, anew in every sync.
        opening: seconds in which an engine opens that, with a sender's first bucket.
        closing: seconds that end a sync, when all has arrived.
        turns: whether several engines take all buckets in the plan's order.
        exchanges: in which all trainer ranks agree at the end.
    """

    move: float
    prepare: float = 0.0
    write: float = 0.0
    unpack: float = 0.0
    keep: float = 0.0
    room: float = 0.0
    opening: float = 0.0
    closing: float = 0.0
    turns: bool = False
    exchanges: int = OBSERVED


def broadcast_way(rates: Rates) -> Way:
    """Over the network of one GPU's adapter."""
    return Way(1 / rates.network, turns=True, exchanges=EXCHANGES)


def predict(
    plan: WeightPlan, rates: Rates, receiving: Receiving, gpus_per_node: int, way: Way | None = None
) -> SyncPrediction:
    """Follow the plan's buckets through filling, going their way, and loading.

    Engines take one bucket at a time and load it before the next: one engine as senders ask it to, several in the
    plan's order where the way has turns. Every request is seen. With turns a sender asks when the bucket before has
    arrived; an engine hears a sender while it takes another's bucket, but SGLang holds a lock from then to its answer
    (`update_weights_from_distributed`), so that next to nothing of the next request is done.

    Args:
        way: default: that of `broadcast`.
    """
    way = way or broadcast_way(rates)
    if not plan.buckets:
        return SyncPrediction(0.0, 0.0, 0.0, 0.0)
    filling = Filling(plan.buckets, rates, gpus_per_node)
    turns = way.turns and receiving.engines > 1
    firsts = set({bucket.sender: bucket.index for bucket in reversed(plan.buckets)}.values())
    asked: list[tuple[float, int, float]] = []
    now = fill = wire = load = latency = written = kept = 0.0
    for _ in plan.buckets:
        for taken, bucket in filling.given():
            ready = taken + way.prepare * bucket.hf_bytes + (way.room if bucket.index in firsts else 0.0)
            if way.write:
                ready = written = max(ready, written) + way.write * bucket.hf_bytes
            heappush(asked, (bucket.index if turns else ready, bucket.index, ready))
        # With turns the next of the plan is always there: all that it waits for lies earlier in the plan.
        _, index, ready = heappop(asked)
        bucket = plan.buckets[index]
        moving = way.move * bucket.hf_bytes
        loading = way.unpack * bucket.hf_bytes + _load_seconds(bucket, rates, receiving)
        asking = rates.request + (way.opening if index in firsts else 0.0)
        begun = max(ready, now)
        fill += begun - now
        wire, load, latency = wire + moving, load + loading, latency + asking
        now = begun + asking + moving + loading
        filling.sent(bucket, now + way.keep * bucket.hf_bytes)
        kept = max(kept, now + way.keep * bucket.hf_bytes)
    latency += way.closing + way.exchanges * rates.exchange
    fill = max(fill, fill_on_shared_cores(plan.buckets, rates, gpus_per_node))
    return SyncPrediction(fill + kept - now, wire, load, latency)


def predict_relay(plan: WeightPlan, rates: Rates, receiving: Receiving, gpus_per_node: int) -> SyncPrediction:
    """Follow the plan's buckets through filling, lanes, passing on within engines, and loading.

    A lane takes the buckets of its senders in the plan's order, one at a time, while the engine handles earlier ones;
    a sender is free when its bucket has arrived. The ranks of an engine handle all buckets in the plan's order: out of
    the lane, which receives again from then on, to the other ranks, into parameters; several lanes' buckets at once
    where they hand on shares. One rank that loads by recorded copies reads a bucket where it arrived, and has room for
    another one meanwhile. Engines are alike, and receive at the same time. One request starts the sync; a bucket
    costs a start of a collective on its lane and, where an engine has several ranks, each handing on costs one within
    it, and these also hear from each other once for as many buckets as they are.

    Every machine of an engine has lanes of its own for all senders, and is counted as an engine: a sender's broadcast
    to more receivers is as fast, as NCCL's ring is counted here. Where each machine is sent what it keeps, a sender
    sends as many parts as there are machines, at the same time and each at that part of its adapter's rate; a rank
    receives from as many senders at once.
    """
    plan = relayed(plan, receiving)
    if not plan.buckets:
        return SyncPrediction(0.0, 0.0, 0.0, 0.0)
    ranks = near_ranks(receiving.ranks, gpus_per_node)
    sent, machines = receiving.sent(ranks), receiving.ranks // ranks
    parts = machines if sent < 1 else 1
    sources = {rank: number % ranks for number, rank in enumerate(plan.senders.everyone())}
    lanes = {rank: number % (ranks * parts) for number, rank in enumerate(plan.senders.everyone())}
    filling, taken = Filling(plan.buckets, rates, gpus_per_node), dict[int, float]()
    empty = dict.fromkeys(lanes.values(), rates.request)  # since when a lane can receive
    shared, in_place = receiving.hands_on_shares(ranks), receiving.recorded and ranks == 1
    now = latency = rates.request
    fill = wire = inside = load = 0.0
    unheard = ranks
    for step in _steps(plan.buckets, sources, shared):
        if ranks > 1 and unheard >= ranks:
            now, latency, unheard = now + rates.collective, latency + rates.collective, 0
        unheard += len(step)
        coming: list[_Coming] = []
        for bucket in step:
            # All that this bucket waits for lies earlier in the plan, so that a courier has taken it by now.
            taken |= {other.index: at for at, other in filling.given()}
            crossing, out = parts * sent * bucket.hf_bytes / rates.network, bucket.hf_bytes / rates.copy
            out *= ranks * receiving.share if shared else 0.0 if in_place else sent
            begun = max(taken.pop(bucket.index), empty[lanes[bucket.sender]])
            arrived = begun + rates.collective + crossing
            filling.sent(bucket, arrived)
            empty[lanes[bucket.sender]] = max(now, arrived) + out
            coming.append(_Coming(max(now, arrived) + out, begun, arrived, crossing, out))
        # The engine waits for the last of them, and for its sender first, then for its lane.
        last = max(coming, key=lambda each: each.out_at)
        on_its_way = max(last.arrived - max(now, last.begun), 0.0)
        seen = min(on_its_way, last.crossing)
        fill, wire, latency = fill + max(last.begun - now, 0.0), wire + seen, latency + on_its_way - seen
        start = rates.collective if ranks > 1 else 0.0
        passing = _passing(step, receiving.share, ranks, shared) / rates.nvlink
        loading = sum(_load_seconds(bucket, rates, receiving) for bucket in step)
        inside, load, latency = inside + last.out + passing, load + loading, latency + start
        now = last.out_at + start + passing + loading
    fill = max(fill, fill_on_shared_cores(plan.buckets, rates, gpus_per_node))
    return SyncPrediction(fill, wire, load, latency + OBSERVED * rates.exchange, inside)


@dataclass(frozen=True)
class _Coming:
    """A bucket on its lane: when it is out of it, its way was begun, it arrived; how long its way and taking it out
    took."""

    out_at: float
    begun: float
    arrived: float
    crossing: float
    out: float


def _steps(buckets: Iterable[Bucket], lanes: Mapping[int, int], shared: bool) -> Iterator[list[Bucket]]:
    """Buckets that are handed on at once: one, or with shares neighbours of different lanes.

    There is always room for their shares, which are the same for all ranks here.
    """
    step: list[Bucket] = []
    for bucket in buckets:
        if step and (not shared or lanes[bucket.sender] in {lanes[other.sender] for other in step}):
            yield step
            step = []
        step.append(bucket)
    yield step


def _passing(step: Sequence[Bucket], share: float, ranks: int, shared: bool) -> float:
    """Bytes over the busiest NVLink: a rank gives the others shares of its bucket, and takes its own of all others."""
    largest, whole = max(bucket.hf_bytes for bucket in step), sum(bucket.hf_bytes for bucket in step)
    if not shared:
        return whole if ranks > 1 else 0.0
    return share * max(largest * (ranks - 1), whole - (largest if len(step) == ranks else 0))


def near_ranks(ranks: int, gpus_per_node: int) -> int:
    """Of an engine of so many ranks, those on one machine."""
    return ranks // -(-ranks // gpus_per_node)


def _load_seconds(bucket: Bucket, rates: Rates, receiving: Receiving) -> float:
    """Of one GPU of an engine."""
    calls = 0.0 if receiving.recorded else len(bucket.entries) * rates.tensor
    return receiving.share * bucket.hf_bytes / rates.copy + calls


def _sender_sync(number: int, rank: int, buckets: Sequence[Bucket], gpus_per_node: int) -> SenderSync:
    received = [gathered(bucket, gpus_per_node) for bucket in buckets]
    return SenderSync(
        rank=rank,
        number=number,
        stage=buckets[0].stage,
        buckets=len(buckets),
        sent=sum(bucket.hf_bytes for bucket in buckets),
        gathered_near=sum(near for near, _ in received),
        gathered_far=sum(far for _, far in received),
        contributed=sum(local_bytes(bucket) for bucket in buckets if len(bucket.members) > 1),
    )
