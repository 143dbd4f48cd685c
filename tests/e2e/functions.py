"""User functions besides rewards, for the end-to-end tests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mslime.algorithms.advantages import GroupRewards
from mslime.algorithms.policies import TokenLoss, ppo
from mslime.algorithms.token_batch import TokenBatch
from mslime.config.algorithm import AlgorithmConfig
from mslime.config.data import DataConfig
from mslime.observe.hooks import StepRecord

WAITS_AT = "MSLIME_TEST_WAITS_AT"


class Increments:
    """Prompts `0+1=`, `1+1=` and so on, without an end."""

    def __init__(self, data: DataConfig, seed: int) -> None:
        self.drawn = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            self.drawn += 1
            yield {"prompt": f"{self.drawn - 1}+1=", "label": str(self.drawn)}

    def state_dict(self) -> dict[str, Any]:
        """How many were drawn."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue there."""
        self.drawn = state["drawn"]


def fails_at_step_2(record: StepRecord) -> None:
    """A hook that raises."""
    if record.step == 2:
        raise RuntimeError("told to fail at step 2")


def centred(rewards: GroupRewards) -> NDArray[np.float64]:
    """As reinforce_pp_baseline, without whitening."""
    return rewards.centred


def ppo_that_tells(batch: TokenBatch, algorithm: AlgorithmConfig) -> TokenLoss:
    """The built-in loss, with a number beside it."""
    found = ppo(batch, algorithm)
    return TokenLoss(found.loss, found.below, found.above, {"ratio": batch.log_ratio.exp()})


def ppo_that_waits(batch: TokenBatch, algorithm: AlgorithmConfig) -> TokenLoss:
    """The built-in loss; while there is a file `stop` in a directory, it leaves one called `here` and waits."""
    directory, end = Path(os.environ[WAITS_AT]), time.monotonic() + 100
    while (directory / "stop").exists() and time.monotonic() < end:
        (directory / "here").touch()
        time.sleep(0.05)
    return ppo(batch, algorithm)


def no_weights(log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Weight 1 for every token."""
    return log_ratio * 0 + 1, batch.mask


def half_way(record: StepRecord) -> dict[str, float]:
    """Progress of the run; fails if a row lacks a required metric."""
    return {"done": record.step / record.num_steps, "ratio_seen": record.metrics["user/ratio"]}
