"""Layers of machines without Transformer Engine: routed experts with one activation for all of them, and an RMS norm.

A small expert's two matrix products take less time than the dozen small operations around them, forward and backward.
So each expert computes its own products, and the elementwise operations between them run once for the tokens of all
experts. Results do not change. Import it after `backends.cpu.megatron_patches.install()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint


class CpuExperts(SequentialMLP):
    """SequentialMLP with a shared activation; parameters, names and checkpoints are unchanged."""

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            permuted_local_hidden_states: [t, H], the tokens of the first expert, then those of the next one.
            tokens_per_expert: [experts].
            permuted_probs: [t], the router's weight of each.

        Returns:
            [t, H], and no bias.
        """
        config = self.config
        if config.add_bias_linear or not config.gated_linear_unit or config.moe_apply_probs_on_input:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        counts = tokens_per_expert.tolist()
        experts = list(self.local_experts)

        def products(name: str, x: torch.Tensor) -> torch.Tensor:
            layers = (expert.get_submodule(name) for expert in experts)
            return torch.cat([layer(part)[0] for layer, part in zip(layers, x.split(counts), strict=True)])

        gate, linear = products("linear_fc1", permuted_local_hidden_states).chunk(2, dim=-1)
        if (largest := config.activation_func_clamp_value) is not None:
            gate, linear = gate.clamp(max=largest), linear.clamp(min=-largest, max=largest)
        if config.glu_linear_offset:
            linear = linear + config.glu_linear_offset
        inner = config.activation_func(gate) * linear
        weighted = (inner * permuted_probs.unsqueeze(-1)).to(inner.dtype)
        return products("linear_fc2", weighted), None


# A zero-centred RMS norm for machines without Transformer Engine; megatron-core has none of its own.


class ZeroCentredRMSNorm(torch.nn.Module):
    """RMS norm scaled by 1 + weight, computed in float32 (transformers `Qwen3NextRMSNorm`)."""

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same shape and dtype."""
        wide = x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normal * (1.0 + self.weight.float())).type_as(x)


# Core attention, plugged into megatron-core through the layer spec.
#
# Megatron-core's own non-TE attention refuses packed sequences (thd), context parallelism and multi-latent attention.
# This section supports all three with torch's scaled-dot-product attention. One call per sequence (per half sequence
# under context parallelism) avoids a mask over the whole packed batch; short sequences of similar length share a call.
# Causal attention only, with sliding windows and attention sinks; anything else fails an assertion.


SHORT = 256
"""Longest sequence that shares a call: for short sequences the overhead of a call exceeds its computation."""
STEP = 16
"""Sequences that share a call differ in length by less than this; shorter ones are padded."""


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    dropout: float = 0.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last `q` positions of a `k`-token prefix, each seeing itself and what comes before it.

    Args:
        query: [q, b, heads, d].
        key: [k, b, groups, d], k >= q, groups divides heads.
        value: [k, b, groups, dv], dv <= d.
        scale: factor on the scores; default 1/sqrt(d).
        dropout: probability, applied to the attention weights.
        window: tokens before itself that a position sees; None: all.
        sinks: [heads], scores of an extra key with value zero that every position sees
            (https://arxiv.org/abs/2309.17453; trained in GPT-OSS).

    Returns:
        [q, b, heads, dv], in the dtype of `query`.
    """
    if window is not None:
        first = max(key.shape[0] - query.shape[0] - window, 0)  # keys before it are visible to no row
        key, value = key[first:], value[first:]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    mask = None
    if q.shape[2] != k.shape[2] or window is not None or sinks is not None:
        columns = torch.arange(k.shape[2], device=q.device)
        rows = columns[k.shape[2] - q.shape[2] :, None]
        mask = columns <= rows
        if window is not None:
            mask = mask & (columns >= rows - window)
    if sinks is not None:
        assert mask is not None
        return _with_sinks(q, k, v, mask, sinks, scale, dropout).permute(2, 0, 1, 3)
    value_size = v.shape[-1]
    # torch's CPU flash kernel wants equal head sizes (MLA's differ); zero columns change nothing.
    v = F.pad(v, (0, q.shape[-1] - value_size))
    out = F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p=dropout, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[..., :value_size].permute(2, 0, 1, 3)


