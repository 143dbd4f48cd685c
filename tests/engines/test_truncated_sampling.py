"""Tokens that a real engine drew from a part of the vocabulary are trained under the distribution they were drawn from.

Supports against their definition over transformers' logits; the trainer's log-probs against the engine's, in several
layouts; loss and gradient against transformers in float64.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.backends.sglang import client as client_module
from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.generating import GenerateRequest
from mslime.config.errors import EngineError
from mslime.config.layout import ParallelLayout
from mslime.data.packing import build_shards
from mslime.data.routes import Routes
from mslime.data.sample import Sample, check_invariants
from mslime.data.shard import TrainShard
from mslime_plugins.planner.plan import make_plan
from mslime_plugins.planner.plan_command import plan_config
from tests.engines.conftest import SharedServer
from tests.engines.trainer_ranks import largest_difference, make_config, metrics_and_gradients, run_trainers, to_hf
from tests.fixtures.engine_calls import load
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

pytestmark = pytest.mark.timeout(400)

TEMPERATURE = 0.8
PROMPTS = [[7], list(range(3, 36)), [(i * 37) % 250 for i in range(90)], [5, 5, 5, 5], list(range(200, 120, -3))]
ADVANTAGES = [1.0, -1.0, 0.5, 1.0, -0.5]
NUCLEUS = {"top_p": 0.9, "top_k": 4096}
DRAWS: dict[str, dict[str, Any]] = {
    "top-p": NUCLEUS,
    "top-k": {"top_k": 40},
    "min-p": {"min_p": 0.3, "top_k": 4096},
    "all": {"top_p": 0.8, "top_k": 60, "min_p": 0.2},
}
ALGORITHM = {"kl_coef": 0.2, "entropy_coef": 0.05}
LAYOUTS: dict[str, dict[str, int]] = {
    "tp2_ep2": {"tp": 2, "ep": 2},
    "cp2": {"cp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
}


async def _continue(client: EngineClient, sample: Sample, rid: str, new_tokens: int, draw: Mapping[str, Any]) -> None:
    """One request; only the rows of new tokens are added."""
    sample.routes = Routes.empty(range(4), 2, 8) if sample.routes is None else sample.routes
    result = await client.generate(
        GenerateRequest(
            rid, sample.tokens, new_tokens, TEMPERATURE, ignore_eos=True, want_routes=True,
            routes_start=len(sample.routes), **draw,
        )
    )  # fmt: skip
    assert result.supports is not None and len(result.supports) == len(result.output_ids)
    sample.extend(
        result.output_ids,
        log_probs=result.log_probs,
        versions=result.versions,
        engine=result.engine,
        routes=result.routes,
        supports=result.supports,
    )
    check_invariants(sample)


def generated(server: SharedServer, name: str, parts: Sequence[int], draw: Mapping[str, Any]) -> list[Sample]:
    """A response to each prompt, in parts, as after aborts."""

    async def work() -> list[Sample]:
        made = [Sample.from_prompt(i, 0, prompt) for i, prompt in enumerate(PROMPTS)]
        async with server.client() as client:
            for part, count in enumerate(parts):
                asked = (_continue(client, s, f"{name}-{s.group_id}-{part}", count, draw) for s in made)
                await asyncio.gather(*asked)
        return made

    return asyncio.run(asyncio.wait_for(work(), 120))


@pytest.fixture(scope="module")
def samples(sglang_server: SharedServer) -> list[Sample]:
    return generated(sglang_server, "nucleus", (9, 14), NUCLEUS)


def double_model(checkpoint: Path) -> Any:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64, **eager).eval()
    model.get_input_embeddings().padding_idx = None  # a sampled padding token has a gradient as any other
    return model


def logits_of(model: Any, sample: Sample) -> Tensor:
    """[T - 1, vocabulary] float64 at the sampling temperature; row t predicts token t + 1."""
    return model(torch.as_tensor(sample.tokens[None].astype(np.int64))).logits[0, :-1] / TEMPERATURE


def kept_ids(
    log_p: NDArray[np.float64], slack: float, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0
) -> set[int]:
    """The definition, on one row: the top-k ids, those before which at most top-p lies, those near the likeliest.

    Args:
        slack: error of probabilities to allow in favour of an id, or against it if negative.
    """
    order = np.argsort(-log_p, kind="stable")
    p = np.exp(log_p[order])
    least = p[min(top_k, len(p)) - 1] if top_k > 0 else 0.0
    kept = (np.cumsum(p) - p <= top_p + slack) & (p >= min_p * p[0] - slack) & (p >= least - slack)
    return set(order[kept].tolist())


@pytest.mark.parametrize("name", list(DRAWS))
def test_supports_are_what_the_settings_keep_and_log_probs_are_over_them(
    name: str, sglang_server: SharedServer
) -> None:
    model, sizes = double_model(sglang_server.checkpoint), []
    for sample in generated(sglang_server, name, (12,), DRAWS[name]):
        with torch.no_grad():
            log_p = logits_of(model, sample).log_softmax(-1).numpy()
        for t in range(sample.prompt_length, len(sample)):
            assert sample.supports is not None
            row = sample.supports.row(t).tolist()
            surely, perhaps = (kept_ids(log_p[t - 1], slack, **DRAWS[name]) for slack in (-1e-6, 1e-6))
            assert surely <= set(row) <= perhaps and len(perhaps - surely) < 4
            mass = np.logaddexp.reduce(log_p[t - 1, row])
            assert sample.log_probs[t] == pytest.approx(log_p[t - 1, sample.tokens[t]] - mass, abs=2e-5)
            sizes.append(len(row))
    assert max(sizes) < 320 and np.mean(sizes) > 3, "so that the numbers are worth comparing"


async def test_an_answer_is_as_large_as_the_plan_says(
    sglang_server: SharedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, new_tokens, read = PROMPTS[1], 400, client_module._read
    sizes: list[int] = []

    async def counted(*asked: Any) -> bytes | None:
        body = await read(*asked)
        sizes.append(len(body or b""))
        return body

    async with sglang_server.client() as client:
        monkeypatch.setattr(client_module, "_read", counted)
        await _continue(client, Sample.from_prompt(0, 0, prompt), "size", new_tokens, {"top_k": 40})
    config = plan_config(
        {
            "model": {"path": str(sglang_server.checkpoint)},
            "cluster": {"device": "cpu"},
            "data": {"max_prompt_tokens": len(prompt)},
            "train": {"replay": "r3"},
            "rollout": {"top_k": 40, "max_response_tokens": new_tokens},
        }
    )
    answers = make_plan(config, json.loads((sglang_server.checkpoint / "config.json").read_text())).rollouts
    assert answers is not None and max(sizes) == pytest.approx(answers.answers.total / answers.responses, rel=0.15)


def check_against(model: Any, sample: Sample) -> None:
    """Each token's support is the nucleus of the model's own probabilities, and its log-prob is the model's over it.

    A nucleus may be of one token alone: that the others hold less than a tenth is what shows whether it should be.
    """
    with torch.no_grad():
        log_p = logits_of(model, sample).log_softmax(-1).numpy()
    assert sample.supports is not None and np.median(sample.supports.sizes[sample.prompt_length :]) > 10
    for t in range(sample.prompt_length, len(sample)):
        row = np.sort(log_p[t - 1, sample.supports.row(t)])
        mass = np.logaddexp.reduce(row)
        assert np.exp(mass) >= NUCLEUS["top_p"] - 1e-5 > np.exp(mass) - np.exp(row[0]) - 2e-5
        assert sample.log_probs[t] == pytest.approx(log_p[t - 1, sample.tokens[t]] - mass, abs=2e-5)


async def test_an_abort_leaves_the_supports_of_the_tokens_that_came(sglang_server: SharedServer) -> None:
    sample = Sample.from_prompt(0, 0, PROMPTS[1])

    async with sglang_server.client() as client:
        running = asyncio.create_task(_continue(client, sample, "cut", 1900, NUCLEUS))
        while await load(client, "used_tokens") < 60:
            await asyncio.sleep(0.02)
        await client.abort("cut")
        await running
        assert 0 < sample.response_length < 1900
        await _continue(client, sample, "rest", 7, NUCLEUS)
    check_against(double_model(sglang_server.checkpoint), sample)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_supports_outlive_a_pause_in_which_the_engine_keeps_the_request(
    mode: Any, sglang_server: SharedServer
) -> None:
    sample = Sample.from_prompt(0, 0, PROMPTS[1])

    async with sglang_server.client() as client:
        running = asyncio.create_task(_continue(client, sample, f"paused-{mode}", 200, NUCLEUS))
        while await load(client, "used_tokens") < 60:
            await asyncio.sleep(0.02)
        await client.pause(mode)
        assert not running.done()
        await client.resume()
        await running
    assert sample.response_length == 200
    check_against(double_model(sglang_server.checkpoint), sample)


async def test_a_top_k_beyond_the_server_s_limit_is_refused_in_its_own_words(sglang_server: SharedServer) -> None:
    with pytest.raises(EngineError, match=r"(?s)4096.*--sampling-mask-max-tokens"):
        async with sglang_server.client() as client:
            await client.generate(GenerateRequest("wide", [1, 2], 2, top_p=0.9, top_k=4097))


@dataclass(frozen=True)
class Found:
    """A rank's results for its shard: log-probs [N] with and without supports, prepared columns, loss and gradients."""

    sequence_ids: list[int]
    with_supports: NDArray[np.float32]
    without: NDArray[np.float32]
    prepared: TrainShard
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    gradient_difference: float


