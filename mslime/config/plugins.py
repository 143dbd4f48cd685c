"""Plug-ins of mslime: entry points of installed distributions.

A package adds a plug-in by a table of its pyproject.toml, and nothing else:

    [project.entry-points."mslime.rewards"]
    unit-tests = "my_package.rewards:UnitTests"

The distribution of mslime adds those of its second package, `mslime_plugins`, through the same groups. mslime itself
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
"""`mslime.commands`: a `mslime.cli.command.Command`, named by the subcommand. `mslime.checks`: a function of a
RunConfig that raises UserError, called by `mslime check` and before a run. `mslime.rewards`: see
`rollout.rewards.scorer`; `mslime.environments`: see `rollout.environments`; `mslime.transports`: see
`weights.transport`.
"""


def found(group: Group) -> dict[str, EntryPoint]:
    """Entry points of a group by name, sorted by name.

    All distributions are read, not the first of each name, as `importlib.metadata.entry_points` does: a checkout on
    PYTHONPATH may hold the `egg-info` of an older build, which lacks the newest entry points.
    """
    return dict(_points(group, tuple(sys.path)))


@functools.lru_cache
def _points(group: Group, path: tuple[str, ...]) -> tuple[tuple[str, EntryPoint], ...]:
    """`found`, cached for each state of `sys.path`: it opens some hundred files."""
    points: dict[str, EntryPoint] = {}
    for each in distributions():
        for point in each.entry_points.select(group=group):
            points.setdefault(point.name, point)
    return tuple(sorted(points.items()))


def load(group: Group, name: str, setting: str) -> Any:
    """Load the object of entry point `name` in a group.

    Args:
        setting: the configuration field that holds the name, for messages.

    Raises:
        ConfigError: no installed package has such an entry point, or its module cannot be imported.
    """
    known = found(group)
    if name not in known:
        hint = f"name one of {', '.join(known)}" if known else "install mslime again: bash scripts/install.sh"
        raise ConfigError(
            setting, name, f"no installed package provides {name!r} in {group}", nearest(name, known) or hint
        )
    point = known[name]
    try:
        return getattr(importlib.import_module(point.module), point.attr)
    except Exception as error:  # another package's module may raise anything during import
        package = point.dist.name if point.dist is not None else "an installed package"
        raise ConfigError(
            setting, name, f"{point.value!r} of {package} cannot be imported "
            f"({type(error).__name__}: {error})", "repair or uninstall that package",
        ) from error  # fmt: skip
