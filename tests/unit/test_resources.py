"""When a run goes on with another trainer, and with which engines."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mslime.config.errors import EngineError, TrainerError, WorkerError
from mslime.config.schema import RunConfig
from mslime.run import ray_cluster as cluster_module
from mslime.run.engine_actors import EngineGroup
from mslime.run.ray_cluster import Cluster
from mslime.run.run import Attempts, can_go_on
from mslime.run.started import RunResources


@pytest.mark.parametrize(
    ("sessions", "told"),
    [
        ([(0, 0, 0)], [""]),  # no step was made
        ([(0, 3, 0)], ["from the beginning (1 of 2 in a row)"]),
        ([(0, 3, 2)], ["from step 2 (1 of 2 in a row)"]),
        ([(0, 3, 2), (2, 2, 2), (2, 2, 2)], ["from step 2 (1 of 2", "from step 2 (2 of 2", ""]),
        ([(0, 3, 2), (2, 4, 2), (2, 5, 4), (4, 4, 4)], ["(1 of 2", "(2 of 2", "from step 4 (1 of 2", "(2 of 2"]),
        ([(7, 7, 7)], [""]),  # a resumed run that fails at once
    ],
)
def test_failures_count_in_a_row_until_there_is_a_new_checkpoint(
    sessions: list[tuple[int, int, int]], told: list[str]
) -> None:
    attempts = Attempts(2)
    for (began, trained, saved), words in zip(sessions, told, strict=True):
        said = attempts.another(began, trained, saved)
        assert words in said and bool(words) == bool(said)


def test_nothing_goes_on_without_a_chance() -> None:
    assert not Attempts(0).another(0, 5, 4)


def run(**cluster: Any) -> RunConfig:
    sections = {"model": {"path": "unused"}, "data": {"prompts": ["unused.jsonl"]}, "cluster": cluster}
    return RunConfig.model_validate(sections)


def test_a_run_without_ray_or_on_shared_gpus_does_not_go_on() -> None:
    resources = RunResources()
    assert not can_go_on(resources, colocated=False), "nothing was started"
    resources.ray = cast("Any", SimpleNamespace(gone=False))
    assert can_go_on(resources, colocated=False)
    assert not can_go_on(resources, colocated=True)
    resources.ray = cast("Any", SimpleNamespace(gone=True))
    assert not can_go_on(resources, colocated=False)


def test_resources_are_left_to_the_sweeper_when_ray_is_gone() -> None:
    ended: list[str] = []
    for gone in (False, True):
        with RunResources() as resources:
            resources.stack.callback(ended.append, f"gone {gone}")
            resources.ray = cast("Any", SimpleNamespace(left=lambda gone=gone: gone))
    assert ended == ["gone False"]


@pytest.mark.parametrize(("states", "lost"), [(["CREATED", "CREATED"], False), (["CREATED", "RESCHEDULING"], True)])
def test_a_trainer_whose_machine_is_gone_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, states: list[str], lost: bool
) -> None:
    monkeypatch.setattr("mslime.run.ray_cluster.placement_group_table", lambda group: {"state": group})
    cluster = Cluster(run(), engines=False)
    cluster._trainers, cluster._critics = cast("Any", states[0]), cast("Any", states[1])
    if not lost:
        cluster.check_trainer_machines()
        return
    with pytest.raises(TrainerError, match="a machine of the trainer is gone") as caught:
        cluster.check_trainer_machines()
    assert not isinstance(caught.value, WorkerError), "the run ends"


class FakeEngines(EngineGroup):
    """Engines of which nothing is started; the books are the real ones."""

    def __init__(self, launched: list[str], attached: list[str], restarts: int = 3) -> None:
        self._config = cast("Any", SimpleNamespace(sglang=SimpleNamespace(restarts=restarts)))
        self.role, self._log_dir, self._may_start = "engine", cast("Any", "logs"), True
        self._actors = dict.fromkeys(launched)
        self._restarts = Counter[str]()
        self._starting, self._waiting = {}, []
        self.addresses = [address(name) for name in launched + attached]
        self.found: dict[str, Any] = {}

    def _begin(self, name: str) -> None:
        self._starting[name] = cast("Any", name)

    def started(self) -> dict[str, Any]:
        found, self.found = self.found, {}
        self._starting = {name: ref for name, ref in self._starting.items() if name not in found}
        return found


def address(name: str) -> Any:
    return SimpleNamespace(name=name, endpoint=f"endpoint of {name}")


def test_unsound_engines_are_started_again_and_attached_ones_let_go() -> None:
    engines = FakeEngines(["engine0", "engine1"], ["engine2", "engine3"])
    engines.replace({"engine1", "engine3"})
    assert [each.name for each in engines.addresses] == ["engine0", "engine2"]
    assert engines.starting == ["engine1"] and engines.attached == ["endpoint of engine2"]


def test_one_that_was_being_started_is_not_started_twice_and_one_that_was_given_up_gets_another_chance() -> None:
    engines = FakeEngines(["engine0", "engine1", "engine2"], [])
    engines.addresses = [address("engine0")]
    engines._begin("engine1")
    engines._restarts["engine2"] = 3
    engines.replace(())
    assert engines.starting == ["engine1", "engine2"] and engines._restarts == {"engine2": 1}


def test_without_a_sound_engine_the_first_that_is_started_is_waited_for() -> None:
    engines = FakeEngines(["engine0", "engine1"], [])
    engines.replace({"engine0", "engine1"})
    failed = EngineError("engine start", "engine0", "its port is taken", "")
    waits: list[dict[str, Any]] = [{"engine0": failed}, {}, {"engine1": address("engine1")}]
    engines.wait_for_one(lambda: setattr(engines, "found", waits.pop(0)))
    assert [each.name for each in engines.addresses] == ["engine1"]

    engines.replace({"engine0", "engine1"})
    waits = [{"engine0": failed}, {"engine1": failed}]
    with pytest.raises(EngineError, match="its port is taken"):
        engines.wait_for_one(lambda: setattr(engines, "found", waits.pop(0)))
    with pytest.raises(EngineError, match="no server is left"):
        FakeEngines([], []).wait_for_one(lambda: None)


@pytest.mark.parametrize(("slow", "calls"), [(0, 1), (2, 3), (3, 3)])
def test_ray_that_is_too_slow_to_start_is_started_again(monkeypatch: pytest.MonkeyPatch, slow: int, calls: int) -> None:
    """Ray's own class and words of it, from a stand-in for `ray.init`."""
    called, killed = list[object](), list[object]()

    def init(**options: object) -> None:
        called.append(options["num_cpus"])
        if len(called) <= slow:
            raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(cluster_module.ray, "init", init)
    monkeypatch.setattr(cluster_module, "kill_all", killed.append)
    if slow < 3:
        cluster_module._start_ray({"num_cpus": 4})
    else:
        with pytest.raises(WorkerError, match=r"3 starts(.|\n)*cluster\.ray_address"):
            cluster_module._start_ray({"num_cpus": 4})
    assert called == [4] * calls and len(killed) == slow


def test_whatever_else_ray_raises_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise RuntimeError("no room in /dev/shm")

    monkeypatch.setattr(cluster_module.ray, "init", init)
    with pytest.raises(RuntimeError, match="no room"):
        cluster_module._start_ray({})
