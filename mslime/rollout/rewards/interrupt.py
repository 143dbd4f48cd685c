"""Time limit for computations that may not terminate: they are interrupted after some seconds."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REPEAT_S = 0.2  # libraries that catch everything are interrupted again


class Interrupted(BaseException):
    """The time limit has passed. Not an Exception, because sympy and its users catch those."""


_inside = False


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Raise Interrupted inside the block after `seconds`. Does nothing off the main thread, or inside another such
    block.

    A single long operation in C is not interrupted; the process must be killed then. An earlier timer of other code is
    restored, less the time that passed.
    """
    global _inside
    if _inside or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        if _inside:
            raise Interrupted

    began = time.monotonic()
    others, interval = signal.getitimer(signal.ITIMER_REAL)
    previous = signal.signal(signal.SIGALRM, ring)
    _inside = True
    signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)
    try:
        yield
    finally:
        _inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if others > 0:
            signal.setitimer(signal.ITIMER_REAL, max(others - (time.monotonic() - began), 1e-3), interval)
