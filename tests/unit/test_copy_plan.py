"""Buckets loaded by recorded copies, against a loader that does with weights what those of SGLang's models do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mslime.engine_plugin import dispatch
from mslime.engine_plugin.copy_plan import BucketCopies, RecordedBucket, SyncBuckets, record

Loader = Callable[["FakeModel", str, torch.Tensor], None]
SENT = {"q": (4, 6), "k": (2, 6), "up": (6, 4), "router": (3, 6), "scale": (1,)}


class FakeModel(torch.nn.Module):
    """Fuses q and k into rows of one parameter, holds half of `up` and pads it, keeps its router in float32."""

    def __init__(self, loader: Loader | None = None) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(6, 6, dtype=torch.bfloat16))
        self.up = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        self.router = torch.nn.Parameter(torch.zeros(3, 6))
        self.scale = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        self.loader = loader

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in named:
                if name in ("q", "k"):
                    self.qk.data.narrow(0, 0 if name == "q" else 4, len(tensor)).copy_(tensor)
                elif name == "up":
                    self.up.data[3:].zero_()
                    self.up.data[:3].copy_(tensor[3:])
                elif self.loader is not None:
                    self.loader(self, name, tensor)
                else:
                    getattr(self, name).data.copy_(tensor)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: param.detach().clone() for name, param in self.named_parameters()}


def values(seed: int, names: Iterable[str] = SENT) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SENT[name], generator=generator).bfloat16() for name in names}


def arrived(buckets: SyncBuckets, sent: dict[str, torch.Tensor]) -> RecordedBucket:
    """The bucket, as a broadcast leaves it."""
    bucket = buckets.of(list(sent), ["bfloat16"] * len(sent), [tuple(tensor.shape) for tensor in sent.values()])
    bucket.flat.copy_(torch.cat([tensor.flatten().view(torch.uint8) for tensor in sent.values()]))
    return bucket


def recorded(model: torch.nn.Module, bucket: RecordedBucket) -> BucketCopies:
    def load() -> tuple[bool, str]:
        model.load_weights(iter(bucket.named))  # type: ignore[operator]
        return True, "loaded"

    copies, loaded, message = record(model, bucket.flat, load)
    assert (loaded, message) == (True, "loaded")
    return copies


def expected(sent: dict[str, torch.Tensor], loader: Loader | None = None) -> dict[str, torch.Tensor]:
    model = FakeModel(loader)
    model.load_weights(sent.items())
    return model.state()


@pytest.fixture(autouse=True)
def no_updaters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps what it knows of an updater; the next test's process is the same."""
    from mslime.engine_plugin import copy_plan as plug_in

    monkeypatch.setattr(plug_in, "BUCKETS", {})


@pytest.fixture
def buckets() -> SyncBuckets:
    return SyncBuckets("cpu")


def test_recorded_copies_load_newer_values_as_the_models_loader_does(buckets: SyncBuckets) -> None:
    model = FakeModel()
    copies = recorded(model, arrived(buckets, values(0)))
    assert not copies.why_not and len(copies.into) == len(SENT)
    for seed in (1, 2):
        buckets.release()
        arrived(buckets, values(seed))
        assert copies.fit(model)
        copies.make()
        torch.testing.assert_close(model.state(), expected(values(seed)), rtol=0, atol=0)


def test_buckets_of_several_sizes_share_one_buffer_that_is_given_back(buckets: SyncBuckets) -> None:
    model = FakeModel()
    small, large = values(0, ["k"]), values(0, ["q", "up", "router", "scale"])
    known = [recorded(model, arrived(buckets, part)) for part in (small, large)]
    buckets.release()
    assert buckets.buffer.bytes == 0
    for copies, part in zip(known, (values(5, ["k"]), values(5, ["q", "up", "router", "scale"])), strict=True):
        arrived(buckets, part)
        copies.make()
    assert buckets.buffer.bytes == sum(tensor.nbytes for tensor in large.values())
    torch.testing.assert_close(
        model.state(), expected(values(5, ["k"]) | values(5, ["q", "up", "router", "scale"])), rtol=0, atol=0
    )
    assert arrived(buckets, small) is arrived(buckets, small)


