"""Adapters in files, in the format of peft: adapter_config.json beside adapter_model.safetensors.

Tensors have the names and shapes of `Adapters.table`; the configuration holds their scaling. peft has no name for a
factor that experts share. Adapters with shared factors (`lora.experts`) are in the format of SGLang: all factors of a
layer's experts are one tensor, [experts, ...], and a shared one is [1, ...].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mslime.config.errors import CheckpointError, reading
from mslime.config.layout import ParallelLayout
from mslime.config.lora import LoraConfig
from mslime.convert.lora_rules import Adapters, make_adapters
from mslime.convert.safetensors_files import (
    RESTORE,
    SAFETENSORS_DTYPES,
    TORCH_DTYPES,
    TensorInfo,
    TensorPlan,
    read_header,
    write_safetensors,
)
from mslime.convert.table import RuleTable
from mslime.convert.tensor_layouts import Shape

if TYPE_CHECKING:
    from torch import Tensor

_EXPERTS = ".experts."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_REFUSED = {
    "use_dora": "DoRA is not supported",
    "rank_pattern": "different ranks are not supported",
    "alpha_pattern": "different alphas are not supported",
    "modules_to_save": "whole modules beside A and B are not supported",
    "target_parameters": "adapters on a tensor of all experts are not supported",
    "fan_in_fan_out": "weights must be [out, in]",
    "layer_replication": "repeated layers are not supported",
    "lora_bias": "a bias in B is not supported",
}
"""Settings with which a file is more than A and B of linear layers."""


@dataclass(frozen=True)
class AdapterFile:
    """An adapter on disk.

    Attributes:
        directory: its path.
        lora: rank, alpha and scaling.
        info: its tensors by name.
    """

    directory: Path
    lora: LoraConfig
    info: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, directory: Path) -> AdapterFile:
        """Read the settings and the file's header.

        Raises:
            CheckpointError: it is missing, or has other parts than A and B of linear layers.
        """
        path = directory / CONFIG
        if not path.is_file():
            raise CheckpointError(
                str(directory),
                None,
                f"has no {CONFIG}, which is part of peft's format",
                "name the directory that contains it",
            )
        with reading(CheckpointError, str(path), "must be a JSON object", RESTORE):
            given: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
            rank, alpha = given.get("r"), given.get("lora_alpha")
        if str(given.get("peft_type")).upper() != "LORA" or not isinstance(rank, int) or rank < 1:
            raise CheckpointError(
                str(path), {"peft_type": given.get("peft_type"), "r": rank}, "must be LORA with a rank",
                "use a LoRA adapter",
            )  # fmt: skip
        for name, why in _REFUSED.items():
            if given.get(name):
                raise CheckpointError(f"{path}: {name}", given[name], why, "use a plain LoRA adapter")
        if given.get("bias", "none") != "none":
            raise CheckpointError(
                f"{path}: bias", given["bias"], "trained biases are not supported", "train it with bias: none"
            )
        with reading(CheckpointError, str(path), "its numbers are not valid for a LoRA adapter", RESTORE):
            lora = LoraConfig(rank=rank, alpha=cast("float", alpha), rs_lora=bool(given.get("use_rslora")))
        info = read_header(directory / WEIGHTS)
        stacked = next((name for name, each in info.items() if len(each.shape) > 2), None)
        if stacked is not None and any(len(each.shape) == 3 and each.shape[0] == 1 for each in info.values()):
            lora = lora.model_copy(update={"experts": "shared_outer"})
        elif stacked is not None:
            raise CheckpointError(
                f"{directory / WEIGHTS}: {stacked}", list(info[stacked].shape), "all experts of a layer are in one "
                "tensor, which is the format for engines", "use the run's exported adapter, or mslime convert run",
            )  # fmt: skip
        file = cls(directory, lora, info)
        for name, shape in file.shapes.items():
            if len(shape) > 3 or (len(shape) == 3 and (shape[0] not in (1, file.experts) or _EXPERTS not in name)):
                raise CheckpointError(
                    f"{directory / WEIGHTS}: {name}", list(shape), f"must be [1, ...] or [{file.experts}, ...], "
                    "the factors of all experts of a layer", "use the run's exported adapter, or mslime convert run",
                )  # fmt: skip
        return file

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor."""
        return {name: info.shape for name, info in self.info.items()}

    @cached_property
    def experts(self) -> int:
        """Number of experts that are stacked in one tensor; 0: experts are not stacked."""
        return max((shape[0] for shape in self.shapes.values() if len(shape) == 3), default=0)

    @property
    def factors(self) -> dict[str, Shape]:
        """Factors in peft's format, with one entry per expert: their shapes."""
        found: dict[str, Shape] = {}
        for name, shape in self.shapes.items():
            if len(shape) == 3:
                one = name.replace(_EXPERTS, f"{_EXPERTS}{{}}.")
                found |= {one.format(expert): shape[1:] for expert in range(self.experts)}
            else:
                found[name] = shape
        return found

    def check(self, adapters: Adapters) -> None:
        """Check that this is an adapter of this model with these settings.

        Raises:
            CheckpointError: another rank or scale, or tensors that are missing, misshapen or unexpected.
        """
        own, run = self.lora, adapters.lora
        of_experts = ("experts",) if any(_EXPERTS in name for name in self.info) else ()
        for name in ("rank", "alpha", "rs_lora", *of_experts):
            if getattr(own, name) != getattr(run, name):
                raise CheckpointError(
                    f"{self.directory / CONFIG}: {name}", getattr(own, name),
                    f"lora.{name} is {getattr(run, name)}", f"set lora.{name} to the adapter's value",
                )  # fmt: skip
        table = adapters.as_files.table
        wanted = table.hf_shapes()
        if odd := sorted(wanted.keys() ^ self.info.keys()):
            here = odd[0] in self.info
            raise CheckpointError(
                f"{self.directory / WEIGHTS}: {odd[0]}", "in the file" if here else "not in the file",
                f"lora.targets {'excludes' if here else 'includes'} its layer",
                "set lora.targets to the layers of the adapter",
            )  # fmt: skip
        table.check_hf(self.shapes, str(self.directory / WEIGHTS))

    def reader(self) -> Callable[[str], Tensor]:
        """Function that reads a tensor by its name in the file, or in `factors`; the file is open as long as the
        function exists. It raises CheckpointError for non-finite values.
        """
        from safetensors import safe_open

        file: Any = safe_open(self.directory / WEIGHTS, framework="pt")

        def read(name: str) -> Tensor:
            if name in self.info or not self.experts:
                tensor: Tensor = file.get_tensor(name)
            else:
                before, _, after = name.partition(_EXPERTS)
                number, _, rest = after.partition(".")
                stack = f"{before}{_EXPERTS}{rest}"
                at = min(int(number), self.info[stack].shape[0] - 1)
                tensor = file.get_slice(stack)[at : at + 1][0]
            if lost := int((~tensor.isfinite()).sum()):
                raise CheckpointError(
                    f"{self.directory / WEIGHTS}: {name}", f"{lost:,} of {tensor.numel():,} values",
                    "are NaN or infinite, so the adapter is unusable",
                    "get the file from its source again",
                )  # fmt: skip
            return tensor

        return read


