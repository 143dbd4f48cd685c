"""Signals: the first is obeyed at the next rest, a second one at once."""

from __future__ import annotations

import signal

import pytest

from mslime.control import stop as stop_module
from mslime.control.stop import TOGETHER_S, Stopped, StopSignals


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that signals come at, in seconds; to be changed in place."""
    now = [100.0]
    monkeypatch.setattr(stop_module.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("signals", "later_s", "counted"),
    [
        ((signal.SIGTERM, signal.SIGTERM), 0.5 * TOGETHER_S, 1),
        ((signal.SIGTERM, signal.SIGTERM), 2 * TOGETHER_S, 2),
        ((signal.SIGINT, signal.SIGINT), 0.5 * TOGETHER_S, 2),
        ((signal.SIGHUP, signal.SIGTERM), 0.5 * TOGETHER_S, 2),
    ],
)
def test_sigterm_from_whoever_ends_parent_and_child_counts_once(
    clock: list[float], signals: tuple[int, int], later_s: float, counted: int
) -> None:
    with StopSignals() as stop:
        stop.patient = True
        signal.raise_signal(signals[0])
        clock[0] += later_s
        if counted == 2:
            with pytest.raises(Stopped) as caught:
                signal.raise_signal(signals[1])
            assert not caught.value.save
            return
        signal.raise_signal(signals[1])
        with pytest.raises(Stopped) as caught:
            stop.check()
        assert caught.value.save and caught.value.exit_status == 128 + signals[0]