def everything(trainer: MegatronTrainer, shards: list[TrainShard], alone: dict[str, Tensor] | None) -> Found:
    """Log-probs, loss and gradients of this rank's shard, as it is handed out.

    Args:
        alone: one process's gradients under Hugging Face names, to be compared; None: they are returned so.
    """
    layout, rank = trainer.spec.layout, trainer.parallel.rank
    last = layout.pp_rank(rank) == layout.pp - 1
    mine = shards[layout.dp_rank(rank)].stage_slice(trainer.moe_layer_ids, has_logits=last)
    (prepared,), _ = trainer.prepare([mine])
    free = trainer.log_probs(replace(mine, supports=None), replay=True).numpy()
    with trainer.routing.gradient_pass(prepared, 0) as routes:
        metrics, gradients = metrics_and_gradients(trainer, prepared, routes)
    return Found(
        prepared.sequence_ids.tolist(),
        trainer.log_probs(mine, replay=True).numpy(),
        free,
        prepared,
        metrics,
        to_hf(trainer, gradients) if alone is None else {},
        0.0 if alone is None else largest_difference(trainer, gradients, alone),
    )


def config_of(server: SharedServer, directory: Path, reference: Path, **sizes: int) -> Any:
    return make_config(
        server.checkpoint, directory, train={"max_tokens_per_micro_batch": 128}, algorithm=ALGORITHM,
        reference=reference, rollout={"temperature": TEMPERATURE, **NUCLEUS}, **sizes,
    )  # fmt: skip


