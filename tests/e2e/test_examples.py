"""Two steps of the examples that learn on a CPU, on real engines.

The models are random, and so are their replies. If an example would end at once with such replies, the test replaces
them by a call of the tool, or a valid proposal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from examples.calculator import make_task as calculator
from examples.navigation import make_task as navigation
from examples.proposer_solver import make_task as proposer_solver
from examples.tiny_model import make_chat_tokenizer, write_model, write_rows
from mslime.config.loader import read_yaml
from tests.e2e.harness import Run, start_run

pytestmark = [pytest.mark.e2e, pytest.mark.engine]
ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, float]


@dataclass(frozen=True)
class Example:
    """An example, and the additions of its test.

    Attributes:
        rows: of its training file. words: of its tokenizer; None: it does not chat.
        rollout: settings of the test. holds: condition that each step meets.
    """

    rows: list[dict[str, Any]]
    words: tuple[str, ...] | None
    holds: Callable[[Row], bool]
    rollout: dict[str, Any] = field(default_factory=dict[str, Any])


def walked(row: Row) -> bool:
    return 1 <= row["user/environment_turns"] <= 8 and row["rollout/responses"] == 16


def calculated(row: Row) -> bool:
    """Whether a result followed every first reply that ended; a stop token within a reply begins a sequence, which is
    rare."""
    return row["user/called"] == 1 and row["rollout/turns"] > 2 and row["rollout/new_sequence/first"] == 1


def solved(row: Row) -> bool:
    """A proposal, and two replies to one request of the client."""
    return row["user/valid"] == 1 and row["rollout/turns"] == row["rollout/sequences_per_rollout"] == 3


EXAMPLES = {
    "navigation": Example(navigation.make_rows(7)["train"], None, walked),
    "calculator": Example(
        calculator.make_rows(7)["train"],
        calculator.WORDS,
        calculated,
        {"renderer": "tests.unit.user_agents:CallsTwice", "stop": list("0123456789")},
    ),
    "proposer_solver": Example(
        proposer_solver.make_rows(7)["train"],
        proposer_solver.WORDS,
        solved,
        {"function": "tests.unit.user_agents:solves_whatever_is_proposed"},
    ),
}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXAMPLES)
def test_two_steps(name: str, tmp_path: Path, runs: list[Run]) -> None:
    example = EXAMPLES[name]
    write_model(tmp_path / "model", 7, None if example.words is None else make_chat_tokenizer(example.words))
    write_rows(tmp_path / "train.jsonl", example.rows)
    values = read_yaml(ROOT / "examples" / name / "run.yaml")
    del values["name"], values["output_dir"], values["data"]["eval_sets"]
    values["model"]["path"] = str(tmp_path / "model")
    values["data"]["prompts"] = [str(tmp_path / "train.jsonl")]
    values["rollout"] |= {"groups_per_step": 4, "group_size": 4, **example.rollout}
    values["train"] |= {"num_steps": 2, "lr_warmup_steps": 0}
    values["observe"] = {}
    run = start_run(values, tmp_path / "out")
    runs.append(run)
    assert run.finish(800) == 0, run.text()
    rows = [row for row in run.rows() if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert example.holds(row), row
        assert row["rollout/rollouts"] == 16 and row["replay/coverage"] == 1.0
        assert 0 < row["ledger/trained_tokens"] <= row["ledger/generated_tokens"]
        said = row["rollout/response_len_mean"] * row["rollout/responses"]
        assert row["ledger/trained_tokens"] < said or name == "proposer_solver", "what it is told is not trained"
    assert not run.left_over(), "environments' processes end with the run"
