"""The replay hook of one router, the proof of consumption, and what is refused; no trainer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import profile
from torch.utils._python_dispatch import _disable_current_modes

import mslime.backends.megatron  # the CPU platform comes before anything of megatron.core  # noqa: F401

from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function  # isort: skip
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

from mslime.backends.megatron.replay import route_rows, routing_replay
from mslime.backends.megatron.replay.route_rows import (
    HASHES_AT_ONCE,
    ShardRoutes,
    check_routes,
    row_ages,
    row_hashes,
    scored_rows,
    token_keys,
)
from mslime.backends.megatron.replay.routing_replay import LayerReplay, Routing, RoutingReplay, refuse_bypass
from mslime.backends.megatron.step.batches import RowLayout, SequenceSlicer, build_micro_batch, on_device
from mslime.config.errors import ConfigError, EngineError
from mslime.data.routes import Routes
from mslime.data.shard import TrainShard
from tests.fixtures.model_facts import model_facts
from tests.unit.test_host_waits import HostWaits

ROWS, EXPERTS, TOP_K = 6, 8, 2


@pytest.fixture
def hook() -> Iterator[LayerReplay]:
    """A layer's hook in a gradient pass, in the place of megatron-core's own."""
    before = list(RouterReplay.global_router_replay_instances)
    own = RouterReplay()
    layer = LayerReplay(5, own)
    assert [i for i in RouterReplay.global_router_replay_instances if i not in before] == [layer]
    layer.start(RouterReplayAction.REPLAY_FORWARD, gradient=True, device=torch.device("cpu"))
    yield layer
    RouterReplay.global_router_replay_instances[:] = before


def route(hook: LayerReplay | None, logits: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Gate values and routing map [rows, experts] from megatron-core's own routing function."""
    return topk_routing_with_score_function(logits, TOP_K, router_replay=hook, **settings)


def chosen(routing_map: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in routing_map]


