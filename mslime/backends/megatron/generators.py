"""The random number generators of one rank, as arrays: Python's, numpy's, torch's and megatron-core's.

They are stored without pickle. Checkpoints of format 1 hold a pickle, which is read with torch's restricted unpickler.
"""

from __future__ import annotations

import io
import random
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker
from numpy.typing import NDArray

from mslime.data.checksums import FileSum, write_summed

_MEGATRON = "megatron/"
_OLD_CLASSES = [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]  # type: ignore[attr-defined]


def save_generators(saving: Path) -> dict[str, FileSum]:
    """Write this rank's generators into a checkpoint; returns the file's sum."""
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
        OSError, ValueError, KeyError, UnpicklingError: the file is not what `save_generators` wrote.
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
    _tracker().set_states({name: _like(own[name], arrays[f"{_MEGATRON}{name}"]) for name in own})


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


def _like(own: torch.Tensor, stored: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(stored).to(own.device)


def _tracker() -> CudaRNGStatesTracker:
    """megatron-core's generators of tensor-parallel regions."""
    return cast(CudaRNGStatesTracker, get_cuda_rng_tracker())


def _name(suffix: str) -> str:
    return f"rng/rank_{dist.get_rank():05d}{suffix}"
