"""Inside an SGLang server: the ranks of one engine among themselves, all of them or those of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class EngineRankGroup:
    """Ranks of an engine, as one of them sees them. All take part in each call, in the same order.

    Attributes:
        rank: its own among them.
        count: of them all.
        tensors: the process group for tensors on their device; None where there is one rank.
        words: the one on CPUs, likewise.
        first: number that the first of them has in the engine, for messages.
    """

    rank: int = 0
    count: int = 1
    tensors: dist.ProcessGroup | None = None
    words: dist.ProcessGroup | None = None
    first: int = 0

    def pass_on(self, flat: torch.Tensor, source: int) -> None:
        """Let `flat` be what it is on rank `source`."""
        if self.tensors is not None:
            dist.broadcast(flat, group=self.tensors, group_src=source)

    def first_failure(self, failed: str) -> str:
        """What failed on the first rank where something did; empty where all is well.

        Args:
            failed: what failed on this one.
        """
        return next(filter(None, self.gathered(self._named(failed))), "")

    def _named(self, failed: str) -> str:
        """With the rank's number, where there are several."""
        if not failed or self.words is None or failed.startswith("rank "):
            return failed
        return f"rank {self.first + self.rank}: {failed}"

    def heard(self, failed: str, said: T) -> list[T]:
        """What each rank says, by rank.

        Args:
            failed: what failed on this one.

        Raises:
            RuntimeError: on all of them, with what failed on the first where something did.
        """
        everyone = self.gathered((self._named(failed), said))
        if broken := next(filter(None, (failure for failure, _ in everyone)), ""):
            raise RuntimeError(broken)
        return [each for _, each in everyone]

    def gathered(self, said: T) -> list[T]:
        """What each rank says, by rank."""
        heard = [said] * self.count
        if self.words is not None:
            dist.all_gather_object(heard, said, group=self.words)  # pyright: ignore[reportUnknownMemberType]
        return heard


@dataclass(frozen=True)
class Ranks:
    """An engine's ranks, as one of them sees them.

    Attributes:
        whole: all of them.
        near: those on its machine.
        machine: number of that, among those of the engine.
    """

    whole: EngineRankGroup = EngineRankGroup()
    near: EngineRankGroup = EngineRankGroup()
    machine: int = 0

    @property
    def machines(self) -> int:
        """That the engine lies on."""
        return self.whole.count // self.near.count


def all_ranks() -> EngineRankGroup:
    """All ranks of this engine, in a server that runs."""
    group = _parallel().tp_group
    if group.world_size == 1:
        return EngineRankGroup()
    return EngineRankGroup(group.rank_in_group, group.world_size, group.device_group, group.cpu_group)


@cache
def ranks() -> Ranks:
    """This process among the ranks of its engine, in a server that runs.

    Where the engine lies over several machines, the first call makes process groups, so that all its ranks make it at
    the same time. SGLang gives each machine as many neighbouring ranks (`_calculate_rank_ranges`).
    """
    whole, machines = all_ranks(), _parallel().nnodes
    if machines == 1 or whole.count == 1:
        return Ranks(whole, whole)
    members, count = _parallel().tp_group.ranks, whole.count // machines
    own, backend = whole.rank // count, dist.get_backend(whole.tensors)
    near = EngineRankGroup(first=whole.rank)
    for machine in range(machines):
        first = machine * count
        # Every rank makes every group, in the same order.
        tensors, words = (_new_group(members[first : first + count], kind) for kind in (backend, "gloo"))
        if machine == own and count > 1:
            near = EngineRankGroup(whole.rank - first, count, tensors, words, first)
    return Ranks(whole, near, own)


def _new_group(members: Sequence[int], backend: str) -> dist.ProcessGroup | None:
    """The group on its members, None elsewhere (torch returns an integer there)."""
    group = dist.new_group(list(members), backend=backend)  # pyright: ignore[reportUnknownMemberType]
    return group if isinstance(group, dist.ProcessGroup) else None


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()
