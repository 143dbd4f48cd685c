"""Weights sent by real Megatron ranks arrive in a real SGLang server, bit for bit, with their version."""

from __future__ import annotations

import importlib.util
import resource
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch
import torch.distributed as dist

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.backends.sglang.port import SGLangPort
from mslime.backends.sglang.server_process import ServerPart, ServerProcess
from mslime.config.base import FileKind
from mslime.config.errors import WeightSyncError
from mslime.config.keys import Endpoint, EngineInfo, EngineKeys
from mslime.config.resolved import engine_spec
from mslime.convert.hf import HFCheckpoint, copy_side_files
from mslime.engine_plugin import wire
from mslime.engine_plugin.wire import RECORDED
from mslime.network import free_port
from mslime.remote_memory import MemoryEndpoint
from mslime.weights.delta import DeltaTransport
from mslime.weights.sync import WeightSender
from mslime.weights.transport import MovedAmounts, Pending, Transport
from mslime.weights.weight_plan import Bucket
from tests.engines.conftest import SharedServer, cpu_run, serve
from tests.engines.trainer_ranks import make_config, run_trainers
from tests.fixtures.engine_calls import with_pool
from tests.fixtures.tiny_models import make_tiny_qwen3_moe
from tests.fixtures.weight_engines import left_in_shared_memory

pytestmark = pytest.mark.timeout(240, func_only=True)  # the first test waits for the server

PROMPT = list(range(40, 90))
UNREADABLE_BYTES = 16
BUCKETS = {"weights": {"bucket_mib": 0.05}}  # many buckets for a small model
needs_mooncake = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None, reason="mooncake-transfer-engine-non-cuda is missing"
)


@pytest.fixture(scope="module")
def checkpoint(tiny_qwen3_moe: Path) -> Path:
    return tiny_qwen3_moe


@pytest.fixture(scope="module")
def own_weights_afterwards(sglang_server: SharedServer) -> Iterator[None]:
    yield
    sglang_server.make_sound()
    sglang_server.restore()


@pytest.fixture
def engine(sglang_server: SharedServer, own_weights_afterwards: None) -> Endpoint:
    """The shared server: after a failed test another one, at another port."""
    return sglang_server.endpoint


def config_of(checkpoint: Path, output: Path, transport: str = "broadcast", over: str = "disk", **sizes: Any) -> Any:
    config = make_config(checkpoint, output, **sizes)
    weights = {**BUCKETS["weights"], "transport": transport, "delta_over": over, "mooncake_over": "tcp"}
    return config.model_copy(update={"weights": config.weights.model_copy(update=weights)})


def change_weights(trainer: MegatronTrainer, amount: float) -> None:
    """Scale every tensor by a specific factor, the same on every rank that holds a part of it."""
    with torch.no_grad():
        for name, parameter in trainer.named_local_params():
            parameter.mul_(1 + amount * (1 + zlib.crc32(name.encode()) % 5))


def publish(sender: WeightSender, version: int, rank: int, check: bool = True, end: bool = True) -> int:
    """begin, send, compare, end, stamp, as control drives them; the number of tensors compared.

    Args:
        end: False forgets the end.
    """
    engines, compared = sender.engines, 0
    if rank == 0:
        with_pool(engines, lambda pool: pool.begin_update())
    dist.barrier()
    try:
        report = sender.send(version, verify=check)
        if rank == 0 and check:
            compared = with_pool(engines, lambda pool: pool.compare(report.expected, strict=True))
            assert compared == len(engines) * len(report.expected)
    finally:
        if rank == 0 and end:
            with_pool(engines, lambda pool: pool.end_update())
    if rank == 0:
        with_pool(engines, lambda pool: pool.stamp(version))
    return compared


def sender_of(trainer: MegatronTrainer) -> WeightSender:
    """As control makes it."""
    return trainer.weight_sender(SGLangPort(trainer.spec.deadlines))


