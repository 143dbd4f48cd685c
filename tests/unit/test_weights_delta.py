"""The transport delta: what changed and nothing else, exact after many updates, refused wherever there is a doubt."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.config.base import version_name
from mslime.config.errors import WeightSyncError
from mslime.engine_plugin.copy_plan import BucketCopies, ReceivedBucket, SyncBuckets
from mslime.engine_plugin.copy_plan import RecordedBucket as EngineBucket
from mslime.engine_plugin.delta import changed as changed_by
from mslime.engine_plugin.delta import put, read_delta, record_loaded, take_back
from mslime.tensor_sums import word_sum
from mslime.weights import delta as weights_delta
from mslime.weights.delta import DeltaTransport, find_changes
from mslime.weights.transport import Link, MovedAmounts, find_transport
from mslime.weights.weight_plan import Bucket, BucketEntry
from tests.fixtures.stand_in_engine import StandInEngine
from tests.fixtures.weight_engines import check_contract, engines, infos, link, obedient

__all__ = ["engines", "link", "obedient"]

pytestmark = pytest.mark.timeout(120)

SIZES = {"float32": 20_011, "bfloat16": 50_003}
BITS = {"float32": (torch.float32, torch.int32, np.int32), "bfloat16": (torch.bfloat16, torch.int16, np.int16)}


def bucket_of(index: int, dtype: str) -> Bucket:
    entries = (BucketEntry(f"{dtype}.a", (SIZES[dtype] - 7,), 0), BucketEntry(f"{dtype}.b", (7,), SIZES[dtype] - 7))
    return Bucket(index, 0, 0, (0,), dtype, (), entries, entries, in_order=True)


BUCKETS = [bucket_of(index, dtype) for index, dtype in enumerate(SIZES)]


@pytest.fixture(params=["disk", "broadcast"])
def carried(link: Link, request: pytest.FixtureRequest) -> Link:
    """As `weights.delta_over` says."""
    return over(link, request.param)


def over(link: Link, carrier: str) -> Link:
    return replace(link, settings={"delta_over": carrier})


@pytest.fixture
def transport(carried: Link, engines: list[StandInEngine]) -> Iterator[DeltaTransport]:
    made = DeltaTransport(carried)
    made.connect(infos(engines))
    yield made
    made.disconnect()


def new_weights() -> dict[int, torch.Tensor]:
    torch.manual_seed(0)
    return {b.index: torch.randn(b.hf_numel).to(BITS[b.dtype][0]) for b in BUCKETS}


def change(weights: dict[int, torch.Tensor], fraction: float, seed: int) -> int:
    """Give a share of the elements other values; how many."""
    random, count = torch.Generator().manual_seed(seed), 0
    for flat in weights.values():
        chosen = torch.randperm(len(flat), generator=random)[: int(len(flat) * fraction)]
        bits = flat.view(torch.int16 if flat.itemsize == 2 else torch.int32)
        bits[chosen] ^= 1
        count += len(chosen)
    return count


def deliver(transport: DeltaTransport, version: int, weights: dict[int, torch.Tensor]) -> MovedAmounts:
    transport.begin(version, BUCKETS)
    for bucket in BUCKETS:
        if version % 2:  # as a sender's bucket_sender does, or without, as transports of users may
            transport.prepare_bucket(bucket, weights[bucket.index])
        transport.start(bucket, weights[bucket.index]).wait()
    transport.complete()
    return transport.moved()


def test_changes_are_noted_when_the_turn_was_passed_on(engines: list[StandInEngine], transport: DeltaTransport) -> None:
    """Before the next bucket is compared, and when all have arrived: nobody waits for it but the sender itself."""
    weights = new_weights()
    deliver(transport, 1, weights)
    change(weights, 0.01, 2)
    first, second = BUCKETS

    def noted(bucket: Bucket) -> bool:
        now = weights[bucket.index]
        return torch.equal(transport._sent[bucket.index].bits, now.view(BITS[bucket.dtype][1]))

    transport.begin(2, BUCKETS)
    transport.prepare_bucket(first, weights[first.index])
    transport.start(first, weights[first.index]).wait()
    assert not noted(first)
    transport.prepare_bucket(second, weights[second.index])
    assert noted(first)
    transport.start(second, weights[second.index]).wait()
    assert not noted(second)
    transport.complete()
    assert noted(second) and transport.moved().changed > 0
    assert_held(engines, weights)
    # Of a sync that broke after the last bucket: it is noted, under its own number, before the next one begins.
    change(weights, 0.01, 3)
    transport.begin(3, BUCKETS)
    for bucket in BUCKETS:
        transport.start(bucket, weights[bucket.index]).wait()
    transport.begin(4, BUCKETS)
    assert noted(first) and noted(second) and {sent.version for sent in transport._sent.values()} == {3}


def test_many_changes_are_noted_from_the_whole_bucket_at_once_unless_senders_take_turns(
    engines: list[StandInEngine], transport: DeltaTransport
) -> None:
    """The bucket's memory may be used again as soon as it has arrived."""
    weights = new_weights()
    deliver(transport, 1, weights)
    count = change(weights, 0.3, 2)
    transport.begin(2, BUCKETS)
    for bucket in BUCKETS:
        now, flat = weights[bucket.index].view(BITS[bucket.dtype][1]), weights[bucket.index].clone()
        transport.start(bucket, flat).wait()
        flat.zero_()
        assert torch.equal(transport._sent[bucket.index].bits, now) == transport.any_order
    transport.complete()
    assert (transport.moved().changed, transport.moved().elements) == (count, sum(SIZES.values()))
    for bucket in BUCKETS:
        sent = transport._sent[bucket.index]
        assert torch.equal(sent.bits, weights[bucket.index].view(BITS[bucket.dtype][1])) and sent.version == 2
    assert_held(engines, weights)
    deliver_changes(engines, transport, 3, weights)


