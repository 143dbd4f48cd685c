"""`mslime plan`: from a file and flags to a printed plan and an exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mslime.config.cluster import usual_gpu
from mslime.config.errors import ConfigError
from mslime.config.loader import build, merge
from mslime.config.schema import RunConfig
from mslime.convert.families import read_hf_config
from mslime_plugins.planner.plan import RunPlan, make_plan
from mslime_plugins.planner.plan_tables import describe, share_of
from mslime_plugins.planner.problems import GIB, Verdict, verdict_of
from mslime_plugins.planner.search import FittingLayout, NothingFits, search

_WIDTH = 140
TIGHT_STATUS = 3
"""Exit status of a plan that fits with a margin below its possible error."""


def run_plan(
    values: dict[str, Any], gpus: int | None, gpu_memory_gb: float | None, as_json: bool, strict: bool = False
) -> int:
    """Print the plan of a run.

    Args:
        values: settings of a file and flags; only `model.path` is required, a directory with a config.json.
        gpus: of the whole run; the trainer gets those that the engines leave (default: `cluster.trainer_ranks`).
        gpu_memory_gb: nominal memory of one GPU (default: `cluster.gpu_memory_gb`).
        as_json: print JSON instead of tables.
        strict: a tight plan does not fit.

    Returns:
        0 if everything fits, 3 if it fits tightly (1 with `strict`), 1 if something does not fit.

    Raises:
        UserError: a mistake in the configuration or in config.json.
    """
    plan = plan_of(values, gpus, gpu_memory_gb)
    if as_json:
        print(json.dumps(plan.as_dict(), indent=2, default=str))
    else:
        console = Console()
        # Tables are wide; they are not wrapped without a terminal.
        Console(width=max(console.width, _WIDTH) if not console.is_terminal else None).print(describe(plan))
    return status_of(plan.verdict, strict)


def status_of(verdict: Verdict, strict: bool) -> int:
    """Exit status of the command."""
    return {"fits": 0, "tight": 1 if strict else TIGHT_STATUS, "does not fit": 1}[verdict]


def run_search(
    values: dict[str, Any], gpus: int | None, gpu_memory_gb: float | None, *, top: int, gpu: str = "",
    as_json: bool = False, strict: bool = False,
) -> int:  # fmt: skip
    """Print the layouts that fit, the fastest first, and the settings of the first.

    Args:
        gpus: of the run; required.
        top: most layouts to print.
        gpu: its name, if it is not the usual GPU with that much memory.

    Returns:
        For the first: 0, or 3 if it fits tightly (1 with `strict`); 1 if nothing fits.

    Raises:
        UserError: a mistake in the configuration or in config.json.
    """
    try:
        found, of = found_by(values, gpus, gpu_memory_gb, top, gpu)
    except NothingFits as error:
        print(error, file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps({"gpu": of, "found": [each.as_dict() for each in found]}, indent=2, default=str))
    else:
        console = Console()
        wide = Console(width=max(console.width, _WIDTH) if not console.is_terminal else None)
        wide.print(describe_found(found, of), soft_wrap=True)
    return status_of(found[0].plan.verdict, strict)


def found_by(
    values: dict[str, Any], gpus: int | None, gpu_memory_gb: float | None, top: int, gpu: str = ""
) -> tuple[list[FittingLayout], str]:
    """Results of a search, and the name of its GPU. Raises NothingFits, UserError."""
    if gpus is None or gpus < 1:
        raise ConfigError("--gpus", gpus, "a search needs the number of GPUs", "set the number of GPUs of the run")
    if top < 1:
        raise ConfigError("--top", top, "must be at least 1", "set the number of layouts to show")
    values = merge({"cluster": {"device": "cuda"}}, _completed(values, gpu_memory_gb))
    alone = build(values, rules=False)
    of = gpu or usual_gpu(alone.cluster.gpu_memory_gb)
    return search(values, gpus, read_hf_config(alone.model.path), top, of), of


def plan_of(values: dict[str, Any], gpus: int | None = None, gpu_memory_gb: float | None = None) -> RunPlan:
    """The plan for settings of a file and flags; see `run_plan`. Raises UserError."""
    return plan_of_run(plan_config(values, gpus, gpu_memory_gb))


def plan_of_run(config: RunConfig) -> RunPlan:
    """The plan of a run, from the config.json of each of its models. Raises UserError."""
    critic = read_hf_config(config.critic.path) if config.has_critic and config.critic.path is not None else None
    teacher_path = config.teacher.path if config.teacher_shares else None
    teacher = read_hf_config(teacher_path) if teacher_path is not None else None
    return make_plan(config, read_hf_config(config.model.path), critic, teacher)


def plan_config(values: dict[str, Any], gpus: int | None = None, gpu_memory_gb: float | None = None) -> RunConfig:
    """The configuration to plan, from settings of a file and flags. Raises ConfigError."""
    values = _completed(values, gpu_memory_gb)
    if gpus is not None:
        # Engines are resolved before the layout: data parallelism uses the remaining GPUs.
        laid_out = ("megatron", "cluster", "weights")
        teacher = dict(values.get("teacher", {}))
        apart = teacher.pop("placement", "separate") == "separate"  # it follows cluster.placement
        known = {key: section for key, section in values.items() if key not in laid_out}
        fixed = build(known | ({"teacher": teacher} if teacher else {}))
        shared = build(values, rules=False).colocated
        teachers = fixed.teacher.gpus if fixed.teacher.launched and apart else 0
        served = (0 if shared else fixed.sglang.gpus) + teachers if fixed.train.task == "rl" else 0
        if gpus <= served:
            raise ConfigError("--gpus", gpus, f"the engines alone need {served}", "raise it, or plan fewer engines")
        shares = 2 if fixed.critic_ranks else 1  # a separate critic takes as many as the policy
        values = merge(values, {"cluster": {"trainer_ranks": (gpus - served) // shares}})
    return build(values)


def _completed(values: dict[str, Any], gpu_memory_gb: float | None) -> dict[str, Any]:
    """Settings to plan, with prompts and the memory of a GPU. Raises ConfigError if a given section is wrong alone."""
    build(values, rules=False)
    values = merge({"data": {"prompts": ["prompts are not read"]}}, values)
    return values if gpu_memory_gb is None else merge(values, {"cluster": {"gpu_memory_gb": gpu_memory_gb}})


# Results of a search, as a table and as usable settings.


def describe_found(found: Sequence[FittingLayout], gpu: str) -> Group:
    """The layouts, the assumptions, and the settings of the first."""
    table = Table(title="Layouts that fit, the fastest first", title_justify="left", title_style="bold")
    columns = ("", "placement", "trainer", "for memory", "engines", "of a GPU", "host GiB", "generate", "train", "sync",
               "sleep", "step s")  # fmt: skip
    for name in columns:
        table.add_column(name, justify="left" if name in columns[1:5] else "right")
    for number, each in enumerate(found, 1):
        plan, seconds = each.plan, each.seconds
        verdict = verdict_of(plan.host_share)
        host = f"{plan.host.total / GIB:.0f}" + ("" if verdict == "fits" else f" {verdict}")
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
        Text(f"estimated for {gpu}, with all responses of maximal length; the seconds are for comparing layouts, and "
             "are not validated on GPUs (docs/planning.md)"),
        Text(f"training of 1, in seconds: {parts}"),
        *(Text(f"remark on 1: {remark}", style="yellow") for remark in best.plan.remarks),
        Text("\nSettings of 1, for RUN.yaml:\n", style="bold"),
        Text(as_yaml(best.settings)),
        Text("or as flags:\n", style="bold"),
        Text(" ".join(as_flags(best.settings))),
    )  # fmt: skip


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
