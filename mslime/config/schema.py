"""The run configuration: one typed tree that is the truth for YAML, flags, documentation and validation.

Free of torch and of every engine. Names follow the engine that owns the thing: `megatron.*` and `sglang.*` use the
engine's own field names, and any further field of its dataclasses may be given (see `passthrough`).
Rules that span sections live in `rules`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_serializer,
    model_validator,
)

from mslime.config.adapters import adapter_runs, at_home, counts_over_a_step, entry_of, refuse_shared
from mslime.config.algorithm import AlgorithmConfig, CriticConfig
from mslime.config.base import Section
from mslime.config.choices import AUTO, Fp8Recipe, ReplayMode, Resume, SftLossOn
from mslime.config.cluster import ClusterConfig
from mslime.config.data import DataConfig
from mslime.config.engines import SGLangConfig, TeacherConfig
from mslime.config.layout import ParallelLayout
from mslime.config.lora import LoraConfig
from mslime.config.megatron import MegatronConfig
from mslime.config.observing import ObserveConfig
from mslime.config.reward import RewardConfig
from mslime.config.rollout import RolloutConfig
from mslime.config.rules import check_run
from mslime.config.serve import ServeConfig
from mslime.config.weights import WeightsConfig


def directory_name(name: str) -> str:
    """A name that is one directory inside another. Raises ValueError."""
    if not name.strip() or name in (".", "..") or not name.isprintable() or set(name) & {"/", "\\"} or len(name) > 200:
        raise ValueError("must be the name of one directory: printable, at most 200 characters, no / and no \\")
    return name


class ModelConfig(Section):
    """Which model is trained. Its architecture comes from the checkpoint's config.json, never from flags."""

    path: Path = Field(description="Hugging Face checkpoint directory (config.json, safetensors, tokenizer).")
    tokenizer_path: Path | None = Field(default=None, description="Tokenizer directory; default: the checkpoint's own.")
    reference_path: Path | None = Field(default=None, description="Reference policy for the KL term; default: `path`.")
    teacher_path: Path | None = Field(
        default=None,
        description="Teacher of on-policy distillation, of the same architecture, held by the trainer; see `teacher`.",
    )
    ignored_config_fields: tuple[str, ...] = Field(
        default=(), description="Settings of config.json that mslime does not know and that change nothing."
    )

    @property
    def tokenizer(self) -> Path:
        """Where the tokenizer is."""
        return self.tokenizer_path or self.path


