"""The records that an engine's plug-in is asked with, and the table of who replies; what loads weights is elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest

from mslime.backends.cpu.sglang import SGLANG_VERSION
from mslime.config.keys import BucketVersion
from mslime.engine_plugin import dispatch, wire
from mslime.engine_plugin.copy_plan import ReceivedBucket, SyncBuckets
from mslime.engine_plugin.relay import RelayedBucket
from mslime.engine_plugin.wire import HostSlices, Slice

CUTS = HostSlices.of([None, ((Slice(3, 4, (2, 5), (70, 8)), Slice(0, 1)), ())])
RECORDS: tuple[wire.Record, ...] = (
    wire.FromFile("mapped", Path("/dev/shm/a:b {}")),
    wire.FromBroadcast(BucketVersion(4, 3, 17, (-(1 << 63), 2, (1 << 63) - 1))), wire.FromBroadcast(BucketVersion(4)),
    wire.RelaySync("job-rank0-3", "plan", ("job-rank0", "job:rank4"), ((0,), (1, 0)), (2, 1), "kept"), wire.Ping(),
    wire.ReadDirectory(Path("/weights")), wire.ForgetDirectory(Path("/weights")),
    wire.ReadMemory(Path("rdma/host:1/5"), bytes(range(5)).hex()), wire.CheckIpc(), wire.TakeIpc({"GPU-a": "ipc://@a"}),
    wire.JoinRelayGroup(3, wire.JoinGroup("a:b", "::1", 5, 2, 4, "gloo"), 0),
    wire.JoinRelayGroup(3, wire.JoinGroup("a:b", "::1", 5, 2, 4, "gloo")), wire.WeightChecksums(),
    wire.AdapterChecksums("code-v1"), wire.ReleasedMemory(), wire.Answer("it is not there"),
    wire.Loaded("loaded: \n all", CUTS), wire.Loaded("loaded"), wire.Sums(({"a": "1 -2"}, {"": "no copies"})),
    wire.Released(frozenset({"weights"}), "requests are running"),
    wire.IpcBucket(("a", "b"), ("bfloat16", "float32"), ((2, 3), ())),
)  # fmt: skip


def test_every_record_is_read_as_it_was_written() -> None:
    assert {type(record) for record in RECORDS} == set(get_args(wire.Record))
    for record in RECORDS:
        assert wire.decode(wire.encode(record)) == record


@pytest.mark.parametrize("text", [None, "", "checksum", "flattened_bucket", "run-1234-rank0"])
def test_what_is_not_ours_is_no_record(text: str | None) -> None:
    assert wire.decode(text) is None


@pytest.mark.parametrize("text", ["mslime:Nothing {}", "mslime:AdapterChecksums {}", "mslime:Ping"])
def test_a_record_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Nothing|name|JSON"):
        wire.decode(text)


def test_sums_are_read_as_they_were_written() -> None:
    assert wire.parse_sum(wire.format_sum(-3, 5)) == (-3, 5)
    assert wire.parse_sum("a parameter has other values") is None and wire.parse_sum("") is None


def test_every_request_has_a_handler_and_the_hooks_are_of_the_pinned_sglang() -> None:
    assert set(dispatch.HANDLERS) == set(get_args(wire.Request))
    assert dispatch.READ_IN == SGLANG_VERSION, "read the hooked methods in this version"


# ------------------------------------------------------------------------------------------------------------- hooks


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A FAKE of the module whose output type is answered."""
    module: Any = ModuleType("sglang.srt.managers.io_struct")
    module.CheckWeightsReqOutput = SimpleNamespace
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def asked(action: str, handlers: Mapping[Any, Any] = dispatch.HANDLERS) -> SimpleNamespace:
    def original(manager: Any, request: Any) -> SimpleNamespace:
        return SimpleNamespace(success=True, message=f"SGLang's own {request.action}")

    manager = SimpleNamespace(offload_tags={"weights"})
    return dispatch.check_weights(original, manager, SimpleNamespace(action=action))


def test_a_request_is_answered_with_its_reply_and_an_action_of_sglangs_by_sglang() -> None:
    answer = asked(wire.encode(wire.ReleasedMemory()))
    assert answer.success and wire.decode(answer.message) == wire.Released(frozenset({"weights"}))
    assert asked("checksum").message == "SGLang's own checksum"


@pytest.mark.parametrize(
    ("error", "message"), [(RuntimeError("rank 1: no"), "rank 1: no"), (KeyError("a"), "KeyError: 'a'")]
)
def test_what_a_handler_raises_is_an_answer(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(manager: Any, request: Any) -> wire.Reply:
        raise error

    monkeypatch.setattr(dispatch, "HANDLERS", {wire.Ping: fails})
    answer = asked(wire.encode(wire.Ping()))
    assert not answer.success and answer.message == message


def test_a_record_of_another_version_of_mslime_is_refused_and_not_raised() -> None:
    answer = asked("mslime:Later {}")
    assert not answer.success and "the versions of mslime on both sides differ" in answer.message


def loaded_by_model(updater: Any, named: Any) -> tuple[bool, str]:
    return True, f"SGLang's own {len(named)}"


def test_the_models_loader_takes_buckets_if_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = SyncBuckets("cpu").of(["a"], ["float32"], [[2]])
    monkeypatch.setattr(dispatch, "RECORDS", False)
    loaded, how = dispatch.load(loaded_by_model, None, ReceivedBucket(bucket))
    assert loaded and how.startswith(wire.OWN_LOADER)
    assert dispatch.load(lambda *_: (False, "no"), None, []) == (False, "no")
    assert wire.CANNOT in dispatch._weight_checksums(None)


def test_a_sync_that_was_relayed_is_answered_by_the_updater_that_loaded_it() -> None:
    updater, done = SimpleNamespace(), wire.Loaded(wire.RECORDED, CUTS)
    loaded, message = dispatch.load(loaded_by_model, updater, RelayedBucket(id(updater), done))
    assert loaded and wire.decode(message) == done
    loaded, message = dispatch.load(loaded_by_model, SimpleNamespace(), RelayedBucket(id(updater), done))
    assert not loaded and "draft model" in message


def test_weights_that_come_otherwise_are_received_by_sglang() -> None:
    told: dict[str, Any] = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}
    updater = SimpleNamespace(_model_update_group={})
    for load_format in (None, wire.FLAT):  # the second in a group that is not there, of which SGLang tells
        more = told | {"group_name": "g", "load_format": load_format}
        assert dispatch.receive(lambda updater, **given: given, updater, **more) == more
