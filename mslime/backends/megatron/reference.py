"""The reference policy of the KL term: its weights wait in host memory and are swapped into the model for a pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from mslime.backends.megatron.model import load_hf_weights
from mslime.backends.megatron.naming import named_local_params


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
    return [tensor.detach().to("cpu", copy=True) for _, tensor in named_local_params(chunks)]


@torch.no_grad()
def _fill(chunks: Sequence[GPTModel], weights: Sequence[Tensor]) -> None:
    for (_, tensor), value in zip(named_local_params(chunks), weights, strict=True):
        tensor.copy_(value)
