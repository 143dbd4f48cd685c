"""What one of several rollout managers has of the run's settings: what there is one of is divided, or counted up.

Processes (`reward.workers`, environments) and limits for each engine are each manager's own, since they grow with the
engines. Servers that all managers ask, and addresses, are not.
"""

from __future__ import annotations

from typing import Any, TypeVar

from mslime.config.reward import GraderConfig, RewardServersConfig, ScoringConfig
from mslime.config.schema import RunConfig

Servers = TypeVar("Servers", bound=RewardServersConfig)
Grader = TypeVar("Grader", bound=GraderConfig)
ScoringSection = TypeVar("ScoringSection", bound=ScoringConfig)


def share_of(config: RunConfig, index: int) -> RunConfig:
    """The settings of manager `index` of `rollout.managers`. A fixed port of the agents' server is that of manager 0,
    and the others follow; requests to a served teacher and to served rewards are divided."""
    teacher, rollout, data, every = config.teacher, config.rollout, config.data, config.rollout.managers
    port = rollout.server.port + index if rollout.server.port else 0
    sets = [
        s if s.reward is None else s.model_copy(update={"reward": _reward(s.reward, every)}) for s in data.eval_sets
    ]
    return config.model_copy(
        update={
            "teacher": teacher.model_copy(update={"concurrency": _part(teacher.concurrency, every)}),
            "rollout": rollout.model_copy(update={"server": rollout.server.model_copy(update={"port": port})}),
            "reward": _reward(config.reward, every),
            "data": data.model_copy(update={"eval_sets": sets}),
        }
    )


def _reward(reward: ScoringSection, every: int) -> ScoringSection:
    return _grader(reward, every, parts=[_grader(part, every) for part in reward.parts])


def _grader(grader: Grader, every: int, **changed: Any) -> Grader:
    divided = {"http": _servers(grader.http, every), "judge": _servers(grader.judge, every)}
    return grader.model_copy(update={**divided, **changed})


def _servers(servers: Servers, every: int) -> Servers:
    return servers.model_copy(update={"concurrency": _part(servers.concurrency, every)})


def _part(requests: int, every: int) -> int:
    return max(1, requests // every)
