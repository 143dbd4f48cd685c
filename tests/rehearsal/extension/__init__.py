"""Transformer Engine's `transformer_engine_torch` in plain torch, for what a GPT in bfloat16, float32 or FP8 uses.

Transformer Engine's own Python runs unchanged above it: every argument of every call into the extension is what it
would be on a GPU. Signatures are those of version 2.20.2. A function that is not written here is there, because
Transformer Engine imports all of them, and says its name when it is called.
"""

from __future__ import annotations

from typing import Any

from tests.rehearsal.extension.attention import *  # noqa: F403
from tests.rehearsal.extension.context_parallel import *  # noqa: F403
from tests.rehearsal.extension.enums import *  # noqa: F403
from tests.rehearsal.extension.fp8 import *  # noqa: F403
from tests.rehearsal.extension.gemm import *  # noqa: F403
from tests.rehearsal.extension.names import CLASSES, FUNCTIONS
from tests.rehearsal.extension.norms import *  # noqa: F403
from tests.rehearsal.extension.optimizer import *  # noqa: F403


class NotRehearsed(NotImplementedError):
    """Something of the extension was called that the stand-in does not have."""


def _missing(name: str) -> Any:
    def missing(*args: object, **kwargs: object) -> object:
        raise NotRehearsed(f"transformer_engine_torch.{name} is not in the rehearsal's stand-in")

    missing.__name__ = name
    return missing


class FP8TensorMeta:
    scale = amax_history = None


def get_cudnn_version() -> int:
    return 92400


def get_stream_priority_range(device: object = None) -> tuple[int, int]:
    return (0, -5)


def ubuf_built_with_mpi() -> bool:
    return False


def device_supports_multicast(device: int = 0) -> bool:
    return False


IMPLEMENTED = sorted(name for name in FUNCTIONS if name in globals())
"""Functions of the extension that compute here."""

for _name in FUNCTIONS:
    globals().setdefault(_name, _missing(_name))
for _name in CLASSES:
    globals().setdefault(_name, type(_name, (), {}))
