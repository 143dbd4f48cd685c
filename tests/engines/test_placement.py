"""Assignment of ranks to machines, on a Ray cluster of fake machines: 4 of 8 GPUs each, all on this one."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as FakeMachines
from ray.util import placement_group_table

from mslime.config.errors import ConfigError
from mslime.config.schema import RunConfig
from mslime.run.placement import BundleLocation, check_tensor_groups, in_order
from mslime.run.ray_cluster import Cluster, remote_class

GPUS = 8


@pytest.fixture(scope="module")
def machines() -> Iterator[str]:
    """The address of a Ray cluster of four machines of eight GPUs."""
    before = os.environ.get("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    machine = {"num_cpus": 16, "num_gpus": GPUS, "object_store_memory": 80 << 20}
    made = FakeMachines(initialize_head=True, head_node_args={**machine, "include_dashboard": False})
    for _ in range(3):
        made.add_node(**machine)
    yield made.address
    made.shutdown()
    if before is None:
        del os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"]


def run(address: str | None, cluster: dict[str, Any], **sections: Any) -> RunConfig:
    cluster = {"device": "cuda", "ray_address": address, **cluster}
    return RunConfig.model_validate(
        {"model": {"path": "unused"}, "data": {"prompts": ["unused.jsonl"]}, "cluster": cluster, **sections}
    )


class Asked:
    """A process of the run that reports its location and its arguments."""

    def spot(self) -> tuple[str, str]:
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def variables(self) -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if k.startswith("NCCL_") or k == "GIVEN"}

    def import_path(self) -> list[str]:
        return os.environ["PYTHONPATH"].split(os.pathsep)


@pytest.mark.nightly
def test_no_tensor_parallel_group_spans_machines(machines: str) -> None:
    layout = {"tensor_model_parallel_size": 8}
    with Cluster(run(machines, {"trainer_ranks": 24}, megatron=layout, sglang={"tp_size": 8}), True) as cluster:
        bundles = [cluster.trainer_options(rank)["scheduling_strategy"] for rank in range(24)]
        machine = placement_group_table(bundles[0].placement_group)["bundles_to_node_id"]
        table = [machine[bundle.placement_group_bundle_index] for bundle in bundles]
    assert len(table) == 24
    for first in range(0, 24, 8):
        assert len(set(table[first : first + 8])) == 1, table
    assert len(set(table)) == 3


@pytest.mark.nightly
def test_ranks_of_a_machine_follow_its_gpus_and_every_process_gets_the_same_settings(machines: str) -> None:
    config = run(machines, {"trainer_ranks": 3, "env": {"GIVEN": "yes"}})
    with Cluster(config, True) as cluster:
        options = [*(cluster.trainer_options(rank) for rank in range(3)), cluster.engine_places(0)[0].options]
        actors = [remote_class(Asked).options(**own).remote() for own in options]
        spots = ray.get([actor.spot.remote() for actor in actors[:3]])
        given = ray.get([actor.variables.remote() for actor in actors])
    assert spots == sorted(spots)
    assert given[0] == {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "GIVEN": "yes"}
    assert all(other == given[0] for other in given), "trainer ranks and engines meet in one NCCL communicator"


@pytest.mark.nightly
def test_colocated_engines_get_the_gpus_of_neighbouring_trainer_ranks(machines: str) -> None:
    shared: dict[str, Any] = {"trainer_ranks": 12, "placement": "colocated"}
    config = run(machines, shared, sglang={"num_engines": 2, "tp_size": 4}, weights={"transport": "disk"})
    with Cluster(config, True) as cluster:
        places = [cluster.engine_places(index)[0] for index in range(2)] + cluster.one_more_engine()
        options = [*(cluster.trainer_options(rank) for rank in range(12)), *(place.options for place in places)]
        spots = ray.get([remote_class(Asked).options(**own).remote().spot.remote() for own in options])
        with pytest.raises(ConfigError, match="share 12 of the trainer's GPUs, 4 each"):
            cluster.one_more_engine()
    for index, place in enumerate(places):
        mine, (node, _) = spots[4 * index : 4 * index + 4], spots[12 + index]
        assert {found for found, _ in mine} == {node} and place.gpus == tuple(gpu for _, gpu in mine)
    assert len({(spots[12 + index][0], place.gpus) for index, place in enumerate(places)}) == 3


def test_a_cluster_that_is_too_small_is_refused_at_once(machines: str) -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError) as caught, Cluster(run(machines, {"trainer_ranks": 64}), True):
        pass
    assert time.monotonic() - begin < 60, "it waited for a placement that can never be"
    assert caught.value.field == "cluster.ray_address" and caught.value.value == machines
    assert "65 GPUs" in caught.value.rule and "4 machines" in caught.value.rule and "has 32" in caught.value.rule


def test_an_engine_larger_than_any_machine_is_refused(machines: str) -> None:
    config = run(machines, {"trainer_ranks": 1, "gpus_per_node": 16}, sglang={"tp_size": 16})
    with pytest.raises(ConfigError, match="engines of 16 GPUs"), Cluster(config, True):
        pass


@pytest.mark.nightly
def test_machines_that_are_still_joining_are_waited_for(machines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = ray.nodes

    def slowly() -> list[dict[str, Any]]:
        asked.append(len(asked))
        return real()[: len(asked)]

    monkeypatch.setattr(ray, "nodes", slowly)
    with Cluster(run(machines, {"trainer_ranks": 2, "join_s": 60}, sglang={"num_engines": 2, "tp_size": 8}), True):
        assert len(asked) >= 3


def test_an_address_where_no_ray_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught, Cluster(run("127.0.0.1:1", {}), True):
        pass
    assert caught.value.field == "cluster.ray_address" and "ray start" in caught.value.hint


def test_ranks_are_numbered_by_machine_and_then_by_gpu() -> None:
    spots = [
        BundleLocation("10.0.0.10", "b", 1),
        BundleLocation("10.0.0.9", "a", 1),
        BundleLocation("10.0.0.10", "b", 0),
        BundleLocation("10.0.0.9", "a", 0),
    ]
    assert in_order(spots) == [3, 1, 2, 0]


def test_a_tensor_parallel_group_on_two_machines_is_refused_by_name() -> None:
    spots = [
        BundleLocation("10.0.0.9", "a", 0),
        BundleLocation("10.0.0.9", "a", 1),
        BundleLocation("10.0.0.9", "a", 2),
        BundleLocation("10.0.0.10", "b", 0),
    ]
    check_tensor_groups(spots, 1)
    with pytest.raises(ConfigError, match=r"ranks 2 to 3 .* 10\.0\.0\.9 and 10\.0\.0\.10"):
        check_tensor_groups(spots, 2)


def test_a_submitted_jobs_own_variables_hold_and_its_import_path_is_no_conflict(
    machines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `ray job submit` and a RayJob start a driver; and with a Python whose path Ray would give to a shell."""
    python = tmp_path / "my venv" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    given = {"PYTHONPATH": "/root/Megatron-LM", "NCCL_CUMEM_ENABLE": "1", "GIVEN": "by the job"}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"env_vars": given}}))
    monkeypatch.syspath_prepend("/root/Megatron-LM")  # the job's variables are the driver's, too
    config = run(machines, {"trainer_ranks": 1, "env": {"GIVEN": "by the run"}})
    with Cluster(config, False) as cluster:
        actor = remote_class(Asked).options(**cluster.trainer_options(0)).remote()
        found, path = ray.get([actor.variables.remote(), actor.import_path.remote()], timeout=60)
    assert (found["NCCL_CUMEM_ENABLE"], found["GIVEN"]) == ("1", "by the run")
    assert "/root/Megatron-LM" in path and os.getcwd() in path
