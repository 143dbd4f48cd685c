"""One probe for each CPU patch of SGLang, run in a process of its own with some of the patches left out.

`python sglang_patch_probes.py "skipped names" probe...` prints one JSON object: probe -> "ok", or what went wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mslime.backends.cpu import sglang as platform


def host_alloc() -> None:
    import torch
    from sglang.srt.mem_cache.pool_host import common

    allocate = common.ALLOC_MEMORY_FUNCS["cpu"]
    tensor = allocate((4, 2), torch.int32, "cpu", True, common.HostTensorAllocator(), registration_granularity_bytes=8)
    assert tensor.shape == (4, 2) and tensor.dtype == torch.int32


def shared_expert_gate() -> None:
    import torch
    from sglang.kernels.ops.elementwise.elementwise import fused_gate_sigmoid_mul_add

    hidden, gate = torch.randn(3, 8), torch.randn(1, 8)
    shared, output = torch.randn(3, 8), torch.randn(3, 8)
    expected = output.double() + shared.double() / (1 + torch.exp(-(hidden.double() * gate.double()).sum(-1, True)))
    fused_gate_sigmoid_mul_add(hidden, gate, shared, output)
    torch.testing.assert_close(output.double(), expected, atol=1e-6, rtol=0)


def joint_norms() -> None:
    import torch
    from sglang.srt.models import minimax_m2

    q, k, q_weight, k_weight = torch.randn(3, 8), torch.randn(3, 4), torch.randn(8), torch.randn(4)
    sums = minimax_m2.rms_sumsq_serial(q, k)
    # As on one of two ranks whose other one adds the same sums.
    found = minimax_m2.rms_apply_serial(q, k, q_weight, k_weight, 2 * sums, 2, 1e-2)
    for out, x, weight in zip(found, (q, k), (q_weight, k_weight), strict=True):
        expected = x.double() / (x.double().square().mean(-1, True) + 1e-2).sqrt() * weight.double()
        torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=0)


def plain_rope() -> None:
    from sglang.srt.layers.rotary_embedding import factory

    seen: list[str] = []
    factory.get_rope = lambda *args: seen.append("plain")
    factory.get_rope_cpu = lambda *args: seen.append("deepseek_yarn")
    factory.get_rope_wrapper(16, 16, 64, 10000, device="cpu")
    factory.get_rope_wrapper(16, 16, 64, 10000, rope_scaling={"rope_type": "default"}, device="cpu")
    factory.get_rope_wrapper(16, 16, 64, 10000, rope_scaling={"rope_type": "deepseek_yarn"}, device="cpu")
    assert seen == ["plain", "plain", "deepseek_yarn"], seen


def absorbed_mla() -> None:
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    registry = handlers.AttentionBackendRegistry
    handler = registry.get_handler("torch_native")
    assert handler is not registry.get_handler("triton"), "it inherits the handler of triton"
    # A long prompt without a cached prefix: what the handler of triton would expand per head.
    mode = SimpleNamespace(
        is_extend_without_speculative=lambda: True,
        is_extend=lambda: True,
        is_target_verify=lambda: False,
        is_draft_extend_v2=lambda: False,
        is_decode=lambda: False,
    )
    batch = SimpleNamespace(forward_mode=mode, extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[4096])
    method = handler(SimpleNamespace(use_dsa=False, current_attention_backend="torch_native"), batch)
    assert method is handlers.AttnForwardMethod.MLA, method


def remote_experts() -> None:
    import torch
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native

    torch.manual_seed(0)
    layer = SimpleNamespace(num_experts=2, w13_weight=torch.randn(2, 12, 8), w2_weight=torch.randn(2, 8, 6))
    x, ids = torch.randn(5, 8), torch.tensor([[0, -1], [1, 0], [-1, -1], [1, -1], [0, 1]])
    weights = torch.rand(5, 2)

    class TopK(SimpleNamespace):
        def __iter__(self) -> Any:
            return iter((self.topk_weights, self.topk_ids, None))

    config = SimpleNamespace(activation="silu", gemm1_alpha=None, apply_router_weight_on_input=False)
    got = moe_forward_native(layer, x, TopK(topk_ids=ids, topk_weights=weights), config)
    expected = torch.zeros(5, 8, dtype=torch.float64)
    for token in range(5):
        for slot in range(2):
            expert = int(ids[token, slot])
            if expert >= 0:
                gate, up = (layer.w13_weight[expert].double() @ x[token].double()).chunk(2)
                inner = gate / (1 + torch.exp(-gate)) * up
                expected[token] += weights[token, slot].double() * (layer.w2_weight[expert].double() @ inner)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-4)


def deterministic_choices() -> None:
    from sglang.srt.arg_groups import choices

    assert "torch_native" in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    assert "torch_native" in choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND


def no_triton_matmuls() -> None:
    import torch
    from sglang.srt import batch_invariant_ops

    batch_invariant_ops.enable_batch_invariant_mode()
    a, b = torch.randn(4, 8), torch.randn(8, 3)
    torch.testing.assert_close(torch.mm(a, b).double(), a.double() @ b.double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.log_softmax(a, -1).exp().sum(-1), torch.ones(4))


def murmur_hash() -> None:
    import torch
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32

    seeds, positions, columns = [1, 2**40 + 3], [0, 17], [0, 5, 319]
    got = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    expected = [
        [_murmur3([s & 0xFFFFFFFF, s >> 32, p, c]) for c in columns] for s, p in zip(seeds, positions, strict=True)
    ]
    assert got.tolist() == expected, (got.tolist(), expected)


def _murmur3(words: list[int]) -> int:
    """MurmurHash3 (x86, 32 bit) of 32-bit words with seed 0, in plain integers."""
    h, limit = 0, 0xFFFFFFFF
    for word in words:
        k = word * 0xCC9E2D51 & limit
        k = (k << 15 | k >> 17) & limit
        h ^= k * 0x1B873593 & limit
        h = (h << 13 | h >> 19) & limit
        h = (h * 5 + 0xE6546B64) & limit
    h ^= 4 * len(words)
    h = (h ^ h >> 16) * 0x85EBCA6B & limit
    h = (h ^ h >> 13) * 0xC2B2AE35 & limit
    return h ^ h >> 16


def adapters_unpinned() -> None:
    from sglang.srt.lora import layers

    assert layers.torch.tensor([0, 3], pin_memory=True).tolist() == [0, 3]
    assert layers.torch.arange(3).pin_memory().tolist() == [0, 1, 2]


def adapter_batches_unpinned() -> None:
    from sglang.srt.lora.backend import torch_backend

    assert torch_backend.torch.zeros((2,), pin_memory=True).tolist() == [0, 0]
    assert torch_backend.torch.empty((2,), pin_memory=True).shape == (2,)


def merged_segments() -> None:
    """Ten requests of 60 tokens, six of one adapter and four of none."""
    import torch
    from sglang.srt.lora.backend import base_backend

    bounds, slots, ranks = torch.tensor([0, 360, 600]), torch.tensor([1, 0]), torch.tensor([0, 4], dtype=torch.int32)
    enabled, mapping = base_backend._compute_moe_lora_info(600, bounds, ranks, slots, None, None, 60)
    assert enabled.tolist() == [0, 1] and mapping.tolist() == [1] * 360 + [-1] * 240


def expert_adapters() -> None:
    """Experts with all factors of their own, and such that share those on the hidden state's side."""
    for shared in (False, True):
        _expert_adapters(shared)


