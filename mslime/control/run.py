"""Starting a run from its configuration, and everything around the loop: directories, signals, the last word."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from mslime.config.dtypes import export_dtype
from mslime.config.errors import ConfigError
from mslime.config.schema import RunConfig
from mslime.control.check import describe, resolve, write_resolved
from mslime.control.cluster import resolved_device
from mslime.control.convert import export_job
from mslime.control.convert_bars import Bars
from mslime.control.environment import refuse_without_gpu
from mslime.control.loop import train_rl, train_sft
from mslime.control.session import Session
from mslime.convert.families import read_hf_config
from mslime.convert.jobs import refuse_existing, run_job
from mslime.data.checkpoints import latest_complete, read_manifest


def run(config: RunConfig) -> int:
    """Train. Returns 0; raises UserError for a user's mistake or a failed part of the run."""
    config = resolved_device(config)
    refuse_without_gpu(config)
    resolved = resolve(config)
    config = resolved.config
    console = Console(stderr=True)
    if config.observe.progress != "off":
        console.print(describe(resolved))
    write_resolved(config, config.run_dir / "config.yaml")
    session = Session(resolved)
    if session.first_step >= config.train.num_steps:
        console.print(f"{config.run_dir}: all {config.train.num_steps} steps are done already")
        return 0
    with _terminate_like_ctrl_c(), session:
        (train_sft if config.train.task == "sft" else train_rl)(session)
    console.print(f"done: {config.run_dir}")
    return 0


def export(config: RunConfig, checkpoint: Path | None, out: Path) -> None:
    """Write the Hugging Face checkpoint of a training checkpoint: what the trainer itself would export.

    Args:
        checkpoint: default: the newest complete one of the run.
        out: directory to write; must not exist.

    Raises:
        UserError: there is no complete checkpoint, or `out` exists.
    """
    refuse_existing(out)
    source = checkpoint or latest_complete(config.run_dir / "checkpoints")
    if source is None:
        raise ConfigError(
            "--checkpoint", str(config.run_dir), "holds no complete checkpoint", "name one with --checkpoint"
        )
    read_manifest(source)
    dtype = export_dtype(read_hf_config(config.model.path))
    job = export_job(source, config.model.path, dtype=dtype)
    with _terminate_like_ctrl_c(), Bars(Console(stderr=True), config.observe.progress == "off") as bars:
        run_job(job, out, workers=min(os.cpu_count() or 1, 8), progress=bars)


@contextmanager
def _terminate_like_ctrl_c() -> Iterator[None]:
    """SIGTERM (a scheduler's way to end a job) unwinds the run like Ctrl-C does, so that nothing is left behind."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
