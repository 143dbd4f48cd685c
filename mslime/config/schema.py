"""Run configuration: one typed tree that defines YAML, flags, documentation and validation.

Free of torch and of every engine. `megatron.*` and `sglang.*` use the engine's own field names, and any further field
of its dataclasses may be given (see `passthrough`).

Settings are validated in two places. Fields and validators of a section check it alone. The function `check_SECTION` in
its module checks it against other sections, whose values it receives; `RunConfig._check` calls all of these, in order.
(`checks` validates against a checkpoint, a tokenizer and data.)
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Self, cast

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from mslime.config.algorithm import AlgorithmConfig, CriticConfig, check_algorithm, check_critic
from mslime.config.base import Seconds, Section, Task, check_choice
from mslime.config.cluster import WHOLE, ClusterConfig, PlacementClaim, RunParts, check_cluster
from mslime.config.data import DataConfig, check_data
from mslime.config.engines import SGLangConfig, TeacherConfig, check_sglang, check_teacher
from mslime.config.errors import ConfigError, UserError
from mslime.config.fp8 import check_fp8
from mslime.config.layout import ParallelLayout
from mslime.config.lora import (
    DIRECTORY,
    OWN_SECTIONS,
    SHARED,
    LoraConfig,
    check_lora,
    check_names,
    merged_entry,
    placed,
    plain_entry,
    refuse_shared,
)
from mslime.config.megatron import MegatronConfig, check_megatron
from mslime.config.output import CheckpointConfig, ObserveConfig, check_checkpoint
from mslime.config.reward import RewardConfig, check_reward
from mslime.config.rollout import FUNCTION as ATROPOS
from mslime.config.rollout import OnStale, RolloutConfig, check_rollout
from mslime.config.serve import ServeConfig
from mslime.config.train import TrainConfig, check_train
from mslime.config.transports import AUTO, choose
from mslime.config.weights import WeightsConfig, check_weights

ALONE = {"sections": "alone"}
"""Validation context in which sections are not checked against each other."""


def directory_name(name: str) -> str:
    """Validate a name for a single directory inside another. Raises ValueError."""
    readable = name.strip() and name not in (".", "..") and name.isprintable() and not set(name) & {"/", "\\"}
    if not readable or len(name.encode()) > 200:
        raise ValueError("must be the name of one directory: printable, at most 200 bytes in UTF-8, no / and no \\")
    return name


class ModelConfig(Section):
    """The trained model. Its architecture comes from the checkpoint's config.json, never from flags."""

    path: Path = Field(description="Hugging Face checkpoint directory (config.json, safetensors, tokenizer).")
    tokenizer_path: Path | None = Field(default=None, description="Tokenizer directory; default: the checkpoint's own.")
    reference_path: Path | None = Field(default=None, description="Reference policy for the KL term; default: `path`.")
    teacher_path: Path | None = Field(
        default=None,
        description="Teacher of on-policy distillation, of the same architecture, held by the trainer; see `teacher`.",
    )
    ignored_config_fields: tuple[str, ...] = Field(
        default=(), description="Unknown fields of config.json to ignore because they do not affect the model."
    )

    @field_validator("ignored_config_fields")
    @classmethod
    def _are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [name for name in names if re.fullmatch(r"[\w.-]+", name) is None]:
            raise ConfigError("model.ignored_config_fields", wrong[0], "is not a valid name of a field of config.json",
                              "name fields, for example [some_gate, other_scale]")  # fmt: skip
        return names

    @property
    def tokenizer(self) -> Path:
        """Directory of the tokenizer."""
        return self.tokenizer_path or self.path


