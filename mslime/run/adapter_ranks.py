"""The trainer of adapters on one base, used by runs of several adapters and by the clients of `mslime serve`.

The driver makes adapters on `AdapterRanks` and calls each through its `AdapterTrainer`, from any number of threads. One
queue (`TrainerTurn`) orders all calls. If steps may share passes, the step that gets the turn includes waiting steps of
the same kind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import ray

from mslime.config.errors import TrainerError, UserError
from mslime.config.resolved import PolicySpec
from mslime.config.serve import AdamParams, LossChoice
from mslime.data.client_batch import ClientShard, Datum, PassResult, by_datum, client_shards
from mslime.logs import phase
from mslime.run.assemble import chunks_per_group
from mslime.run.ranks import RankActor, RankGroup, Report, fetched
from mslime.run.ray_calls import gather
from mslime.run.ray_cluster import ActorProcess, Cluster
from mslime.run.trainer_turn import Offer, TrainerTurn
from mslime.run.trainers import PolicyRank, StepResult, TrainerGroup

if TYPE_CHECKING:
    from mslime.backends.megatron.step.client_steps import RankPassResult

_log = logging.getLogger(__name__)


class AdapterRank(PolicyRank):
    """Methods of one adapter's trainer on a rank that the driver calls, with the adapter in the model."""

    def forward(self, part: Any) -> RankPassResult:
        """See `client_steps.forward`."""
        from mslime.backends.megatron.step import client_steps

        return client_steps.forward(self._trainer, *fetched([part]))

    def forward_backward(self, part: Any) -> RankPassResult:
        """See `client_steps.forward_backward`."""
        from mslime.backends.megatron.step import client_steps

        with phase(_log, "a pass"):
            return client_steps.forward_backward(self._trainer, *fetched([part]))

    def adam_step(self, params: AdamParams) -> dict[str, float]:
        """See `client_steps.adam_step`."""
        from mslime.backends.megatron.step import client_steps

        return client_steps.adam_step(self._trainer, params)

    def forget_moments(self) -> None:
        """See `client_steps.forget_moments`."""
        from mslime.backends.megatron.step import client_steps

        client_steps.forget_moments(self._trainer)

    def rest(self) -> None:
        """See `RankActor.rest`."""


class AdapterActor(RankActor):
    """One rank of the base, and of the trainers of all its adapters."""

    role = "trainer"

    def __init__(self, spec: PolicySpec, process: ActorProcess, rank: int, log_path: str) -> None:
        super().__init__(spec, process, rank, log_path)
        self._spec = spec

    def start(self, rendezvous: str) -> dict[str, Any]:
        """Build the base and read its weights; returns this rank's MoE layers."""
        from mslime.backends.megatron.step.adapters import AdapterTrainers
        from mslime.backends.megatron.step.base_model import Base

        with phase(_log, f"starting at {rendezvous}"):
            base = Base(self._spec, self._rank, self._world, rendezvous)
        self._adapters, self._ranks = AdapterTrainers(base), dict[str, AdapterRank]()
        return {"moe_layer_ids": base.routing_layers}

    def create(self, name: str, spec: PolicySpec, stacked: bool) -> None:
        """Make an adapter and its trainer.

        Args:
            spec: as for a run of this adapter alone, on this base.
            stacked: see `MegatronTrainer.weight_sender`.

        Raises:
            ConfigError: the name is taken, or the adapter does not fit this base. Nothing has changed then.
            CheckpointError: the adapter to start from has another model, rank, scale or targets.
        """
        from mslime.checks.user_functions import check_functions, trainer_functions

        check_functions(trainer_functions(spec.algorithm, spec.weights))
        with phase(_log, f"making adapter {name}"):
            self._adapters.create(name, spec)
            rank = AdapterRank(spec, self._rank)
            with self._adapters.placed(name) as trainer:
                rank.adopt(trainer, None, self._report, stacked=stacked)
        self._ranks[name] = rank

    def free(self, name: str) -> None:
        """Remove an adapter. Raises ConfigError if there is none of that name."""
        with phase(_log, f"removing adapter {name}"):
            self._adapters.free(name)
            del self._ranks[name]

    def ask(self, name: str, verb: str, *given: Any) -> Any:
        """Call a method of an adapter's `AdapterRank`, with the adapter in the model, and return its result.

        Raises:
            ConfigError: there is no such adapter.
        """
        _log.info("adapter %s", name)
        with self._adapters.placed(name):
            return getattr(self._ranks[name], verb)(*given)

    def attempt(self, method: str, *given: Any) -> Any:
        """Call a method of this actor. A user's mistake is returned as a value: all ranks find the same one, and remain
        usable for the next call."""
        try:
            return getattr(self, method)(*given)
        except UserError as error:
            return error

    def joint_train(self, works: Sequence[TrainWork]) -> dict[str, dict[str, Any] | TrainerError]:
        """`PolicyRank.train` of several adapters by name, whose micro-batches share passes. An error that all ranks
        find alike affects only its adapter. Work before the first gradient is done one adapter at a time."""
        from mslime.backends.megatron.step.adapters import joint_update

        begin, ranks = time.time(), {each.adapter: self._ranks[each.adapter] for each in works}
        for each in works:
            _log.info("adapter %s", each.adapter)
            with self._adapters.placed(each.adapter):
                ranks[each.adapter].prepare(each.shards, each.step)
        shards = {each.adapter: ranks[each.adapter].begin_update(each.watched) for each in works}
        with phase(_log, f"one pass of {', '.join(f'{each.adapter}, step {each.step}' for each in works)}"):
            found = joint_update(self._adapters.of(shards), shards)
        return {
            name: rows if isinstance(rows, TrainerError) else ranks[name].end_update(rows, begin)
            for name, rows in found.items()
        }

    def joint_forward_backward(self, works: Sequence[PassWork]) -> dict[str, RankPassResult | TrainerError]:
        """See `client_steps.joint_forward_backward`."""
        from mslime.backends.megatron.step.client_steps import joint_forward_backward

        parts: dict[str, ClientShard] = {each.adapter: fetched([each.shards])[0] for each in works}
        with phase(_log, f"one pass of {', '.join(parts)}"):
            return joint_forward_backward(self._adapters.of(parts), parts)


