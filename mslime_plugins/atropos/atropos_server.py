"""The HTTP server for Atropos' environments: the model below /v1 and at /generate, and the trainer's API.

Their model requests have no session, and their trainer requests no key. So the first part of every path is a token,
random unless configured.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import orjson
from aiohttp import web

from mslime import network
from mslime.config.errors import ConfigError
from mslime.config.rollout import AtroposConfig
from mslime.rollout.agents.app import ServerTimings, body_of, deliver, listen, own_clients, refusal
from mslime.rollout.agents.messages import ChatError, as_object
from mslime.rollout.agents.openai_chat import ChatCompletions, Completions, OpenAIErrors, read_ids
from mslime.rollout.agents.requests import (
    MODEL,
    MOST_REPLIES,
    Dialect,
    Event,
    Request,
    ServedReply,
    integer,
    request_of,
    texts,
)
from mslime.rollout.agents.session import ReplyTurn
from mslime.web_server import BodyError, ListeningServer, admitted, read_body, serve
from mslime_plugins.atropos.pushed import GroupRefusedError

if TYPE_CHECKING:
    from mslime_plugins.atropos.play import AtroposRollouts

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
HEALTH = "hi"
"""Content of the request that Atropos' clients send every second, for one token, to test whether a server is alive."""
MINE = ("/register", "/batch", "/reset_data")
"""Paths that an Atropos trainer would request."""