class DeadlineConfig(Section):
    """Seconds after which a silent part of the run counts as dead. Every wait in mslime has a deadline."""

    engine_start_s: Seconds = Field(default=600, description="Time for an engine to start and load its weights.")
    engine_request_s: Seconds = Field(default=3600, description="Time to generate one response.")
    engine_silence_s: Seconds = Field(
        default=300,
        description="Time without any reply, to requests or heartbeats, from an engine that should generate.",
    )
    engine_control_s: Seconds = Field(
        default=120, description="Time for an engine to reply to a control call: abort, pause, resume."
    )
    trainer_start_s: Seconds = Field(
        default=1200, description="Time for all trainer ranks to connect and build the model."
    )
    train_step_s: Seconds = Field(default=3600, description="Time for all optimizer steps of one rollout.")
    weight_sync_s: Seconds = Field(default=600, description="Time for one phase of a weight update.")
    rollout_step_s: Seconds = Field(default=7200, description="Time to complete the groups of one step.")
    checkpoint_s: Seconds = Field(default=3600, description="Time to write or read a checkpoint or an export.")
    rollout_function_s: Seconds = Field(
        default=3600,
        description="Time of a rollout function between two requests to the engines, for example for a tool call.",
    )
    rescue_s: Seconds = Field(
        default=300, description="Time for the last save of a run that ends early, by a signal or an error."
    )

    def controls_within(self, seconds: float) -> DeadlineConfig:
        """The same with the deadline `seconds` for an engine's replies to control calls and weight updates."""
        return self.model_copy(update={"engine_control_s": seconds, "weight_sync_s": seconds})


class HooksConfig(Section):
    """Your functions that a run calls between its own work (docs/extending.md)."""

    step: str | None = Field(
        default=None,
        description="`module:function`(StepRecord) -> metrics or None, called in the driver after every step.",
    )
    sample: str | None = Field(
        default=None,
        description="rl: `module:function`(Sample) -> metrics or None, called in the rollout service for every sample "
        "of a group that was generated and scored.",
    )


def check_hooks(hooks: HooksConfig, *, task: Task) -> None:
    """Reject hooks that are not function names or would never be called. Raises ConfigError."""
    for setting, named in (("hooks.step", hooks.step), ("hooks.sample", hooks.sample)):
        if named is not None:
            check_choice(setting, named, ())
    if hooks.sample is not None and task == "sft":
        raise ConfigError("hooks.sample", hooks.sample, "supervised training generates no samples",
                          "use hooks.step, or remove it")  # fmt: skip


