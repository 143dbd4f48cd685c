"""What every rank of an engine must hold, worked out from the Hugging Face tensors that the trainer sends.

An engine joins and shares out the tensors that it loads; `convert.engine` says how. Here the same parameters are built
shard by shard, and only their digests are kept: comparing them with the engine's own compares every bit of every
parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch

from mslime.config.layout import EngineLayout
from mslime.convert.engine import EngineParameter

Digest = Callable[[torch.Tensor], str]
"""What an engine on the same kind of device reports for a tensor."""


class ExpectedDigests:
    """Collects Hugging Face tensors in any order; a parameter's digests are taken when its last tensor arrives.

    Args:
        hf_names: the tensors that will arrive.
        parameters: the engine's, of the whole model; those whose tensors will not arrive are left out.
        layout: the engine's.
        digest: of a rank's share of a parameter.

    Attributes:
        digests: for each rank of the engine, the digest of every parameter completed so far.
    """

    def __init__(
        self,
        hf_names: Collection[str],
        parameters: Iterable[EngineParameter],
        layout: EngineLayout,
        digest: Digest,
    ) -> None:
        self._layout, self._digest = layout, digest
        wanted = [parameter for parameter in parameters if parameter.parts[0] in hf_names]
        self._parameter = {name: parameter for parameter in wanted for name in parameter.parts}
        unknown = set(hf_names) ^ self._parameter.keys()
        assert not unknown, f"the engine's parameters and what is sent differ in {sorted(unknown)[:3]}"
        self._parts: dict[str, dict[str, torch.Tensor]] = {}
        self.digests: list[dict[str, str]] = [{} for _ in range(layout.tp)]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One Hugging Face tensor; copied when it has to wait for others."""
        parameter = self._parameter[name]
        parts = self._parts.setdefault(parameter.name, {})
        last = len(parts) + 1 == len(parameter.parts)
        parts[name] = tensor if last else tensor.clone()
        if last:
            del self._parts[parameter.name]
            for rank, digests in enumerate(self.digests):
                digests[parameter.name] = self._digest(parameter.local(parts, rank, self._layout))
