"""A model trained on this rank, policy or critic: its wrappers, optimizer, schedule and checkpoints."""

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
from mslime.backends.megatron.model.megatron_config import ddp_config, optimizer_config
from mslime.backends.megatron.parallel import ParallelState
from mslime.backends.megatron.step.offload import DeviceState, gradient_buffers
from mslime.backends.megatron.step.optimizer import build_optimizer, follow_config, rates_of
from mslime.backends.megatron.step.reductions import over_all_ranks, refuse_not_finite
from mslime.config.base import TrainerPart
from mslime.config.errors import TrainerError
from mslime.config.fp8 import fp8_rows
from mslime.config.resolved import TrainingSpec
from mslime.data.checkpoints import FileSum


class TrainedModel:
    """Model chunks with weights, and their optimizer and schedule, together with the other ranks.

    Attributes:
        spec: settings of the model and its training.
        chunks: the model chunks without wrappers, in virtual-stage order.
        wrapped: the same in their data-parallel wrappers.
        transformer, optimizer, schedule: megatron-core's.
        parallel, device: this rank's parallel state, and the device of its tensors.
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
            stored: the module that checkpoints store for each chunk; None: the chunk.

        Raises:
            ConfigError: megatron-core rejects a setting of the optimizer.
        """
        self.spec, self.chunks, self.transformer, self.device = spec, list(chunks), transformer, device
        self._stored = self.chunks if stored is None else list(stored)
        self.parallel = ParallelState.here(transformer.sequence_parallel, fp8_rows(spec.fp8))
        settings = optimizer_config(spec.train, spec.megatron, device)  # rejects settings before the wrappers are built
        self.wrapped = wrap(self.chunks, transformer, ddp_config(spec.megatron))
        self.optimizer, self.schedule = build_optimizer(self.wrapped, settings, spec.train, spec.steps)
        self.serve_schedule()
        self.step = 0
        self._has_gradients = False
        self._gathered = False  # whether parameters of all ranks are gathered since the last step
        self._compared = False  # whether the ranks have compared their shares of a checkpoint
        self._state = DeviceState(self.wrapped, self.optimizer, device, spec.offload_directory)

    def hold(self, parts: Collection[TrainerPart]) -> None:
        """Keep exactly these parts of the state on the device, which engines share. A collective.

        Raises:
            TrainerError: there is no space for the other parts; or a step has not yet used the gradients.
        """
        if self._has_gradients and "gradients" not in parts:
            raise TrainerError(
                "memory", f"after step {self.step}", "gradients not yet used by an optimizer step would be lost",
                "take the step first, or discard them",
            )  # fmt: skip
        if "weights" in self._state.here and "weights" not in parts:
            self.sync_params()
        self._state.hold(parts)

    def serve_schedule(self) -> None:
        """Make megatron-core's schedule use this model's wrappers and optimizer from here on. It finds them in the
        TransformerConfig, which other models on the same chunks share."""
        self.transformer.finalize_model_grads_func = finalize_model_grads
        self.transformer.grad_scale_func = self.optimizer.scale_loss
        if self.spec.megatron.overlap_grad_reduce:
            no_sync: Any = [chunk.no_sync for chunk in self.wrapped]  # interleaved stages need the list
            self.transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

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
        self.forget_gradients()
        metrics = self.accumulate(add_gradients) | self.apply_gradients()
        return metrics | self.speed(tokens, time.perf_counter() - begin)

    def forget_gradients(self) -> None:
        """Drop the gradients accumulated since the last step."""
        self._has_gradients = False

    def accumulate(self, add_gradients: Callable[[], LossStatistics]) -> dict[str, float]:
        """Add gradients to those since the last step; weights stay unchanged. A collective.

        Args:
            add_gradients: returns this rank's share of the loss statistics.

        Returns:
            Metrics of the loss, equal on all ranks.

        Raises:
            TrainerError: the loss is not finite.
        """
        aside = self.gradients_aside()
        self.clear_gradients()
        metrics = self.keep_gradients(add_gradients())
        self.take_back(aside)
        return metrics

    def gradients_aside(self) -> list[torch.Tensor]:
        """A copy of the gradients since the last step, for the duration of a pass; empty without gradients.

        They are reduced over the ranks already: reduced together with the new ones they would count once for each rank.
        """
        return [buffer.clone() for buffer in self._gradients()] if self._has_gradients else []

    def take_back(self, aside: Sequence[torch.Tensor]) -> None:
        """Add the gradients from `gradients_aside` to those of the pass since."""
        for buffer, held in zip(self._gradients(), aside, strict=bool(aside)):
            buffer.add_(held)

    def _gradients(self) -> list[torch.Tensor]:
        return [buffer.grad_data for chunk in self.wrapped for buffer in gradient_buffers(chunk)]

    def clear_gradients(self) -> None:
        self.forget_gradients()
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def keep_gradients(self, own: LossStatistics) -> dict[str, float]:
        """Accept the reduced gradients that a pass left in the buffers. A collective.

        Args:
            own: this rank's share of the loss statistics.

        Returns:
            Metrics of the loss, equal on all ranks.

        Raises:
            TrainerError: the loss is not finite; the gradients are dropped.
        """
        own_loss = finalise(own)["loss/total"]
        metrics = finalise(over_all_ranks(own))
        refuse_not_finite("loss", metrics["loss/total"], self.step + 1, own_loss, self.parallel.rank, self.device)
        self._has_gradients = True
        return metrics

    def reduce_gradients(self) -> None:
        """Reduce the gradients of a pass over the ranks. A collective."""
        groups = [g for chunk in self.wrapped for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
        for group in groups:
            # If reduction overlaps with the pass, finishing one assumes that the pass started it.
            if self.spec.megatron.overlap_grad_reduce and not group.is_first_batch:
                group.start_grad_sync()
        finalize_model_grads(list(self.wrapped))

    def apply_gradients(self) -> dict[str, float]:
        """One optimizer step on the accumulated gradients. A collective.

        Returns:
            `grad_norm` and `lr`, equal on all ranks.

        Raises:
            TrainerError: there are no gradients, or one of them is not finite.
        """
        if not self._has_gradients:
            raise TrainerError(
                "optimizer step", f"after step {self.step}", "there are no gradients since the last step",
                "run forward and backward first",
            )  # fmt: skip
        self._has_gradients = False
        self.step += 1
        self.schedule.step(1)
        self._gathered = False
        _, norm, _ = cast("tuple[bool, float, object]", self.optimizer.step())
        grad_norm = float(norm)
        own_norm = grad_norm
        if not math.isfinite(grad_norm):  # the sum of |gradient| of this rank: not finite if one of them is not
            trained = (p for chunk in self.wrapped for p in chunk.parameters() if p.requires_grad)
            own_norm = sum(float(p.main_grad.abs().sum()) for p in trained)  # type: ignore[attr-defined]
        refuse_not_finite("grad_norm", grad_norm, self.step, own_norm, self.parallel.rank, self.device)
        return {"grad_norm": grad_norm, "lr": float(self.optimizer.param_groups[0]["lr"])}

    def save(self, directory: Path, extra: dict[str, Any], others: Mapping[str, FileSum] | None = None) -> None:
        """Write a checkpoint for any layout (`checkpoint.save_checkpoint`); on all ranks."""
        self.sync_params()
        layout = self.spec.layout.describe()
        save_checkpoint(
            directory, self._stored, self.optimizer, self.schedule, layout=layout, extra=extra, others=others,
            compare_ranks=not self._compared,
        )  # fmt: skip
        self._compared = True

    def load(self, directory: Path, new_run: bool = False) -> dict[str, Any]:
        """Continue from a checkpoint (`checkpoint.load_checkpoint`); returns its `extra`; on all ranks.

        Args:
            new_run: the checkpoint is from another run: load weights and optimizer state, restart the schedule.
        """
        layout = self.spec.layout.describe()
        rates = rates_of(self.optimizer)
        extra = load_checkpoint(directory, self._stored, self.optimizer, self.schedule, layout=layout)
        follow_config(self.optimizer, self.schedule, rates, restart=new_run)
        self.step = self.schedule.num_steps
        self.forget_gradients()
        self._gathered = False
        self._state.changed()
        return extra

    def sync_params(self) -> None:
        """Complete the parameter all-gather that overlaps with the next forward pass; without it weights are stale.

        megatron-core gathers all of them at every call. So it is called once after a step, and else this waits for
        gathers that a pass started. A collective.
        """
        if not self.spec.megatron.overlap_param_gather:
            return
        for chunk in self.wrapped:
            groups = (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
            for group in groups if self._gathered else ():
                if group.param_gather_handle is not None:
                    group.start_param_sync(force_sync=True)
            if not self._gathered:
                chunk.start_param_sync(force_sync=True)
        self._gathered = True

    @contextmanager
    def weights_in_place(self) -> Iterator[None]:
        """Context manager: parameters are complete and no gather writes into them, for passes outside training."""
        if not self.spec.megatron.overlap_param_gather:
            yield
            return
        self.sync_params()
        for chunk in self.wrapped:
            chunk.disable_forward_pre_hook(param_sync=False)
        try:
            yield
        finally:
            for chunk in self.wrapped:
                chunk.enable_forward_pre_hook()

    def slowest(self, seconds: float) -> float:
        """The largest number of seconds over all ranks. A collective."""
        largest = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)

    def speed(self, tokens: int, seconds: float) -> dict[str, float]:
        """Seconds of the slowest rank, and tokens of all data-parallel ranks over them. A collective."""
        slowest = self.slowest(seconds)
        all_tokens = torch.tensor(float(tokens), dtype=torch.float64, device=self.device)
        dist.all_reduce(all_tokens, group=self.parallel.dp_group)
        return {"perf/train_seconds": slowest, "perf/train_tokens_per_s": float(all_tokens / slowest)}
