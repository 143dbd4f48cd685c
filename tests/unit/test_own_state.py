"""Rectangles as which a rank stores its elements of a tensor."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from mslime.backends.cpu.megatron import install

install()

from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory  # noqa: E402

from mslime.backends.megatron.checkpoint_files import _parts, rectangles  # noqa: E402

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


def test_ranks_store_their_elements_where_these_lie_in_the_whole_tensor() -> None:
    param = torch.nn.Parameter(torch.empty(6, 4))

    def halves(key: str, tensor: torch.Tensor, replica: Any, _: Any) -> Any:
        """As gate and up: one parameter, stored as two."""
        parts = enumerate(tensor.chunk(2))
        return [ShardedTensor.from_rank_offsets(f"{key}.{i}", part, replica_id=replica) for i, part in parts]

    factory: Any = ShardedTensorFactory
    entry = factory("w", param, halves, list, replica_id=(0, 0, 3))
    moments, stored = torch.arange(24.0), {f"optimizer.state.exp_avg.w.{i}": torch.zeros(3, 4) for i in range(2)}
    for start, end in ((0, 7), (7, 13), (13, 24)):
        for part in _parts(entry, "exp_avg", param, moments[start:end], start, end):
            place = zip(part.global_offset, part.local_shape, strict=True)
            assert part.data is not None
            stored[part.key][tuple(slice(at, at + size) for at, size in place)] = part.data
            assert part.replica_id == (0, 0, 0), "no other rank has these elements"
    assert torch.equal(torch.cat([*stored.values()]).flatten(), moments)