class TrainConfig(Section):
    """The optimizer's side of a step."""

    task: Literal["rl", "sft"] = Field(
        default="rl", description="sft: supervised training on rows of prompt and label, or of messages."
    )
    num_steps: int = Field(
        default=100, le=10**9, ge=1, description="Steps of the run: rollouts for rl, batches for sft."
    )
    optimizer_steps_per_rollout: int = Field(
        default=1, ge=1, description="Optimizer steps that each rollout is divided into."
    )
    max_tokens_per_micro_batch: int = Field(
        default=4096, ge=1, description="Token budget of a packed micro-batch, per CP rank."
    )
    quadratic_tokens: Annotated[float, Field(gt=0)] | Literal["auto"] | None = Field(
        default="auto",
        description="Sequence length n at which attention costs as much as everything else; micro-batches are balanced "
        "by n + n^2 / this. auto: counted from config.json, about 12 x hidden size for a dense model. null: by tokens "
        "alone.",
    )
    packed: bool = Field(
        default=True, description="Pack sequences without padding (thd). False: one sequence a micro-batch."
    )
    balance_experts: bool = Field(
        default=True,
        description="With expert parallelism and routes of the rollout (replay r3): exchange sequences of about the "
        "same length between micro-batches, so that ranks wait less for each other's experts. Changes which sequences "
        "meet in a micro-batch, and no token's weight.",
    )
    lr: float = Field(default=1e-6, le=1, gt=0, description="Peak learning rate.")
    min_lr: float = Field(default=0.0, le=1, ge=0, description="Where the learning rate decays to.")
    lr_warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer steps in which the learning rate rises from 0."
    )
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the learning rate falls after the warm-up, until the last step."
    )
    weight_decay: float = Field(default=0.0, le=1, ge=0, description="AdamW's, of matrices.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of Adam's mean of gradients.")
    adam_beta2: float = Field(default=0.98, ge=0, lt=1, description="Decay of Adam's mean of their squares.")
    adam_eps: float = Field(default=1e-8, gt=0, description="Added to Adam's denominator.")
    clip_grad: float = Field(
        default=1.0, le=1e9, ge=0, description="Gradients are scaled to this norm at most; 0: never."
    )
    replay: ReplayMode = Field(
        default="r3",
        description="Routing replay: r3 uses the rollout's routes, r2 the trainer's own old-log-prob pass.",
    )
    replay_max_age: int | None = Field(
        default=None,
        ge=0,
        description="r3: rows whose routes are of weights that are more versions old are left to the trainer's own "
        "routers. None: all routes are replayed, whatever their age.",
    )
    log_prob_chunk_tokens: int = Field(
        default=1024,
        ge=1,
        description="Tokens whose logits are held in fp32 at once, where Triton is missing; else none are.",
    )
    logits_mib: float = Field(
        default=1024,
        gt=0,
        description="Most memory for the logits of a micro-batch on a GPU. Larger ones are made a block of the "
        "vocabulary at a time, and all blocks but one again in the backward pass: up to a third more work in the "
        "output layer. A block is at least 128 ids wide, so that a limit that is too small is as good as that.",
    )
    fp8: Fp8Recipe | None = Field(
        default=None,
        description="On GPUs: linear layers multiply in FP8 by Transformer Engine, with a scale for each block of 128 "
        "(blockwise) or each tensor (tensorwise). Parameters stay bfloat16. No run of mslime has used it yet.",
    )
    sft_batch_size: int = Field(default=64, ge=1, description="sft: rows of one step.")
    sft_loss_on: SftLossOn = Field(
        default="all",
        description="sft with data.messages_key: all assistant turns of a conversation, its last one alone, or each as "
        "a sequence of its own, rendered as if it were the last: for templates that drop earlier thinking.",
    )
    sft_too_long: Literal["refuse", "skip", "cut"] = Field(
        default="refuse",
        description="sft: what becomes of rows of more tokens than rollout.max_total_tokens (default: the model's "
        "positions). skip and cut are counted in data/skipped_rows and data/cut_rows.",
    )

    @property
    def logit_bytes(self) -> int:
        """`logits_mib` in bytes."""
        return int(self.logits_mib * 2**20)


class CheckpointConfig(Section):
    """Saving and resuming."""

    save_every: int = Field(
        default=20,
        ge=0,
        description="Steps between checkpoints; there is also one after the last step. 0: only that one.",
    )
    keep: int = Field(default=2, ge=1, description="Newest checkpoints kept.")
    keep_every: int = Field(
        default=0, ge=0, description="Checkpoints of multiples of this many steps are kept for ever; 0: none."
    )
    keep_best: str | None = Field(
        default=None,
        description="A metric, such as eval/NAME/accuracy: the checkpoint with its best value is kept too. Only steps "
        "that were evaluated take part, so let save_every be a multiple of observe.eval_every.",
    )
    keep_best_is: Literal["max", "min"] = Field(default="max", description="Which value of keep_best is the best.")
    hf_every: int = Field(
        default=0,
        ge=0,
        description="Steps between exports of Hugging Face checkpoints to RUN/hf_step_N, never removed; 0: none.",
    )
    resume: Resume = Field(
        default="auto",
        description="auto: from the newest checkpoint, if any; a damaged one is refused. older: from the newest that "
        "is undamaged, and the damaged ones after it are set aside. never: refuse to start where there is one.",
    )
    load: Path | None = Field(default=None, description="Start from this mslime checkpoint directory.")
    save_hf: bool = Field(default=True, description="Also export a Hugging Face checkpoint at the end.")