class Turned(FakeModel):
    """Holds a part of `up`, turned round, as SGLang does with packed weights; `change` is what it does else."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda turned: turned) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
        self.change = change

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        pairs = list(named)
        super().load_weights([pair for pair in pairs if pair[0] != "up"])
        up = dict(pairs)["up"]
        with torch.no_grad():
            self.up.data.copy_(self.change(up.t().contiguous().narrow(0, 1, 2).narrow(1, 3, 3)))


def test_a_part_of_a_tensor_that_is_turned_round_first_is_a_copy_too(buckets: SyncBuckets) -> None:
    model = Turned()
    copies = recorded(model, arrived(buckets, values(0)))
    assert not copies.why_not
    for seed in (1, 2):
        buckets.release()
        arrived(buckets, values(seed))
        copies.make()
        assert torch.equal(model.up, values(seed)["up"].t()[1:3, 3:6])


@pytest.mark.parametrize("change", [
    lambda turned: turned * 2, lambda turned: turned.mul_(2), lambda turned: turned.as_strided((2, 3), (1, 2)),
], ids=["another tensor", "written over", "another view"])  # fmt: skip
def test_what_is_done_to_a_turned_tensor_is_left_to_the_models_loader(
    buckets: SyncBuckets, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    assert "aten.copy_" in recorded(Turned(change), arrived(buckets, values(0))).why_not


def filled(model: FakeModel, name: str, tensor: torch.Tensor) -> None:
    """As SGLang's default loader does with a parameter of one value."""
    param = getattr(model, name).data
    param.fill_(tensor.item()) if param.numel() == 1 else param.copy_(tensor)


def transformed(model: FakeModel, name: str, tensor: torch.Tensor) -> None:
    getattr(model, name).data.copy_(tensor * 2)


def added(model: FakeModel, name: str, tensor: torch.Tensor) -> None:
    getattr(model, name).data.zero_().add_(tensor)


def broadcast(model: FakeModel, name: str, tensor: torch.Tensor) -> None:
    getattr(model, name).data.copy_(tensor[:1])


def replaced(model: FakeModel, name: str, tensor: torch.Tensor) -> None:
    getattr(model, name).data = tensor.float()


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (filled, "aten.fill_"), (transformed, "aten.copy_"), (added, "aten.add_"), (broadcast, "aten.copy_"),
        (replaced, "FakeModel replaces parameters"),
    ],
)  # fmt: skip
def test_what_is_more_than_a_copy_is_left_to_the_models_loader(buckets: SyncBuckets, loader: Loader, why: str) -> None:
    model = FakeModel(loader)
    copies = recorded(model, arrived(buckets, values(0)))
    assert why in copies.why_not and not copies.fit(model)
    torch.testing.assert_close(model.state(), expected(values(0), loader), rtol=0, atol=0)


def test_a_value_that_is_filled_in_may_be_0_the_first_time(buckets: SyncBuckets) -> None:
    sent = values(0) | {"scale": torch.zeros(1, dtype=torch.bfloat16)}
    assert "aten.fill_" in recorded(FakeModel(filled), arrived(buckets, sent)).why_not


def test_copies_that_a_loader_leaves_to_other_threads_are_recorded_and_others_stay_in_theirs(
    buckets: SyncBuckets,
) -> None:
    """As SGLang's for DeepSeek."""
    others: list[int] = []

    class Threaded(FakeModel):
        def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
            with ThreadPoolExecutor() as pool:
                for done in [pool.submit(super(Threaded, self).load_weights, [pair]) for pair in named]:
                    done.result()
                if (own := threading.get_ident()) == main:
                    stranger = threading.Thread(target=lambda: others.append(pool.submit(threading.get_ident).result()))
                    stranger.start()
                    stranger.join()
                    assert others.pop() not in (own, stranger.ident)

    main, model = threading.get_ident(), Threaded()
    copies = recorded(model, arrived(buckets, values(0)))
    assert not copies.why_not and len(copies.into) == len(SENT)
    arrived(buckets, values(1))
    copies.make()
    torch.testing.assert_close(model.state(), expected(values(1)), rtol=0, atol=0)
    with ThreadPoolExecutor() as pool:
        assert pool.submit(threading.get_ident).result() != main, "only while it is recorded"


def test_what_fails_in_a_thread_of_a_loader_fails_the_load(buckets: SyncBuckets) -> None:
    class Failing(FakeModel):
        def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
            with ThreadPoolExecutor() as pool:
                pool.submit(getattr, self, "nothing").result()

    with pytest.raises(AttributeError, match="nothing"):
        recorded(Failing(), arrived(buckets, values(0)))


def test_a_rank_that_holds_nothing_of_a_bucket_loads_nothing(buckets: SyncBuckets) -> None:
    class Elsewhere(FakeModel):
        def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
            list(named)

    model = Elsewhere()
    copies = recorded(model, arrived(buckets, values(0)))
    assert copies.fit(model) and not copies.into
    copies.make()
    torch.testing.assert_close(model.state(), FakeModel().state(), rtol=0, atol=0)


def moved(model: FakeModel, name: str) -> FakeModel:
    getattr(model, name).data = getattr(model, name).data.clone()
    return model


def replaced_qk(model: FakeModel) -> FakeModel:
    model.qk = torch.nn.Parameter(model.qk.data.clone(), requires_grad=False)
    return model


