"""Bytes that a run writes to disks: checkpoints, exports, and files of weight syncs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mslime.config.output import CheckpointConfig
from mslime.config.resolved import PolicySpec
from mslime.config.transports import traits_of
from mslime.convert.families.qwen3_next import FLOAT32_PARAMETERS
from mslime.convert.table import RuleTable
from mslime_plugins.planner.parameters import model_parameters
from mslime_plugins.planner.trainer_memory import params_bytes


@dataclass(frozen=True)
class CheckpointBytes:
    """Bytes on disks, of all ranks together: every tensor is stored once.

    Attributes:
        weights, main, moments: of one checkpoint: parameters in the trainer's dtype, the optimizer's main weights, and
            Adam's moments. A critic's are among them.
        at_once: most checkpoints at a time: `checkpoint.keep` and `keep_best`, and the next one, which is complete
            before an older one is removed.
        for_ever: further ones, kept by `checkpoint.keep_every`.
        exports: Hugging Face checkpoints, by the end; and bytes of one.
        sync: `disk` and `delta`: all weights twice, below `weights.directory`.
        seconds: of writing one checkpoint, during which the run waits.
        every: steps between two of them; 0: there is only one.
    """

    weights: int
    main: int
    moments: int
    at_once: int
    for_ever: int
    exports: tuple[int, int]
    sync: int
    seconds: float
    every: int

    @property
    def checkpoint(self) -> int:
        """Bytes of one checkpoint."""
        return self.weights + self.main + self.moments

    @property
    def total(self) -> int:
        """Most bytes at the end of the run."""
        number, export = self.exports
        return (self.at_once + self.for_ever) * self.checkpoint + number * export + self.sync


def saved_bytes(
    c: CheckpointConfig, spec: PolicySpec, trained: RuleTable, critic: RuleTable | None, export_width: int,
    sync: int, directory: float,
) -> CheckpointBytes:  # fmt: skip
    """Bytes that a run writes.

    Args:
        trained: rules of the trained part: the model, or its adapters.
        critic: of a critic's model, whose output layer is one row.
        export_width: bytes of a number in an export.
        sync: bytes of all weights as sent to engines.
        directory: bytes a second into the directory, over all writing ranks.
    """
    tables = [trained, *([critic] if critic is not None else [])]
    elements = sum(map(model_parameters, tables))
    float32 = sum(model_parameters(table, FLOAT32_PARAMETERS) for table in tables)
    width = params_bytes(spec)
    kinds = [
        (elements - float32, stored_bytes_per_parameter(spec, width)),
        (float32, stored_bytes_per_parameter(spec, 4)),
    ]
    main, moments = (int(sum(count * each[part] for count, each in kinds)) for part in (0, 1))
    weights = (elements - float32) * width + float32 * 4
    steps = spec.train.num_steps
    saves = -(-steps // c.save_every) if c.save_every else 1
    for_ever = steps // math.lcm(c.keep_every, c.save_every) if c.keep_every and c.save_every else 0
    at_once = min(c.keep + (c.keep_best is not None) + 1, saves)
    exports = (steps // c.hf_every if c.hf_every else 0) + c.save_hf
    in_files = 2 * sync if traits_of(spec.weights.carrier).uses_directory else 0
    return CheckpointBytes(
        weights, main, moments, at_once, min(for_ever, saves - at_once),
        (exports, model_parameters(trained) * export_width), in_files,
        (weights + main + moments) / directory, c.save_every if c.save_every < steps else 0,
    )  # fmt: skip


def stored_bytes_per_parameter(spec: PolicySpec, width: int) -> tuple[int, int]:
    """(main weight, moments) of one parameter in a checkpoint: in the optimizer's dtypes, and in float32 if kept with a
    scale, in 16 or 8 bits, or on the host (`backends/megatron/checkpoint_files.py`).

    Args:
        width: bytes of the parameter; without the distributed optimizer float32 ones are their own main weight.
    """
    extra: Mapping[str, object] = spec.megatron.extra
    main = 0 if width == 4 and not spec.megatron.use_distributed_optimizer else 4
    if not extra.get("use_precision_aware_optimizer") or extra.get("optimizer_cpu_offload"):
        return main, 8
    remainders = extra.get("store_param_remainders", True) and width == 2
    kinds = [str(extra.get(name, "float32")) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    return 2 if remainders else main, sum(2 if kind == "bfloat16" else 4 for kind in kinds)
