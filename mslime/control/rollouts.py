"""The rollout service as one Ray actor: an asyncio process of its own, so that scoring and tokenising never hold up the
loop. It turns each step's groups into shards and leaves them in Ray's store, one for each trainer rank's needs.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from mslime.config.errors import EngineError, RewardError
from mslime.control.calls import call
from mslime.control.cluster import beside_the_driver, redirect_output, remote_class
from mslime.control.garbage import search_seldom
from mslime.control.results import Evaluated, Evaluation, SavedState, Spans, StepShards
from mslime.data.checksums import FileSum, check_sums
from mslime.data.sample_log import Logged, SampleLog
from mslime.logs import hide, log_process, phase
from mslime.observe import samples
from mslime.observe.progress import RolloutCounts, summary_line

if TYPE_CHECKING:
    from mslime.backends.sglang.pool import Serving
    from mslime.backends.sglang.server import EngineAddress
    from mslime.backends.sglang.serving_adapters import AdapterVersion
    from mslime.config.choices import EngineTag
    from mslime.data.probe import Probed
    from mslime.data.sample import Group, Sample
    from mslime.data.source import PromptStream
    from mslime.data.tokenizer import Tokenizer
    from mslime.preflight.resolve import ResolvedRun
    from mslime.rollout.evaluate import EvalResult
    from mslime.rollout.protocols import Rollouts, StepBatch, Updated

_log = logging.getLogger(__name__)
WHO = "rollout service"
LAST_SAMPLES_S = 3.0
"""For what is still being written of the last responses when the run ends."""


class Members(Protocol):
    """Who generates: an `EngineSide`, or the engines of all managers."""

    async def greet(self, address: EngineAddress, at_once: bool = False) -> str: ...
    async def retire(self, name: str) -> None: ...
    async def leave_out(self, urls: Collection[str], why: str) -> None: ...
    async def dead(self) -> Mapping[str, EngineError]: ...
    async def stranded(self) -> bool: ...


class RolloutActor:
    """Owns the rollout service, the engine clients and the reward workers; or, with several managers, their front."""

    _service: Rollouts
    _pool: Updated
    _fleet: Members
    _close_engines: Callable[[], Awaitable[None]]

    def __init__(self, run: ResolvedRun, log_path: str) -> None:
        redirect_output(Path(log_path))
        log_process("rollouts", run.config.observe.log_level)
        self._run, self._config = run, run.config
        self._counts = RolloutCounts(0, 0, 0)
        self._spans: Spans = []
        self._log_path = Path(log_path)
        self._evaluated: list[Logged] = []

    async def start(
        self,
        addresses: Sequence[EngineAddress],
        layers: Sequence[tuple[int, ...]],
        state: SavedState | None,
        version: int,
        teachers: Sequence[EngineAddress],
    ) -> None:
        """Connect to the engines, check what they can do, and open the prompts.

        Args:
            layers: global MoE layer ids of every trainer rank's pipeline stage.
            state: what `save` wrote, when resuming.
            version: weight version that the trainer starts with.
            teachers: servers of the teacher, if SGLang serves one.
        """
        from mslime.control.assemble import SourceNames
        from mslime.data.tokenizer import load_tokenizer
        from mslime.data.user_source import open_prompts
        from mslime.preflight.seams import check_seams

        config = self._config
        check_seams(config, WHO)
        self._layers = layers
        hide(*(key for a in (*addresses, *teachers) for key in (a.keys.api, a.keys.admin)))
        tokenizer = self._tokenizer = load_tokenizer(config.model.tokenizer)
        source = open_prompts(config.data, config.seed, tokenizer)
        self._source_name = SourceNames()
        opened = self._open_one if config.rollout.managers == 1 else self._open_several
        await opened(addresses, teachers, source, tokenizer)
        self._service.version = version
        if state is not None:
            check_sums(state.directory, {state.name: state.total})
            await self._service.load(state.directory / state.name)
        _log.info("prompts are open, generation begins with version %d", version)
        self._samples = SampleLog(config.observe.save_rollouts, tokenizer, config.observe.sample_routes)
        samples.begin(config.run_dir, version)
        search_seldom()

    async def _open_one(
        self,
        addresses: Sequence[EngineAddress],
        teachers: Sequence[EngineAddress],
        source: PromptStream,
        tokenizer: Tokenizer,
    ) -> None:
        """The service in this process."""
        from mslime.backends.sglang.endings import end_ids
        from mslime.control.engine_side import EngineSide
        from mslime.rollout.protocols import EngineLimits
        from mslime.rollout.service import RolloutService

        config, side = self._config, EngineSide(self._run, self._config)
        limits = EngineLimits(await side.meet_engines(addresses), end_ids(config.model.path, tokenizer))
        await side.open_scoring(teachers, tokenizer)
        self._service = RolloutService(
            config, side.pool, source, tokenizer, side.scorer, self._run.model, limits, teacher=side.teacher,
            eval_scorers=side.eval_scorers, on_progress=self._on_progress, on_span=self._on_span,
            on_evaluated=self._on_evaluated,
        )  # fmt: skip
        self._pool, self._fleet, self._close_engines = side.pool, side, side.close

    async def _open_several(
        self,
        addresses: Sequence[EngineAddress],
        teachers: Sequence[EngineAddress],
        source: PromptStream,
        tokenizer: Tokenizer,
    ) -> None:
        """The front of several managers, each in a process of its own."""
        from mslime.control.managers import ManagerGroup
        from mslime.rollout.generation import Sampling
        from mslime.rollout.joined import JoinedService
        from mslime.rollout.protocols import EngineLimits

        config, model = self._config, self._run.model
        managers = ManagerGroup(self._run, self._log_path.parent, addresses)
        refused_input = await managers.start(teachers)
        training = Sampling.for_training(config.rollout, config.train.replay, model, EngineLimits(refused_input))
        self._service = JoinedService(
            config, managers.ports, source, training.longest_input, taught=bool(teachers),
            on_progress=self._on_progress, on_span=self._on_span, on_evaluated=self._on_evaluated,
        )  # fmt: skip
        self._pool, self._fleet, self._close_engines = managers, managers, managers.stop

    async def take(self, step: int) -> StepShards:
        """Wait for a step's groups; shard them."""
        from mslime.control.assemble import have_advantages

        _log.info("step %d: collecting %d groups", step + 1, self._config.rollout.groups_per_step)
        while True:
            batch = await self._service.take(step)
            try:
                # In a thread: seconds for a million tokens, in which responses are to be continued and submitted.
                references, metrics, logged, trained = await asyncio.to_thread(self._shard, batch)
                break
            except RewardError as error:
                _log.warning("step %d: groups without an advantage: %s", step + 1, error)
                blamed = [g for g in batch.groups if not have_advantages(g, self._config)]
                if not await self._service.give_back(blamed):
                    raise
        if self._config.observe.save_groups:
            await asyncio.to_thread(_write, self._config.run_dir / "groups", batch)
        watched = self._samples.watch(step + 1, batch.samples, trained)
        self._samples.write(samples.file_of(self._config.run_dir, step + 1), step + 1, [logged])
        _log.info("step %d: handed over, %s", step + 1, summary_line(batch.metrics | metrics))
        spans, self._spans = self._spans, []
        outline, notes = await self._service.outline(), self._samples.notes()
        return StepShards(references, batch.metrics | metrics, outline, spans, notes, watched)

    def _shard(self, batch: StepBatch) -> tuple[list[list[ray.ObjectRef]], dict[str, float], Logged, list[Sample]]:
        from mslime.control.assemble import assemble, references

        work = assemble(batch.groups, self._config, batch.version, self._source_name, self._run.model)
        shards = references(work.shards, self._config.layout, self._layers)
        return shards, work.metrics, Logged(batch.groups, batch.version, work.advantages), work.trained

    async def log_trained(self, step: int, log_probs: Mapping[int, NDArray[np.float32]]) -> None:
        """Write what the trainer found of the sequences that `take` named, beside the step's responses.

        Args:
            step: of the metrics.
            log_probs: by sequence, [T].
        """
        self._samples.write_trained(samples.trainer_file_of(self._config.run_dir, step), step, log_probs)

    async def collect(self, step: int, directory: str) -> dict[str, float]:
        """A step's groups into a file of `rollout.groups`, and none to a trainer; returns the rollout's metrics. Then
        the engines go on as if the step had been trained, under the same weights."""
        batch = await self._service.take(step)
        await asyncio.to_thread(_write, Path(directory), batch)
        logged = Logged(batch.groups, batch.version)
        self._samples.write(samples.file_of(self._config.run_dir, step + 1), step + 1, [logged])
        await self.count_as(step + 1)
        return batch.metrics

    async def count_as(self, version: int) -> None:
        """Let the weights that the engines serve count as `version`."""
        await self._service.pause_for_update()
        await self._pool.stamp(version)
        await self._service.resume_after_update(version)

    async def pause(self) -> None:
        """Hold the engines for a weight update."""
        with phase(_log, "pausing the engines"):
            await self._service.pause_for_update()

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

    async def compare(self, expected: Mapping[str, str], strict: bool, adapter: int | None = None) -> int:
        """How many tensors in all engines were compared with what the trainer sent."""
        with phase(_log, "comparing the engines' weights with the trainer's"):
            return await self._pool.compare(expected, strict, adapter)

    async def end_update(self) -> None:
        """All weights are there."""
        await self._pool.end_update()

    async def stamp(self, version: int) -> None:
        """Let the engines report a version."""
        await self._pool.stamp(version)

    async def probe(self, version: int) -> Mapping[str, Probed]:
        """What every engine says of the fixed text of `data.probe` under a version, by its URL; nothing where it
        does not fit. See `EnginePool`."""
        from mslime.backends.sglang.probing import ProbeRequest
        from mslime.data import probe

        model, ids = self._run.model, self._tokenizer.encode(probe.TEXT, special_tokens=True)
        longest = self._config.rollout.longest(model.max_positions)
        tokens = probe.fitted(ids, model.vocab_size, min(longest, self._config.sglang.max_total_tokens or longest))
        if not tokens:
            return {}
        request = ProbeRequest(f"probe-{uuid.uuid4().hex}", tokens, version, bool(self._run.replayed_layers))
        with phase(_log, f"probing the engines under version {version}"):
            return await self._pool.probe(request)

    async def resume(self, version: int) -> None:
        """Go on under new weights."""
        with phase(_log, f"going on under version {version}"):
            await self._service.resume_after_update(version)

    async def evaluate(self) -> Evaluated:
        """Scores on every held-out set, one after the other."""
        begin, step = time.time(), self._service.version  # the weights after so many steps
        self._evaluated = []
        results: list[EvalResult] = []
        for eval_set in self._config.data.eval_sets:
            with phase(_log, f"evaluating on {eval_set.name}"):
                results.append(await self._service.evaluate(eval_set))
        versions = {r.version for r in results if r.version is not None}
        assert len(versions) <= 1, f"weights were replaced during the evaluation: versions {sorted(versions)}"
        metrics = {name: value for result in results for name, value in result.metrics().items()}
        self._samples.write(samples.file_of(self._config.run_dir, step, evaluation=True), step, self._evaluated)
        return Evaluated(metrics, next(iter(versions), None), begin, time.time())

    async def save(self, path: str, next_step: int) -> FileSum:
        """Write everything that a resume needs: position in the prompts, work in flight, ledger; returns its sum."""
        try:
            with phase(_log, f"saving {path}"):
                return await self._service.checkpoint(Path(path), next_step)
        except EngineError:  # the engines are gone with what they were generating; the rest is ours
            return await self._service.save(Path(path), next_step)

    async def counts(self) -> RolloutCounts:
        """Groups needed, accepted, running; answered beside the work."""
        return self._counts

    async def stop(self) -> None:
        """Stop generating, close connections, end the reward workers."""
        _log.info("stopping")
        await self._service.close()
        await asyncio.to_thread(self._samples.close, LAST_SAMPLES_S)
        await self._close_engines()

    def _on_evaluated(self, name: str, groups: Sequence[Group]) -> None:
        self._evaluated.append(Logged(groups, self._service.version, None, name))

    def _on_progress(self, *, needed: int, accepted: int, running: int, done: int, aborted: int) -> None:
        self._counts = RolloutCounts(needed, accepted, running, done, aborted)

    def _on_span(self, lane: str, name: str, start: float, end: float, step: int) -> None:
        self._spans.append((lane, name, start, end, step + 1))


