"""What engines hold, summed by their ranks and compared with what was sent: no bit may differ, and none be missing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mslime import tensor_sums
from mslime.backends.sglang.port import compare, why_not
from mslime.config.errors import WeightSyncError
from mslime.engine_plugin import copy_plan
from mslime.engine_plugin.checksums import weight_sums
from mslime.engine_plugin.copy_plan import ReceivedBucket, RecordedBucket, SyncBuckets, buckets_of, record
from mslime.engine_plugin.wire import format_sum
from mslime.tensor_sums import BLOCK, all_places, place_sum, whole_sum
from tests.fixtures.marks import nightly_except

M64 = 0xFFFFFFFFFFFFFFFF


def splitmix(x: int) -> int:
    """The finaliser of splitmix64 (Steele et al., 2014), on whole numbers."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M64
    return x ^ x >> 31


def slow_place_sum(values: list[int]) -> int:
    """Element by element, in whole numbers."""
    total = 0
    for index, value in enumerate(values):
        number = (index // BLOCK + 1) * 0xD1342543DE82EF95 & M64
        number = (number ^ number >> 32) * 0xDABA0B6EB09322E3 & M64
        total += value * (splitmix(index % BLOCK * 0x9E3779B97F4A7C15 & M64) | 1) * (number | 1)
    return (total + (1 << 63) & M64) - (1 << 63)


@pytest.mark.parametrize("numel", nightly_except([0, 1, 257], [0, 1, 257, BLOCK, BLOCK + 5]))
@pytest.mark.slow
def test_a_sum_is_that_of_its_elements_each_times_the_number_of_its_place(numel: int) -> None:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).bfloat16()
    values = tensor.view(torch.int16).tolist()
    assert int(place_sum(tensor)) == slow_place_sum(values)
    assert whole_sum(tensor) == (slow_place_sum(values), all_places(numel))
    assert all_places(numel) == slow_place_sum([1] * numel)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64])
