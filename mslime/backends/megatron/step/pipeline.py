"""One pass of a shard through this rank's model chunks, together with the other ranks: megatron-core's schedule.

`Pipeline` is for any trained model. `StepRunner` is for a language model: its passes return log-probs of a shard's
tokens, or its loss and gradients. A pass has one lane or several: models that share chunks, each with its own
micro-batches (`run_lanes`).

The schedule averages losses over micro-batches and gradients over data-parallel ranks; a shard's weights already
include their denominators. So this module undoes both averages, and the gradient is that of the plain sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import tee
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mslime.algorithms.losses import LossOutput, PolicyLossInputs, policy_loss, sft_loss
from mslime.algorithms.statistics import LossStatistics
from mslime.backends.megatron.log_probs.blocks import hidden_log_probs
from mslime.backends.megatron.log_probs.vocab_parallel import LogProbs, vocab_parallel_log_probs
from mslime.backends.megatron.model.chunks import unwrap
from mslime.backends.megatron.model.gated_delta import HostPackedSeqParams
from mslime.backends.megatron.model.layers import output_layer, output_weight
from mslime.backends.megatron.model.moe import excludes_padding
from mslime.backends.megatron.parallel import ParallelState
from mslime.backends.megatron.step.batches import PADDING, MicroBatch, build_micro_batch, on_device
from mslime.config.resolved import PolicySpec
from mslime.data.shard import TrainShard

OnMicroBatch = Callable[[int, int], None]
"""Called with (micro-batches done, total micro-batches) by every rank during a pass."""


class RouteHooks:
    """Hooks of routing replay around each forward pass of a model chunk; these do nothing."""

    def before_forward(self, chunk: int, batch: MicroBatch) -> None: ...

    def after_forward(self, chunk: int, batch: MicroBatch) -> None: ...


@dataclass(frozen=True)
class Pipeline:
    """Runs shards through this rank's model chunks.

    Attributes:
        chunks: wrapped model chunks, in virtual-stage order.
        config: their TransformerConfig.
        packed: micro-batches are sequences without padding (thd), else one sequence.
        parallel: this rank's parallel state.
        device: device of its tensors.
    """

    chunks: Sequence[DistributedDataParallel]
    config: TransformerConfig
    packed: bool
    parallel: ParallelState
    device: torch.device

    @torch.no_grad()
    def per_token(
        self, shard: TrainShard, read: Callable[[MicroBatch, Tensor], Tensor], routes: RouteHooks | None = None
    ) -> Tensor:
        """A model output for each of the shard's N tokens: float32 [N] on the CPU, on every rank.

        A sequence's first token, which no row predicts, gets 0. A collective over the whole trainer.

        Args:
            read: from the model's output [T, ...] to [T] on the last stage, each for the token that the row predicts.
        """
        out = torch.zeros(len(shard.tokens), dtype=torch.float32, device=self.device)

        def collect(batch: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Any]]:
            batch.slicer.scatter_targets(read(batch, output), out)
            return output.new_zeros(()), {}

        run_lanes([Lane(self, shard, collect, routes)], None, forward_only=True)
        if self.parallel.is_last_stage:
            self.parallel.sum_over_context_ranks(out)
        return self.parallel.broadcast_from_last_stage(out).cpu()

    def add_gradients(
        self,
        shard: TrainShard,
        loss: Callable[[MicroBatch, Tensor], LossOutput],
        routes: RouteHooks | None = None,
        progress: OnMicroBatch | None = None,
    ) -> LossStatistics:
        """Add the gradient of the shard's loss to the gradient buffers; reduced over the ranks when this returns.

        Args:
            loss: of a micro-batch and the model's output [T, ...] for it, on the last stage.

        Returns:
            This rank's share of the statistics: sum and maximise over all ranks.
        """
        lane = self.gradient_lane(shard, loss, routes)
        run_lanes([lane], progress, forward_only=False)
        return lane.statistics

    def gradient_lane(
        self,
        shard: TrainShard,
        loss: Callable[[MicroBatch, Tensor], LossOutput],
        routes: RouteHooks | None = None,
        enter: Callable[[], None] | None = None,
    ) -> Lane:
        """A lane that adds the gradient of the shard's loss to the gradient buffers; see `add_gradients` and `Lane`."""
        # The data-parallel wrapper divides by DP x CP.
        undo_average = self.parallel.dp_group.size() * self.parallel.cp_group.size()

        def add(batch: MicroBatch, output: Tensor) -> tuple[Tensor, dict[str, Any]]:
            found = loss(batch, output)
            if self.parallel.counts:
                lane.statistics = lane.statistics.merge(found.statistics)
            return _SummedLoss.apply(found.loss, undo_average), {}

        lane = Lane(self, shard, add, routes, enter)
        return lane

    def model_inputs(self, batch: MicroBatch, embeds: bool) -> dict[str, Any]:
        """Arguments of a model chunk's call. A chunk with the embedding splits the padding mask like the tokens."""
        inputs: dict[str, Any] = {
            "input_ids": batch.tokens,
            "position_ids": batch.position_ids,
            "attention_mask": None,
            "packed_seq_params": None if batch.cumulative_lengths is None else _packed(batch),
        }
        if excludes_padding(self.config):
            rows = batch.slicer.rows if embeds else batch.slicer.layer_rows
            inputs["padding_mask"] = on_device(rows == PADDING, self.device)[None]
        if self.config.bf16:
            inputs["fp32_output"] = False  # log-probs convert to float32 chunk by chunk
        return inputs


