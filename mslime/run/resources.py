"""What outlives a session of a run: its room on Ray's cluster, and its engines.

A rank that crashes, dies or hangs takes the trainer with it, but no engine, and starting those is most of a start. So
the session ends, its engines are made clean as those are that somebody else runs, and another session goes on from the
newest checkpoint: with the same books as a run that was started anew by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from mslime.backends.sglang.client import blocking
from mslime.backends.sglang.pair import client_of
from mslime.config.schema import DeadlineConfig
from mslime.run.attached import groups_of, made_clean
from mslime.run.engine_actors import EngineGroup
from mslime.run.ray_cluster import Cluster
from mslime.run.ray_watch import RayWatch

CLEAN_S = 30.0
"""For an engine's answers while it is made clean; who takes longer is started anew."""


class Resources:
    """Made by the first session, found by those after it. A context manager.

    Attributes:
        stack: ends them in reverse order.
        cluster, ray: once a session has joined Ray's cluster.
        engines, teachers: servers, once a session has launched them, or attached to them.
        groups: beginnings of the names of process groups that engines may be in.
    """

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.cluster: Cluster | None = None
        self.ray: RayWatch | None = None
        self.engines: EngineGroup | None = None
        self.teachers: EngineGroup | None = None
        self.groups: list[str] = []

    def clean(
        self, engines: EngineGroup, senders: Sequence[int], deadlines: DeadlineConfig, note: Callable[[str], None]
    ) -> None:
        """Let the engines forget a session that has ended; start those again that do not answer as they should.

        Args:
            senders: ranks that sent weights.
            note: shows a line.
        """
        limits = deadlines.controls_within(CLEAN_S)
        clients = [client_of(address, limits) for address in engines.addresses]
        unsound = blocking(made_clean(clients, groups_of(senders, self.groups), flush=True))
        engines.replace(unsound)
        for name, error in unsound.items():
            note(f"{name} is gone ({error.brief}): it {'is started again' if name in engines.starting else 'has left'}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.ray is None or not self.ray.left():
            self.stack.close()


class Attempts:
    """How often a run goes on with another session.

    A run that has not made a step ends: what is wrong from the start is no accident. Failures are in a row while no
    checkpoint is newer than the one that the session began with.

    Args:
        most: failures in a row that are borne.
    """

    def __init__(self, most: int) -> None:
        self._most, self._failures, self._started = most, 0, False

    def another(self, began: int, trained: int, saved: int) -> str:
        """Count a failure; what to say before the run goes on. Empty: it ends.

        Args:
            began: steps done before the session that failed.
            trained: steps done in the end, also those that were lost.
            saved: steps that the newest checkpoint holds; 0 without one.
        """
        self._started = self._started or trained > began
        self._failures = 1 if saved > began else self._failures + 1
        if not self._started or self._failures > self._most:
            return ""
        where = f"from step {saved}" if saved else "from its beginning"
        return f"the run goes on {where} ({self._failures} of {self._most} in a row)"


def can_go_on(resources: Resources, *, colocated: bool) -> bool:
    """Whether another session may use what this one leaves. On shared GPUs an engine may be asleep, or hold memory that
    the trainer's next start needs."""
    return not colocated and resources.ray is not None and not resources.ray.gone
