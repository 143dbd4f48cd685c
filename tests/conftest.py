"""What holds for all tests."""

from __future__ import annotations

import signal

import hypothesis

# Tests send these to themselves and to the processes they start. `nohup` and a shell's background jobs hand them down
# as ignored, and mslime rightly leaves an ignored signal ignored.
for number, default in (
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGINT, signal.default_int_handler),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, default)

# A test never asserts a time: on a busy machine the first example of a property takes what it takes.
hypothesis.settings.register_profile("mslime", deadline=None)
hypothesis.settings.load_profile("mslime")
