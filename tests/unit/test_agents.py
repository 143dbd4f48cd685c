"""Rollout functions that chat: what their rollouts record, and what becomes of their mistakes."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import pytest
import yaml

from mslime.config.errors import RolloutError
from mslime.data.sample import Sample, SampleStatus, check_invariants
from mslime.rollout import function_contract
from mslime.rollout.agents.session import REASONS
from mslime.rollout.function_contract import check_rollout
from tests.fixtures.least import least, refused

ROOT = Path(__file__).parents[2]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients import half of themselves when they first ask, which takes its time on a busy machine."""
    monkeypatch.setattr(function_contract, "LONGEST_BLOCK_S", 60.0)


def rolled(function: str, *replies: str) -> list[Sample]:
    samples = check_rollout(f"tests.unit.user_agents:{function}", replies)
    for sample in samples:
        check_invariants(sample)
    return samples


@pytest.mark.parametrize("function", ["calculates", "with_openai"])
def test_a_tool_loop_is_one_sequence_whose_replies_alone_are_trained(function: str) -> None:
    """Each reply is interrupted in its middle, as a weight update does: its halves have two versions."""
    (sample,) = rolled(function, CALL, "It is 5.")
    text = "".join(map(chr, sample.tokens[sample.prompt_length :]))
    assert text == f"{CALL}\0\ntool: 5\nIt is 5.\0"
    trained = "".join(chr(t) for t in sample.tokens[sample.loss_mask])
    assert trained == f"{CALL}\0It is 5.\0"
    assert [s.version for s in sample.segments if s.version is not None] == [0, 1, 1, 2]
    assert sample.status is SampleStatus.COMPLETED
    assert sample.scores["rollout/turns"] == 2 and sample.scores["rollout/new_sequence/first"] == 1
    if function == "with_openai":
        assert sample.reward == 1.0 and sample.scores["user/length"] == 4


@pytest.mark.parametrize(
    "spec", ["single_turn", "tests.unit.user_agents:calculates", "tests.unit.user_agents:with_openai"]
)
def test_a_rollout_that_is_let_go_of_is_freed_at_once(spec: str) -> None:
    """Not when Python next looks for circles: routes of a step are gigabytes."""
    check_rollout(spec, [CALL, "It is 5."])  # modules are imported by now
    gc.collect()
    gc.disable()
    try:
        freed = [weakref.ref(sample) for sample in check_rollout(spec, [CALL, "It is 5."])]
        assert freed and not any(sample() for sample in freed)
    finally:
        gc.enable()


def test_a_client_of_anthropics_may_be_the_agent() -> None:
    (sample,) = rolled("with_anthropic", "5.")
    assert sample.loss_mask.sum() == len("5.\0")


def test_a_token_that_the_model_does_not_have_is_the_agents_mistake() -> None:
    """Also where it follows a recorded turn. Nothing of it is left in a sequence."""
    samples = rolled("sends_what_is_no_token", "x", "y")
    assert [sample.response for sample in samples] == ["x", "y"]


@pytest.mark.parametrize("token", [-1, 1 << 40, 10**30, 1.5, "a", None])
def test_a_token_that_the_model_does_not_have_is_the_functions_mistake(token: object) -> None:
    with pytest.raises(RolloutError, match="not a token id of this model"):
        check_rollout("tests.unit.user_agents:appends_what_is_no_token", label=token)


def test_agents_at_the_same_time_are_sequences_of_one_rollout() -> None:
    proposer, solver = rolled("proposes_and_solves", "a", "b")
    assert proposer.rollout == solver.rollout and proposer.loss_mask.sum() == solver.loss_mask.sum() == 2
    assert solver.scores["rollout/new_sequence/new_conversation"] == 1


def test_a_reply_that_the_client_did_not_wait_for_is_not_trained() -> None:
    samples = rolled("leaves_early", "a", "b")
    assert sum(int(s.loss_mask.sum()) for s in samples) == len("a\0")


def test_an_agent_that_dies_of_a_full_context_ends_the_rollout_as_truncated() -> None:
    (sample,) = rolled("until_it_is_full", "x")
    assert sample.status is SampleStatus.TRUNCATED and sample.loss_mask.sum() == len("x\0")


def test_replies_have_rewards_of_their_own_by_the_ids_that_clients_show() -> None:
    samples = rolled("rewards_each_reply", *"12345")
    found = sorted((said, reward) for s in samples for said, reward in rewarded(s))
    assert found == [(text, float(text)) for text in "12345"]


