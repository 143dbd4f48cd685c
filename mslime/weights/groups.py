"""The process groups of a sync: which trainer ranks gather with which, and who sends.

Only the first replica of a stage takes part: its tensor-parallel ranks gather the shared tensors, and the first
EP x ETP ranks of the stage (one copy of every expert) gather the experts. Both groups begin with the stage's first
rank, the stage leader, which alone talks to the engines. Rank order is that of `config.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from mslime.config.layout import ParallelLayout


@dataclass(frozen=True)
class SyncGroups:
    """One rank's place in the sync.

    Attributes:
        layout: the trainer's parallel sizes.
        rank: global rank.
        tensor: gather group of the shared tensors, None when this rank is not in it or it has one rank.
        expert: gather group of the experts, likewise.
        control: all trainer ranks over gloo, for plans and errors.
    """

    layout: ParallelLayout
    rank: int
    tensor: dist.ProcessGroup | None
    expert: dist.ProcessGroup | None
    control: dist.ProcessGroup

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.layout.pp_rank(self.rank)

    @property
    def is_leader(self) -> bool:
        """Whether this rank converts and sends its stage's tensors."""
        return self.rank == self.layout.leader(self.stage)

    @property
    def ep_rank(self) -> int:
        """Expert-parallel index."""
        return self.layout.place(self.rank).ep

    def gathers(self, expert: bool) -> bool:
        """Whether this rank's shards are wanted, for buckets of its own stage."""
        return self.layout.place(self.rank).within < (self.layout.expert_size if expert else self.layout.tp)


def make_groups(layout: ParallelLayout, backend: str, timeout_s: float) -> SyncGroups:
    """Build the groups; every trainer rank calls this at the same time, after `torch.distributed` is up.

    Args:
        layout: must have as many ranks as there are processes.
        backend: of the gathers: `nccl` on GPUs, `gloo` on CPUs.
        timeout_s: after which a collective of the sync fails.
    """
    assert dist.get_world_size() == layout.world_size, (dist.get_world_size(), layout)
    rank, timeout = dist.get_rank(), timedelta(seconds=timeout_s)
    mine: dict[str, dist.ProcessGroup] = {}
    for stage in range(layout.pp):
        for name, size in (("tensor", layout.tp), ("expert", layout.expert_size)):
            ranks = list(range(layout.leader(stage), layout.leader(stage) + size))
            # Every rank makes every group, in the same order; a group of one needs none.
            group = _new_group(ranks, backend, timeout) if size > 1 else None
            if group is not None and rank in ranks:
                mine[name] = group
    control = _new_group(list(range(layout.world_size)), "gloo", timeout)
    assert control is not None, "every rank is in the control group"
    return SyncGroups(layout, rank, mine.get("tensor"), mine.get("expert"), control)


def _new_group(ranks: list[int], backend: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """The group on its members, None elsewhere (torch returns an integer there)."""
    group = dist.new_group(ranks, timeout=timeout, backend=backend)  # pyright: ignore[reportUnknownMemberType]
    return group if isinstance(group, dist.ProcessGroup) else None
