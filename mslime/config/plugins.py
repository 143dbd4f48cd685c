"""What installed packages add to mslime, by the entry points of their distributions.

A package adds something with a table of its pyproject.toml, and nothing else:

    [project.entry-points."mslime.rewards"]
    unit-tests = "my_package.rewards:UnitTests"

The distribution of mslime adds what its second package, `mslime_plugins`, holds through the same groups. mslime itself
imports nothing of that package.
"""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.metadata import EntryPoint, distributions
from typing import Any, Literal

from mslime.config.errors import ConfigError, nearest

Group = Literal["mslime.commands", "mslime.checks", "mslime.rewards", "mslime.environments", "mslime.transports"]
"""`mslime.commands`: a `mslime.cli.command.Command`, by the word that follows `mslime`.
`mslime.checks`: a function of a RunConfig that raises UserError, called by `mslime check` and before a run.
`mslime.rewards`: see `rollout.rewards.scorer`; `mslime.environments`: see `rollout.environments`;
`mslime.transports`: see `weights.transport`."""


def found(group: Group) -> dict[str, EntryPoint]:
    """The entry points of a group, by name, in the order of their names.

    All distributions are read, not the first of each name, as `importlib.metadata.entry_points` does: a checkout on
    PYTHONPATH may hold the `egg-info` of an older build, which lacks the newest entry points.
    """
    return dict(_points(group, tuple(sys.path)))


@functools.lru_cache
def _points(group: Group, path: tuple[str, ...]) -> tuple[tuple[str, EntryPoint], ...]:
    """The same, read once for each state of `sys.path`: some hundred files are opened."""
    points: dict[str, EntryPoint] = {}
    for each in distributions():
        for point in each.entry_points.select(group=group):
            points.setdefault(point.name, point)
    return tuple(sorted(points.items()))


def load(group: Group, name: str, setting: str) -> Any:
    """What the entry point `name` of a group stands for.

    Args:
        setting: the configuration field that holds the name, for messages.

    Raises:
        ConfigError: no installed package has such an entry point, or its module cannot be imported.
    """
    known = found(group)
    if name not in known:
        raise ConfigError(
            setting, name, f"no installed package adds {name!r} to {group} {nearest(name, known)}".rstrip(),
            f"name one of {', '.join(known)}" if known else "install mslime again: bash scripts/install.sh",
        )  # fmt: skip
    point = known[name]
    try:
        return getattr(importlib.import_module(point.module), point.attr)
    except Exception as error:  # another package's module may raise anything while it is imported
        raise ConfigError(
            setting, name, f"{point.value!r} of {_distribution(point)} cannot be imported "
            f"({type(error).__name__}: {error})", "repair or uninstall that package",
        ) from error  # fmt: skip


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an installed package"
