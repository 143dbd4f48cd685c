"""What a sync does when an engine dies, and how engines come and go: the order of calls, and when it is given up."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mslime.backends.sglang.client import EngineDied
from mslime.backends.sglang.engine_pool import UpdateMembers
from mslime.backends.sglang.port import CLOSE_SECONDS
from mslime.backends.sglang.server_process import EngineAddress
from mslime.config.errors import EngineError, TrainerError, WeightSyncError, sync_error
from mslime.config.keys import NO_KEYS, Endpoint, EngineKeys
from mslime.config.loader import build
from mslime.run.endpoint import ScaleOrder
from mslime.run.fleet import FORGIVEN_AFTER, Fleet
from mslime.run.publish import Publisher
from mslime.run.sharing import SeparateGpus
from mslime.run.trainers import TrainerGroup
from tests.fixtures.remote import fake_process

CONFIG = build({"model": {"path": "."}, "data": {"prompts": ["p.jsonl"]}})
URLS = {name: f"http://{name}" for name in "abc"}


class Fakes:
    """Trainers, rollout service, engines and progress in one, which write down what they are asked.

    Args:
        there: at each beginning of an update, the engines that are there, by name, or an error.
        sends: of each sending, an error or None.
    """

    def __init__(self, there: list[str | Exception], sends: list[Exception | None]) -> None:
        self.calls: list[str] = []
        self._there, self._sends = iter(there), iter(sends)
        self.weights, self.back, self.refused = None, dict[str, Any](), set[str]()
        self.gone, self.silent, self.starting, self.launches = dict[str, str](), set[str](), list[str](), True
        self.most_starts, self.made = 9, 0
        self.unequal: list[Exception | None] = []
        self.ends: list[str] = []  # of syncs that went so far
        self.addresses = [EngineAddress(name, url, keys=NO_KEYS) for name, url in URLS.items()]

    fleet: Fleet

    def begin_update(self) -> UpdateMembers:
        return self._begin("begin")

    def restart_update(self) -> UpdateMembers:
        return self._begin("again")

    def _begin(self, what: str) -> UpdateMembers:
        self.calls.append(what)
        found = next(self._there)
        if isinstance(found, Exception):
            raise found
        return UpdateMembers(tuple(URLS[name] for name in found), dict.fromkeys(sorted(set("abc") - set(found)), "why"))

    def send_weights(self, version: int, verify: bool, on_progress: Any) -> Any:
        self.calls.append(f"send {version}")
        if (error := next(self._sends)) is not None:
            raise error
        return SimpleNamespace(expected=f"digests {version}"), {}

    def compare(self, expected: str, strict: bool) -> int:
        self.calls.append(f"compare {expected}")
        self.strict = strict
        if self.unequal and (error := self.unequal.pop(0)) is not None:
            raise error
        return 39

    def end_update(self) -> None:
        self.ends.append("end")

    def stamp(self, version: int) -> None:
        self.ends.append(f"stamp {version}")

    def mark_dead(self, urls: Any, why: str) -> None:
        self.calls.append(f"leave out {' '.join(sorted(urls))}: {why}")

    def launched(self, name: str) -> bool:
        return self.launches and name != "x"

    def restart(self, name: str) -> str:
        if not self.most_starts:
            return f"leave {name}"
        self.most_starts -= 1
        self.starting.append(name)
        return f"start {name}"

    def reset_failures(self, name: str) -> None:
        self.calls.append(f"forgive {name}")

    def start_another(self) -> str:
        self.made += 1
        self.starting.append(f"n{self.made}")
        return f"n{self.made}"

    def started(self) -> dict[str, Any]:
        found, self.back = self.back, {}
        self.starting = [name for name in self.starting if name not in found]
        return found

    def attach(self, url: str, keys: EngineKeys) -> EngineAddress:
        return EngineAddress("x", url, keys=keys)

    def take(self, address: EngineAddress) -> None:
        others = [known for known in self.addresses if known.name != address.name]
        self.addresses = sorted([*others, address], key=lambda known: known.name)

    def end(self, name: str) -> None:
        self.calls.append(f"end {name}")
        self.addresses = [known for known in self.addresses if known.name != name]

    def admit(self, address: EngineAddress) -> None:
        self.calls.append(f"greet {address.name}")
        if address.name in self.silent or address.url.endswith("broken"):
            raise EngineError(address.name, "handshake", "it lacks routes", "read its log")
        self.gone.pop(address.name, None)

    def retire(self, name: str) -> None:
        self.calls.append(f"retire {name}")

    def dead(self) -> dict[str, str]:
        return dict(self.gone)

    def no_engine_alive(self) -> bool:
        return len(self.gone) == len(self.addresses)

    def add(self, engine: Endpoint) -> None:
        self.calls.append(f"take over {engine.url}")

    def release(self, engine: Endpoint) -> None:
        self.calls.append(f"release {engine.url}")

    def connect(self, engines: Any, group: str) -> None:
        self.calls.append(f"connect {''.join(e.url[-1] for e in engines)} {group}")
        if group in self.refused:
            raise BROKEN

    def disconnect(self, deadline_s: float | None = None) -> None:
        assert deadline_s is None, "as long as a rank may need for it"
        self.calls.append("leave")

    def note(self, text: str) -> None:
        self.calls.append(text)

    def check(self) -> None:
        self.calls.append("check")


def fleet_of(fakes: Fakes) -> Fleet:
    made: Any = fakes
    return Fleet(fake_process(made).engines, made, made, fakes.check, made)


def publisher_of(fakes: Fakes) -> Publisher:
    made: Any = fakes
    numbers = itertools.count(1)
    fakes.fleet = fleet_of(fakes)
    publisher = Publisher(
        CONFIG, fake_process(made), made, made, fakes.fleet, SeparateGpus(lambda: None), fakes.check,
        lambda: f"g{next(numbers)}", made, made,
    )  # fmt: skip
    publisher._proven = frozenset(URLS.values())
    return publisher


def publish(fakes: Fakes, syncs: int = 1) -> Publisher:
    publisher = publisher_of(fakes)
    publisher.connect("g0")
    for version in range(syncs):
        publisher.send(version, False)
    return publisher


def connected(names: str, number: int) -> list[str]:
    return [f"sending weights to {len(names)} of 3 engines", f"connect {names} g{number}"]


def told(gone: str, left: int) -> list[str]:
    return [f"{gone} is gone (why): start {gone}", f"sending weights to {left} of 3 engines"]


COMPARED = "compare digests 0"
BROKEN = sync_error("send", "bucket 1 to http://b", "the connection broke")


def test_leaving_outlasts_what_a_rank_waits_for_an_engine_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dict[str, float]()

    class FakeRanks:
        def __init__(self, *given: Any) -> None: ...
        def all(self, what: str, deadline_s: float, work: Any) -> None:
            limits[what] = deadline_s

    monkeypatch.setattr("mslime.run.trainers.RankGroup", FakeRanks)
    made: Any = SimpleNamespace(trainer_options=None, process=None)
    TrainerGroup.of_run(CONFIG, made, Path("logs"), lambda: None).disconnect()
    closing = CONFIG.deadlines.weight_sync_s + CLOSE_SECONDS  # the engine's answer, and then the connections
    assert limits["weight sync: disconnect"] > closing


def test_engines_that_are_there_are_met_once() -> None:
    fakes = Fakes(["abc", "abc"], [None, None])
    assert len(publish(fakes, syncs=2)._connected) == 3
    assert fakes.calls == ["connect abc g0", "begin", "send 0", "begin", "send 1"]


def test_an_engine_that_is_gone_before_a_sync_is_left_before_anything_is_sent() -> None:
    fakes = Fakes(["abc", "ac", "ac"], [None, None, None])
    assert len(publish(fakes, syncs=3)._connected) == 2
    left_out = ["begin", *told("b", 2), "leave", "connect ac g1", "send 1"]
    assert fakes.calls == ["connect abc g0", "begin", "send 0", *left_out, "begin", "send 2"]


def test_all_is_sent_again_when_engines_die_one_after_the_other() -> None:
    fakes = Fakes(["abc", "ac", "c"], [BROKEN, BROKEN, None])
    assert len(publish(fakes)._connected) == 1
    first = ["check", "leave", "again", *told("b", 2), "connect ac g1", "send 0"]
    second = ["check", "leave", "again", *told("a", 1), "connect c g2", "send 0", COMPARED]
    assert fakes.calls == ["connect abc g0", "begin", "send 0", *first, *second]


def test_an_engine_that_dies_while_all_meet_is_left_out_as_well() -> None:
    fakes = Fakes(["ab", "a"], [None])
    fakes.refused = {"g1"}
    assert len(publish(fakes)._connected) == 1
    connected_again = ["begin", *told("c", 2), "leave", "connect ab g1"]
    again = ["check", "leave", "again", *told("b", 1), "connect a g2", "send 0", COMPARED]
    assert fakes.calls == ["connect abc g0", *connected_again, *again]


@pytest.mark.parametrize("launches", [True, False])
def test_an_engine_that_is_new_and_takes_no_weights_is_left_out_and_the_others_get_theirs(launches: bool) -> None:
    fakes = Fakes(["ac", "abc", "abc", "ac"], [None, BROKEN, None])
    fakes.launches = launches
    publisher = publish(fakes)
    fakes.calls = []
    publisher.send(1, False)
    begun = [
        "begin",
        "sending weights to 3 of 3 engines",
        "leave",
        "connect abc g2",
        "send 1",
        "check",
        "leave",
        "again",
    ]
    assert fakes.calls[: len(begun) + 1] == [*begun, "retire b"]
    size = 3 if launches else 2
    rest = ["again", f"sending weights to 2 of {size} engines", "connect ac g3", "send 1", "compare digests 1"]
    assert fakes.calls[-5:] == rest and len(publisher._connected) == 2
    assert any(call.startswith("b cannot receive weights (bucket 1") for call in fakes.calls)
    assert ("end b" in fakes.calls) is not launches


SENT_AGAIN = "sending all weights again: bucket 1 to http://b: the connection broke"
ANEW = ["check", "leave", "again"]


def test_a_failure_that_no_death_explains_is_tried_again_with_all_and_then_compared() -> None:
    fakes = Fakes(["abc", "abc"], [BROKEN, None])
    delivered = publisher_of(fakes).send(0, verify=False)
    assert fakes.calls == ["begin", "send 0", *ANEW, SENT_AGAIN, *connected("abc", 1), "send 0", COMPARED]
    assert delivered.compared == 39 and delivered.repeats == 1


def test_an_engine_that_is_named_by_two_failures_in_a_row_is_left_out() -> None:
    fakes = Fakes(["abc", "abc", "abc", "ac"], [BROKEN, BROKEN, None])
    assert len(publish(fakes)._connected) == 2
    second = [*ANEW, "leave out http://b: bucket 1 to http://b: the connection broke", "again", *told("b", 2)]
    calls = ["begin", "send 0", *ANEW, SENT_AGAIN, *connected("abc", 1), "send 0", *second, "connect ac g2", "send 0"]
    assert fakes.calls == ["connect abc g0", *calls, COMPARED]


def test_engines_that_are_left_after_another_was_left_out_are_tried_twice_as_well() -> None:
    at_a = sync_error("send", "bucket 1 to http://a", "the connection broke")
    fakes = Fakes(["abc", "abc", "abc", "ac", "ac", "ac", "c"], [BROKEN, BROKEN, at_a, at_a, None])
    assert len(publish(fakes)._connected) == 1
    assert sum(call.startswith("leave out") for call in fakes.calls) == 2
    assert sum(call.startswith("sending all weights again") for call in fakes.calls) == 2


def test_weights_that_differ_are_sent_again_and_an_engine_whose_always_differ_is_left_out() -> None:
    differs = sync_error("check", "http://b: a.weight", "the engine has other values")
    fakes = Fakes(["abc", "abc", "abc", "ac"], [None, None, None])
    fakes.unequal = [differs, differs]
    delivered = publisher_of(fakes).send(0, verify=True)
    assert delivered.compared == 39 and delivered.repeats == 2
    assert "leave out http://b: http://b: a.weight: the engine has other values" in fakes.calls
    assert fakes.calls[-3:] == ["connect ac g2", "send 0", COMPARED]


def test_what_fails_with_engines_that_never_took_weights_is_not_sent_again() -> None:
    """The run's first sync: it is not an accident, and nobody wants to wait for it twice."""
    fakes = Fakes(["abc", "abc"], [BROKEN])
    publisher = publisher_of(fakes)
    publisher._proven = frozenset()
    with pytest.raises(WeightSyncError, match="the connection broke") as caught:
        publisher.send(0, verify=True)
    assert fakes.calls == ["begin", "send 0", *ANEW] and caught.value is BROKEN


