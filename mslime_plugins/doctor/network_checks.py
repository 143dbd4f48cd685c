"""Networks: InfiniBand, settings of NCCL and gloo, the host's address, loopback HTTP, ports."""

from __future__ import annotations

import fnmatch
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil

from mslime.network import ephemeral_ports, listen, own_ports
from mslime_plugins.doctor.findings import Finding, Node, fail, ok, unseen, warn

GBITS_A_GPU = 200
"""Gb/s of network per GPU below which a run over several hosts is suspect; H100 hosts have nominally 400."""
INTERFACES = {"NCCL_SOCKET_IFNAME": "NCCL", "GLOO_SOCKET_IFNAME": "gloo"}
SLOWING = {
    "NCCL_P2P_DISABLE": ("1", "GPUs of a machine do not use NVLink"),
    "NCCL_SHM_DISABLE": ("1", "GPUs without NVLink communicate over the network"),
    "NCCL_IB_DISABLE": ("1", "NCCL uses TCP instead of InfiniBand"),
    "NCCL_NVLS_ENABLE": ("0", "all-reduce does not use NVLink SHARP"),
    "NCCL_DEBUG": ("TRACE", "every call is logged"),
    "CUDA_LAUNCH_BLOCKING": ("1", "the host waits for every kernel"),
    "NCCL_BLOCKING_WAIT": ("1", "the host waits for every collective"),
}
"""Variables that slow a run down: the value, and its effect."""
_VIRTUAL = ("lo", "docker", "veth", "virbr", "br-", "cni", "flannel", "cali", "tunl")


def check_infiniband(node: Node) -> Iterator[Finding]:
    """Network adapters for RDMA, and whether they can read GPU memory."""
    devices = node.listed("/sys/class/infiniband")
    if not devices:
        yield unseen("no RDMA device (/sys/class/infiniband)",
                     "one machine needs none; without it, several machines use TCP: see docs/clusters.md")  # fmt: skip
        return
    rates = rdma_ports(node)
    down = [port for port, rate in rates.items() if not rate]
    total, gpus = sum(rates.values()), max(1, len(node.gpus))
    text = f"{len(rates) - len(down)} RDMA ports are up, {total:g} Gb/s in total, {total / gpus:g} per GPU"
    if not total:
        yield fail(f"no port of {', '.join(devices)} is up", "ibstat; cables, the subnet manager, the switch's ports")
        return
    if total / gpus < GBITS_A_GPU and node.gpus:
        yield warn(text, f"less than {GBITS_A_GPU} Gb/s per GPU: expert parallelism across machines will be slow; plan "
                   "with cluster.gpu_network_gbits", gbits=total)  # fmt: skip
    else:
        yield ok(text, gbits=total)
    if down:
        yield warn(f"down: {', '.join(down)}", "ibstat; exclude them from NCCL_IB_HCA if they should not be used")
    if node.gpus and not ({"nvidia_peermem", "nv_peer_mem"} & set(node.listed("/sys/module"))):
        yield warn("nvidia_peermem is not loaded", "modprobe nvidia-peermem, unless the kernel has DMA-BUF: else data "
                   "between machines is copied through host memory")  # fmt: skip


def rdma_ports(node: Node) -> dict[str, float]:
    """Gb/s of each port, as `device:port`; 0 if it is down."""
    found: dict[str, float] = {}
    for device in node.listed("/sys/class/infiniband"):
        for port in node.listed(f"/sys/class/infiniband/{device}/ports"):
            at = f"/sys/class/infiniband/{device}/ports/{port}"
            up = "ACTIVE" in (node.read(f"{at}/state") or "")
            found[f"{device}:{port}"] = float((node.read(f"{at}/rate") or "0").split()[0]) if up else 0.0
    return found


