"""Asks megatron-core, through a model without memory, how it stores each parameter of a model in a checkpoint.

The answer does not depend on the layout: megatron-core names stored tensors by global layers and experts, and every
layout writes boxes of the same tensors. One rank that holds the whole model therefore knows everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch import Tensor

from mslime.backends.megatron.checkpoint_files import SHARDING
from mslime.backends.megatron.model.meta_model import fake_process_group, meta_chunks
from mslime.backends.megatron.step.own_state import parts_of_entry
from mslime.config.layout import ParallelLayout
from mslime.config.megatron import MegatronConfig
from mslime.config.training import ModelSpec
from mslime.convert.families import get_family
from mslime.convert.parameter_names import canonical_name
from mslime.convert.placement import ModelPlacement, ParameterBox, whole


def model_placement(hf_config: Mapping[str, object], directory: Path) -> ModelPlacement:
    """How a checkpoint of this model is laid out: every parameter, multi-token prediction's included.

    Args:
        directory: of the Hugging Face checkpoint; only named, not read.

    Raises:
        CheckpointError: the architecture is not supported.
    """
    one_rank = ModelSpec(checkpoint=directory, layout=ParallelLayout(), megatron=MegatronConfig(), device="cpu")
    pieces: dict[str, tuple[ParameterBox, ...]] = {}
    objects: list[str] = []
    with fake_process_group(one_rank.layout):
        (chunk,) = meta_chunks(one_rank, hf_config, mtp=True)
        metadata = SHARDING | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        for local, entry in chunk.sharded_state_dict(metadata=metadata).items():
            if isinstance(entry, ShardedObject):
                objects.append(entry.unique_key)
                continue
            parts = parts_of_entry(entry)
            pieces[canonical_name(local)] = tuple(_piece(part, cast("Tensor", entry.data)) for part in parts)
    table = get_family(hf_config).rules(hf_config)
    for name, rule in table.all_bound.items():
        if rule.untrained and name not in pieces:
            pieces[name] = (whole(rule),)
    placement = ModelPlacement(pieces, objects)
    placement.check(table)
    return placement


def _piece(part: ShardedTensor, parameter: Tensor) -> ParameterBox:
    data = cast("Tensor", part.data)
    owner = data if data._base is None else data._base
    assert parameter.is_contiguous() and (owner is parameter or owner is parameter._base or data is parameter), (
        f"{part.key}: stored from a copy, not from a view of the parameter"
    )
    sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    return ParameterBox(
        part.key, tuple(part.global_shape), tuple(part.global_offset), sizes,
        int(data.storage_offset()) - int(parameter.storage_offset()), tuple(data.shape), data.stride(),
    )  # fmt: skip
