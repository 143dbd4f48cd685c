"""docs/extending.md: every example on it is a file that runs, and says what the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from examples.extending import advantage, correction, filter, reward
from mslime.algorithms.advantages import group_rewards, rollout_advantages
from mslime.algorithms.losses import policy_loss
from mslime.algorithms.statistics import finalise
from mslime.checks.user_functions import check_functions, run_functions
from mslime.config.algorithm import AlgorithmConfig
from mslime.config.data import DataConfig
from mslime.config.loader import build
from mslime.data.sample import Group, Sample
from mslime.data.source import UserSource
from mslime.observe.hooks import StepRecord, call_step_hook
from mslime.rollout.rewards.reward_kinds import checked
from tests.fixtures.pages import ROOT, blocks, read_page, shown
from tests.unit.rollout_fakes import FakeTokenizer

from .algorithms_reference import random_tokens
from .test_algorithms_layouts import LAYOUTS, step
from .test_algorithms_losses import LENGTHS, as_inputs

PAGE = read_page("extending.md")
EXAMPLES = sorted((ROOT / "examples/extending").glob("*.py"))
SPO = AlgorithmConfig(loss="examples.extending.loss:spo", clip_high=0.2)


def sample(response: str, label: str) -> Sample:
    made = Sample.from_prompt(0, 0, [1, 2], label)
    made.response = response
    return made


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_page_shows_every_example_as_it_is(path: Path) -> None:
    assert shown(path) in blocks(PAGE, "python"), f"{path} differs from the page"


def test_the_settings_on_the_page_are_those_of_the_examples() -> None:
    settings: dict[str, dict[str, object]] = {"model": {"path": "m"}, "data": {"prompts": ["p.jsonl"]}}
    for block in blocks(PAGE, "yaml"):
        for section, values in yaml.safe_load(block).items():
            settings.setdefault(section, {}).update(values)
    config = build(settings)
    check_functions(run_functions(config))
    named = {each.function.split(":")[0].rpartition(".")[2] for each in run_functions(config)} | {"reward"}
    assert named == {path.stem for path in EXAMPLES}


def test_the_reward_says_what_the_table_says() -> None:
    for response, worth, exact in (("1 2 3", 1.0, 1.0), ("1 2 4", 0.8, 0.0), ("", 0.0, 0.0)):
        verdict = checked(reward.close_to_label(sample(response, "1 2 3")), 2)
        assert verdict.reward == pytest.approx(worth) and not verdict.error
        assert verdict.metrics == {"exact": exact, "empty": float(not response)}


def test_the_filter_keeps_groups_of_both_kinds() -> None:
    def group(*rewards: float) -> Group:
        samples = [sample("", "") for _ in rewards]
        for made, worth in zip(samples, rewards, strict=True):
            made.reward = worth
        return Group(0, samples, "p:1")

    kept = [filter.some_right(group(*rewards)) for rewards in ((0, 1), (1, 1), (0, 0.2))]
    assert kept == [True, False, False]


def test_the_advantage_says_what_the_table_says() -> None:
    grouped = group_rewards([0, 0, 1, 1, 1], [0] * 5, range(5))
    assert advantage.above_median(grouped).tolist() == [-1, -1, 0, 0, 0]
    assert rollout_advantages(grouped, "examples.extending.advantage:above_median").tolist() == [-1, -1, 0, 0, 0]


def test_the_loss_is_the_papers_and_the_same_in_every_layout() -> None:
    tokens = random_tokens(np.random.default_rng(0), LENGTHS, 0.3)
    found = finalise(policy_loss(as_inputs(tokens), SPO).statistics)
    r, a = np.exp(tokens.log_probs - tokens.old), tokens.advantages
    pull = np.abs(a) / 0.4 * (r - 1) ** 2
    weights = tokens.weights * np.minimum(np.exp(tokens.old - tokens.behaviour), 2.0) * tokens.mask
    assert found["loss/policy"] == pytest.approx((weights * (pull - r * a)).sum())
    assert found["user/spo_pull"] == pytest.approx(pull[tokens.mask].mean())
    loss, gradient, whole = step(SPO, *LAYOUTS[0])
    for layout in LAYOUTS[1:]:
        other, slopes, metrics = step(SPO, *layout)
        assert other == pytest.approx(loss, rel=1e-12) and np.allclose(slopes, gradient, rtol=1e-9, atol=1e-14)
        assert metrics["user/spo_pull"] == pytest.approx(whole["user/spo_pull"], rel=1e-12)


def test_the_correction_fades_on_both_sides() -> None:
    log_ratio = torch.tensor([0.0, -1.0, 1.0, 3.5])
    weights, mask = correction.fading(log_ratio, None)  # pyright: ignore[reportArgumentType]
    assert torch.allclose(weights[:3], torch.exp(torch.tensor([0.0, -1.0, -1.0]))) and mask.tolist() == [1, 1, 1, 0]


def test_the_prompts_are_sums_that_grow_and_resume() -> None:
    data = DataConfig(source="examples.extending.source:Sums")
    first, second = (UserSource(str(data.source), data, FakeTokenizer(), 3) for _ in range(2))
    drawn = [first.next() for _ in range(300)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.next() == first.next()
    for prompt in drawn:
        a, b = map(int, re.findall(r"\d+", prompt.text))
        assert prompt.label == str(a + b) and prompt.metadata == {"data_source": "sums"}
    assert max(int(prompt.label) for prompt in drawn[200:]) > max(int(prompt.label) for prompt in drawn[:100])


def test_the_hook_writes_a_line_and_tells_a_number(tmp_path: Path) -> None:
    metrics = {"loss/tokens": 60.0, "rollout/responses": 20.0, "reward/mean": 0.5}
    told = call_step_hook("examples.extending.hook:tell", StepRecord(1, 4, tmp_path, metrics))
    assert told == {"user/tokens_per_response": 3.0}
    assert json.loads((tmp_path / "progress.jsonl").read_text()) == {"done": 0.25, "reward": 0.5}
