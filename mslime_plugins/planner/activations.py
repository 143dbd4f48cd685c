"""Bytes of activations that a layer keeps for its backward pass, and how many micro-batches keep them at once.

The method is that of Korthikanti et al. 2022 (arXiv:2205.05198, section 4): count the inputs that the backward pass of
each operation in the layer needs. Their 34 sbh is for GPT with dropout, multi-head attention and a 4h MLP; here the
same count is made for grouped-query and multi-latent attention, SwiGLU, experts and flash attention (no s x s matrix),
without dropout. Sequence parallelism divides activations outside the tensor-parallel matmuls by TP (their section
4.2.2). All numbers are elements per token of the micro-batch of one context-parallel rank.
"""

from __future__ import annotations

from mslime.config.layout import ParallelLayout
from mslime.config.megatron import Recompute
from mslime.convert.flops import ModelSizes

EXPERT_IMBALANCE = 1.25
"""Tokens on the fullest expert-parallel rank, over the mean. An assumption: it depends on routing."""
FLOAT32_SHARE = 2
"""Elements of the model's 16-bit dtype that one float32 number takes."""


def attention_elements(w: ModelSizes, layout: ParallelLayout, *, linear: bool, dropped: frozenset[str]) -> float:
    """Activations that an attention block keeps, its norm included.

    Args:
        linear: gated delta-net instead of softmax attention.
        dropped: megatron-core's `recompute_modules`: recomputed in the backward pass instead of kept.
    """
    tp = layout.tp
    norm = w.hidden * (1 if "layernorm" in dropped else 2) / tp  # the layer's input; the projection's input
    if linear:
        # Projected q k v, gate and decay; before and after the convolution; normalised q and k for every value head;
        # the gated norm's input and output (transformers `models/qwen3_next`, megatron-core ssm/gated_delta_net.py).
        mixed = 2 * w.linear_keys + w.linear_values
        inner = 3 * mixed + 4 * w.linear_values + FLOAT32_SHARE * 2 * w.linear_value_heads
        return norm + inner / tp
    log_sum = FLOAT32_SHARE * w.heads
    if w.latent:
        # Compressed q and kv before and after their norms are split along the sequence; the up-projected ones by head.
        compressed = 2 * w.query_rank + 2 * w.key_value_rank + w.rope_dim
        query = w.head_dim + w.rope_dim
        inner = w.heads * (2 * query + (w.head_dim + w.value_dim)) if "mla_up_proj" not in dropped else 0
        return norm + (compressed + inner + w.heads * w.value_dim + log_sum) / tp
    groups = max(w.groups, tp)  # with fewer groups than ranks, every rank has a whole one
    query, key_value = w.heads * w.head_dim, groups * w.head_dim
    normed = query + key_value if w.qk_norm else 0
    return norm + (query + 2 * key_value + normed + query + log_sum) / tp


def mlp_elements(w: ModelSizes, layout: ParallelLayout, *, routed: bool, dropped: frozenset[str]) -> float:
    """Activations that an MLP or MoE block keeps, its norm included: inputs of both linear layers and of the
    activation.

    An expert-parallel rank routes 1/TP of the tokens (sequence parallelism) to `top_k` experts each, and gets
    `EXPERT_IMBALANCE` times as many from the others; expert-tensor parallelism gathers tokens and splits features.
    """
    tp = layout.tp
    norm = w.hidden * (1 if "layernorm" in dropped else 2) / tp
    if not routed:
        return norm + (0 if "mlp" in dropped else 3 * w.mlp / tp)
    if "moe" in dropped:
        return norm
    router = 3 * FLOAT32_SHARE * w.experts / tp
    shared = 0 if "shared_experts" in dropped else 3 * w.shared_mlp / tp
    activation = w.expert_mlp * (2 if "moe_act" in dropped else 3)
    tokens = w.top_k * EXPERT_IMBALANCE / tp
    return norm + router + shared + tokens * (w.hidden * layout.etp + activation)


def layer_elements(w: ModelSizes, layout: ParallelLayout, layer: int, dropped: frozenset[str] = frozenset()) -> float:
    """Activations that a whole layer keeps."""
    attention = attention_elements(w, layout, linear=layer in w.linear_layers, dropped=dropped)
    return attention + mlp_elements(w, layout, routed=layer in w.moe_layers, dropped=dropped)


def chunks_in_flight(layout: ParallelLayout, stage: int) -> float:
    """Most forward passes of a stage whose backward has not begun, in units of the whole stage.

    One forward, one backward: PP - stage. Interleaved, megatron-core's `get_pp_rank_microbatches`: 2 (PP - stage - 1) +
    (VPP - 1) PP chunks of warm-up and one more, each 1/VPP of the stage.
    """
    if layout.vpp == 1:
        return float(layout.pp - stage)
    return (2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1) / layout.vpp


def kept_elements(w: ModelSizes, layout: ParallelLayout, chunks: tuple[tuple[int, ...], ...], how: Recompute) -> float:
    """Activations that one micro-batch keeps on a stage until its backward pass begins."""
    total = 0.0
    for chunk in chunks:
        for index, layer in enumerate(chunk):
            if how.granularity == "full" and how.method == "uniform":
                total += w.hidden / layout.tp if index % how.num_layers == 0 else 0.0
            elif how.granularity == "full" and index < how.num_layers:
                total += w.hidden / layout.tp
            else:
                total += layer_elements(w, layout, layer, how.modules)
    return total


def working_bytes(
    w: ModelSizes, layout: ParallelLayout, layers: tuple[int, ...], how: Recompute, tokens: int, width: int
) -> int:
    """Peak of one layer's backward pass beside the kept activations, including recomputed ones.

    For a layer without experts: the gradients of its activations (as many elements), and the gathered input and output
    gradient of a tensor-parallel matmul, [T, hidden] each. With experts: `_expert_bytes`, which is larger.

    Args:
        tokens: of the micro-batch on a context-parallel rank.
        width: bytes of a parameter.
    """
    largest = max((layer_elements(w, layout, layer) for layer in layers), default=0.0)
    recomputed = 0.0
    if how.granularity == "full":
        recomputed = largest * (how.num_layers if how.method == "uniform" else 1)
    elif how.granularity == "selective":
        recomputed = max((largest - layer_elements(w, layout, layer, how.modules) for layer in layers), default=0.0)
    beside = [
        _expert_bytes(w, layout, tokens, width)
        if layer in w.moe_layers
        else width * tokens * (layer_elements(w, layout, layer) + 2 * w.hidden)
        for layer in layers
    ]
    return int(width * tokens * recomputed + max(beside, default=width * tokens * 2 * w.hidden))


def _expert_bytes(w: ModelSizes, layout: ParallelLayout, tokens: int, width: int) -> float:
    """Memory of experts beside their activations; measured by `tests/rehearsal/full_size.py --peak`.

    While tokens return in the recomputed forward pass: received tokens, the experts' outputs, the same ordered by
    sender, and the sent tokens. In the backward pass of the first linear layers: the input's gradient (the output's is
    smaller than the freed activations), and gradients of all local experts' weights in the model's dtype, before they
    are added to the float32 buffer.
    """
    received = tokens * w.top_k * EXPERT_IMBALANCE / layout.tp * layout.etp * width
    returning = received * w.hidden * (3 + 1 / EXPERT_IMBALANCE)
    weights = w.experts / layout.ep * w.hidden * 2 * w.expert_mlp / layout.etp * width
    return max(returning, received * (w.hidden - w.expert_mlp / layout.etp) + weights)
