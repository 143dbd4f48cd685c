"""Groups survive the way to disk and back, and damaged or half-written files are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mslime.config.errors import CheckpointError, DataError, UserError
from mslime.data.routes import Routes
from mslime.data.sample import Group, Sample, SampleStatus, check_invariants
from mslime.rollout.state import check_stored, open_state, pack_groups, save_state, unpack_groups
from tests.fixtures.supports import supports_of


def sample(group: int, index: int, response: int, *, routes: bool, supports: bool) -> Sample:
    s = Sample.from_prompt(group, index, [5, 6, 7], {"answer": [1, 2]}, difficulty=3)
    if routes:
        s.routes = Routes.empty((1, 3), 2, 300)
    rows = np.full((2 + response, 2, 2), 299) if routes and response else None
    ids = list(range(10, 10 + response))
    spans = [(3, 0, response)] if response else []
    kept = supports_of([[i, i + 1][: 1 + i % 2] for i in ids]) if supports else None
    s.extend(ids, log_probs=[-0.5] * response, versions=spans, engine="e0", routes=rows, supports=kept)
    s.status = SampleStatus.ABORTED if index else SampleStatus.COMPLETED
    s.reward, s.response, s.aborts = (None if index else 0.25), "é", index
    return s


def equal(a: Sample, b: Sample) -> bool:
    plain = [n for n in vars(a) if n[0] != "_" and n not in ("tokens", "loss_mask", "log_probs", "routes", "supports")]
    assert all(vars(a)[n] == vars(b)[n] for n in plain)
    for name in ("tokens", "loss_mask", "log_probs"):
        x, y = vars(a)[name], vars(b)[name]
        assert x.dtype == y.dtype and np.array_equal(x, y), name
    for name, columns in (("routes", ("experts", "mask")), ("supports", ("ids", "offsets"))):
        x, y = vars(a)[name], vars(b)[name]
        assert (x is None) == (y is None), name
        for column in columns if x is not None else ():
            left, right = getattr(x, column), getattr(y, column)
            assert left.dtype == right.dtype and np.array_equal(left, right), (name, column)
        assert x is None or name == "supports" or x.layer_ids == y.layer_ids
    return True


def opened(path: Path) -> dict[str, Any]:
    """A state without columns."""
    with open_state(path) as (state, _):
        return state


@pytest.mark.parametrize("routes", [True, False])
@pytest.mark.parametrize("supports", [True, False])
def test_groups_come_back_as_they_were(tmp_path: Path, routes: bool, supports: bool):
    groups = [
        Group(g, [sample(g, i, 4 * i + (g == 1), routes=routes, supports=supports) for i in range(3)], f"file:{g}")
        for g in (1, 4)
    ]
    headers, arrays = pack_groups(groups)
    save_state(tmp_path / "s.npz", {"groups": headers, "x": 1}, arrays)
    with open_state(tmp_path / "s.npz") as (state, stored):
        back = unpack_groups(state["groups"], stored)
    assert state["x"] == 1 and [(g.group_id, g.source) for g in back] == [(1, "file:1"), (4, "file:4")]
    for old, new in zip(groups, back, strict=True):
        for a, b in zip(old.samples, new.samples, strict=True):
            assert equal(a, b)
            check_invariants(b)
            b.extend([1], log_probs=[-1.0], versions=[(9, 0, 1)], engine="e1",
                     routes=np.zeros((len(b) - len(b.routes), 2, 2), int) if b.routes is not None else None,
                     supports=supports_of([[1]]) if supports else None)  # fmt: skip
            check_invariants(b)


def test_an_empty_service_can_be_saved(tmp_path: Path):
    headers, arrays = pack_groups([])
    save_state(tmp_path / "s.npz", {"groups": headers}, arrays)
    with open_state(tmp_path / "s.npz") as (state, stored):
        assert unpack_groups(state["groups"], stored) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "s.npz"
    save_state(path, {"x": 1}, {})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mslime.data.checkpoints.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_state(path, {"x": 2}, {})
    assert opened(path)["x"] == 1 and [p.name for p in tmp_path.iterdir()] == ["s.npz"]


def test_damaged_files_are_refused(tmp_path: Path):
    path = tmp_path / "s.npz"
    with pytest.raises(CheckpointError, match="not readable"):
        opened(path)
    save_state(path, {"x": 1}, {"a": [np.arange(1000)]})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="not readable"):
        opened(path)
    np.savez(path, header=np.frombuffer(json.dumps({"format": 99}).encode(), np.uint8))
    with pytest.raises(CheckpointError, match="unsupported format"):
        opened(path)


def test_a_pickle_inside_is_never_opened(tmp_path: Path):
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (tmp_path / "went off",)

    np.savez(tmp_path / "s.npz", header=np.array([Bomb()], dtype=object))
    with pytest.raises(CheckpointError, match="not readable"):
        opened(tmp_path / "s.npz")
    assert not (tmp_path / "went off").exists()


def test_metadata_that_is_no_json_is_named(tmp_path: Path):
    s = Sample.from_prompt(0, 0, [1], b"bytes")
    headers, arrays = pack_groups([Group(0, [s])])
    with pytest.raises(DataError, match="must be JSON values"):
        save_state(tmp_path / "s.npz", {"groups": headers}, arrays)


FUZZ = [pytest.param(100, id="short"), pytest.param(1000, id="long", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("trials", FUZZ)
def test_no_random_change_of_a_state_file_ends_in_a_traceback_or_in_impossible_groups(trials: int, tmp_path: Path):
    """Bits of the file, and header and columns behind valid sums, as a program that is wrong would write them."""
    rng = random.Random(7)
    groups = [Group(g, [sample(g, i, 4 * i + 1, routes=g == 1, supports=g == 2) for i in range(2)]) for g in (1, 2)]
    headers, columns = pack_groups(groups)
    state = {"groups": headers, "version": 3}
    path = tmp_path / "s.npz"
    accepted = 0
    for _ in range(trials):
        if rng.random() < 0.3:
            save_state(path, state, columns)
            data = bytearray(path.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(bytes(data))
        else:
            save_state(path, *_changed(state, columns, rng))
        try:
            with open_state(path) as (found, stored):
                back = unpack_groups(found["groups"], stored)
                check_stored(back)
        except UserError:
            continue
        accepted += 1
        for s in (s for g in back for s in g.samples):
            check_invariants(s)
    assert accepted < trials


def _changed(
    state: dict[str, Any], columns: dict[str, Any], rng: random.Random
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One value of the header or one column made something else."""
    state, columns = json.loads(json.dumps(state)), dict(columns)
    if rng.random() < 0.3:
        name = rng.choice(list(columns))
        whole = np.concatenate(columns[name]) if columns[name] else np.empty(0)
        change = rng.randrange(4)
        if change == 0:
            whole = whole[: rng.randrange(len(whole) + 1)]
        elif change == 1:
            whole = np.concatenate([whole, whole[:1]])
        elif change == 2:
            whole = whole.astype(rng.choice(["float64", "int64", "int8", "U3", "complex64"]))
        elif len(whole):
            whole = whole.copy()
            whole[rng.randrange(len(whole))] = rng.choice([0, 1, 99])
        columns[name] = [whole]
        return state, columns
    node: Any = state
    while True:
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.85:
            node = node[key]
            continue
        values = [None, True, -1, 0, 10**12, 1.5, "x", [], {}, [[]], {"a": 1}, 2**70]
        if rng.random() < 0.2 and isinstance(node, dict):
            del node[key]
        else:
            node[key] = rng.choice(values)
        return state, columns


def test_a_column_that_is_longer_than_its_samples_is_refused(tmp_path: Path):
    headers, columns = pack_groups([Group(0, [sample(0, 0, 4, routes=False, supports=False)])])
    columns["tokens"] = [*columns["tokens"], np.ones(1, np.int32)]
    save_state(tmp_path / "s.npz", {"groups": headers}, columns)
    with pytest.raises(CheckpointError, match="tokens holds 1 elements more"), open_state(tmp_path / "s.npz") as found:
        unpack_groups(found[0]["groups"], found[1])
