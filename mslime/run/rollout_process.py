"""The process of the rollout service, and the driver's handle of it. Scoring and tokenising in a separate asyncio
process never delay the loop. Processing of a step's groups is in `run_rollouts`, of engines in `run_engines`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import ray
from ray.exceptions import RayError

from mslime.logs import hide, log_process
from mslime.observe.progress import RolloutCounts
from mslime.run.ray_calls import HandleActor, PendingCall, RemoteHandle, verb
from mslime.run.ray_cluster import beside_the_driver, redirect_output, remote_class
from mslime.run.run_engines import EngineSide, RunEngines
from mslime.run.run_rollouts import HeldOutScores, RunRollouts, SavedState
from mslime.run.started import search_seldom

if TYPE_CHECKING:
    from mslime.backends.sglang.engine_pool import EnginePool
    from mslime.backends.sglang.server_process import EngineAddress
    from mslime.checks.resolve import ResolvedRun
    from mslime.config.base import EngineTag
    from mslime.config.schema import DeadlineConfig, RunConfig
    from mslime.data.tokenizer import Tokenizer
    from mslime.rollout.manager import Manager
    from mslime.rollout.request_slots import RequestSlots
    from mslime.rollout.rewards.scorer import RewardScorer, ServedTeacher
    from mslime.rollout.service import Handle


_log = logging.getLogger(__name__)
T = TypeVar("T")
WHO = "rollout service"
ONLY = ""
"""Replaces the adapter's name in a run with one service."""
Beginning: TypeAlias = tuple[SavedState | None, int]
"""(State written by `RunRollouts.save`, when resuming; weight version that the trainer starts with)."""


def _key(adapter: str) -> str:
    """Name of an adapter's rollouts among the actor's objects."""
    return f"rollouts {adapter}".strip()


class RolloutActor(HandleActor):
    """Owns the rollout service, the engine clients and the reward workers. With several managers it owns their front;
    with several adapters, a service for each over the same engines."""

    _close_engines: Callable[[], Awaitable[None]]

    def __init__(self, run: ResolvedRun, log_path: str, adapters: Sequence[str] = ()) -> None:
        """
        Args:
            adapters: names of those with a service each; none if there is one service, the run's.
        """
        redirect_output(Path(log_path))
        log_process("rollouts", run.config.observe.log_level)
        self._run, self._config = run, run.config
        self._runs = {name: run.adapters[name] for name in adapters} or {ONLY: run}
        self._weights = {each.name: each.weight for each in run.config.adapters if each.name in adapters}
        self._of: dict[str, RunRollouts] = {}
        self._scoring: list[ScoringSide] = []
        self._log_path = Path(log_path)
        self.objects = {"process": self}

    @verb("rollout start", "engine_start_s", more_s=0)
    async def start(
        self,
        addresses: Sequence[EngineAddress],
        layers: Sequence[tuple[int, ...]],
        begins: Mapping[str, Beginning],
        teachers: Sequence[EngineAddress],
    ) -> None:
        """Connect to the engines, check their capabilities, and open the prompts.

        Args:
            layers: global MoE layer ids of every trainer rank's pipeline stage.
            begins: of each adapter, or of `ONLY`.
            teachers: the teacher's servers, if SGLang serves one.
        """
        from mslime.checks.user_functions import check_functions, rollout_functions
        from mslime.data.tokenizer import load_tokenizer

        for config in (run.config for run in self._runs.values()):
            check_functions(rollout_functions(config.data, config.rollout, config.hooks, config.algorithm))
        hide(*(key for a in (*addresses, *teachers) for key in (a.keys.api, a.keys.admin)))
        tokenizer = load_tokenizer(self._config.model.tokenizer)
        self._of = {
            name: RunRollouts(run, tokenizer, layers, "" if name == ONLY else name) for name, run in self._runs.items()
        }
        open_managers = self._open_here if self._config.rollout.managers == 1 else self._open_apart
        engines = await open_managers(addresses, teachers, tokenizer)
        for name, of in self._of.items():
            await of.begin(engines, *begins[name])
        self.objects |= {"engines": engines} | {_key(name): of for name, of in self._of.items()}
        search_seldom()

    async def _open_here(
        self, addresses: Sequence[EngineAddress], teachers: Sequence[EngineAddress], tokenizer: Tokenizer
    ) -> RunEngines:
        """A manager in this process, or one for each adapter."""
        from mslime.rollout.request_slots import RequestSlots
        from mslime.rollout.service import LocalHandle

        config, side = self._config, EngineSide(self._run)
        refused_input = await side.connect_engines(addresses)
        self._close_engines = side.close
        slots: RequestSlots | None = None
        if self._weights:
            slots = RequestSlots(lambda: config.rollout.concurrency * max(len(side.pool), 1), self._weights)
        for name, of in self._of.items():
            scoring = ScoringSide(self._runs[name], of.config)
            self._scoring.append(scoring)
            of.pool, of.slots = side.pool, slots
            manager = await open_manager(
                of.config, self._run, side.pool, scoring, refused_input, teachers, tokenizer, name,
                None if slots is None else partial(slots.of, name),
            )  # fmt: skip
            of.serve([LocalHandle(manager)], refused_input, has_teacher=bool(teachers))
        member = ManagerEngines(LocalHandle(side), LocalHandle(side.pool), [*addresses])
        return RunEngines([member], self._scoring[0] if len(self._scoring) == 1 else None)

    async def _open_apart(
        self, addresses: Sequence[EngineAddress], teachers: Sequence[EngineAddress], tokenizer: Tokenizer
    ) -> RunEngines:
        """Several managers, each in a separate process."""

        managers = ManagerProcesses(self._run, self._log_path.parent, addresses)
        refused_input = await managers.start(teachers)
        self._close_engines = managers.stop
        self._of[ONLY].serve(managers.managers, refused_input, has_teacher=bool(teachers))
        return RunEngines(managers.members)

    async def stop(self) -> None:
        """Stop generating, close connections, end the reward workers."""
        _log.info("stopping")
        for of in self._of.values():
            await of.close()
        await self._close_engines()
        for scoring in self._scoring:
            await scoring.close()


