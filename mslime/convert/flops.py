"""Sizes of a model, and the cost of a sequence by its length, for balancing micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from mslime.convert.families import get_family
from mslime.convert.table import RuleTable


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of one model, read from megatron-core's TransformerConfig fields (`Family.transformer_fields`).

    Every number of features is the whole model's; tensor parallelism divides it where it is used.
    """

    hidden: int
    heads: int
    groups: int
    head_dim: int
    mlp: int
    experts: int
    top_k: int
    expert_mlp: int
    shared_mlp: int
    query_rank: int
    key_value_rank: int
    rope_dim: int
    value_dim: int
    qk_norm: bool
    linear_keys: int
    linear_values: int
    linear_value_heads: int
    linear_key_dim: int
    moe_layers: frozenset[int]
    linear_layers: frozenset[int]

    @property
    def latent(self) -> bool:
        """Multi-latent attention (DeepSeek-V2, arXiv:2405.04434)."""
        return self.key_value_rank > 0


def read_widths(fields: Mapping[str, object], moe_layers: tuple[int, ...]) -> ModelSizes:
    """The sizes in a family's TransformerConfig fields.

    Args:
        moe_layers: global ids of the layers that route.
    """

    def size(name: str, default: int = 0) -> int:
        value = fields.get(name)
        return default if value is None else cast("int", value)

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    latent = bool(fields.get("multi_latent_attention"))
    head_dim = size("qk_head_dim") if latent else size("kv_channels", hidden // heads)
    return ModelSizes(
        hidden=hidden,
        heads=heads,
        groups=size("num_query_groups", heads),
        head_dim=head_dim,
        mlp=size("ffn_hidden_size"),
        experts=size("num_moe_experts"),
        top_k=size("moe_router_topk"),
        expert_mlp=size("moe_ffn_hidden_size"),
        shared_mlp=size("moe_shared_expert_intermediate_size"),
        query_rank=size("q_lora_rank") if latent else 0,
        key_value_rank=size("kv_lora_rank") if latent else 0,
        rope_dim=size("qk_pos_emb_head_dim") if latent else 0,
        value_dim=size("v_head_dim") if latent else head_dim,
        qk_norm=bool(fields.get("qk_layernorm")),
        linear_keys=size("linear_num_key_heads") * size("linear_key_head_dim"),
        linear_values=size("linear_num_value_heads") * size("linear_value_head_dim"),
        linear_value_heads=size("linear_num_value_heads"),
        linear_key_dim=size("linear_key_head_dim"),
        moe_layers=frozenset(moe_layers),
        linear_layers=frozenset(_linear_layers(fields)),
    )


def _linear_layers(fields: Mapping[str, object]) -> list[int]:
    """Global ids of the gated delta-net layers; a frequency N makes every N-th layer a full one (megatron-core)."""
    if fields.get("experimental_attention_variant") != "gated_delta_net":
        return []
    frequency = fields["linear_attention_freq"]
    if isinstance(frequency, int):
        return [layer for layer in range(cast("int", fields["num_layers"])) if (layer + 1) % frequency]
    return [layer for layer, linear in enumerate(cast("list[int]", frequency)) if linear]


def quadratic_tokens(hf_config: Mapping[str, object]) -> float | None:
    """Sequence length at which attention scores cost as much as everything else; None without full attention.

    A token multiplies once with every matrix element of the dense part, of the output layer and of its top-k experts: N
    of them. A causal sequence of n tokens has n^2 / 2 pairs, each of which costs heads * (query + value width) in every
    layer. Chowdhery et al. 2022 (arXiv 2204.02311, appendix B) count the same, 6 N + 12 L H Q T flops a token, without
    the half for the mask; the backward pass is twice the forward in both parts, and cancels. So

        n = (N + linear attention) / (sum over full layers of heads * (query + value width) / 2)

    which is 12 x hidden size for a dense model with an MLP of 4 x hidden size. A layer with a window of w tokens has n
    * w pairs, and one of gated delta-net (arXiv 2412.06464, equation 10) updates and reads a key x value state with
    three products a token; both grow as n does.

    Args:
        hf_config: the model's config.json.
    """
    family = get_family(hf_config)
    fields, model = family.transformer_fields(hf_config), family.model_fields(hf_config)
    widths = read_widths(fields, model.moe_layer_ids)
    windowed, window = _windows(fields, model.num_layers)
    pair = widths.heads * (widths.head_dim + widths.rope_dim + widths.value_dim)
    full = set(range(model.num_layers)) - widths.linear_layers - windowed
    if not full:
        return None
    elements = matrix_elements_per_token(family.rules(hf_config), model.top_k)
    # Products of one token with the states of all gated delta-net layers.
    delta_net = 3.0 * len(widths.linear_layers) * widths.linear_key_dim * widths.linear_values
    linear = elements + len(windowed) * window * pair + delta_net
    return 2 * linear / (len(full) * pair)


def matrix_elements_per_token(table: RuleTable, top_k: int) -> float:
    """Matrix elements that one token multiplies with: all but the input embedding, and `top_k` experts of each layer. A
    tied output layer counts: it is a product too.
    """
    total = 0.0
    for rule in table.rules:
        shape = rule.kind.full_shape
        if rule.trained and len(shape) > 1 and not rule.megatron.startswith("embedding."):
            total += rule.parameters * math.prod(shape) * (top_k / rule.experts if rule.experts else 1.0)
    return total


def _windows(fields: Mapping[str, object], layers: int) -> tuple[set[int], int]:
    """(global ids of the layers with a window, its size including the token itself), from megatron-core's fields."""
    if fields.get("window_size") is None:
        return set(), 0
    before, _ = cast("tuple[int, int]", fields["window_size"])
    frequency = cast("list[int] | None", fields.get("window_attn_skip_freq"))
    return {layer for layer in range(layers) if frequency is None or frequency[layer]}, before + 1
