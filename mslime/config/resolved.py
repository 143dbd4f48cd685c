"""Start parameters of trainer ranks and SGLang servers, resolved from the run's sections once.

A policy and a critic are two models of one run. Each has its own spec and does not see the other's settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mslime.config.algorithm import AlgorithmConfig
from mslime.config.base import Device, Fp8Recipe, ReplayMode
from mslime.config.engines import SGLangConfig
from mslime.config.layout import ParallelLayout
from mslime.config.lora import LoraConfig
from mslime.config.megatron import MegatronConfig
from mslime.config.model_facts import served_dtype, trainer_dtype
from mslime.config.schema import DeadlineConfig, RunConfig
from mslime.config.train import TrainConfig
from mslime.config.weights import WeightsConfig


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Parameters for building a model on trainer ranks.

    Attributes:
        checkpoint: Hugging Face directory that its architecture and weights are read from.
        layout: of the model over the ranks.
        megatron: settings of megatron-core.
        device: of the ranks; `auto` is CUDA if there is any.
        replay: routes that its routers follow; `off` also for a model without routers.
        fp8: recipe of its linear layers; None: no FP8.
    """

    checkpoint: Path
    layout: ParallelLayout
    megatron: MegatronConfig
    device: Device
    replay: ReplayMode = "off"
    fp8: Fp8Recipe | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(ModelSpec):
    """Parameters for building and training a model on trainer ranks.

    Attributes:
        train: the optimizer's side of a step, with this model's learning rates.
        rollouts: steps of the run that train this model.
        seed: of random numbers.
        threads: CPU threads of a rank.
        deadlines: of the ranks' waits for each other.
        offload_directory: directory for files with its offloaded state; None: the state is kept in host memory.
    """

    train: TrainConfig
    rollouts: int
    seed: int
    threads: int
    deadlines: DeadlineConfig
    offload_directory: Path | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.rollouts * (self.train.optimizer_steps_per_rollout if self.train.task == "rl" else 1)


@dataclass(frozen=True, kw_only=True)
class PolicySpec(TrainingSpec):
    """Parameters for training the policy and sending it to the engines.

    Attributes:
        name: of the run, for exported checkpoints.
        algorithm: advantage, loss and correction.
        temperature: of the softmax, as in sampling; 1 for supervised training.
        reference, teacher: checkpoints of further weights for the same model; None without one.
        weights: settings of the sync; the directory is absolute and belongs to this run only.
        asked_engine_dtype: `sglang.dtype`; `config.model_facts.served_dtype` resolves `auto`.
        lora: adapters that are trained instead of the model; rank 0 means none.
        as_stored: engines hold weights as the checkpoint stores them, quantised or not.
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
        """Whether the frozen model without its adapters is the reference policy, which saves a copy of it."""
        return self.lora.on and self.reference == self.checkpoint


@dataclass(frozen=True, kw_only=True)
class CriticSpec(TrainingSpec):
    """Parameters for training a critic. It uses its own router, without replay.

    Attributes:
        value_clip: `critic.value_clip`.
    """

    value_clip: float | None


def policy_spec(config: RunConfig) -> PolicySpec:
    """Spec of a run's policy."""
    rl, model = config.train.task == "rl", config.model
    # Senders resolve the transport `auto` by querying the engines; in colocated runs the settings decide.
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
        offload_directory=config.offload_directory,
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
    """Spec of a run's critic: its own checkpoint and learning rates, in the policy's layout."""
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
        offload_directory=config.offload_directory,
        value_clip=critic.value_clip,
    )


# Start parameters of an SGLang server, resolved from the run's sections once: an engine of the run, or a teacher.

Role = Literal["engine", "teacher"]
"""Role of a server: generation with the policy's weights, or scoring with a teacher's."""


@dataclass(frozen=True)
class ServedLora:
    """Adapters that a server reserves memory for.

    Attributes:
        rank: of every one.
        modules: name endings of the modules that have one.
        alive: most adapters served at once.
        shares_outer: experts of a layer share factors in them (`lora.experts`).
    """

    rank: int
    modules: tuple[str, ...]
    alive: int
    shares_outer: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """Parameters for starting the servers of one role.

    Attributes:
        settings: `sglang`, or `teacher`.
        checkpoint, tokenizer: directories that they read.
        device: of the servers, resolved: not `auto`.
        trainer_dtype: of the parameters that a trainer on a GPU sends to engines.
        seed: of the run; server i draws from `seed + i`.
        start_s: deadline of a server's start, in seconds.
        mask_tokens: most ids of a sampling mask that they return; None: SGLang's default.
        recorded: they load buckets of weights by recorded copies.
        gives_back: they release their memory while a trainer works on their GPUs; a teacher then keeps its weights in
            host memory, because they are not sent again.
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
        """The dtype that the servers hold weights in (`served_dtype`); the device `auto` counts as a GPU. Raises
        ConfigError."""
        return served_dtype(
            self.settings.dtype, hf_config, self.checkpoint, self.trainer_dtype,
            cpu=self.device == "cpu", trained=self.role == "engine",
        )  # fmt: skip


def engine_spec(config: RunConfig, adapted: Sequence[str] = ()) -> ServerSpec:
    """Spec of a run's engines.

    Args:
        adapted: name endings of modules with an adapter, if engines receive adapters.
    """
    model = config.model
    spec = _spec(config, "engine", config.sglang, model.path, model.tokenizer)
    # If the last tokens of a draw have equal probabilities, SGLang's GPU kernels keep all of them, even beyond top-k.
    mask_tokens = 2 * config.rollout.top_k if config.rollout.truncated else None
    recorded = config.weights.loader == "recorded"
    return replace(
        spec, mask_tokens=mask_tokens, recorded=recorded, gives_back=config.colocated, lora=served_lora(config, adapted)
    )


def served_lora(config: RunConfig, adapted: Sequence[str]) -> ServedLora | None:
    """Adapters for which engines are configured; None if engines receive weights.

    Args:
        adapted: name endings of modules with an adapter.
    """
    rank = max((run.lora.rank for run in config.adapter_runs.values()), default=config.lora.rank)
    if not adapted:
        return None
    return ServedLora(rank, tuple(adapted), config.adapters_alive, config.lora.shares_outer)


def teacher_spec(config: RunConfig) -> ServerSpec:
    """Spec of the servers that mslime launches for a run's teacher."""
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
