"""The trainer's turn, which threads of the driver take one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

from mslime.run.trainer_turn import Offer, TrainerTurn, become


def waiting(turn: TrainerTurn, count: int) -> None:
    """Return when so many threads stand in line."""
    while len(turn._line) != count:
        time.sleep(0.002)


def started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def noting(turn: TrainerTurn, order: list[str], name: str, urgent: bool) -> Callable[[], None]:
    """Work that says when it has the turn."""

    def work() -> None:
        with turn.held(urgent):
            order.append(name)

    return work


def test_turns_are_given_in_the_order_in_which_they_were_asked_for_and_urgent_ones_first() -> None:
    turn, order = TrainerTurn(), list[str]()

    turn.take()
    threads = list[threading.Thread]()
    for count, (name, urgent) in enumerate([("a", False), ("b", False), ("deliver", True), ("c", False)], 1):
        threads.append(started(noting(turn, order, name, urgent)))
        waiting(turn, count)
    turn.give()
    for thread in threads:
        thread.join(20)
    assert order == ["deliver", "a", "b", "c"]


def test_who_has_the_turn_may_take_it_again_and_keeps_it_until_all_is_given_back() -> None:
    turn, got = TrainerTurn(), threading.Event()
    with turn.held(), turn.held(urgent=True):
        turn.take()
    assert turn.mine

    def other() -> None:
        with turn.held():
            got.set()

    thread = started(other)
    waiting(turn, 1)
    assert not got.is_set()
    turn.leave()
    thread.join(20)
    assert got.is_set() and not turn.mine
    turn.leave()  # nothing to leave
    with pytest.raises(AssertionError, match="another has"):
        turn.give()


def test_who_gives_up_waiting_leaves_the_line() -> None:
    turn, raised = TrainerTurn(), list[str]()

    def stop() -> None:
        raise RuntimeError("the run ends")

    def impatient() -> None:
        try:
            turn.take(on_wait=stop)
        except RuntimeError as error:
            raised.append(str(error))

    with turn.held():
        started(impatient).join(20)
        assert raised == ["the run ends"] and turn._line == []
    with turn.held():
        assert turn.mine


def test_what_runs_beside_its_owner_has_the_owners_turn() -> None:
    turn, done = TrainerTurn(), list[bool]()

    def owner() -> None:
        become("maths")
        with turn.held(), ThreadPoolExecutor(1) as beside:
            beside.submit(copy_context().run, turn.take).result(20)
            done.append(turn.mine)
            turn.leave()
            turn.take()

    started(owner).join(30)
    assert done == [True] and not turn.mine


def test_no_two_threads_have_it_at_once() -> None:
    turn, inside, most = TrainerTurn(), list[int](), list[int]()

    def work() -> None:
        for _ in range(30):
            with turn.held(), turn.held():
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [started(work) for _ in range(6)]
    for thread in threads:
        thread.join(60)
    assert len(most) == 180 and max(most) == 1


def test_who_has_the_turn_takes_along_what_others_wait_with_and_only_that() -> None:
    """What is offered is done once, in the order of the line; the rest of the line waits on, urgent ones in order."""
    turn, order = TrainerTurn(), list[str]()

    def offering(name: str) -> Callable[[], None]:
        def work() -> None:
            offer = Offer(name)
            with turn.held(offer=offer):
                assert offer.taken and not turn.mine
                order.append(offer.wait(lambda: None))

        return work

    turn.take()
    line = [
        offering("a"), noting(turn, order, "plain", False), offering("b"), noting(turn, order, "first delivery", True),
        noting(turn, order, "second", True),
    ]  # fmt: skip
    threads = list[threading.Thread]()
    for count, work in enumerate(line, 1):
        threads.append(started(work))
        waiting(turn, count)
    offers = turn.offered()
    assert [offer.work for offer in offers] == ["a", "b"] and turn.offered() == []
    for offer in offers:
        offer.finish(f"did {offer.work}")
    for thread in (threads[0], threads[2]):
        thread.join(20)
    assert sorted(order) == ["did a", "did b"]
    turn.give()
    for thread in threads:
        thread.join(20)
    assert order[2:] == ["first delivery", "second", "plain"] and not turn._line


def test_an_offer_that_is_taken_is_waited_for_though_the_run_ends_and_fails_as_it_failed() -> None:
    turn, found, ends = TrainerTurn(), list[str](), threading.Event()

    def check() -> None:
        if ends.is_set():
            raise RuntimeError("the run ends")

    def joined() -> None:
        offer = Offer("a step")
        try:
            with turn.held(on_wait=check, offer=offer):
                offer.wait(lambda: None)
        except RuntimeError as error:
            found.append(str(error))

    with turn.held():
        for message, stop in (("rank 1 died", False), ("the run ends", True)):
            ends.clear()
            thread = started(joined)
            waiting(turn, 1)
            if stop:
                ends.set()
            else:
                turn.offered()[0].fail(RuntimeError(message))
            thread.join(20)
            assert found.pop() == message and not turn._line
        thread = started(joined)
        waiting(turn, 1)
        with turn._changed:  # taken in the moment in which the run ends
            ends.set()
            place = turn._line.pop()
            assert place.offer is not None
            place.offer.taken = True
        time.sleep(0.5)
        assert thread.is_alive(), "what is taken is waited for"
        place.offer.finish(None)
        thread.join(20)
        assert not found
