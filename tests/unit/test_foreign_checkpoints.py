"""Damaged Hugging Face checkpoints: refused by name wherever the safetensors library refuses, and no traceback."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mslime.checks.resolve import resolve
from mslime.config.errors import UserError
from mslime.config.loader import build
from mslime.convert.hf import HFCheckpoint
from mslime.convert.safetensors_files import read_header
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

Damage = Callable[[dict[str, Any]], object]


def write(path: Path, header: bytes, data: bytes) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], bytes]:
    """(header, data) of a file of three tensors."""
    path = tmp_path_factory.mktemp("honest") / "x.safetensors"
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.int64), "c": np.zeros((0, 3)),
    }  # fmt: skip
    save_file(arrays, path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def library_reads(path: Path) -> bool:
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118  not a dict
                file.get_slice(name)
        return True
    except (SafetensorError, OSError, ValueError, OverflowError):
        return False


DAMAGES: dict[str, Damage] = {
    "another dtype of less": lambda h: h["a"].update(dtype="F16"),
    "another dtype of more": lambda h: h["a"].update(dtype="I64"),
    "an unknown dtype": lambda h: h["a"].update(dtype="F99"),
    "a shape of more": lambda h: h["a"].update(shape=[2, 4]),
    "a shape of less": lambda h: h["a"].update(shape=[2, 2]),
    "a negative shape": lambda h: h["a"].update(shape=[-2, -3]),
    "negative offsets": lambda h: h["a"].update(data_offsets=[-24, 0]),
    "reversed offsets": lambda h: h["a"].update(data_offsets=[24, 0]),
    "overlapping offsets": lambda h: h["a"].update(data_offsets=[8, 32]),
    "offsets with a hole": lambda h: h["b"].update(
        data_offsets=[h["b"]["data_offsets"][0] + 8, h["b"]["data_offsets"][1] + 8]
    ),
    "three offsets": lambda h: h["a"].update(data_offsets=[0, 12, 24]),
    "offsets as text": lambda h: h["a"].update(data_offsets=["0", "24"]),
    "offsets as fractions": lambda h: h["a"].update(data_offsets=[0.0, 24.0]),
    "no offsets": lambda h: h["a"].pop("data_offsets"),
    "no shape": lambda h: h["a"].pop("shape"),
    "a tensor that is a number": lambda h: h.update(a=1),
    "a tensor of nothing": lambda h: h.update(a=None),
    "a shape that is true": lambda h: h["a"].update(shape=[True, 6]),
}


@pytest.mark.parametrize("what", list(DAMAGES))
def test_a_header_that_contradicts_itself_is_refused_as_the_library_refuses_it(
    what: str, honest: tuple[dict[str, Any], bytes], tmp_path: Path
) -> None:
    header, data = json.loads(json.dumps(honest[0])), honest[1]
    DAMAGES[what](header)
    path = write(tmp_path / "model.safetensors", json.dumps(header).encode(), data)
    assert not library_reads(path)
    with pytest.raises(UserError, match="model.safetensors"):
        read_header(path)


@pytest.mark.parametrize("header", [b"", b"[]", b"3", b"null", b"{", b"\xff\xfe", b"[" * 3000, b'{"a": NaN}'])
def test_bytes_that_are_no_header_are_refused(header: bytes, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        read_header(write(tmp_path / "x.safetensors", header, b""))


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.nightly if s else ()) for s in range(5)])
def test_no_changed_header_is_read_that_the_library_would_refuse(
    seed: int, honest: tuple[dict[str, Any], bytes], tmp_path: Path
) -> None:
    chance, path = random.Random(seed), tmp_path / "x.safetensors"
    refused = 0
    for _ in range(300):
        header = bytearray(json.dumps(honest[0]).encode())
        for _ in range(chance.randint(1, 2)):
            header[chance.randrange(len(header))] = chance.choice(b'0123456789-,:[]{}"aF.e ')
        write(path, bytes(header), honest[1])
        try:
            found = read_header(path)
        except UserError:
            refused += 1
            continue
        assert library_reads(path), bytes(header)
        with safe_open(path, framework="np") as file:
            assert {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()} == {  # noqa: SIM118
                n: info.shape for n, info in found.items()
            }
    assert refused > 100


@pytest.mark.parametrize("name", ["../other/x.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", 3, None])
def test_an_index_names_files_of_its_own_directory_only(name: object, tmp_path: Path) -> None:
    save_file({"a": np.zeros(2)}, tmp_path / "x.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="index"):
        HFCheckpoint(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": [1]}', "{", "\x00"])
def test_an_index_of_another_shape_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match="index"):
        HFCheckpoint(tmp_path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("foreign") / "model")


def _resolve(model: Path, prompts: Path) -> None:
    if not prompts.exists():
        prompts.write_text('{"prompt": "1+1=", "label": "2"}\n')
    resolve(build({
        "model": {"path": str(model)}, "data": {"prompts": [str(prompts)]}, "rollout": {"max_response_tokens": 16},
        "output_dir": str(prompts.parent / "out"),
    }))  # fmt: skip


_ODD = [None, True, -1, 0, 7, 2**70, 1.5, "", "x", [], {}, [1], {"a": 1}, "\ud800"]


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.nightly if s else ()) for s in range(40)])
def test_no_changed_setting_of_a_checkpoint_s_files_ends_check_otherwise_than_in_words(
    seed: int, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "transformers")  # it logs the model's type, and xdist sends no lone surrogates
    chance, model = random.Random(seed), tmp_path / "model"
    shutil.copytree(checkpoint, model)
    refused = 0
    for _ in range(25):
        name = chance.choice(["config.json", "config.json", "tokenizer_config.json", "tokenizer.json"])
        original = (model / name).read_text()
        if chance.random() < 0.25:
            at = chance.randrange(len(original))
            changed = (
                original[:at] + chance.choice(["", "}", "\x00", '"', "9"]) + original[at + chance.randint(0, 30) :]
            )
        else:
            content = json.loads(original)
            content[chance.choice(list(content))] = chance.choice(_ODD)
            changed = json.dumps(content)
        (model / name).write_text(changed)
        try:
            _resolve(model, tmp_path / "prompts.jsonl")
        except UserError as error:
            refused += 1
            assert error.rule and error.hint
        finally:
            (model / name).write_text(original)
    assert refused > 3


def test_a_checkpoint_without_tokenizer_files_says_so(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(UserError, match="no tokenizer files"):
        _resolve(tmp_path / "model", tmp_path / "prompts.jsonl")


@pytest.mark.parametrize("path", ["x" * 300, "a\0b", "/etc/passwd", "Qwen/Qwen3-30B-A3B"])
def test_a_model_that_is_not_there_is_refused_with_a_way_out(path: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        _resolve(Path(path), tmp_path / "prompts.jsonl")
    assert ("hf download Qwen/Qwen3-30B-A3B" in caught.value.hint) == path.startswith("Qwen")
