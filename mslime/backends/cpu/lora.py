"""Adapters in SGLang 0.5.23 on a CPU: what its `torch_native` backend still lacks there. Patches of `cpu.sglang`."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def unpinned(module: Any) -> None:
    """Let a module of SGLang make its small tensors in ordinary memory: pinned memory needs an accelerator."""
    module.torch = _Unpinned(module.torch)


class _Unpinned(ModuleType):
    """torch, whose tensors are asked for in pinned memory and lie in ordinary memory."""

    def __init__(self, torch: ModuleType) -> None:
        super().__init__("torch")
        self._torch = torch
        torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def tensor(self, *args: Any, pin_memory: bool = False, **options: Any) -> Any:
        """As torch's."""
        return self._torch.tensor(*args, **options)

    def zeros(self, *args: Any, pin_memory: bool = False, **options: Any) -> Any:
        """As torch's."""
        return self._torch.zeros(*args, **options)

    def empty(self, *args: Any, pin_memory: bool = False, **options: Any) -> Any:
        """As torch's."""
        return self._torch.empty(*args, **options)


def merged_segments(module: Any) -> None:
    """Let neighbouring requests of one adapter be one segment that is longer than each of them, as the CPU backend
    makes them: a check that is for the grid of a GPU kernel ends the server there."""
    original = module._compute_token_lora_mapping

    def compute(
        num_tokens: int, indptr: Any, ranks: Any, indices: Any, mapping: Any, max_len: int, **options: Any
    ) -> Any:
        return original(num_tokens, indptr, ranks, indices, mapping, max(max_len, num_tokens), **options)

    module._compute_token_lora_mapping = compute


def expert_adapters(module: Any) -> None:
    """Experts with adapters expert by expert: SGLang has them for GPU kernels alone."""
    module.FusedMoEWithLoRA._forward_with_lora = _forward_with_lora


def _forward_with_lora(self: Any, hidden_states: Any, topk_output: Any, lora_info: Any, **_: Any) -> Any:
    """[tokens, hidden] -> the same: what each token's experts say of it, with the adapter of its request.

    Factors lie as SGLang keeps them: gate and up of A one below the other, B of gate above B of up, alpha / rank in B;
    where experts share the outer factors, A of gate and up and B of down, there is one of them for all.
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
