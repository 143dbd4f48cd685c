"""Rewards: right answers, and functions that raise, hang, die or return nonsense without stopping the others."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mslime.config.errors import ConfigError, RewardError
from mslime.config.reward import RewardConfig
from mslime.data.sample import Group, Sample
from mslime.rollout.filters import load_filter
from mslime.rollout.rewards.reward_kinds import RewardJob
from mslime.rollout.rewards.reward_pool import MODULE, RewardProcess
from mslime.rollout.rewards.scorer import RewardScorer
from mslime.rollout.step_metrics import pass_at_k, summarise
from mslime.rollout.worker_process import WorkerLostError, end_process

USER = "tests.unit.user_rewards"


def sample(response: str, label: Any = None, index: int = 0, **metadata: Any) -> Sample:
    s = Sample.from_prompt(4, index, [1], label)
    s.response, s.metadata = response, metadata
    return s


def score(function: str | None, *samples: Sample, kind: str = "custom", **config: Any) -> list[Any]:
    """Rewards of the samples, all asked for at once; a RewardError stands for itself."""

    async def work() -> list[Any]:
        settings = {"timeout_s": 0.5, "workers": 2, **config}
        scorer = RewardScorer(RewardConfig(kind=kind, function=function and f"{USER}:{function}", **settings))
        try:
            return await asyncio.gather(*(scorer.score(s) for s in samples), return_exceptions=True)
        finally:
            await scorer.close()

    return asyncio.run(asyncio.wait_for(work(), 60))


def test_exact_match_ignores_blanks_around_and_compares_numbers_as_text():
    pairs = [(" 12\n", "12", 1.0), ("12", 12, 1.0), ("12.0", 12, 0.0), ("", "12", 0.0), ("1 2", "12", 0.0)]
    assert score(None, *(sample(r, label) for r, label, _ in pairs), kind="exact") == [w for *_, w in pairs]


MATH = [
    ("The answer is \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
    ("so $x = 3$", "3", 1.0),
    ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}", 1.0),
    ("\\boxed{4}", "5", 0.0),
    ("no idea", "5", 0.0),
    ("", "1/2", 0.0),
    ("\\boxed{(1, 2)}", "$(1,2)$", 1.0),
    ("7", 7, 1.0),
]


def test_mathematical_equivalence():
    responses = [sample(r, label) for r, label, _ in MATH]
    assert score(None, *responses, kind="math", timeout_s=20) == [want for *_, want in MATH]


def test_a_label_without_an_answer_is_an_error_of_the_row():
    (error,) = score(None, sample("1", ""), kind="math", timeout_s=20)
    assert isinstance(error, RewardError) and "no mathematical answer can be read from the label" in str(error)


def score_group(*samples: Sample, **config: Any) -> list[Any]:
    """Rewards of a group; a RewardError stands for them all."""

    async def work() -> list[Any]:
        scorer = RewardScorer(RewardConfig(**{"timeout_s": 0.5, "workers": 2, **config}))
        assert scorer.per_group
        try:
            return await scorer.score_group(samples)
        except RewardError as error:
            return [error]
        finally:
            await scorer.close()

    return asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("array", "returned ndarray array([0.5 , 0.25])"), ("huge", "int too large"), ("vast", "cannot be shown"),
        ("unfloatable", "no number"), ("cancelled", "raised CancelledError"),
    ],
)  # fmt: skip
def test_what_is_no_number_is_said_at_once(what: str, said: str):
    (error, good) = score("odd_values", sample(what), sample(""), timeout_s=50)
    assert isinstance(error, RewardError) and said in str(error) and good == 1.0
    assert score("odd_values", sample(what), timeout_s=50, on_error="drop") == [None]


async def test_an_answer_that_cannot_be_sent_is_an_error_and_no_silence():
    """Of a frame: the parent would wait for it until the process's time is up."""
    worker = await RewardProcess.start("tests.unit.user_frames", RewardJob("x:y", "reward.function", 50.0))
    try:
        with pytest.raises(WorkerLostError, match="its answer cannot be sent"):
            await worker.ask("lambda", 50.0)
        assert await worker.ask("plain", 50.0) == "plain"
    finally:
        await worker.kill()