def test_a_sum_is_of_bits_and_differs_where_one_does_or_two_change_places(dtype: torch.dtype) -> None:
    tensor = torch.randn(60, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    bits = tensor_sums.bits_of(tensor)
    before = int(place_sum(tensor))
    assert before == slow_place_sum(bits.flatten().tolist()) == int(place_sum(tensor.T.contiguous().T))
    swapped = tensor.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert int(place_sum(swapped)) != before
    for bit in range(8 * tensor.itemsize):
        changed = tensor.clone()
        tensor_sums.bits_of(changed)[7, 11] ^= (
            np.array(1 << bit, f"u{tensor.itemsize}").view(f"i{tensor.itemsize}").item()
        )
        assert int(place_sum(changed)) != before, bit


def test_sums_of_parts_add_up_to_that_of_the_whole() -> None:
    tensor = torch.randn(8, 40)
    left, right = torch.zeros_like(tensor), torch.zeros_like(tensor)
    left[:, :13], right[:, 13:] = tensor[:, :13], tensor[:, 13:]
    assert tensor_sums.signed(int(place_sum(left)) + int(place_sum(right))) == int(place_sum(tensor))


SENT = {"q": (8, 6), "k": (4, 6), "up": (8, 6), "down": (6, 8), "router": (3, 6), "norm": (6,), "tied": (4, 4)}
BUCKETS = (("q", "k", "norm", "router"), ("up", "down", "tied"))


class FakeRank(torch.nn.Module):
    """A rank of an engine that shares out `q`, `up` and `down`, and the two heads of `k` if there are no more ranks.

    It joins q and k, keeps its router in float32, adds zero rows to `up`, and has `tied` twice.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        kind = torch.bfloat16
        k = 4 // min(ranks, 2)
        self.qk = torch.nn.Parameter(torch.ones(8 // ranks + k, 6, dtype=kind))
        self.up = torch.nn.Parameter(torch.ones(8 // ranks + 1, 6, dtype=kind))
        self.down = torch.nn.Parameter(torch.ones(6, 8 // ranks, dtype=kind))
        self.router = torch.nn.Parameter(torch.ones(3, 6))
        self.norm = torch.nn.Parameter(torch.ones(6, dtype=kind))
        self.head, self.embedding = (torch.nn.Parameter(torch.ones(4, 4, dtype=kind)) for _ in range(2))

    def load(self, name: str, tensor: torch.Tensor) -> None:
        heads = min(self.ranks, 2)
        own = {
            "q": lambda: (self.qk.data[: 8 // self.ranks], tensor.chunk(self.ranks)[self.rank]),
            "k": lambda: (self.qk.data[8 // self.ranks :], tensor.chunk(heads)[self.rank * heads // self.ranks]),
            "up": lambda: (self.up.data[:-1], tensor.chunk(self.ranks)[self.rank]),
            "down": lambda: (self.down.data, tensor.chunk(self.ranks, 1)[self.rank]),
        }  # fmt: skip
        if name == "tied":
            self.head.data.copy_(tensor)
            self.embedding.data.copy_(tensor)
        elif name in own:
            into, out_of = own[name]()
            into.copy_(out_of)
        else:
            getattr(self, name).data.copy_(tensor)


class FakeEngine:
    """Its ranks, each with buckets of its own, as after a sync."""

    def __init__(self, ranks: int) -> None:
        generator = torch.Generator().manual_seed(ranks)
        self.sent = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SENT.items()}
        self.ranks, self.buckets = (
            [FakeRank(rank, ranks) for rank in range(ranks)],
            [SyncBuckets("cpu") for _ in range(ranks)],
        )
        self.send()

    def send(self) -> None:
        """All buckets, which the ranks load and record."""
        for model, buckets in zip(self.ranks, self.buckets, strict=True):
            for names in BUCKETS:
                bucket = buckets.of(names, ["bfloat16"] * len(names), [SENT[name] for name in names])
                bucket.flat.copy_(torch.cat([self.sent[name].flatten().view(torch.uint8) for name in names]))
                bucket.copies[id(model)], *_ = record(model, bucket.flat, lambda b=bucket, m=model: load_all(m, b))
                buckets.loaded.append(bucket)

    def answers(self) -> list[dict[str, str]]:
        """Of all ranks."""
        return [weight_sums(model, [buckets]) for model, buckets in zip(self.ranks, self.buckets, strict=True)]

    def compare(self) -> int:
        return compare(
            "http://e", self.answers(), {name: format_sum(*whole_sum(tensor)) for name, tensor in self.sent.items()}
        )


def load_all(model: FakeRank, bucket: RecordedBucket) -> tuple[bool, str]:
    for name, tensor in bucket.named:
        model.load(name, tensor)
    return True, "loaded"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_hold_what_was_sent_also_when_asked_again_and_after_the_next_sync(ranks: int) -> None:
    engine = FakeEngine(ranks)
    assert engine.compare() == len(SENT) and engine.compare() == len(SENT)
    for name in engine.sent:
        engine.sent[name] = engine.sent[name] * 2
    with pytest.raises(WeightSyncError, match=f"{len(SENT)} of {len(SENT)} tensors"):
        engine.compare()
    for buckets in engine.buckets:
        buckets.release()
    engine.send()
    assert engine.compare() == len(SENT)


PARAMETERS = {
    "qk": "q", "up": "up", "down": "down", "router": "router", "norm": "norm", "head": "tied", "embedding": "tied"
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("parameter", PARAMETERS)
def test_one_bit_on_one_rank_is_found(parameter: str, ranks: int) -> None:
    for rank in range(ranks):
        engine = FakeEngine(ranks)
        tensor_sums.bits_of(getattr(engine.ranks[rank], parameter).data)[0, ...].view(-1)[0] ^= 1
        with pytest.raises(WeightSyncError, match=rf"http://e: {PARAMETERS[parameter]}.*1 of 7 tensors differ"):
            engine.compare()


def test_what_lies_beside_the_weights_does_not_matter() -> None:
    engine = FakeEngine(2)
    engine.ranks[1].up.data[-1] = 7.0  # padding
    assert engine.compare() == len(SENT)


def spoilt(what: str) -> tuple[FakeEngine, str]:
    """An engine of two ranks, and what is to be said of it."""
    engine = FakeEngine(2)
    if what.startswith("not loaded"):
        for buckets in engine.buckets[1 if what == "not loaded" else 0 :]:
            buckets.loaded.pop()
        return engine, f"up': rank {1 if what == 'not loaded' else 0} did not load it"
    if what == "not all":
        copies = engine.buckets[1].loaded[0].copies[id(engine.ranks[1])]
        kept = [index for index, view in enumerate(copies.into) if view.shape != (4, 6)]
        copies.into, copies.out_of = [copies.into[i] for i in kept], [copies.out_of[i] for i in kept]
        return engine, "q': the engine does not have all of it"
    if what == "replicas":
        engine.ranks[1].norm.data[2] += 1
        return engine, "norm': rank 1 has other values than rank 0 in the same places"
    if what == "rounded":  # less than bfloat16 can tell
        engine.ranks[0].router.data[1, 1] *= 1 + 1e-5
        return engine, "router': rank 0: a parameter in torch.float32 has other values"
    engine.ranks[0].down.data.swapdims(0, 1)[[0, 1]] = engine.ranks[0].down.data.swapdims(0, 1)[[1, 0]]
    return engine, "down': the engine has other values"


@pytest.mark.parametrize(
    "what", ["not loaded", "not loaded by any", "not all", "replicas", "rounded", "changed places"]
)
def test_it_is_said_what_is_wrong_with_a_tensor(what: str) -> None:
    engine, words = spoilt(what)
    with pytest.raises(WeightSyncError) as caught:
        engine.compare()
    assert words in str(caught.value)


def moved(engine: FakeEngine) -> None:
    engine.ranks[0].qk.data = engine.ranks[0].qk.data.clone()


def more_than_copied(engine: FakeEngine) -> None:
    engine.buckets[-1].loaded[0].copies[id(engine.ranks[-1])].why_not = "aten.mul_ writes a parameter"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("spoil", "why"), [(moved, "copies are not recorded"), (more_than_copied, "recorded: aten.mul_")]
)
def test_what_one_rank_has_not_recorded_is_left_out_and_the_reason_told(
    spoil: Callable[[FakeEngine], None], why: str, ranks: int
) -> None:
    engine = FakeEngine(ranks)
    spoil(engine)
    assert why in why_not(engine.answers()) and engine.compare() == 3
    engine.ranks[0].down.data[0, 0] += 1
    with pytest.raises(WeightSyncError, match="1 of 3 tensors differ"):
        engine.compare()


def test_tensors_that_are_joined_before_they_are_copied_are_recorded_as_their_parts() -> None:
    """As SGLang's loader does with the down projections of latent attention."""
    model = torch.nn.Linear(6, 5, bias=False).bfloat16()
    buckets = SyncBuckets("cpu")
    bucket = buckets.of(["a", "b"], ["bfloat16"] * 2, [(2, 6), (3, 6)])

    def load(how: str = "") -> tuple[bool, str]:
        whole = torch.cat([tensor for _, tensor in bucket.named])
        if how == "changed":
            whole.mul_(2)
        if how == "a part":
            model.weight.data[:4].copy_(whole[1:])
        else:
            model.weight.data.copy_(whole)
        return True, ""

    bucket.flat.view(torch.bfloat16).copy_(torch.randn(30))
    copies, *_ = record(model, bucket.flat, load)
    assert not copies.why_not and [list(view.shape) for view in copies.into] == [[2, 6], [3, 6]]
    bucket.flat.view(torch.bfloat16).copy_(torch.randn(30))
    copies.make()
    assert torch.equal(model.weight.data, bucket.flat.view(torch.bfloat16).view(5, 6))
    for how in ("changed", "a part"):
        copies, *_ = record(model, bucket.flat, lambda how=how: load(how))
        assert "aten.copy_" in copies.why_not, how


def test_only_what_this_update_has_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_plan, "BUCKETS", {})
    model = torch.nn.Linear(3, 2, bias=False).bfloat16()
    updater: Any = SimpleNamespace(device="cpu", get_model=lambda: model, _assert_weight_cache_inactive=lambda _: None)
    buckets = buckets_of(updater)

    def own_loader(_: Any, named: Any) -> tuple[bool, str]:
        model.weight.data.copy_(dict(named)["a"])
        return True, "loaded"

    for loaded in (True, True, False):
        bucket = buckets.of(["a"], ["bfloat16"], [(2, 3)])
        bucket.flat.view(torch.bfloat16).copy_(torch.randn(6))
        assert weight_sums(model, [buckets]) == {}
        copy_plan.load(own_loader if loaded else lambda *_: (False, "not today"), updater, ReceivedBucket(bucket))
        assert weight_sums(model, [buckets]) == {"a": format_sum(*whole_sum(model.weight.data))}
        copy_plan.buckets_of(updater).release()
