"""The trainer's weights to all engines that are there, also when one dies on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mslime.backends.sglang.client import EngineDied
from mslime.config.errors import UserError, WeightSyncError
from mslime.config.schema import RunConfig
from mslime.control.engines import EngineGroup
from mslime.control.fleet import Fleet
from mslime.control.rollouts import RolloutHandle
from mslime.control.trainers import Span, TrainerGroup
from mslime.observe.progress import Progress

if TYPE_CHECKING:
    from mslime.backends.sglang.pool import Serving
    from mslime.weights.sync import SendReport


class Delivery:
    """Sends weights to paused engines, whose updates it begins.

    Args:
        engines: where they are.
        fleet: is told who is gone.
        check: raises when the run is to end.
        new_group: makes names for groups without the engines that are gone.
    """

    def __init__(
        self,
        config: RunConfig,
        rollouts: RolloutHandle,
        trainers: TrainerGroup,
        engines: EngineGroup,
        fleet: Fleet,
        check: Callable[[], None],
        new_group: Callable[[], str],
        progress: Progress,
    ) -> None:
        self._config, self._rollouts, self._trainers, self._engines = config, rollouts, trainers, engines
        self._fleet, self._check, self._new_group, self._progress = fleet, check, new_group, progress
        self._met = frozenset(address.url for address in engines.addresses)
        self._proven: frozenset[str] = frozenset()  # engines that have taken weights once

    @property
    def engines(self) -> int:
        """How many share groups with the trainer."""
        return len(self._met)

    def connect(self, group: str) -> None:
        """Let the trainer meet the engines that are there, in process groups whose names begin with `group`."""
        self._trainers.connect([a.endpoint for a in self._engines.addresses if a.url in self._met], group)

    def send(self, version: int, verify: bool) -> tuple[SendReport, dict[str, Span]]:
        """Bring all weights to every engine that is there. When one dies meanwhile, the others, which stay paused and
        hold a mixture, get all of them again. So they do when it fails with engines that are new: it goes on without.

        Returns:
            The report, and every rank's busy span, of the attempt that went through.

        Raises:
            WeightSyncError: it failed, and all engines are there.
            EngineDied: none is left.
            EngineError: one refuses the update.
        """
        serving = self._rollouts.begin_update()
        while True:  # ends: there is an engine less each time
            try:
                self._meet(serving)
                sent = self._trainers.send_weights(version, verify, self._progress.weights)
                self._proven = self._met
                return sent
            except WeightSyncError as error:
                self._check()
                tried = serving.urls
                try:
                    self._leave()
                    serving = self._rollouts.begin_again()
                    if serving.urls == tried and (new := set(tried) - self._proven) and new != set(tried):
                        self._fleet.reject(new, error)
                        serving = self._rollouts.begin_again()
                except EngineDied:
                    raise
                except UserError as second:
                    raise error from second
                if serving.urls == tried:
                    raise

    def _meet(self, serving: Serving) -> None:
        """Where other engines are there than the last time, leave the groups of then and meet those that are there."""
        self._fleet.lost(serving.gone)
        if self._met == (there := frozenset(serving.urls)):
            return
        self._progress.note(f"{len(there)} of {self._fleet.size} engines take the weights")
        if self._met:
            self._leave()
        self._met = there
        self.connect(self._new_group())

    def _leave(self) -> None:
        """Nobody waits for an engine that is gone any more."""
        self._met = frozenset()
        self._trainers.disconnect(self._config.deadlines.weight_sync_s)
