"""Calls the user's function after every step, in the driver."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mslime.config.errors import ConfigError
from mslime.config.schema import RunConfig
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


def call_step_hook(config: RunConfig, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Call the hook; returns its metrics as `user/NAME`, empty without a hook.

    Raises:
        ConfigError: the hook raised, or returned something else than metrics or None. It ends the run.
    """
    spec = config.hooks.step
    if spec is None:
        return {}
    record = StepRecord(step, config.train.num_steps, config.run_dir, MappingProxyType(dict(metrics)))
    with phase(_log, f"{SETTING} {spec} of step {step}"), calling(spec, SETTING, f"step {step}"):
        told: object = load_function(spec, SETTING)(record)
    found = checked_metrics({} if told is None else told)
    if isinstance(found, str):
        raise ConfigError(SETTING, spec, f"{found} (step {step})", "return a mapping of names and numbers, or None")
    named = {f"user/{name}": number for name, number in found.items()}
    taken = next((name for name in named if name in metrics), None)
    if taken is not None:
        raise ConfigError(SETTING, spec, f"returned {taken}, which a reward or the loss also returned",
                          "give it another name")  # fmt: skip
    return named
