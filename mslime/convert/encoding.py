"""Plain weights made into quantised ones: what `mslime convert fp8` and `int4` write, and what a weight sync sends.

`quantised` reads; this writes. A tensor of float numbers becomes one of few bits and its scales, under the names that
the checkpoint's format gives them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mslime.config.errors import CheckpointError
from mslime.convert import codecs
from mslime.convert.hf import HFCheckpoint
from mslime.convert.kinds import Shape
from mslime.convert.quantised import Fp8, check_quantisation, scales_are_powers_of_two
from mslime.convert.writers import TensorPlan

if TYPE_CHECKING:
    from torch import Tensor


class Encoding(ABC):
    """One way to write a weight in several tensors."""

    @abstractmethod
    def plans(self, name: str, dtype: str, shape: Shape) -> tuple[TensorPlan, ...]:
        """What is written of a weight. Args: its name, its dtype as safetensors names it, and [out, in]."""

    @abstractmethod
    def encode(self, weight: Tensor) -> Sequence[Tensor]:
        """The tensors of `plans`, in their order."""


@dataclass(frozen=True)
class Fp8Blocks(Encoding):
    """float8_e4m3fn with a float32 scale for each block.

    Attributes:
        power_of_two: scales are powers of two (ue8m0).
        block: rows and columns that share a scale.
        suffix: of the scale's name.
    """

    power_of_two: bool
    block: tuple[int, int] = codecs.FP8_BLOCK
    suffix: str = "_scale_inv"

    def plans(self, name: str, dtype: str, shape: Shape) -> tuple[TensorPlan, ...]:
        """See `Encoding`."""
        scales: Shape = tuple(codecs.blocks(size, block) for size, block in zip(shape, self.block, strict=True))
        return TensorPlan(name, "F8_E4M3", shape), TensorPlan(name + self.suffix, "F32", scales)

    def encode(self, weight: Tensor) -> Sequence[Tensor]:
        """See `Encoding`."""
        return codecs.fp8_quantise(weight, self.block, power_of_two=self.power_of_two)


@dataclass(frozen=True)
class Int4Groups(Encoding):
    """compressed-tensors' `pack-quantized` INT4, symmetric, a scale for `group` inputs in the weight's dtype."""

    group: int

    def plans(self, name: str, dtype: str, shape: Shape) -> tuple[TensorPlan, ...]:
        """See `Encoding`."""
        (rows, columns), base = shape, name.removesuffix("weight")
        return (
            TensorPlan(f"{base}weight_packed", "I32", (rows, columns // 8)),
            TensorPlan(f"{base}weight_scale", dtype, (rows, columns // self.group)),
            TensorPlan(f"{base}weight_shape", "I64", (2,)),
        )

    def encode(self, weight: Tensor) -> Sequence[Tensor]:
        """See `Encoding`."""
        import torch

        return [*codecs.int4_quantise(weight, self.group), torch.tensor(weight.shape)]


@dataclass(frozen=True)
class Encoded:
    """Which weights of a model are sent quantised, and how.

    Attributes:
        encoding: of these.
        names: of the weights, as the checkpoint has them.
        method: for people.
    """

    encoding: Encoding
    names: frozenset[str]
    method: str


def encoded_weights(checkpoint: HFCheckpoint, hf_config: Mapping[str, object]) -> Encoded | None:
    """The weights that a checkpoint stores quantised, and how they are written again; None where it is plain.

    Args:
        hf_config: its config.json.

    Raises:
        CheckpointError: weights are stored in a way that is read, but not written again in a sync.
    """
    quantisation = check_quantisation(hf_config)
    if quantisation is None:
        return None
    (scheme,) = quantisation.schemes
    if not isinstance(scheme, Fp8) or scheme.block is None:
        raise CheckpointError(
            f"{checkpoint.directory}: quantization_config", quantisation.method,
            "engines that hold quantised weights are sent FP8 with a scale for each block, and nothing else",
            f"write a plain copy with `mslime convert bf16 {checkpoint.directory} OUT` and train from it, or "
            "`mslime convert fp8` of that copy",
        )  # fmt: skip
    suffix = scheme.suffixes[1].removeprefix("weight")
    encoding = Fp8Blocks(scales_are_powers_of_two(hf_config), scheme.block, suffix)
    return Encoded(encoding, checkpoint.quantised_names, quantisation.method)