@dataclass
class Lane:
    """One model's part in a pass.

    Attributes:
        pipeline: of the model. Several lanes share chunks, each in its own wrappers.
        shard: its micro-batches; for interleaved stages padded with empty ones to a multiple of PP.
        on_output: called on the last stage with a micro-batch and the model's output for it, [T, ...].
        routes: replay hooks of its forward passes.
        enter: makes the chunks this lane's model; called before each forward and backward pass of a micro-batch if
            there are several lanes.
        statistics: of the losses of its micro-batches on this rank.
    """

    pipeline: Pipeline
    shard: TrainShard
    on_output: Callable[[MicroBatch, Tensor], tuple[Tensor, dict[str, Any]]]
    routes: RouteHooks | None = None
    enter: Callable[[], None] | None = None
    statistics: LossStatistics = field(init=False)

    def __post_init__(self) -> None:
        stages = self.pipeline.config.pipeline_model_parallel_size if len(self.pipeline.chunks) > 1 else 1
        missing = -len(self.shard.micro_batches) % stages
        self.shard = replace(self.shard, micro_batches=self.shard.micro_batches + ((),) * missing)
        self.statistics = LossStatistics.zeros(self.pipeline.device)

    def begin_backward(self, *gradients: Any) -> None:
        """Make the chunks this lane's model, with the routers' losses weighted as in a pass of this lane alone."""
        assert self.enter is not None
        self.enter()
        pipeline = self.pipeline
        if pipeline.config.num_moe_experts is not None:
            one = torch.ones(1, device=pipeline.device)
            MoEAuxLossAutoScaler.set_loss_scale(one * pipeline.parallel.cp_group.size() / len(self.shard.micro_batches))


def run_lanes(lanes: Sequence[Lane], progress: OnMicroBatch | None, *, forward_only: bool) -> None:
    """Run all micro-batches of all lanes through the pipeline, lane by lane: it fills and drains once.

    Each chunk runs forward and backward passes in this order, so a lane's gradients are summed as in a pass of it
    alone. The first node of a micro-batch's graph selects the lane of its backward pass and recomputation.
    """
    pipeline = lanes[0].pipeline
    total = sum(len(lane.shard.micro_batches) for lane in lanes)
    done = 0

    def work() -> Iterator[tuple[Lane, MicroBatch]]:
        """This rank's view of each micro-batch, built lazily while a GPU computes the earlier ones."""
        for lane in lanes:
            rows, packed, device = lane.pipeline.parallel.rows, lane.pipeline.packed, lane.pipeline.device
            for index in range(len(lane.shard.micro_batches)):
                yield lane, build_micro_batch(lane.shard, index, rows, packed=packed, device=device)

    def forward(iterator: Iterator[tuple[Lane, MicroBatch]], chunk: DistributedDataParallel) -> tuple[Tensor, Callable]:
        nonlocal done
        lane, batch = next(iterator)
        index = unwrap(chunk).vp_stage or 0
        if lane.enter is not None:
            lane.enter()
        if lane.routes is not None:
            lane.routes.before_forward(index, batch)
        own = lane.pipeline.chunks[index]
        output = own(**lane.pipeline.model_inputs(batch, embeds=unwrap(own).pre_process))
        if lane.routes is not None:
            lane.routes.after_forward(index, batch)
        if lane.enter is not None and output.grad_fn is not None:
            output.grad_fn.register_prehook(lane.begin_backward)
        if index == len(pipeline.chunks) - 1:
            done += 1
            if progress is not None:
                progress(done, total)
        return output, lambda output: lane.on_output(batch, output.squeeze(0))

    iterators = list(tee(work(), len(pipeline.chunks)))  # a micro-batch is built once, and kept until each chunk has it
    interleaved = len(pipeline.chunks) > 1
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iterators if interleaved else iterators[0],
        model=list(pipeline.chunks) if interleaved else pipeline.chunks[0],
        num_microbatches=total,
        seq_length=1,  # stages exchange the true shapes (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=forward_only,
    )


