"""JSON bodies of the SDK's requests (tinker 0.38.0). Other fields are ignored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mslime_plugins.serve.client_errors import ServeError


class Body(BaseModel):
    """A JSON body. Numbers are finite."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False, frozen=True)


B = TypeVar("B", bound=Body)


def read(kind: type[B], raw: bytes) -> B:
    """Parse a body. Raises ServeError naming its first invalid field."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        value = None if first["type"] == "missing" else str(first["input"])[:200]
        raise ServeError(where, value, first["msg"], "send a request of the tinker SDK 0.38.0") from None


class CreateSession(Body):
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    display_name: str | None = None


class OfSession(Body):
    session_id: str


class Lora(Body):
    rank: int = Field(ge=1)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(Body):
    session_id: str
    model_seq_id: int = Field(ge=0, lt=10**9)
    base_model: str
    lora_config: Lora | None = None
    optimizer_config: dict[str, Any] = {"type": "adamw"}
    user_metadata: dict[str, Any] | None = None


class OfModel(Body):
    model_id: str


class Adam(Body):
    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)


class OptimStep(Body):
    model_id: str
    seq_id: int = Field(ge=1)
    adam_params: Adam | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Body):
    model_id: str
    seq_id: int = Field(ge=1)
    path: str | None = None
    ttl_seconds: int | None = Field(default=None, ge=1)
    overwrite: bool = False
    user_metadata: dict[str, Any] | None = None


class SaveForSampler(SaveWeights):
    sampling_session_seq_id: int | None = Field(default=None, ge=0)
    kind: str = "snapshot"


class LoadWeights(Body):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = Field(default=None, ge=1)
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0, lt=10**9)
    base_model: str | None = None
    optimizer_config: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class TextChunk(Body):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[TokenId]


class OtherChunk(Body):
    type: Literal["image", "image_asset_pointer", "dmel"]


class ModelInput(Body):
    chunks: list[Annotated[TextChunk | OtherChunk, Field(discriminator="type")]]


class SamplingParams(Body):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=0, lt=2**62)
    stop: str | Sequence[TokenId] | Sequence[str] | None = None
    temperature: float = Field(default=1.0, ge=0, le=1000)
    top_k: int = Field(default=-1, ge=-1, lt=2**31)
    top_p: float = Field(default=1.0, gt=0, le=1)


class SampleBody(Body):
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = Field(default=1, ge=1, le=4096)
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = Field(default=None, ge=0)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)


class OfRequest(Body):
    request_id: str


class OfPath(Body):
    tinker_path: str
