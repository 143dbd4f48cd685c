"""docs/rollout_functions.md: its examples run, its tables are complete, and its errors are those that functions get."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from mslime.checks.user_functions import check_functions, run_functions
from mslime.config.errors import RolloutError
from mslime.config.loader import build
from mslime.data.sample import Sample, check_invariants
from mslime.rollout.function_contract import check_rollout, check_workflow
from mslime.rollout.workflow import Engine, Episode, Task
from tests.fixtures.pages import ROOT, blocks, read_page, rows, settings_of, shown

PAGE = read_page("rollout_functions.md")
EXAMPLES = sorted((ROOT / "examples/rollout_functions").glob("*.py"))
HERE = "examples.rollout_functions"


def said(sample: Sample, trainable: bool) -> str:
    """What of a sample is trained, or is context after its prompt."""
    spans = [s for s in sample.segments[1:] if s.trainable == trainable]
    return "".join(chr(t) for s in spans for t in sample.tokens[s.start : s.end] if t)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_page_shows_every_example_as_it_is(path: Path) -> None:
    assert shown(path) in blocks(PAGE, "python"), f"{path} differs from the page"


def test_the_settings_on_the_page_name_the_examples() -> None:
    named = set[str]()
    for settings in settings_of(PAGE):
        config = build(settings)
        check_functions(run_functions(config))
        named |= {each.function.split(":")[0].rpartition(".")[2] for each in run_functions(config)}
    assert named == {path.stem for path in EXAMPLES}


def test_what_the_page_says_of_trying_holds() -> None:
    tried = [block for block in blocks(PAGE, "python") if "check_rollout" in block]
    assert len(tried) == 1
    exec(tried[0], {})


def test_one_turn_is_graded() -> None:
    assert [check_workflow(f"{HERE}.single_turn:graded", [reply]).reward for reply in ("5", "6")] == [1.0, 0.0]


def test_the_tools_loop_makes_the_sample_of_the_table() -> None:
    made = check_workflow(f"{HERE}.tool_loop:with_sums", replies=["<sum>2+3</sum>", "5"])
    assert (said(made, True), said(made, False)) == ("<sum>2+3</sum>5", "=5\n")
    asked = check_workflow(f"{HERE}.tool_loop:with_sums", replies=["<sum>2+3</sum>"] * 9)
    assert asked.response == "<sum>2+3</sum>=5\n" * 4


def test_a_thought_is_trained_once_and_each_answer_has_its_own_reward() -> None:
    thought, *answers = check_rollout(f"{HERE}.best_of_n:think_once", ["Hm.</think>", "4", "5", "6"])
    assert [said(s, True) for s in (thought, *answers)] == ["Hm.</think>", "4", "5", "6"]
    assert {s.reward for s in (thought, *answers)} == {1.0} and answers[-1].scores["user/right"] == pytest.approx(1 / 3)
    assert not thought.process_rewards
    assert [s.process_rewards for s in answers] == [[(len(s) - 1, w)] for s, w in zip(answers, (0, 1, 0), strict=True)]
    for sample in (thought, *answers):
        check_invariants(sample)


def test_the_chief_is_scored_and_trains_what_it_asked_its_helpers() -> None:
    first, second, chief = check_rollout(
        f"{HERE}.sub_agents:with_helpers", ["one\ntwo\nthree", "1", "2", "12"], prompt="Go.\n"
    )
    prompts = ["".join(map(chr, s.tokens[: s.prompt_length])) for s in (first, second, chief)]
    assert prompts == ["one\n", "two\n", "Go.\n"]
    assert said(chief, True) == "one\ntwo\nthree12" and said(chief, False) == "\n1\n2\n"
    (alone,) = check_rollout(f"{HERE}.sub_agents:with_helpers", ["", "12"], prompt="Go.\n")
    assert said(alone, True) == "12"


def code(cell: str) -> str:
    return re.findall(r"`([^`]+)`", cell)[0]


def test_the_tables_name_all_that_there_is_with_its_arguments() -> None:
    attributes = {name for row in rows(PAGE, "attribute") for name in re.findall(r"`(\w+)`", row[0])}
    assert attributes == {f.name for f in fields(Task)} | {"text"}
    assert {code(row[0]) for row in rows(PAGE, "field of `Episode`")} == {f.name for f in fields(Episode)}
    methods = {name: f for name, f in inspect.getmembers(Engine, inspect.isfunction) if not name.startswith("_")}
    told = {code(row[0]).removeprefix("await ") for row in rows(PAGE, "method")}
    assert {call.partition("(")[0] for call in told} == set(methods)
    for call in told:
        name, _, arguments = call.removesuffix(")").partition("(")
        takes = inspect.signature(methods[name]).parameters.values()
        wanted = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in takes if p.name != "self"]
        assert re.split(r", (?=\w)", arguments) == (wanted or [""]), call


MISTAKES = {
    "raised KeyError: 'no such tool' (FILE:LINE)": "user_rollouts:raises",
    "reported a failed rollout: REASON": "user_mistakes:says_it_failed",
    "raised CancelledError": "user_rollouts:cancels_itself",
    "sent an invalid request to the model: ...": "user_agents:asks_nonsense",
    "changed tokens, loss mask or log-probs of its sample": "user_rollouts:changes_tokens",
    "left a broken sample: ...": "user_mistakes:forgets_what_was_sampled",
    "used a Sample that does not belong to this rollout": "user_mistakes:uses_a_foreign_sample",
    "called generate() while another call for the sequence was running": "user_rollouts:generates_twice_at_once",
    "changed a sequence while a turn was being generated": "user_episodes:appends_while_it_generates",
    "branched at token 1 of 9": "user_episodes:branches_inside_the_prompt",
    "began a sequence with 0 tokens": "user_episodes:begins_with_nothing",
    "passed the tokens 0 to 9 of 9": "user_mistakes:cuts_its_prompt",
    "returned 'done'": "user_rollouts:returns_text",
    "returned a sample twice": "user_rollouts:returns_two",
    "returned without generating": "user_rollouts:says_nothing",
    "returned while a turn was being generated": "user_episodes:returns_while_it_generates",
    "set the invalid reward nan": "user_rollouts:bad_reward",
    "set several rewards: [1.0, 2.0]": "user_episodes:two_rewards",
    "returned the invalid step reward 1.0 at token 100": "user_episodes:a_step_beyond",
    "returned the metric calls = 'two'": "user_episodes:a_metric_of_text",
    "left metadata that cannot be saved: ...": "user_rollouts:notes_an_object",
}
"""What the error says, and a function that gets it."""
ELSEWHERE = {
    "sent no request to the engines for 3600 s": "test_rollout_sequences.py, with a shorter deadline",
    "waited for an agent that sends no more requests (rollout.limits.idle_s = 3600)": "test_agent_clock.py",
}


def told_errors() -> set[str]:
    """How each error begins that a rollout function may get, in the files that tell them."""
    found = set[str]()
    for name in ("turns", "returned"):
        for call in ast.walk(ast.parse((ROOT / f"mslime/rollout/{name}.py").read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("error", "self._error"):
                said = call.args[0].values[0] if isinstance(call.args[0], ast.JoinedStr) else call.args[0]
                found |= {said.value.strip()} if isinstance(said, ast.Constant) else set()
    return found


def test_every_error_is_on_the_page_and_each_of_the_page_is_tried() -> None:
    on_page = {code(row[0]) for row in rows(PAGE, "error")}
    assert on_page == {*MISTAKES, *ELSEWHERE}
    assert len(told_errors()) > 18
    assert not {told for told in told_errors() if not any(cell.startswith(told) for cell in on_page)}


@pytest.mark.parametrize(("message", "function"), MISTAKES.items(), ids=MISTAKES.values())
def test_an_error_says_what_the_page_says(message: str, function: str) -> None:
    """Numbers, places and what stands in capitals differ from case to case."""
    words = re.sub(r"FILE:LINE|REASON|(\\\.){3}|\d+", ".*", re.escape(message))
    with pytest.raises(RolloutError, match=rf"(?s)tests.unit.{function} = 'group 0, response 0': {words}.*hint: "):
        check_workflow(f"tests.unit.{function}", ["A long reply.", "B"], prompt="What?")
