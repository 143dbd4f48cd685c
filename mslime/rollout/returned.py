"""Growing sequences of a rollout, and validation of a rollout function's result: sequences to train, or an error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from mslime.backends.sglang.generating import Finish
from mslime.config.errors import RolloutError
from mslime.data.sample import Group, Sample, check_invariants
from mslime.extensions import checked_metrics
from mslime.rollout.agents.session import ReplyTurn
from mslime.rollout.workflow import Episode

# Sequences of one rollout: growth, protection against changes by user code, and the choice of trained ones.


class TokenCounter:
    """Counts the fate of tokens of an unfinished rollout. This base class counts nothing: its rollout is not
    trained."""

    def generated(self, sample: Sample, tokens: int) -> None:
        """An engine returned `tokens` more tokens of a sample, which are already added."""

    def dropped(self, tokens: int, reason: str) -> None:
        """`tokens` trainable tokens were discarded."""

    def masked(self, tokens: int, reason: str) -> None:
        """`tokens` trainable tokens became context."""


@dataclass(frozen=True)
class TakenTurn:
    """A turn of a sequence that a rollout takes over.

    Attributes:
        start, end: of its tokens, all sampled by the model.
        finish: how it ended.
        masked: (start, end) of its untrained tokens.
    """

    start: int
    end: int
    finish: Finish
    masked: tuple[tuple[int, int], ...] = ()


@dataclass(eq=False)
class GrowingSample:
    """A growing sample.

    Attributes:
        turn_start: start of the current or next turn.
        finish: how the newest turn ended; None if there is none, or if it was cancelled.
        newest: number of its newest turn among all turns of the rollout; 0 if it has none.
        busy: a turn is being generated.
        source, at: the sequence that it was branched from, and how many of its tokens it begins with.
        trained: trainable tokens when `note` was called.
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
        """Record the present columns as valid and make them read-only: user code that writes to them fails at once.
        `untouched` detects a replaced column."""
        self._known, self.trained = self._columns(), self.sample.trainable_tokens
        for column in self._known:
            column.flags.writeable = False

    def end_turn(self, number: int) -> None:
        """End its turn here, as the rollout's turn `number`; the next one begins here."""
        if len(self.sample) > self.turn_start:
            self.sample.turns.append((self.turn_start, number))
        self.turn_start = len(self.sample)

    @property
    def untouched(self) -> bool:
        """Whether its columns are those recorded by `note`."""
        return all(now is known for now, known in zip(self._columns(), self._known, strict=True))

    def _columns(self) -> tuple[NDArray[Any], ...]:
        """Columns that only the engine and the environment may write."""
        return self.sample.tokens, self.sample.loss_mask, self.sample.log_probs


def settle(
    group: Group, grown: Sequence[GrowingSample], chosen: Sequence[GrowingSample], tracker: TokenCounter
) -> None:
    """Make the chosen sequences, in this order, the result of a rollout.

    Tokens that only other sequences train are trained in the first chosen sequence that begins with them; the rest is
    dropped.

    Args:
        grown: all sequences of the rollout, in the order in which they were begun.
    """
    for other in (g for g in grown if g not in chosen):
        inherited, reached = 0, other.at  # earlier tokens are trained elsewhere
        for heir in (g for g in grown if g in chosen):
            if (shared := _shared(heir, other)) > reached:
                inherited += heir.sample.adopt(other.sample, shared, reached)
                reached = shared
        tracker.dropped(other.sample.trainable_tokens - inherited, "unused")
    group.set_parts(grown[0].sample.number, [g.sample for g in chosen])


def _shared(heir: GrowingSample, other: GrowingSample) -> int:
    """Number of leading tokens that `heir` shares with `other`, if it, or a source of it, was branched from `other`;
    else 0."""
    shared, source = heir.at, heir.source
    while source is not None and source is not other:
        shared, source = min(shared, source.at), source.source
    return 0 if source is None else shared


OWN = "return samples of engine.new_sample() and engine.branch()"
Mistake = Callable[[str, str], RolloutError]
"""An error that names the function and its rollout, from a rule and a hint."""
FindReply = Callable[[str, int], ReplyTurn | None]
"""Finds the turn of a response's choice, by the response id that the agent received."""


@dataclass(frozen=True)
class RolloutOutcome:
    """Validated result of a rollout function.

    Attributes:
        chosen: the sequences that are trained, at least one.
        steps: process rewards by id() of the sample in which their tokens were generated, chosen or not.
    """

    chosen: list[GrowingSample]
    reward: float | None
    steps: Mapping[int, list[tuple[int, float]]]
    metrics: Mapping[str, float]


