"""The engine group: one Ray actor per SGLang server, which it launches on its own node and ends with itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from mslime.config.schema import RunConfig
from mslime.control.calls import gather
from mslime.control.cluster import Cluster, own_host, redirect_output, remote_class

if TYPE_CHECKING:
    from mslime.backends.sglang.server import EngineAddress

STOP_SECONDS = 20.0


class EngineActor:
    """Launches one server and watches it. The server dies with this process, whatever ends it."""

    def __init__(self, config: RunConfig, index: int, log_dir: str) -> None:
        redirect_output(Path(log_dir) / f"engine{index}_actor.log")
        from mslime.backends.sglang.server import ServerProcess

        self._server = ServerProcess(config, index, Path(log_dir), host=own_host(config))

    def start(self) -> EngineAddress:
        """Launch and wait until it serves."""
        return self._server.start()

    def stop(self) -> None:
        """End the server and its children."""
        self._server.stop()


class EngineGroup:
    """All engines of a run: launched, or attached to by URL."""

    def __init__(self, config: RunConfig, cluster: Cluster, log_dir: Path) -> None:
        self._config = config
        self._actors: list[Any] = []
        self.log_paths: dict[str, str] = {}
        self.addresses: list[EngineAddress] = []
        if config.sglang.urls:
            return
        remote = remote_class(EngineActor)
        for index in range(config.sglang.num_engines):
            self.log_paths[_name(index)] = str(log_dir / f"engine{index}.log")
            self._actors.append(remote.options(**cluster.engine_options(index)).remote(config, index, str(log_dir)))

    def begin_start(self) -> dict[str, ray.ObjectRef]:
        """Start all servers without waiting, so that trainers can start beside them."""
        return {_name(i): actor.start.remote() for i, actor in enumerate(self._actors)}

    def finish_start(self, starting: dict[str, ray.ObjectRef]) -> list[EngineAddress]:
        """Wait until every server serves. Raises EngineError with the end of the log of the one that does not."""
        from mslime.backends.sglang.server import attach

        if self._config.sglang.urls:
            self.addresses = [attach(url, i) for i, url in enumerate(self._config.sglang.urls)]
        else:
            deadline = self._config.deadlines.engine_start_s + STOP_SECONDS
            self.addresses = list(gather(starting, "engine start", deadline, self.log_paths).values())
        return self.addresses

    def stop(self) -> None:
        """End every server, politely first."""
        stopping = [actor.stop.remote() for actor in self._actors]
        ray.wait(stopping, num_returns=len(stopping), timeout=STOP_SECONDS) if stopping else None
        for actor in self._actors:
            ray.kill(actor, no_restart=True)


def _name(index: int) -> str:
    return f"engine {index}"
