"""A real SGLang server that holds FP8 weights (emulated on CPU) under a trainer of plain ones."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.backends.sglang.port import SGLangPort
from mslime.config.keys import Endpoint
from mslime.convert.encoding import encoded_weights
from mslime.convert.hf import HFCheckpoint
from mslime.engine_plugin.wire import RECORDED
from mslime.offline.jobs import run_job
from mslime.offline.lora_checkpoints import MergeLora
from mslime.offline.requantise import ToFp8, ToInt4, ToPlain
from mslime.weights.transport import MovedAmounts
from tests.engines.conftest import SharedServer, serve
from tests.engines.test_adapter_sync import hold_version, with_lora
from tests.engines.test_weight_sync import change_few, config_of, publish
from tests.engines.trainer_ranks import run_trainers
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

pytestmark = pytest.mark.timeout(240, func_only=True)  # the first test waits for the server

PROMPT = list(range(40, 90))
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 4}
"""In whole blocks, as SGLang's FP8 layers want them."""


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fp8")
    run_job(ToFp8(make_tiny_qwen3_moe(directory / "plain", **SIZES), power_of_two=False), directory / "fp8")
    return directory / "fp8"


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("int4")
    run_job(ToInt4(make_tiny_qwen3_moe(directory / "plain", **SIZES), group=32), directory / "int4")
    return directory / "int4"