@dataclass(frozen=True)
class Evaluation:
    """A running evaluation, of the weights after `step` steps."""

    step: int
    answer: PendingCall[HeldOutScores]


class RolloutProcess:
    """The driver's handle of the rollout service's process.

    Attributes:
        process: the actor itself.
        engines: of the run.
        service: the run's rollouts, or those of one of its adapters.
    """

    engines: RemoteHandle[RunEngines]
    service: RemoteHandle[RunRollouts]

    def __init__(
        self,
        run: ResolvedRun,
        log_path: Path,
        check: Callable[[], None],
        adapters: Sequence[str] = (),
    ) -> None:
        """
        Args:
            check: called while waiting for groups, an evaluation or a new engine; raises when the run is to end.
            adapters: see `RolloutActor`.
        """
        several = 64 * max(1, len(adapters))
        made = remote_class(RolloutActor).options(**beside_the_driver(), max_concurrency=several)
        self._log, self._actor = str(log_path), made.remote(run, str(log_path), adapters)
        self.process = RemoteHandle[RolloutActor](self._actor, "process", WHO, self._log, run.config.deadlines, check)
        self._connect(ONLY, run.config.deadlines, check)

    def _connect(self, adapter: str, deadlines: DeadlineConfig, check: Callable[[], None]) -> None:
        common = (WHO, self._log, deadlines, check)
        self.engines = RemoteHandle(self._actor, "engines", *common)
        self.service = RemoteHandle(self._actor, _key(adapter), *common)

    def of(self, adapter: str, deadlines: DeadlineConfig, check: Callable[[], None]) -> RolloutProcess:
        """A handle for one of its adapters, with that adapter's deadlines and check."""
        other = copy(self)
        other._connect(adapter, deadlines, check)
        return other

    def groups(self, pending: PendingCall[T], on_counts: Callable[[RolloutCounts], None]) -> T:
        """Wait for a call that needs a step's groups, and return its result; reports their counts meanwhile."""
        queries: list[PendingCall[RolloutCounts]] = []

        def poll() -> None:
            self.service.check()
            if queries and queries[0].done:
                with suppress(RayError):  # the awaited call raises the error
                    on_counts(ray.get(queries.pop().ref))
            if not queries:
                queries.append(self.service.begin(RunRollouts.group_counts))

        return self.service.wait(pending, poll)

    def begin_evaluation(self, step: int) -> Evaluation:
        """Begin to evaluate the weights after `step` steps, without waiting."""
        return Evaluation(step, replace(self.service.begin(RunRollouts.evaluate), task=f"evaluation of step {step}"))

    def stop(self) -> None:
        """End the process, gracefully first."""
        ray.wait([self._actor.stop.remote()], timeout=5)
        ray.kill(self._actor, no_restart=True)


