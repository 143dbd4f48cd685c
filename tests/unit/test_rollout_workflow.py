"""Rollout functions of several turns: what they record, how they wait, how they end, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mslime.backends.sglang.generating import GenerateRequest, GenerateResult
from mslime.config.data import EvalSetConfig
from mslime.config.errors import ConfigError, RolloutError
from mslime.data.sample import Group, Sample, SampleStatus, check_invariants
from mslime.data.source import Prompt
from mslime.rollout.function_contract import check_workflow
from mslime.rollout.workflow import Task
from tests.unit import user_rollouts
from tests.unit.rollout_fakes import (
    FakeScorer,
    FakeSlowEngine,
    FakeSpacedTokenizer,
    make_service,
    publish,
    run_config,
    short,
    ticks,
    write_prompts,
)

DEADLINE_S = 30


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    user_rollouts.forget()
    yield
    user_rollouts.forget()


def named(function: str) -> str:
    return f"tests.unit.user_rollouts:{function}"


def check_turns(sample: Sample, environment: list[int]) -> None:
    """Sampled tokens are FakeSlowEngine's at their positions, all others are the environment's and are not trained."""
    check_invariants(sample)
    said = sample.tokens[sample.prompt_length :].tolist()
    assert [t for t in said if t < 100] == environment
    for segment in sample.segments[1:]:
        t = np.arange(segment.start, segment.end)
        if segment.version is None:
            assert not segment.trainable and not sample.loss_mask[t].any() and not sample.log_probs[t].any()
        else:
            assert sample.tokens[t].tolist() == (100 + t).tolist()
            np.testing.assert_allclose(sample.log_probs[t], -t / 1000 - segment.version, rtol=1e-5)
    assert sample.routes is not None and len(sample.routes) == len(sample) - 1, "routes of the environment's tokens too"


async def test_two_turns_are_one_sample_whose_environment_is_not_trained(tmp_path: Path) -> None:
    engine = FakeSlowEngine(short)
    service = make_service(run_config(tmp_path, function=named("two_turns")), engine)
    for step in range(2):
        batch = await service.take(step)
        for sample in batch.samples:
            check_turns(sample, [ord("O"), ord("K")])
            assert sample.trainable_tokens == 2 * short("", sample.index) and len(sample.segments) == 4
            assert sample.status is SampleStatus.COMPLETED and sample.response
            assert batch.metrics["ledger/trained_tokens"] == 4 * 2 * (3 + 4)
        await publish(service, engine, step + 1)
    assert set(user_rollouts.calls.values()) == {1} and len(user_rollouts.calls) == 16
    assert {finish for _, finish in user_rollouts.turns} == {"stop"}
    assert user_rollouts.turns[0][0].split() == ["102", "103", "104"], "the text of one turn"


async def test_a_text_that_is_appended_gets_no_blank_that_nobody_wrote(tmp_path: Path) -> None:
    config = run_config(tmp_path, function=named("two_turns"))
    service = make_service(config, FakeSlowEngine(short), tokenizer=FakeSpacedTokenizer())
    for sample in (await service.take(0)).samples:
        check_turns(sample, [ord("O"), ord("K")])


async def test_a_held_out_set_is_answered_by_the_same_function(tmp_path: Path) -> None:
    config = run_config(tmp_path, function=named("two_turns"))
    seen: list[Group] = []
    service = make_service(config, FakeSlowEngine(short), on_evaluated=lambda name, groups: seen.extend(groups))
    result = await service.evaluate(EvalSetConfig(name="e", path=f"{config.data.prompts[0]}@[:3]"))
    assert result.prompts == 3 and result.response_len_mean == 3 + 2 + 3
    assert all(s.segments[2].version is None and s.status is SampleStatus.COMPLETED for g in seen for s in g.samples)
    assert service.ledger.generated == 0


async def test_an_evaluation_opens_no_more_at_once_than_training(tmp_path: Path) -> None:
    """A rollout function may hold a sandbox, an environment or an agent."""
    user_rollouts.open_now.clear()
    rows = write_prompts(tmp_path / "held_out.jsonl", 20)
    config = run_config(tmp_path, function=named("opens_something"), groups_per_step=2, max_staleness=1)
    service = make_service(config, FakeSlowEngine(lambda group, index: 1))
    result = await service.evaluate(EvalSetConfig(name="held", path=str(rows), samples_per_prompt=2))
    assert result.prompts == 20 and user_rollouts.open_now["most"] == 2 * 2 * 2
    await service.close()


async def test_an_evaluation_that_is_cancelled_from_within_says_so(tmp_path: Path) -> None:
    async def cancelled(sample: Sample) -> float:
        raise asyncio.CancelledError

    scorer = FakeScorer()
    scorer.score = cancelled  # type: ignore[method-assign]
    service = make_service(run_config(tmp_path), FakeSlowEngine(lambda group, index: 1), scorer)
    rows = EvalSetConfig(name="held", path=str(write_prompts(tmp_path / "held_out.jsonl", 2)))
    with pytest.raises(RolloutError, match="raised CancelledError"):
        await service.evaluate(rows)
    with pytest.raises(RolloutError, match="raised CancelledError"):
        await service.take(0)
    await service.close()


async def test_engines_that_are_added_are_sent_as_many_requests_as_the_others(tmp_path: Path) -> None:
    config = run_config(tmp_path, groups_per_step=32, max_staleness=1, concurrency=4)
    engine = FakeSlowEngine(lambda group, index: 40)
    service = make_service(config, engine)
    await publish(service, engine, 0)
    await service.take(0)
    assert engine.most_running == 4
    await service.pause_for_update()
    engine.clients, engine.version = [engine] * 8, 1
    await service.resume_after_update(1)
    await service.take(1)
    assert engine.most_running == 32
    await service.close()


@pytest.mark.parametrize(
    "rollout", [{"over_sampling": 1.5}, {"max_staleness": 1}, {"max_staleness": 1, "pause_mode": "in_place"}]
)
async def test_an_interruption_in_the_second_turn_is_continued_within_the_turn(
    tmp_path: Path, rollout: dict[str, object]
) -> None:
    """The function is called once, and its turn has the tokens of both weight versions."""
    engine = FakeSlowEngine(lambda group, index: 25 if int(group[1:]) % 3 == 1 else 4)
    config = run_config(tmp_path, function=named("two_turns"), on_stale="keep", groups_per_step=2, **rollout)
    service = make_service(config, engine)
    crossed: list[Sample] = []
    for step in range(8):
        for sample in (await service.take(step)).samples:
            check_turns(sample, [ord("O"), ord("K")])
            last = next(i for i, s in enumerate(sample.segments) if i and s.version is None)
            if len({s.version for s in sample.segments[last + 1 :]}) > 1:
                crossed.append(sample)
        await publish(service, engine, step + 1)
    assert crossed, "no second turn was interrupted"
    assert all(s.status is SampleStatus.COMPLETED for s in crossed)
    assert set(user_rollouts.calls.values()) == {1}, "a function was begun again"
    assert "restarted" not in service.ledger.dropped
    lengths = {len(text.split()) for text, _ in user_rollouts.turns}
    assert lengths <= {4, 25}, "a turn was given to the function in parts"
    await service.close()


class Tool:
    """A tool that answers group 1 when it is told to."""

    def __init__(self) -> None:
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def __call__(self, task: Task) -> None:
        if task.group_id == 1:
            self.asked.set()
            await self.may.wait()


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_tool_may_take_longer_than_several_steps(tmp_path: Path, max_staleness: int) -> None:
    engine, tool = FakeSlowEngine(short), Tool()
    user_rollouts.told["tool"] = tool
    config = run_config(
        tmp_path, function=named("with_a_tool"), max_staleness=max_staleness, over_sampling=2.0, on_stale="keep"
    )
    service = make_service(config, engine)
    for step in range(3):
        batch = await service.take(step)
        assert 1 not in [g.group_id for g in batch.groups]
        await publish(service, engine, step + 1)
    assert tool.asked.is_set() and user_rollouts.calls[1, 0] == 1
    tool.may.set()
    found: list[Sample] = []
    for step in range(3, 7):
        found += [s for s in (await service.take(step)).samples if s.group_id == 1]
        await publish(service, engine, step + 1)
    assert len(found) == 2 and user_rollouts.calls[1, 0] == 1
    for sample in found:
        check_turns(sample, [1, 2, 3])
        versions = [s.version for s in sample.segments[1:]]
        assert versions[0] == 0 and versions[1] is None and versions[2] is not None and versions[2] >= 3
    await service.close()


async def test_a_function_that_ends_while_its_group_rests_is_scored_when_the_group_goes_on(tmp_path: Path) -> None:
    engine, may, scorer = FakeSlowEngine(short), asyncio.Event(), FakeScorer()

    async def at_the_end(task: Task) -> None:
        if task.group_id == 1:
            await may.wait()

    user_rollouts.told["tool"] = at_the_end
    config = run_config(tmp_path, function=named("tool_last"), over_sampling=2.0, on_stale="keep")
    service = make_service(config, engine, scorer)
    await service.take(0)
    resting = next(g for g in service.tracker.partial if g.group_id == 1)
    may.set()
    while not resting.finished:
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert all(s.reward is None for s in resting.samples), "scored while it rests"
    await publish(service, engine, 1)
    batch = await service.take(1)
    assert resting in batch.groups and all(s.reward is not None for s in resting.samples)
    assert user_rollouts.calls[1, 0] == 1
    await service.close()


async def test_a_function_that_fails_while_its_group_rests_is_told_when_the_group_goes_on(tmp_path: Path) -> None:
    engine, may = FakeSlowEngine(short), asyncio.Event()

    async def breaks(task: Task) -> None:
        if task.group_id == 1:
            await may.wait()
            raise OSError("the tool is gone")

    user_rollouts.told["tool"] = breaks
    config = run_config(tmp_path, function=named("with_a_tool"), over_sampling=2.0)
    service = make_service(config, engine)
    await service.take(0)
    may.set()
    await publish(service, engine, 1)
    with pytest.raises(RolloutError, match=r"with_a_tool = 'group 1, response \d': raised OSError: the tool is gone"):
        await service.take(1)
    await service.close()


async def test_a_resume_begins_an_unfinished_rollout_anew_and_books_its_tokens(tmp_path: Path) -> None:
    engine, tool = FakeSlowEngine(short), Tool()
    user_rollouts.told["tool"] = tool
    config = run_config(tmp_path, function=named("with_a_tool"), over_sampling=2.0)
    service = make_service(config, engine)
    await service.take(0)
    await publish(service, engine, 1)
    await service.drain()
    await service.save(tmp_path / "s.npz")
    unfinished = [s for g in service.tracker.held() for s in g.samples if not s.status.finished]
    lost = sum(s.trainable_tokens for s in unfinished if s.group_id == 1)
    assert lost == 3 + 4
    await service.close()

    tool.may.set()
    resumed = make_service(config, FakeSlowEngine(short), version=1)
    await resumed.load(tmp_path / "s.npz")
    batch = await resumed.take(1)
    assert 1 in [g.group_id for g in batch.groups]
    assert user_rollouts.calls[1, 0] == 2 and batch.metrics["ledger/dropped/restarted_tokens"] >= lost
    for sample in batch.samples:
        check_turns(sample, [1, 2, 3])
    await resumed.close()


async def test_a_response_continued_after_a_resume_ends_at_a_stop_text_that_began_before(tmp_path: Path) -> None:
    config = run_config(tmp_path, stop=["104 105"], groups_per_step=1)
    before = make_service(config, FakeSlowEngine(lambda group, index: 9))
    group = before.begin(Prompt([80, 48], "0", {}, "p:1"))
    for sample in group.samples:
        t = np.arange(2, 5)
        sample.extend(100 + t, log_probs=-t / 1000, versions=[(0, 0, 3)], engine="fake")
        before.tracker.generated(sample, 3)
    before.tracker.put_back(group)
    await before.save(tmp_path / "s.npz")
    after = make_service(config, FakeSlowEngine(lambda group, index: 9))
    await after.load(tmp_path / "s.npz")
    for sample in (await after.take(0)).samples:
        assert sample.response_tokens.tolist() == [102, 103, 104, 105], "it went on beyond its end"
        assert sample.status is SampleStatus.COMPLETED


async def test_a_stale_rollout_that_is_generated_again_calls_its_function_again(tmp_path: Path) -> None:
    engine = FakeSlowEngine(lambda group, index: 12 if group == "g1" else 4)
    config = run_config(tmp_path, function=named("two_turns"), over_sampling=2.0, groups_per_step=2, on_stale="reroll")
    service = make_service(config, engine)
    await service.take(0)
    await publish(service, engine, 1)
    engine.lengths = lambda group, index: 4
    batch = await service.take(1)
    group = next(g for g in batch.groups if g.group_id == 1)
    for sample in group.samples:
        check_turns(sample, [ord("O"), ord("K")])
        assert {s.version for s in sample.segments} == {None, 1}
    assert user_rollouts.calls[1, 0] == 2
    assert batch.metrics["ledger/dropped/stale_tokens"] > 0 and batch.metrics["rollout/recycled"] == 0
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("rollout g1-")], "the first one lives on"
    await service.close()


async def test_a_turn_in_a_task_of_its_own_ends_with_the_rollout_that_is_begun_again(tmp_path: Path) -> None:
    """The second rollout of group 2 waits for the engines in such a task when the first one's tokens are too old. Both
    begin again, the second in the same sample."""

    async def late(task: Task) -> None:
        await ticks(16)

    user_rollouts.told["late"] = late
    engine = FakeSlowEngine(lambda group, index: 46 if int(group[1:]) % 3 == 2 else 6)
    config = run_config(
        tmp_path, function=named("races_in_a_task"), over_sampling=2.0, groups_per_step=2, max_staleness=0,
        on_stale="reroll",
    )  # fmt: skip
    service = make_service(config, engine)
    for step in range(4):
        batch = await service.take(step)
        for sample in batch.samples:
            assert sample.response_tokens.tolist() == list(range(100 + sample.prompt_length, 100 + len(sample)))
        await publish(service, engine, step + 1)
    await service.close()


async def test_a_closed_service_leaves_no_function_behind(tmp_path: Path) -> None:
    tool = Tool()
    user_rollouts.told["tool"] = tool
    config = run_config(tmp_path, function=named("with_a_tool"), over_sampling=2.0)
    service = make_service(config, FakeSlowEngine(short))
    await service.take(0)
    await service.close()
    assert not [t for t in asyncio.all_tasks() if t.get_name().startswith(("rollout", "group"))]


async def test_turns_have_limits_of_their_own_and_room_is_of_sampled_tokens(tmp_path: Path) -> None:
    config = run_config(tmp_path, function=named("short_turns"))
    batch = await make_service(config, FakeSlowEngine(lambda group, index: 50)).take(0)
    for sample in batch.samples:
        check_turns(sample, [])
        assert sample.response_length == 6 and sample.status is SampleStatus.TRUNCATED
    assert {(len(text.split()), finish) for text, finish in user_rollouts.turns} == {(2, "length")}

    config = run_config(tmp_path, function=named("until_full"), max_response_tokens=10, max_total_tokens=40)
    for sample in (await make_service(config, FakeSlowEngine(lambda group, index: 4)).take(0)).samples:
        assert sample.trainable_tokens == 10 and sample.response_length == 10 + 3 * len("MORE")


async def test_an_environment_that_says_too_much_ends_the_rollout_as_truncated(tmp_path: Path) -> None:
    batch = await make_service(run_config(tmp_path, function=named("talks_too_much")), FakeSlowEngine(short)).take(0)
    assert all(s.status is SampleStatus.TRUNCATED and s.trainable_tokens == s.response_length for s in batch.samples)


async def test_a_function_may_set_the_reward_and_note_what_it_saw(tmp_path: Path) -> None:
    scorer = FakeScorer()
    service = make_service(run_config(tmp_path, function=named("sets_its_reward")), FakeSlowEngine(short), scorer)
    batch = await service.take(0)
    assert [s.reward for s in batch.samples] == [10.0, 11.0] * 4 and scorer.scored == 0
    assert all(s.metadata["seen"] for s in batch.samples) and all(s.response_length == 2 for s in batch.samples)


async def test_a_reward_that_is_true_or_false_is_a_number_that_can_be_resumed(tmp_path: Path) -> None:
    config = run_config(tmp_path, function=named("is_right"))
    service = make_service(config, FakeSlowEngine(short))
    batch = await service.take(0)
    assert [type(s.reward) for s in batch.samples] == [float] * 8 and batch.metrics["reward/mean"] == 0.5
    await service.save(tmp_path / "state.npz", next_step=0)
    again = make_service(config, FakeSlowEngine(short))
    await again.load(tmp_path / "state.npz")
    assert [s.reward for s in (await again.take(0)).samples] == [s.reward for s in batch.samples]


@pytest.mark.parametrize("function", ["changes_tokens", "masks_its_own", "begins_its_sample_again"])
async def test_what_is_saved_after_a_function_changed_its_sample_can_be_resumed(tmp_path: Path, function: str) -> None:
    service = make_service(run_config(tmp_path, function=named(function)), FakeSlowEngine(short))
    with pytest.raises(RolloutError):
        await service.take(0)
    await service.save(tmp_path / "state.npz", next_step=0, interrupt=True)
    await service.close()
    again = make_service(run_config(tmp_path), FakeSlowEngine(short))
    await again.load(tmp_path / "state.npz")
    assert again.ledger.dropped["failed"] > 0
    assert len((await again.take(0)).groups) == 4


async def test_what_a_function_notes_is_of_its_own_try_and_its_own_sample(tmp_path: Path) -> None:
    waiting = asyncio.Event()

    async def tool(task: Task) -> None:
        waiting.set()
        await asyncio.Event().wait()

    user_rollouts.told["tool"] = tool
    config = run_config(tmp_path, function=named("counts_its_calls"))
    service = make_service(config, FakeSlowEngine(short))
    taking = asyncio.create_task(service.take(0))
    await waiting.wait()
    await service.save(tmp_path / "state.npz", next_step=0)
    (tmp_path / "outline.npz").write_bytes(await service.outline())
    taking.cancel()
    await service.close()

    async def answers(task: Task) -> None:
        pass

    user_rollouts.told["tool"] = answers
    for name in ("state.npz", "outline.npz"):
        again = make_service(config, FakeSlowEngine(short))
        await again.load(tmp_path / name)
        for sample in (await again.take(0)).samples:
            assert sample.metadata["log"] == [sample.index], name


async def test_an_engine_that_dies_is_told_while_another_rollout_of_the_group_is_in_a_tool(tmp_path: Path) -> None:
    async def tool(task: Task) -> None:
        if task.index == 1:
            raise ValueError("this one fails")
        await asyncio.Event().wait()

    user_rollouts.told["tool"] = tool
    service = make_service(run_config(tmp_path, function=named("with_a_tool")), FakeSlowEngine(short))
    with pytest.raises(RolloutError, match="this one fails"):
        await asyncio.wait_for(service.take(0), DEADLINE_S / 2)
    await service.close()


async def test_a_stop_text_need_not_be_in_a_list(tmp_path: Path) -> None:
    engine = FakeSlowEngine(short)
    asked: list[tuple[str, ...]] = []
    generate = engine.generate

    async def told(request: GenerateRequest) -> GenerateResult:
        asked.append(request.stop)
        return await generate(request)

    engine.generate = told  # type: ignore[method-assign]
    await make_service(run_config(tmp_path, function=named("stops_at_a_word")), engine).take(0)
    assert set(asked) == {("</sum>",)}


async def test_a_list_of_the_one_sample_is_that_sample(tmp_path: Path) -> None:
    service = make_service(run_config(tmp_path, function=named("one_in_a_list")), FakeSlowEngine(short))
    assert len((await service.take(0)).groups) == 4


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("raises", r"raised KeyError: 'no such tool'"),
        ("returns_another", r"returned Sample\("),
        ("changes_log_probs", r"changed tokens, loss mask or log-probs of its sample"),
        ("masks_its_own", r"changed tokens, loss mask or log-probs of its sample"),
        ("writes_into_its_mask", r"raised ValueError: assignment destination is read-only \(.*user_rollouts.py:\d+\)"),
        ("begins_its_sample_again", r"changed tokens, loss mask or log-probs of its sample"),
        ("cancels_itself", r"raised CancelledError"),
    ],
)
async def test_what_a_function_does_wrong_names_it_with_the_group_and_the_response(
    tmp_path: Path, function: str, told: str
) -> None:
    """The others are tried by test_rollout_functions_page.py, without a service."""
    service = make_service(run_config(tmp_path, function=named(function)), FakeSlowEngine(short))
    expected = rf"(?s)rollout.function {named(function)} = 'group \d, response \d': {told}.*hint: "
    with pytest.raises(RolloutError, match=expected):
        await service.take(0)
    await service.close()


async def test_a_group_whose_function_fails_twice_is_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    service = make_service(run_config(tmp_path, function=named("raises_for_one")), FakeSlowEngine(short))
    with pytest.raises(RolloutError, match="group 2"):
        await service.take(0)
    batch = await service.take(0)
    assert [g.group_id for g in batch.groups] == [0, 1, 3, 4]
    assert batch.metrics["rollout/failed_groups"] == 1
    await service.close()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("not_async", "must be async"),
        ("three_arguments", r"called with \(task, engine\)"),
        ("no_such", "no function 'no_such'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_run(function: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        make_service(run_config(tmp_path, function=named(function)), FakeSlowEngine(short))
    assert caught.value.field == "rollout.function"


def test_the_contract_returns_what_a_function_makes_of_the_replies() -> None:
    sample = check_workflow(named("two_turns"), replies=["first", "second"])
    assert sample.response == "firstOKsecond" and sample.aborts == 2
    assert [(s.version, s.trainable) for s in sample.segments[1:]] == [
        (0, True), (1, True), (None, False), (1, True), (2, True),
    ]  # fmt: skip
    cut = check_workflow(named("short_turns"), replies=["long", "longer", "longest"])
    assert cut.response == "lololo" and cut.status is SampleStatus.TRUNCATED


def test_the_contract_refuses_a_function_that_holds_up_the_event_loop() -> None:
    with pytest.raises(RolloutError, match="blocked the event loop"):
        check_workflow(named("blocks"))
