"""The proposer and its solvers: what a rollout of theirs is worth, what of it is trained, and what they learn from."""

from __future__ import annotations

from typing import Any

import pytest

from examples.proposer_solver import make_task
from examples.proposer_solver.agents import LONGEST, SOLVERS, right, valid, worth
from examples.tiny_model import make_chat_tokenizer
from mslime.checks.user_functions import check_functions, run_functions
from mslime.config.loader import build, read_yaml
from mslime.data.sample import check_invariants
from mslime.rollout import function_contract
from mslime.rollout.agents.template import TemplateRenderer
from mslime.rollout.function_contract import check_rollout
from tests.fixtures.pages import ROOT

EXAMPLE = ROOT / "examples/proposer_solver"
AGENTS = "examples.proposer_solver.agents:propose_and_solve"
PROPOSE: dict[str, Any] = {"prompt": [{"role": "user", "content": "propose 52"}], "label": "52"}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client imports half of itself when it first asks, which takes its time on a busy machine."""
    monkeypatch.setattr(function_contract, "LONGEST_BLOCK_S", 60.0)


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, Any]]]:
    return make_task.make_rows(7)


@pytest.mark.parametrize(
    ("replies", "reward", "metrics"),
    [
        (["52817", "12578", "12578"], 0.5, {"valid": 1.0, "length": 5.0, "solved": 1.0}),
        (["52817", "87521", "12578"], 0.25, {"valid": 1.0, "length": 5.0, "solved": 0.5}),
        (["5281794036", "0123456789", "0123456789"], 1.0, {"valid": 1.0, "length": 10.0, "solved": 1.0}),
        (["17", "17", "17"], 0.0, {"valid": 0.0}),
    ],
)
def test_all_sequences_of_a_rollout_share_what_it_is_worth(
    replies: list[str], reward: float, metrics: dict[str, float]
) -> None:
    samples = check_rollout(AGENTS, replies, **PROPOSE)
    assert [s.reward for s in samples] == [pytest.approx(reward)] * (1 + SOLVERS if metrics["valid"] else 1)
    assert len({s.rollout for s in samples}) == 1
    told = {k.removeprefix("user/"): v for k, v in samples[-1].scores.items() if k.startswith("user/")}
    assert told == metrics
    for sample, reply in zip(samples, replies, strict=False):
        check_invariants(sample)
        assert "".join(chr(t) for t in sample.tokens[sample.loss_mask]) == f"{reply}\x00"


def test_a_held_out_list_is_given_to_one_solver() -> None:
    asked: dict[str, Any] = {"prompt": [{"role": "user", "content": "sort 52817"}], "label": "12578"}
    assert [check_rollout(AGENTS, [reply], **asked)[-1].reward for reply in ("12578", "87521")] == [1.0, 0.0]


def test_a_proposal_begins_as_asked_and_is_at_most_so_long() -> None:
    assert valid("523", "52") and valid("52" + "0" * (LONGEST - 2), "52")
    assert not any(
        valid(digits, "52") for digits in ("52", "532", "52a", "52²", "", "52 3", "52" + "0" * (LONGEST - 1))
    )
    assert right("0012", "2001") and not right("2100", "2001") and not right("012", "2001")
    assert worth("52817", ["12578", "12578"]) > worth("523", ["235", "235"]) > worth("52817", ["1", "2"]) == 0


def test_rows_can_be_played_and_no_held_out_list_is_demonstrated(rows: dict[str, list[dict[str, Any]]]) -> None:
    said = [(row["messages"][0]["content"].split(), row["messages"][1]["content"]) for row in rows["sft"]]
    proposed = [(first, digits) for (role, first), digits in said if role == "propose"]
    answered = [(digits, answer) for (role, digits), answer in said if role == "sort"]
    assert all(valid(digits, first) for first, digits in proposed)
    assert {len(digits) for _, digits in proposed} == set(range(make_task.FIRST + 1, LONGEST + 1))
    assert all(answer in ("".join(sorted(d)), "".join(sorted(d, reverse=True))) for d, answer in answered)
    assert 0.3 < sum(right(answer, d) for d, answer in answered) / len(answered) < 0.42
    held_out = {row["prompt"][0]["content"].removeprefix("sort ") for row in rows["heldout"]}
    assert len(held_out) == make_task.HELD_OUT and not held_out & {d for d, _ in answered}
    assert not held_out & {d for _, d in proposed} and make_task.make_rows(7) == rows
    assert all(row["prompt"][0]["content"] == f"propose {row['label']}" for row in rows["train"])
    assert all(right(row["label"], row["prompt"][0]["content"][5:]) for row in rows["heldout"])


def test_a_role_is_one_token_and_the_longest_reply_has_room() -> None:
    tokenizer = make_chat_tokenizer(make_task.WORDS)
    ids = TemplateRenderer(tokenizer, "template").render([{"role": "user", "content": "sort 30"}], [])
    assert tokenizer.convert_ids_to_tokens(ids) == ["<user>", "sort ", "3", "0", "<eos>", "<assistant>"]
    assert build(read_yaml(EXAMPLE / "run.yaml")).rollout.max_response_tokens > LONGEST + 1


@pytest.mark.parametrize("name", ["sft", "run"])
def test_the_settings_hold_and_name_the_agents(name: str) -> None:
    config = build(read_yaml(EXAMPLE / f"{name}.yaml"))
    check_functions(run_functions(config))
    assert (config.rollout.function == AGENTS) == (name == "run")