# Rollout managers as Ray actors, beside the front that calls them: one process each, with its share of the engines.
#
# The front makes them (`RolloutActor`), and they end with it. A dead manager fails the running call, which ends the
# session with the manager's name and its log.


async def open_manager(
    config: RunConfig, run: ResolvedRun, engines: EnginePool, scoring: ScoringSide, refused_input: int,
    teachers: Sequence[EngineAddress], tokenizer: Tokenizer, adapter: str = "",
    slots: Callable[[], AbstractAsyncContextManager[None]] | None = None, report_every_s: float = 0.0,
) -> Manager:  # fmt: skip
    """A manager in this process, with its reward workers.

    Args:
        config: of the manager or of its adapter. refused_input: number of tokens that engines refuse to continue.
        adapter, slots: if several adapters share the engines, see `Generator`. report_every_s: see `Manager`.
    """
    from mslime.backends.sglang.generating import end_ids
    from mslime.rollout.generation import EngineLimits
    from mslime.rollout.manager import Manager

    await scoring.open(teachers, tokenizer)
    limits = EngineLimits(refused_input, end_ids(config.model.path, tokenizer))
    return Manager(
        config, engines, tokenizer, scoring.scorer, run.model, limits, teacher=scoring.teacher,
        eval_scorers=scoring.eval_scorers, adapter=adapter, slots=slots, report_every_s=report_every_s,
    )  # fmt: skip


@dataclass
class ManagerEngines:
    """The engines of one manager.

    Attributes:
        side, pool: their handles, for objects in the manager's process.
    """

    side: Handle[EngineSide]
    pool: Handle[EnginePool]
    engines: list[EngineAddress]

    @property
    def names(self) -> list[str]:
        """Names of its engines."""
        return [engine.name for engine in self.engines]


class ManagerActor(HandleActor):
    """One manager, with its engine clients and reward workers."""

    def __init__(self, run: ResolvedRun, index: int, log_path: str) -> None:
        from mslime.rollout.manager import share_of

        redirect_output(Path(log_path))
        log_process(f"manager{index}", run.config.observe.log_level)
        self.objects = {"process": self}
        self._run, self._config = run, share_of(run.config, index)

    async def connect(self, addresses: Sequence[EngineAddress]) -> int:
        """Connect to the engines and check them; returns how many tokens they refuse to continue."""
        from mslime.checks.user_functions import check_functions, rollout_functions

        config = self._config
        check_functions(rollout_functions(config.data, config.rollout, config.hooks, config.algorithm))
        hide(*(key for a in addresses for key in (a.keys.api, a.keys.admin)))
        self._side = EngineSide(self._run)
        refused_input = await self._side.connect_engines(addresses)
        self.objects |= {"engines": self._side, "weight sync": self._side.pool}
        return refused_input

    async def open(self, refused_input: int, teachers: Sequence[EngineAddress]) -> None:
        """Make the manager. The first engine refuses to continue `refused_input` tokens."""
        from mslime.data.tokenizer import load_tokenizer
        from mslime.rollout.manager import REPORT_EVERY_S

        hide(*(key for a in teachers for key in (a.keys.api, a.keys.admin)))
        self._scoring = ScoringSide(self._run, self._config)
        tokenizer = load_tokenizer(self._config.model.tokenizer)
        self.objects["rollout"] = await open_manager(
            self._config, self._run, self._side.pool, self._scoring, refused_input, teachers, tokenizer,
            report_every_s=REPORT_EVERY_S,
        )  # fmt: skip
        search_seldom()

    async def stop(self) -> None:
        """Close connections, end the reward workers."""
        _log.info("stopping")
        await self._side.close()
        await self._scoring.close()


