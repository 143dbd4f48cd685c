"""Rollout functions of several sequences, good and bad."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

from mslime.data.sample import Sample
from mslime.rollout.workflow import Engine, Episode, NoRoomError, Task

OTHER_PROMPT = [7, 8, 9]
stages: list[asyncio.Event] = []
"""When each tool call of `patient` returns."""


async def branches(task: Task, engine: Engine) -> list[Sample]:
    """Two turns, and another second turn branched off the first."""
    trunk = engine.new_sample()
    await engine.generate(trunk, max_tokens=3)
    other = engine.branch(trunk)
    for sample, said in ((trunk, "A"), (other, "BB")):
        engine.append(sample, said)
    await asyncio.gather(engine.generate(trunk), engine.generate(other, max_tokens=2))
    return [trunk, other]


async def rewards_a_shared_turn(task: Task, engine: Engine) -> Episode:
    """The step is named by the branch, and trained in the trunk."""
    trunk, other = await branches(task, engine)
    return Episode([other, trunk], 1.0, [(other, other.prompt_length + 2, 0.5), (other, len(other) - 1, 0.25)])


async def rewards_a_shared_turn_of_the_branch_alone(task: Task, engine: Engine) -> Episode:
    other = (await branches(task, engine))[1]
    return Episode([other], 1.0, [(other, other.prompt_length + 2, 0.5)])


async def returns_only_the_branch(task: Task, engine: Engine) -> list[Sample]:
    return [(await branches(task, engine))[1]]


async def returns_a_branch_of_a_branch(task: Task, engine: Engine) -> list[Sample]:
    _, other = await branches(task, engine)
    leaf = engine.branch(other, len(other) - 1)
    engine.append(leaf, "C")
    await engine.generate(leaf, max_tokens=1)
    return [leaf]


async def returns_two_branches_of_a_trunk(task: Task, engine: Engine) -> list[Sample]:
    """One behind its first turn, one within its second."""
    trunk = engine.new_sample()
    await engine.generate(trunk, max_tokens=3)
    one = engine.branch(trunk)
    engine.append(trunk, [1])
    await engine.generate(trunk, max_tokens=4)
    two = engine.branch(trunk, len(trunk) - 1)
    for branch in (one, two):
        engine.append(branch, [2])
        await engine.generate(branch, max_tokens=2)
    return [one, two]


async def scores_a_step_alone(task: Task, engine: Engine) -> Episode:
    """The reward of the rollout is the run's."""
    sample = engine.new_sample()
    await engine.generate(sample, max_tokens=3)
    return Episode([sample], step_rewards=[(sample, sample.prompt_length + 2, 0.5)])


async def writes_what_it_is_given(task: Task, engine: Engine) -> Episode:
    seen = [task.messages[0]["content"], task.tools[0]["name"], task.label[0], int(task.prompt[0])]  # type: ignore[index]
    task.messages[0]["content"] = task.tools[0]["name"] = task.label[0] = "written"  # type: ignore[index]
    task.messages.append({"role": "assistant", "content": "said"})  # type: ignore[union-attr]
    task.prompt[0] = 99
    sample = engine.new_sample()
    sample.metadata["seen"] = seen
    await engine.generate(sample, max_tokens=2)
    return Episode([sample])


async def sub_agents(task: Task, engine: Engine) -> None:
    """A sequence from another prompt at the same time as one from the task's."""
    asked = engine.new_sample(OTHER_PROMPT)
    await asyncio.gather(engine.generate(asked, max_tokens=4), engine.generate(engine.new_sample()))


async def only_another_prompt(task: Task, engine: Engine) -> Episode:
    sample = engine.new_sample(OTHER_PROMPT)
    await engine.generate(sample, max_tokens=4)
    return Episode([sample], reward=1.0, step_rewards=[(sample, 4, 0.5)], metrics={"calls": 2})


