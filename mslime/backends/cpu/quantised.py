"""FP8 experts and projections on CPU: SGLang's server holds them as a GPU would, and the arithmetic is emulated.

SGLang's FP8 layers need kernels of a GPU, or of a CPU with AMX. Here the weights and their scales stay in memory as
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
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x, block = dispatch_output.hidden_states, self.weight_block_size
    plain = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=dequantised(layer.w13_weight, layer.w13_weight_scale_inv, block, x.dtype),
        w2_weight=dequantised(layer.w2_weight, layer.w2_weight_scale_inv, block, x.dtype),
    )
    output = moe_forward_native(plain, x, dispatch_output.topk_output, self.moe_runner_config)  # pyright: ignore[reportArgumentType]
    return StandardCombineInput(hidden_states=output)


def dequantised(weight: Any, scales: Any, block: Any, dtype: Any) -> Any:
    """What FP8 weights [..., out, in] stand for, by their scales [..., ceil(out / block), ceil(in / block)]."""
    rows, columns = weight.shape[-2:]
    wide = scales.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    return (weight.float() * wide).to(dtype)
