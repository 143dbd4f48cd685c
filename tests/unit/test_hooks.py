"""The hook after a step: what it is told, what it may tell, and what becomes of its mistakes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from mslime.config.errors import ConfigError
from mslime.config.schema import HooksConfig
from mslime.data.source import Prompt
from mslime.observe.hooks import StepRecord, call_step_hook
from mslime.rollout.filters import load_sample_hook
from mslime.rollout.group_tracker import new_group
from tests.fixtures.least import refused
from tests.unit.rollout_fakes import FakeSlowEngine, make_service, run_config

USER = "tests.unit.user_functions"
METRICS = {"reward/mean": 0.5, "user/kl": 0.1}


def called(function: str, metrics: Mapping[str, float] = METRICS) -> dict[str, float]:
    """What the hook adds to step 2 of 8."""
    return call_step_hook(f"{USER}:{function}", StepRecord(2, 8, Path("out"), metrics))


def test_a_hook_is_told_of_the_step_and_tells_metrics() -> None:
    assert called("share_of_steps") == {"user/done": 0.25}


@pytest.mark.parametrize(("function", "said"), [
    ("meddles", r"(?s)hooks.step.*raised TypeError.* for step 2 .*user_functions.py"),
    ("tells_text", "returned metrics 'all is well', which are not a mapping"),
    ("tells_of_kl", "not a finite number"),
])  # fmt: skip
def test_a_hooks_mistakes_are_named(function: str, said: str) -> None:
    metrics = dict(METRICS)
    with pytest.raises(ConfigError, match=said):
        called(function, metrics)
    assert metrics == METRICS


def test_a_number_that_was_told_already_is_refused() -> None:
    with pytest.raises(ConfigError, match="returned user/done"):
        called("share_of_steps", {"user/done": 1.0})


def test_names_are_checked_with_the_settings() -> None:
    assert refused(hooks={"step": "tell"}).field == "hooks.step"


def finished(directory: Path, function: str) -> dict[str, float]:
    """The metrics of a step whose samples were told to a hook."""

    async def work() -> dict[str, float]:
        config = run_config(directory).model_copy(update={"hooks": HooksConfig(sample=f"{USER}:{function}")})
        service = make_service(config, FakeSlowEngine(lambda group, index: 3))
        try:
            return (await service.take(0)).metrics
        finally:
            await service.close()

    return asyncio.run(work())


def test_a_hook_for_samples_is_told_of_each_with_its_reward(tmp_path: Path) -> None:
    assert finished(tmp_path, "ages")["user/half"] == 0.25, "rewards are 0 and 1"
    assert "user/half" not in finished(tmp_path, "says_nothing")


@pytest.mark.parametrize(("function", "said"), [
    ("cuts", "assignment destination is read-only for sample"), ("pays", r"changed sample \d of group \d"),
    ("breaks", r"raised KeyError: 'no such sample' for sample \d of group \d .*user_functions.py:\d+"),
    ("tells_a_text", r"the metric half = 'x', which is not a finite number \(sample \d of group \d\)"),
])  # fmt: skip
def test_its_mistakes_end_the_run_with_the_sample(tmp_path: Path, function: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)hooks.sample = .*{function}.*{said}"):
        finished(tmp_path, function)


def test_a_number_that_the_reward_told_is_not_told_again_by_the_hook_but_its_own_may_be() -> None:
    group = new_group(0, Prompt([1], None, {}, "p:1"), 2)
    hook = load_sample_hook(f"{USER}:ages")
    hook(group)
    hook(group)
    other = new_group(1, Prompt([1], None, {}, "p:1"), 1)
    other.samples[0].scores["user/half"] = 1.0
    with pytest.raises(ConfigError, match="returned user/half"):
        load_sample_hook(f"{USER}:ages")(other)


def test_supervised_training_has_no_samples_to_tell_of() -> None:
    assert refused(train={"task": "sft"}, hooks={"sample": "m:f"}).field == "hooks.sample"
