"""The bases of configuration sections: frozen, typed, and unknown keys refused with the nearest known name."""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

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
