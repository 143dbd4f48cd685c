"""The tables of the examples' READMEs: which rows of metrics.jsonl are in which line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from examples import curve


def write(path: Path, *rows: dict[str, float]) -> Path:
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_line_is_the_mean_of_its_steps_run_beside_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write(
        tmp_path / "a", {"step": 0, "eval/a": 0.5}, {"step": 1, "r": 0.1}, {"step": 2, "r": 0.2},
        {"step": 2, "eval/a": 1.0}, {"step": 3, "r": 0.4},
    )  # fmt: skip
    second = write(tmp_path / "b", {"step": 1, "r": 1.0})
    command = ["curve", str(first), str(second), "--metrics", "r", "eval/a", "--every", "2"]
    monkeypatch.setattr(sys, "argv", command)
    curve.main()
    assert capsys.readouterr().out.splitlines() == [
        "| steps | `r` | `eval/a` |",
        "|---|---|---|",
        "| 0 | – / – | 0.50 / – |",
        "| 1 to 2 | 0.15 / 1.00 | 1.00 / – |",
        "| 3 | 0.40 / – | – / – |",
    ]
