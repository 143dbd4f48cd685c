"""Every published config.json at full size, without its memory: the parameters that real megatron-core modules have on
the meta device, in layouts of up to 1,024 ranks, against the rules; and the rules against transformers' own model.

A stage's modules are equal on all of its ranks, except the ids of the experts, which are arithmetic. So the test builds
one rank of every stage, and derives the names of all others.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mslime.backends.megatron.model.chunks import fake_process_group, layer_ids, meta_chunks
from mslime.config.layout import ParallelLayout
from mslime.config.loader import build
from mslime.config.resolved import policy_spec
from mslime.config.schema import RunConfig
from mslime.convert.families import FAMILIES, get_family, refuse_unread
from mslime.convert.families.family import HARMLESS
from mslime.convert.table import RuleTable, canonical_name

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
PUBLISHED = sorted(path.parent.name for path in CONFIGS.glob("*/config.json"))

# Ranks, then megatron-core's sizes; `first` and `last` are the layers of the first and last pipeline stage.
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "first": "num_layers_in_first_pipeline_stage",
    "last": "num_layers_in_last_pipeline_stage",
}
_DEEPSEEK = (
    {"ranks": 1024, "tp": 4, "pp": 16, "last": 1, "ep": 64},
    {"ranks": 128, "tp": 8, "pp": 4, "first": 13, "ep": 32, "etp": 1},
    {"ranks": 64, "tp": 4, "pp": 1, "cp": 2, "ep": 32, "etp": 2},
)
_GLM = (
    {"ranks": 128, "tp": 8, "pp": 4, "ep": 32},
    {"ranks": 64, "tp": 4, "pp": 2, "vpp": 2, "ep": 16, "etp": 2},
    {"ranks": 32, "tp": 2, "pp": 1, "ep": 32},
)
_DENSE = ({"ranks": 64, "tp": 4, "pp": 4, "cp": 2}, {"ranks": 8, "tp": 2, "pp": 2, "vpp": 2}, {"ranks": 1})
LAYOUTS: dict[str, tuple[dict[str, int], ...]] = {
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v2": (
        {"ranks": 256, "tp": 8, "pp": 4, "ep": 32},
        {"ranks": 80, "tp": 4, "pp": 2, "vpp": 5, "ep": 20, "etp": 2},
        {"ranks": 160, "tp": 4, "ep": 160},
    ),
    "deepseek-v2-lite": (
        {"ranks": 64, "tp": 4, "pp": 2, "last": 13, "ep": 32},
        {"ranks": 48, "tp": 2, "pp": 3, "vpp": 3, "ep": 8, "etp": 2},
        {"ranks": 8, "ep": 8},
    ),
    "deepseek-v3": _DEEPSEEK,
    "deepseek-v3.1": _DEEPSEEK,
    "dots.llm1": (
        {"ranks": 128, "tp": 4, "pp": 4, "last": 14, "ep": 32},
        {"ranks": 64, "tp": 2, "pp": 2, "ep": 32},
        {"ranks": 32, "ep": 16, "etp": 2},
    ),
    "glm4-9b": ({"ranks": 64, "tp": 2, "pp": 4, "cp": 2}, {"ranks": 32, "tp": 4, "pp": 4, "vpp": 2}, {"ranks": 1}),
    "glm4.5-355B-A32B": _GLM,
    "glm4.5-air-106B-A12B": (
        {"ranks": 128, "tp": 8, "pp": 4, "last": 10, "ep": 32},
        {"ranks": 64, "tp": 4, "pp": 2, "first": 24, "ep": 16, "etp": 2},
        {"ranks": 32, "tp": 2, "ep": 32},
    ),
    "glm4.7-355B-A32B": _GLM,
    "gpt-oss-120b": (
        {"ranks": 64, "tp": 8, "pp": 4, "ep": 16},
        {"ranks": 32, "tp": 4, "pp": 2, "vpp": 3, "ep": 16},
        {"ranks": 32, "ep": 32},
    ),
    "gpt-oss-20b": (
        {"ranks": 64, "tp": 4, "pp": 4, "ep": 16},
        {"ranks": 16, "tp": 2, "pp": 2, "vpp": 2, "ep": 8},
        {"ranks": 8, "ep": 8},
    ),
    "kimi-k2": (
        {"ranks": 512, "tp": 8, "pp": 8, "last": 5, "ep": 64},
        {"ranks": 256, "tp": 4, "pp": 2, "first": 31, "ep": 128},
        {"ranks": 128, "tp": 8, "ep": 64, "etp": 2},
    ),
    "llama3.1-8B": _DENSE,
    "minimax-m2": (
        {"ranks": 128, "tp": 8, "pp": 4, "last": 14, "ep": 32},
        {"ranks": 128, "tp": 4, "pp": 2, "ep": 32, "etp": 2},
        {"ranks": 64, "ep": 64},
    ),
    "mixtral-8x7B": (
        {"ranks": 64, "tp": 4, "pp": 4, "ep": 4},
        {"ranks": 64, "tp": 2, "pp": 4, "vpp": 2, "ep": 2, "etp": 4},
        {"ranks": 8, "ep": 8},
    ),
    "moonlight-16B-A3B": (
        {"ranks": 64, "tp": 4, "pp": 2, "last": 13, "ep": 16},
        {"ranks": 24, "tp": 2, "pp": 3, "vpp": 3, "ep": 8},
        {"ranks": 16, "ep": 8, "etp": 2},
    ),
    "olmoe-1B-7B": (
        {"ranks": 64, "tp": 4, "pp": 4, "ep": 16},
        {"ranks": 16, "tp": 2, "pp": 2, "vpp": 4, "ep": 4, "etp": 2},
        {"ranks": 8, "ep": 8},
    ),
    "qwen1.5-moe-A2.7B": (
        {"ranks": 64, "tp": 4, "pp": 4, "ep": 4},
        {"ranks": 40, "tp": 2, "pp": 2, "vpp": 2, "ep": 10, "etp": 2},
        {"ranks": 12, "ep": 12},
    ),
    "qwen2-57B-A14B": (
        {"ranks": 64, "tp": 4, "pp": 2, "ep": 32},
        {"ranks": 64, "tp": 4, "pp": 2, "vpp": 7, "ep": 8, "etp": 4},
        {"ranks": 16, "ep": 16},
    ),
    "qwen2.5-0.5B": ({"ranks": 64, "tp": 2, "pp": 8}, {"ranks": 8, "tp": 2, "pp": 2, "vpp": 2}, {"ranks": 1}),
    "qwen2.5-7B": ({"ranks": 64, "tp": 4, "pp": 4, "cp": 2}, {"ranks": 8, "tp": 2, "pp": 2, "vpp": 7}, {"ranks": 1}),
    "qwen3-235B-A22B": (
        {"ranks": 128, "tp": 4, "pp": 4, "last": 22, "ep": 32},
        {"ranks": 256, "tp": 8, "pp": 8, "first": 11, "last": 11, "ep": 32},
        {"ranks": 64, "tp": 4, "pp": 1, "ep": 32, "etp": 2},
    ),
    "qwen3-30B-A3B": (
        {"ranks": 64, "tp": 8, "pp": 2, "ep": 32},
        {"ranks": 32, "tp": 2, "pp": 2, "vpp": 3, "ep": 8, "etp": 2},
        {"ranks": 8, "ep": 8},
    ),
    "qwen3-4B": _DENSE,
    "qwen3-next-80B-A3B": (
        {"ranks": 128, "tp": 2, "pp": 2, "ep": 64},
        {"ranks": 64, "tp": 2, "pp": 4, "vpp": 3, "ep": 16},
        {"ranks": 64, "ep": 64},
    ),
    "qwen3.5-35B-A3B": (
        {"ranks": 64, "tp": 2, "pp": 2, "ep": 32},
        {"ranks": 64, "tp": 2, "pp": 2, "vpp": 5, "ep": 16, "etp": 2},
        {"ranks": 32, "ep": 32},
    ),
    "qwen3.5-397B-A17B": (
        {"ranks": 256, "tp": 4, "pp": 4, "ep": 64},
        {"ranks": 128, "tp": 2, "pp": 4, "vpp": 3, "ep": 16, "etp": 2},
        {"ranks": 64, "ep": 64},
    ),
}


def hf_config(model: str) -> dict[str, Any]:
    return json.loads((CONFIGS / model / "config.json").read_text())


def supported(model: str) -> bool:
    return hf_config(model)["architectures"][0] in FAMILIES


MODELS = [model for model in PUBLISHED if supported(model)]
CASES = [(model, index) for model in MODELS for index in range(len(LAYOUTS.get(model, ())))]


def run_config(model: str, sizes: dict[str, int]) -> RunConfig:
    return build(
        {
            "model": {"path": str(CONFIGS / model)},
            "data": {"prompts": ["unread"]},
            "cluster": {"device": "cpu", "trainer_ranks": sizes["ranks"]},
            "megatron": {"params_dtype": "bfloat16"} | {_SIZES[k]: v for k, v in sizes.items() if k != "ranks"},
            "train": {"replay": "off"},
        }
    )


@dataclass(frozen=True)
class Stage:
    """Contents of one stage's real modules: (local name, layers of its chunk, shape) of every tensor."""

    tensors: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    chunks: tuple[tuple[int, ...], ...]


