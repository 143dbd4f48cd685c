"""One of several adapters of a run: the verbs of its loop, over the trainer and the engines that it shares.

Each adapter's loop is that of a run of it alone, in a thread of the driver. Threads meet in two places: the trainer's
turn, which a thread keeps from a step to the delivery of what it has learnt, and the rollout service's process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from signal import SIGTERM

from mslime.backends.sglang.client import EngineDied
from mslime.checks.resolve import ResolvedRun
from mslime.config.errors import EngineError, TrainerError, UserError
from mslime.observe.progress import NamedProgress, Progress
from mslime.run.adapter_delivery import AdapterDelivery
from mslime.run.adapter_ranks import AdapterRanks
from mslime.run.engines import EngineGroup
from mslime.run.fleet import Fleet
from mslime.run.ray_calls import RayWatch
from mslime.run.results import Beginning
from mslime.run.rollouts import RolloutProcess
from mslime.run.run_engines import RunEngines
from mslime.run.run_rollouts import RunRollouts
from mslime.run.session import Shards, TrainingRun
from mslime.run.stop import Stopped, StopSignals


class Ending:
    """Why the run ends before all adapters are trained: the first reason counts, whichever thread it comes from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self.at_once = False
        self._who, self._since = "", 0.0

    def note(self, who: str, error: BaseException) -> None:
        """An adapter's loop ended by an error."""
        with self._lock:
            if self.error is None:
                self.error, self._who, self._since = error, who, time.monotonic()

    def raise_first(self) -> None:
        """Raise the reason, with the adapter that it is of; nothing where there is none."""
        error = self.error
        if isinstance(error, UserError):
            raise type(error)(f"adapters.{self._who}: {error.field}", error.value, error.rule, error.way_out) from error
        if error is not None:
            raise error

    def check(self, who: str, patience_s: float) -> None:
        """Raise where another adapter's loop has failed, so many seconds ago or more."""
        if self.at_once:
            raise Stopped(SIGTERM, save=False)
        failed = self.error is not None and not isinstance(self.error, Stopped) and self._who != who
        if failed and time.monotonic() - self._since >= patience_s:
            why = str(self.error).partition("\n")[0]
            raise TrainerError(f"adapters.{who}", "stopped", f"adapter {self._who} failed: {why}", "mend that first")


class AdapterStop(StopSignals):
    """The run's signals as an adapter's thread sees them, with what befalls the others."""

    def __init__(self, signals: StopSignals, ending: Ending, who: str) -> None:
        super().__init__()
        self._signals, self._ending, self._of = signals, ending, who

    def check(self, patience_s: float = 0.0) -> None:
        """See `StopSignals.check`; also raises where another adapter's loop has failed."""
        self._signals.check(patience_s)
        self._ending.check(self._of, patience_s)

    def told(self, error: BaseException) -> BaseException:
        """See `StopSignals.told`."""
        return self._signals.told(error)


@dataclass(frozen=True)
class Common:
    """What the adapters of a run share, once it is started."""

    ranks: AdapterRanks
    rollouts: RolloutProcess
    engines: EngineGroup
    fleet: Fleet
    ray: RayWatch
    progress: Progress


class AdapterSession(TrainingRun):
    """One adapter of a running run. A context manager, inside that of the run.

    Attributes:
        name: of the adapter.
        others: the sessions of all adapters, this one's among them.
    """

    def __init__(self, run: ResolvedRun, stop: AdapterStop) -> None:
        super().__init__(run, stop, quiet=True)
        self.name = run.config.name
        self.others: Sequence[AdapterSession] = ()
        self._kept = False  # the trainer's turn, from a step to the delivery that follows

    def beginning(self) -> Beginning:
        """How its rollouts begin."""
        return Beginning(self.checkpoints.rollouts, self.first_step)

    def join(self, common: Common) -> AdapterSession:
        """Share these; to be entered next."""
        self._common = common
        return self

    def _start(self) -> None:
        common = self._common
        self._ray, self._fleet, self._engines = common.ray, common.fleet, common.engines
        self._turn = common.ranks.turn
        self._syncing = partial(self._turn.held, urgent=True)
        self._open_records()
        for note in self.checkpoints.notes():
            self.progress.note(note)
        self._trainers = self._adapter = common.ranks.create(self.name, self.config)
        if self.checkpoints.loaded is not None:
            self._load(self.checkpoints.loaded)
        self._rollouts = common.rollouts.of(self.name, self.config, self._at_rest)
        self._publisher = self._publishes_by(self._make_delivery())

    def _open_records(self) -> None:
        steps, done = self.config.train.num_steps, self.first_step
        self._records.open(self._stack, True, NamedProgress(self.name, self._common.progress, steps, done))
        self._timeline, self.progress = self._records.timeline, self._records.progress

    def _make_delivery(self) -> AdapterDelivery:
        return AdapterDelivery(
            self.config, self._rollouts, self._trainers, self._fleet, self._at_rest, self._probe(), self.name
        )

    def _tend(self) -> None:
        if self._fleet.tend():
            for other in self.others:
                other._publisher.doubt()

    def train(self, shards: Shards, watched: Sequence[int] = ()) -> dict[str, float]:
        """See `TrainingRun.train`; waits for the trainer's turn first, and keeps it for the delivery that follows,
        unless an evaluation has to end before that. Another adapter's step may take this one along (`AdapterTrainer`):
        its delivery waits for a turn of its own then, before all steps that wait."""
        begin = self._timeline.now()
        with self._adapter.turn_for(shards, self._records.step, watched, self._at_rest):
            waited = self._timeline.now() - begin
            found = super().train(shards, watched)
            if self._turn.mine and self._evaluating is None:
                self._turn.take()
                self._kept = True
        return found | {"perf/turn_seconds": waited}

    def _publish(self, version: int) -> dict[str, float]:
        with self._turn.held(urgent=True, on_wait=self._at_rest):
            if self._kept:
                self._kept = False
                self._turn.give()
            return super()._publish(version)

    def _revive(self, error: EngineError) -> None:
        """See `Publisher.revive`. Where another adapter's thread has found an engine meanwhile, there is nothing to
        wait for."""
        if not isinstance(error, EngineDied) or self._rollouts.engines.call(RunEngines.stranded):
            super()._revive(error)

    def leave(self) -> None:
        """Its last step is done: the others have what it had of the engines and of the trainer's memory."""
        self._rollouts.service.call(RunRollouts.leave)
        self._common.ranks.free(self.name)
        self.progress.note("done")
