"""The rollout service as one Ray actor: an asyncio process of its own, so that scoring and tokenising never hold up the
loop. What it does with a step's groups is in `run_rollouts`; here is what has the engines, and the driver's end.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from mslime.config.errors import EngineError
from mslime.control.calls import call
from mslime.control.cluster import beside_the_driver, redirect_output, remote_class
from mslime.control.garbage import search_seldom
from mslime.control.results import Beginning, Evaluated, Evaluation, OfAdapter, SavedState, StepShards
from mslime.control.run_rollouts import RunRollouts
from mslime.data.checksums import FileSum
from mslime.logs import hide, log_process, phase
from mslime.observe.progress import RolloutCounts

if TYPE_CHECKING:
    from mslime.backends.sglang.adapter_engines import AdapterEngines
    from mslime.backends.sglang.pool import Serving
    from mslime.backends.sglang.server import EngineAddress
    from mslime.backends.sglang.serving_adapters import AdapterVersion
    from mslime.config.choices import EngineTag
    from mslime.config.schema import RunConfig
    from mslime.control.scoring_side import ScoringSide
    from mslime.data.probe import Probed
    from mslime.data.tokenizer import Tokenizer
    from mslime.preflight.resolve import ResolvedRun
    from mslime.rollout.protocols import Rollouts, Updated
    from mslime.rollout.shared_room import SharedRoom

_log = logging.getLogger(__name__)
WHO = "rollout service"
ONLY = ""
"""Stands for the adapter's name where a run has one service."""


class Members(Protocol):
    """Who generates: an `EngineSide`, or the engines of all managers."""

    async def greet(self, address: EngineAddress, at_once: bool = False) -> str: ...
    async def retire(self, name: str) -> None: ...
    async def leave_out(self, urls: Collection[str], why: str) -> None: ...
    async def dead(self) -> Mapping[str, EngineError]: ...
    async def stranded(self) -> bool: ...