def test_nothing_is_compared_unless_asked_for() -> None:
    fakes = Fakes(["abc", "abc"], [None, None])
    publisher = publisher_of(fakes)
    assert publisher.send(0, verify=True).compared == 39
    assert publisher.send(0, verify=False).compared is None


@pytest.mark.parametrize(("verify", "strict"), [("probe", False), ("first", True), ("always", True)])
def test_engines_must_say_what_they_hold_where_bits_were_asked_for(verify: str, strict: bool) -> None:
    fakes = Fakes(["abc"], [None])
    publisher = publisher_of(fakes)
    weights = CONFIG.weights.model_copy(update={"verify": verify})
    publisher._config = CONFIG.model_copy(update={"weights": weights})
    publisher.send(0, verify=True)
    assert fakes.strict == strict


@pytest.mark.parametrize("error", [
    sync_error("gather", "bucket 1", "a trainer rank is late"),
    sync_error("send", "http://bb", "another engine's name begins like one of these"),
    sync_error("send", "http://b:80", "likewise"),
    sync_error("send", "http://a, http://b and http://c", "all of them refuse"),
])  # fmt: skip
def test_a_failure_twice_that_names_nobody_or_all_ends_it_in_its_own_words(error: WeightSyncError) -> None:
    fakes = Fakes(["abc", "abc", "abc"], [error, error])
    with pytest.raises(WeightSyncError) as caught:
        publish(fakes)
    assert caught.value is error and fakes.calls[-3:] == ANEW


