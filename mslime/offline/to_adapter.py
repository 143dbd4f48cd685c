"""A training checkpoint of adapters -> an adapter in peft's format, in one process: adapters are small."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from mslime.config.lora import LoraConfig
from mslime.convert.adapters import Adapters, make_adapters, stored_place
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.hf import atomic_directory
from mslime.convert.peft import write_adapter_files
from mslime.convert.table import BoundRule, Rule
from mslime.convert.torch_dist import ModelPlacement, ParameterBox
from mslime.offline.megatron_source import MegatronSource


def export_adapter(checkpoint: Path, settings: Mapping[str, object], model: Path, out: Path) -> int:
    """Write the adapter of a checkpoint; returns the number of its tensors.

    Args:
        settings: what the checkpoint says of its adapters (`LoraConfig.describe`).
        model: Hugging Face directory of the model that they are on.
        out: directory to write.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
    """
    hf_config = read_hf_config(model)
    adapters = make_adapters(get_family(hf_config).rules(hf_config), LoraConfig.model_validate(settings))
    source = MegatronSource(checkpoint, adapters.table, _placement(adapters))
    with atomic_directory(out) as staging:
        tensors = (pair for unit in source.units for pair in source.read(unit).items())
        dtypes = {name: source.dtype(unit) for unit in source.units for name in unit.shapes}
        write_adapter_files(adapters, staging, model, dtypes, tensors)
    return len(dtypes)


def _placement(adapters: Adapters) -> ModelPlacement:
    """Every factor lies whole in a tensor of all layers, and experts."""
    lines = [(rule, bound) for each in adapters.rules for rule in (each.a, each.b) for bound in rule.expand()]
    return ModelPlacement({bound.name: (_piece(rule, bound),) for rule, bound in lines}, ())


def _piece(rule: Rule, bound: BoundRule) -> ParameterBox:
    key, places = stored_place(rule, bound)
    shape = bound.full_shape
    return ParameterBox(
        key, (*(size for _, _, size in places), *shape), (*(at for _, at, _ in places), *(0 for _ in shape)),
        (*(1 for _ in places), *shape), 0, shape, tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))),
    )  # fmt: skip
