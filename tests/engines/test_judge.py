"""Rewards of kind judge, from a real SGLang server at /v1/chat/completions."""

from __future__ import annotations

import asyncio

import pytest

from mslime.config.reward import RewardConfig
from mslime.data.sample import Sample
from mslime.data.tokenizer import load_tokenizer
from mslime.rollout.rewards.scorer import RewardScorer
from tests.engines.conftest import SharedServer

pytestmark = pytest.mark.engine


def test_a_real_server_is_a_judge(sglang_server: SharedServer, monkeypatch: pytest.MonkeyPatch):
    """The random weights give no useful reply, so its digits are made likely; the number is read from its reply."""
    tokenizer = load_tokenizer(sglang_server.checkpoint)
    (seven,) = tokenizer.encode("7", special_tokens=False)
    monkeypatch.setenv("JUDGE_TOKEN", sglang_server.endpoint.keys.api)
    judge = {
        "url": f"{sglang_server.url}/v1/chat/completions",
        "template": "Is {response} right?",
        "pattern": "^(7)",
        "auth_env": "JUDGE_TOKEN",
        "options": {"temperature": 0.0, "max_tokens": 3, "logit_bias": {str(seven): 100}},
    }
    samples = [Sample.from_prompt(0, i, [1, 2], "5") for i in range(4)]

    async def work() -> list[float | None]:
        scorer = RewardScorer(RewardConfig.model_validate({"kind": "judge", "judge": judge}), tokenizer=tokenizer)
        try:
            return await asyncio.gather(*(scorer.score(s) for s in samples))
        finally:
            await scorer.close()

    assert asyncio.run(asyncio.wait_for(work(), 120)) == [7.0] * 4
