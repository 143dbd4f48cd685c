"""A training checkpoint written as a Hugging Face checkpoint.

Joins the offline conversions to megatron-core, which alone knows where it keeps a model's parameters.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from mslime.config.dtypes import export_dtype
from mslime.config.errors import CheckpointError, ConfigError
from mslime.config.lora import LORA_KEY
from mslime.config.schema import RunConfig
from mslime.control.stop import StopSignals
from mslime.convert.families import read_hf_config
from mslime.convert.placement import ModelPlacement
from mslime.data.checkpoints import check_checkpoint, newest
from mslime.data.manifest import NAME, read_manifest
from mslime.observe.progress import ConversionBars
from mslime.offline.jobs import ConversionJob, refuse_existing, run_job
from mslime.offline.to_adapter import export_adapter
from mslime.offline.to_hf import ToHf, side_files


def export(config: RunConfig, checkpoint: Path | None, out: Path) -> None:
    """Write what the trainer itself would export of a training checkpoint: a Hugging Face checkpoint, or an adapter.

    Args:
        checkpoint: default: the run's newest.
        out: directory to write; must not exist.

    Raises:
        UserError: there is no checkpoint or it is damaged, or `out` exists.
    """
    config.refuse_several("an export")
    refuse_existing(out)
    source = checkpoint or newest(config.run_dir / "checkpoints")
    if source is None:
        raise ConfigError("--checkpoint", str(config.run_dir), "holds no checkpoint", "name one with --checkpoint")
    check_checkpoint(source)
    if (lora := _adapters(source)) is not None:
        tensors = export_adapter(source, lora, config.model.path, out)
        Console(stderr=True).print(f"{out}: an adapter of {tensors} tensors, in peft's format")
        return
    dtype = export_dtype(read_hf_config(config.model.path))
    job = export_job(source, config.model.path, dtype=dtype)
    with StopSignals(), ConversionBars(Console(stderr=True), config.observe.progress == "off") as bars:
        run_job(job, out, workers=min(os.cpu_count() or 1, 8), progress=bars)


def export_job(
    checkpoint: Path, source: Path | None, *, dtype: str | None = None, max_shard_bytes: int = 5 << 30
) -> ConversionJob:
    """Megatron -> Hugging Face, for `run_job`.

    Args:
        source: Hugging Face directory of the model; None where the checkpoint carries its config.json.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
    """
    if _adapters(checkpoint) is not None:
        raise CheckpointError(
            str(checkpoint), "adapters", "it holds adapters, and not the model that they are on",
            "write the adapter with `mslime convert run`, and merge it with `mslime convert merge-lora`",
        )  # fmt: skip
    directory = side_files(checkpoint, source)
    config = read_hf_config(directory)
    return ToHf(
        checkpoint, directory, config, placement(config, directory), dtype=dtype, max_shard_bytes=max_shard_bytes
    )


def _adapters(checkpoint: Path) -> Mapping[str, object] | None:
    """What a training checkpoint says of its adapters; None where it holds a model."""
    if not (checkpoint / NAME).is_file():
        return None  # a converted checkpoint
    return read_manifest(checkpoint, check_files=False).extra.get(LORA_KEY)


def placement(config: Mapping[str, object], directory: Path) -> ModelPlacement:
    """Where megatron-core keeps the parameters of this model; imports it, builds a model on the meta device."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's, about how it is trained
        from mslime.backends.megatron.checkpoint_files import model_placement

        return model_placement(config, directory)