def rewarded(sample: Sample) -> list[tuple[str, float]]:
    """(what the turn says that ends at a rewarded token, its reward)."""
    ends = [at for at, _ in sample.turns[1:]] + [len(sample)]
    spans = [(start, end) for (start, _), end in zip(sample.turns, ends, strict=True)]
    said = {end - 1: "".join(map(chr, sample.tokens[start : end - 1])) for start, end in spans}
    return [(said[at], reward) for at, reward in sample.process_rewards or ()]


def test_a_reply_that_sequences_share_has_its_reward_where_it_was_generated() -> None:
    (branch,) = rolled("rewards_a_reply_of_a_branch", "a", "b", "c")
    assert branch.response.startswith("a") and branch.process_rewards == [(branch.turns[0][0] + 1, 0.5)]


def test_a_reward_of_a_reply_that_nobody_got_names_it() -> None:
    with pytest.raises(RolloutError, match=r"step reward 1.0 at choice 1 of 'cmpl-\w+'.*\n.*hint: give the id"):
        rolled("rewards_what_was_not_said", "x")
    with pytest.raises(RolloutError, match=r"step reward 0.5 at choice 0 of 'chatcmpl-\w+'"):
        rolled("rewards_a_reply_that_is_not_returned", "a", "b", "c")
    with pytest.raises(RolloutError, match=r"step reward 0.5 at choice 0 of 'chatcmpl-\w+'"):
        rolled("rewards_a_reply_that_was_cut", "a", "b", "c")


def test_messages_that_cannot_be_answered_name_the_function() -> None:
    with pytest.raises(RolloutError, match="user_agents:asks_nonsense = .*invalid request to the model: messages = "):
        rolled("asks_nonsense")


def test_an_error_of_the_function_after_a_reply_is_its_own() -> None:
    with pytest.raises(RolloutError, match="raised KeyError: 'no such tool'"):
        rolled("dies", "x")


@pytest.mark.parametrize(("server", "field", "rule"), [
    ({"host": "10.1.2.3"}, "rollout.server.token", "can reach the server at 10.1.2.3 without"),
    ({"host": "0.0.0.0", "token": "env:T"}, "rollout.server.host", "not an address"),
    ({"token": " "}, "rollout.server.token", "must not be empty"),
    ({"port": 70000}, "rollout.server.port", "65535"),
])  # fmt: skip
def test_a_server_that_others_could_reach_needs_a_token(server: dict[str, object], field: str, rule: str) -> None:
    error = refused(rollout={"server": server})
    assert error.field == field and rule in error.rule


def test_the_servers_token_is_not_written_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = least(rollout={"server": {"token": "hush"}})
    assert "hush" not in yaml.safe_dump(made.as_dict()) and made.rollout.server.secret() == "hush"
    monkeypatch.setenv("AGENTS", "quiet")
    named = least(rollout={"server": {"token": "env:AGENTS", "host": "::1"}})
    assert named.rollout.server.secret() == "quiet"


@pytest.mark.parametrize(("page", "example"), [("agents", "tools"), ("coding_agents", "coding")])
def test_the_page_shows_the_example_as_it_is(page: str, example: str) -> None:
    code = (ROOT / f"examples/agents/{example}.py").read_text()
    code = code.partition("from __future__ import annotations\n")[2].strip()
    assert f"```python\n{code}\n```" in (ROOT / f"docs/{page}.md").read_text()


def test_the_pages_try_works_and_it_names_every_reason() -> None:
    page = (ROOT / "docs/agents.md").read_text()
    tried = page.split("```python\nfrom mslime.rollout.function_contract")[1].split("```")[0]
    exec(f"from mslime.rollout.function_contract{tried}", {})
    reasons = set(re.findall(r"`(\w+)`", page.split("| reason |")[1].split("`rollout.limits")[0])) - {"rollout"}
    assert reasons >= set(REASONS)


@pytest.mark.parametrize("function", ["with_tools", "with_openai"])
def test_the_example_ends_a_loop_and_answers_broken_calls(function: str) -> None:
    broken = CALL.replace('"a": 2, "b": 3', '"numbers": "x"')
    samples = check_rollout(f"examples.agents.tools:{function}", [broken, "sorry"])
    assert "tool: error: unsupported operand" in samples[0].response and samples[0].response.endswith("sorry")
