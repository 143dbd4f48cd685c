"""megatron-core's gated delta-net layer, extended to packed sequences and float32 for its small parameters.

Parameters, their sharding and their place in checkpoints are megatron-core 0.16.1's (`GatedDeltaNet`). Its forward pass
rejects packed sequences, normalises the output with the block's kind of norm, and rounds the decay to the model's
dtype. This one separates sequences and follows transformers (`models/qwen3_next`) in the other two points.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

CHUNK = 64
"""Rows of a sequence that flash-linear-attention's kernel processes at once."""


@dataclass(frozen=True)
class PackedSequences:
    """Sequences that follow each other in the rows of a layer, with cached index tensors for all layers.

    Attributes:
        cumulative: [sequences + 1], padded start of each, on the layer's device.
        lengths: the same as lengths, for the host.
    """

    cumulative: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, packed: PackedSeqParams) -> PackedSequences:
        """Build it without reading from the GPU if the packing code kept the lengths on the host.

        A read makes the CPU wait for all work queued on the GPU: in each layer, in both passes.
        """
        if isinstance(packed, HostPackedSeqParams):
            return packed.sequences
        return cls(padded(packed), tuple(padded(packed).diff().tolist()))

    @cached_property
    def order(self) -> Tensor:
        """[rows] int64: the sequence of each row."""
        return torch.repeat_interleave(self.cumulative.diff(), output_size=sum(self.lengths))

    def places(self, blank: int) -> Tensor:
        """[rows] int64: the new place of each row with `blank` rows inserted between two sequences."""
        return torch.arange(len(self.order), device=self.order.device) + blank * self.order

    @cached_property
    def chunks(self) -> Tensor:
        """[chunks, 2]: the sequence of each chunk of `CHUNK` rows, and its index within it; the last chunk of a
        sequence may be shorter. These are flash-linear-attention's chunk_indices (`fla.ops.utils.index`, 0.6.0)."""
        counts = (self.cumulative.diff() + (CHUNK - 1)) // CHUNK
        total = sum(-(-length // CHUNK) for length in self.lengths)
        order = torch.repeat_interleave(counts, output_size=total)
        within = torch.arange(total, device=order.device) - (counts.cumsum(0) - counts)[order]
        return torch.stack([order, within], 1).to(self.cumulative.dtype)


@dataclass
class HostPackedSeqParams(PackedSeqParams):
    """Packed sequences whose padded lengths the host knows."""

    lengths: tuple[int, ...] = ()

    @cached_property
    def sequences(self) -> PackedSequences:
        """The sequences, shared by all layers in both passes."""
        return PackedSequences(padded(self), self.lengths)


def padded(packed: PackedSeqParams) -> Tensor:
    """[sequences + 1]: start of each sequence, padding included."""
    return packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded


class HeadNorm(torch.nn.Module):
    """RMS norm of every value head, scaled by the weight itself even if the block's norms are zero-centred.

    Shifting the published weight by one for a zero-centred norm would round it, so it would not round-trip bit for bit.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=torch.float32))
        # Every tensor-parallel rank sees its own heads; megatron-core sums marked gradients over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape, in float32."""
        wide = x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normal.to(x.dtype)


class PackedGatedDeltaNet(GatedDeltaNet):
    """The layer over sequences that follow each other (thd), or over one (bshd)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.A_log.data = self.A_log.data.float()
        sizes = cast("Any", self.config)
        self.head_sizes: tuple[int, int] = (sizes.linear_key_head_dim, sizes.linear_value_head_dim)
        self.taps: int = sizes.linear_conv_kernel_dim
        self.repeats: int = sizes.linear_num_value_heads // sizes.linear_num_key_heads

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        inference_context: object = None,
        **unused: object,
    ) -> tuple[Tensor, Tensor | None]:
        """The recurrence within each sequence.

        Args:
            hidden_states: [rows, b, hidden], rows split under sequence parallelism; b is 1 when packed.
            attention_mask: unused; padding is at the end, where a causal recurrence ignores it.
            packed_seq_params: padded cumulative lengths of the rows; None for one sequence.
            inference_context: must be None.
            unused: arguments for attention only: rotary embeddings and biases.

        Returns:
            [rows, b, hidden], and the output projection's bias (None).
        """
        assert inference_context is None, "the trainer generates nothing"
        projected = self.in_proj(hidden_states)[0].transpose(0, 1)
        mixed = self._mixed(projected, None if packed_seq_params is None else PackedSequences.of(packed_seq_params))
        return self.out_proj(mixed.transpose(0, 1).contiguous())

    def _mixed(self, projected: Tensor, packed: PackedSequences | None) -> Tensor:
        """[b, s, features] -> [b, s, value features], this rank's heads of both; only the convolution and the
        recurrence separate the sequences."""
        key_dim, value_dim = self.head_sizes
        keys, values, heads = self.qk_dim // self.tp_size, self.v_dim // self.tp_size, self.num_v_heads_local_tp
        qkv, gate, beta, alpha = projected.split([2 * keys + values, values, heads, heads], -1)
        convolved = self._convolved(qkv) if packed is None else self._convolved_apart(qkv, packed)
        query, key, value = convolved.split([keys, keys, values], -1)
        query, key = (gated_delta_net.l2norm(x.unflatten(-1, (-1, key_dim)).contiguous()) for x in (query, key))
        if self.repeats > 1:
            query, key = (x.repeat_interleave(self.repeats, 2) for x in (query, key))
        decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias)
        out = self._recurred(
            query.contiguous(),
            key.contiguous(),
            value.unflatten(-1, (-1, value_dim)).contiguous(),
            decay,
            beta.contiguous().sigmoid(),
            packed=packed,
        )
        normal = self.out_norm(out) * self.act_fn(gate.unflatten(-1, (-1, value_dim)).float())
        return normal.to(projected.dtype).flatten(2)

    def _convolved(self, qkv: Tensor) -> Tensor:
        """The causal convolution over [b, s, channels] and its activation."""
        channels = qkv.transpose(1, 2).contiguous()
        kernel = gated_delta_net.causal_conv1d_fn
        if kernel is None or self.config.deterministic_mode:
            return self.act_fn(self.conv1d(channels)[..., : qkv.shape[1]]).transpose(1, 2)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        return kernel(x=channels, weight=weight, bias=bias, activation=self.activation).transpose(1, 2)

    def _convolved_apart(self, qkv: Tensor, packed: PackedSequences) -> Tensor:
        """`_convolved` within each sequence, in one call: rows of zeros, as many as the convolution looks back,
        separate two sequences."""
        blank = self.taps - 1
        at = packed.places(blank)
        spread = qkv.new_zeros(qkv.shape[0], qkv.shape[1] + blank * (len(packed.lengths) - 1), qkv.shape[2])
        return self._convolved(spread.index_copy(1, at, qkv)).index_select(1, at)

    def _recurred(self, *columns: Tensor, packed: PackedSequences | None) -> Tensor:
        """The recurrence over queries, keys, values, decays and betas [b, s, ...], within each sequence."""
        # flash-linear-attention's kernel, or megatron-core's rule in torch
        rule: Any = gated_delta_net.chunk_gated_delta_rule
        if self.config.deterministic_mode:
            rule = gated_delta_net.torch_chunk_gated_delta_rule
        given: dict[str, Any] = {"output_final_state": False, "use_qk_l2norm_in_kernel": False}

        def call(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            return rule(q, k, v, g=g, beta=beta, initial_state=None, **given)[0]

        if packed is None:
            return call(*columns)
        if rule is not gated_delta_net.torch_chunk_gated_delta_rule:
            # Kernel arguments for all layers: flash-linear-attention would otherwise read the lengths from the GPU.
            given |= {"cu_seqlens": packed.cumulative, "chunk_indices": packed.chunks, "chunk_size": CHUNK}
            return call(*columns)
        by_sequence = zip(*(column.split(packed.lengths, 1) for column in columns), strict=True)
        return torch.cat([call(*parts) for parts in by_sequence], 1)


def with_gated_delta_net(
    spec: TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None, in_proj: type, out_proj: type
) -> TransformerBlockSubmodules:
    """The block with this layer in place of self-attention where `config.linear_attention_freq` is 1.

    Args:
        in_proj, out_proj: column- and row-parallel linear layers; the former includes the norm if `spec` fuses it into
            attention's.
    """
    assert isinstance(config.linear_attention_freq, list), config.linear_attention_freq
    attention = ModuleSpec(
        module=PackedGatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=in_proj, out_norm=HeadNorm, out_proj=out_proj),
    )
    first = get_transformer_layer_offset(config, vp_stage)
    layers = list(spec.layer_specs or [])
    for index, layer in enumerate(layers):
        if config.linear_attention_freq[first + index]:
            submodules = replace(cast("Any", layer.submodules), self_attention=attention)
            layers[index] = replace(layer, submodules=submodules)
    return replace(spec, layer_specs=layers)
