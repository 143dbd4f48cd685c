"""A run of several adapters: one trainer, one set of engines, one rollout service, and a thread for each adapter.

Each adapter's loop is that of a run of it alone, in a thread of the driver. Threads share the rollout service's process
and the trainer's queue. A thread keeps its turn there from a step to the delivery of the trained weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from signal import SIGTERM
from typing import Any

from mslime.backends.sglang.client import EngineDied
from mslime.checks.resolve import ResolvedRun
from mslime.config.errors import EngineError, TrainerError, UserError
from mslime.config.resolved import policy_spec
from mslime.config.schema import RunConfig
from mslime.observe.progress import NamedProgress, open_lines
from mslime.run.adapter_ranks import AdapterRanks
from mslime.run.endpoint import ControlEndpoint
from mslime.run.fleet import Fleet
from mslime.run.rollout_process import RolloutActor, RolloutProcess
from mslime.run.run_engines import RunEngines
from mslime.run.run_rollouts import RunRollouts
from mslime.run.sharing import SeparateGpus
from mslime.run.started import StartedRun
from mslime.run.stop import Stopped, StopSignals
from mslime.run.trainer_turn import become
from mslime.run.training_run import Shards, TrainingRun

_log = logging.getLogger(__name__)
LOOK_S, AT_ONCE_S = 0.2, 5.0
"""Seconds between two checks of the threads, and for threads to end after a second signal."""


class RunEnding:
    """Why the run ends before all adapters are trained. The first reason counts, from whichever thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self.at_once = False
        self._name, self._since = "", 0.0

    def note(self, name: str, error: BaseException) -> None:
        """Record an error that ended an adapter's loop."""
        with self._lock:
            if self.error is None:
                self.error, self._name, self._since = error, name, time.monotonic()

    def raise_first(self) -> None:
        """Raise the reason, with the name of its adapter; nothing if there is none."""
        error = self.error
        if isinstance(error, UserError):
            raise type(error)(f"adapters.{self._name}: {error.field}", error.value, error.rule, error.hint) from error
        if error is not None:
            raise error

    def check(self, name: str, patience_s: float) -> None:
        """Raise if another adapter's loop failed at least so many seconds ago."""
        if self.at_once:
            raise Stopped(SIGTERM, save=False)
        failed = self.error is not None and not isinstance(self.error, Stopped) and self._name != name
        if failed and time.monotonic() - self._since >= patience_s:
            why = str(self.error).partition("\n")[0]
            raise TrainerError(f"adapters.{name}", "stopped", f"adapter {self._name} failed: {why}", "fix that first")


class AdapterStop(StopSignals):
    """The run's signals for an adapter's thread, combined with failures of the other threads."""

    def __init__(self, signals: StopSignals, ending: RunEnding, name: str) -> None:
        super().__init__()
        self._signals, self._ending, self._of = signals, ending, name

    def check(self, patience_s: float = 0.0) -> None:
        """See `StopSignals.check`; also raises if another adapter's loop has failed."""
        self._signals.check(patience_s)
        self._ending.check(self._of, patience_s)

    def to_user_error(self, error: BaseException) -> BaseException:
        """See `StopSignals.to_user_error`."""
        return self._signals.to_user_error(error)


class AdapterSession(TrainingRun):
    """One adapter of a running run. A context manager, used inside that of the run.

    Attributes:
        name: of the adapter.
    """

    def __init__(self, run: ResolvedRun, stop: AdapterStop, shared: AdaptersSession) -> None:
        """
        Args:
            shared: holds the parts of all adapters, which are started before this context is entered.
        """
        super().__init__(run, stop, quiet=True)
        self.name, self._shared = run.config.name, shared
        self._kept = False  # the trainer's turn is kept from a step to the delivery that follows

    def _start(self) -> None:
        shared = self._shared
        self._ray, self._fleet, self._engines = shared.ray, shared.fleet, shared.engines
        self._turn = shared.ranks.turn
        self._open_records()
        for note in self.checkpoints.notes():
            self.progress.note(note)
        self._trainers = self._adapter = shared.ranks.create(self.name, policy_spec(self.config))
        if self.checkpoints.loaded is not None:
            self._load(self.checkpoints.loaded)
        self._rollouts = shared.rollouts.of(self.name, self.config.deadlines, self._at_rest)
        self._memory = SeparateGpus(self._fleet.update_engines)
        self._publisher = self._make_publisher(self.name)

    def _open_records(self) -> None:
        steps, done = self.config.train.num_steps, self.first_step
        self._records.open(self._stack, True, NamedProgress(self.name, self._shared.progress, steps, done))
        self._timeline, self.progress = self._records.timeline, self._records.progress

    def train(self, shards: Shards, watched: Sequence[int] = ()) -> dict[str, float]:
        """See `TrainingRun.train`. Waits for the trainer's turn, and keeps it for the following delivery unless an
        evaluation must end before that. Another adapter's step may include this one (`AdapterTrainer`); the delivery
        then waits for a separate turn, ahead of all waiting steps."""
        begin = self._timeline.now()
        with self._adapter.turn_for(shards, self._records.step, watched, self._at_rest):
            waited = self._timeline.now() - begin
            found = super().train(shards, watched)
            if self._turn.mine and self._evaluating is None:
                self._turn.take()
                self._kept = True
        return found | {"perf/turn_seconds": waited}

    @contextmanager
    def _syncing(self) -> Iterator[None]:
        with self._turn.held(urgent=True, on_wait=self._at_rest):
            if self._kept:
                self._kept = False
                self._turn.give()
            yield

    def _revive(self, error: EngineError) -> None:
        """See `Publisher.revive`. Returns without waiting if another adapter's thread has found an engine meanwhile."""
        if not isinstance(error, EngineDied) or self._rollouts.engines.call(RunEngines.no_engine_alive):
            super()._revive(error)

    def leave(self) -> None:
        """After its last step: leave its share of the engines and of the trainer's memory to the other adapters."""
        self._rollouts.service.call(RunRollouts.leave)
        self._shared.ranks.free(self.name)
        self.progress.note("done")


