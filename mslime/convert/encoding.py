"""Quantises plain weights, for `mslime convert fp8` and `int4` and for weight syncs.

`quantised` reads; this module writes. A float tensor becomes a tensor of few bits and its scales, under the names of
the checkpoint's format.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from mslime.config.errors import CheckpointError
from mslime.convert.hf import HFCheckpoint
from mslime.convert.quantised import (
    FP8_BLOCK,
    Fp8,
    Int4,
    Quantisation,
    blocks,
    check_quantisation,
    fp8_quantise,
    int4_quantise,
    left_plain,
    scales_are_powers_of_two,
)
from mslime.convert.safetensors_files import TensorPlan
from mslime.convert.table import RuleTable
from mslime.convert.tensor_layouts import Shape

if TYPE_CHECKING:
    from torch import Tensor, device

PROJECTIONS = r"\.layers\..*(_proj|_proj_with_mqa|in_proj_qkvz|\.w[123])\.weight$"
"""Linear layers of decoder layers: attention, MLPs, experts. Not routers, norms, embeddings, the output layer."""
EXPERTS = r"\.experts\.\d+\..*\.weight$"
NEVER = r"(\.eh_proj|_norm|norm)\.weight$"


class Encoding(ABC):
    """A format that writes one weight as several tensors."""

    @abstractmethod
    def plans(self, name: str, dtype: str, shape: Shape) -> tuple[TensorPlan, ...]:
        """Tensors written for a weight. Args: its name, its dtype as safetensors names it, and [out, in]."""

    @abstractmethod
    def encode(self, weight: Tensor) -> Sequence[Tensor]:
        """Tensors of `plans`, in their order."""


@dataclass(frozen=True)
class Fp8Blocks(Encoding):
    """float8_e4m3fn with a float32 scale for each block.

    Attributes:
        power_of_two: scales are powers of two (ue8m0).
        block: rows and columns that share a scale.
        suffix: of the scale's name.
    """

    power_of_two: bool
    block: tuple[int, int] = FP8_BLOCK
    suffix: str = "_scale_inv"

    def plans(self, name: str, dtype: str, shape: Shape) -> tuple[TensorPlan, ...]:
        scales: Shape = tuple(blocks(size, block) for size, block in zip(shape, self.block, strict=True))
        return TensorPlan(name, "F8_E4M3", shape), TensorPlan(name + self.suffix, "F32", scales)

    def encode(self, weight: Tensor) -> Sequence[Tensor]:
        return fp8_quantise(weight, self.block, power_of_two=self.power_of_two)


@dataclass(frozen=True)
class Int4Groups(Encoding):
    """compressed-tensors' `pack-quantized` INT4, symmetric, a scale for `group` inputs in the weight's dtype."""

    group: int

    def plans(self, name: str, dtype: str, shape: Shape) -> tuple[TensorPlan, ...]:
        (rows, columns), base = shape, name.removesuffix("weight")
        return (
            TensorPlan(f"{base}weight_packed", "I32", (rows, columns // 8)),
            TensorPlan(f"{base}weight_scale", dtype, (rows, columns // self.group)),
            TensorPlan(f"{base}weight_shape", "I64", (2,)),
        )

    def encode(self, weight: Tensor) -> Sequence[Tensor]:
        return [*int4_quantise(weight, self.group), _shape_on(tuple(weight.shape), weight.device)]


@cache
def _shape_on(shape: Shape, on: device) -> Tensor:
    """[2] int64, read-only. Created once: the copy to a GPU waits for all its work, and a sync sends thousands of
    experts."""
    import torch

    return torch.tensor(shape, device=on)


@dataclass(frozen=True)
class Encoded:
    """Weights of a model that are sent quantised, and their format.

    Attributes:
        encoding: their format.
        names: of the weights in the checkpoint.
        method: for people.
    """

    encoding: Encoding
    names: frozenset[str]
    method: str


def encoded_weights(checkpoint: HFCheckpoint, hf_config: Mapping[str, object]) -> Encoded | None:
    """Quantised weights of a checkpoint, with the format for writing them again; None for a plain checkpoint.

    Args:
        hf_config: its config.json.

    Raises:
        CheckpointError: weights are stored in a format that can be read, but not written in a sync.
    """
    quantisation = check_quantisation(hf_config)
    if quantisation is None:
        return None
    encoding = _encoding(quantisation, hf_config)
    names = frozenset(checkpoint.joined)
    if encoding is None:
        raise _not_sent(checkpoint, quantisation.method, "FP8 with a scale for each block, or INT4 in groups")
    if isinstance(encoding, Int4Groups) and (other := [name for name in names if not re.search(EXPERTS, name)]):
        raise _not_sent(
            checkpoint, f"{quantisation.method}: {min(other)}", "INT4 of routed experts, as Kimi-K2-Thinking"
        )
    return Encoded(encoding, names, quantisation.method)


def _not_sent(checkpoint: HFCheckpoint, method: str, sent: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.directory}: quantization_config", method,
        f"syncs to quantised engines support only {sent}",
        f"write a plain copy with `mslime convert bf16 {checkpoint.directory} OUT` and train from it, or "
        "`mslime convert fp8` or `int4` of that copy",
    )  # fmt: skip


def expected_weights(table: RuleTable, hf_config: Mapping[str, object]) -> Encoded | None:
    """Prediction of `encoded_weights` from config.json alone: the linear layers of decoder layers, except layers
    that it declares plain.

    None if they are plain, or stored in a format that syncs do not write.
    """
    quantisation = check_quantisation(hf_config)
    encoding = None if quantisation is None else _encoding(quantisation, hf_config)
    if quantisation is None or encoding is None:
        return None
    is_plain = left_plain(hf_config)
    names = frozenset(
        name
        for bound in table.bound.values()
        for name, shape in zip(bound.hf_names, bound.hf_shapes, strict=True)
        if len(shape) == 2 and is_linear(name) and not is_plain(name.removesuffix(".weight"))
    )
    return Encoded(encoding, names, quantisation.method) if names else None


def is_linear(name: str, include: str = PROJECTIONS) -> bool:
    """Whether a weight belongs to a linear layer that may be quantised; `include`: pattern of weights to quantise."""
    return bool(re.search(include, name)) and not re.search(NEVER, name)


def _encoding(quantisation: Quantisation, hf_config: Mapping[str, object]) -> Encoding | None:
    """Encoding for weights in their stored format; None if there is none."""
    match quantisation.schemes:
        case (Fp8(block=(_, _) as block) as scheme,):
            return Fp8Blocks(scales_are_powers_of_two(hf_config), block, scheme.suffixes[1].removeprefix("weight"))
        case (Int4(group=int(group)),):
            return Int4Groups(group)
        case _:
            return None
