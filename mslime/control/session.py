"""One run's parts, started together, watched, and ended together: what the loop's verbs mean.

Every method is one verb of the loop. A failure anywhere leaves through `__exit__`, which ends every process of the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray

from mslime.config.errors import CheckpointError, ConfigError, DataError, EngineError, RewardError, UserError
from mslime.config.schema import RunConfig
from mslime.control.assemble import assemble_supervised
from mslime.control.attached import AttachedEngines, new_group
from mslime.control.check import ResolvedRun
from mslime.control.cluster import Cluster
from mslime.control.engines import EngineGroup
from mslime.control.rollouts import RolloutHandle, StepShards
from mslime.control.trainers import TrainerGroup
from mslime.data.checkpoints import critic_directory, latest_complete, prune, read_extra, step_directory
from mslime.data.source import PromptSource, supervised_sample
from mslime.data.tokenizer import load_tokenizer
from mslime.observe.metrics import MetricsLogger
from mslime.observe.progress import open_progress
from mslime.observe.rows import over_optimizer_steps
from mslime.observe.timeline import STEP, Timeline
from mslime.weights.commit import Commit

Shards = Sequence[Sequence[Any]]
"""[ranks][optimizer steps] of TrainShard, or of Ray references to them."""


class Session:
    """A running run. A context manager.

    Attributes:
        config: the resolved configuration.
        first_step: steps done before this session (after a resume).
        loaded: the checkpoint that the trainer continues from, if any.
    """

    def __init__(self, run: ResolvedRun) -> None:
        self._run, self.config = run, run.config
        self._stack = ExitStack()
        self.loaded = _checkpoint_to_load(self.config)
        self._extra = read_extra(self.loaded) if self.loaded else {}
        self._own = self.loaded is not None and self.loaded.parent == self._checkpoints
        self.first_step: int = self._extra["next_step"] if self._own else 0
        self._trained = self._saved = self.first_step
        self._verified = False
        self._step = self.first_step
        self._carried: dict[str, float] = {}  # measured between two steps, logged with the second

    @property
    def _checkpoints(self) -> Path:
        return self.config.run_dir / "checkpoints"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        config, logs = self.config, self.config.run_dir / "logs"
        self._metrics = self._stack.enter_context(
            MetricsLogger(
                config.run_dir,
                config.observe,
                self.first_step + 1 if self.first_step else 0,
                config.name,
                config.as_dict(),
            )
        )
        self._timeline = self._stack.enter_context(Timeline(config.run_dir))
        self._progress = self._stack.enter_context(
            open_progress(config.observe.progress, config.train.num_steps, self.first_step)
        )
        self._progress.note(
            f"starting {config.layout.world_size} trainer rank(s): {config.layout.describe()}; logs in {logs}"
        )
        generates = config.train.task == "rl"
        cluster = self._stack.enter_context(Cluster(config, generates))
        self._trainers = TrainerGroup(config, cluster, logs)
        self._stack.callback(self._trainers.stop)
        if generates:
            self._start_generation(cluster, logs)
        else:
            self._layers = self._trainers.start()
        if self.loaded is not None:
            self._progress.note(f"continuing from {self.loaded}")
            self._trainers.load(self.loaded, new_run=not self._own)
            if config.has_critic and not critic_directory(self.loaded).is_dir():
                self._progress.note(
                    f"no critic in {self.loaded}: it starts from {config.critic.path or config.model.path}"
                )
        if config.train.task == "sft":
            self._open_supervised()

    def _start_generation(self, cluster: Cluster, logs: Path) -> None:
        """Engines and trainers start side by side; the rollout service connects when both are there."""
        self._engines = EngineGroup(self.config, cluster, logs)
        self._stack.callback(self._engines.stop)
        teachers = EngineGroup(self.config, cluster, logs, "teacher")
        self._stack.callback(teachers.stop)
        starting, teachers_starting = self._engines.begin_start(), teachers.begin_start()
        watch = self._engines.watch_start(starting, self._progress.note)
        self._layers = self._trainers.start(watch)
        addresses = self._engines.finish_start(starting, watch)
        self._progress.note("engines: " + ", ".join(a.url for a in addresses))
        taught_by = teachers.finish_start(
            teachers_starting, teachers.watch_start(teachers_starting, self._progress.note)
        )
        if taught_by:
            self._progress.note("teachers: " + ", ".join(a.url for a in taught_by))
        group, endpoints = new_group(self.config), [a.endpoint for a in addresses]
        if self.config.sglang.urls:
            attached = AttachedEngines(self.config, endpoints, group)
            attached.take_over()
            self._stack.callback(attached.leave, self._trainers.disconnect)
        self._rollouts = RolloutHandle(self._run, logs / "rollouts.log")
        self._stack.callback(self._rollouts.stop)
        state = self._extra.get("rollouts") if self.first_step else None
        self._rollouts.start(addresses, self._layers, state, self.first_step, taught_by)
        engines = self._trainers.connect(endpoints, group)
        self._commit = Commit(engines, self.config.deadlines.weight_sync_s)
        self._stack.callback(self._commit.close)

    def _open_supervised(self) -> None:
        config = self.config
        self._tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path)
        self._source = PromptSource(config.data.prompts, config.data, self._tokenizer, config.seed)
        if self.first_step:
            self._source.load_state_dict(self._extra["source"])

    # ---------------------------------------------------------------------------------------------- verbs of the loop

    @contextmanager
    def step(self, step: int) -> Iterator[dict[str, float]]:
        """One step (0-based): times it, and logs what was recorded when it ends well."""
        self._step = step + 1
        begin, record, self._carried = self._timeline.now(), self._carried, {}
        yield record
        end = self._timeline.now()
        self._timeline.record("driver", STEP, begin, end, step + 1)
        record |= {"version": step + 1, "perf/step_seconds": end - begin}
        self._metrics.log(step + 1, record)
        self._progress.step_done(step + 1, record)

    def take(self, step: int) -> StepShards:
        """Finished groups of a step as shards; waits for them."""
        begin = self._timeline.now()
        batch = self._rollouts.take(step, self._progress.rollout)
        end = self._timeline.now()
        self._timeline.record("driver", "wait for rollouts", begin, end, step + 1)
        for span in batch.spans:
            self._timeline.record(*span)
        batch.metrics["perf/wait_seconds"] = end - begin
        return batch

    def train(self, shards: Shards) -> dict[str, float]:
        """Optimizer steps on the shards, and one row of metrics of them all."""
        # While the critic is warmed up, the policy stays what it is.
        policy = not self.config.has_critic or self._step > self.config.critic.warmup_steps
        metrics, spans = self._trainers.train(shards, self._progress.train, policy)
        self._trained = self._step
        self._record_ranks("train", spans)
        return over_optimizer_steps(metrics)

    def publish_weights(self, version: int) -> dict[str, float]:
        """Give the engines the trainer's weights under a new version; generation goes on under it afterwards.

        No trainer rank enters a collective before every engine has confirmed its pause.
        """
        begin = time.monotonic()
        mode = self._run.weight_check
        verify = mode == "always" or (mode == "first" and not self._verified)
        self._rollouts.pause()
        paused = time.monotonic()
        self._commit.begin()
        sent, spans = self._trainers.send_weights(version, verify, self._progress.weights)
        if verify:
            compared = self._commit.check(sent.expected)
            self._verified = True
            self._progress.note(f"version {version}: {compared} engine parameters equal the trainer's, bit for bit")
        self._commit.end()
        self._commit.stamp(version)
        self._rollouts.resume(version)
        end = time.monotonic()
        self._record_ranks("send weights", spans)
        return {
            "weights/seconds": end - begin,
            "weights/bytes": float(sent.bytes),
            "weights/gb_per_s": sent.bytes / max(sent.seconds, 1e-9) / 1e9,
            "weights/pause_seconds": end - paused,
            "weights/buckets": float(sent.buckets),
        }

    def evaluate(self, step: int) -> dict[str, float]:
        """Scores on the held-out sets after `step` steps; those before the first step are logged as step 0."""
        if not self.config.data.eval_sets:
            return {}
        begin = self._timeline.now()
        metrics = self._rollouts.evaluate()
        end = self._timeline.now()
        for address in self._engines.addresses:
            self._timeline.record(address.name, "evaluate", begin, end, step)
        metrics["perf/eval_seconds"] = end - begin
        if step == 0:
            self._metrics.log(0, {**metrics, "version": 0.0})
            self._progress.step_done(0, metrics)
        return metrics

    def supervised_batch(self, step: int) -> Shards:
        """The next `train.sft_batch_size` rows as shards for every rank."""
        samples = [
            supervised_sample(self._source.next(), i, self._tokenizer) for i in range(self.config.train.sft_batch_size)
        ]
        shards = assemble_supervised(samples, self.config)
        layout = self.config.layout
        return [[ray.put(per_dp[layout.dp_rank(rank)]) for per_dp in shards] for rank in range(layout.world_size)]

    def save(self, next_step: int) -> None:
        """A checkpoint from which the run continues at `next_step` without losing anything."""
        begin = self._timeline.now()
        directory = step_directory(self._checkpoints, next_step)
        extra: dict[str, Any] = {"next_step": next_step, "version": next_step}
        if self.config.train.task == "rl":
            extra["rollouts"] = self._rollouts.state()
        else:
            extra["source"] = self._source.state_dict()
        self._trainers.save(directory, extra)
        self._saved = next_step
        prune(self._checkpoints, self.config.checkpoint.keep)
        if self.config.has_critic:
            prune(critic_directory(directory).parent, self.config.checkpoint.keep)
        end = self._timeline.now()
        self._carried["perf/checkpoint_seconds"] = end - begin
        self._record_ranks("save", {f"trainer {r}": (begin, end) for r in range(self.config.layout.world_size)})
        self._progress.note(f"saved {directory}")

    @contextmanager
    def rescuing(self) -> Iterator[None]:
        """When engines, rewards or data fail inside, save what the trainer has learnt before the error ends the run."""
        try:
            yield
        except (EngineError, RewardError, DataError):
            if self._trained > self._saved:
                self._progress.note(f"saving step {self._trained} before the run ends with an error")
                with suppress(UserError):  # the first error is the one to report
                    self.save(self._trained)
            raise

    def finish(self) -> None:
        """The run is through: export the final weights when asked to."""
        if self.config.checkpoint.save_hf:
            self.export_hf(self.config.run_dir / "hf")

    def export_hf(self, directory: Path) -> None:
        """Write the trainer's weights as a Hugging Face checkpoint with the model's configuration and tokenizer."""
        self._trainers.export_hf(directory)
        self._progress.note(f"wrote {directory}")

    def _record_ranks(self, name: str, spans: Mapping[str, tuple[float, float]]) -> None:
        for rank, (begin, end) in spans.items():
            self._timeline.record(rank, name, begin, end, self._step)


def _checkpoint_to_load(config: RunConfig) -> Path | None:
    """The run's own newest checkpoint when resuming, else `checkpoint.load`, else None."""
    root = config.run_dir / "checkpoints"
    newest = latest_complete(root) if root.is_dir() else None
    if config.checkpoint.resume == "auto" and newest is not None:
        return newest
    if newest is not None:
        raise ConfigError(
            "checkpoint.resume",
            "never",
            f"{newest} would be overwritten by a run that starts again",
            "give the run another name, or move the directory away",
        )
    load = config.checkpoint.load
    if load is not None and not load.is_dir():
        raise CheckpointError("checkpoint.load", str(load), "no such directory", "name a checkpoints/step_N directory")
    return load
