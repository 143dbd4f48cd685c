"""`mslime check --try` plays an environment, and says what a model's words would break."""

from __future__ import annotations

from typing import Any

import pytest

from mslime.config.errors import ConfigError
from mslime.preflight.episodes import check_environment

USER = "tests.unit.user_environments"


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
