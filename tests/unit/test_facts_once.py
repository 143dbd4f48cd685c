"""Facts that several rooms need are decided in one place. A second place is a copy, and copies diverge: one of the
dtype broke every bfloat16 checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "mslime"
PACKAGES = (ROOT, ROOT.parent / "mslime_plugins")

FACTS = {
    "where config.json keeps the language model": (
        r'"text_config"',
        # What else writes or checks that section: exports, quantised checkpoints, and the family that has it.
        {"config/model_facts.py", "convert/quantised.py", "convert/families/qwen3_next.py"},
    ),
    "the dtype that config.json names": (
        r'"torch_dtype"\]?\)|"torch_dtype"\) if', {"config/model_facts.py"},
    ),
    "the ends of a sequence": (r'\.get\("eos_token_id"', {"config/model_facts.py"}),
    "the dtype of the trainer's parameters": (r"params_dtype or ", {"config/model_facts.py"}),
    "whether there is a GPU": (
        r"nvidia-smi\"|cuda\.is_available\(\)",
        # `environment` explains why there is none; the others ask torch before they touch CUDA.
        {
            "run/ray_cluster.py", "checks/environment.py", "backends/megatron/model/megatron_config.py",
            "backends/megatron/checkpoint.py", "backends/cpu/megatron_patches.py",
        },
    ),
    "recompute's defaults": (r'"core_attn"[,}\]]', {"config/megatron.py"}),
    "parameters that stay in float32": (r"\.self_attention\.A_log", {"convert/families/qwen3_next.py"}),
    "what engines are asked for weights": (
        r'"/(begin_weight|end_weight|init_weights|update_weights|update_weight_|destroy_weights|weights_checker)',
        {"backends/sglang/client.py", "backends/sglang/handshake.py"},
    ),
    "names of transports": (
        r'"(broadcast|relay|handles|shm|checkpoint_engine)"',
        {"config/transports.py", "weights/memory.py", "transports/checkpoint_engine.py"},
    ),
    "how engines join tensors": (r"qkv_proj\.|w13'", set[str]()),
    "how engines are spoken to": (r"import (httpx|requests|urllib\.request)", set[str]()),
    "the engine's padding of the vocabulary": (r"VOCAB\w* = 64", {"planner/engine.py"}),
    "estimates of the KL": (r"expm1", {"algorithms/token_batch.py"}),
    "whose routes are followed": (
        r'replay [!=]= "r3"',
        {"config/model_facts.py", "rollout/group_files.py", "config/warnings.py"},
    ),
    "the rank grid": (r"rank\)? (//|%) \(?(self\.)?_?layout\.|world_size // (self\.)?_?layout\.pp", set[str]()),
    "choices of settings": (
        r'Literal\["(k1|abort|r3|some|all)", "',
        {"config/base.py"},
    ),
    "which dtype stands for `auto`": (
        r'or "(bfloat16|float16|float32)"|"(bfloat16|float16|float32)" if |else "(bfloat16|float16|float32)"',
        {"config/model_facts.py", "backends/sglang/handshake.py"},  # the second one knows SGLang's own rule
    ),
    "whether experts are grouped": (r'get\("moe_grouped_gemm", ', {"config/megatron.py"}),
    "who is on whose GPUs": (
        r'placement [!=]= "(colocated|separate|shared)"',
        {"config/cluster.py", "config/schema.py", "config/engines.py"},  # each of a placement of its own
    ),
    "whether engines are given adapters alone": (
        r'lora\.sync [!=]= "adapter"',
        {"config/schema.py", "config/lora.py"},  # the second one refuses it
    ),
    "the scale of an adapter": (r"\.alpha / |math\.sqrt\(self\.rank\)", {"config/lora.py"}),
    "versions of adapters that an engine has at once": (r"max_staleness \+ 2", {"config/schema.py"}),
    "how a checkpoint says that it is quantised": (
        r'"quant_method"', {"convert/quantised.py", "offline/requantise.py"},  # the one reads it, the other writes it
    ),
    "blocks of FP8 weights": (r"\(128, 128\)", {"convert/quantised.py"}),
    "rows that FP8 needs": (r'"blockwise": \d', {"config/fp8.py"}),
    "whether a package is installed": (r"PackageNotFoundError", {"config/passthrough.py"}),
    "the sizes of a model": (r"\n    (num_experts|moe_layer_ids): ", {"config/model_facts.py"}),
    "routed or not": (r'"n_routed_experts", "num_local_experts"', set[str]()),
}  # fmt: skip


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_has_one_home(fact: str) -> None:
    pattern, homes = FACTS[fact]
    found = {
        str(path.relative_to(package))
        for package in PACKAGES
        for path in package.rglob("*.py")
        if re.search(pattern, path.read_text("utf-8"))
    }
    assert found <= homes, f"{fact} is decided a second time in {sorted(found - homes)}"
    assert homes <= found, f"{sorted(homes - found)} has nothing to do with it any more"


def test_the_weights_room_names_no_engine() -> None:
    """Ranks that send are handed the engines (`weights.transport.EnginePort`); what they are is the engine room's."""
    files = [*(ROOT / "weights").glob("*.py"), *(ROOT.parent / "mslime_plugins/transports").glob("*.py")]
    naming = [path.name for path in files if "sglang" in path.read_text("utf-8").lower()]
    assert not naming
