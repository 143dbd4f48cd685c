"""Prompt files: every row once an epoch in an order that a resume continues, and bad input named by file and line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.config.data import DataConfig
from mslime.config.errors import DataError
from mslime.data.source import PromptSource, split_slice
from tests.unit.rollout_fakes import FakeTokenizer


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"P{i}", "label": i} for i in range(start, start + count)]


def source(*specs: Any, seed: int = 0, shuffle: bool = False, **config: Any) -> PromptSource:
    names = [str(s) for s in specs]
    return PromptSource(names, DataConfig(prompts=names, shuffle=shuffle, **config), FakeTokenizer(), seed)


def labels(prompts: PromptSource, count: int) -> list[Any]:
    return [prompts.next().label for _ in range(count)]


def test_rows_of_several_files_come_in_order_with_their_place(tmp_path: Path):
    write(tmp_path / "a.jsonl", ["", *rows(2), "   ", *rows(1, 2)])
    pq.write_table(pa.Table.from_pylist(rows(2, 3)), tmp_path / "b.parquet")
    s = source(tmp_path / "a.jsonl", tmp_path / "b.parquet")
    drawn = [s.next() for _ in range(5)]
    assert [p.label for p in drawn] == [0, 1, 2, 3, 4]
    assert [p.where for p in drawn] == [
        *(f"{tmp_path}/a.jsonl:{n}" for n in (2, 3, 5)),
        *(f"{tmp_path}/b.parquet:row {n}" for n in (0, 1)),
    ]
    assert drawn[0].tokens == [ord("P"), ord("0")]


@pytest.mark.parametrize("part", ["[:]", "[2:5]", "[-3:]", "[:-8]", "[ 1 : 3 ]", "[8:100]", "[+2:4]"])
def test_slices_mean_what_they_mean_in_python(tmp_path: Path, part: str):
    write(tmp_path / "a.jsonl", rows(10))
    pq.write_table(pa.Table.from_pylist(rows(10)), tmp_path / "b.parquet")
    expected = eval(f"list(range(10)){part}")
    for name in ("a.jsonl", "b.parquet"):
        s = source(f"{tmp_path / name}@{part}")
        assert labels(s, len(s)) == expected


@pytest.mark.parametrize("part", ["[1:2:3]", "[a:b]", "[5]", "[]", "[1:2", "[1.5:]", "[+:]"])
def test_other_slices_are_refused(tmp_path: Path, part: str):
    write(tmp_path / "a.jsonl", rows(10))
    with pytest.raises(DataError, match="slice"):
        source(f"{tmp_path / 'a.jsonl'}@{part}")


def test_an_at_sign_in_a_path_is_no_slice(tmp_path: Path):
    assert split_slice("data@v2/a.jsonl") == (Path("data@v2/a.jsonl"), slice(None))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 17), st.integers(0, 40), st.integers(0, 2**31))
def test_every_row_once_an_epoch_also_across_a_resume(
    tmp_path_factory: pytest.TempPathFactory, n: int, at: int, seed: int
):
    path = write(tmp_path_factory.mktemp("rows") / "a.jsonl", rows(n))
    whole = source(path, seed=seed, shuffle=True)
    expected = labels(whole, 3 * n + 40)
    for epoch in range(3):
        assert sorted(expected[epoch * n : (epoch + 1) * n]) == list(range(n))
    first = source(path, seed=seed, shuffle=True)
    head = labels(first, at)
    state = json.loads(json.dumps(first.state_dict()))
    second = source(path, seed=seed, shuffle=True)
    second.load_state_dict(state)
    assert head + labels(second, 3 * n + 40 - at) == expected


def test_the_order_depends_on_seed_and_epoch(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", rows(50))
    a, b = source(path, seed=1, shuffle=True), source(path, seed=2, shuffle=True)
    first, second = labels(a, 50), labels(a, 50)
    assert len({tuple(first), tuple(second), tuple(labels(b, 50)), tuple(range(50))}) == 4


@pytest.mark.parametrize("change", ["rows", "content", "seed", "shuffle", "slice"])
def test_a_resume_with_other_prompts_is_refused(tmp_path: Path, change: str):
    path = write(tmp_path / "a.jsonl", rows(9))
    s = source(path, shuffle=True)
    labels(s, 4)
    state = s.state_dict()
    if change in ("rows", "content"):
        write(path, rows(8) if change == "rows" else rows(9, 1))
    spec = f"{path}@[:8]" if change == "slice" else path
    other = source(spec, seed=int(change == "seed"), shuffle=change != "shuffle")
    with pytest.raises(DataError, match="saved with other prompts"):
        other.load_state_dict(state)


def test_a_moved_file_is_the_same_file(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", rows(9))
    s = source(path, shuffle=True)
    labels(s, 4)
    state, expected = s.state_dict(), labels(s, 5)
    other = source(path.rename(tmp_path / "b.jsonl"), shuffle=True)
    other.load_state_dict(state)
    assert labels(other, 5) == expected


def test_long_prompts_are_skipped_and_counted(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", rows(12))
    s = source(path, max_prompt_tokens=2)
    assert labels(s, 15) == [*range(10), *range(5)] and s.skipped == 2
    state = s.state_dict()
    other = source(path, max_prompt_tokens=2)
    other.load_state_dict(state)
    assert (labels(other, 1), other.skipped) == ([5], 2)


def test_only_long_prompts_end_the_run_instead_of_spinning(tmp_path: Path):
    with pytest.raises(DataError, match=r"max_prompt_tokens = 1: all 3 prompts"):
        source(write(tmp_path / "a.jsonl", rows(3)), max_prompt_tokens=1).next()


def test_messages_and_strings_go_through_the_chat_template(tmp_path: Path):
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "P1"}]
    table = [{"prompt": chat, "label": 1}]
    write(tmp_path / "a.jsonl", [*table, {"prompt": "P2", "label": 2}])
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "b.parquet")
    s = source(tmp_path / "a.jsonl", tmp_path / "b.parquet", apply_chat_template=True)
    texts = ["".join(chr(t) for t in s.next().tokens) for _ in range(3)]
    assert texts == [
        "<system>be brief<user>P1<assistant>",
        "<user>P2<assistant>",
        "<system>be brief<user>P1<assistant>",
    ]


def test_keys_can_be_renamed_and_left_out(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [{"question": "P", "extra": {"difficulty": 3}}])
    p = source(path, prompt_key="question", label_key=None, metadata_key="extra").next()
    assert (p.tokens, p.label, p.metadata) == ([80], None, {"difficulty": 3})


BAD_ROWS: list[tuple[Any, dict[str, Any], str]] = [
    ('{"prompt": "P", "label"', {}, r"a.jsonl:3 = .*not valid JSON"),
    ("\xff\xfe", {}, r"a.jsonl:3 = .*not valid JSON"),
    ("[1, 2]", {}, r"a.jsonl:3 = .*must be a JSON object"),
    ({"promt": "P", "label": 1}, {}, r"a.jsonl:3 = .*no key 'prompt'\n  hint: did you mean 'promt'"),
    ({"prompt": "P"}, {}, r"a.jsonl:3 = .*no key 'label'"),
    ({"prompt": "P", "label": 1}, {"metadata_key": "meta"}, r"no key 'meta'"),
    ({"prompt": "P", "label": 1, "meta": "easy"}, {"metadata_key": "meta"}, r"a.jsonl:3 = 'easy': 'meta' must be"),
    ({"prompt": 5, "label": 1}, {}, r"a.jsonl:3 = 5: 'prompt' must be a string"),
    ({"prompt": None, "label": 1}, {}, r"a.jsonl:3: 'prompt' must be a string"),
    ({"prompt": "", "label": 1}, {}, r"a.jsonl:3 = '': the prompt is empty"),
    ({"prompt": [{"role": "user", "content": "P"}], "label": 1}, {}, r"needs data.apply_chat_template"),
    ({"prompt": [{"text": "P"}], "label": 1}, {"apply_chat_template": True}, r"list of \{role, content\} messages"),
    ({"prompt": [], "label": 1}, {"apply_chat_template": True}, r"the prompt is empty"),
]


@pytest.mark.parametrize(("row", "config", "message"), BAD_ROWS)
def test_a_bad_row_is_named_before_anything_is_drawn(tmp_path: Path, row: Any, config: dict[str, Any], message: str):
    path = tmp_path / "a.jsonl"
    text = "".join(json.dumps(r | {"meta": {}}) + "\n" for r in rows(2)) if config.get("metadata_key") else "".join(
        json.dumps(r) + "\n" for r in rows(2))  # fmt: skip
    bad = row.encode("latin-1") if isinstance(row, str) else json.dumps(row).encode()
    path.write_bytes(text.encode() + bad + b"\n" + json.dumps(rows(1)[0]).encode() + b"\n")
    with pytest.raises(DataError, match=message) as caught:
        source(path, **config)
    assert caught.value.hint


def test_files_that_are_missing_empty_or_of_another_kind_are_refused(tmp_path: Path):
    for name, content, message in [
        ("none.jsonl", None, "no such file"),
        ("empty.jsonl", b"", "holds no rows"),
        ("blank.jsonl", b"\n  \n", "holds no rows"),
        ("rows.csv", b"prompt\nP\n", "suffix '.csv'"),
        ("bad.parquet", b"PAR1 no", "not a readable parquet"),
    ]:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            source(path)
    with pytest.raises(DataError, match="selects none of the 3 rows"):
        source(f"{write(tmp_path / 'a.jsonl', rows(3))}@[3:]")
    with pytest.raises(DataError, match="names no file"):
        source()


def test_a_parquet_file_without_the_column_is_refused(tmp_path: Path):
    pq.write_table(pa.Table.from_pylist([{"question": "P", "label": 1}]), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet = \['label', 'question'\]: has no key 'prompt'"):
        source(tmp_path / "b.parquet")


def test_rows_of_jsonl_stay_on_disk(tmp_path: Path):
    """The index holds two integers a row, so a large file costs little memory; draws read single lines."""
    random.seed(0)
    path = write(tmp_path / "a.jsonl", [{"prompt": "P" * random.randint(1, 500), "label": i} for i in range(2000)])
    s = source(path, shuffle=True)
    held = sum(v.nbytes for v in vars(s._files[0]).values() if hasattr(v, "nbytes"))
    assert held == 2 * 8 * 2000 < path.stat().st_size / 10
    assert sorted(labels(s, 2000)) == list(range(2000))