def _expert_adapters(shared: bool) -> None:
    """Three tokens of two adapters and one of none, each on two of three experts."""
    import torch
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    torch.manual_seed(0)
    rank, hidden, inner, experts = 2, 8, 6, 3
    w13, w2 = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    up_a, up_b = torch.randn(2, experts, 2 * rank, hidden), torch.randn(2, experts, 2 * inner, rank)
    down_a, down_b = torch.randn(2, experts, rank, inner), torch.randn(2, experts, hidden, rank)
    if shared:
        up_a, down_b = up_a[:, :1], down_b[:, :1]
    x, ids = torch.randn(4, hidden), torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2]])
    weights, slots = torch.rand(4, 2), [0, 1, -1, 1]

    class Dispatcher:
        def dispatch(self, hidden_states: Any, topk_output: Any) -> Any:
            return SimpleNamespace(hidden_states=hidden_states, topk_output=topk_output)

        def combine(self, combine_input: Any) -> Any:
            return combine_input.hidden_states

    layer = SimpleNamespace(base_layer=SimpleNamespace(w13_weight=w13, w2_weight=w2, dispatcher=Dispatcher()))
    info = SimpleNamespace(
        max_lora_rank=rank, token_lora_mapping=torch.tensor(slots), has_active_lora=True, gate_up_lora_a_weights=up_a,
        gate_up_lora_b_weights=up_b, down_lora_a_weights=down_a, down_lora_b_weights=down_b,
        experts_shared_outer_loras=shared,
    )  # fmt: skip
    got = FusedMoEWithLoRA._forward_with_lora(layer, x, (weights, ids, None), info)
    expected = torch.zeros(4, hidden, dtype=torch.float64)
    up_a, down_b = up_a.expand(2, experts, -1, -1), down_b.expand(2, experts, -1, -1)
    for token, slot in enumerate(slots):
        for choice, e in enumerate(ids[token].tolist()):
            gate, up, down = w13[e][:inner].double(), w13[e][inner:].double(), w2[e].double()
            if slot >= 0:
                gate = gate + up_b[slot, e][:inner].double() @ up_a[slot, e][:rank].double()
                up = up + up_b[slot, e][inner:].double() @ up_a[slot, e][rank:].double()
                down = down + down_b[slot, e].double() @ down_a[slot, e].double()
            g = gate @ x[token].double()
            expected[token] += weights[token, choice] * (down @ (g / (1 + torch.exp(-g)) * (up @ x[token].double())))
    torch.testing.assert_close(got.double(), expected, atol=1e-3, rtol=1e-4)