NONE_LEFT = EngineError("engines", "c", "none is left", "read c.log")
DIED = EngineDied("engines", "c", "none is left", "read c.log")
FAILED = TrainerError("send", "rank 1", "died", "read its log")


@pytest.mark.parametrize(
    ("there", "first", "raised", "last"),
    [
        (["abc", NONE_LEFT], BROKEN, BROKEN, ANEW),
        (["abc", DIED], BROKEN, DIED, ANEW),
        (["abc"], FAILED, FAILED, ["send 0"]),
    ],
    ids=["all refuse to begin again", "the last one died: the run may go on when one is back", "a trainer failed"],
)
def test_a_sync_ends_with_its_first_failure_or_with_what_the_last_engine_died_of(
    there: list[str | Exception], first: Exception, raised: Exception, last: list[str]
) -> None:
    fakes = Fakes(there, [first])
    with pytest.raises(type(raised)) as caught:
        publish(fakes)
    assert caught.value is raised and fakes.calls[-len(last) :] == last


def test_an_engine_that_is_back_is_met_by_all_and_gets_the_next_weights() -> None:
    fakes = Fakes(["ac", "abc"], [None, None])
    publisher = publish(fakes)
    assert not fakes.fleet.update_engines() and state_of(fakes, "b") == "starting"
    fakes.back, fakes.calls = {"b": EngineAddress("b", "http://b2", keys=NO_KEYS)}, []
    URLS["b"] = "http://b2"
    try:
        assert fakes.fleet.update_engines() and state_of(fakes, "b") == "joining"
        publisher.send(1, False)
        fakes.fleet.settled()
    finally:
        URLS["b"] = "http://b"
    back = ["greet b", "b is back at http://b2", "begin", "sending weights to 3 of 3 engines"]
    assert fakes.calls == [*back, "leave", "connect a2c g2", "send 1"] and len(publisher._connected) == 3
    assert state_of(fakes, "b") == "serving"


