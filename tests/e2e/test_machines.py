"""A run over several machines: Ray nodes on this one, each with its own cores and address."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster as FakeMachines

from tests.e2e.harness import Run, start_run
from tests.e2e.test_run import START_S, STEP_S, TP2_EP2, prompts, saved_step, settings
from tests.fixtures.killing_transport import kill_family
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

__all__ = ["prompts"]

ENGINE = "mslime.backends.sglang.launch"


@pytest.fixture
def three_machines() -> Iterator[FakeMachines]:
    """Two cores on each of three nodes: two hold the trainer's ranks, the third both engines. The head has none, so the
    driver and the rollout service live apart from all of them."""
    yield from machines(cores=2)


@pytest.fixture
def three_small_machines() -> Iterator[FakeMachines]:
    """The same, with one core each."""
    yield from machines(cores=1)


def machines(cores: int) -> Iterator[FakeMachines]:
    """Three of them, beside the head."""
    machine = {"num_gpus": 0, "object_store_memory": 128 << 20}
    head = {**machine, "node_ip_address": "127.0.0.2", "num_cpus": 0, "include_dashboard": False}
    made = FakeMachines(initialize_head=True, head_node_args=head)
    for address in ("127.0.0.3", "127.0.0.4", "127.0.0.5"):
        made.add_node(**machine, node_ip_address=address, num_cpus=cores)
    yield made
    made.shutdown()


def processes(title: str) -> list[psutil.Process]:
    """Processes below this one whose title or command contains `title`."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        try:
            if title in " ".join([process.name(), *process.cmdline()]):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def machines_of(title: str) -> list[int]:
    """The raylet above each process with this title. One that has just forked is there twice for a moment, and is the
    other one's parent."""
    found: list[int] = []
    for process in processes(title):
        with suppress(psutil.NoSuchProcess):
            found += [above.pid for above in process.parents() if above.name() == "raylet"]
    return found


@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_four_ranks_and_two_engines_train_over_three_machines(
    tiny_qwen3_moe: Path,
    prompts: Path,
    tmp_path: Path,
    runs: list[Run],
    three_machines: FakeMachines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", three_machines.address)
    values = settings(
        tiny_qwen3_moe,
        prompts,
        megatron=TP2_EP2,
        sglang={"num_engines": 2, "max_total_tokens": 4096},
        cluster={"trainer_ranks": 4, "env": {"MSLIME_TEST_GIVEN": "yes"}},
    )
    run = start_run(values, tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(processes("ray::TrainerActor")) == 4 and len(processes(ENGINE)) >= 2, START_S)
    assert len(set(machines_of("ray::TrainerActor"))) == 2, "tensor-parallel pairs, one on each of two machines"
    raylets = {*machines_of("ray::TrainerActor"), *machines_of("ray::EngineActor")}
    assert len(raylets) == 3 and not raylets & {*machines_of("ray::RolloutActor")}
    for process in [*processes("ray::TrainerActor"), *processes(ENGINE)]:
        assert process.environ()["MSLIME_TEST_GIVEN"] == "yes"
    assert run.finish(START_S + 2 * STEP_S) == 0, run.text()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["replay/coverage"] == 1.0 and row["mismatch/abs_max"] < 1e-3 for row in rows)
    assert "bit for bit" in run.text()
    elsewhere = [line for line in run.text().splitlines() if line.startswith(f"logs in {run.directory / 'logs'} of ")]
    found = [re.fullmatch(r".* \((127\.0\.0\.[345])\): (.*)", line) for line in elsewhere]
    where = {match[2]: match[1] for match in found if match is not None}
    held = {"trainer_rank0 to trainer_rank1", "trainer_rank2 to trainer_rank3", "engine0 to engine1"}
    assert set(where) == held and len(set(where.values())) == 3, elsewhere
    assert not processes(ENGINE) and not processes("ray::TrainerActor")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", ["ray::EngineActor", "ray::TrainerActor"])
def test_a_machine_that_dies_is_named_and_takes_no_step_of_others_with_it(
    tiny_qwen3_moe: Path,
    prompts: Path,
    tmp_path: Path,
    runs: list[Run],
    three_machines: FakeMachines,
    monkeypatch: pytest.MonkeyPatch,
    lost: str,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", three_machines.address)
    values = settings(
        tiny_qwen3_moe,
        prompts,
        megatron={"tensor_model_parallel_size": 2},
        sglang={"num_engines": 1, "max_total_tokens": 4096},
        cluster={"trainer_ranks": 4},
        train={"num_steps": 500},
        checkpoint={"save_every": 0},
    )
    run = start_run(values, tmp_path)
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 2, START_S + 2 * STEP_S)
    machine = psutil.Process(machines_of(lost)[-1])
    for process in [machine, *machine.children(recursive=True)]:
        process.kill()
    assert run.finish(200) == 2, run.text()
    if lost == "ray::EngineActor":
        assert saved_step(run) == len(run.rows()), run.text()
        assert "engine0" in run.text()
    else:
        assert "trainer rank" in run.text() and "not saved" in run.text()
    assert "Traceback" not in run.text()
    assert not processes(ENGINE) and not processes("ray::TrainerActor")


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_engine_over_two_machines_serves_and_is_started_again_when_a_part_of_it_dies(
    prompts: Path,
    tmp_path: Path,
    runs: list[Run],
    three_small_machines: FakeMachines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", three_small_machines.address)
    values = settings(
        make_tiny_qwen3_moe(tmp_path / "model", moe_intermediate_size=128),
        prompts,
        rollout={"max_response_tokens": 8, "group_size": 2},
        sglang={"tp_size": 2, "nnodes": 2, "max_total_tokens": 4096},
        train={"num_steps": 500},
        weights={"verify": "always"},
        checkpoint={"save_every": 0},
        deadlines={"engine_silence_s": 20, "engine_request_s": 60, "engine_control_s": 30, "weight_sync_s": 40},
    )
    run = start_run(values, tmp_path / "run")
    runs.append(run)
    run.wait_for(lambda: len(run.rows()) >= 2, START_S + 4 * STEP_S)
    parts = [*processes("ray::EngineActor"), *processes("ray::PartActor")]
    assert len(parts) == 2 and len({part.ppid() for part in parts}) == 2, "each on a machine of its own"
    assert "part 1 of engine0" in run.text() and "bit for bit" in run.text()
    before = len(run.rows())
    kill_family(processes("--node-rank 1")[0])
    run.wait_for(lambda: "engine0 is back at http" in run.text(), START_S + STEP_S)
    run.wait_for(lambda: len(run.rows()) >= before + 3, 6 * STEP_S)
    assert "engine0 is gone" in run.text() and "no engine is left" in run.text()
    run.process.terminate()
    assert run.finish(120) == 128 + signal.SIGTERM, run.text()
    assert saved_step(run) == len(run.rows())
    assert not processes(ENGINE) and not processes("ray::PartActor")
