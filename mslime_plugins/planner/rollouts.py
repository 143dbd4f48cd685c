"""Bytes of a step's tokens outside of GPUs: in engine answers, rollout managers and Ray's store.

Two columns are large: the routes of a model with experts, and the supports of truncated sampling. All responses are
assumed to have maximal length, and one sequence each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import log

import numpy as np

from mslime.config.layout import ParallelLayout
from mslime.config.rollout import RolloutConfig
from mslime.config.schema import RunConfig
from mslime.convert.families.family import ModelFields
from mslime.data.routes import narrowest_dtype

SAMPLE_COLUMNS = 4 + 1 + 4
"""Bytes of a token of a sample: id, loss mask, log-prob (`data/sample.py`)."""
SHARD_COLUMNS = 4 + 1 + 6 * 4
"""Bytes of a token in a shard: id, mask, and weight, advantage, log-prob, reward, version and age (`data/shard.py`)."""
SUPPORT_ROW, SUPPORT_ID = 8, 4
"""Bytes of a position and of an id (`data/routes.py`)."""
ROUTE_ROW = 1
"""Bytes beside the ids: whether the row may be replayed (`data/routes.py`)."""
ANSWER_COLUMNS = 41
"""Measured bytes of a token's id, log-prob and text in the JSON of an answer."""
BASE64, INT32 = 4 / 3, 4
MEASURED_IDS = {0.8: 20.0, 0.9: 56.0, 0.95: 125.0, 0.99: 514.0}
"""Mean ids of a support by top-p: measured with SmolLM2-135M-Instruct at temperature 1 and top-k 4096
(benchmarks/results/rollout.md). Larger and trained models keep fewer."""


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of tokens, by column.

    Attributes:
        columns: all columns without a field of their own.
    """

    columns: int
    routes: int
    supports: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.columns + self.routes + self.supports

    @property
    def largest(self) -> str:
        """The largest part."""
        sizes = {"columns": self.columns, "routes": self.routes, "supports": self.supports}
        return max(sizes, key=lambda name: sizes[name])


@dataclass(frozen=True)
class RolloutBytes:
    """Upper bounds of the bytes of responses.

    Attributes:
        responses, tokens: of a step; prompts are counted in each response.
        support_ids, most_ids: in the support of a token: expected (used for all sums), and at most. 0: tokens are drawn
            from the whole vocabulary.
        answers: of the engines, in a step.
        held: by the rollout managers: waiting and generating groups, and those of the step in training.
        store: of a step's shards in Ray's store; with several managers, also the groups in transit to them.
        machine: of these shards, for the ranks of one trainer host.
    """

    responses: int
    tokens: int
    support_ids: float
    most_ids: int
    answers: TokenBytes
    held: TokenBytes
    store: TokenBytes
    machine: int


def rollout_bytes(config: RunConfig, model: ModelFields, longest: int) -> RolloutBytes:
    """Bytes of responses of at most `longest` tokens, with their prompts."""
    r = config.rollout
    responses = r.groups_per_step * r.group_size
    sampled, ids = min(r.max_response_tokens, longest), expected_ids(r)
    routes = model.sends_routes(config.train.replay)
    sample = _of_sample(r, model, longest, sampled, routes=routes)
    answer = _of_answer(r, model, longest, sampled, routes=routes, attached=bool(config.sglang.urls))
    groups = r.groups_per_step * (2 + r.max_staleness) + r.spare_groups
    stages, taught = config.megatron.stage_layers(model.num_layers), 4 if config.teacher.serves else 0
    shards = [
        _of_shard(r, model, longest, sampled, [*chain(*stage)], routes=routes, last=stage is stages[-1], taught=taught)
        for stage in stages
    ]
    store = _sum([_times(each, responses) for each in shards] + [_times(sample, responses)] * (r.managers > 1))
    return RolloutBytes(
        responses=responses,
        tokens=responses * longest,
        support_ids=ids,
        most_ids=r.top_k if r.truncated else 0,
        answers=_times(answer, responses),
        held=_times(sample, groups * r.group_size),
        store=store,
        machine=_of_machine(
            config.layout, config.cluster.gpus_per_node, responses, max(each.total for each in shards), store.total
        ),
    )


def expected_ids(r: RolloutConfig) -> float:
    """Mean number of ids in the support of a token; 0 without truncated sampling.

    Under top-p by `MEASURED_IDS`. Under min-p an id has at least min_p times the likeliest one's probability. If that
    is nearly 1, there are at most 1 / min_p ids.
    """
    if not r.truncated:
        return 0.0
    most = max(r.top_k, 1)
    known = [*MEASURED_IDS.items(), (1.0, float(max(most, *MEASURED_IDS.values())))]
    by_top_p = float(np.exp(np.interp(r.top_p, [p for p, _ in known], [log(n) for _, n in known])))
    by_min_p = 1 / r.min_p if r.min_p > 0 else most
    return min(most, by_top_p if r.top_p < 1 else most, by_min_p)


def _of_sample(r: RolloutConfig, model: ModelFields, tokens: int, sampled: int, *, routes: bool) -> TokenBytes:
    """Bytes of one response in memory."""
    return TokenBytes(
        SAMPLE_COLUMNS * tokens,
        tokens * (_route_bytes(model, len(model.moe_layer_ids)) + ROUTE_ROW) if routes else 0,
        _support_bytes(r, tokens, sampled),
    )


def _of_answer(
    r: RolloutConfig, model: ModelFields, tokens: int, sampled: int, *, routes: bool, attached: bool
) -> TokenBytes:
    """Bytes of one response in an engine's answers. Ids of supports are decimal numbers there, and routes base64, for
    all layers; external engines send these as int32."""
    read = 0
    if routes:
        width = INT32 if attached else narrowest_dtype(model.num_experts).itemsize
        read = int(tokens * model.num_layers * model.top_k * width * BASE64)
    digits = len(str(model.vocab_size - 1)) + 1
    return TokenBytes(ANSWER_COLUMNS * sampled, read, int(sampled * expected_ids(r) * digits))


def _of_shard(
    r: RolloutConfig, model: ModelFields, tokens: int, sampled: int, layers: list[int], *, routes: bool, last: bool,
    taught: int,
) -> TokenBytes:  # fmt: skip
    """Bytes of one response in the shard of a pipeline stage with these layers. Only the last stage has supports.

    Args:
        taught: bytes of a token's log-prob of a teacher.
    """
    mine = set(layers) & set(model.moe_layer_ids)
    return TokenBytes(
        (SHARD_COLUMNS + taught) * tokens,
        tokens * (_route_bytes(model, len(mine)) + ROUTE_ROW) if routes else 0,
        _support_bytes(r, tokens, sampled) if last else 0,
    )


def _of_machine(layout: ParallelLayout, per_node: int, responses: int, each: int, most: int) -> int:
    """Bytes of the shards of a trainer host, with `each` per response; `most`: of all shards. Ranks of a stage with the
    same data share one shard."""
    shards = -(-min(per_node, layout.world_size) // (layout.tp * layout.cp))
    return min(shards * -(-responses // layout.dp) * each, most)


def _route_bytes(model: ModelFields, layers: int) -> int:
    return layers * model.top_k * narrowest_dtype(model.num_experts).itemsize


def _support_bytes(r: RolloutConfig, tokens: int, sampled: int) -> int:
    return SUPPORT_ROW * tokens + int(SUPPORT_ID * sampled * expected_ids(r)) if r.truncated else 0


def _times(each: TokenBytes, count: int) -> TokenBytes:
    return TokenBytes(each.columns * count, each.routes * count, each.supports * count)


def _sum(parts: list[TokenBytes]) -> TokenBytes:
    return TokenBytes(sum(p.columns for p in parts), sum(p.routes for p in parts), sum(p.supports for p in parts))
