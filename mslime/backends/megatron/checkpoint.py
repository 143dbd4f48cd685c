"""Saving and resuming the trainer: weights, optimizer, schedule, random number generators and the caller's `extra`.

Weights and optimizer go through megatron-core's distributed checkpoints (`torch_dist`, fully reshardable), so a
checkpoint of one parallel layout resumes in any other. `data.checkpoints` makes them atomic. At the end of every stage
all ranks agree that it succeeded: a rank whose disk is full fails the save on every rank, with its reason, and no rank
waits in a collective.

Random number generators are restored rank by rank if the layout is unchanged. Under another layout ranks do not
correspond, and generators stay as the trainer seeded them from `seed`.
"""

from __future__ import annotations

import io
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.serialization import get_default_save_common_strategy
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker
from numpy.typing import NDArray
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from mslime.backends.megatron.checkpoint_files import SHARDING, InProcessSave, SafeLoad
from mslime.backends.megatron.step.optimizer import begin_states, load_states, states_of, without_classes
from mslime.config.errors import CheckpointError
from mslime.data import checkpoints
from mslime.data.checkpoints import FileSum, check_sums, read_manifest, share, write_summed

# The random number generators of one rank, as arrays: Python's, numpy's, torch's and megatron-core's.
#
# They are stored without pickle. Checkpoints of format 1 contain a pickle, which torch's restricted unpickler reads.

_MEGATRON = "megatron/"
_OLD_CLASSES = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]  # type: ignore[attr-defined]


def save_generators(saving: Path) -> dict[str, FileSum]:
    """Write this rank's generators into a checkpoint; returns the file's checksum."""
    version, words, gauss = random.getstate()
    bits: dict[str, Any] = cast("dict[str, Any]", np.random.get_state(legacy=False))
    arrays: dict[str, Any] = {
        "python": np.asarray(words, np.uint32),
        "python_rest": np.asarray([version, np.nan if gauss is None else gauss]),
        "numpy": bits["state"]["key"],
        "numpy_rest": np.asarray([bits["state"]["pos"], bits["has_gauss"], bits["gauss"]]),
        "torch": torch.get_rng_state().numpy(),
    }
    if torch.cuda.is_available():
        arrays["cuda"] = torch.cuda.get_rng_state().numpy()
    arrays |= {f"{_MEGATRON}{name}": state.cpu().numpy() for name, state in _tracker().get_states().items()}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    name = _name(".npz")
    (saving / name).parent.mkdir(exist_ok=True)
    return {name: write_summed(saving / name, buffer.getvalue())}


def load_generators(directory: Path) -> None:
    """Set this rank's generators from a checkpoint of the same layout.

    Raises:
        OSError, ValueError, KeyError, UnpicklingError: the file was not written by `save_generators`, or is damaged.
    """
    if not (directory / _name(".npz")).exists():
        _load_old(directory / _name(".pt"))
        return
    with np.load(directory / _name(".npz"), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    version, gauss = arrays["python_rest"].tolist()
    random.setstate((int(version), tuple(arrays["python"].tolist()), None if np.isnan(gauss) else gauss))
    pos, has_gauss, last = arrays["numpy_rest"].tolist()
    _set_numpy(arrays["numpy"], int(pos), int(has_gauss), last)
    torch.set_rng_state(torch.from_numpy(arrays["torch"]))
    if "cuda" in arrays and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(arrays["cuda"]))
    own = _tracker().get_states()
    stored = {name: torch.from_numpy(arrays[f"{_MEGATRON}{name}"]) for name in own}
    _tracker().set_states({name: state.to(own[name].device) for name, state in stored.items()})


