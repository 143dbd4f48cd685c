"""Routers that megatron-core 0.16.1 does not build, put into the layer spec where a family needs them.

DeepSeek-V2's softmax router chooses experts from the groups whose best expert scores highest (arXiv 2405.04434, section
2.2.2). megatron-core ranks groups by the sum of several experts (`moe_utils.group_limited_topk`): DeepSeek-V3's rule.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mslime.config.errors import ConfigError


class BestOfGroupRouter(TopKRouter):
    """Softmax scores over all experts; those of the chosen ones, scaled but not normalised, weigh their outputs."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[s, b, experts] -> weights and map [s * b, experts]; 0 and False where a token does not visit an expert."""
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


def use_own_routers(block: TransformerBlockSubmodules, config: TransformerConfig) -> None:
    """Put them into every layer of the spec that routes with softmax scores within groups.

    Raises:
        ConfigError: a setting asks for what these routers do not compute.
    """
    if config.moe_router_score_function != "softmax" or not config.moe_router_group_topk:
        return
    _refuse(config)
    for layer in block.layer_specs or []:
        submodules: Any = layer.submodules.mlp.submodules  # type: ignore[union-attr]
        if isinstance(submodules, MoESubmodules):
            submodules.router = BestOfGroupRouter


def _refuse(config: TransformerConfig) -> None:
    unused = {
        "moe_router_load_balancing_type": config.moe_router_load_balancing_type != "none",
        "moe_z_loss_coeff": config.moe_z_loss_coeff is not None,
        "moe_expert_capacity_factor": config.moe_expert_capacity_factor is not None,
        "moe_router_fusion": bool(config.moe_router_fusion),
    }
    for name, is_set in unused.items():
        if is_set:
            raise ConfigError(
                f"megatron.{name}", "set", "the router of DeepSeek-V2 with limited groups is mslime's own, without it",
                "remove it",
            )  # fmt: skip
