"""Rollouts of one configuration in the rollout actor: the service, the log of its responses, and shards for the
trainer.

A run has one; a run of several adapters has one for each, over the same engines.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import ray
from numpy.typing import NDArray

from mslime.config.errors import EngineError, RewardError
from mslime.data.checkpoints import FileSum, check_sums
from mslime.data.sample_log import LogBatch, SampleLog
from mslime.logs import phase
from mslime.observe import samples
from mslime.observe.progress import RolloutCounts, summary_line
from mslime.run.ray_calls import verb

if TYPE_CHECKING:
    from mslime.backends.sglang.engine_pool import EnginePool
    from mslime.checks.resolve import ResolvedRun
    from mslime.data.probe import ProbeScores
    from mslime.data.sample import Group, Sample
    from mslime.data.tokenizer import Tokenizer
    from mslime.rollout.manager import Manager
    from mslime.rollout.request_slots import RequestSlots
    from mslime.rollout.service import Handle, RolloutService, StepBatch
    from mslime.rollout.step_metrics import EvalResult
    from mslime.run.run_engines import RunEngines

_log = logging.getLogger(__name__)
LAST_SAMPLES_S = 3.0
"""Seconds for writes of the last responses to finish at the end of a run."""
Spans = list[tuple[str, str, float, float, int]]


@dataclass
class StepShards:
    """One step's work for the trainer.

    Attributes:
        shards: [ranks][optimizer steps] references to TrainShard.
        metrics: of the rollout.
        outline: small state file of the service after this step, used if the service is lost.
        spans: (lane, name, start, end, step) of engines and service since the last step.
        notes: lines for the user.
        watched: sequences whose log-probs at the trainer are to be passed to `RunRollouts.log_trained`.
    """

    shards: list[list[ray.ObjectRef]]
    metrics: dict[str, float]
    outline: bytes
    spans: Spans = field(default_factory=list)
    notes: list[str] = field(default_factory=list[str])
    watched: tuple[int, ...] = ()


@dataclass(frozen=True)
class SavedState:
    """The service's file in a checkpoint, in a format private to the service.

    Attributes:
        total: expected checksum of the file.
    """

    directory: Path
    name: str
    total: FileSum


@dataclass(frozen=True)
class HeldOutScores:
    """Scores on every held-out set.

    Attributes:
        version: weight version that sampled every response; None if nothing was sampled.
        begin, end: Unix seconds.
    """

    metrics: dict[str, float]
    version: int | None
    begin: float
    end: float


class RunRollouts:
    """Everything of a configuration's rollouts except engines and scoring.

    Args:
        run: the configuration, resolved.
        tokenizer: of the model.
        layers: global MoE layer ids of every trainer rank's pipeline stage.
        adapter: name of the rollouts' adapter, if there are several; else empty.

    Attributes:
        service: set by `serve`.
        pool, slots: with several adapters, the engines of all, and their shared capacity.
        counts: groups needed, accepted, running.
    """

    service: RolloutService
    pool: EnginePool
    slots: RequestSlots | None = None

    def __init__(
        self, run: ResolvedRun, tokenizer: Tokenizer, layers: Sequence[tuple[int, ...]], adapter: str = ""
    ) -> None:
        from mslime.run.assemble import SourceNames

        self.config, self._run, self._tokenizer, self._layers = run.config, run, tokenizer, layers
        self._adapter, self._prefix = adapter, f"{adapter}: " if adapter else ""
        self._for = f" for {adapter}" if adapter else ""
        self.counts = RolloutCounts(0, 0, 0)
        self._source_name = SourceNames()
        self._spans: Spans = []
        self._evaluated: list[LogBatch] = []
        self._closed = False
        self._samples = SampleLog(run.config.observe.save_rollouts, tokenizer, run.config.observe.sample_routes)

    def serve(self, managers: Sequence[Handle[Manager]], refused_input: int, *, has_teacher: bool) -> None:
        """Make the service over these managers.

        Args:
            refused_input: number of tokens that engines refuse to continue.
            has_teacher: whether a served teacher scores responses.
        """
        from mslime.data.source import open_prompts
        from mslime.rollout.generation import EngineLimits, Sampling
        from mslime.rollout.service import RolloutService

        config = self.config
        limits = EngineLimits(refused_input)
        sampling = Sampling.for_training(config.rollout, config.train.replay, self._run.model, limits)
        prompts = open_prompts(config.data, config.seed, self._tokenizer)
        self.service = RolloutService(
            config.rollout, config.deadlines.rollout_step_s, managers, prompts, sampling.longest_input,
            has_teacher=has_teacher, on_progress=self.on_progress, on_span=self.on_span, on_evaluated=self.on_evaluated,
        )  # fmt: skip

    async def begin(self, engines: RunEngines, state: SavedState | None, version: int) -> None:
        """Start generation.

        Args:
            state: written by `save`, when resuming.
            version: weight version that the trainer starts with.
        """
        self._engines, self.service.version = engines, version
        if state is not None:
            check_sums(state.directory, {state.name: state.total})
            await self.service.load(state.directory / state.name)
        _log.info("%sprompts are loaded, generation starts with version %d", self._prefix, version)
        samples.begin(self.config.run_dir, version)

    @verb("rollout of step {0}", "rollout_step_s", more_s=60)
    async def take(self, step: int) -> StepShards:
        """Wait for a step's groups; shard them."""
        from mslime.run.assemble import have_advantages

        groups = self.config.rollout.groups_per_step
        _log.info("%sstep %d: collecting %d groups", self._prefix, step + 1, groups)
        while True:
            batch = await self.service.take(step)
            try:
                # In a thread: it takes seconds for a million tokens, and responses must continue meanwhile.
                references, metrics, logged, trained = await asyncio.to_thread(self._shard, batch)
                break
            except RewardError as error:
                _log.warning("%sstep %d: groups without an advantage: %s", self._prefix, step + 1, error)
                blamed = [g for g in batch.groups if not have_advantages(g, self.config.algorithm)]
                if not await self.service.give_back(blamed):
                    raise
        if self.config.observe.save_groups:
            await asyncio.to_thread(_write, self.config.run_dir / "groups", batch)
        watched = self._samples.watch(step + 1, batch.samples, trained)
        self._samples.write(samples.file_of(self.config.run_dir, step + 1), step + 1, [logged])
        _log.info("%sstep %d: sent to the trainer, %s", self._prefix, step + 1, summary_line(batch.metrics | metrics))
        spans, self._spans = self._spans, []
        outline, notes = await self.service.outline(), self._samples.notes()
        return StepShards(references, batch.metrics | metrics, outline, spans, notes, watched)

    def _shard(self, batch: StepBatch) -> tuple[list[list[ray.ObjectRef]], dict[str, float], LogBatch, list[Sample]]:
        from mslime.run.assemble import assemble, references

        work = assemble(batch.groups, self.config, batch.version, self._source_name, self._run.model)
        shards = references(work.shards, self.config.layout, self._layers)
        return shards, work.metrics, LogBatch(batch.groups, batch.version, work.advantages), work.trained

    @verb("log-probs of step {0}")
    async def log_trained(self, step: int, log_probs: Mapping[int, NDArray[np.float32]]) -> None:
        """Write the trainer's log-probs of the sequences that `take` named, beside the step's responses.

        Args:
            step: of the metrics.
            log_probs: by sequence, [T].
        """
        self._samples.write_trained(samples.trainer_file_of(self.config.run_dir, step), step, log_probs)

    @verb("group counts")
    async def group_counts(self) -> RolloutCounts:
        """Groups needed, accepted, running; answered while other calls run."""
        return self.counts

    @verb("pause engines")
    async def pause(self) -> None:
        """Pause the engines for a weight update; for updates of adapters alone, nothing is paused."""
        with phase(_log, f"pausing the engines{self._for}"):
            await self.service.pause_for_update()

    @verb("resume engines")
    async def resume(self, version: int) -> None:
        """Continue under new weights."""
        with phase(_log, f"continuing with version {version}{self._for}"):
            await self.service.resume_after_update(version)

    @verb("adapter leaves")
    async def leave(self) -> None:
        """End generation for a trained adapter, and leave its share of the engines to the others."""
        assert self.slots is not None, "the only service leaves with the run"
        await self.close()
        await self.pool.abort(self._adapter)
        self.slots.leave(self._adapter)

    @verb("rollout of step {0}", "rollout_step_s", more_s=60)
    async def collect(self, step: int, directory: Path) -> dict[str, float]:
        """Write a step's groups into a file of `rollout.group_files`, without a trainer; returns the rollout's metrics.
        The engines then continue as after a trained step, with the same weights."""
        batch = await self.service.take(step)
        await asyncio.to_thread(_write, directory, batch)
        logged = LogBatch(batch.groups, batch.version)
        self._samples.write(samples.file_of(self.config.run_dir, step + 1), step + 1, [logged])
        await self.count_as(step + 1)
        return batch.metrics

    @verb("weight version")
    async def count_as(self, version: int) -> None:
        """Set the version of the engines' current weights."""
        await self.service.pause_for_update()
        await self._engines.stamp(version)
        await self.service.resume_after_update(version)

    @verb("weight sync: probe", "weight_sync_s")
    async def probe(self, version: int) -> Mapping[str, ProbeScores]:
        """Every engine's log-probs of the fixed text of `data.probe` under a version, by its URL; empty if the text
        does not fit."""
        from mslime.backends.sglang.generating import ProbeRequest
        from mslime.data import probe

        config, model = self.config, self._run.model
        ids = self._tokenizer.encode(probe.TEXT, special_tokens=True)
        longest = config.rollout.longest(model.max_positions)
        tokens = probe.fitted(ids, model.vocab_size, min(longest, config.sglang.max_total_tokens or longest))
        if not tokens:
            return {}
        name = f"probe-{uuid.uuid4().hex}"
        request = ProbeRequest(name, tokens, version, self._run.sends_routes, self._adapter)
        with phase(_log, f"probing the engines under version {version}{self._for}"):
            return await self._engines.probe(request)

    @verb("evaluation", "rollout_step_s", more_s=0, interruptible=True)
    async def evaluate(self) -> HeldOutScores:
        """Scores on every held-out set, one after the other."""
        begin, step = time.time(), self.service.version  # of the weights after so many steps
        self._evaluated = []
        results: list[EvalResult] = []
        for eval_set in self.config.data.eval_sets:
            with phase(_log, f"{self._prefix}evaluating on {eval_set.name}"):
                results.append(await self.service.evaluate(eval_set))
        versions = {r.version for r in results if r.version is not None}
        assert len(versions) <= 1, f"weights were replaced during the evaluation: versions {sorted(versions)}"
        metrics = {name: value for result in results for name, value in result.metrics().items()}
        self._samples.write(samples.file_of(self.config.run_dir, step, evaluation=True), step, self._evaluated)
        return HeldOutScores(metrics, next(iter(versions), None), begin, time.time())

    @verb("rollout state", "checkpoint_s", more_s=0)
    async def save(self, path: Path, next_step: int) -> FileSum:
        """Write everything for a resume: position in the prompts, work in flight, ledger; returns the file's
        checksum."""
        try:
            with phase(_log, f"saving {path}"):
                return await self.service.save(path, next_step, interrupt=True)
        except EngineError:  # the engines' running work is lost with them; the rest is saved
            return await self.service.save(path, next_step)

    async def close(self) -> None:
        """Stop generating; further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        await self.service.close()
        await asyncio.to_thread(self._samples.close, LAST_SAMPLES_S)

    # ------------------------------------------------------------------------------ callbacks of the service

    def on_evaluated(self, name: str, groups: Sequence[Group]) -> None:
        """Keep the groups of a held-out set for the log."""
        self._evaluated.append(LogBatch(groups, self.service.version, None, name))

    def on_progress(self, needed: int, accepted: int, running: int, done: int, aborted: int) -> None:
        """Keep the counts."""
        self.counts = RolloutCounts(needed, accepted, running, done, aborted)

    def on_span(self, lane: str, name: str, start: float, end: float, step: int) -> None:
        """Keep a stretch of work for the timeline."""
        self._spans.append((lane, name, start, end, step + 1))


def _write(directory: Path, batch: StepBatch) -> None:
    from mslime.rollout.group_files import StepGroups, write_groups

    write_groups(directory, StepGroups(batch.step + 1, batch.version, batch.groups))
