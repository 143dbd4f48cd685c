"""Calls the user's function after every step, in the driver."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from mslime.config.errors import ConfigError
from mslime.extensions import calling, checked_metrics, load_function
from mslime.logs import phase

SETTING = "hooks.step"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecord:
    """Input of a hook for one step. Immutable.

    Attributes:
        step: steps done, counted from 1; also the weight version that the engines serve now.
        num_steps: of the whole run.
        run_dir: the run's directory; a hook may write its own files there.
        metrics: the step's row of metrics.jsonl, without scores on held-out sets that arrive later
            (`rollout.max_staleness` above 0).
    """

    step: int
    num_steps: int
    run_dir: Path
    metrics: Mapping[str, float]


def call_step_hook(spec: str, record: StepRecord) -> dict[str, float]:
    """Call the hook; returns its metrics, named `user/NAME`.

    Args:
        spec: `hooks.step`.
        record: the hook receives a copy.

    Raises:
        ConfigError: the hook raised, or returned anything but metrics or None. It ends the run.
    """
    step, copy = f"step {record.step}", replace(record, metrics=MappingProxyType(dict(record.metrics)))
    with phase(_log, f"{SETTING} {spec} of {step}"), calling(spec, SETTING, step):
        returned: object = load_function(spec, SETTING)(copy)
    found = checked_metrics({} if returned is None else returned)
    if isinstance(found, str):
        raise ConfigError(SETTING, spec, f"{found} ({step})", "return a mapping of names and numbers, or None")
    named = {f"user/{name}": number for name, number in found.items()}
    taken = next((name for name in named if name in record.metrics), None)
    if taken is not None:
        raise ConfigError(SETTING, spec, f"returned {taken}, which a reward or the loss also returned",
                          "choose another name")  # fmt: skip
    return named
