"""Kind math: what is equal to a label and what is not, where an answer stands, and answers that nobody can compute."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from fractions import Fraction

import pytest

from mslime.config.errors import RewardError
from mslime.config.reward import RewardConfig
from mslime.data.sample import Sample
from mslime.rollout.rewards.reward_worker import TimeLimitReached, interrupted_after
from mslime.rollout.rewards.scorer import RewardScorer
from mslime_plugins.graders.kinds import MATH
from mslime_plugins.graders.mathematics import UngradedError, graded_answer_line, graded_math
from mslime_plugins.graders.numbers import PlainNumber, close, read_number
from tests.fixtures.hedged_answers import hedged
from tests.fixtures.math_answers import EQUAL, RESPONSES, TOWERS, UNEQUAL


def sample(response: str, label: object, index: int = 0) -> Sample:
    s = Sample.from_prompt(4, index, [1], label)
    s.response = response
    return s


def grade(label: object, response: str) -> bool:
    return graded_math(sample(response, label)) == 1.0


def wrong_pairs(pairs: list[tuple[str, str]], right: bool) -> list[tuple[str, str]]:
    """Those of the pairs, in either direction, that are not graded as they should be."""
    both = [(a, b) for pair in pairs for a, b in (pair, pair[::-1]) if a]
    return [(a, b) for a, b in both if grade(a, f"\\boxed{{{b}}}") != right]


@pytest.mark.parametrize("kind", EQUAL)
def test_answers_that_say_the_same_are_equal(kind: str):
    assert wrong_pairs(EQUAL[kind], True) == []


@pytest.mark.parametrize("kind", UNEQUAL)
def test_answers_that_say_something_else_are_not_equal(kind: str):
    assert wrong_pairs(UNEQUAL[kind], False) == []


@pytest.mark.parametrize("kind", RESPONSES)
def test_the_answer_is_found_in_a_response(kind: str):
    cases = [(label, response, right) for label, response, right in RESPONSES[kind] if label != ""]
    assert [(label, r) for label, r, right in cases if grade(label, r) != right] == []


@pytest.mark.parametrize("part", [pytest.param(n, marks=pytest.mark.nightly if n else ()) for n in range(10)])
def test_nothing_is_paid_for_a_value_that_is_not_stated_alone(part: int):
    """Chains, lists in another order, several boxes, other bases, commas: 200 responses here, all of them at night."""
    assert [(label, r) for label, r in list(hedged(2000))[part::10] if grade(label, r)] == []


@pytest.mark.parametrize(
    "label", ["", " ", None, {}, {"ground_truth": "5"}, [], [["5"]], "$$", "\\frac{1}{", float("nan")]
)
def test_a_label_without_an_answer_is_an_error_of_the_row(label: object):
    with pytest.raises(ValueError, match="label"):
        graded_math(sample("\\boxed{5}", label))
    assert MATH.label_problem(label)


def test_labels_of_every_case_can_be_read():
    labels = [a for pairs in (*EQUAL.values(), *UNEQUAL.values()) for pair in pairs for a in pair if a]
    labels += [label for cases in RESPONSES.values() for label, _, _ in cases if label != ""]
    assert [label for label in labels if MATH.label_problem(label)] == []


@pytest.mark.slow
def test_answers_that_nobody_can_compute_are_refused_at_once_or_interrupted():
    refused = 0
    for tower in TOWERS:
        try:
            with interrupted_after(5.0):
                assert graded_math(sample(f"\\boxed{{{tower}}}", "7")) == 0.0, tower
        except UngradedError:
            refused += 1
        except TimeLimitReached:
            pass
    assert refused >= 20, "most are seen before anything is computed"


def test_a_tower_equals_itself_as_text():
    assert grade("10^{10^{10}}", r"\boxed{10^{10^{10}}}")


@pytest.mark.parametrize("length", [1_000, 300_000])
@pytest.mark.parametrize(
    "piece", ["(", "{", "$", r"\boxed{", r"\frac{1}", "1+", "x", "9", ",", r"\left(", "answer is ", " 1,", "\\"]
)
def test_long_nonsense_is_graded(piece: str, length: int):
    for response in (piece * (length // len(piece)), f"\\boxed{{{piece * (length // len(piece))}}}"):
        with suppress(UngradedError, TimeLimitReached), interrupted_after(5.0):
            graded_math(sample(response, "7"))


def test_an_answer_line_is_read_from_its_line_alone():
    right = ["so 41.\nAnswer: 42", "**Answer:** $42$", "Answer: 41\nno\nAnswer: \\boxed{42}", "answer : 42.0"]
    wrong = ["42", "\\boxed{42}", "Answer: 42\nAnswer: 43", "The answer is 42", ""]
    assert [graded_answer_line(sample(r, "42")) for r in right + wrong] == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1.50", Fraction(-3, 2)), ("2\\frac{1}{2}", Fraction(5, 2)), ("0.1\\overline{6}", Fraction(1, 6)),
        ("3/-4", Fraction(-3, 4)), ("1.5e-3", Fraction(3, 2000)), ("\\frac{1}{0}", None), ("x", None), ("", None),
        ("1e999999", None), ("1.2.3", None),
    ],
)  # fmt: skip
def test_plain_numbers_are_read_exactly(text: str, value: Fraction | None):
    found = read_number(text)
    assert (found.value if found else None) == value


def test_decimals_equal_what_they_are_the_rounding_of_and_small_ones_are_compared_relatively():
    def decimal(text: str) -> PlainNumber:
        found = read_number(text)
        assert found is not None
        return found

    third = PlainNumber(Fraction(1, 3))
    assert close(decimal("0.333333"), third) and not close(decimal("0.3333"), third)
    assert not close(decimal("1e-5"), decimal("2e-5")) and not close(decimal("0.000001"), decimal("0"))
    assert not close(decimal("1000000.1"), decimal("1000000")) and close(decimal("2.50"), decimal("2.5"))


def scored(responses: list[Sample], **settings: object) -> tuple[list[object], RewardScorer]:
    """What a scorer of kind math says, all asked for at once."""

    async def work() -> tuple[list[object], RewardScorer]:
        scorer = RewardScorer(RewardConfig.model_validate({"kind": "math", **settings}))
        try:
            return await asyncio.gather(*(scorer.score(s) for s in responses), return_exceptions=True), scorer
        finally:
            await scorer.close()

    return asyncio.run(asyncio.wait_for(work(), 250))


@pytest.mark.nightly
def test_towers_and_ordinary_answers_side_by_side_end_no_run_and_cost_nobody_else_his_reward():
    """Through the worker processes, with the defaults: on_error is `fail`."""
    ordinary = [(a, f"so \\boxed{{{b}}}") for pairs in EQUAL.values() for a, b in pairs][::8]
    samples = [sample(response, label, i) for i, (label, response) in enumerate(ordinary)]
    towers = [sample(f"\\boxed{{{tower}}}", "7", 1000 + i) for i, tower in enumerate(TOWERS)]
    mixed = [s for pair in zip(samples, towers, strict=False) for s in pair] + samples[len(towers) :]
    rewards, _ = scored(mixed, timeout_s=20)
    by_index = dict(zip((s.index for s in mixed), rewards, strict=True))
    assert [by_index[s.index] for s in samples] == [1.0] * len(samples)
    assert [by_index[s.index] for s in towers] == [0.0] * len(towers)
    assert sum(bool(s.error) for s in towers) >= 20
    assert not any(s.error for s in samples)


def test_an_answer_that_takes_too_much_memory_or_time_is_worth_nothing_and_counted():
    """Kind custom stands in for an answer that is not caught before: the same limits are put on every math worker."""
    from mslime.rollout.rewards.reward_kinds import RewardJob, RewardResult
    from mslime.rollout.rewards.reward_pool import WorkerPool

    async def ask(function: str) -> RewardResult:
        pool = WorkerPool(
            RewardJob(f"tests.unit.user_rewards:{function}", "reward.kind", 0.5, 2**28, interrupt=True), 1
        )
        try:
            return await pool.score(sample("", "7"))
        finally:
            await pool.close()

    greedy, slow = (asyncio.run(asyncio.wait_for(ask(f), 60)) for f in ("greedy", "spins_and_catches"))
    assert "MemoryError" in greedy.error and greedy.reward == 0.0
    assert "took longer than 0.5 s" in slow.error and "killed" not in slow.error


def test_a_bad_label_is_not_the_answers_fault():
    (error,), _ = scored([sample("\\boxed{1}", {"ground_truth": "1"})])
    assert isinstance(error, RewardError) and "label" in str(error) and "mslime check" in error.hint


@pytest.mark.parametrize("others", [0.0, 100.0])
def test_a_timer_of_somebody_else_goes_on_after_a_limit_and_none_is_left_where_none_was(others: float) -> None:
    before, _ = signal.setitimer(signal.ITIMER_REAL, others)  # of pytest-timeout
    try:
        with interrupted_after(50.0):
            pass
        left, _ = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, before)
    assert left == 0 if others == 0 else 0 < left <= others
