"""The reference policy of the KL term: its weights wait in host memory and are swapped into the model for a pass.

From a GPU they go into blocks of pinned memory, which is copied to and fro several times as fast. Pinned one by one,
each weight would take the next power of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from mslime.backends.megatron.model.chunks import load_hf_weights
from mslime.backends.megatron.model.naming import named_local_params
from mslime.backends.megatron.step.asleep import MemoryStore


class ReferencePolicy:
    """A host copy of another set of weights for the same model chunks."""

    def __init__(self, chunks: Sequence[GPTModel], hf_config: Mapping[str, object], directory: Path) -> None:
        """Read the weights from a checkpoint. Overwrites the chunks' own weights: load those afterwards.

        Raises:
            CheckpointError: the checkpoint does not fit the model.
        """
        self._chunks = chunks
        load_hf_weights(chunks, hf_config, directory)
        pinned = next(_flats(chunks)).is_cuda
        self._weights, self._own = MemoryStore(pinned), MemoryStore(pinned)
        _keep(chunks, self._weights)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The chunks hold the reference weights inside, and their own again, bit for bit, afterwards."""
        _keep(self._chunks, self._own)
        _fill(self._chunks, self._weights)
        try:
            yield
        finally:
            _fill(self._chunks, self._own)


def _flats(chunks: Sequence[GPTModel]) -> Iterator[Tensor]:
    """[bytes] uint8: each weight's memory."""
    for _, tensor in named_local_params(chunks):
        yield tensor.detach().view(-1).view(torch.uint8)


def _keep(chunks: Sequence[GPTModel], store: MemoryStore) -> None:
    at = 0
    for flat in _flats(chunks):
        store.write(at, flat)
        at += flat.numel()
    _wait_for_copies()


def _fill(chunks: Sequence[GPTModel], store: MemoryStore) -> None:
    at = 0
    for flat in _flats(chunks):
        store.read(at, flat)
        at += flat.numel()
    _wait_for_copies()


def _wait_for_copies() -> None:
    """Host memory may be read, or written again, once the GPU has done with it."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
