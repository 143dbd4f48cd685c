"""What a trainer rank and an SGLang server are started with, resolved from the run's sections once.

A policy and a critic are two models of one run. Each has a spec of its own, so that neither sees the other's settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mslime.config.algorithm import AlgorithmConfig
from mslime.config.base import Device, Fp8Recipe, ReplayMode
from mslime.config.dtypes import served_dtype, trainer_dtype
from mslime.config.engines import SGLangConfig
from mslime.config.layout import ParallelLayout
from mslime.config.lora import LoraConfig
from mslime.config.megatron import MegatronConfig
from mslime.config.schema import DeadlineConfig, RunConfig
from mslime.config.train import TrainConfig
from mslime.config.weights import WeightsConfig


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """How trainer ranks build a model.

    Attributes:
        checkpoint: Hugging Face directory that its architecture and weights are read from.
        layout: how it is divided over the ranks.
        megatron: settings of megatron-core.
        device: of the ranks; `auto` is CUDA where there is any.
        replay: whose routes its routers follow; `off` also for a model without routers.
        fp8: how its linear layers multiply in FP8; None: they do not.
    """

    checkpoint: Path
    layout: ParallelLayout
    megatron: MegatronConfig
    device: Device
    replay: ReplayMode = "off"
    fp8: Fp8Recipe | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(ModelSpec):
    """How trainer ranks build and train a model.

    Attributes:
        train: the optimizer's side of a step, with this model's learning rates.
        rollouts: steps of the run that train this model.
        seed: of what is drawn at random.
        threads: CPU threads of a rank.
        deadlines: of the ranks' waits for each other.
        asleep: directory for files with its state while it sleeps, where it does; None: it lies in host memory then.
    """

    train: TrainConfig
    rollouts: int
    seed: int
    threads: int
    deadlines: DeadlineConfig
    asleep: Path | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.rollouts * (self.train.optimizer_steps_per_rollout if self.train.task == "rl" else 1)


@dataclass(frozen=True, kw_only=True)
class PolicySpec(TrainingSpec):
    """How the policy is trained, and sent to the engines.

    Attributes:
        name: of the run; stands in exported checkpoints.
        algorithm: advantage, loss and correction.
        temperature: of the softmax: what the tokens were sampled with; 1 for supervised training.
        reference, teacher: checkpoints of further weights for the same model; None where none is held.
        weights: how they are sent; the directory is this run's own, and absolute.
        asked_engine_dtype: `sglang.dtype`; `config.dtypes.served_dtype` decides what `auto` is.
        lora: adapters that are trained in the place of the model; those of rank 0 are none.
        as_stored: engines hold weights as the checkpoint stores them, also where that is quantised.
    """

    name: str
    algorithm: AlgorithmConfig
    temperature: float
    reference: Path | None
    teacher: Path | None
    weights: WeightsConfig
    asked_engine_dtype: str
    as_stored: bool
    lora: LoraConfig

    @property
    def base_is_reference(self) -> bool:
        """Whether the frozen model without its adapters is the reference policy, so that no copy of it is held."""
        return self.lora.on and self.reference == self.checkpoint


@dataclass(frozen=True, kw_only=True)
class CriticSpec(TrainingSpec):
    """How a critic is trained. It routes by itself, without replay.

    Attributes:
        value_clip: `critic.value_clip`.
    """

    value_clip: float | None


def policy_spec(config: RunConfig) -> PolicySpec:
    """The policy of a run."""
    rl, model = config.train.task == "rl", config.model
    # Senders ask engines what the transport `auto` comes to, but where both take turns, settings alone say it.
    transport = config.transport if config.colocated else config.weights.transport
    sent = {"transport": transport, "directory": config.weights_directory}
    return PolicySpec(
        checkpoint=model.path,
        layout=config.layout,
        megatron=config.megatron,
        device=config.cluster.device,
        replay=config.train.replay if rl else "off",
        fp8=config.train.fp8,
        train=config.train,
        rollouts=config.policy_steps,
        seed=config.seed,
        threads=config.cluster.trainer_threads,
        deadlines=config.deadlines,
        asleep=config.asleep_directory,
        name=config.name,
        algorithm=config.algorithm,
        temperature=config.rollout.temperature if rl else 1.0,
        reference=(model.reference_path or model.path) if rl and config.algorithm.kl_coef > 0 else None,
        teacher=model.teacher_path if rl else None,
        weights=config.weights.model_copy(update=sent),
        asked_engine_dtype=config.sglang.dtype,
        lora=config.lora,
        as_stored=rl and not config.sglang.urls,
    )


def critic_spec(config: RunConfig) -> CriticSpec:
    """The critic of a run: its own checkpoint and learning rates, in the policy's layout."""
    critic = config.critic
    rates = {"lr": critic.lr, "min_lr": critic.min_lr, "lr_warmup_steps": critic.lr_warmup_steps}
    return CriticSpec(
        checkpoint=critic.path or config.model.path,
        layout=config.layout,
        megatron=config.megatron,
        device=config.cluster.device,
        fp8=config.train.fp8,
        train=config.train.model_copy(update=rates),
        rollouts=config.train.num_steps,
        seed=config.seed,
        threads=config.cluster.trainer_threads,
        deadlines=config.deadlines,
        asleep=config.asleep_directory,
        value_clip=critic.value_clip,
    )


# What an SGLang server is started with, resolved from the run's sections once: an engine of the run, or a teacher.

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

    def dtype(self, hf_config: Mapping[str, Any]) -> str:
        """The dtype that the servers hold weights in (`config.dtypes.served_dtype`); the device `auto` counts as a GPU.
        Raises ConfigError."""
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
