"""One run's parts, started together, watched, and ended together: the implementation of the loop's verbs.

Every method is one verb of the loop. A failure anywhere leaves through `__exit__`, which ends every process of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mslime.backends.sglang.client import EngineDied
from mslime.checks.resolve import ResolvedRun
from mslime.config.cluster import WHOLE, RunParts
from mslime.config.errors import CheckpointError, EngineError, TrainerError, WorkerError
from mslime.data.checkpoints import (
    CRITIC,
    OUTLINE,
    ROLLOUTS,
    FileSum,
    begin,
    critic_directory,
    saving_directory,
    write_summed,
)
from mslime.observe.names import over_optimizer_steps
from mslime.run.assemble import SupervisedRows
from mslime.run.endpoint import ControlEndpoint
from mslime.run.engine_actors import EngineGroup
from mslime.run.fleet import Fleet
from mslime.run.publish import AdapterPublisher, Publisher
from mslime.run.ray_cluster import Cluster
from mslime.run.records import StepRecords
from mslime.run.rollout_process import ONLY, Evaluation, RolloutActor, RolloutProcess
from mslime.run.run_checkpoints import RunCheckpoints
from mslime.run.run_engines import RunEngines
from mslime.run.run_rollouts import HeldOutScores, RunRollouts, StepShards
from mslime.run.sharing import SeparateGpus, SharedGpus
from mslime.run.started import RunResources, StartedRun
from mslime.run.stop import RescueState, Stopped, StopSignals
from mslime.run.trainers import TrainerGroup
from mslime.run.weight_probe import WeightProbe

if TYPE_CHECKING:
    from mslime.backends.sglang.server_process import EngineAddress

Shards = Sequence[Sequence[Any]]
"""[ranks][optimizer steps] of TrainShard, or of Ray references to them."""

_log = logging.getLogger(__name__)
REST_S = 30.0
"""Seconds in which ranks must finish their earlier work in a rescue; after that they count as stuck."""


class TrainingRun(StartedRun):
    """A running run. A context manager.

    Attributes:
        checkpoints: the one that the run begins with, and those it writes.
        first_step: steps done before this session (after a resume).
        parts: processes of the run that are started.
        rows: of supervised training, set by `_start`.
    """

    parts: ClassVar[RunParts] = WHOLE

    def __init__(
        self,
        run: ResolvedRun,
        stop: StopSignals | None = None,
        quiet: bool = False,
        resources: RunResources | None = None,
    ) -> None:
        """
        Args:
            quiet: show no progress, regardless of `observe.progress`.
            resources: see `StartedRun`.
            stop: signal handlers that are already set; the session makes them patient once there is something to save.
                None: the session handles no signals.
        """
        super().__init__(run, stop or StopSignals(), resources)
        self._quiet = quiet
        config = self.config
        self.checkpoints = RunCheckpoints(config.run_dir, config.checkpoint, config.has_critic)
        self.first_step = self.checkpoints.first_step
        self._rescue_state = RescueState(self.first_step, self.first_step)
        self._records = StepRecords(config, self.checkpoints)
        self._outlines: dict[int, bytes] = {}  # of the rollout service, by the step a checkpoint continues at
        self._source_state: dict[str, Any] = {}  # of supervised prompts, after the last trained batch
        self._evaluating: Evaluation | None = None
        self._memory = SeparateGpus()

    def _start(self) -> None:
        config = self.config
        self._open_records()
        self._print_start()
        for note in self.checkpoints.notes():
            self.progress.note(note)
        generates = config.train.task == "rl" and self.parts.engines
        cluster, _ = self._join_cluster(generates)
        self._trainers = TrainerGroup.of_run(config, cluster, self._logs, self._worth_waiting)
        self._stack.callback(self._trainers.stop)
        if generates:
            self._start_generation(cluster)
        else:
            self._start_trainers()
        if self.checkpoints.loaded is not None and not (generates and config.colocated):
            self._load(self.checkpoints.loaded)
        if config.train.task == "sft":
            self.rows = SupervisedRows(self._run)
            if self.first_step:
                self.rows.resume(self.checkpoints.loaded, self.checkpoints.extra)
            self._source_state = self.rows.source.state_dict()

    def _open_records(self) -> None:
        self._records.open(self._stack, self._quiet)
        self._timeline, self.progress = self._records.timeline, self._records.progress

    def _load(self, checkpoint: Path) -> None:
        """Load a checkpoint into the trainer and the critic."""
        critic = self.config.critic
        self.progress.note(f"continuing from {checkpoint}")
        self._trainers.load(checkpoint, new_run=not self.checkpoints.own)
        if self.config.has_critic and not critic_directory(checkpoint).is_dir():
            self.progress.note(f"no critic in {checkpoint}: it starts from {critic.path or self.config.model.path}")

    def _start_generation(self, cluster: Cluster) -> None:
        """Start engines and trainers side by side, or on shared GPUs one after the other; the rollout service connects
        when both are up."""
        if self._resources.engines is None:
            addresses, teacher_addresses = self._start_engines(cluster)
        else:
            addresses, teacher_addresses = self._find_engines(self._resources.engines, cluster)
        group = self._take_over(self._engines.attached, self._trainers.disconnect)
        self._rollouts = RolloutProcess(self._run, self._logs / "rollouts.log", self._at_rest)
        self._stack.callback(self._rollouts.stop)
        begin = {ONLY: (self.checkpoints.rollouts, self.first_step)}
        self._rollouts.process.call(RolloutActor.start, addresses, self._layers, begin, teacher_addresses)
        self._fleet = Fleet(self._rollouts.engines, self._engines, self._attached, self._at_rest, self.progress)
        self._memory = SeparateGpus(self._fleet.update_engines)
        if self.config.colocated:
            teachers = self._resources.teachers if self.config.teacher_shares else None
            self._memory = SharedGpus(
                self._rollouts, self._trainers, self._engines, self._fleet.update_engines, self._at_rest, teachers
            )
        self._publisher = self._make_publisher()
        self._publisher.connect(group)
        self._stack.enter_context(ControlEndpoint(self.config.run_dir, self._fleet.orders))

    def _start_engines(self, cluster: Cluster) -> tuple[list[EngineAddress], list[EngineAddress]]:
        """Addresses of (engines, teachers), launched beside the trainer or attached."""
        self._engines = self._resources.engines = self._engine_group(cluster)
        teachers = self._resources.teachers = self._engine_group(cluster, "teacher")
        if self.config.colocated:
            # Offloaded before the engines start, because they measure the free memory of their GPUs.
            self._start_trainers()
            if self.checkpoints.loaded is not None:
                self._load(self.checkpoints.loaded)
            self._trainers.hold(())
            self.progress.note("the trainer is ready and offloaded")
        start = (lambda _: None) if self.config.colocated else self._start_trainers
        addresses, teacher_addresses = self._start_beside(start, self._engines, teachers)
        return addresses, teacher_addresses

    def _find_engines(self, engines: EngineGroup, cluster: Cluster) -> tuple[list[EngineAddress], list[EngineAddress]]:
        """Addresses of (engines, teachers) left by an earlier session, while another trainer starts."""
        self._engines, teachers = engines, self._resources.teachers
        assert teachers is not None, "they are started together"
        self._resources.clean(engines, self._senders, self.config.deadlines, self.progress.note)
        self._start_trainers(cluster.check_trainer_machines)
        engines.wait_for_one(self._at_rest)
        self._print_places(engines, teachers)
        return engines.addresses, teachers.addresses

    def _make_publisher(self, adapter: str = "") -> Publisher:
        """Publisher of the weights or the adapters; with several adapters, of the one with this name."""
        kind = AdapterPublisher if self.config.syncs_adapters else Publisher
        return kind(
            self.config, self._rollouts, self._trainers, self._engines, self._fleet, self._memory, self._at_rest,
            self._other_group, self.progress, self._timeline, self._probe(), adapter,
        )  # fmt: skip

    def _start_trainers(self, on_wait: Callable[[], None] | None = None) -> None:
        self._layers = self._trainers.start(on_wait)

    def _probe(self) -> WeightProbe | None:
        if self.config.weights.verify not in ("probe", "always"):
            return None
        tolerance, model = self._run.probe_tolerance, self._run.model
        follows = model.sends_routes(self.config.train.replay)
        return WeightProbe(self._rollouts, self._trainers, tolerance, self._memory, model, follows=follows)

    # ---------------------------------------------------------------------------------------------- verbs of the loop

    @property
    def trained(self) -> int:
        """Steps done, also before this session."""
        return self._rescue_state.trained

    @contextmanager
    def step(self, step: int) -> Iterator[dict[str, float]]:
        """One step (0-based): measures its time, and logs its record if it succeeds."""
        yield self._records.begin(step + 1)
        self._close_row()
        self._at_rest()

    def _close_row(self, hook: bool = True) -> None:
        """Log the row of the step in progress, if it was trained."""
        if self._rescue_state.trained < self._records.step:
            self._records.drop()
        self._records.close(hook)

    def take(self, step: int) -> StepShards:
        """Wait for a step's finished groups, and return them as shards."""
        _log.info("step %d: waiting for rollouts", step + 1)
        begin = self._timeline.now()
        while True:
            try:
                taking = self._rollouts.service.begin(RunRollouts.take, step)
                batch = self._rollouts.groups(taking, self.progress.rollout)
                break
            except EngineError as error:  # groups finished before it remain for the next call
                with self._syncing():
                    self._revive(error)
                    self._publisher.publish(step, self._records.step_of_spans)
        end = self._timeline.now()
        self._timeline.record("driver", "wait for rollouts", begin, end, step + 1)
        for span in batch.spans:
            self._timeline.record(*span)
        for note in batch.notes:
            self.progress.note(note)
        batch.metrics["perf/wait_seconds"] = end - begin
        self._outlines = {at: old for at, old in self._outlines.items() if at >= step} | {step + 1: batch.outline}
        return batch

    def train(self, shards: Shards, watched: Sequence[int] = ()) -> dict[str, float]:
        """Optimizer steps on the shards, and one row of metrics for all of them.

        Args:
            watched: sequences whose log-probs are written beside their responses.
        """
        self._memory.begin_training()
        _log.info("step %d: training", self._records.step)
        # While the critic is warmed up, the policy stays unchanged.
        policy = not self.config.has_critic or self._records.step > self.config.critic.warmup_steps
        self._rescue_state.training = True
        found = self._trainers.train(shards, self.progress.train, policy, self._records.step, watched)
        self._rescue_state.training = False
        self._rescue_state.trained = self._records.step
        if self.config.train.task == "sft":
            self._source_state = self.rows.source.state_dict()
        self._records.record_lanes("train", found.spans)
        if found.log_probs:
            self._rollouts.service.begin(RunRollouts.log_trained, self._records.step, found.log_probs)
        return over_optimizer_steps(found.metrics)

    def publish_weights(self, version: int) -> dict[str, float]:
        """Publish the trainer's weights to the engines as a new version; see `Publisher.publish`."""
        self._at_rest()
        assert self._evaluating is None, "an evaluation still draws from the weights that would be replaced"
        with self._syncing():
            return self._publisher.publish(version, self._records.step_of_spans)

    def _syncing(self) -> AbstractContextManager[None]:
        """Context of a weight sync, and of changes to the engines' members."""
        return nullcontext()

    def _revive(self, error: EngineError) -> None:
        self._publisher.revive(error)

    def has_scores(self, step: int) -> bool:
        """Whether the run has recorded scores on held-out sets after `step` steps."""
        return self._records.has_scores(step)

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate on the held-out sets after `step` steps.

        With `rollout.max_staleness` above 0, and separate GPUs, the engines generate for it while the trainer
        continues, and `evaluated` waits for the scores. Otherwise, and after the last step, this returns the result of
        `evaluated`.
        """
        if not self.config.data.eval_sets:
            return {}
        self._at_rest()
        self._evaluating = self._rollouts.begin_evaluation(step)
        beside = self.config.rollout.max_staleness > 0 and not self.config.colocated
        return {} if beside and step < self.config.train.num_steps else self.evaluated()

    def evaluated(self, repeat: bool = True) -> dict[str, float]:
        """Wait for the running evaluation, if any, and record its scores with its step. Returns metrics for the record
        of the step in progress.

        Args:
            repeat: repeat it if all engines died in it; the weights are still the same.

        `checkpoint.keep_best` needs no more: scores arrive before the next checkpoint is saved, and until then their
        checkpoint is the newest, which is kept.
        """
        if (running := self._evaluating) is None:
            return {}
        begin = self._timeline.now()
        found = self._scores(running) if repeat else self._rollouts.service.wait(running.answer)
        end = self._timeline.now()
        self._evaluating = None
        assert found.version in (running.step, None), f"scores of version {found.version} for step {running.step}"
        for address in self._engines.addresses:
            self._timeline.record(address.name, "evaluate", found.begin, found.end, self._records.of_span(running.step))
        self._timeline.record("driver", "wait for evaluation", begin, end, self._records.step_of_spans)
        waited = {"perf/eval_seconds": end - begin}
        in_step = self._records.record is not None
        if in_step and self._records.step == running.step:
            return found.metrics | waited
        self._records.log_scores(running.step, found.metrics if in_step else found.metrics | waited)
        return waited

    def _scores(self, running: Evaluation) -> HeldOutScores:
        """Scores of an evaluation; it is repeated until an engine has survived it."""
        while True:
            try:
                return self._rollouts.service.wait(running.answer)
            except EngineDied as error:
                with self._syncing():
                    if self._rollouts.engines.call(RunEngines.no_engine_alive):
                        self._fleet.revive(error)
                        self._publisher.publish(running.step, self._records.step_of_spans)
                self.progress.note(f"restarting the evaluation of step {running.step}: no engine was left for it")
                running = self._rollouts.begin_evaluation(running.step)

    def held_out_loss(self, step: int) -> dict[str, float]:
        """The loss on held-out rows after `step` steps; outside a step it is logged in a separate row."""
        if not self.config.data.eval_sets:
            return {}
        self._at_rest()
        begin = self._timeline.now()

        def of_shards(shards: Shards) -> tuple[float, int]:
            found, spans = self._trainers.negative_log_likelihood(shards)
            self._timeline.record_lanes("evaluate", spans, step)
            return found

        metrics = self.rows.evaluate(of_shards)
        metrics["perf/eval_seconds"] = self._timeline.now() - begin
        if self._records.record is None:
            self._records.log_scores(step, metrics)
        return metrics

    def save(self, next_step: int) -> None:
        """Save a checkpoint from which the run continues at `next_step` without losing anything."""
        try:
            self._save(next_step)
        except CheckpointError:
            self._rescue_state.save_failed = True
            raise
        self._at_rest()

    def _save(self, next_step: int, rescue: bool = False) -> None:
        begun_at = self._timeline.now()
        deadline = self.config.deadlines.rescue_s if rescue else self.config.deadlines.checkpoint_s
        directory = self.checkpoints.directory(next_step)
        extra: dict[str, Any] = {"next_step": next_step, "version": next_step, CRITIC: self.config.has_critic}
        extra |= {"row": self._records.last_row, "config": self.config.as_dict()}
        _log.info("saving %s", directory)
        begin(directory)
        others: dict[str, FileSum] = {}
        if self.config.train.task == "rl":
            others = self._save_rollouts(saving_directory(directory), next_step, deadline, rescue)
        else:
            extra["source"] = self._source_state
        with self._memory.awake("save", next_step, last=rescue):
            self._trainers.save(directory, extra, others, deadline)
        self._rescue_state.saved = next_step
        self.checkpoints.prune()
        end = self._timeline.now()
        self._records.carry({"perf/checkpoint_seconds": end - begun_at})
        self._records.record_lanes(
            "save", {f"trainer {r}": (begun_at, end) for r in range(self.config.layout.world_size)}
        )
        self.progress.note(f"saved {directory}")

    def _save_rollouts(self, saving: Path, next_step: int, deadline: float, rescue: bool) -> dict[str, FileSum]:
        """Make the rollout service write its file. In a rescue its last outline replaces a service that is gone."""
        try:
            service = self._rollouts.service.within(deadline)
            return {ROLLOUTS: service.call(RunRollouts.save, saving / ROLLOUTS, next_step)}
        except TrainerError as error:
            if not rescue or next_step not in self._outlines:
                raise
            self.progress.note(
                f"the rollout service cannot report its groups ({error.rule.splitlines()[0]}): unfinished groups will "
                "restart from their prompts"
            )
            return {OUTLINE: write_summed(saving / OUTLINE, self._outlines[next_step])}

    @contextmanager
    def rescuing(self) -> Iterator[None]:
        """If a signal or an error ends the block early, save the trained steps, provided that the trainer is at
        rest."""
        self._stop.describe, self._stop.patient = lambda: self._rescue_state.stopping(self._records.step), True
        try:
            yield
        except BaseException as error:
            shown = self._stop.to_user_error(error)
            outcome = self._rescue(shown)
            if isinstance(shown, Stopped):
                shown.outcome = outcome
            if shown is not error:
                raise shown from None
            raise
        finally:
            self._stop.patient = False

    def _rescue(self, error: BaseException) -> str:
        """Try to save before the run ends with `error`; returns the outcome in words. Raises Stopped at a second
        signal."""
        rescue, stopped = self._rescue_state, isinstance(error, Stopped)
        ending = "the trainer" if isinstance(error, WorkerError) else "the run"  # the run may get another trainer
        first = (str(error).splitlines() or [type(error).__name__])[0]
        reason = f"{ending} ends" if stopped else f"{ending} ends: {first}"
        if isinstance(error, Stopped) and not error.save:
            return self._lost("a second signal arrived")
        self._keep_scores()
        if not rescue.training and rescue.trained <= rescue.saved:
            return rescue.nothing_to_save()
        if why := rescue.hinders_saving(self._records.step, stopped):
            return self._lost(why)
        self.progress.note(f"saving step {rescue.trained} before {reason}")
        try:
            self._trainers.rest(min(REST_S, self.config.deadlines.rescue_s))
            self._close_row(hook=False)  # the first error is the one that ends the run
            self._save(rescue.trained, rescue=True)
        except KeyboardInterrupt:
            self._lost("a second signal arrived")
            raise
        except Exception as second:  # of any kind: the first error is the one that ends the run
            return self._lost(f"saving failed: {second}")
        return f"saved step {rescue.trained} in {self.checkpoints.directory(rescue.trained)}"

    def _keep_scores(self) -> None:
        """Record the scores of an evaluation that has finished before the run ends."""
        running = self._evaluating
        if running is None or (self._ray is not None and self._ray.gone):
            return
        with suppress(Exception):  # of any kind: the first error is the one that ends the run
            if running.answer.done:
                found = self.evaluated(repeat=False)
                if (record := self._records.record) is not None:
                    record.update(found)
                return
        fate = "it restarts when the run continues" if running.step == self.trained else "its scores are lost"
        self.progress.note(f"the evaluation of step {running.step} has not finished: {fate}")

    def _lost(self, why: str) -> str:
        """Message that steps are not saved."""
        self.progress.note(text := self._rescue_state.lost(why))
        return text

    def finish(self) -> None:
        """At the end of the run: export the final weights if configured."""
        if self.config.checkpoint.save_hf:
            self.export_hf(self.config.run_dir / "hf")

    def export_hf(self, directory: Path) -> None:
        """Write the trainer's weights as a Hugging Face checkpoint with the model's configuration and tokenizer."""
        with self._memory.awake("send", self.trained):
            self._trainers.export_hf(directory)
        self.progress.note(f"wrote {directory}")
        self._at_rest()
