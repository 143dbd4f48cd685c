"""What an SGLang server is started with, resolved from the run's sections once: an engine of the run, or a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mslime.config.choices import Device
from mslime.config.dtypes import served_dtype, trainer_dtype
from mslime.config.engines import SGLangConfig
from mslime.config.schema import RunConfig

Role = Literal["engine", "teacher"]
"""What a server is for: generating with the policy's weights, or scoring with a teacher's."""


@dataclass(frozen=True)
class ServedLora:
    """Adapters that a server makes room for.

    Attributes:
        rank: of every one.
        modules: ends of the names of the modules that have one.
        alive: how many it serves at once.
        shares_outer: experts of a layer share factors in them (`lora.experts`).
    """

    rank: int
    modules: tuple[str, ...]
    alive: int
    shares_outer: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """How the servers of one role are started.

    Attributes:
        settings: `sglang`, or `teacher`.
        checkpoint, tokenizer: directories that they read.
        device: of the servers, decided: not `auto`.
        trainer_dtype: of the parameters of a trainer on a GPU, which an engine is sent.
        seed: of the run; server i draws from `seed + i`.
        start_s: seconds until a server answers.
        mask_tokens: most ids of a sampling mask that they return; None: SGLang's default.
        recorded: they load buckets of weights by recorded copies.
        gives_back: they give their memory back while a trainer works on their GPUs; a teacher keeps its weights in the
            machine's memory meanwhile, since nobody sends them again.
        lora: adapters that they serve; None: none.
    """

    role: Role
    settings: SGLangConfig
    checkpoint: Path
    tokenizer: Path
    device: Device
    trainer_dtype: str
    seed: int
    start_s: float
    mask_tokens: int | None = None
    recorded: bool = False
    gives_back: bool = False
    lora: ServedLora | None = None

    def dtype(self, hf_config: dict[str, Any]) -> str:
        """The dtype that the servers hold weights in (`config.dtypes.served_dtype`). Raises ConfigError."""
        return served_dtype(
            self.settings.dtype, hf_config, self.checkpoint, self.trainer_dtype,
            cpu=self.device == "cpu", trained=self.role == "engine",
        )  # fmt: skip


def engine_spec(config: RunConfig, adapted: Sequence[str] = ()) -> ServerSpec:
    """The engines of a run.

    Args:
        adapted: ends of the names of modules with an adapter, where engines are given adapters.
    """
    model = config.model
    spec = _spec(config, "engine", config.sglang, model.path, model.tokenizer)
    # Where the draw's last tokens tie in probability, SGLang's GPU kernels keep all of them, also beyond top-k.
    mask_tokens = 2 * config.rollout.top_k if config.rollout.truncated else None
    recorded = config.weights.loader == "recorded"
    return replace(
        spec, mask_tokens=mask_tokens, recorded=recorded, gives_back=config.colocated, lora=served_lora(config, adapted)
    )


def served_lora(config: RunConfig, adapted: Sequence[str]) -> ServedLora | None:
    """What engines are told of the adapters that they are given; None where they are given weights.

    Args:
        adapted: ends of the names of modules with an adapter.
    """
    rank = max((run.lora.rank for run in config.adapter_runs.values()), default=config.lora.rank)
    if not adapted:
        return None
    return ServedLora(rank, tuple(adapted), config.adapters_alive, config.lora.shares_outer)


def teacher_spec(config: RunConfig) -> ServerSpec:
    """The servers of a run's teacher, which mslime launches."""
    path = config.teacher.path
    assert path is not None, "there is nothing to launch"
    return replace(_spec(config, "teacher", config.teacher, path, path), gives_back=config.teacher_shares)


def _spec(config: RunConfig, role: Role, settings: SGLangConfig, checkpoint: Path, tokenizer: Path) -> ServerSpec:
    return ServerSpec(
        role=role,
        settings=settings,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        device=config.cluster.device,
        trainer_dtype=trainer_dtype(config.megatron, cpu=False),
        seed=config.seed,
        start_s=config.deadlines.engine_start_s,
    )
