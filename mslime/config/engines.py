"""Settings of SGLang servers: those that generate, and those of a teacher, which only score; the rules about teachers.

A teacher for on-policy distillation can also be held by the trainer's own ranks (`model.teacher_path`).
docs/algorithms.md says which to take.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from mslime.config.base import EngineSection
from mslime.config.choices import KVTransfer, Placement, Rejoin
from mslime.config.errors import ConfigError
from mslime.config.keys import EngineKeys, Secret, read_secret

if TYPE_CHECKING:
    from mslime.config.schema import RunConfig

MASK_LIMIT = 4096
"""Most ids of a sampling mask that an SGLang server returns, unless it is told otherwise (sampling_mask_max_tokens)."""

SGLANG_RESERVED: dict[str, str] = {
    "model_path": "use model.path",
    "tokenizer_path": "use model.tokenizer_path",
    "host": "engines are launched and found by mslime",
    "port": "engines are launched and found by mslime",
    "device": "use cluster.device",
    "enable_return_routed_experts": "it follows train.replay",
    "skip_server_warmup": "the capability handshake is the warm-up",
    "served_model_name": "by this name mslime knows its own servers from others",
    "api_key": "use api_key of this section itself, which is kept out of command lines and logs",
    "admin_api_key": "use admin_api_key of this section itself, which is kept out of command lines and logs",
    "weight_version": "mslime counts and stamps the versions",
    "delete_ckpt_after_loading": "trainer ranks read the same checkpoint",
    "checkpoint_engine_wait_weights_before_ready": "weights are sent to engines that are ready",
    "tokenizer_worker_num": "with several tokenizer processes the server asks nobody for a key",
    "node_rank": "mslime numbers the machines of an engine (nnodes)",
    "dist_init_addr": "mslime tells the machines of an engine (nnodes) where they meet",
    "custom_sigquit_handler": "mslime ends its servers itself, and leaves none behind",
    "load_publish_endpoint": "mslime asks engines for their load itself, and no port of theirs is open to others",
    "use_ray": "mslime places its servers itself",
    "grpc_mode": "engines are spoken to over HTTP",
    "smg_grpc_mode": "engines are spoken to over HTTP",
    "fastapi_root_path": "engines are spoken to at the root of their URL",
    "ssl_keyfile": "launched engines are spoken to over plain HTTP; run them yourself behind TLS and give urls",
    "ssl_certfile": "launched engines are spoken to over plain HTTP; run them yourself behind TLS and give urls",
    "ssl_keyfile_password": "launched engines are spoken to over plain HTTP",
    "is_embedding": "engines must generate",
    "encoder_only": "engines must generate",
    "disaggregation_mode": "use sglang.pairs: mslime starts the two halves of a pair together",
    "disaggregation_transfer_backend": "use sglang.pairs",
    "disaggregation_bootstrap_port": "mslime picks a free one for each pair (sglang.pairs)",
    "disaggregation_decode_retraction_backup": "a request that is put back has no routes; it is sampled anew from what "
    "it had",
    "enable_pd_role_switch": "a pair stays one (sglang.pairs)",
    "allow_auto_truncate": "a prompt that was cut in silence would be trained on as if it had been read",
    "preferred_sampling_params": "sampling is set in rollout, so that the log-probs are those of what was drawn",
    "enable_watermark": "a watermark draws from another distribution than the one whose log-probs are reported",
}

SGLANG_TESTED = frozenset(
    {
        "attention_backend",
        "disable_radix_cache",
        "enable_deterministic_inference",
        "enable_memory_saver",
        "enable_weights_cpu_backup",
        "random_seed",
        "sampling_mask_max_tokens",
    }
)


class SGLangConfig(EngineSection):
    """The generation engines, under SGLang's own names."""

    engine: ClassVar[str] = "sglang"
    reserved: ClassVar[dict[str, str]] = SGLANG_RESERVED
    tested: ClassVar[frozenset[str]] = SGLANG_TESTED

    num_engines: int = Field(default=1, ge=1, le=65536, description="Servers to launch (ignored when `urls` is given).")
    restarts: int = Field(
        default=3, ge=0,
        description="How often in a row a launched engine that died is started again, beside the run; it takes part "
        "from the next weight sync on, and after ten syncs is counted anew. Without another one, the run waits.",
    )  # fmt: skip
    rejoin: Rejoin = Field(
        default="sync",
        description="When an engine that is back, or new, gets weights. sync: in the next weight sync. peer: at once, "
        "of an engine that serves, where it was started alike, so that it serves before that sync, too.",
    )
    urls: list[str] = Field(default_factory=list, description="Attach to these running servers instead of launching.")
    api_key: Secret | None = Field(
        default=None,
        description="Key of the servers: env:NAME, file:PATH, or the key itself. Servers that mslime launches get a "
        "random one for each run unless it is given; attached ones are asked with this one.",
    )
    admin_api_key: Secret | None = Field(
        default=None,
        description="Key of the servers' control endpoints (weights, pauses), where it is not api_key; the same forms.",
    )
    tp_size: int = Field(default=1, ge=1, description="GPUs of one engine.")
    nnodes: int = Field(
        default=1,
        ge=1,
        description="Machines that one launched engine spans, each with an equal share of its GPUs. More than one "
        "where an engine is larger than a machine.",
    )
    pairs: KVTransfer | None = Field(
        default=None,
        description="Launch each engine as a pair of servers, one that prefills and one that decodes, of tp_size GPUs "
        "each; and by what SGLang moves a request's cache from one to the other. null: one server does both.",
    )
    ep_size: int = Field(default=1, ge=1, description="GPUs of an engine that its experts are divided over.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Of the engines' weights. auto: float32 on a CPU; on a GPU the checkpoint's bfloat16, and for a "
        "float32 checkpoint megatron.params_dtype (bfloat16 by default). Never float16.",
    )
    mem_fraction_static: float | None = Field(
        default=None, gt=0, lt=1, description="Share of a GPU's memory for weights and cache; null: SGLang decides."
    )
    max_total_tokens: int | None = Field(
        default=None, ge=1, description="Tokens in an engine's cache; null: what memory allows (65,536 on a CPU)."
    )
    max_running_requests: int | None = Field(
        default=None, ge=1, description="Requests that an engine decodes at once; null: SGLang decides."
    )
    extra: dict[str, Any] = Field(
        default_factory=dict, description="Any other SGLang ServerArgs field; may also be given beside these."
    )

    def keys(self) -> EngineKeys | None:
        """The servers' keys as configured; None when nothing is. Raises ConfigError when they cannot be found."""
        if self.api_key is None and self.admin_api_key is None:
            return None
        name = self.section or self.engine
        api, admin = (
            read_secret(setting, f"{name}.{key}") if setting is not None else ""
            for key, setting in (("api_key", self.api_key), ("admin_api_key", self.admin_api_key))
        )
        return EngineKeys(api, admin)

    def check_rejoin(self, colocated: bool, adapters: bool) -> None:
        """Raise ConfigError where engines cannot have weights of each other.

        Args:
            colocated: they share the trainer's GPUs.
            adapters: they are given adapters alone.
        """
        if self.rejoin != "peer":
            return
        why = ""
        if colocated:
            why = "engines on the trainer's GPUs (cluster.placement) have their weights in their own turn only"
        elif adapters:
            why = "engines that get adapters alone (lora.sync: adapter) have the model's own weights from their start"
        if why:
            raise ConfigError("sglang.rejoin", self.rejoin, why, "set it to sync, which is the default")

    @property
    def drafts(self) -> bool:
        """Whether engines have a draft model."""
        return self.extra.get("speculative_algorithm") is not None

    @property
    def gpus_a_machine(self) -> int:
        """GPUs of one engine on each of its machines."""
        return self.tp_size // self.nnodes

    def check_machines(self, gpus_per_node: int) -> None:
        """Raise ConfigError when a launched engine does not fit its machines of so many GPUs."""
        name = self.section or self.engine
        where = "its machine" if self.nnodes == 1 else f"each of its {self.nnodes} machines"
        if self.tp_size % self.nnodes:
            raise ConfigError(
                f"{name}.nnodes", self.nnodes, f"{self.tp_size} GPUs ({name}.tp_size) cannot be shared out equally",
                "choose a divisor of tp_size",
            )  # fmt: skip
        if self.gpus_a_machine > gpus_per_node:
            raise ConfigError(
                f"{name}.tp_size", self.tp_size,
                f"an engine has {self.gpus_a_machine} GPUs on {where}, and a machine has {gpus_per_node} "
                "(cluster.gpus_per_node)",
                f"let it span more machines ({name}.nnodes: {-(-self.tp_size // gpus_per_node)}), or lower it",
            )  # fmt: skip

    @property
    def parts(self) -> int:
        """Processes that a launched engine has places for, of `gpus_a_machine` GPUs each: its machines, or the halves
        of a pair."""
        return self.nnodes if self.pairs is None else 2

    @property
    def shape(self) -> str:
        """What one engine is, in words."""
        return (
            f"TP{self.tp_size}" if self.pairs is None else f"(TP{self.tp_size} to prefill, TP{self.tp_size} to decode)"
        )

    @property
    def servers(self) -> int:
        """Engines, launched or attached to."""
        return len(self.urls) or self.num_engines

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return self.servers * self.parts * self.gpus_a_machine


