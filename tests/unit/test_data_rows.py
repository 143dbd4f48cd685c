"""Prompt files as people have them: read, or refused in words by file and row; never read as something else."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mslime.cli import main
from mslime.config.data import DataConfig
from mslime.config.errors import CheckpointError, DataError, UserError, hub_download
from mslime.config.model_facts import read_hf_config
from mslime.data.source import PromptSource
from mslime.data.tokenizer import load_tokenizer
from tests.fixtures.tiny_models import make_tiny_qwen3_dense, make_tokenizer
from tests.unit.rollout_fakes import FakeTokenizer

ROWS = [{"prompt": f"P{i}", "label": str(i)} for i in range(4)]


def source(path: Path | str, tokenizer: Any = None, **config: Any) -> PromptSource:
    settings = DataConfig(prompts=[str(path)], shuffle=False, **config)
    return PromptSource(settings.prompts, settings, tokenizer or FakeTokenizer(), 0)


def labels(prompts: PromptSource) -> list[Any]:
    return [prompt.label for prompt in prompts]


def test_gzipped_json_lists_directories_and_saved_datasets_are_read(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "b.json").write_text(json.dumps(ROWS))
    (tmp_path / "c").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS[:2]), tmp_path / "c" / "0.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[2:]), tmp_path / "c" / "1.parquet")
    (tmp_path / "d").mkdir()
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(str(tmp_path / "d" / "data-0.arrow"), table.schema) as out:
        out.write_table(table)
    for name in ("a.jsonl.gz", "b.json", "c", "d"):
        assert labels(source(tmp_path / name)) == ["0", "1", "2", "3"], name


def test_keys_may_be_nested(tmp_path: Path) -> None:
    rows = [{"prompt": "P", "reward_model": {"ground_truth": str(i), "style": "rule"}, "a.b": "x"} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "v.parquet")
    (tmp_path / "v.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("v.parquet", "v.jsonl"):
        assert labels(source(tmp_path / name, label_key="reward_model.ground_truth")) == ["0", "1", "2"]
        assert labels(source(tmp_path / name, label_key="a.b")) == ["x"] * 3
        with pytest.raises(DataError, match="reward_model.nope"):
            source(tmp_path / name, label_key="reward_model.nope")


@pytest.mark.parametrize(
    "value", [datetime.datetime(2026, 1, 2), decimal.Decimal("1.5"), b"\x00\x01", float("nan"), datetime.timedelta(1)]
)
def test_a_label_that_no_checkpoint_can_hold_is_refused_by_its_row_before_the_run(tmp_path: Path, value: Any) -> None:
    rows = pa.Table.from_pylist([{"prompt": "P", "label": value}])
    pq.write_table(rows, tmp_path / "x.parquet")
    with pytest.raises(DataError, match="row 0") as caught:
        source(tmp_path / "x.parquet")
    assert "JSON" in caught.value.rule


@pytest.mark.parametrize(
    "line",
    ['{"prompt": "\\ud800", "label": ""}', '{"prompt": "P", "label": "\\udfff"}', "[" * 100_000,
     '{"prompt": "P", "label": NaN}', '{"prompt": "P", "label": ' + "[" * 50_000 + "]" * 50_000 + "}"],
)  # fmt: skip
def test_text_that_is_no_text_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "P", "label": ""}\n' + line + "\n")
    with pytest.raises(DataError, match=r"x\.jsonl:2"):
        source(tmp_path / "x.jsonl")


def test_a_prompt_of_megabytes_is_skipped_without_being_tokenised(tmp_path: Path) -> None:
    class Counting(FakeTokenizer):
        longest = 0

        def encode(self, text: str, *, special_tokens: bool) -> list[int]:
            self.longest = max(self.longest, len(text))
            return super().encode(text, special_tokens=special_tokens)

    rows = [{"prompt": "x" * 1_000_000, "label": "a"}, {"prompt": "P", "label": "b"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = Counting()
    prompts = source(tmp_path / "x.jsonl", tokenizer, max_prompt_tokens=8)
    assert prompts.next().label == "b" and prompts.skipped == 1 and tokenizer.longest == 1


def test_other_contents_of_the_same_size_are_other_prompts(tmp_path: Path) -> None:
    for name, label in (("a", "1"), ("b", "2")):
        pq.write_table(pa.Table.from_pylist([{"prompt": "P", "label": label}]), tmp_path / f"{name}.parquet")
    state = source(tmp_path / "a.parquet").state_dict()
    source(tmp_path / "a.parquet").load_state_dict(state)
    with pytest.raises(DataError, match="other prompts"):
        source(tmp_path / "b.parquet").load_state_dict(state)
    source(tmp_path / "b.parquet").load_state_dict(state | {"files": ["parquet-1-prompt,label-24"]})  # of before


@pytest.mark.parametrize(("path", "said"), [
    ("nope.jsonl", "no such file"), ("openai/gsm8k", "hf download openai/gsm8k --repo-type dataset"),
    ("x" * 300 + ".jsonl", ""), ("a\0b.jsonl", ""), (".", "directory without parquet"),
])  # fmt: skip
def test_what_is_not_there_is_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"data\.prompts") as caught:
        source(path)
    assert said in str(caught.value)


CHAT = {"apply_chat_template": True}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def chat_file(directory: Path, content: Any) -> Path:
    path = directory / "chat.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": content}], "label": "2"}) + "\n")
    return path


def test_parts_of_text_are_the_text_whatever_the_template_does_with_lists(tmp_path: Path, tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "[34"}, {"type": "text", "text": "17]"}]
    in_parts = source(chat_file(tmp_path, parts), tokenizer, **CHAT).at(0).tokens
    assert in_parts == source(chat_file(tmp_path, "[3417]"), tokenizer, **CHAT).at(0).tokens
    assert "[3417]" in tokenizer.decode(in_parts)


@pytest.mark.parametrize(
    "content",
    [[{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text", "text": "a"}, {"type": "input_audio"}],
     ["a"], [{"type": "text"}], 3, None, {"text": "a"}],
)  # fmt: skip
def test_content_that_is_no_text_is_refused_by_its_line(tmp_path: Path, tokenizer: Any, content: Any) -> None:
    with pytest.raises(DataError, match=r"chat\.jsonl:1"):
        source(chat_file(tmp_path, content), tokenizer, **CHAT)


def test_an_end_of_sequence_that_the_prompt_itself_writes_is_kept(tokenizer: Any) -> None:
    assert tokenizer.encode("a<|eos|>", special_tokens=True)[-1] == tokenizer.eos_token_id


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_dense(tmp_path_factory.mktemp("model") / "m")


def check(model: Path, prompts: Path, *flags: str) -> int:
    return main(
        ["check", "--model.path", str(model), "--data.prompts", str(prompts), "--train.replay", "off",
         "--rollout.max-response-tokens", "8", "--output-dir", str(prompts.parent / "out"), *flags]
    )  # fmt: skip


def with_template(model: Path, directory: Path, template: str | None) -> Path:
    made = load_tokenizer(model)._inner
    made.chat_template = template
    made.save_pretrained(directory / "tokenizer")
    return directory / "tokenizer"


def test_check_shows_the_first_prompt_as_the_model_sees_it_with_counts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(model, chat_file(tmp_path, "1+1="), "--data.apply-chat-template") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1+1=" in out and "<|im_start|>" in out and "1 rows" in out and "tokens" in out


@pytest.mark.parametrize(("template", "said"), [
    (None, "no chat template"),
    ("{% for m in messages %}<{{ m['role'] }}>{% endfor %}", "omits the user's text"),
    ("{{ messages[0]['content'] + 3 }}", "cannot render"), ("{{ messages[0].nope.nope }}", "cannot render"),
    ("{{ raise_exception('only system') }}", "only system"),
])  # fmt: skip
def test_check_tries_the_chat_template(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str | None, said: str
) -> None:
    tokenizer = with_template(model, tmp_path, template)
    flags = ["--data.apply-chat-template", "--model.tokenizer-path", str(tokenizer)]
    assert check(model, chat_file(tmp_path, "1+1="), *flags) == 2
    assert said in capsys.readouterr().err


def test_check_finds_a_prompt_that_leaves_no_room_by_its_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "P", "label": "2"}\n' + json.dumps({"prompt": "x" * 100, "label": "2"}) + "\n")
    assert check(model, path, "--rollout.max-total-tokens", "64") == 2
    assert "x.jsonl:2" in capsys.readouterr().err
    assert check(model, path, "--rollout.max-total-tokens", "64", "--data.max-prompt-tokens", "50") == 0
    assert "1 are skipped" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("label", "line"), [("12", 0), (7, 2), (None, 2), ("", 2), ("x" * 4000, 2)])
def test_check_reads_every_row_of_supervised_training(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], label: Any, line: int
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "P", "label": "a"}\n' + json.dumps({"prompt": "P", "label": label}) + "\n")
    assert check(model, path, "--train.task", "sft") == (2 if line else 0)
    assert not line or f"x.jsonl:{line}" in capsys.readouterr().err


_ODD = [None, True, 0, 1.5, "", "x", [], {}, ["a"], {"a": 1}, "\ud800", [[]], "é" * 50]


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.nightly if s else ()) for s in range(4)])
def test_no_damaged_file_of_prompts_ends_otherwise_than_in_words(seed: int, tmp_path: Path) -> None:
    chance, refused = random.Random(seed), 0
    for number in range(250):
        rows = [dict(row) for row in ROWS]
        rows[chance.randrange(4)][chance.choice(["prompt", "label", "other"])] = chance.choice(_ODD)
        suffix = chance.choice([".jsonl", ".json", ".jsonl.gz", ".parquet"])
        path = tmp_path / f"{number}{suffix}"
        try:
            _write(path, rows)
        except (pa.ArrowException, UnicodeEncodeError, TypeError):
            continue
        content = bytearray(path.read_bytes())
        if chance.random() < 0.6:
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            path.write_bytes(bytes(content))
        try:
            for prompt in source(path):
                assert prompt.tokens and isinstance(prompt.metadata, dict)
        except UserError as error:
            refused += 1
            assert error.rule and error.hint
    assert refused > 40


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def test_only_what_may_be_a_name_on_the_hub_is_fetched_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert hub_download(Path("owner/name")) == (
        "download it first: hf download owner/name --local-dir name", Path("name"))  # fmt: skip
    assert [hub_download(Path(p))[0] for p in ("/name", "mine/name", "name", "a/b/c")] == [""] * 4


def test_what_is_fetched_into_a_directory_of_models_is_no_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # with the directory, and without it
        with pytest.raises(CheckpointError) as caught:
            read_hf_config(Path("models/Qwen"))
        assert caught.value.hint.endswith("hf download OWNER/Qwen --local-dir models/Qwen")
        (tmp_path / "models").mkdir(exist_ok=True)


FIRST = {"prompt": ["a"], "label": ["1"], "metadata": [{"level": 1}]}


def shards(directory: Path, *tables: dict[str, Any]) -> PromptSource:
    directory.mkdir()
    for number, table in enumerate(tables):
        pq.write_table(pa.table(table), directory / f"{number}.parquet")
    return source(directory, metadata_key="metadata")


@pytest.mark.parametrize(
    "change",
    [
        {"label": pa.array([None], pa.null())}, {"prompt": pa.array(["b"], pa.large_string())},
        {"metadata": pa.array([{"level": 2}], pa.struct([("level", pa.int32())]))},
        {"metadata": [{"level": 2, "source": "x"}]},
    ],
    ids=["null", "large_string", "int32", "another key"],
)  # fmt: skip
def test_shards_whose_types_can_be_one_are_read_together(tmp_path: Path, change: dict[str, Any]) -> None:
    second = {"prompt": ["b"], "label": ["2"], "metadata": [{"level": 2}]}
    prompts = shards(tmp_path / "d", FIRST, second | change)
    assert [prompts.row(i).prompt for i in range(2)] == ["a", "b"] and prompts.row(1).metadata["level"] == 2


def test_a_shard_whose_types_cannot_be_those_of_the_others_is_named_with_its_column(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        shards(tmp_path / "d", FIRST, FIRST | {"label": [[1, 2]]})
    assert "1.parquet" in error.value.field and "'label'" in error.value.rule


@pytest.mark.parametrize("name", ["rows.json", "rows.json.gz", "rows.jsonl"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_json_is_read_with_and_without_a_byte_order_mark(tmp_path: Path, name: str, mark: bytes) -> None:
    rows = [{"prompt": "a", "label": "1"}, {"prompt": "b", "label": "2"}]
    text = "\r\n".join(map(json.dumps, rows)) if name.endswith("l") else json.dumps(rows)
    content = mark + text.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert labels(source(tmp_path / name)) == ["1", "2"]