def logits_and_experts(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Router logits, and for each row the two experts that it likes least."""
    logits = torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return logits, logits.topk(TOP_K, largest=False).indices


SCORES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre_softmax": {"use_pre_softmax": True},
    "sigmoid": {"score_function": "sigmoid"},
    "scaled": {"score_function": "sigmoid", "expert_bias": torch.linspace(-1, 1, 8), "scaling_factor": 2.5},
    "grouped": {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2},
}


@pytest.mark.parametrize("settings", SCORES.values(), ids=SCORES.keys())
def test_rows_with_a_route_are_forced_and_masked_rows_are_natural(hook: LayerReplay, settings: dict[str, Any]) -> None:
    logits, experts = logits_and_experts()
    mask = torch.tensor([True, False, True, True, False, True])
    _, natural = route(None, logits, **settings)
    hook.lay_out(experts.to(torch.uint8), mask)
    _, routed = route(hook, logits, **settings)
    for row in range(ROWS):
        expected = sorted(experts[row].tolist()) if mask[row] else chosen(natural)[row]
        assert chosen(routed)[row] == expected


@pytest.mark.parametrize("settings", SCORES.values(), ids=SCORES.keys())
def test_replaying_the_natural_choice_changes_no_bit_and_agrees_fully(
    hook: LayerReplay, settings: dict[str, Any]
) -> None:
    logits, _ = logits_and_experts()
    probs, natural = route(None, logits, **settings)
    experts = torch.tensor(chosen(natural))
    order = probs.gather(1, experts).argsort(-1, descending=True)
    hook.lay_out(experts.gather(1, order), torch.ones(ROWS, dtype=torch.bool))
    replayed_probs, replayed = route(hook, logits, **settings)
    assert torch.equal(replayed, natural)
    torch.testing.assert_close(replayed_probs, probs, atol=1e-7, rtol=0)
    assert hook.agreed is not None and int(hook.agreed) == ROWS


def test_gate_values_and_their_gradients_come_from_the_current_logits(hook: LayerReplay) -> None:
    logits, experts = logits_and_experts()
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    hook.lay_out(experts, torch.ones(ROWS, dtype=torch.bool))
    upstream = torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(1))
    (route(hook, ours)[0] * upstream).sum().backward()
    gates = torch.softmax(exact.gather(1, experts), -1)
    (gates * upstream.double().gather(1, experts)).sum().backward()
    assert ours.grad is not None and exact.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-6, rtol=0)
    assert ours.grad.abs().max() > 0, "a router keeps learning under replay"


def test_agreement_counts_replayed_rows_whose_natural_set_is_the_same(hook: LayerReplay) -> None:
    logits, experts = logits_and_experts()
    natural = logits.topk(TOP_K).indices
    experts[0], experts[1], experts[2] = natural[0], natural[1].flip(0), natural[2]
    mask = torch.tensor([True, True, False, True, True, True])
    hook.lay_out(experts, mask)
    route(hook, logits)
    assert int(hook.agreed if hook.agreed is not None else -1) == 2, "order does not matter, masked rows do not count"


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.sampled_from([torch.uint8, torch.int16]))
def test_agreement_is_counted_as_by_sorting(seed: int, top_k: int, dtype: torch.dtype) -> None:
    """Few experts, so that many sets agree. Rows outside the mask may hold an expert twice."""
    random = torch.Generator().manual_seed(seed)
    natural, experts = (torch.rand(2 * ROWS, top_k + 1, generator=random).argsort(-1)[:, :top_k] for _ in range(2))
    mask = torch.rand(2 * ROWS, generator=random) < 0.7
    experts[~mask] = 0
    layer: Any = object.__new__(LayerReplay)
    layer.layer_id, layer.gradient, layer.agreed = 0, False, torch.zeros((), dtype=torch.int64)
    layer.experts_and_mask = (experts.to(dtype), mask)
    layer._next_rows(natural)
    assert int(layer.agreed) == int(((natural.sort().values == experts.sort().values).all(-1) & mask).sum())


def test_agreement_sorts_nothing(hook: LayerReplay) -> None:
    """A sort of each row takes several kernels and as much time as the router's own top-k."""
    logits, experts = logits_and_experts()
    hook.lay_out(experts, torch.ones(ROWS, dtype=torch.bool))
    with profile() as ran:
        route(hook, logits)
    assert "aten::topk" in (names := {event.key for event in ran.key_averages()}) and "aten::sort" not in names


def test_recomputation_replays_micro_batches_in_the_order_of_their_forward_passes(hook: LayerReplay) -> None:
    """Three forward passes inside checkpoints are in flight; each recomputation sees its own micro-batch's routes."""
    whole = torch.ones(ROWS, dtype=torch.bool)
    batches = [(logits, experts) for logits, experts in (logits_and_experts(seed) for seed in range(3))]
    for logits, experts in batches:
        hook.lay_out(experts, whole)
        with torch.no_grad():
            route(hook, logits)
    for logits, experts in batches:
        assert chosen(route(hook, logits)[1]) == [sorted(row) for row in experts.tolist()]
    hook.check_used_up()


def test_a_forward_pass_outside_checkpoints_is_not_recomputed(hook: LayerReplay) -> None:
    logits, experts = logits_and_experts()
    hook.lay_out(experts, torch.ones(ROWS, dtype=torch.bool))
    route(hook, logits)
    hook.check_used_up()
    with pytest.raises(AssertionError, match="layer 5: its router ran without routes"):
        route(hook, logits)


def test_routes_that_no_router_asked_for_and_passes_that_were_not_recomputed_are_noticed(hook: LayerReplay) -> None:
    logits, experts = logits_and_experts()
    hook.lay_out(experts, torch.ones(ROWS, dtype=torch.bool))
    with pytest.raises(AssertionError, match="bypassed"):
        hook.check_used_up()
    with pytest.raises(AssertionError, match="did not request"):
        hook.lay_out(experts, torch.ones(ROWS, dtype=torch.bool))
    with torch.no_grad():
        route(hook, logits)
    with pytest.raises(AssertionError, match="never recomputed"):
        hook.check_used_up()


def test_routing_is_natural_outside_a_pass(hook: LayerReplay) -> None:
    hook.stop()
    logits, _ = logits_and_experts()
    assert torch.equal(route(hook, logits)[1], route(None, logits)[1])


def make_shard(**changes: Any) -> TrainShard:
    """Two sequences of 4 and 3 tokens, two MoE layers; the newest token of each has no route."""
    experts = np.stack(
        [[np.random.default_rng(10 * t + l).permutation(EXPERTS)[:TOP_K] for l in range(2)] for t in range(7)]
    )
    shard = TrainShard(
        tokens=np.arange(7, dtype=np.int32),
        lengths=np.array([4, 3]),
        sequence_ids=np.array([8, 3]),
        loss_mask=np.array([0, 0, 1, 1, 0, 1, 1], np.bool_),
        weights=np.ones(7, np.float32),
        advantages=np.ones(7, np.float32),
        behaviour_log_probs=np.zeros(7, np.float32),
        micro_batches=((0, 1),),
        routes=Routes(experts.astype(np.uint8), np.array([1, 1, 1, 0, 1, 1, 0], np.bool_), (1, 3)),
    )
    return replace(shard, **changes)


def with_routes(change: Any) -> TrainShard:
    shard = make_shard()
    assert shard.routes is not None
    experts, mask = shard.routes.experts.copy(), shard.routes.mask.copy()
    change(experts, mask)
    return replace(shard, routes=Routes(experts, mask, shard.routes.layer_ids))


def test_scored_rows_predict_trained_tokens_of_their_own_sequence() -> None:
    assert scored_rows(make_shard()).tolist() == [False, True, True, False, True, True, False]


def test_a_row_has_the_age_of_the_weights_that_sampled_after_it() -> None:
    """A prompt of 2, two tokens of age 3, a tool's 2, two of age 1, and one of now; then a sequence without a token."""
    lengths, sampled = [10, 2], [None, None, 3, 3, None, None, 1, 1, 0, None, None, None]
    zeros = np.zeros(12, np.float32)
    shard = make_shard(
        tokens=np.arange(12, dtype=np.int32), lengths=np.array(lengths), loss_mask=np.zeros(12, np.bool_),
        weights=zeros, advantages=zeros, behaviour_log_probs=zeros, routes=None,
        segment_ages=np.array([age or 0 for age in sampled], np.int32),
    )  # fmt: skip
    expected: list[int] = []
    for start, stop in shard.spans():
        for row in range(start, stop):
            expected.append(next((age for t in range(row + 1, stop) if (age := sampled[t]) is not None), 0))
    assert row_ages(shard).tolist() == expected == [3, 3, 3, 1, 1, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(("max_age", "left"), [(None, []), (2, []), (1, [0, 1]), (0, [0, 1, 2])])
def test_rows_beyond_the_age_are_left_to_the_router(max_age: int | None, left: list[int]) -> None:
    shard = make_shard(segment_ages=np.array([0, 0, 2, 1, 0, 0, 0], np.int32))
    routes = ShardRoutes.from_rollout(shard, (1, 3), max_age)
    assert shard.routes is not None and np.flatnonzero(routes.too_old).tolist() == left
    np.testing.assert_array_equal(routes.mask, shard.routes.mask & ~routes.too_old)
    slicer = SequenceSlicer.build(shard.spans(), RowLayout(cp=2))
    rows = routes.rows(slicer, torch.device("cpu"))
    assert [row for row, old in zip(slicer.rows.tolist(), rows.too_old.tolist(), strict=True) if old] == [
        row for row in slicer.rows.tolist() if row in left
    ]
    assert not (rows.mask & rows.too_old).any()


def twice(experts: Any, mask: Any) -> None:
    experts[5, 1] = [4, 4]


def twice_in_a_masked_row(experts: Any, mask: Any) -> None:
    experts[3] = 0


def forget(experts: Any, mask: Any) -> None:
    mask[2] = False


@pytest.mark.parametrize(
    ("change", "experts", "top_k", "refused"),
    [
        (None, EXPERTS, TOP_K, None),
        (twice_in_a_masked_row, EXPERTS, TOP_K, None),
        (twice, EXPERTS, TOP_K, "sequence 3, position 1"),
        (forget, EXPERTS, TOP_K, "1 trained tokens without a route, the first in sequence 8, position 2"),
        (None, 4, TOP_K, "2 of 4 experts"),
        (None, EXPERTS, 3, "3 of 8 experts"),
    ],
)
def test_routes_that_cannot_be_replayed_are_refused_with_their_place(
    change: Any, experts: int, top_k: int, refused: str | None
) -> None:
    shard = with_routes(change) if change else make_shard()
    with pytest.raises(EngineError, match=refused) if refused else nullcontext():
        check_routes(shard, experts, top_k)


def test_no_pass_is_laid_out_with_routes_that_cannot_be_replayed() -> None:
    model = model_facts(100, num_layers=2, top_k=TOP_K, num_experts=EXPERTS)
    replay: Any = SimpleNamespace(layer_ids=(1, 3), tally=lambda: None)
    routing = Routing("r3", replay, model, parallel=None, device=torch.device("cpu"))  # type: ignore[arg-type]
    routing.laid_out(make_shard(), 0)
    with pytest.raises(EngineError, match="sequence 3, position 1"):
        routing.laid_out(with_routes(twice), 0)


def test_routes_are_checked_once_for_all_passes_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, checked = model_facts(100, num_layers=2, top_k=TOP_K, num_experts=EXPERTS), []
    replay: Any = SimpleNamespace(layer_ids=(1, 3), tally=lambda: None)
    routing = Routing("r3", replay, model, parallel=None, device=torch.device("cpu"))  # type: ignore[arg-type]
    monkeypatch.setattr(routing_replay, "check_routes", lambda shard, *_: checked.append(shard))
    shards = [make_shard(), make_shard()]
    for index, shard in enumerate(shards):
        routing.laid_out(shard, index)
    for index, shard in enumerate(shards):
        routing.laid_out(replace(shard, old_log_probs=np.zeros(7, np.float32)), index)
    assert [id(each) for each in checked] == [id(each) for each in shards]
    routing.laid_out(make_shard(), 0)
    assert len(checked) == 3, "equal routes of another step"
    held = weakref.ref(shards[0].routes)
    shards.clear(), checked.clear()
    del shard
    gc.collect()
    assert held() is None, "routes of a past step are not kept"


def fingerprint(shard: TrainShard, layers: Any) -> int:
    return ShardRoutes.from_rollout(shard, layers).fingerprint(torch.device("cpu"))


def layouts() -> list[list[RowLayout]]:
    """All ranks of some layouts."""
    cut = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)]
    return [[RowLayout(cp, c, sp, s) for c in range(cp) for s in range(sp)] for cp, sp in cut]


