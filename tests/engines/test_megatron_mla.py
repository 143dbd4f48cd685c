"""Multi-latent attention on the CPU specs: the same output and gradients under TP (with SP) and CP, packed or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines.megatron_ranks import run_ranks

LENGTHS = (16, 8)
HEADS, HIDDEN = 2, 32
# Dimension over which tensor parallelism splits each weight; the others are whole on every rank.
SPLIT = {"linear_q_up_proj": 0, "linear_kv_up_proj": 0, "linear_proj": 1}


def attend(rank: int, world_size: int, init_method: str, tp: int, cp: int, packed: bool) -> dict[str, torch.Tensor]:
    """Outputs by token and weight gradients, as this rank has them."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from mslime.backends.megatron.model.chunks import block_spec
    from mslime.backends.megatron.step.batches import PADDING, RowLayout, SequenceSlicer

    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = MLATransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, q_lora_rank=12, kv_lora_rank=16, qk_head_dim=8,
        qk_pos_emb_head_dim=4, v_head_dim=6, multi_latent_attention=True, normalization="RMSNorm", rope_type="rope",
        rotary_scaling_factor=1.0, add_bias_linear=False, qk_layernorm=True, use_cpu_initialization=True,
        attention_dropout=0.0, hidden_dropout=0.0, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp, context_parallel_size=cp, sequence_parallel=tp > 1,
    )  # fmt: skip
    layers = block_spec(config, torch.device("cpu"), None).layer_specs
    assert layers is not None
    layer: Any = build_module(layers[0].submodules.self_attention, config=config, layer_number=1)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            dim = SPLIT.get(name.split(".")[0])
            shape = list(parameter.shape)
            if dim is not None:
                shape[dim] *= tp
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name)))) * 0.3
            parameter.copy_(whole if dim is None else whole.chunk(tp, dim)[tp_rank])
    hidden = torch.randn(sum(LENGTHS), HIDDEN, generator=torch.Generator().manual_seed(1))
    upstream = torch.randn(sum(LENGTHS), HIDDEN, generator=torch.Generator().manual_seed(2))
    spans = [(0, LENGTHS[0]), (LENGTHS[0], sum(LENGTHS))]
    rows = RowLayout(cp, parallel_state.get_context_parallel_rank(), tp, tp_rank)
    out = torch.zeros(sum(LENGTHS), HIDDEN)
    for group in [spans] if packed else [[span] for span in spans]:
        slicer = SequenceSlicer.build(group, rows)
        assert (slicer.rows != PADDING).all()
        cumulative = torch.tensor([0, *torch.tensor(slicer.padded_lengths).cumsum(0)], dtype=torch.int32)
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cumulative, cu_seqlens_kv=cumulative,
            max_seqlen_q=max(slicer.padded_lengths), max_seqlen_kv=max(slicer.padded_lengths),
        )  # fmt: skip
        index = torch.from_numpy(slicer.layer_rows)
        output = layer(hidden[index][:, None], None, packed_seq_params=params if packed else None)[0]
        out[index] = output.detach()[:, 0]
        (output[:, 0] * upstream[index]).sum().backward()
    found = {"output": out}
    dist.all_reduce(out)
    for name, parameter in layer.named_parameters():
        dim, gradient = SPLIT.get(name.split(".")[0]), parameter.grad
        dist.all_reduce(gradient, group=parallel_state.get_context_parallel_group())
        if dim is None:
            # Each rank saw its own rows: megatron-core sums gradients of weights marked sequence_parallel.
            assert tp == 1 or parameter.sequence_parallel, name
            dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        else:
            parts = [torch.empty_like(gradient) for _ in range(tp)]
            dist.all_gather(parts, gradient.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
            gradient = torch.cat(parts, dim)
        found[name] = gradient
    return found


@pytest.mark.parametrize(
    ("tp", "cp", "packed"), [(1, 1, True), (2, 1, True), (1, 2, True), (1, 2, False), (2, 2, True)]
)
def test_a_layout_gives_the_output_and_gradients_of_one_process(tp: int, cp: int, packed: bool) -> None:
    (expected,) = run_ranks(attend, 1, 1, 1, False)
    for found in run_ranks(attend, tp * cp, tp, cp, packed):
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=2e-5, msg=name)