class AtroposServer:
    """Both servers at one address.

    Args:
        record: file for the user, with the address and the token of a run without a configured one.
        max_body: largest request, bytes.

    Attributes:
        address: URL of the trainer, once it listens; the model's is below it, at /v1.
    """

    def __init__(self, settings: AtroposConfig, record: Path, max_body: int, rollouts: AtroposRollouts) -> None:
        self._settings, self._record = settings, record
        self._max_body, self._rollouts = max_body, rollouts
        self._patience = ServerTimings()
        self._listening: ListeningServer | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen. Raises ConfigError if that is not possible on the address."""
        s, secret = self._settings, self._settings.secret() or self._kept_token()
        prefix = f"/{secret}"
        app = web.Application(client_max_size=self._max_body, middlewares=[own_clients(s.host)])
        for method, path, handler in self._routes():
            app.router.add_route(method, prefix + path, _with_token(handler))
        try:
            listening = listen(s.host, s.port)
        except OSError as error:
            raise ConfigError("rollout.atropos", f"{s.host}:{s.port}", f"cannot listen on this address ({error})",
                              "set an address of this machine and a free port") from error  # fmt: skip
        self._listening = await serve(app, listening, handler_cancellation=True, shutdown_timeout=1.0)
        self.address = network.url_of(s.host, listening.getsockname()[1]) + prefix
        network.write_address(self._record, listening, secret, trainer=self.address, model=f"{self.address}/v1")

    async def close(self) -> None:
        """Stop listening."""
        if self._listening is not None:
            listening, self._listening = self._listening, None
            await listening.close()

    def described(self) -> list[str]:
        """Instructions to start an environment, for the log. They omit the token, because others may read logs."""
        shown = f"{self.address.rpartition('/')[0]}/TOKEN"
        return [f"start Atropos' environments with rollout_server_url {shown} and base_url {shown}/v1; TOKEN is in "
                f"{self._record}"]  # fmt: skip

    def _kept_token(self) -> str:
        """A random token, or the token of an earlier process of the run, so its environments continue."""
        try:
            kept = json.loads(self._record.read_text())["key"]
        except (OSError, ValueError, LookupError, TypeError):
            kept = None
        return kept if isinstance(kept, str) and kept else secrets.token_urlsafe(24)

    def _routes(self) -> list[tuple[str, str, Handler]]:
        routes: list[tuple[str, str, Callable[[Mapping[str, Any]], Any]]] = [
            ("GET", "/", lambda _: {"message": "mslime, as a trainer of Atropos"}),
            ("GET", "/info", lambda _: self._rollouts.registry.info()),
            ("GET", "/wandb_info", lambda _: self._rollouts.wandb()),
            ("GET", "/status", lambda _: self._rollouts.status()),
            ("GET", "/status-env", self._status),
            ("GET", "/latest_example", lambda _: self._rollouts.latest),
            ("POST", "/register-env", lambda body: self._rollouts.registry.register(body, self._rollouts.step)),
            ("POST", "/disconnect-env", lambda body: self._rollouts.registry.disconnect(body.get("env_id"))),
        ]  # fmt: skip
        return [
            *((method, path, self._answering(respond)) for method, path, respond in routes),
            ("POST", "/scored_data", self._scored),
            ("POST", "/scored_data_list", self._scored),
            *((method, path, _not_mine) for path in MINE for method in ("GET", "POST")),
            ("POST", PATH, self._generate),
            *(("POST", dialect.path, self._chatting(dialect)) for dialect in (ChatCompletions(), Completions())),
            ("GET", "/health", self._answering(lambda _: {})),
            ("GET", "/v1/models", self._answering(lambda _: {"object": "list", "data": [
                {"id": MODEL, "object": "model", "created": 0, "owned_by": "mslime"}]})),
        ]  # fmt: skip

    async def _body(self, http: web.Request) -> bytes:
        """Body of a request, unpacked. Raises ChatError if it is too large, too slow, or cannot be unpacked."""
        try:
            return await read_body(http, self._patience.body, "rollout.server.max_request_mib")
        except BodyError as error:
            length = http.headers.get("content-length", "?")
            raise ChatError("body", length, error.rule, error.hint) from error

    # -------------------------------------------------------------------------------------------------- the trainer

    def _answering(self, respond: Callable[[Mapping[str, Any]], Any]) -> Handler:
        async def handle(http: web.Request) -> web.StreamResponse:
            self._rollouts.registry.touch()
            try:
                raw = await self._body(http)
                return web.json_response(respond(body_of(raw) if raw else {}))
            except (GroupRefusedError, ChatError, TypeError, ValueError) as error:
                return _unprocessable(str(error))

        return handle

    def _status(self, body: Mapping[str, Any]) -> dict[str, Any]:
        waiting, spare = self._rollouts.queue()
        return self._rollouts.registry.status(body.get("env_id"), self._rollouts.step, waiting, spare)

    async def _scored(self, http: web.Request) -> web.StreamResponse:
        """Accept one group, or a list of groups. A rejected group does not affect the others."""
        self._rollouts.registry.touch()
        try:
            given = orjson.loads(await self._body(http))
        except (ChatError, ValueError) as error:
            return _unprocessable(f"the body is not valid JSON ({error})")
        groups: list[Any] = given if isinstance(given, list) else [given]
        errors = [error for group in groups if (error := self._rollouts.submit(group)) is not None]
        wrong = [e for e in errors if e.reason != "repeated"]  # repeated groups were already accepted
        if wrong and len(errors) == len(groups):
            return _unprocessable(str(wrong[0]))
        routes = (
            {"groups_processed": len(groups), "refused": [str(e) for e in wrong]} if isinstance(given, list) else {}
        )
        return web.json_response({"status": "received", **routes})

    # ---------------------------------------------------------------------------------------------------- the model

    def _chatting(self, dialect: Dialect) -> Handler:
        async def handle(http: web.Request) -> web.StreamResponse:
            return await self._reply(http, lambda _: dialect)

        return handle

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        return await self._reply(http, generate_dialect)

    async def _reply(self, http: web.Request, choose: Callable[[Mapping[str, Any]], Dialect]) -> web.StreamResponse:
        self._rollouts.registry.touch()
        try:
            raw = await self._body(http)
            body = body_of(raw)
            dialect = choose(body)
            if is_health_check(body):
                return web.json_response(_alive(dialect))
            request = dialect.read(body, {})
            conversation = await self._rollouts.conversation(request)
        except Exception as error:  # reported to the client, whatever it is
            return refusal(ChatCompletions(), error)
        return await deliver(http, dialect, conversation.session, request, raw, self._patience)


def is_health_check(body: Mapping[str, Any]) -> bool:
    """Whether a request is a health check of Atropos' clients. Nothing is sampled for it."""
    if body.get("max_tokens") != 1:
        return False
    return body.get("prompt") == HEALTH or body.get("messages") == [{"role": "user", "content": HEALTH}]


def _alive(dialect: Dialect) -> dict[str, Any]:
    """An answer without a token, which cannot be submitted in a group."""
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}
    if isinstance(dialect, ChatCompletions):
        kind, choice = "chat.completion", {**choice, "message": {"role": "assistant", "content": ""}}
    else:
        kind, choice = "text_completion", {**choice, "text": ""}
    return {"id": "alive", "object": kind, "created": 0, "model": MODEL, "choices": [choice], "usage": usage}


def _with_token(handler: Handler) -> Handler:
    """Route requests whose path begins with the token."""

    async def handle(http: web.Request) -> web.StreamResponse:
        admitted(http)
        return await handler(http)

    return handle