@pytest.mark.parametrize("found", [
    EngineAddress("b", "http://broken"), TrainerError("engine start", "handshake", "it lacks routes", "read its log"),
])  # fmt: skip
def test_an_engine_that_does_not_come_back_well_is_started_again(found: Any) -> None:
    fakes = Fakes(["ac"], [None])
    publish(fakes)
    fakes.back = {"b": found}
    assert not fakes.fleet.update_engines()
    assert fakes.calls[-1] == "b could not be started (handshake: it lacks routes): start b"


def state_of(fakes: Fakes, name: str) -> str:
    return state_in(fakes.fleet, name)


def state_in(fleet: Fleet, name: str) -> str:
    (found,) = (e for e in fleet.orders.standing()["engines"] if e["name"] == name)
    return found["state"]


def test_an_engine_of_which_one_connection_broke_gets_requests_again() -> None:
    """It answers, so nothing is started: it is checked, and is in the next sync."""
    fakes = Fakes([], [])
    fleet = fleet_of(fakes)
    fakes.gone = {"b": "the connection broke"}
    assert fleet.update_engines()
    assert fakes.calls == ["greet b", f"b answers again at {URLS['b']}"] and not fakes.starting


def test_an_engine_that_does_not_answer_is_started_again_beside_the_run_and_told_once() -> None:
    fakes = Fakes([], [])
    fakes.fleet = fleet_of(fakes)
    fakes.gone, fakes.silent = {"b": "exit status 1"}, {"b"}
    for _ in range(3):
        assert not fakes.fleet.update_engines()
        fakes.fleet.lost(fakes.gone)
    assert fakes.calls == ["greet b", "b is gone (exit status 1): start b"]
    (shown,) = (e for e in fakes.fleet.orders.standing()["engines"] if e["name"] == "b")
    assert (shown["state"], shown["why"]) == ("starting", "exit status 1")