class DeadlineConfig(Section):
    """Seconds after which a silent part of the run is declared dead. No wait in mslime is without one."""

    engine_start_s: float = Field(default=600, le=1e9, gt=0, description="An engine loads its weights and answers.")
    engine_request_s: float = Field(default=3600, le=1e9, gt=0, description="One response is generated.")
    engine_silence_s: float = Field(
        default=300, le=1e9, gt=0,
        description="An engine that is to generate shows a sign of life: it answers a request, or a heartbeat.",
    )  # fmt: skip
    engine_control_s: float = Field(
        default=120, le=1e9, gt=0, description="An engine answers a control call: abort, pause, resume."
    )
    trainer_start_s: float = Field(
        default=1200, le=1e9, gt=0, description="All trainer ranks meet and build the model."
    )
    train_step_s: float = Field(default=3600, le=1e9, gt=0, description="All optimizer steps of one rollout.")
    weight_sync_s: float = Field(default=600, le=1e9, gt=0, description="One phase of a weight update.")
    rollout_step_s: float = Field(default=7200, le=1e9, gt=0, description="The groups of one step are complete.")
    checkpoint_s: float = Field(default=3600, le=1e9, gt=0, description="A checkpoint or an export is written or read.")
    rollout_function_s: float = Field(
        default=3600,
        le=1e9,
        gt=0,
        description="What a rollout function does between two requests to the engines: a call of a tool, for example.",
    )
    rescue_s: float = Field(
        default=300, le=1e9, gt=0, description="For the last save of a run that ends early, by a signal or an error."
    )

    def controls_within(self, seconds: float) -> DeadlineConfig:
        """The same, but an engine has so long for an answer to a control call, or of a weight update."""
        return self.model_copy(update={"engine_control_s": seconds, "weight_sync_s": seconds})


class HooksConfig(Section):
    """Functions of yours that a run calls beside its work (docs/extending.md)."""

    step: str | None = Field(
        default=None,
        description="`module:function`(StepRecord) -> metrics or None, called in the driver after every step.",
    )
    sample: str | None = Field(
        default=None,
        description="rl: `module:function`(Sample) -> metrics or None, called in the rollout service for every sample "
        "of a group that was generated and scored.",
    )


