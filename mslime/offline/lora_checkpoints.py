"""Adapters offline: merged into a Hugging Face checkpoint, or exported from a training checkpoint in peft's format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mslime.config.errors import CheckpointError, nearest
from mslime.config.lora import LoraConfig
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.hf import HFCheckpoint, atomic_directory
from mslime.convert.lora_rules import FACTORS, PREFIX, make_adapters, stored_place
from mslime.convert.peft import WEIGHTS, AdapterFile, write_adapter_files
from mslime.convert.safetensors_files import TensorPlan, torch_dtype
from mslime.convert.table import BoundRule, Rule
from mslime.convert.torch_dist import ModelPlacement, ParameterBox
from mslime.offline.jobs import source_identity
from mslime.offline.to_hf import HFJob, MegatronSource, Output

if TYPE_CHECKING:
    from torch import Tensor


class MergeLora(HFJob):
    """Job that merges an adapter: W + scale * B A in float32, in the checkpoint's dtype.

    Args:
        source: Hugging Face directory of the model, with plain or quantised weights; they are written plain.
        adapter: directory of an adapter in peft's format.

    Raises:
        CheckpointError: the adapter does not fit this model, or one of the two is damaged.
    """

    def __init__(self, source: Path, adapter: Path, max_shard_bytes: int = 5 << 30) -> None:
        self._source, self._file = source, AdapterFile.open(adapter)
        checkpoint, _ = self._opened
        self._adapted = _checked(self._file, checkpoint)
        outputs = [Output(name, (TensorPlan(name, info.dtype, info.shape),)) for name, info in checkpoint.info.items()]
        files = [source / file for file in {info.file for info in checkpoint.stored.values()}]
        self.sources = [*files, adapter / WEIGHTS]
        self._identity = source_identity(self.sources)
        super().__init__(outputs, source, {}, max_shard_bytes)

    @cached_property
    def _opened(self) -> tuple[HFCheckpoint, Callable[[str], Tensor]]:
        return HFCheckpoint(self._source), self._file.reader()

    def identity(self) -> Mapping[str, object]:
        return {
            "job": "merge-lora",
            "source": [str(self._source.resolve()), str(self._file.directory.resolve()), self._identity],
            "lora": self._file.lora.describe(),
        }

    def make(self, output: Output) -> Sequence[Tensor]:
        checkpoint, read = self._opened
        (plan,) = output.plans
        weight = checkpoint.tensor(plan.name).to(torch_dtype(plan.dtype))
        module = self._adapted.get(plan.name)
        if module is None:
            return [weight]
        a, b = (read(f"{module}.{factor}.weight").float() for factor in FACTORS)
        return [(weight.float() + b @ a * self._file.lora.scale).to(weight.dtype)]


def _checked(file: AdapterFile, checkpoint: HFCheckpoint) -> dict[str, str]:
    """Modules of the adapter, by the name of their weight.

    Raises:
        CheckpointError: a module that the model does not have, or of another shape; a module with only A or B.
    """
    found: dict[str, str] = {}
    shapes, where = file.factors, file.directory / WEIGHTS
    for name in shapes:
        module, _, factor = name.removesuffix(".weight").rpartition(".")
        weight = f"{module.removeprefix(PREFIX)}.weight"
        if factor not in FACTORS or not module.startswith(PREFIX):
            raise CheckpointError(
                f"{where}: {name}", list(shapes[name]), f"a name must begin with {PREFIX} and end in "
                f"{' or '.join(FACTORS)}",
                "use an adapter in peft's format",
            )  # fmt: skip
        if weight not in checkpoint.info:
            raise CheckpointError(
                f"{where}: {name}", None, f"the model has no {weight}",
                f"{nearest(weight, checkpoint.info)} name the checkpoint that the adapter was trained on".lstrip(),
            )  # fmt: skip
        found[weight] = module
    for weight in found if file.experts else ():
        if (beyond := weight.replace(".experts.0.", f".experts.{file.experts}.")) not in found and (
            beyond in checkpoint.info
        ):
            raise CheckpointError(
                f"{where}: {found[weight]}", f"{file.experts} experts", f"the model also has {beyond}",
                "name the checkpoint that the adapter was trained on",
            )  # fmt: skip
    for weight, module in found.items():
        a, b = (shapes.get(f"{module}.{factor}.weight") for factor in FACTORS)
        out, features = (*checkpoint.info[weight].shape, 0)[:2]
        if a != (file.lora.rank, features) or b != (out, file.lora.rank):
            raise CheckpointError(
                f"{where}: {module}", {"lora_A": a, "lora_B": b},
                f"{weight} is {(out, features)}, and the rank {file.lora.rank}",
                "name the checkpoint that the adapter was trained on",
            )  # fmt: skip
    return found


# Export of adapters from a training checkpoint to peft's format, in one process: adapters are small.


def export_adapter(checkpoint: Path, settings: Mapping[str, object], model: Path, out: Path) -> int:
    """Write the adapter of a checkpoint; returns the number of its tensors.

    Args:
        settings: adapter settings in the checkpoint (`LoraConfig.describe`).
        model: Hugging Face directory of the model that they are on.
        out: directory to write.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
    """
    hf_config = read_hf_config(model)
    adapters = make_adapters(get_family(hf_config).rules(hf_config), LoraConfig.model_validate(settings))
    # every factor is complete, in a tensor of all layers and experts
    lines = [(rule, bound) for each in adapters.rules for rule in (each.a, each.b) for bound in rule.expand()]
    placement = ModelPlacement({bound.name: (_piece(rule, bound),) for rule, bound in lines}, ())
    source = MegatronSource(checkpoint, adapters.table, placement)
    with atomic_directory(out) as staging:
        tensors = (pair for unit in source.units.values() for pair in source.read(unit).items())
        dtypes = {name: source.dtype(unit) for unit in source.units.values() for name in unit.shapes}
        write_adapter_files(adapters, staging, model, dtypes, tensors)
    return len(dtypes)


def _piece(rule: Rule, bound: BoundRule) -> ParameterBox:
    key, places = stored_place(rule, bound)
    shape = bound.kind.full_shape
    return ParameterBox(
        key, (*(size for _, _, size in places), *shape), (*(at for _, at, _ in places), *(0 for _ in shape)),
        (*(1 for _ in places), *shape), 0, shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))),
    )  # fmt: skip
