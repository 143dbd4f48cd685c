"""Quantised checkpoints: the numbers are the engines' own, slices are parts of the whole, other methods are refused."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from mslime.config.errors import CheckpointError
from mslime.convert import quantised as codecs
from mslime.convert.hf import HFCheckpoint
from mslime.convert.quantised import check_quantisation, without_quantisation

FP8_BLOCK: dict[str, object] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"


def compressed(**weights: Any) -> dict[str, object]:
    """A quantization_config as compressed-tensors writes it."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {"quant_method": "compressed-tensors", "format": "any", "config_groups": {"group_0": group}, "ignore": []}


FP8_CHANNEL = compressed(type="float", num_bits=8, strategy="channel")
INT4 = compressed(type="int", num_bits=4, strategy="group", group_size=32)


def of_sglang(*names: str) -> Callable[..., Any]:
    """The last of some functions of SGLang's own fp8_utils, without importing SGLang and what it needs."""
    root = importlib.util.find_spec("sglang")
    assert root is not None and root.origin is not None
    path = Path(root.origin).parent / "srt" / "layers" / "quantization" / "fp8_utils.py"
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} == set(names)
    scope: dict[str, Any] = {
        "torch": torch, "List": list, "Tuple": tuple, "ceil_align": lambda x, y: -(-x // y) * y,
        "align": lambda x, y: -(-x // y) * y,
    }  # fmt: skip
    exec(compile(tree, str(path), "exec"), scope)
    return scope[names[-1]]


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(0.02).bfloat16()


@pytest.mark.parametrize("shape", [(256, 384), (576, 200), (100, 130)], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_blocks_are_dequantised_to_sglangs_bits(shape: tuple[int, int], power_of_two: bool) -> None:
    original = weight(*shape)
    quantised, scales = codecs.fp8_quantise(original, power_of_two=power_of_two)
    ours = codecs.fp8_dequantise(quantised, scales, codecs.FP8_BLOCK, torch.bfloat16)
    assert torch.equal(ours, of_sglang("block_quant_dequant")(quantised, scales, [128, 128], torch.bfloat16))
    # Half a step of 32 between 256 and 448, and bfloat16's own rounding.
    largest = original.float().abs().max()
    assert (ours.float() - original.float()).abs().max() <= largest / 448 * 17 * (2 if power_of_two else 1)


def test_power_of_two_scales_and_weights_are_sglangs_own() -> None:
    original = weight(300, 260)
    quantised, scales = codecs.fp8_quantise(original, power_of_two=True)
    expected, factors = of_sglang("ceil_to_ue8m0", "per_block_cast_to_fp8")(original)
    assert torch.equal(scales, factors) and torch.equal(quantised.view(torch.uint8), expected.view(torch.uint8))


def test_exact_scales_bring_the_largest_weight_of_a_block_to_448() -> None:
    original = weight(256, 256)
    quantised, scales = codecs.fp8_quantise(original, power_of_two=False)
    blocks = original.float().view(2, 128, 2, 128).abs().amax((1, 3))
    assert torch.equal(scales, blocks / 448)
    assert torch.equal(quantised.float().view(2, 128, 2, 128).abs().amax((1, 3)), torch.full((2, 2), 448.0))


def test_a_block_of_zeros_stays_zero() -> None:
    quantised, scales = codecs.fp8_quantise(torch.zeros(130, 128), power_of_two=False)
    assert (scales == 1).all() and not codecs.fp8_dequantise(quantised, scales, (128, 128), torch.float32).any()


@pytest.mark.parametrize("group", [32, 64])
def test_int4_is_what_compressed_tensors_packs_and_unpacks(group: int) -> None:
    original = weight(200, 128)
    packed, scales = codecs.int4_quantise(original, group)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(original.shape)}
    theirs = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
    ours = codecs.int4_dequantise(packed, scales, group, torch.bfloat16)
    assert torch.equal(ours, theirs)
    again = PackedQuantizationCompressor.compress({"weight": theirs, "weight_scale": scales}, scheme)
    assert torch.equal(again["weight_packed"], packed)
    step = scales.float().repeat_interleave(group, 1)
    # The largest of a group falls on 7.5 steps, of which 7 are left; scale and product are rounded to bfloat16.
    assert ((ours.float() - original.float()).abs() <= 0.56 * step).all()


def fp8_by_blocks(weight: torch.Tensor, block: tuple[int, int], power_of_two: bool) -> tuple[torch.Tensor, ...]:
    """A slow reference: one block after the other."""
    grid = [-(-size // side) for size, side in zip(weight.shape, block, strict=True)]
    scales, quantised = torch.empty(grid), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row, column in itertools.product(*map(range, grid)):
        here = slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1])
        largest = float(weight[here].float().abs().max())
        scale = np.float32(largest) / np.float32(448) if largest else np.float32(1)
        if power_of_two:
            scale = np.float32(2.0 ** math.ceil(math.log2(scale)))
        scales[row, column] = float(scale)
        quantised[here] = (weight[here].float() / float(scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return quantised, scales


def int4_by_rows(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A slow reference: one row after the other."""
    packed, scales = list[list[int]](), list[torch.Tensor]()
    for row in weight:
        grouped = row.float().view(-1, group)
        scale = (grouped.abs().amax(1) / 7.5).to(weight.dtype)
        scale[scale == 0] = torch.finfo(weight.dtype).eps
        values = ((grouped / scale.float()[:, None]).round().clamp(-8, 7) + 8).int().view(-1, 8).tolist()
        words = [sum(value << 4 * place for place, value in enumerate(word)) for word in values]
        packed.append([word - (word >> 31 << 32) for word in words])
        scales.append(scale)
    return torch.tensor(packed, dtype=torch.int32), torch.stack(scales)


@pytest.mark.parametrize("at_once", [1, 200, 1 << 24])
@given(
    st.integers(1, 9), st.integers(1, 12), st.sampled_from([(4, 4), (2, 8), (3, 5)]), st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 9),
)  # fmt: skip
def test_fp8_is_the_same_block_by_block_and_at_once(
    at_once: int, rows: int, columns: int, block: tuple[int, int], power_of_two: bool, dtype: torch.dtype, seed: int
) -> None:
    weight = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 5)).to(dtype)
    weight[: block[0], : block[1]] *= seed % 2  # a block of zeros
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(codecs.AT_ONCE, "cpu", at_once)
        found = codecs.fp8_quantise(weight, block, power_of_two=power_of_two)
    quantised, scales = fp8_by_blocks(weight, block, power_of_two)
    assert torch.equal(found[0].view(torch.uint8), quantised.view(torch.uint8)) and torch.equal(found[1], scales)


@pytest.mark.parametrize("at_once", [1, 100, 1 << 24])
@given(st.integers(1, 9), st.sampled_from([(16, 8), (32, 16), (64, 32)]), st.booleans(), st.integers(0, 9))
def test_int4_is_the_same_row_by_row_and_at_once(
    at_once: int, rows: int, sizes: tuple[int, int], bf16: bool, seed: int
) -> None:
    weight = torch.randn(rows, sizes[0], generator=torch.Generator().manual_seed(seed)) * (seed % 3)
    weight = weight.bfloat16() if bf16 else weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(codecs.AT_ONCE, "cpu", at_once)
        found = codecs.int4_quantise(weight, sizes[1])
    for mine, reference in zip(found, int4_by_rows(weight, sizes[1]), strict=True):
        assert torch.equal(mine, reference)


def test_quantising_on_a_gpu_takes_as_few_operations_however_large_the_weight_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is a kernel to launch."""
    monkeypatch.setitem(codecs.AT_ONCE, "cpu", codecs.AT_ONCE["cuda"])

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    for quantise in (partial(codecs.fp8_quantise, power_of_two=True), partial(codecs.int4_quantise, group=32)):
        counts = list[int]()
        for rows in (128, 2048):
            weight = torch.zeros(rows, 256, dtype=torch.bfloat16)
            with Counting() as counting:
                quantise(weight)
            counts.append(counting.count)
        assert counts[0] == counts[1] < 50


def test_mxfp4_is_what_transformers_makes_of_gpt_oss() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 4, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 4), generator=random, dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales)
    ours = torch.stack([codecs.mxfp4_dequantise(b, s, torch.bfloat16).T for b, s in zip(blocks, scales, strict=True)])
    assert torch.equal(ours, theirs)


def write(directory: Path, tensors: dict[str, torch.Tensor], section: dict[str, object] | None, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    written = {"dtype": "bfloat16", **config, **({"quantization_config": section} if section else {})}
    (directory / "config.json").write_text(json.dumps(written))
    return directory


def stored(section: dict[str, object], original: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors of a quantised `a.weight` on disk, and the weight that they stand for."""
    if section is INT4:
        packed, scale = codecs.int4_quantise(original, 32)
        tensors = {"a.weight_packed": packed, "a.weight_scale": scale, "a.weight_shape": torch.tensor(original.shape)}
        return tensors, codecs.int4_dequantise(packed, scale, 32, torch.bfloat16)
    if section is FP8_CHANNEL:
        scale = original.float().abs().amax(1, keepdim=True) / 448
        quantised = (original.float() / scale).to(torch.float8_e4m3fn)
        plain = (quantised.float() * scale).bfloat16()
        return {"a.weight": quantised, "a.weight_scale": scale}, plain
    quantised, scale = codecs.fp8_quantise(original, power_of_two=False)
    plain = of_sglang("block_quant_dequant")(quantised, scale, [128, 128], torch.bfloat16)
    return {"a.weight": quantised, "a.weight_scale_inv": scale}, plain


SLICES = [
    ..., slice(100, 300), slice(0, 1), (slice(None), slice(64, 192)), (slice(130, 131), slice(127, 129)),
    slice(256, 256), (slice(None), slice(None)),
]  # fmt: skip


@pytest.mark.parametrize("section", [FP8_BLOCK, FP8_CHANNEL, INT4], ids=["fp8", "fp8 channel", "int4"])
@pytest.mark.parametrize("index", SLICES, ids=str)
def test_any_slice_of_a_quantised_weight_is_that_slice_of_the_plain_one(
    tmp_path: Path, section: dict[str, object], index: Any
) -> None:
    tensors, plain = stored(section, weight(320, 256))
    norm = weight(7, seed=1)
    checkpoint = HFCheckpoint(write(tmp_path, {**tensors, "norm.weight": norm}, section))
    assert checkpoint.shapes == {"norm.weight": (7,), "a.weight": (320, 256)}
    assert checkpoint.info["a.weight"].dtype == "BF16"
    assert torch.equal(checkpoint.view("a.weight")[index], plain[index])
    assert torch.equal(checkpoint.tensor("norm.weight"), norm)


def test_experts_of_an_mxfp4_stack_are_read_one_by_one(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), generator=random, dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, 8, 2), generator=random, dtype=torch.uint8)
    tensors = {"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales}
    view = HFCheckpoint(write(tmp_path, tensors, {"quant_method": "mxfp4"})).view("e.gate_up_proj")
    whole = torch.stack([codecs.mxfp4_dequantise(b, s, torch.bfloat16).T for b, s in zip(blocks, scales, strict=True)])
    assert view.shape == (3, 64, 8) and torch.equal(view[...], whole)
    assert torch.equal(view[1:2, 10:20, 2:6], whole[1:2, 10:20, 2:6])


@pytest.mark.parametrize(("section", "named"), [
    ({"quant_method": "gptq", "bits": 4}, "gptq"),
    ({"quant_method": "awq"}, "awq"),
    ({"quant_method": "modelopt"}, "modelopt"),
    ({**FP8_BLOCK, "weight_block_size": None}, "weight_block_size"),
    ({**FP8_BLOCK, "fmt": "e5m2"}, "e5m2"),
    ({**FP8_BLOCK, "activation_scheme": "static"}, "static"),
    (compressed(type="int", num_bits=8, strategy="channel"), "num_bits"),
    (compressed(type="float", num_bits=4, strategy="tensor_group", group_size=16), "tensor_group"),
    (compressed(type="int", num_bits=4, strategy="group", group_size=32, symmetric=False), "symmetric"),
    (compressed(type="int", num_bits=4, strategy="group", group_size=32, actorder="group"), "actorder"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_every_other_method_is_refused_by_name(section: dict[str, object], named: str) -> None:
    with pytest.raises(CheckpointError, match=named) as error:
        check_quantisation({"quantization_config": section})
    assert error.value.field.startswith("config.json: quantization_config.")
    with pytest.raises(CheckpointError, match=named):
        check_quantisation({"text_config": {"quantization_config": section}})


def test_published_configurations_are_recognised() -> None:
    found = {}
    for path in CONFIGS.glob("*/config.json"):
        quantisation = check_quantisation(json.loads(path.read_text()))
        found[path.parent.name] = quantisation and quantisation.method
    block = "FP8, blocks of [128, 128]"
    expected = dict.fromkeys(["deepseek-r1", "deepseek-v3", "deepseek-v3.1", "kimi-k2", "minimax-m2"], block)
    expected |= {"gpt-oss-20b": "MXFP4", "gpt-oss-120b": "MXFP4"}
    assert {name: method for name, method in found.items() if method} == expected


@pytest.mark.parametrize(("lost", "section", "named"), [
    ("a.weight_scale_inv", FP8_BLOCK, "a.weight_scale_inv"),
    (None, {**FP8_BLOCK, "weight_block_size": [64, 128]}, "a.weight_scale_inv"),
    (None, None, "a.weight"),
], ids=["no scale", "a scale of other blocks", "no quantization_config: it is not read as numbers"])  # fmt: skip
def test_fp8_that_cannot_be_dequantised_is_refused_by_its_tensor(
    tmp_path: Path, lost: str | None, section: dict[str, object] | None, named: str
) -> None:
    tensors, _ = stored(FP8_BLOCK, weight(256, 256))
    kept = {name: tensor for name, tensor in tensors.items() if name != lost}
    with pytest.raises(CheckpointError, match=named):
        HFCheckpoint(write(tmp_path, kept, section))


def test_a_plain_config_keeps_everything_but_the_quantisation() -> None:
    config = {"a": 1, "quantization_config": FP8_BLOCK, "text_config": {"b": 2, "compression_config": INT4}}
    assert without_quantisation(config) == {"a": 1, "text_config": {"b": 2}}


def test_dequantisation_works_in_bands_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The float32 copy of a whole FP8 weight would be four times its size."""
    quantised, scales = torch.zeros(2048, 1024).to(torch.float8_e4m3fn), torch.ones(16, 8)
    made: list[int] = []
    real = torch.Tensor.float

    def watched(self: torch.Tensor) -> torch.Tensor:
        made.append(self.numel())
        return real(self)

    monkeypatch.setattr(torch.Tensor, "float", watched)
    codecs.fp8_dequantise(quantised, scales, (128, 128), torch.bfloat16)
    assert max(made) == 128 * 1024
