"""Reward functions and filters as users write them, good and bad."""

from __future__ import annotations

import asyncio
import os
import time

from mslime.data.sample import Group, Sample


def length(sample: Sample) -> float:
    print("rewards may print")
    return len(sample.response) + sample.metadata.get("bonus", 0)


def by_step(sample: Sample) -> object:
    """The number of steps, with a process reward of half on each of the positions that the response names."""
    steps = [int(at) for at in sample.response.split()]
    return len(steps), [(at, 0.5) for at in steps]


def odd_steps(sample: Sample) -> object:
    return 1.0, sample.response


async def slow_length(sample: Sample) -> float:
    await asyncio.sleep(0.3)
    return float(len(sample.response))


def moody(sample: Sample) -> object:
    """Does what the response says."""
    what = sample.response
    if what == "raise":
        raise KeyError("score")
    if what == "hang":
        time.sleep(600)
    if what == "spin":
        while True:
            pass
    if what == "exit":
        os._exit(3)
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "list": [1.0]}.get(what, 1.0)


async def moody_async(sample: Sample) -> object:
    if sample.response == "await":
        await asyncio.sleep(600)
    return moody(sample)


def keep_even(group: Group) -> bool:
    return group.group_id % 2 == 0


def confused(group: Group) -> object:
    return 1 if group.group_id else group.samples[5]


NOT_A_FUNCTION = 3


def parity(sample: Sample) -> float:
    """1 for responses of an odd number of tokens: a coin for random models."""
    return float(sample.response_length % 2)
