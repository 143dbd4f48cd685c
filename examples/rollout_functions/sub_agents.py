"""Sub-agents: `rollout.function: examples.rollout_functions.sub_agents:with_helpers`."""

from __future__ import annotations

import asyncio

from mslime.data.sample import Sample
from mslime.rollout.workflow import Engine, Task


async def with_helpers(task: Task, engine: Engine) -> list[Sample]:
    """The model's first lines are tasks for two helpers, which work in parallel. It answers with their reports."""
    chief = engine.new_sample()
    plan = await engine.generate(chief, max_tokens=128)
    parts = [line for line in plan.text.splitlines() if line.strip()][:2]
    helpers = [engine.new_sample(engine.encode(f"{part}\n")) for part in parts]
    reports = await asyncio.gather(*(engine.generate(helper, max_tokens=128) for helper in helpers))
    engine.append(chief, "\n".join(["", *(report.text for report in reports), ""]))
    await engine.generate(chief)
    return [*helpers, chief]
