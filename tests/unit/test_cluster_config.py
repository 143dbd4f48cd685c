"""Settings of the machines: the Ray cluster's address, the environment of the run's processes, and what fits where."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mslime.checks.resolve import resolve
from mslime.config.cluster import check_machines, worker_environment
from mslime.config.errors import ConfigError
from mslime.config.loader import load_config
from mslime.config.megatron import MegatronConfig, check_model
from mslime.config.resolved import policy_spec
from mslime.config.schema import RunConfig
from tests.fixtures.least import least, refused


def run(cluster: dict[str, Any], **sections: Any) -> RunConfig:
    return least(cluster=cluster, **sections)


def environment_of(config: RunConfig) -> dict[str, str]:
    return worker_environment(config.cluster, config.sglang.extra)


# ------------------------------------------------------------------------------------------------- the Ray cluster


def test_the_address_of_the_ray_cluster_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert run({}).cluster.ray_address == "10.0.0.1:6379"
    assert run({"ray_address": "10.0.0.2:6379"}).cluster.ray_address == "10.0.0.2:6379"
    assert run({"ray_address": "local"}).cluster.ray_address is None
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert run({}).cluster.ray_address is None


@pytest.mark.parametrize(("cluster", "sections", "named"), [
    ({"trainer_ranks": 16}, {}, "17 GPUs (16 trainer, 1 engines)"),
    ({"trainer_ranks": 4}, {"sglang": {"num_engines": 2, "tp_size": 4}}, "12 GPUs (4 trainer, 8 engines)"),
    ({"trainer_ranks": 2, "gpus_per_node": 2}, {}, "3 GPUs"),
])  # fmt: skip
def test_more_gpus_than_a_machine_has_need_a_ray_cluster(
    cluster: dict[str, Any], sections: dict[str, Any], named: str
) -> None:
    config = run({"device": "cuda", **cluster}, **sections)
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    error = caught.value
    assert error.field == "cluster.ray_address" and named in error.rule
    assert "ray start --head" in error.hint and "RAY_ADDRESS" in error.hint
    config = run({"device": "cuda", "ray_address": "auto", **cluster}, **sections)
    check_machines(config.cluster, config.claims())


@pytest.mark.parametrize("transport", ["shm", "handles"])
def test_machines_share_no_memory(transport: str) -> None:
    weights: dict[str, Any] = {"weights": {"transport": transport}}
    says = rf"weights\.transport = '{transport}'.*17 GPUs .16 trainer, 1 engines.*one machine has 8"
    with pytest.raises(ConfigError, match=says) as caught:
        run({"device": "cuda", "trainer_ranks": 16, "ray_address": "auto"}, **weights)
    assert "broadcast, or disk" in caught.value.hint
    run({"device": "cuda", "trainer_ranks": 4, "ray_address": "auto"}, **weights)
    run({"device": "cpu", "trainer_ranks": 16}, **weights)


def test_weights_on_disk_are_in_a_directory_of_the_run_alone(tmp_path: Path) -> None:
    shared = run({"device": "cpu"}, name="mine", weights={"transport": "disk", "directory": tmp_path})
    assert policy_spec(shared).weights.directory == tmp_path / "mine"
    own = run({"device": "cpu"}, name="mine", output_dir="runs", weights={"transport": "disk"})
    assert policy_spec(own).weights.directory == Path.cwd() / "runs" / "mine" / "weights"


@pytest.mark.parametrize(("cluster", "sections"), [
    ({"device": "cuda", "trainer_ranks": 4}, {"sglang": {"num_engines": 2, "tp_size": 2}}),
    ({"device": "cuda", "trainer_ranks": 8}, {"sglang": {"urls": ["http://there:30000"], "tp_size": 8}}),
    ({"device": "cuda", "trainer_ranks": 8}, {"train": {"task": "sft"}}),
    ({"device": "cpu", "trainer_ranks": 16}, {}),
])  # fmt: skip
def test_what_one_machine_holds_needs_no_ray_cluster(cluster: dict[str, Any], sections: dict[str, Any]) -> None:
    config = run(cluster, **sections)
    check_machines(config.cluster, config.claims())


@pytest.mark.parametrize(("sections", "field"), [
    ({"cluster": {"ray_address": "ray://10.0.0.1:10001"}}, "cluster.ray_address"),
    ({"cluster": {"device": "cuda"}, "megatron": {"tensor_model_parallel_size": 16}}, "megatron.tensor_model_parallel"),
    *(({"sglang": {name: 1}}, f"sglang.{name}") for name in ("node_rank", "dist_init_addr")),
    ({"cluster": {"env": {"A=B": "1"}}}, "cluster.env"), ({"cluster": {"env": {"": "1"}}}, "cluster.env"),
    *(({"cluster": {"env": {name: "1"}}}, "cluster.env") for name in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "RANK")),
])  # fmt: skip
def test_what_is_not_the_users_or_fits_no_machine_is_refused(sections: dict[str, Any], field: str) -> None:
    assert refused(**sections).field.startswith(field)


TEACHES = {"rollout": {"temperature": 1.0}, "algorithm": {"opd_coef": 0.1}}


@pytest.mark.parametrize(("engine", "told"), [
    ({"tp_size": 16}, r"sglang.tp_size = 16: .*16 GPUs on its machine, but a machine has 8.*sglang.nnodes: 2"),
    ({"tp_size": 32, "nnodes": 2}, r"16 GPUs on each of its 2 machines.*sglang.nnodes: 4"),
    ({"tp_size": 16, "nnodes": 3}, r"sglang.nnodes.*16 GPUs.*equally"),
])  # fmt: skip
def test_an_engine_fits_its_machines(engine: dict[str, int], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run({"device": "cuda", "ray_address": "auto"}, sglang=engine)
    assert re.search(told, " ".join(str(caught.value).split())), str(caught.value)
    with pytest.raises(ConfigError, match="teacher."):
        run({"device": "cuda", "ray_address": "auto"}, teacher={"path": "t", **engine}, **TEACHES)
    run({"device": "cuda"}, sglang={**engine, "urls": ["http://there:30000"]})


def test_an_engine_over_two_machines_takes_a_share_of_each() -> None:
    config = run({"device": "cuda", "ray_address": "auto", "trainer_ranks": 8},
                 sglang={"num_engines": 2, "tp_size": 16, "nnodes": 2},
                 teacher={"path": "t", "tp_size": 4, "nnodes": 2}, **TEACHES)  # fmt: skip
    assert [(c.what, c.count, c.gpus) for c in config.claims()] == [
        ("trainer", 8, 1), ("engines", 4, 8), ("teachers", 2, 2),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------- the environment


def test_variables_can_be_given_as_flags_and_numbers_are_text() -> None:
    flags = ["--model.path", "m", "--data.prompts", "p.jsonl", "--cluster.env.NCCL_IB_GID_INDEX", "3"]
    assert load_config(None, [*flags, "--cluster.env.NCCL_DEBUG", "INFO"]).cluster.env == {
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_DEBUG": "INFO",
    }


def test_workers_get_the_users_variables_and_on_gpus_what_nccl_must_agree_on() -> None:
    assert environment_of(run({"device": "cpu", "env": {"A": "1"}})) == {"A": "1"}
    assert environment_of(run({"device": "cuda", "env": {"A": "1"}})) == {
        "A": "1",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
    }


@pytest.mark.parametrize(
    ("flag", "cumem", "nvls"), [("enable_symm_mem", "1", "1"), ("enable_nccl_nvls", "0", "1"), ("fp8_gemm", "0", "0")]
)
def test_nccl_settings_follow_the_flags_with_which_sglang_overrules_them(flag: str, cumem: str, nvls: str) -> None:
    engine = {} if flag == "fp8_gemm" else {flag: True}
    found = environment_of(run({"device": "cuda"}, sglang=engine))
    assert (found["NCCL_CUMEM_ENABLE"], found["NCCL_NVLS_ENABLE"]) == (cumem, nvls)


def test_a_variable_that_engines_would_overrule_is_refused() -> None:
    with pytest.raises(ConfigError, match="the trainer has another value"):
        run({"device": "cuda", "env": {"NCCL_NVLS_ENABLE": "0"}}, sglang={"enable_nccl_nvls": True})
    found = environment_of(run({"device": "cuda", "env": {"NCCL_CUMEM_ENABLE": "1"}}))
    assert found["NCCL_CUMEM_ENABLE"] == "1"


# --------------------------------------------------------------------------------------------- attention on GPUs


@pytest.mark.parametrize("derived", [{"softmax_type": "learnable"}, {"window_size": (127, 0)}])
def test_sinks_and_windows_are_not_shared_out_in_a_ring_on_gpus(derived: dict[str, Any]) -> None:
    fields = {"num_layers": 4, **derived}
    with pytest.raises(ConfigError, match="ring attention does not support"):
        check_model(MegatronConfig(context_parallel_size=2), "cuda", fields)
    check_model(MegatronConfig.model_validate({"context_parallel_size": 2, "cp_comm_type": "a2a"}), "cuda", fields)
    check_model(MegatronConfig(context_parallel_size=2), "cpu", fields)
    check_model(MegatronConfig(context_parallel_size=2), "cuda", {"num_layers": 4})
