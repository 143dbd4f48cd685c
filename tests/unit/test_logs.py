"""The logs of a run's processes: who, when, what, how long; no secrets, and nothing left behind in the driver."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mslime import logs
from mslime.observe.progress import open_progress
from mslime.run.placement import on_other_machines

LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d{4} "


def test_a_process_writes_its_own_lines_and_its_libraries_warnings() -> None:
    program = (
        "import logging\n"
        "from mslime.logs import hide, log_process, phase\n"
        "log_process('trainer 3', 'info')\n"
        "hide('sesame', '')\n"
        "ours, theirs = logging.getLogger('mslime.x'), logging.getLogger('megatron.core')\n"
        "ours.debug('no'), theirs.info('no'), theirs.warning('beware of sesame')\n"
        "with phase(ours, 'step 1: training'): pass\n"
        "logging.getLogger('mslime_plugins.serve').info('one pass')\n"
        "try:\n"
        "    with phase(ours, 'saving'): raise OSError('sesame is full\\nmore')\n"
        "except OSError: ours.exception('it')\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = told.stderr.splitlines()
    expected = (
        r"WARNING megatron\.core: beware of \(redacted\)", r"INFO step 1: training",
        r"INFO step 1: training: done in \d+\.\d\d s", "INFO one pass", r"INFO saving",
        r"ERROR saving: failed after \d+\.\d\d s: OSError: \(redacted\) is full", "ERROR it",
    )  # fmt: skip
    for line, pattern in zip(lines[: len(expected)], expected, strict=True):
        assert re.fullmatch(f"{LINE}trainer 3 {pattern}", line), line
    assert "Traceback" in told.stderr and "sesame" not in told.stderr


def test_the_driver_s_file_holds_what_was_said_and_why_it_ended_and_the_callers_logging_is_as_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, root, ours = tmp_path / "logs" / "driver.log", logging.getLogger(), logging.getLogger("mslime")
    before = (list(root.handlers), root.level, list(ours.handlers), ours.level)
    for mode in ("off", "auto"):
        with pytest.raises(OSError), logs.log_file(path, "driver", "info"), open_progress(mode, 3) as progress:
            progress.note(f"starting, progress {mode}")
            progress.step_done(1, {"loss/total": 0.5})
            raise OSError("the disk is full")
    logging.getLogger("mslime").warning("after the run")
    lines = path.read_text().splitlines()
    assert all(re.match(f"{LINE}driver (INFO|ERROR) ", line) for line in lines)
    assert [re.sub(f"{LINE}driver ", "", line) for line in lines] == [
        text
        for mode in ("off", "auto")
        for text in (
            f"INFO starting, progress {mode}", "INFO step 1/3  loss 0.5000", "ERROR ended by OSError: the disk is full",
        )
    ]  # fmt: skip
    assert (list(root.handlers), root.level, list(ours.handlers), ours.level) == before
    assert capsys.readouterr().out == ""


def test_the_level_decides_what_is_written(tmp_path: Path) -> None:
    with logs.log_file(tmp_path / "driver.log", "driver", "warning"), logs.phase(logging.getLogger("mslime.x"), "work"):
        logging.getLogger("mslime_plugins.x").warning("beware")
    assert (tmp_path / "driver.log").read_text().endswith("WARNING beware\n")
    assert len((tmp_path / "driver.log").read_text().splitlines()) == 1


def test_processes_on_other_machines_are_named_by_machine() -> None:
    names = {"a": "head (10.0.0.1)", "b": "node-b (10.0.0.2)"}
    placed = {"trainer_rank": ["a", "a", "b", "b", "b", "c"], "engine": ["b", "a", "b"], "teacher": []}
    assert on_other_machines(placed, "a", names) == [
        "node-b (10.0.0.2): trainer_rank2 to trainer_rank4, engine0, engine2",
        "c: trainer_rank5",
    ]
    assert on_other_machines({"trainer_rank": ["a", "a"]}, "a", names) == []