def check_nccl(node: Node) -> Iterator[Finding]:
    """Variables of NCCL and gloo, compared with the host's interfaces and devices."""
    interfaces = _interfaces_up()
    for variable, library in INTERFACES.items():
        value = node.environ.get(variable)
        if value is None:
            continue
        matching = [name for name in interfaces if _names(value, name)]
        if not matching:
            yield fail(f"{variable}={value}: no active interface matches; active are {', '.join(interfaces)}",
                       f"set it to one of them, or unset it: {library} cannot start")  # fmt: skip
        else:
            yield ok(f"{variable}={value}: {', '.join(matching)}")
    wanted, devices = node.environ.get("NCCL_IB_HCA"), node.listed("/sys/class/infiniband")
    if wanted and not any(_names(wanted, device) for device in devices):
        yield fail(f"NCCL_IB_HCA={wanted}: no RDMA device matches; available are {', '.join(devices) or 'none'}",
                   "set it to existing devices, or unset it")  # fmt: skip
    for variable, (value, meaning) in SLOWING.items():
        if node.environ.get(variable, "").upper() == value:
            yield warn(f"{variable}={value}: {meaning}", "unset it, unless you are debugging")
    real = [name for name in interfaces if not name.startswith(_VIRTUAL)]
    if len(real) > 1 and "NCCL_SOCKET_IFNAME" not in node.environ:
        yield warn(f"several interfaces are up ({', '.join(real)}) and NCCL_SOCKET_IFNAME is not set",
                   "with several machines, set it in cluster.env to the interface that connects them")  # fmt: skip
    else:
        yield ok(f"active interfaces: {', '.join(interfaces)}")


def _interfaces_up() -> list[str]:
    return sorted(name for name, state in psutil.net_if_stats().items() if state.isup)


def _names(value: str, name: str) -> bool:
    """Whether NCCL's list of prefixes matches `name`: `=` before it matches whole names, `^` all others; a device's
    port is ignored."""
    others, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    words = [word.partition(":")[0] for word in value.lstrip("^=").split(",") if word]
    fits = any(fnmatch.fnmatchcase(name, word if exact else f"{word}*") for word in words)
    return fits != others


def check_address(node: Node) -> Iterator[Finding]:
    """The host's name, and its address."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        yield warn(f"the machine's name {name} cannot be resolved ({error})",
                   "add it to /etc/hosts with the address that the other machines use")  # fmt: skip
        return
    if address.startswith("127.") and (node.options.nodes > 1 or node.listed("/sys/class/infiniband")):
        yield warn(f"the machine's name {name} is {address}, which other machines cannot reach",
                   "a single machine is fine; for several, write the network address into /etc/hosts")  # fmt: skip
    else:
        yield ok(f"the machine's name {name} is {address}")


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"here")

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing to the terminal."""


def check_loopback(node: Node) -> Iterator[Finding]:
    """HTTP to this host, and ports for it."""
    with listen() as free:
        port = free.getsockname()[1]
    server = HTTPServer(("127.0.0.1", port), _Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/")
        reply = connection.getresponse().read()
        connection.close()
    except OSError as error:
        yield fail(
            f"HTTP to 127.0.0.1:{port} fails: {error}", "check firewall and sandbox: mslime needs HTTP to its engines"
        )
        return
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert reply == b"here"
    yield ok(f"HTTP to 127.0.0.1:{port} works")
    proxies = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if node.environ.get(name)]
    around = node.environ.get("no_proxy", "") + node.environ.get("NO_PROXY", "")
    if proxies and "127.0.0.1" not in around and "*" not in around:
        yield warn(f"{proxies[0]} is set, but no_proxy does not contain 127.0.0.1",
                   "export no_proxy=127.0.0.1,localhost: your reward functions and tools may use the proxy for this "
                   "machine")  # fmt: skip
    first, last = ephemeral_ports()
    ports = len(own_ports())
    yield ok(f"{ports:,} ports for services outside of {first} to {last}, the kernel's range", ports=ports)
