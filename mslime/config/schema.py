"""The run configuration: one typed tree that is the truth for YAML, flags, documentation and validation.

Free of torch and of every engine. Names follow the engine that owns the thing: `megatron.*` and `sglang.*` use the
engine's own field names, and any further field of its dataclasses may be given (see `passthrough`).
Rules that span sections live in `rules`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from mslime.config.algorithm import AlgorithmConfig, CriticConfig
from mslime.config.base import Section
from mslime.config.choices import (
    TRANSPORT_NAMES,
    Fp8Recipe,
    ReplayMode,
    Resume,
    SftLossOn,
    Verify,
    check_choice,
)
from mslime.config.cluster import ClusterConfig
from mslime.config.engines import SGLangConfig, TeacherConfig
from mslime.config.layout import ParallelLayout
from mslime.config.lora import LoraConfig
from mslime.config.megatron import MegatronConfig
from mslime.config.observing import ObserveConfig
from mslime.config.reward import RewardConfig, ScoringConfig
from mslime.config.rollout import RolloutConfig
from mslime.config.rules import check_run


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


class EvalSetConfig(Section):
    """One held-out set."""

    name: str = Field(description="Its metrics are eval/NAME/...: letters, digits and _ . @ + -.")
    path: str = Field(description="JSONL or parquet, optionally sliced: `file@[0:200]`.")
    samples_per_prompt: int = Field(
        default=1, ge=1, description="n: responses per prompt; pass@k is reported for k <= n."
    )
    temperature: float = Field(default=0.0, le=1000, ge=0, description="Of sampling; 0 is greedy.")
    max_response_tokens: int | None = Field(default=None, ge=1, description="Default: rollout.max_response_tokens.")
    reward: ScoringConfig | None = Field(
        default=None, description="How this set is scored; default: as in training, without penalties."
    )


class DataConfig(Section):
    """Prompts in, in which order, and how they become tokens."""

    prompts: list[str] = Field(
        default_factory=list, description="JSONL or parquet files, each optionally sliced: `file@[a:b]`."
    )
    source: str | None = Field(
        default=None,
        description="rl: `module:function`(data, seed) -> an object that is iterated over for prompts, instead of the "
        "files (docs/extending.md).",
    )
    prompt_key: str = Field(default="prompt", description="A string, or a list of chat messages.")
    label_key: str | None = Field(default="label", description="Handed to the reward; null when there is none.")
    messages_key: str | None = Field(
        default=None,
        description="sft: key of a list of {role, content} messages, rendered with the chat template; the assistant's "
        "turns are trained. Stands in for prompt_key and label_key.",
    )
    tools_key: str | None = Field(
        default=None,
        description="Key of a list of tool definitions, or of one written as JSON, handed to the chat template and to "
        "rollout functions; null: none.",
    )
    metadata_key: str | None = Field(
        default=None, description="Key of an object that rewards and filters get with the sample; null: none."
    )
    apply_chat_template: bool = Field(
        default=False,
        description="Render prompts with the tokenizer's chat template; a plain string becomes a user's message.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Handed to the template, for example {enable_thinking: false}."
    )
    shuffle: bool = Field(
        default=True,
        description="Draw rows in an order that follows from the seed, anew in each pass; else in the files' order.",
    )
    max_prompt_tokens: int | None = Field(
        default=None, ge=1, description="Longer prompts are skipped, and counted in data/skipped_rows."
    )
    eval_sets: list[EvalSetConfig] = Field(
        default_factory=list[EvalSetConfig], description="Held-out sets, each a mapping of these."
    )


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
        "output layer.",
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


class WeightsConfig(Section):
    """Trainer to engine."""

    bucket_mib: float = Field(
        default=512, gt=0, description="Size of a bucket of the weight sync; two are held at once."
    )
    senders: int = Field(
        default=8,
        ge=1,
        description="Trainer ranks that send, at most. A stage has one for every expert-parallel rank, or block, "
        "and at least one. Every engine GPU holds a connection to each.",
    )
    verify: Verify = Field(
        default="probe",
        description="What is checked after a sync. first: every bit of what engines hold in the first sync, and in "
        "the second, which is the first to use what weights.loader recorded. probe: the same, where an engine can say "
        "what it holds, and after each sync what engines and trainer say of a fixed text: log-probs, and routes with "
        "train.replay r3, of engines that kept no requests through their pause (rollout.pause_mode). always: bits and "
        "text in each.",
    )
    probe_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Nats by which the log-probs of half of the fixed text's tokens may be off. Default: 0.0005 where "
        "trainer and engines hold float32, 0.5 where engines hold quantised weights, else 0.25.",
    )
    loader: Literal["recorded", "model"] = Field(
        default="recorded",
        description="How engines that mslime starts load a bucket. recorded: by the copies that the model's own loader "
        "made of it the first time, wherever it made copies only. model: by that loader each time.",
    )
    transport: str = Field(
        default="broadcast",
        description="How buckets reach the engines: broadcast; relay, to one GPU of each engine from each "
        "sender, all at once, which passes them on; shm, through memory that a sender shares with engines "
        "on its machine; disk, through files in weights.directory; delta, of which only what changed goes through such "
        "files; or your own as module:function.",
    )
    directory: Path | None = Field(
        default=None,
        description="disk and delta: senders write weights to DIRECTORY/NAME of the run, on a file system that trainer "
        "and engines share, and that holds all weights twice. None: to RUN/weights.",
    )

    @model_validator(mode="after")
    def _check_names(self) -> WeightsConfig:
        check_choice("weights.transport", self.transport, TRANSPORT_NAMES)
        return self


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

    engine_start_s: float = Field(default=600, gt=0, description="An engine loads its weights and answers.")
    engine_request_s: float = Field(default=3600, gt=0, description="One response is generated.")
    engine_silence_s: float = Field(
        default=300, gt=0,
        description="An engine that is to generate shows a sign of life: it answers a request, or a heartbeat.",
    )  # fmt: skip
    engine_control_s: float = Field(
        default=120, gt=0, description="An engine answers a control call: abort, pause, resume."
    )
    trainer_start_s: float = Field(default=1200, gt=0, description="All trainer ranks meet and build the model.")
    train_step_s: float = Field(default=3600, gt=0, description="All optimizer steps of one rollout.")
    weight_sync_s: float = Field(default=600, gt=0, description="One phase of a weight update.")
    rollout_step_s: float = Field(default=7200, gt=0, description="The groups of one step are complete.")
    checkpoint_s: float = Field(default=3600, gt=0, description="A checkpoint or an export is written or read.")
    rollout_function_s: float = Field(
        default=3600,
        gt=0,
        description="What a rollout function does between two requests to the engines: a call of a tool, for example.",
    )
    rescue_s: float = Field(
        default=300, gt=0, description="For the last save of a run that ends early, by a signal or an error."
    )


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
    def syncs_adapters(self) -> bool:
        """Whether engines are given adapters, and no weights."""
        return self.train.task == "rl" and self.lora.on and self.lora.sync == "adapter"

    @property
    def adapters_alive(self) -> int:
        """Versions of the adapters that an engine serves at once, at most (`syncs_adapters`): the newest, and those
        that running requests have."""
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
    def critic_ranks(self) -> int:
        """Processes, and GPUs, that a critic of its own takes beside the trainer's."""
        return self.layout.world_size if self.has_critic and self.critic.placement == "separate" else 0

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

    @model_validator(mode="after")
    def _cross_section_rules(self) -> RunConfig:
        check_run(self)
        return self