def _load_old(path: Path) -> None:
    with torch.serialization.safe_globals(_OLD_CLASSES):
        state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise UnpicklingError(f"{path} is not a checkpoint's generators")
    random.setstate(state["python"])
    bits = state["numpy"]
    _set_numpy(bits["state"]["key"], bits["state"]["pos"], bits["has_gauss"], bits["gauss"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    _tracker().set_states(state["megatron"])


def _set_numpy(key: NDArray[np.uint32], pos: int, has_gauss: int, gauss: float) -> None:
    np.random.set_state(
        {"bit_generator": "MT19937", "state": {"key": key, "pos": pos}, "has_gauss": has_gauss, "gauss": gauss}
    )


def _tracker() -> CudaRNGStatesTracker:
    """megatron-core's generators of tensor-parallel regions."""
    return cast(CudaRNGStatesTracker, get_cuda_rng_tracker())


def _name(suffix: str) -> str:
    return f"rng/rank_{dist.get_rank():05d}{suffix}"


T = TypeVar("T")

# torch's CheckpointException does not derive from Exception. A dead rank appears as a RuntimeError of the collective.
FAILURES = (
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    UnpicklingError,
    CheckpointingException,
    CheckpointException,
)
HEADROOM = 1.05
"""Required free space before writing, as a multiple of the tensors' bytes."""


def save_checkpoint(
    directory: Path,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    *,
    layout: str,
    extra: dict[str, Any],
    others: Mapping[str, FileSum] | None = None,
    compare_ranks: bool = True,
) -> None:
    """Write a complete checkpoint to `directory`, or nothing. A collective of all trainer ranks.

    Args:
        directory: the checkpoint's own directory, on a file system that all ranks share; replaced if it exists.
        chunks: unwrapped model chunks, in virtual-stage order.
        layout: `ParallelLayout.describe()`.
        extra: JSON values, the same on every rank; comes back from `load_checkpoint`.
        others: files that other processes have written into `checkpoints.saving_directory`, which they created; None if
            it does not exist yet.
        compare_ranks: check first that the ranks' shares cover every tensor exactly once, by exchanging names and
            places of all tensors. One check per process suffices.

    Raises:
        CheckpointError: on every rank, if one of them cannot write. Older checkpoints are untouched.
    """
    saving, fail = checkpoints.saving_directory(directory), partial(_cannot_write, directory)
    try:
        if others is None:
            _together(lambda: _on_rank_0(lambda: checkpoints.begin(directory)), fail)
        state = _together(lambda: _state(chunks, optimizer, schedule, is_loading=False), fail)
        # The rest, which is the same on every rank, is split off from the sharded tensors.
        parts = _together(lambda: save_preprocess(state, validate_access_integrity=compare_ranks), fail)
        tensors, common = cast("tuple[dict[str, Any], dict[str, Any]]", parts)
        _check_space(directory, tensors)
        _together(lambda: get_default_save_common_strategy().save_common(common, saving), fail)
        sums = _together(lambda: save_generators(saving), fail)
        # Each rank writes its share; data-parallel replicas share the writing.
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = InProcessSave()
        writer = FullyParallelSaveStrategyWrapper(strategy, cast(dist.ProcessGroup, group))
        _together(lambda: writer.save(tensors, saving), fail)
        sums |= strategy.sums
        everyone: list[dict[str, FileSum]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, sums)
        every_sum = {name: total for of_rank in everyone for name, total in of_rank.items()} | dict(others or {})

        def finish() -> None:
            save_config(CheckpointingConfig("torch_dist", 1), str(saving))
            checkpoints.complete(saving, directory, layout, dist.get_world_size(), extra, every_sum)

        _together(lambda: _on_rank_0(finish), fail)
    except CheckpointError:
        _on_rank_0(lambda: shutil.rmtree(saving, ignore_errors=True))
        raise


def load_checkpoint(
    directory: Path,
    chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    *,
    layout: str,
) -> dict[str, Any]:
    """Restore a checkpoint of `save_checkpoint` in this or another layout; returns its `extra`. A collective.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged (naming the file) or is of another model.
    """
    fail = partial(_cannot_read, directory)
    written = _together(lambda: read_manifest(directory, check_files=dist.get_rank() == 0), fail)
    # This rank compares its share of the files with their checksums; the rollout service checks its own file.
    mine = dict(written.files)
    mine.pop(checkpoints.rollouts_file(written) or "", None)
    of_rank = share(mine, dist.get_rank(), dist.get_world_size())
    _together(lambda: check_sums(directory, of_rank, threads=2), fail)

    def load() -> dict[str, Any]:
        state = _state(chunks, optimizer, schedule, is_loading=True)
        return cast("dict[str, Any]", dist_checkpointing.load(state, str(directory), sharded_strategy=SafeLoad()))

    state = _together(load, fail)

    def take() -> None:
        for key, chunk in _named(chunks):
            chunk.load_state_dict(state[key], strict=True)
        load_states(optimizer, state["optimizer"])
        schedule.load_state_dict(state["schedule"])

    _together(take, fail)
    if written.layout == layout and written.world_size == dist.get_world_size():
        _together(lambda: load_generators(directory), fail)
    return written.extra


def _named(chunks: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Chunks under the keys they have in the state; tensors are stored under global layer names, not under these."""
    return [(f"model{stage}", chunk) for stage, chunk in enumerate(chunks)]


def _state(
    chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, schedule: OptimizerParamScheduler, *, is_loading: bool
) -> dict[str, Any]:
    """The sharded state dict of this rank."""
    begin_states(optimizer)
    metadata = SHARDING | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {
        key: chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        for key, chunk in _named(chunks)
    }
    held = states_of(optimizer, dict(state), is_loading=is_loading, metadata=metadata)
    state["optimizer"] = without_classes(held)
    state["schedule"] = schedule.state_dict()
    return state


def _check_space(directory: Path, tensors: dict[str, Any]) -> None:
    """Raise CheckpointError, before anything large is written, if the disk is too small for all ranks' tensors."""
    mine = sum(
        tensor.data.nbytes
        for tensor in nested_values(tensors)
        if isinstance(tensor, ShardedTensor) and tensor.data is not None and is_main_replica(tensor.replica_id)
    )
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"  # of this process group's collectives
    needed = torch.tensor([mine, 0], dtype=torch.int64, device=device)
    dist.all_reduce(needed)
    if dist.get_rank() == 0:
        needed[1] = shutil.disk_usage(directory.parent).free
    dist.broadcast(needed, src=0)
    size, free = needed.tolist()
    if free < size * HEADROOM:
        raise CheckpointError(
            str(directory), f"{free} bytes free", f"the checkpoint needs {int(size * HEADROOM)} bytes",
            "free space there, lower checkpoint.keep, or point output_dir at a larger disk",
        )  # fmt: skip


def _on_rank_0(work: Callable[[], object]) -> None:
    if dist.get_rank() == 0:
        work()


def _together(work: Callable[[], T], describe: Callable[[str], CheckpointError]) -> T:
    """Run `work` on every rank; if it fails on one, fail on all, with the error that `describe` makes of the reason."""
    result, mistake, cause = None, None, None
    try:
        result = work()
    except CheckpointError as error:
        mistake = error
    except FAILURES as error:
        rank, cause = dist.get_rank(), error
        failure: BaseException = error
        if isinstance(error, CheckpointException) and error.failures:  # it carries the failures of all ranks
            rank, (failure, _) = next(iter(error.failures.items()))
        mistake = describe(f"{type(failure).__name__} on rank {rank}: {failure}")
    mistakes: list[CheckpointError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(mistakes, mistake)
    first = next((m for m in mistakes if m is not None), None)
    if first is not None:
        raise first from cause
    return cast(T, result)


def _cannot_write(directory: Path, reason: str) -> CheckpointError:
    existing = next(parent for parent in [directory, *directory.absolute().parents] if parent.exists())
    return CheckpointError(
        str(directory), f"{shutil.disk_usage(existing).free} bytes free", f"saving failed: {reason}",
        "free space there or fix the file system; older checkpoints are untouched",
    )  # fmt: skip


def _cannot_read(directory: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        str(directory), reason, "must be a readable checkpoint of the trained model",
        "resume with the model and megatron.use_distributed_optimizer of its run, or from an older checkpoint",
    )  # fmt: skip