def sync_twice(trainer: MegatronTrainer, engine: Endpoint, version: int, export: Path) -> tuple[int, int]:
    """Two syncs over one connection, the second with newer weights, which are also exported; (compared, buckets).

    The second sync uses the engine's records of the first.
    """
    rank, engine_port = trainer.parallel.rank, SGLangPort(trainer.spec.deadlines)
    sender = trainer.weight_sender(engine_port)
    sender.connect([engine])
    change_weights(trainer, 0.01)
    publish(sender, version - 1, rank, check=False)
    first = {said for _, said in engine_port.reports}
    change_weights(trainer, -0.004 * version)
    compared = publish(sender, version, rank)
    if first:  # of a rank that sends
        (said,) = {said for _, said in engine_port.reports if said.startswith(RECORDED)}
        assert {said for _, said in engine_port.reports} - first <= {said}
        (info,) = sender.engines
        several = trainer.spec.weights.transport == "relay" and info.ranks > info.machines
        assert ("each rank's share of" in said) is several
    sender.disconnect()
    sender.export(export, trainer.spec.checkpoint)
    return compared, len(sender.plan.buckets)


def post(engine: Endpoint, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(engine.url + path, json=body, headers=engine.keys.headers(path), timeout=60).raise_for_status()
    return answer.json() if answer.text.startswith("{") else answer.text


def parameters_of(engine: Endpoint) -> list[dict[str, str]]:
    """SGLang's own digests of all parameters, by rank."""
    return [rank["checksums"] for rank in post(engine, "/weights_checker", {"action": "checksum"})["ranks"]]


def are_those_of(engine: Endpoint, exported: Path) -> bool:
    """Whether an engine's parameters equal, bit for bit, those that its model's own loader reads from a checkpoint on
    disk. The engine loads that checkpoint for the comparison."""
    held = parameters_of(engine)
    post(engine, "/update_weights_from_disk", {"model_path": str(exported)})
    return held == parameters_of(engine)


def tensors_of(checkpoint: Path) -> int:
    """How many a checkpoint has."""
    return len(HFCheckpoint(checkpoint).info)


def engine_log_probs(engine: Endpoint, new_tokens: int = 1) -> tuple[torch.Tensor, dict[str, Any]]:
    """log p of PROMPT's tokens from the second on, as the engine computes them now; continued greedily."""
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    post(engine, "/flush_cache", {})
    meta = post(engine, "/generate", body)["meta_info"]
    return torch.tensor([entry[0] for entry in meta["input_token_logprobs"][1:]]), meta


def transformers_log_probs(path: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        return model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]


@pytest.mark.parametrize(
    ("version", "sizes"),
    [
        (2, {}),
        (4, {"tp": 2, "ep": 2}),
        (6, {"pp": 2}),
        (8, {"dp": 2, "ep": 2}),
        (14, {"transport": "shm", "dp": 2, "ep": 2}),
        (20, {"transport": "handles", "dp": 2, "ep": 2}),
        pytest.param(22, {"transport": "mooncake", "dp": 2, "ep": 2}, marks=needs_mooncake),
        (16, {"transport": "disk", "dp": 2, "ep": 2}),
        (18, {"transport": "relay", "tp": 2, "ep": 2}),
    ],
    ids=[
        "1 process",
        "tp2 ep2",
        "pp2",
        "dp2 ep2",
        "shm dp2 ep2",
        "handles dp2 ep2",
        "mooncake dp2 ep2",
        "disk dp2 ep2",
        "relay tp2 ep2",
    ],
)
def test_the_engine_serves_the_trainers_weights_under_their_version(
    checkpoint: Path, engine: Endpoint, tmp_path: Path, version: int, sizes: dict[str, Any]
) -> None:
    before, _ = engine_log_probs(engine)
    config = config_of(checkpoint, tmp_path, **sizes)
    results = run_trainers(sync_twice, config, engine, version, tmp_path / "exported")
    compared, buckets = results[0]
    assert buckets > 5 and compared == tensors_of(checkpoint) == 3 + 4 * (9 + 3 * 8)
    after, meta = engine_log_probs(engine)
    expected = transformers_log_probs(tmp_path / "exported")
    assert float((after - expected).abs().max()) < 1e-4
    assert float((after - before).abs().max()) > 1e-3, "the weights changed enough to tell"
    assert meta["weight_version"] == str(version)
    assert are_those_of(engine, tmp_path / "exported")
    assert not left_in_shared_memory()
    if sizes.get("transport") == "disk":
        assert torch.equal(transformers_log_probs(whole_version(config, checkpoint)), expected)


def whole_version(config: Any, source: Path) -> Path:
    """The version that `disk` left, made a checkpoint that others can load."""
    (found,) = config.run_dir.glob("weights/*/version_*")
    copy_side_files(source, found)
    return found


def sync_to_two_ranks(trainer: MegatronTrainer, engine: Endpoint, export: Path) -> list[str]:
    """Two syncs, and what buckets are answered that both ranks cannot read, and (mooncake) the second one alone."""
    engine_port = SGLangPort(trainer.spec.deadlines)
    sender = trainer.weight_sender(engine_port)
    sender.connect([engine])
    for version in (1, 2):
        change_weights(trainer, 0.01)
        publish(sender, version, 0, check=False)
    assert RECORDED not in {said for _, said in engine_port.reports}
    (info,) = sender.engines
    said = [refusal_of(engine_port, info, "mapped", Path("/dev/shm/nowhere"))]
    if trainer.spec.weights.transport == "mooncake":
        end, room = MemoryEndpoint("127.0.0.1", "tcp"), torch.ones(UNREADABLE_BYTES // 2, dtype=torch.uint8)
        said.append(refusal_of(engine_port, info, "remote", end.share(room.data_ptr(), room.numel()).as_path()))
    sender.disconnect()
    sender.export(export, trainer.spec.checkpoint)
    return said


def refusal_of(engine_port: SGLangPort, engine: EngineInfo, kind: FileKind, place: Path) -> str:
    """What an engine answers to a bucket of UNREADABLE_BYTES that does not lie there, or lies there in part."""
    bucket = SimpleNamespace(names=["a"], dtypes=["float32"], shapes=[[UNREADABLE_BYTES // 4]])
    with_pool([engine], lambda pool: pool.begin_update())
    with pytest.raises(WeightSyncError) as caught:
        engine_port.load(engine, wire.update_request([bucket], load=wire.FromFile(kind, place))).result()
    with_pool([engine], lambda pool: pool.end_update())
    return str(caught.value)


@pytest.mark.nightly
@pytest.mark.timeout(500)  # a server of its own
@pytest.mark.parametrize("transport", ["shm", pytest.param("mooncake", marks=needs_mooncake)])
def test_every_rank_of_an_engine_reads_a_bucket_before_the_sender_is_answered(tmp_path: Path, transport: str) -> None:
    """The memory is written over with the next bucket then. Also where the model's own loader loads."""
    # On a CPU, SGLang pads experts that are not a multiple of 64 on each rank.
    checkpoint = make_tiny_qwen3_moe(tmp_path / "model", moe_intermediate_size=128)
    server = serve(checkpoint, tmp_path / "logs", sglang={"tp_size": 2}, weights={"loader": "model"})
    try:
        config = config_of(checkpoint, tmp_path, transport)
        said = run_trainers(sync_to_two_ranks, config, server.endpoint, tmp_path / "exported")[0]
        assert "rank 0: FileNotFoundError" in said[0]
        assert ["rank 1: OSError: Mooncake cannot read 8 bytes" in words for words in said[1:]] == (
            [True] if transport == "mooncake" else []
        )
        assert len(parameters_of(server.endpoint)) == 2 and are_those_of(server.endpoint, tmp_path / "exported")
    finally:
        server.process.stop()


def change_few(trainer: MegatronTrainer, seed: int) -> None:
    """Other values for about one element in a hundred, the same on every rank that holds them."""
    with torch.no_grad():
        for name, parameter in trainer.named_local_params():
            random = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
            chosen = torch.rand(parameter.shape, generator=random) < 0.01
            parameter[chosen] *= 1.01


def sync_changes(trainer: MegatronTrainer, engine: Endpoint, before: Path) -> list[tuple[int, MovedAmounts, int]]:
    """(tensors compared, what was moved, buckets that the engine refused) of each sync, where this rank sends.

    Before the last but one, somebody else gives the engine other weights.
    """
    rank, moved = trainer.parallel.rank, list[tuple[int, MovedAmounts, int]]()
    sender = sender_of(trainer)
    sender.connect([engine])
    for version in range(21, 27):
        change_few(trainer, version)
        if version == 25 and rank == 0:
            post(engine, "/update_weights_from_disk", {"model_path": str(before)})
        dist.barrier()
        compared = publish(sender, version, rank)
        if isinstance(sender._transport, DeltaTransport):  # this rank sends
            refused = sum(sent.refused > 0 for sent in sender._transport._sent.values())
            moved.append((compared, sender._transport.moved(), refused))
    sender.disconnect()
    return moved


@pytest.mark.parametrize(
    ("over", "sizes"),
    [("disk", {"tp": 2, "ep": 1}), ("broadcast", {"dp": 2, "ep": 2}), ("disk", {"dp": 2, "ep": 2})],
    ids=["disk tp2", "broadcast dp2 ep2", "disk dp2 ep2"],
)
def test_changes_alone_bring_an_engine_to_the_trainers_weights_and_are_refused_by_one_that_has_others(
    checkpoint: Path, engine: Endpoint, tmp_path: Path, over: str, sizes: dict[str, int]
) -> None:
    check_changes(checkpoint, engine, tmp_path, over, sizes)


@pytest.mark.nightly
@pytest.mark.timeout(500)  # a server of its own
def test_changes_alone_bring_every_rank_of_an_engine_to_the_trainers_weights(tmp_path: Path) -> None:
    """A rank holds a part of each bucket, so it can tell only by its own sums whether it still does."""
    checkpoint = make_tiny_qwen3_moe(tmp_path / "model", moe_intermediate_size=128)
    server = serve(checkpoint, tmp_path / "logs", sglang={"tp_size": 2})
    try:
        for over in ("disk", "broadcast"):
            check_changes(checkpoint, server.endpoint, tmp_path / over, over, {"dp": 2, "ep": 2})
    finally:
        server.process.stop()


@pytest.mark.nightly
@pytest.mark.timeout(500)  # a server of its own
@pytest.mark.parametrize(
    ("transport", "loader"),
    [("relay", "recorded"), ("relay", "model"), pytest.param("mooncake", "recorded", marks=needs_mooncake)],
)
def test_ranks_of_an_engine_take_different_parts_from_two_senders_and_pass_them_on(
    tmp_path: Path, transport: str, loader: str
) -> None:
    checkpoint = make_tiny_qwen3_moe(tmp_path / "model", moe_intermediate_size=128)
    server = serve(checkpoint, tmp_path / "logs", sglang={"tp_size": 2}, weights={"loader": loader})
    try:
        config = config_of(checkpoint, tmp_path, transport, dp=2, ep=2)
        work = sync_twice if loader == "recorded" else sync_by_their_own_loaders
        results = run_trainers(work, config, server.endpoint, 2, tmp_path / "exported")
        compared, buckets = results[0]
        assert buckets > 5 and compared == (tensors_of(checkpoint) if loader == "recorded" else 0)
        after, meta = engine_log_probs(server.endpoint)
        expected = transformers_log_probs(tmp_path / "exported")
        assert float((after - expected).abs().max()) < 1e-4 and meta["weight_version"] == "2"
        assert len(parameters_of(server.endpoint)) == 2 and are_those_of(server.endpoint, tmp_path / "exported")
    finally:
        server.process.stop()


@pytest.mark.nightly
@pytest.mark.timeout(700)  # a server of two processes and four ranks
def test_each_machine_of_an_engine_receives_from_all_senders_and_passes_on_for_itself(tmp_path: Path) -> None:
    """Two machines of two ranks each, as SGLang has them; here they are one."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    checkpoint = make_tiny_qwen3_moe(tmp_path / "model", moe_intermediate_size=256, **heads)
    server = ServedOverTwo(checkpoint, tmp_path / "logs")
    try:
        engine = server.process.start().endpoint
        config = config_of(checkpoint, tmp_path, "relay", dp=2, ep=2)
        (compared, _), *_ = run_trainers(sync_by_machine, config, engine, 3, tmp_path / "exported")
        assert compared == 2 * tensors_of(checkpoint)
        after, meta = engine_log_probs(engine)
        expected = transformers_log_probs(tmp_path / "exported")
        assert float((after - expected).abs().max()) < 1e-4 and meta["weight_version"] == "3"
    finally:
        server.process.stop()
    assert server.part._process is not None and server.part._process.poll() is not None


def sync_by_machine(trainer: MegatronTrainer, engine: Endpoint, version: int, export: Path) -> tuple[int, int]:
    """As `sync_twice`, and once more: what a machine keeps is told in the second sync, and sent alone in the third."""
    rank, engine_port, compared = trainer.parallel.rank, SGLangPort(trainer.spec.deadlines), 0
    sender = trainer.weight_sender(engine_port)
    sender.connect([engine])
    for number in range(version):
        change_weights(trainer, 0.01 - 0.004 * number)
        compared += publish(sender, number + 1, rank, check=number > 0)
    if engine_port.reports:  # of a rank that sends
        said = {said for _, said in engine_port.reports if said.startswith(RECORDED)}
        assert all("each rank's share of" in words for words in said)
        assert [words for words in said if "each host's part" in words], said
    sender.disconnect()
    sender.export(export, trainer.spec.checkpoint)
    return compared, len(sender.plan.buckets)


class ServedOverTwo:
    """A server whose two machines are this one."""

    def __init__(self, checkpoint: Path, logs: Path) -> None:
        spec = engine_spec(cpu_run(checkpoint, sglang={"tp_size": 4, "nnodes": 2}))
        keys = EngineKeys.random()
        self.part = ServerPart(spec, 0, 1, logs, "127.0.0.1", keys, routes=True)
        self.process = ServerProcess(spec, 0, logs, keys=keys, routes=True, others=[self.part])


def sync_by_their_own_loaders(
    trainer: MegatronTrainer, engine: Endpoint, version: int, export: Path
) -> tuple[int, int]:
    """As `sync_twice`, of an engine that records nothing; a third sync is given up half way before the last."""
    rank, sender = trainer.parallel.rank, sender_of(trainer)
    sender.connect([engine])
    change_weights(trainer, 0.01)
    publish(sender, version - 1, rank, check=False)
    whole = sender._params
    sender._params = lambda: [(name, each) for name, each in whole() if "layers.3." not in name]
    with pytest.raises(WeightSyncError, match="layers.3"):
        publish(sender, version, rank, check=False)
    sender._params = whole
    change_weights(trainer, -0.004)
    publish(sender, version, rank, check=False)
    sender.disconnect()
    sender.export(export, trainer.spec.checkpoint)
    return 0, len(sender.plan.buckets)


def check_changes(checkpoint: Path, engine: Endpoint, tmp_path: Path, over: str, sizes: dict[str, int]) -> None:
    results = run_trainers(sync_changes, config_of(checkpoint, tmp_path, "delta", over, **sizes), engine, checkpoint)
    assert [compared for compared, _, _ in results[0]] == [tensors_of(checkpoint)] * 6
    senders = [sent for sent in results if sent]
    assert len(senders) == sizes.get("ep", 1)
    for sent in senders:
        whole, first, *_, after_another, last = (moved for _, moved, _ in sent)
        assert whole.elements == 0 and 0.005 < first.changed / first.elements < 0.02
        assert first.bytes < 0.1 * whole.bytes and last.bytes < 0.1 * whole.bytes
        assert after_another.bytes == whole.bytes
        refused = [count for _, _, count in sent]
        assert refused[:4] == [0] * 4 and refused[4] > 5 and refused[5] == 0


class BitFlippingTransport:
    """Breaks one bit of one tensor on its way; everything else goes to the real transport."""

    def __init__(self, real: Transport, tensor: str) -> None:
        self._real, self._tensor = real, tensor

    def start(self, bucket: Bucket, flat: torch.Tensor) -> Pending:
        for entry in bucket.entries:
            if entry.name == self._tensor:
                flat = flat.clone()
                flat.view(torch.int32)[entry.offset + entry.numel // 2] ^= 1
        return self._real.start(bucket, flat)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


FLIPPED = (
    "model.layers.1.mlp.experts.5.down_proj.weight", "model.layers.2.self_attn.v_proj.weight",
    "model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.3.mlp.gate.weight", "model.embed_tokens.weight",
    "model.layers.3.self_attn.k_norm.weight",
)  # fmt: skip


def flip_and_repair(trainer: MegatronTrainer, engine: Endpoint) -> dict[str, str]:
    """What `check` says with one bit of each tensor broken in turn; at last everything is sent unbroken."""
    sender = sender_of(trainer)
    sender.connect([engine])
    real, said = sender._transport, {}
    assert real is not None
    for tensor in FLIPPED:
        sender._transport = cast(Any, BitFlippingTransport(real, tensor))
        with pytest.raises(WeightSyncError) as caught:
            publish(sender, 99, 0)
        said[tensor] = str(caught.value)
    sender._transport = real
    publish(sender, 10, 0)
    sender.disconnect()
    return said


def test_one_flipped_bit_in_one_tensor_is_found_and_the_version_is_not_stamped(
    checkpoint: Path, engine: Endpoint, tmp_path: Path
) -> None:
    said = run_trainers(flip_and_repair, config_of(checkpoint, tmp_path), engine)[0]
    for tensor, message in said.items():
        assert f"{engine.url}: {tensor}'" in message and "1 of 135 tensors differ" in message
    assert engine_log_probs(engine)[1]["weight_version"] == "10"


def refused(trainer: MegatronTrainer, engine: Endpoint) -> tuple[str, float]:
    """Send without an open session, which SGLang refuses; then a whole sync on the same connection's successor."""
    sender = sender_of(trainer)
    sender.connect([engine])
    begin = time.monotonic()
    with pytest.raises(WeightSyncError) as caught:
        sender.send(11)
    seconds = time.monotonic() - begin
    sender.disconnect()
    sender.connect([engine])
    publish(sender, 12, trainer.parallel.rank)
    sender.disconnect()
    return str(caught.value), seconds


def test_a_refusal_is_raised_on_every_rank_with_the_engines_words_and_a_new_connection_works(
    checkpoint: Path, engine: Endpoint, tmp_path: Path
) -> None:
    for message, seconds in run_trainers(refused, config_of(checkpoint, tmp_path, tp=2, ep=2), engine):
        assert "weights.send = 'trainer rank 0': bucket 0 (stage 0" in message, message
        assert "must run between begin_weight_update() and end_weight_update()" in message
        assert seconds < 20
    assert engine_log_probs(engine)[1]["weight_version"] == "12"


def unreachable(trainer: MegatronTrainer, engine: Endpoint) -> str:
    sender = sender_of(trainer)
    with pytest.raises(WeightSyncError) as caught:
        sender.connect([engine])
    sender.disconnect()
    return str(caught.value)


@pytest.mark.nightly
def test_an_engine_that_is_not_there_is_named_on_every_rank(checkpoint: Path, tmp_path: Path) -> None:
    engine = Endpoint(f"http://127.0.0.1:{free_port()}")
    for message in run_trainers(unreachable, config_of(checkpoint, tmp_path, tp=2, ep=2), engine):
        assert "weights.connect" in message and engine.url in message


def export_on_a_small_disk(trainer: MegatronTrainer, directory: Path, limited_rank: int) -> str:
    """One leader may write no more than 10 kB a file, as on a file system that fills up under it."""
    sender = trainer.weight_sender()
    if trainer.parallel.rank == limited_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    with pytest.raises(WeightSyncError) as error:
        sender.export(directory, trainer.spec.checkpoint)
    return str(error.value)


@pytest.mark.nightly
def test_an_export_that_cannot_be_written_fails_on_every_rank_and_keeps_what_was_there(
    checkpoint: Path, tmp_path: Path
) -> None:
    target = tmp_path / "exported"
    target.mkdir()
    (target / "kept").write_text("as it was")
    config = config_of(checkpoint, tmp_path, tp=2, ep=2, pp=2)
    messages = run_trainers(export_on_a_small_disk, config, target, 0)
    assert len(set(messages)) == 1 and "trainer rank 0" in messages[0]
    assert [path.name for path in target.iterdir()] == ["kept"]