def _with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """[b, heads, q, dv]; the softmax is taken in float32 over the keys and the sink."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q.float() @ k.float().mT * factor).masked_fill(~mask, float("-inf"))
    sink = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return F.dropout(weights, dropout).to(q.dtype) @ v


class CpuCoreAttention(MegatronModule):
    """Causal core attention over bshd or thd inputs, with Transformer Engine's zigzag context-parallel layout.

    Context parallelism cuts a sequence of n tokens into 2*CP chunks; rank r holds chunks r and 2*CP-1-r. Keys and
    values are all-gathered (backward: reduce-scatter), each local chunk then attends to its own prefix.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp", "tp"])
        self.cp_group = groups.cp
        self.window: int | None = None
        every = cast("int | list[int]", config.window_attn_skip_freq)
        if is_layer_window_attention(config.window_size, every, layer_number):
            assert config.window_size is not None and config.window_size[1] == 0, config.window_size
            self.window = config.window_size[0]
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            self.tp_group = groups.tp
            heads = config.num_attention_heads // groups.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        else:
            assert config.softmax_type == "vanilla", f"softmax_type {config.softmax_type!r} is not implemented on CPU"
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            query, key, value: [s, b, heads or groups, d], or [t, heads or groups, d] when packed (thd).
            attention_mask, attention_bias: must be None; padding sits at the end, where causal attention ignores it.
            packed_seq_params: padded cumulative lengths over all context-parallel ranks; None for bshd.

        Returns:
            [s, b, heads * dv], or [t, heads * dv] when packed.
        """
        assert attention_mask is None and attention_bias is None, "only the causal mask is implemented on CPU"
        assert attn_mask_type in (None, AttnMaskType.causal, AttnMaskType.padding_causal), attn_mask_type
        packed = packed_seq_params is not None
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        size = self.cp_group.size()
        lengths = [query.shape[0] * size]
        if packed_seq_params is not None:
            assert packed_seq_params.qkv_format == "thd", packed_seq_params.qkv_format
            padded = packed_seq_params.cu_seqlens_q_padded
            lengths = (packed_seq_params.cu_seqlens_q if padded is None else padded).diff().tolist()
        if size > 1:
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
        outputs = self._attend(query, key, value, lengths, size)
        out = torch.cat(outputs).flatten(2)
        return out.squeeze(1) if packed else out

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], size: int
    ) -> list[torch.Tensor]:
        """One output per local chunk, in local order; `key` and `value` hold all ranks' rows, rank by rank."""
        attend = functools.partial(
            causal_attention,
            scale=self.softmax_scale,
            dropout=self.dropout if self.training else 0.0,
            window=self.window,
            sinks=self.softmax_offset,
        )
        rank = self.cp_group.rank()
        if size == 1 and len(lengths) > 1 and max(lengths) <= SHORT:
            return [_attend_together(attend, query, key, value, lengths)]
        # Split once: a slice a sequence would each fill a gradient as large as the whole micro-batch.
        queries = query.split([length // size for length in lengths])
        keys, values = (_in_sequence_order(x, lengths, size).split(lengths) for x in (key, value))
        outputs = []
        for length, q, k, v in zip(lengths, queries, keys, values, strict=True):
            if size == 1:
                outputs.append(attend(q, k, v))
                continue
            chunk = length // (2 * size)
            for part, index in zip(q.split(chunk), (rank, 2 * size - 1 - rank), strict=True):
                prefix = (index + 1) * chunk
                outputs.append(attend(part, k[:prefix], v[:prefix]))
        return outputs

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The sinks, split by heads; there are no other parameters."""
        if self.softmax_offset is None:
            return {}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def _attend_together(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
) -> torch.Tensor:
    """Attention over short sequences [t, 1, heads or groups, d], batched as rows; returns [t, 1, heads, dv].

    Padding rows behind a sequence's end do not affect its tokens, because attention is causal.
    """
    plan = _batches_of(tuple(lengths))
    sizes = [sequences * length for sequences, length in plan.shapes]
    q, k, v = (_GatherRepeated.apply(x.squeeze(1), plan.rows, plan.places).split(sizes) for x in (query, key, value))
    outputs = []
    for batch, shape in zip(zip(q, k, v, strict=True), plan.shapes, strict=True):
        out = attend(*(x.unflatten(0, shape).transpose(0, 1) for x in batch))
        outputs.append(out.transpose(0, 1).flatten(0, 1))
    return _GatherDistinct.apply(torch.cat(outputs), plan.places).unsqueeze(1)


@dataclass(frozen=True)
class _Batches:
    """Layout of short sequences of t tokens in batches of r rows in total.

    Attributes:
        shapes: (sequences, rows of each) of every batch.
        rows: [r], the token that each row holds; any behind a sequence's end.
        places: [t], the row of each token.
    """

    shapes: tuple[tuple[int, int], ...]
    rows: torch.Tensor
    places: torch.Tensor


@functools.lru_cache(maxsize=16)  # all layers of a micro-batch ask for the same
def _batches_of(lengths: tuple[int, ...]) -> _Batches:
    sizes = torch.tensor(lengths)
    starts, padded = sizes.cumsum(0) - sizes, (sizes + STEP - 1) // STEP * STEP
    shapes, rows, places, begin = [], [], torch.empty(int(sizes.sum()), dtype=torch.int64), 0
    for length in padded.unique().tolist():
        members = (padded == length).nonzero()[:, 0]
        offset = torch.arange(length).clamp(max=sizes[members, None] - 1)  # rows behind the end repeat the last token
        token = starts[members, None] + offset
        places[token] = begin + torch.arange(len(members))[:, None] * length + offset
        shapes.append((len(members), length))
        rows.append(token.flatten())
        begin += token.numel()
    return _Batches(tuple(shapes), torch.cat(rows), places)


class _GatherRepeated(torch.autograd.Function):
    """Rows of x [t, ...], some repeated; a token's gradient comes from its own row only, not from repetitions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class _GatherDistinct(torch.autograd.Function):
    """The rows at distinct places; the gradient is therefore a copy instead of a sum."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.length = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.length, *grads[0].shape[1:]).index_copy_(0, places, grads[0]), None


def _in_sequence_order(x: torch.Tensor, lengths: list[int], size: int) -> torch.Tensor:
    """The rows of all context-parallel ranks, rank by rank in `x`, as whole sequences one after the other."""
    if size == 1:
        return x
    local, start = x.shape[0] // size, 0
    order: list[torch.Tensor] = []
    for length in lengths:
        half = length // (2 * size)
        bases = [rank * local + start for rank in range(size)]
        order += [torch.arange(base, base + half) for base in bases]
        order += [torch.arange(base + half, base + 2 * half) for base in reversed(bases)]
        start += 2 * half
    return x.index_select(0, torch.cat(order).to(x.device))


class DuplicatedLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank holds in full: multi-latent attention's down projections.

    Stands in for Transformer Engine's linear with `parallel_mode="duplicated"`. With megatron-core's column-parallel
    layer in this place the gradients are wrong under tensor parallelism: the positional key's part is not summed.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Any,
        bias: bool = False,
        parallel_mode: str | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        assert parallel_mode == "duplicated" and not bias, (parallel_mode, bias)
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        # Each rank sees its own part of the sequence; megatron-core sums marked gradients over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """[..., input_size] -> [..., output_size], and no bias."""
        return F.linear(x, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The weight, saved once as it is the same on every tensor-parallel rank."""
        groups = metadata or {}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            # Without it every rank would declare itself the first replica.
            tp_group=groups.get("tp_group") or cast("Any", parallel_state.get_tensor_model_parallel_group()),
            dp_cp_group=groups.get("dp_cp_group"),
        )
