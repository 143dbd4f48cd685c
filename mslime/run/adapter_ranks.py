"""Ranks that train several adapters on one base: each adapter's trainer is spoken to as that of a run of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from mslime.config.errors import TrainerError
from mslime.config.resolved import policy_spec
from mslime.config.schema import RunConfig
from mslime.logs import phase
from mslime.run.cluster import Cluster
from mslime.run.ranks import BaseActor, RankGroup, Report
from mslime.run.trainer_turn import Offer, TrainerTurn
from mslime.run.trainers import PolicyRank, Trained, TrainerGroup

if TYPE_CHECKING:
    from mslime.backends.megatron.step.adapter_slots import AdapterTrainers
    from mslime.backends.megatron.step.base import Base

_log = logging.getLogger(__name__)


class AdaptersActor(BaseActor):
    """One rank of the base, and of the trainers of all its adapters."""

    def hold(self, base: Base) -> None:
        """See `BaseActor.hold`."""
        from mslime.backends.megatron.step.adapter_slots import AdapterTrainers

        self._adapters: AdapterTrainers = AdapterTrainers(base)
        self._ranks: dict[str, PolicyRank] = {}

    def create(self, name: str, config: RunConfig) -> None:
        """Make an adapter and its trainer.

        Args:
            config: as of a run of it alone, on this base.

        Raises:
            ConfigError: the name is taken, or the adapter is not one for this base. Nothing has changed then.
            CheckpointError: the adapter to start from is of another model, rank, scale or targets.
        """
        from mslime.checks.user_functions import check_seams

        check_seams(config, "trainer")
        with phase(_log, f"making adapter {name}"):
            self._adapters.create(name, policy_spec(config))
            rank = PolicyRank(config, self._rank)
            with self._adapters.placed(name) as trainer:
                rank.adopt(trainer, None, self._report)
        self._ranks[name] = rank

    def free(self, name: str) -> None:
        """Forget an adapter. Raises ConfigError when there is none of that name."""
        with phase(_log, f"forgetting adapter {name}"):
            self._adapters.free(name)
            del self._ranks[name]

    def train_together(self, asked: Sequence[StepOfAdapter]) -> dict[str, dict[str, Any] | TrainerError]:
        """`PolicyRank.train` of several adapters by name, whose micro-batches share passes; an error that all ranks
        find alike is its adapter's alone. What comes before the first gradient is done in turns."""
        begin, ranks = time.time(), {each.adapter: self._ranks[each.adapter] for each in asked}
        for each in asked:
            _log.info("adapter %s", each.adapter)
            with self._adapters.placed(each.adapter):
                ranks[each.adapter].prepare(each.shards, each.step)
        shards = {each.adapter: ranks[each.adapter].begin_update(each.watched) for each in asked}
        with phase(_log, f"one pass of {', '.join(f'{each.adapter}, step {each.step}' for each in asked)}"):
            found = self._adapters.update_together(shards)
        return {
            name: rows if isinstance(rows, TrainerError) else ranks[name].end_update(rows, begin)
            for name, rows in found.items()
        }

    def ask(self, name: str, verb: str, *given: Any) -> Any:
        """What a method of an adapter's `PolicyRank` returns, with the adapter in the model.

        Raises:
            ConfigError: there is no such adapter.
        """
        _log.info("adapter %s", name)
        with self._adapters.placed(name):
            return getattr(self._ranks[name], verb)(*given)


@dataclass(frozen=True)
class StepOfAdapter:
    """What `PolicyRank.train` is given, of one rank; or of all, where `shards` has an element for each."""

    adapter: str
    shards: Sequence[Any]
    step: int
    watched: Sequence[int]

    def of_rank(self, rank: int) -> StepOfAdapter:
        """What a rank is given of a step of all ranks."""
        return replace(self, shards=self.shards[rank])


@dataclass(frozen=True)
class _Verb:
    """A method of an adapter's rank, called as those of a Ray actor are."""

    actor: Any
    name: str
    verb: str

    def remote(self, *given: Any) -> ray.ObjectRef:
        return self.actor.ask.remote(self.name, self.verb, *given)


@dataclass(frozen=True)
class _AdapterOfActor:
    """An actor whose methods are an adapter's."""

    actor: Any
    name: str

    @property
    def rest(self) -> Any:
        """Of the rank itself, which does one thing at a time."""
        return self.actor.rest

    def __getattr__(self, verb: str) -> _Verb:
        return _Verb(self.actor, self.name, verb)


class _AdapterRanks(RankGroup):
    """All ranks of one adapter."""

    def __init__(self, ranks: RankGroup, name: str, turn: TrainerTurn) -> None:
        vars(self).update(vars(ranks))  # the lock, too: what threads ask of different adapters is in order as well
        self._actors = [_AdapterOfActor(actor, name) for actor in ranks._actors]
        self._turn = turn

    def all(
        self,
        what: str,
        deadline_s: float,
        work: Callable[[Any, int], ray.ObjectRef],
        on_wait: Callable[[], None] | None = None,
    ) -> list[Any]:
        """See `RankGroup.all`; the deadline begins with the adapter's turn."""
        with self._turn.held(on_wait=on_wait):
            return super().all(what, deadline_s, work, on_wait)

    def stop(self) -> None:
        """Nothing: the ranks are other adapters', too."""


