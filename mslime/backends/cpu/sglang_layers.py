"""Layers of SGLang 0.5.23 on a CPU: FP8 and INT4, whose arithmetic is emulated; adapters; pairs of servers.

SGLang's layers need kernels of a GPU, or of a CPU with AMX. Here the weights and their scales stay in memory as they
were loaded, bit for bit, so that loading, weight syncs and their comparison are real. Each layer computes with the
dequantised weights, in the dtype of its input. Activations are not quantised, unlike in GPU kernels.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any


def emulated_fp8(module: Any) -> None:
    """Args: module: `sglang.srt.layers.quantization.fp8`."""
    linear, experts = module.Fp8LinearMethod, module.Fp8MoEMethod
    linear.__init__ = _remember_config
    for method in (linear, experts):
        method.process_weights_after_loading = _stay_as_loaded
    linear.apply, experts.apply = _apply_linear, _apply_experts
    module.Fp8Config.get_supported_act_dtypes = classmethod(_every_dtype)


def _every_dtype(cls: type) -> list[Any]:
    """Kernels need 16 bits; plain torch products also take float32, which the CPU platform serves."""
    import torch

    return [torch.bfloat16, torch.half, torch.float32]


def _remember_config(self: Any, quant_config: Any) -> None:
    """Replaces SGLang's method, which looks for a kernel."""
    self.quant_config, self.use_mxfp8 = quant_config, False
    self.weight_block_size = quant_config.weight_block_size
    self.block_quant = quant_config.weight_block_size is not None
    self.is_checkpoint_fp8_serialized = quant_config.is_checkpoint_fp8_serialized


def _stay_as_loaded(self: Any, layer: Any) -> None:
    if not self.block_quant or not self.quant_config.is_checkpoint_fp8_serialized:
        raise NotImplementedError("the CPU platform emulates FP8 checkpoints with a scale for each block only")


def _apply_linear(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    import torch

    weight = dequantised(layer.weight, layer.weight_scale_inv, self.weight_block_size, x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def _apply_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    dtype, block = dispatch_output.hidden_states.dtype, self.weight_block_size
    w13 = dequantised(layer.w13_weight, layer.w13_weight_scale_inv, block, dtype)
    w2 = dequantised(layer.w2_weight, layer.w2_weight_scale_inv, block, dtype)
    return _through(w13, w2, layer, dispatch_output, self.moe_runner_config)


def _through(w13: Any, w2: Any, layer: Any, sent: Any, runner_config: Any) -> Any:
    """Pass tokens through experts with plain weights."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    plain = SimpleNamespace(num_experts=layer.num_experts, w13_weight=w13, w2_weight=w2)
    output = moe_forward_native(plain, sent.hidden_states, sent.topk_output, runner_config)  # pyright: ignore[reportArgumentType]
    return StandardCombineInput(hidden_states=output)


def dequantised(weight: Any, scales: Any, block: Any, dtype: Any) -> Any:
    """Dequantise FP8 weights [..., out, in] by their scales [..., ceil(out / block), ceil(in / block)]."""
    rows, columns = weight.shape[-2:]
    wide = scales.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    return (weight.float() * wide).to(dtype)


def emulated_int4(module: Any) -> None:
    """Args: module: `...compressed_tensors.schemes.compressed_tensors_wNa16_moe`."""
    experts = module.CompressedTensorsWNA16MoE
    experts.process_weights_after_loading = _stay_packed
    experts.create_moe_runner = _remember_runner_config
    experts.apply_weights = _apply_packed_experts


def every_dtype_beside_int4(module: Any) -> None:
    """Args: module: `sglang.srt.layers.quantization.compressed_tensors.compressed_tensors`."""
    module.CompressedTensorsConfig.get_supported_act_dtypes = classmethod(_every_dtype)


def _stay_packed(self: Any, layer: Any) -> None:
    if self.num_bits != 4 or not self.sym or self.strategy != "group":
        raise NotImplementedError("the CPU platform emulates symmetric INT4 experts with a scale for each group only")


def _remember_runner_config(self: Any, layer: Any, moe_runner_config: Any) -> None:
    """Replaces SGLang's method, which looks for a kernel."""
    self.moe_runner_config = moe_runner_config


def _apply_packed_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    dtype = dispatch_output.hidden_states.dtype
    w13 = unpacked(layer.w13_weight_packed, layer.w13_weight_scale, dtype)
    w2 = unpacked(layer.w2_weight_packed, layer.w2_weight_scale, dtype)
    return _through(w13, w2, layer, dispatch_output, self.moe_runner_config)


def unpacked(packed: Any, scales: Any, dtype: Any) -> Any:
    """Dequantise INT4 weights: [experts, out, in].

    Args:
        packed: [experts, in / 8, out] int32, eight numbers of 4 bits in a word, each plus 8, the first in the lowest
            bits.
        scales: [experts, in / group, out].
    """
    import torch

    words = packed.transpose(1, 2).unsqueeze(-1)
    values = ((words >> torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)) & 15).flatten(2) - 8
    group = values.shape[2] // scales.shape[1]
    return (values.float() * scales.float().transpose(1, 2).repeat_interleave(group, 2)).to(dtype)


# Adapters in SGLang 0.5.23 on a CPU: features that its `torch_native` backend lacks there. Patches of `cpu.sglang`.


def unpinned(module: Any) -> None:
    """Make a module of SGLang allocate its small tensors in ordinary memory: pinned memory needs an accelerator."""
    module.torch = _Unpinned(module.torch)


class _Unpinned(ModuleType):
    """torch, with requests for pinned memory served from ordinary memory."""

    def __init__(self, torch: ModuleType) -> None:
        super().__init__("torch")
        self._torch = torch
        torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **options: Any) -> Any:
        return self._torch.tensor(*args, **options)

    def zeros(self, *args: Any, pin_memory: bool = False, **options: Any) -> Any:
        return self._torch.zeros(*args, **options)

    def empty(self, *args: Any, pin_memory: bool = False, **options: Any) -> Any:
        return self._torch.empty(*args, **options)


