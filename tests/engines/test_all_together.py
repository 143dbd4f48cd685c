"""Episodes of several turns with all features at once: nucleus sampling, replayed routes, token-level TIS, tool calls,
three weight versions within an episode, and a trainer in parallel layouts.

Every ratio is recomputed with transformers: the denominator by the weights of the version that sampled the token, the
numerator by the trainer's weights along the recorded routes, both over the ids that the token was drawn from.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.layout import ParallelLayout
from mslime.data.packing import build_shards
from mslime.data.sample import Sample, check_invariants
from mslime.data.shard import TrainShard
from mslime.data.tokenizer import load_tokenizer
from tests.engines.conftest import SharedServer
from tests.engines.reference import Reference, as_told, makers_of, versions_of
from tests.engines.test_rollout_service import config_for, publish, run, service_for
from tests.engines.trainer_ranks import make_config, metrics_and_gradients, run_trainers
from tests.fixtures.tiny_models import make_tiny_qwen3_moe
from tests.unit import user_episodes

pytestmark = pytest.mark.timeout(600)

TEMPERATURE, CAP = 0.8, 2.0
DRAW = {"temperature": TEMPERATURE, "top_p": 0.9, "top_k": 4096}
LAYOUTS: dict[str, dict[str, int]] = {"tp2_ep2": {"tp": 2, "ep": 2}, "pp2": {"pp": 2}}


class Replayed(Reference):
    """Follows the given routes, if there are any."""

    def _route(self, module: Any, inputs: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits, weights, chosen = output
        assert self.ties is not None
        theirs, rows = self.ties[:, len(self.routes)], len(self.ties)
        taken = logits.softmax(-1)[:rows].gather(1, theirs)
        chosen, weights = chosen.clone(), weights.clone()
        chosen[:rows], weights[:rows] = theirs, (taken / taken.sum(1, keepdim=True)).to(weights.dtype)
        self.routes.append(chosen)
        return logits, weights, chosen


@dataclass
class Episodes:
    """Finished samples, and a checkpoint with the weights of each version."""

    samples: list[Sample]
    weights: dict[int, Path]


def restricted(sample: Sample, logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """[T] log-prob of every sampled token over the ids that it was drawn from; 0 elsewhere."""
    assert sample.supports is not None
    found = np.zeros(len(sample))
    for t in np.flatnonzero(sample.loss_mask):
        kept, row = sample.supports.row(int(t)), logits[t - 1] / TEMPERATURE
        found[t] = row[sample.tokens[t]] - np.logaddexp.reduce(row[kept])
    return found


def behaviour(sample: Sample, by_version: dict[int, Reference]) -> NDArray[np.float64]:
    """[T] the same, of each token by the weights of the version that sampled it."""
    found, versions, makers = np.zeros(len(sample)), versions_of(sample), makers_of(sample)
    for version in sorted(set(versions.tolist()) - {-1}):
        at = np.flatnonzero(versions == version)
        found[at] = as_told(by_version[version], sample, makers == version, at, restricted)[0][at]
    return found


async def played(server: SharedServer, directory: Path, weights: dict[int, Path | None]) -> list[Sample]:
    """Episodes whose first and second turns are each interrupted by an update, and whose third follows both."""
    config = config_for(
        server, directory, stop_ids=0, groups_per_step=1, group_size=2, max_staleness=2, on_stale="keep",
        max_response_tokens=300, function="tests.unit.user_episodes:patient", **DRAW,
    )  # fmt: skip
    user_episodes.stages[:] = [asyncio.Event(), asyncio.Event()]
    found: list[Sample] = []
    async with service_for(config, load_tokenizer(server.checkpoint), server) as (service, pool):
        taking = asyncio.create_task(service.take(0))
        for stage, (version, path) in zip(user_episodes.stages, weights.items(), strict=True):
            before = service.ledger.generated
            while not service.manager._runner.traffic.in_flight:  # pyright: ignore[reportPrivateUsage]
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            await publish(service, pool, version, path)
            assert service.ledger.generated > before
            stage.set()
        found += (await taking).samples
        for step in (1, 2):
            found += (await service.take(step)).samples
    return found


@pytest.fixture(scope="module", params=["equal weights", "other weights"])
def episodes(
    request: pytest.FixtureRequest, sglang_server: SharedServer, tmp_path_factory: pytest.TempPathFactory
) -> Episodes:
    directory, own = tmp_path_factory.mktemp("episodes"), sglang_server.checkpoint
    others: dict[int, Path | None] = {1: None, 2: None}
    if request.param == "other weights":
        others = {seed: make_tiny_qwen3_moe(directory / f"seed{seed}", seed=seed) for seed in (1, 2)}
    found: list[Sample] = []

    async def work() -> None:
        found.extend(await played(sglang_server, directory, others))

    try:
        run(work)
    finally:
        sglang_server.restore()
    return Episodes(found, {0: own, **{version: path or own for version, path in others.items()}})


def test_an_episode_holds_what_each_version_sampled(episodes: Episodes) -> None:
    three = within = 0
    for sample in episodes.samples:
        check_invariants(sample)
        versions = [s.version for s in sample.segments[1:]]
        assert versions.count(None) == 2, "two tool calls"
        three += {0, 1, 2} <= set(versions)
        within += any(None not in pair for pair in pairwise(versions))
        assert sample.supports is not None and max(sample.supports.sizes) < 320
    assert three and within, "no episode crossed three versions, or none within a turn"
    references = {version: Reference(path) for version, path in episodes.weights.items()}
    for sample in episodes.samples:
        np.testing.assert_allclose(sample.log_probs, behaviour(sample, references), atol=1e-4)


def stepped(trainer: MegatronTrainer, shards: list[TrainShard]) -> tuple[TrainShard, dict[str, float]]:
    """A rank's shard with the old policy's log-probs, and the metrics of the loss."""
    layout, rank = trainer.spec.layout, trainer.parallel.rank
    last = layout.pp_rank(rank) == layout.pp - 1
    mine = shards[layout.dp_rank(rank)].stage_slice(trainer.moe_layer_ids, has_logits=last)
    (prepared,), _ = trainer.prepare([mine])
    with trainer.routing.gradient_pass(prepared, 0) as routes:
        metrics, _ = metrics_and_gradients(trainer, prepared, routes)
    return prepared, metrics


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_ratio_is_that_of_an_independent_computation(name: str, episodes: Episodes, tmp_path: Path) -> None:
    sizes, trainer_weights = LAYOUTS[name], episodes.weights[2]
    layout = ParallelLayout(**{k: sizes.get(k, 1) for k in ("tp", "cp", "pp", "ep", "dp")})
    samples = episodes.samples
    shards = build_shards(samples, [1.0] * len(samples), layout, token_budget=512, version=2)[0]
    config = make_config(
        trainer_weights, tmp_path, train={"max_tokens_per_micro_batch": 512}, rollout=DRAW, **sizes,
        algorithm={"correction": {"preset": "tis", "high": CAP}},
    )  # fmt: skip
    newest = Replayed(trainer_weights)
    by_version = {version: Reference(path) for version, path in episodes.weights.items()}
    expected: list[NDArray[np.float64]] = []
    for sample in samples:
        assert sample.routes is not None
        logits, _ = newest(sample.tokens.tolist(), ties=sample.routes.experts)
        expected.append((restricted(sample, logits) - behaviour(sample, by_version))[sample.loss_mask])
    log_ratio = np.concatenate(expected)
    equal = len(set(episodes.weights.values())) == 1
    assert (np.abs(log_ratio).max() < 1e-4) == equal

    for prepared, metrics in run_trainers(stepped, config, shards):
        if prepared.old_log_probs is None:
            continue  # a stage without logits
        found = (prepared.old_log_probs - prepared.behaviour_log_probs)[prepared.loss_mask]
        at = {i: list(prepared.sequence_ids).index(i) for i in range(len(samples))}
        order = np.concatenate([expected[i] for i in sorted(at, key=lambda i: at[i])])
        np.testing.assert_allclose(found, order, atol=2e-4)
        weights = np.minimum(np.exp(log_ratio), CAP)
        assert metrics["correction/mean_weight"] == pytest.approx(weights.mean(), rel=1e-3)
        assert metrics["correction/clipped_fraction"] == pytest.approx((np.exp(log_ratio) > CAP).mean(), abs=2e-3)
