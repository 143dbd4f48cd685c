"""`MegatronCritic`: one rank of PPO's value model, in the policy's layout, with its own optimizer and checkpoint.

It runs in the policy's processes (`critic.placement: shared`) or in as many of its own. It receives the shards of the
policy rank with the same number, fills in their values, and is trained on the returns that the policy rank computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mslime.algorithms.losses import LossOutput, value_loss
from mslime.algorithms.statistics import LossStatistics
from mslime.backends.megatron.model.chunks import build_chunks, load_hf_weights
from mslime.backends.megatron.model.megatron_config import device_of, transformer_config
from mslime.backends.megatron.parallel import start_process_groups, stop_process_groups
from mslime.backends.megatron.step.batches import MicroBatch
from mslime.backends.megatron.step.pipeline import OnMicroBatch, Pipeline
from mslime.backends.megatron.step.trained_model import TrainedModel
from mslime.config.resolved import CriticSpec
from mslime.convert.families import get_family, read_hf_config
from mslime.data.shard import TrainShard

METRICS = {
    "loss/value": "loss/value",
    "loss/value_clip_fraction": "loss/value_clip_fraction",
    "loss/explained_variance": "loss/explained_variance",
    "grad_norm": "critic/grad_norm",
    "lr": "critic/lr",
    "perf/train_seconds": "perf/critic_seconds",
}
"""The critic's metrics of an optimizer step, by their names in any trained model."""


class MegatronCritic(TrainedModel):
    """One critic rank.

    Attributes:
        spec: settings of the critic.
        on_micro_batch: called with (done, in all) during `train`; may be replaced.
    """

    spec: CriticSpec

    def __init__(self, spec: CriticSpec, rank: int, world_size: int, init_method: str | None) -> None:
        """Build this rank's part of the critic and read its weights.

        Args:
            init_method: address of the rendezvous; None in a process whose trainer has already joined its own.

        Raises:
            ConfigError: a setting that the critic does not support.
            CheckpointError: the checkpoint is incomplete or does not fit.
            TrainerError: the ranks could not connect to each other.
        """
        device, hf_config = device_of(spec.device, rank), read_hf_config(spec.checkpoint)
        transformer = transformer_config(spec, hf_config, device)
        if init_method is not None:
            start_process_groups(spec, rank, world_size, init_method, device)
        chunks = build_chunks(transformer, get_family(hf_config).model_fields(hf_config), device, values=True)
        load_hf_weights(chunks, hf_config, spec.checkpoint)
        super().__init__(spec, chunks, transformer, device)
        self._pipeline = Pipeline(self.wrapped, transformer, spec.train.packed, self.parallel, device)
        self.on_micro_batch: OnMicroBatch | None = None

    def with_values(self, shards: Sequence[TrainShard]) -> list[TrainShard]:
        """The shards with the value, [N] float32, of the state in which each token was sampled. A collective."""
        with self.weights_in_place():
            found = [self._pipeline.per_token(shard, lambda _, values: _column(values)).numpy() for shard in shards]
        return [replace(shard, values=values) for shard, values in zip(shards, found, strict=True)]

    def train(self, shards: Sequence[TrainShard]) -> list[dict[str, float]]:
        """One optimizer step for each shard, with values and returns, in order. A collective.

        Returns:
            Metrics of each step, equal on all ranks.

        Raises:
            TrainerError: the loss or the gradient is not finite.
        """
        return [self._step(shard) for shard in shards]

    def close(self) -> None:
        """Leave the process groups, if the critic joined its own."""
        stop_process_groups()

    def _step(self, shard: TrainShard) -> dict[str, float]:
        assert shard.values is not None and shard.returns is not None, "a critic learns returns"

        def add_gradients() -> LossStatistics:
            return self._pipeline.add_gradients(shard, self._loss, progress=self.on_micro_batch)

        found = self.optimizer_step(add_gradients, len(shard.tokens))
        return {name: found[key] for key, name in METRICS.items() if key in found}

    def _loss(self, batch: MicroBatch, output: Tensor) -> LossOutput:
        assert batch.values is not None and batch.returns is not None
        clip = self.spec.value_clip
        return value_loss(_column(output), batch.values, batch.returns, batch.weights, batch.loss_mask, clip)


def _column(output: Tensor) -> Tensor:
    return output.squeeze(1).to(torch.float32)