def built_stages(config: RunConfig, hf: dict[str, Any]) -> list[Stage]:
    """One rank of every stage, built by megatron-core; once for models that differ in what builds nothing."""
    family = get_family(hf)
    key = repr((family.transformer_fields(hf), family.model_fields(hf).vocab_size, config.layout, config.megatron))
    if key not in _built:
        _built[key] = [_built_stage(config, hf, stage) for stage in range(config.layout.pp)]
    return _built[key]


_built: dict[str, list[Stage]] = {}


def _built_stage(config: RunConfig, hf: dict[str, Any], stage: int) -> Stage:
    with fake_process_group(config.layout, stage * (config.layout.world_size // config.layout.pp)):
        chunks = meta_chunks(policy_spec(config), hf)
    found: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for chunk in chunks:
        biases = [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")]
        found += [(name, layer_ids(chunk), tuple(t.shape)) for name, t in [*chunk.named_parameters(), *biases]]
    return Stage(tuple(found), tuple(layer_ids(chunk) for chunk in chunks))


def names_on_rank(stage: Stage, layout: ParallelLayout, ep_rank: int, experts: int) -> list[str]:
    """Canonical names on the ranks of one expert-parallel index."""
    return [canonical_name(name, experts // layout.ep * ep_rank, layers) for name, layers, _ in stage.tensors]


def buildable(model: str) -> bool:
    return not get_family(hf_config(model)).support.not_trained


@pytest.mark.parametrize(("model", "index"), CASES, ids=[f"{model} {LAYOUTS[model][i]}" for model, i in CASES])
def test_every_parameter_of_every_rank_is_made_by_one_rule(model: str, index: int) -> None:
    if not buildable(model):
        pytest.skip(get_family(hf_config(model)).support.not_trained)
    config, hf = run_config(model, LAYOUTS[model][index]), hf_config(model)
    family, layout = get_family(hf), config.layout
    table, experts = family.rules(hf), family.model_fields(hf).num_experts
    owners: Counter[str] = Counter()
    planned = config.megatron.stage_layers(family.model_fields(hf).num_layers)
    for stage, layers in zip(built_stages(config, hf), planned, strict=True):
        assert stage.chunks == layers
        for ep_rank in range(layout.ep):
            names = names_on_rank(stage, layout, ep_rank, experts)
            assert len(set(names)) == len(names)
            for name, (_, _, shape) in zip(names, stage.tensors, strict=True):
                rule = table.bound[name]
                if rule.is_expert or ep_rank == 0:
                    owners[name] += 1
                    assert rule.kind.local_shape(layout.etp if rule.is_expert else layout.tp) == shape, name
    assert set(owners.values()) == {1}
    table.check_model(owners)
    # A tied output layer is a copy of the embedding on the last of several stages, and no tensor on a single one.
    assert table.bound.keys() - owners.keys() == (set() if layout.pp > 1 else set(tied_copies(table)))


def tied_copies(table: RuleTable) -> list[str]:
    return [name for name, rule in table.bound.items() if not rule.exported]


def transformers_shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes that transformers would save for this config.json: its meta model, experts unfused again."""
    raw = {k: v for k, v in hf_config(model).items() if k not in HARMLESS or k == "model_type"}
    key = json.dumps(raw)
    if key not in _saved:
        _saved[key] = _saved_shapes(raw)
    return _saved[key]


_saved: dict[str, dict[str, tuple[int, ...]]] = {}


def _saved_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion

    if raw["model_type"] == "kimi_k2":  # not a class of transformers' own: DeepSeek-V3's, as its `architectures` says
        raw["model_type"] = "deepseek_v3"
    auto = AutoModelForImageTextToText if "text_config" in raw else AutoModelForCausalLM
    with torch.device("meta"):
        built = auto.from_config(AutoConfig.for_model(**raw), dtype=torch.bfloat16)
        saved = built.state_dict()
        if raw["model_type"] != "qwen3_5_moe":  # published as in memory, experts stacked
            saved = revert_weight_conversion(built, saved)
    return {name: tuple(tensor.shape) for name, tensor in saved.items()}


@pytest.mark.parametrize("model", MODELS)
def test_every_checkpoint_name_and_shape_is_the_one_of_transformers(model: str) -> None:
    hf = hf_config(model)
    family = get_family(hf)
    refuse_unread(family, hf)
    table = family.rules(hf)
    predicting = {name for name, part in table.untrained_names.items() if part == "mtp"}
    carried = predicting | set(table.aliases)  # transformers leaves multi-token prediction out
    ours = {name: shape for name, shape in table.hf_shapes().items() if name not in carried}
    theirs = {name: shape for name, shape in transformers_shapes(model).items() if name not in table.ignored}
    assert ours == theirs
    assert sum(map(math.prod, ours.values())) == sum(map(math.prod, theirs.values()))


def test_every_published_config_is_covered_in_three_layouts_one_of_them_large() -> None:
    assert MODELS == PUBLISHED and LAYOUTS.keys() == set(PUBLISHED)
    for model, layouts in LAYOUTS.items():
        assert len(layouts) >= 3, model
        assert max(sizes["ranks"] for sizes in layouts) >= 64, model
