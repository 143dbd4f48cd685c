"""transformers as the reference of engines' results: log-probs and routes of whole sequences, including ties."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from mslime.data.sample import Sample

TIE = 1e-5
"""Router probabilities closer than this are equal in float32: either expert may be the k-th."""


class Reference:
    """transformers' logits and routes for whole sequences.

    Attributes:
        near: of the last call, the (row, layer, experts [top-k]) that would do as well as those chosen.
    """

    def __init__(self, path: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self.routes: list[torch.Tensor] = []
        self.ties: torch.Tensor | None = None
        self.near: list[tuple[int, int, NDArray[np.int64]]] = []
        for layer in self.model.model.layers:
            layer.mlp.gate.register_forward_hook(self._route)

    def __call__(
        self, ids: list[int], ties: NDArray[np.integer] | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Token ids [T] -> float64 logits [T, vocabulary], routes [T, layers, top-k].

        Args:
            ties: [at most T, layers, top-k] an engine's routes, which decide ties of the router's own choice.
        """
        self.routes.clear()
        self.near.clear()
        self.ties = None if ties is None else torch.as_tensor(ties.astype(np.int64))
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0]
        return logits.double().numpy(), torch.stack(self.routes, 1).numpy()

    def _route(self, module: Any, inputs: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, chosen = output
        if self.ties is not None:
            theirs = self.ties[:, len(self.routes)]
            probs = logits.softmax(-1)[: len(theirs)]
            least = probs.gather(1, chosen[: len(theirs)])[:, -1]
            taken = probs.gather(1, theirs)
            tied = (taken.min(1).values < least) & (taken.min(1).values > least - TIE)
            chosen, weights = chosen.clone(), weights.clone()
            chosen[: len(theirs)][tied] = theirs[tied]
            weights[: len(theirs)][tied] = (taken / taken.sum(1, keepdim=True))[tied]
        self._find_near(logits.softmax(-1), chosen)
        self.routes.append(chosen)
        return logits, weights, chosen

    def _find_near(self, probs: torch.Tensor, chosen: torch.Tensor) -> None:
        best, by_rank = probs.topk(chosen.shape[1] + 1)
        for row in torch.nonzero(best[:, -2] - best[:, -1] < TIE)[:, 0].tolist():
            *sure, last, other = by_rank[row].tolist()
            experts = np.array([*sure, other if last in chosen[row] else last])
            self.near.append((row, len(self.routes), experts))


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def versions_of(sample: Sample) -> NDArray[np.int64]:
    """[T] version of the weights that sampled each token; -1 for tokens that were not sampled."""
    versions = np.full(len(sample), -1)
    for segment in sample.segments:
        versions[segment.start : segment.end] = -1 if segment.version is None else segment.version
    return versions


def makers_of(sample: Sample, routes_before: int | None = None) -> NDArray[np.int64]:
    """[T - 1] version of the weights that made each row of the routes.

    Row t is made when token t is read, by the weights that sampled the next sampled token.

    Args:
        routes_before: version whose weights recomputed the rows of older tokens.
    """
    makers = versions_of(sample)[1:]
    for t in reversed(range(len(makers) - 1)):
        makers[t] = makers[t + 1] if makers[t] == -1 else makers[t]
    return makers if routes_before is None else np.maximum(makers, routes_before)


def scores(sample: Sample, logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """[T] log-prob of every token but the first (0), from logits [T, vocabulary]."""
    log_probs = log_softmax(logits)[np.arange(len(sample) - 1), sample.tokens[1:]]
    return np.concatenate([[0.0], log_probs])


def as_told(
    reference: Reference,
    sample: Sample,
    made: NDArray[np.bool_],
    at: NDArray[np.int64],
    score: Callable[[Sample, NDArray[np.float64]], NDArray[np.float64]],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Log-probs [T] and routes [T, layers, top-k] of a sample, with ties decided as the engine decided them.

    The sample's routes decide ties in rows made by these weights. Tokens that the engine read again after an update
    have no recorded routes: there, the choice with the nearest log-probs is taken.

    Args:
        made: [T - 1] rows of the sample's routes that these weights made.
        at: tokens that these weights sampled.
        score: [T] log-probs of the sample from logits [T, vocabulary].
    """
    found = [(score(sample, logits), routes) for logits, routes in _readings(reference, sample, made, at[-1])]
    return min(found, key=lambda pair: float(np.abs(pair[0][at] - sample.log_probs[at]).max()))


def _readings(
    reference: Reference, sample: Sample, made: NDArray[np.bool_], last: int
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """One reading for every way to decide the ties in unrecorded rows that these weights read before token `last`."""
    assert sample.routes is not None
    ids = sample.tokens.tolist()
    _, own = reference(ids)
    ties = np.where(made[:, None, None], sample.routes.experts.astype(np.int64), own[:-1])
    reference(ids, ties=ties)
    near = [found for found in reference.near if found[0] < last and not made[found[0]]]
    assert len(near) < 8, "so many ties are no chance"
    for turned in itertools.chain.from_iterable(itertools.combinations(near, n) for n in range(len(near) + 1)):
        decided = ties.copy()
        for row, layer, experts in turned:
            decided[row, layer] = experts
        yield reference(ids, ties=decided)
