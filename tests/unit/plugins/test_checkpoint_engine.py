"""The transport checkpoint_engine: trainer ranks over gloo with a fake ParameterServer and, where the package is
installed, with its own code on CPUs. CUDA's handles were run by nothing."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mslime.config.errors import WeightSyncError
from mslime.config.keys import EngineInfo
from mslime.engine_plugin import bucket_files, wire
from mslime.engine_plugin.engine_ranks import EngineRankGroup
from mslime.network import free_port
from mslime.weights.transport import CollectiveTransport, EnginePort, Link, find_transport
from mslime_plugins.transports import checkpoint_engine
from mslime_plugins.transports.checkpoint_engine import VERSION, CheckpointEngineTransport
from tests.fixtures.parameter_servers import Case, FakeParameterServer, Outcome, run_ranks
from tests.fixtures.stand_in_engine import StandInEngine
from tests.fixtures.weight_engines import engines, link
from tests.unit.weights_world import moe_table, whole_tensors

__all__ = ["engines", "link"]

with_package = pytest.mark.skipif(
    importlib.util.find_spec("checkpoint_engine") is None, reason=f"needs checkpoint-engine {VERSION}"
)
both = pytest.mark.parametrize("package", ["fake", pytest.param("real", marks=with_package)])
pytestmark = pytest.mark.timeout(240)
WHOLE = whole_tensors(moe_table())
ENTERED = ["gather_metas", "update"]


def run(**case: Any) -> list[Outcome]:
    return run_ranks(Case(**case), free_port())


@pytest.mark.slow
@both
@pytest.mark.parametrize("senders", [1, 2])
def test_all_ranks_take_part_and_every_rank_of_the_engine_holds_all_weights_again_and_again(
    package: str, senders: int
) -> None:
    outcomes = run(package=package, senders=senders, syncs=2, connects=2)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert [outcome.entered for outcome in outcomes] == [ENTERED * 4] * 2  # also who sends nothing
    assert len(outcomes[0].held) == 4 and outcomes[1].addresses == []  # one rank asks
    # A rank of an engine that still waits for an older server hears no newer one.
    assert len({address for each in outcomes[0].addresses for address in each.values()}) == 8
    for version, ranks in enumerate(outcomes[0].held):
        for held in ranks:
            assert held.keys() == WHOLE.keys()
            assert all(torch.equal(held[name], WHOLE[name] * 2**version) for name in WHOLE)


@both
@pytest.mark.parametrize(
    ("fault", "senders", "words"),
    [
        ("rank 0 cannot fill", 2, ["trainer rank 0", "a shard is missing"]),
        ("rank 1 cannot fill", 2, ["trainer rank 1", "a shard is missing"]),
        ("rank 1 cannot fill", 1, ["trainer rank 1", "a shard is missing"]),  # one that sends nothing
        ("rank 1 cannot pin", 2, ["trainer rank 1", "out of memory"]),
        ("the engine lacks the package", 1, ["the engine lacks it"]),
    ],
)
def test_what_fails_before_ends_the_sync_on_all_and_none_enters_a_collective(
    package: str, fault: str, senders: int, words: list[str]
) -> None:
    if package == "real" and fault.startswith("the engine"):
        pytest.skip("the real one is installed")
    outcomes = run(package=package, senders=senders, fault=fault)
    assert [outcome.entered for outcome in outcomes] == [[], []]
    assert all(word in one.error for one in outcomes for word in words)


@both
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("engine refuses", ["it has no time"]),
        pytest.param("engine is silent", ["does not answer in time"], marks=pytest.mark.slow),
        ("rank 1 dies", ["dead or unreachable"]),
        ("engine fails at the end", ["it is not flushed"]),
        ("rank 1 loads nothing", ["the engine on the GPU of trainer rank 1", "no room"]),
        ("rank 1 lacks the package", ["trainer rank 1", "mslime[checkpoint-engine]"]),
    ],
)
def test_what_fails_in_a_sync_is_raised_on_all_ranks_within_the_deadline(
    package: str, fault: str, words: list[str]
) -> None:
    outcomes = run(package=package, fault=fault, **({"deadline_s": 6} if fault == "engine is silent" else {}))
    assert all(word in one.error for one in outcomes for word in words)
    if fault == "engine refuses":
        assert [outcome.entered for outcome in outcomes] == [ENTERED, ENTERED]
    if fault == "rank 1 dies":
        assert outcomes[0].held[-1][0].keys() < WHOLE.keys(), "the other rank was sent no more"
    if fault == "engine fails at the end":
        assert all(one.held[-1] for one in outcomes)


def link_of(ranks: int = 2, rank: int = 0) -> Link:
    def ask(engine: EngineInfo, request: object, hint: str) -> Future[wire.Answer]:
        assert request == wire.CheckIpc()
        done: Future[wire.Answer] = Future()
        done.set_result(wire.Answer())
        return done

    engine_port = cast(EnginePort, SimpleNamespace(ask=ask))
    return Link("l", "gloo", 5, engine_port, "g", rank, senders={0: "l"}, ranks=ranks)


@pytest.mark.parametrize(
    ("engine", "ranks", "said", "hint"),
    [
        (EngineInfo("http://127.0.0.1:1", 2, drafts=True), 2, "draft model", "without one"),
        (EngineInfo("http://127.0.0.1:1", 2), 4, "4 trainer ranks", "resume the run"),
        (EngineInfo("http://127.0.0.1:1", 2), 2, "0 of 0", "its own GPU"),
    ],
)
def test_engines_that_cannot_be_handed_weights_are_refused(
    engine: EngineInfo, ranks: int, said: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_engine, "_package", lambda: None)
    transport = find_transport("checkpoint_engine")(link_of(ranks))
    assert isinstance(transport, CollectiveTransport)
    transport.connect([engine])
    with pytest.raises(WeightSyncError, match=said) as caught:
        transport.offer()
    assert caught.value.field == "weights.transport" and hint in caught.value.hint


def test_servers_from_elsewhere_find_the_address_where_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_engine, "own_address", lambda url: url.removeprefix("http://"))
    near, far = EngineInfo("http://127.0.0.1"), EngineInfo("http://10.0.0.1")
    assert checkpoint_engine._outward([near, far]) == "10.0.0.1" and checkpoint_engine._outward([near]) == "127.0.0.1"


def test_the_package_finds_its_rank_and_no_mooncake_and_buckets_of_our_size(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ModuleType("mooncake.engine")
    monkeypatch.setitem(sys.modules, "mooncake.engine", there)
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("PS_MAX_BUCKET_SIZE_GB", "8")
    with checkpoint_engine._as_the_package_wants_it(replace(link_of(rank=1), bucket_bytes=1 << 29)):
        assert os.environ["RANK"] == "1" and float(os.environ["PS_MAX_BUCKET_SIZE_GB"]) == 0.5
        with pytest.raises(ImportError):
            importlib.import_module("mooncake.engine")
    assert os.environ["RANK"] == "7" and sys.modules["mooncake.engine"] is there


def test_another_version_of_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "checkpoint_engine", SimpleNamespace(__version__="0.4.3"))
    transport = CheckpointEngineTransport(link_of())
    transport.connect([EngineInfo("http://127.0.0.1:1", 2)])
    with pytest.raises(WeightSyncError, match=rf"0\.4\.3 is installed; required is {VERSION}"):
        transport.offer()


def test_the_extra_is_the_version_that_is_asked_for() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert f'checkpoint-engine = ["checkpoint-engine=={VERSION}"]' in text


@with_package
def test_the_fake_has_the_signatures_of_the_packages_own() -> None:
    from checkpoint_engine.ps import ParameterServer  # pyright: ignore

    real: Any = ParameterServer
    for name in ("__init__", "register_checkpoint", "unregister_checkpoint", "gather_metas", "update"):
        own, fake = (inspect.signature(getattr(each, name)).parameters for each in (real, FakeParameterServer))
        assert list(own) == list(fake)
        assert [each.kind for each in own.values()] == [each.kind for each in fake.values()]
    source = inspect.getsource(real)
    assert "def _bind_zmq_socket(self)" in source and "self._zmq_addr_counter" in source
    assert "_bind_zmq_socket()" in source and 'os.getenv("PS_MAX_BUCKET_SIZE_GB"' in source


# ------------------------------------------------------------------------------------------------------ in an engine


class Worker:
    """In the place of SGLang's end: what it loads is given to the loader; it notes what it was asked for."""

    loaded: tuple[tuple[str, torch.Tensor], ...] = ()
    hooks: list[object] = []

    def __init__(self, runner: object) -> None:
        self.runner = runner

    def get_device_uuid(self) -> str:
        return "GPU-a"

    def get_model_loader(self) -> Any:
        raise AssertionError("the model's own loader takes no bucket")

    def get_post_hook(self) -> Any:
        raise AssertionError("the session's end finishes the weights")

    def update_weights_from_ipc(self, addresses: dict[str, str]) -> None:
        self.get_model_loader()(self.loaded)
        self.hooks.append(self.get_post_hook())


