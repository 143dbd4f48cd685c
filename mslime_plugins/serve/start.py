"""`mslime serve`: trainer ranks and engines of a configuration, started together, and a server in front of them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

from pydantic import SecretStr
from rich.console import Console

from mslime import network
from mslime.backends.sglang.engine_pool import EnginePool
from mslime.checks.environment import refuse_without_gpu
from mslime.checks.resolve import resolve
from mslime.config.errors import ConfigError, EngineError
from mslime.config.keys import read_secret
from mslime.config.resolved import policy_spec
from mslime.logs import hide, log_file
from mslime.observe.progress import PlainProgress, Progress
from mslime.rollout.service import LocalHandle
from mslime.run.adapter_ranks import AdapterRanks
from mslime.run.fleet import Fleet
from mslime.run.ray_calls import LoopHandle
from mslime.run.ray_cluster import resolved_device
from mslime.run.rollout_process import ManagerEngines
from mslime.run.run import only_run, owned, write_resolved
from mslime.run.run_engines import EngineSide, RunEngines
from mslime.run.started import StartedRun
from mslime.run.stop import StopSignals
from mslime.threads import in_thread
from mslime_plugins.serve.pass_requests import ModelLimits
from mslime_plugins.serve.sampling import PooledEngines
from mslime_plugins.serve.served_config import adapted_parts, base_names, served_config
from mslime_plugins.serve.server import KEY_PREFIX, Server
from mslime_plugins.serve.tinker_service import ServedModel, Service

FILE_NAME = "serve.json"
LOOK_S = 0.5
HOST = "127.0.0.1"
_log = logging.getLogger(__name__)


def serve(values: Mapping[str, Any]) -> int:
    """Serve until a signal ends it. Returns 0.

    Args:
        values: settings of the file and the flags.

    Raises:
        UserError: a user's mistake, or a part that failed.
        Stopped: a signal ended it.
    """
    config = resolved_device(served_config(values))
    key = _key(config.serve.key)
    hide(key)
    refuse_without_gpu(config.cluster)
    run = resolve(config, data=False)
    log = log_file(config.run_dir / "logs" / "driver.log", "server", config.observe.log_level)
    with only_run(config.name), StopSignals() as stop, owned(config.run_dir), log:
        listening = _listen(config.serve.port)
        write_resolved(run.config, config.run_dir / "config.yaml")
        with listening, ServerResources(run, stop) as serving:
            serving.answer(listening, key)
    return 0


def _key(given: SecretStr | None) -> str:
    """The key for clients. Raises ConfigError for a key that the SDK would not send."""
    if given is None:
        return KEY_PREFIX + secrets.token_urlsafe(32)
    key = read_secret(given, "serve.key")
    if not key.startswith(KEY_PREFIX):
        raise ConfigError("serve.key", "(not shown)", f"must begin with {KEY_PREFIX}, as the SDK requires",
                          f"put {KEY_PREFIX} before it")  # fmt: skip
    return key


def _listen(port: int) -> socket.socket:
    if not port:
        return network.listen(HOST)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise ConfigError("serve.port", port, f"cannot listen on this port: {error.strerror}",
                          "end the process there, choose another port, or 0 for a free one") from error  # fmt: skip
    return listening


class ServerResources(StartedRun):
    """Trainer ranks and engines of a server. A context manager."""

    def _start(self) -> None:
        config = self.config
        console = Console(file=sys.stderr)
        off = config.observe.progress == "off"
        self.progress = self._stack.enter_context(Progress(1) if off else PlainProgress(1, 0, console))
        self._status = console.status("") if console.is_terminal and not off else None
        self._print_start()
        cluster, _ = self._join_cluster(True)
        self._engines = self._engine_group(cluster)
        self._ranks = AdapterRanks(
            policy_spec(config), cluster, self._logs, together=config.steps_together, survives=True
        )
        self._stack.callback(self._ranks.stop)
        (self._addresses,) = self._start_beside(self._ranks.start, self._engines)
        self._take_over(self._engines.attached, lambda _: None)

    def answer(self, listening: socket.socket, key: str) -> None:
        """Serve until a signal arrives, or a part fails for good. Raises Stopped, or the failure."""
        self._stop.patient = True  # handled between two checks, not during an answer
        asyncio.run(self._answer(listening, key))

    async def _answer(self, listening: socket.socket, key: str) -> None:
        config, side = self.config, EngineSide(self._run)
        hide(*(key for address in self._addresses for key in (address.keys.api, address.keys.admin)))
        try:
            refused = await side.connect_engines(self._addresses)
            positions = min(config.rollout.longest(self._run.model.max_positions), refused)
            attention, mlp = adapted_parts(config.lora)
            served = ServedModel(
                base_names(config.model.path, config.serve.model_name), str(config.model.tokenizer.resolve()),
                self._run.family.architecture,
                ModelLimits(self._run.model.vocab_size, positions), config.lora.rank, attention, mlp,
            )  # fmt: skip
            members = RunEngines([ManagerEngines(LocalHandle(side), LocalHandle(side.pool), [*self._addresses])])
            of_loop = LoopHandle(members, asyncio.get_running_loop())
            fleet = Fleet(of_loop, self._engines, self._attached, self._at_rest, self.progress)
            await side.pool.join()
            engines = PooledEngines(side.pool, config.serve.engine_adapters, lambda: fleet.expects_engines)
            service = Service(served, config, self._ranks, engines, config.run_dir / "serve", self.progress.note)
            server = Server(service, key)
            await server.start(listening)
            try:
                self._announce(listening, key, served)
                with self._status or nullcontext():
                    await self._watch(fleet, side.pool, service)
            finally:
                (config.run_dir / FILE_NAME).unlink(missing_ok=True)
                await server.stop()
        finally:
            await side.close()

    async def _watch(self, fleet: Fleet, pool: EnginePool, service: Service) -> None:
        """Wait for a signal or a failure, and supervise the engines. Raises these."""
        looking = in_thread(fleet.update_engines)
        while True:
            await asyncio.sleep(LOOK_S)
            if self._status is not None:
                self._status.update(service.describe())
            self._at_rest()
            if self._ranks.failure is not None:
                raise self._ranks.failure
            if looking.done():
                if looking.result():
                    with suppress(EngineError):  # an engine that does not resume is dead, which the next check detects
                        await pool.join()
                    fleet.settled()
                looking = in_thread(fleet.update_engines)

    def _announce(self, listening: socket.socket, key: str, served: ServedModel) -> None:
        """Write the server's address and key to a file readable only by its user, and log it."""
        record = self.config.run_dir / FILE_NAME
        url = network.write_address(record, listening, key, model=served.names[0])
        self.progress.note(f"serving {served.names[0]} at {url}; the key is in {record}")
        if (loss := self.config.serve.stable_reinforce) is not None:
            self.progress.note(
                f"clients that request stable_reinforce get another loss, {loss} (serve.stable_reinforce)"
            )