def merged_segments(module: Any) -> None:
    """Allow a merged segment longer than each of its requests, which the CPU backend makes for neighbours of one
    adapter: a check for the grid of a GPU kernel would end the server."""
    original = module._compute_token_lora_mapping

    def compute(
        num_tokens: int, indptr: Any, ranks: Any, indices: Any, mapping: Any, max_len: int, **options: Any
    ) -> Any:
        return original(num_tokens, indptr, ranks, indices, mapping, max(max_len, num_tokens), **options)

    module._compute_token_lora_mapping = compute


def expert_adapters(module: Any) -> None:
    """Apply adapters of experts one expert at a time: SGLang supports them only in GPU kernels."""
    module.FusedMoEWithLoRA._forward_with_lora = _forward_with_lora


def _forward_with_lora(self: Any, hidden_states: Any, topk_output: Any, lora_info: Any, **_: Any) -> Any:
    """[tokens, hidden] -> [tokens, hidden]: outputs of each token's experts, with the adapter of its request.

    Factors are in SGLang's layout: A of gate above A of up, B of gate above B of up, alpha / rank in B. If experts
    share the outer factors (A of gate and up, B of down), there is one of each for all.
    """
    import torch
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from torch.nn import functional

    base, rank, shared = self.base_layer, lora_info.max_lora_rank, lora_info.experts_shared_outer_loras
    dispatched = base.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
    x, (weights, ids, _) = dispatched.hidden_states, dispatched.topk_output
    slots = lora_info.token_lora_mapping
    output = torch.zeros(x.shape, dtype=weights.dtype)
    for expert in range(base.w13_weight.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if not token.numel():
            continue
        rows, slot_of, outer = x[token], slots[token], 0 if shared else expert
        used = [int(slot) for slot in slot_of.unique() if slot >= 0] if lora_info.has_active_lora else []
        gate_up = functional.linear(rows, base.w13_weight[expert])
        for slot in used:
            mine, b = slot_of == slot, lora_info.gate_up_lora_b_weights[slot, expert]
            h, half = rows[mine] @ lora_info.gate_up_lora_a_weights[slot, outer].T, b.shape[0] // 2
            gate_up[mine] += torch.cat([h[:, :rank] @ b[:half].T, h[:, rank:] @ b[half:].T], -1)
        gate, up = gate_up.chunk(2, -1)
        active = functional.silu(gate) * up
        down = functional.linear(active, base.w2_weight[expert])
        for slot in used:
            mine = slot_of == slot
            a, b = lora_info.down_lora_a_weights[slot, expert], lora_info.down_lora_b_weights[slot, outer]
            down[mine] += active[mine] @ a.T @ b.T
        output.index_add_(0, token, down.to(output.dtype) * weights[token, choice, None])
    return base.dispatcher.combine(combine_input=StandardCombineInput(hidden_states=output.to(x.dtype)))


# Pairs of SGLang servers (0.5.23) on a CPU: support that the prefill server lacks there. A patch of `cpu.sglang`.


def plain_indices(module: Any) -> None:
    """Keep page indices in ordinary memory: pinned memory, and a stream's event, need an accelerator."""
    module.MooncakeKVSender.supports_host_tensor_indices = False
