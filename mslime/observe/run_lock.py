"""The lock of a run's directory: which process owns it. `run.run_directory` takes and releases it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import psutil

LOCK = ".lock"
"""In a run's directory: who owns it, or did so last."""


def own_description() -> dict[str, Any]:
    """What this process writes into the lock of its run's directory."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "process_started": psutil.Process().create_time(),
    }


def owner_in(text: bytes) -> dict[str, Any]:
    """Who wrote the lock's file last; empty when it says nothing."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def lives_here(owner: Mapping[str, Any]) -> bool:
    """Whether the described process is one of this machine, and not a later one of the same number."""
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    try:
        return psutil.Process(pid).create_time() == owner.get("process_started")
    except psutil.Error:
        return False
