"""The trainer's adapters to all engines that are there, while those generate."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

from mslime.backends.sglang.serving_adapters import AdapterVersion
from mslime.config.base import adapter_directory
from mslime.config.errors import WeightSyncError
from mslime.config.schema import RunConfig
from mslime.convert.peft import WEIGHTS
from mslime.run.delivery import Delivered, names_engine
from mslime.run.fleet import Fleet
from mslime.run.rollout_process import RolloutProcess
from mslime.run.run_engines import RunEngines
from mslime.run.trainers import TrainerGroup
from mslime.run.weight_probe import WeightProbe
from mslime.weights.bucket_sender import Seconds
from mslime.weights.sync import SendReport

T = TypeVar("T")


class AdapterDelivery:
    """Writes the adapters once for all engines, and has each load them under a name of its own for every version.

    Args:
        fleet: is told who is gone.
        check: raises when the run is to end.
        probe: asked after each sync; None: nothing is.
        owner: which of several adapters it delivers; empty in a run of one.
    """

    def __init__(
        self, config: RunConfig, rollouts: RolloutProcess, trainers: TrainerGroup, fleet: Fleet,
        check: Callable[[], None], probe: WeightProbe | None = None, owner: str = "",
    ) -> None:  # fmt: skip
        self._config, self._rollouts, self._trainers, self._fleet = config, rollouts, trainers, fleet
        self._check, self._probe, self._owner = check, probe, owner
        self._name = f"{config.name}-{uuid.uuid4().hex[:8]}"  # attached engines may still have those of another run
        self._directory = config.weights_directory
        self._engines = 0

    pauses = False
    """Engines generate while it sends."""

    @property
    def engines(self) -> int:
        """How many have the newest adapters."""
        return self._engines

    def connect(self, group: str) -> None:
        """Nothing: engines and trainer share a directory, and no process group."""

    def send(self, version: int, verify: bool) -> Delivered:
        """Write the adapters, let every engine that is there load them, compare them if asked to, and probe.

        An engine that cannot load them, holds others or says something else is taken for dead, and is started again
        like every engine that dies; it gave none of its requests the new adapters.

        Raises:
            WeightSyncError: they cannot be written; or all engines hold others, or say something else.
            EngineError: no engine can load them. EngineDied: none is left.
        """
        directory = self._directory / adapter_directory(version)
        adapter = AdapterVersion(f"{self._name}-v{version}", version, directory, self._owner)
        strict = self._config.weights.verify in ("first", "always")
        begin = time.monotonic()
        expected, spans = self._trainers.write_adapter(adapter.directory, verify)
        written = time.monotonic()
        serving = self._rollouts.engines.call(RunEngines.load_adapter, adapter, self._config.adapters_alive)
        loaded = time.monotonic()
        self._fleet.lost(serving.gone)
        self._engines = len(serving.urls)
        self._remove_unused({*serving.adapters, version})
        compared, probe = None, self._probe
        if verify:
            engines, owner = self._rollouts.engines, self._owner
            compared = self._of_sound(
                serving.urls, lambda: engines.call(RunEngines.compare, expected, strict, version, owner)
            )
        probed = None if probe is None else self._of_sound(serving.urls, lambda: probe.ask(version))
        moved = (adapter.directory / WEIGHTS).stat().st_size
        phases = {0: Seconds(fill=written - begin, send=loaded - written)}
        return Delivered(
            SendReport(version, moved, 0, loaded - begin, phases, None, expected), spans, compared, 0, probed
        )

    def _of_sound(self, urls: Sequence[str], ask: Callable[[], T]) -> T:
        """The answer of the engines that are right. Raises WeightSyncError when that is none."""
        left = set(urls)
        while True:  # ends: there is an engine less every time
            try:
                return ask()
            except WeightSyncError as error:
                self._check()
                wrong = {url for url in left if names_engine(error, url)}
                if not wrong or wrong == left:
                    raise
                self._rollouts.engines.call(RunEngines.leave_out, wrong, error.brief)
                left -= wrong
                self._engines = len(left)

    def _remove_unused(self, kept: set[int]) -> None:
        """An engine reads what it has loaded from its file as long as a request may have it."""
        names = {adapter_directory(version) for version in kept}
        for directory in self._directory.glob("adapter_*"):
            if directory.name not in names:
                shutil.rmtree(directory, ignore_errors=True)
