"""Parts of MoE layers missing or wrong in megatron-core 0.16.1: routers, dispatchers, experts' state.

DeepSeek-V2's softmax router chooses experts from the groups whose best expert scores highest (arXiv 2405.04434, section
2.2.2). megatron-core ranks groups by the sum of several experts (`moe_utils.group_limited_topk`): DeepSeek-V3's rule.

If routers have auxiliary losses, or count tokens for their bias, padding rows are excluded. megatron-core has a mask
for that, with three faults corrected here: its z-loss averages per rank, its bias ignores the mask, and a micro-batch
of padding divides by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mslime.config.errors import ConfigError


class BestOfGroupRouter(TopKRouter):
    """Router with softmax scores over all experts; scores of the chosen ones, scaled and not normalised, are the
    weights."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[s, b, experts] -> weights and map [s * b, experts]; 0 and False if a token does not visit an expert."""
        groups, chosen = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        assert groups is not None and chosen is not None
        logits = logits.flatten(0, -2)
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32).type_as(logits)
        question = scores, self.topk, groups, chosen
        replay: Any = self.router_replay
        weights, experts = (
            choose_from_best_groups(*question)
            if replay is None
            else replay.get_replay_topk(*question, choose_from_best_groups)
        )
        weights = weights * (self.config.moe_router_topk_scaling_factor or 1.0)
        return (
            torch.zeros_like(logits).scatter(1, experts, weights),
            torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True),
        )


def choose_from_best_groups(scores: Tensor, top_k: int, groups: int, chosen: int) -> tuple[Tensor, Tensor]:
    """Values and indices [rows, top-k] of the highest positive scores [rows, experts] in the `chosen` best groups."""
    by_group = scores.view(len(scores), groups, -1)
    best = by_group.amax(-1).topk(chosen, dim=-1).indices
    kept = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, True)
    values, indices = by_group.masked_fill(~kept[..., None], 0.0).flatten(1).topk(top_k, dim=-1)
    return values, indices


def excludes_padding(config: TransformerConfig) -> bool:
    """Whether routers must know the padding rows: they have an auxiliary loss, or count tokens."""
    found: Any = config.moe_aux_loss_coeff
    coefficients = found if isinstance(found, list) else [found]
    counts = config.moe_router_enable_expert_bias
    return bool(config.num_moe_experts) and (any(coefficients) or config.moe_z_loss_coeff is not None or counts)