def outcome_of(returned: object, grown: Sequence[GrowingSample], reply: FindReply, error: Mistake) -> RolloutOutcome:
    """Validate a function's return value against the sequences of its rollout. Raises RolloutError."""
    episode = _episode(returned, error)
    if episode.failed:
        hint = "check the environment, or set rollout.on_error: drop to drop such rollouts"
        raise error(f"reported a failed rollout: {episode.failed}", hint)
    chosen = _chosen(episode.samples, grown, error)
    for one in chosen:
        _check_sample(one.sample, error)
    metrics = checked_metrics(episode.metrics)
    if isinstance(metrics, str):
        raise error(metrics, "return numbers under plain names")
    return RolloutOutcome(chosen, _reward(episode, chosen, error), _steps(episode, chosen, reply, error), metrics)


def _episode(returned: object, error: Mistake) -> Episode:
    if returned is None or isinstance(returned, Sample):
        return Episode(None if returned is None else [returned])
    if isinstance(returned, list | tuple):
        return Episode(returned)
    if not isinstance(returned, Episode):
        raise error(f"returned {returned!r:.80}", f"{OWN}, an Episode, or None")
    return returned


def _chosen(samples: Sequence[Sample] | None, grown: Sequence[GrowingSample], error: Mistake) -> list[GrowingSample]:
    """The sequences named by an episode; otherwise all that have turns, in the order of their newest turns."""
    if samples is None:
        found = sorted((g for g in grown if g.finish is not None), key=lambda g: g.newest)
    else:
        by_id = {id(g.sample): g for g in grown}
        found = [by_id[id(s)] for s in samples if id(s) in by_id]
        if len(found) < len(samples):
            wrong = next(s for s in samples if id(s) not in by_id)
            raise error(f"returned {wrong!r:.80}", OWN)
        if len({id(g) for g in found}) < len(found):
            raise error("returned a sample twice", "return each sequence once")
    if any(g.busy for g in found):  # checked before `finish`, which is None until a turn has ended
        raise error("returned while a turn was being generated", "await it, or cancel it")
    if not found or any(g.finish is None for g in found):
        raise error(
            "returned without generating",
            "call engine.generate at least once for each sample; a cache in an agent's "
            "client may have answered instead",
        )
    return found


def _check_sample(sample: Sample, error: Mistake) -> None:
    try:
        json.dumps(sample.metadata)
    except (TypeError, ValueError) as problem:
        raise error(f"left metadata that cannot be saved: {problem}", "keep text, numbers, lists and objects "
                    "in it") from problem  # fmt: skip
    try:
        check_invariants(sample)
    except AssertionError as problem:
        raise error(f"left a broken sample: {problem}", "change nothing but its metadata") from problem


def _reward(episode: Episode, chosen: Sequence[GrowingSample], error: Mistake) -> float | None:
    """The rollout's reward, from the episode or from one of its samples."""
    given = [r for r in (episode.reward, *(g.sample.reward for g in chosen)) if r is not None]
    for reward in given:
        if not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise error(f"set the invalid reward {reward!r:.80}", "set a finite number, or None to use `reward`")
    if len(set(given)) > 1:
        raise error(f"set several rewards: {sorted(given)}", "set one, and use Episode.step_rewards for steps")
    return float(given[0]) if given else None


def _steps(
    episode: Episode, chosen: Sequence[GrowingSample], reply: FindReply, error: Mistake
) -> dict[int, list[tuple[int, float]]]:
    steps: dict[int, list[tuple[int, float]]] = {}
    for where, at, reward in episode.step_rewards:
        if isinstance(where, str):
            place, found = f"choice {at!r:.40} of {where!r:.60}", _of_reply(reply(where, at), chosen)
            hint = "give the id of a response to an agent, the index of a choice, and a finite number"
        else:
            place, found = f"token {at!r:.40}", _of_sample(where, at, chosen)
            hint = "give a returned sequence, a position in it, and a finite number"
        if found is None or not math.isfinite(reward):
            raise error(f"returned the invalid step reward {reward!r:.40} at {place}", hint)
        steps.setdefault(id(found[0]), []).append((int(found[1]), float(reward)))
    return steps


def _of_sample(sample: Sample, at: int, chosen: Sequence[GrowingSample]) -> tuple[Sample, int] | None:
    """(sample in which the token at a position of a chosen sequence was generated, position)."""
    named = next((g for g in chosen if g.sample is sample and 0 <= at < len(sample)), None)
    return None if named is None else (_origin(named, at), at)


def _of_reply(turn: ReplyTurn | None, chosen: Sequence[GrowingSample]) -> tuple[Sample, int] | None:
    """(sample in which a reply's last token was generated, position), if a chosen sequence contains that token."""
    if turn is None:
        return None
    last = turn.end - 1
    contained = last < len(turn.sample) and any(_origin(g, last) is turn.sample for g in chosen)
    return (turn.sample, last) if contained else None


def _origin(grown: GrowingSample, at: int) -> Sample:
    """The sequence in which the token at a position of a sequence was generated."""
    while grown.source is not None and at < grown.at:
        grown = grown.source
    return grown.sample
