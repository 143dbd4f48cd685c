"""Checkpoints on disk: read by headers, written whole or not at all, damage named by file and tensor."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from mslime.config.errors import CheckpointError
from mslime.convert.hf import INDEX_NAME, HFCheckpoint, ShardWriter, atomic_directory, copy_side_files, write_index

TENSORS = {
    "a": torch.arange(12.0).view(3, 4),
    "b": torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "c": torch.arange(6.0).view(2, 3),
}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Three tensors over three shards with an index, written by our own writer."""
    target = tmp_path / "ckpt"
    with atomic_directory(target) as staging:
        writer = ShardWriter(staging, max_shard_bytes=30)
        for name, tensor in TENSORS.items():
            writer.add(name, tensor)
        write_index(staging, *writer.close())
    return target


def test_what_was_written_is_read_back_bit_for_bit(sharded: Path) -> None:
    checkpoint = HFCheckpoint(sharded)
    assert {info.file for info in checkpoint.info.values()} == {f"model-0-{i:05d}.safetensors" for i in range(3)}
    assert checkpoint.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    index = json.loads((sharded / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    assert {name: info.dtype for name, info in checkpoint.info.items()} == {"a": "F32", "b": "BF16", "c": "F32"}
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.tensor(name), tensor) and checkpoint.tensor(name).dtype == tensor.dtype


def test_a_view_reads_only_the_rows_it_is_asked_for(sharded: Path) -> None:
    view = HFCheckpoint(sharded).view("a")
    assert view.shape == (3, 4)
    assert torch.equal(view[1:2], TENSORS["a"][1:2]) and torch.equal(view[:, 2:], TENSORS["a"][:, 2:])


def test_few_files_are_open_at_once(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "many") as staging:
        writer = ShardWriter(staging, max_shard_bytes=1)
        for i in range(9):
            writer.add(str(i), torch.full((2,), float(i)))
        write_index(staging, *writer.close())
    checkpoint = HFCheckpoint(tmp_path / "many")
    for _ in range(2):
        for i in range(9):
            assert checkpoint.tensor(str(i))[0] == i
    assert cast("Any", checkpoint._open).cache_info().currsize == 4


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert HFCheckpoint(tmp_path).shapes.keys() == TENSORS.keys()


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        HFCheckpoint(tmp_path)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"


@pytest.mark.parametrize("damage", [
    lambda content: content[:4], lambda content: content[:20], lambda content: content[:-1], lambda _: LFS_POINTER,
    lambda _: (16).to_bytes(8, "little") + b"\xff" * 16,
], ids=["in the length", "in the header", "in the data", "a pointer of git-lfs", "no safetensors"])  # fmt: skip
def test_a_damaged_shard_is_named(sharded: Path, damage: Callable[[bytes], bytes]) -> None:
    shard = sharded / "model-0-00002.safetensors"
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(CheckpointError, match=r"model-0-00002\.safetensors"):
        HFCheckpoint(sharded)


def test_a_tensor_that_is_not_there_is_named(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match="zzz"):
        HFCheckpoint(sharded).view("zzz")


def test_a_write_that_fails_leaves_the_old_checkpoint_untouched(sharded: Path) -> None:
    before = {path.name: path.read_bytes() for path in sharded.iterdir()}
    with pytest.raises(RuntimeError, match="in the middle"), atomic_directory(sharded) as staging:
        ShardWriter(staging).add("a", TENSORS["c"])
        raise RuntimeError("in the middle")
    assert {path.name: path.read_bytes() for path in sharded.iterdir()} == before
    assert [path.name for path in sharded.parent.iterdir()] == ["ckpt"], "no staging directory is left"


def test_a_new_checkpoint_replaces_the_old_one_whole(sharded: Path) -> None:
    with atomic_directory(sharded) as staging:
        writer = ShardWriter(staging)
        writer.add("only", TENSORS["a"])
        write_index(staging, *writer.close())
    assert sorted(path.name for path in sharded.iterdir()) == ["model-0-00000.safetensors", INDEX_NAME]
    assert HFCheckpoint(sharded).info.keys() == {"only"}


@contextmanager
def full_disk() -> Iterator[None]:
    """No file may grow beyond 64 KiB: the kernel refuses the write as it does on a full disk.

    Also pytest's own log where it goes to a file, so the limit is lifted before the test ends.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_a_checkpoint_error_and_the_old_checkpoint_stays(sharded: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"model-0-00000.*could not be written(.|\n)*free disk space"),
        full_disk(),
        atomic_directory(sharded) as staging,
    ):
        writer = ShardWriter(staging)
        writer.add("large", torch.zeros(1 << 16))
        writer.close()
    assert HFCheckpoint(sharded).info.keys() == TENSORS.keys()
    assert [path.name for path in sharded.parent.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_a_tied_model_with_another_head_in_its_files_is_refused(tmp_path: Path, change: float) -> None:
    """transformers keeps both then; an equal head is only stored twice."""
    embedding = torch.randn(6, 4)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + change}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    if change:
        with pytest.raises(CheckpointError, match="lm_head.weight"):
            HFCheckpoint(tmp_path)
        (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    assert HFCheckpoint(tmp_path).shapes["lm_head.weight"] == (6, 4)


def test_chat_templates_a_vocabulary_and_the_licence_go_with_an_export_and_weights_do_not(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    target.mkdir()
    files = ["additional_chat_templates/tool_use.jinja", "words.tiktoken", "LICENSE", "tokenizer.json"]
    for name in [*files, "weights.safetensors", INDEX_NAME, "config.json"]:
        (source / name).write_text("{}")
    copy_side_files(source, target)
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert found == {*files, "config.json"}
