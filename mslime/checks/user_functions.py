"""Checks of a user's functions for `mslime check`: rewards, environments, hooks. Each is imported; with --try, called.

A user's function runs in its own process here too: side effects of its import do no harm.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mslime.config.algorithm import AlgorithmConfig
from mslime.config.base import is_function
from mslime.config.data import DataConfig
from mslime.config.errors import ConfigError, DataError
from mslime.config.reward import RewardConfig, RewardPartConfig, ScoringConfig
from mslime.config.rollout import RolloutConfig
from mslime.config.schema import HooksConfig, RunConfig
from mslime.config.weights import WeightsConfig
from mslime.data.sample import Sample, SampleStatus
from mslime.data.source import Prompt, PromptSource
from mslime.data.tokenizer import Tokenizer
from mslime.extensions import check_parameters, load_function
from mslime.rollout.environments.environment_pool import EnvironmentFailedError, EnvironmentPool
from mslime.rollout.environments.protocol import (
    SETTING,
    EnvironmentJob,
    EnvironmentTask,
    Observation,
    Step,
    load_environment,
)
from mslime.rollout.filters import load_filter
from mslime.rollout.rewards.reward_kinds import alternatives, reward_kind
from mslime.rollout.rewards.scorer import RewardScorer
from mslime.rollout.rewards.servers import token_of
from mslime.rollout.workflow import load_workflow
from mslime.threads import in_thread

if TYPE_CHECKING:
    from mslime.checks.datasets import DrawnPrompts

OTHER_ROWS = 8  # rows that are searched for a label that is wrong for the first row


def check_rewards(
    rollout: RolloutConfig,
    reward: RewardConfig,
    data: DataConfig,
    sources: Mapping[str, PromptSource | DrawnPrompts],
    tokenizer: Tokenizer,
) -> list[str]:
    """Check labels and functions of training and of every held-out set; returns notes.

    Args:
        sources: by name of the held-out set; "" is training.

    Raises:
        DataError: a row's label cannot be graded.
        ConfigError: a function of reward, filter or rollout cannot be used, or the token of a served reward is not set.
    """
    load_filter(rollout.dynamic_filter)
    if rollout.environment is None:
        load_workflow(rollout.function)
    notes: list[str] = []
    own = {s.name: (f"data.eval_sets[{i}].reward", s.reward) for i, s in enumerate(data.eval_sets)}
    sizes = {"": rollout.group_size} | {s.name: s.samples_per_prompt for s in data.eval_sets}
    for name, source in sources.items():
        place, scoring = own.get(name, ("reward", None))
        found = _check_labels(source, scoring or reward, place, data.label_key)
        notes += [f"{name or 'training'}: {note}" for note in found]
        if scoring is not None or not name:
            own_scoring = scoring or reward
            for i, part in enumerate(own_scoring.graders):  # the tokens of served reward models
                where = f"{place}.parts[{i}]" if own_scoring.parts else place
                if part.servers is not None and (variable := part.servers[1].auth_env) is not None:
                    token_of(variable, f"{where}.{part.servers[0]}")
            if any(part.kind == "custom" for part in own_scoring.graders):
                rows = [source.at(i) for i in range(min(len(source), OTHER_ROWS))]
                notes += try_reward_functions(own_scoring, place, rows, tokenizer, sizes[name])
    return notes


def _check_labels(
    source: PromptSource | DrawnPrompts, scoring: ScoringConfig, place: str, label_key: str | None
) -> list[str]:
    kinds = {g.kind: kind for g in scoring.graders if (kind := reward_kind(g.kind, place)) is not None}
    for where, label in source.labels():
        for name, kind in kinds.items():
            if problem := kind.label_problem(label):
                raise DataError(
                    where, label, f"the reward kind {name} cannot grade this label: {problem}",
                    f"fix or delete the row, or set data.label_key to the key of the answer (now {label_key!r})",
                )  # fmt: skip
    notes = dict.fromkeys(kind.notes for kind in kinds.values() if kind.notes is not None)
    return [note for write in notes for note in write(source.labels(), len(source))]


def try_reward_functions(
    scoring: ScoringConfig, place: str, rows: Sequence[Prompt], tokenizer: Tokenizer, group_size: int
) -> list[str]:
    """Score the first row with four responses: its label, none, a wrong label and a truncated one.

    Args:
        rows: the first, and others whose labels are wrong responses.
        group_size: samples of a prompt, for functions of groups.

    Raises:
        ConfigError: a function cannot be imported, or fails and `on_error` is `fail`.
    """
    custom = [(part, f"{place}.parts[{i}]" if scoring.parts else place)
              for i, part in enumerate(scoring.graders) if part.kind == "custom"]  # fmt: skip
    samples = _responses(rows, tokenizer)
    work = _try_all(custom, samples, group_size, scoring.on_error == "fail")
    return in_thread(asyncio.run, work).result()  # the caller may have an event loop


async def _try_all(
    functions: list[tuple[RewardPartConfig, str]], samples: Mapping[str, Sample], group_size: int, fatal: bool
) -> list[str]:
    lines: list[str] = []
    for part, place in functions:
        alone = ScoringConfig(
            kind="custom", function=part.function, per=part.per, timeout_s=part.timeout_s, workers=1, on_error="zero"
        )
        scorer = RewardScorer(alone, place)
        try:
            await scorer.start()
            (tried, label), *others = [(how, _copies(s, group_size, scorer.per_group)) for how, s in samples.items()]
            mixed = [dataclasses.replace(g[0], index=i) for i, (_, g) in enumerate(itertools.islice(
                itertools.cycle([(tried, label), *others]), group_size))] if scorer.per_group else []  # fmt: skip
            rest = [("a mixed group", mixed)] if scorer.per_group else others
            outcomes = [(how, group, await scorer.score_group(group)) for how, group in [(tried, label), *rest]]
        finally:
            await scorer.close()
        for how, group, _ in outcomes if fatal else []:
            if error := next((s.error for s in group if s.error), ""):
                rule = f"fails on the first row with {how} as the response: {error}"
                raise ConfigError(f"{place}.function", part.function, rule, "fix it, or set on_error to zero or drop")
        (_, group, rewards), *rest = outcomes
        of = f" of a group of {len(group)}" if scorer.per_group else ""
        others_scored = [f"{how}: {_outcome(group, rewards)}" for how, group, rewards in rest]
        first = f"with {tried} as the response{of}: {_outcome(group, rewards)}"
        lines.append("; ".join([f"{part.function} was tried on the first row {first}", *others_scored]))
    return lines


def _copies(sample: Sample, group_size: int, per_group: bool) -> list[Sample]:
    return [dataclasses.replace(sample, index=i) for i in range(group_size if per_group else 1)]


def _outcome(group: list[Sample], rewards: list[float | None]) -> str:
    error = next((s.error for s in group if s.error), "")
    return error or "scores " + ", ".join(dict.fromkeys(f"{reward:g}" for reward in rewards))


def _responses(rows: Sequence[Prompt], tokenizer: Tokenizer) -> dict[str, Sample]:
    """Finished samples of the first row, by kind of response."""
    right = next(_texts(rows[0].label), "")
    wrong = next((text for row in rows[1:] for text in _texts(row.label) if text != right), "")
    found = {"its label": _answered(rows[0], right, tokenizer), "an empty response": _answered(rows[0], "", tokenizer)}
    if wrong:
        found["the label of another row"] = _answered(rows[0], wrong, tokenizer)
    if len(right) > 1:
        cut = found["its label, cut short"] = _answered(rows[0], right[: len(right) // 2], tokenizer)
        cut.status = SampleStatus.TRUNCATED
    return found


def _answered(prompt: Prompt, response: str, tokenizer: Tokenizer) -> Sample:
    """A row with a response as a finished sample."""
    sample = Sample.from_prompt(0, 0, prompt.tokens, prompt.label)
    sample.metadata = dict(prompt.metadata)
    sample.response = response
    tokens = np.asarray(tokenizer.encode(sample.response, special_tokens=False), np.int32)
    if len(tokens):
        zeros = np.zeros(len(tokens), np.float32)
        sample.extend(tokens, log_probs=zeros, versions=[(0, 0, len(tokens))], engine="check")
    sample.status = SampleStatus.COMPLETED
    return sample


def _texts(label: object) -> Iterator[str]:
    """Text in a label, if any."""
    try:
        yield from alternatives(label)
    except ValueError:
        return


# Environments for `mslime check --try`: plays some turns in a separate process, as in a run.

ACTIONS = ("", "A reply that no environment waits for.", "A reply that ends in the middle of a {", "0")
SHOWN = 60


def check_environment(
    function: str, options: Mapping[str, Any] | None = None, prompt: Prompt | None = None, *, limit_s: float = 60.0,
    memory_mib: float | None = None,
) -> list[str]:  # fmt: skip
    """Try an environment: reset, some typical model actions, close; twice for the same task.

    Args:
        function: `module:Class`. options: arguments of its constructor.
        limit_s: seconds for each call.

    Raises:
        ConfigError: the class cannot be used, or one of its methods raised, hung or returned something else.
    """
    job = EnvironmentJob(function, dict(options or {}), limit_s, memory_mib)
    row = prompt or Prompt([1], None, {}, "made_up:1", "A prompt.")
    task = EnvironmentTask(row.text, row.label, row.metadata, 0, 0, False, 0)
    return in_thread(asyncio.run, _tried(job, task)).result()  # the caller may have its own event loop


async def _tried(job: EnvironmentJob, task: EnvironmentTask) -> list[str]:
    pool = EnvironmentPool(job, 1)
    try:
        (first, steps), (repeated, _) = await _played(pool, task), await _played(pool, task)
    except EnvironmentFailedError as error:
        message = str(error).removeprefix(f"{job.function}: ")
        raise ConfigError(SETTING, job.function, message,
                          "fix that method; step must accept any text of a model") from error  # fmt: skip
    finally:
        await pool.close()
    another = "a different one (rollouts of a prompt are compared: draw by task.group_id)"
    same = "the same" if first == repeated else another
    return [
        f"reset: {_shown(first)}, and {same} for the same task",
        *(f"step({action[:SHOWN]!r}): {_summary(step)}" for action, step in zip(ACTIONS, steps, strict=False)),
        "closed",
    ]


async def _played(pool: EnvironmentPool, task: EnvironmentTask) -> tuple[Observation, list[Step]]:
    environment, steps = await pool.open(alone=True), list[Step]()
    try:
        first = await environment.reset(task)
        for action in ACTIONS:
            steps.append(await environment.step(action))
            if steps[-1].done:
                break
        return first, steps
    finally:
        await environment.close()


def _summary(step: Step) -> str:
    reward = "no reward" if step.reward is None else f"reward {step.reward:g}"
    final = "" if step.final_reward is None else f", final reward {step.final_reward:g}"
    return f"{_shown(step.observation)}, {reward}{final}{', done' if step.done else ''}"


def _shown(observation: Observation) -> str:
    return repr(observation if len(str(observation)) <= SHOWN else f"{str(observation)[:SHOWN]}...")


# User functions that a run calls: each is imported and checked before a GPU is claimed.
#
# Reward functions are not here: worker processes import and try them (`check_rewards`).

# `mslime check` imports all of them, and each process of a run only those that it calls itself.


@dataclass(frozen=True)
class UserFunction:
    """A user's function that the run will call.

    Attributes:
        setting: setting that names it.
        function: `module:function`, or a class.
        parameters: names of its arguments, in order.
        options: arguments of an environment's constructor.
    """

    setting: str
    function: str
    parameters: tuple[str, ...]
    options: Mapping[str, Any] | None = None


def run_functions(config: RunConfig) -> list[UserFunction]:
    """The functions that a run's settings name, in the order of their calls in a step."""
    hook = _user_function("hooks.step", config.hooks.step, "record")
    if config.train.task == "sft":
        return hook
    of_rollouts = rollout_functions(config.data, config.rollout, config.hooks, config.algorithm)
    return [*of_rollouts, *trainer_functions(config.algorithm, config.weights), *hook]


