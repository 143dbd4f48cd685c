"""The expected digests: SGLang's hashes recomputed, its fused layouts rebuilt, and one changed bit noticed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mslime.backends.sglang.comparison import compare
from mslime.backends.sglang.digest import engine_digest, sha_hash, tiled_hash
from mslime.config.errors import WeightSyncError
from mslime.config.layout import EngineLayout
from mslime.convert.engine import EngineParameter, engine_parameters
from mslime.convert.families import get_family
from mslime.convert.families.gqa import Attention, attention_rules
from mslime.convert.kinds import FusedGatedMLP, GatedMLP, Replicated
from mslime.convert.table import Rule, RuleTable
from mslime.weights.expected import ExpectedDigests
from tests.unit.weights_world import moe_table, whole_tensors

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def slow_tiled_hash(data: bytes) -> int:
    """SGLang's GPU hash word by word in Python integers (sglang/kernels/ops/memory/gpu_tensor_hash.py)."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & M32
        x ^= x >> 13
        x = x * 0xC2B2AE35 & M32
        return x ^ x >> 16

    def rotate(x: int, r: int) -> int:
        return (x << r | x >> 32 - r) & M32

    data += b"\0" * (-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    seed = 0x243F6A88
    seed2 = (seed * 0x9E3779B1 ^ 0xDEADBEEF) & M32
    total = 0
    for tile in range(0, len(words), 8192):
        h1 = h2 = 0
        for i in range(tile, min(tile + 8192, len(words))):
            h1 += mix(words[i] ^ ((i * 0x27D4EB2D + seed & M32) ^ rotate(i, 15)))
            h2 += mix(words[i] ^ ((i * 0x165667B1 + seed2 & M32) ^ rotate(i, 13)))
        n = len(words) * 4 & M32
        total += mix(h1 & M32 ^ n) << 32 | mix(h2 & M32 ^ n)
    x = total & M64
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & M64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & M64
    return x ^ x >> 31


@pytest.mark.parametrize("numel", [1, 3, 8192, 8193, 20001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiled_hash_equals_the_word_by_word_reference(numel: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    assert tiled_hash(tensor) == slow_tiled_hash(tensor.view(torch.uint8).numpy().tobytes())


def test_tiled_hash_does_not_depend_on_how_it_is_cut_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(5 * 8192 + 17, generator=torch.Generator().manual_seed(0))
    whole = tiled_hash(tensor)
    monkeypatch.setattr("mslime.backends.sglang.digest._CHUNK_TILES", 2)
    assert tiled_hash(tensor) == whole


def test_cpu_digest_is_the_head_of_sha256() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3).T
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert f"{sha_hash(tensor):016x}" == hashlib.sha256(data).hexdigest()[:16] == engine_digest(tensor)


@pytest.mark.parametrize("digest", [sha_hash, tiled_hash])
def test_one_bit_changes_the_digest(digest: Any) -> None:
    tensor = torch.randn(9000, generator=torch.Generator().manual_seed(1))
    before = digest(tensor)
    tensor.view(torch.int32)[4711] ^= 1
    assert digest(tensor) != before


def digests_of(
    parameters: Iterable[EngineParameter], whole: Mapping[str, torch.Tensor], layout: EngineLayout
) -> list[dict[str, str]]:
    """What is expected of each rank when these tensors arrive in this order."""
    expected = ExpectedDigests(whole.keys(), parameters, layout, engine_digest)
    for name, tensor in whole.items():
        expected.add(name, tensor)
    return expected.digests


def engine_reference(whole: dict[str, torch.Tensor], layout: EngineLayout, rank: int) -> dict[str, np.ndarray]:
    """What SGLang's loaders leave on one rank, by hand, for the model of `weights_world` (2 KV heads of 4)."""
    w = {name: tensor.numpy() for name, tensor in whole.items()}
    tp = layout.tp

    def rows(x: np.ndarray, r: int = rank, n: int = tp) -> np.ndarray:
        return x[r * len(x) // n : (r + 1) * len(x) // n]

    def columns(x: np.ndarray, r: int = rank, n: int = tp) -> np.ndarray:
        return rows(x.T, r, n).T

    held: dict[str, np.ndarray] = {"model.norm.weight": w["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        held[name] = rows(np.concatenate([w[name], np.zeros((64 - 21, 8), np.float32)]))
    for layer in range(4):
        p = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            held[f"{p}{name}.weight"] = w[f"{p}{name}.weight"]
        q, k, v = (w[f"{p}self_attn.{part}_proj.weight"] for part in "qkv")
        kv_head = rank * 2 // tp if tp > 2 else None
        own_kv = [x[kv_head * 4 : kv_head * 4 + 4] if kv_head is not None else rows(x) for x in (k, v)]
        held[f"{p}self_attn.qkv_proj.weight"] = np.concatenate([rows(q), *own_kv])
        held[f"{p}self_attn.o_proj.weight"] = columns(w[f"{p}self_attn.o_proj.weight"])
        if layer == 2:
            gate, up, down = (w[f"{p}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            held[f"{p}mlp.gate_up_proj.weight"] = np.concatenate([rows(gate), rows(up)])
            held[f"{p}mlp.down_proj.weight"] = columns(down)
            continue
        held[f"{p}mlp.gate.weight"] = w[f"{p}mlp.gate.weight"]
        moe_tp, per_rank = tp // layout.ep, 8 // layout.ep
        w13, w2 = [], []
        for expert in range(rank // moe_tp * per_rank, (rank // moe_tp + 1) * per_rank):
            gate, up, down = (w[f"{p}mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
            share = (rank % moe_tp, moe_tp)
            w13.append(np.concatenate([rows(gate, *share), rows(up, *share)]))
            w2.append(columns(down, *share))
        held[f"{p}mlp.experts.w13_weight"], held[f"{p}mlp.experts.w2_weight"] = np.stack(w13), np.stack(w2)
    return held


@pytest.mark.parametrize(
    "layout", [EngineLayout(), EngineLayout(2, 1), EngineLayout(2, 2), EngineLayout(4, 2)], ids=str
)
def test_what_is_expected_of_every_engine_rank_equals_sglangs_loaders(layout: EngineLayout) -> None:
    whole = whole_tensors(moe_table())
    in_any_order = dict(sorted(whole.items(), key=lambda item: hashlib.md5(item[0].encode()).digest()))
    found = digests_of(engine_parameters(moe_table()), in_any_order, layout)
    for rank in range(layout.tp):
        expected = engine_reference(whole, layout, rank)
        digests = {name: engine_digest(torch.from_numpy(array.copy())) for name, array in expected.items()}
        assert found[rank] == digests


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_norms_of_all_heads_go_with_their_heads_and_norms_of_each_head_to_every_rank(tp: int, joint: bool) -> None:
    at, heads, kv_heads, head_dim = "model.layers.0.self_attn.", 4, 2, 4
    attention = Attention(8, heads, kv_heads, head_dim, norm="projection" if joint else "head")
    table = RuleTable(attention_rules(attention, [0]))
    whole = whole_tensors(table)
    q, k = whole[f"{at}q_norm.weight"], whole[f"{at}k_norm.weight"]
    digests = digests_of(engine_parameters(table), whole, EngineLayout(tp))
    for rank in range(tp):
        own_q = q.view(tp, -1)[rank] if joint else q
        own_k = k.view(min(tp, kv_heads), -1)[rank * min(tp, kv_heads) // tp] if joint else k
        found = [digests[rank][f"{at}{part}_norm.weight"] for part in "qk"]
        assert found == [engine_digest(own_q.clone()), engine_digest(own_k.clone())]


def test_one_tensor_of_gate_and_up_projections_is_cut_like_two() -> None:
    gate, up = torch.randn(6, 4), torch.randn(6, 4)
    name = "decoder.layers.{layer}.mlp.linear_fc1.weight"
    two = RuleTable((Rule(name, ("a.gate_proj.weight", "a.up_proj.weight"), GatedMLP(6, 4), (0,)),))
    one = RuleTable((Rule(name, ("a.gate_up_proj.weight",), FusedGatedMLP(6, 4), (0,)),))
    apart = {"a.gate_proj.weight": gate, "a.up_proj.weight": up}
    of_two = digests_of(engine_parameters(two), apart, EngineLayout(2))
    of_one = digests_of(engine_parameters(one), {"a.gate_up_proj.weight": torch.cat([gate, up])}, EngineLayout(2))
    assert of_one == of_two and of_one[0] != of_one[1] and list(of_one[0]) == ["a.gate_up_proj.weight"]


def test_what_engines_hold_in_float32_is_compared_in_float32() -> None:
    name, rows = "model.layers.0.mlp.gate.weight", Replicated((4, 8))
    table = RuleTable((Rule("router", (name,), rows), Rule("norm", ("model.norm.weight",), Replicated((8,)))))
    whole = {name: torch.randn(4, 8).bfloat16(), "model.norm.weight": torch.randn(8).bfloat16()}
    parameters = engine_parameters(table, (".mlp.gate.weight",))
    expected = {
        name: engine_digest(whole[name].float()),
        "model.norm.weight": engine_digest(whole["model.norm.weight"]),
    }
    assert digests_of(parameters, whole, EngineLayout()) == [expected]


def test_a_buffer_may_be_reused_while_its_tensors_wait_for_others() -> None:
    whole = whole_tensors(moe_table())
    parameters, layout = engine_parameters(moe_table()), EngineLayout()
    reused = ExpectedDigests(whole.keys(), parameters, layout, engine_digest)
    for name, tensor in whole.items():
        buffer = tensor.clone()
        reused.add(name, buffer)
        buffer.zero_()
    assert reused.digests == digests_of(parameters, whole, layout)


def test_a_stage_expects_its_own_parameters_only_and_refuses_to_leave_a_tensor_out() -> None:
    parameters = engine_parameters(moe_table())
    whole = whole_tensors(moe_table())
    stage = {name for name in whole if ".layers.1." in name}
    expected = ExpectedDigests(stage, parameters, EngineLayout(), engine_digest)
    for name in stage:
        expected.add(name, whole[name])
    assert all(".layers.1." in name for name in expected.digests[0]) and len(expected.digests[0]) == 9
    with pytest.raises(AssertionError, match="self_attn.k_proj"):
        ExpectedDigests(stage - {"model.layers.1.self_attn.q_proj.weight"}, parameters, EngineLayout(), engine_digest)


def test_latent_attention_joins_its_down_projections_only_where_the_query_has_one() -> None:
    a, both = "model.layers.0.self_attn.", ("kv_a_proj_with_mqa.weight", "kv_b_proj.weight", "o_proj.weight")
    latent = latent_attention({"q_lora_rank": 4})
    assert latent[f"{a}fused_qkv_a_proj_with_mqa.weight"] == (f"{a}q_a_proj.weight", f"{a}{both[0]}")
    assert f"{a}q_a_proj.weight" not in latent and f"{a}{both[0]}" not in latent
    direct = latent_attention({"q_lora_rank": None})
    for name in ("q_proj.weight", *both):
        assert direct[a + name] == (a + name,)


def latent_attention(changes: dict[str, object]) -> dict[str, tuple[str, ...]]:
    """The tensors of each engine parameter of DeepSeek-V2-Lite."""
    config = json.loads((CONFIGS / "deepseek-v2-lite" / "config.json").read_text()) | changes
    family = get_family(config)
    return {parameter.name: parameter.parts for parameter in family.engine_parameters(family.rules(config))}


@pytest.mark.parametrize(
    "model",
    ["deepseek-v2-lite", "glm4-9b", "gpt-oss-20b", "mixtral-8x7B", "olmoe-1B-7B", "qwen2.5-0.5B", "qwen3.5-35B-A3B"],
)
def test_every_sent_tensor_belongs_to_one_engine_parameter(model: str) -> None:
    config = json.loads((CONFIGS / model / "config.json").read_text())
    family = get_family(config)
    table = family.rules(config)
    parameters = family.engine_parameters(table)
    sent = Counter(name for parameter in parameters for name in parameter.parts)
    assert sent.keys() == {name for rule in table.bound.values() if rule.exported for name in rule.hf_names}
    assert set(sent.values()) == {1} and len({parameter.name for parameter in parameters}) == len(parameters)


def answer(tp_rank: int, checksums: dict[str, str]) -> dict[str, Any]:
    """One rank of `/weights_checker`'s answer."""
    return {"checksums": checksums, "parallelism_info": [{"tp_rank": tp_rank}]}


def test_comparison_names_engine_rank_and_parameter() -> None:
    expected = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    good = [answer(1, {"a": "3", "b": "4"}), answer(0, {"a": "1", "b": "2"})]
    assert compare("http://e", good, expected) == 4
    with pytest.raises(WeightSyncError, match=r"http://e rank 1: b.*1 of 2.*reports 5.*expects 4"):
        compare("http://e", [good[1], answer(1, {"a": "3", "b": "5"})], expected)
    with pytest.raises(WeightSyncError, match=r"rank 0: b.*reports None"):
        compare("http://e", [good[0], answer(0, {"a": "1"})], expected)
    with pytest.raises(WeightSyncError, match=r"rank 0: extra"):
        compare("http://e", [good[0], answer(0, {"a": "1", "b": "2", "extra": "9"})], expected)
    with pytest.raises(WeightSyncError, match=r"ranks \[0\] answered, 2 hold weights"):
        compare("http://e", [good[1]], expected)