def assert_held(engines: list[StandInEngine], weights: dict[int, torch.Tensor]) -> None:
    for engine in engines:
        held = engine.held()
        for bucket in BUCKETS:
            bits = BITS[bucket.dtype][1]
            found = torch.cat([held[entry.name] for entry in bucket.entries])
            assert torch.equal(found.view(bits), weights[bucket.index].view(bits)), (engine.url, bucket.index)


def deliver_changes(
    engines: list[StandInEngine], transport: DeltaTransport, version: int, weights: dict[int, torch.Tensor]
) -> MovedAmounts:
    """Change one element in a hundred and send that: all engines hold it then."""
    change(weights, 0.01, version)
    moved = deliver(transport, version, weights)
    assert_held(engines, weights)
    return moved


def assert_written(link: Link, expected: list[str]) -> None:
    """The files of the last version, where there are any."""
    assert link.directory is not None
    if link.settings["delta_over"] == "disk":
        assert sorted(path.name for path in link.directory.glob("*/version_*/*")) == expected


CHANGED = ["bucket_00000.changes.safetensors", "bucket_00001.changes.safetensors"]
WHOLE = ["bucket_00000.safetensors", "bucket_00001.safetensors"]


def test_changes_keep_the_contract_of_a_transport(engines: list[StandInEngine], carried: Link) -> None:
    check_contract(find_transport("delta"), carried, engines)


def test_fifty_updates_are_exact_and_move_what_changed(
    engines: list[StandInEngine], carried: Link, transport: DeltaTransport
) -> None:
    weights, whole = new_weights(), sum(bucket.hf_bytes for bucket in BUCKETS)
    assert deliver(transport, 1, weights) == MovedAmounts(whole)
    assert_written(carried, WHOLE)
    for version in range(2, 52):
        count = change(weights, (0.01, 0.05, 0.0)[version % 3], version)
        moved = deliver(transport, version, weights)
        # 4 bytes for where and 2 or 4 for what, of as many elements in each bucket as it has of all.
        assert (moved.changed, moved.elements) == (count, sum(SIZES.values())) and moved.bytes < 8 * count + 1
        assert_written(carried, CHANGED)
        if version % 10 == 0 or version == 51:
            assert_held(engines, weights)


def test_what_was_prepared_for_a_sync_that_broke_off_is_not_sent_in_the_next(
    engines: list[StandInEngine], transport: DeltaTransport
) -> None:
    weights = new_weights()
    deliver(transport, 1, weights)
    change(weights, 0.01, 1)
    transport.begin(2, BUCKETS)
    transport.prepare_bucket(BUCKETS[0], weights[0])
    change(weights, 0.01, 2)
    deliver(transport, 2, weights)
    assert_held(engines, weights)


