"""Dynamic filters: which complete groups are worth training on."""

from __future__ import annotations

from collections.abc import Callable

from mslime.config.algorithm import SAME_REWARD
from mslime.config.errors import ConfigError
from mslime.data.sample import Group
from mslime.extensions import calling, check_parameters, load_function

GroupFilter = Callable[[Group], bool]
UNSHAPED = "reward/unshaped/mean"
"""In the `scores` of a rollout's last sample: its reward before penalties; absent where none were taken off."""


def rewards_differ(group: Group) -> bool:
    """Whether a group teaches anything: with equal rewards every advantage is zero (DAPO, arXiv 2503.14476). Penalties
    for length and repetition aside: they would keep groups that are all right or all wrong."""
    last = [samples[-1] for samples in group.rollouts()]
    rewards = [s.scores.get(UNSHAPED, s.reward) for s in last if s.reward is not None]
    low, high = min(rewards), max(rewards)
    return high - low > SAME_REWARD * max(abs(low), abs(high))


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
    check_parameters(function, spec, "rollout.dynamic_filter", "group")

    def keep(group: Group) -> bool:
        with calling(spec, "rollout.dynamic_filter", f"group {group.group_id} from {group.source}"):
            verdict = function(group)
        if not isinstance(verdict, bool):
            raise ConfigError("rollout.dynamic_filter", verdict, f"{spec} must return True (keep) or False",
                              "mend the function")  # fmt: skip
        return verdict

    return "filter", keep
