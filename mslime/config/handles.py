"""Handles of memory that a process shares with others on its machine, as files: each is for one process to open."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

HandleFields = tuple[bytes | int, ...]
"""What torch needs to open memory; the first says on which kind of device: 0 a CPU, 1 CUDA."""


def write_handle(path: Path, number: int, fields: HandleFields) -> None:
    """Write one of several handles of the memory that `path` names. Raises OSError."""
    said = [field.hex() if isinstance(field, bytes) else field for field in fields]
    path.with_name(f"{path.name}.{number}").write_text(json.dumps(said))


def take_handle(path: Path) -> HandleFields:
    """A handle that no other process has taken, nor will.

    Raises:
        OSError: there is none left, or none was written.
    """
    for number in count():
        own = path.with_name(f"{path.name}.{number}")
        taken = own.with_name(f"{own.name}.taken")
        try:
            own.rename(taken)
        except FileNotFoundError:
            if not taken.exists():
                raise
            continue
        return tuple(
            bytes.fromhex(said) if isinstance(said, str) else int(said) for said in json.loads(taken.read_text())
        )
    raise AssertionError("numbers do not end")
