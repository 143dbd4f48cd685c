"""Scoring given tokens on an SGLang server (0.5.23): one prefill, nothing is generated.

Which log-prob it is (read in sglang/srt/layers/logprob_processor.py and logits_processor.py, kept by tests): that of
each token of the prompt after those before it, log softmax(logits). The request's temperature does not enter, unlike
with generated tokens, and there is no setting that makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ScoreRequest:
    """One sequence to be scored.

    Attributes:
        rid: request id, unique among the requests in flight.
        input_ids: [n] token ids.
        start: first token whose log-prob is wanted, at least 1. What comes before it may be found in the prefix cache.
        session_id: requests of one session go to one engine (see `EnginePool`), which then reuses its prefix cache.
    """

    rid: str
    input_ids: Sequence[int] | NDArray[np.int32]
    start: int = 1
    session_id: str = ""

    def payload(self) -> dict[str, Any]:
        """The body of POST /generate."""
        assert 1 <= self.start < len(self.input_ids), f"start {self.start} of {len(self.input_ids)} tokens"
        return {
            "rid": self.rid,
            "input_ids": [int(t) for t in self.input_ids],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": self.start - 1,  # the engine's first entry has no log-prob
        }


def parse_scores(request: ScoreRequest, answer: dict[str, Any], vocab_size: int | None) -> NDArray[np.float32]:
    """[n] float32: index t holds the log-prob of token t, 0 before `request.start`.

    Args:
        vocab_size: of the served model, when it is known.

    Raises:
        AssertionError: the answer has not one finite log-prob for each token that was asked for.
    """
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] != "abort", f"aborted: {meta['finish_reason'].get('message')}"
    scores = np.zeros(len(request.input_ids), np.float32)
    scores[request.start :] = read_scores(meta, request.input_ids, request.start, vocab_size)
    return scores


def read_scores(
    meta: Mapping[str, Any], ids: Sequence[int] | NDArray[np.int32], start: int, vocab_size: int | None
) -> NDArray[np.float32]:
    """[n - start] float32: log-probs of the tokens from `start` on of a prompt of n. Raises like `parse_scores`."""
    asked, pairs = np.asarray(ids, np.int64)[start - 1 :], meta["input_token_logprobs"]
    assert len(pairs) == len(asked), f"{len(pairs) - 1} log-probs for {len(asked) - 1} tokens"
    found = np.asarray([pair[1] for pair in pairs], np.int64)
    # The engine reports the last id of the vocabulary as 0 (it takes it for a placeholder of an image).
    last = vocab_size is None or asked == vocab_size - 1
    assert bool(((found == asked) | ((found == 0) & last)).all()), "log-probs of other tokens"
    assert pairs[0][0] is None, f"the first entry is {pairs[0][0]}, where no log-prob is possible"
    values = np.asarray([pair[0] for pair in pairs[1:]], np.float64)
    assert bool(np.isfinite(values).all()), "log-probs that are not finite"
    return np.minimum(values, 0.0).astype(np.float32)  # log of a rounded probability can exceed 0 by an ulp
