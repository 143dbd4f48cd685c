"""Reads quantised checkpoints: supported formats, and reconstruction of a weight from its stored tensors.

`check_quantisation` decides from config.json. `Quantisation.join` combines weights and their scales into the plain
tensors of the rules, read and dequantised slice by slice. Supported are FP8 with a scale per block, row or tensor
(DeepSeek, Kimi-K2, Qwen3, MiniMax; GLM and others through compressed-tensors), INT4 of compressed-tensors
(Kimi-K2-Thinking) and GPT-OSS's MXFP4. Every other method is rejected by name.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from mslime.config.errors import CheckpointError
from mslime.convert.safetensors_files import RESTORE
from mslime.convert.tensor_layouts import Shape, Sliceable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""(first, end) in every dimension."""
_FP8 = "F8_E4M3"
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")


class Scheme(ABC):
    """A format that stores one weight as several tensors."""

    suffixes: tuple[str, ...]
    """Suffixes of the stored names; the first marks a quantised weight."""

    @abstractmethod
    def shape(self, stored: Sequence[Shape]) -> Shape | None:
        """Shape of the weight; None if the stored shapes do not match each other."""

    @abstractmethod
    def read(self, stored: Sequence[Sliceable], box: Box, dtype: torch.dtype) -> Tensor:
        """The part `box` of the weight."""

    def weight_name(self, base: str) -> str:
        """Name of the weight, from the stored names without their suffix."""
        return f"{base}weight"


