"""The trainer that replays a real engine's routes computes the log-probs that the engine sampled with."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.backends.sglang.generating import GenerateRequest, ProbeRequest
from mslime.config.layout import ParallelLayout
from mslime.data.packing import build_shards
from mslime.data.probe import ProbeDifferences, ProbeScores, joined_routes, routes_of
from mslime.data.routes import Routes
from mslime.data.sample import Sample, check_invariants
from mslime.data.shard import TrainShard
from tests.engines.conftest import SharedServer
from tests.engines.trainer_ranks import make_config, run_trainers

pytestmark = pytest.mark.timeout(400)

TEMPERATURE = 0.8
PROMPTS = [[7], list(range(3, 36)), [(i * 37) % 250 for i in range(90)], [5, 5, 5, 5], list(range(200, 120, -3))]


@pytest.fixture(scope="module")
def samples(sglang_server: SharedServer) -> list[Sample]:
    """Responses in two parts, as after an abort: the second request fetches the missing rows."""

    async def generate() -> list[Sample]:
        made = [Sample.from_prompt(i, 0, prompt) for i, prompt in enumerate(PROMPTS)]
        async with sglang_server.client() as client:
            for part, new_tokens in enumerate((9, 14)):
                await asyncio.gather(*(_continue(client, sample, part, new_tokens) for sample in made))
        return made

    return asyncio.run(asyncio.wait_for(generate(), 120))


async def _continue(client: Any, sample: Sample, part: int, new_tokens: int) -> None:
    sample.routes = sample.routes or Routes.empty(range(4), 2, 8)
    request = GenerateRequest(
        rid=f"{sample.group_id}-{part}",
        input_ids=sample.tokens,
        max_new_tokens=new_tokens,
        temperature=TEMPERATURE,
        ignore_eos=True,
        want_routes=True,
        routes_start=len(sample.routes),
    )
    result = await client.generate(request)
    sample.extend(
        result.output_ids,
        log_probs=result.log_probs,
        versions=result.versions,
        engine=result.engine,
        routes=result.routes,
    )
    check_invariants(sample)


def _replayed(trainer: MegatronTrainer, shard: TrainShard) -> dict[str, Any]:
    mine = shard.stage_slice(trainer.moe_layer_ids)
    log_probs = trainer.log_probs(mine, replay=True).numpy()
    report = trainer.routing.report(mine)
    metrics = trainer.train([mine])[0]
    assert report is not None
    return {"log_probs": log_probs, "report": report, "metrics": metrics}


def largest_difference(log_probs: NDArray[np.float32], shard: TrainShard) -> float:
    return float(np.abs(log_probs - shard.behaviour_log_probs)[shard.loss_mask].max())


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "ep": 2}, {"pp": 2, "ep": 1}], ids=["one", "tp2_ep2", "pp2"])
def test_log_probs_match_the_engine_on_every_generated_token(
    sizes: dict[str, int], samples: list[Sample], sglang_server: SharedServer, tmp_path: Path
) -> None:
    layout = ParallelLayout(tp=sizes.get("tp", 1), ep=sizes.get("ep", 1), pp=sizes.get("pp", 1))
    shard = build_shards(samples, [1.0, -1.0, 0.5, 1.0, -0.5], layout, token_budget=128)[0][0]
    assert shard.loss_mask.sum() == len(PROMPTS) * (9 + 14)
    train = {"max_tokens_per_micro_batch": 128}
    config = make_config(sglang_server.checkpoint, tmp_path, train=train, rollout={"temperature": TEMPERATURE}, **sizes)
    for result in run_trainers(_replayed, config, shard):
        assert largest_difference(result["log_probs"], shard) < 1e-4
        report = result["report"]
        assert report.coverage == 1.0
        assert report.agreement == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}
        assert report.rows == 4 * (len(shard.tokens) - len(PROMPTS)), "every row but those of newest tokens"
        assert result["metrics"]["replay/coverage"] == result["metrics"]["replay/agreement"] == 1.0


def _probed(trainer: MegatronTrainer, sequences: list[NDArray[np.int32]], routes: Routes, other: Routes) -> Any:
    before = [parameter.detach().clone() for _, parameter in trainer.named_local_params()]
    followed = [trainer.probe(sequences, given)[0] for given in (routes, other)]
    found = (*trainer.probe(sequences), *followed)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, trainer.named_local_params(), strict=True))
    return found, trainer.routing.replay is None or all(
        layer.router_replay_action is None for layer in trainer.routing.replay.layers
    )


LAYOUTS = [{}, {"tp": 2, "ep": 2}, {"pp": 2, "ep": 1}, {"cp": 2}, {"pp": 2, "vpp": 2}]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=["one", "tp2_ep2", "pp2", "cp2", "pp2_vpp2"])
def test_engine_and_trainer_say_the_same_of_a_probe(
    sizes: dict[str, int], sglang_server: SharedServer, tmp_path: Path
) -> None:
    """At temperature 1, whatever the rollout's is; two texts of other lengths than any layout's multiple."""
    texts = [list(range(40, 91)), [7, 9, 200]]

    async def ask() -> list[ProbeScores]:
        async with sglang_server.client() as client:
            version = await client.version()
            requests = [ProbeRequest(f"probe-{len(text)}", text, version, want_routes=True) for text in texts]
            return [await client.probe(request) for request in requests]

    answers = asyncio.run(asyncio.wait_for(ask(), 120))
    sequences = [answer.tokens for answer in answers]
    config = make_config(sglang_server.checkpoint, tmp_path, rollout={"temperature": TEMPERATURE}, **sizes)
    theirs = routes_of(answers, range(4), 8)
    first = np.arange(len(theirs))[:, None, None] == 0
    experts = np.where(first, (theirs.experts + 1) % 8, theirs.experts).astype(np.uint8)
    flipped = Routes(experts, theirs.mask, theirs.layer_ids)
    found = run_trainers(_probed, config, sequences, theirs, flipped)
    assert all(stopped for _, stopped in found)
    ends = np.cumsum([len(tokens) for tokens in sequences])
    routes = joined_routes([part for (_, part, _, _), _ in found if part is not None], int(ends[-1]))
    assert routes is not None
    for (log_probs, _, by_theirs, by_others), _ in found:
        assert np.abs(by_theirs - log_probs).max() < 1e-5, "the engine's routes are the trainer's"
        apart = np.abs(by_others - log_probs)[: ends[0]]
        assert np.median(apart[1:]) > 5e-4, "other experts of the first token reach the tokens after it"
        of_ranks = zip(answers, np.split(log_probs, ends[:-1]), np.split(routes, ends[:-1]), strict=True)
        for answer, mine, chosen in of_ranks:
            trainers = ProbeScores(answer.tokens, answer.given, mine, chosen)
            same = ProbeDifferences.between(answer, trainers)
            assert same.log_probs < 1e-5 and same.routes == 1.0
            assert np.abs(answer.log_probs - mine).max() < 1e-4 and len(answer.routes) == len(answer.tokens) - 1
            assert ProbeDifferences.between(replace(answer, routes=7 - answer.routes), trainers).too_large(5e-4)


def _with_other_experts(trainer: MegatronTrainer, shard: TrainShard) -> dict[str, Any]:
    assert shard.routes is not None
    other = Routes((shard.routes.experts + 3) % 8, shard.routes.mask, shard.routes.layer_ids)
    shard = replace(shard, routes=other)
    return {"log_probs": trainer.log_probs(shard, replay=True).numpy(), "report": trainer.routing.report(shard)}


def test_other_routes_are_seen_in_log_probs_and_agreement(
    samples: list[Sample], sglang_server: SharedServer, tmp_path: Path
) -> None:
    """Otherwise the test above would pass even if the routes were not used."""
    shard = build_shards(samples, [1.0] * len(samples), ParallelLayout(), token_budget=128)[0][0]
    config = make_config(sglang_server.checkpoint, tmp_path, rollout={"temperature": TEMPERATURE})
    result = run_trainers(_with_other_experts, config, shard)[0]
    assert largest_difference(result["log_probs"], shard) > 1e-2
    assert max(result["report"].agreement.values()) < 0.6