def adapters_of_run(
    table: RuleTable, lora: LoraConfig, layout: ParallelLayout, stages: Sequence[Sequence[Sequence[int]]]
) -> tuple[Adapters, AdapterFile | None]:
    """(adapters that a run trains, adapter file that they start from).

    Args:
        table: the model's conversion rules.
        stages: global layer ids `[stage][chunk]` (`config.layout.stage_layers`).

    Raises:
        ConfigError: a target that the model does not have, or that this layout cannot divide.
        CheckpointError: the adapter to start from is of another model, rank, scale or targets.
    """
    adapters = make_adapters(table, lora)
    adapters.table.check_layout(layout)
    adapters.check_stages(stages)
    if lora.init is None:
        return adapters, None
    file = AdapterFile.open(lora.init)
    file.check(adapters)
    return adapters, file


def adapter_config(adapters: Adapters, base: Path) -> dict[str, object]:
    """adapter_config.json in peft's format.

    Args:
        base: of the model that the adapter is added to.
    """
    lora = adapters.lora
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "use_rslora": lora.rs_lora,
        "target_modules": list(adapters.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "inference_mode": True,
    }


def write_adapter(
    adapters: Adapters, staging: Path, source: Path, dtype: str, files: Mapping[str, str], nbytes: int
) -> None:
    """Merge the safetensors shards in a directory into an adapter file; a single shard is renamed.

    Args:
        source: checkpoint of the model.
        dtype, nbytes: not used: the shards define them.
        files: name of the shard of every tensor.
    """
    if len(set(files.values())) == 1:
        (staging / next(iter(files.values()))).rename(staging / WEIGHTS)
        write_adapter_config(adapters, staging, source)
        return
    from safetensors import safe_open

    shards: dict[str, Any] = {file: safe_open(staging / file, framework="pt") for file in set(files.values())}
    infos = {file: read_header(staging / file) for file in shards}
    dtypes = {
        name: TORCH_DTYPES[infos[files[name]][name].dtype] for name in adapters.table.hf_shapes() if name in files
    }
    write_adapter_files(
        adapters, staging, source, dtypes, ((name, shards[files[name]].get_tensor(name)) for name in dtypes)
    )
    for file in shards:
        (staging / file).unlink()


def write_adapter_files(
    adapters: Adapters, directory: Path, base: Path, dtypes: Mapping[str, str], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write both files of an adapter.

    Args:
        base: checkpoint of the model.
        dtypes: of the tensors in their order, as torch names them.
        tensors: with their names, in that order.
    """
    shapes = adapters.table.hf_shapes()
    plans = [TensorPlan(name, SAFETENSORS_DTYPES[dtype], shapes[name]) for name, dtype in dtypes.items()]
    write_safetensors(directory / WEIGHTS, plans, (tensor for _, tensor in tensors), lambda done: None)
    write_adapter_config(adapters, directory, base)


def write_adapter_config(adapters: Adapters, directory: Path, base: Path) -> None:
    """Write `adapter_config` to its file; see `write_adapter_files`."""
    text = json.dumps(adapter_config(adapters, base), indent=2) + "\n"
    (directory / CONFIG).write_text(text, encoding="utf-8")
