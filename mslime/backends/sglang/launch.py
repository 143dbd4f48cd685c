"""`python -m sglang.launch_server`, with settings that its command line lacks.

The server's key comes from the environment and is removed from it at once, so the command line, the log and child
processes do not expose it. Its processes (on GPUs they are spawned, so each imports this module first; on a CPU forked)
die with the server, however it ends, even during imports. The rendezvous store of its ranks listens on the server's own
address.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing.util import register_after_fork
from typing import Any

from mslime.backends.sglang.guard import parent_and_group

KEY_VARIABLE, ADMIN_KEY_VARIABLE = "MSLIME_ENGINE_API_KEY", "MSLIME_ENGINE_ADMIN_API_KEY"
_SERVER_PID = "MSLIME_ENGINE_PID"
_PR_SET_PDEATHSIG = 1


class HiddenKey(str):
    """A key with a masked `repr`: SGLang logs its settings, keys included."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'(redacted)'"


def ancestors(pid: int) -> list[int]:
    """Process ids above `pid`, nearest first, read from /proc."""
    found: list[int] = []
    while pid > 1 and (stat := parent_and_group(pid)):
        pid = stat[0]
        found.append(pid)
    return found


def die_with_the_server() -> None:
    """In a process of the server: die with its parent, or end now if the server has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    server = os.environ.get(_SERVER_PID)
    if server is not None and int(server) not in ancestors(os.getpid()):
        os._exit(1)


def listen_on_own_address() -> None:
    """Make torch's rendezvous listen on its given address; by default it listens on all of them."""
    from torch._C._distributed_c10d import TCPStore

    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function of that name hides it
    original = rendezvous._create_c10d_store

    def create_store(hostname: str, port: int, rank: int, world_size: int, timeout: Any, use_libuv: bool = True) -> Any:
        if rank != 0:
            return original(hostname, port, rank, world_size, timeout, use_libuv)
        family, kind, _, _, address = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)[0]
        server = socket.socket(family, kind)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(1024)
        return TCPStore(
            hostname, port, world_size, True, timeout,
            multi_tenant=True, use_libuv=use_libuv, master_listen_fd=server.detach(),
        )  # fmt: skip

    rendezvous._create_c10d_store = create_store


def fork_children() -> None:
    """Start schedulers and the detokenizer as forks of this process, with their imports done.

    SGLang spawns them, because CUDA does not survive a fork. Each then imports torch and SGLang again: two thirds of a
    start's CPU time, and half of its memory. If this process has a second thread, whose locks would stay locked in a
    fork, they are spawned as usual.
    """
    listen_on_own_address()
    register_after_fork(die_with_the_server, lambda die: die())
    set_start_method = multiprocessing.set_start_method

    def fork_where_alone(method: str | None, force: bool = False) -> None:
        set_start_method("fork" if len(os.listdir("/proc/self/task")) == 1 else method, force)

    multiprocessing.set_start_method = fork_where_alone


def main(argv: list[str]) -> None:
    """Run the server until it ends. Settings as for `sglang.launch_server`; keys from the environment."""
    os.environ[_SERVER_PID] = str(os.getpid())
    key, admin_key = os.environ.pop(KEY_VARIABLE, ""), os.environ.pop(ADMIN_KEY_VARIABLE, "")
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    settings = prepare_server_args(argv)
    fields: Any = settings  # SGLang defines them at import
    if fields.device == "cpu" and fields.dp_size == 1:  # else a controller starts the schedulers from threads
        fork_children()
    settings.api_key = HiddenKey(key) if key else None
    settings.admin_api_key = HiddenKey(admin_key) if admin_key else None
    try:
        run_server(settings)
    except KeyboardInterrupt:
        print("stopped on request", flush=True)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__":  # a scheduler or detokenizer of the server, before its large imports
    die_with_the_server()
    listen_on_own_address()
