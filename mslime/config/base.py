"""Base classes of configuration sections, frozen and typed, and choices shared by several settings."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast, get_args
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from mslime.config.errors import ConfigError, nearest
from mslime.config.passthrough import collect_extra, is_finite

Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""Time limit in seconds. Every wait has one."""


@dataclass(frozen=True)
class KnownValues:
    """Known values of a text setting beside `module:function`: the only list of them, for messages, docs, editors.

    Attributes:
        names: in the order in which they are shown.
    """

    names: tuple[str, ...]

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"enum": list(self.names), "type": "string"}, handler(core)]}


def alternatives(annotation: Any) -> set[Any]:
    """Types that an annotation admits, without bounds: {float, None} for `Annotated[float, ...] | None`."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return alternatives(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return set[Any]().union(*(alternatives(part) for part in typing.get_args(annotation)))
    return {annotation}


class Section(BaseModel):
    """A part of the run configuration. Frozen after validation; `loader.build` rejects unknown keys.

    Numbers are finite and exclude true and false. pydantic rejects a section that is not a mapping before any code of
    mslime runs.

    Attributes:
        shorthand: setting that a bare text sets; none by default.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, arbitrary_types_allowed=False, allow_inf_nan=False
    )
    shorthand: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _take(cls, values: Any) -> Any:
        if isinstance(values, str) and cls.shorthand:
            values = {cls.shorthand: values}
        return cls.prepare(cast("dict[str, Any]", values)) if isinstance(values, dict) else values

    @classmethod
    def prepare(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Adjust given values before validation: the place for defaults that depend on them."""
        return values

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = alternatives(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, str) and not value.strip() and Path in kinds:
            raise ValueError("must not be an empty path")
        if dict[str, Any] in kinds and not is_finite(value):
            raise ValueError("numbers in it must be finite")
        if bool in kinds and not isinstance(value, bool | None):
            raise ValueError("must be true or false")
        if isinstance(value, bool) and bool not in kinds and not kinds & {Any, object}:
            raise ValueError(f"must not be {str(value).lower()}: a boolean is not valid here")
        return value

    def given(self) -> dict[str, Any]:
        """Explicitly given values, secrets included, which can be validated again with changes."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return {name: value.given() if isinstance(value, Section) else value for name, value in values.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, for YAML and for other processes."""
        return self.model_dump(mode="json")


class EngineSection(Section):
    """A section that also accepts the engine's own fields, and keeps them in `extra`.

    Attributes:
        engine: `megatron` or `sglang`.
        section: the section's name, if it differs from the engine's.
        reserved: engine fields that mslime sets itself, with the reason.
        tested: engine fields that launch scripts set, or tests with real engines; others are passed on untested.
    """

    engine: ClassVar[str]
    section: ClassVar[str] = ""
    reserved: ClassVar[dict[str, str]]
    tested: ClassVar[frozenset[str]]

    @classmethod
    def prepare(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Move the engine's own fields into `extra` and check them."""
        own = set(cls.model_fields)
        if set(values) <= own and not values.get("extra"):
            return values
        return collect_extra(cls.section or cls.engine, cls.engine, values, own, cls.reserved)


# Choices of a setting that another package acts on; each is defined once, here.

Task = Literal["rl", "sft"]
"""Task of a run: reinforcement learning, or supervised training."""

Device = Literal["auto", "cpu", "cuda"]
"""Device of trainer ranks and engines; `auto` is CUDA if there is a GPU."""

KLType = Literal["k1", "k2", "k3", "low_var"]
"""Per-token estimates of a KL divergence (`algorithms.token_batch`)."""

PauseMode = Literal["abort", "retract", "in_place"]
"""Treatment of running responses while an engine loads new weights."""

ReplayMode = Literal["r3", "r2", "off"]
"""Expert routes that the trainer follows: the engine's, those of its own log-prob pass, or none."""

Fp8Recipe = Literal["blockwise", "tensorwise"]
"""Scaling recipe of Transformer Engine for the trainer's FP8 products."""

SftLossOn = Literal["all", "last", "each"]
"""Which assistant turns of a conversation are trained."""

Resume = Literal["auto", "older", "never"]
"""Which of its own checkpoints a run continues from."""

OnError = Literal["fail", "drop"]
"""Consequence of a failed rollout: the end of the run, or of this rollout."""

ProgressMode = Literal["auto", "on", "off"]
"""Whether the console shows live bars."""


KVTransfer = Literal["mooncake", "mooncake_tcp", "nixl", "mori"]
"""Transport with which SGLang moves a prefilled request's cache to the decoding server."""

Half = Literal["prefill", "decode"]
"""Role of a server in a pair."""

Placement = Literal["separate", "colocated"]
"""Whether engines have their own GPUs, or share the trainer's in turns."""

TrainerPart = Literal["weights", "optimizer", "gradients"]
"""Parts of a trained model on its device."""

LoraSync = Literal["merged", "adapter"]
"""Form in which engines receive adapters: merged into weights, or the adapters alone."""

LoraExperts = Literal["per_expert", "shared_outer"]
"""Whether each routed expert has both factors, or all experts of a layer share those on the hidden state's side."""

EngineTag = Literal["weights", "kv_cache", "cuda_graph"]
"""Memory that an engine can release, by SGLang's tags."""

ENGINE_TAGS: tuple[EngineTag, ...] = get_args(EngineTag)

OffloadTo = Literal["auto", "memory", "disk"]
"""Place of an offloaded trainer's weights and optimizer."""

Verify = Literal["probe", "first", "always", "never"]
"""When engines are compared with the trainer: see `weights.verify`."""

Kept = Literal["some", "all", "none"]
"""How many responses are written to files."""


SHARES_AT_MOST = 1.25
"""Memory bound of the exchange between an engine's ranks (`relay`), in multiples of the largest bucket: for the shares
of one bucket together, and for the data that a rank receives.
"""

NOT_ARRIVED = "no bucket arrived"
"""Start of the error of an engine's rank that receives no buckets from a sender: the fault lies elsewhere."""


FileKind = Literal["mapped", "handle", "remote", "safetensors", "base", "changes"]
"""Format of a bucket in a file.

- mapped: as the first bytes of memory that stays mapped.
- handle: as the first bytes of memory that is opened by handles beside the file, and stays open.
- remote: not in a file, but in the sender's memory, read over the network (`mslime.remote_memory`).
- safetensors: its tensors, in its order.
- base: the same; changes of it will follow.
- changes: safetensors with the differences from an earlier version, under the names `CHANGES`.
"""

CHANGES = ("sums", "index", "value")
"""Tensors of a file of changes, in this order.

- sums [4] int64: number of the changed version; word sums (`tensor_sums.word_sum`) of `index`, of `value`
  and of the whole bucket after the changes.
- index [n] int32: changed elements of the bucket, in ascending order.
- value [n], the bucket's dtype: their new values.
"""


def version_name(version: int) -> str:
    """Directory name of a version of the weights, for transports by files."""
    return f"version_{version:06d}"


def adapter_directory(version: int) -> str:
    """Directory name of a version of the adapters that engines read."""
    return f"adapter_{version:06d}"


Rule = tuple[object, str, object, str, str]
"""(Whether it is broken, a setting, its value, the rule in words, one remedy)."""


def refuse_first(section: str, rules: Iterable[Rule]) -> None:
    """Raise ConfigError for the first broken rule of a section's settings; of full names, if `section` is empty."""
    for broken, setting, value, rule, hint in rules:
        if broken:
            raise ConfigError(f"{section}.{setting}".lstrip("."), value, rule, hint)


def is_function(value: str) -> bool:
    """Whether a text names a function, `module:function`, and not one of a setting's choices."""
    return ":" in value


def check_choice(setting: str, value: str, choices: Iterable[str]) -> None:
    """Raise ConfigError unless `value` is one of `choices`, or written as `module:function`."""
    known = list(choices)
    if value in known or re.fullmatch(r"[^\s:]+:[^\W\d]\w*", value):
        return
    named = f"must be {', '.join(known)} or `module:function`" if known else "must be a function, `module:function`"
    raise ConfigError(setting, value, named, nearest(value, known) or "for example my_project.functions:mine")


def check_url(field: str, url: str, example: str) -> None:
    """Raise ConfigError for an invalid server URL, and for one with a password, which config.yaml would show."""
    if re.fullmatch(r"https?://[^/\s\x00-\x1f]+(?:/\S*)?", url) is None:
        raise ConfigError(field, url, "is not a URL", f"write for example {example}")
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ConfigError(field, "(not shown)", "must not contain a user or password: config.yaml and logs show it",
                          "set the key in its own setting")  # fmt: skip
    try:
        parts.port  # noqa: B018  raises if it is invalid
    except ValueError as error:
        raise ConfigError(field, url, f"is not a valid URL ({error})", f"write for example {example}") from error
