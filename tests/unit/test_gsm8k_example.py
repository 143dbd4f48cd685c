"""The example on GSM8K: rows become prompts and labels that can be graded, and its run passes check and plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as arrow  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet as parquet  # pyright: ignore[reportMissingTypeStubs]
import pytest

from mslime.cli import main
from tests.fixtures.full_size import make_hollow_checkpoint
from tests.fixtures.tiny_models import make_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples/gsm8k"
ROWS = [
    {"question": "A hen lays 3 eggs a day. How many in 6 days?", "answer": "She lays <<3*6=18>>18 eggs.\n#### 18"},
    {"question": "What is 500 + 734?", "answer": "500 + 734 = 1,234.\n#### 1,234"},
    {"question": "What is 2 - 7?", "answer": "It is below 0.\n#### -5"},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "prepare.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_rows_become_a_message_and_a_number(tmp_path: Path, suffix: str) -> None:
    source, out = tmp_path / f"train.{suffix}", tmp_path / "new/train.jsonl"
    if suffix == "parquet":
        parquet.write_table(arrow.Table.from_pylist(ROWS), source)
    else:
        write(source, ROWS)
    done = prepare(source, out)
    assert done.returncode == 0 and "3 rows" in done.stdout, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["label"] for row in rows] == ["18", "1234", "-5"]
    for row, given in zip(rows, ROWS, strict=True):
        [message] = row["prompt"]
        assert message["role"] == "user" and message["content"].startswith(given["question"])
        assert "\\boxed{}" in message["content"]


@pytest.mark.parametrize(("row", "says"), [
    ({"question": "q", "answer": "no end"}, "must end in ####"),
    ({"question": "q", "answer": "#### 18 eggs"}, "must end in ####"),
    ({"question": "q"}, "must end in ####"),
    ({"question": " ", "answer": "#### 1"}, "question must be text"),
])  # fmt: skip
def test_a_row_that_is_not_gsm8ks_is_named_and_nothing_is_written(
    tmp_path: Path, row: dict[str, Any], says: str
) -> None:
    done = prepare(write(tmp_path / "rows.jsonl", [ROWS[0], row]), tmp_path / "out.jsonl")
    assert done.returncode == 2 and "rows.jsonl:2" in done.stderr and says in done.stderr and "hint" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(("name", "says"), [("nope.jsonl", "no such file"), ("rows.csv", "suffix '.csv'")])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\n")
    done = prepare(tmp_path / name, tmp_path / "out.jsonl")
    assert done.returncode == 2 and says in done.stderr and "hint" in done.stderr


def test_help_says_what_a_row_is() -> None:
    assert "#### 18" in prepare("--help").stdout


TUTORIAL = (EXAMPLE.parents[1] / "docs/tutorial.md").read_text()


@pytest.mark.parametrize("machine", ["two GPUs of 80 GB", "two GPUs of 24 GB", "one GPU of 80 GB"])
def test_the_run_passes_check_on_prepared_rows_and_fits_by_plan(
    machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On every machine that the tutorial names, with the flags that it names."""
    train = tmp_path / "train.jsonl"
    assert prepare(write(tmp_path / "rows.jsonl", ROWS), train).returncode == 0
    make_tokenizer(tmp_path / "tokenizer")
    flags = ["--model.path", str(make_hollow_checkpoint("qwen2.5-0.5B", tmp_path / "model"))]
    flags += ["--model.tokenizer-path", str(tmp_path / "tokenizer"), "--data.prompts", str(train)]
    flags += ["--data.eval-sets", f"[{{name: test, path: {train}}}]", "--output-dir", str(tmp_path / "outputs")]
    begin = {"two GPUs of 24 GB": "--cluster.gpu-memory-gb", "one GPU of 80 GB": "--cluster.placement"}.get(machine)
    flags += [word for line in TUTORIAL.splitlines() if begin and line.startswith(begin) for word in line.split()]
    assert begin is None or begin in flags
    for command in ("check", "plan"):
        assert main([command, str(EXAMPLE / "run.yaml"), *flags]) == 0, capsys.readouterr()
    verdict = capsys.readouterr().out.strip().splitlines()[-1]
    assert verdict.startswith("fits: ") and (machine == "two GPUs of 24 GB" or f"`{verdict}`" in TUTORIAL)
