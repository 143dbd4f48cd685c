"""Megatron `torch_dist` -> Hugging Face, in one process or several, none of which builds a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mslime.config.dtypes import declared_dtype
from mslime.config.errors import CheckpointError
from mslime.config.model_facts import checkpoint_dtype
from mslime.convert.families import get_family
from mslime.convert.files import SAFETENSORS_DTYPES, TensorPlan, torch_dtype
from mslime.convert.hf import HFCheckpoint
from mslime.convert.table import RuleTable
from mslime.convert.torch_dist import ModelPlacement
from mslime.offline.hf_output import HFJob, Output
from mslime.offline.jobs import source_identity
from mslime.offline.megatron_source import MegatronSource, Unit
from mslime.offline.to_megatron import DESCRIPTION, HF_FILES

if TYPE_CHECKING:
    from torch import Tensor


class ToHf(HFJob):
    """The job: see `jobs.ConversionJob`.

    Args:
        checkpoint: a converted checkpoint, or one of a training run.
        source: Hugging Face directory with config.json and tokenizer; its weights are read for what training left out
            (multi-token prediction, vision).
        hf_config: its config.json.
        placement: where megatron-core keeps the model's parameters.
        dtype: of the weights, as torch names it; default: what config.json says. Rules may pin theirs.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
    """

    def __init__(
        self,
        checkpoint: Path,
        source: Path,
        hf_config: Mapping[str, object],
        placement: ModelPlacement,
        *,
        dtype: str | None = None,
        max_shard_bytes: int = 5 << 30,
    ) -> None:
        self._checkpoint, self._source, self._hf_config = checkpoint, source, dict(hf_config)
        self._placement = placement
        self._dtype = dtype or checkpoint_dtype(hf_config)
        megatron, table, untrained = self._open()
        self._units = {unit.key: unit for unit in megatron.units}
        self._aliases = {name: table.aliases[name] for name in _aliases(checkpoint, untrained, table)}
        changes = declared_dtype(hf_config, self._dtype) if self._dtype else {}
        super().__init__(list(self._plan(megatron, table, untrained)), source, changes, max_shard_bytes)
        files = sorted(checkpoint.glob("*.distcp"))
        self._identity = source_identity([*files, checkpoint / ".metadata", source / "config.json"])

    def identity(self) -> Mapping[str, object]:
        """See `jobs.ConversionJob`."""
        return {
            "job": "to-hf",
            "source": [str(self._checkpoint.resolve()), self._identity],
            "config": self._hf_config,
            "dtype": self._dtype,
        }

    def _open(self) -> tuple[MegatronSource, RuleTable, HFCheckpoint | None]:
        """The checkpoint, the rules, and the Hugging Face weights where they are needed and there."""
        opened = cast("tuple[MegatronSource, RuleTable, HFCheckpoint | None] | None", self.__dict__.get("_opened"))
        if opened is None:
            table = get_family(self._hf_config).rules(self._hf_config)
            megatron = MegatronSource(self._checkpoint, table, self._placement)
            has_weights = any(self._source.glob("*.safetensors"))
            wanted = bool(table.untrained_names or table.aliases) and has_weights
            opened = (megatron, table, HFCheckpoint(self._source) if wanted else None)
            self._opened: Any = opened
        return opened

    def _plan(self, megatron: MegatronSource, table: RuleTable, untrained: HFCheckpoint | None) -> Iterator[Output]:
        stored: set[str] = set()
        for unit in megatron.units:
            dtype = unit.rules[0].dtype or self._dtype or megatron.dtype(unit)
            plans = [TensorPlan(name, SAFETENSORS_DTYPES[dtype], shape) for name, shape in unit.shapes.items()]
            again = [
                TensorPlan(alias, SAFETENSORS_DTYPES[dtype], unit.shapes[original])
                for alias, original in self._aliases.items()
                if original in unit.shapes
            ]
            stored.update(unit.shapes)
            yield Output(unit.key, (*plans, *again))
        own = {name: rule.dtype for rule in table.all_bound.values() if rule.dtype for name in rule.hf_names}
        for name in table.untrained_names if untrained is not None else ():
            assert untrained is not None
            if name in untrained.info and name not in stored:
                dtype = own.get(name) or self._dtype
                short = SAFETENSORS_DTYPES[dtype] if dtype else untrained.info[name].dtype
                yield Output(name, (TensorPlan(name, short, untrained.info[name].shape),))

    def make(self, output: Output) -> Sequence[Tensor]:
        """See `HFJob`."""
        megatron, _, untrained = self._open()
        unit: Unit | None = self._units.get(output.key)
        if unit is not None:
            tensors = megatron.read(unit)
        else:
            assert untrained is not None
            tensors = {output.key: untrained.tensor(output.key)}
        return [tensors[self._aliases.get(plan.name, plan.name)].to(torch_dtype(plan.dtype)) for plan in output.plans]


def _aliases(checkpoint: Path, untrained: HFCheckpoint | None, table: RuleTable) -> list[str]:
    """Names under which the original checkpoint repeated a tensor."""
    if untrained is not None:
        return [name for name in table.aliases if name in untrained.info]
    path = checkpoint / DESCRIPTION
    return list(json.loads(path.read_text(encoding="utf-8"))["aliases"]) if path.exists() else []


def side_files(checkpoint: Path, source: Path | None) -> Path:
    """The Hugging Face directory that belongs to a Megatron checkpoint.

    Args:
        source: what the user named, if anything.

    Raises:
        CheckpointError: nothing says which model this is.
    """
    if source is not None:
        return source
    if (checkpoint / HF_FILES / "config.json").exists():
        return checkpoint / HF_FILES
    raise CheckpointError(
        str(checkpoint), None, "a training checkpoint does not name its Hugging Face model",
        "name that model's directory with --source",
    )  # fmt: skip
