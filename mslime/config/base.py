"""Bases of configuration sections, frozen and typed, and the choices that several settings offer."""

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
from mslime.config.passthrough import collect_extra

Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""How long something may take. No wait is without an end."""


@dataclass(frozen=True)
class Known:
    """Values of a text that mslime knows, beside `module:function`: the one list of them, for messages, docs, editors.

    Attributes:
        names: in the order in which they are shown.
    """

    names: tuple[str, ...]

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"enum": list(self.names), "type": "string"}, handler(core)]}


def alternatives(annotation: Any) -> set[Any]:
    """The types that an annotation admits, bounds left out: {float, None} of `Annotated[float, ...] | None`."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return alternatives(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return set[Any]().union(*(alternatives(part) for part in typing.get_args(annotation)))
    return {annotation}


class Section(BaseModel):
    """A part of the run configuration. Frozen after validation; unknown keys are refused by `loader.build`.

    Numbers are finite, and true and false are no numbers; a section that is not a mapping is refused by pydantic, and
    reaches no code of ours.

    Attributes:
        shorthand: setting that a bare text stands for; none by default.
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
        """What was given for the section, before it is validated: the place for defaults that depend on it."""
        return values

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = alternatives(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, str) and not value.strip() and Path in kinds:
            raise ValueError("must not be empty: it is a path")
        if bool in kinds and not isinstance(value, bool | None):
            raise ValueError("must be true or false")
        if isinstance(value, bool) and bool not in kinds and not kinds & {Any, object}:
            raise ValueError(f"must not be {str(value).lower()}: true and false are no numbers or words here")
        return value

    def given(self) -> dict[str, Any]:
        """What was set and not left to a default, secrets included, so that it can be validated again with changes."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return {name: value.given() if isinstance(value, Section) else value for name, value in values.items()}

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-able values, for YAML and for crossing process borders."""
        return self.model_dump(mode="json")


class EngineSection(Section):
    """A section that also takes the engine's own fields, and keeps those in `extra`.

    Attributes:
        engine: `megatron` or `sglang`.
        section: the section's name, where it is not the engine's.
        reserved: engine fields that mslime sets itself, with the reason.
        tested: engine fields that launch scripts set, or tests with real engines; others are passed on untested.
    """

    engine: ClassVar[str]
    section: ClassVar[str] = ""
    reserved: ClassVar[dict[str, str]]
    tested: ClassVar[frozenset[str]]

    @classmethod
    def prepare(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The engine's own fields moved into `extra`, and checked."""
        own = set(cls.model_fields)
        if set(values) <= own and not values.get("extra"):
            return values
        return collect_extra(cls.section or cls.engine, cls.engine, values, own, cls.reserved)


# Choices that a setting offers and another package acts on: each is named once, here.

Task = Literal["rl", "sft"]
"""What a run does: reinforcement learning, or supervised training."""

Device = Literal["auto", "cpu", "cuda"]
"""What trainer ranks and engines run on; `auto` is CUDA where there is a GPU."""

KLType = Literal["k1", "k2", "k3", "low_var"]
"""Per-token estimates of a KL divergence (`algorithms.token_batch`)."""

PauseMode = Literal["abort", "retract", "in_place"]
"""What becomes of running responses while an engine takes new weights."""

ReplayMode = Literal["r3", "r2", "off"]
"""Whose expert routes the trainer follows: the engine's, those of its own log-prob pass, or none."""

Fp8Recipe = Literal["blockwise", "tensorwise"]
"""How Transformer Engine scales what the trainer multiplies in FP8."""

SftLossOn = Literal["all", "last", "each"]
"""Which assistant turns of a conversation are trained."""

Resume = Literal["auto", "older", "never"]
"""Which checkpoint of its own a run continues from."""

OnError = Literal["fail", "drop"]
"""What the failure of one rollout means: the end of the run, or of this rollout."""

ProgressMode = Literal["auto", "on", "off"]
"""Whether the console shows live bars."""


KVTransfer = Literal["mooncake", "mooncake_tcp", "nixl", "mori"]
"""How SGLang moves the cache of a request that was prefilled to the server that decodes it."""

