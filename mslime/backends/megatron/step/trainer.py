"""`MegatronTrainer`: one rank of the policy's trainer, from its process groups to an optimizer step.

All ranks call the same methods in the same order: each of them is a collective. The trainer depends on neither Ray nor
the engines; it takes shards and returns metrics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mslime.algorithms.advantages_tokens import needs_policy_log_probs
from mslime.algorithms.corrections import needs_old_log_probs
from mslime.algorithms.statistics import LossStatistics
from mslime.backends.megatron.model.chunks import named_factors, named_local_params
from mslime.backends.megatron.model.lora_layers import (
    MergedWeights,
    StoredAdapters,
    adapters_off,
    check_same_adapters,
    trained_adapters,
)
from mslime.backends.megatron.parallel import ParallelState, stop_process_groups
from mslime.backends.megatron.replay.routing_replay import Routing
from mslime.backends.megatron.step.base_model import Base
from mslime.backends.megatron.step.pipeline import OnMicroBatch, StepRunner
from mslime.backends.megatron.step.reductions import normalising_scale, with_token_advantages
from mslime.backends.megatron.step.trained_model import TrainedModel
from mslime.config.lora import LORA_KEY
from mslime.config.model_facts import export_dtype, served_dtype, trainer_dtype
from mslime.config.resolved import PolicySpec
from mslime.convert.encoding import encoded_weights
from mslime.convert.families import get_family
from mslime.convert.hf import HFCheckpoint
from mslime.convert.peft import write_adapter
from mslime.convert.quantised import check_quantisation
from mslime.data.checkpoints import FileSum
from mslime.data.probe import RoutedRows, shard_of
from mslime.data.routes import Routes
from mslime.data.shard import TrainShard
from mslime.logs import phase
from mslime.weights.groups import make_groups
from mslime.weights.sync import SyncOptions, WeightSender
from mslime.weights.transport import EnginePort
from mslime.weights.weight_plan import Senders

# Log-probs of a few sequences as the trainer computed them, for people to read beside the sampler's.
#
# They are copied from a step's existing passes, so they cost no computation or communication: from the pass before the
# first update if there is one, else from the gradient pass. A rank of the last stage has those of its own rows; the
# ranks of a context-parallel group together have all.


@dataclass
class WatchedSequences:
    """Sequences whose log-probs are recorded, and this rank's values.

    Attributes:
        parallel: this rank's parallel state.
        sequences: ids of the step's sequences (`TrainShard.sequence_ids`).
        found: by id, [T] float32; NaN for tokens that another context-parallel rank has, and for first tokens.
    """

    parallel: ParallelState
    sequences: frozenset[int] = frozenset()
    found: dict[int, NDArray[np.float32]] = field(default_factory=dict[int, NDArray[np.float32]])

    def begin(self, sequences: Iterable[int]) -> None:
        """Watch these sequences, and drop the values of earlier ones."""
        self.sequences, self.found = frozenset(sequences), {}

    def column(self, shard: TrainShard, device: torch.device) -> Tensor | None:
        """[N] float32 buffer for the shard's log-probs in the gradient pass; None if none are recorded."""
        if shard.old_log_probs is not None or not self._held(shard):
            return None
        return torch.full((len(shard.tokens),), torch.nan, device=device)

    def keep(self, shard: TrainShard, column: Tensor | None) -> None:
        """Record the shard's log-probs: its old ones, or `column` after the gradient pass."""
        known = shard.old_log_probs if column is None else column.cpu().numpy()
        if known is None:
            return
        spans = shard.spans()
        for place in self._held(shard):
            start, stop = spans[place]
            self.found[int(shard.sequence_ids[place])] = known[start:stop].copy()

    def _held(self, shard: TrainShard) -> list[int]:
        """Positions of the watched sequences in the shard; none on ranks that leave them to another rank."""
        if not self.parallel.counts:
            return []
        return [place for place, number in enumerate(shard.sequence_ids.tolist()) if number in self.sequences]


_log = logging.getLogger(__name__)


