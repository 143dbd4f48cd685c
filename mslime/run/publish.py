"""A new version of the weights: from the pause of the engines to their next request, and which engines take part.

`Publisher` sends all weights to paused engines, also if one of them dies meanwhile. `AdapterPublisher` sends only
adapters, to engines that generate meanwhile.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from mslime.backends.sglang.client import EngineDied
from mslime.backends.sglang.serving_adapters import AdapterVersion
from mslime.config.base import adapter_directory
from mslime.config.errors import EngineError, UserError, WeightSyncError
from mslime.config.schema import RunConfig
from mslime.convert.peft import WEIGHTS
from mslime.observe.progress import Progress
from mslime.observe.timeline import Timeline
from mslime.run.engine_actors import EngineGroup
from mslime.run.fleet import Fleet
from mslime.run.ranks import Span
from mslime.run.rollout_process import RolloutProcess
from mslime.run.run_engines import RunEngines
from mslime.run.run_rollouts import RunRollouts
from mslime.run.sharing import SeparateGpus
from mslime.run.trainers import TrainerGroup
from mslime.run.weight_probe import ProbeResult, WeightProbe
from mslime.weights.bucket_sender import PhaseSeconds
from mslime.weights.sync import SendReport

if TYPE_CHECKING:
    from mslime.backends.sglang.engine_pool import UpdateMembers

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateResult:
    """Result of a weight update.

    Attributes:
        report: of the successful attempt.
        spans: when each rank was busy with it.
        compared: number of tensors compared in all engines and found equal; None without a comparison.
        repeats: number of failed attempts.
        probed: result of the probe; None without one.
    """

    report: SendReport
    spans: Mapping[str, Span]
    compared: int | None
    repeats: int
    probed: ProbeResult | None = None

    def metrics(self) -> dict[str, float]:
        """Named as in `metrics.jsonl`."""
        sent, senders = self.report, self.report.phases.values()
        return {
            "weights/bytes": float(sent.bytes),
            **({} if sent.changed is None else {"weights/changed": sent.changed}),
            "weights/gb_per_s": sent.bytes / max(sent.seconds, 1e-9) / 1e9,
            "weights/buckets": float(sent.buckets),
            "weights/repeats": float(self.repeats),
            "weights/fill_seconds": max(spent.fill for spent in senders),
            "weights/turn_seconds": max(spent.turn for spent in senders),
            "weights/send_seconds": max(spent.send for spent in senders),
            **({} if self.probed is None else self.probed.metrics()),
        }


class Publisher:
    """Publishes the trainer's weights to the engines.

    Args:
        engines: holds their addresses.
        fleet: tracks which of them are alive; it is updated with dead ones.
        memory: schedules the use of shared GPUs.
        check: raises when the run is to end.
        new_group: makes names for groups without the dead engines.
        probe: run after each sync; None: no probe.
        adapter: name of the published adapter, if there are several; else empty.
    """

    pauses: ClassVar = True
    """Whether engines are paused while it sends."""

    def __init__(
        self,
        config: RunConfig,
        rollouts: RolloutProcess,
        trainers: TrainerGroup,
        engines: EngineGroup,
        fleet: Fleet,
        memory: SeparateGpus,
        check: Callable[[], None],
        new_group: Callable[[], str],
        progress: Progress,
        timeline: Timeline,
        probe: WeightProbe | None = None,
        adapter: str = "",
    ) -> None:
        self._config, self._rollouts, self._trainers, self._engines = config, rollouts, trainers, engines
        self._fleet, self._memory, self._check, self._new_group = fleet, memory, check, new_group
        self._progress, self._timeline, self._probe, self._adapter = progress, timeline, probe, adapter
        self._verified, self._joins = 0, fleet.joins  # syncs with a comparison since the last engine joined
        self._connected = frozenset(address.url for address in engines.addresses)  # engines that take part in syncs
        self._proven: frozenset[str] = frozenset()  # engines that have taken weights once
        self._unique = uuid.uuid4().hex[:8]  # attached engines may still have adapters of another run

    def connect(self, group: str) -> None:
        """Connect the trainer to the engines, in process groups whose names begin with `group`."""
        connected = [address for address in self._engines.addresses if address.url in self._connected]
        self._trainers.connect([endpoint for address in connected for endpoint in address.endpoints], group)

    def publish(self, version: int, step: int) -> dict[str, float]:
        """Publish the trainer's weights as this version; generation continues under it afterwards.

        The rollout service owns the engines, and every step on their side is a call to it. No trainer rank enters a
        collective before every engine has confirmed its pause. The version is stamped last, so an engine with a partial
        update never reports the new one. The comparison comes before the end, while parameters are as loaded.

        If all engines die meanwhile, and one comes back, everything is done again.

        Args:
            step: of the timeline.

        Returns:
            Metrics named as in `metrics.jsonl`.
        """
        _log.info("sending weights of version %d", version)
        begin = time.monotonic()
        try:
            self._memory.begin_sync()
            if self._joins != self._fleet.joins:  # new engines are compared as all are in the run's first syncs
                self._verified, self._joins = 0, self._fleet.joins
            self._rollouts.service.call(RunRollouts.pause)
            paused = time.monotonic()
            self._memory.enter("send")
            verify = self._config.weights.verify
            delivered = self.send(version, verify == "always" or (verify in ("first", "probe") and self._verified < 2))
            self._memory.enter("generate")
            self._rollouts.service.call(RunRollouts.resume, version)
            end = time.monotonic()
            self._memory.end_sync()
            self._fleet.lost(self._rollouts.engines.call(RunEngines.dead))
        except EngineError as error:
            self.revive(error)
            return self.publish(version, step)
        self._fleet.settled()
        self._note(delivered, version, step)
        return {
            "weights/seconds": end - begin,
            "weights/pause_seconds": end - paused if self.pauses else 0.0,
            **delivered.metrics(),
            "weights/engines": float(len(self._connected)),
            **self._memory.metrics(),
        }

    def revive(self, error: EngineError) -> None:
        """If all engines are dead, wait until one can receive weights. Raises `error` otherwise, or if none comes
        back."""
        if not self._rollouts.engines.call(RunEngines.no_engine_alive):
            raise error
        self._memory.revive()
        self._fleet.revive(error)

    def _note(self, delivered: UpdateResult, version: int, step: int) -> None:
        """Record how many tensors were compared, and when each rank was busy."""
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

    def send(self, version: int, verify: bool) -> UpdateResult:
        """Send all weights to every live engine, compare them if `verify` is set, stamp them as `version`, and probe.

        After a failure the engines stay paused with a mixture of versions, so all of them get everything again, and are
        compared. Dead engines are left out; new ones too, if there are others; and, after a second failure with the
        same engines, those that the error names.

        Raises:
            WeightSyncError: it failed with engines of which none has taken weights before; or twice with the same ones,
                and the error names none of them, or all.
            EngineDied: none is left.
            EngineError: all refuse the update.
        """
        serving, failed, repeats = self._rollouts.engines.call(RunEngines.begin_update), (), 0
        while True:  # ends: every second attempt has one engine less
            try:
                self._reconnect(serving)
                self._memory.enter("send")
                check = self._config.compares_weights and (verify or repeats > 0)
                report, spans = self._trainers.send_weights(version, check, self._progress.weights)
                strict = self._config.weights.verify in ("first", "always")
                compared = self._rollouts.engines.call(RunEngines.compare, report.expected, strict) if check else None
                self._rollouts.engines.call(RunEngines.end_update)
                self._rollouts.engines.call(RunEngines.stamp, version)
                probed = None if self._probe is None else self._probe.ask(version)
                self._proven = self._connected
                return UpdateResult(report, spans, compared, repeats, probed)
            except WeightSyncError as error:
                self._check()
                tried, repeats = serving.urls, repeats + 1
                serving = self._retry(tried, tried == failed, error)
                failed = tried

    def _retry(self, tried: tuple[str, ...], twice: bool, error: WeightSyncError) -> UpdateMembers:
        """Choose the engines of the next attempt after a failure. Raises `error` if a further attempt is useless."""
        try:
            self._leave()
            serving = self._rollouts.engines.call(RunEngines.restart_update)
            if serving.urls != tried:
                return serving
            new, named = set(tried) - self._proven, self._named(error) & set(tried)
            if new:  # if all are new, this is the run's first sync: its fault persists in another attempt
                if new != set(tried):
                    self._fleet.reject(new, error)
                    return self._rollouts.engines.call(RunEngines.restart_update)
            elif not twice:
                self._progress.note(f"sending all weights again: {error.brief}")
                return serving
            elif named and named != set(tried):
                self._rollouts.engines.call(RunEngines.mark_dead, named, error.brief)
                return self._rollouts.engines.call(RunEngines.restart_update)
        except EngineDied:
            raise
        except UserError as second:
            raise error from second
        raise error

    def _named(self, error: WeightSyncError) -> set[str]:
        """URLs of the engines that an error names, by any of their servers."""
        return {
            address.url
            for address in self._engines.addresses
            if any(_names_engine(error, server.url) for server in address.endpoints)
        }

    def _reconnect(self, serving: UpdateMembers) -> None:
        """If the set of engines has changed, leave the old groups and connect to the current engines."""
        self._fleet.lost(serving.gone)
        if self._connected == (there := frozenset(serving.urls)):
            return
        self._progress.note(f"sending weights to {len(there)} of {self._fleet.size} engines")
        if self._connected:
            self._leave()
        self._connected = there
        self.connect(self._new_group())

    def _leave(self) -> None:
        """Leave the groups, so no rank waits for a dead engine."""
        self._connected = frozenset()
        self._trainers.disconnect()


def _names_engine(error: WeightSyncError, url: str) -> bool:
    """Whether an error names this engine."""
    return re.search(rf"{re.escape(url)}(?![\w.-]|:\d)", str(error)) is not None


class AdapterPublisher(Publisher):
    """Writes the adapters once for all engines, which load each version under a separate name."""

    pauses = False
    """Engines generate while it sends."""

    def connect(self, group: str) -> None:
        """Nothing: engines and trainer share a directory, and no process group."""

    def send(self, version: int, verify: bool) -> UpdateResult:
        """Write the adapters, make every live engine load them, compare them if `verify` is set, and probe.

        An engine that cannot load them, or fails the comparison or the probe, is declared dead and restarted like every
        dead engine. It has used the new adapters for none of its requests.

        Raises:
            WeightSyncError: they cannot be written; or all engines fail the comparison or the probe.
            EngineError: no engine can load them. EngineDied: none is left.
        """
        directory, owner = self._config.weights_directory / adapter_directory(version), self._adapter
        adapter = AdapterVersion(f"{self._config.name}-{self._unique}-v{version}", version, directory, owner)
        strict = self._config.weights.verify in ("first", "always")
        begin = time.monotonic()
        expected, spans = self._trainers.write_adapter(directory, verify)
        written = time.monotonic()
        serving = self._rollouts.engines.call(RunEngines.load_adapter, adapter, self._config.adapters_alive)
        loaded = time.monotonic()
        self._fleet.lost(serving.gone)
        self._connected = frozenset(serving.urls)
        self._remove_unused({*serving.adapters, version})
        compared, probe = None, self._probe
        if verify:
            engines = self._rollouts.engines
            compared = self._of_sound(lambda: engines.call(RunEngines.compare, expected, strict, version, owner))
        probed = None if probe is None else self._of_sound(lambda: probe.ask(version))
        moved = (directory / WEIGHTS).stat().st_size
        phases = {0: PhaseSeconds(fill=written - begin, send=loaded - written)}
        return UpdateResult(
            SendReport(version, moved, 0, loaded - begin, phases, None, expected), spans, compared, 0, probed
        )

    def _of_sound(self, ask: Callable[[], T]) -> T:
        """Result of `ask` for the engines without errors. Raises WeightSyncError if there are none."""
        while True:  # ends: every attempt has one engine less
            try:
                return ask()
            except WeightSyncError as error:
                self._check()
                wrong = {url for url in self._connected if _names_engine(error, url)}
                if not wrong or wrong == self._connected:
                    raise
                self._rollouts.engines.call(RunEngines.mark_dead, wrong, error.brief)
                self._connected -= wrong

    def _remove_unused(self, kept: set[int]) -> None:
        """Remove files of adapters that no request can use any more: an engine reads a loaded adapter from its file."""
        names = {adapter_directory(version) for version in kept}
        for directory in self._config.weights_directory.glob("adapter_*"):
            if directory.name not in names:
                shutil.rmtree(directory, ignore_errors=True)
