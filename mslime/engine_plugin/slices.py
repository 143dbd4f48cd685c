"""Inside an SGLang server: each rank's slice of a bucket, so that the receiving rank passes on only these slices.

Recorded copies (`copy_plan`) show which elements of a bucket a rank copies into its parameters. Ranks exchange these
slices once. From then on the rank with a bucket packs each rank's slice of it. The ranks of a host exchange several
buckets at once, one from each of their lanes, so sent and received bytes are about equal on all ranks. This needs no
knowledge of layouts or names.

A bucket goes to all ranks whole if a rank's copies of it are not recorded, or if the slices together are larger than
the bucket.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from mslime.config.base import SHARES_AT_MOST
from mslime.engine_plugin.copy_plan import BucketCopies, RecordedBucket, ReleasableBuffer
from mslime.engine_plugin.engine_ranks import EngineRankGroup
from mslime.engine_plugin.wire import HostSlice, HostSlices, Slice
from mslime.tensor_sums import BITS

_ALIGNED = 16


def aligned(size: int) -> int:
    """The size rounded up, so that elements of any size are aligned behind it."""
    return -(-size // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class ElementView:
    """A view of a bucket, in elements.

    Attributes:
        start: its first element.
    """

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class RankSlice:
    """One rank's slice of a bucket, passed on packed: the elements of all parts, in order.

    Attributes:
        itemsize: bytes of an element.
    """

    itemsize: int
    parts: tuple[ElementView, ...]

    @property
    def bytes(self) -> int:
        return self.itemsize * sum(part.numel for part in self.parts)


def rank_slice_of(bucket: RecordedBucket, copies: BucketCopies) -> RankSlice | None:
    """The elements that recorded copies read from a bucket; None if its tensors have several element sizes."""
    sizes = {tensor.itemsize for _, tensor in bucket.named}
    if len(sizes) != 1:
        return None
    parts: list[ElementView] = []
    for view in copies.out_of:  # a bucket starts at the beginning of its storage
        part = ElementView(int(view.storage_offset()), tuple(view.shape), view.stride())
        if view.is_contiguous():
            part = ElementView(part.start, (part.numel,), (1,))
            last = parts[-1] if parts else None
            if last is not None and last.stride == (1,) and last.start + last.numel == part.start:
                parts[-1] = ElementView(last.start, (last.numel + part.numel,), (1,))
                continue
        parts.append(part)
    return RankSlice(sizes.pop(), tuple(parts))


@dataclass(frozen=True)
class ExchangeStep:
    """Buckets that are exchanged at once.

    Attributes:
        buckets: consecutive indices in the plan; of different sources.
        shared: every rank takes its slice; else the one bucket goes whole to all.
    """

    buckets: tuple[int, ...]
    shared: bool


def steps(
    sources: Sequence[int],
    sizes: Sequence[int],
    shares: Sequence[Sequence[RankSlice | None]],
    largest: int | None = None,
) -> list[ExchangeStep]:
    """Group the buckets of a plan into exchange steps, in order.

    Args:
        sources: for each bucket, the rank that receives it.
        sizes: for each bucket, the bytes that the host receives.
        shares: for each rank, its slice of each bucket.
        largest: bytes of the largest bucket; default: that of `sizes`.
    """
    largest = max(sizes, default=0) if largest is None else largest
    most, found, run = SHARES_AT_MOST * largest, list[ExchangeStep](), list[int]()
    taken = [0] * len(shares)

    def close() -> None:
        nonlocal taken
        if run:
            found.append(ExchangeStep(tuple(run), True))
        run.clear()
        taken = [0] * len(shares)

    for index, (source, size) in enumerate(zip(sources, sizes, strict=True)):
        of_ranks = [share.bytes for each in shares if (share := each[index]) is not None]
        if len(shares) == 1 or len(of_ranks) < len(shares) or sum(of_ranks) > SHARES_AT_MOST * size:
            close()
            found.append(ExchangeStep((index,), False))
            continue
        after = [aligned(before) + more for before, more in zip(taken, of_ranks, strict=True)]
        if source in {sources[other] for other in run if sizes[other] and size} or max(after) > most:
            close()
            after = of_ranks
        run.append(index)
        taken = after
    close()
    return found


class Exchange:
    """One rank's part in a step that exchanges slices, reused at every sync.

    Args:
        sources: source ranks of its buckets, all different.
        shares: for each rank, its slice of each of the step's buckets.
        copies: this rank's, of each of the step's buckets.
        beside: the ranks that exchange.
        arrival: [bytes] uint8, memory in which this rank receives its own bucket of the step.
        within: maps a part of that bucket to its place in the received bytes.
        given, taken: memory for packed slices for other ranks, and for arriving ones.

    Attributes:
        gives, takes: bytes that it needs of these two.
        arrived: for each bucket, the packed views that its copies read.
    """

    def __init__(
        self, sources: Sequence[int], shares: Sequence[Sequence[RankSlice]], copies: Sequence[BucketCopies],
        beside: EngineRankGroup, arrival: torch.Tensor, within: Callable[[ElementView], ElementView],
        given: ReleasableBuffer, taken: ReleasableBuffer,
    ) -> None:  # fmt: skip
        self._beside = beside
        self._give, self._take = [0] * beside.count, [0] * beside.count
        for source, share in zip(sources, shares[beside.rank], strict=True):
            self._take[source] = aligned(share.bytes)
        if beside.rank in sources:
            mine = [each[sources.index(beside.rank)] for each in shares]
            self._give = [aligned(share.bytes) for share in mine]
        self.gives, self.takes = sum(self._give), sum(self._take)
        self._given, self._taken = given.head(self.gives), taken.head(self.takes)
        self._from_arrival, self._packed = list[torch.Tensor](), list[torch.Tensor]()
        if beside.rank in sources:
            for share, start in zip(mine, accumulate(self._give, initial=0), strict=False):
                self._note(RankSlice(share.itemsize, tuple(map(within, share.parts))), arrival, start)
        begins = list(accumulate(self._take, initial=0))
        self.arrived = [
            _views(self._taken, begins[source], each.out_of) for source, each in zip(sources, copies, strict=True)
        ]

    def _note(self, share: RankSlice, arrival: torch.Tensor, start: int) -> None:
        """Add the copies that pack a slice at a position of `given`."""
        bits = BITS[share.itemsize]
        elements, packed = _typed(arrival, 0, bits), _typed(self._given, start, bits)
        ends = accumulate((part.numel for part in share.parts), initial=0)
        for part, begin in zip(share.parts, ends, strict=False):
            self._from_arrival.append(_view(elements, part))
            self._packed.append(packed[begin : begin + part.numel].view(part.shape))

    def pack(self) -> None:
        """Pack every rank's slice from the bucket that this rank has received."""
        if self._packed:
            torch._foreach_copy_(self._packed, self._from_arrival)  # pyright: ignore[reportPrivateImportUsage]

    def exchange(self) -> None:
        """Exchange the packed slices; collective."""
        dist.all_to_all_single(self._taken, self._given, self._take, self._give, group=self._beside.tensors)


