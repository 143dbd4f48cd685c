"""Environments for rollouts of several turns (docs/environments.md).

from mslime.rollout.environments import EnvironmentTask, Step
"""

from mslime.rollout.environments.protocol import Environment as Environment
from mslime.rollout.environments.protocol import EnvironmentTask as EnvironmentTask
from mslime.rollout.environments.protocol import Messages as Messages
from mslime.rollout.environments.protocol import Step as Step
