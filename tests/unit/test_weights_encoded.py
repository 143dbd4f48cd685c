"""Weights that are sent quantised: the bits that the offline converter writes, in one bucket with their scales."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mslime.config.errors import CheckpointError
from mslime.config.layout import ParallelLayout
from mslime.convert.encoding import Encoded, Fp8Blocks, Int4Groups, encoded_weights
from mslime.convert.families import get_family
from mslime.convert.hf import HFCheckpoint
from mslime.offline.jobs import run_job
from mslime.offline.requantise import ToFp8, ToInt4
from mslime.weights.buckets import encode, named_tensors
from mslime.weights.weight_plan import DTYPE_BYTES, Senders, WeightPlan, build_plan, encoded_plan
from tests.fixtures.tiny_models import make_tiny_qwen3_moe


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 160, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("plain") / "model", **sizes)


@pytest.fixture(scope="module", params=["float32", "ue8m0"])
def fp8(plain: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    out = tmp_path_factory.mktemp("fp8") / "model"
    run_job(ToFp8(plain, power_of_two=request.param == "ue8m0"), out)
    return out


def plan_of(plain: Path, dtype: str = "float32") -> WeightPlan:
    config = json.loads((plain / "config.json").read_text())
    return build_plan(get_family(config).rules(config), Senders(ParallelLayout()), [[0, 1]], dtype, 1 << 18)


def sent(
    plan: WeightPlan, plain: Path, encoded: Encoded, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """What every bucket holds, filled with a checkpoint's weights as conversion would."""
    weights, found = load_file(plain / "model.safetensors"), dict[str, torch.Tensor]()
    for bucket in plan.buckets:
        flat = torch.cat([weights[piece.name].to(dtype).reshape(-1) for piece in bucket.pieces])
        found |= dict(named_tensors(bucket, encode(bucket, flat, encoded) if bucket.packed_dtype else flat))
    return found


