"""What a run takes from Ray, and how it leaves it: a token of its own, and an end that waits for nobody."""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import services
from ray.exceptions import AuthenticationError

from mslime.config.errors import ConfigError
from mslime.config.schema import RunConfig
from mslime.run import ray_cluster as cluster_module
from mslime.run import started
from mslime.run.ray_cluster import Cluster

ROOT = Path(__file__).parents[2]


def test_a_signal_to_the_drivers_group_does_not_reach_rays_processes() -> None:
    with cluster_module._apart():
        started = services.start_ray_process(["sleep", "300"], "raylet", fate_share=True).process
    try:
        assert os.getsid(started.pid) == started.pid != os.getsid(0)
        assert os.getpgid(started.pid) != os.getpgid(0)
    finally:
        started.kill()
        started.wait()
    assert services.ConsolePopen is not None and isinstance(services.ConsolePopen, type)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cluster, list[str]]]:
    """A cluster that has been joined, and what became of it. Nothing of Ray runs."""
    cluster, told = Cluster(run_on(), engines=False), list[str]()
    cluster._connected = True
    cluster._sweeper.callback(told.append, "swept in order")
    monkeypatch.setattr(cluster_module.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster_module, "leave_without_ray", lambda: told.append("left"))
    monkeypatch.setattr(cluster_module, "STOP_SECONDS", 0.05)
    yield cluster, told


def raises() -> None:
    raise RuntimeError("There was timeout in removing the placement group")


@pytest.mark.parametrize("fate", ["ends", "raises", "hangs"])
def test_ray_that_does_not_end_in_order_is_left_to_the_sweeper(
    joined: tuple[Cluster, list[str]], monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    cluster, told = joined
    forever = threading.Event()
    ways: dict[str, Callable[[], object]] = {"ends": lambda: None, "raises": raises, "hangs": forever.wait}
    monkeypatch.setattr(cluster, "_leave", ways[fate])
    if fate == "ends":
        monkeypatch.setattr(cluster_module, "STOP_SECONDS", 60)
    cluster._stop()
    forever.set()
    assert told == (["swept in order"] if fate == "ends" else ["left"])


# Ray's hooks, as they are where its processes are gone: whoever comes by them stays for ever.
WITHOUT_RAY = """
import atexit, sys, threading
from mslime.cli import commands
from mslime.cli.command import Command
from mslime.run.stop import Stopped, leave_without_ray

forever = lambda *_: threading.Event().wait()
atexit.register(forever)
sys.excepthook = forever

def run(args):
    leave_without_ray()
    raise {error}

commands.COMMANDS["env"] = Command("ends", lambda parser: None, run)
sys.exit(commands.main(["env"]))
"""


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        ("RuntimeError('no such shard')", 1, "RuntimeError: no such shard"),
        ("Stopped(15, save=True)", 143, "stopped by SIGTERM"),
    ],
)
def test_the_command_ends_with_its_own_status_when_ray_is_gone(error: str, status: int, said: str) -> None:
    source = WITHOUT_RAY.replace("{error}", error)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (status, "") and said in done.stderr


def run_on(ray_address: str | None = None, **cluster: Any) -> RunConfig:
    values = {"model": {"path": "unused"}, "data": {"prompts": ["unused.jsonl"]}}
    return RunConfig.model_validate({**values, "cluster": {"ray_address": ray_address, **cluster}})


def environment_of(config: RunConfig) -> AbstractContextManager[None]:
    return cluster_module._ray_environment(config.cluster.ray_address, config.deadlines.rescue_s)


@pytest.fixture
def no_ray_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_ray_variables")
@pytest.mark.parametrize("left_by_ray", [None, "token"])
def test_each_local_run_draws_a_token_that_stands_in_no_file(
    monkeypatch: pytest.MonkeyPatch, left_by_ray: str | None
) -> None:
    """Also in a process in which `ray.init` was called before: it sets the mode and takes the token of its file."""
    if left_by_ray:
        monkeypatch.setenv("RAY_AUTH_MODE", left_by_ray)
    drawn = set[str]()
    for _ in range(2):
        with environment_of(run_on()):
            assert os.environ["RAY_AUTH_MODE"] == "token"
            drawn.add(os.environ["RAY_AUTH_TOKEN"])
        assert "RAY_AUTH_TOKEN" not in os.environ
    assert len(drawn) == 2 and all(len(token) == 64 for token in drawn)


