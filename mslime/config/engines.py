"""Settings of SGLang servers: those that generate, and (in `teacher`) those that only score."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from mslime.config.base import EngineSection
from mslime.config.keys import EngineKeys, Secret, read_secret

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
    "custom_sigquit_handler": "mslime ends its servers itself, and leaves none behind",
    "use_ray": "mslime places its servers itself",
    "grpc_mode": "engines are spoken to over HTTP",
    "smg_grpc_mode": "engines are spoken to over HTTP",
    "fastapi_root_path": "engines are spoken to at the root of their URL",
    "ssl_keyfile": "launched engines are spoken to over plain HTTP; run them yourself behind TLS and give urls",
    "ssl_certfile": "launched engines are spoken to over plain HTTP; run them yourself behind TLS and give urls",
    "ssl_keyfile_password": "launched engines are spoken to over plain HTTP",
    "is_embedding": "engines must generate",
    "encoder_only": "engines must generate",
    "disaggregation_mode": "an engine must prefill and decode",
    "allow_auto_truncate": "a prompt that was cut in silence would be trained on as if it had been read",
    "preferred_sampling_params": "sampling is set in rollout, so that the log-probs are those of what was drawn",
    "enable_watermark": "a watermark draws from another distribution than the one whose log-probs are reported",
}


class SGLangConfig(EngineSection):
    """The generation engines, under SGLang's own names."""

    engine: ClassVar[str] = "sglang"
    reserved: ClassVar[dict[str, str]] = SGLANG_RESERVED

    num_engines: int = Field(default=1, ge=1, description="Servers to launch (ignored when `urls` is given).")
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

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return (len(self.urls) or self.num_engines) * self.tp_size
