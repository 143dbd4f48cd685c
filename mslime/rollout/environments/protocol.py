"""Interface of environments: user classes, the arguments of their methods, and permitted return values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, SupportsFloat

from mslime.config.errors import ConfigError
from mslime.extensions import check_parameters, checked_metrics, load_function

SETTING = "rollout.environment"
Messages = list[dict[str, str]]
"""Chat messages, each with a role and a text."""
Observation = str | Messages
METHODS: dict[str, tuple[str, ...]] = {"reset": ("task",), "step": ("action",), "close": ()}
_ROLES = ("system", "user", "tool")


@dataclass(frozen=True)
class EnvironmentTask:
    """Task of an episode.

    Attributes:
        text: of the prompt, without special tokens. messages: the same as chat messages; None if it has none.
        label, metadata: of the prompt's row.
        group_id, index: of the prompt, and of the rollout among those of the prompt. Rollouts of a prompt are compared
            with each other, so random choices should depend on `group_id`, not on `seed`.
        evaluation: whether this is for a held-out set.
        seed: constant over all attempts of this rollout, different for every other rollout of the run.
    """

    text: str
    label: Any
    metadata: Mapping[str, Any]
    group_id: int
    index: int
    evaluation: bool
    seed: int
    messages: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Step:
    """Result of an action.

    Attributes:
        observation: the model's next input: a text, or chat messages. Empty when the episode is done.
        reward: of this step; None: it has none. If no step has one, `reward` of the run scores the episode.
        done: the episode has ended.
        final_reward: of the whole episode, in place of the sum of its steps' rewards.
        metrics: numbers that are logged as `user/<name>`; the last value of each name in an episode counts.
    """

    observation: Observation = ""
    reward: float | None = None
    done: bool = False
    final_reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class WrongAnswerError(Exception):
    """A method returned an invalid value; the message describes it."""


class Environment(Protocol):
    """One episode: each object is reset once, and always closed. Each method may be async instead.

    A method that is not async runs on a thread that belongs to this episode.
    """

    def reset(self, task: EnvironmentTask) -> Observation | Awaitable[Observation]:
        """Begin the episode. The result follows the prompt; an empty text adds nothing."""
        ...

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Return the observation after the model's action. A tuple (observation, reward, done) is also accepted."""
        ...


def load_environment(spec: str, options: Mapping[str, Any]) -> type:
    """Load the class of `rollout.environment`.

    Args:
        options: arguments of its constructor.

    Raises:
        ConfigError: it was not found, is not a class, or its constructor or a method of METHODS takes other arguments.
    """
    found = load_function(spec, SETTING)
    if not inspect.isclass(found):
        raise ConfigError(SETTING, spec, "is not a class", "name a class with the methods reset(task) and step(action)")
    try:
        inspect.signature(found).bind(**options)
    except ValueError:
        pass  # implemented in C, without a readable signature
    except TypeError as error:
        given = ", ".join(f"{name}={value!r:.40}" for name, value in options.items())
        raise ConfigError(
            f"{SETTING}_options", dict(options), f"{spec} cannot be constructed with ({given}): {error}",
            "set the arguments of its __init__",
        ) from error  # fmt: skip
    for method, parameters in METHODS.items():
        function = getattr(found, method, None)
        if callable(function):
            check_parameters(function, spec, SETTING, "self", *parameters)
        elif method != "close":
            written = f"write it as def {method}(self, {', '.join(parameters)})"
            raise ConfigError(SETTING, spec, f"has no method {method}", written)
    return found


def checked_observation(value: object, place: str) -> Observation:
    """Validate a text, or messages of plain strings. Raises WrongAnswerError that describes any other value of
    `place`."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise WrongAnswerError(f"{place} returned {value!r:.80}, which is neither a text nor a list of chat messages")
    return [_message(one, place) for one in value]


def _message(value: object, place: str) -> dict[str, str]:
    given: Mapping[Any, Any] = value if isinstance(value, Mapping) else {}
    role, content = given.get("role"), given.get("content")
    if role not in _ROLES or not isinstance(content, str):
        form = f'{{"role": ..., "content": text}} with a role of {", ".join(_ROLES)}'
        raise WrongAnswerError(f"{place} returned the message {value!r:.80}; expected {form}")
    return {str(key): str(part) for key, part in given.items()}


def checked_step(value: object) -> Step:
    """Validate the result of `step`, with plain numbers. Raises WrongAnswerError that describes the error."""
    if isinstance(value, tuple) and len(value) == 3:
        value = Step(*value)
    if not isinstance(value, Step):
        raise WrongAnswerError(f"step returned {value!r:.80}, which is neither a Step nor (observation, reward, done)")
    if not isinstance(value.done, bool | int) or value.done not in (0, 1):
        raise WrongAnswerError(f"step returned done = {value.done!r:.80}, which is neither true nor false")
    metrics = checked_metrics(value.metrics)
    if isinstance(metrics, str):
        raise WrongAnswerError(f"step {metrics}")
    return Step(
        checked_observation(value.observation, "step"), _number(value.reward, "reward"), bool(value.done),
        _number(value.final_reward, "final_reward"), metrics,
    )  # fmt: skip


def _number(value: object, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, SupportsFloat) or not math.isfinite(float(value)):
        raise WrongAnswerError(f"step returned {name} = {value!r:.80}, which is not a finite number")
    return float(value)


# Messages between environment processes and their parent, where their program is `__main__`.

CLOSE_S = 10.0
"""Time limit for closing an environment, in seconds: runs wait for it when they stop."""


class FailureReason(Enum):
    """Reasons why an environment returned no answer."""

    RAISED = "raised"
    """It raised, or returned an invalid value."""
    LATE = "late"
    """It took too long, and may still be running."""
    MEMORY = "memory"
    """Its process ran out of memory, possibly because of another environment."""


@dataclass(frozen=True)
class EnvironmentJob:
    """The job of an environment process.

    Attributes:
        function: `module:Class`.
        options: arguments of its constructor.
        limit_s: seconds for one call.
        memory_mib: that the process may take beyond its use after the import; None: no limit.
        setting: the setting that names it, for messages.
    """

    function: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    limit_s: float = 60.0
    memory_mib: float | None = None
    setting: str = SETTING

    def limit_of(self, method: str) -> float:
        """Time limit of a method's call, in seconds."""
        return min(self.limit_s, CLOSE_S) if method == "close" else self.limit_s
