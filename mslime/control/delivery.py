"""The trainer's weights to all engines that are there, also when one dies on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mslime.config.errors import UserError, WeightSyncError
from mslime.config.schema import RunConfig
from mslime.control.rollouts import RolloutHandle
from mslime.control.trainers import Span, TrainerGroup
from mslime.observe.progress import Progress

if TYPE_CHECKING:
    from mslime.backends.sglang.pool import Serving
    from mslime.backends.sglang.server import EngineAddress
    from mslime.weights.sync import SendReport


class Delivery:
    """Sends weights to paused engines, whose updates it begins.

    Args:
        addresses: of all engines that the run began with.
        check: raises when the run is to end.
    """

    def __init__(
        self,
        config: RunConfig,
        rollouts: RolloutHandle,
        trainers: TrainerGroup,
        addresses: Sequence[EngineAddress],
        check: Callable[[], None],
        progress: Progress,
    ) -> None:
        self._config, self._rollouts, self._trainers, self._addresses = config, rollouts, trainers, addresses
        self._check, self._progress = check, progress
        self._met = frozenset(address.url for address in addresses)

    @property
    def engines(self) -> int:
        """How many share groups with the trainer."""
        return len(self._met)

    def connect(self, group: str) -> None:
        """Let the trainer meet the engines that are there, in process groups whose names begin with `group`."""
        self._trainers.connect([a.endpoint for a in self._addresses if a.url in self._met], group)

    def send(self, version: int, verify: bool, new_group: Callable[[], str]) -> tuple[SendReport, dict[str, Span]]:
        """Bring all weights to every engine that is there. When one dies meanwhile, the others, which stay paused and
        hold a mixture, get all of them again.

        Args:
            new_group: makes names for groups without the engines that are gone.

        Returns:
            The report, and every rank's busy span, of the attempt that went through.

        Raises:
            WeightSyncError: it failed, and all engines are there.
            EngineError: none is left, or one refuses the update.
        """
        self._meet(self._rollouts.begin_update(), new_group)
        while True:  # ends: there is an engine less each time
            try:
                return self._trainers.send_weights(version, verify, self._progress.weights)
            except WeightSyncError as error:
                self._check()
                try:
                    self._leave()
                    serving = self._rollouts.begin_again()
                except UserError as second:
                    raise error from second
                if self._met == frozenset(serving.urls):
                    raise
                self._meet(serving, new_group)

    def _meet(self, serving: Serving, new_group: Callable[[], str]) -> None:
        """Where engines are gone since the last time, leave the groups with them and meet those that are left."""
        if self._met == (there := frozenset(serving.urls)):
            return
        for name, why in serving.gone.items():
            self._progress.note(f"{name} is gone ({why}); {len(there)} of {len(self._addresses)} engines go on")
        self._leave()
        self._met = there
        self.connect(new_group())

    def _leave(self) -> None:
        """Nobody waits for an engine that is gone any more."""
        self._trainers.disconnect(self._config.deadlines.weight_sync_s)
