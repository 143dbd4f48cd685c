"""mslime: reinforcement-learning post-training for large Mixture-of-Experts language models.

Importing this package is cheap and pulls in no engine: torch, megatron, sglang and ray are imported
inside the process that runs them. The names below are the Python API (`mslime.api`), loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mslime.api import (
        RunConfig,
        Stopped,
        TrainResult,
        UserError,
        check,
        evaluate,
        load_config,
        train,
    )

__version__ = "0.1.0"
__all__ = [
    "RunConfig",
    "Stopped",
    "TrainResult",
    "UserError",
    "__version__",
    "check",
    "evaluate",
    "load_config",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mslime' has no attribute {name!r}")
    globals()[name] = value = getattr(importlib.import_module("mslime.api"), name)
    return value


def __dir__() -> list[str]:
    return __all__
