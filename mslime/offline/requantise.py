"""Hugging Face -> Hugging Face in another number format: FP8 blocks, INT4 groups, or plain again."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mslime.config.errors import CheckpointError, ConfigError
from mslime.convert.encoding import EXPERTS, PROJECTIONS, Encoding, Fp8Blocks, Int4Groups, is_linear
from mslime.convert.hf import HFCheckpoint
from mslime.convert.quantised import FP8_BLOCK
from mslime.convert.safetensors_files import SAFETENSORS_DTYPES, TensorPlan, torch_dtype
from mslime.offline.jobs import source_identity
from mslime.offline.to_hf import HFJob, Output

if TYPE_CHECKING:
    from torch import Tensor

_FLOATS = ("F32", "BF16", "F16")


class _Requantise(HFJob):
    """A job over the tensors of one Hugging Face checkpoint, each converted separately."""

    name: str

    def __init__(self, source: Path, include: str, max_shard_bytes: int) -> None:
        self._source, self._include = source, include
        try:
            re.compile(include)
        except re.error as error:
            rule = f"not a regular expression: {error}"
            raise ConfigError("--include", include, rule, "see Python's re module") from error
        checkpoint = self._opened
        outputs = [Output(name, self.plan(name, checkpoint)) for name in checkpoint.info]
        self.sources = [source / file for file in {info.file for info in checkpoint.stored.values()}]
        self._identity = source_identity(self.sources)
        super().__init__(outputs, source, self.changes(checkpoint), max_shard_bytes)

    @cached_property
    def _opened(self) -> HFCheckpoint:
        return HFCheckpoint(self._source)

    def chosen(self, name: str, checkpoint: HFCheckpoint) -> bool:
        """Whether a tensor is quantised: a matrix of floats that matches the pattern."""
        info = checkpoint.info[name]
        matrix = len(info.shape) == 2 and info.dtype in _FLOATS
        return matrix and is_linear(name, self._include)

    def left_plain(self, checkpoint: HFCheckpoint) -> list[str]:
        """Modules with an unquantised matrix, for config.json."""
        return [
            name.removesuffix(".weight")
            for name, info in checkpoint.info.items()
            if name.endswith(".weight") and len(info.shape) == 2 and not self.chosen(name, checkpoint)
        ]

    def identity(self) -> Mapping[str, object]:
        return {"job": self.name, "source": [str(self._source.resolve()), self._identity], "changes": self._changes}

    @abstractmethod
    def plan(self, name: str, checkpoint: HFCheckpoint) -> tuple[TensorPlan, ...]:
        """Tensors to write for one tensor."""

    @abstractmethod
    def changes(self, checkpoint: HFCheckpoint) -> Mapping[str, object]:
        """Settings of the new config.json."""


class ToPlain(_Requantise):
    """Converts every quantised weight to the model's dtype."""

    name = "bf16"

    def __init__(self, source: Path, dtype: str | None = None, max_shard_bytes: int = 5 << 30) -> None:
        self._dtype = dtype
        super().__init__(source, "", max_shard_bytes)

    def plan(self, name: str, checkpoint: HFCheckpoint) -> tuple[TensorPlan, ...]:
        info = checkpoint.info[name]
        quantised = name not in checkpoint.stored
        dtype = SAFETENSORS_DTYPES[self._dtype] if self._dtype and quantised else info.dtype
        return (TensorPlan(name, dtype, info.shape),)

    def changes(self, checkpoint: HFCheckpoint) -> Mapping[str, object]:
        """Raises CheckpointError if nothing is quantised."""
        if checkpoint.quantisation is None:
            raise CheckpointError(
                str(self._source), "plain weights", "there is nothing to dequantise", "use the checkpoint as it is"
            )
        return {}

    def make(self, output: Output) -> Sequence[Tensor]:
        (plan,) = output.plans
        return [self._opened.tensor(plan.name).to(torch_dtype(plan.dtype))]


class _Quantise(_Requantise):
    """A job that writes the selected weights in an encoding, and the others unchanged.

    Args:
        include: regular expression of the weights to quantise.
    """

    def __init__(self, source: Path, encoding: Encoding, include: str, max_shard_bytes: int) -> None:
        self._encoding = encoding
        super().__init__(source, include, max_shard_bytes)

    def plan(self, name: str, checkpoint: HFCheckpoint) -> tuple[TensorPlan, ...]:
        info = checkpoint.info[name]
        if not self.chosen(name, checkpoint):
            return (TensorPlan(name, info.dtype, info.shape),)
        return self._encoding.plans(name, info.dtype, info.shape)

    def make(self, output: Output) -> Sequence[Tensor]:
        tensor = self._opened.tensor(output.key)
        return [tensor] if len(output.plans) == 1 else self._encoding.encode(tensor)


class ToFp8(_Quantise):
    """FP8 with a float32 scale for each block.

    Args:
        power_of_two: scales are powers of two.
        include: regular expression of the weights to quantise.
    """

    name = "fp8"

    def __init__(
        self, source: Path, *, power_of_two: bool, include: str = PROJECTIONS, max_shard_bytes: int = 5 << 30
    ) -> None:
        self._power_of_two = power_of_two
        super().__init__(source, Fp8Blocks(power_of_two), include, max_shard_bytes)

    def changes(self, checkpoint: HFCheckpoint) -> Mapping[str, object]:
        """Section of config.json in the format of DeepSeek and Qwen."""
        section: dict[str, object] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(FP8_BLOCK),
            "modules_to_not_convert": self.left_plain(checkpoint),
        }
        return {"quantization_config": section | ({"scale_fmt": "ue8m0"} if self._power_of_two else {})}


class ToInt4(_Quantise):
    """compressed-tensors `pack-quantized` INT4, symmetric, one scale for `group` inputs.

    Args:
        include: regular expression of the weights to quantise; default: routed experts, as in Kimi-K2-Thinking.
    """

    name = "int4"

    def __init__(
        self, source: Path, *, group: int = 32, include: str = EXPERTS, max_shard_bytes: int = 5 << 30
    ) -> None:
        if group < 8 or group % 8:
            raise ConfigError(
                "--group", group, "must be a multiple of 8, because a word holds eight values", "use 32 or 128"
            )
        self._group = group
        super().__init__(source, Int4Groups(group), include, max_shard_bytes)

    def plan(self, name: str, checkpoint: HFCheckpoint) -> tuple[TensorPlan, ...]:
        """Raises CheckpointError if the inputs are not a multiple of the group."""
        shape = checkpoint.info[name].shape
        if self.chosen(name, checkpoint) and shape[1] % self._group:
            raise CheckpointError(
                f"{self._source}: {name}", shape, f"inputs must be a multiple of the group size {self._group}",
                "choose another --group, or exclude this tensor with --include",
            )  # fmt: skip
        return super().plan(name, checkpoint)

    def changes(self, checkpoint: HFCheckpoint) -> Mapping[str, object]:
        """Section of config.json in the format of compressed-tensors 0.18."""
        weights: dict[str, object] = {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": self._group,
            "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
        }  # fmt: skip
        group: dict[str, object] = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
        section: dict[str, object] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": self.left_plain(checkpoint),
            "kv_cache_scheme": None,
        }
        return {"quantization_config": section}
