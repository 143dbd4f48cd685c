"""The loop and the session around evaluations: which weights are scored, where the scores go, what a signal costs.

Engines, ranks and the rollout service only pretend, so that an evaluation ends when a test says so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mslime.backends.sglang.client import EngineDied
from mslime.backends.sglang.engine_pool import UpdateMembers
from mslime.backends.sglang.server_process import EngineAddress
from mslime.checks.resolve import ResolvedRun
from mslime.config.errors import EngineError
from mslime.config.loader import build
from mslime.data.checkpoints import FileSum, complete, saving_directory, steps, write_summed
from mslime.observe.metrics import read_metrics
from mslime.observe.names import by_step
from mslime.observe.timeline import read_spans
from mslime.run.fleet import Fleet
from mslime.run.loop import train_rl
from mslime.run.publish import Publisher
from mslime.run.rollout_process import Evaluation
from mslime.run.run_rollouts import HeldOutScores, StepShards
from mslime.run.sharing import SeparateGpus
from mslime.run.stop import Stopped
from mslime.run.trainers import StepResult
from mslime.run.training_run import TrainingRun
from tests.fixtures.model_facts import model_facts
from tests.fixtures.remote import fake_process

ENGINE = EngineAddress("engine 0", "http://127.0.0.1:1")


class FakeRollouts:
    """Takes nothing and evaluates at once. `events` is what the run did, in order; a hook may end it there.

    Attributes:
        update: what was done to the engines' weights, in order.
    """

    def __init__(self, events: list[str], hook: Callable[[str], None]) -> None:
        self.version, self._events, self._hook = -1, events, hook
        self.done = True
        self.update: list[str] = []
        self.gone: dict[str, str] = {}

    def tell(self, event: str) -> None:
        self._events.append(event)
        self._hook(event)

    def take(self, step: int) -> StepShards:
        self.tell(f"take {step + 1}")
        return StepShards([], {"reward/mean": 0.5}, b"")

    def pause(self) -> None:
        self.tell("pause")
        self.update.append("pause")

    def admit(self, address: EngineAddress) -> None:
        self.update.append(f"greet {address.name}")

    def dead(self) -> dict[str, str]:
        return self.gone

    def no_engine_alive(self) -> bool:
        return False

    def begin_update(self) -> UpdateMembers:
        self.update.append("begin")
        return UpdateMembers((ENGINE.url,), {})

    def compare(self, expected: object, strict: bool) -> int:
        self.update.append("compare")
        return 1

    def end_update(self) -> None:
        self.update.append("end")

    def stamp(self, version: int) -> None:
        self.update.append(f"stamp {version}")
        self._hook(f"stamp {version}")

    def resume(self, version: int) -> None:
        self.version = version
        self.update.append(f"resume {version}")

    def save(self, path: Path, next_step: int) -> FileSum:
        return write_summed(path, b"groups")

    def process(self) -> Any:
        """As the session has it. An evaluation has ended, or has not: as the test says."""
        process = fake_process(self)
        process.service.wait = self._wait
        process.begin_evaluation = self._begin_evaluation
        return process

    def _begin_evaluation(self, step: int) -> Evaluation:
        self.tell(f"evaluate {step}")
        return Evaluation(step, cast("Any", SimpleNamespace(done=self.done, step=step)))

    def _wait(self, pending: Any) -> HeldOutScores:
        self.tell(f"scores {pending.step}")
        return HeldOutScores({"eval/a/accuracy": (5 - pending.step) / 10}, self.version, 1.0, 2.0)


class FakeTrainers:
    """Ranks that learn nothing and save quickly."""

    def __init__(self, rollouts: FakeRollouts) -> None:
        self._tell, self._update = rollouts.tell, rollouts.update

    def train(self, shards: object, on_progress: object, policy: bool, step: int, watched: object) -> StepResult:
        self._tell("train")
        return StepResult([{"loss/total": 1.0, "loss/tokens": 1.0}], {}, {})

    def send_weights(self, version: int, verify: bool, on_progress: object) -> tuple[Any, dict[str, Any]]:
        self._tell(f"send {version}")
        self._update.append("send, verified" if verify else "send")
        spent = SimpleNamespace(fill=0.1, turn=0.0, send=0.1, sent=[])
        sent = SimpleNamespace(bytes=1, seconds=1.0, buckets=1, expected={}, phases={0: spent}, changed=None)
        return sent, {"trainer 0": (1.0, 2.0)}

    def save(self, directory: Path, extra: dict[str, Any], others: dict[str, FileSum], deadline_s: float) -> None:
        complete(saving_directory(directory), directory, "tp1", 1, extra, others)

    def rest(self, deadline_s: float) -> None:
        pass


class FakeEngines:
    """One engine, which comes back when a test says so."""

    def __init__(self, run: FakeParts) -> None:
        self.addresses, self.starting, self._run = [ENGINE], list[str](), run

    def launched(self, name: str) -> bool:
        return True

    def started(self) -> dict[str, EngineAddress]:
        return self._run.back

    def take(self, address: EngineAddress) -> None: ...

    def reset_failures(self, name: str) -> None: ...

    def restart(self, name: str) -> str:
        self.starting.append(name)
        return "it is being restarted"


class FakeParts(TrainingRun):
    """A session whose processes only pretend; its loop, records and checkpoints are the real ones."""

    def __init__(self, run: ResolvedRun, hook: Callable[[str], None]) -> None:
        super().__init__(run)
        self.events: list[str] = []
        self.fake = FakeRollouts(self.events, hook)

    def _start(self) -> None:
        self._open_records()
        self._rollouts, self._trainers = self.fake.process(), cast("Any", FakeTrainers(self.fake))
        self.back: dict[str, EngineAddress] = {}
        self._engines = cast("Any", FakeEngines(self))
        self._fleet = Fleet(self._rollouts.engines, self._engines, cast("Any", None), lambda: None, self.progress)
        self._memory = SeparateGpus(self._fleet.update_engines)
        self._publisher = Publisher(
            self.config, self._rollouts, self._trainers, self._engines, self._fleet, self._memory, lambda: None,
            lambda: "other", self.progress, self._timeline,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("loader", "verify", "compared"), [("model", "probe", 0), ("recorded", "first", 2), ("recorded", "probe", 2)]
)
def test_weights_are_compared_before_the_update_ends_and_stamped_last(
    tmp_path: Path, loader: str, verify: str, compared: int
) -> None:
    """Twice, since what the first sync has recorded the second one uses."""
    with session(tmp_path, 0, weights={"loader": loader, "verify": verify}) as run:
        for version in (1, 2, 3):
            run.publish_weights(version)
    expected: list[str] = []
    for version in (1, 2, 3):
        sent = ["send, verified", "compare"] if version <= compared else ["send"]
        expected += ["pause", "begin", *sent, "end", f"stamp {version}", f"resume {version}"]
    assert run.fake.update == expected


@pytest.mark.parametrize(("verify", "asks"), [("probe", True), ("always", True), ("first", False), ("never", False)])
def test_engines_are_probed_as_configured(tmp_path: Path, verify: str, asks: bool) -> None:
    with session(tmp_path, 0, weights={"verify": verify}) as run:
        assert (run._probe() is not None) == asks


def test_an_engine_that_refuses_its_stamp_is_started_again_and_does_not_count_as_serving(tmp_path: Path) -> None:
    def refuse(event: str) -> None:
        if event == "stamp 2":
            run.fake.gone = {"engine 0": "/update_weight_version: HTTP 500"}

    with session(tmp_path, 0, hook=refuse) as run:
        for version in (1, 2):
            run.publish_weights(version)
            (state,) = run._fleet.orders.standing()["engines"]
            assert state["state"] == ("serving" if version == 1 else "starting")
    assert run._engines.starting == ["engine 0"] and "HTTP 500" in state["why"]


def test_an_engine_that_is_back_is_compared_anew(tmp_path: Path) -> None:
    """It is another process, which records its copies anew."""
    with session(tmp_path, 0, weights={"verify": "first"}) as run:
        for version in range(1, 7):
            run.back = {"engine 0": ENGINE} if version == 4 else {}
            run.publish_weights(version)
    sent = ["send, verified", "send, verified", "send"] * 2
    assert [event for event in run.fake.update if event.startswith("send")] == sent
    assert run.fake.update.index("greet engine 0") == run.fake.update.index("resume 3") + 1, "before the pause"


def nothing(event: str) -> None:
    pass


def session(
    tmp_path: Path, staleness: int, hook: Callable[[str], None] = nothing, done: bool = True, **sections: Any
) -> FakeParts:
    values: dict[str, Any] = {
        "model": {"path": str(tmp_path)}, "output_dir": str(tmp_path), "cluster": {"device": "cpu"},
        "data": {"prompts": ["p.jsonl"], "eval_sets": [{"name": "a", "path": "e.jsonl"}]},
        "rollout": {"max_staleness": staleness}, "train": {"num_steps": 4}, "checkpoint": {"save_hf": False},
        "observe": {"eval_every": 2, "progress": "off"}, "weights": {"verify": "never"}, **sections,
    }  # fmt: skip
    made = FakeParts(cast("Any", SimpleNamespace(config=build(values), probe_tolerance=1.0, model=model_facts())), hook)
    made.fake.done = done
    return made


def train(made: FakeParts) -> list[str]:
    with made:
        train_rl(made)
    return made.events


def rows_of(tmp_path: Path) -> list[dict[str, Any]]:
    return read_metrics(tmp_path / "run" / "metrics.jsonl")


def test_training_goes_on_while_a_version_is_evaluated_and_the_next_one_waits(tmp_path: Path) -> None:
    events = train(session(tmp_path, staleness=1))
    assert events == [
        "pause", "send 0", "evaluate 0",
        "take 1", "train", "scores 0", "pause", "send 1",
        "take 2", "train", "pause", "send 2", "evaluate 2",
        "take 3", "train", "scores 2", "pause", "send 3",
        "take 4", "train", "pause", "send 4", "evaluate 4", "scores 4",
    ]  # fmt: skip
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 2, 3, 4], "in order, and the late ones before the next step's"
    joined = by_step(rows)
    assert {r["step"]: r["eval/a/accuracy"] for r in joined if "eval/a/accuracy" in r} == {0: 0.5, 2: 0.3, 4: 0.1}
    assert all(r["version"] == r["step"] for r in joined) and "loss/total" in joined[2]
    waited = [r["step"] for r in rows if "perf/eval_seconds" in r]
    assert waited == [1, 3, 4], "the step that waited, which is the next one"
    spans = [(s.lane, s.step) for s in read_spans(tmp_path / "run") if s.name == "evaluate"]
    assert spans == [("engine 0", 0), ("engine 0", 2), ("engine 0", 4)]


def test_without_staleness_nothing_runs_beside_an_evaluation(tmp_path: Path) -> None:
    events = train(session(tmp_path, staleness=0))
    assert events[2:4] == ["evaluate 0", "scores 0"] and events[events.index("evaluate 2") + 1] == "scores 2"
    assert [row["step"] for row in rows_of(tmp_path)] == [0, 1, 2, 3, 4]
    assert [r["step"] for r in rows_of(tmp_path) if "perf/eval_seconds" in r] == [0, 2, 4]


def test_the_best_checkpoint_is_kept_by_scores_that_come_late(tmp_path: Path) -> None:
    kept = {"save_hf": False, "save_every": 1, "keep": 1, "keep_best": "eval/a/accuracy"}
    train(session(tmp_path, staleness=1, checkpoint=kept, observe={"eval_every": 1, "progress": "off"}))
    assert [path.name for path in steps(tmp_path / "run" / "checkpoints")] == ["step_1", "step_4"]
    down = {**kept, "keep_best_is": "min"}
    train(session(tmp_path / "down", staleness=1, checkpoint=down, observe={"eval_every": 1, "progress": "off"}))
    assert [path.name for path in steps(tmp_path / "down" / "run" / "checkpoints")] == ["step_4"]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("done", [True, False])
def test_an_evaluation_that_a_signal_meets_is_recorded_once(tmp_path: Path, staleness: int, done: bool) -> None:
    """It comes while version 2 is evaluated. What has ended is kept; what has not is done by the next session."""
    at = "take 3" if staleness else "scores 2"
    met: list[str] = []

    def stop(event: str) -> None:
        if event == at and not met:
            met.append(event)
            raise Stopped(15, save=True)

    first = session(tmp_path, staleness, stop, done)
    with pytest.raises(Stopped) as stopped:
        train(first)
    assert stopped.value.outcome.startswith("saved step 2 in ")
    has_scores = {row["step"] for row in rows_of(tmp_path) if "eval/a/accuracy" in row}
    assert has_scores == ({0, 2} if done else {0})

    again = train(session(tmp_path, staleness))
    assert again[:2] == ["pause", "send 2"] and ("evaluate 2" in again) == (not done)
    joined = by_step(rows_of(tmp_path))
    assert [r["step"] for r in joined] == [0, 1, 2, 3, 4]
    assert {r["step"]: r["eval/a/accuracy"] for r in joined if "eval/a/accuracy" in r} == {0: 0.5, 2: 0.3, 4: 0.1}
    assert all("loss/total" in r for r in joined[1:])
    trained = {s.step for s in read_spans(tmp_path / "run") if s.name == "step"}
    assert trained == {1, 2, 3, 4}, "spans of a step that is evaluated again are not replaced"


def test_an_evaluation_in_which_all_engines_died_begins_again_when_one_is_back(tmp_path: Path) -> None:
    died = [EngineDied("engine 0", "/generate", "the connection broke", "read its log")]

    def die_once(event: str) -> None:
        if event == "scores 2" and died:
            raise died.pop()

    made = session(tmp_path, 1, die_once)
    train(made)
    at = made.events.index("scores 2")
    assert made.events[at : at + 3] == ["scores 2", "evaluate 2", "scores 2"]
    assert [row["step"] for row in by_step(rows_of(tmp_path))][-1] == 4


def test_an_evaluation_that_fails_costs_no_trained_step(tmp_path: Path) -> None:
    def fail(event: str) -> None:
        if event == "scores 2":
            raise EngineError("engine 0", "evaluation", "died", "read its log")

    made = session(tmp_path, 1, fail)
    with pytest.raises(EngineError, match="died"):
        train(made)
    assert made.events[-3:] == ["train", "scores 2", "scores 2"], "step 3 was trained before"
    assert [path.name for path in steps(tmp_path / "run" / "checkpoints")] == ["step_3"]
    assert [row["step"] for row in rows_of(tmp_path)][-1] == 3