class AdapterTrainer(TrainerGroup):
    """The trainer of one of several adapters. Where steps of others wait for the turn that it has for one of its own,
    they are taken along, in one call of the ranks.

    Args:
        together: take others along, and let this one's steps be taken along.
    """

    def __init__(
        self, name: str, config: RunConfig, ranks: RankGroup, turn: TrainerTurn, check: Callable[[], None], *,
        together: bool,
    ) -> None:  # fmt: skip
        super().__init__(config, ranks, None, check)
        self._name, self._turn, self._together = name, turn, together
        self._offer: Offer | None = None

    @contextmanager
    def turn_for(
        self, shards: Sequence[Sequence[Any]], step: int, watched: Sequence[int], on_wait: Callable[[], None]
    ) -> Iterator[None]:
        """Inside, `train` of these has the turn, or is taken along by another's."""
        self._offer = Offer(StepOfAdapter(self._name, shards, step, watched)) if self._together else None
        try:
            with self._turn.held(on_wait=on_wait, offer=self._offer):
                yield
        finally:
            self._offer = None

    def train(
        self, shards: Sequence[Sequence[Any]], on_progress: Report, policy: bool, step: int, watched: Sequence[int] = ()
    ) -> Trained:
        """See `TrainerGroup.train`; inside `turn_for`."""
        own = self._offer
        if own is None:
            return super().train(shards, on_progress, policy, step, watched)
        if own.taken:
            return self._trained(own.wait(self._check))
        others = self._turn.offered()
        if not others:
            return super().train(shards, on_progress, policy, step, watched)
        try:
            self._train_together([own, *others], on_progress)
        except BaseException as error:
            for other in others:
                other.fail(error)
            raise
        return self._trained(own.wait(self._check))

    def _train_together(self, offers: Sequence[Offer], on_progress: Report) -> None:
        """Finish or fail each. Its deadline is that of as many steps."""
        steps: list[StepOfAdapter] = [offer.work for offer in offers]
        poll = self._trainers.poller("progress", on_progress, self._check)
        results = self._trainers.all(
            "train step", self._config.deadlines.train_step_s * len(steps),
            lambda a, r: a.actor.train_together.remote([each.of_rank(r) for each in steps]), poll,
        )  # fmt: skip
        for offer, step in zip(offers, steps, strict=True):
            of_ranks = [result[step.adapter] for result in results]
            failed = next((each for each in of_ranks if isinstance(each, TrainerError)), None)
            if failed is None:
                offer.finish(of_ranks)
            else:
                offer.fail(failed)


class AdapterRanks:
    """The ranks of one base. Every method returns when all of them are done; threads may share it.

    Attributes:
        turn: that each call of an adapter's trainer takes; who has it may do several things in a row.
        layers: every rank's global MoE layer ids, once they are started.
    """

    def __init__(self, config: RunConfig, cluster: Cluster, log_dir: Path, check: Callable[[], None]) -> None:
        """
        Args:
            config: of the base; its adapter is none of those that are trained, but `lora.rank` is above 0.
            check: called while ranks are waited for; raises when that is to end.
        """
        self._config, self._check = config, check
        self._ranks = RankGroup("trainer", AdaptersActor, config, cluster.trainer_options, log_dir)
        self.turn = TrainerTurn()

    def start(self, on_wait: Callable[[], None] | None = None) -> None:
        """Build the base on all ranks."""
        self.layers = self._ranks.start(on_wait)

    def create(self, name: str, config: RunConfig) -> AdapterTrainer:
        """Make an adapter; the trainer of it, which is started.

        Args:
            config: as of a run of it alone, on this base.

        Raises:
            ConfigError, CheckpointError: see `AdaptersActor.create`.
        """
        deadline = self._config.deadlines.trainer_start_s
        with self.turn.held(on_wait=self._check):
            self._ranks.all(f"adapter {name}", deadline, lambda a, _: a.create.remote(name, config), self._check)
        ranks, together = _AdapterRanks(self._ranks, name, self.turn), self._config.steps_together
        return AdapterTrainer(name, config, ranks, self.turn, self._check, together=together)

    def free(self, name: str) -> None:
        """Forget an adapter; its trainer answers no more. Raises ConfigError when there is none of that name."""
        deadline = self._config.deadlines.checkpoint_s
        with self.turn.held(on_wait=self._check):
            self._ranks.all(f"adapter {name}", deadline, lambda a, _: a.free.remote(name), self._check)

    def rest(self, deadline_s: float) -> None:
        """Return when every rank has done what it was given. Raises TrainerError when one is gone or still at work."""
        self._ranks.all("waiting for the trainer", deadline_s, lambda a, _: a.rest.remote())

    def stop(self) -> None:
        """Kill every rank."""
        self._ranks.stop()
