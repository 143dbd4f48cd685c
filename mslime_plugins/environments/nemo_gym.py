"""Environments of NeMo Gym (0.4.0), over its HTTP protocol: an agent server's POST /run plays an episode.

A Gym has one model server for all episodes; mslime gives every rollout its own endpoint. So the Gym's model server (its
`openai_model`) points at a relay here, which forwards each request to its rollout. The rollout is identified by a name
in `metadata` of `responses_create_params`, which agents pass to the model server. A Gym logs that name and shows it in
errors, so it is the relay's own and not a key.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
from aiohttp import web
from pydantic import SecretStr

from mslime.config.keys import read_secret
from mslime.rollout.agents.app import ModelEndpoint, body_of, listen, own_clients
from mslime.rollout.agents.messages import ChatError
from mslime.rollout.workflow import Engine, Episode, Task
from mslime.web_server import BodyError, ListeningServer, admitted, read_body, same_key, serve
from mslime_plugins.environments.verifiers import answer_of, episode_of, is_number

NAME = "mslime_rollout"
"""Key in a request's metadata with the relay's name of the rollout."""

OWN = ("responses_create_params", "response", "reward")
MOST_BYTES = 64 * 2**20


class NemoGym:
    """A rollout function: one episode of a NeMo Gym agent server per rollout.

        rollout = NemoGym("http://127.0.0.1:8001", relay_port=8702, relay_key="env:GYM_KEY")

    Use it as `rollout.function: my_project.rollouts:rollout`. The Gym runs with
    `policy_base_url=http://HOST:RELAY_PORT/v1`, `policy_api_key` the relay's key, and any name of a model.

    Args:
        url: of the agent server.
        relay_port: port for the Gym's model server; 0: any, see `relay`.
        relay_host: an address reachable from the Gym.
        relay_key: the Gym's `policy_api_key`, which the relay requires: `env:NAME`, `file:PATH`, or the key itself. A
            Gym gets its key at its start, often before a run, so the run creates none.

    Raises:
        ConfigError: the key cannot be found. ValueError: it is empty.
    """

    def __init__(self, url: str, relay_port: int, relay_host: str = "127.0.0.1", *, relay_key: str) -> None:
        self._url, self.relay = url.rstrip("/"), GymRequestRouter(relay_host, relay_port, relay_key)

    async def __call__(self, task: Task, engine: Engine) -> Episode:
        """Play one episode. The row's metadata is a row of the Gym: `responses_create_params` and others. Numbers that
        the verifier adds to its answer are metrics."""
        row = dict(task.metadata)
        params = row.get("responses_create_params")
        if not isinstance(params, dict):
            raise ValueError("the row's metadata has no responses_create_params: put the Gym's row there")
        endpoint = await engine.endpoint()
        async with self.relay.serving(endpoint) as name:
            named = {**cast("dict[str, Any]", params)}
            named["metadata"] = {**(named.get("metadata") or {}), NAME: name}
            answer = await answer_of(f"{self._url}/run", {**row, "responses_create_params": named})
        if isinstance(answer, str):
            return episode_of(answer)
        metrics = {name: n for name, n in answer.items() if name not in row and name not in OWN and is_number(n)}
        return episode_of({"reward": answer.get("reward"), "metrics": metrics})


class GymRequestRouter:
    """Forwards requests of a Gym's model server to their rollouts.

    Attributes:
        port: that it listens on, once a rollout is served.
    """

    def __init__(self, host: str, port: int, key: str) -> None:
        if not key:
            raise ValueError("relay_key is empty: choose a key, and set the Gym's policy_api_key to it")
        self._host, self.port, self._key = host, port, read_secret(SecretStr(key), "relay_key")
        self._endpoints: dict[str, ModelEndpoint] = {}
        self._listening: ListeningServer | None = None
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def serving(self, endpoint: ModelEndpoint) -> AsyncIterator[str]:
        """Context manager: a name for an endpoint, which receives requests with this name in their metadata."""
        name = secrets.token_urlsafe(16)
        await self._add(name, endpoint)
        try:
            yield name
        finally:
            await self._remove(name)

    async def _add(self, name: str, endpoint: ModelEndpoint) -> None:
        """Accept its requests; start listening if it is the first."""
        async with self._starting:
            self._endpoints[name] = endpoint
            if self._listening is None:
                app = web.Application(client_max_size=MOST_BYTES, middlewares=[own_clients(self._host)])
                app.add_routes([web.post("/v1/{route:responses|chat/completions}", self._pass_on)])
                listening = listen(self._host, self.port)
                self._listening = await serve(app, listening, handler_cancellation=True)
                self.port = listening.getsockname()[1]

    async def _remove(self, name: str) -> None:
        """Stop accepting its requests; stop listening if it was the last."""
        async with self._starting:
            del self._endpoints[name]
            if not self._endpoints and self._listening is not None:
                listening, self._listening = self._listening, None
                await listening.close()

    async def _pass_on(self, request: web.Request) -> web.Response:
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not same_key(key, self._key):
            return _refused("invalid key: set the Gym's policy_api_key to relay_key", 401)
        admitted(request)
        try:
            body = dict(body_of(await read_body(request)))
        except BodyError as error:
            return _refused(f"body: {error}", error.status)
        except ChatError as error:
            return _refused(str(error))
        metadata = body.get("metadata")
        metadata = dict(cast("dict[str, Any]", metadata)) if isinstance(metadata, dict) else {}
        endpoint = self._endpoints.get(str(metadata.pop(NAME, "")))
        if endpoint is None:
            return _refused(f"metadata.{NAME} names no running rollout")
        body["metadata"] = metadata
        url = f"{endpoint.openai_url.rstrip('/')}/{request.match_info['route']}"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                session.post(url, json=body, headers={"Authorization": f"Bearer {endpoint.key}"}) as response,
            ):
                read = await response.read()
                return web.Response(body=read, status=response.status, content_type=response.content_type)
        except aiohttp.ClientError as error:
            return _refused(f"the rollout's endpoint does not answer ({error})", 502)


def _refused(message: str, status: int = 400) -> web.Response:
    error = {"message": message, "type": "invalid_request_error" if status < 500 else "server_error"}
    headers = {"x-should-retry": "false"} if status < 500 else {}
    return web.json_response({"error": error}, status=status, headers=headers)
