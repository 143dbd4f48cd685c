"""The trainer: one Ray actor per rank around `MegatronTrainer`, with the critic's ranks inside or beside them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from mslime.config.base import TrainerPart
from mslime.config.keys import Endpoint
from mslime.config.resolved import CriticSpec, PolicySpec, critic_spec, policy_spec
from mslime.config.schema import RunConfig
from mslime.data.checkpoints import FileSum, critic_directory
from mslime.data.probe import joined_routes
from mslime.logs import hide, phase
from mslime.run.ranks import RankActor, RankGroup, Report, Span, fetched
from mslime.run.ray_calls import gather
from mslime.run.ray_cluster import ActorProcess, Cluster

if TYPE_CHECKING:
    from mslime.backends.megatron.step.critic import MegatronCritic
    from mslime.backends.megatron.step.trainer import MegatronTrainer
    from mslime.config.layout import ParallelLayout
    from mslime.data.probe import RoutedRows
    from mslime.data.routes import Routes
    from mslime.data.shard import TrainShard
    from mslime.weights.sync import SendReport

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """Results of a step.

    Attributes:
        metrics: of each optimizer step, equal on all ranks.
        spans: when each rank was busy.
        log_probs: by watched sequence, [T] float32, NaN for its first token.
    """

    metrics: list[dict[str, float]]
    spans: dict[str, Span]
    log_probs: dict[int, NDArray[np.float32]]


class PolicyRank:
    """Methods that the driver calls on a trainer rank, with a critic's rank on the same GPU."""

    def __init__(self, spec: PolicySpec, rank: int) -> None:
        self._spec, self._rank, self._step = spec, rank, 0
        self._sent, self._buckets = 0, 0
        self._prepared: list[TrainShard] = []
        self._found: dict[str, float] = {}

    def adopt(
        self, trainer: MegatronTrainer, critic: MegatronCritic | None, on_micro_batch: Callable[[int, int], None], *,
        stacked: bool = True,
    ) -> None:  # fmt: skip
        """Use this trainer and critic from here on. A collective.

        Args:
            on_micro_batch: called with (done, total) in a step.
            stacked: see `MegatronTrainer.weight_sender`.
        """
        from mslime.backends.sglang.port import SGLangPort

        self._trainer, self._critic = trainer, critic
        trainer.on_micro_batch = on_micro_batch
        if critic is not None:
            critic.on_micro_batch = on_micro_batch
        port = SGLangPort(self._spec.deadlines)

        def report(sent: int, buckets: int) -> None:
            self._sent, self._buckets = sent, buckets

        self._sender = trainer.weight_sender(port, report, stacked=stacked)

    def prepare(self, shards: Sequence[Any], step: int, values: Sequence[Any] | None = None) -> list[Any]:
        """Everything before the first gradient of these shards, for the following `update`.

        Args:
            step: of the run, from 1 on, for the log.
            values: of a critic on other GPUs, one column a shard.

        Returns:
            Target returns of a critic, one column a shard; None if there is no critic.
        """
        self._step = step
        with phase(_log, f"step {step}: log-probs of {len(shards)} shard(s)"):
            own: list[TrainShard] = fetched(shards)
            if values is not None:
                own = [replace(shard, values=column) for shard, column in zip(own, values, strict=True)]
            elif self._critic is not None:
                own = self._critic.with_values(own)
            self._prepared, self._found = self._trainer.prepare(own)
        return [shard.returns for shard in self._prepared]

    def update(self, policy: bool, watched: Sequence[int]) -> dict[str, Any]:
        """One optimizer step per prepared shard. Returns metrics of each, the time span in which this rank was busy,
        and its log-probs of `watched` sequences (`WatchedSequences`).

        Args:
            policy: also train the policy, not only the critic on the same GPU.
        """
        begin, shards = time.time(), self.begin_update(watched)
        rows: list[dict[str, float]] = [{} for _ in shards]
        with phase(_log, f"step {self._step}: training on {sum(len(s.tokens) for s in shards)} tokens"):
            if self._critic is not None:
                rows = self._critic.train(shards)
            if policy:
                rows = [row | updated for row, updated in zip(rows, self._trainer.update(shards), strict=True)]
        return self.end_update(rows, begin)

    def begin_update(self, watched: Sequence[int]) -> list[TrainShard]:
        """Shards left by `prepare`; log-probs of `watched` sequences are kept from here on."""
        self._trainer.watch.begin(watched)
        shards, self._prepared = self._prepared, []
        return shards

    def end_update(self, rows: Sequence[Mapping[str, float]], begin: float) -> dict[str, Any]:
        """Result of `update`, from the rows of its steps and its start time."""
        found = [{**self._found, **row} for row in rows]
        return {"metrics": found, "span": (begin, time.time()), "log_probs": self._trainer.watch.found}

    def train(self, shards: Sequence[Any], policy: bool, step: int, watched: Sequence[int]) -> dict[str, Any]:
        """`prepare` and `update` in one."""
        begin = time.time()
        self.prepare(shards, step)
        return self.update(policy, watched) | {"span": (begin, time.time())}

    def negative_log_likelihood(self, shards: Sequence[Any]) -> tuple[float, int, Span]:
        """(its sum over these shards' trained tokens, how many those are, when this rank was busy)."""
        begin = time.time()
        total, tokens = self._trainer.negative_log_likelihood(fetched(shards))
        return total, tokens, (begin, time.time())

    def buckets(self) -> tuple[int, int]:
        """(weight buckets sent, total) of the sync in progress; answered while it runs."""
        return self._sent, self._buckets

    def connect(self, engines: Sequence[Endpoint], group: str) -> None:
        """Connect to the engines."""
        hide(*(key for engine in engines for key in (engine.keys.api, engine.keys.admin)))
        with phase(_log, f"connecting to {', '.join(engine.url for engine in engines)}"):
            self._sender.connect(engines, group)

    def disconnect(self) -> None:
        """Disconnect from the engines."""
        self._sender.disconnect()

    def send_weights(self, version: int, verify: bool) -> tuple[SendReport, Span]:
        """Send every bucket; returns the report and the time span in which this rank was busy."""
        begin = time.time()
        with phase(_log, f"sending weights of version {version}"):
            report = self._sender.send(version, verify)
        return report, (begin, time.time())

    def write_adapter(self, directory: str, verify: bool) -> tuple[dict[str, str], Span]:
        """Write the adapters for engines; see `MegatronTrainer.write_adapter`. Also returns the time span of it."""
        begin = time.time()
        with phase(_log, f"writing adapters to {directory}"):
            expected = self._trainer.write_adapter(Path(directory), verify)
        return expected, (begin, time.time())

    def probe(
        self, sequences: Sequence[NDArray[np.int32]], routes: Routes | None
    ) -> tuple[NDArray[np.float32], RoutedRows | None, Span]:
        """Log-probs and experts of sequences under the current weights, see `MegatronTrainer.probe`; experts are
        returned by one copy of the model only."""
        begin = time.time()
        with phase(_log, f"log-probs of {len(sequences)} probe(s)"):
            log_probs, chosen = self._trainer.probe(sequences, routes)
        first = self._spec.layout.dp_rank(self._rank) == 0
        return log_probs, chosen if first else None, (begin, time.time())

    def hold(self, parts: Sequence[TrainerPart]) -> None:
        """Keep these parts of the state on the GPU and no others. A critic beside the policy is only loaded for
        training and saves."""
        with phase(_log, f"having {', '.join(parts) or 'nothing'} on the device"):
            self._trainer.hold(parts)
            if self._critic is not None:
                self._critic.hold(parts if "optimizer" in parts else ())

    def export_hf(self, directory: str) -> None:
        """Write the current weights as a Hugging Face checkpoint, or the trained adapter."""
        with phase(_log, f"exporting to {directory}"):
            self._trainer.export(Path(directory))

    def save(self, directory: str, extra: dict[str, Any], others: dict[str, FileSum] | None) -> None:
        """Write a resumable checkpoint, the critic's first.

        Args:
            others: files of other processes already in it; None: the checkpoint is not begun yet.
        """
        with phase(_log, f"saving {directory}"):
            if self._critic is not None:
                self._critic.save(critic_directory(Path(directory)), {})
            self._trainer.save(Path(directory), extra, others)

    def load(self, directory: str, new_run: bool) -> None:
        """Read a checkpoint; of another run if `new_run`. A critic missing in it keeps its initial state."""
        with phase(_log, f"loading {directory}"):
            self._trainer.load(Path(directory), new_run)
            if self._critic is not None and critic_directory(Path(directory)).is_dir():
                self._critic.load(critic_directory(Path(directory)), new_run)


