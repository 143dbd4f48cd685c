"""What holds for all tests."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys

import hypothesis
import pytest

# Tests send these to themselves and to the processes they start. `nohup` and a shell's background jobs hand them down
# as ignored, and mslime rightly leaves an ignored signal ignored.
for number, default in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)

# A test never asserts a time: on a busy machine the first example of a property takes what it takes. Examples are the
# same in every run, so that a change is judged by what it changed; `--hypothesis-profile search` looks for new ones.
hypothesis.settings.register_profile("mslime", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("mslime")


@pytest.fixture(autouse=True)
def the_same_tensors_in_every_run() -> None:
    """A rounding that one draw of numbers in a thousand shows must not fail somebody else's change."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asked = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in asked}))
    return True