@pytest.mark.parametrize("level", ["INFO", "WARNING"])
def test_the_traceback_of_a_reward_is_in_the_log_of_the_run_and_not_on_a_terminal(
    level: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    """Processes of rewards write to the log of the process that started them, which has none of its own in check."""
    caplog.set_level(level, logger="mslime")
    score("moody", sample("raise"), sample("raise"), timeout_s=50, on_error="zero", workers=1)
    assert capfd.readouterr().err.count("Traceback") == (level == "INFO")


def test_no_process_outlives_its_pool_or_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    """Where one sample in three ends its process: never more processes than workers, and none at the end."""
    started: list[RewardProcess] = []
    start = RewardProcess.start.__func__

    async def noted(kind: type[RewardProcess], module: str, job: RewardJob) -> RewardProcess:
        started.append(worker := await start(kind, module, job))
        assert sum(w.alive for w in started) <= 2
        return worker

    monkeypatch.setattr(RewardProcess, "start", classmethod(noted))
    samples = [sample("" if i % 3 else "exit", index=i) for i in range(12)]
    assert score("moody", *samples, on_error="zero") == [0.0 if i % 3 == 0 else 1.0 for i in range(12)]
    assert len(started) >= 4 and not any(w.alive for w in started)


@pytest.mark.slow
def test_a_child_that_hangs_holds_up_nobody_and_ends_with_its_parent(tmp_path: Path):
    file = tmp_path / "child"
    hangs = [sample("hang", file=str(file)), sample("good")]
    for limit in (3, 30):  # the second for a machine on which 3 s are too short to start a child, or to score at all
        scores = score("judges_in_a_child", *hangs, on_error="zero", timeout_s=limit)
        if file.exists() and scores[1]:
            break
    assert scores == [0.0, 1.0]
    with pytest.raises(ProcessLookupError):
        while True:  # init reaps it
            os.kill(int(file.read_text()), 0)
            time.sleep(0.01)


def test_a_group_is_scored_at_once_beside_parts_that_score_samples():
    group = [sample("abcd"), sample("a"), sample("abc", bonus=4)]
    custom = {"kind": "custom", "function": f"{USER}:brevity_rank", "per": "group"}
    assert score_group(*group, **custom) == [0.0, 1.0, 0.5]
    assert [s.scores for s in group] == [{"user/group": 3.0}] * 3
    length = {"name": "length", "kind": "custom", "function": f"{USER}:length", "weight": 10}
    assert score_group(*group, parts=[{"name": "rank", **custom}, length]) == [40.0, 11.0, 70.5]
    assert [s.scores["reward/rank/mean"] for s in group] == [0.0, 1.0, 0.5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("short", "returned 1 rewards for a group of 2 samples"),
        ("number", "returned 1.0, which is not a list"),
        ("text", "returned '11', which is not a list"),
        ("raise", "raised KeyError: 'score'"),
        pytest.param("hang", "took longer than 0.5 s", marks=pytest.mark.nightly),  # ten processes end and start
        ("exit", "ended with exit code 3"),
    ],
)
def test_a_function_of_groups_that_fails_fails_for_all_its_samples(what: str, said: str):
    custom = {"kind": "custom", "function": f"{USER}:moody_group", "per": "group"}
    group = [sample(what), sample("x", index=1)]
    assert score_group(*group, **custom, on_error="zero") == [0.0, 0.0]
    assert all(said in s.error for s in group)
    assert score_group(sample(what), sample("x"), **custom, on_error="drop") == [None, None]
    (error,) = score_group(sample(what), sample("x"), **custom)
    assert isinstance(error, RewardError) and said in str(error) and "moody_group" in str(error)


def test_one_bad_reward_of_a_group_is_one_samples():
    custom = {"kind": "custom", "function": f"{USER}:moody_group", "per": "group"}
    assert score_group(sample("one bad"), sample("x", index=1), **custom, on_error="drop") == [1.0, None]
    assert score_group(sample("fine"), sample("x", index=1), **custom) == [1.0, 2.0]


def test_a_group_that_is_scored_again_after_a_failure_has_each_step_reward_once():
    rank = {"name": "rank", "kind": "custom", "function": f"{USER}:brevity_rank", "per": "group"}
    parts = [rank, {"name": "steps", "kind": "custom", "function": f"{USER}:by_step"}]
    group = [sample("0"), sample("no step", index=1)]
    (error,) = score_group(*group, parts=parts)
    assert isinstance(error, RewardError) and group[1].error
    group[1].response = ""
    assert score_group(*group, parts=parts) == [1.0, 1.0]
    assert [s.process_rewards for s in group] == [[(0, 0.5)], []] and not group[1].error