@pytest.mark.usefixtures("no_ray_variables")
@pytest.mark.parametrize(
    ("given", "address", "mode", "token"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, None, "disabled", None),
        ({"RAY_AUTH_TOKEN": "mine"}, None, "token", "mine"),
        ({"RAY_AUTH_TOKEN": "theirs"}, "10.0.0.1:6379", "token", "theirs"),
        ({}, "10.0.0.1:6379", None, None),
    ],
)
def test_what_the_environment_says_of_rays_token_holds(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], address: str | None, mode: str | None, token: str | None
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with environment_of(run_on(address)):
        assert (os.environ.get("RAY_AUTH_MODE"), os.environ.get("RAY_AUTH_TOKEN")) == (mode, token)


def test_a_cluster_that_wants_another_token_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_knock(address: str) -> None:
        raise AuthenticationError("RPC error: InvalidAuthToken: Authentication token is missing or incorrect")

    monkeypatch.setattr(cluster_module, "_knock", fake_knock)
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN") as caught:
        Cluster(run_on("10.0.0.1:6379"), engines=False)._connect({})
    assert caught.value.field == "cluster.ray_address"


@pytest.mark.parametrize("python", ["/home/me/my projects/.venv/bin/python", "/home/me/mslime/.venv/bin/python"])
def test_a_python_whose_path_has_a_blank_is_quoted_for_rays_shell(monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    """Ray 2.60 takes its own where it is told none."""
    monkeypatch.setattr(sys, "executable", python)
    told = cluster_module._runtime_environment(run_on().cluster, {}).get("py_executable")
    assert told is None if " " not in python else shlex.split(str(told)) == [python]


def test_variables_of_a_submitted_job_stay_unless_the_run_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"THEIRS": "1", "BOTH": "theirs", "PYTHONPATH": "/job"}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"env_vars": given}}))
    config = run_on(env={"BOTH": "ours"})
    found = cluster_module._runtime_environment(config.cluster, {})["env_vars"]
    assert (found["THEIRS"], found["BOTH"]) == ("1", "ours") and str(ROOT) in found["PYTHONPATH"].split(os.pathsep)
    with environment_of(config):
        assert os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] == "1", "else Ray refuses two sources of one variable"


@pytest.mark.parametrize("state", ["PENDING_CREATION", "ALIVE"])
def test_a_start_in_which_nothing_comes_up_says_what_ray_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    (tmp_path / "raylet.err").write_text("bash: line 1: /home/me/my: No such file or directory\n" * 9)
    actors = {"a": {"State": state, "JobID": "01"}, "b": {"State": "ALIVE", "JobID": "another job's"}}
    node, job = SimpleNamespace(get_logs_dir_path=lambda: str(tmp_path)), SimpleNamespace(get_job_id=lambda: "01")
    monkeypatch.setattr(cluster_module.ray._private.state, "actors", lambda: actors)
    monkeypatch.setattr(cluster_module.ray._private.worker, "_global_node", node)
    monkeypatch.setattr(cluster_module.ray, "get_runtime_context", lambda: job)
    why = Cluster(run_on(), engines=False).why_nothing_runs()
    assert why.count("No such file or directory") == (5 if state == "PENDING_CREATION" else 0)
    assert (str(tmp_path / "raylet.err") in why) == (state == "PENDING_CREATION")


class FakeCluster:
    """Nothing of the run comes up on it."""

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def on_other_machines(self) -> list[str]:
        return []

    def why_nothing_runs(self) -> str:
        return "Ray says so"


class FakeStarted(started.StartedRun):
    def _start(self) -> None: ...


def test_a_start_that_has_been_silent_for_long_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(started, "SILENT_S", 0.0)
    monkeypatch.setattr(started, "Cluster", lambda *_, **__: FakeCluster())
    monkeypatch.setattr(started, "RayWatch", lambda address: nullcontext())
    monkeypatch.setattr(started.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=""))
    run = FakeStarted(SimpleNamespace(config=run_on()), SimpleNamespace(install=None))  # type: ignore[arg-type]
    run.progress = SimpleNamespace(note=said.put)  # type: ignore[assignment]
    run._join_cluster(True)
    assert said.get(timeout=30) == "Ray says so"
    run._stack.close()
