"""`mslime check --try` plays an environment; the example and the settings of docs/environments.md can be used."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from mslime.checks.user_functions import check_environment, check_functions, run_functions
from mslime.config.errors import ConfigError
from mslime.config.loader import build
from tests.fixtures.pages import ROOT, blocks, read_page

USER = "tests.unit.user_environments"
PAGE = read_page("environments.md")


def test_an_environment_that_answers_whatever_is_said_passes():
    said = check_environment(f"{USER}:Plays", {"turns": 3})
    assert said == [
        "reset: 'GO', and the same for the same task",
        "step(''): 'OK', reward 1",
        "step('A reply that no environment waits for.'): 'OK', reward 1",
        "step('A reply that ends in the middle of a {'): 'OK', reward 1, done",
        "closed",
    ]


@pytest.mark.parametrize(("kind", "options", "told"), [
    ("Counting", {}, "step raised ValueError: invalid literal for int.*user_environments.py"),
    ("OldReset", {}, r"it is called with \(self, task\)"),
])  # fmt: skip
def test_one_that_does_not_is_refused_with_what_it_did(kind: str, options: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        check_environment(f"{USER}:{kind}", options)


def test_the_page_of_environments_shows_the_example_as_it_is() -> None:
    code = (ROOT / "examples/environments/guess.py").read_text().partition('"""\n\n')[2].strip()
    assert f"{code}\n" in blocks(PAGE, "python")


@pytest.mark.parametrize("block", blocks(PAGE, "yaml"))
def test_the_pages_settings_name_classes_that_can_be_used(block: str) -> None:
    given = yaml.safe_load(block)
    own_prompts = given["rollout"]["function"] == "atropos"
    config = build({"model": {"path": "m"}, "data": {} if own_prompts else {"prompts": ["p.jsonl"]}, **given})
    check_functions(run_functions(config))
    assert own_prompts or "rollout.environment" in {each.setting for each in run_functions(config)}


def test_the_example_answers_whatever_a_model_says() -> None:
    said = check_environment("examples.environments.guess:Guess", {"largest": 10})
    assert said[0] == "reset: 'A number from 1 to 10?\\n', and the same for the same task"
    assert said[1] == "step(''): 'That is not a number.\\n', reward -0.1" and said[-1] == "closed"