def _write(directory: Path, batch: StepBatch) -> None:
    from mslime.rollout.groups import StepGroups, write_groups

    write_groups(directory, StepGroups(batch.step + 1, batch.version, batch.groups))


class RolloutHandle:
    """The driver's end of the rollout actor."""

    def __init__(self, run: ResolvedRun, log_path: Path, check: Callable[[], None]) -> None:
        """
        Args:
            check: called while groups or an evaluation are waited for; raises when the run is to end.
        """
        self._config, self._log, self._check = run.config, str(log_path), check
        self._actor = (
            remote_class(RolloutActor).options(**beside_the_driver(), max_concurrency=64).remote(run, self._log)
        )

    def start(
        self,
        addresses: Sequence[EngineAddress],
        layers: Sequence[tuple[int, ...]],
        state: SavedState | None,
        version: int,
        teachers: Sequence[EngineAddress] = (),
    ) -> None:
        """See `RolloutActor.start`."""
        self._call(
            "rollout start",
            self._actor.start.remote(addresses, layers, state, version, teachers),
            self._config.deadlines.engine_start_s,
        )

    def take(self, step: int, on_counts: Callable[[RolloutCounts], None]) -> StepShards:
        """See `RolloutActor.take`; reports group counts while it waits."""
        return self._groups(step, self._actor.take.remote(step), on_counts)

    def log_trained(self, step: int, log_probs: Mapping[int, NDArray[np.float32]]) -> None:
        """See `RolloutActor.log_trained`; waits for nothing, and a failure ends nothing."""
        self._actor.log_trained.remote(step, log_probs)

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
                asked.append(self._actor.counts.remote())

        return self._call(f"rollout of step {step}", answer, self._config.deadlines.rollout_step_s + 60, poll)

    def pause(self) -> None:
        """See `RolloutActor.pause`."""
        self._control("pause engines", self._actor.pause.remote())

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
        return self._update("compare", self._actor.compare.remote(expected, strict, adapter))

    def end_update(self) -> None:
        """See `RolloutActor.end_update`."""
        self._update("end", self._actor.end_update.remote())

    def stamp(self, version: int) -> None:
        """See `RolloutActor.stamp`."""
        self._control("weight version", self._actor.stamp.remote(version))

    def probe(self, version: int) -> Mapping[str, Probed]:
        """See `RolloutActor.probe`."""
        return self._update("probe", self._actor.probe.remote(version))

    def resume(self, version: int) -> None:
        """See `RolloutActor.resume`."""
        self._control("resume engines", self._actor.resume.remote(version))

    def begin_evaluation(self, step: int) -> Evaluation:
        """Begin what `RolloutActor.evaluate` does, and wait for nothing."""
        return Evaluation(step, self._actor.evaluate.remote())

    def finish_evaluation(self, running: Evaluation) -> Evaluated:
        """The scores; waits for them."""
        deadline, check = self._config.deadlines.rollout_step_s, None if running.done else self._check
        return self._call(f"evaluation of step {running.step}", running.answer, deadline, check)

    def save(self, path: Path, next_step: int, deadline_s: float | None = None) -> FileSum:
        """See `RolloutActor.save`."""
        deadline = deadline_s or self._config.deadlines.checkpoint_s
        return self._call("rollout state", self._actor.save.remote(str(path), next_step), deadline)

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


def _told(serving: Serving) -> Serving:
    """Write down which engines are dead."""
    for name, why in serving.gone.items():
        _log.warning("%s is gone: %s", name, why)
    return serving
