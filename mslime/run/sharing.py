"""Use of the memory of GPUs that trainer and engines share, and its hand-over between them.

With `cluster.placement: separate` both keep their memory (`SeparateGpus`). A colocated run is in one of four phases
(`PHASES`), and only `SharedGpus` switches between them. First both sides release the parts that the next phase does not
need, then both take those that it needs. So no GPU ever holds more than the larger of two phases. Engines report which
parts they hold, and trainer ranks track theirs, so a switch may be repeated after any failure.

An engine can only start, or be admitted again, while the trainer is offloaded: it measures the free memory of its GPUs,
and its first requests need all its memory. So its start waits for that, and the trainer is reloaded only after all
starting engines are up.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from mslime.config.base import ENGINE_TAGS, EngineTag, TrainerPart
from mslime.config.errors import EngineError, UserError
from mslime.run.engine_actors import EngineGroup
from mslime.run.fleet import LOOK_EVERY_S
from mslime.run.rollout_process import RolloutProcess
from mslime.run.run_engines import RunEngines
from mslime.run.run_rollouts import RunRollouts
from mslime.run.trainers import TrainerGroup

PhaseName = Literal["generate", "train", "send", "save"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Phase:
    """Contents of the GPUs.

    Attributes:
        trainer: parts of the trainer's state.
        engines: parts of the engines' memory.
        teachers: parts of a served teacher's memory, on GPUs of the trainer without engines.
    """

    trainer: frozenset[TrainerPart] = frozenset()
    engines: frozenset[EngineTag] = frozenset()
    teachers: frozenset[EngineTag] = frozenset()


PHASES: dict[PhaseName, Phase] = {
    "generate": Phase(engines=frozenset(ENGINE_TAGS), teachers=frozenset(ENGINE_TAGS)),
    "train": Phase(trainer=frozenset(("weights", "optimizer", "gradients"))),
    "send": Phase(trainer=frozenset(("weights",)), engines=frozenset(("weights",))),
    "save": Phase(trainer=frozenset(("weights", "optimizer")), engines=frozenset(("weights",))),
}
"""`send` is also for exports and for the trainer's part of a probe: weights without training state. In `save` engines
keep their weights, because nothing would send them again."""


class SeparateGpus:
    """Trainer and engines on separate GPUs.

    Args:
        update_engines: handles dead, recovered and requested engines; never called in a run without engines.
    """

    shared = False

    def __init__(self, update_engines: Callable[[], object] = lambda: None) -> None:
        self._update_engines = update_engines

    def enter(self, phase: PhaseName) -> None:
        """Load the parts of this phase. Engines must be paused."""

    def begin_sync(self) -> None:
        """Called before engines are paused for a sync."""
        self._update_engines()

    def end_sync(self) -> None:
        """Called when engines generate again."""

    def begin_training(self) -> None:
        """Called before a step of the trainer, after its groups were taken."""

    @contextmanager
    def awake(self, phase: PhaseName, version: int, last: bool = False) -> Iterator[None]:
        """Context in which the trainer has the parts of this phase; engines, which serve this version, continue
        afterwards.

        Args:
            last: no generation follows.
        """
        yield

    def revive(self) -> None:
        """Called if no engine is left, and some are to be started."""

    def metrics(self) -> dict[str, float]:
        """Seconds of phase switches since the last call."""
        return {}


class SharedGpus(SeparateGpus):
    """Trainer and engines on the same GPUs. It begins with an offloaded trainer and all engines up.

    Args:
        update_engines: as for `SeparateGpus`.
        check: raises when the run is to end.
        teachers: servers of a teacher that also shares the GPUs; None without one.
    """

    shared = True

    def __init__(
        self,
        rollouts: RolloutProcess,
        trainers: TrainerGroup,
        engines: EngineGroup,
        update_engines: Callable[[], object],
        check: Callable[[], None],
        teachers: EngineGroup | None = None,
    ) -> None:
        super().__init__(update_engines)
        self._rollouts, self._trainers, self._engines, self._check = rollouts, trainers, engines, check
        self._trainer, self._engine = PHASES["generate"].trainer, PHASES["generate"].engines
        self._teachers, self._teacher = teachers, PHASES["generate"].teachers
        self._open = True  # engines may be started
        self._seconds = defaultdict[str, float](float)

    def enter(self, phase: PhaseName) -> None:
        """Raises EngineError if no engine can switch, and TrainerError if the trainer cannot."""
        if phase != "generate":
            self._close()
        wanted = PHASES[phase]
        self._load_engines(self._engine & wanted.engines, "release")
        self._load_teachers(self._teacher & wanted.teachers, "release")
        self._load_trainer(self._trainer & wanted.trainer, "sleep")
        self._load_trainer(wanted.trainer, "wake")
        self._load_engines(wanted.engines, "resume")
        self._load_teachers(wanted.teachers, "resume")

    def begin_sync(self) -> None:
        """If engines have generated until now, wait for starting engines, and handle dead ones."""
        self._close()

    def end_sync(self) -> None:
        """Engines may start from now on."""
        self._open = True
        self._engines.let_start(True)

    def begin_training(self) -> None:
        """Without engines the trainer may continue as well: their memory is free."""
        self._close()
        try:
            self._rollouts.service.call(RunRollouts.pause)
            self.enter("train")
        except EngineError:
            if not self._rollouts.engines.call(RunEngines.no_engine_alive):
                raise
            self._engine = frozenset()
            self.enter("train")

    @contextmanager
    def awake(self, phase: PhaseName, version: int, last: bool = False) -> Iterator[None]:
        """Nothing is done if the trainer already holds these parts, as after a step that could not be sent. If no
        generation follows, the engines are ended, which frees their memory in any case."""
        if self._trainer >= PHASES[phase].trainer:
            yield
            return
        if last:
            self._engines.stop()
            if self._teachers is not None:
                self._teachers.stop()
            self._engine = self._teacher = frozenset()
            self._load_trainer(PHASES[phase].trainer, "wake")
            yield
            return
        self._close()
        self._rollouts.service.call(RunRollouts.pause)
        self.enter(phase)
        yield
        self.enter("generate")
        self._rollouts.service.call(RunRollouts.resume, version)
        self.end_sync()

    def revive(self) -> None:
        """Engines start while the trainer is offloaded, and then hold all their memory."""
        self._load_trainer(frozenset(), "sleep")
        self._engine = PHASES["generate"].engines
        self.end_sync()

    def metrics(self) -> dict[str, float]:
        """`perf/sleep_seconds` and the like."""
        found, self._seconds = self._seconds, defaultdict[str, float](float)
        return {f"perf/{label}_seconds": found[label] for label in ("release", "sleep", "wake", "resume")}

    def _close(self) -> None:
        """Forbid starts of engines, and wait for starting ones, which need their GPUs."""
        if not self._open:
            return
        self._update_engines()
        while self._engines.starting:
            self._check()
            time.sleep(LOOK_EVERY_S)
            self._update_engines()
        self._open = False
        self._engines.let_start(False)

    def _load_engines(self, tags: frozenset[EngineTag], label: str) -> None:
        if tags == self._engine:
            return
        begin, self._engine = time.monotonic(), frozenset(ENGINE_TAGS)  # if this fails, they may hold anything
        try:
            self._rollouts.engines.call(RunEngines.hold_memory, tags)
        finally:
            self._end_dead(self._engines, self._rollouts.engines.call(RunEngines.dead))
        self._engine = tags
        self._seconds[label] += time.monotonic() - begin

    def _load_teachers(self, tags: frozenset[EngineTag], label: str) -> None:
        """A dead teacher, also one that died while offloaded, is skipped. Raises EngineError if none is left: the run
        ends."""
        if self._teachers is None or tags == self._teacher:
            return
        begin, self._teacher = time.monotonic(), frozenset(ENGINE_TAGS)
        try:
            dead = self._rollouts.engines.call(RunEngines.hold_teachers, tags)
        except EngineError as error:
            raise EngineError(
                "teacher", "no server is left", f"teachers are not restarted, and {error.field} is gone: {error.brief}",
                "read its log, and start the run again: it continues after the last step. With teacher.num_engines: 2 "
                "a run survives the loss of one",
            ) from error  # fmt: skip
        self._end_dead(self._teachers, dead)
        self._teacher = tags
        self._seconds[label] += time.monotonic() - begin

    def _load_trainer(self, parts: frozenset[TrainerPart], label: str) -> None:
        if parts == self._trainer:
            return
        begin, self._trainer = time.monotonic(), frozenset()  # if this fails, nothing is sure to be there
        self._trainers.hold(parts)
        self._trainer = parts
        self._seconds[label] += time.monotonic() - begin

    def _end_dead(self, group: EngineGroup, names: Iterable[str]) -> None:
        """End these servers: one declared dead may only hang, and keep its memory."""
        for name in names:
            try:
                group.halt(name)
            except UserError as error:
                _log.warning("%s cannot be stopped: %s", name, error.brief)