def test_a_function_may_return_process_rewards_beside_the_rollouts():
    samples = [sample("0"), sample(""), sample("0 0")]
    assert score("by_step", *samples) == [1.0, 0.0, 2.0]
    assert [s.process_rewards for s in samples] == [[(0, 0.5)], [], [(0, 0.5), (0, 0.5)]]


def test_process_rewards_that_are_none_or_lie_beyond_the_sample_are_errors():
    beyond, strange = score("by_step", sample("1")), score("odd_steps", sample("no pairs"))
    assert isinstance(beyond[0], RewardError) and "beyond the 1 tokens" in str(beyond[0])
    assert isinstance(strange[0], RewardError) and "not pairs of position and reward" in str(strange[0])


def test_async_functions_wait_together():
    assert score("met_length", *(sample("x" * i) for i in range(40)), workers=1, timeout_s=50) == list(range(40))


@pytest.mark.slow
@pytest.mark.parametrize("function", ["moody", "moody_async"])
def test_every_way_to_fail_is_reported_and_the_others_are_scored(function: str):
    ways = {
        "raise": r"raised KeyError: 'score' (",
        "hang": "took longer than 0.5 s",
        "exit": "ended with exit code 3",
        "nan": "returned nan, which is not finite",
        "inf": "returned inf, which is not finite",
        "none": "returned None, which is not a number",
        "text": "returned '1.0', which is not a number",
        "list": "returned [1.0], which is not a number",
    }
    if function == "moody_async":
        ways["await"] = "took longer than 0.5 s"
    asked = [s for i, way in enumerate(ways) for s in (sample(way, index=i), sample("fine", index=i))]
    results = score(function, *asked)
    for i, (way, message) in enumerate(ways.items()):
        assert results[2 * i + 1] == 1.0, f"the sample beside {way}"
        error = results[2 * i]
        assert isinstance(error, RewardError), way
        assert message in error.rule and error.field == f"reward {USER}:{function}"
        assert f"group 4, sample {i}" in error.value and way in error.value and "on_error" in error.hint


@pytest.mark.slow
@pytest.mark.parametrize(("function", "hanging"), [("hangs_on", {0, 1}), ("hangs_on_async", {3, 14})])
def test_only_the_sample_that_hangs_is_blamed_when_its_process_is_killed_while_others_start(
    function: str, hanging: set[int]
):
    """Starting a process takes half a second, in which a second one is killed: nobody may be given to the dead."""
    asked = [sample("", index=i, hang=i in hanging) for i in range(20)]
    rewards = score(function, *asked, on_error="zero")
    assert [i for i, r in enumerate(rewards) if r != 1.0] == sorted(hanging)
    assert {s.index for s in asked if s.error} == hanging


