"""Lock of a run's directory, which names the owning process. `run.run_directory` takes and releases it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import psutil

LOCK = ".lock"
"""File in a run's directory that describes its present or last owner."""


def own_description() -> dict[str, Any]:
    """Description of this process for the lock of its run's directory."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "process_started": psutil.Process().create_time(),
    }


def owner_in(text: bytes) -> dict[str, Any]:
    """Last owner from the lock's file; empty if the text is not readable."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def lives_here(owner: Mapping[str, Any]) -> bool:
    """Whether the described process runs on this machine and is not a later one with the same id."""
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        return psutil.Process(pid).create_time() == owner.get("process_started")
    except psutil.Error:
        return False
