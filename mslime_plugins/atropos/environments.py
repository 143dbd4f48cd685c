"""Registered environments, and the run's properties for them: Atropos' trainer API without its data."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from mslime.config.schema import RunConfig
from mslime_plugins.atropos.pushed import GroupRefusedError

LEAST_WEIGHT = 0.01
"""Smallest weight of an environment in the share of requests, as in Atropos."""
NEVER = 10**9
"""Number of steps after which an environment would end by itself: the run ends first."""
GONE_S = 60.0
"""Seconds without a request: environments send one every second or so."""


@dataclass
class RegisteredEnvironment:
    """An environment.

    Attributes:
        name: name assigned to it: the requested one and a number.
        length, weight: its share of all environments' requests: weight times its longest sequence.
        connected: it has not disconnected. heard: time of its last status request (`time.monotonic`).
    """

    name: str
    length: int
    weight: float
    connected: bool = True
    touch: float = field(default_factory=time.monotonic)


class EnvironmentRegistry:
    """All environments.

    Attributes:
        last: time of the last request (`time.monotonic`).
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._all: list[RegisteredEnvironment] = []
        self.last = time.monotonic()

    def touch(self) -> None:
        """Record the time of a request."""
        self.last = time.monotonic()

    @property
    def connected(self) -> list[RegisteredEnvironment]:
        """Environments that have not disconnected."""
        return [e for e in self._all if e.connected]

    def register(self, request: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Register an environment; returns the reply. It logs a status other than success, and retries."""
        size, wanted = request.get("group_size"), self._config.rollout.group_size
        if not isinstance(size, int) or size > wanted:
            return {"status": f"refused: group_size of the environment is {size}, but rollout.group_size of the run is "
                              f"{wanted}: set both to one value"}  # fmt: skip
        if request.get("min_batch_allocation") is not None:
            return {"status": "refused: min_batch_allocation is not supported, because a step takes groups in the "
                              "order of their completion: remove it"}  # fmt: skip
        base = str(request.get("desired_name") or "environment")
        number = sum(e.name.rpartition("_")[0] == base for e in self._all)
        weight, length = request.get("weight", 1.0), request.get("max_token_length", 1)
        self._all.append(RegisteredEnvironment(f"{base}_{number}", int(length), max(0.0, float(weight))))
        config = self._config
        return {
            "status": "success", "env_id": len(self._all) - 1, "wandb_name": self._all[-1].name,
            "checkpoint_dir": str(config.run_dir), "starting_step": step,
            "checkpoint_interval": config.checkpoint.save_every or -1, "num_steps": NEVER,
        }  # fmt: skip

    def disconnect(self, env_id: object) -> dict[str, Any]:
        """Disconnect an environment."""
        try:
            self.named(env_id).connected = False
        except GroupRefusedError as error:
            return {"status": "failure", "error": str(error)}
        return {"status": "success"}

    def named(self, env_id: object) -> RegisteredEnvironment:
        """An environment by its number; None if the request has none. Raises GroupRefusedError."""
        if env_id is None:
            return RegisteredEnvironment("environment", 1, 1.0)
        if not isinstance(env_id, int) or isinstance(env_id, bool) or not 0 <= env_id < len(self._all):
            raise GroupRefusedError("unknown_environment", f"env_id = {env_id!r:.40} has not registered with this run",
                                    "restart the environment after the start of the run")  # fmt: skip
        return self._all[env_id]

    def name_of(self, given: object) -> str:
        """Name of the environment that submitted a group, for messages."""
        env_id = cast("Mapping[str, Any]", given).get("env_id") if isinstance(given, Mapping) else None
        known = isinstance(env_id, int) and 0 <= env_id < len(self._all)
        return f"environment {self._all[cast('int', env_id)].name if known else env_id}"

    def status(self, env_id: object, step: int, waiting: int, spare: int) -> dict[str, Any]:
        """The reply to an environment before it begins new groups. Raises GroupRefusedError if it is not registered.

        Args:
            waiting, spare: see `AtroposRollouts.queue`.
        """
        environment = self.named(env_id)
        now = environment.touch = time.monotonic()
        total = sum(e.length * e.weight for e in self.connected if now - e.touch < GONE_S)
        share = environment.length * environment.weight / total if total > 0 else 1.0
        return {
            "current_step": step, "queue_size": waiting + spare, "unallocated_fraction": 1.0,
            "self_queue_size": waiting, "max_group_size": self._config.rollout.group_size,
            "env_weight": max(LEAST_WEIGHT, share),
        }  # fmt: skip

    def info(self) -> dict[str, Any]:
        """Sizes of the run: sequences of a step, and the length from which a sequence is too long."""
        rollout = self._config.rollout
        return {
            "batch_size": rollout.groups_per_step * rollout.group_size, "max_token_len": rollout.max_total_tokens or -1,
        }  # fmt: skip
