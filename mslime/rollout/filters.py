"""Dynamic filters: which complete groups are worth training on."""

from __future__ import annotations

from collections.abc import Callable

from mslime.config.errors import ConfigError
from mslime.data.sample import Group
from mslime.extensions import load_function

GroupFilter = Callable[[Group], bool]


def rewards_differ(group: Group) -> bool:
    """Whether a group teaches anything: with equal rewards every advantage is zero (DAPO, arXiv 2503.14476)."""
    rewards = [s.reward for s in group.samples if s.reward is not None]
    return max(rewards) - min(rewards) > 1e-6


def load_filter(spec: str) -> tuple[str, GroupFilter | None]:
    """(name for the ledger, filter that is True for groups to keep) of `rollout.dynamic_filter`; None keeps all.

    Raises:
        ConfigError: an unknown name, or a function that cannot be found.
    """
    if spec == "none":
        return spec, None
    if spec == "zero_variance":
        return spec, rewards_differ
    function = load_function(spec, "rollout.dynamic_filter")

    def keep(group: Group) -> bool:
        try:
            verdict = function(group)
        except Exception as error:
            where = f"group {group.group_id} from {group.source}"
            raise ConfigError("rollout.dynamic_filter", spec, f"raised {type(error).__name__}: {error} for {where}",
                              "mend the function") from error  # fmt: skip
        if not isinstance(verdict, bool):
            raise ConfigError("rollout.dynamic_filter", verdict, f"{spec} must return True (keep) or False",
                              "mend the function")  # fmt: skip
        return verdict

    return "filter", keep