async def cuts_and_masks(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    await engine.generate(sample, max_tokens=4)
    engine.mask(sample, len(sample) - 4, len(sample) - 2)
    engine.append(sample, "X")
    await engine.generate(sample, max_tokens=3)
    engine.cut(sample, len(sample) - 2)


async def cancels_a_turn(task: Task, engine: Engine) -> None:
    """A turn that takes too long is thrown away, and another one taken."""
    sample = engine.new_sample()
    await engine.generate(sample, max_tokens=2)
    start = len(sample)
    turn = asyncio.create_task(engine.generate(sample))
    for _ in range(40):
        await asyncio.sleep(0)
    turn.cancel()
    with suppress(asyncio.CancelledError):
        await turn
    engine.cut(sample, start)
    engine.append(sample, "X")
    await engine.generate(sample, max_tokens=2)


async def keeps_a_cancelled_turn(task: Task, engine: Engine) -> None:
    """And another sequence, of which a cancelled turn is all there is."""
    samples = [engine.new_sample(), engine.new_sample(OTHER_PROMPT)]
    await engine.generate(samples[0], max_tokens=2)
    for sample in samples:
        turn = asyncio.create_task(engine.generate(sample))
        for _ in range(40):
            await asyncio.sleep(0)
        turn.cancel()
        with suppress(asyncio.CancelledError):
            await turn


async def fails_for_one(task: Task, engine: Engine) -> Episode:
    sample = engine.new_sample()
    await engine.generate(sample, max_tokens=2)
    return Episode(failed="the environment is gone" if task.group_id == 1 and task.index == 0 else "")


async def hangs_for_one(task: Task, engine: Engine) -> None:
    await engine.generate(engine.new_sample(), max_tokens=2)
    if task.group_id == 1 and task.index == 0:
        await asyncio.Event().wait()


async def anything(task: Task, engine: Engine) -> list[Sample] | None:
    """Whatever a function may do, by chance."""
    chance = random.Random(f"{task.seed}")
    grown = [engine.new_sample()]
    await engine.generate(grown[0], max_tokens=chance.randint(1, 5))
    for _ in range(chance.randint(1, 6)):
        sample = chance.choice(grown)
        match chance.choice(["turn", "turn", "branch", "cut", "mask", "new", "both"]):
            case "turn":
                with suppress(NoRoomError):
                    engine.append(sample, "X" * chance.randint(1, 3))
                    await engine.generate(sample, max_tokens=chance.randint(1, 5))
            case "branch":
                grown.append(engine.branch(sample, chance.randint(sample.prompt_length, len(sample))))
            case "cut":
                engine.cut(sample, chance.randint(sample.prompt_length, len(sample)))
            case "mask":
                start = chance.randint(sample.prompt_length, len(sample))
                engine.mask(sample, start, chance.randint(start, len(sample)))
            case "new":
                grown.append(engine.new_sample(OTHER_PROMPT))
            case _:
                two = chance.sample(grown, min(2, len(grown)))
                await asyncio.gather(*(engine.generate(s, max_tokens=3) for s in two))
    for sample in grown:
        await engine.generate(sample, max_tokens=1)
    return chance.choice([None, [chance.choice(grown)], chance.sample(grown, chance.randint(1, len(grown)))])


async def branches_inside_the_prompt(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    await engine.generate(sample)
    engine.branch(sample, 1)


async def begins_with_nothing(task: Task, engine: Engine) -> None:
    engine.new_sample([])


async def appends_while_it_generates(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    turn = asyncio.create_task(engine.generate(sample))
    await asyncio.sleep(0)
    engine.append(sample, "X")
    await turn


async def returns_while_it_generates(task: Task, engine: Engine) -> list[Sample]:
    first, second = engine.new_sample(), engine.new_sample()
    await engine.generate(first, max_tokens=1)
    task_of_second = asyncio.create_task(engine.generate(second))
    await asyncio.sleep(0)
    assert not task_of_second.done()
    return [first, second]


async def two_rewards(task: Task, engine: Engine) -> list[Sample]:
    found = await branches(task, engine)
    found[0].reward, found[1].reward = 1.0, 2.0
    return found


async def a_metric_of_text(task: Task, engine: Engine) -> Episode:
    await engine.generate(engine.new_sample(), max_tokens=1)
    return Episode(metrics={"calls": "two"})  # type: ignore[dict-item]


async def a_step_beyond(task: Task, engine: Engine) -> Episode:
    sample = engine.new_sample()
    await engine.generate(sample, max_tokens=1)
    return Episode(step_rewards=[(sample, 100, 1.0)])


async def patient(task: Task, engine: Engine) -> None:
    """A turn more than there are `stages`, with a tool call between them that waits for its stage."""
    sample = engine.new_sample()
    for stage in stages:
        await engine.generate(sample, max_tokens=90)
        await stage.wait()
        engine.append(sample, "=OK")
    await engine.generate(sample, max_tokens=90)
