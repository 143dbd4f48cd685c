"""Which tokens end a response at an SGLang server, and where one ended although the server says that it was aborted.

SGLang tests for an abort before it tests for an end (`Req.update_finish_state`, 0.5.23): when the token sampled last
ends the response and an abort came in the same step, the answer says `abort`. And it looks for stop texts in the tokens
of one request only, so one that begins before an abort and ends after it goes unseen. Continued, such a response would
grow beyond its end.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mslime.backends.sglang.generating import GenerateResult
from mslime.config.errors import DataError, reading
from mslime.config.hf_config import eos_ids
from mslime.data.tokenizer import Tokenizer

_STOP_TEXTS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Added tokens that end a response wherever a tokenizer has them (`attach_additional_stop_token_ids`)."""


def end_ids(checkpoint: Path | str, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end a response without being asked for: of config.json, generation_config.json and the tokenizer.

    Raises DataError when one of the files cannot be read.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = Path(checkpoint) / name
        if path.is_file():
            with reading(DataError, str(path), "is no JSON with integer eos_token_ids", "download the file again"):
                found |= set(eos_ids(json.loads(path.read_text(encoding="utf-8"))))
    encoded = [tokenizer.encode(text, special_tokens=False) for text in _STOP_TEXTS]
    found |= {ids[0] for ids in encoded if len(ids) == 1}
    return frozenset(found if tokenizer.eos_token_id is None else found | {tokenizer.eos_token_id})


class Endings:
    """Ends of responses that were interrupted.

    Args:
        ids: tokens that end a response.
        texts: that end a response, their last token included.
    """

    def __init__(self, ids: Collection[int], texts: Sequence[str], tokenizer: Tokenizer) -> None:
        self._ids, self._texts, self._tokenizer = frozenset(ids), tuple(texts), tokenizer
        self._reach = max((len(text.encode()) for text in texts), default=0)  # tokens: each has a byte at least

    def settled(self, before: NDArray[np.int32], result: GenerateResult) -> GenerateResult:
        """The answer as it would be if the response before it and its tokens were of one request.

        Args:
            before: [m] tokens that the response has already.
        """
        n = len(result.output_ids)
        if n == 0:
            return result
        added = result.output_ids.tolist()
        if (end := self._straddling(before, added)) is not None:
            return head(result, end)
        if result.finish == "abort" and (added[-1] in self._ids or self._ends_in_text(added)):
            return dataclasses.replace(result, finish="stop")
        return result

    def _straddling(self, before: NDArray[np.int32], added: Sequence[int]) -> int | None:
        """How many of the new tokens complete a stop text that begins in the old ones; None when there is none."""
        tail = before[-self._reach :].tolist() if self._reach else []
        if not tail:
            return None
        return next((k for k in range(1, min(len(added), self._reach) + 1) if self._in([*tail, *added[:k]])), None)

    def _ends_in_text(self, added: Sequence[int]) -> bool:
        return bool(self._texts) and self._in(added[-self._reach :])

    def _in(self, ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(ids, special_tokens=True)
        return any(stop in text for stop in self._texts)


def head(result: GenerateResult, n: int) -> GenerateResult:
    """The first `n` tokens of an answer, as one that ended with them; n >= 1."""
    cut = len(result.output_ids) - n
    return dataclasses.replace(
        result,
        output_ids=result.output_ids[:n],
        log_probs=result.log_probs[:n],
        finish="stop",
        versions=tuple((version, start, min(end, n)) for version, start, end in result.versions if start < n),
        routes=None if result.routes is None else result.routes[: len(result.routes) - cut],
        supports=None if result.supports is None else result.supports.first(n),
        text="",
    )
