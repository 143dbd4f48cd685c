"""A rollout of your own: `rollout.function: examples.extending.rollout:with_calculator`."""

from __future__ import annotations

import re

from mslime.data.sample import Sample
from mslime.rollout.workflow import Engine, Episode, Task

SUM = re.compile(r"<sum>(\d+(?:\+\d+)*)</sum>$")


async def with_calculator(task: Task, engine: Engine) -> Sample:
    """At most four turns. What the model writes as <sum>2+3</sum> is added up, and it goes on with the result."""
    sample = engine.new_sample()
    for _ in range(4):
        turn = await engine.generate(sample, stop=["</sum>"])
        asked = SUM.search(turn.text)
        if asked is None:
            break
        engine.append(sample, f"={sum(int(n) for n in asked[1].split('+'))}\n")
    return sample


async def with_a_critic(task: Task, engine: Engine) -> Episode:
    """A second sequence of the same rollout judges the answer. Both are trained, with the answer's reward."""
    answer = engine.new_sample()
    turn = await engine.generate(answer)
    critic = engine.new_sample(engine.encode(f"{task.text}\n{turn.text}\nIs that right?"))
    await engine.generate(critic, max_tokens=64)
    return Episode([critic, answer])
