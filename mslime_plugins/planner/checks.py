"""Checks of the planner for `mslime check`."""

from __future__ import annotations

from mslime.config.errors import ConfigError
from mslime.config.resolved import policy_spec
from mslime.config.schema import RunConfig
from mslime_plugins.planner.plan_command import plan_of_run
from mslime_plugins.planner.problems import GIB, host_problems


def check_host_memory(config: RunConfig) -> None:
    """Compare the planned host memory with `cluster.host_memory_gb`, if set. Raises ConfigError.

    The memory of GPUs is not compared: `mslime plan` does that.
    """
    if (memory := config.cluster.host_memory_gb) is None:
        return
    plan = plan_of_run(config)
    for problem in host_problems(policy_spec(config), memory, plan.host, plan.rollouts, config.rollout):
        raise ConfigError("cluster.host_memory_gb", memory, f"{problem.where}: needs {problem.needs / GIB:.1f} of "
                          f"{problem.has / GIB:.1f} usable GiB, most of it {problem.component} (mslime plan shows all "
                          "parts)", problem.hint)  # fmt: skip
