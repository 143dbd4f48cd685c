"""The set of engines during training: dead engines are restarted, others added or removed, all at weight syncs.

An engine may serve requests only with the run's weights, which it gets in a sync together with all others. So a new,
restarted or recovered engine is checked beside the run and admitted to the next sync. A leaving engine gets no further
requests, and the sync excludes it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from mslime.config.errors import ConfigError, EngineError, UserError
from mslime.observe.progress import Progress
from mslime.run.attached import AttachedEngines
from mslime.run.endpoint import EngineState, ScaleOrder, ScaleOrders
from mslime.run.engine_actors import EngineGroup
from mslime.run.ray_calls import LoopHandle, RemoteHandle
from mslime.run.run_engines import RunEngines

if TYPE_CHECKING:
    from mslime.backends.sglang.server_process import EngineAddress

LOOK_EVERY_S = 0.5
"""Between two checks while no engine is left."""
FORGIVEN_AFTER = 10
"""Weight syncs of an engine after which its `sglang.restarts` count is reset: long runs lose engines now and then, but
an engine that dies again and again is broken."""


class Fleet:
    """The engines of a run, or of `mslime serve`, and their states.

    Args:
        members: the same engines in the rollout service, which sends them requests.
        engines: those that the run began with; it launches others.
        attached: takes over attached engines before use, and releases them.
        check: raises when the run is to end.

    Attributes:
        orders: requests from outside to change the set.
        joins: number of engines admitted since the start.
    """

    def __init__(
        self,
        members: RemoteHandle[RunEngines] | LoopHandle[RunEngines],
        engines: EngineGroup,
        attached: AttachedEngines,
        check: Callable[[], None],
        progress: Progress,
    ) -> None:
        self._members, self._engines = members, engines
        self._attached, self._check, self._progress = attached, check, progress
        self.orders, self.joins = ScaleOrders(), 0
        self._passed = Counter[str]()  # syncs since an engine died
        self._states = {
            a.name: EngineState(a.name, a.url, engines.launched(a.name), "serving") for a in engines.addresses
        } | {name: EngineState(name, "", True, "starting") for name in engines.starting}
        self._show()

    @property
    def size(self) -> int:
        """Number of engines, including dead and starting ones."""
        return len(self._states)

    @property
    def expects_engines(self) -> bool:
        """Whether an engine generates, or may do so again: it is starting, or its death has not been handled yet."""
        return any(state.state in ("serving", "joining", "starting") for state in list(self._states.values()))

    # --------------------------------------------------------------------------------------------------- at a sync

    def update_engines(self) -> bool:
        """Before the engines are paused for a sync: admit started, recovered and attached engines, restart dead ones,
        and remove unwanted ones. Returns whether any joined."""
        for number, order in self.orders.take():
            try:
                if order.engines is not None:
                    result = self._scale(order.engines)
                else:
                    result = self._attach(order) if order.attach else self._drain(order.drain)
            except UserError as error:
                result = f"refused: {error}"
            self._progress.note(f"requested {order.describe()}: {result.splitlines()[0]}")
            self._show()
            self.orders.record(number, result)
        self._take_started()
        for name, why in self._members.call(RunEngines.dead).items():
            self._look_after(name, why)
        self._show()
        return any(state.state == "joining" for state in self._states.values())

    def _take_started(self) -> None:
        """Admit servers that have started, and retry failed starts."""
        for name, found in (started := self._engines.started()).items():
            how = "is back" if self._states[name].why else "joins"
            failure = found if isinstance(found, UserError) else self._admit(found, how)
            if failure is not None:
                self._start_again(name, f"{name} could not be started ({failure.brief})", failure)
        if started:
            self._show()

    def lost(self, gone: Mapping[str, str]) -> None:
        """Handle engines that died during a sync, with the causes."""
        for name, why in gone.items():
            if name in self._states and self._states[name].state in ("serving", "joining"):
                self._start_again(name, f"{name} is gone ({why})", why)
        self._show()

    def reject(self, urls: Collection[str], error: UserError) -> None:
        """Remove new engines that cannot receive weights, so the others continue. Raises UserError if one of them
        cannot be spared."""
        for name in [name for name, state in self._states.items() if state.url in urls]:
            self._members.call(RunEngines.retire, name)
            event = f"{name} cannot receive weights ({error.brief})"
            if self._states[name].launched:
                self._start_again(name, event, error)
            else:
                self._progress.note(event)
                self._forget(name)
        self._show()

    def settled(self) -> None:
        """After a sync: joining engines now serve, and leaving ones are removed."""
        for name, state in list(self._states.items()):
            if state.state in ("joining", "serving"):
                state.state = "serving"
                state.syncs += 1
                if state.syncs == FORGIVEN_AFTER:
                    self._engines.reset_failures(name)
            elif state.state == "leaving":
                self._forget(name)
        self._show()

    def revive(self, error: EngineError) -> None:
        """Wait for an engine that a sync can send weights to, for each rollout manager that has none left. Raises
        `error` if none can come back."""
        dead = self._members.call(RunEngines.dead)
        others = any(state.state == "serving" and name not in dead for name, state in self._states.items())
        event = "a rollout manager has no engine left" if others else "no engine is left"
        self._progress.note(f"{event} ({error.brief})")
        while True:
            self.update_engines()
            if not self._members.call(RunEngines.no_engine_alive):
                return
            if not self._engines.starting:
                raise error
            self._check()
            time.sleep(LOOK_EVERY_S)

    # ---------------------------------------------------------------------------------------------------- one engine

    def _look_after(self, name: str, why: str) -> None:
        """Handle an engine that is dead to the rollout service: admit it if it answers, because only a connection may
        have failed; else restart it."""
        state = self._states.get(name)
        if state is None or state.state in ("starting", "joining", "leaving"):
            return
        if state.state == "gone":
            if state.launched:
                return  # it has no restarts left
            self._passed[name] += 1
            if self._passed[name].bit_count() > 1:  # ever more rarely, because a hanging one delays the sync
                return
        address = self._address(name)
        assert address is not None, "a dead engine had an address"
        if self._admit(address, "answers again") is not None and state.state != "gone":
            self._start_again(name, f"{name} is gone ({why})", why)

    def _admit(self, address: EngineAddress, how: str) -> EngineError | None:
        """Admit an engine to the next sync; returns its error, if any."""
        try:
            self._members.call(RunEngines.admit, address)
        except EngineError as error:
            return error
        self._engines.take(address)
        self.joins += 1
        del self._passed[address.name]
        launched = self._engines.launched(address.name)
        self._states[address.name] = EngineState(address.name, address.url, launched, "joining")
        self._progress.note(f"{address.name} {how} at {address.url}")
        return None

    def _start_again(self, name: str, event: str, why: object) -> None:
        outcome = self._engines.restart(name)
        state = self._states[name]
        state.state = "starting" if name in self._engines.starting else "gone"
        state.why = why.brief if isinstance(why, UserError) else str(why)
        self._progress.note(f"{event}: {outcome}")

    # ------------------------------------------------------ orders: each returns the outcome, or raises UserError

    def _scale(self, engines: int) -> str:
        for name in [name for name, state in self._states.items() if state.launched and state.state == "gone"]:
            self._retire(name)  # others take its place
        mine = [name for name, state in self._states.items() if state.launched and state.state != "leaving"]
        if not self._engines.launches:
            raise ConfigError(
                "engines", engines, "the engines of this run are attached (sglang.urls)",
                "use --attach and --drain",
            )  # fmt: skip
        if len(mine) == engines:
            return f"there are already {engines}"
        for name in reversed(mine[engines:]):
            self._retire(name)
        names: list[str] = []
        for _ in range(engines - len(mine)):
            names.append(self._engines.start_another())
            self._states[names[-1]] = EngineState(names[-1], "", True, "starting")
        return f"starting {', '.join(names)}" if names else f"{', '.join(mine[engines:])} will leave"

    def _attach(self, order: ScaleOrder) -> str:
        if order.attach in (urls := [state.url for state in self._states.values()]):
            known = ", ".join(urls)
            raise ConfigError("attach", order.attach, "is already an engine of this run", f"its engines: {known}")
        address = self._engines.attach(order.attach, order.keys)
        self._attached.add(address.endpoint)
        if (failure := self._admit(address, "joins")) is not None:
            self._attached.release(address.endpoint)
            raise failure
        return f"attached as {address.name}"

    def _drain(self, which: str) -> str:
        for name, state in self._states.items():
            if which in (name, state.url):
                self._retire(name)
                return f"{name} will leave"
        known = ", ".join(f"{state.name} ({state.url})" for state in self._states.values())
        raise ConfigError("drain", which, "is not an engine of this run", f"its engines: {known}")

    def _retire(self, name: str) -> None:
        """Let an engine leave. Raises ConfigError for the last serving one."""
        state = self._states[name]
        serves = [s.name for s in self._states.values() if s.state in ("serving", "joining")]
        if serves == [name]:
            raise ConfigError("drain", name, "no other engine is serving, and a run needs one", "add another first")
        if state.state == "leaving":
            return
        self._members.call(RunEngines.retire, name)
        if name in serves:
            state.state = "leaving"
        else:
            self._forget(name)

    def _forget(self, name: str) -> None:
        address = self._address(name)
        if address is not None and not self._states[name].launched:
            self._attached.release(address.endpoint)
        self._engines.end(name)
        del self._states[name]
        self._progress.note(f"{name} has left")

    def _address(self, name: str) -> EngineAddress | None:
        """Address of an engine; None during its first start."""
        return next((address for address in self._engines.addresses if address.name == name), None)

    def _show(self) -> None:
        self.orders.show(list(self._states.values()))