@dataclass(frozen=True)
class Fp8(Scheme):
    """float8 `weight` with a scale for each block, each row or the whole tensor.

    Attributes:
        block: rows and columns that share a scale; None: a whole row or tensor, by the scale's shape.
        suffixes: `weight` and the suffix of the scale.
    """

    block: tuple[int, int] | None
    suffixes: tuple[str, ...] = ("weight", "weight_scale_inv")

    def shape(self, stored: Sequence[Shape]) -> Shape | None:
        weight, scale = stored
        if len(weight) != 2:
            return None
        if self.block is not None:
            expected = (blocks(weight[0], self.block[0]), blocks(weight[1], self.block[1]))
            return weight if scale == expected else None
        return weight if scale in ((), (1,), (1, 1), (weight[0],), (weight[0], 1)) else None

    def read(self, stored: Sequence[Sliceable], box: Box, dtype: torch.dtype) -> Tensor:
        weight, scale = stored
        (top, bottom), (left, right) = box
        part = weight[top:bottom, left:right]
        if self.block is None:
            scales = scale[...].float().reshape(-1, 1)
            scales = scales[top:bottom] if len(scales) > 1 else scales.expand(bottom - top, 1)
            return fp8_dequantise(part, scales, (1, right - left), dtype)
        high, wide = self.block
        scales = scale[top // high : blocks(bottom, high), left // wide : blocks(right, wide)]
        return fp8_dequantise(part, scales, self.block, dtype, (top % high, left % wide))


@dataclass(frozen=True)
class Int4(Scheme):
    """compressed-tensors' `pack-quantized` INT4, symmetric.

    Attributes:
        group: inputs that share a scale; None: a whole row.
    """

    group: int | None
    suffixes: tuple[str, ...] = ("weight_packed", "weight_scale", "weight_shape")

    def shape(self, stored: Sequence[Shape]) -> Shape | None:
        packed, scale, shape = stored
        if len(packed) != 2 or shape != (2,):
            return None
        columns = packed[1] * 8
        groups = 1 if self.group is None else columns // self.group
        return (packed[0], columns) if scale == (packed[0], groups) else None

    def read(self, stored: Sequence[Sliceable], box: Box, dtype: torch.dtype) -> Tensor:
        packed, scale, shape = stored
        (top, bottom), (left, right) = box
        rows = packed[top:bottom]
        columns = int(shape[...][1])
        if columns != rows.shape[1] * 8:
            raise CheckpointError(
                "weight_shape", columns, f"the packed tensor has {rows.shape[1] * 8} columns", RESTORE
            )
        group = self.group or columns
        return int4_dequantise(rows, scale[top:bottom], group, dtype)[:, left:right].contiguous()


@dataclass(frozen=True)
class Mxfp4(Scheme):
    """GPT-OSS: experts' projections as `_blocks` [experts, out, groups, 16] and `_scales`; the weight is transposed."""

    suffixes: tuple[str, ...] = ("_blocks", "_scales")

    def shape(self, stored: Sequence[Shape]) -> Shape | None:
        packed, scale = stored
        if len(packed) != 4 or packed[3] != 16 or scale != packed[:3]:
            return None
        return (packed[0], packed[2] * 32, packed[1])

    def read(self, stored: Sequence[Sliceable], box: Box, dtype: torch.dtype) -> Tensor:
        import torch

        packed, scale = stored
        (first, last), (left, right), (top, bottom) = box
        experts = [
            mxfp4_dequantise(
                packed[expert : expert + 1][0, top:bottom], scale[expert : expert + 1][0, top:bottom], dtype
            )[:, left:right].T
            for expert in range(first, last)
        ]
        return torch.stack(experts).contiguous()

    def weight_name(self, base: str) -> str:
        return base


@dataclass(frozen=True)
class JoinedWeight:
    """A weight that is stored in several tensors.

    Attributes:
        scheme: its format.
        stored: names of those tensors, in the scheme's order.
        shape: of the weight.
    """

    scheme: Scheme
    stored: tuple[str, ...]
    shape: Shape


@dataclass(frozen=True)
class Quantisation:
    """Quantisation in config.json.

    Attributes:
        method: for people.
        schemes: possible formats of weights; tensors that match none are stored plain.
    """

    method: str
    schemes: tuple[Scheme, ...]

    def join(self, stored: Mapping[str, tuple[str, Shape]], where: str) -> dict[str, JoinedWeight]:
        """Quantised weights by name.

        Args:
            stored: safetensors dtype and shape of every tensor of the checkpoint.
            where: directory, for messages.

        Raises:
            CheckpointError: a quantised weight lacks its scale, or their shapes do not match.
        """
        found: dict[str, JoinedWeight] = {}
        for name, (dtype, _) in stored.items():
            marked = (s for s in self.schemes if name.endswith(s.suffixes[0]))
            scheme = next((s for s in marked if not isinstance(s, Fp8) or dtype == _FP8), None)
            if scheme is None:
                refuse_plain_fp8(name, dtype, where)
                continue
            base = name.removesuffix(scheme.suffixes[0])
            names = tuple(base + suffix for suffix in scheme.suffixes)
            for other in names:
                if other not in stored:
                    raise CheckpointError(
                        f"{where}: {other}", None, f"{name} is quantised and needs this tensor", RESTORE
                    )
            shape = scheme.shape([stored[other][1] for other in names])
            if shape is None or (isinstance(scheme, Fp8) and stored[names[1]][0] not in _SCALES):
                raise CheckpointError(
                    f"{where}: {names[1]}", stored[names[1]],
                    f"does not match {name} {stored[name]} with {self.method}",
                    "use the config.json that belongs to these weights",
                )  # fmt: skip
            found[scheme.weight_name(base)] = JoinedWeight(scheme, names, shape)
        return found


def refuse_plain_fp8(name: str, dtype: str, where: str) -> None:
    """Raise CheckpointError for FP8 numbers without a scale: they are meaningless."""
    if dtype.startswith(("F8_E4", "F8_E5")):
        raise CheckpointError(
            f"{where}: {name}", dtype, "an FP8 tensor needs a quantization_config that locates its scale",
            "use the config.json that belongs to these weights",
        )  # fmt: skip


def check_quantisation(hf_config: Mapping[str, object]) -> Quantisation | None:
    """Quantisation of a checkpoint's weights; None if they are plain.

    Args:
        hf_config: config.json; settings of a text model inside a multimodal one count too.

    Raises:
        CheckpointError: an unsupported method, by name.
    """
    section = _section(hf_config)
    if section is None:
        return None
    method = str(section.get("quant_method"))
    readers: dict[str, Callable[[Mapping[str, object]], Quantisation]] = {
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "mxfp4": lambda _: Quantisation("MXFP4", (Mxfp4(),)),
    }
    if method not in readers:
        raise _refused("quant_method", method, f"supported are {', '.join(readers)}")
    return readers[method](section)


def scales_are_powers_of_two(hf_config: Mapping[str, object]) -> bool:
    """Whether config.json declares FP8 scales to be powers of two (`scale_fmt: ue8m0`)."""
    return (_section(hf_config) or {}).get("scale_fmt") == "ue8m0"


def left_plain(hf_config: Mapping[str, object]) -> Callable[[str], bool]:
    """Predicate for modules, by name, that config.json leaves plain.

    `modules_to_not_convert` of FP8 holds names of modules, or parts of them; `ignore` of compressed-tensors also
    expressions that begin with `re:` and match the start of a name.
    """
    section = _section(hf_config) or {}
    named = [
        name
        for key in ("modules_to_not_convert", "ignored_layers", "ignore")
        if isinstance(given := section.get(key), list)
        for name in cast("list[str]", given)
    ]
    whole = frozenset(named)
    patterns = [re.compile(name.removeprefix("re:")) for name in named if name.startswith("re:")]
    parts = [f".{name}." for name in named if not name.startswith("re:")]

    def is_plain(module: str) -> bool:
        if module in whole or any(pattern.match(module) for pattern in patterns):
            return True
        return any(part in f".{module}." for part in parts)

    return is_plain


def without_quantisation(hf_config: Mapping[str, object]) -> dict[str, object]:
    """config.json of the same model with plain weights."""
    plain = {key: value for key, value in hf_config.items() if key not in _KEYS}
    text = plain.get("text_config")
    if isinstance(text, dict):
        plain["text_config"] = without_quantisation(cast("dict[str, object]", text))
    return plain


_KEYS = ("quantization_config", "compression_config")


def _section(config: Mapping[str, object]) -> Mapping[str, object] | None:
    for key in _KEYS:
        if isinstance(config.get(key), dict):
            return cast("dict[str, object]", config[key])
    text = config.get("text_config")
    return _section(cast("dict[str, object]", text)) if isinstance(text, dict) else None


def _fp8(section: Mapping[str, object]) -> Quantisation:
    if section.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise _refused("fmt", section["fmt"], "only e4m3 is supported")
    if section.get("activation_scheme") not in (None, "dynamic"):
        raise _refused(
            "activation_scheme", section["activation_scheme"], "only dynamic activation scales are supported"
        )
    size = section.get("weight_block_size")
    if size is None:
        raise _refused("weight_block_size", None, "FP8 weights need a scale per block")
    return Quantisation(f"FP8, blocks of {size}", (Fp8(_block(size)),))


def _block(size: object) -> tuple[int, int]:
    match size:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case _:
            raise _refused("weight_block_size", size, "must be two positive integers")


def _compressed_tensors(section: Mapping[str, object]) -> Quantisation:
    given = section.get("config_groups")
    groups = cast("dict[str, dict[str, object]]", given) if isinstance(given, dict) else {}
    if not groups:
        raise _refused("config_groups", groups, "must have at least one group")
    found: list[tuple[str, Scheme]] = []
    for group in groups.values():
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise _refused("config_groups.weights", weights, "must describe the quantisation of weights")
        scheme = _compressed_weights(cast("dict[str, object]", weights))
        if scheme not in found:
            found.append(scheme)
    if len(found) > 1:
        raise _refused("config_groups", [name for name, _ in found], "only one format per checkpoint is supported")
    return Quantisation(f"{found[0][0]} (compressed-tensors)", (found[0][1],))


def _compressed_weights(weights: Mapping[str, object]) -> tuple[str, Scheme]:
    kind = (weights.get("type"), weights.get("num_bits"))
    strategy = weights.get("strategy")
    if not weights.get("symmetric", True):
        raise _refused("config_groups.weights.symmetric", False, "only symmetric weights are supported")
    if weights.get("actorder") not in (None, "weight", "static"):
        raise _refused("config_groups.weights.actorder", weights["actorder"], "reordered inputs are not supported")
    names = ("weight", "weight_scale")
    if kind == ("float", 8) and strategy == "block":
        return f"FP8, blocks of {weights.get('block_structure')}", Fp8(_block(weights.get("block_structure")), names)
    if kind == ("float", 8) and strategy in ("channel", "tensor"):
        return f"FP8, a scale per {strategy}", Fp8(None, names)
    size = weights.get("group_size")
    if kind == ("int", 4) and strategy == "group" and isinstance(size, int) and size > 0:
        return f"INT4, groups of {size}", Int4(size)
    if kind == ("int", 4) and strategy == "channel":
        return "INT4, a scale per row", Int4(None)
    raise _refused(
        "config_groups.weights", {"type": kind[0], "num_bits": kind[1], "strategy": strategy},
        "supported are float 8 (block, channel, tensor) and int 4 (group, channel)",
    )  # fmt: skip


def _refused(field: str, value: object, rule: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: quantization_config.{field}", value, rule, "use a checkpoint that is not quantised this way"
    )


# Arithmetic of quantised weights. Pure tensor functions.
#
# Dequantisation works on bands of rows, which keeps its temporaries small. Its bits equal those of the engines: the
# product in float32, rounded once to the result's dtype. Quantisation for a weight sync on a GPU processes an expert's
# whole weight at once.

FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn."""
FP8_BLOCK = (128, 128)
_INT4_HALF_RANGE = 7.5  # compressed-tensors: symmetric scales are max|w| / ((7 - -8) / 2)
_BAND = 128
AT_ONCE = {"cuda": 1 << 24, "cpu": 1 << 20}
"""Elements that are quantised at once, with three temporary float32 copies: on a GPU each operation is one kernel
launch, on a CPU they stay in its cache.
"""
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def blocks(size: int, block: int) -> int:
    """Number of blocks that cover `size`, the last one perhaps cut off."""
    return -(-size // block)


def fp8_quantise(weight: Tensor, block: tuple[int, int] = FP8_BLOCK, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """FP8 weights with one scale per block.

    Args:
        weight: [out, in], any float dtype.
        power_of_two: round scales up to a power of two (UE8M0, for DeepGEMM's kernels on Blackwell and DeepSeek-V3.1);
            else the exact float32 quotient max|w| / 448.

    Returns:
        float8_e4m3fn [out, in], and float32 scales [ceil(out / block), ceil(in / block)] that multiply it.
    """
    import torch

    rows, columns = weight.shape
    scales = torch.empty(blocks(rows, block[0]), blocks(columns, block[1]), device=weight.device)
    quantised = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    height = blocks(_rows_at_once(weight), block[0])
    for index, band in _bands(rows, height * block[0]):
        values = _padded(weight[band].float(), block)
        tiles = values.view(values.shape[0] // block[0], block[0], -1, block[1])
        largest = tiles.abs().amax(dim=(1, 3))
        scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
        if power_of_two:
            scale = _power_of_two_above(scale)
        scales[index * height : index * height + len(scale)] = scale
        divided = (tiles / scale[:, None, :, None]).clamp_(-FP8_MAX, FP8_MAX).view(values.shape)
        quantised[band] = divided[: len(weight[band]), :columns].to(torch.float8_e4m3fn)
    return quantised, scales


def fp8_dequantise(
    quantised: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype, first: tuple[int, int] = (0, 0)
) -> Tensor:
    """The weight in `dtype`, equal to the result of SGLang's `block_quant_dequant`.

    Args:
        quantised: float8 [rows, columns], a part of a whole tensor.
        scales: of the blocks that the part touches.
        first: row and column of the part within its first block.
    """
    import torch

    rows, columns = quantised.shape
    weight = torch.empty(rows, columns, dtype=dtype)
    scales = scales.float()
    at = 0
    for scale in scales:
        size = min(block[0] - first[0] if at == 0 else block[0], rows - at)
        wide = scale.repeat_interleave(block[1])[first[1] : first[1] + columns]
        weight[at : at + size] = quantised[at : at + size].float() * wide
        at += size
    assert at == rows, (quantised.shape, scales.shape, first)
    return weight


def int4_quantise(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Symmetric INT4 with one scale for `group` consecutive inputs, packed as in compressed-tensors.

    Args:
        weight: [out, in], `in` a multiple of `group`, and of 8.

    Returns:
        int32 [out, in / 8], eight values of 4 bits in a word, the first in the lowest bits, each plus 8; and scales
        [out, in / group] in the weight's dtype.
    """
    import torch

    rows, columns = weight.shape
    assert columns % group == 0 and columns % 8 == 0, (weight.shape, group)
    packed = torch.empty(rows, columns // 8, dtype=torch.int32, device=weight.device)
    scales = torch.empty(rows, columns // group, dtype=weight.dtype, device=weight.device)
    smallest = torch.finfo(weight.dtype).eps
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=weight.device)
    for _, band in _bands(rows, _rows_at_once(weight)):
        grouped = weight[band].float().view(-1, columns // group, group)
        scale = (grouped.abs().amax(2) / _INT4_HALF_RANGE).to(weight.dtype)
        scale = scales[band] = torch.where(scale == 0, smallest, scale)
        values = (grouped / scale.float()[:, :, None]).round().clamp(-8, 7).to(torch.int32) + 8
        packed[band] = (values.view(-1, columns // 8, 8) << shifts).sum(2, dtype=torch.int32)
    return packed, scales


def int4_dequantise(packed: Tensor, scales: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in `dtype`, from the output of `int4_quantise` or compressed-tensors."""
    import torch

    rows, columns = packed.shape[0], packed.shape[1] * 8
    weight = torch.empty(rows, columns, dtype=dtype)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    for _, band in _bands(rows, _BAND):
        values = ((packed[band][:, :, None] >> shifts) & 15).view(-1, columns) - 8
        weight[band] = values.float() * scales[band].float().repeat_interleave(group, 1)
    return weight


def mxfp4_dequantise(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """MXFP4 as GPT-OSS stores it (OCP Microscaling Formats 1.0: E2M1 values, one E8M0 scale for 32 of them).

    Args:
        packed: uint8 [out, groups, 16], two values a byte, the first in the low bits.
        scales: uint8 [out, groups], exponents with bias 127.

    Returns:
        [out, groups * 32] in `dtype`.
    """
    import torch

    table = torch.tensor(_FP4_VALUES + tuple(-value for value in _FP4_VALUES))
    weight = torch.empty(packed.shape[0], packed.shape[1] * 32, dtype=dtype)
    for _, band in _bands(packed.shape[0], _BAND):
        part = packed[band]
        values = table[torch.stack([part & 15, part >> 4], -1).view(*part.shape[:2], 32).int()]
        exponent = (scales[band].int() - 127)[:, :, None]
        weight[band] = torch.ldexp(values, exponent).view(part.shape[0], -1).to(dtype)
    return weight


def _rows_at_once(weight: Tensor) -> int:
    return max(AT_ONCE.get(weight.device.type, AT_ONCE["cuda"]) // max(weight.shape[1], 1), 1)


def _bands(rows: int, height: int) -> Iterator[tuple[int, slice]]:
    return ((i, slice(start, min(start + height, rows))) for i, start in enumerate(range(0, rows, height)))


def _padded(values: Tensor, block: tuple[int, int]) -> Tensor:
    import torch

    below, beside = -values.shape[0] % block[0], -values.shape[1] % block[1]
    return torch.nn.functional.pad(values, (0, beside, 0, below)) if below or beside else values


def _power_of_two_above(scale: Tensor) -> Tensor:
    """The smallest power of two that is not smaller; exact, by the float's own exponent."""
    import torch

    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2**exponent, 0.5 <= mantissa < 1
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(scale), exponent)
