"""Inside an SGLang server: send expert ids of tokens in one or two bytes each, instead of four.

SGLang 0.5.23 sends the experts of every token and layer as base64 of int32, most of an answer's bytes; few models have
more than 256 experts. A narrowed text begins with a tag that is invalid base64 (`wire.NARROW`), so no client decodes it
as int32. Other ids are sent unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mslime.engine_plugin.wire import NARROW


def narrowed(experts: torch.Tensor | None) -> tuple[str, torch.Tensor | None]:
    """The tag of the narrowest dtype for a request's experts, and the experts in it.

    Args:
        experts: int32, of any shape; None if the request needs none.
    """
    if experts is None or experts.dtype != torch.int32 or not experts.numel():
        return "", experts
    least, most = (int(found) for found in torch.aminmax(experts))
    for tag, dtype in NARROW.items():
        if least >= 0 and most <= np.iinfo(dtype).max:
            return tag, torch.from_numpy(experts.numpy().astype(dtype))
    return "", experts


def narrow(original: Any, self: Any, batch: Any) -> Any:
    """Wrapper of `DetokenizerManager.handle_batch_token_id_out`."""
    if not batch.routed_experts:
        return original(self, batch)
    found = [narrowed(experts) for experts in batch.routed_experts]
    batch.routed_experts = [experts for _, experts in found]
    answers = original(self, batch)
    answers.routed_experts = _tagged([tag for tag, _ in found], answers.routed_experts)
    return answers


def _tagged(tags: Sequence[str], texts: Sequence[str | None]) -> list[str | None]:
    return [None if text is None else tag + text for tag, text in zip(tags, texts, strict=True)]