def test_only_files_may_arrive_in_any_order(carried: Link) -> None:
    assert DeltaTransport(carried).any_order == (carried.settings["delta_over"] == "disk")


def test_more_changes_than_weights_go_as_a_whole_and_may_be_followed_by_changes(
    engines: list[StandInEngine], carried: Link, transport: DeltaTransport
) -> None:
    weights, whole = new_weights(), sum(bucket.hf_bytes for bucket in BUCKETS)
    deliver(transport, 1, weights)
    count = change(weights, 1.0, 1)
    assert deliver(transport, 2, weights) == MovedAmounts(whole, count, count)
    assert_written(carried, WHOLE)
    change(weights, 0.001, 2)
    deliver(transport, 3, weights)
    assert_held(engines, weights)
    assert_written(carried, CHANGED)


def test_the_same_version_again_and_another_connection_are_exact(
    engines: list[StandInEngine], carried: Link, transport: DeltaTransport
) -> None:
    weights = new_weights()
    deliver(transport, 1, weights)
    change(weights, 0.01, 1)
    deliver(transport, 2, weights)
    change(weights, 0.01, 2)
    deliver(transport, 2, weights)
    assert_held(engines, weights)
    transport.disconnect()
    transport.connect(infos(engines))
    change(weights, 0.01, 3)
    assert deliver(transport, 3, weights).elements == 0, "nobody knows what they hold"
    assert_held(engines, weights)


def test_an_engine_whose_parameters_were_changed_refuses_and_all_get_the_whole_bucket(
    engines: list[StandInEngine], transport: DeltaTransport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    weights = new_weights()
    deliver(transport, 1, weights)
    for version in (2, 4, 6):
        engines[1].change("float32.b")
        moved = deliver_changes(engines, transport, version, weights)
        assert f"parameters no longer match version_{version - 1:06d}" in caplog.text
        assert engines[1].url in caplog.text and "from now on" not in caplog.text
        assert moved.bytes > BUCKETS[0].hf_bytes and moved.elements == sum(SIZES.values())
        moved = deliver_changes(engines, transport, version + 1, weights)
        assert moved.bytes < BUCKETS[0].hf_bytes / 2, "changes are tried again"


def test_after_two_refusals_in_a_row_a_bucket_goes_as_a_whole_from_then_on(
    engines: list[StandInEngine], transport: DeltaTransport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    weights = new_weights()
    deliver(transport, 1, weights)
    for version in (2, 3, 4):
        engines[0].change("bfloat16.a")
        deliver_changes(engines, transport, version, weights)
    assert caplog.text.count("goes as a whole") == 2 and caplog.text.count("and from now on") == 1


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_changes_whose_sums_are_others_are_refused(
    engines: list[StandInEngine],
    transport: DeltaTransport,
    caplog: pytest.LogCaptureFixture,
    wrong: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.WARNING)
    weights, right, asked = new_weights(), weights_delta.word_sum, list[int]()
    deliver(transport, 1, weights)

    def of_another(tensor: torch.Tensor) -> int:
        asked.append(len(asked) % 3)
        return right(tensor) + (asked[-1] == wrong)

    monkeypatch.setattr(weights_delta, "word_sum", of_another)
    deliver_changes(engines, transport, 2, weights)
    assert "damaged" in caplog.text if wrong < 2 else "does not match the checksum" in caplog.text
    assert caplog.text.count("goes as a whole") == len(BUCKETS)


def test_a_failure_that_is_no_refusal_is_raised_and_nothing_is_sent_again(
    engines: list[StandInEngine], link: Link
) -> None:
    transport = DeltaTransport(link := over(link, "disk"))
    transport.connect(infos(engines))
    weights = new_weights()
    deliver(transport, 1, weights)
    change(weights, 0.01, 1)
    engines[1].set_mode("refuse")
    transport.begin(2, BUCKETS)
    with pytest.raises(WeightSyncError, match="bucket 0.*no weights today"):
        transport.start(BUCKETS[0], weights[0]).wait()
    assert_written(link, sorted([*WHOLE, CHANGED[0]]))  # version 1, and changes of it


# ---------------------------------------------------------------------------------------------------- what is different


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(sorted(BITS)), size=st.integers(0, 70), start=st.integers(0, 3), data=st.data(),
    chunk=st.sampled_from([5, 16, 1 << 24]),
)  # fmt: skip
def test_changes_are_those_that_numpy_finds_of_any_bits_size_and_address(
    dtype: str, size: int, start: int, data: st.DataObject, chunk: int
) -> None:
    _, bits, of_numpy = BITS[dtype]
    draw = st.lists(st.sampled_from([0, 1, -1, 0x7FC0, -0x8000]), min_size=size, max_size=size)
    before, now = (torch.tensor(data.draw(draw), dtype=torch.int64).to(bits) for _ in range(2))
    flat = torch.cat([torch.zeros(start, dtype=bits), now])[start:].view(BITS[dtype][0])
    expected = np.flatnonzero(before.numpy().view(of_numpy) != now.numpy().view(of_numpy))
    whole = weights_delta._CHUNK
    try:
        weights_delta._CHUNK = chunk
        count, found = find_changes(flat, before) if size else (0, None)
    finally:
        weights_delta._CHUNK = whole
    assert count == len(expected)
    if size and count * (4 + flat.itemsize) <= size * flat.itemsize:
        assert found is not None and found.index.tolist() == expected.tolist()
        assert torch.equal(found.value.view(bits), now[found.index])
    else:
        assert found is None


# -------------------------------------------------------------------------------------------------------- in an engine


def changed(path: Path, bucket: EngineBucket, model: torch.nn.Module) -> ReceivedBucket:
    """The bucket with the changes of a file."""
    return changed_by(read_delta(path), path.parent, bucket, model)


class Holding(torch.nn.Module):
    """Holds the second half of one tensor and all of another, as one of two ranks does."""

    def __init__(self, *, half: bool) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(4 if half else 8))
        self.second = torch.nn.Parameter(torch.zeros(3))


