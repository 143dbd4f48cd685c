"""GRPO advantages."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from mslime.algorithms.advantages import grpo_advantages
from mslime.config.errors import UserError


def test_advantages_are_the_group_z_scores() -> None:
    rewards = [[1.0, 0.0, 0.0, 1.0, 1.0], [0.2, 0.9]]
    for group, got in zip(rewards, grpo_advantages(rewards, normalise_std=True, eps=1e-6), strict=True):
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        np.testing.assert_allclose(got, [(r - mean) / (std + 1e-6) for r in group], rtol=1e-6)
        assert got.dtype == np.float32


def test_without_std_the_advantage_is_the_distance_to_the_mean() -> None:
    (got,) = grpo_advantages(np.array([[3.0, 1.0, 2.0]]), normalise_std=False)
    np.testing.assert_array_equal(got, np.array([1.0, -1.0, 0.0], np.float32))


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_equal_rewards_give_no_advantage(value: float) -> None:
    (got,) = grpo_advantages([[value] * 8], normalise_std=True)
    np.testing.assert_allclose(got, 0.0, atol=1e-3)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"(?s)rollout.group_size = 1.*way out"):
        grpo_advantages([[1.0, 0.0], [1.0]], normalise_std=True)


def test_advantages_do_not_import_torch() -> None:
    code = "import sys, mslime.algorithms.advantages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