class MegatronTrainer(TrainedModel):
    """One trainer rank.

    Attributes:
        spec: settings of the policy.
        base: the model of this rank, which trainers of other adapters may share.
        adapters: trained instead of the model; None without.
        placed: the same in their layers; None without.
        moe_layer_ids: global ids of this pipeline stage's MoE layers, whose routes its shards must carry.
        on_micro_batch: called with (done, in all) during `update`; may be replaced.
        watch: sequences whose log-probs are kept during `update`.
    """

    spec: PolicySpec

    def __init__(self, spec: PolicySpec, rank: int, world_size: int, init_method: str) -> None:
        """Join the other ranks, build this rank's part of the model and read its weights.

        Args:
            init_method: address of the rendezvous, for example `tcp://host:port`.

        Raises:
            ConfigError: a setting that this trainer does not support.
            CheckpointError: the checkpoint is incomplete or does not fit.
            TrainerError: the ranks could not connect to each other.
        """
        self._build(spec, Base(spec, rank, world_size, init_method))

    @classmethod
    def on(cls, base: Base, spec: PolicySpec) -> Self:
        """A trainer of adapters on a base shared with other trainers; the base has no adapters in it at return.

        Raises:
            ConfigError: a target that the model does not have, or that this layout cannot split.
            CheckpointError: the adapter to start from is of another model, rank, scale or targets.
        """
        trainer = cls.__new__(cls)
        trainer._build(spec, base)
        return trainer

    def _build(self, spec: PolicySpec, base: Base) -> None:
        self.base, self.hf_config, self.model = base, base.hf_config, base.model
        self.moe_layer_ids = base.routing_layers
        trained = trained_adapters(spec, base.hf_config, base.chunks, base.transformer)
        self.adapters, self.placed = trained or (None, None)
        stored = [StoredAdapters(chunk, self.adapters) for chunk in base.chunks] if self.adapters else None
        mode = spec.replay if base.model.num_experts else "off"
        self.routing = Routing(mode, base.replay, base.model, base.parallel, base.device, spec.train.replay_max_age)
        with ExitStack() as undo, phase(_log, "building the optimizer"):
            if self.placed is not None:
                undo.callback(self.placed.take_out)
            super().__init__(spec, base.chunks, base.transformer, base.device, stored)
            undo.pop_all()
        self.runner = StepRunner(
            self.wrapped, base.transformer, spec.train.packed, base.parallel, base.device, spec, self.model.vocab_size
        )
        self._factors: tuple[tuple[str, Tensor], ...] = ()
        self.on_micro_batch: OnMicroBatch | None = None
        self.watch = WatchedSequences(base.parallel)

    def put_in(self) -> None:
        """Put this trainer's adapters into the base, and make megatron-core's schedule use this trainer."""
        assert self.placed is not None
        self.placed.put_in()
        self.serve_schedule()
        if self.spec.megatron.overlap_param_gather:
            for chunk in self.wrapped:
                chunk.enable_forward_pre_hook()

    def take_out(self) -> None:
        """Remove this trainer's adapters from the base."""
        assert self.placed is not None
        if self.spec.megatron.overlap_param_gather:
            # Hooks of one adapter's wrappers are on every layer of the base.
            for chunk in self.wrapped:
                chunk.disable_forward_pre_hook(param_sync=True)
        self.placed.take_out()
        # Otherwise they would keep a freed adapter's optimizer and wrappers alive.
        self.transformer.grad_scale_func = self.transformer.no_sync_func = None

    def save(self, directory: Path, extra: dict[str, Any], others: Mapping[str, FileSum] | None = None) -> None:
        """Write a checkpoint (`TrainedModel.save`); with adapters, of the adapters alone."""
        super().save(directory, {**extra, LORA_KEY: self.spec.lora.describe()} if self.adapters else extra, others)

    def load(self, directory: Path, new_run: bool = False) -> dict[str, Any]:
        """Load a checkpoint (`TrainedModel.load`).

        Raises:
            CheckpointError: it has other adapters, or a whole model if adapters are trained, or adapters if not.
        """
        check_same_adapters(directory, self.spec.lora)
        return super().load(directory, new_run)

    def train(self, shards: Sequence[TrainShard]) -> list[dict[str, float]]:
        """`prepare` and `update` in one."""
        prepared, found = self.prepare(shards)
        return [found | metrics for metrics in self.update(prepared)]

    def prepare(self, shards: Sequence[TrainShard]) -> tuple[list[TrainShard], dict[str, float]]:
        """Complete the shards before the first gradient; returns them, and metrics equal on all ranks.

        Args:
            shards: of this data-parallel rank, one for each optimizer step, in order; with a critic's values for gae.

        Raises:
            EngineError: the rollout's routes cannot be replayed.
        """
        if self.spec.train.task == "sft":
            return list(shards), {}
        begin = time.perf_counter()
        shards = [self._with_old_log_probs(shard, index, len(shards)) for index, shard in enumerate(shards)]
        if self.spec.reference is not None:
            log_probs = self._other_log_probs("reference", shards)
            shards = [replace(s, reference_log_probs=p) for s, p in zip(shards, log_probs, strict=True)]
        if self.base.teacher is not None:
            log_probs = self._other_log_probs("teacher", shards)
            shards = [replace(s, teacher_log_probs=p) for s, p in zip(shards, log_probs, strict=True)]
        prepared, found = with_token_advantages(shards, self.spec.algorithm, self.device, self.parallel.dp_group)
        return prepared, found | {"perf/log_prob_seconds": self.slowest(time.perf_counter() - begin)}

    def update(self, prepared: Sequence[TrainShard]) -> list[dict[str, float]]:
        """One optimizer step for each shard of `prepare`, in order.

        Returns:
            Metrics of each step, equal on all ranks.

        Raises:
            TrainerError: the loss or the gradient is not finite.
            EngineError: the rollout's routes cannot be replayed.
        """
        return [self._update(shard, index) for index, shard in enumerate(prepared)]

    def log_probs(
        self, shard: TrainShard, policy: Literal["actor", "reference", "teacher"] = "actor", replay: bool = False
    ) -> Tensor:
        """log pi(token | before) of every token of the shard: float32 [N] on the CPU, 0 for first tokens.

        Args:
            policy: the weights being trained, the reference's (needs algorithm.kl_coef > 0) or the teacher's (needs
                model.teacher_path).
            replay: route as the rollout did (r3) instead of naturally.
        """
        if policy != "actor":
            assert not replay, f"the {policy} policy routes by itself"
            return torch.from_numpy(self._other_log_probs(policy, [shard])[0])
        assert not replay or self.routing.mode == "r3", f"train.replay is {self.routing.mode}"
        with self.weights_in_place():
            if not replay:
                return self.runner.log_probs(shard, None)
            with self.routing.old_log_prob_pass(shard, -1) as routes:
                return self.runner.log_probs(shard, routes)

    def negative_log_likelihood(self, shards: Sequence[TrainShard]) -> tuple[float, int]:
        """(sum over these shards' trained tokens of -log pi, how many those are): of this data-parallel rank.

        A forward pass alone: weights, gradients, optimizer and random numbers stay unchanged.
        """
        found = [(-self.log_probs(shard).double()[torch.from_numpy(shard.loss_mask.copy())]) for shard in shards]
        return float(sum(part.sum() for part in found)), sum(len(part) for part in found)

    def probe(
        self, sequences: Sequence[NDArray[np.int32]], routes: Routes | None = None
    ) -> tuple[NDArray[np.float32], RoutedRows | None]:
        """Log-probs of all tokens at temperature 1, [N] float32, and the experts chosen by this rank's routers.

        The experts are those of the tokens on this rank, or None if routes are not replayed.

        Args:
            routes: of all tokens and layers, which the routers follow instead (r3); no experts are returned then.
        """
        if routes is not None:
            assert self.routing.mode == "r3", f"train.replay is {self.routing.mode}"
            shard = shard_of(sequences, routes)
            with self.weights_in_place(), self.routing.old_log_prob_pass(shard, -1) as replayed:
                return self.runner.log_probs(shard, replayed, temperature=1.0).numpy(), None
        with self.weights_in_place(), self.routing.observed_pass() as (hooks, chosen):
            log_probs = self.runner.log_probs(shard_of(sequences), hooks, temperature=1.0)
            return log_probs.numpy(), chosen()

    def named_local_params(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, local tensor) of this rank's parameters as of the last optimizer step, without tied copies.

        It waits for parameters that are still being gathered: call it on all ranks.
        """
        self.sync_params()
        return named_local_params(self.chunks, tied_copies=False)

    def named_factors(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, local tensor) of this rank's adapters as of the last optimizer step; on all ranks."""
        self.sync_params()
        if not self._factors:  # listing the names of thousands takes longer than a sync of them
            self._factors = tuple(named_factors(self.chunks))
        return iter(self._factors)

    def weight_sender(
        self, engine_port: EnginePort | None = None, on_bucket: Callable[[int, int], None] | None = None, *,
        stacked: bool = True,
    ) -> WeightSender:  # fmt: skip
        """This rank's part in weight syncs and Hugging Face exports; call it once.

        Args:
            engine_port: the engines; None if weights are only exported.
            on_bucket: called on senders with (buckets filled, buckets that it sends).
            stacked: `write_adapter` writes one tensor for all experts of a layer, which SGLang loads many times faster;
                else peft's format, which other software reads, too.
        """
        spec, backend, exported = self.spec, dist.get_backend(), export_dtype(self.hf_config)
        cpu, dtype, encoded = self.device.type == "cpu", exported, None
        if spec.train.task == "rl":
            on_gpu = trainer_dtype(spec.megatron, cpu=False)
            dtype = served_dtype(spec.asked_engine_dtype, self.hf_config, spec.checkpoint, on_gpu, cpu=cpu)
        if spec.as_stored and check_quantisation(self.hf_config) is not None:
            encoded = encoded_weights(HFCheckpoint(spec.checkpoint), self.hf_config)  # reads the headers of its files
        rules = get_family(self.hf_config).rules(self.hf_config)
        options = SyncOptions(
            dtype=dtype,
            export_dtype=exported,
            bucket_bytes=int(spec.weights.bucket_mib * (1 << 20)),
            backend=backend,
            deadline_s=spec.deadlines.weight_sync_s,
            name=spec.name,
            transport=spec.weights.transport,
            directory=spec.weights.directory,
            settings=spec.weights.own_settings,
        )
        senders = Senders.at_most(spec.layout, spec.weights.senders)
        groups = self.base.groups or make_groups(senders, backend, spec.deadlines.weight_sync_s)
        self.base.groups = groups
        whole = replace(options, encoded=encoded)

        def as_served(params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            return params if self.adapters is None else MergedWeights(self.chunks, params)

        sender = WeightSender(rules, groups, self.named_local_params, whole, engine_port, on_bucket, values=as_served)
        self._export = sender.export
        if (adapters := self.adapters) is not None:
            own = replace(options, dtype=trainer_dtype(spec.megatron, cpu=cpu), export_dtype=None)
            files = adapters.as_files
            finish = partial(write_adapter, files)
            self._export = WeightSender(files.table, groups, self.named_factors, own, finish=finish).export
            # SGLang divides alpha by the rank, even if the file sets rank-stabilised scaling.
            served_adapters = files.with_plain_scale()
            served_adapters = served_adapters.with_stacked_experts() if stacked else served_adapters
            finish = partial(write_adapter, served_adapters)
            served = replace(options, export_dtype=None)
            self.adapter_sender = WeightSender(
                served_adapters.table, groups, self.named_factors, served, engine_port, finish=finish
            )
        return sender

    def write_adapter(self, directory: Path, verify: bool) -> dict[str, str]:
        """Write the adapters for engines to read, in their dtype; a collective.

        `weight_sender` comes first.

        Args:
            verify: also compute the checksums that the engines must return.

        Returns:
            Checksums by name of the tensor; empty without `verify`.

        Raises:
            WeightSyncError: on every rank, if it cannot be written.
        """
        self.adapter_sender.export(directory, self.spec.checkpoint)
        return self.adapter_sender.sums() if verify else {}

    def export(self, directory: Path) -> None:
        """Write the trained weights: a Hugging Face checkpoint, or an adapter in peft's format; a collective.

        `weight_sender` comes first. Raises WeightSyncError on every rank if it cannot be written.
        """
        self._export(directory, self.spec.checkpoint)

    def close(self) -> None:
        stop_process_groups()

    def _with_old_log_probs(self, shard: TrainShard, index: int, steps: int) -> TrainShard:
        """The shard with its old log-probs, if they are needed."""
        algorithm = self.spec.algorithm
        always = algorithm.old_log_probs == "always" or self.routing.mode == "r2"
        always = always or (needs_policy_log_probs(algorithm) and algorithm.correction.reference == "recompute")
        if always or needs_old_log_probs(algorithm.correction, steps):
            with self.weights_in_place(), self.routing.old_log_prob_pass(shard, index) as routes:
                return replace(shard, old_log_probs=self.runner.log_probs(shard, routes).numpy())
        return shard

    def _other_log_probs(
        self, policy: Literal["reference", "teacher"], shards: Sequence[TrainShard]
    ) -> list[NDArray[np.float32]]:
        """`log_probs` of each shard by another policy, whose weights are copied to the device once for all shards."""
        if policy == "reference" and self.spec.base_is_reference:  # the frozen base without adapters
            weights = nullcontext()
        else:
            other = self.base.reference if policy == "reference" else self.base.teacher
            assert other is not None, "a reference is loaded when algorithm.kl_coef > 0, a teacher from its path"
            weights = other.swapped_in()
        with self.weights_in_place(), adapters_off(self.chunks), weights:
            return [self.runner.log_probs(shard, None).numpy() for shard in shards]

    def _update(self, shard: TrainShard, index: int) -> dict[str, float]:
        seen = self.watch.column(shard, self.device)
        loss = partial(self.runner.loss, weight_scale=self.weight_scale(shard), seen=seen)

        def add_gradients() -> LossStatistics:
            with self.routing.gradient_pass(shard, index) as routes:
                return self.runner.add_gradients(shard, loss, routes, self.on_micro_batch)

        return self.optimizer_step(add_gradients, len(shard.tokens)) | self.seen(shard, seen)

    def weight_scale(self, shard: TrainShard) -> float:
        """The factor on the correction's weights (`normalising_scale`). A collective if normalisation is configured."""
        if self.spec.train.task != "rl":
            return 1.0
        return normalising_scale(shard, self.spec.algorithm, self.device, self.parallel.dp_group)

    def seen(self, shard: TrainShard, column: Tensor | None) -> dict[str, float]:
        """Record the watched sequences of a gradient pass; returns metrics of its replay. A collective.

        Args:
            column: see `WatchedSequences.keep`.
        """
        self.watch.keep(shard, column)
        report = self.routing.report(shard)
        return report.metrics() if report is not None else {}
