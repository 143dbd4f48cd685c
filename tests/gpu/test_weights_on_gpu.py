"""Weights from a trainer on a GPU to engines on the same GPU: every transport that needs one machine and one GPU.

    python -m pytest tests/gpu/test_weights_on_gpu.py -W ignore

The engines are stand-ins without a model, whose memory is on the GPU; what they have got must be, bit for bit, what the
trainer exports. `handles` is the one that only a GPU can try: CUDA's handles of memory between processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mslime.convert.hf import HFCheckpoint
from tests.gpu.test_trainer_on_gpu import gpu_config, on_ranks

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]


def send(trainer: Any, urls: list[str], exported: Path) -> tuple[int, int]:
    """Two syncs, the second with other weights, which are exported; buckets, and bytes that stay on the GPU for it."""
    from mslime.backends.sglang.port import SGLangPort
    from mslime.config.keys import Endpoint
    from tests.engines.trainer_ranks import shard_of

    sender = trainer.weight_sender(SGLangPort(trainer.spec.deadlines))
    sender.connect([Endpoint(url) for url in urls])
    sender.send(1)
    trainer.train([shard_of(trainer)])
    before = torch.cuda.memory_allocated()
    sender.send(2)
    left = torch.cuda.memory_allocated() - before
    sender.disconnect()
    sender.export(exported, trainer.spec.checkpoint)
    return len(sender.plan.buckets), left


@pytest.mark.parametrize("transport", ["handles", "shm", "disk", "delta"])
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_engines_hold_every_bit_of_a_trainer_on_the_same_gpu(name: str, transport: str, tmp_path: Path) -> None:
    from tests.fixtures.stand_in_engine import two_engines

    shared = {"directory": tmp_path / "shared"} if transport in ("disk", "delta") else {}
    config = gpu_config(name, tmp_path, weights={"transport": transport, "bucket_mib": 0.05, **shared})
    with two_engines("cuda:0") as engines:
        ((buckets, left),) = on_ranks(send, config, tmp_path, [e.url for e in engines], tmp_path / "exported")
        held = [engine.held() for engine in engines]
    source, compared = HFCheckpoint(tmp_path / "exported"), 0
    for each in held:
        assert each.keys() == source.info.keys()
        for tensor_name, tensor in each.items():
            compared += 1
            assert torch.equal(tensor, source.tensor(tensor_name).to(tensor.dtype)), tensor_name
    assert buckets > 2 and compared > 50
    assert left < 1 << 20, "a sync gives back what it took"
