"""Rollout functions as users write them, good and bad. What they do at a certain point is told by `told`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import numpy as np

from mslime.data.sample import Sample
from mslime.rollout.agents.renderer import Renderer
from mslime.rollout.function_contract import _Plain
from mslime.rollout.workflow import Engine, NoRoomError, Task

calls: Counter[tuple[int, int]] = Counter()
"""How often each (group, response) was begun."""
turns: list[tuple[str, str]] = []
"""(text, finish) of every turn that ended."""
told: dict[str, Callable[[Task], Awaitable[None]]] = {}
"""What happens in a tool call of `with_a_tool`."""


def forget() -> None:
    """Begin a test."""
    calls.clear()
    turns.clear()
    told.clear()


async def two_turns(task: Task, engine: Engine) -> Sample:
    calls[task.group_id, task.index] += 1
    sample = engine.new_sample()
    for message in ("OK", ""):
        turn = await engine.generate(sample)
        turns.append((turn.text, turn.finish))
        if message:
            engine.append(sample, message)
    return sample


def plain(tokenizer: object, thinking: object) -> Renderer:
    """Tokens are characters."""
    return _Plain()


async def hears_the_end_of_a_turn(task: Task, engine: Engine) -> None:
    await engine.chat([{"role": "user", "content": "a<|end|>b"}])


open_now: Counter[str] = Counter()
"""Rollouts of `opens_something` that are under way, and the most there were."""


async def opens_something(task: Task, engine: Engine) -> None:
    open_now["now"] += 1
    open_now["most"] = max(open_now["most"], open_now["now"])
    try:
        await engine.generate(engine.new_sample())
    finally:
        open_now["now"] -= 1


async def races_in_a_task(task: Task, engine: Engine) -> Sample:
    """Looks at a clock while the model speaks, as functions with a time limit do. In group 2 the second rollout begins
    when the first has spoken for long."""
    if (task.group_id, task.index) == (2, 1):
        await told["late"](task)
    sample = engine.new_sample()
    turn = asyncio.create_task(engine.generate(sample))
    while not turn.done():
        await asyncio.wait([turn], timeout=0.005)
    return sample


async def with_a_tool(task: Task, engine: Engine) -> None:
    calls[task.group_id, task.index] += 1
    sample = engine.new_sample()
    await engine.generate(sample)
    await told["tool"](task)
    engine.append(sample, [1, 2, 3])
    await engine.generate(sample)


async def needs_its_row(task: Task, engine: Engine) -> None:
    """A function that reads all that a row may have."""
    sample = engine.new_sample()
    assert task.messages is not None and task.tools is not None
    engine.append(sample, f"{task.messages[0]['content']}, {task.tools[0]['name']}, {task.metadata['first']}")
    await engine.generate(sample)


async def one_in_a_list(task: Task, engine: Engine) -> list[Sample]:
    sample = engine.new_sample()
    await engine.generate(sample)
    return [sample]


async def sets_its_reward(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    sample.metadata["seen"] = task.text
    await engine.generate(sample, max_tokens=2)
    sample.reward = 10.0 + task.index


async def short_turns(task: Task, engine: Engine) -> None:
    """Three turns of two tokens without anything between them."""
    sample = engine.new_sample()
    for _ in range(3):
        turn = await engine.generate(sample, max_tokens=2)
        turns.append((turn.text, turn.finish))


async def talks_too_much(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    await engine.generate(sample)
    engine.append(sample, "X" * 1000)


async def until_full(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    while engine.room(sample):
        await engine.generate(sample)
        try:
            engine.append(sample, "MORE")
        except NoRoomError:
            break


async def raises(task: Task, engine: Engine) -> None:
    await engine.generate(engine.new_sample())
    raise KeyError("no such tool")


async def raises_for_one(task: Task, engine: Engine) -> None:
    await engine.generate(engine.new_sample())
    if task.group_id == 2:
        raise KeyError("no such tool")


async def returns_two(task: Task, engine: Engine) -> list[Sample]:
    sample = engine.new_sample()
    await engine.generate(sample)
    return [sample, sample]


async def returns_another(task: Task, engine: Engine) -> Sample:
    await engine.generate(engine.new_sample())
    return Sample.from_prompt(task.group_id, task.index, [1])


async def returns_text(task: Task, engine: Engine) -> str:
    await engine.generate(engine.new_sample())
    return "done"


async def says_nothing(task: Task, engine: Engine) -> None:
    engine.new_sample()


async def changes_tokens(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    await engine.generate(sample)
    sample.tokens = sample.tokens + 1
    await engine.generate(sample)


async def changes_log_probs(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    await engine.generate(sample)
    sample.log_probs = sample.log_probs + 100


async def bad_reward(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    await engine.generate(sample)
    sample.reward = float("nan")


async def cancels_itself(task: Task, engine: Engine) -> None:
    await engine.generate(engine.new_sample())
    raise asyncio.CancelledError


def not_async(task: Task, engine: Engine) -> None:
    pass


async def three_arguments(task: Task, engine: Engine, tools: object) -> None:
    pass


async def tool_last(task: Task, engine: Engine) -> None:
    calls[task.group_id, task.index] += 1
    await engine.generate(engine.new_sample())
    await told["tool"](task)


async def blocks(task: Task, engine: Engine) -> None:
    await engine.generate(engine.new_sample())
    time.sleep(1.1)


async def notes_an_object(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    await engine.generate(sample)
    sample.metadata["tool"] = object()


async def masks_its_own(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    await engine.generate(sample)
    sample.loss_mask = sample.loss_mask & (np.arange(len(sample)) < len(sample) - 2)


async def writes_into_its_mask(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    await engine.generate(sample)
    sample.loss_mask[-2:] = False


async def begins_its_sample_again(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    await engine.generate(sample)
    sample.restart()


async def generates_twice_at_once(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    await asyncio.gather(engine.generate(sample), engine.generate(sample))


async def is_right(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    await engine.generate(sample)
    sample.reward = task.index == 1


async def counts_its_calls(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    sample.metadata.setdefault("log", []).append(task.index)
    await with_a_tool(task, _Given(engine, sample))


async def stops_at_a_word(task: Task, engine: Engine) -> None:
    await engine.generate(engine.new_sample(), stop="</sum>")


class _Given:
    """The engine with its sample made already."""

    def __init__(self, engine: Engine, sample: Sample) -> None:
        self.generate, self.append = engine.generate, engine.append
        self.new_sample = lambda: sample
