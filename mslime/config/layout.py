"""Arithmetic of the parallel layout: legal sizes, groups of ranks, layers of each stage.

No process groups here. Rank order is megatron-core's default, `tp-cp-ep-dp-pp` (fastest first): the dense grid is (tp,
cp, dp, pp) and the expert grid is (etp, ep, edp, pp) over the same ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from mslime.config.errors import ConfigError


@dataclass(frozen=True)
class RankPlace:
    """Indices of one rank in every parallel dimension.

    Attributes:
        pp: pipeline stage.
        dp, cp, tp: in the dense grid of the stage. edp, ep, etp: in its expert grid, over the same ranks.
        within: place among the ranks of the stage.
    """

    pp: int
    dp: int
    cp: int
    tp: int
    edp: int
    ep: int
    etp: int
    within: int


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
                raise ConfigError(f"megatron.{name}", value, "must be at least 1", "set it to 1 to turn it off")
        if self.stage_size % self.expert_size:
            raise ConfigError(
                "megatron.expert_model_parallel_size",
                self.ep,
                f"expert-parallel x expert-tensor-parallel = {self.ep} x {self.etp} must divide the {self.stage_size} "
                f"ranks of a pipeline stage (TP {self.tp} x CP {self.cp} x DP {self.dp})",
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
        return self.stage_size * self.pp

    @property
    def edp(self) -> int:
        """Expert data-parallel size: replicas of every expert within a pipeline stage."""
        return self.stage_size // self.expert_size

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage, which are neighbours."""
        return self.tp * self.cp * self.dp

    @property
    def expert_size(self) -> int:
        """Ranks of one copy of a stage's experts: the first ones of the stage."""
        return self.ep * self.etp

    def place(self, rank: int) -> RankPlace:
        """Place of a global rank in both grids."""
        within = rank % self.stage_size
        return RankPlace(
            pp=rank // self.stage_size,
            dp=within // (self.tp * self.cp),
            cp=within // self.tp % self.cp,
            tp=within % self.tp,
            edp=within // self.expert_size,
            ep=within // self.etp % self.ep,
            etp=within % self.etp,
            within=within,
        )

    def leader(self, stage: int) -> int:
        """The first rank of a pipeline stage, which sends its weights."""
        return stage * self.stage_size

    def dp_rank(self, rank: int) -> int:
        """Data-parallel index of a global rank."""
        return self.place(rank).dp

    def pp_rank(self, rank: int) -> int:
        """Pipeline stage of a global rank."""
        return self.place(rank).pp

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


def stage_layers(
    num_layers: int, pp: int, vpp: int = 1, first: int | None = None, last: int | None = None
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Global (0-based) layer ids of every chunk of every pipeline stage: `[stage][chunk]`.

    The arithmetic of megatron-core 0.16.1's `get_num_layers_to_build` and `get_transformer_layer_offset`. The first and
    last stage hold `first` and `last` layers if given; the stages between share the rest evenly. A stage's layers are
    split so that chunk 0 of every stage comes before chunk 1 of any.

    Args:
        num_layers: transformer layers of the model.
        pp, vpp: pipeline stages, and chunks of each.
        first, last: megatron-core's `num_layers_in_first_pipeline_stage` and `num_layers_in_last_pipeline_stage`.

    Raises:
        ConfigError: the layers cannot be divided so; it names sizes of the first or last stage that would work.
    """
    uneven = {"first": first, "last": last}
    given = {name: size for name, size in uneven.items() if size is not None}
    if given and pp == 1:
        name, size = next(iter(given.items()))
        raise ConfigError(
            f"megatron.num_layers_in_{name}_pipeline_stage", size, "there is only one pipeline stage",
            "remove it, or raise pipeline_model_parallel_size",
        )  # fmt: skip
    rest, others = num_layers - sum(given.values()), pp - len(given)
    if rest < 0 or (others == 0 and rest) or (others and (rest % others or rest < others)):
        raise ConfigError(
            "megatron.pipeline_model_parallel_size", pp, _uneven_rule(num_layers, pp, given),
            _uneven_hint(num_layers, pp, vpp),
        )  # fmt: skip
    if vpp > 1 and not others:
        raise ConfigError(
            "megatron.num_layers_in_last_pipeline_stage", last,
            "with virtual stages megatron-core 0.16.1 needs stages between first and last, and there are none",
            "remove it: it follows from num_layers_in_first_pipeline_stage",
        )  # fmt: skip
    share = rest // others if others else 0
    sizes = [first if first is not None else share, *[share] * (pp - 2), last if last is not None else share][:pp]
    uncut = next((size for size in sizes if size % vpp), None)
    if uncut is not None:
        raise ConfigError(
            "megatron.virtual_pipeline_model_parallel_size", vpp,
            f"must divide the layers of every stage, and one holds {uncut}", _uneven_hint(num_layers, pp, vpp),
        )  # fmt: skip
    chunks: list[list[tuple[int, ...]]] = [[] for _ in range(pp)]
    at = 0
    for _ in range(vpp):
        for stage, size in enumerate(sizes):
            chunks[stage].append(tuple(range(at, at + size // vpp)))
            at += size // vpp
    return tuple(tuple(stage) for stage in chunks)


def _uneven_rule(num_layers: int, pp: int, given: dict[str, int]) -> str:
    if not given:
        return f"must divide the model's {num_layers} layers"
    fixed = " and ".join(f"{size} in the {name} stage" for name, size in given.items())
    return f"{num_layers} layers with {fixed} leave no equal share for the other {pp - len(given)} stages"


def _uneven_hint(num_layers: int, pp: int, vpp: int) -> str:
    """A valid size of the last stage, smaller than the others because it also holds the output layer."""
    if pp > 1:
        for share in range(-(-num_layers // pp), num_layers):
            last = num_layers - share * (pp - 1)
            if share % vpp == 0 and last > 0 and last % vpp == 0:
                return (
                    f"set num_layers_in_last_pipeline_stage: {last} (the other stages hold {share}), "
                    f"or use a divisor of {num_layers}"
                )
    return f"choose pipeline sizes whose product divides {num_layers}"
