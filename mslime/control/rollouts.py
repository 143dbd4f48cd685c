"""The process of the rollout service: an asyncio process of its own, so that scoring and tokenising never hold up the
loop; and the driver's end of it. What it does with a step's groups is in `run_rollouts`, with engines in `run_engines`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import ray
from ray.exceptions import RayError

from mslime.control.cluster import beside_the_driver, redirect_output, remote_class
from mslime.control.garbage import search_seldom
from mslime.control.remote import Host, PendingCall, Remote, verb
from mslime.control.results import Beginning, Evaluation, OfAdapter, SavedState
from mslime.control.run_engines import RunEngines
from mslime.control.run_rollouts import RunRollouts
from mslime.logs import hide, log_process
from mslime.observe.progress import RolloutCounts

if TYPE_CHECKING:
    from mslime.backends.sglang.server import EngineAddress
    from mslime.config.schema import RunConfig
    from mslime.control.scoring_side import ScoringSide
    from mslime.data.tokenizer import Tokenizer
    from mslime.preflight.resolve import ResolvedRun
    from mslime.rollout.shared_room import SharedRoom

_log = logging.getLogger(__name__)
T = TypeVar("T")
WHO = "rollout service"
ONLY = ""
"""Stands for the adapter's name where a run has one service."""


def _key(adapter: str) -> str:
    """Under which the rollouts of an adapter stand among the actor's objects."""
    return f"rollouts {adapter}".strip()


class RolloutActor(Host):
    """Owns the rollout service, the engine clients and the reward workers; or, with several managers, their front; or,
    with several adapters, a service of each over the same engines."""

    _close_engines: Callable[[], Awaitable[None]]

    def __init__(self, run: ResolvedRun, log_path: str, adapters: Mapping[str, OfAdapter] | None = None) -> None:
        """
        Args:
            adapters: by name, in their order; None where there is one service, the run's.
        """
        redirect_output(Path(log_path))
        log_process("rollouts", run.config.observe.log_level)
        self._run, self._config = run, run.config
        self._runs = {ONLY: run} if adapters is None else {name: each.run for name, each in adapters.items()}
        self._weights = {name: each.weight for name, each in (adapters or {}).items()}
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
        """Connect to the engines, check what they can do, and open the prompts.

        Args:
            layers: global MoE layer ids of every trainer rank's pipeline stage.
            begins: of each adapter, or of `ONLY`.
            teachers: servers of the teacher, if SGLang serves one.
        """
        from mslime.data.tokenizer import load_tokenizer
        from mslime.preflight.seams import check_seams

        for run in self._runs.values():
            check_seams(run.config, WHO)
        hide(*(key for a in (*addresses, *teachers) for key in (a.keys.api, a.keys.admin)))
        tokenizer = load_tokenizer(self._config.model.tokenizer)
        self._of = {
            name: RunRollouts(run, tokenizer, layers, "" if name == ONLY else name) for name, run in self._runs.items()
        }
        open_managers = self._open_here if self._config.rollout.managers == 1 else self._open_apart
        engines = await open_managers(addresses, teachers, tokenizer)
        for name, of in self._of.items():
            await of.begin(engines, begins[name].state, begins[name].version)
        self.objects |= {"engines": engines} | {_key(name): of for name, of in self._of.items()}
        search_seldom()

    async def _open_here(
        self, addresses: Sequence[EngineAddress], teachers: Sequence[EngineAddress], tokenizer: Tokenizer
    ) -> RunEngines:
        """A manager in this process, or one for each adapter."""
        from mslime.backends.sglang.adapter_engines import AdapterEngines
        from mslime.control.engine_side import EngineSide
        from mslime.control.managers import Member, open_manager
        from mslime.control.scoring_side import ScoringSide
        from mslime.rollout.asked import Local
        from mslime.rollout.shared_room import SharedRoom

        config, side = self._config, EngineSide(self._run, self._config)
        refused_input = await side.meet_engines(addresses)
        self._close_engines = side.close
        room: SharedRoom | None = None
        if self._weights:
            room = SharedRoom(lambda: config.rollout.concurrency * max(len(side.pool), 1), self._weights)
        for name, of in self._of.items():
            scoring = ScoringSide(self._runs[name], of.config)
            self._scoring.append(scoring)
            of.own_engines, of.room = AdapterEngines(side.pool, name), room
            engines, places = (side.pool, None) if room is None else (of.own_engines, room.of(name))
            manager = await open_manager(
                of.config, self._run, engines, scoring, refused_input, teachers, tokenizer, places
            )
            of.serve([Local(manager)], refused_input, taught=bool(teachers))
        member = Member(Local(side), Local(side.pool), [*addresses])
        return RunEngines([member], self._scoring[0] if len(self._scoring) == 1 else None)

    async def _open_apart(
        self, addresses: Sequence[EngineAddress], teachers: Sequence[EngineAddress], tokenizer: Tokenizer
    ) -> RunEngines:
        """Several managers, each in a process of its own."""
        from mslime.control.managers import ManagerProcesses

        managers = ManagerProcesses(self._run, self._log_path.parent, addresses)
        refused_input = await managers.start(teachers)
        self._close_engines = managers.stop
        self._of[ONLY].serve(managers.managers, refused_input, taught=bool(teachers))
        return RunEngines(managers.members)

    async def stop(self) -> None:
        """Stop generating, close connections, end the reward workers."""
        _log.info("stopping")
        for of in self._of.values():
            await of.close()
        await self._close_engines()
        for scoring in self._scoring:
            await scoring.close()