@dataclass(frozen=True)
class Arrival:
    """The part of a bucket that arrives at a host.

    Attributes:
        source: the rank that receives it.
        size: bytes.
        arrival: [bytes] uint8, memory in which it arrives on that rank; empty on the others.
        within: maps a part of the bucket to its place in it; None if the whole bucket arrives.
    """

    source: int
    size: int
    arrival: torch.Tensor
    within: Callable[[ElementView], ElementView] | None = None


class Route:
    """One rank's schedule for passing on a plan's buckets.

    Args:
        sent: the buckets, in the order of the plan.
        arrivals: for each bucket, the part that arrives.
        shares: for each rank of the host, its slice of each bucket.
        copies: this rank's, of each bucket.
        beside: the ranks of the host.
        given, taken: memory for packed slices, and for those from other ranks.

    Attributes:
        steps: in order.
        arrivals: the argument.
        exchanges: this rank's part in steps that exchange slices, by their first bucket.
        packed: for buckets that do not arrive whole at this rank, the views that its copies read.
    """

    def __init__(
        self, sent: Sequence[RecordedBucket], arrivals: Sequence[Arrival], shares: Sequence[Sequence[RankSlice | None]],
        copies: Sequence[BucketCopies | None], beside: EngineRankGroup, given: ReleasableBuffer,
        taken: ReleasableBuffer,
    ) -> None:  # fmt: skip
        sizes, sources = [each.size for each in arrivals], [each.source for each in arrivals]
        self.steps = steps(sources, sizes, shares, max((len(bucket.flat) for bucket in sent), default=0))
        self.arrivals = arrivals
        self._given, self._taken = given, taken
        alone = beside.count == 1  # it copies directly from the arrived bytes
        self.exchanges: dict[int, Exchange] = {}
        self.packed: dict[int, list[torch.Tensor]] = {}
        for step in self.steps:
            moved = [i for i in step.buckets if step.shared and sizes[i]]
            self.packed |= {i: [] for i in step.buckets if not sizes[i]}
            if moved:
                of_ranks = [[share for i in moved if (share := each[i]) is not None] for each in shares]
                known = [mine for i in moved if (mine := copies[i]) is not None]
                own = next((arrivals[i] for i in moved if sources[i] == beside.rank), arrivals[moved[0]])
                exchange = Exchange(
                    [sources[i] for i in moved],
                    of_ranks,
                    known,
                    beside,
                    own.arrival,
                    own.within or _as_it_is,
                    given,
                    taken,
                )
                self.exchanges[step.buckets[0]] = exchange
                self.packed |= dict(zip(moved, exchange.arrived, strict=True))
        for step in self.steps:
            for index in () if step.shared else step.buckets:
                within, mine = arrivals[index].within or (_as_it_is if alone else None), copies[index]
                if within is not None and mine is not None and sizes[index]:
                    arrived = arrivals[index].arrival if alone else taken.head(sizes[index])
                    self.packed[index] = _views_within(arrived, mine.out_of, within)

    def reserve(self) -> None:
        """Allocate memory for all steps of a sync."""
        self._given.reserve(max((each.gives for each in self.exchanges.values()), default=0))
        self._taken.reserve(max((each.takes for each in self.exchanges.values()), default=0))


