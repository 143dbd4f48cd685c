"""Inside an SGLang server: communication among the ranks of one engine, all of them or those of one host."""

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
    """Group of an engine's ranks, seen from one of them. Every method is collective.

    Attributes:
        rank: its own among them.
        count: number of ranks.
        tensors: the process group for tensors on their device; None for one rank.
        words: the process group for objects on CPUs, likewise.
        first: index of the first of them in the engine, for messages.
    """

    rank: int = 0
    count: int = 1
    tensors: dist.ProcessGroup | None = None
    words: dist.ProcessGroup | None = None
    first: int = 0

    def pass_on(self, flat: torch.Tensor, source: int) -> None:
        """Broadcast `flat` from rank `source`."""
        if self.tensors is not None:
            dist.broadcast(flat, group=self.tensors, group_src=source)

    def first_failure(self, failed: str) -> str:
        """The error of the first failed rank; empty if none failed.

        Args:
            failed: this rank's error, or empty.
        """
        return next(filter(None, self.gather(self._named(failed))), "")

    def _named(self, failed: str) -> str:
        """The error with the rank's index, if there are several ranks."""
        if not failed or self.words is None or failed.startswith("rank "):
            return failed
        return f"rank {self.first + self.rank}: {failed}"

    def gather_or_raise(self, failed: str, value: T) -> list[T]:
        """Each rank's value, by rank.

        Args:
            failed: this rank's error, or empty.

        Raises:
            RuntimeError: on all of them, with the error of the first failed rank.
        """
        everyone = self.gather((self._named(failed), value))
        if broken := next(filter(None, (failure for failure, _ in everyone)), ""):
            raise RuntimeError(broken)
        return [each for _, each in everyone]

    def gather(self, value: T) -> list[T]:
        """Each rank's value, by rank."""
        everyone = [value] * self.count
        if self.words is not None:
            dist.all_gather_object(everyone, value, group=self.words)  # pyright: ignore[reportUnknownMemberType]
        return everyone


@dataclass(frozen=True)
class EngineRanks:
    """An engine's ranks, seen from one of them.

    Attributes:
        whole: all of them.
        near: those on its host.
        machine: index of its host among those of the engine.
    """

    whole: EngineRankGroup = EngineRankGroup()
    near: EngineRankGroup = EngineRankGroup()
    machine: int = 0

    @property
    def machines(self) -> int:
        return self.whole.count // self.near.count


def all_ranks() -> EngineRankGroup:
    """All ranks of this engine, in a running server."""
    group = _parallel().tp_group
    if group.world_size == 1:
        return EngineRankGroup()
    return EngineRankGroup(group.rank_in_group, group.world_size, group.device_group, group.cpu_group)


@cache
def ranks() -> EngineRanks:
    """This process's groups within its engine, in a running server.

    If the engine spans several hosts, the first call creates process groups and is collective. SGLang gives each host
    equally many consecutive ranks (`_calculate_rank_ranges`).
    """
    whole, machines = all_ranks(), _parallel().nnodes
    if machines == 1 or whole.count == 1:
        return EngineRanks(whole, whole)
    members, count = _parallel().tp_group.ranks, whole.count // machines
    own, backend = whole.rank // count, dist.get_backend(whole.tensors)
    near = EngineRankGroup(first=whole.rank)
    for machine in range(machines):
        first = machine * count
        # Every rank creates every group, in the same order.
        tensors, words = (_new_group(members[first : first + count], kind) for kind in (backend, "gloo"))
        if machine == own and count > 1:
            near = EngineRankGroup(whole.rank - first, count, tensors, words, first)
    return EngineRanks(whole, near, own)


def _new_group(members: Sequence[int], backend: str) -> dist.ProcessGroup | None:
    """The group on its members, None elsewhere (torch returns an integer there)."""
    group = dist.new_group(list(members), backend=backend)  # pyright: ignore[reportUnknownMemberType]
    return group if isinstance(group, dist.ProcessGroup) else None


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()
