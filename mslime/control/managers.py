"""Rollout managers as Ray actors, beside the front that asks them: one process each, with its share of the engines.

The front makes them (`RolloutActor`), and they end with it. A manager that dies fails the call that is under way, which
ends the session with its name and its log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayError

from mslime.backends.sglang.pool import Serving, all_or_first_failure
from mslime.config.errors import ConfigError, EngineError
from mslime.control.calls import told
from mslime.control.cluster import beside_the_driver, redirect_output, remote_class
from mslime.control.garbage import search_seldom
from mslime.logs import hide, log_process

if TYPE_CHECKING:
    from mslime.backends.sglang.comparison import Sums
    from mslime.backends.sglang.probing import ProbeRequest
    from mslime.backends.sglang.server import EngineAddress
    from mslime.backends.sglang.serving_adapters import AdapterVersion
    from mslime.config.choices import EngineTag
    from mslime.config.data import EvalSetConfig
    from mslime.data.probe import Probed
    from mslime.data.sample import Group
    from mslime.preflight.resolve import ResolvedRun
    from mslime.rollout.group_service import Standing
    from mslime.rollout.joined_books import Due
    from mslime.rollout.manager import HandedOver, ManagerPort, Report

_log = logging.getLogger(__name__)
T = TypeVar("T")


class ManagerActor:
    """One manager, with its engine clients and reward workers."""

    def __init__(self, run: ResolvedRun, index: int, log_path: str) -> None:
        from mslime.rollout.share import share_of

        redirect_output(Path(log_path))
        log_process(f"manager{index}", run.config.observe.log_level)
        self._run, self._config = run, share_of(run.config, index)

    async def meet(self, addresses: Sequence[EngineAddress]) -> int:
        """Connect to the engines and check them; how many tokens they refuse to continue."""
        from mslime.control.engine_side import EngineSide
        from mslime.preflight.seams import check_seams

        check_seams(self._config, "rollout service")
        hide(*(key for a in addresses for key in (a.keys.api, a.keys.admin)))
        self._side = EngineSide(self._run, self._config)
        return await self._side.meet_engines(addresses)

    async def open(self, refused_input: int, teachers: Sequence[EngineAddress]) -> None:
        """Make the manager, for engines of which the first refuses to continue so many tokens."""
        from mslime.backends.sglang.endings import end_ids
        from mslime.control.scoring_side import ScoringSide
        from mslime.data.tokenizer import load_tokenizer
        from mslime.rollout.manager import Manager
        from mslime.rollout.protocols import EngineLimits

        hide(*(key for a in teachers for key in (a.keys.api, a.keys.admin)))
        side, config = self._side, self._config
        scoring = self._scoring = ScoringSide(self._run, config)
        tokenizer = load_tokenizer(config.model.tokenizer)
        await scoring.open(teachers, tokenizer)
        limits = EngineLimits(refused_input, end_ids(config.model.path, tokenizer))
        self._manager = Manager(
            config, side.pool, tokenizer, scoring.scorer, self._run.model, limits, teacher=scoring.teacher,
            eval_scorers=scoring.eval_scorers,
        )  # fmt: skip
        search_seldom()

    async def ask(self, verb: str, *args: Any) -> Any:
        """A method of the manager."""
        return await methodcaller(verb, *args)(self._manager)

    async def ask_engines(self, verb: str, *args: Any) -> Any:
        """A method of the manager's `EnginePool`."""
        return await methodcaller(verb, *args)(self._side.pool)

    async def ask_side(self, verb: str, *args: Any) -> Any:
        """A method of the manager's `EngineSide`."""
        return await methodcaller(verb, *args)(self._side)

    async def stop(self) -> None:
        """Close connections, end the reward workers."""
        _log.info("stopping")
        await self._side.close()
        await self._scoring.close()


