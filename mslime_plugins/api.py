"""The Python API of this package: what `mslime plan` and `mslime report` do, as functions that return values.

Like those of `mslime.api`, they raise UserError for a mistake and print nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mslime.api import Source, values_of

if TYPE_CHECKING:
    from mslime_plugins.planner.plan import RunPlan


def plan(source: Source, *, gpus: int | None = None, gpu_memory_gb: float | None = None) -> RunPlan:
    """Memory, balance and weight-sync traffic, as `mslime plan`; of `model.path` only config.json is read.

    Args:
        gpus: of the whole run, engines included; default: what the configuration says.
        gpu_memory_gb: of one GPU as it is sold; default `cluster.gpu_memory_gb`.

    Raises:
        UserError: a mistake in the configuration or in config.json. That something does not fit is in the plan.
    """
    from mslime_plugins.planner.plan_command import plan_of

    return plan_of(values_of(source), gpus, gpu_memory_gb)


def report(
    run_dir: str | os.PathLike[str], *others: str | os.PathLike[str], out: str | os.PathLike[str] | None = None
) -> Path:
    """Write the page about a run, finished or not, or one that compares it with others; returns its path. Of a run of
    several adapters, each is compared with the others.

    Args:
        out: where to; default: report.html or compare.html in `run_dir`.

    Raises:
        UserError: a directory is not there, holds no metrics, or a broken file.
    """
    from mslime.config.errors import reading_run
    from mslime.config.lora import directories
    from mslime_plugins.report.compare import FILE_NAME, write_comparison
    from mslime_plugins.report.page import write_report

    given, to = list(dict.fromkeys(map(Path, (run_dir, *others)))), None if out is None else Path(out)
    with reading_run(given[0]):
        runs = [path for each in given for path in directories(each)[1:] or [each]]
        if len(runs) == 1:
            return write_report(runs[0], to)
        return write_comparison(runs, to or given[0] / FILE_NAME)