def loaded(half: bool, version: Path) -> tuple[EngineBucket, Holding]:
    """A model that has loaded 0, 1, .. 10 and recorded how."""
    model = Holding(half=half)
    bucket = SyncBuckets("cpu").of(["a", "b"], ["float32"] * 2, [[8], [3]])
    first, second = (tensor for _, tensor in bucket.named)
    into, out_of = [model.first.data, model.second.data], [first[4:] if half else first, second]
    bucket.copies[id(model)] = BucketCopies(model, into, out_of)
    bucket.flat.view(torch.float32).copy_(torch.arange(11.0))
    bucket.copies[id(model)].make()
    record_loaded(bucket, model, version)
    return bucket, model


def written(path: Path, base: int, index: list[int], value: torch.Tensor, total: int) -> Path:
    from safetensors.torch import save_file

    where = torch.tensor(index, dtype=torch.int32)
    sums = torch.tensor([base, word_sum(where), word_sum(value), total])
    path.parent.mkdir(exist_ok=True)
    save_file({"sums": sums, "index": where, "value": value}, path)
    return path


def after(index: list[int], value: torch.Tensor) -> torch.Tensor:
    result = torch.arange(11.0)
    result[index] = value
    return result


@pytest.mark.parametrize("half", [False, True])
def test_changes_are_put_into_what_the_model_holds(half: bool, tmp_path: Path) -> None:
    bucket, model = loaded(half, tmp_path / version_name(4))
    index, value = [1, 5, 10], torch.tensor([-1.0, -5.0, float("nan")])
    expected = after(index, value)
    bucket.flat.fill_(77)  # the buffer has been used for others meanwhile
    path = written(tmp_path / version_name(5) / "x", 4, index, value, word_sum(expected))
    received = changed(path, bucket, model)
    bucket.copies[id(model)].make()
    held = expected[4:8] if half else expected[:8]
    assert torch.equal(model.first.data, held) and torch.equal(
        model.second.data.view(torch.int32), expected[8:].view(torch.int32)
    )
    assert received.then is not None
    received.then()
    assert bucket.loaded_version is not None and bucket.loaded_version.version == tmp_path / version_name(5)
    again = written(tmp_path / version_name(6) / "x", 5, [9], torch.tensor([2.0]), word_sum(after([9], 2.0)))
    if half:  # it cannot tell: only a part of the bucket is its own
        changed(again, bucket, model)
    else:
        with pytest.raises(ValueError, match="does not match the checksum"):
            changed(again, bucket, model)


