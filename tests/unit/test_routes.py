"""Routes grow in place where nobody else has grown them, and nobody sees a difference."""

from __future__ import annotations

import copy
import pickle

import numpy as np

from mslime.data.routes import Routes

LAYERS = (0, 2)


def rows(first: int, count: int) -> np.ndarray:
    """[count, 2 layers, top-2], each row of its own."""
    return np.arange(first * 4, (first + count) * 4, dtype=np.uint8).reshape(count, 2, 2)


def grown(*counts: int) -> Routes:
    routes = Routes.empty(LAYERS, 2, 256)
    for count in counts:
        routes = routes.append(rows(len(routes), count))
    return routes


def test_what_was_appended_is_there_in_order() -> None:
    routes = grown(3, 1, 0, 7, 2)
    assert (routes.experts == rows(0, 13)).all() and routes.mask.all() and len(routes) == 13
    masked = routes.append(rows(13, 2), np.array([False, True]))
    assert masked.mask.tolist() == [True] * 13 + [False, True]


def test_two_continuations_of_the_same_routes_do_not_see_each_other() -> None:
    before = grown(4, 4)  # with room behind
    one, other = before.append(rows(8, 2)), before.append(rows(30, 3))
    assert (before.experts == rows(0, 8)).all() and len(before) == 8
    assert (one.experts == rows(0, 10)).all()
    assert (other.experts[8:] == rows(30, 3)).all() and (other.experts[:8] == rows(0, 8)).all()


def test_a_rollout_of_many_turns_is_copied_a_few_times() -> None:
    routes, rooms = Routes.empty(LAYERS, 2, 256), set[int]()
    kept = []
    for _ in range(500):
        routes = routes.append(rows(0, 3))
        rooms.add(id(routes._room))
        kept.append(routes)  # ids are not given twice
    assert len(rooms) <= 18, "the memory grows by halves"


def test_a_single_answer_takes_no_more_than_its_rows() -> None:
    routes = grown(5)
    assert routes.experts.base is not None and routes.experts.base.nbytes == routes.experts.nbytes


def test_copies_and_pickles_hold_the_rows_alone() -> None:
    routes = grown(*[10] * 5)
    for other in (pickle.loads(pickle.dumps(routes)), copy.deepcopy(routes)):
        assert (other.experts == routes.experts).all() and (other.mask == routes.mask).all()
        assert other.layer_ids == LAYERS and other._room is None
    assert len(pickle.dumps(routes)) < len(pickle.dumps(grown(50))) + 10
    longer = pickle.loads(pickle.dumps(routes)).append(rows(50, 1))
    assert (longer.experts == rows(0, 51)).all()
