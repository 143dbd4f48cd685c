"""Conversion on real megatron-core: transformers' logits, mbridge's export, and the way back to disk."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mslime.backends.megatron.trainer import MegatronTrainer
from mslime.convert.families import get_family
from mslime.convert.hf import HFCheckpoint
from tests.engines.trainer_ranks import make_config, make_shard, run_trainers, shard_of
from tests.fixtures.tiny_models import make_tiny_qwen3_dense, make_tiny_qwen3_moe

pytestmark = pytest.mark.timeout(180)

ALL = {"tp": 2, "pp": 2, "ep": 2}
SMALL_INIT = {"initializer_range": 0.05}  # logits of order 1, so that 1e-5 is a statement about fp32


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("convert")
    return {
        "moe": make_tiny_qwen3_moe(root / "moe", **SMALL_INIT),
        "moe with dense layers": make_tiny_qwen3_moe(root / "mixed", mlp_only_layers=[0], **SMALL_INIT),
        "top-k not normalised": make_tiny_qwen3_moe(root / "raw", norm_topk_prob=False, **SMALL_INIT),
        "odd vocabulary": make_tiny_qwen3_moe(root / "odd", vocab_size=321, **SMALL_INIT),
        "dense tied": make_tiny_qwen3_dense(root / "tied", tie_word_embeddings=True, **SMALL_INIT),
    }


@pytest.fixture(scope="module")
def references(checkpoints: dict[str, Path]) -> dict[str, Path]:
    """transformers' logits of `make_shard`'s eight ragged sequences, [N, vocabulary] for each checkpoint."""
    from transformers import AutoModelForCausalLM

    shard, written = make_shard(), {}
    for name, path in checkpoints.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        sequences = torch.from_numpy(shard.tokens).long().split(shard.lengths.tolist())
        with torch.no_grad():
            logits = torch.cat([model(tokens[None]).logits[0] for tokens in sequences])
        written[name] = path / "logits.pt"
        torch.save(logits, written[name])
    return written


def worst_logit_difference(trainer: MegatronTrainer, reference: Path) -> tuple[int, float]:
    """(logit rows compared, largest |Megatron - transformers| over them) on the last stage; (0, 0) elsewhere."""
    from megatron.core import parallel_state as groups

    expected, shard = torch.load(reference), shard_of(trainer)
    compared, worst = 0, 0.0

    def compare(batch: Any, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        nonlocal compared, worst
        shares = [torch.empty_like(logits) for _ in range(trainer.place.tp_size)]
        dist.all_gather(shares, logits.contiguous(), group=groups.get_tensor_model_parallel_group())
        whole = torch.cat(shares, -1)[:, : trainer.model.vocab_size]
        rows = torch.from_numpy(batch.slicer.rows)
        known = rows >= 0
        compared += int(known.sum())
        worst = max(worst, float((whole[known] - expected[rows[known]]).abs().max()))
        return logits.new_zeros(()), {}

    with torch.no_grad():
        trainer.runner._run(trainer.runner._micro_batches(shard), compare, None, None, forward_only=True)
    assert compared in (0, len(shard.tokens))
    return compared, worst


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("moe", {}),
        ("moe", {"train": {"packed": False}}),
        ("moe", ALL),
        ("moe", {**ALL, "train": {"packed": False}}),
        ("moe with dense layers", {"pp": 2}),
        ("top-k not normalised", {}),
        ("odd vocabulary", {"tp": 2, "ep": 2}),
        ("dense tied", {"tp": 2, "pp": 2}),
        ("dense tied", {"tp": 4}),  # more ranks than key-value heads
    ],
    ids=str,
)
def test_megatron_logits_equal_transformers_within_1e_5(
    checkpoints: dict[str, Path], references: dict[str, Path], tmp_path: Path, model: str, sizes: dict[str, Any]
) -> None:
    config = make_config(checkpoints[model], tmp_path, **sizes)
    found = run_trainers(worst_logit_difference, config, references[model])
    assert sum(rows for rows, _ in found) > 0
    assert max(difference for _, difference in found) <= 1e-5, found


class TransformerEngineNames:
    """Shows a local-spec model under the parameter names that mbridge knows (test oracle's adapter)."""

    def __init__(self, model: Any) -> None:
        self._model, self.decoder, self.config = model, model.decoder, model.config

    def _name(self, name: str) -> str:
        match = re.match(r"(decoder\.layers\.(\d+)\.)(.*)", name)
        if match is None:
            return name
        prefix, layer, rest = match.groups()
        if rest == "input_layernorm.weight":
            return prefix + "self_attention.linear_qkv.layer_norm_weight"
        if rest == "pre_mlp_layernorm.weight" and not hasattr(self.decoder.layers[int(layer)].mlp, "router"):
            return prefix + "mlp.linear_fc1.layer_norm_weight"
        if expert := re.match(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", rest):
            return f"{prefix}mlp.experts.{expert[2]}.weight{expert[1]}"
        return name

    def named_parameters(self) -> Any:
        return ((self._name(name), parameter) for name, parameter in self._model.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        return {self._name(name): value for name, value in self._model.state_dict().items()}


def mbridge_export(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """Every Hugging Face tensor, as mbridge exports it from this trainer's model."""
    from mbridge import AutoBridge
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(trainer.config.model.path)
    config.rope_theta = config.rope_parameters["rope_theta"]  # mbridge 0.15.1 reads transformers 4 configurations
    config.rope_scaling = None
    bridge = AutoBridge.from_config(config, dtype=torch.float32)
    views = [TransformerEngineNames(chunk) for chunk in trainer.chunks]
    with torch.no_grad():
        return {name: tensor.clone() for name, tensor in bridge.export_weights(views)}


def perturb_and_export(trainer: MegatronTrainer, directory: Path) -> list[str]:
    """Change every parameter, export with both, and name every tensor in which a bit differs."""
    from mslime.backends.megatron.naming import named_local_params

    rules = get_family(trainer.hf_config).rules(trainer.hf_config)
    with torch.no_grad():
        for name, parameter in named_local_params(trainer.chunks):  # the copy of a tied embedding included
            parameter.add_(0.01 * (1 + zlib.crc32(rules.bind(name).hf_names[0].encode()) % 7))
    trainer.weight_sender().export(directory, trainer.config.model.path)
    oracle = mbridge_export(trainer)
    ours = HFCheckpoint(directory)
    assert ours.info.keys() == oracle.keys(), ours.info.keys() ^ oracle.keys()
    return [name for name, tensor in oracle.items() if not torch.equal(ours.tensor(name), tensor)]


@pytest.mark.parametrize("model", ["moe", "dense tied"])
@pytest.mark.parametrize("sizes", [{}, {**ALL, "vpp": 2}], ids=str)
def test_the_export_equals_mbridges_bit_for_bit(
    checkpoints: dict[str, Path], tmp_path: Path, model: str, sizes: dict[str, Any]
) -> None:
    if model == "dense tied":
        sizes = {key: size for key, size in sizes.items() if key != "ep"}
    config = make_config(checkpoints[model], tmp_path, **sizes)
    for rank, different in enumerate(run_trainers(perturb_and_export, config, tmp_path / "exported")):
        assert not different, f"rank {rank}: {different[:3]}"
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
