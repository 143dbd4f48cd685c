"""A fixed text of which engines and trainer must say the same: its log-probs, and the experts of its tokens.

Equal parameters do not make an engine compute what the trainer computes: it may hold tensors that it derived from
older parameters, count experts otherwise, or be set up for another model. All that shows here.
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
"""Prose, numbers, code and other languages, so that many experts have something to do."""
MOST_TOKENS, NEW_TOKENS = 128, 8
"""Of the text, at most; and of those that an engine adds to it."""
SAME_ROUTES = 0.5
"""The least share of (token, layer) pairs with the same experts. Rounding changes some, another numbering nearly all;
a router that computes something else shows in the log-probs too."""


@dataclass(frozen=True)
class Probed:
    """What a model says of a text of `given` tokens, and of those that an engine added to it, T in all.

    Attributes:
        tokens: [T] int32.
        log_probs: [T] float32, natural log of each token's probability after those before it, at temperature 1; 0 for
            the first.
        routes: [rows, MoE layers, top-k] expert ids, of the first tokens; None where nobody records them.
    """

    tokens: NDArray[np.int32]
    given: int
    log_probs: NDArray[np.float32]
    routes: NDArray[np.integer] | None = None

    def may_be_followed(self, num_experts: int) -> bool:
        """Whether there are routes, and each names experts that exist, none of them twice."""
        if self.routes is None or not self.routes.size:
            return False
        experts = np.sort(self.routes.astype(np.int64), axis=-1)
        return bool(experts.min() >= 0 and experts.max() < num_experts and (np.diff(experts) > 0).all())


@dataclass(frozen=True)
class ProbeDifferences:
    """Between what an engine and the trainer say.

    Attributes:
        log_probs: nats; the median over the given tokens, or over the added ones where that is larger. A median, for
            where two experts are about equally good rounding decides, and the tokens that it concerns differ by much.
        routes: share of (token, layer) pairs with the same set of experts; 1 where they are not known.
    """

    log_probs: float
    routes: float = 1.0

    @classmethod
    def between(cls, one: Probed, other: Probed) -> ProbeDifferences:
        """Raises AssertionError when they are not of the same tokens, layers and top-k."""
        assert np.array_equal(one.tokens, other.tokens), "of other tokens"
        apart = np.abs(one.log_probs.astype(np.float64) - other.log_probs)
        parts = (apart[1 : one.given], apart[one.given :])
        worst = float(np.max([np.median(part) for part in parts if len(part)]))  # NaN where one is
        if one.routes is None or other.routes is None:
            return cls(worst)
        rows = min(len(one.routes), len(other.routes))
        first, second = (np.sort(routes[:rows].astype(np.int64), axis=-1) for routes in (one.routes, other.routes))
        assert first.shape == second.shape, f"routes {first.shape} and {second.shape}"
        return cls(worst, float((first == second).all(-1).mean()) if first.size else 1.0)

    def too_large(self, tolerance: float) -> bool:
        """Whether one of them cannot come from rounding. `tolerance`: nats."""
        return not self.log_probs <= tolerance or self.routes < SAME_ROUTES


@dataclass(frozen=True)
class RoutedRows:
    """Routes that one rank computed: of some tokens, in some layers.

    Attributes:
        tokens: [rows] int64, which, counted over all sequences.
        layer_ids: global ids of the layers.
        experts: [rows, layers, top-k] int16.
    """

    tokens: NDArray[np.int64]
    layer_ids: tuple[int, ...]
    experts: NDArray[np.int16]


def fitted(ids: Sequence[int], vocab_size: int, longest: int) -> list[int]:
    """What of the text's token ids an engine is given whose sequences have at most `longest` tokens; empty where that
    leaves nothing to compare. Ids that the model lacks are left out."""
    room = min(MOST_TOKENS, longest // 2 - NEW_TOKENS)
    found = [token for token in ids if token < vocab_size][: max(room, 0)]
    return found if len(found) > 1 else []


def joined_routes(parts: Sequence[RoutedRows], tokens: int) -> NDArray[np.int16] | None:
    """[T, layers, top-k] from what the ranks have, layers in order; None where none has anything.

    Raises AssertionError when a token's routes in a layer are missing.
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
    """Sequences of which nothing is trained, as each rank takes them for a forward pass, one a micro-batch.

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


def routes_of(probes: Sequence[Probed], layer_ids: Sequence[int], num_experts: int) -> Routes:
    """The routes of texts that engines answered, laid end to end; tokens that have none are left to the routers."""
    rows, masks = list[NDArray[np.integer]](), list[NDArray[np.bool_]]()
    for each in probes:
        assert each.routes is not None, "no routes were asked for"
        known, total = min(len(each.routes), len(each.tokens)), len(each.tokens)
        rows.append(np.concatenate([each.routes[:known], np.zeros((total - known, *each.routes.shape[1:]), np.int64)]))
        masks.append(np.arange(total) < known)
    experts = np.concatenate(rows).astype(narrowest_dtype(num_experts))
    return Routes(experts, np.concatenate(masks), tuple(layer_ids))
