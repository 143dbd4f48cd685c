"""What a sync does when an engine dies: the order of calls, and when it is given up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mslime.backends.sglang.pool import Serving
from mslime.backends.sglang.server import EngineAddress
from mslime.config.errors import EngineError, TrainerError, WeightSyncError, sync_error
from mslime.config.keys import NO_KEYS
from mslime.config.loader import build
from mslime.control.delivery import Delivery

CONFIG = build({"model": {"path": "."}, "data": {"prompts": ["p.jsonl"]}})
URLS = {name: f"http://{name}" for name in "abc"}


class Fakes:
    """Trainers, rollout service and progress in one, which write down what they are asked.

    Args:
        there: at each beginning of an update, the engines that are there, by name, or an error.
        sends: of each sending, an error or None.
    """

    def __init__(self, there: list[str | Exception], sends: list[Exception | None]) -> None:
        self.calls: list[str] = []
        self._there, self._sends, self._known = iter(there), iter(sends), set("abc")
        self.weights, self.back, self.refused = None, dict[str, Any](), set[str]()
        self.addresses = [EngineAddress(name, url, keys=NO_KEYS) for name, url in URLS.items()]

    def begin_update(self) -> Serving:
        return self._begin("begin")

    def begin_again(self) -> Serving:
        return self._begin("again")

    def _begin(self, what: str) -> Serving:
        self.calls.append(what)
        found = next(self._there)
        if isinstance(found, Exception):
            raise found
        gone, self._known = self._known - set(found), set(found)
        return Serving(tuple(URLS[name] for name in found), dict.fromkeys(sorted(gone), "why"))

    def send_weights(self, version: int, verify: bool, on_progress: Any) -> Any:
        self.calls.append(f"send {version}")
        if (error := next(self._sends)) is not None:
            raise error
        return "report", {}

    def start_again(self, name: str) -> str:
        return f"start {name}"

    def came_back(self) -> dict[str, Any]:
        return self.back

    def rejoin(self, address: EngineAddress) -> None:
        self.calls.append(f"rejoin {address.name}")
        if address.url.endswith("broken"):
            raise EngineError(address.name, "handshake", "it lacks routes", "read its log")
        self._known.add(address.name)

    def connect(self, engines: Any, group: str) -> None:
        self.calls.append(f"connect {''.join(e.url[-1] for e in engines)} {group}")
        if group in self.refused:
            raise BROKEN

    def disconnect(self, deadline_s: float) -> None:
        self.calls.append("leave")

    def note(self, text: str) -> None:
        self.calls.append(text)

    def check(self) -> None:
        self.calls.append("check")


def deliver(fakes: Fakes, syncs: int = 1) -> Delivery:
    made: Any = fakes
    numbers = itertools.count(1)
    delivery = Delivery(CONFIG, made, made, made, fakes.check, lambda: f"g{next(numbers)}", made)
    delivery.connect("g0")
    for version in range(syncs):
        delivery.send(version, False)
    return delivery


def told(gone: str, left: int) -> list[str]:
    return [f"{gone} is gone (why): start {gone}", f"{left} of 3 engines take the weights"]


BROKEN = sync_error("send", "bucket 1 to http://b", "the connection broke")


def test_engines_that_are_there_are_met_once() -> None:
    fakes = Fakes(["abc", "abc"], [None, None])
    assert deliver(fakes, syncs=2).engines == 3
    assert fakes.calls == ["connect abc g0", "begin", "send 0", "begin", "send 1"]


def test_an_engine_that_is_gone_before_a_sync_is_left_before_anything_is_sent() -> None:
    fakes = Fakes(["abc", "ac", "ac"], [None, None, None])
    assert deliver(fakes, syncs=3).engines == 2
    left_out = ["begin", *told("b", 2), "leave", "connect ac g1", "send 1"]
    assert fakes.calls == ["connect abc g0", "begin", "send 0", *left_out, "begin", "send 2"]


def test_all_is_sent_again_when_engines_die_one_after_the_other() -> None:
    fakes = Fakes(["abc", "ac", "c"], [BROKEN, BROKEN, None])
    assert deliver(fakes).engines == 1
    first = ["check", "leave", "again", *told("b", 2), "connect ac g1", "send 0"]
    second = ["check", "leave", "again", *told("a", 1), "connect c g2", "send 0"]
    assert fakes.calls == ["connect abc g0", "begin", "send 0", *first, *second]


def test_an_engine_that_dies_while_all_meet_is_left_out_as_well() -> None:
    fakes = Fakes(["ab", "a"], [None])
    fakes.refused = {"g1"}
    assert deliver(fakes).engines == 1
    met = ["begin", *told("c", 2), "leave", "connect ab g1"]
    again = ["check", "leave", "again", *told("b", 1), "connect a g2", "send 0"]
    assert fakes.calls == ["connect abc g0", *met, *again]


@pytest.mark.parametrize("again", ["abc", EngineError("engines", "c", "none is left", "read c.log")])
def test_a_failure_that_no_death_explains_ends_it_in_its_own_words(again: str | Exception) -> None:
    fakes = Fakes(["abc", again], [BROKEN])
    with pytest.raises(WeightSyncError, match="the connection broke"):
        deliver(fakes)
    assert fakes.calls[-3:] == ["check", "leave", "again"]


def test_a_trainer_that_failed_is_not_asked_again() -> None:
    fakes = Fakes(["abc"], [TrainerError("send", "rank 1", "died", "read its log")])
    with pytest.raises(TrainerError):
        deliver(fakes)
    assert fakes.calls[-1] == "send 0"


def test_an_engine_that_is_back_is_met_by_all_and_gets_the_next_weights() -> None:
    fakes = Fakes(["ac", "abc"], [None, None])
    delivery = deliver(fakes)
    assert not delivery.welcome()
    fakes.back, fakes.calls = {"b": EngineAddress("b", URLS["b"], keys=NO_KEYS)}, []
    assert delivery.welcome()
    delivery.send(1, False)
    back = ["rejoin b", f"b is back at {URLS['b']}", "begin", "3 of 3 engines take the weights"]
    assert fakes.calls == [*back, "leave", "connect abc g2", "send 1"] and delivery.engines == 3


@pytest.mark.parametrize("found", [
    EngineAddress("b", "http://broken"), TrainerError("engine start", "handshake", "it lacks routes", "read its log"),
])  # fmt: skip
def test_an_engine_that_does_not_come_back_well_is_started_again(found: Any) -> None:
    fakes = Fakes(["ac"], [None])
    delivery = deliver(fakes)
    fakes.back = {"b": found}
    assert not delivery.welcome()
    assert fakes.calls[-1] == "b could not be started again (handshake: it lacks routes): start b"