class AdapterConfig(Section):
    """One of several adapters: what differs from the run's settings, section by section."""

    name: Annotated[str, AfterValidator(directory_name)] = Field(
        description="Of the adapter, and of its directory below that of the run."
    )
    weight: float = Field(
        default=1.0, gt=0, le=1e6, description="Its part of the engines while all adapters have work, beside others'."
    )
    seed: int | None = Field(default=None, lt=2**31, ge=0, description="Default: the run's.")
    data: DataConfig = Field(default_factory=DataConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    observe: ObserveConfig = Field(default_factory=ObserveConfig)
    hooks: HooksConfig = Field(default_factory=HooksConfig)

    @classmethod
    def prepare(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The same values, if none of them is the base's."""
        refuse_shared(values)
        return values


class RunConfig(Section):
    """Everything about one run."""

    name: Annotated[str, AfterValidator(directory_name)] = Field(
        default="run", description="Of the run, and of its directory."
    )
    output_dir: Path = Field(default=Path("outputs"), description="The run writes to output_dir/name and nowhere else.")
    seed: int = Field(
        default=1234,
        lt=2**31,
        ge=0,
        description="Of the order of prompts, of sampling, and of weights that no checkpoint has.",
    )
    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    megatron: MegatronConfig = Field(default_factory=MegatronConfig)
    sglang: SGLangConfig = Field(default_factory=SGLangConfig)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    observe: ObserveConfig = Field(default_factory=ObserveConfig)
    deadlines: DeadlineConfig = Field(default_factory=DeadlineConfig)
    hooks: HooksConfig = Field(default_factory=HooksConfig)
    serve: ServeConfig = Field(default_factory=ServeConfig)
    adapters: tuple[AdapterConfig, ...] = Field(
        default=(),
        description="Several adapters on one base, each a mapping of these: sections hold what differs from the run's "
        "(docs/lora.md#several-adapters-in-one-run). On the command line --adapters.NAME.SECTION.SETTING changes one.",
    )
    _adapter_runs: tuple[RunConfig, ...] = PrivateAttr(default=())

    @property
    def adapter_runs(self) -> dict[str, RunConfig]:
        """The run of each of several adapters by name, in their order: as if it were trained alone."""
        return {run.name: at_home(run, self) for run in self._adapter_runs}

    @property
    def run_dir(self) -> Path:
        """Where this run writes."""
        return self.output_dir / self.name

    @property
    def layout(self) -> ParallelLayout:
        """The trainer's parallel layout, and the critic's."""
        return self.megatron.layout(self.cluster.trainer_ranks)

    @property
    def colocated(self) -> bool:
        """Whether engines and trainer take turns on the same GPUs."""
        return self.cluster.placement == "colocated"

    @property
    def teacher_shares(self) -> bool:
        """Whether a served teacher takes turns with the trainer on its GPUs, as engines do."""
        return self.teacher.placement == "colocated" and self.train.task == "rl"

    @property
    def taught_gpus(self) -> int:
        """GPUs of the trainer that a served teacher shares, where no engine can be."""
        return self.teacher.gpus if self.teacher_shares else 0

    @property
    def syncs_adapters(self) -> bool:
        """Whether engines are given adapters, and no weights."""
        return self.train.task == "rl" and self.lora.sync == "adapter" and (self.lora.on or bool(self.adapters))

    @property
    def transport(self) -> str:
        """`weights.transport`; where it is `auto`, what that comes to with the engines that the run starts."""
        if self.weights.transport != AUTO:
            return self.weights.transport
        engine, cluster = self.sglang, self.cluster
        if self.colocated and cluster.device == "cpu" and cluster.ray_address is None:
            return "shm"  # one process group may not hold both, and this is one machine
        return "broadcast" if engine.urls or engine.tp_size > 1 or engine.drafts else "relay"

    @property
    def steps_together(self) -> bool:
        """Whether steps of several adapters that are ready at the same time go through the model in one pass."""
        if self.lora.together is not None:
            return self.lora.together
        return self.layout.pp > 1 and not counts_over_a_step(self)

    @property
    def adapters_alive(self) -> int:
        """Versions of the adapters that an engine serves at once, at most (`syncs_adapters`): the newest, and those
        that running requests have."""
        if self.adapters:
            return sum(run.adapters_alive for run in self._adapter_runs)
        return 2 if self.rollout.pause_mode == "abort" else self.rollout.max_staleness + 2

    @property
    def compares_weights(self) -> bool:
        """Whether engines may be able to say what they hold: by what they recorded; attached ones are asked."""
        return self.syncs_adapters or self.weights.loader == "recorded" or bool(self.sglang.urls)

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return self.train.task == "rl" and self.algorithm.advantage == "gae"

    @property
    def shares_critic(self) -> bool:
        """Whether a critic takes turns with the policy on its GPUs."""
        return self.has_critic and self.critic.placement == "shared"

    @property
    def critic_ranks(self) -> int:
        """Processes, and GPUs, that a critic of its own takes beside the trainer's."""
        return self.layout.world_size if self.has_critic and not self.shares_critic else 0

    @property
    def on_stale(self) -> Literal["keep", "mask", "reroll", "drop"]:
        """`rollout.on_stale`, decided: tokens beyond the bound are kept where something corrects for their age."""
        chosen, correction = self.rollout.on_stale, self.algorithm.correction
        if chosen != "auto":
            return chosen
        return "keep" if correction.corrects and self.rollout.max_staleness > 0 else "mask"

    @property
    def spare_groups(self) -> int:
        """Groups begun beyond what the steps need, see `rollout.over_sampling`."""
        rollout = self.rollout
        if rollout.max_staleness > 0 and rollout.dynamic_filter == "none":
            return 0
        return int((rollout.over_sampling - 1.0) * rollout.groups_per_step)

    @property
    def policy_steps(self) -> int:
        """Steps of the run that train the policy: all but those in which the critic is warmed up."""
        return self.train.num_steps - (self.critic.warmup_steps if self.has_critic else 0)

    @field_serializer("adapters")
    def _whole_adapters(self, entries: tuple[AdapterConfig, ...]) -> list[dict[str, Any]]:
        return [entry_of(run, entry.weight) for run, entry in zip(self._adapter_runs, entries, strict=True)]

    @model_validator(mode="wrap")
    @classmethod
    def _resolve_adapters(cls, values: Any, handler: ModelWrapValidatorHandler[RunConfig]) -> RunConfig:
        """Rules that span sections hold for every adapter's run, and for the run's own sections where there are none:
        what all adapters override needs not be right."""
        config = handler(values)
        if not config.adapters:
            check_run(config)
        elif isinstance(values, dict):
            config._adapter_runs = adapter_runs(cast("dict[str, Any]", values), config)
        return config
