"""Fixed text that engines and trainer score: log-probs and routed experts must agree.

Equal parameters do not guarantee equal results. An engine may hold tensors derived from older parameters, number
experts differently, or be configured for another model. The probe reveals all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mslime.data.routes import Routes, narrowest_dtype
from mslime.data.shard import TrainShard

TEXT = (
    "The river rises in the hills north of the town, and after heavy rain it carries so much sand that the water turns "
    "brown for a week. Question: a boat goes 18 km downstream in 1.5 hours and back in 2.25 hours. How fast is the "
    "current? Down it makes 18 / 1.5 = 12 km/h, up 18 / 2.25 = 8 km/h, so the current has (12 - 8) / 2 = 2 km/h.\n"
    'def speed(way: float, hours: float) -> float:\n    """Kilometres per hour."""\n    return way / hours\n\n'
    "Der Fluss entspringt in den Bergen. La rivière prend sa source dans les collines. 河流发源于山中。"
)
"""Prose, numbers, code and other languages, which use many experts."""
MOST_TOKENS, NEW_TOKENS = 128, 8
"""Most tokens of the text, and most tokens that an engine adds to it."""
SAME_ROUTES = 0.5
"""Least share of (token, layer) pairs with the same experts. Rounding changes some, another numbering nearly all; a
wrong router also changes the log-probs.
"""


@dataclass(frozen=True)
class ProbeScores:
    """Scores of a text of `given` tokens and of the tokens that an engine added, T in all.

    Attributes:
        tokens: [T] int32.
        log_probs: [T] float32, natural log of each token's probability after those before it, at temperature 1; 0 for
            the first.
        routes: [rows, MoE layers, top-k] expert ids, of the first tokens; None if they are not recorded.
    """

    tokens: NDArray[np.int32]
    given: int
    log_probs: NDArray[np.float32]
    routes: NDArray[np.integer] | None = None

    def may_be_followed(self, num_experts: int) -> bool:
        """Whether there are routes, and each has distinct, existing experts."""
        if self.routes is None or not self.routes.size:
            return False
        experts = np.sort(self.routes.astype(np.int64), axis=-1)
        return bool(experts.min() >= 0 and experts.max() < num_experts and (np.diff(experts) > 0).all())


@dataclass(frozen=True)
class ProbeDifferences:
    """Differences between scores of an engine and of the trainer.

    Attributes:
        log_probs: nats; the larger median of given tokens and of added tokens. A median, because rounding decides
            between experts of nearly equal scores, and changes those tokens by much.
        routes: share of (token, layer) pairs with the same set of experts; 1 if they are unknown.
    """

    log_probs: float
    routes: float = 1.0

    @classmethod
    def between(cls, one: ProbeScores, other: ProbeScores) -> ProbeDifferences:
        """Compare two scores. Raises AssertionError if tokens, layers or top-k differ."""
        assert np.array_equal(one.tokens, other.tokens), "the scores are of different tokens"
        apart = np.abs(one.log_probs.astype(np.float64) - other.log_probs)
        parts = (apart[1 : one.given], apart[one.given :])
        worst = float(np.max([np.median(part) for part in parts if len(part)]))  # NaN if one part is NaN
        if one.routes is None or other.routes is None:
            return cls(worst)
        rows = min(len(one.routes), len(other.routes))
        first, second = (np.sort(routes[:rows].astype(np.int64), axis=-1) for routes in (one.routes, other.routes))
        assert first.shape == second.shape, f"routes {first.shape} and {second.shape}"
        return cls(worst, float((first == second).all(-1).mean()) if first.size else 1.0)

    def too_large(self, tolerance: float) -> bool:
        """Whether rounding cannot explain one of them. `tolerance`: nats."""
        return not self.log_probs <= tolerance or self.routes < SAME_ROUTES


@dataclass(frozen=True)
class RoutedRows:
    """Routes that one rank computed, of some tokens in some layers.

    Attributes:
        tokens: [rows] int64, indices over all sequences.
        layer_ids: global ids of the layers.
        experts: [rows, layers, top-k] int16.
    """

    tokens: NDArray[np.int64]
    layer_ids: tuple[int, ...]
    experts: NDArray[np.int16]


def fitted(ids: Sequence[int], vocab_size: int, longest: int) -> list[int]:
    """Ids of the text that fit an engine with sequences of at most `longest` tokens; empty if too few remain to
    compare. Ids outside the vocabulary are left out.
    """
    room = min(MOST_TOKENS, longest // 2 - NEW_TOKENS)
    found = [token for token in ids if token < vocab_size][: max(room, 0)]
    return found if len(found) > 1 else []


def joined_routes(parts: Sequence[RoutedRows], tokens: int) -> NDArray[np.int16] | None:
    """Join the ranks' parts into [T, layers, top-k], layers in order; None if all are empty.

    Raises AssertionError if a token's routes in a layer are missing.
    """
    if not parts:
        return None
    columns = {layer: column for column, layer in enumerate(sorted({id for part in parts for id in part.layer_ids}))}
    whole = np.full((tokens, len(columns), parts[0].experts.shape[-1]), -1, np.int16)
    for part in parts:
        for index, layer in enumerate(part.layer_ids):
            whole[part.tokens, columns[layer]] = part.experts[:, index]
    assert int(whole.min(initial=0)) >= 0, "routes that no rank computed"
    return whole


def shard_of(sequences: Sequence[NDArray[np.int32]], routes: Routes | None = None) -> TrainShard:
    """Shard of sequences without trained tokens for a forward pass, one per micro-batch.

    Args:
        routes: of all their tokens.
    """
    lengths = np.asarray([len(tokens) for tokens in sequences], np.int64)
    zeros = np.zeros(int(lengths.sum()), np.float32)
    return TrainShard(
        tokens=np.concatenate(sequences).astype(np.int32),
        lengths=lengths,
        sequence_ids=np.arange(len(sequences)),
        loss_mask=np.zeros(len(zeros), np.bool_),
        weights=zeros,
        advantages=zeros,
        behaviour_log_probs=zeros,
        micro_batches=tuple((index,) for index in range(len(sequences))),
        routes=routes,
        segment_ages=None if routes is None else np.zeros(len(zeros), np.int32),
    )


def routes_of(probes: Sequence[ProbeScores], layer_ids: Sequence[int], num_experts: int) -> Routes:
    """Routes of scored texts, laid end to end; tokens without routes are left to the routers."""
    rows, masks = list[NDArray[np.integer]](), list[NDArray[np.bool_]]()
    for each in probes:
        assert each.routes is not None, "no routes were requested"
        known, total = min(len(each.routes), len(each.tokens)), len(each.tokens)
        rows.append(np.concatenate([each.routes[:known], np.zeros((total - known, *each.routes.shape[1:]), np.int64)]))
        masks.append(np.arange(total) < known)
    experts = np.concatenate(rows).astype(narrowest_dtype(num_experts))
    return Routes(experts, np.concatenate(masks), tuple(layer_ids))