class RemoteManager:
    """A `ManagerPort` of a manager in another process. Raises as `calls.gather` does.

    Args:
        actor: a `ManagerActor`. who: its name in messages. log_path: where it writes.
    """

    def __init__(self, actor: Any, who: str, log_path: str) -> None:
        self.actor, self._who, self._log = actor, who, log_path

    async def answer(self, what: str, ref: ray.ObjectRef) -> Any:
        """What a call to the actor comes to."""
        try:
            return await ref
        except RayError as error:
            raise told(error, self._who, what, self._log) from None

    async def engines(self, verb: str, *args: Any) -> Any:
        """See `ManagerActor.ask_engines`."""
        return await self.answer(f"weight sync: {verb}", self.actor.ask_engines.remote(verb, *args))

    async def side(self, verb: str, *args: Any) -> Any:
        """See `ManagerActor.ask_side`."""
        return await self.answer(f"engines: {verb}", self.actor.ask_side.remote(verb, *args))

    async def _ask(self, verb: str, *args: Any) -> Any:
        return await self.answer(f"rollout: {verb}", self.actor.ask.remote(verb, *args))

    async def go_on(self, step: int, allowance: int) -> Report:
        return await self._ask("go_on", step, allowance)

    async def moved(self) -> Report:
        return await self._ask("moved")

    async def report(self) -> Report:
        return await self._ask("report")

    async def hand(self, groups: Sequence[Group]) -> None:
        await self._ask("hand", groups)

    async def drain(self) -> None:
        await self._ask("drain")

    async def accepted(self) -> list[Due]:
        return await self._ask("accepted")

    async def hand_over(self, step: int, ids: Collection[int]) -> HandedOver:
        return await self._ask("hand_over", step, ids)

    async def give_back(self, ids: Collection[int]) -> bool:
        return await self._ask("give_back", ids)

    async def end_failing(self) -> BaseException | None:
        return await self._ask("end_failing")

    async def standing(self) -> Standing:
        return await self._ask("standing")

    async def pause_for_update(self) -> None:
        await self._ask("pause_for_update")

    async def resume_with(self, version: int, allowance: int | None) -> None:
        await self._ask("resume_with", version, allowance)

    async def answer_rows(self, eval_set: EvalSetConfig, first: int = 0, every: int = 1) -> list[Group]:
        """Cancelled with the caller: where another manager's engine died, an evaluation begins again, for all."""
        ref = self.actor.ask.remote("answer_rows", eval_set, first, every)
        try:
            return await self.answer("rollout: answer_rows", ref)
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise

    async def continue_with(self, version: int, accepted: Sequence[Group], resting: Sequence[Group]) -> None:
        await self._ask("continue_with", version, accepted, resting)

    async def kept(self, next_step: int | None, interrupt: bool) -> bytes:
        return await self._ask("kept", next_step, interrupt)

    async def begun(self) -> bytes:
        return await self._ask("begun")

    async def close(self) -> None:
        await self._ask("close")


