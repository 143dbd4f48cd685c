"""The expected digests: SGLang's hashes recomputed, its fused layouts rebuilt, and one changed bit noticed."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from mslime.weights.commit import compare
from mslime.weights.digest import engine_digest, sha_hash, tiled_hash
from mslime.weights.errors import WeightSyncError
from mslime.weights.image import EngineImage, EngineLayout, engine_parameter, engine_parameters
from tests.unit.weights_world import moe_table, whole_tensors

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
    monkeypatch.setattr("mslime.weights.digest._CHUNK_TILES", 2)
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
def test_the_image_of_every_engine_rank_equals_sglangs_loaders(layout: EngineLayout) -> None:
    whole = whole_tensors(moe_table())
    image = EngineImage(moe_table().hf_shapes(), 2, layout)
    for name in sorted(whole, key=lambda n: hashlib.md5(n.encode()).digest()):  # any order
        image.add(name, whole[name])
    for rank in range(layout.tp):
        expected = engine_reference(whole, layout, rank)
        digests = {name: engine_digest(torch.from_numpy(array.copy())) for name, array in expected.items()}
        assert image.digests[rank] == digests


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_norms_of_all_heads_go_with_their_heads_and_norms_of_each_head_to_every_rank(tp: int, joint: bool) -> None:
    at, kv_heads, head_dim = "model.layers.0.self_attn.", 2, 4
    rows = {"q": 4 * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    whole = {f"{at}{part}_proj.weight": torch.randn(n, 8) for part, n in rows.items()}
    q, k = (torch.randn(rows[part] if joint else head_dim) for part in "qk")
    whole |= {f"{at}q_norm.weight": q, f"{at}k_norm.weight": k}
    image = EngineImage({name: tuple(tensor.shape) for name, tensor in whole.items()}, kv_heads, EngineLayout(tp))
    for name, tensor in whole.items():
        image.add(name, tensor)
    for rank in range(tp):
        own_q = q.view(tp, -1)[rank] if joint else q
        own_k = k.view(min(tp, kv_heads), -1)[rank * min(tp, kv_heads) // tp] if joint else k
        found = [image.digests[rank][f"{at}{part}_norm.weight"] for part in "qk"]
        assert found == [engine_digest(own_q.clone()), engine_digest(own_k.clone())]


def test_one_tensor_of_gate_and_up_projections_is_cut_like_two() -> None:
    gate, up = torch.randn(6, 4), torch.randn(6, 4)
    layout, name = EngineLayout(2), "model.layers.0.mlp.{}_proj.weight"
    two = EngineImage({name.format("gate"): (6, 4), name.format("up"): (6, 4)}, 2, layout)
    one = EngineImage({name.format("gate_up"): (12, 4)}, 2, layout)
    two.add(name.format("gate"), gate), two.add(name.format("up"), up)
    one.add(name.format("gate_up"), torch.cat([gate, up]))
    assert one.digests == two.digests and one.digests[0] != one.digests[1]


def test_what_engines_hold_in_float32_is_compared_in_float32() -> None:
    gate, norm = torch.randn(4, 8).bfloat16(), torch.randn(8).bfloat16()
    shapes = {"model.layers.0.mlp.gate.weight": (4, 8), "model.norm.weight": (8,)}
    image = EngineImage(shapes, 2, EngineLayout(), (".mlp.gate.weight",))
    for name, tensor in zip(shapes, (gate, norm), strict=True):
        image.add(name, tensor)
    expected = dict(zip(shapes, (engine_digest(gate.float()), engine_digest(norm)), strict=True))
    assert image.digests == [expected]


def test_a_buffer_may_be_reused_while_its_tensors_wait_for_others() -> None:
    whole = whole_tensors(moe_table())
    image, reused = (
        EngineImage(moe_table().hf_shapes(), 2, EngineLayout()),
        EngineImage(moe_table().hf_shapes(), 2, EngineLayout()),
    )
    for name, tensor in whole.items():
        image.add(name, tensor)
        buffer = tensor.clone()
        reused.add(name, buffer)
        buffer.zero_()
    assert image.digests == reused.digests


def test_every_hf_tensor_belongs_to_one_engine_parameter() -> None:
    assert engine_parameter("model.layers.0.mlp.experts.12.up_proj.weight") == "model.layers.0.mlp.experts.w13_weight"
    assert engine_parameter("model.layers.0.mlp.experts.12.down_proj.weight") == "model.layers.0.mlp.experts.w2_weight"
    assert engine_parameter("model.layers.0.self_attn.k_proj.weight") == "model.layers.0.self_attn.qkv_proj.weight"
    assert engine_parameter("model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.gate_up_proj.weight"
    assert engine_parameter("model.layers.0.self_attn.k_norm.weight") == "model.layers.0.self_attn.k_norm.weight"


def test_latent_attention_fuses_its_down_projections_only_where_the_query_has_one() -> None:
    a, both = "model.layers.0.self_attn.", ("kv_a_proj_with_mqa.weight", "kv_b_proj.weight", "o_proj.weight")
    latent = engine_parameters(f"{a}{name}" for name in ("q_a_proj.weight", "q_b_proj.weight", *both))
    assert latent.pop(f"{a}fused_qkv_a_proj_with_mqa.weight") == [f"{a}q_a_proj.weight", f"{a}{both[0]}"]
    assert latent == {name: [name] for name in (f"{a}q_b_proj.weight", f"{a}{both[1]}", f"{a}{both[2]}")}
    direct = engine_parameters(f"{a}{name}" for name in ("q_proj.weight", *both))
    assert direct == {name: [name] for name in direct} and f"{a}q_proj.weight" in direct


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
