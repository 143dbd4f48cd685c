"""Rectangles as which a rank stores its elements of a tensor."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from mslime.backends.megatron.step.own_state import rectangles

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(SHAPES, st.data())
def test_a_run_of_elements_is_cut_into_few_rectangles_that_follow_each_other(
    shape: list[int], data: st.DataObject
) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    whole = torch.arange(size).view(shape)
    found = list(rectangles(shape, start, end))
    parts = [whole[tuple(slice(a, a + n) for a, n in zip(*each, strict=True))].flatten() for each in found]
    assert torch.equal(torch.cat([whole.new_empty(0), *parts]), torch.arange(start, end))
    assert len(found) <= 2 * len(shape) - 1


def test_whole_tensors_and_single_numbers_are_one_rectangle() -> None:
    assert list(rectangles((3, 4), 0, 12)) == [((0, 0), (3, 4))]
    assert list(rectangles((), 0, 1)) == [((), ())]
    assert list(rectangles((3, 4), 2, 11)) == [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 3))]
