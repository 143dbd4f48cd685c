"""The gated delta-net layer against its recurrence in float64 NumPy, token by token; packed and not; its norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from mslime.backends.cpu.megatron_patches import install

install()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.ssm import gated_delta_net  # noqa: E402
from megatron.core.ssm.gated_delta_net import GatedDeltaNetSubmodules  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from mslime.backends.cpu.megatron_layers import ZeroCentredRMSNorm  # noqa: E402
from mslime.backends.megatron.model.chunks import fake_process_group  # noqa: E402
from mslime.backends.megatron.model.gated_delta import HeadNorm, HostPackedSeqParams, PackedGatedDeltaNet  # noqa: E402
from mslime.config.schema import RunConfig  # noqa: E402
from tests.fixtures.delta_rule import chunk_gated_delta_rule  # noqa: E402

HIDDEN, KEYS, VALUES, KEY_DIM, VALUE_DIM, WIDTH = 16, 2, 4, 8, 6, 4
Array = NDArray[np.float64]


@pytest.fixture(scope="module")
def layer() -> Iterator[PackedGatedDeltaNet]:
    layout = RunConfig.model_validate(
        {"model": {"path": "unused"}, "data": {"prompts": ["unused.jsonl"]}, "cluster": {"device": "cpu"}}
    ).layout
    with fake_process_group(layout):
        config = TransformerConfig(
            num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, activation_func=F.silu, normalization="RMSNorm",
            experimental_attention_variant="gated_delta_net", linear_attention_freq=[1], linear_conv_kernel_dim=WIDTH,
            linear_key_head_dim=KEY_DIM, linear_value_head_dim=VALUE_DIM, linear_num_key_heads=KEYS,
            linear_num_value_heads=VALUES, use_cpu_initialization=True, layernorm_epsilon=1e-6,
        )  # fmt: skip
        parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=HeadNorm, out_proj=RowParallelLinear)
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        built = PackedGatedDeltaNet(config=config, submodules=parts, layer_number=1, pg_collection=groups)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in built.named_parameters():
                size = 0.5 if parameter.ndim > 1 else 0.3
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * size + (name == "out_norm.weight"))
        yield built


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def by_hand(layer: PackedGatedDeltaNet, x: Array) -> Array:
    """[s, hidden] of one sequence -> the same, by the definition (https://arxiv.org/abs/2412.06464, equation 10)."""
    p = {name: tensor.detach().double().numpy() for name, tensor in layer.named_parameters()}
    k, v = KEYS * KEY_DIM, VALUES * VALUE_DIM
    mixed, gate, beta, alpha = np.split(x @ p["in_proj.weight"].T, np.cumsum([2 * k + v, v, VALUES]), axis=1)
    padded = np.concatenate([np.zeros((WIDTH - 1, 2 * k + v)), mixed])
    kernel = p["conv1d.weight"][:, 0]
    mixed = silu(np.stack([(padded[t : t + WIDTH] * kernel.T).sum(0) for t in range(len(x))]))
    query, key, value = np.split(mixed, [k, 2 * k], axis=1)
    decay = np.exp(-np.exp(p["A_log"]) * np.log1p(np.exp(alpha + p["dt_bias"])))
    beta = 1 / (1 + np.exp(-beta))
    out = np.zeros((len(x), VALUES, VALUE_DIM))
    for head in range(VALUES):
        of_key = slice(head // (VALUES // KEYS) * KEY_DIM, (head // (VALUES // KEYS) + 1) * KEY_DIM)
        of_value = slice(head * VALUE_DIM, (head + 1) * VALUE_DIM)
        state = np.zeros((KEY_DIM, VALUE_DIM))
        for t in range(len(x)):
            q, kt = (y / np.sqrt((y**2).sum() + 1e-6) for y in (query[t, of_key], key[t, of_key]))
            state = state * decay[t, head]
            state = state + np.outer(kt, beta[t, head] * (value[t, of_value] - kt @ state))
            out[t, head] = q @ state / np.sqrt(KEY_DIM)
    normal = out / np.sqrt((out**2).mean(-1, keepdims=True) + 1e-6) * p["out_norm.weight"]
    return (normal.reshape(len(x), v) * silu(gate)) @ p["out_proj.weight"].T


def rows(n: int) -> torch.Tensor:
    return torch.randn((n, HIDDEN), generator=torch.Generator().manual_seed(n))


def packed(lengths: list[int]) -> PackedSeqParams:
    cumulative = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cumulative, cu_seqlens_kv=cumulative)


@pytest.mark.parametrize("length", [1, 3, 64, 150])
def test_one_sequence_follows_the_recurrence(layer: PackedGatedDeltaNet, length: int) -> None:
    x = rows(length)
    out, bias = layer(x[:, None], None)
    assert bias is None
    np.testing.assert_allclose(out[:, 0].detach().numpy(), by_hand(layer, x.double().numpy()), rtol=1e-5, atol=3e-5)


def test_packed_sequences_begin_with_empty_states_and_keep_gradients_to_themselves(layer: PackedGatedDeltaNet) -> None:
    lengths = [5, 1, 70, 2]
    x = rows(sum(lengths)).requires_grad_()
    out = layer(x[:, None], None, packed_seq_params=packed(lengths), rotary_pos_emb=torch.ones(3))[0][:, 0]
    start = 0
    for length in lengths:
        expected = by_hand(layer, x[start : start + length].detach().double().numpy())
        np.testing.assert_allclose(out[start : start + length].detach().numpy(), expected, rtol=1e-5, atol=3e-5)
        start += length
    out[5].sum().backward()
    touched = x.grad.abs().sum(1) > 0  # type: ignore[union-attr]
    assert touched[5] and int(touched.sum()) == 1


@pytest.mark.parametrize("kernel", ["in torch", "of a GPU"])
def test_the_host_knows_lengths_that_it_wrote_down_and_asks_no_gpu(
    layer: PackedGatedDeltaNet, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is the same for every token is done once, however many sequences there are: on a GPU all of it."""
    lengths, counts, calls, derived = [5, 1, 70, 2], list[int](), list[int](), list[Any]()
    x, asked = rows(sum(lengths))[:, None].requires_grad_(), packed(lengths)
    expected = layer(x, None, packed_seq_params=asked)[0]
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    if kernel == "of a GPU":

        def rule(*columns: Any, **options: Any) -> Any:
            calls.append(len(options["cu_seqlens"]) - 1)
            with torch.utils._python_dispatch._disable_current_modes():
                return chunk_gated_delta_rule(*columns, **options)

        monkeypatch.setattr(gated_delta_net, "chunk_gated_delta_rule", rule)

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is not torch.ops.aten._local_scalar_dense.default, "a question to the GPU"
            once = (
                torch.ops.aten.softplus, torch.ops.aten.rsqrt, torch.ops.aten.convolution, torch.ops.aten.index_copy,
            )  # fmt: skip
            counts[-1] += func in [op.default for op in once]
            derived.extend([func] if func is torch.ops.aten.repeat_interleave.Tensor else [])
            return func(*args, **(kwargs or {}))

    for some in ([78], lengths):
        known = HostPackedSeqParams(qkv_format="thd", cu_seqlens_q=packed(some).cu_seqlens_q, lengths=tuple(some))
        counts.append(0)
        with Watching():
            found = layer(x, None, packed_seq_params=known)[0]
    assert counts[0] == counts[1] > 0
    before = len(derived)
    with Watching():
        layer(x, None, packed_seq_params=known)
    assert 0 < before == len(derived), "a second layer takes what the first has derived from the lengths"
    assert calls == ([1, 4, 4] if kernel == "of a GPU" else [])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), x)[0], gradient)


def test_padding_at_the_end_changes_nothing_before_it(layer: PackedGatedDeltaNet) -> None:
    x = rows(40)
    alone = layer(x[:30, None], None)[0]
    padded = layer(x[:, None], None)[0][:30]
    torch.testing.assert_close(padded, alone, rtol=2e-6, atol=1e-6)


def test_the_layers_own_scales_stay_in_float32_and_are_summed_over_sequence_parallel_ranks() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, bf16=True)
    norm = HeadNorm(config, 8, 1e-6)
    assert norm.weight.dtype == torch.float32 and norm.weight.sequence_parallel is False  # type: ignore[attr-defined]
    x = torch.randn(3, 8)
    expected = x / np.sqrt((x.double().numpy() ** 2).mean(-1, keepdims=True) + 1e-6)
    torch.testing.assert_close(norm(x), expected.float())


def test_the_zero_centred_norm_scales_by_one_plus_its_weight() -> None:
    norm = ZeroCentredRMSNorm(8, 1e-6, torch.float32)
    torch.nn.init.uniform_(norm.weight, -0.5, 0.5)
    x = torch.randn(3, 8)
    wide = x.double().numpy()
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * (1 + norm.weight.detach().double().numpy())
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=0, atol=1e-6)
