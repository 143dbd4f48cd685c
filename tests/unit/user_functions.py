"""Losses, advantages, corrections, prompt sources and hooks as users write them, good and bad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mslime.algorithms.advantages import GroupRewards
from mslime.algorithms.policies import TokenLoss
from mslime.algorithms.token_batch import TokenBatch
from mslime.config.algorithm import AlgorithmConfig
from mslime.config.data import DataConfig
from mslime.data.sample import Sample
from mslime.observe.hooks import StepRecord


def ppo_again(batch: TokenBatch, algorithm: AlgorithmConfig) -> TokenLoss:
    """The built-in ppo, written once more, which also tells of the ratio."""
    ratio = torch.exp(batch.log_ratio)
    plain = -ratio * batch.advantages
    bounded = -ratio.clamp(1.0 - algorithm.clip_low, 1.0 + algorithm.clip_high) * batch.advantages
    cut = bounded > plain
    below, above = cut & (batch.advantages < 0), cut & (batch.advantages > 0)
    return TokenLoss(torch.maximum(plain, bounded), below, above, {"ratio": ratio, "twice": 2 * ratio})


def bare_reinforce(batch: TokenBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Only a tensor, and nonsense outside the mask."""
    loss = -torch.exp(batch.log_ratio.detach()) * batch.advantages * batch.log_probs
    return torch.where(batch.mask, loss, torch.nan)


def summed(batch: TokenBatch, algorithm: AlgorithmConfig) -> Tensor:
    return batch.log_probs.sum()


def text(batch: TokenBatch, algorithm: AlgorithmConfig) -> str:
    return "0.3"


def raising(batch: TokenBatch, algorithm: AlgorithmConfig) -> Tensor:
    raise KeyError("no such column")


def per_half(batch: TokenBatch, algorithm: AlgorithmConfig) -> TokenLoss:
    never = torch.zeros_like(batch.mask)
    return TokenLoss(batch.log_probs, never, never, {"half": batch.log_probs[::2]})


def grpo_again(rewards: GroupRewards) -> np.ndarray:
    centred = rewards.rewards - rewards.means[rewards.group]
    centred[rewards.zero_variance[rewards.group]] = 0.0
    variance = np.bincount(rewards.group, weights=centred**2) / (rewards.sizes - 1)
    return centred / (np.sqrt(variance)[rewards.group] + 1e-6)


def too_few(rewards: GroupRewards) -> np.ndarray:
    return rewards.rewards[1:]


def not_finite(rewards: GroupRewards) -> np.ndarray:
    return rewards.rewards / 0 * 0


def takes_two(rewards: GroupRewards, more: float) -> np.ndarray:
    return rewards.rewards * more


def tis_again(log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    return torch.exp(log_ratio).clamp(max=2.0), batch.mask


def mis_again(log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    rho = torch.exp(log_ratio)
    return rho, (rho >= 0.5) & (rho <= 2.0)


def narrow_mis(log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    rho = torch.exp(log_ratio)
    return rho, (rho >= 0.8) & (rho <= 1.2)


def weights_alone(log_ratio: Tensor, batch: TokenBatch) -> Tensor:
    return torch.exp(log_ratio)


class Letters:
    """Prompts A, B, C ... with their numbers as labels; `bad` names what to do wrong."""

    bad = ""

    def __init__(self, data: DataConfig, seed: int) -> None:
        self.at, self.seed = 0, seed

    def __iter__(self) -> Iterator[Any]:
        while self.bad != "ends" or self.at < 3:
            number, self.at = self.at, self.at + 1
            item: Any = {"prompt": chr(65 + number % 26) * (1 + number % 7), "label": number}
            if number == 2 and self.bad == "raises":
                raise OSError("no network")
            yield {"text": {"text": "A"}, "a list": ["A"], "empty": {"prompt": ""}, "odd": {"prompt": "A", "lable": 1},
                   "metadata": {"prompt": "A", "metadata": "m"}}.get(self.bad, item)  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"at": {1, 2} if self.bad == "state" else self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Forgetful(Letters):
    """Counts after the yield, so that a resumed run draws its last prompt again."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield {"prompt": chr(65 + self.at % 26), "label": self.at}
            self.at += 1


def no_source(data: DataConfig, seed: int) -> list[dict[str, str]]:
    return [{"prompt": "A"}]


def share_of_steps(record: StepRecord) -> dict[str, float]:
    return {"done": record.step / record.num_steps}


def meddles(record: StepRecord) -> None:
    record.metrics["reward/mean"] = 1.0  # pyright: ignore[reportIndexIssue]


def tells_text(record: StepRecord) -> str:
    return "all is well"


def tells_of_kl(record: StepRecord) -> dict[str, float]:
    return {"kl": float("nan")}


def ages(sample: Sample) -> dict[str, float]:
    """A hook for samples that tells."""
    return {"half": (sample.reward or 0.0) / 2}


def says_nothing(sample: Sample) -> None:
    """One that does not."""


def cuts(sample: Sample) -> None:
    """One that changes what is trained."""
    sample.loss_mask[-1] = False


def pays(sample: Sample) -> None:
    """One that changes the reward."""
    sample.reward = 7.0


def breaks(sample: Sample) -> None:
    raise KeyError("no such sample")


def tells_a_text(sample: Sample) -> dict[str, str]:
    return {"half": "x"}
