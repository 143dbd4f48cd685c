"""Ports and listening sockets of a run's own services. Standard library only.

A port that is chosen and released is bound by its service only seconds or minutes later. In between, any socket with a
port from the kernel (gloo, NCCL, Ray, outgoing connections) may take it if it lies in the kernel's range. So ports are
chosen outside that range; if possible, the socket is kept open and passed on.
"""

from __future__ import annotations

import json
import os
import random
import socket
from pathlib import Path
from urllib.parse import urlsplit

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, HIGHEST = 20000, 65535
"""Range of chosen ports. Lower ones belong to well-known services and to Ray's workers (10002 to 19999)."""
_USUAL_EPHEMERAL = (32768, 60999)
_ENOUGH = 512
_ATTEMPTS = 200
_random = random.SystemRandom()


def ephemeral_ports() -> tuple[int, int]:
    """First and last port that the kernel assigns to sockets without one."""
    try:
        first, last = EPHEMERAL.read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):  # no /proc, or another format
        return _USUAL_EPHEMERAL


def own_ports() -> list[int]:
    """Ports that the kernel does not assign; all ports if its range leaves (nearly) none."""
    first, last = ephemeral_ports()
    outside = [*range(LOWEST, min(first, HIGHEST + 1)), *range(max(last + 1, LOWEST), HIGHEST + 1)]
    return outside if len(outside) >= _ENOUGH else list(range(LOWEST, HIGHEST + 1))


def listen(host: str = "127.0.0.1") -> socket.socket:
    """A socket that listens on `host` and no other address, on one of `own_ports`.

    Raises:
        OSError: the address is not this machine's, or no port is free.
    """
    ports = own_ports()
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    for attempt in range(_ATTEMPTS):
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.bind((host, _random.choice(ports)))
            server.listen(1024)
            return server
        except OSError:
            server.close()
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `own_ports` without a listener."""
    with listen(host) as probe:
        return probe.getsockname()[1]


def own_address(url: str) -> str:
    """Local address from which this machine reaches a URL, at which the URL's server can reach this machine."""
    there = urlsplit(url)
    family, _, _, _, address = socket.getaddrinfo(there.hostname, there.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def url_of(host: str, port: int | str) -> str:
    """URL of a service: an IPv6 address stands in brackets (RFC 3986, 3.2.2)."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def write_address(record: Path, listening: socket.socket, key: str, **more: str) -> str:
    """Write the address and key of a loopback service to a file readable only by its user; returns the URL.

    Args:
        more: further entries of the file.
    """
    host, port = listening.getsockname()[:2]
    contents = {"url": url_of(host, port), "key": key, **more, "host": socket.gethostname(), "pid": os.getpid()}
    record.parent.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    with os.fdopen(os.open(record, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(contents, file)
    return contents["url"]


def port_in_use(host: str, port: int) -> bool:
    """Whether a process listens on the port."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError:
            return True
        return False
