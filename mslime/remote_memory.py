"""Memory that other processes read by Mooncake's transfer engine: its name, and endpoints that share or read it.

Mooncake's package (the extra `mooncake`) is imported only when an endpoint is created.
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
"""Read by Mooncake when an endpoint is created; its argument `protocol` has no effect if adapters are found."""


@dataclass(frozen=True)
class RemoteMemory:
    """Address of a process's memory for other processes.

    Attributes:
        over: network protocol.
        session: host and port of the endpoint that shares it.
        address: in its process.
    """

    over: MooncakeOver
    session: str
    address: int

    def as_path(self) -> Path:
        """Path that encodes the address, for requests that name files."""
        return Path(self.over, self.session, str(self.address))

    @classmethod
    def of_path(cls, path: Path) -> RemoteMemory:
        """Address from the path of `as_path`. Raises ValueError."""
        match path.parts:
            case (over, session, address) if over in get_args(MooncakeOver) and address.isdecimal():
                return cls(cast("MooncakeOver", over), session, int(address))
            case _:
                raise ValueError(f"{path} is not an address of another process's memory")


class MemoryEndpoint:
    """An endpoint of Mooncake's transfers in this process: a port through which others read its registered memory.

    Args:
        host: this machine's address, as the other endpoints reach it.
        over: network protocol, the same at all endpoints.

    Raises:
        ImportError: the package is missing, or a library that it needs (libibverbs).
        OSError: Mooncake failed to start.
    """

    def __init__(self, host: str, over: MooncakeOver) -> None:
        from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]

        self.over: MooncakeOver = over
        self._engine: Any = TransferEngine()
        with _environment(over):
            refused = self._engine.initialize(host, "P2PHANDSHAKE", over, "")
        if refused:
            raise OSError(f"Mooncake's transfer engine did not start at {host} over {over}: error {refused}")
        self._session = f"{f'[{host}]' if ':' in host else host}:{self._engine.get_rpc_port()}"

    def share(self, address: int, size: int) -> RemoteMemory:
        """Share `size` bytes from `address` on until `unshare`. Raises OSError."""
        self.register(address, size)
        return RemoteMemory(self.over, self._session, address)

    def register(self, address: int, size: int) -> None:
        """Register memory for transfers. Raises OSError."""
        if refused := self._engine.register_memory(address, size):
            raise OSError(f"Mooncake cannot register {size:,} bytes: error {refused}")

    def unregister(self, address: int) -> None:
        """Unregister memory; unknown memory is ignored."""
        self._engine.unregister_memory(address)

    def read(self, memory: RemoteMemory, offset: int, into: int, size: int) -> None:
        """Copy bytes of another process into registered memory of this one; returns when they have arrived.

        Raises:
            OSError: its process is gone, shares no such memory, or cannot be reached.
        """
        if refused := self._engine.transfer_sync_read(memory.session, into, memory.address + offset, size):
            raise OSError(f"Mooncake cannot read {size:,} bytes of {memory.session}: error {refused}")


@contextmanager
def _environment(over: MooncakeOver) -> Generator[None]:
    """Environment for creating an endpoint; restored afterwards, for SGLang's own endpoints in this process."""
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
