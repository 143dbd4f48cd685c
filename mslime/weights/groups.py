"""The process groups of a sync: trainer ranks that gather together, senders that take turns, and all ranks for
exchanges of small values."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from mslime.config.layout import ParallelLayout
from mslime.weights.weight_plan import Senders

_T = TypeVar("_T")
Members = tuple[int, ...]
EXCHANGED_AT_ONCE = 2048
"""Bytes of each rank in the first collective: enough for a sender's report of a sync of about 90 buckets."""
LENGTH_BYTES = 8
"""Bytes of the length, little-endian, before the value."""


@dataclass(frozen=True)
class SyncGroups:
    """One rank's process groups in the sync.

    Attributes:
        senders: the trainer's layout, and which of its ranks send.
        rank: global rank.
        gathers: groups in which this rank gathers, by their members; only those of several ranks.
        control: all trainer ranks over gloo, for plans and errors.
        turns: the senders over gloo, ordered by rank; None if there is one sender, or this rank is not one.
    """

    senders: Senders
    rank: int
    gathers: Mapping[Members, dist.ProcessGroup]
    control: dist.ProcessGroup
    turns: dist.ProcessGroup | None

    @property
    def layout(self) -> ParallelLayout:
        """The trainer's parallel sizes."""
        return self.senders.layout

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.layout.pp_rank(self.rank)

    @property
    def sends(self) -> bool:
        """Whether this rank sends weights."""
        return self.rank in self.senders.everyone()


def make_groups(senders: Senders, backend: str, timeout_s: float) -> SyncGroups:
    """Build the groups; a collective of all trainer ranks, after `torch.distributed` is initialised.

    Args:
        senders: of a layout that covers all processes.
        backend: of the gathers: `nccl` on GPUs, `gloo` on CPUs.
        timeout_s: after which a collective of the sync fails.
    """
    layout = senders.layout
    assert dist.get_world_size() == layout.world_size, (dist.get_world_size(), layout)
    rank, timeout = dist.get_rank(), timedelta(seconds=timeout_s)
    mine: dict[Members, dist.ProcessGroup] = {}
    for members in dict.fromkeys(_gathers(senders)):
        # Every rank creates every group, in the same order; a group of one needs none.
        group = _new_group(members, backend, timeout) if len(members) > 1 else None
        if group is not None and rank in members:
            mine[members] = group
    everyone = senders.everyone()
    turns = _new_group(everyone, "gloo", timeout) if len(everyone) > 1 else None
    control = _new_group(tuple(range(layout.world_size)), "gloo", timeout)
    assert control is not None, "every rank is in the control group"
    return SyncGroups(senders, rank, mine, control, turns)


def _gathers(senders: Senders) -> Iterator[Members]:
    for stage in range(senders.layout.pp):
        yield senders.all_expert_ranks(stage)
        for sender in senders.ranks(stage):
            yield senders.tensor_ranks(sender)
            yield senders.expert_ranks(sender)


def _new_group(ranks: Members, backend: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """The group on its members, None elsewhere (torch returns an integer there)."""
    group = dist.new_group(list(ranks), timeout=timeout, backend=backend)  # pyright: ignore[reportUnknownMemberType]
    return group if isinstance(group, dist.ProcessGroup) else None


def exchange(mine: _T, group: dist.ProcessGroup) -> list[_T]:
    """All-gather of small Python objects over gloo, in rank order; one collective if all fit in 2 KiB.

    `torch.distributed.all_gather_object` needs two, the first for sizes alone. Exchanges at the end of a sync overlap
    with nothing, and on busy CPUs each collective waits for a core more than once.

    Args:
        mine: anything that pickles.

    Raises:
        RuntimeError: a rank of the group is gone, or missed the group's timeout.
    """
    sent = pickle.dumps(mine, pickle.HIGHEST_PROTOCOL)
    framed = len(sent).to_bytes(LENGTH_BYTES, "little") + sent
    everyone = _gathered(framed[:EXCHANGED_AT_ONCE], EXCHANGED_AT_ONCE, group)
    ends = [LENGTH_BYTES + int.from_bytes(one[:LENGTH_BYTES], "little") for one in everyone]
    if max(ends) > EXCHANGED_AT_ONCE:
        rests = _gathered(framed[EXCHANGED_AT_ONCE:], max(ends) - EXCHANGED_AT_ONCE, group)
        everyone = [one + rest for one, rest in zip(everyone, rests, strict=True)]
    return [pickle.loads(one[LENGTH_BYTES:end]) for one, end in zip(everyone, ends, strict=True)]


def _gathered(mine: bytes, size: int, group: dist.ProcessGroup) -> list[bytes]:
    """Every rank's bytes, padded to `size` with zeros."""
    everyone = torch.empty(dist.get_world_size(group) * size, dtype=torch.uint8)
    own = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8)
    dist.all_gather_single(everyone, own, group=group)  # pyright: ignore[reportUnknownMemberType]
    whole = everyone.numpy().tobytes()
    return [whole[at : at + size] for at in range(0, len(whole), size)]
