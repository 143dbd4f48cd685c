"""Resources of a run that outlive a session: its part of Ray's cluster, and its engines.

A rank that crashes, dies or hangs ends the trainer, but no engine, and starting engines is most of a start. So the
session ends, and its engines are cleaned like attached ones. Another session then continues from the newest checkpoint,
with the same ledger as a run that is restarted by hand.
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
"""Seconds for an engine's answers while it is cleaned; a slower engine is restarted."""


class Resources:
    """Created by the first session and reused by later ones. A context manager.

    Attributes:
        stack: ends them in reverse order.
        cluster, ray: set once a session has joined Ray's cluster.
        engines, teachers: servers, once a session has launched them, or attached to them.
        groups: name prefixes of process groups that engines may be in.
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
        """Remove the state of an ended session from the engines; engines without a proper answer are restarted.

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
    """Counts how often a run continues with another session.

    A run ends if it has not made a step: a fault present from the start would recur. Failures count as consecutive
    while no checkpoint is newer than the one that the session began with.

    Args:
        most: largest number of consecutive failures.
    """

    def __init__(self, most: int) -> None:
        self._most, self._failures, self._started = most, 0, False

    def another(self, began: int, trained: int, saved: int) -> str:
        """Count a failure; returns a message for the user before the run continues. Empty: the run ends.

        Args:
            began: steps done before the failed session.
            trained: steps done in the end, including lost ones.
            saved: steps in the newest checkpoint; 0 without one.
        """
        self._started = self._started or trained > began
        self._failures = 1 if saved > began else self._failures + 1
        if not self._started or self._failures > self._most:
            return ""
        where = f"from step {saved}" if saved else "from its beginning"
        return f"the run goes on {where} ({self._failures} of {self._most} in a row)"


def can_go_on(resources: Resources, *, colocated: bool) -> bool:
    """Whether another session may use the resources of this one. On shared GPUs an engine may have released its memory,
    or hold memory that the trainer's next start needs."""
    return not colocated and resources.ray is not None and not resources.ray.gone
