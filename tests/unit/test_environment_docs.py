"""docs/environments.md: its example is a file that runs, and its settings are real ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mslime.checks.user_functions import check_environment, check_seams, seams_of
from mslime.config.loader import build

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/environments.md").read_text()


def test_the_page_shows_the_example_as_it_is() -> None:
    code = (ROOT / "examples/environments/guess.py").read_text().partition('"""\n\n')[2].strip()
    assert f"```python\n{code}\n```" in PAGE


@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
def test_the_pages_settings_name_classes_that_can_be_used(block: str) -> None:
    given = yaml.safe_load(block)
    own_prompts = given["rollout"]["function"] == "atropos"
    config = build({"model": {"path": "m"}, "data": {} if own_prompts else {"prompts": ["p.jsonl"]}, **given})
    check_seams(config)
    assert own_prompts or "rollout.environment" in {seam.setting for seam in seams_of(config)}


def test_the_example_answers_whatever_a_model_says() -> None:
    said = check_environment("examples.environments.guess:Guess", {"largest": 10})
    assert said[0] == "reset: 'A number from 1 to 10?\\n', and the same for the same task"
    assert said[1] == "step(''): 'That is no number.\\n', reward -0.1" and said[-1] == "closed"