class ManagerProcesses:
    """All managers of a run.

    Args:
        log_dir: directory of each manager's log.
        engines: manager m of M has the engines m, m + M, ...

    Attributes:
        managers: handles for the front.
        members: their engines.
    """

    def __init__(self, run: ResolvedRun, log_dir: Path, engines: Sequence[EngineAddress]) -> None:
        every, limits = run.config.rollout.managers, run.config.deadlines
        made = remote_class(ManagerActor).options(**beside_the_driver(), max_concurrency=64)
        self.managers: list[Handle[Manager]] = []
        self.members: list[ManagerEngines] = []
        self._actors: list[Any] = []
        self._processes: list[RemoteHandle[ManagerActor]] = []
        for index in range(every):
            log = str(log_dir / f"manager{index}.log")
            actor, label = made.remote(run, index, log), f"rollout manager {index}"
            self._actors.append(actor)
            self._processes.append(RemoteHandle(actor, "process", label, log, limits))
            self.managers.append(RemoteHandle(actor, "rollout", label, log, limits))
            side: RemoteHandle[EngineSide] = RemoteHandle(actor, "engines", label, log, limits)
            pool: RemoteHandle[EnginePool] = RemoteHandle(actor, "weight sync", label, log, limits)
            self.members.append(ManagerEngines(side, pool, [*engines[index::every]]))

    async def start(self, teachers: Sequence[EngineAddress]) -> int:
        """Connect to all engines and make the managers; returns how many tokens the engines refuse to continue."""
        pairs = zip(self._processes, self.members, strict=True)
        connecting = [process.ask(ManagerActor.connect, member.engines) for process, member in pairs]
        refused_input = min(await asyncio.gather(*connecting))
        await asyncio.gather(*(process.ask(ManagerActor.open, refused_input, teachers) for process in self._processes))
        return refused_input

    async def stop(self) -> None:
        """End all managers, gracefully first."""
        stopping = [process.ask(ManagerActor.stop) for process in self._processes]
        await asyncio.gather(*stopping, return_exceptions=True)
        for actor in self._actors:
            ray.kill(actor, no_restart=True)


# Scoring for one configuration: its rewards, those of held-out sets, and a served teacher.


class ScoringSide:
    """Opened before a rollout service, and closed after it.

    Args:
        config: of the run, of one of its adapters, or of one of several managers.

    Attributes:
        scorer, eval_scorers, teacher: see `RolloutService`; set by `open`.
    """

    scorer: RewardScorer
    eval_scorers: dict[str, RewardScorer]
    teacher: ServedTeacher | None

    def __init__(self, run: ResolvedRun, config: RunConfig) -> None:
        self._run, self._config = run, config
        self._teachers: EnginePool | None = None

    async def open(self, teachers: Sequence[EngineAddress], tokenizer: Tokenizer) -> None:
        """Start the scorers of training and held-out responses."""
        from mslime.rollout.rewards.scorer import RewardScorer

        config = self._config
        self.scorer = RewardScorer(config.reward, tokenizer=tokenizer)
        self.eval_scorers = {
            s.name: RewardScorer(s.reward, f"data.eval_sets[{i}].reward", tokenizer)
            for i, s in enumerate(config.data.eval_sets)
            if s.reward is not None
        }
        for scorer in (self.scorer, *self.eval_scorers.values()):
            await scorer.start()
        self.teacher = await self._connect_teachers(teachers, tokenizer)

    async def _connect_teachers(self, addresses: Sequence[EngineAddress], tokenizer: Tokenizer) -> ServedTeacher | None:
        """Connect to the teacher's servers and check them; None if there are none."""
        from mslime.backends.sglang.client import EngineClient
        from mslime.backends.sglang.engine_pool import EnginePool
        from mslime.backends.sglang.handshake import connect_teacher
        from mslime.rollout.rewards.scorer import ServedTeacher

        if not addresses:
            return None
        config, model = self._config, self._run.model
        rollout, prompt = config.rollout, config.data.max_prompt_tokens or 1
        longest = min(rollout.longest(model.max_positions), prompt + rollout.max_response_tokens)
        limits = config.deadlines
        clients = [EngineClient(a.url, a.name, limits, None, a.log_path, a.keys, a.identity) for a in addresses]
        await asyncio.gather(*(connect_teacher(client, tokenizer, model.vocab_size, longest) for client in clients))
        self._teachers = EnginePool(clients, config.teacher.concurrency)
        return ServedTeacher(self._teachers)

    async def hold_teachers(self, tags: Collection[EngineTag]) -> list[str]:
        """Make the teacher's servers on shared GPUs hold these parts of their memory; returns names of dead ones.
        Raises EngineError if none is left."""
        assert self.teacher is not None and self._teachers is not None, "a teacher shares the GPUs"
        await self.teacher.hold_memory(tags)
        return [*self._teachers.dead]

    async def close(self) -> None:
        """Close connections, end the reward workers."""
        if self._teachers is not None:
            await self._teachers.close()
        for scorer in (self.scorer, *self.eval_scorers.values()):
            await scorer.close()