class AdapterConfig(Section):
    """One of several adapters: its differences from the run's settings, section by section."""

    name: Annotated[str, AfterValidator(directory_name)] = Field(
        description="Name of the adapter, and of its directory below the run's."
    )
    weight: float = Field(
        default=1.0, gt=0, le=1e6, description="Relative share of the engines while all adapters have work."
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
        """Check that an entry has no settings of the base."""
        refuse_shared(values)
        return values


class RunConfig(Section):
    """All settings of one run."""

    name: Annotated[str, AfterValidator(directory_name)] = Field(
        default="run", description="Name of the run, and of its directory."
    )
    output_dir: Path = Field(default=Path("outputs"), description="The run writes to output_dir/name and nowhere else.")
    seed: int = Field(
        default=1234,
        lt=2**31,
        ge=0,
        description="Seed of the order of prompts, of sampling, and of weights that are not in a checkpoint.",
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
        description="Several adapters on one base; each entry holds its differences from the run's settings "
        "(docs/lora.md#several-adapters-in-one-run). Flag: --adapters.NAME.SECTION.SETTING.",
    )
    _adapter_runs: tuple[RunConfig, ...] = PrivateAttr(default=())

    @property
    def adapter_runs(self) -> dict[str, RunConfig]:
        """Runs of several adapters by name, in their order, as if each were trained alone."""
        return {run.name: self._with_base(run) for run in self._adapter_runs}

    @property
    def run_dir(self) -> Path:
        """Output directory of this run."""
        return self.output_dir / self.name

    @property
    def layout(self) -> ParallelLayout:
        """The trainer's parallel layout, and the critic's."""
        return self.megatron.layout(self.cluster.trainer_ranks)

    @property
    def colocated(self) -> bool:
        """Whether engines and trainer take turns on the same GPUs."""
        return self.cluster.colocated

    @property
    def teacher_shares(self) -> bool:
        """Whether a served teacher takes turns with the trainer on its GPUs, as engines do."""
        return self.teacher.placement == "colocated" and self.train.task == "rl"

    @property
    def teacher_gpus(self) -> int:
        """GPUs of the trainer that a served teacher shares, which no engine can use."""
        return self.teacher.gpus if self.teacher_shares else 0

    @property
    def syncs_adapters(self) -> bool:
        """Whether engines receive adapters instead of weights."""
        return self.train.task == "rl" and self.lora.sync == "adapter" and (self.lora.on or bool(self.adapters))

    @property
    def transport(self) -> str:
        """`weights.transport`, with `auto` resolved for the engines that the run starts."""
        if self.weights.transport != AUTO:
            return self.weights.transport
        engine, cluster = self.sglang, self.cluster
        share_cpus = self.colocated and cluster.device == "cpu" and cluster.ray_address is None
        return choose(one_rank_each=not (engine.urls or engine.tp_size > 1 or engine.drafts), share_cpus=share_cpus)

    @property
    def steps_together(self) -> bool:
        """Whether concurrent steps of several adapters share one pass through the model."""
        if self.lora.together is not None:
            return self.lora.together
        return self.layout.pp > 1 and not self.megatron.counts_over_a_step

    @property
    def adapters_alive(self) -> int:
        """Most adapter versions that an engine serves at once (`syncs_adapters`): the newest, and those of running
        requests.
        """
        if self.adapters:
            return sum(run.adapters_alive for run in self._adapter_runs)
        return 2 if self.rollout.pause_mode == "abort" else self.rollout.max_staleness + 2

    @property
    def compares_weights(self) -> bool:
        """Whether engines may return checksums of their weights, from recorded copies; attached ones are queried."""
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
        """Processes, and GPUs, of a separate critic beside the trainer's."""
        return self.layout.world_size if self.has_critic and not self.shares_critic else 0

    @property
    def on_stale(self) -> OnStale:
        """`rollout.on_stale`, decided: tokens beyond the bound are kept where something corrects for their age."""
        chosen, correction = self.rollout.on_stale, self.algorithm.correction
        if chosen != "auto":
            return chosen
        return "keep" if correction.corrects and self.rollout.max_staleness > 0 else "mask"

    @property
    def policy_steps(self) -> int:
        """Steps of the run that train the policy: all except the critic's warm-up."""
        return self.train.num_steps - (self.critic.warmup_steps if self.has_critic else 0)

    @property
    def weights_directory(self) -> Path:
        """Directory for files of weights and adapters of this run: absolute, because engines read it too."""
        given = self.weights.directory
        return (given / self.name if given is not None else self.run_dir / "weights").absolute()

    @property
    def offload_directory(self) -> Path | None:
        """Directory for files of an offloaded trainer's state; None if the state is kept in host memory. The device
        `auto` counts as GPUs.
        """
        cluster = self.cluster
        kept_in = (
            cluster.offload_to if cluster.offload_to != "auto" else "disk" if cluster.device == "cpu" else "memory"
        )
        return (cluster.offload_directory or self.run_dir).absolute() if kept_in == "disk" else None

    def claims(self, parts: RunParts = WHOLE) -> list[PlacementClaim]:
        """Claims of the run: trainer ranks, and a critic, engines and teachers that mslime launches."""
        generates = self.train.task == "rl" and parts.engines
        launched = self.sglang.num_engines if generates and not self.sglang.urls else 0
        shared = launched and parts.trainers and self.colocated
        launched, trainer = (0, "trainer and engines") if shared else (launched, "trainer")
        teachers = self.teacher.launched if generates and not (shared and self.teacher_shares) else 0
        wanted = [
            PlacementClaim(trainer, self.layout.world_size if parts.trainers else 0, 1),
            PlacementClaim("critic", self.critic_ranks if parts.trainers else 0, 1),
            PlacementClaim("engines", launched * self.sglang.parts, self.sglang.gpus_a_machine),
            PlacementClaim("teachers", teachers * self.teacher.nnodes, self.teacher.gpus_a_machine),
        ]
        return [claim for claim in wanted if claim.count]

    def refuse_several(self, command: str) -> None:
        """Raise ConfigError if a command needs one adapter, and the run has several."""
        if names := [entry.name for entry in self.adapters]:
            raise ConfigError(
                "adapters", ", ".join(names), f"{command} supports one adapter only",
                f"pass the adapter's own file, which a run writes: {self.run_dir / DIRECTORY / names[0]}/config.yaml",
            )  # fmt: skip

    @field_serializer("adapters")
    def _whole_adapters(self, entries: tuple[AdapterConfig, ...]) -> list[dict[str, Any]]:
        return [run._as_entry(entry.weight) for run, entry in zip(self._adapter_runs, entries, strict=True)]

    @model_validator(mode="wrap")
    @classmethod
    def _resolve(cls, values: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Rules that span sections hold for every adapter's run, and for the run's own sections if there are none:
        values that all adapters override need not be valid."""
        config = handler(values)
        if info.context is ALONE:
            return config
        if not config.adapters:
            config._check()
        elif isinstance(values, dict):
            config._adapter_runs = config._resolve_adapters(cast("dict[str, Any]", values))
        return config

    def _check(self) -> None:
        """Check sections against each other. Raises ConfigError for the first broken rule."""
        task, cluster, layout, colocated = self.train.task, self.cluster, self.layout, self.colocated
        adapters, ranks = self.syncs_adapters, layout.world_size
        check_cluster(cluster, task=task)
        check_teacher(
            self.teacher, self.sglang, cluster, self.rollout,
            held=self.model.teacher_path, coefficient=self.algorithm.opd_coef, ranks=ranks,
        )  # fmt: skip
        check_lora(
            self.lora, self.sglang, self.megatron, syncs_adapters=adapters, pause_mode=self.rollout.pause_mode,
            transport=self.weights.transport, colocated=colocated,
        )  # fmt: skip
        check_weights(
            self.weights, self.sglang, cluster, self.claims(),
            task=task, ranks=ranks, transport=self.transport, compares=self.compares_weights,
        )  # fmt: skip
        check_sglang(
            self.sglang, cluster, self.rollout, ranks=ranks, teacher_gpus=self.teacher_gpus, syncs_adapters=adapters
        )
        check_megatron(self.megatron, cluster, layout, self.train.replay, has_critic=self.has_critic)
        check_fp8(
            self.train.fp8, cluster.device, self.megatron.params_dtype, adapters=self.lora.on, colocated=colocated
        )
        check_rollout(
            self.rollout, self.algorithm, self.data, self.reward,
            task=task, servers=self.sglang.servers, colocated=colocated,
        )  # fmt: skip
        check_algorithm(self.algorithm)
        check_critic(self.critic, self.algorithm, self.train, trained=self.has_critic)
        check_reward(self.reward, max_response_tokens=self.rollout.max_response_tokens)
        check_train(self.train, policy_steps=self.policy_steps, groups_per_step=self.rollout.groups_per_step)
        check_data(self.data, self.train, own_prompts=self.rollout.function == ATROPOS)
        sets = [s.name for s in self.data.eval_sets]
        check_checkpoint(self.checkpoint, sets=sets, task=task, eval_every=self.observe.eval_every)
        check_hooks(self.hooks, task=task)

    def _resolve_adapters(self, values: dict[str, Any]) -> tuple[RunConfig, ...]:
        """Runs of all entries of `adapters`, in their order.

        Args:
            values: given for this run, before defaults.

        Raises:
            ConfigError: an entry has settings of the run, or cannot be trained beside others.
        """
        check_names([entry.name for entry in self.adapters])
        self._check_shared()
        runs = tuple(self._run_of(values, plain_entry(entry)) for entry in values["adapters"])
        for run in runs:
            self._check_adapter(run)
        return runs

    def _run_of(self, values: dict[str, Any], entry: dict[str, Any]) -> RunConfig:
        """One entry merged over the run's values."""
        name = str(entry["name"])
        try:
            return type(self).model_validate(merged_entry(values, entry, self.run_dir / DIRECTORY))
        except ValidationError as error:
            first = error.errors()[0]
            cause, path = first.get("ctx", {}).get("error"), ".".join(map(str, first["loc"]))
            if isinstance(cause, UserError):
                raise placed(name, cause, entry) from None
            raise ConfigError(f"adapters.{name}.{path}", first["input"], first["msg"], "correct the value") from None
        except UserError as error:
            raise placed(name, error, entry) from None

    def _with_base(self, run: RunConfig) -> RunConfig:
        """An adapter's run with the present settings of the base, and its directory below this run's."""
        shared = [name for name in RunConfig.model_fields if name not in (*OWN_SECTIONS, "name", "seed", "adapters")]
        changed = {name: getattr(self, name) for name in shared}
        changed["output_dir"] = self.run_dir / DIRECTORY
        if (directory := self.weights.directory) is not None:
            changed["weights"] = self.weights.model_copy(update={"directory": directory / self.name})
        return run.model_copy(update=changed)

    def _as_entry(self, weight: float) -> dict[str, Any]:
        """An adapter's run as a complete YAML entry, which resolves to the same run."""
        whole = self.as_dict()
        shared = [setting.split(".") for setting in SHARED]
        sections = {
            section: {k: v for k, v in whole[section].items() if [section, k] not in shared} for section in OWN_SECTIONS
        }
        return {"name": self.name, "weight": weight, "seed": self.seed, **sections}

    def _check_shared(self) -> None:
        """Reject settings that runs of several adapters do not support. Raises ConfigError."""
        refused: tuple[tuple[bool, str, object, str, str], ...] = (
            (self.train.task != "rl", "train.task", self.train.task, "supervised training has one adapter",
             "train each adapter in a separate run"),
            (self.lora.sync != "adapter", "lora.sync", self.lora.sync,
             "several adapters need engines that receive adapters alone",
             "set lora.sync: adapter"),
            (bool(self.lora.together) and self.megatron.counts_over_a_step, "lora.together", True,
             "routers count tokens over a whole pass (moe_router_load_balancing_type: global_aux_loss)", "remove it"),
            (self.colocated, "cluster.placement", "colocated", "offloading is not tested with adapters",
             "set separate"),
            (self.rollout.managers > 1, "rollout.managers", self.rollout.managers,
             "one rollout service uses the engines for all adapters", "remove it"),
            (self.teacher.path is not None or bool(self.teacher.urls), "teacher", "a served teacher",
             "not tested with several adapters",
             "remove the section, or train this adapter in a separate run"),
            (self.model.teacher_path is not None, "model.teacher_path", str(self.model.teacher_path),
             "a teacher is not tested with several adapters", "remove it, or train this adapter in a separate run"),
            (self.model.reference_path is not None, "model.reference_path", str(self.model.reference_path),
             "the reference of several adapters is the base without them", "remove it"),
            (self.observe.wandb_project is not None, "observe.wandb_project", self.observe.wandb_project,
             "one process logs one run to Weights & Biases", "remove it, and set observe.tensorboard: true"),
        )  # fmt: skip
        for applies, field, value, rule, hint in refused:
            if applies:
                raise ConfigError(field, value, f"{rule} (adapters)", hint)

    def _check_adapter(self, run: RunConfig) -> None:
        """Reject settings that one of several adapters does not support. Raises ConfigError."""
        at = f"adapters.{run.name}"
        if run.has_critic:
            raise ConfigError(f"{at}.algorithm.advantage", "gae", "a critic needs a separate run",
                              "choose another advantage")  # fmt: skip
        if run.rollout.function == "atropos":
            raise ConfigError(f"{at}.rollout.function", "atropos", "Atropos' environments are not tested with several "
                              "adapters", "train this adapter in a separate run")  # fmt: skip
        if run.rollout.server.port and len(self.adapters) > 1:
            raise ConfigError(f"{at}: rollout.server.port", run.rollout.server.port, "every adapter has its own server "
                              "on its own port", "remove it: free ports are used")  # fmt: skip
        if run.observe.wandb_project is not None:
            raise ConfigError(f"{at}.observe.wandb_project", run.observe.wandb_project, "one process logs one run to "
                              "Weights & Biases", "remove it, and set observe.tensorboard: true")  # fmt: skip
        if run.checkpoint.load is not None and self.checkpoint.load is not None:
            same = run.checkpoint.load == self.checkpoint.load
            if same and len(self.adapters) > 1:
                raise ConfigError("checkpoint.load", str(self.checkpoint.load), "all adapters would start from one "
                                  "checkpoint", "set it in the entry of one adapter")  # fmt: skip
