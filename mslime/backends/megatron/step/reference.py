"""The reference policy of the KL term: its weights wait in host memory and are swapped into the model for a pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from mslime.backends.megatron.model.chunks import load_hf_weights
from mslime.backends.megatron.model.naming import named_local_params


class ReferencePolicy:
    """A host copy of another set of weights for the same model chunks."""

    def __init__(self, chunks: Sequence[GPTModel], hf_config: Mapping[str, object], directory: Path) -> None:
        """Read the weights from a checkpoint. Overwrites the chunks' own weights: load those afterwards.

        Raises:
            CheckpointError: the checkpoint does not fit the model.
        """
        self._chunks = chunks
        load_hf_weights(chunks, hf_config, directory)
        self._weights = _host_copy(chunks)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The chunks hold the reference weights inside, and their own again, bit for bit, afterwards."""
        own = _host_copy(self._chunks)
        _fill(self._chunks, self._weights)
        try:
            yield
        finally:
            _fill(self._chunks, own)


def _host_copy(chunks: Sequence[GPTModel]) -> list[Tensor]:
    """The weights in host memory: from a GPU into pinned memory, which is copied to and fro several times as fast.

    torch keeps freed pinned memory for the next pass.
    """
    copies: list[Tensor] = []
    for _, tensor in named_local_params(chunks):
        copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        copies.append(copy.copy_(tensor.detach(), non_blocking=True))
    _wait_for_copies()
    return copies


@torch.no_grad()
def _fill(chunks: Sequence[GPTModel], weights: Sequence[Tensor]) -> None:
    for (_, tensor), value in zip(named_local_params(chunks), weights, strict=True):
        tensor.copy_(value, non_blocking=True)
    _wait_for_copies()


def _wait_for_copies() -> None:
    """Host memory may be read, or freed, once the GPU has done with it."""
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