class _SummedLoss(torch.autograd.Function):
    """A micro-batch's loss as a summand of a plain sum: its gradient is a given factor.

    The schedule's own factors are ignored: the mean over the micro-batches of all lanes, CP, and a scale that is 1 in
    every dtype. Undone by division, the last bit would depend on the number of micro-batches.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(gradients[0], ctx.factor), None


def _packed(batch: MicroBatch) -> HostPackedSeqParams:
    longest = max(batch.slicer.padded_lengths)
    return HostPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cumulative_lengths,  # type: ignore[arg-type]
        cu_seqlens_kv=batch.cumulative_lengths,  # type: ignore[arg-type]
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=batch.slicer.padded_lengths,
    )


@dataclass(frozen=True)
class StepRunner(Pipeline):
    """`Pipeline` of a language model.

    Attributes:
        spec: training settings.
        vocab_size: size of the vocabulary without padding.
    """

    spec: PolicySpec
    vocab_size: int

    def log_probs(self, shard: TrainShard, routes: RouteHooks | None, temperature: float | None = None) -> Tensor:
        """log pi(token | tokens before it) for each of the shard's N tokens: float32 [N] on the CPU, on every rank.

        A token with a support (`TrainShard.supports`) gets that of pi restricted to the support. A sequence's first
        token gets 0. A collective over the whole trainer.

        Args:
            temperature: None: the rollout's.
        """

        def read(batch: MicroBatch, output: Tensor) -> Tensor:
            return self._token_log_probs(batch, output, with_entropy=False, temperature=temperature).log_probs

        return self.per_token(shard, read, routes)

    def target_log_probs(self, batch: MicroBatch, output: Tensor) -> Tensor:
        """[T] float32, log pi of the micro-batch's labels at temperature 1; carries the gradient."""
        return self._token_log_probs(batch, output, with_entropy=False, temperature=1.0).log_probs

    def _token_log_probs(
        self, batch: MicroBatch, output: Tensor, *, with_entropy: bool, temperature: float | None = None
    ) -> LogProbs:
        """Log-probs from the output of the last chunk: logits [T, V / TP] or, for a large micro-batch, hidden states
        [T, H]."""
        chunk = unwrap(self.chunks[-1])
        layer = output_layer(chunk)
        read: dict[str, Any] = {
            "tp_group": self.parallel.tp_group,
            "vocab_start": self.parallel.tp_rank * layer.output_size_per_partition,
            "vocab_size": self.vocab_size,
            "temperature": self.spec.temperature if temperature is None else temperature,
            "with_entropy": with_entropy,
            "chunk": self.spec.train.log_prob_chunk_tokens,
            "support": batch.support,
        }
        if layer.makes_logits(len(batch.slicer)):
            # The pipeline passes the logits to the loss alone, which may therefore overwrite them.
            return vocab_parallel_log_probs(output, batch.labels, reuse_logits=True, **read)
        return hidden_log_probs(output, output_weight(chunk), batch.labels, most_bytes=layer.most_bytes, **read)

    def loss(
        self, batch: MicroBatch, output: Tensor, weight_scale: float = 1.0, seen: Tensor | None = None
    ) -> LossOutput:
        """The loss of a micro-batch, on the last stage.

        Args:
            output: the model's, [T, ...].
            weight_scale: factor on the off-policy correction's weights (`policy_loss`).
            seen: [N] float32 to which the log-probs of this rank's tokens are written (`WatchedSequences.column`).
        """
        if self.spec.train.task == "sft":
            found = self._token_log_probs(batch, output, with_entropy=False)
            return sft_loss(found.log_probs, batch.weights, batch.loss_mask)
        found = self._token_log_probs(batch, output, with_entropy=True)
        if seen is not None:
            batch.slicer.scatter_targets(found.log_probs.detach(), seen)
        entropy = found.entropy
        assert entropy is not None
        if self.spec.algorithm.entropy_coef == 0:
            entropy = entropy.detach()  # reported only: costs no backward pass
        inputs = PolicyLossInputs(
            log_probs=found.log_probs,
            behaviour_log_probs=batch.behaviour_log_probs,
            advantages=batch.advantages,
            mask=batch.loss_mask,
            weights=batch.weights,
            sequence_index=batch.sequence_index,
            num_sequences=batch.num_sequences,
            old_log_probs=batch.old_log_probs,
            reference_log_probs=batch.reference_log_probs,
            entropy=entropy,
            segment_index=batch.segment_index,
            num_segments=batch.num_segments,
            ages=batch.ages,
            positions=batch.positions,
        )
        return policy_loss(inputs, self.spec.algorithm, self.parallel.sum_over_context_ranks, weight_scale)