def shards_for(samples: list[Sample], **sizes: int) -> list[TrainShard]:
    layout = ParallelLayout(**{k: sizes.get(k, 1) for k in ("tp", "cp", "pp", "ep", "dp")})
    return build_shards(samples, ADVANTAGES, layout, token_budget=128, version=0)[0]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("reference"), seed=5)


@pytest.fixture(scope="module")
def alone(
    samples: list[Sample], sglang_server: SharedServer, reference: Path, tmp_path_factory: pytest.TempPathFactory
) -> Found:
    config = config_of(sglang_server, tmp_path_factory.mktemp("alone"), reference)
    return run_trainers(everything, config, shards_for(samples), None)[0]


def largest(log_probs: NDArray[np.float32], shard: TrainShard) -> float:
    return float(np.abs(log_probs - shard.behaviour_log_probs)[shard.loss_mask].max())


def test_trainer_and_engine_agree_with_the_supports_and_not_without(alone: Found) -> None:
    shard = alone.prepared
    assert shard.loss_mask.sum() == len(PROMPTS) * (9 + 14)
    assert largest(alone.with_supports, shard) < 1e-4
    assert largest(alone.without, shard) > 0.05, "at least log 0.9 apart"
    assert alone.metrics["mismatch/abs_max"] < 1e-4 and alone.metrics["loss/ratio_p99"] == pytest.approx(1, abs=0.08)
    assert shard.reference_log_probs is not None and largest(shard.reference_log_probs, shard) > 0.05


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_layout_agrees_with_the_engine_and_gives_one_process_s_loss_and_gradient(
    name: str, samples: list[Sample], alone: Found, sglang_server: SharedServer, reference: Path, tmp_path: Path
) -> None:
    sizes = LAYOUTS[name]
    shards = shards_for(samples, **sizes)
    config = config_of(sglang_server, tmp_path, reference, **sizes)
    for found in run_trainers(everything, config, shards, alone.gradients):
        rank_shard = next(s for s in shards if s.sequence_ids.tolist() == found.sequence_ids)
        assert largest(found.with_supports, rank_shard) < 1e-4
        assert found.metrics["loss/total"] == pytest.approx(alone.metrics["loss/total"], abs=1e-6)
        for metric in ("entropy/mean", "loss/kl", "loss/entropy", "mismatch/abs_max"):
            assert found.metrics[metric] == pytest.approx(alone.metrics[metric], abs=1e-5), metric
        # Float32 sums in another order: below 1e-6 as a rule, 1.4e-6 once, as the engine happened to draw.
        assert found.gradient_difference < 5e-6


