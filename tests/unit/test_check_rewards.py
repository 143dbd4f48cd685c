"""What `mslime check` says of rewards on real files: bad labels by row, functions by name, one row tried."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mslime.cli import main
from mslime.data.sample import Sample
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

ROOT = Path(__file__).parents[2]
USER = "tests.unit.user_rewards"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("check") / "model")


class Check:
    """`mslime check` of rows with these labels."""

    def __init__(self, directory: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._directory, self._checkpoint, self._capsys = directory, checkpoint, capsys

    def __call__(self, labels: list[Any], *flags: str) -> tuple[int, str]:
        path = self._directory / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": "1+1=", "label": label}) + "\n" for label in labels))
        base = ["check", "--model.path", str(self._checkpoint), "--data.prompts", str(path)]
        status = main([*base, "--rollout.max-response-tokens", "32", *flags])
        printed = self._capsys.readouterr()
        return status, " ".join((printed.out + printed.err).split())


@pytest.fixture
def check(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    return Check(tmp_path, checkpoint, capsys)


@pytest.mark.parametrize(("kind", "labels", "line", "problem"), [
    ("exact", ["2", None], 2, "the label is missing"),
    ("exact", ["2", {"ground_truth": "2"}], 2, "the label is an object"),
    ("math", ["2", "\\frac{1}{2}", ""], 3, "no mathematical answer can be read from the label ''"),
    ("math", ["2", "\\frac{1}{"], 2, "the braces of the label"),
    ("math", [{"ground_truth": "2"}], 1, "the label is an object"),
    ("math", [["1", []]], 1, "list of lists"),
    ("letters", ["A", "(b)", "17"], 3, "is not a letter"),
    ("f1", ["Paris", []], 2, "the label is an empty list"),
])  # fmt: skip
def test_a_label_that_cannot_be_graded_is_refused_by_row(
    check: Check, kind: str, labels: list[Any], line: int, problem: str
):
    status, said = check(labels, "--reward.kind", kind)
    where = f"rows.jsonl:{line}: " if problem == "the label is missing" else f"rows.jsonl:{line} = "
    assert status == 2 and where in said and problem in said and "data.label_key" in said


def test_labels_of_held_out_sets_are_checked_with_their_own_reward(check: Check, tmp_path: Path):
    held_out = tmp_path / "gpqa.jsonl"
    held_out.write_text('{"prompt": "x", "label": "A"}\n{"prompt": "x", "label": "17"}\n')
    sets = [{"name": "gpqa", "path": str(held_out), "reward": {"kind": "letters"}}]
    status, said = check(["2"], "--reward.kind", "math", "--data.eval-sets", json.dumps(sets))
    assert status == 2 and "gpqa.jsonl:2 = '17'" in said


def test_labels_that_are_no_mathematics_are_counted_and_the_first_is_named(check: Check):
    labels = ["2", "\\frac{1}{2}", "Evelyn", "(1,2)", "x \\to \\to y", "3:2", "[0,1)", "204_5", "\\circledast +"]
    status, said = check(labels, "--reward.kind", "math")
    assert status == 0
    assert "note: training: 2 of 9 labels cannot be read as mathematics and are compared as text; the first:" in said
    assert "rows.jsonl:5,'x\\\\to\\\\toy'" in said.replace(" ", "")  # lines are wrapped within words
    assert "cannot be read" not in check(labels[:4], "--reward.kind", "math")[1]


@pytest.mark.parametrize(("flags", "said_before"), [
    (["--reward.kind", "custom", "--reward.function", f"{USER}:lenght"], "did you mean 'length'"),
    (["--reward.kind", "custom", "--reward.function", "no.such.module:f"], "cannot be imported"),
    (["--rollout.dynamic-filter", f"{USER}:keep_evn"], "did you mean 'keep_even'"),
    (["--rollout.dynamic-filter", "zero_varianse"], "did you mean 'zero_variance'"),
])  # fmt: skip
def test_functions_that_do_not_exist_are_refused_before_anything_is_started(
    check: Check, flags: list[str], said_before: str
):
    status, said = check(["2"], *flags)
    assert status == 2 and said_before in said


def test_the_token_of_a_served_reward_must_be_set(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = {"kind": "http", "http": {"url": "http://127.0.0.1:9/score", "auth_env": "MSLIME_TEST_TOKEN"}}
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"prompt": "x", "label": "1"}\n')
    sets = ["--data.eval-sets", json.dumps([{"name": "own", "path": str(path), "reward": served}])]
    parts = ["--reward.parts", json.dumps([{"name": "right", "kind": "math"}, {"name": "rm", **served}])]
    monkeypatch.delenv("MSLIME_TEST_TOKEN", raising=False)
    for flags, place in ((parts, "reward.parts[1]"), (sets, "data.eval_sets[0].reward")):
        status, said = check(["2"], *flags)
        assert status == 2 and f"{place}.http.auth_env = 'MSLIME_TEST_TOKEN': this environment variable is not" in said
    monkeypatch.setenv("MSLIME_TEST_TOKEN", "secret")
    status, said = check(["2"], *parts, *sets)
    assert status == 0 and "secret" not in said


def test_a_users_function_is_tried_on_the_first_row(check: Check):
    flags = ["--reward.kind", "custom", "--reward.function"]
    status, said = check(["1 2", "x"], *flags, f"{USER}:keyword_only")
    assert status == 0
    assert f"{USER}:keyword_only was tried on the first row with its label as the response: scores 1" in said
    assert "; an empty response: scores 0; the label of another row: scores 0; its label, cut short: scores 0" in said


@pytest.mark.parametrize("labels", [["raise"], ["good", "raise"], ["raise, cut"]], ids=["right", "wrong", "cut"])
def test_a_reward_that_fails_on_the_first_rows_is_refused(check: Check, labels: list[str]):
    """With the label, a wrong, or a cut response; where on_error takes it for zero, or drops it, it is told."""
    flags = ["--reward.kind", "custom", "--reward.function", f"{USER}:moody"]
    labels = ["raiseraise"] if labels == ["raise, cut"] else labels
    status, said = check(labels, *flags)
    assert status == 2 and "as the response: raised KeyError: 'score'" in said and "reward.function" in said
    for on_error in ("zero", "drop"):
        status, said = check(labels, *flags, "--reward.on-error", on_error)
        assert status == 0 and "raised KeyError: 'score'" in said


def test_a_reward_stands_in_the_table_of_what_was_tried(check: Check):
    flags = ["--reward.kind", "custom", "--reward.function", f"{USER}:length", "--try"]
    status, said = check(["1 2", "x"], *flags)
    assert status == 0 and "reward.function" in said.split("called on synthetic input")[1]


def test_a_function_of_groups_is_tried_on_a_group_of_the_first_row(check: Check, tmp_path: Path):
    flags = ["--reward.kind", "custom", "--reward.function", f"{USER}:brevity_rank", "--reward.per", "group"]
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"prompt": "x", "label": "12"}\n')
    own = {"kind": "custom", "function": f"{USER}:moody_group", "per": "group"}
    sets = json.dumps([{"name": "own", "path": str(path), "samples_per_prompt": 2, "temperature": 1, "reward": own}])
    status, said = check(["1 2"], *flags, "--rollout.group-size", "3", "--data.eval-sets", sets)
    assert status == 0
    assert f"{USER}:brevity_rank was tried on the first row with its label as the response of a group of 3: " in said
    assert "scores 1, 0.5, 0" in said
    assert "as the response of a group of 2: scores 1, 2" in said
    status, said = check(["1 2"], "--reward.per", "group")
    assert status == 2 and "reward.per = 'group': kind exact scores samples one by one" in said


def test_the_example_of_a_group_reward_in_the_docs_does_what_it_says(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/rewards.md").read_text().split("## A whole group at once")[1].split("\n## ")[0]
    code, settings = (re.search(rf"```{kind}\n(.*?)```", page, re.S) for kind in ("python", "yaml"))
    assert code is not None and settings is not None
    package = tmp_path / "my_project"
    package.mkdir()
    (package / "groups.py").write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)
    reward = yaml.safe_load(settings[1])["reward"]
    status, said = check(["1 2"], "--reward.parts", json.dumps(reward["parts"]), "--rollout.group-size", "4")
    assert status == 0
    (shown,) = re.findall(r"^note: (.*)$", page, re.M)
    assert shown in said
    responses, rewards = re.findall(r"^\| (`2`.*) \| (1, .*) \|$", page, re.M)[0]
    group = [Sample.from_prompt(0, i, [1], "2") for i in range(4)]
    for sample, response in zip(group, re.findall("`(.*?)`", responses), strict=True):
        sample.response = response
        sample.extend([5] * len(response), log_probs=[0.0] * len(response), versions=[(0, 0, len(response))])
    scores = importlib.import_module("my_project.groups").shortest_right(group)
    assert scores == [float(reward) for reward in rewards.split(", ")]


def test_every_part_is_named_and_tried(check: Check):
    parts = [{"name": "right", "kind": "math"}, {"name": "style", "kind": "custom", "function": f"{USER}:length"}]
    status, said = check(["42"], "--reward.parts", json.dumps(parts), "--reward.overlong.buffer-tokens", "8")
    assert status == 0
    assert f"1 x right: math; 1 x style: {USER}:length; up to -1 in the last 8 tokens" in said
    assert f"{USER}:length was tried on the first row with its label as the response: scores 2" in said
    parts[1]["function"] = f"{USER}:lenght"
    status, said = check(["42"], "--reward.parts", json.dumps(parts))
    assert status == 2 and "reward.parts[1].function" in said


def test_the_first_prompts_of_a_users_source_are_drawn_and_the_reward_is_tried_on_one(check: Check):
    source = ["--data.source", "examples.extending.source:Sums"]
    own = ["--reward.kind", "custom", "--reward.function", f"{USER}:length"]
    status, said = check([], *source, *own)
    assert status == 0, said
    assert "the first prompt, as the model sees it: '" in said and " =', " in said
    assert "prompts: examples.extending.source:Sums; 16 drawn, the longest has" in said
    assert f"{USER}:length was tried on the first row with its label as the response: scores " in said
    status, said = check([], *source, "--data.max-prompt-tokens", "1")
    assert status == 2 and "the last 1000 prompts of examples.extending.source:Sums are longer" in said
    status, said = check([], *source, "--reward.kind", "letters")
    assert status == 2 and "examples.extending.source:Sums:0" in said and "letters cannot grade" in said
