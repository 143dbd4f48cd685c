"""Several adapters on real ranks under Ray: driver threads train them concurrently, each as in a separate run."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mslime.config.errors import ConfigError, TrainerError
from mslime.config.resolved import PolicySpec
from mslime.data.checkpoints import saving_directory
from mslime.run.adapter_ranks import AdapterRanks
from mslime.run.ray_cluster import Cluster
from mslime.run.trainers import TrainerGroup
from tests.engines.megatron_parity import STEPS
from tests.engines.megatron_ranks import run_ranks
from tests.engines.test_adapters_in_one_pass import broken_batches, failing_in_one_pass
from tests.engines.test_many_adapters import alone, configs, numbers, shards_of, specs
from tests.engines.test_megatron_parity import LAYOUTS

CASE, NAMES = LAYOUTS["dp2"], ["plain", "other_rank"]
TOGETHER = ["plain", "other_rank", "middle_layers"]


def alone_metrics(rank: int, world: int, init: str, checkpoint: Path) -> dict[str, list[dict[str, float]]]:
    return {name: metrics for name, (metrics, _) in alone(rank, world, init, checkpoint, CASE, NAMES).items()}


@pytest.mark.nightly
def test_threads_train_adapters_of_one_base(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    own = run_ranks(alone_metrics, CASE.world, tiny_qwen3_moe)[0]
    base, given = configs(tiny_qwen3_moe, CASE)["plain"], specs(tiny_qwen3_moe, CASE)
    with Cluster(base, engines=False) as cluster:
        ranks = AdapterRanks(given["plain"], cluster, tmp_path, together=False)
        ranks.start()
        assert ranks.layers == [(0, 1, 2, 3)] * 2
        trainers = {name: ranks.create(name, given[name]) for name in NAMES}

        def train(name: str) -> list[dict[str, float]]:
            found: list[dict[str, float]] = []
            for step in range(STEPS):
                shards: list[list[Any]] = [[shards_of(name, CASE, given[name], rank)[step]] for rank in range(2)]
                trained = trainers[name].train(shards, lambda done, total: None, True, step + 1)
                found.append(numbers(trained.metrics[0]))
            return found

        with ThreadPoolExecutor() as pool:
            assert dict(zip(NAMES, pool.map(train, NAMES), strict=True)) == own
        sums, _ = trainers["plain"].write_adapter(tmp_path / "plain", verify=True)
        assert sums and (tmp_path / "plain" / "adapter_model.safetensors").is_file()
        refused(ranks, trainers["other_rank"], given, tmp_path)
        ranks.stop()


def alone_with_a_failure(rank: int, world: int, init: str, checkpoint: Path) -> dict[str, Any]:
    """Each adapter's own run of three batches, of which the second is broken for one of them."""
    return failing_in_one_pass(rank, world, init, checkpoint, CASE, TOGETHER)["steps"]


@pytest.mark.nightly
def test_a_failure_in_a_shared_pass_is_told_to_its_adapters_thread_alone(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    own = {name: steps for name, (_, steps) in run_ranks(alone_with_a_failure, CASE.world, tiny_qwen3_moe)[0].items()}
    base, given = configs(tiny_qwen3_moe, CASE)["plain"], specs(tiny_qwen3_moe, CASE)
    with Cluster(base, engines=False) as cluster:
        ranks = AdapterRanks(given["plain"], cluster, tmp_path, together=True)
        ranks.start()
        trainers = {name: ranks.create(name, given[name]) for name in TOGETHER}

        def step(name: str, number: int) -> tuple[dict[str, float] | str, float]:
            shards = [broken_batches(name, CASE, given[name], rank)[number] for rank in range(CASE.world)]
            with trainers[name].turn_for(shards, number + 1, (), lambda: None):
                try:
                    metrics = trainers[name].train(shards, lambda done, total: None, True, number + 1).metrics[0]
                except TrainerError as error:
                    return str(error), 0.0
            return numbers(metrics), metrics["perf/adapters_together"]

        found: dict[str, list[dict[str, float] | str]] = {name: [] for name in TOGETHER}
        for number in range(STEPS):
            with ThreadPoolExecutor() as pool:
                with ranks.turn.held():  # all wait for the turn, so that whoever gets it takes the others along
                    steps = {name: pool.submit(step, name, number) for name in TOGETHER}
                    while len(ranks.turn._line) < len(TOGETHER):
                        time.sleep(0.01)
                for name, each in steps.items():
                    outcome, together = each.result()
                    found[name].append(outcome)
                    assert isinstance(outcome, str) or together == len(TOGETHER)
        assert found == own
        assert [name for name in TOGETHER if isinstance(found[name][1], str)] == ["other_rank"]
        ranks.stop()


def refused(ranks: AdapterRanks, other: TrainerGroup, given: dict[str, PolicySpec], directory: Path) -> None:
    """A mistake is answered, and changes nothing; a freed adapter answers no more, and comes back from its files."""
    with pytest.raises(ConfigError, match="already in use"):
        ranks.create("plain", given["plain"])
    saving_directory(directory / "saved").mkdir()
    other.save(directory / "saved", {"next_step": 1}, {})
    other.rest(60)
    ranks.free("other_rank")
    with pytest.raises(ConfigError, match="there are plain"):
        other.save(directory / "again", {}, {})
    ranks.create("other_rank", given["other_rank"]).load(directory / "saved", new_run=False)
