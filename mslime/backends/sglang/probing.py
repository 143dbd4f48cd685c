"""Asking an SGLang server (0.5.23) for a fixed text: its log-probs and routes, and what follows it.

The text is computed in one prefill, the tokens after it one by one. Some models do the two by different weights:
DeepSeek's attention reads the projections themselves in a prefill, and what it derived from them in a decoding step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mslime.backends.sglang.generating import GenerateRequest, GenerateResult, parse_generation
from mslime.backends.sglang.scoring import ScoreRequest, parse_scores
from mslime.config.model_facts import ModelFacts
from mslime.data.probe import NEW_TOKENS, Probed


@dataclass(frozen=True)
class ProbeRequest:
    """A text to be scored and continued, greedily.

    Attributes:
        rid: request id, unique among the requests in flight.
        input_ids: [T] token ids, at least 2.
        version: of the weights that must answer.
        want_routes: return the experts of every token but the last.
        adapter: which of a run's several adapters answers; empty in a run of one, or of none.
    """

    rid: str
    input_ids: Sequence[int]
    version: int
    want_routes: bool
    adapter: str = ""

    @property
    def generation(self) -> GenerateRequest:
        """The continuation. Its cache key keeps it apart from what other weights, and other requests, computed."""
        return GenerateRequest(
            self.rid, self.input_ids, NEW_TOKENS, temperature=0.0, ignore_eos=True, want_routes=self.want_routes,
            cache_key=self.rid,
        )  # fmt: skip

    def payload(self) -> dict[str, Any]:
        """The body of POST /generate."""
        return self.generation.payload() | {"logprob_start_len": 0}


def parse_probe(
    request: ProbeRequest, answer: dict[str, Any], engine: str, model: ModelFacts, adapter: bool = False
) -> Probed:
    """What a probe found. Raises one of MALFORMED, also for an answer of another weight version.

    Args:
        adapter: it was answered with the adapter of its version, of which the engine says nothing.
    """
    text = parse_scores(ScoreRequest(request.rid, request.input_ids), answer, model.vocab_size)
    return probed(request, text, parse_generation(request.generation, answer, engine, model), model, adapter)


def probed(
    request: ProbeRequest, text: NDArray[np.float32], new: GenerateResult, model: ModelFacts, adapter: bool = False
) -> Probed:
    """What `parse_probe` returns and raises.

    Args:
        text: [T] log-probs of the text.
        new: what was added to it.
    """
    assert len(new.output_ids) == NEW_TOKENS, f"{len(new.output_ids)} tokens of {NEW_TOKENS}, finished by {new.finish}"
    versions = {version for version, _, _ in new.versions}
    assert adapter or versions == {request.version}, f"weights of version {versions}, and {request.version} was asked"
    return Probed(
        np.concatenate([np.asarray(request.input_ids, np.int32), new.output_ids]),
        len(text),
        np.concatenate([text, new.log_probs]),
        None if new.routes is None else new.routes[:, list(model.moe_layer_ids)],
    )
