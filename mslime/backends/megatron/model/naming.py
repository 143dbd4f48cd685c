"""Parameters of this rank's model chunks under their canonical names: global layers, global experts, local spec.

How names are spelled, Transformer Engine's included, is in `mslime.convert.parameter_names`; here is what only a built
model knows: which layers and which experts this rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from mslime.convert.adapters import is_factor
from mslime.convert.parameter_names import canonical_name, of_all_experts

SHARED_BY_EXPERTS = "shared_by_experts"
"""Attribute of a parameter that all experts of a layer share: modules of several experts hold it."""


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside data-parallel and precision wrappers."""
    while not isinstance(chunk, GPTModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def layer_ids(chunk: GPTModel) -> tuple[int, ...]:
    """Global (0-based) ids of a chunk's layers, in order."""
    return tuple(layer.layer_number - 1 for layer in chunk.decoder.layers)  # type: ignore[union-attr, misc]


def moe_layer_ids(chunks: Iterable[GPTModel], all_moe_layers: Sequence[int]) -> tuple[int, ...]:
    """Global ids of the MoE layers of these chunks, in order."""
    return tuple(layer for chunk in chunks for layer in layer_ids(chunk) if layer in set(all_moe_layers))


def first_local_expert(chunk: GPTModel) -> int:
    """Global id of this rank's first expert; 0 in a dense model."""
    experts = chunk.config.num_moe_experts or 0
    size = parallel_state.get_expert_model_parallel_world_size()
    return experts // size * parallel_state.get_expert_model_parallel_rank()


def named_local_params(chunks: Iterable[GPTModel], *, tied_copies: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, local tensor) of every parameter of these chunks, and of the routers' expert bias; without
    adapters.

    Args:
        tied_copies: include the last pipeline stage's copy of a tied embedding (`output_layer.weight`), which is
            loaded but never exported.
    """
    for chunk in chunks:
        biases = [(name, tensor) for name, tensor in chunk.named_buffers() if name.endswith("router.expert_bias")]
        for name, tensor in _named(chunk, [*chunk.named_parameters(), *biases]):
            tied = name == "output_layer.weight" and chunk.share_embeddings_and_output_weights
            if not is_factor(name) and (tied_copies or not tied):
                yield name, tensor


def named_parameters(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, tensor) of a chunk's parameters, adapters included, in the order of `chunk.named_parameters`."""
    return _named(chunk, chunk.named_parameters())


def named_factors(chunks: Iterable[GPTModel]) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, local tensor) of the factors of these chunks' adapters."""
    return ((name, tensor) for chunk in chunks for name, tensor in named_parameters(chunk) if is_factor(name))


def _named(chunk: GPTModel, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    layers, first = layer_ids(chunk), first_local_expert(chunk)
    for local, tensor in tensors:
        name = canonical_name(local, first, layers)
        yield (of_all_experts(name) if hasattr(tensor, SHARED_BY_EXPERTS) else name), tensor
