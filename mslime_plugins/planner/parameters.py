"""Number of parameters on a trainer rank, by pipeline stage; exact, from the rules that build and convert the model.

All ranks of a stage hold equally many, whatever their tensor, expert, context or data index: shards are even and the
vocabulary is padded. So only the stage matters, at any number of GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mslime.config.layout import ParallelLayout
from mslime.convert.families.qwen3_next import FLOAT32_PARAMETERS
from mslime.convert.table import Rule, RuleTable

ROUTER_BIAS = "router.expert_bias"
"""A buffer, not a parameter: float32, without gradient or optimizer state (megatron-core's TopKRouter)."""


@dataclass(frozen=True)
class StageParameters:
    """Parameters on one rank of a pipeline stage.

    Attributes:
        stage: pipeline stage.
        chunks: global layer ids of its chunks.
        dense: elements that all data- and context-parallel ranks repeat.
        expert: elements that the expert-data-parallel ranks repeat.
        embedding: elements of `dense` in the input embedding, which is looked up, not multiplied.
        float32: elements of `dense` that are float32 in a model of any dtype.
        buffers: elements of float32 buffers.
        largest: elements of its largest parameter.
    """

    stage: int
    chunks: tuple[tuple[int, ...], ...]
    dense: int
    expert: int
    embedding: int
    float32: int
    buffers: int
    largest: int = 0

    @property
    def layers(self) -> tuple[int, ...]:
        """Global layer ids, all chunks."""
        return tuple(layer for chunk in self.chunks for layer in chunk)

    @property
    def trained(self) -> int:
        """Elements with a gradient."""
        return self.dense + self.expert


def stage_parameters(
    table: RuleTable,
    layout: ParallelLayout,
    stages: Sequence[tuple[tuple[int, ...], ...]],
    value_head: int = 0,
) -> tuple[StageParameters, ...]:
    """The parameters of one rank of every stage.

    Args:
        table: the model's conversion rules.
        layout: the trainer's parallel sizes.
        stages: global layer ids `[stage][chunk]` (`config.layout.stage_layers`).
        value_head: of a critic: elements of the float32 head that replaces the output layer on its last stage.
    """
    found: list[StageParameters] = []
    for stage, chunks in enumerate(stages):
        layers = frozenset(layer for chunk in chunks for layer in chunk)
        counts = {"dense": 0, "expert": 0, "embedding": 0, "float32": 0, "buffers": 0, "largest": value_head}
        if value_head and stage == layout.pp - 1:
            counts["dense"] = counts["float32"] = value_head
        for rule in table.rules:
            if value_head and rule.megatron.startswith("output_layer."):
                continue
            size = _held(rule, layout, stage, layers)
            if rule.megatron.endswith(ROUTER_BIAS):
                counts["buffers"] += size
                continue
            counts["expert" if rule.experts else "dense"] += size
            counts["largest"] = max(counts["largest"], _local(rule, layout) if size else 0)
            counts["embedding"] += size if rule.megatron.startswith("embedding.") else 0
            counts["float32"] += size if rule.megatron.endswith(FLOAT32_PARAMETERS) else 0
        found.append(StageParameters(stage, chunks, **counts))
    return tuple(found)


def model_parameters(table: RuleTable, ends: str | tuple[str, ...] = "") -> int:
    """Elements of the whole model, a tied output layer once, without router biases.

    Args:
        ends: suffixes of the counted names.
    """
    return sum(
        rule.parameters * math.prod(rule.kind.full_shape)
        for rule in table.rules
        if rule.exported and rule.trained and not rule.megatron.endswith(ROUTER_BIAS) and rule.megatron.endswith(ends)
    )


def _held(rule: Rule, layout: ParallelLayout, stage: int, layers: frozenset[int]) -> int:
    """Elements of a rule's parameters on one rank of a stage."""
    if not rule.trained:
        return 0
    if "{layer}" in rule.megatron:
        here = sum(layer in layers for layer in rule.layers)
        number = here * (rule.experts // layout.ep if rule.experts else 1)
    elif rule.megatron.startswith("embedding."):
        number = int(stage == 0)
    else:
        # A tied output layer is the embedding itself if one stage holds both, else a copy of it.
        number = int(stage == layout.pp - 1 and (rule.exported or layout.pp > 1))
    return number * _local(rule, layout)


def _local(rule: Rule, layout: ParallelLayout) -> int:
    """Elements of one of a rule's parameters on a rank that holds it."""
    return math.prod(rule.kind.local_shape(layout.etp if rule.experts else layout.tp))


def work_per_token(held: StageParameters, layout: ParallelLayout, top_k: int, num_experts: int) -> float:
    """Multiplications of one rank of a stage for one token of its micro-batch, without attention scores.

    A token multiplies with every dense element of its tensor-parallel ranks and with `top_k` experts. With sequence
    parallelism each rank routes 1/TP of the tokens, and with even routing the expert-parallel ranks send as many tokens
    as they get.
    """
    per_expert = held.expert / (num_experts // layout.ep) if num_experts else 0.0
    return held.dense - held.embedding + per_expert * top_k * layout.etp / layout.tp
