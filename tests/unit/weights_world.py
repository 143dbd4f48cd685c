"""A trainer world in one process, for tests: what every rank of a layout would hold, cut from whole tensors by rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mslime.config.layout import ParallelLayout
from mslime.convert.families import get_family
from mslime.convert.table import RuleTable
from mslime.weights.buckets import pack
from mslime.weights.weight_plan import Bucket, Senders, WeightPlan, build_plan

MOE_CONFIG: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 21, "hidden_act": "silu",
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "moe_intermediate_size": 4,
    "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [2],
}  # fmt: skip
LAYOUTS = {
    "one rank": ParallelLayout(),
    "tp2 ep2": ParallelLayout(tp=2, ep=2),
    "tp2 etp2": ParallelLayout(tp=2, etp=2),
    "tp2 dp2 ep2 etp2": ParallelLayout(tp=2, dp=2, ep=2, etp=2),
    "dp4 ep4": ParallelLayout(dp=4, ep=4),
    "tp2 ep2 pp2": ParallelLayout(tp=2, ep=2, pp=2),
    "tp4 ep2 etp2 pp2": ParallelLayout(tp=4, ep=2, etp=2, pp=2),
}


def moe_table(**changes: object) -> RuleTable:
    """The rules of a four-layer MoE whose layer 2 is dense and whose vocabulary is odd."""
    config = MOE_CONFIG | changes
    return get_family(config).rules(config)


def stages(layout: ParallelLayout) -> list[list[int]]:
    """Four layers over the stages, interleaved as virtual stages would be when there are two."""
    return [list(range(4))] if layout.pp == 1 else [[0, 2], [1, 3]]


def plan_of(
    layout: ParallelLayout,
    bucket_bytes: int = 1 << 30,
    dtype: str = "float32",
    senders: int = 1,
    table: RuleTable | None = None,
) -> WeightPlan:
    """The plan of `moe_table` (or another one) in a layout, with so many senders, or one for each stage."""
    return build_plan(table or moe_table(), Senders.at_most(layout, senders), stages(layout), dtype, bucket_bytes)


def whole_tensors(table: RuleTable, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random Hugging Face tensors of a model."""
    generator = torch.Generator().manual_seed(3)
    shapes: dict[str, Any] = table.hf_shapes()
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def local_params(
    table: RuleTable, layout: ParallelLayout, stage_rank: int, whole: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What one rank of any stage holds (of all stages at once), by megatron-core's rank order."""
    held: dict[str, torch.Tensor] = {}
    for name, rule in table.bound.items():
        if rule.is_expert:
            per_rank = sum(r.experts for r in table.rules if r.experts) // 2 // layout.ep
            if rule.expert // per_rank != stage_rank // layout.etp % layout.ep:
                continue
            rank, size = stage_rank % layout.etp, layout.etp
        else:
            rank, size = stage_rank % layout.tp, layout.tp
        held[name] = rule.to_megatron(whole.__getitem__, rank, size)
    return held


def gathered(bucket: Bucket, params: Callable[[int], Mapping[str, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """The buffers of all members, as `buckets.gather` gives them; `params` of a global rank."""
    return tuple(torch.stack([pack(bucket, params(rank), rank) for rank in bucket.members]).unbind())