TEACHER_RESERVED: dict[str, str] = SGLANG_RESERVED | {
    "model_path": "use teacher.path",
    "tokenizer_path": "it is that of teacher.path",
    "enable_return_routed_experts": "a teacher's routes are not used",
}


class TeacherConfig(SGLangConfig):
    """SGLang servers that score finished responses for `algorithm.opd_coef`; any model with the student's tokenizer."""

    section: ClassVar[str] = "teacher"
    reserved: ClassVar[dict[str, str]] = TEACHER_RESERVED

    path: Path | None = Field(
        default=None, description="Hugging Face checkpoint of the teacher, for servers that mslime launches."
    )
    urls: list[str] = Field(
        default_factory=list, description="Attach to these running servers of the teacher instead of launching."
    )
    restarts: int = Field(
        default=0, ge=0, le=0,
        description="0: a teacher that died is not started again. Others take its work; without one the run ends.",
    )  # fmt: skip
    rejoin: Rejoin = Field(default="sync", description="sync is all there is: a teacher's weights never change.")
    pairs: KVTransfer | None = Field(default=None, description="null is all there is: a teacher only prefills.")
    concurrency: int = Field(default=64, ge=1, description="Responses that are being scored at once, per server.")
    placement: Placement = Field(
        default="separate",
        description="separate: servers that mslime launches have GPUs of their own. colocated: the last of the "
        "trainer's GPUs, where no engine is (with cluster.placement: colocated); while the trainer works the teacher's "
        "weights are in the machine's memory.",
    )

    @property
    def serves(self) -> bool:
        """Whether SGLang serves the teacher."""
        return bool(self.urls) or self.path is not None

    @property
    def launched(self) -> int:
        """Servers that mslime launches."""
        return self.num_engines if self.path is not None else 0


