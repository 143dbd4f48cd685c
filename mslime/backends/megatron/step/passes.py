"""The policy's passes over a shard: log-probs of its tokens, or its loss and gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mslime.algorithms.losses import LossOutput, PolicyLossInputs, policy_loss, sft_loss
from mslime.algorithms.statistics import LossStatistics
from mslime.backends.megatron.log_probs.vocab_parallel import LogProbs, vocab_parallel_log_probs
from mslime.backends.megatron.step.batches import MicroBatch
from mslime.backends.megatron.step.pipeline import OnMicroBatch, Pipeline, RouteHooks
from mslime.config.training import PolicySpec
from mslime.data.shard import TrainShard


@dataclass(frozen=True)
class StepRunner(Pipeline):
    """`Pipeline` of a language model.

    Attributes:
        spec: how it is trained.
        vocab_size: without padding.
    """

    spec: PolicySpec
    vocab_size: int

    def log_probs(self, shard: TrainShard, routes: RouteHooks | None, progress: OnMicroBatch | None = None) -> Tensor:
        """log pi(token | what is before it) for each of the shard's N tokens: float32 [N] on the CPU, on every rank.

        The first token of a sequence has none, and gets 0. A collective over the whole trainer.
        """

        def read(batch: MicroBatch, logits: Tensor) -> Tensor:
            return self._token_log_probs(batch, logits, with_entropy=False).log_probs

        return self.per_token(shard, read, routes, progress)

    def loss_and_gradients(
        self,
        shard: TrainShard,
        routes: RouteHooks | None,
        weight_scale: float = 1.0,
        progress: OnMicroBatch | None = None,
    ) -> LossStatistics:
        """Add the gradient of the shard's loss to the gradient buffers; reduced over the ranks when this returns.

        Args:
            weight_scale: factor on the off-policy correction's weights (`policy_loss`).

        Returns:
            This rank's share of the statistics: sum and maximise over all ranks.
        """

        def loss(batch: MicroBatch, logits: Tensor) -> LossOutput:
            return self._loss(batch, logits, weight_scale)

        return self.add_gradients(shard, loss, routes, progress)

    def _token_log_probs(self, batch: MicroBatch, logits: Tensor, *, with_entropy: bool) -> LogProbs:
        return vocab_parallel_log_probs(
            logits,
            batch.labels,
            tp_group=self.place.tp_group,
            vocab_start=self.place.tp_rank * logits.shape[-1],
            vocab_size=self.vocab_size,
            temperature=self.spec.temperature,
            with_entropy=with_entropy,
            chunk=self.spec.train.log_prob_chunk_tokens,
            reuse_logits=True,  # the pipeline hands them to the loss alone
        )

    def _loss(self, batch: MicroBatch, logits: Tensor, weight_scale: float) -> LossOutput:
        if self.spec.train.task == "sft":
            found = self._token_log_probs(batch, logits, with_entropy=False)
            return sft_loss(found.log_probs, batch.weights, batch.loss_mask)
        found = self._token_log_probs(batch, logits, with_entropy=True)
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
        return policy_loss(inputs, self.spec.algorithm, self.place.sum_over_context_ranks, weight_scale)
