"""A new version of the weights: who waits for whom in a sync, what happens when all engines die in it, its metrics."""

from __future__ import annotations

import logging
import time

from mslime.config.base import Verify
from mslime.config.errors import EngineError
from mslime.observe.progress import Progress
from mslime.observe.timeline import Timeline
from mslime.run.adapter_delivery import AdapterDelivery
from mslime.run.delivery import Delivered, Delivery
from mslime.run.fleet import Fleet
from mslime.run.rollout_process import RolloutProcess
from mslime.run.run_engines import RunEngines
from mslime.run.run_rollouts import RunRollouts
from mslime.run.sharing import Apart

_log = logging.getLogger(__name__)


class Publisher:
    """Lets the engines generate under the trainer's weights.

    Args:
        verify: how engines are compared with the trainer (`weights.verify`).
        memory: whose turn it is on shared GPUs.
    """

    def __init__(
        self, verify: Verify, rollouts: RolloutProcess, delivery: Delivery | AdapterDelivery, fleet: Fleet,
        memory: Apart, progress: Progress, timeline: Timeline,
    ) -> None:  # fmt: skip
        self._verify, self._rollouts, self._delivery, self._fleet = verify, rollouts, delivery, fleet
        self._memory, self._progress, self._timeline = memory, progress, timeline
        self._verified = 0

    def tend(self) -> None:
        """See `Fleet.tend`. With engines that join, weights are compared as in the run's first syncs."""
        if self._fleet.tend():
            self.doubt()

    def doubt(self) -> None:
        """Compare weights as in the run's first syncs."""
        self._verified = 0

    def publish(self, version: int, step: int) -> dict[str, float]:
        """Give the engines the trainer's weights as this version; generation goes on under it afterwards.

        The rollout service has the engines: every step on their side is a call to it. No trainer rank enters a
        collective before every engine has confirmed its pause. The version is stamped last, so an engine that was left
        in the middle never claims the new one; the comparison comes before the end, while parameters lie as loaded.

        Args:
            step: of the timeline.

        Returns:
            Metrics named as in `metrics.jsonl`.
        """
        while True:
            try:
                return self._publish(version, step)
            except EngineError as error:
                self.revive(error)

    def revive(self, error: EngineError) -> None:
        """Where all engines are gone, wait until one can get weights; else, or when none comes back, raise `error`."""
        if not self._rollouts.engines.call(RunEngines.stranded):
            raise error
        self._memory.revive()
        self._fleet.revive(error)

    def _publish(self, version: int, step: int) -> dict[str, float]:
        _log.info("sending weights of version %d", version)
        begin = time.monotonic()
        self._memory.begin_sync()
        self._rollouts.service.call(RunRollouts.pause)
        paused = time.monotonic()
        self._memory.enter("send")
        first = self._verify in ("first", "probe") and self._verified < 2
        delivered = self._delivery.send(version, self._verify == "always" or first)
        self._memory.enter("generate")
        self._rollouts.service.call(RunRollouts.resume, version)
        end = time.monotonic()
        self._memory.end_sync()
        self._fleet.lost(self._rollouts.engines.call(RunEngines.dead))
        self._fleet.settled()
        self._tell(delivered, version, step)
        seconds = {
            "weights/seconds": end - begin,
            "weights/pause_seconds": end - paused if self._delivery.pauses else 0.0,
        }
        return (
            seconds | delivered.metrics() | {"weights/engines": float(self._delivery.engines)} | self._memory.metrics()
        )

    def _tell(self, delivered: Delivered, version: int, step: int) -> None:
        """What was compared, and who was busy when."""
        if (compared := delivered.compared) is not None:
            self._verified += 1
            equal = f"{compared} tensors in the engines equal the trainer's, bit for bit"
            self._progress.note(f"version {version}: {equal if compared else 'no engine can report its tensors'}")
        self._timeline.record_lanes("send weights", delivered.spans, step)
        for rank, spent in delivered.report.phases.items():
            for start, end in spent.sent:
                self._timeline.record(f"sender {rank}", "send bucket", start, end, step)
        if delivered.probed is not None:
            self._timeline.record_lanes("probe", delivered.probed.spans, step)
