"""Inside an SGLang server: the slice of a bucket that each host of an engine keeps, and that senders send to it.

A host's slice is the union of its ranks' slices (`rank_slices`). Overlapping runs are merged, so each element is sent
once: rows, columns, experts, and elements that all ranks keep. The slice comes packed, so its elements have other
offsets than in the bucket. Two forms that overlap otherwise (a whole tensor, and some columns of it) are both sent. If
all hosts together would receive much more than the bucket, it is sent whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mslime.config.base import SHARES_AT_MOST
from mslime.engine_plugin.rank_slices import ElementView, RankSlice
from mslime.engine_plugin.wire import HostSlice, HostSlices, Slice

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
    """Bytes of a packed slice."""
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
