"""What `mslime env` prints, and what is said where GPUs are wanted and cannot be used: early, with a hint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mslime.checks import environment
from mslime.checks.environment import describe_environment, driver_version, failure, gpu_warnings, refuse_without_gpu
from mslime.config.errors import ConfigError
from mslime.config.schema import RunConfig
from mslime.run.run import run

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Pretend to be on a machine with this driver, on which code that contains a word of `fails` fails."""

    def pretend(driver: str | None, **fails: str) -> None:
        monkeypatch.setattr(environment, "driver_version", lambda: driver)
        monkeypatch.setattr(
            environment, "failure", lambda code: next((why for word, why in fails.items() if word in code), None)
        )
        environment.gpu_problems.cache_clear()

    yield pretend
    environment.gpu_problems.cache_clear()


def gpu_run(**cluster: object) -> RunConfig:
    return RunConfig.model_validate(
        {"model": {"path": "nowhere"}, "data": {"prompts": ["unused.jsonl"]}, "cluster": {"device": "cuda", **cluster}}
    )


def test_the_environment_names_what_a_gpu_run_stands_on() -> None:
    names = {line.split(":")[0] for line in describe_environment().splitlines()}
    assert {
        "NVIDIA driver", "CUDA of torch", "NCCL", "cuDNN", "apex (NVIDIA's)", "transformer-engine-torch",
        "flash-linear-attention", "flash-attn-4", "GPUs",
    } <= names  # fmt: skip


@pytest.mark.parametrize(("driver", "fails", "says"), [
    (None, {}, "no NVIDIA driver"),
    ("550.54.15", {}, "550.54.15, but CUDA 13 needs 580"),
    ("580.65.06", {"is_available": "AssertionError"}, "torch sees no GPU"),
    ("580.65.06", {"transformer_engine": "FileNotFoundError: no torch lib"}, "FileNotFoundError: no torch lib"),
])  # fmt: skip
def test_a_run_that_this_machine_cannot_hold_is_refused_before_anything_starts(
    machine: Machine, driver: str | None, fails: dict[str, str], says: str
) -> None:
    machine(driver, **fails)
    with pytest.raises(ConfigError) as caught:
        run(gpu_run())
    assert caught.value.field == "cluster.device" and says in caught.value.rule and caught.value.hint
    assert [says in text for text in gpu_warnings(gpu_run().cluster)] == [True]


def test_a_run_is_not_refused_for_what_it_does_not_need_here_or_has(machine: Machine) -> None:
    machine(None)
    refuse_without_gpu(gpu_run(ray_address="10.0.0.1:6379").cluster)
    refuse_without_gpu(gpu_run(device="cpu").cluster)
    assert gpu_warnings(gpu_run(device="cpu").cluster) == []
    machine("580.65.06")
    refuse_without_gpu(gpu_run().cluster)
    assert gpu_warnings(gpu_run().cluster) == []


@pytest.mark.parametrize("flavour", ["", "for x86_64 "])
def test_the_driver_is_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flavour: str) -> None:
    file = tmp_path / "version"
    file.write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module {flavour} 580.65.06  Release Build\nGCC version: 12")
    monkeypatch.setattr(environment, "_DRIVER_FILE", file)
    assert driver_version() == "580.65.06"
    monkeypatch.setattr(environment, "_DRIVER_FILE", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version() is None


def test_a_process_that_fails_gives_its_last_words() -> None:
    assert failure("pass") is None
    assert failure("raise OSError('libnccl is missing')") == "OSError: libnccl is missing"
