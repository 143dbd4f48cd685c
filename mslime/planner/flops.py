"""How the work of a sequence grows with its length: what packing balances micro-batches by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

from mslime.convert.families import get_family
from mslime.convert.table import RuleTable
from mslime.planner.activations import Widths, read_widths
from mslime.planner.parameters import copies, is_trained


def quadratic_tokens(hf_config: Mapping[str, object]) -> float | None:
    """The sequence length at which attention scores cost as much as everything else; None without full attention.

    A token multiplies once with every matrix element of the dense part, of the output layer and of its top-k experts: N
    of them. A causal sequence of n tokens has n^2 / 2 pairs, each of which costs heads * (query + value width) in every
    layer. Chowdhery et al. 2022 (arXiv 2204.02311, appendix B) count the same, 6 N + 12 L H Q T flops a token, without
    the half for the mask; the backward pass is twice the forward in both parts, and cancels. So

        n = (N + linear attention) / (sum over full layers of heads * (query + value width) / 2)

    which is 12 x hidden size for a dense model with an MLP of 4 x hidden size. A layer with a window of w tokens sees
    n * w pairs, and one of gated delta-net (arXiv 2412.06464, equation 10) updates and reads a key x value state with
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
    linear = elements + len(windowed) * window * pair + _delta_net(widths)
    return 2 * linear / (len(full) * pair)


def matrix_elements_per_token(table: RuleTable, top_k: int) -> float:
    """Elements of the matrices that one token multiplies with: all but the input embedding, and `top_k` experts of each
    layer. A tied output layer counts; it is a product all the same."""
    total = 0.0
    for rule in table.rules:
        shape = rule.kind.full_shape
        if is_trained(rule) and len(shape) > 1 and not rule.megatron.startswith("embedding."):
            total += copies(rule) * math.prod(shape) * (top_k / rule.experts if rule.experts else 1.0)
    return total


def _windows(fields: Mapping[str, object], layers: int) -> tuple[set[int], int]:
    """(global ids of the layers that see a window only, its size with the token itself), of megatron-core's fields."""
    if fields.get("window_size") is None:
        return set(), 0
    before, _ = cast("tuple[int, int]", fields["window_size"])
    frequency = cast("list[int] | None", fields.get("window_attn_skip_freq"))
    return {layer for layer in range(layers) if frequency is None or frequency[layer]}, before + 1


def _delta_net(widths: Widths) -> float:
    """Products of one token with the states of all gated delta-net layers."""
    return 3.0 * len(widths.linear_layers) * widths.linear_key_dim * widths.linear_values
