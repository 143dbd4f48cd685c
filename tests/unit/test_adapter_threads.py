"""Loops of several adapters in threads of the driver: how they end. Named stand-ins of sessions; nothing is trained."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mslime.config.errors import EngineError, RewardError, TrainerError
from mslime.observe.progress import NamedProgress, Progress
from mslime.run.adapter_session import AdaptersSession, AdapterStop, RunEnding
from mslime.run.stop import Stopped, StopSignals
from mslime.run.trainer_turn import TrainerTurn

Loop = Callable[[Any], None]


class Lines(Progress):
    def __init__(self) -> None:
        super().__init__(0)
        self.lines = list[str]()

    def note(self, text: str) -> None:
        self.lines.append(text)


class FakeAdapter:
    """A session that does nothing, and asks at each rest whether the run goes on."""

    def __init__(self, name: str, stop: AdapterStop) -> None:
        self.name, self.stop, self.left, self.saved = name, stop, False, False

    def leave(self) -> None:
        self.left = True

    def until_told(self) -> None:
        """Rest after rest, for ever; what it learnt is saved at the end."""
        try:
            while True:
                self.stop.check()
                time.sleep(0.005)
        except BaseException as error:
            self.saved = not (isinstance(error, Stopped) and not error.save)
            if isinstance(error, Stopped):
                error.outcome = f"saved {self.name}"
            raise


def session(signals: StopSignals, *names: str) -> tuple[Any, dict[str, FakeAdapter]]:
    made: Any = AdaptersSession.__new__(AdaptersSession)
    made._stop, made._ending, made.progress = signals, RunEnding(), Lines()
    made.ranks = SimpleNamespace(turn=TrainerTurn())
    fakes = {name: FakeAdapter(name, AdapterStop(signals, made._ending, name)) for name in names}
    made.adapters = list(fakes.values())
    return made, fakes


def test_every_adapter_runs_to_its_own_end_in_a_thread_of_its_own() -> None:
    run, fakes = session(StopSignals(), "a", "b", "c")
    meet, threads = threading.Barrier(3), set[str]()

    def loop(adapter: Any) -> None:
        meet.wait(20)  # no one of them ends unless all run
        threads.add(threading.current_thread().name)

    run.train(loop)
    assert threads == {"adapter a", "adapter b", "adapter c"} and all(fake.left for fake in fakes.values())


def test_the_first_failure_ends_all_is_named_and_the_others_are_saved() -> None:
    run, fakes = session(StopSignals(), "good", "bad", "other")

    def loop(adapter: Any) -> None:
        if adapter.name == "bad":
            run.ranks.turn.take()  # and never gives it back
            raise RewardError("reward.function", "f", "raised", "mend it")
        adapter.until_told()

    with pytest.raises(RewardError, match=r"adapters.bad: reward.function = 'f': raised"):
        run.train(loop)
    assert fakes["good"].saved and fakes["other"].saved and not any(fake.left for fake in fakes.values())
    assert run.ranks.turn._holder is None, "others can take turns to save"


def test_what_befalls_the_others_says_who_failed_and_waits_for_a_step_under_way() -> None:
    ending = RunEnding()
    ending.note("bad", EngineError("engine0", "x", "died", ""))
    with pytest.raises(TrainerError, match="adapters.good = 'stopped': adapter bad failed: engine0 = 'x': died"):
        ending.check("good", 0)
    ending.check("bad", 0)
    ending.check("good", 60)
    ending.note("late", RewardError("f", "v", "later", ""))
    with pytest.raises(EngineError, match="adapters.bad"):
        ending.raise_first()


def test_a_signal_lets_every_adapter_save() -> None:
    asked = threading.Event()
    signals = StopSignals(asked.is_set)
    run, fakes = session(signals, "a", "b")
    threading.Timer(0.2, asked.set).start()
    with pytest.raises(Stopped) as stopped:
        run.train(lambda adapter: adapter.until_told())
    assert all(fake.saved for fake in fakes.values()) and stopped.value.save
    assert sorted(run.progress.lines) == ["a: saved a", "b: saved b"] and not signals.patient


def test_a_second_signal_ends_all_at_once() -> None:
    signals = StopSignals()
    run, fakes = session(signals, "a", "b")

    def loop(adapter: Any) -> None:
        adapter.until_told()

    def join(thread: threading.Thread, seconds: float) -> None:
        raise signals._stopped(2, save=False)  # as the handler does, where the main thread waits

    joined, threading.Thread.join = threading.Thread.join, join  # type: ignore[method-assign]
    try:
        with pytest.raises(Stopped):
            run.train(loop)
    finally:
        threading.Thread.join = joined  # type: ignore[method-assign]
    for thread in threading.enumerate():
        if thread.name.startswith("adapter "):
            thread.join(20)
    assert run._ending.at_once and not any(fake.saved for fake in fakes.values())


def test_lines_of_an_adapter_have_its_name() -> None:
    lines = Lines()
    progress = NamedProgress("maths", lines, 3, 0)
    progress.note("saved")
    progress.step_done(1, {"reward/mean": 0.5})
    assert lines.lines == ["maths: saved", "maths: step 1/3  reward 0.500  eta ?"]
