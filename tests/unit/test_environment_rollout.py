"""Episodes in environments as the rollout service plays them: what is trained, limits, and what breaks."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mslime.config.errors import ConfigError, RolloutError
from mslime.config.loader import build
from mslime.data.sample import SampleStatus, check_invariants
from mslime.rollout.environments.environment_rollout import ChatTurns, PlainTurns
from mslime.rollout.environments.environment_rollout import _turns as open_turns
from mslime.rollout.service import RolloutService, StepBatch
from tests.fixtures.least import refused
from tests.unit.rollout_fakes import FakeSlowEngine, FakeTokenizer, make_service, publish, run_config

USER = "tests.unit.user_environments"


def settings(tmp_path: Path, kind: str = "Plays", limits: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """`rollout` of a run in an environment that takes notes; `options` are its constructor's."""
    options = {"notes": str(tmp_path / "notes"), **more.pop("options", {})}
    return {
        "function": "environment", "environment": f"{USER}:{kind}", "environment_options": options,
        "environment_limits": {"workers": 1, "call_s": 30, **(limits or {})}, **more,
    }  # fmt: skip


def engine() -> FakeSlowEngine:
    return FakeSlowEngine(lambda group, index: 3 + index)


def taken(tmp_path: Path, kind: str = "Plays", **more: Any) -> tuple[StepBatch, RolloutService]:
    """The first step of such a run."""

    async def work() -> tuple[StepBatch, RolloutService]:
        service = make_service(run_config(tmp_path, **settings(tmp_path, kind, **more)), engine())
        try:
            return await service.take(0), service
        finally:
            await service.close()

    return asyncio.run(asyncio.wait_for(work(), 60))


def closed_as_often_as_begun(tmp_path: Path) -> bool:
    lines = [line.rsplit(" ", 2)[0].split(" ", 1) for line in (tmp_path / "notes").read_text().splitlines()]
    counts = {what: Counter(who for did, *who_ in lines if did == what for who in who_) for what in ("reset", "close")}
    return counts["reset"] == counts["close"] and bool(counts["reset"])


def test_an_episode_is_one_sample_with_the_sum_of_its_rewards(tmp_path: Path):
    batch, _ = taken(tmp_path)
    assert len(batch.samples) == 8
    for sample in batch.samples:
        check_invariants(sample)
        n = 3 + sample.index
        assert sample.trainable_tokens == 2 * n and len(sample) == sample.prompt_length + 2 + n + 2 + n
        assert (sample.reward, sample.status, sample.process_rewards) == (2.0, SampleStatus.COMPLETED, [])
    assert batch.metrics["user/environment_turns"] == 2 and batch.metrics["user/environment_done"] == 1
    assert closed_as_often_as_begun(tmp_path)


def test_where_no_step_has_a_reward_the_runs_reward_scores_the_episode(tmp_path: Path):
    batch, _ = taken(tmp_path, "Scored")
    assert [s.reward for s in batch.samples] == [float(s.index % 2) for s in batch.samples], "FakeScorer's"
    assert batch.metrics["user/taken"] == 2


@pytest.mark.parametrize(("advantage", "credit", "of_first", "of_last"), [
    ("grpo", "auto", None, None), ("grpo", "episode", None, None), ("grpo", "steps", 1.0, 1.0),
    ("reinforce_pp", "auto", 1.0, 1.0), ("reinforce_pp", "episode", None, None),
])  # fmt: skip
def test_rewards_of_steps_count_where_the_step_ended_and_never_twice(
    tmp_path: Path, advantage: str, credit: str, of_first: float | None, of_last: float | None
):
    config = run_config(tmp_path, **settings(tmp_path, environment_credit=credit))
    values = config.model_dump(mode="json", exclude_unset=True) | {"algorithm": {"advantage": advantage}}

    async def work() -> StepBatch:
        service = make_service(build(values), engine())
        try:
            return await service.take(0)
        finally:
            await service.close()

    for sample in asyncio.run(asyncio.wait_for(work(), 60)).samples:
        first_end = sample.prompt_length + 2 + 3 + sample.index - 1
        last = len(sample) - 1
        rewards = dict(sample.process_rewards)
        if of_first is None:
            assert rewards == {}
        elif advantage == "grpo":
            assert rewards == {first_end: of_first, last: of_last}, "beside the episode's reward"
        else:
            rewards[last] = rewards.get(last, 0.0) + (sample.reward or 0.0)
            assert rewards == {first_end: of_first, last: of_last}, "the return is the reward, spread over its steps"


