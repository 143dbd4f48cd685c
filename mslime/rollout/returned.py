"""Sequences of a rollout while they grow, and what a rollout function returned: what is trained, or an error."""

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
from mslime.rollout.agents.chat.session import ReplyTurn
from mslime.rollout.workflow import Episode

# The sequences of one rollout: how they grow, that nobody else changed them, and which of them are trained.


class TokenCounter:
    """Counts what becomes of the tokens of a rollout under way. This one counts nothing: its rollout is not trained."""

    def generated(self, sample: Sample, tokens: int) -> None:
        """An engine returned `tokens` more of a sample, which are in it."""

    def dropped(self, tokens: int, reason: str) -> None:
        """So many tokens that were to be trained are gone."""

    def masked(self, tokens: int, reason: str) -> None:
        """So many tokens that were to be trained are context from now on."""


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


def settle(
    group: Group, grown: Sequence[GrowingSample], chosen: Sequence[GrowingSample], tracker: TokenCounter
) -> None:
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
        tracker.dropped(other.sample.trainable_tokens - inherited, "unused")
    group.set_parts(grown[0].sample.number, [g.sample for g in chosen])


def _shared(heir: GrowingSample, other: GrowingSample) -> int:
    """With how many tokens of the other it begins, which it or a sequence before it was branched off; 0 else."""
    shared, source = heir.at, heir.source
    while source is not None and source is not other:
        shared, source = min(shared, source.at), source.source
    return 0 if source is None else shared


OWN = "return samples of engine.new_sample() and engine.branch()"
Mistake = Callable[[str, str], RolloutError]
"""An error that names the function and its rollout, from a rule and a way out."""
FindReply = Callable[[str, int], ReplyTurn | None]
"""The turn of a choice of a response, by the id that the agent was told."""


@dataclass(frozen=True)
class RolloutOutcome:
    """What a function told of its rollout.

    Attributes:
        chosen: the sequences that are trained, at least one.
        steps: process rewards by id() of the sample in which their tokens were generated, chosen or not.
    """

    chosen: list[GrowingSample]
    reward: float | None
    steps: Mapping[int, list[tuple[int, float]]]
    metrics: Mapping[str, float]


def told_of(returned: object, grown: Sequence[GrowingSample], reply: FindReply, error: Mistake) -> RolloutOutcome:
    """What a function told that returned this, from the sequences of its rollout. Raises RolloutError."""
    episode = _episode(returned, error)
    if episode.failed:
        way_out = "look at the environment; or set rollout.on_error: drop to leave such rollouts out"
        raise error(f"reported a failed rollout: {episode.failed}", way_out)
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
    """The sequences of an episode; without it, all that have turns, in the order of the newest ones."""
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
    if any(g.busy for g in found):  # before the next one: until a turn has ended, there is none
        raise error("returned while a turn was generated", "await it, or cancel it")
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
    """The rollout's, from the episode or from a sample of it."""
    given = [r for r in (episode.reward, *(g.sample.reward for g in chosen)) if r is not None]
    for reward in given:
        if not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise error(f"set the reward {reward!r:.80}", "set a finite number, or leave it to the reward")
    if len(set(given)) > 1:
        raise error(f"set the rewards {sorted(given)}", "a rollout has one; use Episode.step_rewards beside it")
    return float(given[0]) if given else None


def _steps(
    episode: Episode, chosen: Sequence[GrowingSample], reply: FindReply, error: Mistake
) -> dict[int, list[tuple[int, float]]]:
    steps: dict[int, list[tuple[int, float]]] = {}
    for where, at, reward in episode.step_rewards:
        if isinstance(where, str):
            place, found = f"choice {at!r:.40} of {where!r:.60}", _of_reply(reply(where, at), chosen)
            way_out = "name the id of a response that an agent got and the index of a choice, and a finite number"
        else:
            place, found = f"token {at!r:.40}", _of_sample(where, at, chosen)
            way_out = "name a sequence that is returned, a position within it, and a finite number"
        if found is None or not math.isfinite(reward):
            raise error(f"gave the step reward {reward!r:.40} at {place}", way_out)
        steps.setdefault(id(found[0]), []).append((int(found[1]), float(reward)))
    return steps


def _of_sample(sample: Sample, at: int, chosen: Sequence[GrowingSample]) -> tuple[Sample, int] | None:
    """Where the token at a position of a chosen sequence was generated."""
    named = next((g for g in chosen if g.sample is sample and 0 <= at < len(sample)), None)
    return None if named is None else (_origin(named, at), at)


def _of_reply(turn: ReplyTurn | None, chosen: Sequence[GrowingSample]) -> tuple[Sample, int] | None:
    """Where the last token of a reply was generated, if a chosen sequence has it."""
    if turn is None:
        return None
    last = turn.end - 1
    held = last < len(turn.sample) and any(_origin(g, last) is turn.sample for g in chosen)
    return (turn.sample, last) if held else None


def _origin(grown: GrowingSample, at: int) -> Sample:
    """The sequence in which the token at a position of a sequence was generated."""
    while grown.source is not None and at < grown.at:
        grown = grown.source
    return grown.sample