class RolloutProcess:
    """The driver's end of the rollout service's process.

    Attributes:
        engines: of the run.
        service: its rollouts, or those of one of its adapters.
    """

    engines: Remote[RunEngines]
    service: Remote[RunRollouts]

    def __init__(
        self,
        run: ResolvedRun,
        log_path: Path,
        check: Callable[[], None],
        adapters: Mapping[str, OfAdapter] | None = None,
    ) -> None:
        """
        Args:
            check: called while groups, an evaluation or a new engine are waited for; raises when the run is to end.
            adapters: see `RolloutActor`.
        """
        several = 64 * max(1, len(adapters or ()))
        made = remote_class(RolloutActor).options(**beside_the_driver(), max_concurrency=several)
        self._log, self._actor = str(log_path), made.remote(run, str(log_path), adapters)
        self._process = Remote[RolloutActor](self._actor, "process", WHO, self._log, run.config.deadlines, check)
        self._connect(ONLY, run.config, check)

    def _connect(self, adapter: str, config: RunConfig, check: Callable[[], None]) -> None:
        common = (WHO, self._log, config.deadlines, check)
        self.engines = Remote(self._actor, "engines", *common)
        self.service = Remote(self._actor, _key(adapter), *common)

    def of(self, adapter: str, config: RunConfig, check: Callable[[], None]) -> RolloutProcess:
        """The same process, for one of its adapters, with its configuration and its check."""
        other = copy(self)
        other._connect(adapter, config, check)
        return other

    def start(
        self,
        addresses: Sequence[EngineAddress],
        layers: Sequence[tuple[int, ...]],
        state: SavedState | None,
        version: int,
        teachers: Sequence[EngineAddress] = (),
    ) -> None:
        """See `RolloutActor.start`.

        Args:
            state: what `RunRollouts.save` wrote, when resuming.
            version: weight version that the trainer starts with.
        """
        self.start_adapters(addresses, layers, {ONLY: Beginning(state, version)}, teachers)

    def start_adapters(
        self,
        addresses: Sequence[EngineAddress],
        layers: Sequence[tuple[int, ...]],
        begins: Mapping[str, Beginning],
        teachers: Sequence[EngineAddress] = (),
    ) -> None:
        """See `RolloutActor.start`."""
        self._process.call(RolloutActor.start, addresses, layers, begins, teachers)

    def groups(self, pending: PendingCall[T], on_counts: Callable[[RolloutCounts], None]) -> T:
        """What a call that waits for a step's groups returns; reports their counts while it waits."""
        asked: list[PendingCall[RolloutCounts]] = []

        def poll() -> None:
            self.service.check()
            if asked and asked[0].done:
                with suppress(RayError):  # the call that is waited for says what happened
                    on_counts(ray.get(asked.pop().ref))
            if not asked:
                asked.append(self.service.begin(RunRollouts.group_counts))

        return self.service.wait(pending, poll)

    def begin_evaluation(self, step: int) -> Evaluation:
        """Begin to evaluate the weights after `step` steps, and wait for nothing."""
        return Evaluation(step, replace(self.service.begin(RunRollouts.evaluate), what=f"evaluation of step {step}"))

    def stop(self) -> None:
        """End the process, politely first."""
        ray.wait([self._actor.stop.remote()], timeout=5)
        ray.kill(self._actor, no_restart=True)