def test_an_episode_ends_with_its_turns(tmp_path: Path):
    batch, _ = taken(tmp_path, limits={"turns": 3}, options={"turns": 100})
    assert all(s.reward == 3.0 and s.trainable_tokens == 3 * (3 + s.index) for s in batch.samples)
    assert batch.metrics["user/environment_done"] == 0
    assert closed_as_often_as_begun(tmp_path)


def test_an_episode_ends_when_its_environment_took_its_seconds(tmp_path: Path):
    batch, _ = taken(tmp_path, limits={"episode_s": 0.04}, options={"turns": 100, "trouble": "slow"})
    assert all(s.reward == 1.0 for s in batch.samples), "the first step takes them"


def test_an_episode_whose_text_fills_the_context_ends_as_truncated_with_its_reward(tmp_path: Path):
    batch, _ = taken(tmp_path, max_total_tokens=16, options={"turns": 100})
    assert {(s.status, s.index, s.reward) for s in batch.samples} == {
        (SampleStatus.TRUNCATED, 0, 3.0),  # the third turn fills it
        (SampleStatus.TRUNCATED, 1, 2.0),  # what follows the second turn does not fit
    }


def failure(tmp_path: Path, **more: Any) -> str:
    with pytest.raises(RolloutError) as caught:
        taken(tmp_path, **more)
    return str(caught.value)


@pytest.mark.parametrize(("trouble", "told"), [
    ("raise", "step raised ValueError: the group_gate is stuck"), ("hang", "step took longer than 2 s"),
    ("exit", "step returned no answer: its process ended with exit code 7"),
    ("memory", "step needed more memory than the 512 MiB of its process"), ("number", "step returned reward = 'one'"),
])  # fmt: skip
@pytest.mark.slow
def test_a_broken_episode_ends_the_run_or_is_dropped_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trouble: str, told: str
):
    limits = {"call_s": 2 if trouble == "hang" else 30, "memory_mib": 512}
    error = failure(tmp_path, limits=limits, options={"trouble": trouble}, group_size=3)
    assert f"{USER}:Plays: {told}" in error, "names the class"
    assert "group 1, response 0" in error, "names the rollout"
    assert "rollout.on_error: drop" in error, "names the hint"
    if trouble not in ("exit", "memory"):
        assert closed_as_often_as_begun(tmp_path)
    (tmp_path / "notes").unlink()
    batch, service = taken(tmp_path, limits=limits, options={"trouble": trouble}, on_error="drop", group_size=3)
    assert {g.group_id: g.numbers for g in batch.groups} == {0: [0, 1, 2], 1: [1, 2], 2: [0, 1, 2], 3: [0, 1, 2]}
    assert all(s.reward == 2.0 for s in batch.samples)
    assert service.tracker.counters.total["failed_rollouts"] == 1
    assert told in capsys.readouterr().out


def test_episodes_that_another_one_took_down_begin_again(tmp_path: Path):
    """One process holds all eight; the one that ends it does so once, so it is not to blame when it is alone."""
    batch, service = taken(tmp_path, options={"trouble": "exit once"})
    assert [s.reward for s in batch.samples] == [2.0] * 8
    assert service.ledger.dropped["unused"] > 0, "what was generated in the lost episodes"
    for sample in batch.samples:
        check_invariants(sample)


def test_a_first_text_that_does_not_fit_is_told_as_such(tmp_path: Path):
    error = failure(tmp_path, options={"trouble": "long"})
    assert "reset returned a text that does not fit: 1000 tokens after" in error
    assert closed_as_often_as_begun(tmp_path)


def test_episodes_wait_through_weight_updates_and_are_closed_when_the_service_is(tmp_path: Path):
    async def work() -> None:
        config = run_config(
            tmp_path, **settings(tmp_path, options={"turns": 4}, over_sampling=2.0, limits={"workers": 2})
        )
        fake = engine()
        service = make_service(config, fake)
        for step in range(3):
            batch = await service.take(step)
            assert all(s.reward == 4.0 for s in batch.samples)
            await publish(service, fake, step + 1)
        await service.close()

    asyncio.run(asyncio.wait_for(work(), 90))
    assert closed_as_often_as_begun(tmp_path)


