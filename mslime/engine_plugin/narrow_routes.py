"""Inside an SGLang server: the experts of tokens leave it in one byte each, or in two, instead of four.

SGLang 0.5.23 sends the experts of every token and layer as base64 of int32, most of an answer's bytes; few models have
more than 256 experts. The text then begins with a tag that is no base64 (`wire.NARROW`), so that nobody reads it as
int32. What cannot be narrowed is sent as SGLang sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mslime.engine_plugin.wire import NARROW


def narrowed(experts: torch.Tensor | None) -> tuple[str, torch.Tensor | None]:
    """The experts of a request in the narrowest dtype that holds them, and the tag of that one.

    Args:
        experts: int32, of any shape; None for a request that did not ask for them.
    """
    if experts is None or experts.dtype != torch.int32 or not experts.numel():
        return "", experts
    least, most = (int(found) for found in torch.aminmax(experts))
    for tag, dtype in NARROW.items():
        if least >= 0 and most <= np.iinfo(dtype).max:
            return tag, torch.from_numpy(experts.numpy().astype(dtype))
    return "", experts


def narrow(original: Any, self: Any, batch: Any) -> Any:
    """Around `DetokenizerManager.handle_batch_token_id_out`."""
    if not batch.routed_experts:
        return original(self, batch)
    found = [narrowed(experts) for experts in batch.routed_experts]
    batch.routed_experts = [experts for _, experts in found]
    answers = original(self, batch)
    answers.routed_experts = _tagged([tag for tag, _ in found], answers.routed_experts)
    return answers


def _tagged(tags: Sequence[str], texts: Sequence[str | None]) -> list[str | None]:
    return [None if text is None else tag + text for tag, text in zip(tags, texts, strict=True)]