@dataclass(frozen=True)
class _AdapterWork:
    """Arguments of an adapter's ranks: those of one rank, or of all if `shards` has an element for each."""

    adapter: str
    shards: Any

    def of_rank(self, rank: int) -> Self:
        """Arguments of one rank, taken from those of all ranks."""
        return replace(self, shards=self.shards[rank])


@dataclass(frozen=True)
class TrainWork(_AdapterWork):
    """Arguments of `PolicyRank.train`; a rank gets a list of shards."""

    step: int
    watched: Sequence[int]


@dataclass(frozen=True)
class PassWork(_AdapterWork):
    """Arguments of a forward and backward pass on a client's data; a rank gets one shard."""


@dataclass(frozen=True)
class _Call:
    """A method of an actor with its first arguments bound; called like a method of a Ray actor."""

    method: Any
    first: tuple[str, ...]

    def remote(self, *given: Any) -> ray.ObjectRef:
        return self.method.remote(*self.first, *given)


@dataclass(frozen=True)
class _Through:
    """An actor called through another one: `it.save.remote(x)` is `actor.ask.remote(name, "save", x)`."""

    actor: Any
    method: str
    first: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> _Call:
        return _Call(getattr(self.actor, self.method), (*self.first, name))


class AdapterRanks(RankGroup):
    """The ranks of one base. Every method returns when all of them are done; threads may share it.

    Attributes:
        turn: taken by each call of an adapter's trainer; its holder may do several things in a row.
        layers: every rank's global MoE layer ids, set by `start`.
    """

    def __init__(
        self, spec: PolicySpec, cluster: Cluster, log_dir: Path, check: Callable[[], None] = lambda: None, *,
        together: bool, survives: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            spec: of the base; it has none of the trained adapters, but its `lora.rank` is above 0.
            check: called while waiting for ranks; raises to end the wait.
            together: let steps of several adapters share passes.
            survives: the ranks continue after a mistake that all of them find alike.
        """
        super().__init__(AdapterActor, spec, cluster.process, cluster.trainer_options, log_dir)
        self.turn, self._check, self._together, self._survives = TrainerTurn(), check, together, survives
        self._adapter: str | None = None
        self._failures: list[UserError] = []  # shared with the groups of single adapters

    @property
    def failure(self) -> UserError | None:
        """The first failure that the ranks do not survive."""
        return self._failures[0] if self._failures else None

    def start(self, on_wait: Callable[[], None] | None = None) -> list[tuple[int, ...]]:
        """Build the base on all ranks; returns the layers.

        Args:
            on_wait: called a few times a second until all of them are up.
        """
        refs, deadline = self.begin_start(on_wait), self._limits.trainer_start_s
        started = gather(refs, "trainer start", deadline, self.log_paths, on_wait)
        self.layers = [tuple(started[name]["moe_layer_ids"]) for name in self.log_paths]
        return self.layers

    def create(self, name: str, spec: PolicySpec, *, stacked: bool = True) -> AdapterTrainer:
        """Make an adapter; returns its started trainer.

        Args:
            spec: as for a run of this adapter alone, on this base.
            stacked: see `MegatronTrainer.weight_sender`.

        Raises:
            ConfigError, CheckpointError: see `AdapterActor.create`.
        """
        deadline = self._limits.trainer_start_s
        self.all(f"adapter {name}", deadline, lambda a, _: a.create.remote(name, spec, stacked), self._check)
        own = copy(self)  # shares the lock, so calls of threads for different adapters are ordered as well
        own._adapter = name
        return AdapterTrainer(name, spec, own, self._check, together=self._together)

    def free(self, name: str) -> None:
        """Remove an adapter; its trainer is unusable afterwards. Raises ConfigError if there is none of that name."""
        deadline = self._limits.checkpoint_s
        self.all(f"adapter {name}", deadline, lambda a, _: a.free.remote(name), self._check)

    def all(
        self,
        task: str,
        deadline_s: float,
        work: Callable[[Any, int], ray.ObjectRef],
        on_wait: Callable[[], None] | None = None,
    ) -> list[Any]:
        """See `RankGroup.all`: for the base, or for the adapter that this group belongs to. The deadline begins with
        the turn."""

        def submit(actor: Any, rank: int) -> ray.ObjectRef:
            return work(actor if self._adapter is None else _Through(actor, "ask", (self._adapter,)), rank)

        with self.turn.held(on_wait=on_wait):
            return self._all(task, deadline_s, submit, on_wait)

    def joint(
        self, task: str, deadline_s: float, method: str, works: Sequence[TrainWork | PassWork],
        on_wait: Callable[[], None],
    ) -> list[list[Any] | UserError]:  # fmt: skip
        """Call a method of `AdapterActor` that several adapters share. Returns for each the results in rank order, or
        the error that all ranks found. The caller has the turn."""
        found = self._all(
            task, deadline_s, lambda a, r: getattr(a, method).remote([work.of_rank(r) for work in works]), on_wait
        )
        every = [[of_rank[work.adapter] for of_rank in found] for work in works]
        return [self._refused(task, each) or each for each in every]

    def _all(
        self, task: str, deadline_s: float, work: Callable[[Any, int], ray.ObjectRef],
        on_wait: Callable[[], None] | None,
    ) -> list[Any]:  # fmt: skip
        def attempted(actor: Any, rank: int) -> ray.ObjectRef:
            return work(_Through(actor, "attempt") if self._survives else actor, rank)

        try:
            found = super().all(task, deadline_s, attempted, on_wait)
        except UserError as error:
            self._failures.append(error)
            raise
        if (refused := self._refused(task, found)) is not None:
            raise refused
        return found

    def _refused(self, task: str, found: Sequence[Any]) -> UserError | None:
        """The error that all ranks raised. Raises TrainerError if only some ranks did: they then differ in state."""
        refused = [each for each in found if isinstance(each, UserError)]
        if not refused:
            return None
        if len(refused) == len(found):
            return refused[0]
        error = TrainerError(task, f"{len(refused)} of {len(found)} ranks", str(refused[0]), "read their logs")
        self._failures.append(error)
        raise error


class AdapterTrainer(TrainerGroup):
    """The trainer of one adapter. When it has the turn for a step, it includes waiting steps of other adapters in one
    call of the ranks.

    Args:
        ranks: those of the adapter.
        together: let this adapter's steps share calls with those of others.
    """

    def __init__(
        self, name: str, spec: PolicySpec, ranks: AdapterRanks, check: Callable[[], None], *, together: bool
    ) -> None:
        super().__init__(spec, ranks, None, check)
        self._name, self._ranks, self._together = name, ranks, together
        self._offer: Offer | None = None

    # ------------------------------------------------------------------------------------------ a step of a run's loop

    @contextmanager
    def turn_for(
        self, shards: Sequence[Sequence[Any]], step: int, watched: Sequence[int], on_wait: Callable[[], None]
    ) -> Iterator[None]:
        """Inside, `train` of these shards has the turn, or another adapter's call includes it."""
        self._offer = self._offered(TrainWork(self._name, shards, step, watched))
        try:
            with self._ranks.turn.held(on_wait=on_wait, offer=self._offer):
                yield
        finally:
            self._offer = None

    def train(
        self, shards: Sequence[Sequence[Any]], on_progress: Report, policy: bool, step: int, watched: Sequence[int] = ()
    ) -> StepResult:
        """See `TrainerGroup.train`; inside `turn_for`."""
        poll = self._trainers.poller("progress", on_progress, self._check)
        joined = self._joined(self._offer, "train step", "joint_train", poll)
        return super().train(shards, on_progress, policy, step, watched) if joined is None else self._trained(joined)

    # ------------------------------------------------------------------------------------- steps that a client composes

    def forward(self, data: Sequence[Datum], loss: LossChoice) -> PassResult:
        """Losses and log-probs of a client's data."""
        shards = self._shards(data, loss)
        parts = self._of_ranks(shards)
        found = self._ranks.all("forward", self._step_s, lambda a, r: a.forward.remote(parts[r]), self._check)
        return self._passed(shards, found, len(data))

    def forward_backward(self, data: Sequence[Datum], loss: LossChoice) -> PassResult:
        """The same, and accumulate the gradients of the adapter, in a separate pass or one shared with other adapters.

        Raises:
            TrainerError: the loss is not finite; gradients since the last step are then dropped.
        """
        shards, task = self._shards(data, loss), "forward_backward"
        parts = self._of_ranks(shards)
        offer = self._offered(PassWork(self._name, parts))
        with self._ranks.turn.held(on_wait=self._check, offer=offer):
            found = self._joined(offer, task, "joint_forward_backward", self._check)
            if found is None:
                found = self._ranks.all(
                    task, self._step_s, lambda a, r: a.forward_backward.remote(parts[r]), self._check
                )
        return self._passed(shards, found, len(data))

    def adam_step(self, params: AdamParams) -> dict[str, float]:
        """An optimizer step on the gradients with these parameters; returns `grad_norm` and `lr`."""
        return self._ranks.all("optim_step", self._step_s, lambda a, _: a.adam_step.remote(params), self._check)[0]

    def load(self, directory: Path, new_run: bool, *, optimizer: bool = True) -> None:
        """See `TrainerGroup.load`.

        Args:
            optimizer: load its state, too; otherwise it is reset.
        """
        super().load(directory, new_run)
        if not optimizer:
            self._ranks.all("checkpoint load", self._step_s, lambda a, _: a.forget_moments.remote(), self._check)

    @property
    def _step_s(self) -> float:
        return self._limits.train_step_s

    def _shards(self, data: Sequence[Datum], loss: LossChoice) -> list[ClientShard]:
        """Shards of all data-parallel ranks."""
        train, layout = self._spec.train, self._layout
        quadratic = train.quadratic_tokens
        return client_shards(
            data, loss, layout, train.max_tokens_per_micro_batch, packed=train.packed,
            multiple_of=chunks_per_group(layout),
            quadratic_tokens=quadratic if isinstance(quadratic, float) else None,
        )  # fmt: skip

    def _of_ranks(self, shards: Sequence[ClientShard]) -> list[ray.ObjectRef]:
        """References to every rank's shard."""
        layout, stored = self._layout, [ray.put(shard) for shard in shards]
        return [stored[layout.dp_rank(rank)] for rank in range(layout.world_size)]

    def _passed(self, shards: Sequence[ClientShard], found: Sequence[RankPassResult], data: int) -> PassResult:
        """Combine the results of all ranks for so many data."""
        of_rank = {self._layout.dp_rank(rank): each.log_probs for rank, each in enumerate(found)}
        return PassResult(found[0].loss, by_datum([(shards[rank], column) for rank, column in of_rank.items()], data))

    # -------------------------------------------------------------------------------------------------------- together

    def _offered(self, work: TrainWork | PassWork) -> Offer | None:
        return Offer(work) if self._together else None

    def _joined(self, own: Offer | None, task: str, method: str, poll: Callable[[], None]) -> list[Any] | None:
        """Every rank's result of a step that shares a pass with others. None if there is none to share it with; the
        step is then still to be done. Inside the turn."""
        if own is None:
            return None
        if not own.taken:
            others = self._ranks.turn.offered(type(own.work))
            if not others:
                return None
            offers = [own, *others]
            deadline_s = self._step_s * len(offers)
            try:
                found = self._ranks.joint(task, deadline_s, method, [offer.work for offer in offers], poll)
            except BaseException as error:
                for other in others:
                    other.fail(error)
                raise
            for offer, outcome in zip(offers, found, strict=True):
                if isinstance(outcome, UserError):
                    offer.fail(outcome)
                else:
                    offer.finish(outcome)
        return own.wait(self._check)
