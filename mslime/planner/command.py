"""`mslime plan`: from a file and flags to a printed plan and an exit status."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from mslime.config.errors import ConfigError
from mslime.config.loader import build, merge
from mslime.config.schema import RunConfig
from mslime.convert.families import read_hf_config
from mslime.planner.describe import describe
from mslime.planner.plan import RunPlan, make_plan

_WIDTH = 140


def run_plan(
    values: dict[str, Any], gpus: int | None, gpu_memory_gb: float | None, as_json: bool, strict: bool = False
) -> int:
    """Print the plan of a run.

    Args:
        values: what a file and flags say; only `model.path` is required, a directory with a config.json.
        gpus: of the whole run; what the engines leave becomes the trainer's (default: `cluster.trainer_ranks`).
        gpu_memory_gb: of one GPU as it is sold (default: `cluster.gpu_memory_gb`).
        as_json: print JSON instead of tables.
        strict: a tight plan does not fit.

    Returns:
        0 when everything fits, tightly or not, 1 when something does not.

    Raises:
        UserError: a mistake in the configuration or in config.json.
    """
    plan = plan_of(values, gpus, gpu_memory_gb)
    if as_json:
        print(json.dumps(plan.as_dict(), indent=2, default=str))
    else:
        console = Console()
        # Tables are wide; where there is no terminal to fit into, they are not folded.
        Console(width=max(console.width, _WIDTH) if not console.is_terminal else None).print(describe(plan))
    return 0 if plan.verdict in (("fits",) if strict else ("fits", "tight")) else 1


def plan_of(values: dict[str, Any], gpus: int | None = None, gpu_memory_gb: float | None = None) -> RunPlan:
    """The plan of what a file and flags say; see `run_plan`. Raises UserError."""
    config = plan_config(values, gpus, gpu_memory_gb)
    critic = read_hf_config(config.critic.path) if config.has_critic and config.critic.path is not None else None
    return make_plan(config, read_hf_config(config.model.path), critic)


def plan_config(values: dict[str, Any], gpus: int | None = None, gpu_memory_gb: float | None = None) -> RunConfig:
    """The configuration that is planned, from what a file and flags say. Raises ConfigError."""
    values = merge({"data": {"prompts": ["prompts are not read"]}}, values)
    if gpu_memory_gb is not None:
        values = merge(values, {"cluster": {"gpu_memory_gb": gpu_memory_gb}})
    if gpus is not None:
        # The engines are known before the layout can be: data parallelism is whatever GPUs are left.
        laid_out = ("megatron", "cluster")
        fixed = build({key: section for key, section in values.items() if key not in laid_out})
        teachers = fixed.teacher.launched * fixed.teacher.tp_size
        shared = values.get("cluster", {}).get("placement") == "colocated"
        served = (0 if shared else fixed.sglang.gpus) + teachers if fixed.train.task == "rl" else 0
        if gpus <= served:
            raise ConfigError("--gpus", gpus, f"the engines alone take {served}", "raise it, or plan fewer engines")
        shares = 2 if fixed.critic_ranks else 1  # a critic of its own takes as many as the policy
        values = merge(values, {"cluster": {"trainer_ranks": (gpus - served) // shares}})
    return build(values)
