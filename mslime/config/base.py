"""The bases of configuration sections: frozen, typed, and unknown keys refused with the nearest known name."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from mslime.config.passthrough import collect_extra


class Section(BaseModel):
    """A part of the run configuration. Frozen after validation; unknown keys are refused by `loader.build`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, arbitrary_types_allowed=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-able values, for YAML and for crossing process borders."""
        return self.model_dump(mode="json")


class EngineSection(Section):
    """A section that also takes the engine's own fields, and keeps those in `extra`.

    Attributes:
        engine: `megatron` or `sglang`.
        section: the section's name, where it is not the engine's.
        reserved: engine fields that mslime sets itself, with the reason.
    """

    engine: ClassVar[str]
    section: ClassVar[str] = ""
    reserved: ClassVar[dict[str, str]]

    @model_validator(mode="before")
    @classmethod
    def _collect_extra(cls, values: dict[str, Any]) -> dict[str, Any]:
        own = set(cls.model_fields)
        if set(values) <= own and not values.get("extra"):
            return values
        return collect_extra(cls.section or cls.engine, cls.engine, values, own, cls.reserved)
