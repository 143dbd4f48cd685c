"""Episodes in messages: the renderer extends what the model said, or another sequence of the rollout begins."""

from __future__ import annotations

from typing import Any

import pytest

from mslime.config.errors import ConfigError, RolloutError
from mslime.config.loader import build
from mslime.config.rollout import EnvironmentLimitsConfig
from mslime.data.sample import Sample, check_invariants
from mslime.rollout import function_contract
from mslime.rollout.environments.environment_pool import EnvironmentFailedError
from mslime.rollout.environments.environment_rollout import EnvironmentRollout
from mslime.rollout.environments.protocol import Observation, Step
from mslime.rollout.function_contract import check_rollout
from mslime.rollout.workflow import Engine, Episode, Task

CHAT = [{"role": "user", "content": "Count."}]


class FakePool:
    """Holds an environment that counts what it is told, in this process."""

    seconds = 0.0

    def __init__(self, first: Observation = "From 0.") -> None:
        self._first, self._heard = first, 0

    async def open(self, alone: bool) -> FakePool:
        return self

    def failed(self, why: str) -> EnvironmentFailedError:
        return EnvironmentFailedError(why)

    async def reset(self, task: object) -> Observation:
        return self._first

    async def step(self, action: str) -> Step:
        self._heard += 1
        return Step(f"{self._heard}: {action}?", float(self._heard), self._heard == 2)

    async def close(self) -> None: ...


def playing(pool: Any, credit: str = "steps") -> EnvironmentRollout:
    return EnvironmentRollout(pool, EnvironmentLimitsConfig(), None, credit)


async def counts(task: Task, engine: Engine) -> Episode:
    return await playing(FakePool())(task, engine)


async def moves_credit(task: Task, engine: Engine) -> Episode:
    return await playing(FakePool(), "moved")(task, engine)


async def says_too_much(task: Task, engine: Engine) -> Episode:
    return await playing(FakePool("x" * 2_000_000))(task, engine)


def played(function: str, *replies: str) -> list[Sample]:
    samples = check_rollout(f"{__name__}:{function}", replies, prompt=CHAT)
    for sample in samples:
        check_invariants(sample)
    return samples


def text(sample: Sample, trained: bool = False) -> str:
    return "".join(chr(t) for t, m in zip(sample.tokens, sample.loss_mask, strict=True) if m or not trained)


def test_an_episode_is_one_sequence_where_the_renderer_extends_what_was_said() -> None:
    (sample,) = played("counts", "one", "two")
    assert text(sample) == "user: Count.\n\nFrom 0.\none\0\nuser: 1: one?\ntwo\0"
    assert text(sample, trained=True) == "one\0two\0"
    ends = [at for at, token in enumerate(sample.tokens) if token == 0]
    assert sample.process_rewards == [(ends[0], 1.0), (ends[1], 2.0)] and sample.reward == 3.0


def test_where_history_is_written_anew_each_turn_is_trained_in_the_sequence_that_the_model_saw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(function_contract._Plain, "extend", lambda *_: None)
    first, second = played("counts", "one", "two")
    assert text(first) == "user: Count.\n\nFrom 0.\none\0" and text(first, trained=True) == "one\0"
    assert text(second).endswith("user: 1: one?\ntwo\0") and text(second, trained=True) == "two\0"
    assert first.process_rewards == [(len(first) - 1, 1.0)] and second.process_rewards == [(len(second) - 1, 2.0)]
    assert second.scores["rollout/new_sequence/template_rewrites_history"] == 1
    assert [n for s in (first, second) for _, n in s.turns] == [1, 2] and first.rollout == second.rollout
    moved, last = played("moves_credit", "one", "two")
    assert moved.process_rewards == [(len(moved) - 1, 1.0)]
    assert last.process_rewards == [(len(last) - 1, 2.0 - 3.0)] and last.reward == 3.0


def test_an_environment_that_leaves_no_room_for_a_turn_has_failed() -> None:
    with pytest.raises(RolloutError, match="no room for a turn"):
        played("says_too_much", "one")


@pytest.mark.parametrize(("sections", "said"), [
    ({"data": {"apply_chat_template": False}}, "data.apply_chat_template is false"),
    ({"algorithm": {"advantage": "reinforce_pp"}}, "set algorithm.credit: turns"),
])  # fmt: skip
def test_settings_under_which_a_chat_could_not_be_played_or_credited_are_refused(
    sections: dict[str, Any], said: str
) -> None:
    rollout = {"function": "environment", "environment": "a:B", "environment_turns": "chat"}
    data = {"prompts": ["p.jsonl"], "apply_chat_template": True}
    values: dict[str, Any] = {"model": {"path": "."}, "data": data, "rollout": rollout}
    build(values | {"algorithm": {"advantage": "reinforce_pp", "credit": "turns"}})
    for section, fields in sections.items():
        values[section] = {**values.get(section, {}), **fields}
    with pytest.raises(ConfigError, match=said):
        build(values)
