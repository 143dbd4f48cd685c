"""Memory that others read by Mooncake's transfer engine: its name, and an end that shares it or reads it.

Mooncake's package (the extra `mooncake`) is imported when an end is made, and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from mslime.config.transports import MooncakeOver

_FORCE_TCP = "MC_FORCE_TCP"
"""Mooncake looks at it when an end is made; its argument `protocol` chooses nothing where adapters are found."""


@dataclass(frozen=True)
class RemoteMemory:
    """Memory of a process, as others name it.

    Attributes:
        over: what it is read over.
        session: host and port of the end that shares it.
        address: in its process.
    """

    over: MooncakeOver
    session: str
    address: int

    def as_path(self) -> Path:
        """In the form in which requests name files."""
        return Path(self.over, self.session, str(self.address))

    @classmethod
    def of_path(cls, path: Path) -> RemoteMemory:
        """What `as_path` wrote. Raises ValueError."""
        match path.parts:
            case (over, session, address) if over in get_args(MooncakeOver) and address.isdecimal():
                return cls(cast("MooncakeOver", over), session, int(address))
            case _:
                raise ValueError(f"{path} names no memory of another process")


class End:
    """One end of Mooncake's transfers, in this process: a port that others read its registered memory through.

    Args:
        host: this machine's address, as the other ends reach it.
        over: the same at all ends.

    Raises:
        ImportError: the package is missing, or a library that it needs (libibverbs).
        OSError: Mooncake refused to start.
    """

    def __init__(self, host: str, over: MooncakeOver) -> None:
        from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]

        self.over: MooncakeOver = over
        self._engine: Any = TransferEngine()
        with _environment(over):
            refused = self._engine.initialize(host, "P2PHANDSHAKE", over, "")
        if refused:
            raise OSError(f"Mooncake's transfer engine did not start at {host} over {over}: it answered {refused}")
        self._session = f"{f'[{host}]' if ':' in host else host}:{self._engine.get_rpc_port()}"

    def share(self, address: int, size: int) -> RemoteMemory:
        """Let others read so many bytes from there on, until `unshare`. Raises OSError."""
        self.register(address, size)
        return RemoteMemory(self.over, self._session, address)

    def register(self, address: int, size: int) -> None:
        """Let memory take part in transfers. Raises OSError."""
        if refused := self._engine.register_memory(address, size):
            raise OSError(f"Mooncake cannot register {size:,} bytes: it answered {refused}")

    def unregister(self, address: int) -> None:
        """Let memory take no part any more. One that Mooncake does not know is none."""
        self._engine.unregister_memory(address)

    def read(self, memory: RemoteMemory, offset: int, into: int, size: int) -> None:
        """Copy bytes of another process into registered memory of this one; returns when they are there.

        Raises:
            OSError: its process is gone, shares no such memory, or cannot be reached.
        """
        if refused := self._engine.transfer_sync_read(memory.session, into, memory.address + offset, size):
            raise OSError(f"Mooncake cannot read {size:,} bytes of {memory.session}: it answered {refused}")


@contextmanager
def _environment(over: MooncakeOver) -> Generator[None]:
    """What an end is made in: SGLang makes others in the same process, which are not to be told."""
    before = os.environ.get(_FORCE_TCP)
    if over == "tcp":
        os.environ[_FORCE_TCP] = "1"
    try:
        yield
    finally:
        if over == "tcp":
            del os.environ[_FORCE_TCP]
            if before is not None:
                os.environ[_FORCE_TCP] = before
