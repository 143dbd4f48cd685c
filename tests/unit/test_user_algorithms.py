"""A user's loss, advantage and correction stand where the built-in ones do: same numbers, every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mslime.algorithms.advantages import group_rewards, rollout_advantages
from mslime.algorithms.losses import policy_loss
from mslime.algorithms.statistics import LossStatistics, finalise
from mslime.backends.megatron.step import reductions
from mslime.config.algorithm import AlgorithmConfig
from mslime.config.errors import ConfigError

from .algorithms_reference import random_tokens
from .test_algorithms_layouts import LAYOUTS, step
from .test_algorithms_losses import LENGTHS, algorithm, as_inputs

USER = "tests.unit.user_functions"
TOKENS = random_tokens(np.random.default_rng(3), LENGTHS, 0.4)


def loss_of(**settings: Any) -> tuple[float, np.ndarray, dict[str, float]]:
    """(loss, gradient of log pi, metrics)."""
    inputs = as_inputs(TOKENS)
    output = policy_loss(inputs, algorithm(**settings))
    output.loss.backward()
    assert inputs.log_probs.grad is not None
    return output.loss.item(), inputs.log_probs.grad.numpy(), finalise(output.statistics)


@pytest.mark.parametrize(
    ("own", "built_in"),
    [
        ({"loss": f"{USER}:ppo_again"}, {"loss": "ppo"}),
        ({"loss": f"{USER}:bare_reinforce"}, {"loss": "reinforce"}),
        ({"correction": {"function": f"{USER}:tis_again"}}, {"correction": {"preset": "tis"}}),
        ({"correction": f"{USER}:mis_again"}, {"correction": {"preset": "mis"}}),
        (
            {"correction": {"function": f"{USER}:mis_again", "max_age": 1}},
            {"correction": {"preset": "mis", "max_age": 1}},
        ),
    ],
)
def test_a_users_function_that_says_the_same_gives_the_same_bits(own: dict[str, Any], built_in: dict[str, Any]) -> None:
    (loss, gradient, metrics), (want, want_gradient, want_metrics) = loss_of(**own), loss_of(**built_in)
    assert loss == want and (gradient == want_gradient).all()
    different = {n for n in want_metrics if metrics[n] != want_metrics[n]}
    assert different <= {"correction/clipped_fraction"}, "which a function does not tell"


def test_a_users_advantage_that_says_the_same_gives_the_same_bits() -> None:
    grouped = group_rewards([0.1, 0.7, 1.0, 1.0, 0.3, -2.0], [5, 5, 1, 1, 5, 5], [0, 1, 0, 1, 2, 2 + 1])
    own = rollout_advantages(grouped, f"{USER}:grpo_again")
    assert own.dtype == np.float32 and (own == rollout_advantages(grouped, "grpo")).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_reports_its_own_numbers_the_same_in_every_layout(layout: tuple[int, int, int, bool]) -> None:
    config = AlgorithmConfig(loss=f"{USER}:ppo_again")
    _, _, whole = step(config, *LAYOUTS[0])
    _, _, metrics = step(config, *layout)
    assert metrics["user/twice"] == pytest.approx(2 * metrics["user/ratio"]) and metrics["user/ratio"] > 0.5
    assert metrics["user/ratio"] == pytest.approx(whole["user/ratio"], rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss": f"{USER}:summed"}, r"(?s)algorithm.loss.*summed.*loss of shape \(\).*one number for each token"),
        ({"loss": f"{USER}:text"}, "returned str instead of a TokenLoss"),
        ({"loss": f"{USER}:raising"}, r"(?s)algorithm.loss.*raised KeyError.*user_functions.py:\d+"),
        ({"loss": f"{USER}:per_half"}, "returned half of shape"),
        ({"correction": f"{USER}:weights_alone"}, r"must return \(weights, mask\)"),
    ],
)
def test_what_a_loss_or_correction_does_wrong_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loss_of(**settings)


@pytest.mark.parametrize(("function", "said"), [("too_few", r"shape \(2,\) for 3 rollouts"), ("not_finite", "finite")])
def test_what_an_advantage_does_wrong_is_named(function: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said), np.errstate(all="ignore"):
        rollout_advantages(group_rewards([0.0, 1.0, 2.0], [0, 0, 0], [0, 1, 2]), f"{USER}:{function}")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss": "pppo"}, r"(?s)algorithm.loss = 'pppo'.*did you mean 'ppo'"),
        ({"loss": "a:b:c"}, "or `module:function`"),
        ({"advantage": "grppo"}, "did you mean 'grpo'"),
        ({"correction": {"function": "a:b", "preset": "tis"}}, "algorithm.correction.preset"),
        ({"correction": {"function": "a:b", "high": 2.0}}, r"(?s)algorithm.correction.high.*no effect with function"),
        ({"correction": {"function": "nothing"}}, "`module:function`"),
    ],
)
def test_names_that_are_no_choice_and_no_function_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AlgorithmConfig(**settings)


def test_a_correction_by_function_survives_being_written_and_read() -> None:
    config = AlgorithmConfig(correction="a.b:c")  # pyright: ignore[reportArgumentType]
    assert config.correction.function == "a.b:c" and config.correction.corrects
    assert AlgorithmConfig(**config.as_dict()) == config
    own = AlgorithmConfig(loss="dppo_tv", correction={"function": "a:b"})  # pyright: ignore[reportArgumentType]
    assert own.correction.reference == "recompute"


def test_a_rank_without_the_loss_learns_what_the_others_report(monkeypatch: pytest.MonkeyPatch) -> None:
    told = policy_loss(as_inputs(TOKENS), algorithm(loss=f"{USER}:ppo_again")).statistics
    others = iter([told.sums, told.maxima])

    def gathered(names: list[Any], own: tuple[str, ...], group: object) -> None:
        names[:] = [own, told.user_names]

    monkeypatch.setattr(reductions.dist, "all_reduce", lambda tensor, **_: tensor.add_(next(others)))
    monkeypatch.setattr(reductions.dist, "all_gather_object", gathered)
    monkeypatch.setattr(reductions.dist, "get_world_size", lambda group: 2)
    found = finalise(reductions.over_all_ranks(LossStatistics.zeros()))
    assert found == finalise(told) and "user/ratio" in found
    others = iter([torch.zeros_like(told.sums), torch.zeros_like(told.maxima)])
    monkeypatch.setattr(reductions.dist, "all_gather_object", None)  # nothing is reported, so nothing is gathered
    assert reductions.over_all_ranks(LossStatistics.zeros()).user_names == ()
