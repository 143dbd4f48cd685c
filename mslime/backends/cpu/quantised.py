"""FP8 and INT4 layers on CPU: SGLang's server holds them as a GPU would, and the arithmetic is emulated.

SGLang's layers need kernels of a GPU, or of a CPU with AMX. Here the weights and their scales stay in memory as
they were loaded, bit for bit, so that loading, weight syncs and their comparison are the real ones; each layer computes
with what they stand for, in the dtype of its input. Activations are not quantised, which kernels on a GPU do.
"""

from __future__ import annotations

from types import SimpleNamespace
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
    """Kernels want 16 bits; a product in plain torch takes float32 as well, which the CPU platform serves."""
    import torch

    return [torch.bfloat16, torch.half, torch.float32]


def _remember_config(self: Any, quant_config: Any) -> None:
    """In place of SGLang's, which looks for a kernel."""
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
    """Tokens through experts of plain weights."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    plain = SimpleNamespace(num_experts=layer.num_experts, w13_weight=w13, w2_weight=w2)
    output = moe_forward_native(plain, sent.hidden_states, sent.topk_output, runner_config)  # pyright: ignore[reportArgumentType]
    return StandardCombineInput(hidden_states=output)


def dequantised(weight: Any, scales: Any, block: Any, dtype: Any) -> Any:
    """What FP8 weights [..., out, in] stand for, by their scales [..., ceil(out / block), ceil(in / block)]."""
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
    """In place of SGLang's, which looks for a kernel."""
    self.moe_runner_config = moe_runner_config


def _apply_packed_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    dtype = dispatch_output.hidden_states.dtype
    w13 = unpacked(layer.w13_weight_packed, layer.w13_weight_scale, dtype)
    w2 = unpacked(layer.w2_weight_packed, layer.w2_weight_scale, dtype)
    return _through(w13, w2, layer, dispatch_output, self.moe_runner_config)


def unpacked(packed: Any, scales: Any, dtype: Any) -> Any:
    """What INT4 weights stand for: [experts, out, in].

    Args:
        packed: [experts, in / 8, out] int32, eight numbers of 4 bits in a word, the first in the lowest bits, plus 8.
        scales: [experts, in / group, out].
    """
    import torch

    words = packed.transpose(1, 2).unsqueeze(-1)
    values = ((words >> torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)) & 15).flatten(2) - 8
    group = values.shape[2] // scales.shape[1]
    return (values.float() * scales.float().transpose(1, 2).repeat_interleave(group, 2)).to(dtype)