# The chat template


TURN = "<|im_end|>\n<|im_start|>user\nAt 3.<|im_end|>\n<|im_start|>assistant\n"


class FakeChat(FakeTokenizer):
    """ChatML; 0 is its end of a turn."""

    def render(self, messages: Any, options: Any) -> str:
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return f"{turns}<|im_start|>assistant\n"

    def decode(self, ids: Any, *, special_tokens: bool = False) -> str:
        return "<|im_end|>" if list(ids) == [0] else "?"


@pytest.mark.parametrize(("last", "wanted"), [(0, TURN.removeprefix("<|im_end|>")), (ord("x"), TURN)])
def test_what_the_environment_says_is_a_turn_in_the_chat_template(last: int, wanted: str):
    """A reply that a limit cut is closed; one that the model ended is not closed twice."""
    turns = ChatTurns(FakeChat(), {})
    assert turns.user_turn([{"role": "user", "content": "At 3."}], last) == wanted


def test_special_tokens_that_an_environment_writes_out_are_text():
    said = list[str]()

    class FakeEngine:
        def append(self, sample: Any, text: str) -> None:
            said.append(text)

    PlainTurns(["<|end|>"]).add(FakeEngine(), None, "a<|end|>b")  # type: ignore[arg-type]
    PlainTurns(["<|end|>"]).add(FakeEngine(), None, [{"role": "user", "content": "<|end|>"}])  # type: ignore[arg-type]
    assert said == ["a< |end|>b", "< |end|>"]
    assert ChatTurns(FakeChat(), {}, ["<|end|>"])._ordinary("x<|end|>") == "x< |end|>"


class FakeWithEnds(FakeTokenizer):
    """`<|end|>` is a special token."""

    def decode(self, ids: Any, *, special_tokens: bool = False) -> str:
        return "<|end|>" if list(ids) == [0] else super().decode(ids)


@pytest.mark.parametrize("read", [False, True])
def test_special_tokens_that_tools_and_environments_write_are_read_only_where_the_run_says_so(
    tmp_path: Path, read: bool
):
    function = "tests.unit.user_rollouts:hears_the_end_of_a_turn"
    chats = {"function": function, "renderer": "tests.unit.user_rollouts:plain", "read_special_tokens": read}
    heard = "a<|end|>b" if read else "a< |end|>b"

    async def work() -> None:
        service = make_service(run_config(tmp_path, **chats), engine(), tokenizer=FakeWithEnds())
        try:
            for sample in (await service.take(0)).samples:
                assert heard in "".join(map(chr, sample.tokens[: sample.prompt_length]))
        finally:
            await service.close()

    asyncio.run(asyncio.wait_for(work(), 30))
    said = list[str]()

    class FakeEngine:
        def append(self, sample: Any, text: str) -> None:
            said.append(text)

    config = run_config(tmp_path, **settings(tmp_path, read_special_tokens=read))
    open_turns(config.rollout, config.data, FakeWithEnds()).add(FakeEngine(), None, "a<|end|>b")  # type: ignore[arg-type, union-attr]
    assert said == [heard]


def test_a_template_that_rewrites_replies_is_refused():
    class Rewrites(FakeChat):
        def render(self, messages: Any, options: Any) -> str:
            return super().render([m for m in messages if m["role"] != "assistant"], options)

    with pytest.raises(ConfigError, match="the chat template changes replies"):
        ChatTurns(Rewrites(), {}).user_turn([{"role": "user", "content": "x"}], 0)


@pytest.mark.parametrize(("rollout", "field", "rule"), [
    ({"environment": "a:B"}, "rollout.environment", "rollout.function: environment"),
    ({"function": "environment"}, "rollout.environment", "must be set together"),
    ({"function": "environment", "environment": "a.B"}, "rollout.environment", "module:function"),
    ({"environment_options": {"size": 3}}, "rollout.environment_options", "without rollout.environment"),
    ({"environment_credit": "steps", "advantage": "rloo"}, "rollout.environment_credit", "rewards of whole"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(rollout: dict[str, Any], field: str, rule: str):
    algorithm = {"advantage": rollout.pop("advantage", "grpo")}
    error = refused(rollout=rollout, algorithm=algorithm)
    assert error.field == field and rule in error.rule
