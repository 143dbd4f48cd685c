"""The model of one rank as loaded from its checkpoint; trainers of several adapters share it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from mslime.backends.megatron.model.chunks import build_chunks, load_hf_weights, moe_layer_ids
from mslime.backends.megatron.model.layers import limit_logits
from mslime.backends.megatron.model.megatron_config import device_of, transformer_config
from mslime.backends.megatron.parallel import ParallelState, start_process_groups
from mslime.backends.megatron.replay.routing import Routing
from mslime.backends.megatron.replay.routing_replay import RoutingReplay
from mslime.backends.megatron.step.reference import ReferencePolicy
from mslime.config.fp8 import fp8_rows
from mslime.config.resolved import PolicySpec
from mslime.convert.families import ModelFields, get_family, read_hf_config
from mslime.logs import phase
from mslime.weights.groups import SyncGroups

_log = logging.getLogger(__name__)


@dataclass
class Base:
    """A rank's model chunks with the checkpoint's weights, its process groups and routing replay.

    Attributes:
        spec: settings of the model.
        hf_config, model: of the checkpoint.
        transformer: megatron-core's settings.
        device, parallel: device of the chunks and this rank's parallel state.
        chunks: without wrappers, in virtual-stage order.
        routing_layers: global ids of this pipeline stage's MoE layers.
        replay: attached to the routers; None if they route by themselves.
        reference, teacher: weights of other policies; None without.
        groups: process groups of weight syncs and exports, once created.
    """

    spec: PolicySpec
    hf_config: Mapping[str, object]
    model: ModelFields
    transformer: TransformerConfig
    device: torch.device
    parallel: ParallelState
    chunks: list[GPTModel]
    routing_layers: tuple[int, ...]
    replay: RoutingReplay | None
    reference: ReferencePolicy | None
    teacher: ReferencePolicy | None
    groups: SyncGroups | None = None

    @classmethod
    def start(cls, spec: PolicySpec, rank: int, world_size: int, init_method: str) -> Self:
        """Join the other ranks, build this rank's part of the model and read its weights.

        Raises:
            ConfigError: a setting that the trainer does not support.
            CheckpointError: the checkpoint is incomplete or does not fit.
            TrainerError: the ranks could not connect to each other.
        """
        device, hf_config = device_of(spec.device, rank), read_hf_config(spec.checkpoint)
        model = get_family(hf_config).model_fields(hf_config)
        transformer = transformer_config(spec, hf_config, device)
        with phase(_log, f"meeting the other ranks, {world_size} in all"):
            start_process_groups(spec, rank, world_size, init_method, device)
        with phase(_log, "building the model"):
            chunks = build_chunks(transformer, model, device, adapters=spec.lora.on)
            limit_logits(chunks, spec.train.logit_bytes)
        held = partial(ReferencePolicy, chunks, hf_config)
        reference = held(spec.reference) if spec.reference is not None and not spec.base_is_reference else None
        teacher = held(spec.teacher) if spec.teacher is not None else None
        with phase(_log, f"reading the weights of {spec.checkpoint}"):
            load_hf_weights(chunks, hf_config, spec.checkpoint)
        return cls(
            spec=spec,
            hf_config=hf_config,
            model=model,
            transformer=transformer,
            device=device,
            parallel=ParallelState.here(transformer.sequence_parallel, fp8_rows(spec.fp8)),
            chunks=chunks,
            routing_layers=moe_layer_ids(chunks, model.moe_layer_ids),
            replay=RoutingReplay(chunks, chunks[0].config) if model.num_experts and spec.replay != "off" else None,
            reference=reference,
            teacher=teacher,
        )

    def routing(self, spec: PolicySpec) -> Routing:
        """Routes of one trainer's passes, with separate records per trainer."""
        mode = spec.replay if self.model.num_experts else "off"
        return Routing(mode, self.replay, self.model, self.parallel, self.device, spec.train.replay_max_age)
