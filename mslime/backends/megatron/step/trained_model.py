"""A model that is trained on this rank, policy or critic: its wrappers, optimizer, schedule and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from mslime.algorithms.statistics import LossStatistics, finalise
from mslime.backends.megatron.checkpoint import load_checkpoint, save_checkpoint
from mslime.backends.megatron.model.chunks import wrap
from mslime.backends.megatron.model.settings import ddp_config, optimizer_config
from mslime.backends.megatron.parallel import ParallelState
from mslime.backends.megatron.step.asleep import DeviceState
from mslime.backends.megatron.step.metrics import over_all_ranks, refuse_not_finite
from mslime.backends.megatron.step.optimizer import build_optimizer, follow_config, learning_rate
from mslime.config.choices import TrainerPart
from mslime.config.fp8 import fp8_rows
from mslime.config.training import TrainingSpec
from mslime.data.checksums import FileSum


class TrainedModel:
    """Model chunks whose weights are set, and what trains them together with the other ranks.

    Attributes:
        spec: how this model is built and trained.
        chunks: the model chunks without wrappers, in virtual-stage order.
        wrapped: the same in their data-parallel wrappers.
        transformer, optimizer, schedule: megatron-core's.
        parallel, device: where this rank stands, and where its tensors live.
        step: optimizer steps taken.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        chunks: Sequence[GPTModel],
        transformer: TransformerConfig,
        device: torch.device,
        stored: Sequence[torch.nn.Module] | None = None,
    ) -> None:
        """
        Args:
            stored: what checkpoints hold of each chunk; None: the chunk.

        Raises:
            ConfigError: megatron-core refuses a setting of the optimizer.
        """
        self.spec, self.chunks, self.transformer, self.device = spec, list(chunks), transformer, device
        self._stored = self.chunks if stored is None else list(stored)
        self.parallel = ParallelState.here(transformer.sequence_parallel, fp8_rows(spec.fp8))
        self.wrapped = wrap(self.chunks, transformer, ddp_config(spec.megatron))
        self.optimizer, self.schedule = build_optimizer(
            self.wrapped, optimizer_config(spec.train, spec.megatron, device), spec.train, spec.steps
        )
        transformer.finalize_model_grads_func = finalize_model_grads
        transformer.grad_scale_func = self.optimizer.scale_loss
        if spec.megatron.overlap_grad_reduce:
            no_sync: Any = [chunk.no_sync for chunk in self.wrapped]  # interleaved stages want the list
            transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.step = 0
        self._state = DeviceState(self.wrapped, self.optimizer, device, spec.asleep)

    def hold(self, parts: Collection[TrainerPart]) -> None:
        """Have these parts of the state on the device and no others, for engines that share it. A collective.

        Raises:
            TrainerError: there is no room for the others elsewhere.
        """
        if "weights" in self._state.here and "weights" not in parts:
            self.sync_params()
        self._state.hold(parts)

    def optimizer_step(self, add_gradients: Callable[[], LossStatistics], tokens: int) -> dict[str, float]:
        """One optimizer step on the gradients that `add_gradients` leaves in the buffers. A collective.

        Args:
            add_gradients: returns this rank's share of the loss statistics.
            tokens: of this data-parallel rank's shard, for the speed.

        Returns:
            Metrics, equal on all ranks.

        Raises:
            TrainerError: the loss or the gradient is not finite.
        """
        begin = time.perf_counter()
        self.step += 1
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        own = add_gradients()
        own_loss = finalise(own)["loss/total"]
        metrics = finalise(over_all_ranks(own))
        refuse_not_finite("loss", metrics["loss/total"], self.step, own_loss, self.parallel.rank, self.device)
        self.schedule.step(1)
        _, norm, _ = cast("tuple[bool, float, object]", self.optimizer.step())
        grad_norm = float(norm)
        own_norm = grad_norm if math.isfinite(grad_norm) else self._own_gradient_size()
        refuse_not_finite("grad_norm", grad_norm, self.step, own_norm, self.parallel.rank, self.device)
        return {
            **metrics,
            "grad_norm": grad_norm,
            "lr": learning_rate(self.optimizer),
            **self._speed(tokens, time.perf_counter() - begin),
        }

    def save(self, directory: Path, extra: dict[str, Any], others: Mapping[str, FileSum] | None = None) -> None:
        """Write a checkpoint that any layout resumes from (`checkpoint.save_checkpoint`); on all ranks."""
        self.sync_params()
        layout = self.spec.layout.describe()
        save_checkpoint(
            directory, self._stored, self.optimizer, self.schedule, layout=layout, extra=extra, others=others
        )

    def load(self, directory: Path, new_run: bool = False) -> dict[str, Any]:
        """Continue from a checkpoint (`checkpoint.load_checkpoint`); returns its `extra`; on all ranks.

        Args:
            new_run: the checkpoint is another run's: take weights and optimizer state, begin the schedule anew.
        """
        layout = self.spec.layout.describe()
        extra = load_checkpoint(directory, self._stored, self.optimizer, self.schedule, layout=layout)
        follow_config(self.optimizer, self.schedule, self.spec.train, restart=new_run)
        self.step = self.schedule.num_steps
        self._state.changed()
        return extra

    def sync_params(self) -> None:
        """Complete the parameter gathering that overlaps with the next forward pass; without it weights are stale."""
        if self.spec.megatron.overlap_param_gather:
            for chunk in self.wrapped:
                chunk.start_param_sync(force_sync=True)

    @contextmanager
    def weights_in_place(self) -> Iterator[None]:
        """Parameters are complete and nothing gathers into them inside: for passes outside training."""
        if not self.spec.megatron.overlap_param_gather:
            yield
            return
        for chunk in self.wrapped:
            chunk.disable_forward_pre_hook(param_sync=True)
        try:
            yield
        finally:
            for chunk in self.wrapped:
                chunk.enable_forward_pre_hook()

    def slowest(self, seconds: float) -> float:
        """The largest of all ranks' seconds. A collective."""
        largest = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)

    def _own_gradient_size(self) -> float:
        """Sum of |gradient| of this rank: not finite when one of its gradients is not."""
        return sum(
            float(p.main_grad.abs().sum())  # type: ignore[attr-defined]
            for chunk in self.wrapped
            for p in chunk.parameters()
            if p.requires_grad
        )

    def _speed(self, tokens: int, seconds: float) -> dict[str, float]:
        """Seconds of the slowest rank, and tokens of all data-parallel ranks over them."""
        slowest = self.slowest(seconds)
        all_tokens = torch.tensor(float(tokens), dtype=torch.float64, device=self.device)
        dist.all_reduce(all_tokens, group=self.parallel.dp_group)
        return {
            "perf/train_seconds": slowest,
            "perf/train_tokens_per_s": float(all_tokens / slowest),
        }
