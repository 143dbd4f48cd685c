"""Multi-token-prediction layers: the rules against megatron-core's own block, and its output against transformers'."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from mslime.backends.megatron.model.chunks import build_chunks, fake_process_group, load_hf_weights, meta_chunks
from mslime.backends.megatron.model.megatron_config import transformer_config
from mslime.backends.megatron.parallel import start_process_groups, stop_process_groups
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.resolved import policy_spec
from mslime.config.schema import RunConfig
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.hf import HFCheckpoint
from mslime.convert.table import canonical_name
from tests.engines.megatron_ranks import run_ranks
from tests.engines.test_full_size import hf_config, run_config
from tests.engines.trainer_ranks import make_config, run_trainers
from tests.fixtures.families.deepseek import SMALL_INIT, YARN, with_mtp_layer

pytestmark = pytest.mark.timeout(180)

# The last stage of a short pipeline: few layers to build beside the prediction layer.
LAST_STAGES = {
    "deepseek-v3": {"ranks": 1024, "tp": 4, "pp": 16, "last": 1, "ep": 64},
    "glm4.5-air-106B-A12B": {"ranks": 368, "tp": 8, "pp": 46, "ep": 8},
    "qwen3-next-80B-A3B": {"ranks": 96, "tp": 2, "pp": 12, "ep": 8},
}


@pytest.mark.parametrize("model", LAST_STAGES)
def test_every_parameter_of_a_full_size_prediction_layer_is_made_by_one_rule(model: str) -> None:
    config, hf = run_config(model, LAST_STAGES[model]), hf_config(model)
    table, layout = get_family(hf).rules(hf), config.layout
    per_rank = get_family(hf).model_fields(hf).num_experts // layout.ep
    with fake_process_group(layout, layout.world_size - layout.world_size // layout.pp):
        (chunk,) = meta_chunks(policy_spec(config), hf, mtp=True)
    biases = [(name, tensor) for name, tensor in chunk.named_buffers() if name.endswith("router.expert_bias")]
    built = [(n, tuple(t.shape)) for n, t in [*chunk.named_parameters(), *biases] if n.startswith("mtp.")]
    owners: Counter[str] = Counter()
    for ep_rank in range(layout.ep):
        for local, shape in built:
            rule = table.bind(canonical_name(local, ep_rank * per_rank))
            assert rule.kind.local_shape(layout.etp if rule.is_expert else layout.tp) == shape, rule.name
            owners[rule.name] += rule.is_expert or ep_rank == 0
    assert set(owners.values()) == {1}
    assert owners.keys() == {name for name, rule in table.all_bound.items() if rule.untrained == "mtp"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_mtp_layer(tmp_path_factory.mktemp("mtp") / "model", rope_parameters=YARN, **SMALL_INIT)


def predicted(
    rank: int, world_size: int, init_method: str, config: RunConfig, states: torch.Tensor, embeddings: torch.Tensor
) -> torch.Tensor:
    """Output [tokens, hidden] of the prediction layer that the rules load."""
    start_process_groups(policy_spec(config), rank, world_size, init_method, device := torch.device("cpu"))
    hf = read_hf_config(config.model.path)
    settings = transformer_config(policy_spec(config), hf, device)
    settings.mtp_num_layers = 1
    chunks = build_chunks(settings, get_family(hf).model_fields(hf), device, mtp=True)
    load_hf_weights(chunks, hf, config.model.path)
    layer: Any = chunks[-1].mtp.layers[0]
    mine = slice(rank * len(states) // world_size, (rank + 1) * len(states) // world_size)
    whole = [tensor[mine, None] for tensor in (states, embeddings)]
    out = layer._proj_and_transformer_layer(*whole)[:, 0].detach()
    parts = [torch.empty_like(out) for _ in range(world_size)]
    dist.all_gather(parts, out)
    stop_process_groups()
    return torch.cat(parts)


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "ep": 2}], ids=["one process", "TP2 EP2"])
def test_a_prediction_layer_computes_what_transformers_computes(
    checkpoint: Path, tmp_path: Path, sizes: dict[str, int]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")
    # transformers looks for the layer of the full-size model, the 61st.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\..*"]
    reference = MtpModel.from_pretrained(model)
    draw = torch.Generator().manual_seed(0)
    states, embeddings = (torch.randn(24, model.config.hidden_size, generator=draw) for _ in range(2))
    positions = torch.arange(24)[None]
    mask = torch.full((24, 24), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        rotary = model.model.rotary_emb(embeddings[None], positions)
        expected = reference.layers[0](embeddings[None], states[None], rotary, mask, positions, None)[0]
    for found in run_ranks(
        predicted, sizes.get("tp", 1), make_config(checkpoint, tmp_path, **sizes), states, embeddings
    ):
        assert (found - expected).abs().max() <= 1e-5


def trained_and_exported(trainer: MegatronTrainer, exported: Path) -> None:
    """Weights that are no longer those of the checkpoint, written to disk."""
    with torch.no_grad():
        for _, tensor in trainer.named_local_params():
            tensor.add_(0.5)
    trainer.weight_sender().export(exported, trainer.spec.checkpoint)


def test_an_export_of_trained_weights_has_the_sources_prediction_layer_and_repeats_the_trained_ends(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = make_config(checkpoint, tmp_path, tp=2, pp=2, ep=2)
    run_trainers(trained_and_exported, config, tmp_path / "exported")
    ours, theirs = HFCheckpoint(tmp_path / "exported"), HFCheckpoint(checkpoint)
    assert ours.info.keys() == theirs.info.keys()
    repeated = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    for name in theirs.info:
        untrained, short = name.startswith("model.layers.4."), name.removeprefix("model.layers.4.")
        if short in repeated:
            assert torch.equal(ours.tensor(name), ours.tensor(repeated[short])), name
        else:
            assert torch.equal(ours.tensor(name), theirs.tensor(name)) == untrained, name


def test_a_checkpoint_without_its_prediction_layer_is_exported_without_it(checkpoint: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(checkpoint, cut)
    tensors = load_file(cut / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.4.")}
    save_file(kept, cut / "model.safetensors", {"format": "pt"})
    run_trainers(trained_and_exported, make_config(cut, tmp_path), tmp_path / "exported")
    assert HFCheckpoint(tmp_path / "exported").info.keys() == kept.keys()