class TrainerActor(RankActor, PolicyRank):
    """One trainer rank, and the rank of a critic that shares its GPU.

    Args:
        critic: None without one.
    """

    role = "trainer"

    def __init__(
        self, spec: PolicySpec, process: ActorProcess, rank: int, log_path: str, critic: CriticSpec | None
    ) -> None:
        RankActor.__init__(self, spec, process, rank, log_path)
        PolicyRank.__init__(self, spec, rank)
        self._critic_spec = critic

    def start(self, rendezvous: str) -> dict[str, Any]:
        """Build the model and optimizer; returns this rank's MoE layers."""
        from mslime.backends.megatron.step.critic import MegatronCritic
        from mslime.backends.megatron.step.trainer import MegatronTrainer
        from mslime.checks.user_functions import check_functions, trainer_functions

        spec, critic = self._spec, None
        if spec.train.task == "rl":  # this machine may lack a module that the driver's has
            check_functions(trainer_functions(spec.algorithm, spec.weights))
        with phase(_log, f"starting at {rendezvous}"):
            trainer = MegatronTrainer(spec, self._rank, self._world, rendezvous)
            if self._critic_spec is not None:
                critic = MegatronCritic(self._critic_spec, self._rank, self._world, None)
            self.adopt(trainer, critic, self._report)
        return {"moe_layer_ids": trainer.moe_layer_ids}