def test_an_attached_engine_that_is_gone_is_asked_now_and_then_and_one_of_ours_is_not() -> None:
    for launches, greeted in ((False, 5), (True, 1)):
        fakes = Fakes([], [])
        fakes.launches, fakes.most_starts, fakes.silent = launches, 0, {"b"}
        fleet = fleet_of(fakes)
        fakes.gone = {"b": "no connection"}
        for _ in range(8):  # found dead, and then after 1, 2 and 4 syncs
            assert not fleet.update_engines()
        fakes.silent = set()
        assert fleet.update_engines() is not launches
        assert fakes.calls.count("greet b") == greeted
        assert [c for c in fakes.calls if "gone" in c] == ["b is gone (no connection): leave b"]


def test_a_run_without_engines_waits_for_one_that_is_being_started_and_ends_without_that() -> None:
    died = EngineDied("a", "exit status 1", "the server ended", "read a.log")
    fakes = Fakes([], [])
    fleet = fleet_of(fakes)
    fakes.gone, fakes.silent = dict.fromkeys("abc", "exit status 1"), set("abc")
    waits = itertools.count()

    def come_back() -> None:
        if next(waits) == 2:
            fakes.back, fakes.silent = {"c": fakes.addresses[2]}, set()

    fleet._check = come_back
    fleet.revive(died)
    assert next(waits) == 3 and fakes.calls[-1].startswith("c is back at")
    fakes.gone, fakes.silent, fakes.most_starts, fakes.starting = dict.fromkeys("abc", "again"), set("abc"), 0, []
    with pytest.raises(EngineDied, match="the server ended"):
        fleet.revive(died)
    assert [call for call in fakes.calls if " left (" in call] == [
        "no engine is left (exit status 1: the server ended)"
    ] * 2


@pytest.mark.parametrize("starts", [0, 1])
def test_an_engine_is_expected_until_all_are_gone_for_good(starts: int) -> None:
    fakes = Fakes([], [])
    fleet = fleet_of(fakes)
    fakes.gone, fakes.silent, fakes.most_starts = dict.fromkeys("abc", "exit status 1"), set("abc"), starts
    assert fleet.expects_engines, "nobody has looked after them"
    fleet.update_engines()
    assert fleet.expects_engines == bool(starts)


def test_who_waits_for_an_engine_of_one_of_several_managers_says_that_others_live() -> None:
    fakes = Fakes([], [])
    fleet = fleet_of(fakes)
    fakes.gone, fakes.silent = {"a": "exit status 1"}, {"a"}
    fleet.revive(EngineDied("a", "exit status 1", "the server ended", "read a.log"))
    assert fakes.calls[0] == "a rollout manager has no engine left (exit status 1: the server ended)"


