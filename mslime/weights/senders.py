"""Which trainer ranks send weights, and from which ranks each of them gathers: pure arithmetic of the layout.

A stage has one sender for each block of expert-parallel ranks. With as many senders as expert-parallel ranks nobody
gathers experts: a rank sends those that it holds. Only the first copy of a stage's experts takes part; shared tensors
(attention, norms, embeddings) are dealt out to the senders, each of which gathers them over its own tensor-parallel
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from mslime.config.layout import ParallelLayout


@dataclass(frozen=True)
class Senders:
    """The senders of every stage.

    Attributes:
        layout: the trainer's.
        per_stage: of one stage; divides the expert-parallel size.
    """

    layout: ParallelLayout
    per_stage: int = 1

    def __post_init__(self) -> None:
        assert self.layout.ep % self.per_stage == 0, (self.layout, self.per_stage)

    @classmethod
    def at_most(cls, layout: ParallelLayout, senders: int) -> Senders:
        """As many as the layout allows, but no more than `senders` over all stages, and at least one for each."""
        share = max(1, senders // layout.pp)
        return cls(layout, max(n for n in range(1, layout.ep + 1) if layout.ep % n == 0 and n <= share))

    @property
    def block(self) -> int:
        """Expert-parallel ranks whose experts one sender sends."""
        return self.layout.ep // self.per_stage

    def ranks(self, stage: int) -> tuple[int, ...]:
        """Global ranks of a stage's senders: the first of each block."""
        step = self.block * self.layout.etp
        return tuple(self.layout.leader(stage) + sender * step for sender in range(self.per_stage))

    def everyone(self) -> tuple[int, ...]:
        """Global ranks of all senders, in order."""
        return tuple(rank for stage in range(self.layout.pp) for rank in self.ranks(stage))

    def tensor_ranks(self, sender: int) -> tuple[int, ...]:
        """Global ranks that hold the shards of shared tensors for a sender, in tensor-parallel order."""
        first = sender - sender % self.layout.tp
        return tuple(range(first, first + self.layout.tp))

    def expert_ranks(self, sender: int) -> tuple[int, ...]:
        """Global ranks whose experts a sender sends: expert-tensor-parallel rank fastest."""
        return tuple(range(sender, sender + self.block * self.layout.etp))

    def all_expert_ranks(self, stage: int) -> tuple[int, ...]:
        """Global ranks of one copy of all experts of a stage: expert-tensor-parallel rank fastest."""
        first = self.layout.leader(stage)
        return tuple(range(first, first + self.layout.expert_size))
