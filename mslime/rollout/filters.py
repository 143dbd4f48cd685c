"""User functions that receive the samples of a complete group: dynamic filters, and the hook for every sample."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from mslime.config.algorithm import SAME_REWARD
from mslime.config.errors import ConfigError
from mslime.data.sample import Group, Sample, SampleStatus
from mslime.extensions import calling, check_parameters, checked_metrics, load_function

GroupFilter = Callable[[Group], bool]
UNSHAPED = "reward/unshaped/mean"
"""Key in the `scores` of a rollout's last sample: its reward before penalties; absent if there were none."""


def rewards_differ(group: Group) -> bool:
    """Whether rewards differ within a group: with equal rewards every advantage is zero (DAPO, arXiv 2503.14476).
    Penalties for length and repetition are ignored: they would keep groups that are all right or all wrong."""
    last = [samples[-1] for samples in group.rollouts()]
    rewards = [s.scores.get(UNSHAPED, s.reward) for s in last if s.reward is not None]
    low, high = min(rewards), max(rewards)
    return high - low > SAME_REWARD * max(abs(low), abs(high))


def load_filter(spec: str) -> tuple[str, GroupFilter | None]:
    """(name for the ledger, filter that is True for groups to keep) of `rollout.dynamic_filter`; None keeps all.

    Raises:
        ConfigError: an unknown name, or a function that was not found.
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
                              "fix the function")  # fmt: skip
        return verdict

    return "filter", keep


# The user function that is called for every sample of a scored group, in training: `hooks.sample`.

SETTING = "hooks.sample"
Hook = Callable[[Group], None]


def load_sample_hook(spec: str | None) -> Hook:
    """Function that calls the hook for the samples of a complete group. Raises ConfigError if the hook is not found."""
    if spec is None:
        return lambda group: None
    function = load_function(spec, SETTING)
    own = set[str]()  # names that it returned before: it may be called twice for a group

    def call(group: Group) -> None:
        """Raises ConfigError if the hook raised, changed a sample, or returned neither metrics nor None."""
        for sample in group.samples:
            if sample.status is SampleStatus.FAILED:
                continue
            about, before = f"sample {sample.index} of group {sample.group_id}", _print(sample)
            with calling(spec, SETTING, about):
                returned: object = function(sample)
            found = checked_metrics({} if returned is None else returned)
            if isinstance(found, str):
                hint = "return a mapping of names and numbers, or None"
                raise ConfigError(SETTING, spec, f"{found} ({about})", hint)
            if _print(sample) != before:
                hint = "the hook must only read samples"
                raise ConfigError(SETTING, spec, f"changed {about}", hint)
            named = {f"user/{name}": number for name, number in found.items()}
            taken = next((name for name in named if name in sample.scores and name not in own), None)
            if taken is not None:
                rule = f"returned {taken}, which the reward or the rollout also returned ({about})"
                raise ConfigError(SETTING, spec, rule, "choose another name")
            own.update(named)
            sample.scores |= named

    return call


def _print(sample: Sample) -> tuple[Any, ...]:
    """Fingerprint of the values that a hook may not change."""
    checksum = 0
    for column in (sample.tokens, sample.loss_mask, sample.log_probs):
        checksum = zlib.crc32(column.data, checksum)
    return checksum, len(sample), sample.reward, tuple(sample.process_rewards), tuple(sample.segments)