class RolloutActor:
    """Owns the rollout service, the engine clients and the reward workers; or, with several managers, their front; or,
    with several adapters, a service of each over the same engines."""

    _pool: Updated
    _fleet: Members
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
        self._room: SharedRoom | None = None
        self._engines_of: dict[str, AdapterEngines] = {}
        self._log_path = Path(log_path)

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
        opened = self._open_here if self._config.rollout.managers == 1 else self._open_several
        services = await opened(addresses, teachers, tokenizer)
        for name, service in services.items():
            await self._of[name].begin(service, begins[name].state, begins[name].version)
        search_seldom()

    async def _open_here(
        self, addresses: Sequence[EngineAddress], teachers: Sequence[EngineAddress], tokenizer: Tokenizer
    ) -> dict[str, Rollouts]:
        """Services in this process, one for each adapter."""
        from mslime.backends.sglang.adapter_engines import AdapterEngines
        from mslime.backends.sglang.endings import end_ids
        from mslime.control.engine_side import EngineSide
        from mslime.control.scoring_side import ScoringSide
        from mslime.rollout.protocols import EngineLimits
        from mslime.rollout.service import RolloutService
        from mslime.rollout.shared_room import SharedRoom

        config, side = self._config, EngineSide(self._run, self._config)
        limits = EngineLimits(await side.meet_engines(addresses), end_ids(config.model.path, tokenizer))
        self._pool, self._fleet, self._close_engines = side.pool, side, side.close
        if self._weights:
            self._room = SharedRoom(lambda: config.rollout.concurrency * max(len(side.pool), 1), self._weights)
        services: dict[str, Rollouts] = {}
        for name, of in self._of.items():
            scoring = ScoringSide(self._runs[name], of.config)
            self._scoring.append(scoring)
            await scoring.open(teachers, tokenizer)
            engines = self._engines_of[name] = AdapterEngines(side.pool, name)
            services[name] = RolloutService(
                of.config, side.pool if self._room is None else engines, of.open_prompts(),
                tokenizer, scoring.scorer, self._run.model, limits, teacher=scoring.teacher,
                eval_scorers=scoring.eval_scorers, on_progress=of.on_progress, on_span=of.on_span,
                on_evaluated=of.on_evaluated, places=None if self._room is None else self._room.of(name),
            )  # fmt: skip
        return services

    async def _open_several(
        self, addresses: Sequence[EngineAddress], teachers: Sequence[EngineAddress], tokenizer: Tokenizer
    ) -> dict[str, Rollouts]:
        """The front of several managers, each in a process of its own."""
        from mslime.control.managers import ManagerGroup
        from mslime.rollout.generation import Sampling
        from mslime.rollout.joined import JoinedService
        from mslime.rollout.protocols import EngineLimits

        config, model, of = self._config, self._run.model, self._of[ONLY]
        managers = ManagerGroup(self._run, self._log_path.parent, addresses)
        refused_input = await managers.start(teachers)
        training = Sampling.for_training(config.rollout, config.train.replay, model, EngineLimits(refused_input))
        self._pool, self._fleet, self._close_engines = managers, managers, managers.stop
        return {
            ONLY: JoinedService(
                config, managers.ports, of.open_prompts(), training.longest_input, taught=bool(teachers),
                on_progress=of.on_progress, on_span=of.on_span, on_evaluated=of.on_evaluated,
            )
        }  # fmt: skip

    # ------------------------------------------------------------------------- what each adapter's service is asked

    async def take(self, step: int, adapter: str) -> StepShards:
        """See `RunRollouts`, as for what follows."""
        return await self._of[adapter].take(step)

    async def log_trained(self, step: int, log_probs: Mapping[int, NDArray[np.float32]], adapter: str) -> None:
        self._of[adapter].log_trained(step, log_probs)

    async def evaluate(self, adapter: str) -> Evaluated:
        return await self._of[adapter].evaluate()

    async def save(self, path: str, next_step: int, adapter: str) -> FileSum:
        return await self._of[adapter].save(Path(path), next_step)

    async def counts(self, adapter: str) -> RolloutCounts:
        """Answered beside the work."""
        return self._of[adapter].counts

    async def pause(self, adapter: str) -> None:
        """Hold the engines for a weight update; where they are given adapters alone, nothing is held."""
        with phase(_log, f"pausing the engines{_of(adapter)}"):
            await self._of[adapter].service.pause_for_update()

    async def resume(self, version: int, adapter: str) -> None:
        """Go on under new weights."""
        with phase(_log, f"going on under version {version}{_of(adapter)}"):
            await self._of[adapter].service.resume_after_update(version)

    async def probe(self, version: int, adapter: str) -> Mapping[str, Probed]:
        """What every engine says of the fixed text of `data.probe` under a version, by its URL; nothing where it
        does not fit. See `EnginePool`."""
        request = self._of[adapter].probe_request(version)
        if request is None:
            return {}
        with phase(_log, f"probing the engines under version {version}{_of(adapter)}"):
            return await self._pool.probe(request)

    async def leave(self, adapter: str) -> None:
        """An adapter is trained: nothing more is generated for it, and its places at the engines are the others'."""
        assert self._room is not None, "the only service leaves with the run"
        await self._of[adapter].close()
        await self._engines_of[adapter].abort()
        self._room.leave(adapter)

    async def collect(self, step: int, directory: str) -> dict[str, float]:
        """A step's groups into a file of `rollout.groups`, and none to a trainer; returns the rollout's metrics. Then
        the engines go on as if the step had been trained, under the same weights."""
        metrics = await self._of[ONLY].collect(step, Path(directory))
        await self.count_as(step + 1)
        return metrics

    async def count_as(self, version: int) -> None:
        """Let the weights that the engines serve count as `version`."""
        service = self._of[ONLY].service
        await service.pause_for_update()
        await self._pool.stamp(version)
        await service.resume_after_update(version)

    # ------------------------------------------------------------------------------------------------- the engines

    async def greet(self, address: EngineAddress, at_once: bool) -> str:
        """Check an engine, and let it take part from the next weight update on, or at once; see `EngineSide`."""
        with phase(_log, f"meeting {address.name} at {address.url}"):
            return await self._fleet.greet(address, at_once)

    async def retire(self, name: str) -> None:
        """Let an engine leave at the next weight update; see `EnginePool`."""
        with phase(_log, f"{name} leaves"):
            await self._fleet.retire(name)

    async def leave_out(self, urls: Collection[str], why: str) -> None:
        """Take these engines for dead; see `EnginePool`."""
        await self._fleet.leave_out(urls, why)

    async def dead(self) -> dict[str, str]:
        """What each dead engine died of, by name."""
        return {name: error.brief for name, error in (await self._fleet.dead()).items()}

    async def stranded(self) -> bool:
        """Whether there is nobody to generate."""
        return await self._fleet.stranded()

    async def hold_memory(self, tags: Collection[EngineTag]) -> None:
        """Let the paused engines hold these parts of their memory; see `EnginePool`."""
        with phase(_log, f"engines hold {', '.join(tags) or 'nothing'}"):
            await self._pool.hold_memory(tags)

    async def hold_teachers(self, tags: Collection[EngineTag]) -> list[str]:
        """Let the teacher's servers hold these parts of their memory; names of dead ones. See `ServedTeacher`."""
        (scoring,) = self._scoring
        with phase(_log, f"teachers hold {', '.join(tags) or 'nothing'}"):
            return await scoring.hold_teachers(tags)

    async def begin_update(self) -> Serving:
        """Let the paused engines take weights; see `EnginePool`, as for the next three."""
        return _told(await self._pool.begin_update())

    async def begin_again(self) -> Serving:
        """The same after an update that broke off."""
        return _told(await self._pool.begin_again())

    async def load_adapter(self, adapter: AdapterVersion, alive: int) -> Serving:
        """Let the engines have an adapter, while they generate; see `EnginePool`."""
        with phase(_log, f"loading {adapter.name}"):
            return _told(await self._pool.load_adapter(adapter, alive))

    async def compare(self, expected: Mapping[str, str], strict: bool, version: int | None, adapter: str) -> int:
        """How many tensors in all engines were compared with what the trainer sent; of adapters, of which version."""
        with phase(_log, f"comparing the engines' weights with the trainer's{_of(adapter)}"):
            return await self._pool.compare(expected, strict, version, adapter)

    async def end_update(self) -> None:
        """All weights are there."""
        await self._pool.end_update()

    async def stamp(self, version: int) -> None:
        """Let the engines report a version."""
        await self._pool.stamp(version)

    async def stop(self) -> None:
        """Stop generating, close connections, end the reward workers."""
        _log.info("stopping")
        for of in self._of.values():
            await of.close()
        await self._close_engines()
        for scoring in self._scoring:
            await scoring.close()


