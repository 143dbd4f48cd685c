"""A server that holds a teacher, met before a run depends on it: does it speak the student's tokens, and score them?

A token id beyond a model's vocabulary kills an SGLang server, so how many ids the teacher embeds must be known, and
log-probs of other words would train silently on nonsense, so its tokenizer must be the student's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.scoring import ScoreRequest
from mslime.config.errors import CheckpointError, EngineError
from mslime.config.hf_config import language_model, read_hf_config
from mslime.config.model_facts import ModelFacts
from mslime.data.tokenizer import Tokenizer, first_difference, probe_texts

_PROBE = (1, 2, 3, 4)


async def meet_teachers(clients: Sequence[EngineClient], tokenizer: Tokenizer, vocab_size: int, longest: int) -> None:
    """`meet_teacher` with every server at once."""
    await asyncio.gather(*(meet_teacher(client, tokenizer, vocab_size, longest) for client in clients))


async def meet_teacher(client: EngineClient, tokenizer: Tokenizer, vocab_size: int, longest: int) -> None:
    """Check one server, and tell its client how many ids it embeds.

    Args:
        tokenizer, vocab_size: of the student; rows of its embedding.
        longest: tokens of a sequence that is sure to be scored.

    Raises:
        EngineError: the server is not there, is of other words or too few, is too short, or does not score.
    """
    with client.reading("handshake"):
        await _meet(client, tokenizer, vocab_size, longest)


async def _meet(client: EngineClient, tokenizer: Tokenizer, vocab_size: int, longest: int) -> None:
    info = await client.server_info()
    rows = embedding_rows(Path(str(info.get("model_path", ""))))
    if rows is not None and rows < vocab_size:
        raise EngineError(
            client.name,
            f"a vocabulary of {rows}",
            f"the teacher embeds fewer token ids than the student, which may sample any of {vocab_size}",
            "serve a teacher of the student's family",
        )
    await _compare_tokenizers(client, tokenizer)
    # Where its checkpoint is out of sight, it embeds at least the tokens of its tokenizer, which is ours.
    rows = rows or tokenizer.vocab_size
    client.model = ModelFacts(
        vocab_size=rows, max_positions=longest, num_layers=0, moe_layer_ids=(), num_experts=0, top_k=0
    )
    limit = info.get("max_req_input_len")
    if isinstance(limit, int) and longest >= limit:
        raise EngineError(
            client.name,
            f"at most {limit - 1} tokens",
            f"the teacher must score sequences of {longest} tokens and more",
            "start it with a longer context, or lower rollout.max_response_tokens or rollout.max_total_tokens",
        )
    scores = await client.score(ScoreRequest(f"handshake-{client.name}-{secrets.token_hex(8)}", _PROBE))
    if not (np.count_nonzero(scores) and scores[0] == 0):
        raise client.error("scores", f"{len(_PROBE)} tokens were scored as {scores.tolist()}")


def embedding_rows(checkpoint: Path) -> int | None:
    """Token ids that a checkpoint's model embeds; None when its config.json cannot be read on this machine."""
    try:
        config = read_hf_config(checkpoint)
    except CheckpointError:
        return None
    return int(language_model(config)["vocab_size"])


async def _compare_tokenizers(client: EngineClient, tokenizer: Tokenizer) -> None:
    texts = probe_texts(tokenizer)
    try:
        theirs = await client.tokenize(texts)
    except EngineError as error:
        raise client.error("/tokenize", f"its tokenizer cannot be compared with the student's: {error.rule}") from error
    different = first_difference(texts, [tokenizer.encode(text, special_tokens=False) for text in texts], theirs)
    if different:
        raise EngineError(
            client.name,
            "its tokenizer",
            f"a teacher needs the student's tokenizer, but {different}",
            "serve a teacher of the student's family, with its tokenizer",
        )