def exact_loss(policy: Any, reference: Any, samples: list[Sample], shard: TrainShard, supports: bool) -> Tensor:
    """sum w (c L + kl_coef KL - entropy_coef H), each over the support of its token, from the definitions in float64.

    Args:
        supports: False takes the whole vocabulary for every token, as for unrecorded draws.
    """
    total = torch.zeros((), dtype=torch.float64)
    for sequence, (start, stop) in zip(shard.sequence_ids.tolist(), shard.spans(), strict=True):
        sample = samples[sequence]
        ours = logits_of(policy, sample)
        with torch.no_grad():
            theirs = logits_of(reference, sample)
        for t in range(sample.prompt_length, stop - start):
            assert sample.supports is not None
            kept = torch.as_tensor(sample.supports.row(t).astype(np.int64)) if supports else torch.arange(320)
            label = kept.tolist().index(int(sample.tokens[t]))
            log_p, log_q = ours[t - 1, kept].log_softmax(-1), theirs[t - 1, kept].log_softmax(-1)[label]
            entropy, log_pi = -(log_p.exp() * log_p).sum(), log_p[label]
            old, mu = log_pi.detach(), float(sample.log_probs[t])
            loss = -torch.exp(log_pi - old) * float(shard.advantages[start + t])
            weight = torch.exp(old - mu).clamp(max=2.0)
            d = log_pi - log_q
            kl = (torch.expm1(-d) + d).clamp(max=10.0)
            terms = weight * loss + ALGORITHM["kl_coef"] * kl - ALGORITHM["entropy_coef"] * entropy
            total = total + float(shard.weights[start + t]) * terms
    return total


def gradients_of(model: Any) -> dict[str, Tensor]:
    """Gradients of every parameter by its name in checkpoints, in which experts are separate tensors."""
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        block, stacked, kind = name.rpartition("experts.")
        if not stacked:
            found[name] = p.grad
            continue
        for expert, grad in enumerate(p.grad):
            parts = (
                {"down_proj": grad}
                if kind == "down_proj"
                else dict(zip(("gate_proj", "up_proj"), grad.chunk(2), strict=True))
            )
            found |= {f"{block}experts.{expert}.{part}.weight": g for part, g in parts.items()}
    return found


def test_loss_and_gradient_are_those_of_transformers_in_float64(
    samples: list[Sample], alone: Found, sglang_server: SharedServer, reference: Path
) -> None:
    policy, held = double_model(sglang_server.checkpoint), double_model(reference)
    differences: dict[bool, float] = {}
    for supports in (True, False):
        policy.zero_grad()
        loss = exact_loss(policy, held, samples, alone.prepared, supports)
        loss.backward()
        expected = gradients_of(policy)
        assert set(expected) == set(alone.gradients)
        scale = max(float(g.abs().max()) for g in expected.values())
        differences[supports] = max(float((alone.gradients[n] - g).abs().max()) for n, g in expected.items()) / scale
        if supports:
            assert alone.metrics["loss/total"] == pytest.approx(float(loss), abs=1e-6)
    assert differences[True] < 1e-4 and differences[False] > 0.05
