"""The trainer's weights to all engines that are there, also when one dies on the way."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mslime.backends.sglang.client import EngineDied
from mslime.config.errors import UserError, WeightSyncError
from mslime.config.schema import RunConfig
from mslime.observe.progress import Progress
from mslime.run.engine_actors import EngineGroup
from mslime.run.fleet import Fleet
from mslime.run.ranks import Span
from mslime.run.rollout_process import RolloutProcess
from mslime.run.run_engines import RunEngines
from mslime.run.sharing import Apart
from mslime.run.trainers import TrainerGroup
from mslime.run.weight_probe import Answered, WeightProbe

if TYPE_CHECKING:
    from mslime.backends.sglang.engine_pool import UpdateMembers
    from mslime.weights.sync import SendReport


@dataclass(frozen=True)
class Delivered:
    """Weights that are there.

    Attributes:
        report: of the attempt that went through.
        spans: when each rank was busy with it.
        compared: tensors that were compared in all engines, and are equal; None where none was to be compared.
        repeats: attempts that did not go through.
        probed: of the probe; None where there was none.
    """

    report: SendReport
    spans: Mapping[str, Span]
    compared: int | None
    repeats: int
    probed: Answered | None = None

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


class Delivery:
    """Brings weights to paused engines, whose updates it begins and ends.

    Args:
        engines: where they are.
        fleet: is told who is gone.
        check: raises when the run is to end.
        new_group: makes names for groups without the engines that are gone.
        memory: whose turn it is on shared GPUs.
        probe: asked after each sync; None: nothing is.
    """

    def __init__(
        self,
        config: RunConfig,
        rollouts: RolloutProcess,
        trainers: TrainerGroup,
        engines: EngineGroup,
        fleet: Fleet,
        check: Callable[[], None],
        new_group: Callable[[], str],
        progress: Progress,
        memory: Apart,
        probe: WeightProbe | None = None,
    ) -> None:
        self._config, self._rollouts, self._trainers, self._engines = config, rollouts, trainers, engines
        self._fleet, self._check, self._new_group, self._progress = fleet, check, new_group, progress
        self._memory, self._probe = memory, probe
        self._met = frozenset(address.url for address in engines.addresses)
        self._proven: frozenset[str] = frozenset()  # engines that have taken weights once

    pauses = True
    """Engines rest while it sends."""

    @property
    def engines(self) -> int:
        """How many share groups with the trainer."""
        return len(self._met)

    def connect(self, group: str) -> None:
        """Let the trainer meet the engines that are there, in process groups whose names begin with `group`."""
        met = [address for address in self._engines.addresses if address.url in self._met]
        self._trainers.connect([endpoint for address in met for endpoint in address.endpoints], group)

    def send(self, version: int, verify: bool) -> Delivered:
        """Bring all weights to every engine that is there, compare them if asked to, let them count as `version`, and
        probe.

        When it fails, the engines stay paused and hold a mixture, so all of them get everything again, and are
        compared. Without those that died; without those that are new, where there are others; and without those that
        the error names, when it fails a second time with the same ones.

        Raises:
            WeightSyncError: it failed with engines of which none took weights before; or twice with the same ones, and
                names none of them, or all.
            EngineDied: none is left.
            EngineError: all refuse the update.
        """
        serving, failed, repeats = self._rollouts.engines.call(RunEngines.begin_update), (), 0
        while True:  # ends: there is an engine less every second time
            try:
                self._meet(serving)
                self._memory.enter("send")
                check = self._config.compares_weights and (verify or repeats > 0)
                report, spans = self._trainers.send_weights(version, check, self._progress.weights)
                strict = self._config.weights.verify in ("first", "always")
                compared = self._rollouts.engines.call(RunEngines.compare, report.expected, strict) if check else None
                self._rollouts.engines.call(RunEngines.end_update)
                self._rollouts.engines.call(RunEngines.stamp, version)
                probed = None if self._probe is None else self._probe.ask(version)
                self._proven = self._met
                return Delivered(report, spans, compared, repeats, probed)
            except WeightSyncError as error:
                self._check()
                tried, repeats = serving.urls, repeats + 1
                serving = self._again(tried, tried == failed, error)
                failed = tried

    def _again(self, tried: tuple[str, ...], twice: bool, error: WeightSyncError) -> UpdateMembers:
        """After a failure: who is to be tried with next. Raises `error` when trying again is of no use."""
        try:
            self._leave()
            serving = self._rollouts.engines.call(RunEngines.begin_again)
            if serving.urls != tried:
                return serving
            new, named = set(tried) - self._proven, self._named(error) & set(tried)
            if new:  # where all are, it is the run's first sync: what is wrong then is not mended by sending it again
                if new != set(tried):
                    self._fleet.reject(new, error)
                    return self._rollouts.engines.call(RunEngines.begin_again)
            elif not twice:
                self._progress.note(f"all weights are sent again: {error.brief}")
                return serving
            elif named and named != set(tried):
                self._rollouts.engines.call(RunEngines.leave_out, named, error.brief)
                return self._rollouts.engines.call(RunEngines.begin_again)
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
            if any(names_engine(error, server.url) for server in address.endpoints)
        }

    def _meet(self, serving: UpdateMembers) -> None:
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
        self._trainers.disconnect()


def names_engine(error: WeightSyncError, url: str) -> bool:
    """Whether an error says that it is this engine's."""
    return re.search(rf"{re.escape(url)}(?![\w.-]|:\d)", str(error)) is not None
