"""Checkpoint directories on disk: what is complete, what is damaged, what is resumed from, what is kept. No trainer."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mslime.config.errors import CheckpointError, ConfigError, UserError
from mslime.data.checkpoints import (
    CRITIC,
    FileSum,
    SummedFile,
    begin,
    check_checkpoint,
    check_sums,
    choose,
    complete,
    critic_directory,
    newest,
    prune,
    read_manifest,
    retained,
    rollouts_file,
    share,
    step_directory,
    sum_file,
)

FUZZ = [pytest.param(60, id="short"), pytest.param(1000, id="long", marks=pytest.mark.nightly)]


def save(root: Path, step: int, text: str = "weights", **extra: Any) -> Path:
    """A complete checkpoint with two files, one of them summed by its writer."""
    directory = step_directory(root, step)
    saving = begin(directory)
    (saving / "part").mkdir()
    (saving / "part" / "data").write_text(text)
    with SummedFile(saving / "large") as file:
        file.write(text.encode() * 10)
        file.sync()
    complete(saving, directory, "TP2", 2, {"next_step": step, **extra}, {"large": file.sum})
    return directory


def save_format_1(root: Path, step: int) -> Path:
    """A checkpoint as it was written before files had checksums."""
    directory = step_directory(root, step)
    (directory / "extra").mkdir(parents=True)
    (directory / "data").write_text("weights")
    (directory / "extra" / "rollouts.bin").write_bytes(b"state")
    content = {"layout": "TP2", "world_size": 2, "extra": {"next_step": step}, "format": 1, "complete": True}
    content["files"] = {"data": 7, "extra/rollouts.bin": 5}
    (directory / "manifest.json").write_text(json.dumps(content, indent=1))
    return directory


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def flip(path: Path, bit: int) -> None:
    """One bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(bytes(data))


def test_a_complete_checkpoint_gives_back_its_extra_and_sums_and_people_can_read_them(tmp_path: Path) -> None:
    directory = save(tmp_path, 3, cursor={"epoch": [1, 2]})
    manifest, content = read_manifest(directory), json.loads((directory / "manifest.json").read_text())
    assert manifest.extra == content["extra"] == {"next_step": 3, "cursor": {"epoch": [1, 2]}}
    assert manifest.files == {name: sum_file(directory / name) for name in ("large", "part/data")}
    assert (content["layout"], content["world_size"], content["files"]["part/data"]["bytes"]) == ("TP2", 2, 7)
    assert len(content["files"]["part/data"]["sha256"]) == 64


@pytest.mark.parametrize("pieces", [[b""], [b"a", b"bc" * 7], [os.urandom(3 << 20), b"x", os.urandom(1 << 20)]])
def test_a_file_is_summed_while_it_is_written(pieces: list[bytes], tmp_path: Path) -> None:
    with SummedFile(tmp_path / "f") as file:
        for piece in pieces:
            assert file.write(bytearray(piece)) == len(piece)
    assert (tmp_path / "f").read_bytes() == b"".join(pieces) and file.sum == sum_file(tmp_path / "f")


def test_readers_share_the_files_by_their_bytes() -> None:
    files = {f"f{i}": FileSum(size, "") for i, size in enumerate([100, 1, 1, 1, 50, 50, 3])}
    shares = [share(files, rank, 3) for rank in range(3)]
    assert sorted(name for s in shares for name in s) == sorted(files)
    assert max(sum(f.size for f in s.values()) for s in shares) <= 103
    assert [share({}, rank, 2) for rank in range(2)] == [{}, {}]


def test_nothing_is_visible_until_it_is_complete(tmp_path: Path) -> None:
    saving = begin(step_directory(tmp_path, 5))
    (saving / "data").write_text("x")
    assert newest(tmp_path) is None
    save(tmp_path, 4)
    assert newest(tmp_path) == step_directory(tmp_path, 4)


def test_the_newest_is_the_largest_step_and_not_the_last_in_the_alphabet(tmp_path: Path) -> None:
    for step in (9, 10, 100, 11):
        save(tmp_path, step)
    assert newest(tmp_path) == step_directory(tmp_path, 100)
    assert choose(tmp_path, "auto").directory == choose(tmp_path, "older").directory == step_directory(tmp_path, 100)


def test_no_directory_has_no_newest(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent") is None and choose(tmp_path / "absent", "never").directory is None


def test_a_checkpoint_is_never_overwritten_by_a_run_that_starts_again(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="step_1 exists, and a new run would overwrite it"):
        choose(tmp_path, "never")


def test_a_file_that_is_not_as_its_writer_left_it_is_no_checkpoint(tmp_path: Path) -> None:
    saving = begin(step_directory(tmp_path, 1))
    with SummedFile(saving / "large") as file:
        file.write(b"weights")
    os.truncate(saving / "large", 3)
    with pytest.raises(CheckpointError, match="large = '3 bytes'"):
        complete(saving, step_directory(tmp_path, 1), "TP2", 2, {}, {"large": file.sum})
    assert newest(tmp_path) is None


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped bit": lambda path: flip(path, 13), "cut byte": _cut, "missing": Path.unlink,
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"), "empty": lambda path: path.write_bytes(b""),
}  # fmt: skip


