"""The model of one rank as loaded from its checkpoint; trainers of several adapters share it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from mslime.backends.megatron.model.chunks import build_chunks, load_hf_weights, moe_layer_ids, named_local_params
from mslime.backends.megatron.model.layers import limit_logits
from mslime.backends.megatron.model.megatron_config import device_of, transformer_config
from mslime.backends.megatron.parallel import ParallelState, start_process_groups
from mslime.backends.megatron.replay.routing_replay import RoutingReplay
from mslime.backends.megatron.step.offload import MemoryStore
from mslime.config.fp8 import fp8_rows
from mslime.config.resolved import PolicySpec
from mslime.convert.families import get_family, read_hf_config
from mslime.logs import phase
from mslime.weights.groups import SyncGroups


class ReferencePolicy:
    """A host copy of another set of weights for the same model chunks.

    For a GPU they are in blocks of pinned memory, which copies several times as fast. Pinned one by one, each weight
    would take the next power of two.
    """

    def __init__(self, chunks: Sequence[GPTModel], hf_config: Mapping[str, object], directory: Path) -> None:
        """Read the weights from a checkpoint. Overwrites the chunks' own weights: load those afterwards.

        Raises:
            CheckpointError: the checkpoint does not fit the model.
        """
        self._chunks = chunks
        load_hf_weights(chunks, hf_config, directory)
        pinned = any(tensor.is_cuda for _, tensor in named_local_params(chunks))
        self._weights, self._own = _Copy(pinned), _Copy(pinned)
        self._weights.keep(chunks)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context manager: the chunks hold the reference weights inside, and their own again, bit for bit,
        afterwards."""
        self._own.keep(self._chunks)
        self._weights.fill(self._chunks)
        try:
            yield
        finally:
            self._own.fill(self._chunks)


class _Copy:
    """One set of weights in host memory, each in its original dtype: the optimizer's wrapper may change it."""

    def __init__(self, pinned: bool) -> None:
        self._store = MemoryStore(pinned)
        self._dtypes: list[torch.dtype] = []

    @torch.no_grad()
    def keep(self, chunks: Sequence[GPTModel]) -> None:
        weights = [tensor.detach() for _, tensor in named_local_params(chunks)]
        self._dtypes = [weight.dtype for weight in weights]
        at = 0
        for weight in weights:
            self._store.write(at, _bytes(weight))
            at += weight.nbytes
        _wait_for_copies()

    @torch.no_grad()
    def fill(self, chunks: Sequence[GPTModel]) -> None:
        at = 0
        for (_, tensor), dtype in zip(named_local_params(chunks), self._dtypes, strict=True):
            weight = tensor.detach()
            kept = weight if weight.dtype == dtype else torch.empty_like(weight, dtype=dtype)
            self._store.read(at, _bytes(kept))
            if kept is not weight:
                weight.copy_(kept)
            at += kept.nbytes
        _wait_for_copies()


def _bytes(weight: Tensor) -> Tensor:
    """[bytes] uint8: the weight's memory."""
    return weight.view(-1).view(torch.uint8)


def _wait_for_copies() -> None:
    """Wait until the GPU no longer uses the host memory, before it is read or written again."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


_log = logging.getLogger(__name__)


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

    def __init__(self, spec: PolicySpec, rank: int, world_size: int, init_method: str) -> None:
        """Join the other ranks, build this rank's part of the model and read its weights.

        Raises:
            ConfigError: a setting that the trainer does not support.
            CheckpointError: the checkpoint is incomplete or does not fit.
            TrainerError: the ranks could not connect to each other.
        """
        self.spec, self.device, self.hf_config = spec, device_of(spec.device, rank), read_hf_config(spec.checkpoint)
        self.model = model = get_family(self.hf_config).model_fields(self.hf_config)
        self.transformer = transformer_config(spec, self.hf_config, self.device)
        with phase(_log, f"connecting to the other ranks, {world_size} in total"):
            start_process_groups(spec, rank, world_size, init_method, self.device)
        with phase(_log, "building the model"):
            self.chunks = chunks = build_chunks(self.transformer, model, self.device, adapters=spec.lora.on)
            limit_logits(chunks, spec.train.logit_bytes)
        held = partial(ReferencePolicy, chunks, self.hf_config)
        self.reference = held(spec.reference) if spec.reference is not None and not spec.base_is_reference else None
        self.teacher = held(spec.teacher) if spec.teacher is not None else None
        with phase(_log, f"reading the weights of {spec.checkpoint}"):
            load_hf_weights(chunks, self.hf_config, spec.checkpoint)
        self.parallel = ParallelState.here(self.transformer.sequence_parallel, fp8_rows(spec.fp8))
        self.routing_layers = moe_layer_ids(chunks, model.moe_layer_ids)
        replays = model.num_experts and spec.replay != "off"
        self.replay = RoutingReplay(chunks, chunks[0].config) if replays else None
        self.groups: SyncGroups | None = None
