"""One turn: `rollout.function: examples.rollout_functions.single_turn:graded`."""

from __future__ import annotations

from mslime.rollout.workflow import Engine, Episode, Task


async def graded(task: Task, engine: Engine) -> Episode:
    """One response, graded here, with an extra metric for the log."""
    sample = engine.new_sample()
    turn = await engine.generate(sample)
    right = turn.text.strip() == str(task.label)
    return Episode([sample], reward=float(right), metrics={"empty": float(not turn.text)})