def check_teacher(config: RunConfig) -> None:
    """A teacher is there exactly when it is distilled, in one place, and scores what the student's policy is.

    Raises:
        ConfigError: the first of these that does not hold.
    """
    served, held, coefficient = config.teacher, config.model.teacher_path, config.algorithm.opd_coef
    if served.urls and served.path is not None:
        raise ConfigError(
            "teacher.path",
            str(served.path),
            f"the teacher is served already, at {served.urls[0]}",
            "remove teacher.path to attach to teacher.urls, or teacher.urls to launch servers",
        )
    if served.serves and held is not None:
        raise ConfigError(
            "model.teacher_path",
            str(held),
            "SGLang serves the teacher already (teacher.urls or teacher.path)",
            "keep one: servers for any model with the student's tokenizer, model.teacher_path for a small one",
        )
    if (coefficient > 0) != (served.serves or held is not None):
        field = "teacher.urls" if served.urls else "teacher.path" if served.path else "model.teacher_path"
        value = served.urls or served.path or held
        raise ConfigError(
            field,
            value if value is None or isinstance(value, list) else str(value),
            f"a teacher goes together with algorithm.opd_coef, which is {coefficient}",
            "set both or neither; the teacher is one of teacher.urls, teacher.path and model.teacher_path",
        )
    if served.serves:
        _check_served(config)


def _check_served(config: RunConfig) -> None:
    served, temperature = config.teacher, config.rollout.temperature
    if served.pairs is not None:
        raise ConfigError("teacher.pairs", served.pairs, "a teacher only prefills", "remove it")
    if temperature != 1.0:
        raise ConfigError(
            "rollout.temperature",
            temperature,
            "SGLang 0.5.23 scores the tokens of a prompt at temperature 1 whatever it is asked for, so the teacher's "
            "log-probs would not be comparable with the policy's",
            "set it to 1.0, or let the trainer hold the teacher (model.teacher_path), which scores at any temperature",
        )
    if config.rollout.truncated:
        raise ConfigError(
            "rollout.top_k",
            config.rollout.top_k,
            "SGLang 0.5.23 scores the tokens of a prompt over the whole vocabulary, so the teacher's log-probs would "
            "not be comparable with those of a policy that draws from a part of it",
            "draw from all of it (top_p: 1, top_k: -1, min_p: 0), or let the trainer hold the teacher "
            "(model.teacher_path), which scores over the same part",
        )
    shared = sorted({u.rstrip("/") for u in served.urls} & {u.rstrip("/") for u in config.sglang.urls})
    if shared:
        raise ConfigError(
            "teacher.urls",
            shared[0],
            "this server is one of sglang.urls: it gets the student's weights after every step",
            "give the teacher servers of its own",
        )
    if served.launched:
        served.check_machines(config.cluster.gpus_per_node if config.cluster.device == "cuda" else served.tp_size)