def _as_it_is(part: ElementView) -> ElementView:
    return part


def _views_within(
    arrived: torch.Tensor, like: Sequence[torch.Tensor], within: Callable[[ElementView], ElementView]
) -> list[torch.Tensor]:
    """Map views of the whole bucket to views of its arrived part."""
    parts = (ElementView(int(view.storage_offset()), tuple(view.shape), view.stride()) for view in like)
    return [_view(_typed(arrived, 0, view.dtype), within(part)) for view, part in zip(like, parts, strict=True)]


def _view(elements: torch.Tensor, part: ElementView) -> torch.Tensor:
    return elements.as_strided(part.shape, part.stride, int(elements.storage_offset()) + part.start)


def _typed(buffer: torch.Tensor, start: int, dtype: torch.dtype) -> torch.Tensor:
    """A buffer from an offset on, as elements of this dtype; leftover bytes at its end are cut off."""
    whole = (buffer.numel() - start) // dtype.itemsize * dtype.itemsize
    return buffer[start : start + whole].view(dtype)


def _views(buffer: torch.Tensor, start: int, like: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Packed views in `buffer` from an offset on, with the given shapes and dtypes."""
    views: list[torch.Tensor] = []
    for view in like:
        end = start + view.numel() * view.itemsize
        views.append(buffer[start:end].view(view.dtype).view(view.shape))
        start = end
    return views


# The slice of a bucket that each host of an engine keeps, and that senders send to it.
#
# A host's slice is the union of its ranks' slices. Overlapping runs are merged, so each element is sent once: rows,
# columns, experts, and elements that all ranks keep. The slice comes packed, so its elements have other offsets than in
# the bucket. Two forms that overlap otherwise (a whole tensor, and some columns of it) are both sent. If all hosts
# together would receive much more than the bucket, it is sent whole.


_Runs = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of a `Slice`."""


@dataclass(frozen=True)
class _Form:
    """A part as a piece, with the mapping of its dimensions.

    Attributes:
        dims: for each dimension, the index of the piece's dimension that contains it (0 is the run itself, then
            outwards), and its stride there.
    """

    piece: Slice
    dims: tuple[tuple[int, int], ...]


def _form(part: ElementView) -> _Form | None:
    """The form of a part; None if its elements overlap."""
    sizes, strides = [1], [1]  # innermost first: the run has stride 1
    dims = [(0, 0)] * len(part.shape)
    for dim in sorted(range(len(part.shape)), key=lambda each: part.stride[each]):
        size, stride = part.shape[dim], part.stride[dim]
        if size == 1 or stride == 0:
            continue
        if stride == strides[-1] * sizes[-1]:
            dims[dim] = len(sizes) - 1, stride // strides[-1]
            sizes[-1] *= size
        elif stride < strides[-1] * sizes[-1]:
            return None
        else:
            dims[dim] = len(sizes), 1
            sizes.append(size)
            strides.append(stride)
    piece = Slice(part.start, sizes[0], tuple(reversed(sizes[1:])), tuple(reversed(strides[1:])))
    return _Form(piece, tuple(dims))


def host_slice_of(shares: Iterable[RankSlice]) -> HostSlice | None:
    """The slice that a host's ranks keep together; None if a rank's part has no pieces."""
    runs: dict[_Runs, set[tuple[int, int]]] = {}
    for part in {part for share in shares for part in share.parts}:
        form = _form(part)
        if form is None:
            return None
        piece = form.piece
        runs.setdefault((piece.sizes, piece.strides), set()).add((piece.start, piece.start + piece.width))
    pieces = [
        Slice(start, end - start, sizes, strides)
        for (sizes, strides), spans in runs.items()
        for start, end in _joined(sorted(spans), strides[-1] if strides else None)
    ]
    return tuple(sorted(pieces, key=lambda piece: (piece.start, piece.sizes, piece.strides)))


def _joined(spans: Sequence[tuple[int, int]], most: int | None) -> Iterator[tuple[int, int]]:
    """Sorted spans; touching or overlapping ones are merged, unless the result is wider than `most`."""
    begin, end = spans[0]
    for start, stop in spans[1:]:
        if start <= end and (most is None or max(end, stop) - begin <= most):
            end = max(end, stop)
        else:
            yield begin, end
            begin, end = start, stop
    yield begin, end


def host_slices_of(sizes: Sequence[int], shares: Sequence[Sequence[RankSlice | None]], machines: int) -> HostSlices:
    """Each host's slice of the buckets of a plan, where it pays to send slices.

    Args:
        sizes: of each bucket, in bytes.
        shares: for each rank of the engine, its slice of each bucket. All hosts have equally many consecutive ranks.
    """
    near = len(shares) // machines
    found: list[tuple[HostSlice, ...] | None] = []
    for index, size in enumerate(sizes):
        of_ranks = [share for each in shares if (share := each[index]) is not None]
        cuts = [cut for m in range(machines) if (cut := host_slice_of(of_ranks[m * near : (m + 1) * near])) is not None]
        known = len(of_ranks) == len(shares) and len(cuts) == machines
        sent = sum(host_slice_bytes(cut, of_ranks[0].itemsize) for cut in cuts) if known else 0
        found.append(tuple(cuts) if known and sent <= SHARES_AT_MOST * size else None)
    return HostSlices.of(found)


def host_slice_bytes(cut: HostSlice, itemsize: int) -> int:
    return itemsize * sum(piece.numel for piece in cut)


class PackedSlice:
    """A host's slice of a bucket, packed as it arrives."""

    def __init__(self, cut: HostSlice) -> None:
        found: dict[_Runs, list[tuple[int, Slice, int]]] = {}
        begin = 0
        for piece in cut:
            found.setdefault((piece.sizes, piece.strides), []).append((piece.start, piece, begin))
            begin += piece.numel
        self._pieces = found
        self._starts = {runs: [start for start, _, _ in pieces] for runs, pieces in found.items()}

    def within(self, part: ElementView) -> ElementView:
        """The view of a bucket's part within the packed slice."""
        form = _form(part)
        assert form is not None, "a cut has been made of it"
        runs = form.piece.sizes, form.piece.strides
        start, piece, begin = self._pieces[runs][bisect_right(self._starts[runs], part.start) - 1]
        strides = [1, *([piece.width] if piece.sizes else [])]  # from the run outwards
        for size in list(reversed(piece.sizes))[:-1]:
            strides.append(strides[-1] * size)
        stride = tuple(strides[number] * factor for number, factor in form.dims)
        return ElementView(begin + part.start - start, part.shape, stride)