@pytest.fixture(scope="module")
def server(fp8: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    server = serve(fp8, tmp_path_factory.mktemp("sglang"))
    yield server
    server.process.stop()


def prompt_log_probs(engine: Endpoint) -> list[float]:
    body: dict[str, Any] = {
        "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0,
    }  # fmt: skip
    answer = httpx.post(engine.url + "/generate", json=body, headers=engine.keys.headers("/generate"), timeout=60)
    return [row[0] for row in answer.raise_for_status().json()["meta_info"]["input_token_logprobs"][1:]]


def computed(checkpoint: Path, weights: dict[str, torch.Tensor], scratch: Path) -> list[float]:
    """Results of transformers with the dequantised weights of a model, in float32."""
    from transformers import Qwen3MoeForCausalLM

    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("quantization_config", None)
    scratch.mkdir()
    (scratch / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, scratch / "model.safetensors")
    model = Qwen3MoeForCausalLM.from_pretrained(scratch, dtype=torch.float32)
    with torch.no_grad():
        log_probs = model(torch.tensor([PROMPT])).logits.log_softmax(-1)[0]
    return [float(log_probs[at, token]) for at, token in enumerate(PROMPT[1:])]


def dequantised(checkpoint: Path) -> dict[str, torch.Tensor]:
    source = HFCheckpoint(checkpoint)
    return {name: source.tensor(name).float() for name in source.info}


def test_it_computes_with_what_the_weights_stand_for(server: SharedServer, fp8: Path, tmp_path: Path) -> None:
    expected = computed(fp8, dequantised(fp8), tmp_path / "plain")
    assert prompt_log_probs(server.endpoint) == pytest.approx(expected, abs=2e-4)


def disturb(trainer: MegatronTrainer, seed: int) -> None:
    """Another number for every weight: a whole tensor that is scaled would have the same FP8 bits."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, tensor in trainer.named_local_params():
            tensor.mul_(1 + 0.1 * torch.randn(tensor.shape, generator=random))


@dataclass(frozen=True)
class Synced:
    """What was seen of syncs: tensors compared and buckets in the last, whether the export says that it is quantised,
    and with `delta` what each sync moved."""

    compared: int
    buckets: int
    says_quantised: bool
    moved: tuple[MovedAmounts, ...]


def sync_thrice(trainer: MegatronTrainer, engine: Endpoint, export: Path, seed: int) -> Synced:
    """Compared syncs, of which the second uses recorded copies of the first, and in the third little has changed; and
    an export."""
    engine_port = SGLangPort(trainer.spec.deadlines)
    sender = trainer.weight_sender(engine_port)
    sender.connect([engine])
    compared, moved = 0, list[MovedAmounts]()
    for version, change in ((1, disturb), (2, disturb), (3, change_few)):
        change(trainer, seed + version)
        compared = publish(sender, version, trainer.parallel.rank)
        if (counted := sender._transport and sender._transport.moved()) is not None:
            moved.append(counted)
    assert any(said.startswith(RECORDED) for _, said in engine_port.reports), engine_port.reports
    # What the engine must be found to hold differs where one bit of one scale does.
    report = sender.sums()
    assert any(name.endswith(("_scale_inv", "_scale")) for name in report)
    sender.disconnect()
    sender.export(export, trainer.spec.checkpoint)
    says_quantised = "quantization_config" in (export / "config.json").read_text()
    return Synced(compared, len(sender.plan.buckets), says_quantised, tuple(moved))


def assert_file_by_file(version: Path, scratch: Path) -> None:
    """The version left by `disk` equals the converter's output for the export."""
    run_job(ToFp8(scratch / "hf", power_of_two=False), scratch / "written")
    written, found = (
        {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for directory in (scratch / "written", version)
    )
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("transport", ["broadcast", "disk", "delta", "relay", "shm"])
def test_later_weights_arrive_quantised(server: SharedServer, fp8: Path, tmp_path: Path, transport: str) -> None:
    encoded = encoded_weights(HFCheckpoint(fp8), json.loads((fp8 / "config.json").read_text()))
    assert encoded is not None
    config, before = config_of(fp8, tmp_path, transport), prompt_log_probs(server.endpoint)
    seed = zlib.crc32(transport.encode())
    (synced,) = run_trainers(sync_thrice, config, server.endpoint, tmp_path / "hf", seed)
    assert synced.buckets > 5 and synced.compared == len(HFCheckpoint(fp8).stored)
    assert not synced.says_quantised  # exported weights are plain
    if transport == "delta":
        whole, other, few = synced.moved
        assert whole.elements == 0 and other.bytes > whole.bytes // 2 and few.bytes < whole.bytes // 10
        assert 0 < few.changed < 0.02 * few.elements
    if transport == "disk":
        assert_file_by_file(next(config.run_dir.glob("weights/*/version_000003")), tmp_path)
    run_job(ToFp8(tmp_path / "hf", power_of_two=False), tmp_path / "again")
    after = prompt_log_probs(server.endpoint)
    assert after == pytest.approx(computed(fp8, dequantised(tmp_path / "again"), tmp_path / "a"), abs=2e-4)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-2
    plain = computed(fp8, dequantised(tmp_path / "hf"), tmp_path / "b")
    assert max(abs(a - b) for a, b in zip(plain, after, strict=True)) > 2e-3  # it was quantised


def sync_merged(trainer: MegatronTrainer, engine: Endpoint, adapter: Path) -> int:
    """Two compared syncs of weights with an adapter in them, and what the adapter is in the second."""
    sender = trainer.weight_sender(SGLangPort(trainer.spec.deadlines))
    sender.connect([engine])
    compared = 0
    for version in (1, 2):
        hold_version(trainer, version)
        compared = publish(sender, version, trainer.parallel.rank)
    sender.disconnect()
    trainer.export(adapter)
    return compared


@pytest.mark.nightly
def test_an_adapter_is_merged_into_weights_that_are_quantised_again(
    server: SharedServer, fp8: Path, tmp_path: Path
) -> None:
    config = with_lora(config_of(fp8, tmp_path), sync="merged")
    (compared,) = run_trainers(sync_merged, config, server.endpoint, tmp_path / "adapter")
    assert compared == len(HFCheckpoint(fp8).stored)
    run_job(ToPlain(fp8), tmp_path / "base")
    run_job(MergeLora(tmp_path / "base", tmp_path / "adapter"), tmp_path / "merged")
    run_job(ToFp8(tmp_path / "merged", power_of_two=False), tmp_path / "again")
    after = prompt_log_probs(server.endpoint)
    # Merging rounds here and there, so a few numbers of 8 bits may be the neighbours.
    assert after == pytest.approx(computed(fp8, dequantised(tmp_path / "again"), tmp_path / "a"), abs=1e-3)
    for other in ("base", "merged"):
        plain = computed(fp8, dequantised(tmp_path / other), tmp_path / f"{other} computed")
        assert max(abs(a - b) for a, b in zip(plain, after, strict=True)) > 2e-3, other


@pytest.mark.nightly
def test_int4_experts_are_served_and_sent_as_they_are(int4: Path, tmp_path: Path) -> None:
    """With a separate server, which starts with other weights than one of FP8."""
    server = serve(int4, tmp_path / "sglang")
    try:
        before = prompt_log_probs(server.endpoint)
        assert before == pytest.approx(computed(int4, dequantised(int4), tmp_path / "before"), abs=2e-4)
        (synced,) = run_trainers(sync_thrice, config_of(int4, tmp_path), server.endpoint, tmp_path / "hf", 7)
        after = prompt_log_probs(server.endpoint)
    finally:
        server.process.stop()
    assert synced.compared == len(HFCheckpoint(int4).stored) and not synced.says_quantised
    run_job(ToInt4(tmp_path / "hf", group=32), tmp_path / "again")
    assert after == pytest.approx(computed(int4, dequantised(tmp_path / "again"), tmp_path / "after"), abs=2e-4)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-2
    plain = computed(int4, dequantised(tmp_path / "hf"), tmp_path / "exported")
    assert max(abs(a - b) for a, b in zip(plain, after, strict=True)) > 2e-3  # it was quantised