def rollout_functions(
    data: DataConfig, rollout: RolloutConfig, hooks: HooksConfig, algorithm: AlgorithmConfig
) -> list[UserFunction]:
    """Functions that the rollout service calls."""
    return [
        *_user_function("data.source", data.source, "data", "seed"),
        *_user_function("rollout.function", rollout.function, "task", "engine"),
        *_user_function(SETTING, rollout.environment, options=rollout.environment_options),
        *_user_function("rollout.dynamic_filter", rollout.dynamic_filter, "group"),
        *_user_function("hooks.sample", hooks.sample, "sample"),
        *_user_function("algorithm.advantage", algorithm.advantage, "rewards"),
    ]


def trainer_functions(algorithm: AlgorithmConfig, weights: WeightsConfig) -> list[UserFunction]:
    """Functions that trainer ranks call in reinforcement learning."""
    return [
        *_user_function("algorithm.loss", algorithm.loss, "batch", "algorithm"),
        *_user_function("algorithm.correction.function", algorithm.correction.function, "log_ratio", "batch"),
        *_user_function("weights.transport", weights.transport, "link"),
    ]


def _user_function(
    setting: str, named: str | None, *parameters: str, options: Mapping[str, Any] | None = None
) -> list[UserFunction]:
    """The function that a setting names; none if it names one of mslime's choices, or nothing."""
    return [] if named is None or not is_function(named) else [UserFunction(setting, named, parameters, options)]


def check_functions(functions: Iterable[UserFunction]) -> None:
    """Import every function, and check that it accepts its arguments.

    Raises:
        ConfigError: the first function that cannot be imported or called with them.
    """
    for each in functions:
        if each.options is not None:
            load_environment(each.function, each.options)
        else:
            function = load_function(each.function, each.setting)
            check_parameters(function, each.function, each.setting, *each.parameters)