async def test_a_process_that_somebody_else_kills_costs_no_sample_its_reward():
    scorer = RewardScorer(RewardConfig(kind="custom", function=f"{USER}:own_pid", workers=2, timeout_s=20))
    try:
        await scorer.start()
        pids = {int(await scorer.score(sample("")) or 0) for _ in range(20)}
        slow = [asyncio.create_task(scorer.score(sample("", wait=1.0))) for _ in range(2)]
        await asyncio.sleep(0.3)
        assert all(pid > 1 and pid != os.getpid() for pid in pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        rewards = await asyncio.gather(*slow, *(scorer.score(sample("")) for _ in range(4)), return_exceptions=True)
        assert len(rewards) == 6 and all(isinstance(r, float) and r > 1 for r in rewards)
    finally:
        await scorer.close()


async def test_a_dead_worker_answers_at_once_that_it_is_dead(capfd: pytest.CaptureFixture[str]):
    worker = await RewardProcess.start(MODULE, RewardJob(f"{USER}:length", "reward.function", 20.0))
    await worker.kill()
    with pytest.raises(WorkerLostError):
        await worker.ask(sample("abc"), 3600.0)
    assert not worker.alive


def test_killing_a_process_that_has_just_ended_leaves_its_exit_code_alone(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    """The child has ended and nobody has reaped it yet: polling it now would take the exit code from the watcher."""

    async def work() -> int:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import os; os._exit(7)")
        time.sleep(0.5)  # the loop does not run, so asyncio has not heard of the end
        end_process(process)
        return await process.wait()

    policy = asyncio.get_event_loop_policy()
    watcher = policy.get_child_watcher()
    policy.set_child_watcher(asyncio.PidfdChildWatcher())  # reaps within the loop, as Python 3.12 does by default
    try:
        assert asyncio.run(asyncio.wait_for(work(), 30)) == 7
    finally:
        policy.set_child_watcher(watcher)
    assert "Unknown child process" not in caplog.text + capfd.readouterr().err


def test_a_function_that_writes_nonsense_to_the_pipe_is_an_error_of_its_sample():
    results = score("scribbles", sample("scribble"), sample("fine", index=1), workers=1)
    assert isinstance(results[0], RewardError) and results[1] == 1.0


@pytest.mark.slow
def test_a_function_that_spins_is_killed_and_its_worker_replaced():
    results = score("moody", sample("spin"), *(sample("fine", index=i) for i in range(1, 6)), workers=1)
    assert isinstance(results[0], RewardError) and results[1:] == [1.0] * 5


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("tests.unit.no_such_module:score", "cannot be imported"),
        (f"{USER}:lenght", "no function 'lenght'\n  hint: did you mean 'length'"),
        (f"{USER}:NOT_A_FUNCTION", "no function 'NOT_A_FUNCTION'"),
        ("length", "`module:function`"),
    ],
)
async def test_a_function_that_cannot_be_found_is_known_before_generation(function: str, message: str):
    scorer = RewardScorer(RewardConfig(kind="custom", function=function))
    with pytest.raises(ConfigError, match=message) as caught:
        await scorer.start()
    assert caught.value.field == "reward.function"
    await scorer.close()


def group(number: int, rewards: list[float]) -> Group:
    samples = [sample("x", index=i) for i in range(len(rewards))]
    for s, r in zip(samples, rewards, strict=True):
        s.reward = r
    return Group(number, samples)


def test_the_zero_variance_filter_keeps_groups_that_teach():
    _, keep = load_filter("zero_variance")
    assert keep is not None
    assert not keep(group(0, [0, 0, 0])) and not keep(group(0, [0.3, 0.3 + 1e-9])) and keep(group(0, [0, 0, 1]))
    assert load_filter("none") == ("none", None)


def test_a_users_filter_decides_and_its_mistakes_are_named():
    name, keep = load_filter(f"{USER}:keep_even")
    assert name == "filter" and keep is not None and keep(group(2, [0])) and not keep(group(3, [0]))
    _, confused = load_filter(f"{USER}:confused")
    assert confused is not None
    with pytest.raises(ConfigError, match="must return True"):
        confused(group(1, [0]))
    with pytest.raises(ConfigError, match="raised IndexError: list index out of range for group 0"):
        confused(group(0, [0]))
    with pytest.raises(ConfigError, match=r"rollout.dynamic_filter = 'zero_varianse'"):
        load_filter("zero_varianse")


def brute_force_pass_at_k(n: int, right: int, k: int) -> float:
    """Share of all subsets of k responses that hold a right one."""
    from itertools import combinations

    subsets = list(combinations(range(n), k))
    return sum(any(i < right for i in s) for s in subsets) / len(subsets)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    for n in range(1, 8):
        for right in range(n + 1):
            for k in range(1, n + 1):
                assert pass_at_k(n, right, k) == pytest.approx(brute_force_pass_at_k(n, right, k), abs=1e-12)


def test_a_held_out_set_is_summarised_by_prompt():
    groups = [group(0, [1, 0, 0, 0, 0, 0]), group(1, [1] * 6), group(2, [0] * 6)]
    result = summarise("sums", groups, 2.0)
    assert result.accuracy == result.mean_reward == pytest.approx(7 / 18)
    assert result.pass_at == pytest.approx({1: (1 / 6 + 1) / 3, 2: (1 / 3 + 1) / 3, 4: (4 / 6 + 1) / 3})
    assert set(result.metrics()) == {
        f"eval/sums/{n}"
        for n in ("accuracy", "reward", "response_len_mean", "truncated", "seconds", "pass@1", "pass@2", "pass@4")
    }
