"""Errors that a user can act on.

Every user mistake is a `UserError`: it names the field (or file, or key), the value found, the rule that was
broken and a way out. Broken invariants of our own are assertions instead, and never end up here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave us.

    Attributes:
        field: dotted path of the setting, or the file and line, that is wrong.
        value: what was found there.
        rule: what must hold instead.
        way_out: one concrete thing to do about it.
    """

    def __init__(self, field: str, value: object, rule: str, way_out: str) -> None:
        self.field, self.value, self.rule, self.way_out = field, value, rule, way_out
        super().__init__(f"{field} = {value!r}: {rule}\n  way out: {way_out}")

    def __reduce__(self) -> tuple[type, tuple[str, object, str, str]]:
        """Survive pickling between processes (Ray re-raises errors on the driver)."""
        return (type(self), (self.field, self.value, self.rule, self.way_out))


class ConfigError(UserError):
    """A setting of the run configuration is wrong."""


class DataError(UserError):
    """A prompt file, a line of it, or a key in it is wrong."""


class CheckpointError(UserError):
    """A checkpoint (Hugging Face or Megatron) is missing, truncated or does not match the model."""


class RewardError(UserError):
    """A reward function raised, ran out of time, or returned something that is not a finite number."""


class EngineError(UserError):
    """A generation engine lacks a feature, did not start, died, or refused a request."""


class TrainerError(UserError):
    """A trainer rank failed, or missed a deadline."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for a misspelt name, or an empty string when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""
