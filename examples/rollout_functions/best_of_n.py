"""The best of several answers: `rollout.function: examples.rollout_functions.best_of_n:think_once`."""

from __future__ import annotations

import asyncio

from mslime.rollout.workflow import Engine, Episode, Task

ANSWERS = 3


async def think_once(task: Task, engine: Engine) -> Episode:
    """One thought with several answers that branch off. The reward is 1 if one of them is right."""
    thought = engine.new_sample()
    await engine.generate(thought, max_tokens=512, stop=["</think>"])
    answers = [engine.branch(thought) for _ in range(ANSWERS)]
    turns = await asyncio.gather(*(engine.generate(answer, max_tokens=64) for answer in answers))
    right = [float(turn.text.strip() == str(task.label)) for turn in turns]
    steps = [(answer, len(answer) - 1, worth) for answer, worth in zip(answers, right, strict=True)]
    return Episode([thought, *answers], reward=max(right), step_rewards=steps, metrics={"right": sum(right) / ANSWERS})
