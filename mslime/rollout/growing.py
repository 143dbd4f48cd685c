"""The sequences of one rollout: how they grow, that nobody else changed them, and which of them are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from mslime.backends.sglang.generating import Finish
from mslime.data.sample import Group, Sample


class TokenBooks(Protocol):
    """Who is told what becomes of the tokens of a rollout under way."""

    def generated(self, sample: Sample, tokens: int) -> None:
        """An engine returned `tokens` more of a sample, which are in it."""
        ...

    def dropped(self, tokens: int, reason: str) -> None:
        """So many tokens that were to be trained are gone."""
        ...

    def masked(self, tokens: int, reason: str) -> None:
        """So many tokens that were to be trained are context from now on."""
        ...


class NoBooks:
    """For rollouts of which nothing is trained."""

    def generated(self, sample: Sample, tokens: int) -> None:
        """Nobody counts."""

    def dropped(self, tokens: int, reason: str) -> None:
        """Nobody counts."""

    def masked(self, tokens: int, reason: str) -> None:
        """Nobody counts."""


@dataclass(frozen=True)
class TakenTurn:
    """A turn of a sequence that a rollout takes in.

    Attributes:
        start, end: of its tokens, all of which the model sampled.
        finish: how it ended.
        masked: (start, end) of tokens within it that are not trained.
    """

    start: int
    end: int
    finish: Finish
    masked: tuple[tuple[int, int], ...] = ()


@dataclass(eq=False)
class GrowingSample:
    """A sample that grows.

    Attributes:
        turn_start: where the turn begins that is generated now or comes next.
        finish: how the newest turn ended; None when there is none, or it was cancelled.
        newest: number of its newest turn among all turns of the rollout; 0 when it has none.
        busy: a turn is generated.
        source, at: the sequence that it was branched off, and how many tokens of that it begins with.
        trained: tokens that were to be trained when `note` was called.
    """

    sample: Sample
    turn_start: int
    finish: Finish | None = None
    newest: int = 0
    busy: bool = False
    source: GrowingSample | None = None
    at: int = 0
    trained: int = 0
    _known: tuple[NDArray[Any], ...] = ()

    def __post_init__(self) -> None:
        self.note()

    def note(self) -> None:
        """What it holds now is right. From now on its columns are read only: whoever changes them otherwise than by
        another column, which is noticed, is told so where it is tried."""
        self._known, self.trained = self._columns(), self.sample.trainable_tokens
        for column in self._known:
            column.flags.writeable = False

    def end_turn(self, number: int) -> None:
        """Its turn ends here, as the rollout's turn `number`; the next one begins here."""
        if len(self.sample) > self.turn_start:
            self.sample.turns.append((self.turn_start, number))
        self.turn_start = len(self.sample)

    @property
    def untouched(self) -> bool:
        """Whether it holds what `note` saw."""
        return all(now is known for now, known in zip(self._columns(), self._known, strict=True))

    def _columns(self) -> tuple[NDArray[Any], ...]:
        """What only the engine and the environment may write."""
        return self.sample.tokens, self.sample.loss_mask, self.sample.log_probs


def settle(group: Group, grown: Sequence[GrowingSample], chosen: Sequence[GrowingSample], books: TokenBooks) -> None:
    """Let a rollout consist of the chosen ones of its sequences, in this order.

    What only the others train is trained in the first chosen sequence that begins with it; the rest is dropped.

    Args:
        grown: all sequences of the rollout, in the order in which they were begun.
    """
    for other in (g for g in grown if g not in chosen):
        inherited, reached = 0, other.at  # what is before that is trained elsewhere
        for heir in (g for g in grown if g in chosen):
            if (shared := _shared(heir, other)) > reached:
                inherited += heir.sample.adopt(other.sample, shared, reached)
                reached = shared
        books.dropped(other.sample.trainable_tokens - inherited, "unused")
    group.set_parts(grown[0].sample.number, [g.sample for g in chosen])


def _shared(heir: GrowingSample, other: GrowingSample) -> int:
    """With how many tokens of the other it begins, which it or a sequence before it was branched off; 0 else."""
    shared, source = heir.at, heir.source
    while source is not None and source is not other:
        shared, source = min(shared, source.at), source.source
    return 0 if source is None else shared
