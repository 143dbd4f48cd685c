"""What the trainer does to a loaded optimizer state before megatron-core takes it, by the kind of optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mslime.backends.cpu.megatron_patches import install

install()

from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory  # noqa: E402
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402

from mslime.backends.megatron import checkpoint_files  # noqa: E402
from mslime.backends.megatron.checkpoint_files import _parts, rectangles  # noqa: E402
from mslime.backends.megatron.step import optimizer as optimizer_module  # noqa: E402
from mslime.backends.megatron.step.optimizer import load_states, states_of, without_classes  # noqa: E402
from mslime.config.loader import build  # noqa: E402


class FakeFusedAdam(torch.optim.Optimizer):
    """Counts steps per group, as Transformer Engine's does: a parameter's state with a count of its own is an error."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})


def wrapped(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> tuple[MegatronOptimizer, list[Any]]:
    """megatron-core's wrapper around an optimizer, as far as loading knows it, and what it was given to load."""
    taken: list[Any] = []
    inner = make([torch.nn.Parameter(torch.zeros(2))])
    return cast("MegatronOptimizer", SimpleNamespace(optimizer=inner, load_state_dict=taken.append)), taken


def loaded_state() -> dict[str, Any]:
    moments = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    return {"optimizer": {"state": {0: moments}, "param_groups": [{}]}}


def test_a_fused_adam_is_given_no_step_count_per_parameter() -> None:
    optimizer, taken = wrapped(FakeFusedAdam)
    load_states(optimizer, loaded_state())
    assert "common_step" not in taken[0]["optimizer"]["state"]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_torch_adam_gets_the_step_count_of_0_that_the_file_leaves_out(kind: type[torch.optim.Adam]) -> None:
    optimizer, taken = wrapped(kind)
    load_states(optimizer, loaded_state())
    assert taken[0]["optimizer"]["state"]["common_step"] == 0


def test_adam_without_a_loop_over_parameters_changes_no_bit() -> None:
    def trained(foreach: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((5, 7), (3,), (1, 1))]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, foreach=foreach)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        return [*parameters, *(state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))]

    assert all(torch.equal(a, b) for a, b in zip(trained(foreach=True), trained(foreach=False), strict=True))


def test_a_sharded_tensor_in_a_message_does_not_read_its_numbers() -> None:
    tensor = ShardedTensor.from_rank_offsets("decoder.weight", torch.full((3,), 7.0))
    assert f"{tensor}" == "ShardedTensor(decoder.weight)"
    factory = ShardedTensorFactory("decoder.gated", tensor.data, build_fn=list, merge_fn=list)
    assert f"{factory}" == "ShardedTensorFactory(decoder.gated)"


def test_a_distributed_optimizer_stores_its_own_part_and_no_whole_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    part: Any = object.__new__(DistributedOptimizer)
    part.is_stub_optimizer, part.model_param_group_index_map, part.optimizer = False, {}, None
    monkeypatch.setattr(optimizer_module, "get_megatron_optimizer", lambda config, chunks: part)
    monkeypatch.setattr(optimizer_module, "OptimizerParamScheduler", lambda *_, **__: None)
    train = build({"model": {"path": "m"}, "data": {"prompts": ["p.jsonl"]}}).train
    optimizer_module.build_optimizer([], cast("Any", None), train, 4)
    assert part.sharded_param_state_fully_reshardable.__func__ is checkpoint_files._own_state
    assert part.load_parameter_state_from_fully_reshardable.__func__ is checkpoint_files._take_state


class FakeOffloaded:
    """As megatron-core's distributed optimizer with `HybridDeviceOptimizer`: classes are among a group's numbers."""

    def __init__(self) -> None:
        self.optimizer = SimpleNamespace(
            param_groups=[{"lr": 0.1, "cpu_optimizer_cls": torch.optim.AdamW}],
            defaults={"lr": 0.1, "cpu_optimizer_cls": torch.optim.AdamW},
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.param_groups = [dict(group) for group in state["optimizer"]["param_groups"]]


def test_a_saved_state_has_no_classes_and_a_loaded_one_has_them_again() -> None:
    held = FakeOffloaded()
    moments = torch.ones(2)
    state = {"optimizer": {"param_groups": held.optimizer.param_groups, "state": {0: {"exp_avg": moments}}}}
    saved = without_classes(state)
    assert saved == {"optimizer": {"param_groups": [{"lr": 0.1}], "state": {0: {"exp_avg": moments}}}}
    assert saved["optimizer"]["state"][0]["exp_avg"] is moments
    assert "cpu_optimizer_cls" in held.optimizer.param_groups[0], "what is held stays as it is"
    saved["optimizer"]["param_groups"][0]["lr"] = 0.2
    load_states(cast("Any", held), saved)
    assert held.optimizer.param_groups == [{"lr": 0.2, "cpu_optimizer_cls": torch.optim.AdamW}]


class FakeChain(ChainedOptimizer):
    """Of parts with these optimizers, which would save `saved`."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], saved: dict[Any, Any]) -> None:
        self.chained_optimizers = [SimpleNamespace(optimizer=each) for each in optimizers]
        self._saved = saved

    def sharded_state_dict(self, *_: object, **__: object) -> dict[Any, Any]:
        return self._saved


@pytest.mark.parametrize("counts", ["each parameter", "each group"])
def test_a_part_without_parameters_on_this_rank_tells_the_steps_of_the_others(counts: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    here, elsewhere = torch.optim.Adam([parameter]), torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    elsewhere.param_groups[0]["params"] = []
    if counts == "each parameter":
        here.state[parameter] = {"step": torch.tensor(3.0)}
    else:
        here.param_groups[0]["step"] = 3
    own: dict[str, Any] = {"optimizer": {"state": {}, "param_groups": [{}]}}
    by_groups: dict[str, Any] = {"param_groups": [{}]}
    for saved in (own, by_groups):
        states_of(FakeChain([here, elsewhere], {0: {}, 1: saved}), {}, is_loading=False, metadata=None)
    assert own["optimizer"]["state"]["common_step"] == 3 and by_groups["param_groups"] == [{"step": 3}]


# ----------------------------------------------------------------------------------------------------------- rectangles


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