def written_by(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


def config_of(checkpoint: Path) -> dict[str, object]:
    return json.loads((checkpoint / "config.json").read_text())


def assert_equal(found: dict[str, torch.Tensor], written: dict[str, torch.Tensor]) -> None:
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_what_is_sent_is_what_the_converter_writes(plain: Path, fp8: Path) -> None:
    encoded = encoded_weights(HFCheckpoint(fp8), config_of(fp8))
    assert encoded is not None and encoded.names
    assert_equal(sent(encoded_plan(plan_of(plain), encoded), plain, encoded), written_by(fp8))


def test_int4_is_what_the_converter_writes(plain: Path, tmp_path: Path) -> None:
    run_job(ToInt4(plain, group=32), tmp_path / "out")
    encoded = encoded_weights(HFCheckpoint(tmp_path / "out"), config_of(tmp_path / "out"))
    assert encoded is not None and encoded.encoding == Int4Groups(32) and len(encoded.names) == 2 * 8 * 3
    written = written_by(tmp_path / "out")
    assert_equal(sent(encoded_plan(plan_of(plain), encoded), plain, encoded), written)


def test_the_shape_of_int4_weights_is_copied_to_a_device_once() -> None:
    """Each such copy to a GPU waits for all its work."""
    encoding = Int4Groups(32)

    def shape_of(weight: torch.Tensor) -> torch.Tensor:
        return encoding.encode(weight)[2]

    first, other = shape_of(torch.ones(8, 64)), shape_of(torch.ones(64, 32))
    assert shape_of(torch.zeros(8, 64)) is first
    assert (first.tolist(), other.tolist(), first.dtype) == ([8, 64], [64, 32], torch.int64)
    assert shape_of(torch.ones(8, 64, device="meta")).device.type == "meta"


def test_int4_of_other_layers_than_experts_is_not_sent(plain: Path, tmp_path: Path) -> None:
    """Engines hold one `weight_shape` for what they join, so nobody could tell that they hold what was sent."""
    run_job(ToInt4(plain, group=32, include=r"q_proj"), tmp_path / "out")
    with pytest.raises(CheckpointError, match="INT4 of routed experts") as caught:
        encoded_weights(HFCheckpoint(tmp_path / "out"), config_of(tmp_path / "out"))
    assert "q_proj" in str(caught.value) and "convert bf16" in str(caught.value)


def test_it_is_what_numpy_computes(plain: Path, fp8: Path) -> None:
    """By the definition: the largest of a block is 448, and each number is the nearest of the 253 that FP8 has."""
    encoded = encoded_weights(HFCheckpoint(fp8), config_of(fp8))
    assert encoded is not None
    found = sent(encoded_plan(plan_of(plain), encoded), plain, encoded)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    weight = load_file(plain / "model.safetensors")[name].numpy()
    assert weight.shape == (160, 128)
    values = np.arange(256, dtype=np.uint8)
    table = torch.from_numpy(values).view(torch.float8_e4m3fn).float().numpy()
    table = np.unique(table[np.isfinite(table)])
    for row, first in enumerate((0, 128)):
        block = weight[first : first + 128]
        scale = np.float32(np.abs(block).max()) / np.float32(448)
        if encoded.encoding == Fp8Blocks(power_of_two=True):
            scale = np.float32(2.0 ** math.ceil(math.log2(float(scale))))
        assert found[f"{name}_scale_inv"][row, 0] == scale
        exact = (block / scale).astype(np.float64)
        ours = found[name][first : first + 128].float().numpy()
        nearest = np.abs(exact[:, :, None] - table).min(-1)
        assert (np.abs(exact - ours) == nearest).all()


def test_a_weight_and_its_scale_share_a_bucket_in_which_all_is_aligned(plain: Path, fp8: Path) -> None:
    encoded = encoded_weights(HFCheckpoint(fp8), config_of(fp8))
    assert encoded is not None
    before = plan_of(plain)
    plan = encoded_plan(before, encoded)
    assert len(plan.buckets) > 3
    for bucket in plan.buckets:
        names = {entry.name for entry in bucket.entries}
        assert {f"{name}_scale_inv" for name in names & encoded.names} <= names
        at = 0
        for entry, dtype in zip(bucket.entries, bucket.dtypes, strict=True):
            start = entry.offset if bucket.packed_dtype else entry.offset * DTYPE_BYTES[dtype]
            assert start == at and start % DTYPE_BYTES[dtype] == 0, entry
            at += entry.numel * DTYPE_BYTES[dtype]
        assert at == bucket.hf_bytes
    unchanged = [(a, b) for a, b in zip(before.buckets, plan.buckets, strict=True) if not b.packed_dtype]
    assert unchanged and all(a == b for a, b in unchanged), "nothing is quantised in them"
    for bucket in plan.buckets:
        quantised = {entry.name for entry in bucket.entries} & encoded.names
        assert bool(bucket.packed_dtype) == bool(quantised)
    written = sum(tensor.nbytes for tensor in written_by(fp8).values())
    assert plan.total_bytes == written < before.total_bytes / 2
    assert [b.local_numel for b in plan.buckets] == [b.local_numel for b in before.buckets]


def test_weights_of_odd_sizes_leave_their_scales_aligned(tmp_path: Path) -> None:
    odd = make_tiny_qwen3_moe(tmp_path / "odd", hidden_size=30, moe_intermediate_size=33, num_hidden_layers=2)
    before = plan_of(odd)
    names = frozenset({"model.layers.0.mlp.experts.0.up_proj.weight"})
    assert 30 * 33 % DTYPE_BYTES["float32"], "so that nothing wider may follow it at once"
    plan = encoded_plan(before, Encoded(Fp8Blocks(power_of_two=False), names, "FP8"))
    (bucket,) = [bucket for bucket in plan.buckets if bucket.packed_dtype]
    assert all(entry.offset % DTYPE_BYTES[entry.dtype] == 0 for entry in bucket.entries)


@pytest.mark.parametrize("kind", ["channel", "tensor"])
def test_other_scales_than_of_blocks_are_not_sent(fp8: Path, kind: str) -> None:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": kind}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    section = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups, "ignore": []}
    with pytest.raises(CheckpointError, match="FP8 with a scale for each block, or INT4 in groups"):
        encoded_weights(HFCheckpoint(fp8), config_of(fp8) | {"quantization_config": section})


def test_bfloat16_on_the_wire_keeps_what_is_not_quantised(plain: Path, fp8: Path) -> None:
    encoded = encoded_weights(HFCheckpoint(fp8), config_of(fp8))
    assert encoded is not None
    found = sent(encoded_plan(plan_of(plain, "bfloat16"), encoded), plain, encoded, torch.bfloat16)
    assert found["model.norm.weight"].dtype == found["model.layers.0.mlp.gate.weight"].dtype == torch.bfloat16
    assert found["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert found["model.layers.0.self_attn.q_proj.weight_scale_inv"].dtype == torch.float32


def test_a_plain_checkpoint_sends_plain_weights(plain: Path) -> None:
    assert encoded_weights(HFCheckpoint(plain), config_of(plain)) is None
