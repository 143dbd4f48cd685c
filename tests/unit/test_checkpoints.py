"""Checkpoint directories on disk: what is complete, what is newest, what is removed. No trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mslime.config.errors import CheckpointError
from mslime.data.checkpoints import (
    begin,
    complete,
    latest_complete,
    prune,
    read_extra,
    read_manifest,
    step_directory,
    write_extra,
)


def save(root: Path, step: int, text: str = "weights", **extra: Any) -> Path:
    """A complete checkpoint with one file."""
    directory = step_directory(root, step)
    saving = begin(directory)
    (saving / "part").mkdir()
    (saving / "part" / "data").write_text(text)
    complete(saving, directory, "TP2", 2, write_extra(saving, {"step": step, **extra}))
    return directory


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_complete_checkpoint_gives_back_its_extra(tmp_path: Path) -> None:
    directory = save(tmp_path, 3, rollouts=b"\x00\x01", cursor={"epoch": [1, 2]})
    assert read_extra(directory) == {"step": 3, "rollouts": b"\x00\x01", "cursor": {"epoch": [1, 2]}}
    assert read_manifest(directory).files == {"extra/rollouts.bin": 2, "part/data": 7}


def test_nothing_is_visible_until_it_is_complete(tmp_path: Path) -> None:
    saving = begin(step_directory(tmp_path, 5))
    (saving / "data").write_text("x")
    assert latest_complete(tmp_path) is None
    save(tmp_path, 4)
    assert latest_complete(tmp_path) == step_directory(tmp_path, 4)


def test_the_newest_is_the_largest_step_and_not_the_last_in_the_alphabet(tmp_path: Path) -> None:
    for step in (9, 10, 100, 11):
        save(tmp_path, step)
    assert latest_complete(tmp_path) == step_directory(tmp_path, 100)


def test_an_incomplete_newest_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    (damaged / "part" / "data").unlink()
    assert latest_complete(tmp_path) == step_directory(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"part/data = 'missing'"):
        read_manifest(damaged)


def test_no_directory_has_no_newest(tmp_path: Path) -> None:
    assert latest_complete(tmp_path / "absent") is None


def test_pruning_keeps_the_newest_complete_ones_and_removes_leftovers(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (step_directory(tmp_path, 4) / "manifest.json").unlink()
    begin(step_directory(tmp_path, 7))
    prune(tmp_path, keep=2)
    assert names(tmp_path) == ["step_2", "step_3", "step_4"], "an incomplete one is neither counted nor touched"


def test_a_step_saved_again_replaces_the_old_one_whole(tmp_path: Path) -> None:
    save(tmp_path, 1, "older and longer")
    directory = save(tmp_path, 1, "new")
    assert (directory / "part" / "data").read_text() == "new"
    read_manifest(directory)
    assert names(tmp_path) == ["step_1"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99, "complete": true}', '{"format": 1}'])
def test_a_manifest_that_says_nothing_useful_is_refused(content: str, tmp_path: Path) -> None:
    directory = save(tmp_path, 1)
    (directory / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(directory)
    assert latest_complete(tmp_path) is None


def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    directory = save(tmp_path, 1)
    os.truncate(directory / "part" / "data", 3)
    with pytest.raises(CheckpointError, match=r"part/data = '3 bytes': the manifest says 7 bytes"):
        read_manifest(directory)


def test_the_manifest_can_be_read_by_people(tmp_path: Path) -> None:
    content = json.loads((save(tmp_path, 12) / "manifest.json").read_text())
    assert (content["layout"], content["world_size"], content["extra"]) == ("TP2", 2, {"step": 12})
