"""The base of every configuration section: frozen, typed, and unknown keys refused with the nearest known name."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the run configuration. Frozen after validation; unknown keys are refused by `loader.build`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, arbitrary_types_allowed=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON-able values, for YAML and for crossing process borders."""
        return self.model_dump(mode="json")