class TokenRouter(TopKRouter):
    """megatron-core's router with losses and counts over real tokens only, without padding on any rank."""

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        return self._balanced(probs, scores_for_aux_loss, routing_map, "aux_loss", "load_balancing_loss")

    def _apply_seq_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, seq_length: int, bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:  # fmt: skip
        assert bsz == 1, "sequences are packed, or come one by one"
        return self._balanced(probs, scores_for_aux_loss, routing_map, "seq_aux_loss", "seq_load_balancing_loss")

    def _balanced(self, probs: Tensor, scores: Tensor, routing_map: Tensor, kind: str, name: str) -> Tensor:
        """`probs` with the loss of a micro-batch attached: E * sum over experts of its share of the tokens times its
        mean score (arXiv 2101.03961, eq. 4). `scores` and `routing_map` [rows, experts] are 0 for padding."""
        coefficient = self.get_aux_loss_coeff(kind)
        if coefficient == 0:
            return probs
        counts = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), self.tp_cp_group)
        tokens = (counts.sum() / self.topk).clamp(min=1.0)  # 0 if the whole micro-batch is padding
        loss = switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=counts,
            total_num_tokens=tokens,  # type: ignore[arg-type]
            topk=self.topk,
            num_experts=self.config.num_moe_experts,  # type: ignore[arg-type]
            moe_aux_loss_coeff=coefficient,
            fused=self.config.moe_router_fusion,
        )
        return self.attach_and_log_load_balancing_loss(probs, coefficient, loss, name, self.tp_cp_group)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """`logits` [rows, experts] with the mean over the micro-batch's tokens of the squared log-sum-exp attached
        (arXiv 2202.08906, eq. 5)."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not self.training or not torch.is_grad_enabled():
            return logits
        kept = torch.ones_like(logits[:, 0]) if padding_mask is None else (~padding_mask).to(logits.dtype)
        tokens = reduce_from_tensor_model_parallel_region(kept.sum(), self.tp_cp_group).clamp(min=1.0)
        loss = coefficient * (torch.logsumexp(logits, dim=-1).square() * kept).sum() / tokens
        return MoEAuxLossAutoScaler.apply(logits, loss)  # type: ignore[return-value]

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask[:, None]
        super()._apply_expert_bias(routing_map)


def use_own_routers(block: TransformerBlockSubmodules, config: TransformerConfig) -> None:
    """Put these routers into every layer that routes with softmax scores within groups, or must exclude padding.

    Raises:
        ConfigError: a setting that these routers do not support.
    """
    within_groups = config.moe_router_score_function == "softmax" and config.moe_router_group_topk
    unused = {
        "moe_router_load_balancing_type": config.moe_router_load_balancing_type != "none",
        "moe_z_loss_coeff": config.moe_z_loss_coeff is not None,
        "moe_expert_capacity_factor": config.moe_expert_capacity_factor is not None,
        "moe_router_fusion": bool(config.moe_router_fusion),
    }
    if within_groups and (name := next((name for name, is_set in unused.items() if is_set), None)):
        raise ConfigError(
            f"megatron.{name}", "set", "not supported by mslime's router for DeepSeek-V2 with limited groups",
            "remove it",
        )  # fmt: skip
    if not within_groups and not excludes_padding(config):
        return
    for layer in block.layer_specs or []:
        submodules: Any = layer.submodules.mlp.submodules  # type: ignore[union-attr]
        if isinstance(submodules, MoESubmodules):
            submodules.router = BestOfGroupRouter if within_groups else TokenRouter


# megatron-core's token dispatchers, without references to a micro-batch after its forward pass.
#
# Version 0.16.1 keeps a layer's routing weights in its dispatcher until the layer's next forward pass. They reference
# the graph that computed them, so the input of every MoE layer, its router's and the sum behind its attention stay in
# memory through the rest of the backward pass, the optimizer's step and a weight sync: 2 x [T / TP, H] a layer.

KEPT = ("probs", "local_probs", "routing_map", "local_map", "reversed_local_input_permutation_mapping")
"""Attributes of dispatchers that are used only within one forward pass."""


def forget_micro_batches(chunk: torch.nn.Module) -> None:
    """Make the dispatchers of all MoE layers drop these attributes at the end of each pass, recomputed ones
    included."""

    def combine_and_forget(dispatcher: Any, combine: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        out = combine(hidden)
        for name in KEPT:
            if name in vars(dispatcher):
                setattr(dispatcher, name, None)
        return out

    for layer in chunk.modules():
        if isinstance(layer, MoELayer):
            dispatcher: Any = layer.token_dispatcher
            dispatcher.combine_postprocess = partial(combine_and_forget, dispatcher, dispatcher.combine_postprocess)


# Checkpoints of grouped experts if Transformer Engine keeps no FP8 state.
#
# megatron-core 0.16.1 passes a grouped layer's FP8 state to its experts and assumes that a layer that multiplies in FP8
# has one. With recipes without a history of maxima (`train.fp8`) Transformer Engine 2.20 has none and returns an empty
# tensor, so saving fails.

_SPLIT = "_split_extra_state"


def share_empty_states(chunk: torch.nn.Module) -> None:
    """Give each expert of a grouped layer the layer's FP8 state if that is empty."""

    def share(layer: Any, split: Callable[[Tensor], list[Tensor]], state: Tensor) -> list[Tensor]:
        return split(state) if state.numel() else [state] * layer.num_gemms

    for layer in chunk.modules():
        if hasattr(layer, _SPLIT):
            setattr(layer, _SPLIT, partial(share, layer, getattr(layer, _SPLIT)))
