"""The Python API of this package: `mslime plan` and `mslime report` as functions that return values.

Like `mslime.api`, they raise UserError for a mistake and print nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mslime.api import Source, values_of

if TYPE_CHECKING:
    from mslime_plugins.planner.plan import RunPlan


def plan(source: Source, *, gpus: int | None = None, gpu_memory_gb: float | None = None) -> RunPlan:
    """Memory, balance and weight-sync traffic, as in `mslime plan`; reads only config.json of `model.path`.

    Args:
        gpus: of the whole run, engines included; default: from the configuration.
        gpu_memory_gb: nominal memory of one GPU; default `cluster.gpu_memory_gb`.

    Raises:
        UserError: a mistake in the configuration or in config.json. A run that does not fit is reported in the plan.
    """
    from mslime_plugins.planner.plan_command import plan_of

    return plan_of(values_of(source), gpus, gpu_memory_gb)


def report(
    run_dir: str | os.PathLike[str], *others: str | os.PathLike[str], out: str | os.PathLike[str] | None = None
) -> Path:
    """Write the report of a run, finished or not, or its comparison with others; returns the path. A run of several
    adapters gives a comparison of these.

    Args:
        out: path of the page; default: report.html or compare.html in `run_dir`.

    Raises:
        UserError: a directory is missing, has no metrics, or has a broken file.
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