class CriticActor(RankActor):
    """One rank of a critic on separate GPUs."""

    role = "critic"

    def __init__(self, spec: CriticSpec, process: ActorProcess, rank: int, log_path: str) -> None:
        super().__init__(spec, process, rank, log_path)
        self._spec = spec

    def start(self, rendezvous: str) -> None:
        """Build the model and optimizer."""
        from mslime.backends.megatron.step.critic import MegatronCritic

        with phase(_log, f"starting at {rendezvous}"):
            self._critic = MegatronCritic(self._spec, self._rank, self._world, rendezvous)
        self._critic.on_micro_batch = self._report
        self._shards: list[TrainShard] = []

    def values(self, shards: Sequence[Any], step: int) -> list[Any]:
        """The values of these shards, one column each, for the following `train`."""
        self._step = step
        with phase(_log, f"step {step}: values of {len(shards)} shard(s)"):
            self._shards = self._critic.with_values(fetched(shards))
        return [shard.values for shard in self._shards]

    def train(self, returns: Sequence[Any]) -> dict[str, Any]:
        """One optimizer step per shard; returns metrics of each and the time span in which this rank was busy."""
        begin = time.time()
        updated = [replace(shard, returns=column) for shard, column in zip(self._shards, returns, strict=True)]
        with phase(_log, f"step {self._step}: training on {sum(len(s.tokens) for s in updated)} tokens"):
            metrics = self._critic.train(updated)
        self._shards = []
        return {"metrics": metrics, "span": (begin, time.time())}

    def save(self, directory: str) -> None:
        """Write a resumable checkpoint."""
        with phase(_log, f"saving {directory}"):
            self._critic.save(Path(directory), {})

    def load(self, directory: str, new_run: bool) -> None:
        """Read a checkpoint; of another run if `new_run`."""
        with phase(_log, f"loading {directory}"):
            self._critic.load(Path(directory), new_run)