@pytest.mark.parametrize("ranks", layouts(), ids=lambda ranks: f"cp{ranks[0].cp}_sp{ranks[0].sp}")
def test_every_layout_consumes_the_same_rows_exactly_once(ranks: list[RowLayout]) -> None:
    shard = make_shard()
    total = 0
    for rank in ranks:
        slicer = SequenceSlicer.build(shard.spans(), rank)
        rows = ShardRoutes.from_rollout(shard, (1, 3)).rows(slicer, torch.device("cpu"))
        total += int((row_hashes(rows.experts, rows.keys, torch.tensor([1, 3])) * rows.mask[:, None]).sum())
    assert (total - fingerprint(shard, (1, 3))) % 2**64 == 0


def test_stages_of_a_pipeline_sum_to_the_whole() -> None:
    shard = make_shard()
    parts = sum(fingerprint(shard.stage_slice([layer]), [layer]) for layer in (1, 3))
    assert (parts - fingerprint(shard, (1, 3))) % 2**64 == 0


@pytest.mark.parametrize("at_once", [1, 3, 4, 1 << 22])
def test_a_fingerprint_is_the_same_in_pieces(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its device a few rows are hashed at once; splitmix64 written out for single numbers says what it must be."""
    shard, bits = make_shard(), 2**64 - 1
    assert shard.routes is not None

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & bits
        x = (x ^ x >> 27) * 0x94D049BB133111EB & bits
        return x ^ x >> 31

    expected = 0
    for key, mask, row in zip(token_keys(shard).tolist(), shard.routes.mask, shard.routes.experts, strict=True):
        for layer, experts in zip((1, 3), row.tolist(), strict=True):
            hashed = mix(mix(key) + (layer + 1) * 0x632BE59BD9B4E019 & bits)
            for expert in experts:
                hashed = mix(hashed ^ expert + 1)
            expected += hashed * bool(mask)
    monkeypatch.setitem(HASHES_AT_ONCE, "cpu", at_once)
    assert (fingerprint(shard, (1, 3)) - expected) % 2**64 == 0


@pytest.mark.parametrize("rows_at_once", [1, 2, 512])
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_the_first_row_with_an_expert_twice_is_found_as_by_sorting(rows_at_once: int, seed: int, top_k: int) -> None:
    random = np.random.default_rng(seed)
    routes = Routes(random.integers(0, 9, (6, 2, top_k)).astype(np.uint8), random.random(6) < 0.7, (0, 1))
    experts = np.sort(routes.experts, axis=-1)
    twice = (experts[..., 1:] == experts[..., :-1]).any(axis=(1, 2)) & routes.mask
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route_rows, "ROWS_AT_ONCE", rows_at_once)
        largest, first = route_rows._largest_and_first_repeated(routes)
    assert largest == routes.experts[routes.mask].max(initial=0)
    assert first == (int(np.flatnonzero(twice)[0]) if twice.any() else None)


def change_places(experts: Any, mask: Any, *rows: Any) -> None:
    one, other = rows
    experts[one], experts[other] = experts[other].copy(), experts[one].copy()


OTHERS: dict[str, Any] = {
    "tokens": lambda experts, mask: change_places(experts, mask, 0, 1),
    "layers": lambda experts, mask: change_places(experts, mask, (0, 0), (0, 1)),
    "order": lambda experts, mask: change_places(experts, mask, (0, 0, 0), (0, 0, 1)),
    "one lost": lambda experts, mask: mask.__setitem__(1, False),
}
"""Routes that are not the shard's own."""


@pytest.mark.parametrize("change", OTHERS)
def test_the_fingerprint_notices(change: str) -> None:
    assert fingerprint(with_routes(OTHERS[change]), (1, 3)) != fingerprint(make_shard(), (1, 3))


class FakeLayer:
    """Takes whatever is laid out, and has chosen experts 3 and 4."""

    def __init__(self, layer_id: int) -> None:
        self.layer_id, self.agreed, self.experts = layer_id, None, torch.zeros(0)

    def start(self, *_: object, **__: object) -> None: ...

    def stop(self) -> None: ...

    def clear_indices(self) -> None: ...

    def lay_out(self, experts: Tensor, mask: Tensor) -> None:
        self.experts = experts

    def get_recorded_indices(self) -> Tensor:
        return torch.tensor([[3, 4]] * ROWS)


def replay_of(*chunks: list[Any]) -> Any:
    """Replay of these layers, by model chunk, without a model of four layers."""
    replay: Any = object.__new__(RoutingReplay)
    replay.num_layers, replay.device, replay.records = 4, torch.device("cpu"), {}
    replay.chunks, replay.layers = list(chunks), [layer for chunk in chunks for layer in chunk]
    replay.layer_ids = tuple(layer.layer_id for layer in replay.layers)
    replay._layers_on_device = torch.tensor(replay.layer_ids)
    return replay


@pytest.mark.parametrize("change", [None, "tokens", "layers", "order"])
def test_a_pass_that_used_other_routes_than_the_steps_own_is_refused(change: str | None) -> None:
    replay = replay_of([FakeLayer(1), FakeLayer(3)])
    slicer, tally = SequenceSlicer.build(make_shard().spans(), RowLayout()), replay.tally()
    used = ShardRoutes.from_rollout(with_routes(OTHERS[change]) if change else make_shard(), (1, 3))
    replay.lay_out(0, used.rows(slicer, replay.device), tally)
    routing = Routing("r3", replay, model=None, parallel=None, device=replay.device)  # type: ignore[arg-type]
    routing._tally, routing.parallel = tally, SimpleNamespace(tp_rank=0, rows=RowLayout())  # type: ignore[assignment]
    if change is None:
        report = routing.report(make_shard())
        assert report is not None and (report.coverage, report.rows) == (1.0, 10)
        return
    with pytest.raises(AssertionError, match="are not those of the step, each exactly once"):
        routing.report(make_shard())


def test_each_chunk_replays_the_columns_of_its_own_layers() -> None:
    shard = make_shard()
    assert shard.routes is not None
    slicer, one, other = SequenceSlicer.build(shard.spans(), RowLayout()), FakeLayer(1), FakeLayer(3)
    rows = ShardRoutes.from_rollout(shard, (1, 3)).rows(slicer, torch.device("cpu"))
    replay, counted = replay_of([one], [], [other]), []
    tally = replay.tally()
    for chunk in range(3):
        replay.lay_out(chunk, rows, tally)
        counted.append(int(tally.rows))
    assert counted == [5, 5, 10] and (int(tally.fingerprint) - fingerprint(shard, (1, 3))) % 2**64 == 0
    for column, layer in enumerate((one, other)):
        np.testing.assert_array_equal(layer.experts.numpy(), shard.routes.experts[:, column])


def test_a_recording_without_a_chunk_is_refused_when_its_pass_ends() -> None:
    replay = replay_of([FakeLayer(0)], [FakeLayer(2)])
    with replay.recording():
        replay.keep(0, "a"), replay.keep(1, "a")
    assert replay.records["a"].tolist() == [[[3, 4]] * 2] * ROWS
    with pytest.raises(AssertionError, match="not recorded in every model chunk"), replay.recording():
        replay.keep(0, "a"), replay.keep(1, "a"), replay.keep(0, "b")


@pytest.mark.parametrize("mode", ["r3", "r2"])
def test_in_a_micro_batch_the_host_waits_for_no_gpu(
    mode: Any, hook: LayerReplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layout of its routes, its forward pass in a checkpoint, recomputation and backward pass (see `HostWaits`)."""

    def through_pinned_memory(array: Any, device: torch.device) -> Tensor:
        with _disable_current_modes():
            return on_device(array, device)

    monkeypatch.setattr(route_rows, "on_device", through_pinned_memory)
    experts = np.array([[[0, 1]]] * 7, np.uint8)
    shard = make_shard(routes=Routes(experts, np.ones(7, np.bool_), (hook.layer_id,)))
    model, device = model_facts(100, num_layers=6, top_k=TOP_K, num_experts=EXPERTS), torch.device("cpu")
    routing = Routing(mode, replay_of([hook]), model, parallel=None, device=device)  # type: ignore[arg-type]
    routing._recorded[0] = {0: torch.from_numpy(experts.astype(np.int16))}
    routes, batch = routing.laid_out(shard, 0), build_micro_batch(shard, 0, RowLayout(), packed=True, device=device)
    logits = torch.randn(7, EXPERTS, requires_grad=True)
    assert routes is not None
    with HostWaits() as waits:
        routes.before_forward(0, batch)
        with torch.no_grad():
            route(hook, logits)
        probs, _ = route(hook, logits)
        probs.square().sum().backward()
    hook.check_used_up()
    assert waits.found == []


def test_token_keys_are_unique_over_sequences_and_never_those_of_padding() -> None:
    keys = token_keys(make_shard())
    assert len(set(keys.tolist())) == 7 and 0 not in keys


CONFIG = {
    "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": EXPERTS, "moe_router_topk": TOP_K,
    "moe_router_load_balancing_type": "none", "moe_enable_routing_replay": True, "add_bias_linear": False,
}  # fmt: skip
BYPASSES = {
    "moe_enable_routing_replay": False,
    "moe_router_fusion": True,
    "moe_router_load_balancing_type": "sinkhorn",
    "moe_expert_capacity_factor": 1.5,
    "moe_router_force_load_balancing": True,
    "cuda_graph_impl": "local",
    "mtp_num_layers": 1,
    "tensor_model_parallel_size": 2,  # without sequence parallelism its ranks route the same rows
}


@pytest.mark.parametrize("name", BYPASSES)
def test_a_router_whose_kernel_would_bypass_replay_is_refused_by_name(name: str) -> None:
    config = TransformerConfig(**CONFIG)  # type: ignore[arg-type]
    refuse_bypass(config)
    vars(config)[name] = BYPASSES[name]
    with pytest.raises(ConfigError) as caught:
        refuse_bypass(config)
    expected = "sequence_parallel" if name == "tensor_model_parallel_size" else name
    assert caught.value.field == f"megatron.{expected}"