class RolloutHandle:
    """The driver's end of the rollout actor."""

    def __init__(
        self,
        run: ResolvedRun,
        log_path: Path,
        check: Callable[[], None],
        adapters: Mapping[str, OfAdapter] | None = None,
    ) -> None:
        """
        Args:
            check: called while groups or an evaluation are waited for; raises when the run is to end.
            adapters: see `RolloutActor`.
        """
        self._config, self._log, self._check = run.config, str(log_path), check
        self._adapter = ONLY
        options = beside_the_driver()
        several = 64 * max(1, len(adapters or ()))
        self._actor = (
            remote_class(RolloutActor).options(**options, max_concurrency=several).remote(run, self._log, adapters)
        )

    def of(self, adapter: str, config: RunConfig, check: Callable[[], None]) -> RolloutHandle:
        """The same actor, asked for the service of one of its adapters, with its configuration and its check."""
        handle = copy(self)
        handle._adapter, handle._config, handle._check = adapter, config, check
        return handle

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
            state: what `save` wrote, when resuming.
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
        started = self._actor.start.remote(addresses, layers, begins, teachers)
        self._call("rollout start", started, self._config.deadlines.engine_start_s)

    def take(self, step: int, on_counts: Callable[[RolloutCounts], None]) -> StepShards:
        """See `RolloutActor.take`; reports group counts while it waits."""
        return self.taken(step, self.begin_take(step), on_counts)

    def begin_take(self, step: int) -> ray.ObjectRef:
        """Begin what `RolloutActor.take` does, and wait for nothing."""
        return self._actor.take.remote(step, self._adapter)

    def taken(self, step: int, answer: ray.ObjectRef, on_counts: Callable[[RolloutCounts], None]) -> StepShards:
        """What `begin_take` gives; reports group counts while it waits."""
        return self._groups(step, answer, on_counts)

    def leave(self) -> None:
        """See `RolloutActor.leave`."""
        self._control("adapter leaves", self._actor.leave.remote(self._adapter))

    def log_trained(self, step: int, log_probs: Mapping[int, NDArray[np.float32]]) -> None:
        """See `RolloutActor.log_trained`; waits for nothing, and a failure ends nothing."""
        self._actor.log_trained.remote(step, log_probs, self._adapter)

    def collect(self, step: int, directory: Path, on_counts: Callable[[RolloutCounts], None]) -> dict[str, float]:
        """See `RolloutActor.collect`; reports group counts while it waits."""
        return self._groups(step, self._actor.collect.remote(step, str(directory)), on_counts)

    def count_as(self, version: int) -> None:
        """See `RolloutActor.count_as`."""
        self._control("weight version", self._actor.count_as.remote(version))

    def _groups(self, step: int, answer: ray.ObjectRef, on_counts: Callable[[RolloutCounts], None]) -> Any:
        asked: list[ray.ObjectRef] = []

        def poll() -> None:
            self._check()
            if asked and ray.wait(asked, timeout=0)[0]:
                with suppress(RayError):  # the call that is waited for says what happened
                    on_counts(ray.get(asked.pop()))
            if not asked:
                asked.append(self._actor.counts.remote(self._adapter))

        return self._call(f"rollout of step {step}", answer, self._config.deadlines.rollout_step_s + 60, poll)

    def pause(self) -> None:
        """See `RolloutActor.pause`."""
        self._control("pause engines", self._actor.pause.remote(self._adapter))

    def greet(self, address: EngineAddress, at_once: bool = False) -> str:
        """See `RolloutActor.greet`."""
        deadline = self._config.deadlines.engine_start_s + 30
        return self._call("meet engine", self._actor.greet.remote(address, at_once), deadline, self._check)

    def retire(self, name: str) -> None:
        """See `RolloutActor.retire`."""
        self._control("let engine leave", self._actor.retire.remote(name))

    def leave_out(self, urls: Collection[str], why: str) -> None:
        """See `RolloutActor.leave_out`."""
        self._control("leave engines out", self._actor.leave_out.remote(urls, why))

    def dead(self) -> dict[str, str]:
        """See `RolloutActor.dead`."""
        return self._control("engines", self._actor.dead.remote())

    def stranded(self) -> bool:
        """See `RolloutActor.stranded`."""
        return self._control("engines", self._actor.stranded.remote())

    def hold_memory(self, tags: Collection[EngineTag]) -> None:
        """See `RolloutActor.hold_memory`."""
        self._update("memory", self._actor.hold_memory.remote(sorted(tags)))

    def hold_teachers(self, tags: Collection[EngineTag]) -> list[str]:
        """See `RolloutActor.hold_teachers`."""
        return self._update("memory", self._actor.hold_teachers.remote(sorted(tags)))

    def begin_update(self) -> Serving:
        """See `RolloutActor.begin_update`."""
        return self._update("begin", self._actor.begin_update.remote())

    def begin_again(self) -> Serving:
        """See `RolloutActor.begin_again`."""
        return self._update("begin again", self._actor.begin_again.remote())

    def load_adapter(self, adapter: AdapterVersion, alive: int) -> Serving:
        """See `RolloutActor.load_adapter`."""
        return self._update("load adapter", self._actor.load_adapter.remote(adapter, alive))

    def compare(self, expected: Mapping[str, str], strict: bool, adapter: int | None = None) -> int:
        """See `RolloutActor.compare`."""
        return self._update("compare", self._actor.compare.remote(expected, strict, adapter, self._adapter))

    def end_update(self) -> None:
        """See `RolloutActor.end_update`."""
        self._update("end", self._actor.end_update.remote())

    def stamp(self, version: int) -> None:
        """See `RolloutActor.stamp`."""
        self._control("weight version", self._actor.stamp.remote(version))

    def probe(self, version: int) -> Mapping[str, Probed]:
        """See `RolloutActor.probe`."""
        return self._update("probe", self._actor.probe.remote(version, self._adapter))

    def resume(self, version: int) -> None:
        """See `RolloutActor.resume`."""
        self._control("resume engines", self._actor.resume.remote(version, self._adapter))

    def begin_evaluation(self, step: int) -> Evaluation:
        """Begin what `RolloutActor.evaluate` does, and wait for nothing."""
        return Evaluation(step, self._actor.evaluate.remote(self._adapter))

    def finish_evaluation(self, running: Evaluation) -> Evaluated:
        """The scores; waits for them."""
        deadline, check = self._config.deadlines.rollout_step_s, None if running.done else self._check
        return self._call(f"evaluation of step {running.step}", running.answer, deadline, check)

    def save(self, path: Path, next_step: int, deadline_s: float | None = None) -> FileSum:
        """See `RolloutActor.save`."""
        deadline = deadline_s or self._config.deadlines.checkpoint_s
        return self._call("rollout state", self._actor.save.remote(str(path), next_step, self._adapter), deadline)

    def stop(self) -> None:
        """End the actor, politely first."""
        ray.wait([self._actor.stop.remote()], timeout=5)
        ray.kill(self._actor, no_restart=True)

    def _update(self, what: str, ref: ray.ObjectRef) -> Any:
        return self._call(f"weight sync: {what}", ref, self._config.deadlines.weight_sync_s + 30)

    def _control(self, what: str, ref: ray.ObjectRef) -> Any:
        return self._call(what, ref, self._config.deadlines.engine_control_s + 30)

    def _call(self, what: str, ref: ray.ObjectRef, deadline_s: float, on_wait: Callable[[], None] | None = None) -> Any:
        return call(ref, WHO, what, deadline_s, self._log, on_wait)


def _of(adapter: str) -> str:
    return f" for {adapter}" if adapter else ""


def _told(serving: Serving) -> Serving:
    """Write down which engines are dead."""
    for name, why in serving.gone.items():
        _log.warning("%s is gone: %s", name, why)
    return serving
