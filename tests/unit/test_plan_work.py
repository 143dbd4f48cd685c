"""The length at which attention costs as much as everything else, against counts by hand from published configs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mslime.checks.resolve import with_quadratic_tokens
from mslime.config.train import TrainConfig
from mslime.convert.families import read_hf_config
from mslime.convert.flops import quadratic_tokens

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"


def published(name: str) -> dict[str, float]:
    """Numbers of a config.json, as float64."""
    found = json.loads((CONFIGS / name / "config.json").read_text())
    return {key: np.float64(value) for key, value in found.items() if isinstance(value, int | float)}


def meets(linear: float, per_pair: float) -> float:
    """n where n tokens of `linear` products equal the n^2 / 2 pairs of causal attention."""
    return linear / (per_pair / 2)


def dense_by_hand() -> float:
    c = published("qwen3-4B")
    h, q, kv = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    layer = h * q + 2 * h * kv + q * h + 3 * h * c["intermediate_size"]
    return meets(c["num_hidden_layers"] * layer + h * c["vocab_size"], c["num_hidden_layers"] * 2 * q)


def moe_by_hand() -> float:
    c = published("qwen3-30B-A3B")
    h, q, kv = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    experts = c["num_experts_per_tok"] * 3 * h * c["moe_intermediate_size"] + h * c["num_experts"]
    layer = h * q + 2 * h * kv + q * h + experts
    return meets(c["num_hidden_layers"] * layer + h * c["vocab_size"], c["num_hidden_layers"] * 2 * q)


def latent_by_hand() -> float:
    c = published("deepseek-v3")
    h, heads, nope, rope = c["hidden_size"], c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
    value, rank = c["v_head_dim"], c["kv_lora_rank"]
    query = h * c["q_lora_rank"] + c["q_lora_rank"] * heads * (nope + rope)
    attention = query + h * (rank + rope) + rank * heads * (nope + value) + heads * value * h
    routed = (c["num_experts_per_tok"] + c["n_shared_experts"]) * 3 * h * c["moe_intermediate_size"]
    dense, layers = c["first_k_dense_replace"], c["num_hidden_layers"]
    mlps = dense * 3 * h * c["intermediate_size"] + (layers - dense) * (routed + h * c["n_routed_experts"])
    return meets(layers * attention + mlps + h * c["vocab_size"], layers * heads * (nope + rope + value))


def windows_by_hand() -> float:
    """gpt-oss: every other layer sees 128 tokens."""
    c = published("gpt-oss-20b")
    h, q, kv = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    experts = c["num_experts_per_tok"] * 3 * h * c["intermediate_size"] + h * c["num_local_experts"]
    half = c["num_hidden_layers"] / 2
    layers = 2 * half * (h * q + 2 * h * kv + q * h + experts) + half * c["sliding_window"] * 2 * q
    return meets(layers + h * c["vocab_size"], half * 2 * q)


BY_HAND = {
    "qwen3-4B": dense_by_hand,
    "qwen3-30B-A3B": moe_by_hand,
    "deepseek-v3": latent_by_hand,
    "gpt-oss-20b": windows_by_hand,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_count_is_that_by_hand(name: str) -> None:
    found = quadratic_tokens(read_hf_config(CONFIGS / name))
    assert found == pytest.approx(BY_HAND[name](), rel=1e-4 if name == "gpt-oss-20b" else 1e-9)


def test_a_plain_dense_model_is_at_twelve_times_its_hidden_size() -> None:
    """Heads as wide as the model, an MLP of 8 h^2 in three matrices instead of two, next to no vocabulary."""
    hidden = 3072
    config = json.loads((CONFIGS / "qwen2.5-7B" / "config.json").read_text()) | {
        "hidden_size": hidden, "num_attention_heads": 24, "num_key_value_heads": 24,
        "intermediate_size": hidden * 8 // 3, "vocab_size": 1,
    }  # fmt: skip
    assert quadratic_tokens(config) == pytest.approx(12 * hidden, rel=1e-3)


def test_linear_attention_has_no_pairs() -> None:
    """Only every fourth layer of Qwen3-Next has pairs."""
    found = quadratic_tokens(read_hf_config(CONFIGS / "qwen3-next-80B-A3B"))
    assert found is not None and found > 2 * (quadratic_tokens(read_hf_config(CONFIGS / "qwen3-30B-A3B")) or 0)


@pytest.mark.parametrize(("given", "expected"), [("auto", 27278.0), (None, None), (5000, 5000.0)])
def test_a_number_and_null_are_kept_and_auto_is_counted(given: object, expected: float | None) -> None:
    train = TrainConfig.model_validate({"quadratic_tokens": given})
    assert with_quadratic_tokens(train, read_hf_config(CONFIGS / "qwen3-4B")).quadratic_tokens == expected
