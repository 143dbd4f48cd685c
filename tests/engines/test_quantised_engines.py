"""A real SGLang server that holds FP8 weights (emulated on CPU) under a trainer of plain ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.backends.sglang.receivers import SGLangReceivers
from mslime.backends.sglang.recorded import RECORDED
from mslime.config.keys import Endpoint
from mslime.convert.encoding import encoded_weights
from mslime.convert.hf import HFCheckpoint
from mslime.offline.jobs import run_job
from mslime.offline.requantise import ToFp8
from tests.engines.conftest import SharedServer, serve
from tests.engines.test_weight_sync import config_of, publish
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
    """What transformers computes with the weights that a quantised model stands for, in float32."""
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


def sync_twice(trainer: MegatronTrainer, engine: Endpoint, export: Path, seed: int) -> tuple[int, int, bool]:
    """Two compared syncs, of which the second uses what was recorded in the first; and an export."""
    receivers = SGLangReceivers(trainer.spec.deadlines)
    sender = trainer.weight_sender(receivers)
    sender.connect([engine])
    disturb(trainer, seed)
    publish(sender, 1, trainer.parallel.rank)
    disturb(trainer, seed + 1)
    compared = publish(sender, 2, trainer.parallel.rank)
    assert any(said.startswith(RECORDED) for _, said in receivers.heard), receivers.heard
    # What the engine must be found to hold differs where one bit of one scale does.
    report = sender.sums()
    assert any(name.endswith("_scale_inv") for name in report)
    sender.disconnect()
    sender.export(export, trainer.spec.checkpoint)
    return compared, len(sender.plan.buckets), "quantization_config" in (export / "config.json").read_text()


@pytest.mark.parametrize("transport", ["broadcast", pytest.param("shm", marks=pytest.mark.nightly)])
def test_later_weights_arrive_quantised(server: SharedServer, fp8: Path, tmp_path: Path, transport: str) -> None:
    encoded = encoded_weights(HFCheckpoint(fp8), json.loads((fp8 / "config.json").read_text()))
    assert encoded is not None
    config, before = config_of(fp8, tmp_path, transport), prompt_log_probs(server.endpoint)
    ((compared, buckets, says_quantised),) = run_trainers(
        sync_twice, config, server.endpoint, tmp_path / "hf", len(transport)
    )
    assert buckets > 5 and compared == len(HFCheckpoint(fp8).stored)
    assert not says_quantised  # exported weights are plain
    run_job(ToFp8(tmp_path / "hf", power_of_two=False), tmp_path / "again")
    after = prompt_log_probs(server.endpoint)
    assert after == pytest.approx(computed(fp8, dequantised(tmp_path / "again"), tmp_path / "a"), abs=2e-4)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-2
    plain = computed(fp8, dequantised(tmp_path / "hf"), tmp_path / "b")
    assert max(abs(a - b) for a, b in zip(plain, after, strict=True)) > 2e-3  # it was quantised