@pytest.fixture
def end(monkeypatch: pytest.MonkeyPatch) -> type[Worker]:
    ours = type("Ours", (Worker,), {"hooks": []})
    module = SimpleNamespace(SGLangCheckpointEngineWorkerExtensionImpl=ours)
    monkeypatch.setitem(sys.modules, bucket_files._ENDS_MODULE, module)
    monkeypatch.setattr(bucket_files, "all_ranks", EngineRankGroup)
    return ours


def take(*gpus: str) -> wire.Loaded:
    return bucket_files.take_ipc("updater", "runner", wire.TakeIpc(dict.fromkeys(gpus, "ipc://@there")))


def test_buckets_are_loaded_in_the_place_of_the_models_loader_and_finished_by_the_session(
    end: type[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[str] = []
    monkeypatch.setattr(bucket_files, "load_bucket", lambda updater, name, flat: came.append(name) or f"loaded {name}")
    end.loaded = (("first", torch.zeros(1)), ("second", torch.zeros(1)))
    assert take("GPU-a") == wire.Loaded("loaded second")
    assert came == ["first", "second"] and end.hooks == [None]


def test_an_engine_on_another_gpu_connects_to_nobody(end: type[Worker]) -> None:
    with pytest.raises(RuntimeError, match="none of 1 trainer ranks is on GPU-a"):
        take("GPU-b")
    assert end.hooks == []


def test_what_fails_in_an_engine_is_told_in_its_words(end: type[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> str:
        raise ValueError("no room")

    monkeypatch.setattr(bucket_files, "load_bucket", fails)
    end.loaded = (("first", torch.zeros(1)),)
    with pytest.raises(RuntimeError, match="ValueError: no room"):
        take("GPU-a")


def test_an_engine_says_whether_the_package_is_there(end: type[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    assert bucket_files.check_ipc() == wire.Answer()
    monkeypatch.setitem(sys.modules, bucket_files._ENDS_MODULE, cast(Any, None))
    assert bucket_files.UNABLE in bucket_files.check_ipc().why_not


# ------------------------------------------------------------------------------------------------- asking an engine


def test_a_server_without_the_package_or_the_plug_in_is_named_with_the_way_out(
    engines: list[StandInEngine], link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mode, said, hint in (
        ("obey", bucket_files.UNABLE, "`checkpoint-engine`"), ("no plug-in", "without mslime's plug-in", "path_entry"),
    ):  # fmt: skip
        engines[0].set_mode(mode)
        with pytest.raises(WeightSyncError, match=said) as caught:
            link.engine_port.ask(EngineInfo(engines[0].url), wire.CheckIpc(), checkpoint_engine._FOR_ENGINES).result()
        assert caught.value.value == engines[0].url and hint in caught.value.hint


def test_an_engine_is_given_all_addresses_and_what_it_replies_is_noted(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    async def ask(request: object, reply: type) -> wire.Loaded:
        asked.append(request)
        return wire.Loaded("loaded by recorded copies")

    engine_port: Any = link.engine_port
    monkeypatch.setattr(engine_port, "_client", lambda engine: SimpleNamespace(ask=ask))
    engine_port.ask(EngineInfo("http://e"), wire.TakeIpc({"GPU-a": "ipc://@a"})).result()
    assert asked == [wire.TakeIpc({"GPU-a": "ipc://@a"})]
    assert engine_port.reports == {("http://e", "loaded by recorded copies")}


def test_a_link_knows_how_many_ranks_the_trainer_has() -> None:
    assert replace(link_of(), ranks=8).ranks == 8 and Link("l", "gloo", 5, link_of().engine_port).ranks == 1
