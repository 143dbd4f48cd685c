"""What makes a process of the rehearsal believe in its GPU, beyond the fake runtime: import this before a trainer.

What is changed of others' Python is all here. Of Transformer Engine's: float32 takes the fused attention, whose two
checks for 16 bits are left out, so that numbers can be compared to the last digits; and its Triton permutation of
tokens, which would take the interpreter minutes, is torch's indexing (`permutation`, which also compares the two).
flash-linear-attention's kernels, likewise, are megatron-core's rule in torch; that they take the arguments is checked,
what they compute is not.
"""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import torch
import transformer_engine.pytorch
from megatron.core.ssm import gated_delta_net
from transformer_engine.common.triton import permutation as kernels
from transformer_engine.pytorch.attention.dot_product_attention import backends, utils
from transformer_engine.pytorch.attention.dot_product_attention import dot_product_attention as attention
from transformer_engine.pytorch.triton import permutation as launches

from tests.fixtures.delta_rule import chunk_gated_delta_rule
from tests.rehearsal.on_host import gloo_as_nccl
from tests.rehearsal.permutation import REPLACED

__all__ = ["transformer_engine"]


def use_fused_attention_in_float32() -> None:
    """cuDNN's attention takes 16 bits only; the stand-in's takes any."""
    choose = utils.get_attention_backend

    def chosen(params: Any = None) -> Any:
        params.qkv_dtype = torch.bfloat16
        return choose(params)

    utils.get_attention_backend = chosen
    source = inspect.getsource(backends.FusedAttention)
    assert "FusedAttention only supports FP16 and BF16" in source, "Transformer Engine checks dtypes elsewhere now"
    relaxed = source.replace("assert all(", "assert True or all(", 1)
    exec(compile(relaxed, backends.__file__, "exec"), backends.__dict__)
    attention.FusedAttention = backends.FusedAttention


def use_indexing() -> SimpleNamespace:
    """Replaces the permutation; returns the original functions, whose kernels are not tuned any more."""
    for name in ("_permute_kernel", "_unpermute_kernel", "_sort_chunks_by_map_kernel"):
        kernel = getattr(kernels, name)
        kernel.configs = kernel.configs[:1]
    originals = {function.__name__: getattr(launches, function.__name__) for function in REPLACED}
    for function in REPLACED:
        setattr(launches, function.__name__, function)
    return SimpleNamespace(**originals)


def use_torch_delta_rule() -> None:
    """The gated delta rule and its norm, as the CPU path computes them, behind the kernel's own parameters."""
    taken = inspect.signature(gated_delta_net.chunk_gated_delta_rule)

    def checked(*args: Any, **kwargs: Any) -> Any:
        taken.bind(*args, **kwargs)
        return chunk_gated_delta_rule(*args, **kwargs)

    def l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)

    assert gated_delta_net.HAVE_FLA, "megatron-core does not find flash-linear-attention"
    gated_delta_net.chunk_gated_delta_rule, gated_delta_net.l2norm = checked, l2norm


def trust_forked_gpu() -> None:
    """A real GPU cannot be used by a process that was forked after it was; the fake one's memory is forked too."""
    torch.cuda._is_in_bad_fork = lambda: False


logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)  # its GPU draws from the CPU
gloo_as_nccl()
use_fused_attention_in_float32()
TRITON = use_indexing()
use_torch_delta_rule()
trust_forked_gpu()
