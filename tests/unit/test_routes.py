"""Routes grow in place where nobody else has grown them, and nobody sees a difference."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mslime.data.routes import Routes
from mslime.rollout.generation import as_slice

LAYERS = (0, 2)


def rows(first: int, count: int) -> np.ndarray:
    """[count, 2 layers, top-2], each row of its own."""
    return np.arange(first * 4, (first + count) * 4).astype(np.uint8).reshape(count, 2, 2)


def grown(*counts: int) -> Routes:
    routes = Routes.empty(LAYERS, 2, 256)
    for count in counts:
        routes = routes.append(rows(len(routes), count))
    return routes


def test_two_continuations_of_the_same_routes_do_not_see_each_other() -> None:
    before = grown(4, 4)  # with room behind
    one, other = before.append(rows(8, 2)), before.append(rows(30, 3))
    assert (before.experts == rows(0, 8)).all() and len(before) == 8
    assert (one.experts == rows(0, 10)).all()
    assert (other.experts[8:] == rows(30, 3)).all() and (other.experts[:8] == rows(0, 8)).all()


def test_no_turn_copies_what_came_before_it() -> None:
    routes, seen = Routes.empty(LAYERS, 2, 256), list[NDArray[Any]]()
    for _ in range(200):
        routes = routes.append(rows(0, 3))
        assert all(np.shares_memory(old, new) for old, new in zip(seen, routes.pieces, strict=False))
        seen = [*routes.pieces]
    assert 1 < len(seen) < 20


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 9), st.integers(0, 400))
def test_pieces_are_read_as_the_whole_is(counts: list[int], step: int, cut: int) -> None:
    whole, routes = grown(*counts).experts, grown(*counts)
    every, mask = routes.every(step)
    np.testing.assert_array_equal(every, whole[::step])
    assert len(mask) == len(every) and (routes.first(cut).experts == whole[:cut]).all()
    np.testing.assert_array_equal(np.concatenate(routes.pieces), whole)
    assert (routes.append(rows(len(whole), 2)).experts == rows(0, len(whole) + 2)).all()
    np.testing.assert_array_equal(routes.experts, whole)
    assert (routes.append(rows(len(whole), 2)).experts == rows(0, len(whole) + 2)).all(), "also once it was read"


def test_a_single_answer_takes_no_more_than_its_rows() -> None:
    routes = grown(5)
    assert routes.experts.base is not None and routes.experts.base.nbytes == routes.experts.nbytes


def test_copies_and_pickles_hold_the_rows_alone() -> None:
    routes = grown(*[1000] * 5)
    for other in (pickle.loads(pickle.dumps(routes)), copy.deepcopy(routes)):
        assert (other.experts == routes.experts).all() and (other.mask == routes.mask).all()
        assert other.layer_ids == LAYERS and other._buffer is None
    assert len(pickle.dumps(routes)) < len(pickle.dumps(grown(5000))) + 1000
    longer = pickle.loads(pickle.dumps(routes)).append(rows(5000, 1))
    assert (longer.experts == rows(0, 5001)).all()


def made(*shape: int, dtype: type[np.generic] = np.uint8) -> NDArray[Any]:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def test_the_first_rows_are_kept_as_they_are_and_later_ones_follow() -> None:
    first, second = made(4, 2, 3), made(2, 2, 3)
    one = Routes.empty((0, 1), 3, 64).append(first)
    assert one.experts is first and one.mask.tolist() == [True] * 4
    two = one.append(second, np.asarray([False, True]))
    np.testing.assert_array_equal(two.experts, np.concatenate([first, second]))
    assert two.mask.tolist() == [True] * 4 + [False, True] and not np.shares_memory(two.experts, first)


def test_some_layers_of_an_answer_do_not_keep_all_of_it_in_memory() -> None:
    answer = made(4, 5, 3)
    routes = Routes.empty((3, 4), 3, 64).append(answer[:, 3:])
    assert routes.experts.flags.c_contiguous and not np.shares_memory(routes.experts, answer)
    np.testing.assert_array_equal(routes.experts, answer[:, 3:])


@pytest.mark.parametrize("expert", [-1, 256])
def test_ids_of_a_wider_dtype_must_fit(expert: int) -> None:
    wide = made(2, 1, 2, dtype=np.int32)
    narrow = Routes.empty((0,), 2, 64).append(wide)
    assert narrow.experts.dtype == np.uint8 and narrow.experts.tolist() == wide.tolist()
    wide[1, 0, 0] = expert
    with pytest.raises(AssertionError, match="expert id"):
        Routes.empty((0,), 2, 64).append(wide)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 9), unique=True).map(lambda layers: tuple(sorted(layers))))
def test_layers_are_picked_without_a_copy_where_they_follow_each_other(layers: tuple[int, ...]) -> None:
    answer = made(3, 10, 2)
    picked = answer[:, as_slice(layers)]
    np.testing.assert_array_equal(picked, answer[:, np.asarray(layers, np.intp)])
    consecutive = len(layers) > 0 and layers[-1] - layers[0] + 1 == len(layers)
    assert np.shares_memory(picked, answer) == consecutive