def emulated_fp8() -> None:
    """A layer of FP8 blocks that the patched SGLang makes computes with what they stand for, in float64."""
    import torch
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod

    config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
    assert torch.float32 in config.get_supported_act_dtypes()
    method, random = Fp8LinearMethod(config), torch.Generator().manual_seed(0)
    weight = torch.randn(200, 300, generator=random).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=random) + 0.5
    layer = SimpleNamespace(weight=weight, weight_scale_inv=scales)
    method.process_weights_after_loading(layer)
    assert layer.weight is weight and layer.weight_scale_inv is scales, "the bits stay"
    x, bias = torch.randn(5, 300, generator=random), torch.randn(200, generator=random)
    expected = torch.empty(200, 300, dtype=torch.float64)
    for row in range(200):
        for column in range(300):
            expected[row, column] = float(weight[row, column].float()) * float(scales[row // 128, column // 128])
    torch.testing.assert_close(
        method.apply(layer, x, bias).double(), x.double() @ expected.T + bias.double(), atol=1e-3, rtol=1e-5
    )


def emulated_int4() -> None:
    """Experts of packed INT4 that the patched SGLang makes compute with what they stand for, in float64."""
    import torch
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16MoE

    method = CompressedTensorsWNA16MoE.__new__(CompressedTensorsWNA16MoE)
    method.num_bits, method.sym, method.strategy = 4, True, "group"
    random = torch.Generator().manual_seed(0)

    def made(out: int, into: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of three experts: packed, scales, and the weights in float64, number by number."""
        values = torch.randint(-8, 8, (3, out, into), generator=random)
        scales = torch.rand(3, into // 32, out, generator=random) + 0.5
        packed, weights = torch.zeros(3, into // 8, out, dtype=torch.int64), torch.empty(3, out, into).double()
        for column in range(into):
            packed[:, column // 8] |= (values[:, :, column] + 8) << (4 * (column % 8))
            weights[:, :, column] = values[:, :, column].double() * scales[:, column // 32].double()
        packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
        return packed, scales, weights / 50

    (w13, s13, up), (w2, s2, down) = made(128, 96), made(96, 64)
    layer = SimpleNamespace(
        num_experts=3, w13_weight_packed=w13, w2_weight_packed=w2, w13_weight_scale=s13 / 50, w2_weight_scale=s2 / 50
    )
    method.process_weights_after_loading(layer)  # pyright: ignore[reportArgumentType]
    assert layer.w13_weight_packed is w13 and layer.w2_weight_packed is w2, "the bits stay"
    method.create_moe_runner(layer, MoeRunnerConfig(activation="silu"))  # pyright: ignore[reportArgumentType]
    x = torch.randn(5, 96, generator=random)
    ids, shares = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]]), torch.rand(5, 2, generator=random)
    sent = SimpleNamespace(hidden_states=x, topk_output=StandardTopKOutput(shares, ids, x))
    got = method.apply_weights(layer, sent).hidden_states  # pyright: ignore[reportArgumentType]
    for token in range(5):
        expected = torch.zeros(96).double()
        for share, expert in zip(shares[token], ids[token], strict=True):
            gate, value = (up[expert] @ x[token].double()).chunk(2)
            expected += share.double() * (down[expert] @ (torch.nn.functional.silu(gate) * value))
        torch.testing.assert_close(got[token].double(), expected, atol=1e-3, rtol=1e-4)


def every_dtype_beside_int4() -> None:
    import torch
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    config = CompressedTensorsConfig.__new__(CompressedTensorsConfig)
    assert {torch.float32, torch.bfloat16} <= {*config.get_supported_act_dtypes()}


def plain_indices() -> None:
    sys.modules.setdefault("prometheus_client", SimpleNamespace(Counter=lambda *_: None))  # type: ignore[arg-type]
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    assert not MooncakeKVSender.supports_host_tensor_indices


def sgl_kernel() -> None:
    import sgl_kernel

    assert sgl_kernel.anything is not None


def torchvision() -> None:
    import torchvision.transforms
    from transformers.utils import import_utils

    assert torchvision.transforms is not None
    assert not import_utils.is_torchvision_available(), "transformers must not believe that it is installed"


def triton() -> None:
    import triton.language

    @triton.jit
    def kernel(block: triton.language.constexpr) -> int:
        return 3

    assert kernel(1) == 3 and triton.cdiv(7, 2) == 4


PROBES: dict[str, Callable[[], None]] = {
    probe.__name__: probe
    for probe in (
        sgl_kernel,
        torchvision,
        triton,
        host_alloc,
        shared_expert_gate,
        joint_norms,
        plain_rope,
        absorbed_mla,
        remote_experts,
        deterministic_choices,
        no_triton_matmuls,
        murmur_hash,
        adapters_unpinned,
        adapter_batches_unpinned,
        merged_segments,
        expert_adapters,
        emulated_fp8,
        emulated_int4,
        every_dtype_beside_int4,
        plain_indices,
    )
}


def main(skip: list[str], probes: list[str]) -> dict[str, str]:
    """Install the platform and run the probes, each reported on its own."""
    platform.install(skip)
    found: dict[str, str] = {}
    for name in probes:
        try:
            PROBES[name]()
            found[name] = "ok"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    print("\n" + json.dumps(main(sys.argv[1].split(), sys.argv[2:])))
