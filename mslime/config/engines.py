"""Settings of SGLang servers: engines that generate, and servers of a teacher, which only score.

The trainer's own ranks can also hold a teacher for on-policy distillation (`model.teacher_path`). docs/algorithms.md
compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from mslime.config.base import EngineSection, KVTransfer, Placement, Rule, check_url, refuse_first
from mslime.config.cluster import ClusterConfig, engine_nccl, not_colocated
from mslime.config.keys import EngineKeys, Secret, not_empty, read_secret
from mslime.config.rollout import RolloutConfig

MASK_LIMIT = 4096
"""SGLang's default of the most ids in a returned sampling mask (sampling_mask_max_tokens)."""

SGLANG_RESERVED: dict[str, str] = {
    "model_path": "use model.path",
    "tokenizer_path": "use model.tokenizer_path",
    "host": "mslime launches engines and sets their addresses",
    "port": "mslime launches engines and sets their addresses",
    "device": "use cluster.device",
    "enable_return_routed_experts": "it follows train.replay",
    "skip_server_warmup": "the capability handshake is the warm-up",
    "served_model_name": "mslime identifies its own servers by this name",
    "api_key": "use api_key of this section itself, which is kept out of command lines and logs",
    "admin_api_key": "use admin_api_key of this section itself, which is kept out of command lines and logs",
    "weight_version": "mslime counts and stamps the versions",
    "delete_ckpt_after_loading": "trainer ranks read the same checkpoint",
    "checkpoint_engine_wait_weights_before_ready": "weights are sent to engines that are ready",
    "tokenizer_worker_num": "with several tokenizer processes the server accepts requests without a key",
    "node_rank": "mslime numbers the machines of an engine (nnodes)",
    "dist_init_addr": "mslime sets the rendezvous address of an engine's machines (nnodes)",
    "custom_sigquit_handler": "mslime stops its servers itself",
    "load_publish_endpoint": "mslime queries the load of engines itself, and their ports are not open to others",
    "use_ray": "mslime places its servers itself",
    "grpc_mode": "mslime uses the HTTP interface of engines",
    "smg_grpc_mode": "mslime uses the HTTP interface of engines",
    "fastapi_root_path": "mslime sends requests to the root of an engine's URL",
    "ssl_keyfile": "launched engines use plain HTTP; for TLS, start them yourself and set urls",
    "ssl_certfile": "launched engines use plain HTTP; for TLS, start them yourself and set urls",
    "ssl_keyfile_password": "launched engines use plain HTTP",
    "is_embedding": "engines must generate",
    "encoder_only": "engines must generate",
    "disaggregation_mode": "use sglang.pairs: mslime starts the two halves of a pair together",
    "disaggregation_transfer_backend": "use sglang.pairs",
    "disaggregation_bootstrap_port": "mslime picks a free one for each pair (sglang.pairs)",
    "disaggregation_decode_retraction_backup": "a retracted request loses its routes; it is continued as a new request",
    "enable_pd_role_switch": "roles in a pair are fixed (sglang.pairs)",
    "allow_auto_truncate": "a silently cut prompt would be trained as if the engine had read all of it",
    "preferred_sampling_params": "sampling is set in rollout; log-probs must match the distribution that tokens are "
    "drawn from",
    "enable_watermark": "with a watermark, reported log-probs do not match the distribution that tokens are drawn from",
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


ServerKey = Annotated[Secret, not_empty("sglang.api_key")]


class SGLangConfig(EngineSection):
    """The generation engines, under SGLang's own names."""

    engine: ClassVar[str] = "sglang"
    reserved: ClassVar[dict[str, str]] = SGLANG_RESERVED
    tested: ClassVar[frozenset[str]] = SGLANG_TESTED

    num_engines: int = Field(default=1, ge=1, le=65536, description="Servers to launch (ignored if `urls` is set).")
    restarts: int = Field(
        default=3, ge=0,
        description="Consecutive restarts of a launched engine that died; ten syncs reset the count. If no engine is "
        "left, the run waits.",
    )  # fmt: skip
    urls: list[str] = Field(default_factory=list, description="Attach to these running servers instead of launching.")
    api_key: ServerKey | None = Field(
        default=None,
        description="Key of the servers: env:NAME, file:PATH, or the key itself. Default: launched servers get a "
        "random key for each run.",
    )
    admin_api_key: ServerKey | None = Field(
        default=None,
        description="Key of the servers' control endpoints (weights, pauses), if it differs from api_key; same forms.",
    )
    tp_size: int = Field(default=1, ge=1, description="GPUs of one engine.")
    nnodes: int = Field(
        default=1,
        ge=1,
        description="Hosts of one launched engine that needs more GPUs than a host has, with equal shares.",
    )
    pairs: KVTransfer | None = Field(
        default=None,
        description="Each engine is two servers of tp_size GPUs, one for prefill and one for decoding, with this "
        "transport for caches. null: one server.",
    )
    ep_size: int = Field(default=1, ge=1, description="GPUs of an engine that its experts are divided over.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Dtype of the engines' weights. auto: float32 on a CPU, on a GPU the checkpoint's bfloat16 or "
        "megatron.params_dtype. float16 is not supported.",
    )
    mem_fraction_static: float | None = Field(
        default=None, gt=0, lt=1, description="Share of a GPU's memory for weights and cache; null: SGLang decides."
    )
    max_total_tokens: int | None = Field(
        default=None, ge=1, description="Tokens in an engine's cache; null: as many as memory allows (65,536 on a CPU)."
    )
    max_running_requests: int | None = Field(
        default=None, ge=1, description="Requests that an engine decodes at once; null: SGLang decides."
    )
    extra: dict[str, Any] = Field(
        default_factory=dict, description="Any other SGLang ServerArgs field; may also be given beside these."
    )

    def keys(self) -> EngineKeys | None:
        """Configured keys of the servers; None without any. Raises ConfigError if they cannot be found."""
        if self.api_key is None and self.admin_api_key is None:
            return None
        api, admin = (
            read_secret(setting, f"{self.name}.{key}") if setting is not None else ""
            for key, setting in (("api_key", self.api_key), ("admin_api_key", self.admin_api_key))
        )
        return EngineKeys(api, admin)

    @property
    def name(self) -> str:
        """Name of the section."""
        return self.section or self.engine

    @property
    def drafts(self) -> bool:
        """Whether engines have a draft model."""
        return self.extra.get("speculative_algorithm") is not None

    @property
    def gpus_a_machine(self) -> int:
        """GPUs of one engine on each of its machines."""
        return self.tp_size // self.nnodes

    def check_machines(self, gpus_per_node: int) -> None:
        """Raise ConfigError if a launched engine does not fit its machines with `gpus_per_node` GPUs each."""
        where = "its machine" if self.nnodes == 1 else f"each of its {self.nnodes} machines"
        refuse_first(self.name, [
            (self.tp_size % self.nnodes, "nnodes", self.nnodes,
             f"{self.tp_size} GPUs ({self.name}.tp_size) cannot be divided equally among "
             "hosts", "choose a divisor of tp_size"),
            (self.gpus_a_machine > gpus_per_node, "tp_size", self.tp_size,
             f"an engine has {self.gpus_a_machine} GPUs on {where}, but a machine has {gpus_per_node} "
             "(cluster.gpus_per_node)",
             f"use more machines ({self.name}.nnodes: {-(-self.tp_size // gpus_per_node)}), or lower it"),
        ])  # fmt: skip

    @property
    def parts(self) -> int:
        """Processes of a launched engine with `gpus_a_machine` GPUs each: its machines, or the halves of a pair."""
        return self.nnodes if self.pairs is None else 2

    @property
    def shape(self) -> str:
        """Description of one engine's layout."""
        return (
            f"TP{self.tp_size}" if self.pairs is None else f"(TP{self.tp_size} to prefill, TP{self.tp_size} to decode)"
        )

    @property
    def servers(self) -> int:
        """Number of engines, launched or attached."""
        return len(self.urls) or self.num_engines

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return self.servers * self.parts * self.gpus_a_machine


TEACHER_RESERVED: dict[str, str] = SGLANG_RESERVED | {
    "model_path": "use teacher.path",
    "tokenizer_path": "the tokenizer of teacher.path is used",
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
        description="Must be 0: a dead teacher server is not restarted. Others take over its work; if none is left, "
        "the run ends.",
    )  # fmt: skip
    pairs: KVTransfer | None = Field(default=None, description="Must be null: a teacher only prefills.")
    concurrency: int = Field(default=64, ge=1, description="Responses scored at once, per server.")
    placement: Placement = Field(
        default="separate",
        description="separate: launched servers have their own GPUs. colocated (with cluster.placement: colocated): on "
        "the trainer's last GPUs, which have no engine; weights are in host memory while the trainer works.",
    )

    @property
    def serves(self) -> bool:
        """Whether SGLang serves the teacher."""
        return bool(self.urls) or self.path is not None

    @property
    def launched(self) -> int:
        """Servers that mslime launches."""
        return self.num_engines if self.path is not None else 0


def check_sglang(
    engine: SGLangConfig,
    cluster: ClusterConfig,
    rollout: RolloutConfig,
    *,
    ranks: int,
    teacher_gpus: int,
    syncs_adapters: bool,
) -> None:
    """Reject engines that the machines, the placement or the sampling do not support.

    Args:
        ranks: of the trainer.
        teacher_gpus: GPUs of the trainer that a teacher shares, which no engine can use.
        syncs_adapters: engines receive adapters alone.

    Raises:
        ConfigError: the first broken rule.
    """
    for url in engine.urls:
        check_url("sglang.urls", url, "http://10.0.0.5:30000")
    if engine.pairs is not None:
        refuse_first("", _pairs(engine, engine.pairs, cluster, rollout.pause_mode, syncs_adapters=syncs_adapters))
    if cluster.colocated:
        _check_colocated(engine, cluster, ranks, teacher_gpus)
    if not engine.urls:
        engine.check_machines(cluster.gpus_per_node if cluster.device == "cuda" else engine.tp_size)
    # SGLang flags that override NCCL's environment: the trainer would use other values.
    refuse_first("cluster.env", (
        (given == "1" and cluster.env.get(name, given) != given, name, cluster.env.get(name),
         "sglang.enable_symm_mem or sglang.enable_nccl_nvls set it to 1 in the engines, and NCCL fails if the trainer "
         "has another value", "remove it, or remove those flags")
        for name, given in engine_nccl(engine.extra).items()
    ))  # fmt: skip
    if rollout.truncated:
        refuse_first("rollout", _sampling(engine.extra, rollout))


def check_teacher(
    teacher: TeacherConfig,
    engine: SGLangConfig,
    cluster: ClusterConfig,
    rollout: RolloutConfig,
    *,
    held: Path | None,
    coefficient: float,
    ranks: int,
) -> None:
    """Check that a teacher is configured exactly for distillation, in one place, and scores the student's distribution.

    Args:
        held: checkpoint of a teacher that the trainer holds (`model.teacher_path`).
        coefficient: `algorithm.opd_coef`.
        ranks: of the trainer.

    Raises:
        ConfigError: the first broken rule.
    """
    for url in teacher.urls:
        check_url("teacher.urls", url, "http://10.0.0.5:30000")
    if teacher.placement == "colocated":
        refuse_first("teacher", _colocated_teacher(teacher, cluster, rollout.managers, ranks))
        refuse_first("teacher", _machines(teacher, cluster, ranks))
    served, holds = teacher.serves, held is not None
    field = "teacher.urls" if teacher.urls else "teacher.path" if teacher.path else "model.teacher_path"
    value = teacher.urls or (None if (path := teacher.path or held) is None else str(path))
    refuse_first("", [
        (teacher.urls and teacher.path is not None, "teacher.path", str(teacher.path),
         f"the teacher is served already, at {next(iter(teacher.urls), '')}",
         "remove teacher.path to attach to teacher.urls, or teacher.urls to launch servers"),
        (served and holds, "model.teacher_path", str(held),
         "SGLang serves the teacher already (teacher.urls or teacher.path)",
         "keep one: servers for any model with the student's tokenizer, model.teacher_path for a small one"),
        ((coefficient > 0) != (served or holds), field, value,
         f"a teacher and algorithm.opd_coef must be set together; opd_coef is {coefficient}",
         "set both or neither; the teacher is one of teacher.urls, teacher.path and model.teacher_path"),
    ])  # fmt: skip
    if served:
        refuse_first("", _served(teacher, engine, rollout))
    if teacher.launched:
        teacher.check_machines(cluster.gpus_per_node if cluster.device == "cuda" else teacher.tp_size)


def _pairs(
    engine: SGLangConfig, pairs: KVTransfer, cluster: ClusterConfig, pause_mode: str, *, syncs_adapters: bool
) -> Iterator[Rule]:
    """Settings that pairs of a prefill and a decode server do not support."""
    yield (
        engine.urls, "sglang.pairs", pairs,
        f"mslime pairs only servers that it launches, and engines are attached to ({next(iter(engine.urls), '')})",
        "remove sglang.urls, or remove sglang.pairs",
    )  # fmt: skip
    for field, value, needed, why in (
        ("sglang.nnodes", engine.nnodes, 1, "each server of a pair must fit on one machine"),
        ("cluster.placement", cluster.placement, "separate", "offloading is not tested with pairs"),
        ("rollout.pause_mode", pause_mode, "abort",
         "with another mode, a request could be prefilled by one weight version and decoded by another"),
    ):  # fmt: skip
        yield (
            value != needed,
            field,
            value,
            f"{why} (sglang.pairs: {pairs})",
            f"set it to {needed}, or remove sglang.pairs",
        )
    yield (
        syncs_adapters, "sglang.pairs", pairs,
        "pairs do not support lora.sync: adapter", "remove it, or set lora.sync: merged",
    )  # fmt: skip
    yield (
        cluster.device == "cpu" and pairs != "mooncake_tcp", "sglang.pairs", pairs, "it transfers GPU memory, and "
        "cluster.device is cpu",
        "set it to mooncake_tcp, which is for tests",
    )  # fmt: skip


def _check_colocated(engine: SGLangConfig, cluster: ClusterConfig, ranks: int, teacher_gpus: int) -> None:
    """Check that colocated engines are on the trainer's GPUs and can release their memory."""
    if engine.urls:
        raise not_colocated(
            f"attached engines ({engine.urls[0]}) do not run on the trainer's GPUs",
            "remove sglang.urls to launch engines on the trainer's GPUs, or set cluster.placement: separate",
        )
    free, more = ranks - teacher_gpus, engine.extra
    beside = f" GPUs besides the teacher's {teacher_gpus} (teacher.placement)" if teacher_gpus else ""
    mode = more.get("weight_cache_mode", "off")
    refuse_first("sglang", [
        (engine.tp_size > ranks, "tp_size", engine.tp_size, f"an engine does not fit on the trainer's {ranks} GPUs",
         f"set it to {ranks} or less, or raise cluster.trainer_ranks"),
        (engine.gpus > free, "num_engines", engine.num_engines,
         f"{engine.num_engines} engines of {engine.tp_size} GPUs (sglang.tp_size) do not fit on the trainer's "
         f"{free}{beside}", f"set it to {free // engine.tp_size} or less, or raise cluster.trainer_ranks"),
    ])  # fmt: skip
    refuse_first("sglang", _machines(engine, cluster, ranks))
    refuse_first("sglang", [
        (more.get("enable_memory_saver") is False, "enable_memory_saver", False,
         "engines need it to release their memory", "remove it (mslime sets it on GPUs)"),
        (mode != "off", "weight_cache_mode", mode, "weights shared by a daemon are not released", "remove it"),
    ])  # fmt: skip


def _machines(engine: SGLangConfig, cluster: ClusterConfig, ranks: int) -> Iterator[Rule]:
    """Servers that do not use neighbouring GPUs of the trainer, within one machine or on whole machines."""
    each, machine = engine.gpus_a_machine, cluster.gpus_per_node
    if cluster.device == "cpu" or ranks <= machine:
        return
    yield (
        machine % each, "tp_size", engine.tp_size,
        f"engines use neighbouring GPUs of the trainer, and {each} do not divide the {machine} GPUs of a machine "
        "(cluster.gpus_per_node)", "choose a divisor",
    )  # fmt: skip
    yield (
        engine.nnodes > 1 and each != machine, "nnodes", engine.nnodes,
        f"an engine on several machines must use all {machine} GPUs of each, and it uses {each}",
        f"set {engine.name}.tp_size: {engine.nnodes * machine}, or lower nnodes",
    )  # fmt: skip


def _colocated_teacher(teacher: TeacherConfig, cluster: ClusterConfig, managers: int, ranks: int) -> Iterator[Rule]:
    """Settings with which a teacher's servers cannot use the trainer's last GPUs."""
    more, shares = teacher.extra, ("placement", "colocated")
    yield (
        not cluster.colocated, *shares, "the trainer's GPUs are not shared (cluster.placement: separate)",
        "set cluster.placement: colocated, or remove it",
    )  # fmt: skip
    yield (
        not teacher.launched, *shares, "mslime can offload only a teacher that it launches",
        "set teacher.path, or remove it",
    )  # fmt: skip
    yield (
        managers > 1, *shares, f"all {managers} managers call the teacher, and would have to stop before it is "
        "offloaded", "set rollout.managers: 1, or remove it",
    )  # fmt: skip
    yield (
        teacher.gpus >= ranks or ranks % teacher.tp_size, "tp_size", teacher.tp_size,
        f"{teacher.num_engines} servers (teacher.num_engines) must leave some of the trainer's {ranks} GPUs to "
        "engines, and the size of one must divide them", "lower it, or raise cluster.trainer_ranks",
    )  # fmt: skip
    yield (
        more.get("enable_memory_saver") is False or more.get("enable_weights_cpu_backup") is False, *shares,
        "it needs SGLang's memory saver to release its memory, and the saver's backup to keep its weights",
        "remove teacher.enable_memory_saver and teacher.enable_weights_cpu_backup",
    )  # fmt: skip


def _sampling(extra: dict[str, Any], r: RolloutConfig) -> Iterator[Rule]:
    """Truncated sampling that SGLang 0.5.23 does not report exactly (managers/scheduler.py, layers/sampler.py)."""
    given, value = ("top_p", r.top_p) if r.top_p < 1 else ("min_p", r.min_p)
    yield (
        r.top_k == -1, "top_k", -1,
        f"with {given}: {value:g} the trainer needs the candidate ids of each draw, and SGLang returns them only if "
        "top_k bounds their number",
        f"set rollout.top_k, for example to {MASK_LIMIT}: {given} still decides nearly every draw",
    )  # fmt: skip
    limit = extra.get("sampling_mask_max_tokens") or MASK_LIMIT
    yield (
        r.top_k > limit, "top_k", r.top_k, f"SGLang returns at most {limit} candidate ids of a draw",
        "lower it, or raise sglang.sampling_mask_max_tokens",
    )  # fmt: skip
    fixed = next((n for n in ("enable_deterministic_inference", "rl_on_policy_target") if extra.get(n)), None)
    yield (
        r.min_p > 0 and fixed is not None, "min_p", r.min_p,
        f"SGLang does not support seeded min-p sampling, which sglang.{fixed} requires",
        f"set it to 0, or remove sglang.{fixed}",
    )  # fmt: skip


def _served(served: TeacherConfig, engine: SGLangConfig, rollout: RolloutConfig) -> Iterator[Rule]:
    """Settings that a served teacher does not support."""
    yield served.pairs is not None, "teacher.pairs", served.pairs, "a teacher only prefills", "remove it"
    yield (
        rollout.temperature != 1.0, "rollout.temperature", rollout.temperature,
        "SGLang 0.5.23 always scores prompt tokens at temperature 1, so the teacher's log-probs would not be "
        "comparable with the policy's",
        "set it to 1.0, or let the trainer hold the teacher (model.teacher_path), which scores at any temperature",
    )  # fmt: skip
    yield (
        rollout.truncated, "rollout.top_k", rollout.top_k,
        "SGLang 0.5.23 always scores prompt tokens over the whole vocabulary, and the policy samples from a part of "
        "it, so their log-probs would not be comparable",
        "draw from all of it (top_p: 1, top_k: -1, min_p: 0), or let the trainer hold the teacher "
        "(model.teacher_path), which scores over the same part",
    )  # fmt: skip
    shared = sorted({u.rstrip("/") for u in served.urls} & {u.rstrip("/") for u in engine.urls})
    yield (
        shared, "teacher.urls", next(iter(shared), None),
        "this server is also in sglang.urls, and receives the student's weights after every step",
        "use separate servers for the teacher",
    )  # fmt: skip
