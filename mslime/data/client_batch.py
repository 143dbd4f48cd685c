"""Data of `mslime serve` clients for a forward and backward pass, and its conversion to shards.

A datum has an input and, for each of its tokens, a target, which need not be the token that follows: row t predicts
`targets[t]` from `tokens[: t + 1]`. A shard's columns are about the token after a row. A datum of T rows therefore
becomes a sequence of T + 1 tokens, whose column t + 1 is the datum's row t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mslime.config.layout import ParallelLayout
from mslime.config.serve import LossChoice
from mslime.data.packing import Packer
from mslime.data.shard import TrainShard, joined, renumbered


@dataclass(frozen=True)
class Datum:
    """One sequence. All [T].

    Attributes:
        tokens, targets: int32.
        weights: float32, of cross_entropy.
        advantages, log_probs: float32, of the policy losses; the second is of the policy that sampled.
    """

    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    weights: NDArray[np.float32]
    advantages: NDArray[np.float32]
    log_probs: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class ClientShard:
    """Part of a client's data for one data-parallel rank.

    Attributes:
        shard: its columns; `sequence_ids` are numbers of data. targets: [N] int32, 0 for the first of each sequence.
        loss: the loss to compute.
    """

    shard: TrainShard
    targets: NDArray[np.int32]
    loss: LossChoice


@dataclass(frozen=True)
class PassResult:
    """Result of a pass over data.

    Attributes:
        loss: summed over all data.
        log_probs: of each datum's targets, [T] float32.
    """

    loss: float
    log_probs: list[NDArray[np.float32]]


def client_shards(
    data: Sequence[Datum], loss: LossChoice, layout: ParallelLayout, token_budget: int, *, packed: bool,
    multiple_of: int = 1, quadratic_tokens: float | None = None,
) -> list[ClientShard]:  # fmt: skip
    """Shards for all data-parallel ranks, with the same number of micro-batches. See `packing.build_shards`."""
    lengths = np.asarray([len(datum) + 1 for datum in data], np.int64)
    packer = Packer(token_budget * layout.cp, layout.dp, multiple_of, quadratic_tokens)
    plan = packer.pack(lengths) if packed else packer.one_each(lengths)
    return [_of_rank(data, micro_batches, loss) for micro_batches in plan]


def _of_rank(data: Sequence[Datum], micro_batches: Sequence[Sequence[int]], loss: LossChoice) -> ClientShard:
    mine = [i for micro_batch in micro_batches for i in micro_batch]
    zero = np.zeros(1, np.float32)

    def moved(column: str) -> NDArray[np.float32]:
        return joined([part for i in mine for part in (zero, getattr(data[i], column))], np.float32)

    shard = TrainShard(
        tokens=joined([np.append(data[i].tokens, data[i].targets[-1]) for i in mine], np.int32),
        lengths=np.asarray([len(data[i]) + 1 for i in mine], np.int64),
        sequence_ids=np.asarray(mine, np.int64),
        loss_mask=joined([np.arange(len(data[i]) + 1) > 0 for i in mine], np.bool_),
        weights=moved("weights"),
        advantages=moved("advantages"),
        behaviour_log_probs=moved("log_probs"),
        micro_batches=renumbered(micro_batches),
    )
    targets = joined([np.append(np.int32(0), data[i].targets) for i in mine], np.int32)
    return ClientShard(shard, targets, loss)


def by_datum(found: Sequence[tuple[ClientShard, NDArray[np.float32]]], count: int) -> list[NDArray[np.float32]]:
    """Split [N] values of the data-parallel ranks' shards into [T] per datum."""
    out: dict[int, NDArray[np.float32]] = {}
    for part, column in found:
        for number, (start, stop) in zip(part.shard.sequence_ids.tolist(), part.shard.spans(), strict=True):
            out[int(number)] = column[start + 1 : stop]
    assert sorted(out) == list(range(count)), f"{len(out)} of {count} data were computed"
    return [out[i] for i in range(count)]
