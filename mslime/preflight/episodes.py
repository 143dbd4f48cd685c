"""What `mslime check --try` says of an environment: some turns are played, in a process of its own as in a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from mslime.config.errors import ConfigError
from mslime.data.source import Prompt
from mslime.rollout.environments.pool import EnvironmentFailedError, EnvironmentPool, OpenEnvironment
from mslime.rollout.environments.protocol import SETTING, EnvironmentTask, Observation, Step
from mslime.rollout.environments.result import EnvironmentJob
from mslime.threads import in_thread

ACTIONS = ("", "A reply that no environment waits for.", "A reply that ends in the middle of a {", "0")
SHOWN = 60


def check_environment(
    function: str, options: Mapping[str, Any] | None = None, prompt: Prompt | None = None, *, limit_s: float = 60.0,
    memory_mib: float | None = None,
) -> list[str]:  # fmt: skip
    """Try an environment: reset, some actions as a model may say them, close; twice for the same task.

    Args:
        function: `module:Class`. options: what its constructor is given.
        limit_s: seconds for each call.

    Raises:
        ConfigError: the class cannot be used, or one of its methods raised, hung or returned something else.
    """
    job = EnvironmentJob(function, dict(options or {}), limit_s, memory_mib)
    asked = prompt or Prompt([1], None, {}, "made_up:1", "A prompt.")
    task = EnvironmentTask(asked.text, asked.label, asked.metadata, 0, 0, False, 0)
    return in_thread(asyncio.run, _tried(job, task)).result()  # the caller may have an event loop of its own


async def _tried(job: EnvironmentJob, task: EnvironmentTask) -> list[str]:
    pool = EnvironmentPool(job, 1)
    try:
        (first, steps), (again, _) = await _played(pool, task), await _played(pool, task)
    except EnvironmentFailedError as error:
        told = str(error).removeprefix(f"{job.function}: ")
        raise ConfigError(SETTING, job.function, told,
                          "correct that method; step must answer any text of a model") from error  # fmt: skip
    finally:
        await pool.close()
    same = "the same" if first == again else "another one (rollouts of a prompt are compared: draw by task.group_id)"
    return [
        f"reset: {_shown(first)}, and {same} for the same task",
        *(f"step({action[:SHOWN]!r}): {_told(step)}" for action, step in zip(ACTIONS, steps, strict=False)),
        "closed",
    ]


async def _played(pool: EnvironmentPool, task: EnvironmentTask) -> tuple[Observation, list[Step]]:
    environment = await pool.open(alone=True)
    try:
        return await environment.reset(task), await _steps(environment)
    finally:
        await environment.close()


async def _steps(environment: OpenEnvironment) -> list[Step]:
    steps: list[Step] = []
    for action in ACTIONS:
        steps.append(await environment.step(action))
        if steps[-1].done:
            break
    return steps


def _told(step: Step) -> str:
    reward = "no reward" if step.reward is None else f"reward {step.reward:g}"
    final = "" if step.final_reward is None else f", final reward {step.final_reward:g}"
    return f"{_shown(step.observation)}, {reward}{final}{', done' if step.done else ''}"


def _shown(observation: Observation) -> str:
    return repr(observation if len(str(observation)) <= SHOWN else f"{str(observation)[:SHOWN]}...")
