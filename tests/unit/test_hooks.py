"""The hook after a step: what it is told, what it may tell, and what becomes of its mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mslime.config.errors import ConfigError
from mslime.config.loader import build
from mslime.config.schema import RunConfig
from mslime.observe.hooks import call_step_hook

USER = "tests.unit.user_functions"
METRICS = {"reward/mean": 0.5, "user/kl": 0.1}


def config(function: str) -> RunConfig:
    return build({
        "name": "r", "output_dir": "out", "model": {"path": "m"}, "data": {"prompts": ["p"]},
        "train": {"num_steps": 8}, "hooks": {"step": f"{USER}:{function}"},
    })  # fmt: skip


def test_a_hook_is_told_of_the_step_and_tells_metrics() -> None:
    assert call_step_hook(config("share_of_steps"), 2, METRICS) == {"user/done": 0.25}


def test_without_a_hook_nothing_is_told() -> None:
    assert call_step_hook(build({"model": {"path": "m"}, "data": {"prompts": ["p"]}}), 2, METRICS) == {}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("meddles", r"(?s)hooks.step.*raised TypeError.* for step 2 .*user_functions.py"),
        ("tells_text", "returned metrics 'all is well', which are not an object"),
        ("tells_of_kl", "not a finite number"),
    ],
)
def test_a_hooks_mistakes_are_named(function: str, said: str) -> None:
    metrics = dict(METRICS)
    with pytest.raises(ConfigError, match=said):
        call_step_hook(config(function), 2, metrics)
    assert metrics == METRICS


def test_a_number_that_was_told_already_is_refused() -> None:
    with pytest.raises(ConfigError, match="user/done, which a reward or the loss told already"):
        call_step_hook(config("share_of_steps"), 2, {"user/done": 1.0})


def test_names_are_checked_with_the_settings() -> None:
    with pytest.raises(ConfigError, match="`module:function`"):
        build({"model": {"path": "m"}, "data": {"prompts": ["p"]}, "hooks": {"step": "tell"}})


def test_the_directory_is_the_runs() -> None:
    assert config("share_of_steps").run_dir == Path("out/r")
