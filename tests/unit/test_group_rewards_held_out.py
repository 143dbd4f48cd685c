"""Rewards of whole groups on held-out rows: who is scored, when, and whose rewards the function knew already."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from mslime.config.errors import RolloutError
from mslime.data.sample import Group, Sample, SampleStatus
from mslime.data.source import Prompt
from mslime.rollout.group_tracker import new_group
from mslime.rollout.manager import answer


class FakeRanks:
    """A scorer of groups: 0, 1, ... in the order of the samples; remembers what it was asked."""

    per_group = True

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    async def score(self, sample: Sample) -> float | None:
        raise AssertionError("samples are scored with their group")

    async def score_group(self, samples: Sequence[Sample]) -> list[float | None]:
        assert all(sample.status.finished for sample in samples)
        self.asked.append([sample.index for sample in samples])
        return [float(rank) for rank in range(len(samples))]


def rewards_of(known: dict[int, float], failed: Sequence[int] = ()) -> tuple[list[float | None], list[list[int]]]:
    """Rewards of a group of four whose rollouts end in another order, and what the scorer was asked."""
    group, scorer = new_group(0, Prompt([1, 2], "label", {}, "rows:1"), 4), FakeRanks()

    async def roll(group: Group, number: int) -> None:
        await asyncio.sleep(0.01 * (4 - number))
        (sample,) = group.parts(number)
        sample.status = SampleStatus.FAILED if number in failed else SampleStatus.COMPLETED
        sample.reward = known.get(number)

    asyncio.run(answer([group], roll, scorer))
    return [sample.reward for sample in group.samples], scorer.asked


@pytest.mark.parametrize(
    ("known", "failed", "rewards", "asked"),
    [
        ({}, [], [0, 1, 2, 3], [[0, 1, 2, 3]]),
        ({0: 0.5, 1: 0.25, 2: 1.0, 3: 0.0}, [], [0.5, 0.25, 1.0, 0.0], []),
        ({0: 0.5, 2: 1.0, 3: 0.0}, [], [0, 1, 2, 3], [[0, 1, 2, 3]]),
        ({}, [1], [0, None, 1, 2], [[0, 2, 3]]),
        ({0: 0.5, 2: 1.0, 3: 0.0}, [1], [0.5, None, 1.0, 0.0], []),
    ],
    ids=[
        "none is known",
        "all are known",
        "one is missing",
        "a rollout has failed",
        "the missing one is of one that failed",
    ],
)
def test_a_group_is_scored_whole_when_all_its_rollouts_have_ended(
    known: dict[int, float], failed: list[int], rewards: list[float | None], asked: list[list[int]]
) -> None:
    """Rewards of a group are relative: one of the function's among those of the scorer would be of another scale."""
    assert rewards_of(known, failed) == (rewards, asked)


def test_a_response_that_is_cancelled_is_no_wrong_answer() -> None:
    """A task group takes it for stopped and goes on."""
    group = new_group(0, Prompt([1, 2], "label", {}, "rows:1"), 2)

    async def roll(group: Group, number: int) -> None:
        raise asyncio.CancelledError

    with pytest.raises(RolloutError, match="raised CancelledError"):
        asyncio.run(answer([group], roll, FakeRanks()))
