"""What somebody asks of a running run's engines, and what the run says of them: shared by the loop, which obeys at
weight syncs, and the endpoint's thread, which takes orders at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mslime.config.errors import ConfigError
from mslime.config.keys import NO_KEYS, EngineKeys

State = Literal["starting", "joining", "serving", "leaving", "gone"]
MOST_ENGINES = 4096


@dataclass
class EngineState:
    """One engine as `mslime scale` shows it.

    Attributes:
        url: empty until it has one.
        launched: by mslime; else attached.
        state: starting: not yet up. joining: checked, gets weights in the next sync. leaving: gets no requests any
            more. gone: dead.
        why: what it died of, or why it does not start.
        syncs: weight syncs that it took part in since it was started or attached.
    """

    name: str
    url: str
    launched: bool
    state: State
    why: str = ""
    syncs: int = 0


@dataclass(frozen=True)
class Order:
    """One request; one of the three is given.

    Attributes:
        engines: how many engines mslime is to run.
        attach: the URL of a server that is to join. keys: what it asks for.
        drain: the name or the URL of an engine that is to leave.
    """

    engines: int | None = None
    attach: str = ""
    keys: EngineKeys = field(default=NO_KEYS, repr=False)
    drain: str = ""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Order:
        """From the body of a request. Raises ConfigError."""
        known = ("engines", "attach", "drain", "api_key", "admin_api_key")
        for name, value in body.items():
            if name not in known:
                raise ConfigError(name, value, "is nothing that can be asked", f"name one of {', '.join(known)}")
            if name != "engines" and not isinstance(value, str):
                raise ConfigError(name, value, "is a text", "give a text")
        given = [name for name in ("engines", "attach", "drain") if body.get(name) not in (None, "")]
        if len(given) != 1:
            raise ConfigError("order", ", ".join(given) or "nothing", "one of engines, attach and drain is asked at a "
                              "time", "ask for one")  # fmt: skip
        engines = body.get("engines")
        if engines is not None and (isinstance(engines, bool) or not isinstance(engines, int) or engines < 0):
            raise ConfigError("engines", engines, "is a number of engines", "give a whole number of 0 or more")
        if engines is not None and engines > MOST_ENGINES:
            raise ConfigError("engines", engines, f"is more than {MOST_ENGINES}", "give a smaller number")
        api = str(body.get("api_key") or "")
        keys = EngineKeys(api, str(body.get("admin_api_key") or api))
        return cls(engines, str(body.get("attach") or "").rstrip("/"), keys, str(body.get("drain") or "").rstrip("/"))

    def describe(self) -> str:
        """In words, without the keys."""
        if self.engines is not None:
            return f"{self.engines} engines"
        return f"attach {self.attach}" if self.attach else f"drain {self.drain}"


class Orders:
    """Orders that wait, and the newest word on each engine. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[tuple[int, Order]] = []
        self._count = 0
        self._told: dict[int, str] = {}
        self._engines: list[EngineState] = []

    def give(self, order: Order) -> int:
        """Ask for something; its number."""
        with self._lock:
            self._count += 1
            self._new.append((self._count, order))
            return self._count

    def take(self) -> list[tuple[int, Order]]:
        """All that have not been taken, in order. They wait until `tell`."""
        with self._lock:
            taken, self._new = self._new, []
            return taken

    def tell(self, number: int, what: str) -> None:
        """What came of an order; after `show`, for who asked looks at the engines then."""
        with self._lock:
            self._told[number] = what

    def show(self, engines: Sequence[EngineState]) -> None:
        """How the engines are now."""
        with self._lock:
            self._engines = [EngineState(**asdict(engine)) for engine in engines]

    def standing(self) -> dict[str, Any]:
        """For JSON: the engines, the numbers of orders that wait, and what came of each other one."""
        with self._lock:
            return {
                "engines": [asdict(engine) for engine in self._engines],
                "waiting": [number for number in range(1, self._count + 1) if number not in self._told],
                "told": {str(number): what for number, what in self._told.items()},
            }
