"""Rows of padding go to many experts and do not affect the loss, on real megatron-core ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mslime.backends.megatron.step import batches
from mslime.backends.megatron.step.batches import PADDING, SequenceSlicer
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.data.shard import TrainShard
from tests.engines.trainer_ranks import loss_and_gradients, make_config, run_trainers
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

pytestmark = pytest.mark.timeout(180)

SEQUENCES, LENGTH = 48, 5
"""With two context-parallel ranks each sequence is laid out in 8 rows, so that 3 of 8 are padding."""


def short_sequences() -> TrainShard:
    """All begin with the same token, as templates do."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, 256, (SEQUENCES, LENGTH)).astype(np.int32)
    tokens[:, 0] = 1
    n = tokens.size
    mask = (np.arange(n) % LENGTH) > 1
    return TrainShard(
        tokens=tokens.reshape(-1),
        lengths=np.full(SEQUENCES, LENGTH),
        sequence_ids=np.arange(SEQUENCES),
        loss_mask=mask,
        weights=mask.astype(np.float32) / mask.sum(),
        advantages=random.normal(size=n).astype(np.float32),
        behaviour_log_probs=np.full(n, -6, np.float32),
        micro_batches=tuple(tuple(range(i, i + 16)) for i in range(0, SEQUENCES, 16)),
    )


def zeros_for_padding(slicer: SequenceSlicer, tokens: Any, spans: Any) -> Any:
    """What padding is not any more."""
    return slicer.at_rows(tokens)


def _dispatched(trainer: MegatronTrainer) -> dict[str, Any]:
    """This rank's rows of padding by layer and expert, loss and gradients; now, and with one token for all padding."""
    from megatron.core.transformer.moe.router import TopKRouter  # only once the CPU platform is in place

    shard = short_sequences()
    spans = shard.spans()
    slicers = [SequenceSlicer.build([spans[i] for i in m], trainer.parallel.rows) for m in shard.micro_batches]
    padding = [torch.from_numpy(s.layer_rows == PADDING) for s in slicers]
    maps: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        maps.append(output[1].detach())

    for chunk in trainer.chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(keep)

    def measured() -> dict[str, Any]:
        maps.clear()
        loss, gradients = loss_and_gradients(trainer, shard, None)
        layers = len(maps) // len(padding)
        by_batch = [torch.stack(maps[i * layers : (i + 1) * layers]) for i in range(len(padding))]
        counts = sum(chosen[:, rows].sum(1) for chosen, rows in zip(by_batch, padding, strict=True))
        real = sum(chosen[:, ~rows].sum(1) for chosen, rows in zip(by_batch, padding, strict=True))
        return {"padding": counts, "real": real, "loss": loss, "gradients": gradients}

    with mock.patch.object(batches, "_with_padding", zeros_for_padding):
        before = measured()
    return {"now": measured(), "zeros": before}


def with_loud_embeddings(model: Path) -> Path:
    """As after training, a token's embedding determines its routing more than the noise of random attention."""
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 100
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.parametrize("layout", [{"cp": 2}, {"cp": 2, "tp": 2, "ep": 2}], ids=["cp2", "cp2_tp2_ep2"])
def test_padding_spreads_over_the_experts_as_tokens_do_and_changes_no_gradient(
    layout: dict[str, int], tmp_path: Path
) -> None:
    model = with_loud_embeddings(make_tiny_qwen3_moe(tmp_path / "model"))
    results = run_trainers(_dispatched, make_config(model, tmp_path, **layout))

    def fullest(which: str, rows: str) -> np.ndarray:
        """[layers] share of the rows that the expert with the most of them gets."""
        counts = sum(result[which][rows] for result in results).double()
        assert (counts.sum(1) == counts.sum(1)[0]).all()
        return (counts.max(1).values / counts.sum(1)).numpy()

    padded = int(sum(result["now"]["padding"].sum() for result in results))
    assert padded == SEQUENCES * 3 * 2 * 4, "rows of padding, times top-k, times layers"
    spread, piled, tokens = fullest("now", "padding"), fullest("zeros", "padding"), fullest("now", "real")
    assert (spread < tokens + 0.1).all(), (spread, tokens)
    assert (piled > spread + 0.1).all(), (piled, spread)
    for result in results:
        assert result["now"]["loss"] == pytest.approx(result["zeros"]["loss"], abs=1e-7)
        for name, gradient in result["now"]["gradients"].items():
            torch.testing.assert_close(gradient, result["zeros"]["gradients"][name], atol=1e-7, rtol=1e-5)
