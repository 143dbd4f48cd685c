"""Chats of a service's rollouts: one renderer and one server for all, one set of conversations per rollout.

Each is created on first use, because most runs do not chat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mslime.config.errors import UserError
from mslime.config.rollout import AgentLimits, RolloutConfig
from mslime.rollout.agents.chat.messages import Tools
from mslime.rollout.agents.chat.renderer import Renderer, Rendering
from mslime.rollout.agents.chat.session import ChatSession, Reply, ReplyTurn
from mslime.rollout.agents.server.app import ModelEndpoint, ModelServer, ServedRollout

if TYPE_CHECKING:
    from mslime.rollout.turns import Rollout

T = TypeVar("T")


class Agents:
    """Renderer and server that the rollouts of a service share.

    Args:
        config: `rollout`.
        make: creates the renderer; called once.
        special: the tokenizer's special tokens as text.
    """

    def __init__(self, config: RolloutConfig, make: Callable[[], Renderer], special: Sequence[str] = ()) -> None:
        self._config, self._make = config, make
        self._special = () if config.read_special_tokens else tuple(special)
        self._rendering: Rendering | None = None
        self._server: ModelServer | None = None
        self._making = asyncio.Lock()

    async def chat(
        self, engine: Rollout, on_expiry: Callable[[], bool], limits: AgentLimits | None = None
    ) -> ChatSession:
        """Open the conversations of a rollout (see `ChatSession`), within `rollout.limits` or other limits. Raises
        ConfigError if there is no renderer for them."""
        async with self._making:
            if self._rendering is None:
                self._rendering = Rendering(await asyncio.to_thread(self._make), self._special)
        return ChatSession(engine, self._rendering, limits or self._config.limits, on_expiry)

    async def serve(self, chat: ChatSession) -> tuple[ModelEndpoint, ServedRollout]:
        """Serve the conversations of a rollout. Raises ConfigError if the server cannot listen on the address."""
        if self._server is None:
            s = self._config.server
            self._server = ModelServer(s.host, s.port, s.secret(), s.max_request_mib << 20)
        return await self._server.open(chat)

    async def end(self, session: ServedRollout) -> None:
        """Stop serving these conversations."""
        if self._server is not None:
            await self._server.end(session)

    async def close(self) -> None:
        """Close the server and the renderer."""
        if self._server is not None:
            await self._server.close()
        if self._rendering is not None:
            self._rendering.close()


class Conversations:
    """The conversations of one rollout, created at its first request.

    Args:
        on_expiry: see `ChatSession`.
    """

    def __init__(self, agents: Agents, engine: Rollout, on_expiry: Callable[[], bool]) -> None:
        self._agents = agents
        self._open: Callable[[], Coroutine[Any, Any, ChatSession]] | None = lambda: agents.chat(engine, on_expiry)
        self._chat: asyncio.Task[ChatSession] | None = None
        self._served: asyncio.Task[tuple[ModelEndpoint, ServedRollout]] | None = None

    async def chat(self, messages: Sequence[Any], tools: Tools, max_tokens: int | None, stop: Sequence[str]) -> Reply:
        return await (await self._session()).chat(messages, tools, max_tokens=max_tokens, stop=stop)

    async def endpoint(self) -> ModelEndpoint:
        if self._served is None:
            self._served = asyncio.create_task(self._serve())
        return (await asyncio.shield(self._served))[0]

    @property
    def failure(self) -> UserError | None:
        """The engines' error at the last request, if any, whatever its agent makes of it."""
        return None if (chat := self._begun) is None else chat.failure

    @property
    def full(self) -> bool:
        """Whether the last request was refused for lack of room, or by a limit."""
        return (chat := self._begun) is not None and chat.full

    @property
    def expired(self) -> str:
        """The time limit that passed without a request; empty if none did."""
        return "" if (chat := self._begun) is None else chat.expired

    async def stop(self) -> None:
        """Take no more requests; cancel turns under way."""
        if (served := _made(self._served)) is not None:
            await self._agents.end(served[1])
        for task in (self._chat, self._served):
            if task is not None:
                task.cancel()
        if (chat := self._begun) is not None:
            await chat.stop()

    def settle(self) -> dict[str, float]:
        """After `stop`: mask undelivered replies. Returns the rollout's metrics by name."""
        if (chat := self._begun) is None:
            return {}
        chat.mask_undelivered()
        return chat.report()

    def forget(self) -> None:
        """Release the conversations of a finished rollout, for the reason given in `ChatSession.forget`."""
        if (chat := self._begun) is not None:
            chat.forget()
        self._chat = self._served = self._open = None

    def reply(self, response: str, choice: int) -> ReplyTurn | None:
        return None if (chat := self._begun) is None else chat.choice(response, choice)

    @property
    def _begun(self) -> ChatSession | None:
        return _made(self._chat)

    async def _session(self) -> ChatSession:
        if self._chat is None:
            if self._open is None:
                raise asyncio.CancelledError("the rollout has ended")
            self._chat = asyncio.create_task(self._open())
        return await asyncio.shield(self._chat)

    async def _serve(self) -> tuple[ModelEndpoint, ServedRollout]:
        return await self._agents.serve(await self._session())


def _made(task: asyncio.Task[T] | None) -> T | None:
    """Result of a task; None if it has none yet."""
    done = task is not None and task.done() and not task.cancelled() and task.exception() is None
    return task.result() if task is not None and done else None
