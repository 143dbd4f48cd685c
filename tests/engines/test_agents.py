"""An agent that uses only OpenAI's client, on a real SGLang server: transformers scores each token again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mslime.data.tokenizer import HFTokenizer
from tests.engines.conftest import SharedServer
from tests.engines.reference import Reference
from tests.engines.test_rollout_service import (
    assert_scored,
    config_for,
    fresh,
    other_weights,
    publish,
    reference,
    service_for,
    tokenizer,
)

__all__ = ["fresh", "other_weights", "reference", "tokenizer"]


@pytest.mark.nightly
async def test_two_turns_with_a_tool_are_exact_when_the_weights_change_within_a_turn(
    fresh: SharedServer, tokenizer: HFTokenizer, reference: Reference, other_weights: Path, tmp_path: Path
) -> None:
    """Log-probs and routes of each segment are those of the weights of its version, read over the whole sequence."""
    # Five of 24 turns at a time: when the first batch is whole, others are in the middle of theirs.
    config = config_for(
        fresh, tmp_path, stop_ids=0, max_staleness=1, group_size=2, max_response_tokens=800, concurrency=5,
        function="tests.unit.user_agents:two_long_turns_with_openai",
        renderer="tests.unit.user_agents:CallsThenAnswers",
    )  # fmt: skip
    async with service_for(config, tokenizer, fresh) as (service, pool):
        first = await service.take(0)
        await publish(service, pool, 1, other_weights)
        second = await service.take(1)
        samples, by_version = [*first.samples, *second.samples], {0: reference, 1: Reference(other_weights)}
        for sample in samples:
            assert_scored(sample, by_version)
        assert first.metrics["rollout/turns"] == second.metrics["rollout/turns"] == 2
        parts = Counter(s.rollout for s in samples)
        whole = [s for s in samples if parts[s.rollout] == 1]
        assert len(whole) > len(samples) / 2, "a stop token in mid-reply begins a sequence; few replies have one"
        for sample in whole:
            tool = next(s for s in sample.segments[2:] if s.version is None)
            assert "<tool_response>\n5\n</tool_response>" in tokenizer.decode(sample.tokens[tool.start : tool.end])
            assert not sample.loss_mask[tool.start : tool.end].any()
        crossed = [s for s in samples if [0, 1] in versions_within_a_turn(s)]
        assert crossed, "no turn was under way when the weights changed"
        for batch in (first, second):
            told = {k: v for k, v in batch.metrics.items() if k.startswith("ledger/")}
            assert told["ledger/trained_tokens"] == sum(s.trainable_tokens for s in batch.samples)


def versions_within_a_turn(sample: object) -> list[list[int]]:
    """The weight versions of each reply, in order."""
    turns: list[list[int]] = [[]]
    for segment in sample.segments[1:]:  # type: ignore[attr-defined]
        if segment.version is None:
            turns.append([])
        else:
            turns[-1].append(segment.version)
    return turns
