"""Environments behind OpenEnv's protocol (openenv-core 0.3.0, `env_server/http_server.py`): one WebSocket an episode.

The messages are {"type": "reset" | "step" | "close", "data": {...}}; the answers {"type": "observation", "data":
{"observation": {...}, "reward": ..., "done": ...}} or {"type": "error", "data": {"message": ..., "code": ...}}. A
server creates one environment per connection, up to its own limit, and rejects further ones.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import Any

import aiohttp

from mslime.rollout.environments.protocol import EnvironmentTask, Step

FULL = "CAPACITY_REACHED"
INVALID = "VALIDATION_ERROR"
WAIT_S = 0.5  # before a retry at a full server
MOST_BYTES = 16 * 2**20  # of an observation


class ServerError(Exception):
    """A server's error, with its code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class OpenEnv:
    """One episode of an environment on an OpenEnv server.

    Override `action` and `observation` if the server's are more than a text.

    Args:
        url: of the server, `http://host:port`; of several, episodes are spread over them by their seeds.
        action_field: of the server's action, for the model's text. None: the model writes the whole action, as a JSON
            object.
        observation_field: of the server's observation, for the model. None: all of it, as JSON.
        reset: further arguments of the server's `reset`.
    """

    def __init__(
        self, url: str | list[str], action_field: str | None = "message", observation_field: str | None = None,
        reset: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._urls = [url] if isinstance(url, str) else list(url)
        self._action_field, self._observation_field = action_field, observation_field
        self._reset = dict(reset or {})
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    def action(self, text: str) -> dict[str, Any]:
        """The server's action for the model's text. Raises ValueError if it is invalid; the model gets the error."""
        if self._action_field is not None:
            return {self._action_field: text}
        try:
            action = json.loads(text)
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None
        if not isinstance(action, dict):
            raise ValueError("it is not a JSON object")
        return action

    def observation(self, seen: dict[str, Any]) -> str:
        """The model's text for the server's observation."""
        if self._observation_field is None:
            return json.dumps(seen)
        if self._observation_field not in seen:
            known = ", ".join(sorted(seen)) or "none"
            raise ValueError(f"the observation has no field {self._observation_field!r}; its fields: {known}")
        return str(seen[self._observation_field])

    async def reset(self, task: EnvironmentTask) -> str:
        """Begin an episode, with the seed of the row's metadata, else one for all rollouts of the prompt."""
        own = zlib.crc32(f"{task.evaluation}/{task.group_id}".encode()) & 0x7FFFFFFF
        arguments = {"seed": task.metadata.get("seed", own), **self._reset}
        url = self._urls[task.seed % len(self._urls)].rstrip("/")
        self._session = aiohttp.ClientSession()
        while True:
            self._socket = await self._session.ws_connect(f"{url}/ws", max_msg_size=MOST_BYTES)
            try:
                return self.observation((await self._ask("reset", arguments))["observation"])
            except ServerError as error:
                if error.code != FULL:
                    raise
            await self._socket.close()
            await asyncio.sleep(WAIT_S)  # until `rollout.environment_limits.call_s`

    async def step(self, action: str) -> Step:
        """Take one action. The model receives errors of the server's schema, and the episode continues."""
        try:
            request = self.action(action)
        except ValueError as error:
            return Step(f"Invalid action: {error}", 0.0)
        try:
            answer = await self._ask("step", request)
        except ServerError as error:
            if error.code != INVALID:
                raise
            return Step(f"Invalid action: {error}", 0.0)
        return Step(self.observation(answer["observation"]), answer.get("reward"), bool(answer.get("done")))

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The data of an observation. Raises ServerError, ConnectionError."""
        assert self._socket is not None, "reset comes first"
        await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the server ended the connection ({message.type.name} {message.data!r:.80})")
        answer: dict[str, Any] = json.loads(message.data)
        if answer["type"] == "error":
            raise ServerError(str(answer["data"].get("code")), str(answer["data"].get("message")))
        return answer["data"]

    async def close(self) -> None:
        """End the server's environment and the connection."""
        try:
            if self._socket is not None and not self._socket.closed:
                await self._socket.send_json({"type": "close"})
                await self._socket.close()
        finally:
            if self._session is not None:
                await self._session.close()