def test_whatever_does_not_belong_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    bucket, model = loaded(False, tmp_path / version_name(4))
    one, place = torch.tensor([1.0]), tmp_path / version_name(5) / "x"
    right = word_sum(after([1], one))

    def refused(path: Path, why: str) -> None:
        with pytest.raises(ValueError, match=why):
            changed(path, bucket, model)

    refused(written(place, 3, [1], one, right), "belong to version_000003, and this engine has .*version_000004")
    refused(written(place, 4, [11], one, right), "beyond the bucket's 11")
    refused(written(place, 4, [-1], one, right), "beyond the bucket's 11")
    refused(written(place, 4, [1], one.bfloat16(), right), "bfloat16, and the bucket is torch.float32")
    refused(written(place, 4, [1], one, right + 1), "does not match the checksum")
    refused(written(place, 4, [1, 2], one, right), "is damaged")
    whole = written(place, 4, [1], one, right).read_bytes()
    for at in range(len(whole) - 8, len(whole)):  # the index and the value
        place.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        refused(place, "is damaged")
    for damaged in (whole[:-1], b"", b"\xff" * 64):
        place.write_bytes(damaged)
        refused(place, "is not a file of changes")
    place.unlink()
    with pytest.raises(FileNotFoundError):
        changed(place, bucket, model)
    written(place, 4, [1], one, right)
    model.second.data[2] = 5.5
    refused(place, "no longer match version_000004")
    model.second.data[2] = 10.0
    bucket.loaded_version = None
    refused(place, "this engine has None")
    model.first = torch.nn.Parameter(torch.zeros(8))
    refused(place, "copies are not recorded")
    record_loaded(bucket, model, place.parent)
    assert bucket.loaded_version is None and model.second.data.tolist() == [8.0, 9.0, 10.0]


def test_a_model_whose_loader_does_more_than_copy_says_why(tmp_path: Path) -> None:
    bucket, model = loaded(False, tmp_path / version_name(4))
    bucket.copies[id(model)].why_not = "it derives tensors"
    path = written(tmp_path / version_name(5) / "x", 4, [1], torch.tensor([1.0]), 0)
    with pytest.raises(ValueError, match="copies are not recorded: it derives tensors"):
        changed(path, bucket, model)


def test_what_is_taken_back_of_a_part_has_zeros_for_the_rest(tmp_path: Path) -> None:
    bucket, model = loaded(True, tmp_path / version_name(4))
    bucket.flat.fill_(9)
    total = take_back(bucket, bucket.copies[id(model)])
    expected = torch.tensor([0.0] * 4 + list(range(4, 11)))
    assert torch.equal(bucket.flat.view(torch.float32), expected) and total == word_sum(expected)


def test_no_changes_at_all_are_a_version_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path / version_name(5) / "x", 4, [], torch.zeros(0), 7)
    changes = read_delta(path)
    assert (changes.version, changes.total, len(changes.index)) == (4, 7, 0)
    bucket, _ = loaded(False, tmp_path / version_name(4))
    put(changes, bucket)
    assert bucket.flat.view(torch.float32).tolist() == list(range(11))


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_word_sum_is_that_of_its_bytes(start: int) -> None:
    raw = torch.randint(0, 256, (start + 1003,), dtype=torch.uint8)[start:]
    data = bytes(raw.tolist())
    words = [int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, 1000, 8)]
    expected = (sum(words) + sum(data[1000:]) + 2**63) % 2**64 - 2**63
    assert word_sum(raw) == expected
    assert word_sum(torch.full((4,), -1, dtype=torch.int64)) == -4
    assert word_sum(torch.full((2,), 2**63 - 1, dtype=torch.int64)) == -2
    assert word_sum(torch.tensor([255] * 7 + [127, 1], dtype=torch.uint8)) == -(2**63), "the tail goes around too"
