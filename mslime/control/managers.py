"""Rollout managers as Ray actors, beside the front that asks them: one process each, with its share of the engines.

The front makes them (`RolloutActor`), and they end with it. A manager that dies fails the call that is under way, which
ends the session with its name and its log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from mslime.control.cluster import beside_the_driver, redirect_output, remote_class
from mslime.control.garbage import search_seldom
from mslime.control.remote import Host, Remote
from mslime.logs import hide, log_process

if TYPE_CHECKING:
    from mslime.backends.sglang.pool import EnginePool
    from mslime.backends.sglang.server import EngineAddress
    from mslime.config.schema import RunConfig
    from mslime.control.engine_side import EngineSide
    from mslime.control.scoring_side import ScoringSide
    from mslime.data.tokenizer import Tokenizer
    from mslime.preflight.resolve import ResolvedRun
    from mslime.rollout.asked import Asked
    from mslime.rollout.manager import Manager
    from mslime.rollout.protocols import Engines

_log = logging.getLogger(__name__)


async def open_manager(
    config: RunConfig, run: ResolvedRun, engines: Engines, scoring: ScoringSide, refused_input: int,
    teachers: Sequence[EngineAddress], tokenizer: Tokenizer, places: AbstractAsyncContextManager[None] | None = None,
    report_every_s: float = 0.0,
) -> Manager:  # fmt: skip
    """A manager in this process, with what scores its responses.

    Args:
        config: of the manager or of its adapter. refused_input: engines refuse to continue so many tokens.
        places: at the engines, if several adapters share them. report_every_s: see `Manager`.
    """
    from mslime.backends.sglang.generating import end_ids
    from mslime.rollout.manager import Manager
    from mslime.rollout.protocols import EngineLimits

    await scoring.open(teachers, tokenizer)
    limits = EngineLimits(refused_input, end_ids(config.model.path, tokenizer))
    return Manager(
        config, engines, tokenizer, scoring.scorer, run.model, limits, teacher=scoring.teacher,
        eval_scorers=scoring.eval_scorers, places=places, report_every_s=report_every_s,
    )  # fmt: skip


@dataclass
class Member:
    """The engines of one manager.

    Attributes:
        side, pool: what they are asked by, in the manager's process.
    """

    side: Asked[EngineSide]
    pool: Asked[EnginePool]
    engines: list[EngineAddress]

    @property
    def names(self) -> list[str]:
        """Of its engines."""
        return [engine.name for engine in self.engines]


class ManagerActor(Host):
    """One manager, with its engine clients and reward workers."""

    def __init__(self, run: ResolvedRun, index: int, log_path: str) -> None:
        from mslime.rollout.share import share_of

        redirect_output(Path(log_path))
        log_process(f"manager{index}", run.config.observe.log_level)
        self.objects = {"process": self}
        self._run, self._config = run, share_of(run.config, index)

    async def meet(self, addresses: Sequence[EngineAddress]) -> int:
        """Connect to the engines and check them; how many tokens they refuse to continue."""
        from mslime.control.engine_side import EngineSide
        from mslime.preflight.seams import check_seams

        check_seams(self._config, "rollout service")
        hide(*(key for a in addresses for key in (a.keys.api, a.keys.admin)))
        self._side = EngineSide(self._run, self._config)
        refused_input = await self._side.meet_engines(addresses)
        self.objects |= {"engines": self._side, "weight sync": self._side.pool}
        return refused_input

    async def open(self, refused_input: int, teachers: Sequence[EngineAddress]) -> None:
        """Make the manager, for engines of which the first refuses to continue so many tokens."""
        from mslime.control.scoring_side import ScoringSide
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
        log_dir: for a log of each.
        engines: manager m of M has the engines m, m + M, ...

    Attributes:
        managers: as the front asks them.
        members: their engines.
    """

    def __init__(self, run: ResolvedRun, log_dir: Path, engines: Sequence[EngineAddress]) -> None:
        every, limits = run.config.rollout.managers, run.config.deadlines
        made = remote_class(ManagerActor).options(**beside_the_driver(), max_concurrency=64)
        self.managers: list[Asked[Manager]] = []
        self.members: list[Member] = []
        self._actors: list[Any] = []
        self._processes: list[Remote[ManagerActor]] = []
        for index in range(every):
            log = str(log_dir / f"manager{index}.log")
            actor, who = made.remote(run, index, log), f"rollout manager {index}"
            self._actors.append(actor)
            self._processes.append(Remote(actor, "process", who, log, limits))
            self.managers.append(Remote(actor, "rollout", who, log, limits))
            side: Remote[EngineSide] = Remote(actor, "engines", who, log, limits)
            pool: Remote[EnginePool] = Remote(actor, "weight sync", who, log, limits)
            self.members.append(Member(side, pool, [*engines[index::every]]))

    async def start(self, teachers: Sequence[EngineAddress]) -> int:
        """Connect to all engines and make the managers; how many tokens the engines refuse to continue."""
        pairs = zip(self._processes, self.members, strict=True)
        met = [process.ask(ManagerActor.meet, member.engines) for process, member in pairs]
        refused_input = min(await asyncio.gather(*met))
        await asyncio.gather(*(process.ask(ManagerActor.open, refused_input, teachers) for process in self._processes))
        return refused_input

    async def stop(self) -> None:
        """End all managers, politely first."""
        stopping = [process.ask(ManagerActor.stop) for process in self._processes]
        await asyncio.gather(*stopping, return_exceptions=True)
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
