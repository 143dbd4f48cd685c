"""Reward functions and filters as users write them, good and bad."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np

from mslime.data.sample import Group, Sample


def length(sample: Sample) -> float:
    print("rewards may print")
    return len(sample.response) + sample.metadata.get("bonus", 0)


def brevity_rank(samples: list[Sample]) -> list[object]:
    """1 for the shortest response of the group, 0 for the longest."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].response))
    ranks = [1 - order.index(i) / max(len(samples) - 1, 1) for i in range(len(samples))]
    return [{"reward": rank, "metrics": {"group": len(samples)}} for rank in ranks]


async def moody_group(samples: list[Sample]) -> object:
    """Does what the first response says."""
    what = samples[0].response
    if what in ("raise", "hang", "exit"):
        return moody(samples[0])
    return {"short": [1.0], "number": 1.0, "text": "11", "one bad": [1.0, None]}.get(what, (float(i) for i in (1, 2)))


def by_step(sample: Sample) -> object:
    """The number of steps, with a process reward of half on each of the positions that the response names."""
    steps = [int(at) for at in sample.response.split()]
    return len(steps), [(at, 0.5) for at in steps]


def odd_steps(sample: Sample) -> object:
    return 1.0, sample.response


_met: set[str] = set()
_all_met = asyncio.Event()


async def met_length(sample: Sample) -> float:
    """Waits until forty responses are scored at once."""
    _met.add(sample.response)
    if len(_met) == 40:
        _all_met.set()
    await _all_met.wait()
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


def odd_values(sample: Sample) -> object:
    """Returns what the response names."""
    if sample.response == "cancelled":
        raise asyncio.CancelledError
    values = {"array": np.array([0.5, 0.25]), "huge": 10**400, "vast": 10**5000, "unfloatable": Unfloatable()}
    return values.get(sample.response, {"reward": 1.0, "metrics": {"x": 1.0}})


class Unfloatable:
    def __float__(self) -> float:
        raise RuntimeError("no number")


def judges_in_a_child(sample: Sample) -> float:
    """The child of the response `hang` writes its process id to the file that the row names, and hangs."""
    if sample.response == "hang":
        child = multiprocessing.get_context("fork").Process(target=_hang, args=(sample.metadata["file"],))
        child.start()
        child.join()
    return 1.0


def _hang(file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)


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


def greedy(sample: Sample) -> float:
    """Takes more memory than there may be."""
    return float(len(bytearray(2**30)))


def spins_and_catches(sample: Sample) -> float:
    """Never ends, and catches what it can, as computer algebra does."""
    while True:
        try:
            sum(range(1000))
        except Exception:
            continue


def hangs_on(sample: Sample) -> float:
    """Hangs for the samples that say so."""
    if sample.metadata.get("hang"):
        time.sleep(600)
    return 1.0


async def hangs_on_async(sample: Sample) -> float:
    """Likewise, and takes its process with it."""
    if sample.metadata.get("hang"):
        time.sleep(600)
    await asyncio.sleep(0.01)
    return 1.0


def own_pid(sample: Sample) -> float:
    """The process that scores, after as long as the sample says."""
    time.sleep(sample.metadata.get("wait", 0.0))
    return float(os.getpid())


def scribbles(sample: Sample) -> float:
    """Writes to every descriptor that is open, as a library with a wrong idea of its standard output does."""
    if sample.response == "scribble":
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\x05\x00\x00\x00hello")
        time.sleep(600)
    return 1.0


def with_metrics(sample: Sample) -> object:
    """A reward with further numbers."""
    return {
        "reward": float(len(sample.response)),
        "metrics": {"letters": len(sample.response), "odd": sample.index % 2},
    }


def odd_answers(sample: Sample) -> object:
    """What the response names, instead of a reward."""
    return {
        "keys": {"reward": 1.0, "score": 2.0},
        "missing": {"metrics": {}},
        "names": {"reward": 1.0, "metrics": {"a/b": 1.0}},
        "values": {"reward": 1.0, "metrics": {"a": float("nan")}},
        "many": {"reward": 1.0, "metrics": {f"m{i}": 1.0 for i in range(100)}},
        "list": {"reward": 1.0, "metrics": [1.0]},
    }[sample.response]


def unbounded(sample: Sample) -> object:
    """A metric named after its value."""
    return {"reward": 1.0, "metrics": {f"sample{sample.index}": 1.0}}


def keyword_only(sample: Sample) -> float:
    """1 when the response says what the label says."""
    return float(sample.response.split() == str(sample.label).split())
