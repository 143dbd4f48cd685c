"""A run of several adapters: one trainer, one set of engines and one rollout service, and a thread for each adapter."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from mslime.config.schema import RunConfig
from mslime.control.adapter_ranks import AdapterRanks
from mslime.control.adapter_session import AdapterSession, AdapterStop, Common, Ending
from mslime.control.endpoint import ControlEndpoint
from mslime.control.fleet import Fleet
from mslime.control.results import OfAdapter
from mslime.control.rollouts import RolloutProcess
from mslime.control.started import Started
from mslime.control.stop import Stopped, StopSignals
from mslime.control.trainer_turn import become
from mslime.observe.progress import open_lines
from mslime.preflight.resolve import ResolvedRun

_log = logging.getLogger(__name__)
LOOK_EVERY_S, AT_ONCE_S = 0.2, 5.0
"""Between two looks at the threads; for threads to end after a second signal."""


class AdaptersSession(Started):
    """A running run of several adapters. A context manager.

    Attributes:
        adapters: those that have steps left.
    """

    def __init__(self, run: ResolvedRun, stop: StopSignals, quiet: bool = False) -> None:
        """
        Args:
            quiet: show no progress, whatever `observe.progress` says.
        """
        super().__init__(run, stop)
        self._quiet, self._ending = quiet, Ending()
        every = [AdapterSession(own, AdapterStop(stop, self._ending, name)) for name, own in run.adapters.items()]
        self.adapters = [each for each in every if each.first_step < each.config.train.num_steps]
        for each in self.adapters:
            each.others = self.adapters

    def _start(self) -> None:
        config, names = self.config, [each.name for each in self.adapters]
        shown = "off" if self._quiet else config.observe.progress
        self.progress = self._stack.enter_context(open_lines(shown))
        self._say_start()
        cluster, ray = self._join_cluster(generates=True)
        ranks = AdapterRanks(with_base(config), cluster, self._logs, self._worth_waiting)
        self._stack.callback(ranks.stop)
        engines = self._engine_group(cluster)
        (addresses,) = self._start_beside(ranks.start, engines)
        self._take_over(engines.attached, lambda seconds: None)
        weights = {entry.name: entry.weight for entry in config.adapters}
        parts = {name: OfAdapter(self._run.adapters[name], weights[name]) for name in names}
        rollouts = RolloutProcess(self._run, self._logs / "rollouts.log", self._at_rest, parts)
        self._stack.callback(rollouts.stop)
        rollouts.start_adapters(addresses, ranks.layers, {each.name: each.beginning() for each in self.adapters})
        fleet = Fleet(rollouts.engines, engines, self._attached, self._at_rest, self.progress)
        common = Common(ranks, rollouts, engines, fleet, ray, self.progress)
        for each in self.adapters:
            self._stack.enter_context(each.join(common))
        self._ranks = ranks
        self._stack.enter_context(ControlEndpoint(config.run_dir, fleet.orders))

    def train(self, loop: Callable[[AdapterSession], None]) -> None:
        """Every adapter's loop, each in a thread of its own, until all are through.

        A signal, or the first loop that fails, ends them all: each saves what it has learnt at its next rest. Raises
        what that was.
        """
        self._stop.describe = lambda: "stopping: adapters are saved when they are at rest; again to stop without saving"
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
                    thread.join(LOOK_EVERY_S)
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
        except BaseException as error:  # whatever it is, the main thread raises the first
            _log.info("adapter %s ends: %s", adapter.name, error)
            if isinstance(error, Stopped):
                self.progress.note(f"{adapter.name}: {error.outcome}")
                error.outcome = "the lines above list the saved adapters"
            self._ending.note(adapter.name, error)
        finally:
            self._ranks.turn.leave()


def with_base(config: RunConfig) -> RunConfig:
    """The run's settings for the base that adapters are trained on: what `lora` says is each adapter's own."""
    own: dict[str, Any] = {"rank": max(run.lora.rank for run in config.adapter_runs.values()), "init": None}
    return config.model_copy(update={"lora": config.lora.model_copy(update=own)})
