"""A user-defined filter: `rollout.dynamic_filter: examples.extending.filter:some_right`."""

from __future__ import annotations

from mslime.data.sample import Group


def some_right(group: Group) -> bool:
    """Keep groups in which some responses are right, but not all of them."""
    right = [sample.reward is not None and sample.reward > 0.5 for sample in group.samples]
    return any(right) and not all(right)