async def _not_mine(http: web.Request) -> web.StreamResponse:
    return web.json_response({"detail": "mslime is the trainer: another one cannot register"}, status=409)


def _unprocessable(detail: str) -> web.Response:
    """A status that makes environments log the text without a retry."""
    return web.json_response({"detail": detail}, status=422)


# SGLang's and vLLM's own POST /generate, which Atropos' managed servers use for tokens with log-probabilities.
#
# Both use one path; a `prompt` identifies a vLLM request. Their answers contain exactly the sampled tokens.

PATH = "/generate"
_SAMPLING = ("n", "max_new_tokens", "stop")
_OF_SGLANG = ("input_ids", "text", "sampling_params", "return_logprob", "return_text_in_logprobs")
_OF_VLLM = ("prompt", "n", "max_tokens", "stop", "logprobs")


class SGLangGenerate(OpenAIErrors):
    """Dialect of SGLang's /generate, with one prompt a request."""

    path = PATH

    def read(self, body: Mapping[str, Any], recorded: Mapping[str, ReplyTurn]) -> Request:
        sampling = as_object(body.get("sampling_params") or {}, "sampling_params")
        given = body.get("text") if body.get("input_ids") is None else body.get("input_ids")
        unread = sorted(name for name, value in sampling.items() if value is not None and name not in _SAMPLING)
        return request_of(
            body,
            _OF_SGLANG,
            left_out=tuple(unread),
            prompts=(given if isinstance(given, str) and given else read_ids(given, "input_ids"),),
            count=integer(sampling, "n", 1, MOST_REPLIES) or 1,
            max_tokens=integer(sampling, "max_new_tokens", 1),
            stop=texts(sampling, "stop"),
        )  # fmt: skip

    def answer(
        self, request: Request, replies: Sequence[ServedReply]
    ) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        found = [_of_sglang(routes) for routes in replies]
        return found if request.count > 1 else found[0]

    def events(self, request: Request, replies: Sequence[ServedReply]) -> Iterator[Event]:
        raise _no_stream()


class VLLMGenerate(OpenAIErrors):
    """Dialect of vLLM's /generate, with one prompt a request."""

    path = PATH

    def read(self, body: Mapping[str, Any], recorded: Mapping[str, ReplyTurn]) -> Request:
        given = body.get("prompt")
        ids = cast("dict[str, Any]", given).get("prompt_token_ids") if isinstance(given, dict) else given
        if integer(body, "prompt_logprobs", 0) is not None:
            raise ChatError("prompt_logprobs", body["prompt_logprobs"], "log-probs of prompts are not supported",
                            "remove it; see teacher for distillation")  # fmt: skip
        return request_of(
            body,
            _OF_VLLM,
            prompts=(ids if isinstance(ids, str) and ids else read_ids(ids, "prompt.prompt_token_ids"),),
            count=integer(body, "n", 1, MOST_REPLIES) or 1,
            max_tokens=integer(body, "max_tokens", 1),
            stop=texts(body, "stop"),
        )

    def answer(self, request: Request, replies: Sequence[ServedReply]) -> Mapping[str, Any]:
        """The answer; `logprobs` has, for each reply and position, a list with one {token id: log-probability}."""
        return {
            "text": [routes.turn.reply.text for routes in replies],
            "logprobs": [
                [[{str(token): log_prob}] for token, log_prob in zip(routes.ids, routes.log_probs, strict=True)]
                for routes in replies
            ],
            "finish_reasons": [routes.turn.finish for routes in replies],
        }

    def events(self, request: Request, replies: Sequence[ServedReply]) -> Iterator[Event]:
        raise _no_stream()


def generate_dialect(body: Mapping[str, Any]) -> SGLangGenerate | VLLMGenerate:
    """The dialect of a request. Raises ChatError if it requests a stream."""
    if body.get("stream"):
        raise _no_stream()
    return VLLMGenerate() if "prompt" in body else SGLangGenerate()


def _of_sglang(routes: ServedReply) -> dict[str, Any]:
    turn = routes.turn
    pairs = [[log_prob, token, None] for token, log_prob in zip(routes.ids, routes.log_probs, strict=True)]
    return {
        "text": turn.reply.text,
        "output_ids": routes.ids,
        "meta_info": {
            "id": turn.reply.echo,
            "finish_reason": {"type": turn.finish},
            "prompt_tokens": turn.start,
            "completion_tokens": turn.end - turn.start,
            "output_token_logprobs": pairs,
        },
    }


def _no_stream() -> ChatError:
    return ChatError("stream", True, "streams are not supported here", "remove it")
