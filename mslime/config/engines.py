"""Settings of SGLang servers: those that generate, and (in `teacher`) those that only score."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from mslime.config.base import EngineSection

SGLANG_RESERVED: dict[str, str] = {
    "model_path": "use model.path",
    "tokenizer_path": "use model.tokenizer_path",
    "host": "engines are launched and found by mslime",
    "port": "engines are launched and found by mslime",
    "device": "use cluster.device",
    "enable_return_routed_experts": "it follows train.replay",
    "skip_server_warmup": "the capability handshake is the warm-up",
}


class SGLangConfig(EngineSection):
    """The generation engines, under SGLang's own names."""

    engine: ClassVar[str] = "sglang"
    reserved: ClassVar[dict[str, str]] = SGLANG_RESERVED

    num_engines: int = Field(default=1, ge=1, description="Servers to launch (ignored when `urls` is given).")
    urls: list[str] = Field(default_factory=list, description="Attach to these running servers instead of launching.")
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

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return (len(self.urls) or self.num_engines) * self.tp_size