Half = Literal["prefill", "decode"]
"""Which of the two servers of a pair."""

Placement = Literal["separate", "colocated"]
"""Whether engines have GPUs of their own, or take turns with the trainer on its GPUs."""

TrainerPart = Literal["weights", "optimizer", "gradients"]
"""What a trained model holds on its device."""

LoraSync = Literal["merged", "adapter"]
"""What engines are given of adapters: weights with them in, or the adapters alone."""

LoraExperts = Literal["per_expert", "shared_outer"]
"""Whether each routed expert has both factors of its own, or all of a layer share those on the hidden state's side."""

EngineTag = Literal["weights", "kv_cache", "cuda_graph"]
"""What an engine can give back, by SGLang's tags."""

ENGINE_TAGS: tuple[EngineTag, ...] = get_args(EngineTag)

AsleepIn = Literal["auto", "memory", "disk"]
"""Where a trainer that sleeps keeps its weights and optimizer."""

Verify = Literal["probe", "first", "always", "never"]
"""When engines are compared with the trainer: see `weights.verify`."""

Kept = Literal["some", "all", "none"]
"""How many of the responses are written to files."""


SHARES_AT_MOST = 1.25
"""How much ranks of an engine exchange at once (`relay`): shares of one bucket together, and what a rank takes, are at
most so many times the largest bucket. It bounds the memory that they need."""

NOT_ARRIVED = "no bucket arrived"
"""What begins the words of an engine's rank to which a sender's buckets do not come: the fault is not its own."""


FileKind = Literal["mapped", "handle", "remote", "safetensors", "base", "changes"]
"""How a bucket lies in a file.

- mapped: as the first bytes of memory that stays mapped.
- handle: as the first bytes of memory that is opened by handles beside the file, and stays open.
- remote: in no file, but in memory of the sender that is read over the network (`mslime.remote_memory`).
- safetensors: its tensors, in its order.
- base: the same, and changes of it will follow.
- changes: safetensors of what is different from an earlier version, under the names `CHANGES`.
"""

CHANGES = ("sums", "index", "value")
"""Tensors of a file of changes, in this order.

- sums [4] int64: the number of the version that was changed; word sums (`tensor_sums.word_sum`) of
  `index`, of `value` and of the whole bucket with the changes in it.
- index [n] int32: elements of the bucket that changed, in ascending order.
- value [n], the bucket's dtype: what they are now.
"""


def version_name(version: int) -> str:
    """The directory of a version of the weights, for transports by files."""
    return f"version_{version:06d}"


def adapter_directory(version: int) -> str:
    """The directory of a version of the adapters that engines read."""
    return f"adapter_{version:06d}"


def is_function(value: str) -> bool:
    """Whether a text names a function, `module:function`, and not one of a setting's choices."""
    return ":" in value


def check_choice(setting: str, value: str, choices: Iterable[str]) -> None:
    """Raise ConfigError unless `value` is one of `choices`, or written as `module:function`."""
    known = list(choices)
    if value in known or re.fullmatch(r"[^\s:]+:[^\W\d]\w*", value):
        return
    named = f"is {', '.join(known)} or `module:function`" if known else "a function is named `module:function`"
    raise ConfigError(setting, value, f"{named} {nearest(value, known)}".rstrip(),
                      "write for example my_project.functions:mine")  # fmt: skip


def check_url(field: str, url: str, example: str) -> None:
    """Raise ConfigError for what is no URL of a server, and for one with a password, which config.yaml would show."""
    if re.fullmatch(r"https?://[^/\s\x00-\x1f]+(?:/\S*)?", url) is None:
        raise ConfigError(field, url, "is not a URL", f"write for example {example}")
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ConfigError(field, "(not shown)", "a URL holds no user or password: config.yaml and logs show it",
                          "give the key by its own setting")  # fmt: skip
    try:
        parts.port  # noqa: B018  raises where it is none
    except ValueError as error:
        raise ConfigError(field, url, f"is not a URL ({error})", f"write for example {example}") from error