@pytest.mark.parametrize(("change", "fits"), [
    (lambda model: moved(model, "qk"), False), (replaced_qk, False), (lambda model: FakeModel(), False),
    (lambda model: moved(model, "scale"), True),
], ids=["moved", "replaced", "another model, whose id may be the same later", "another parameter moved"])  # fmt: skip
def test_copies_are_repeated_only_into_the_parameters_that_they_were_recorded_for(
    buckets: SyncBuckets, change: Callable[[FakeModel], FakeModel], fits: bool
) -> None:
    model = FakeModel()
    copies = recorded(model, arrived(buckets, values(0, ["q"])))
    assert not copies.why_not and copies.into and copies.fit(model)
    assert copies.fit(change(model)) is fits


class FakeUpdater:
    """SGLang's."""

    device = "cpu"

    def __init__(self, model: Any) -> None:
        self.get_model, self.own, self.ended = lambda: model, 0, 0

    def _assert_weight_cache_inactive(self, op: str) -> None: ...

    def original(self, _: Any, named: Any) -> tuple[bool, str]:
        if any(name == "unknown" for name, _ in named):
            return False, "no such tensor"
        self.own += 1
        self.get_model().load_weights(iter(named))
        return True, "Succeeded to update parameter online."

    def end(self, _: Any, *, run_post_load: bool) -> None:
        self.ended += 1


def test_what_a_model_derives_from_its_weights_it_derives_once_at_the_end_of_a_sync() -> None:
    from mslime.engine_plugin import copy_plan as plug_in

    class Derives(FakeModel):
        """As DeepSeek's attention: its own loader derives at once."""

        derived, times = torch.zeros(0), 0

        def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(named)
            self.post_load_weights()

        def post_load_weights(self) -> None:
            assert not torch.is_grad_enabled()
            self.derived, self.times = self.qk.data.float() * 2, self.times + 1

    model = Derives()
    updater = FakeUpdater(model)
    with torch.no_grad():
        for seed in (0, 1, 2):
            for part in (["q", "k"], ["up", "router", "scale"]):
                sent = {name: tensor for name, tensor in values(seed).items() if name in part}
                bucket = arrived(plug_in.buckets_of(updater), sent)
                assert plug_in.load(updater.original, updater, plug_in.ReceivedBucket(bucket))[0]
            assert model.times == (2 if seed == 0 else 2 + seed - 1)
            for _ in "ab":  # two plug-ins are hooked
                dispatch.end(updater.end, updater, run_post_load=False)
            assert torch.equal(model.derived, model.qk.data.float() * 2) and model.times == 2 + seed
    torch.testing.assert_close(model.state(), expected(values(2)), rtol=0, atol=0)
    assert updater.own == 2 and updater.ended == 6


def test_an_updater_records_once_and_says_how_it_loads() -> None:
    from mslime.engine_plugin import copy_plan as plug_in

    for loader, says in ((None, plug_in.RECORDED), (added, plug_in.OWN_LOADER + "aten.add_")):
        updater = FakeUpdater(FakeModel(loader))
        said = []
        refused = plug_in.ReceivedBucket(arrived(plug_in.buckets_of(updater), {"unknown": torch.zeros(3).bfloat16()}))
        assert [plug_in.load(updater.original, updater, refused) for _ in "ab"] == [(False, "no such tensor")] * 2
        for seed in (0, 1, 2):
            bucket = arrived(plug_in.buckets_of(updater), values(seed))
            loaded, message = plug_in.load(updater.original, updater, plug_in.ReceivedBucket(bucket))
            assert loaded
            said.append(message)
            torch.testing.assert_close(updater.get_model().state(), expected(values(seed), loader), rtol=0, atol=0)
        assert said[1].startswith(says) and said[1] == said[2] and updater.own == (1 if loader is None else 3)
    assert dispatch.load(updater.original, updater, [("unknown", torch.zeros(1))]) == (False, "no such tensor")


def test_no_updater_gets_the_buckets_of_one_that_is_gone() -> None:
    """Its `id` is free as soon as nothing refers to it, and the next one gets it."""
    from mslime.engine_plugin import copy_plan as plug_in

    model = FakeModel()
    assert len({id(plug_in.buckets_of(FakeUpdater(model))) for _ in range(20)}) == 20


def test_a_share_is_not_loaded_into_parameters_that_were_moved() -> None:
    from mslime.engine_plugin import copy_plan as plug_in

    updater = FakeUpdater(FakeModel())
    bucket = arrived(plug_in.buckets_of(updater), values(0))
    assert plug_in.load(updater.original, updater, plug_in.ReceivedBucket(bucket))[0]
    (copies,) = bucket.copies.values()
    packed = [view.clone() + 1 for view in copies.out_of]
    assert plug_in.load(updater.original, updater, plug_in.ReceivedBucket(bucket, packed=packed)) == (
        True,
        plug_in.RECORDED,
    )
    assert torch.equal(updater.get_model().up.data[:3], values(0)["up"][3:] + 1)
    updater.get_model().up.data = updater.get_model().up.data.clone()
    loaded, why = plug_in.load(updater.original, updater, plug_in.ReceivedBucket(bucket, packed=packed))
    assert not loaded and "were moved" in why and updater.own == 1
