"""Results of a search, as a table and as usable settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from rich.console import Group
from rich.table import Table
from rich.text import Text

from mslime_plugins.planner.plan_tables import share_of
from mslime_plugins.planner.problems import GIB, Verdict, verdict_of
from mslime_plugins.planner.search import FittingLayout


def describe_found(found: Sequence[FittingLayout], gpu: str) -> Group:
    """The layouts, the assumptions, and the settings of the first."""
    table = Table(title="Layouts that fit, the fastest first", title_justify="left", title_style="bold")
    columns = ("", "placement", "trainer", "for memory", "engines", "of a GPU", "host GiB", "generate", "train", "sync",
               "sleep", "step s")  # fmt: skip
    for name in columns:
        table.add_column(name, justify="left" if name in columns[1:5] else "right")
    for number, each in enumerate(found, 1):
        plan, seconds = each.plan, each.seconds
        host = f"{plan.host.total / GIB:.0f}" + _word(verdict_of(plan.host_share))
        table.add_row(
            str(number), each.settings["cluster"]["placement"], f"{plan.trainer_gpus}: {plan.layout.describe()}",
            each.measures, engines_of(each.settings["sglang"]),
            share_of(plan.fullest / plan.gpu_bytes, plan.verdict_of(plan.fullest)), host,
            *(f"{seconds[name]:.1f}" for name in ("generate", "train", "sync", "sleep", "step")),
        )  # fmt: skip
    best = found[0]
    parts = ", ".join(f"{name} {spent:.1f}" for name, spent in best.training.items() if spent >= 0.05)
    return Group(
        table,
        Text(f"reckoned with {gpu}, when all responses are as long as they may be; seconds compare layouts, and were "
             "compared with no GPU (docs/planning.md)"),
        Text(f"training of 1, in seconds: {parts}"),
        *(Text(f"remark on 1: {said}", style="yellow") for said in best.plan.remarks),
        Text("\nSettings of 1, for RUN.yaml:\n", style="bold"),
        Text(as_yaml(best.settings)),
        Text("or as flags:\n", style="bold"),
        Text(" ".join(as_flags(best.settings))),
    )  # fmt: skip


def _word(verdict: Verdict) -> str:
    return "" if verdict == "fits" else f" {verdict}"


def engines_of(sglang: Mapping[str, Any]) -> str:
    """Short description of engine sizes."""
    ep = f" EP{sglang['ep_size']}" if sglang.get("ep_size", 1) > 1 else ""
    return f"{sglang['num_engines']} x TP{sglang['tp_size']}{ep}"


def as_yaml(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections of a run's file."""
    return yaml.safe_dump({name: dict(section) for name, section in settings.items()}, sort_keys=False)


def as_flags(settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The same as flags of commands that take settings; after a launch script's flags they override these."""
    words: list[str] = []
    for section, values in settings.items():
        for name, value in values.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{section}.{'' if value else 'no-'}{flag}")
            else:
                words += [f"--{section}.{flag}", "null" if value is None else str(value)]
    return words
