"""Experts with one activation for all of them against megatron-core's own, one after the other: equal to the bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mslime.backends.cpu.megatron_patches import install

install()

from megatron.core.transformer.mlp import MLPSubmodules  # noqa: E402
from megatron.core.transformer.moe.experts import SequentialMLP  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from mslime.backends.cpu.megatron_layers import CpuExperts  # noqa: E402


class PlainLinear(torch.nn.Linear):
    """megatron-core's linear layer as one rank without process groups has it: it returns its bias."""

    def __init__(self, size: int, out: int, *, bias: bool, **_: object) -> None:
        super().__init__(size, out, bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # type: ignore[override]
        return x @ self.weight.t(), self.bias


GROUP = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
PLAIN: dict[str, Any] = {"activation_func": torch.nn.functional.silu}
CLAMPED: dict[str, Any] = {
    "activation_func": torch.nn.functional.gelu, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0
}  # fmt: skip
BIASES: dict[str, Any] = {**PLAIN, "add_bias_linear": True}


def run(kind: type[SequentialMLP], fields: dict[str, Any]) -> list[torch.Tensor]:
    """Output and gradients of tokens, probabilities and parameters; one expert has no token."""
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, ffn_hidden_size=24, moe_ffn_hidden_size=24,
        num_moe_experts=4, gated_linear_unit=True, use_cpu_initialization=True, bias_activation_fusion=False,
        **{"add_bias_linear": False, **fields},
    )  # fmt: skip
    modules = MLPSubmodules(linear_fc1=PlainLinear, linear_fc2=PlainLinear)
    groups = SimpleNamespace(ep=GROUP, expt_tp=GROUP, expt_dp=GROUP)
    torch.manual_seed(0)
    experts = kind(4, config, modules, pg_collection=groups)  # type: ignore[arg-type]
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    tokens, probs = torch.randn(11, 16, requires_grad=True), torch.rand(11, requires_grad=True)
    out, bias = experts(tokens, torch.tensor([3, 0, 7, 1]), probs)
    assert bias is None
    wanted = [tokens, probs, *experts.parameters()]
    return [out, *torch.autograd.grad(out, wanted, torch.randn(11, 16), allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("fields", [PLAIN, CLAMPED, BIASES], ids=["swiglu", "clamped, with an offset", "biases"])
def test_output_and_gradients_are_those_of_one_expert_after_the_other(fields: dict[str, Any]) -> None:
    ours, theirs = run(CpuExperts, fields), run(SequentialMLP, fields)
    assert len(ours) == len(theirs) > 10
    for mine, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(mine, wanted)


def test_the_activation_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.Size] = []

    def silu(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        return torch.nn.functional.silu(x)

    run(CpuExperts, {"activation_func": silu})
    assert calls == [(11, 24)]
