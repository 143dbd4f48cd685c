"""CPU core attention against a float64 softmax written out: packed and not, MLA's head sizes, windows, sinks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mslime.backends.cpu.megatron_patches import install

install()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from mslime.backends.cpu.megatron_layers import CpuCoreAttention, causal_attention  # noqa: E402


def by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> np.ndarray:
    """[s, heads, dv] float64, for [s, heads or groups, d] of one sequence."""
    query, key, value = (x.detach().double().numpy() for x in (q, k, v))
    repeats = query.shape[1] // key.shape[1]
    out = np.zeros((*query.shape[:2], value.shape[2]))
    offset = len(key) - len(query)
    for head in range(query.shape[1]):
        for row in range(len(query)):
            last = offset + row
            seen = slice(0 if window is None else max(last - window, 0), last + 1)
            scores = key[seen, head // repeats] @ query[row, head] * scale
            weights = np.exp(scores)
            total = weights.sum() + (0.0 if sinks is None else np.exp(float(sinks[head])))
            out[row, head] = weights @ value[seen, head // repeats] / total
    return out


def tensors(
    queries: int, keys: int, heads: int, groups: int, size: int, value_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(queries + 10 * keys)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return draw(queries, heads, size), draw(keys, groups, size), draw(keys, groups, value_size)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (3, 9), (1, 5), (130, 130)])
@pytest.mark.parametrize(("groups", "value_size"), [(4, 8), (2, 8), (1, 8), (4, 5)], ids=["mha", "gqa", "mqa", "mla"])
def test_each_query_attends_to_itself_and_everything_before(
    queries: int, keys: int, groups: int, value_size: int
) -> None:
    q, k, v = tensors(queries, keys, 4, groups, 8, value_size)
    out = causal_attention(q[:, None], k[:, None], v[:, None], scale=0.3)[:, 0]
    np.testing.assert_allclose(out.numpy(), by_hand(q, k, v, 0.3), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (7, 7), (3, 9), (1, 5), (70, 70)])
@pytest.mark.parametrize("window", [None, 0, 1, 4, 100])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["", "sinks"])
def test_windows_and_sinks_equal_the_softmax_written_out(
    queries: int, keys: int, window: int | None, with_sinks: bool
) -> None:
    q, k, v = tensors(queries, keys, 4, 2, 8, 8)
    sinks = torch.tensor([-2.0, 0.0, 0.5, 3.0]) if with_sinks else None
    out = causal_attention(q[:, None], k[:, None], v[:, None], 0.3, window=window, sinks=sinks)[:, 0]
    np.testing.assert_allclose(out.numpy(), by_hand(q, k, v, 0.3, window, sinks), rtol=0, atol=2e-6)


def test_a_sinks_gradient_is_the_finite_difference() -> None:
    q, k, v = (x.double()[:, None] for x in tensors(6, 6, 2, 1, 4, 4))
    sinks = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)

    def total(values: torch.Tensor) -> torch.Tensor:
        return causal_attention(q, k, v, None, window=3, sinks=values).square().sum()

    (gradient,) = torch.autograd.grad(total(sinks), sinks)
    step = 1e-2  # scores are float32
    for head in range(2):
        moved = [sinks.detach() + sign * step * torch.eye(2, dtype=torch.float64)[head] for sign in (1, -1)]
        difference = (total(moved[0]) - total(moved[1])) / (2 * step)
        assert abs(float(gradient[head] - difference)) < 1e-3


def attention(layer: int = 1, **fields: object) -> CpuCoreAttention:
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, **fields)  # type: ignore[arg-type]
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1, rank=lambda: 0), tp=SimpleNamespace(size=lambda: 1))
    return CpuCoreAttention(config, layer, AttnMaskType.causal, "self", pg_collection=groups)  # type: ignore[arg-type]


def test_layers_take_turns_in_seeing_a_window_and_their_sinks_have_megatron_cores_name() -> None:
    fields = {"window_size": (3, 0), "window_attn_skip_freq": [1, 0], "softmax_type": "learnable"}
    q, k, v = tensors(9, 9, 4, 2, 8, 8)
    for layer, window in ((1, 3), (2, None)):
        module = attention(layer, **fields)
        (sinks,) = dict(module.named_parameters()).items()
        assert sinks[0] == "softmax_offset"
        torch.nn.init.constant_(sinks[1], 0.4)
        out = module(q[:, None], k[:, None], v[:, None], None, AttnMaskType.causal)[:, 0]
        expected = by_hand(q, k, v, 8**-0.5, window, sinks[1]).reshape(9, -1)
        np.testing.assert_allclose(out.detach().numpy(), expected, rtol=0, atol=2e-6)


def packed_params(lengths: list[int]) -> PackedSeqParams:
    cumulative = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cumulative, cu_seqlens_kv=cumulative)


def test_packed_sequences_do_not_see_each_other_and_gradients_stay_inside() -> None:
    lengths = [5, 1, 9]
    q, k, v = (x.requires_grad_() for x in tensors(15, 15, 4, 2, 8, 8))
    out = attention()(q, k, v, None, packed_seq_params=packed_params(lengths))
    assert out.shape == (15, 32)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        expected = by_hand(q[rows], k[rows], v[rows], 8**-0.5).reshape(length, -1)
        np.testing.assert_allclose(out[rows].detach().numpy(), expected, rtol=0, atol=2e-6)
        start += length
    out[5].sum().backward()
    for x in (q, k, v):
        touched = x.grad.abs().sum((1, 2)) > 0  # type: ignore[union-attr]
        assert not touched[:5].any() and not touched[6:].any()


@pytest.mark.parametrize(
    "fields", [{}, {"window_size": (3, 0), "softmax_type": "learnable"}], ids=["", "window, sinks"]
)
def test_short_sequences_that_share_calls_are_what_each_is_alone(fields: dict[str, object]) -> None:
    lengths = [5, 1, 40, 16, 9, 17, 33, 256, 3, 16]
    module = attention(**fields)
    x = [t.requires_grad_() for t in tensors(sum(lengths), sum(lengths), 4, 2, 8, 5)]
    upstream = torch.randn(sum(lengths), 4 * 5)
    together = module(*x, None, packed_seq_params=packed_params(lengths))
    of_together = torch.autograd.grad(together, x, upstream)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        own = [t[rows].detach().requires_grad_() for t in x]
        alone = module(*own, None, packed_seq_params=packed_params([length]))
        np.testing.assert_allclose(together[rows].detach(), alone.detach(), rtol=0, atol=2e-6)
        for mine, theirs in zip(torch.autograd.grad(alone, own, upstream[rows]), of_together, strict=True):
            np.testing.assert_allclose(theirs[rows], mine, rtol=0, atol=3e-6)
        start += length


def test_one_call_is_made_for_all_sequences_of_about_the_same_length(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def counted(query: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        calls.append(query.shape)
        return real(query, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    lengths = [30, 17, 32, 20, 5, 16]
    q, k, v = tensors(sum(lengths), sum(lengths), 4, 2, 8, 8)
    attention()(q, k, v, None, packed_seq_params=packed_params(lengths))
    assert calls == [(2, 4, 16, 8), (4, 4, 32, 8)]
    calls.clear()
    attention()(q, k, v, None, packed_seq_params=packed_params([sum(lengths)]))
    assert calls == [(1, 4, sum(lengths), 8)]


def test_memory_does_not_grow_with_the_square_of_the_packed_batch() -> None:
    """64 sequences of 64 tokens: one mask over all of them would have 16.8 million entries."""
    q, k, v = tensors(4096, 4096, 4, 2, 8, 8)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    with Watch():
        attention()(q, k, v, None, packed_seq_params=packed_params([64] * 64))
    assert largest <= q.numel(), largest


def test_masks_are_refused() -> None:
    q, k, v = (x[:, None] for x in tensors(4, 4, 4, 2, 8, 8))
    with pytest.raises(AssertionError, match="causal mask"):
        attention()(q, k, v, torch.zeros(1, 1, 4, 4, dtype=torch.bool))
    with pytest.raises(AssertionError):
        attention()(q, k, v, None, AttnMaskType.no_mask)