def test_an_engine_that_has_served_for_a_while_may_be_started_again_as_often_as_at_first() -> None:
    fakes = Fakes([], [])
    fleet = fleet_of(fakes)
    for _ in range(FORGIVEN_AFTER - 1):
        fleet.settled()
    fakes.gone = {"b": "the connection broke"}
    fleet.update_engines()
    fleet.settled()
    fleet.settled()
    assert [call for call in fakes.calls if "forgive" in call] == ["forgive a", "forgive c"], "b begins to count anew"


def test_engines_are_added_and_let_go_as_asked() -> None:
    fakes = Fakes(["abc"], [None])
    publish(fakes)
    fleet, orders = fakes.fleet, fakes.fleet.orders
    number = orders.give(ScaleOrder(engines=4))
    assert not fleet.update_engines() and orders.standing()["results"] == {str(number): "starting n1"}
    fakes.back = {"n1": EngineAddress("n1", "http://n1")}
    assert fleet.update_engines() and state_of(fakes, "n1") == "joining"
    fleet.settled()
    orders.give(ScaleOrder(engines=2))
    fleet.update_engines()
    assert fakes.calls[-3:-1] == ["retire n1", "retire c"]
    assert [state_of(fakes, name) for name in ("a", "c", "n1")] == ["serving", "leaving", "leaving"]
    fleet.settled()
    assert [e["name"] for e in orders.standing()["engines"]] == ["a", "b"] and fleet.size == 2
    assert {"end c", "end n1"} <= set(fakes.calls)


def test_an_engine_that_is_gone_for_good_can_be_let_go_and_is_replaced() -> None:
    for order, left in ((ScaleOrder(drain="b"), ["a", "c"]), (ScaleOrder(engines=3), ["a", "c", "n1"])):
        fakes = Fakes([], [])
        fakes.most_starts, fakes.silent, fakes.gone = 0, {"b"}, {"b": "exit status 1"}
        fleet = fleet_of(fakes)
        fleet.update_engines()
        assert state_in(fleet, "b") == "gone"
        fleet.orders.give(order)
        fleet.update_engines()
        fleet.lost(fakes.gone)  # the pool forgets it when the update has begun
        assert [e["name"] for e in fleet.orders.standing()["engines"]] == left
        assert "retire b" in fakes.calls and "end b" in fakes.calls


def test_a_server_of_somebody_else_joins_and_leaves_by_its_address() -> None:
    fakes = Fakes([], [])
    fleet = fleet_of(fakes)
    orders = fleet.orders
    orders.give(ScaleOrder(attach="http://x", keys=EngineKeys("k", "k")))
    assert fleet.update_engines() and fakes.calls[:2] == ["take over http://x", "greet x"]
    fleet.settled()
    orders.give(ScaleOrder(drain="http://x"))
    fleet.update_engines()
    fleet.settled()
    assert fakes.calls[-3:] == ["release http://x", "end x", "x has left"]


@pytest.mark.parametrize(("order", "said"), [
    (ScaleOrder(attach="http://b"), "is already an engine of this run"),
    (ScaleOrder(drain="z"), "is not an engine of this run"),
    (ScaleOrder(attach="http://broken"), "it lacks routes"),
    (ScaleOrder(engines=0), "no other engine is serving"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused_and_the_run_goes_on(order: ScaleOrder, said: str) -> None:
    fakes = Fakes([], [])
    fleet = fleet_of(fakes)
    number = fleet.orders.give(order)
    fleet.update_engines()
    told = fleet.orders.standing()["results"][str(number)]
    assert told.startswith("refused") and said in told
    assert "serving" in {e["state"] for e in fleet.orders.standing()["engines"]}


def test_engines_that_others_run_are_not_started_by_number() -> None:
    fakes = Fakes([], [])
    fakes.launches = False
    fleet = fleet_of(fakes)
    fleet.orders.give(ScaleOrder(engines=3))
    fleet.update_engines()
    assert "use --attach and --drain" in fleet.orders.standing()["results"]["1"]


def test_the_last_engine_that_serves_cannot_be_let_go() -> None:
    fakes = Fakes([], [])
    fleet = fleet_of(fakes)
    for name in "abc":
        fleet.orders.give(ScaleOrder(drain=name))
    fleet.update_engines()
    told = list(fleet.orders.standing()["results"].values())
    assert told[:2] == ["a will leave", "b will leave"] and "no other engine is serving" in told[2]
