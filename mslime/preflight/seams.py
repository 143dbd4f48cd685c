"""Where a run calls functions of the user's: each is found and looked at before a GPU is claimed.

Reward functions are not here: they are imported in worker processes of their own, and tried there (`rewards`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mslime.config.base import is_function
from mslime.config.schema import RunConfig
from mslime.extensions import check_parameters, load_function
from mslime.rollout.environments.protocol import SETTING as ENVIRONMENT
from mslime.rollout.environments.protocol import load_environment

Process = Literal["driver", "rollout service", "trainer"]
"""What calls a function: `mslime check` imports all of them, each process of a run its own."""


@dataclass(frozen=True)
class Seam:
    """A function that the run will call.

    Attributes:
        setting: that names it.
        function: `module:function`, or a class.
        parameters: what it is called with, in this order; of an environment, what its constructor is given.
        process: where it is called.
    """

    setting: str
    function: str
    parameters: tuple[str, ...]
    process: Process


def seams_of(config: RunConfig) -> list[Seam]:
    """The functions that a run's settings name, in the order in which a step calls them."""
    algorithm = config.algorithm
    of_rl: list[tuple[str, str | None, tuple[str, ...], Process]] = [
        ("data.source", config.data.source, ("data", "seed"), "rollout service"),
        ("rollout.function", config.rollout.function, ("task", "engine"), "rollout service"),
        (ENVIRONMENT, config.rollout.environment, tuple(config.rollout.environment_options), "rollout service"),
        ("rollout.dynamic_filter", config.rollout.dynamic_filter, ("group",), "rollout service"),
        ("hooks.sample", config.hooks.sample, ("sample",), "rollout service"),
        ("algorithm.advantage", algorithm.advantage, ("rewards",), "rollout service"),
        ("algorithm.loss", algorithm.loss, ("batch", "algorithm"), "trainer"),
        ("algorithm.correction.function", algorithm.correction.function, ("log_ratio", "batch"), "trainer"),
        ("weights.transport", config.weights.transport, ("link",), "trainer"),
    ]
    hook: tuple[str, str | None, tuple[str, ...], Process] = ("hooks.step", config.hooks.step, ("record",), "driver")
    return [
        Seam(setting, named, parameters, process)
        for setting, named, parameters, process in [*(of_rl if config.train.task == "rl" else ()), hook]
        if named is not None and is_function(named)
    ]


def check_seams(config: RunConfig, process: Process | None = None) -> None:
    """Import every function that the settings name, and see whether it takes what it will be called with.

    Args:
        process: of which alone; None: of all.

    Raises:
        ConfigError: the first function that cannot be imported or called so.
    """
    for seam in seams_of(config):
        if process not in (None, seam.process):
            continue
        if seam.setting == ENVIRONMENT:
            load_environment(seam.function, config.rollout.environment_options)
        else:
            function = load_function(seam.function, seam.setting)
            check_parameters(function, seam.function, seam.setting, *seam.parameters)
