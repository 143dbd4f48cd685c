"""Process groups and seeds of one trainer rank, and the rank's position in them.

megatron-core keeps its groups as process globals; this module sets them up once and wraps the operations that the
trainer needs. Every group has a deadline: a missing rank fails the others instead of hanging them.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed.rendezvous import rendezvous

from mslime.backends.megatron.step.batches import RowLayout
from mslime.config.errors import TrainerError
from mslime.config.layout import ParallelLayout
from mslime.config.resolved import TrainingSpec


def start_process_groups(
    spec: TrainingSpec, rank: int, world_size: int, init_method: str, device: torch.device
) -> None:
    """Join the trainer's processes and build megatron-core's groups; seed everything that draws random numbers.

    Args:
        init_method: address of the rendezvous, for example `tcp://host:port`.

    Raises:
        TrainerError: the number of processes differs from the layout's, or a rank did not connect in time.
    """
    layout = spec.layout
    if world_size != layout.world_size:
        raise TrainerError(
            "trainer ranks", world_size, f"the layout {layout.describe()} needs {layout.world_size}",
            "start that many, or change the parallel sizes",
        )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(spec.threads)
    seconds, longest = spec.deadlines.trainer_start_s, max(spec.deadlines.train_step_s, spec.deadlines.weight_sync_s)
    try:
        store = next(rendezvous(init_method, rank, world_size, timeout=timedelta(seconds=seconds)))[0]
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise TrainerError(
            "deadlines.trainer_start_s", seconds,
            f"rank {rank} of {world_size} waited this long at {init_method} for the others: {error}",
            "read the log of the rank that died or did not start",
        ) from error  # fmt: skip
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=longest),
    )  # fmt: skip
    make_model_parallel_groups(layout, distributed_timeout_minutes=math.ceil(longest / 60))
    # Stages differ, ranks of one stage agree, tensor-parallel regions follow megatron-core.
    stage_seed = spec.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def make_model_parallel_groups(layout: ParallelLayout, **options: Any) -> None:
    """megatron-core's groups of a layout, in the world that this process has joined.

    Args:
        options: further ones of `initialize_model_parallel`.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        **options,
    )


def stop_process_groups() -> None:
    """Leave all groups; a new trainer may be built in this process afterwards."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(frozen=True)
class ParallelState:
    """This rank's parallel state.

    Attributes:
        rank, world_size: over all trainer ranks.
        tp_rank, tp_size: tensor parallel.
        is_last_stage: this rank computes the loss.
        counts: whether this rank counts its tokens in statistics: exactly one rank of each (data-parallel,
            context-parallel) pair does.
        rows: distribution of a micro-batch's rows.
        tp_group, cp_group, dp_group, pp_group: its tensor, context, data and pipeline parallel groups.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    is_last_stage: bool
    counts: bool
    rows: RowLayout
    tp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup

    @classmethod
    def here(cls, sequence_parallel: bool, multiple: int = 1) -> ParallelState:
        """This process's place in the groups that megatron-core holds.

        Args:
            multiple: see `RowLayout`.
        """
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        tp_size = parallel_state.get_tensor_model_parallel_world_size()
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        rows = RowLayout(
            cp=parallel_state.get_context_parallel_world_size(),
            cp_rank=parallel_state.get_context_parallel_rank(),
            sp=tp_size if sequence_parallel else 1,
            sp_rank=tp_rank if sequence_parallel else 0,
            multiple=multiple,
        )
        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            tp_rank=tp_rank,
            tp_size=tp_size,
            is_last_stage=last,
            counts=last and tp_rank == 0,
            rows=rows,
            tp_group=_one_group(parallel_state.get_tensor_model_parallel_group()),
            cp_group=_one_group(parallel_state.get_context_parallel_group()),
            dp_group=_one_group(parallel_state.get_data_parallel_group()),
            pp_group=_one_group(parallel_state.get_pipeline_model_parallel_group()),
        )

    def sum_over_context_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Sum in place over the ranks that hold other rows of the same sequences."""
        if self.cp_group.size() > 1:
            dist.all_reduce(values, group=self.cp_group)
        return values

    def broadcast_from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast `tensor` from the last pipeline stage to every stage, in place."""
        if self.pp_group.size() > 1:
            dist.broadcast(tensor, parallel_state.get_pipeline_model_parallel_last_rank(), group=self.pp_group)
        return tensor


def tensor_shard(expert: bool) -> tuple[int, int]:
    """(rank, size) of this rank among those that share a weight: tensor parallel, or expert-tensor parallel."""
    if expert:
        rank = parallel_state.get_expert_tensor_parallel_rank()
        size = parallel_state.get_expert_tensor_parallel_world_size()
    else:
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
    return cast("int", rank), cast("int", size)


def _one_group(group: object) -> dist.ProcessGroup:
    """Check that a getter returned one group: megatron-core's return other types for layouts that are not used here."""
    assert isinstance(group, dist.ProcessGroup), group
    return group