class ManagerGroup:
    """All managers of a run; `protocols.Updated` of all their engines.

    Args:
        log_dir: for a log of each.
        engines: manager m of M has the engines m, m + M, ...
    """

    def __init__(self, run: ResolvedRun, log_dir: Path, engines: Sequence[EngineAddress]) -> None:
        every = run.config.rollout.managers
        self._shares = [[*engines[index::every]] for index in range(every)]
        made = remote_class(ManagerActor).options(**beside_the_driver(), max_concurrency=64)
        logs = [str(log_dir / f"manager{index}.log") for index in range(every)]
        self._managers = [
            RemoteManager(made.remote(run, index, log), f"rollout manager {index}", log)
            for index, log in enumerate(logs)
        ]

    @property
    def ports(self) -> list[ManagerPort]:
        """As the front sees them."""
        return [*self._managers]

    async def start(self, teachers: Sequence[EngineAddress]) -> int:
        """Connect to all engines and make the managers; how many tokens the engines refuse to continue."""
        met = [m.answer("start", m.actor.meet.remote(share)) for m, share in self._pairs()]
        refused_input: int = min(await asyncio.gather(*met))
        opened = [m.answer("start", m.actor.open.remote(refused_input, teachers)) for m in self._managers]
        await asyncio.gather(*opened)
        return refused_input

    async def greet(self, address: EngineAddress, at_once: bool = False) -> str:
        """See `EngineSide`: at the manager whose engine it was, or at the one that has fewest."""
        pairs = self._pairs()
        known = [pair for pair in pairs if address.name in _names(pair[1])]
        manager, share = known[0] if known else min(pairs, key=lambda pair: len(pair[1]))
        giver: str = await manager.side("greet", address, at_once)
        if known:
            share[_names(share).index(address.name)] = address
        else:
            share.append(address)
        return giver

    async def retire(self, name: str) -> None:
        """See `EnginePool`. Raises ConfigError when its manager has no other one: its groups have nowhere to go."""
        for manager, share in self._pairs():
            if name not in _names(share):
                continue
            if len(share) == 1:
                raise ConfigError(
                    "drain", name, "is the only engine of one of several rollout managers", "drain another"
                )
            await manager.side("retire", name)
            share[:] = [address for address in share if address.name != name]

    async def leave_out(self, urls: Collection[str], why: str) -> None:
        """See `EnginePool`."""
        await _ended(manager.side("leave_out", urls, why) for manager in self._managers)

    async def dead(self) -> Mapping[str, EngineError]:
        """Of all managers."""
        found: list[dict[str, EngineError]] = await _ended(manager.side("dead") for manager in self._managers)
        return {name: error for each in found for name, error in each.items()}

    async def stranded(self) -> bool:
        """Whether a manager has nobody to generate."""
        return any(await _ended(manager.side("stranded") for manager in self._managers))

    async def hold_memory(self, tags: Collection[EngineTag]) -> None:
        """See `EnginePool`."""
        await self._all_engines("hold_memory", tags)

    async def begin_update(self) -> Serving:
        """See `EnginePool`, as for the next three: all managers at once. A manager whose engines are all gone raises:
        its groups have nowhere to go."""
        return await self._begun("begin_update")

    async def begin_again(self) -> Serving:
        return await self._begun("begin_again")

    async def load_adapter(self, adapter: AdapterVersion, alive: int) -> Serving:
        """See `EnginePool`."""
        return await self._begun("load_adapter", adapter, alive)

    async def _begun(self, verb: str, *args: Any) -> Serving:
        found: list[Serving] = await self._all_engines(verb, *args)
        urls = tuple(url for each in found for url in each.urls)
        gone = {name: why for each in found for name, why in each.gone.items()}
        return Serving(urls, gone, frozenset().union(*(each.adapters for each in found)))

    async def compare(self, expected: Sums, strict: bool = False, adapter: int | None = None, owner: str = "") -> int:
        return sum(await self._all_engines("compare", expected, strict, adapter, owner))

    async def end_update(self) -> None:
        await self._all_engines("end_update")

    async def stamp(self, version: int) -> None:
        await self._all_engines("stamp", version)

    async def probe(self, request: ProbeRequest) -> dict[str, Probed]:
        """See `EnginePool`."""
        return {url: found for each in await self._all_engines("probe", request) for url, found in each.items()}

    async def stop(self) -> None:
        """End all managers, politely first."""
        stopping = [m.answer("stop", m.actor.stop.remote()) for m in self._managers]
        await asyncio.gather(*stopping, return_exceptions=True)
        for manager in self._managers:
            ray.kill(manager.actor, no_restart=True)

    async def _all_engines(self, verb: str, *args: Any) -> list[Any]:
        return await _ended(manager.engines(verb, *args) for manager in self._managers)

    def _pairs(self) -> list[tuple[RemoteManager, list[EngineAddress]]]:
        return list(zip(self._managers, self._shares, strict=True))


def _names(engines: Iterable[EngineAddress]) -> list[str]:
    return [engine.name for engine in engines]


async def _ended(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The answers of calls that have all ended. Raises the first failure among them."""
    return all_or_first_failure(await asyncio.gather(*calls, return_exceptions=True))
