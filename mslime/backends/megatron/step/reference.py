"""The reference policy of the KL term: weights in host memory, swapped into the model for a pass.

For a GPU they are in blocks of pinned memory, which copies several times as fast. Pinned one by one, each weight would
take the next power of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from mslime.backends.megatron.model.chunks import load_hf_weights, named_local_params
from mslime.backends.megatron.step.offload import MemoryStore


class ReferencePolicy:
    """A host copy of another set of weights for the same model chunks."""

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