class TrainerGroup:
    """All trainer ranks, and those of a critic on separate GPUs. Every method returns when all ranks are done."""

    def __init__(
        self, spec: PolicySpec, trainers: RankGroup, critics: RankGroup | None, check: Callable[[], None]
    ) -> None:
        """
        Args:
            spec: of the policy.
            check: called while waiting for a step or a weight update; raises to end the wait.
        """
        self._spec, self._limits, self._layout = spec, spec.deadlines, spec.layout
        self._trainers, self._critics, self._check = trainers, critics, check

    @classmethod
    def of_run(cls, config: RunConfig, cluster: Cluster, log_dir: Path, check: Callable[[], None]) -> Self:
        """The ranks of a run that trains one policy, not started yet."""
        spec, process, critics = policy_spec(config), cluster.process, None
        if config.critic_ranks:
            critics = RankGroup(CriticActor, critic_spec(config), process, cluster.critic_options, log_dir)
        beside = critic_spec(config) if config.shares_critic else None
        trainers = RankGroup(TrainerActor, spec, process, cluster.trainer_options, log_dir, beside)
        return cls(spec, trainers, critics, check)

    def start(self, on_wait: Callable[[], None] | None = None) -> list[tuple[int, ...]]:
        """Build the models on all ranks; returns every trainer rank's global MoE layer ids."""
        refs, logs = self._trainers.begin_start(on_wait), self._trainers.log_paths
        if self._critics is not None:
            refs, logs = refs | self._critics.begin_start(on_wait), logs | self._critics.log_paths
        started = gather(refs, "trainer start", self._limits.trainer_start_s, logs, on_wait)
        return [tuple(started[name]["moe_layer_ids"]) for name in self._trainers.log_paths]

    def train(
        self, shards: Sequence[Sequence[Any]], on_progress: Report, policy: bool, step: int, watched: Sequence[int] = ()
    ) -> StepResult:
        """One optimizer step for each element of `shards[rank]`.

        Args:
            policy: also train the policy, not only the critic.
            step: of the run, from 1 on, for the ranks' logs.
            watched: ids of sequences whose log-probs are returned.
        """
        if self._critics is not None:
            return self._train_apart(self._critics, shards, on_progress, policy, step, watched)
        deadline, poll = (
            self._limits.train_step_s,
            self._trainers.poller("progress", on_progress, self._check),
        )
        results = self._trainers.all(
            "train step", deadline, lambda a, r: a.train.remote(shards[r], policy, step, watched), poll
        )
        return self._trained(results)

    @staticmethod
    def _trained(results: Sequence[Mapping[str, Any]]) -> StepResult:
        """Combine the results of `PolicyRank.train` of all ranks."""
        return StepResult(results[0]["metrics"], _spans("trainer", results), _joined(results))

    def negative_log_likelihood(self, shards: Sequence[Sequence[Any]]) -> tuple[tuple[float, int], dict[str, Span]]:
        """((its sum over the trained tokens of all ranks' shards, how many those are), when each rank was busy)."""
        deadline, layout = self._limits.train_step_s, self._layout
        poll = self._trainers.poller("progress", lambda done, total: None, self._check)
        results = self._trainers.all(
            "held-out loss", deadline, lambda a, r: a.negative_log_likelihood.remote(shards[r]), poll
        )
        spans = {f"trainer {rank}": found[2] for rank, found in enumerate(results)}
        return over_data_parallel_ranks([found[:2] for found in results], layout), spans

    def _train_apart(
        self,
        critics: RankGroup,
        shards: Sequence[Sequence[Any]],
        on_progress: Report,
        policy: bool,
        step: int,
        watched: Sequence[int],
    ) -> StepResult:
        """Send values from the critic's ranks to the trainer's and returns back, rank by rank; then train both."""
        trainers, deadline = self._trainers, self._limits.train_step_s
        logs, poll = trainers.log_paths | critics.log_paths, trainers.poller("progress", on_progress, self._check)
        valued = critics.submit(lambda a, r: a.values.remote(shards[r], step))
        gather(valued, "train step: values", deadline, logs, poll)
        values = list(valued.values())
        prepared = trainers.submit(lambda a, r: a.prepare.remote(shards[r], step, values[r]))
        gather(prepared, "train step: log-probs", deadline, logs, poll)
        returns = list(prepared.values())
        learning = trainers.submit(lambda a, _: a.update.remote(policy, watched))
        learning |= critics.submit(lambda a, r: a.train.remote(returns[r]))
        found = gather(learning, "train step", deadline, logs, poll)
        of_policy, of_critic = ([found[name] for name in group.log_paths] for group in (trainers, critics))
        rows = [a | b for a, b in zip(of_policy[0]["metrics"], of_critic[0]["metrics"], strict=True)]
        return StepResult(rows, _spans("trainer", of_policy) | _spans("critic", of_critic), _joined(of_policy))

    def connect(self, engines: Sequence[Endpoint], group: str) -> None:
        """Connect to the engines in process groups whose names begin with `group`."""
        connected = list(engines)
        self._trainers.all("weight sync: connect", self._sync_deadline, lambda a, _: a.connect.remote(connected, group))

    def disconnect(self, deadline_s: float | None = None) -> None:
        """Disconnect from the engines. Raises TrainerError if a rank is gone, or does not answer in time.

        Args:
            deadline_s: default: the longest wait of a rank for a silent engine, plus a margin.
        """
        limit = self._sync_deadline if deadline_s is None else deadline_s
        self._trainers.all("weight sync: disconnect", limit, lambda a, _: a.disconnect.remote())

    def send_weights(self, version: int, verify: bool, on_progress: Report) -> tuple[SendReport, dict[str, Span]]:
        """Send all buckets; returns the report and every rank's busy span."""
        poll = self._trainers.poller("buckets", on_progress, self._check)
        results = self._trainers.all(
            "weight sync: send", self._sync_deadline, lambda a, _: a.send_weights.remote(version, verify), poll
        )
        return results[0][0], {f"trainer {rank}": span for rank, (_, span) in enumerate(results)}

    def write_adapter(self, directory: Path, verify: bool) -> tuple[dict[str, str], dict[str, Span]]:
        """Write the adapters for engines to read; (expected checksums of the tensors, every rank's busy span)."""
        found = self._trainers.all(
            "weight sync: write", self._sync_deadline, lambda a, _: a.write_adapter.remote(str(directory), verify),
            self._check,
        )  # fmt: skip
        return found[0][0], {f"trainer {rank}": span for rank, (_, span) in enumerate(found)}

    def probe(
        self, sequences: Sequence[NDArray[np.int32]], routes: Routes | None = None
    ) -> tuple[list[tuple[NDArray[np.float32], NDArray[np.int16] | None]], dict[str, Span]]:
        """(for each sequence under the current weights: [T] log-probs, [T, MoE layers, top-k] experts; every rank's
        busy span).

        Args:
            routes: of all sequences, for the routers to follow; experts are then not returned.
        """
        found = self._trainers.all(
            "weight sync: probe", self._sync_deadline, lambda a, _: a.probe.remote(sequences, routes), self._check
        )
        ends = np.cumsum([len(tokens) for tokens in sequences])
        chosen = joined_routes([part for _, part, _ in found if part is not None], int(ends[-1]))
        log_probs = np.split(found[0][0], ends[:-1])
        experts = [None] * len(sequences) if chosen is None else np.split(chosen, ends[:-1])
        spans = {f"trainer {rank}": span for rank, (_, _, span) in enumerate(found)}
        return list(zip(log_probs, experts, strict=True)), spans

    def hold(self, parts: Collection[TrainerPart]) -> None:
        """See `TrainerActor.hold`. A critic on separate GPUs stays loaded."""
        deadline, held = self._limits.checkpoint_s, sorted(parts)
        self._trainers.all("memory", deadline, lambda a, _: a.hold.remote(held))

    def export_hf(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint."""
        deadline = self._limits.checkpoint_s
        self._trainers.all("export", deadline, lambda a, _: a.export_hf.remote(str(directory)))

    def save(
        self, directory: Path, extra: dict[str, Any], others: dict[str, FileSum] | None, deadline_s: float | None = None
    ) -> None:
        """Write a resumable checkpoint: the critic's first, then the policy's, whose name marks the save as complete.

        Args:
            others: files that other processes have written into `checkpoints.saving_directory(directory)`, which they
                created; None: it is not created yet.
            deadline_s: default `deadlines.checkpoint_s`.
        """
        deadline, critic = deadline_s or self._limits.checkpoint_s, str(critic_directory(directory))
        if self._critics is not None:
            self._critics.all("checkpoint save", deadline, lambda a, _: a.save.remote(critic))
        self._trainers.all("checkpoint save", deadline, lambda a, _: a.save.remote(str(directory), extra, others))

    def rest(self, deadline_s: float) -> None:
        """Return when every rank has finished its earlier work. Raises TrainerError if one is gone or still busy."""
        for group in (self._trainers, self._critics):
            if group is not None:
                group.all("waiting for the trainer", deadline_s, lambda a, _: a.rest.remote())

    def load(self, directory: Path, new_run: bool) -> None:
        """Read a checkpoint; of another run if `new_run`, which restarts the learning-rate schedule."""
        deadline, critic = self._limits.checkpoint_s, critic_directory(directory)
        self._trainers.all("checkpoint load", deadline, lambda a, _: a.load.remote(str(directory), new_run))
        if self._critics is not None and critic.is_dir():
            self._critics.all("checkpoint load", deadline, lambda a, _: a.load.remote(str(critic), new_run))

    def stop(self) -> None:
        """Kill every rank."""
        for group in (self._trainers, self._critics):
            if group is not None:
                group.stop()

    @property
    def _sync_deadline(self) -> float:
        # The sender's own deadlines name bucket and engine; this one is for a rank that is gone.
        return self._limits.weight_sync_s + 60


def over_data_parallel_ranks(found: Sequence[tuple[float, int]], layout: ParallelLayout) -> tuple[float, int]:
    """Sums over data-parallel ranks of the (loss, tokens) that every rank reported for its shards."""
    own = {layout.dp_rank(rank): each for rank, each in enumerate(found)}  # ranks of one shard report the same
    return math.fsum(total for total, _ in own.values()), sum(tokens for _, tokens in own.values())


def _joined(results: Sequence[Mapping[str, Any]]) -> dict[int, NDArray[np.float32]]:
    """Log-probs by sequence, joined from the ranks that hold parts of it."""
    whole: dict[int, NDArray[np.float32]] = {}
    for number, part in (each for result in results for each in result["log_probs"].items()):
        whole[number] = np.where(np.isnan(part), whole[number], part) if number in whole else part
    return whole


def _spans(role: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Span]:
    return {f"{role} {rank}": result["span"] for rank, result in enumerate(results)}
