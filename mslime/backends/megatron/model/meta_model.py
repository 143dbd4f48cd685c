"""A trainer rank's model without its memory: on the meta device, in a world of which only this process exists.

Used where only names and shapes matter: learning how megatron-core stores a model in a checkpoint, and checking the
conversion rules of a full-size model in a layout of any size. Never in a process that trains.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel

from mslime.backends.megatron.model.chunks import build_chunks
from mslime.backends.megatron.model.settings import transformer_config
from mslime.backends.megatron.parallel import make_model_parallel_groups
from mslime.config.layout import ParallelLayout
from mslime.config.training import ModelSpec
from mslime.convert.families import get_family
from mslime.convert.families.mtp import mtp_depth


@contextmanager
def fake_process_group(layout: ParallelLayout, rank: int = 0) -> Generator[None]:
    """Rank `rank` of a world whose other ranks are not there: groups exist, collectives must not be entered."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "this process already belongs to a world"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        make_model_parallel_groups(layout, create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def meta_chunks(spec: ModelSpec, hf_config: Mapping[str, object], mtp: bool = False) -> list[GPTModel]:
    """The chunks that `build_chunks` would give this rank, all parameters on the meta device.

    Call it within `fake_process_group`.

    Args:
        mtp: with the checkpoint's multi-token-prediction layers, which a trainer leaves out.
    """
    device = torch.device("cpu")
    settings, family = transformer_config(spec, hf_config, device), get_family(hf_config)
    settings.perform_initialization = False
    depth = mtp_depth(family.rules(hf_config))
    settings.mtp_num_layers = depth if mtp else None
    with torch.device("meta"):
        return build_chunks(settings, family.model_fields(hf_config), torch.device("meta"), mtp and depth > 0)
