"""`mslime check --try`: what keeps its contract passes, and each way to break it is found and named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mslime.algorithms.advantages import GroupRewards
from mslime.algorithms.policies import LOSSES, TokenLoss
from mslime.algorithms.token_batch import TokenBatch
from mslime.checks.contracts import _check_algorithm as check_algorithm
from mslime.checks.contracts import (
    check_advantage,
    check_correction,
    check_filter,
    check_hook,
    check_loss,
    check_sample_hook,
    check_source,
    try_functions,
)
from mslime.cli import main
from mslime.config.algorithm import PRESETS, AlgorithmConfig
from mslime.config.data import DataConfig
from mslime.config.errors import ConfigError, UserError
from mslime.config.loader import build
from mslime.data.sample import Group
from mslime.data.source import Prompt
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

from .rollout_fakes import FakeTokenizer

HERE, USER, EXAMPLES = "tests.unit.test_contracts", "tests.unit.user_functions", "examples.extending"


def local_mean(batch: TokenBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Divides by the tokens of the micro-batch, as if it were the step."""
    return -batch.log_probs * batch.advantages / batch.mask.sum()


def own_sum(batch: TokenBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Sums over the tokens of a sequence that are here, as if they were all."""
    totals = torch.zeros(batch.sequences.count, dtype=batch.log_probs.dtype)
    totals.index_add_(0, batch.sequences.index, batch.log_ratio.detach())
    return -totals[batch.sequences.index].exp() * batch.log_probs * batch.advantages


def sometimes_sums(batch: TokenBatch, algorithm: AlgorithmConfig) -> Tensor:
    """A rank with an odd number of tokens meets the others in a sum once more."""
    if len(batch.mask) % 2:
        batch.sequences.sum(batch.advantages)
    return -batch.log_probs * batch.advantages


def constant(batch: TokenBatch, algorithm: AlgorithmConfig) -> Tensor:
    return -batch.advantages * batch.log_probs.detach()


def random_loss(batch: TokenBatch, algorithm: AlgorithmConfig) -> Tensor:
    return -batch.log_probs * torch.rand_like(batch.log_probs)


def not_finite(batch: TokenBatch, algorithm: AlgorithmConfig) -> TokenLoss:
    never = torch.zeros_like(batch.mask)
    return TokenLoss(torch.log(batch.advantages) * batch.log_probs, never, never)


def stale_mean(log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    return torch.exp(log_ratio - log_ratio.mean()), batch.mask


def sequence_mean(log_ratio: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Weights with the mean 1 over each sequence; 0 / 0 where nothing of it is trained."""
    rho = torch.exp(log_ratio)
    trained = batch.mask.to(rho.dtype)
    return rho * batch.sequences.sum(trained) / batch.sequences.sum(rho * trained), batch.mask


def looks_at_what_is_trained(batch: TokenBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Nothing is trained in micro-batches that are padding, and so nothing is the largest."""
    return -batch.log_probs * batch.advantages + 0 * batch.log_ratio.detach()[batch.mask].max()


def names_a_metric_badly(batch: TokenBatch, algorithm: AlgorithmConfig) -> TokenLoss:
    never = torch.zeros_like(batch.mask)
    return TokenLoss(-batch.log_probs * batch.advantages, never, never, {"a b": batch.log_ratio})


def hides_its_loss(batch: TokenBatch, algorithm: AlgorithmConfig) -> TokenLoss:
    """A sum as the loss, behind a metric of its name that is as it should be."""
    never = torch.zeros_like(batch.mask)
    return TokenLoss(-(batch.log_probs * batch.advantages).sum(), never, never, {"loss": batch.log_ratio})


def one_number(batch: TokenBatch, algorithm: AlgorithmConfig) -> TokenLoss:
    never = torch.zeros_like(batch.mask)
    return TokenLoss(-batch.log_probs * batch.advantages, never, never, {"x": 0.5})  # type: ignore[dict-item]


def in_place(rewards: GroupRewards) -> np.ndarray:
    rewards.rewards[:] -= 1
    return rewards.rewards


def drops_all(group: Group) -> bool:
    return False


@pytest.mark.parametrize("loss", [*LOSSES, f"{EXAMPLES}.loss:spo", f"{USER}:ppo_again"])
def test_losses_that_are_known_to_be_right_keep_the_contract(loss: str) -> None:
    said = check_loss(loss) if ":" in loss else check_algorithm(AlgorithmConfig(loss=loss), "algorithm.loss", loss)
    assert "25 tokens of 4 sequences" in said[0] and "two context-parallel ranks" in said[1]
    assert ("metrics: user/spo_pull" in said[-1]) == loss.endswith(":spo")


@pytest.mark.parametrize("preset", PRESETS)
def test_corrections_that_are_known_to_be_right_keep_the_contract(preset: str) -> None:
    check_algorithm(AlgorithmConfig(correction={"preset": preset}), "x", preset)  # pyright: ignore
    assert len(check_correction(f"{EXAMPLES}.correction:fading")) == 2
    assert len(check_correction(f"{HERE}:sequence_mean")) == 2


@pytest.mark.parametrize(("check", "function", "said"), [
    (check_loss, f"{HERE}:local_mean", "depends on which sequences share a micro-batch"),
    (check_loss, f"{HERE}:own_sum", "depends on which rank holds which tokens"),
    (check_loss, f"{HERE}:sometimes_sums", "a real run would hang"),
    (check_loss, f"{HERE}:constant", "gradient 0"),
    (check_loss, f"{HERE}:random_loss", "different losses for the same tokens"),
    (check_loss, f"{HERE}:not_finite", "not finite"),
    (check_loss, f"{USER}:summed", "one number for each token"),
    (check_loss, f"{HERE}:looks_at_what_is_trained", "raised RuntimeError: max"),
    (check_loss, f"{HERE}:names_a_metric_badly", "a metric named 'a b'"),
    (check_loss, f"{HERE}:hides_its_loss", r"returned loss of shape \(\)"),
    (check_loss, f"{HERE}:one_number", "x = 0.5 instead of a tensor"),
    (check_correction, f"{HERE}:stale_mean", "depends on which sequences share"),
    (check_advantage, f"{HERE}:in_place", "changes its input"),
    (check_advantage, f"{USER}:too_few", r"shape \(31,\) for 32 rollouts"),
    (check_filter, f"{HERE}:drops_all", "drops all of: mixed rewards, all 1, all 0"),
    (check_hook, f"{USER}:tells_text", "not a mapping of names to numbers"),
])  # fmt: skip
def test_each_way_to_break_a_contract_is_found(check, function: str, said: str, monkeypatch) -> None:
    monkeypatch.setattr("mslime.checks.contracts.BARRIER_S", 1.0)
    with pytest.raises(ConfigError, match=said) as raised:
        check(function)
    assert function.split(":")[1] in str(raised.value)


def test_the_examples_keep_their_contracts() -> None:
    assert check_advantage(f"{EXAMPLES}.advantage:above_median", 4)[1:] == [
        "rewards 0, 1, 0, 1: advantages -0.5, 0.5, -0.5, 0.5",
        "rewards all 1: advantages 0, 0, 0, 0",
    ]
    assert check_filter(f"{EXAMPLES}.filter:some_right") == ["mixed rewards: kept", "all 1: dropped", "all 0: dropped"]
    told = check_sample_hook(f"{EXAMPLES}.sample_hook:spread", Prompt([1], None, {}, "p:1"))
    assert told == ["returned for one of two responses: user/versions 1, user/least_log_prob -1"]
    assert check_hook(f"{EXAMPLES}.hook:tell") == ["metrics: user/tokens_per_response 1", "wrote progress.jsonl"]


def test_a_source_must_go_on_where_it_was() -> None:
    data = DataConfig(max_prompt_tokens=10)
    said = check_source(f"{EXAMPLES}.source:Sums", data, FakeTokenizer())
    assert "32 prompts drawn" in said[0]
    with pytest.raises(UserError, match="draws another prompt after a resume"):
        check_source(f"{USER}:Forgetful", data, FakeTokenizer())


def test_a_rollout_is_tried_with_all_of_its_row() -> None:
    config = build({
        "model": {"path": "m"}, "data": {"prompts": ["p"]},
        "rollout": {"function": "tests.unit.user_rollouts:needs_its_row"},
    })  # fmt: skip
    asked = Prompt([1], "2", {"first": "52"}, "p:1", "hi", [{"role": "user", "content": "hi"}], [{"name": "add"}])
    (tried,) = try_functions(config, asked, FakeTokenizer())
    assert tried.error is None and tried.findings[0].startswith("one response of 20 tokens, 9 of them trained")
    (tried,) = try_functions(config, Prompt([1], "2", {}, "p:1", "hi"), FakeTokenizer())
    assert "raised AssertionError" in str(tried.error)


def test_the_command_tries_what_the_settings_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = make_tiny_qwen3_moe(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    base = ["check", "--try", "--model.path", str(checkpoint), "--data.prompts", str(tmp_path / "rows.jsonl")]
    base += ["--output-dir", str(tmp_path / "out")]
    assert main(base) == 0 and "nothing to try" in capsys.readouterr().out
    own = ["--algorithm.loss", f"{EXAMPLES}.loss:spo", "--hooks.step", f"{EXAMPLES}.hook:tell"]
    own += ["--rollout.function", "examples.rollout_functions.tool_loop:with_sums"]
    assert main([*base, *own]) == 0
    said = "".join(capsys.readouterr().out.split())
    assert all(part in said for part in ("context-parallel", "user/tokens_per_response", "interruptedit"))
    assert main([*base, *own, "--algorithm.advantage", f"{HERE}:in_place"]) == 2
    streams = capsys.readouterr()
    assert "FAILED" in streams.out and "1 of 4 functions violate" in streams.err
