"""`MegatronTrainer`: one rank of the trainer, from its process groups to an optimizer step.

All ranks call the same methods in the same order: each of them is a collective. The trainer knows neither Ray nor the
engines; it is handed shards and gives back numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from mslime.algorithms.advantages_tokens import needs_policy_log_probs
from mslime.algorithms.corrections import needs_old_log_probs
from mslime.algorithms.statistics import finalise
from mslime.backends.megatron.advantages import with_token_advantages
from mslime.backends.megatron.checkpoint import load_checkpoint, save_checkpoint
from mslime.backends.megatron.metrics import normalising_scale, over_all_ranks, refuse_not_finite
from mslime.backends.megatron.model import build_chunks, load_hf_weights, wrap
from mslime.backends.megatron.naming import moe_layer_ids, named_local_params
from mslime.backends.megatron.optimizer import build_optimizer, follow_config, learning_rate
from mslime.backends.megatron.parallel import Place, start_process_groups, stop_process_groups
from mslime.backends.megatron.reference import ReferencePolicy
from mslime.backends.megatron.routing import Routing
from mslime.backends.megatron.settings import (
    ddp_config,
    device_of,
    engine_dtype,
    optimizer_config,
    transformer_config,
)
from mslime.backends.megatron.step import OnMicroBatch, StepRunner
from mslime.config.schema import RunConfig
from mslime.convert.families import get_family, read_hf_config
from mslime.data.shard import TrainShard
from mslime.weights.groups import make_groups
from mslime.weights.sync import SyncOptions, WeightSender


class MegatronTrainer:
    """One trainer rank.

    Attributes:
        moe_layer_ids: global ids of this pipeline stage's MoE layers, whose routes its shards must carry.
        step: optimizer steps taken.
        on_micro_batch: called with (done, in all) during `train`; may be replaced.
        chunks: the model chunks without wrappers, in virtual-stage order.
        wrapped: the same in their data-parallel wrappers.
        transformer, optimizer, schedule: megatron-core's.
    """

    def __init__(self, config: RunConfig, rank: int, world_size: int, init_method: str) -> None:
        """Join the other ranks, build this rank's part of the model and read its weights.

        Args:
            init_method: where the ranks meet, for example `tcp://host:port`.

        Raises:
            ConfigError: a setting that this trainer cannot follow.
            CheckpointError: the checkpoint is not complete or does not fit.
            TrainerError: the ranks did not find each other.
        """
        self.config = config
        self.device = device_of(config, rank)
        self.hf_config = read_hf_config(config.model.path)
        self.model = get_family(self.hf_config).model_fields(self.hf_config)
        self.transformer = transformer = transformer_config(config, self.hf_config, self.device)
        start_process_groups(config, rank, world_size, init_method, self.device)
        self.place = Place.here(transformer.sequence_parallel)
        self.chunks = build_chunks(transformer, self.model, self.device)
        self.moe_layer_ids = moe_layer_ids(self.chunks, self.model.moe_layer_ids)
        self._reference: ReferencePolicy | None = None
        if config.train.task == "rl" and config.algorithm.kl_coef > 0:
            directory = config.model.reference_path or config.model.path
            self._reference = ReferencePolicy(self.chunks, self.hf_config, directory)
        self._teacher: ReferencePolicy | None = None
        if config.train.task == "rl" and config.model.teacher_path is not None:
            self._teacher = ReferencePolicy(self.chunks, self.hf_config, config.model.teacher_path)
        load_hf_weights(self.chunks, self.hf_config, config.model.path)
        routed = config.train.task == "rl" and bool(self.model.num_experts)
        self.routing = Routing.attach(
            config.train.replay if routed else "off", self.chunks, self.model, self.place, self.device
        )
        self.wrapped = wrap(self.chunks, transformer, ddp_config(config))
        self.optimizer, self.schedule = build_optimizer(self.wrapped, optimizer_config(config, self.device), config)
        transformer.finalize_model_grads_func = finalize_model_grads
        transformer.grad_scale_func = self.optimizer.scale_loss
        if config.megatron.overlap_grad_reduce:
            no_sync: Any = [chunk.no_sync for chunk in self.wrapped]  # interleaved stages want the list
            transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.runner = StepRunner(self.wrapped, transformer, config, self.place, self.device, self.model.vocab_size)
        self.step = 0
        self.on_micro_batch: OnMicroBatch | None = None

    def train(self, shards: Sequence[TrainShard]) -> list[dict[str, float]]:
        """One optimizer step for each shard of this data-parallel rank, in order.

        Returns:
            Metrics of each step, equal on all ranks.

        Raises:
            TrainerError: the loss or the gradient is not finite.
            EngineError: the rollout's routes cannot be replayed.
        """
        prepared = [self._with_log_probs(shard, index, len(shards)) for index, shard in enumerate(shards)]
        found: dict[str, float] = {}
        if self.config.train.task == "rl":
            algorithm, group = self.config.algorithm, self.place.dp_group
            prepared, found = with_token_advantages(prepared, algorithm, self.device, group)
        return [found | self._optimizer_step(shard, index) for index, shard in enumerate(prepared)]

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
            other = self._reference if policy == "reference" else self._teacher
            assert other is not None, "a reference is loaded when algorithm.kl_coef > 0, a teacher from its path"
            assert not replay, f"the {policy} policy routes by itself"
            with self._weights_in_place(), other.swapped_in():
                return self.runner.log_probs(shard, None)
        assert not replay or self.routing.mode == "r3", f"train.replay is {self.routing.mode}"
        with self._weights_in_place():
            if not replay:
                return self.runner.log_probs(shard, None)
            with self.routing.old_log_prob_pass(shard, -1) as routes:
                return self.runner.log_probs(shard, routes)

    def save(self, directory: Path, extra: dict[str, Any]) -> None:
        """Write a checkpoint that any layout resumes from (`checkpoint.save_checkpoint`); on all ranks."""
        self.sync_params()
        layout = self.config.layout.describe()
        save_checkpoint(directory, self.chunks, self.optimizer, self.schedule, layout=layout, extra=extra)

    def load(self, directory: Path, new_run: bool = False) -> dict[str, Any]:
        """Continue from a checkpoint (`checkpoint.load_checkpoint`); returns its `extra`; on all ranks.

        Args:
            new_run: the checkpoint is another run's: take weights and optimizer state, begin the schedule anew.
        """
        layout = self.config.layout.describe()
        extra = load_checkpoint(directory, self.chunks, self.optimizer, self.schedule, layout=layout)
        follow_config(self.optimizer, self.schedule, self.config.train, restart=new_run)
        self.step = self.schedule.num_steps
        return extra

    def named_local_params(self) -> Iterator[tuple[str, Tensor]]:
        """(canonical name, local tensor) of this rank's parameters as of the last optimizer step, tied copies left out.

        Waits for parameters that are still being gathered: call it on all ranks.
        """
        self.sync_params()
        return named_local_params(self.chunks, tied_copies=False)

    def sync_params(self) -> None:
        """Complete the parameter gathering that overlaps with the next forward pass; without it weights are stale."""
        if self.config.megatron.overlap_param_gather:
            for chunk in self.wrapped:
                chunk.start_param_sync(force_sync=True)

    def weight_sender(self, on_bucket: Callable[[int, int], None] | None = None) -> WeightSender:
        """This rank's part in weight syncs and Hugging Face exports; call it once.

        Args:
            on_bucket: called on stage leaders with (buckets sent, buckets of the stage).
        """
        config, backend = self.config, dist.get_backend()
        options = SyncOptions(
            dtype=engine_dtype(config, self.hf_config),
            bucket_bytes=int(config.weights.bucket_mib * (1 << 20)),
            backend=backend,
            deadline_s=config.deadlines.weight_sync_s,
            kv_heads=self.transformer.num_query_groups or self.transformer.num_attention_heads,
            engine_float32=get_family(self.hf_config).engine_float32,
            name=config.name,
        )
        groups = make_groups(config.layout, backend, config.deadlines.weight_sync_s)
        rules = get_family(self.hf_config).rules(self.hf_config)
        return WeightSender(rules, groups, self.named_local_params, options, on_bucket)

    def close(self) -> None:
        """Leave the process groups."""
        stop_process_groups()

    @contextmanager
    def _weights_in_place(self) -> Iterator[None]:
        """Parameters are complete and nothing gathers into them inside: for passes outside training."""
        if not self.config.megatron.overlap_param_gather:
            yield
            return
        for chunk in self.wrapped:
            chunk.disable_forward_pre_hook(param_sync=True)
        try:
            yield
        finally:
            for chunk in self.wrapped:
                chunk.enable_forward_pre_hook()

    def _with_log_probs(self, shard: TrainShard, index: int, steps: int) -> TrainShard:
        """The shard with what must be known before the first gradient: old, reference and teacher log-probs."""
        algorithm = self.config.algorithm
        if self.config.train.task == "sft":
            return shard
        always = algorithm.old_log_probs == "always" or self.routing.mode == "r2"
        always = always or (needs_policy_log_probs(algorithm) and algorithm.correction.reference == "recompute")
        if always or needs_old_log_probs(algorithm.correction, steps):
            with self._weights_in_place(), self.routing.old_log_prob_pass(shard, index) as routes:
                shard = replace(shard, old_log_probs=self.runner.log_probs(shard, routes).numpy())
        if self._reference is not None:
            shard = replace(shard, reference_log_probs=self.log_probs(shard, "reference").numpy())
        if self._teacher is not None:
            shard = replace(shard, teacher_log_probs=self.log_probs(shard, "teacher").numpy())
        return shard

    def _optimizer_step(self, shard: TrainShard, index: int) -> dict[str, float]:
        begin = time.perf_counter()
        self.step += 1
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self.routing.gradient_pass(shard, index) as routes:
            own = self.runner.loss_and_gradients(shard, routes, self._weight_scale(shard), self.on_micro_batch)
        own_loss = finalise(own)["loss/total"]
        metrics = finalise(over_all_ranks(own))
        refuse_not_finite("loss", metrics["loss/total"], self.step, own_loss, self.place.rank, self.device)
        self.schedule.step(1)
        _, norm, _ = cast("tuple[bool, float, object]", self.optimizer.step())
        grad_norm = float(norm)
        own_norm = grad_norm if math.isfinite(grad_norm) else self._own_gradient_size()
        refuse_not_finite("grad_norm", grad_norm, self.step, own_norm, self.place.rank, self.device)
        report = self.routing.report(shard)
        return {
            **metrics,
            "grad_norm": grad_norm,
            "lr": learning_rate(self.optimizer),
            **(report.metrics() if report is not None else {}),
            **self._speed(shard, time.perf_counter() - begin),
        }

    def _weight_scale(self, shard: TrainShard) -> float:
        """What the off-policy correction's weights are multiplied by in this step."""
        if self.config.train.task == "sft":
            return 1.0
        return normalising_scale(shard, self.config.algorithm, self.device, self.place.dp_group)

    def _own_gradient_size(self) -> float:
        """Sum of |gradient| of this rank: not finite when one of its gradients is not."""
        return sum(
            float(p.main_grad.abs().sum())  # type: ignore[attr-defined]
            for chunk in self.wrapped
            for p in chunk.parameters()
        )

    def _speed(self, shard: TrainShard, seconds: float) -> dict[str, float]:
        """Seconds of the slowest rank, and tokens of all data-parallel ranks over them."""
        slowest = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        tokens = torch.tensor(float(len(shard.tokens)), dtype=torch.float64, device=self.device)
        dist.all_reduce(tokens, group=self.place.dp_group)
        return {
            "perf/train_seconds": float(slowest),
            "perf/train_tokens_per_s": float(tokens / slowest),
        }
