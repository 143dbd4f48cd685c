"""The parallel layout as arithmetic: which sizes are legal and how ranks are grouped. No process groups here.

Rank order is megatron-core's default, `tp-cp-ep-dp-pp` (fastest first): the dense grid is (tp, cp, dp, pp) and the
expert grid is (etp, ep, edp, pp) over the same ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from mslime.config.errors import ConfigError


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of every parallel dimension of the trainer.

    Attributes:
        tp, pp, cp, dp: tensor, pipeline, context and data parallel sizes; their product is the world size.
        vpp: model chunks per pipeline stage (virtual pipeline), 1 when off.
        ep, etp: expert parallel and expert-tensor parallel sizes.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ConfigError(
                    f"megatron.{name}", value, "parallel sizes are at least 1", "set it to 1 to turn it off"
                )
        per_stage = self.tp * self.cp * self.dp
        if per_stage % (self.ep * self.etp):
            raise ConfigError(
                "megatron.expert_model_parallel_size",
                self.ep,
                f"expert-parallel x expert-tensor-parallel = {self.ep} x {self.etp} must divide the {per_stage} ranks "
                f"of a pipeline stage (TP {self.tp} x CP {self.cp} x DP {self.dp})",
                "lower the expert sizes, or give the trainer more GPUs",
            )
        if self.vpp > 1 and self.pp == 1:
            raise ConfigError(
                "megatron.virtual_pipeline_model_parallel_size",
                self.vpp,
                "virtual pipeline stages need pipeline_model_parallel_size > 1",
                "raise pipeline_model_parallel_size or drop the virtual stages",
            )

    @property
    def world_size(self) -> int:
        """Trainer ranks in all."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Expert data-parallel size: replicas of every expert within a pipeline stage."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    def dp_rank(self, rank: int) -> int:
        """Data-parallel index of a global rank."""
        return rank // (self.tp * self.cp) % self.dp

    def pp_rank(self, rank: int) -> int:
        """Pipeline stage of a global rank."""
        return rank // (self.tp * self.cp * self.dp)

    def describe(self) -> str:
        """One line for people: `TP2 PP1 EP2 ...`, sizes of one left out."""
        sizes = {
            "TP": self.tp,
            "PP": self.pp,
            "VPP": self.vpp,
            "CP": self.cp,
            "DP": self.dp,
            "EP": self.ep,
            "ETP": self.etp,
        }
        return " ".join(f"{k}{v}" for k, v in sizes.items() if v > 1) or "one rank"
