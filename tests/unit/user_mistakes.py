"""Further rollout functions with a mistake; see docs/rollout_functions.md."""

from __future__ import annotations

from mslime.data.sample import Sample
from mslime.rollout.workflow import Engine, Episode, Task


async def says_it_failed(task: Task, engine: Engine) -> Episode:
    await engine.generate(engine.new_sample())
    return Episode(failed="no environment")


async def uses_a_foreign_sample(task: Task, engine: Engine) -> None:
    await engine.generate(Sample.from_prompt(task.group_id, task.index, [1]))


async def cuts_its_prompt(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    await engine.generate(sample)
    engine.cut(sample, 0)


async def forgets_what_was_sampled(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    await engine.generate(sample)
    sample.segments.pop()