@pytest.mark.parametrize("file", ["large", "part/data", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_only_passed_over_when_asked(damage: str, file: str, tmp_path: Path) -> None:
    good, bad = save(tmp_path, 2), save(tmp_path, 4)
    DAMAGES[damage](bad / file)
    with pytest.raises(CheckpointError, match=file):
        check_checkpoint(bad)
    if damage != "flipped bit" or file == "manifest.json":  # else the ranks find it, when they load it
        with pytest.raises(CheckpointError, match=f"(?s){bad}/{file}.*resume: older"):
            choose(tmp_path, "auto")
    chosen = choose(tmp_path, "older")
    assert chosen.directory == good
    assert [(path.name, file in error.field) for path, error in chosen.passed_over] == [("damaged-step_4", True)]
    assert choose(tmp_path, "auto").directory == good, "what was set aside is not met again"


def test_when_all_are_damaged_nothing_is_chosen_and_nothing_touched(tmp_path: Path) -> None:
    for step in (2, 4):
        flip(save(tmp_path, step) / "large", 5)
    with pytest.raises(CheckpointError, match=r"(?s)\['step_4', 'step_2'\].*all checkpoints are damaged.*large"):
        choose(tmp_path, "older")
    assert names(tmp_path) == ["step_2", "step_4"]


def test_a_damaged_critic_damages_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(critic_directory(step_directory(tmp_path, 2)).parent, 2)
    policy = save(tmp_path, 2, **{CRITIC: True})
    check_checkpoint(policy)
    flip(critic_directory(policy) / "large", 7)
    with pytest.raises(CheckpointError, match="critic/step_2/large"):
        check_checkpoint(policy)
    assert choose(tmp_path, "older").directory == step_directory(tmp_path, 1)
    assert names(tmp_path / "critic") == ["damaged-step_2"]


def test_a_checkpoint_from_before_checksums_is_read_by_its_sizes(tmp_path: Path) -> None:
    directory = save_format_1(tmp_path, 7)
    manifest = read_manifest(directory)
    assert not manifest.summed and manifest.extra == {"next_step": 7}
    assert rollouts_file(manifest) == "extra/rollouts.bin"
    check_sums(directory, manifest.files)
    assert choose(tmp_path, "auto").directory == directory
    _cut(directory / "data")
    with pytest.raises(CheckpointError, match="data = '6 bytes'"):
        newest(tmp_path)


@pytest.mark.parametrize("change", [{"format": 3}, {"format": 99, "new": 1}, {"format": 2**70}])
def test_a_manifest_of_a_newer_version_says_so(change: dict[str, Any], tmp_path: Path) -> None:
    directory = save(tmp_path, 1)
    content = json.loads((directory / "manifest.json").read_text()) | change
    (directory / "manifest.json").write_text(json.dumps(content | {"written_by": "9.9"}))
    with pytest.raises(CheckpointError, match=r"newer mslime \(9.9\)") as error:
        read_manifest(directory)
    assert "version of mslime that wrote it" in error.value.hint


@pytest.mark.parametrize(
    "change",
    [{"new": 1}, {"files": None}, {"files": {"../x": 1}}, {"files": {"/x": 1}}, {"extra": []}, {"world_size": True}],
)
def test_a_manifest_of_another_version_is_refused_without_a_traceback(change: dict[str, Any], tmp_path: Path) -> None:
    directory = save_format_1(tmp_path, 1)
    content = json.loads((directory / "manifest.json").read_text()) | change
    (directory / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(directory)


def test_a_file_that_cannot_be_looked_at_is_a_missing_one(tmp_path: Path) -> None:
    directory = save_format_1(tmp_path, 1)
    content = json.loads((directory / "manifest.json").read_text()) | {"files": {"x" * 5000: 1}}
    (directory / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="missing"):
        read_manifest(directory)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99, "complete": true}', '{"format": 1}', "[" * 10**5])
def test_a_manifest_that_says_nothing_useful_is_refused(content: str, tmp_path: Path) -> None:
    directory = save(tmp_path, 1)
    (directory / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        newest(tmp_path)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(directory)


@pytest.mark.parametrize("trials", FUZZ)
def test_no_random_edit_of_a_manifest_is_believed_or_ends_in_a_traceback(trials: int, tmp_path: Path) -> None:
    rng = random.Random(5)
    makers = [lambda root: save(root, 3, cursor={"a": [1, 2.5, None, "é"]}), lambda root: save_format_1(root, 3)]
    for trial in range(trials):
        directory = makers[trial % 2](tmp_path / str(trial))
        path = directory / "manifest.json"
        whole, before = path.read_bytes(), read_manifest(directory)
        path.write_bytes(_edited(whole, rng))
        try:
            after = read_manifest(directory, check_files=False)
        except UserError:
            continue
        if trial % 2 == 0:
            assert after == before, f"trial {trial}: {path.read_bytes()!r}"


def _edited(data: bytes, rng: random.Random) -> bytes:
    """A file after a random accident: bits, bytes, pieces and whole JSON values."""
    kind, at = rng.randrange(6), rng.randrange(len(data))
    if kind == 0:
        return bytes(b ^ (1 << rng.randrange(8)) if i == at else b for i, b in enumerate(data))
    if kind == 1:
        return data[:at] + data[at + rng.randrange(1, 9) :]
    if kind == 2:
        return data[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9))) + data[at:]
    if kind == 3:
        return data[:at]
    content = json.loads(data)
    keys = [*content, "surprise"]
    value = rng.choice([None, True, -1, 2**80, 1.5, "x", [], {}, {"a": {}}, [[1]], float("nan")])
    if kind == 4 and content["files"]:
        content["files"][rng.choice([*content["files"], "../up", ""])] = value
    elif rng.random() < 0.5:
        content[rng.choice(keys)] = value
    else:
        content.pop(rng.choice(list(content)))
    return json.dumps(content).encode()


@pytest.mark.parametrize("trials", FUZZ)
def test_every_random_damage_of_a_checkpoint_is_found_by_name(trials: int, tmp_path: Path) -> None:
    rng = random.Random(6)
    directory = save(tmp_path, 3, "".join(chr(rng.randrange(32, 127)) for _ in range(500)))
    whole = {name: (directory / name).read_bytes() for name in ("large", "part/data", "manifest.json")}
    for trial in range(trials):
        name = rng.choice(list(whole))
        damaged = _edited(whole[name], rng) if name == "manifest.json" else _scarred(whole[name], rng)
        (directory / name).write_bytes(damaged)
        if damaged != whole[name] and not _same_json(damaged, whole[name]):
            with pytest.raises(CheckpointError) as error:
                check_checkpoint(directory)
            assert name in error.value.field, f"trial {trial}"
        (directory / name).write_bytes(whole[name])
    check_checkpoint(directory)


def _scarred(data: bytes, rng: random.Random) -> bytes:
    kind, at = rng.randrange(4), rng.randrange(len(data))
    if kind == 0:
        return bytes(b ^ (1 << rng.randrange(8)) if i == at else b for i, b in enumerate(data))
    if kind == 1:
        return data[:at] + bytes(len(data) - at)  # a block that never reached the disk
    if kind == 2:
        return data[:at]
    return data + data[:at]


def _same_json(a: bytes, b: bytes) -> bool:
    """White space and the order of keys mean nothing."""
    try:
        return json.loads(a) == json.loads(b)
    except (ValueError, RecursionError):
        return False


# ------------------------------------------------------------------------------------------------------------ keeping


def test_pruning_keeps_the_newest_complete_ones_and_removes_leftovers(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (step_directory(tmp_path, 4) / "manifest.json").unlink()
    begin(step_directory(tmp_path, 7))
    prune(tmp_path, lambda steps: retained(steps, keep=2))
    assert names(tmp_path) == ["step_2", "step_3", "step_4"], "an incomplete one is neither counted nor touched"


def test_milestones_and_the_best_are_kept_beside_the_newest() -> None:
    steps = list(range(10, 110, 10))
    assert retained(steps, keep=2) == {90, 100}
    assert retained(steps, keep=1, keep_every=40) == {40, 80, 100}
    assert retained(steps, keep=1, scores={20: 0.5, 40: 0.7, 60: 0.7, 70: 0.1, 999: 5.0}) == {60, 100}
    assert retained(steps, keep=1, keep_every=50, scores={}) == {50, 100}


def test_a_step_saved_again_replaces_the_old_one_whole(tmp_path: Path) -> None:
    save(tmp_path, 1, "older and longer")
    directory = save(tmp_path, 1, "new")
    assert (directory / "part" / "data").read_text() == "new"
    check_checkpoint(directory)
    assert names(tmp_path) == ["step_1"]


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ({2: 0.9, 4: math.nan, 6: 0.5}, {2, 6}), ({2: math.nan, 4: 0.9, 6: 0.5}, {4, 6}),
        ({2: math.nan, 4: math.nan, 6: math.nan}, {6}),
    ],
)  # fmt: skip
def test_a_score_that_is_no_number_is_never_the_best(scores: dict[int, float], kept: set[int]) -> None:
    assert retained([2, 4, 6], 1, 0, scores) == kept
