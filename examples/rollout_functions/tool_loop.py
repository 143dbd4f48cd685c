"""A loop with a tool: `rollout.function: examples.rollout_functions.tool_loop:with_sums`."""

from __future__ import annotations

import re

from mslime.data.sample import Sample
from mslime.rollout.workflow import Engine, Task

SUM = re.compile(r"<sum>(\d+(?:\+\d+)*)</sum>$")


async def with_sums(task: Task, engine: Engine) -> Sample:
    """At most four turns. A sum written as <sum>2+3</sum> is computed, and generation continues with it."""
    sample = engine.new_sample()
    for _ in range(4):
        turn = await engine.generate(sample, stop=["</sum>"])
        found = SUM.search(turn.text)
        if found is None:
            break
        engine.append(sample, f"={sum(int(n) for n in found[1].split('+'))}\n")
    return sample
