"""Rotary embeddings of packed sequences against megatron-core's, a sequence at a time: equal to the bit."""

from __future__ import annotations

import gc
import importlib.util
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mslime.backends.cpu.megatron_patches import install

install()

from megatron.core.models.common.embeddings import rope_utils  # noqa: E402
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # noqa: E402
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402

from mslime.backends.megatron.model import chunks, rotary  # noqa: E402
from mslime.backends.megatron.model.rotary import packed_positions, rotate_packed, table_length  # noqa: E402
from mslime.backends.megatron.step.batches import zigzag_positions  # noqa: E402
from tests.unit.test_log_probs import NothingIsRead  # noqa: E402

LENGTHS = [8, 16, 8, 32]


@pytest.fixture(scope="module")
def megatron() -> ModuleType:
    """megatron-core's functions as they are, whatever this process has put in their place."""
    spec = importlib.util.find_spec(rope_utils.__name__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def group(size: int = 1, rank: int = 0) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def angles(positions: int, features: int) -> torch.Tensor:
    return torch.outer(torch.arange(positions).float(), 10.0 ** -torch.linspace(0, 3, features))[:, None, None]


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_positions_are_those_of_the_rows_that_a_rank_holds(cp: int) -> None:
    for rank in range(cp):
        expected = np.concatenate([zigzag_positions(length, cp, rank) for length in LENGTHS])
        found = packed_positions(cumulative(LENGTHS), len(expected), cp, rank)
        assert found.dtype == torch.int64 and found.tolist() == expected.tolist()


@pytest.mark.parametrize("options", [
    {}, {"rotary_interleaved": True}, {"multi_latent_attention": True}, {"mscale": 1.3},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("features", [16, 6], ids=["whole", "partial"])
@pytest.mark.parametrize(("cp", "rank"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_megatron_cores_to_the_bit(
    megatron: ModuleType, dtype: torch.dtype, cp: int, rank: int, features: int, options: dict[str, Any]
) -> None:
    rows = sum(LENGTHS) // cp
    x = torch.randn(rows, 3, 16).to(dtype).requires_grad_()
    given = (cumulative(LENGTHS), angles(32, features))
    mine = rotate_packed(x, *given, cp_group=group(cp, rank), **options)
    theirs = megatron._apply_rotary_pos_emb_thd(x, *given, cp_group=group(cp, rank), **options)
    assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    upstream = torch.randn_like(mine)
    assert torch.equal(*(torch.autograd.grad(y, x, upstream)[0] for y in (mine, theirs)))


def test_nothing_waits_for_the_device(megatron: ModuleType) -> None:
    """Rehearsed without one."""
    x, given = torch.randn(64, 3, 16), (cumulative(LENGTHS), angles(32, 16))
    with NothingIsRead():
        rotate_packed(x, *given, cp_group=group())
        with pytest.raises(AssertionError, match="waits"):
            megatron._apply_rotary_pos_emb_thd(x, *given, cp_group=group())


def test_layers_of_a_micro_batch_share_what_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = rotary.packed_positions

    def counted(lengths: torch.Tensor, rows: int, *place: int) -> torch.Tensor:
        made.append(rows)
        return real(lengths, rows, *place)

    monkeypatch.setattr(rotary, "packed_positions", counted)
    lengths, freqs, x = cumulative(LENGTHS), angles(32, 16), torch.randn(64, 3, 16)
    for _ in range(3):
        rotate_packed(x, lengths, freqs, cp_group=group())
    assert made == [64]
    rotate_packed(x, lengths, angles(32, 16), cp_group=group())  # a layer with angles of its own
    rotate_packed(x, lengths, freqs, cp_group=group())
    others = cumulative([32, 32])
    rotate_packed(x, others, freqs, cp_group=group())
    rotate_packed(x.bfloat16(), others, freqs, cp_group=group())
    assert made == [64] * 5
    rotate_packed(x, lengths, freqs, cp_group=group())
    del lengths
    gc.collect()
    assert not rotary._newest


def test_attention_layers_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", None)
    monkeypatch.setattr(RotaryEmbedding, "get_rotary_seq_len", None)
    rotary.use_packed_rotary()
    assert RotaryEmbedding.get_rotary_seq_len is YarnRotaryEmbedding.get_rotary_seq_len is table_length
    config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False)
    x, given = torch.randn(64, 3, 16), (cumulative(LENGTHS), angles(32, 16))
    found = rope_utils.apply_rotary_pos_emb(x, given[1], config, given[0], cp_group=group())  # type: ignore[arg-type]
    assert torch.equal(found, rotate_packed(x, *given, cp_group=group()))


def test_a_model_is_built_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Installed(Exception): ...

    def fake_install() -> None:
        raise Installed

    monkeypatch.setattr(chunks, "block_spec", lambda *_: None)
    monkeypatch.setattr(chunks, "use_packed_rotary", fake_install)
    nothing: Any = None
    with pytest.raises(Installed):
        chunks.build_chunks(SimpleNamespace(virtual_pipeline_model_parallel_size=None), nothing, nothing)  # type: ignore[arg-type]


def test_tables_of_angles_have_few_lengths_and_the_same_angles() -> None:
    """megatron-core keeps 32 of them on the device."""
    made = RotaryEmbedding(8, rotary_percent=1.0, use_cpu_initialization=True, cp_group=group())
    config = SimpleNamespace(sequence_parallel=False, context_parallel_size=1)

    def length(longest: int) -> int:
        lengths = cumulative([longest])
        return table_length(
            made, None, None, None, config,
            PackedSeqParams(cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=longest, max_seqlen_kv=longest),
        )  # fmt: skip

    found = {longest: length(longest) for longest in range(1, 4097)}
    assert all(longest <= table < 2 * longest for longest, table in found.items()) and len(set(found.values())) == 13
    assert torch.equal(made(found[100], packed_seq=True)[:100], made(100, packed_seq=True))
    assert table_length(made, None, None, torch.zeros(100, 1), config) == 100, "one sequence without padding"
