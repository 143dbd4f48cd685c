"""A real SGLang server as the teacher: its scores are transformers' log-probs, token for token, up to the shards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.generating import GenerateRequest, ScoreRequest
from mslime.backends.sglang.handshake import connect_teacher
from mslime.config.errors import EngineError
from mslime.data.sample import Sample
from mslime.data.source import PromptSource
from mslime.data.tokenizer import load_tokenizer
from mslime.rollout.generation import EngineLimits
from mslime.rollout.rewards.scorer import RewardScorer, ServedTeacher
from mslime.run.assemble import assemble
from tests.engines.conftest import SharedServer
from tests.engines.reference import Reference, log_softmax
from tests.engines.test_rollout_service import MODEL, config_for, publish
from tests.fixtures.engine_calls import load_from_disk
from tests.fixtures.service_of_one import ServiceOfOne

VOCABULARY = 320


@pytest.fixture(scope="module")
def reference(sglang_server: SharedServer) -> Reference:
    return Reference(sglang_server.checkpoint)


def log_probs(reference: Reference, ids: list[int]) -> NDArray[np.float64]:
    """[n] transformers' log-prob of each token, 0 for the first."""
    own = log_softmax(reference(ids)[0])[np.arange(len(ids) - 1), ids[1:]]
    return np.concatenate([[0.0], own])


async def test_scores_are_transformers_log_probs_while_others_are_generating(
    sglang_server: SharedServer, reference: Reference
) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, VOCABULARY, n).tolist() for n in (2, 17, 200, 200, 700)]
    sequences[2][100:] = [VOCABULARY - 1] * 50 + [0] * 50  # the engine reports the last id as 0
    sequences[3][:150] = sequences[2][:150]  # found in the prefix cache
    starts = [1, 5, 1, 150, 699]

    async with sglang_server.client() as client:
        busy = [
            asyncio.create_task(client.generate(GenerateRequest(f"busy{i}", [i, 2], 300, ignore_eos=True)))
            for i in range(4)
        ]
        requests = [
            ScoreRequest(f"s{i}", ids, start) for i, (ids, start) in enumerate(zip(sequences, starts, strict=True))
        ]
        for _ in range(2):  # the second time with everything in the cache
            found = await asyncio.gather(*(client.score(request) for request in requests))
            for scores, ids, start in zip(found, sequences, starts, strict=True):
                expected = log_probs(reference, ids)
                expected[:start] = 0
                np.testing.assert_allclose(scores, expected, atol=2e-5, rtol=0)
        assert [len(result.output_ids) for result in await asyncio.gather(*busy)] == [300] * 4


async def test_a_server_is_a_teacher_of_its_own_vocabulary_and_no_larger_one(sglang_server: SharedServer) -> None:
    tokenizer = load_tokenizer(sglang_server.checkpoint)

    async with sglang_server.client() as client:
        await connect_teacher(client, tokenizer, VOCABULARY, 1000)
        assert client.model is not None and client.model.vocab_size == VOCABULARY
        with pytest.raises(EngineError, match="fewer token ids"):
            await connect_teacher(client, tokenizer, VOCABULARY + 1, 1000)
        with pytest.raises(EngineError, match="sequences of 2048 tokens"):
            await connect_teacher(client, tokenizer, VOCABULARY, 2048)
        with pytest.raises(EngineError, match="outside the vocabulary"):
            await client.score(ScoreRequest("foreign", [1, VOCABULARY]))


@pytest.mark.nightly
async def test_a_policy_that_is_its_own_teacher_agrees_with_it_in_every_shard(
    sglang_server: SharedServer, reference: Reference, tmp_path: Path
) -> None:
    config = config_for(sglang_server, tmp_path, stop_ids=4, over_sampling=3.0)
    tokenizer = load_tokenizer(sglang_server.checkpoint)

    def aligned(samples: list[Sample]) -> None:
        for sample in samples:
            assert sample.teacher_log_probs is not None
            expected = np.where(sample.loss_mask, log_probs(reference, sample.tokens.tolist()), 0)
            np.testing.assert_allclose(sample.teacher_log_probs, expected, atol=2e-5, rtol=0)

    clients = [sglang_server.client(), sglang_server.client()]
    pool, teachers = EnginePool(clients[:1], 64), EnginePool(clients[1:], 8)
    scorer = RewardScorer(config.reward)
    source = PromptSource(config.data.prompts, config.data, tokenizer, config.seed)
    service = ServiceOfOne(
        config, pool, source, tokenizer, scorer, MODEL, EngineLimits(), teacher=ServedTeacher(teachers)
    )
    compared = continued = 0
    try:
        await scorer.start()  # else the engine finishes every response while the reward's process starts
        for step in range(3):
            batch = await service.take(step)
            aligned(batch.samples)
            compared += sum(s.trainable_tokens for s in batch.samples)
            continued += sum(len(s.segments) > 2 for s in batch.samples)
            ((shard,),) = assemble(batch.groups, config, service.version).shards
            assert shard.teacher_log_probs is not None and not shard.teacher_log_probs[~shard.loss_mask].any()
            gap = (shard.behaviour_log_probs - shard.teacher_log_probs)[shard.loss_mask]
            assert np.abs(gap).max() < 1e-4, "log pi - log teacher of one and the same model"
            await publish(service, pool, step + 1)
        assert compared > 200 and continued, "no partial response was continued and then scored"
    finally:
        await service.close()
        await pool.abort()
        await scorer.close()
        await pool.close()
        await teachers.close()
        async with sglang_server.client() as client:
            await load_from_disk(client, sglang_server.checkpoint, 0)
