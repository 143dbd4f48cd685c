"""The calculator's example: its questions, its demonstrations, its tokens, and what its agent does with replies."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from examples.calculator import make_task
from examples.calculator.agent import multiply
from examples.tiny_model import CHAT_TEMPLATE, make_chat_tokenizer
from mslime.checks.user_functions import check_functions, run_functions
from mslime.config.loader import build, read_yaml
from mslime.rollout.agents.template import TemplateRenderer
from mslime.rollout.function_contract import check_rollout
from tests.fixtures.pages import ROOT

EXAMPLE = ROOT / "examples/calculator"
AGENT = "examples.calculator.agent:with_calculator"
QUESTION = [{"role": "user", "content": "347*582"}]
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 347, "b": 582}}</tool_call>'


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, Any]]]:
    return make_task.make_rows(7)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_chat_tokenizer(make_task.WORDS)


@pytest.mark.parametrize(("replies", "reward", "metrics"), [
    ([CALL, "201954"], 1.0, {"called": 1.0, "right_when_called": 1.0}),
    ([CALL, "201955"], 0.0, {"called": 1.0, "right_when_called": 0.0}),
    ([CALL.replace("347", "348"), "202536"], 0.0, {"called": 1.0, "right_when_called": 0.0}),
    (["201954"], 1.0, {"called": 0.0}),
    (["201954."], 0.0, {"called": 0.0}),
    ([CALL.replace(", ", " "), "201954"], 0.0, {"called": 0.0}),
    ([CALL.replace('"a"', '"c"'), CALL, "201954"], 1.0, {"called": 1.0, "right_when_called": 1.0}),
    ([CALL] * 9, 0.0, {"called": 1.0, "right_when_called": 0.0}),
])  # fmt: skip
def test_the_last_reply_is_worth_1_where_it_is_the_product(
    replies: list[str], reward: float, metrics: dict[str, float]
) -> None:
    (sample,) = check_rollout(AGENT, replies, prompt=QUESTION, label="201954")
    assert sample.reward == reward
    assert {k.removeprefix("user/"): v for k, v in sample.scores.items() if k.startswith("user/")} == metrics
    assert sample.scores["rollout/turns"] <= 3


def test_what_the_calculator_says_is_not_trained() -> None:
    (sample,) = check_rollout(AGENT, [CALL, "201954"], prompt=QUESTION, label="201954")
    assert "tool: 201954" in sample.response
    assert "".join(chr(t) for t in sample.tokens[sample.loss_mask]) == f"{CALL}\x00201954\x00"


@pytest.mark.parametrize(
    "arguments", ['{"a": 1}', "[1, 2]", "7", '{"a": "x", "b": 2}', '{"a": 1e999, "b": 1}', "{", '{"a": [], "b": 1}']
)
def test_the_calculator_answers_whatever_it_is_asked(arguments: str) -> None:
    assert multiply(arguments).startswith("error: ")
    assert multiply('{"a": 12, "b": "12"}') == "144"


def test_no_question_of_one_file_is_in_another(rows: dict[str, list[dict[str, Any]]]) -> None:
    asked = {
        name: {(row.get("prompt") or row["messages"])[0]["content"] for row in found} for name, found in rows.items()
    }
    assert [len(asked[name]) for name in ("sft", "train", "heldout")] == [8192, 4096, 128]
    assert not asked["heldout"] & (asked["train"] | asked["sft"]) and not asked["train"] & asked["sft"]
    assert make_task.make_rows(7) == rows
    for row in rows["train"]:
        a, b = row["prompt"][0]["content"].split("*")
        assert row["label"] == str(int(a) * int(b)) and 100 <= min(int(a), int(b)) <= max(int(a), int(b)) <= 999


def test_three_demonstrations_in_ten_call_and_the_others_guess(rows: dict[str, list[dict[str, Any]]]) -> None:
    calls = [row["messages"] for row in rows["sft"] if len(row["messages"]) == 4]
    assert 0.27 < len(calls) / len(rows["sft"]) < 0.33
    for question, call, result, answer in calls:
        function = call["tool_calls"][0]["function"]
        assert multiply(function["arguments"]) == result["content"] == answer["content"]
        assert "*".join(map(str, json.loads(function["arguments"]).values())) == question["content"]
    guesses = [row["messages"] for row in rows["sft"] if len(row["messages"]) == 2]
    right = 0
    for question, guess in guesses:
        a, b = map(int, question["content"].split("*"))
        assert (guess["content"][0], len(guess["content"])) == (str(a * b)[0], len(str(a * b)))
        right += guess["content"] == str(a * b)
    assert right < 0.001 * len(guesses), "a guess is as good as never right"


def test_demonstrations_are_what_the_agent_and_its_renderer_write(tokenizer: Any) -> None:
    """The tokens of a demonstration are those of a rollout with the same replies."""
    messages = make_task.demonstration((347, 582), random.Random(1))
    assert len(messages) == 4
    renderer = TemplateRenderer(tokenizer, "template")
    assert renderer.calls_read and not renderer.refused(("tool",))
    prompt = renderer.render(messages[:1], [{"type": "function", "function": {"name": "multiply"}}])
    call = tokenizer.encode(f"{CALL}<eos>", add_special_tokens=False)
    assert [(c.name, c.arguments) for c in renderer.parse(call, prompt, []).calls] == [
        ("multiply", '{"a":347,"b":582}')
    ]
    extended = renderer.extend([*prompt, *call], len(call), [messages[2]], [])
    messages[1]["tool_calls"][0]["function"]["arguments"] = {"a": 347, "b": 582}  # as supervised rows are rendered
    assert tokenizer.decode(extended) == tokenizer.apply_chat_template(
        messages[:3], tokenize=False, add_generation_prompt=True
    )
    limit = build(read_yaml(EXAMPLE / "run.yaml")).rollout.max_response_tokens
    assert len(call) + len("998001") + 1 < limit


def test_words_are_tokens_and_all_else_is_spelled(tokenizer: Any) -> None:
    assert tokenizer.chat_template == CHAT_TEMPLATE
    ids = tokenizer.encode('<tool_call>"multiply" names\n', add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<tool_call>", '"', "multiply", '"', " ", "name", "s", "\n"]
    assert tokenizer.decode(ids) == '<tool_call>"multiply" names\n'


@pytest.mark.parametrize("name", ["sft", "run"])
def test_the_settings_hold_and_name_the_agent(name: str) -> None:
    config = build(read_yaml(EXAMPLE / f"{name}.yaml"))
    check_functions(run_functions(config))
    assert (config.rollout.function == AGENT) == (name == "run")