class AdaptersSession(StartedRun):
    """A running run of several adapters. A context manager.

    Attributes:
        adapters: those with steps left.
        ranks, engines, rollouts, fleet, ray: parts that the adapters share, once started.
    """

    def __init__(self, run: ResolvedRun, stop: StopSignals, quiet: bool = False) -> None:
        """
        Args:
            quiet: show no progress, regardless of `observe.progress`.
        """
        super().__init__(run, stop)
        self._quiet, self._ending = quiet, RunEnding()
        every = [AdapterSession(own, AdapterStop(stop, self._ending, name), self) for name, own in run.adapters.items()]
        self.adapters = [each for each in every if each.first_step < each.config.train.num_steps]

    def _start(self) -> None:
        config, names = self.config, [each.name for each in self.adapters]
        shown = "off" if self._quiet else config.observe.progress
        self.progress = self._stack.enter_context(open_lines(shown))
        self._print_start()
        cluster, self.ray = self._join_cluster(generates=True)
        self.ranks = ranks = AdapterRanks(
            policy_spec(with_base(config)), cluster, self._logs, self._worth_waiting, together=config.steps_together
        )
        self._stack.callback(ranks.stop)
        self.engines = engines = self._engine_group(cluster)
        (addresses,) = self._start_beside(ranks.start, engines)
        self._take_over(engines.attached, lambda seconds: None)
        self.rollouts = rollouts = RolloutProcess(self._run, self._logs / "rollouts.log", self._at_rest, names)
        self._stack.callback(rollouts.stop)
        begins = {each.name: (each.checkpoints.rollouts, each.first_step) for each in self.adapters}
        rollouts.process.call(RolloutActor.start, addresses, ranks.layers, begins, ())
        self.fleet = Fleet(rollouts.engines, engines, self._attached, self._at_rest, self.progress)
        for each in self.adapters:
            self._stack.enter_context(each)
        self._stack.enter_context(ControlEndpoint(config.run_dir, self.fleet.orders))

    def train(self, loop: Callable[[AdapterSession], None]) -> None:
        """Run every adapter's loop in a separate thread, until all have ended.

        A signal, or the first loop that fails, ends them all: each saves its trained steps when its trainer is next at
        rest. Raises the cause.
        """
        self._stop.describe = lambda: "Stopping after each adapter is saved. Press Ctrl-C again to stop without saving."
        self._stop.patient = True
        threads = [
            threading.Thread(target=self._run_loop, args=(each, loop), name=f"adapter {each.name}", daemon=True)
            for each in self.adapters
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    thread.join(LOOK_S)
        except BaseException:  # a second signal
            self._ending.at_once = True
            for thread in threads:
                thread.join(AT_ONCE_S)
            raise
        finally:
            self._stop.patient = False
        self._ending.raise_first()

    def _run_loop(self, adapter: AdapterSession, loop: Callable[[AdapterSession], None]) -> None:
        """In a thread: an adapter's loop to its end."""
        become(adapter.name)
        try:
            loop(adapter)
            adapter.leave()
        except BaseException as error:  # of any kind: the main thread raises the first
            _log.info("adapter %s ends: %s", adapter.name, error)
            if isinstance(error, Stopped):
                self.progress.note(f"{adapter.name}: {error.outcome}")
                error.outcome = "the lines above list the saved adapters"
            self._ending.note(adapter.name, error)
        finally:
            self.ranks.turn.leave()


def with_base(config: RunConfig) -> RunConfig:
    """The run's settings for the base of its adapters: `lora.rank` is their largest, and `lora.init` is None."""
    own: dict[str, Any] = {"rank": max(run.lora.rank for run in config.adapter_runs.values()), "init": None}
    return config.model_copy(update={"lora": config.lora.model_copy(update=own)})
