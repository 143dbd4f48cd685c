"""Who has the memory of the GPUs that trainer and engines share, and when it changes hands.

With `cluster.placement: separate` everybody keeps what they have (`Apart`). Colocated, a run is in one of four phases
(`PHASES`), and `Shared` is the one place that leads from one to another: first both sides give back what the next phase
does not need, then both take what it does, so that no GPU ever holds more than the larger of two phases. Engines are
asked what they hold, and trainer ranks know it themselves, so that a step of it may be repeated after any failure.

An engine can only be started, or met again, while the trainer sleeps: it measures the free memory of its GPUs, and its
first requests need all of its own. So who is to be started waits for that, and whoever starts is waited for before the
trainer wakes.
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
    """What is on the GPUs.

    Attributes:
        trainer: parts of the trainer's state.
        engines: parts of the engines' memory.
        teachers: of a served teacher's, on GPUs of the trainer that no engine has.
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
"""`send` is also for exports and for the trainer's part of a probe: its weights, and nothing that trains them. In
`save` engines keep the weights that they were sent, which nobody would send them again."""


class Apart:
    """Trainer and engines on GPUs of their own.

    Args:
        update_engines: looks after engines that died, answer again or are asked for.
    """

    shared = False

    def __init__(self, update_engines: Callable[[], None]) -> None:
        self._update_engines = update_engines

    def enter(self, phase: PhaseName) -> None:
        """Let the phase have what it needs. Engines must be paused."""

    def begin_sync(self) -> None:
        """Before engines are paused for a sync."""
        self._update_engines()

    def end_sync(self) -> None:
        """Engines generate again."""

    def begin_training(self) -> None:
        """Before a step of the trainer, after its groups were taken."""

    @contextmanager
    def awake(self, phase: PhaseName, version: int, last: bool = False) -> Iterator[None]:
        """The trainer has what this phase needs inside; engines, which serve this version, go on afterwards.

        Args:
            last: nothing is generated any more.
        """
        yield

    def revive(self) -> None:
        """No engine is left, and some are to be started."""

    def metrics(self) -> dict[str, float]:
        """Seconds of changes since the last call."""
        return {}


class Shared(Apart):
    """Trainer and engines on the same GPUs. It begins where the trainer sleeps and all engines are there.

    Args:
        update_engines: as for `Apart`.
        check: raises when the run is to end.
        teachers: servers of a teacher that shares the GPUs, too; None: none does.
    """

    shared = True

    def __init__(
        self,
        rollouts: RolloutProcess,
        trainers: TrainerGroup,
        engines: EngineGroup,
        update_engines: Callable[[], None],
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
        """Raises EngineError where no engine does as it is told, and TrainerError where the trainer cannot."""
        if phase != "generate":
            self._close()
        wanted = PHASES[phase]
        self._let_engines_hold(self._engine & wanted.engines, "release")
        self._let_teachers_hold(self._teacher & wanted.teachers, "release")
        self._let_trainer_hold(self._trainer & wanted.trainer, "sleep")
        self._let_trainer_hold(wanted.trainer, "wake")
        self._let_engines_hold(wanted.engines, "resume")
        self._let_teachers_hold(wanted.teachers, "resume")

    def begin_sync(self) -> None:
        """Where engines have generated until now, those that start are waited for, and who died is looked after."""
        self._close()

    def end_sync(self) -> None:
        """Engines may be started from now on."""
        self._open = True
        self._engines.let_start(True)

    def begin_training(self) -> None:
        """Without engines the trainer may go on as well: their memory is free."""
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
        """Nothing is done for a trainer that is awake enough, as after a step that could not be sent. Where nothing
        is generated any more, the engines are ended, which is sure to make room whatever they do."""
        if self._trainer >= PHASES[phase].trainer:
            yield
            return
        if last:
            self._engines.stop()
            if self._teachers is not None:
                self._teachers.stop()
            self._engine = self._teacher = frozenset()
            self._let_trainer_hold(PHASES[phase].trainer, "wake")
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
        """Engines are started while the trainer sleeps, and have all of their memory then."""
        self._let_trainer_hold(frozenset(), "sleep")
        self._engine = PHASES["generate"].engines
        self.end_sync()

    def metrics(self) -> dict[str, float]:
        """`perf/sleep_seconds` and the like."""
        found, self._seconds = self._seconds, defaultdict[str, float](float)
        return {f"perf/{what}_seconds": found[what] for what in ("release", "sleep", "wake", "resume")}

    def _close(self) -> None:
        """Nobody starts from now on; who does so is waited for, since it needs its GPUs."""
        if not self._open:
            return
        self._update_engines()
        while self._engines.starting:
            self._check()
            time.sleep(LOOK_EVERY_S)
            self._update_engines()
        self._open = False
        self._engines.let_start(False)

    def _let_engines_hold(self, tags: frozenset[EngineTag], what: str) -> None:
        if tags == self._engine:
            return
        begin, self._engine = time.monotonic(), frozenset(ENGINE_TAGS)  # if this fails, they may hold anything
        try:
            self._rollouts.engines.call(RunEngines.hold_memory, tags)
        finally:
            self._end_dead(self._engines, self._rollouts.engines.call(RunEngines.dead))
        self._engine = tags
        self._seconds[what] += time.monotonic() - begin

    def _let_teachers_hold(self, tags: frozenset[EngineTag], what: str) -> None:
        """One that died, also while it slept, is done without. Raises EngineError where none is left: the run ends."""
        if self._teachers is None or tags == self._teacher:
            return
        begin, self._teacher = time.monotonic(), frozenset(ENGINE_TAGS)
        try:
            dead = self._rollouts.engines.call(RunEngines.hold_teachers, tags)
        except EngineError as error:
            raise EngineError(
                "teacher", "no server is left", f"none is started again, and {error.field} is gone: {error.brief}",
                "read its log, and start the run again, which goes on after the last step; of two (teacher.num_engines)"
                " one may die",
            ) from error  # fmt: skip
        self._end_dead(self._teachers, dead)
        self._teacher = tags
        self._seconds[what] += time.monotonic() - begin

    def _let_trainer_hold(self, parts: frozenset[TrainerPart], what: str) -> None:
        if parts == self._trainer:
            return
        begin, self._trainer = time.monotonic(), frozenset()  # if this fails, nothing is sure to be there
        self._trainers.hold(parts)
        self._trainer = parts
        self._seconds[what] += time.monotonic() - begin

    def _end_dead(self, group: EngineGroup, names: Iterable[str]) -> None:
        """What is dead to us may only hang, and keep its memory."""
        for name in names:
            try:
                group.halt(name)
            except UserError as error:
                _log.warning("%s cannot be ended: %s", name, error.brief)
