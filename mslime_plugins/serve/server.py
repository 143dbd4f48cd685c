"""The HTTP server: paths, key and answers of the SDK; aiohttp, on loopback."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import orjson
from aiohttp import web

from mslime.config.errors import UserError
from mslime.web_server import BodyError, ListeningServer, admitted, read_body, same_key, serve
from mslime_plugins.serve import bodies
from mslime_plugins.serve.client_errors import BUSY, GONE, UNKNOWN, UNKNOWN_KEY, ServeError
from mslime_plugins.serve.futures import JSON
from mslime_plugins.serve.pass_requests import read_header, read_pass
from mslime_plugins.serve.states import TYPES, StoredState
from mslime_plugins.serve.tinker_service import Service

KEY_PREFIX = "tml-"
"""Prefix that the SDK requires of a key."""
LARGEST_BODY = 256 << 20
POLL_S = 20.0
"""Seconds for which a poll for an answer is held; the SDK gives up after 45 s."""
TIDY_S = 1.0
_ROOT = "/api/v1"
_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CLIENT_CONFIG = {
    "use_pyqwest_transport": False,  # plain HTTP/1.1 on loopback
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,
    "pjwt_auth_enabled": False,
}
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}


class Server:
    """Server of the SDK's clients.

    Args:
        key: the key that they must send.
    """

    def __init__(self, service: Service, key: str) -> None:
        self._service, self._key = service, key
        self._listening: ListeningServer | None = None
        self._tidying: asyncio.Task[None] | None = None

    async def start(self, listening: socket.socket) -> None:
        """Serve on a socket, and close sessions of silent clients."""
        self._listening = await serve(self.app(), listening, shutdown_timeout=1.0)
        self._tidying = asyncio.create_task(self._tidy())

    async def stop(self) -> None:
        """Stop serving."""
        if self._tidying is not None:
            self._tidying.cancel()
        if self._listening is not None:
            await self._listening.close()

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            try:
                await self._service.tidy()
            except UserError as error:
                _log.error("cleanup failed: %s", error)

    def app(self) -> web.Application:
        """The application."""
        service = self._service
        app = web.Application(client_max_size=LARGEST_BODY, middlewares=[self._guarded])
        for path, handler in {
            "client/config": _always(**CLIENT_CONFIG),
            "client/dynamic_config": _always(**DYNAMIC_CONFIG),
            "telemetry": _always(status="accepted"),  # no client reads it
            "create_session": _of(bodies.CreateSession, self._create_session),
            "session_heartbeat": _of(bodies.OfSession, self._heartbeat),
            "sessions/{session}/finish": self._finish,
            "create_model": _of(bodies.CreateModel, lambda body: _taken(*service.create_model(body))),
            "get_info": _of(bodies.OfModel, self._get_info),
            "forward_backward": self._forward_backward,
            "optim_step": _of(bodies.OptimStep, lambda body: _taken(service.optim_step(body), body.model_id)),
            "save_weights": _of(bodies.SaveWeights, lambda body: _taken(service.save_weights(body), body.model_id)),
            "save_weights_for_sampler": _of(
                bodies.SaveForSampler, lambda body: _taken(service.save_for_sampler(body), body.model_id)
            ),
            "load_weights": _of(bodies.LoadWeights, lambda body: _taken(*service.load_weights(body))),
            "weights_info": _of(bodies.OfPath, self._weights_info),
            "create_sampling_session": _of(bodies.CreateSamplingSession, self._create_sampler),
            "asample": _of(bodies.SampleBody, self._sample),
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }.items():
            app.router.add_post(f"{_ROOT}/{path}", handler)
        for path, handler in {
            "healthz": _always(status="ok"),
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
            "sessions": self._sessions,
            "sessions/{session}": self._session,
            "training_runs": self._runs,
            "training_runs/{model}": self._run,
            "training_runs/{model}/checkpoints": self._checkpoints,
            "checkpoints": self._checkpoints,
        }.items():
            app.router.add_get(f"{_ROOT}/{path}", handler)
        app.router.add_delete(f"{_ROOT}/training_runs/{{model}}/checkpoints/{{kind}}/{{name}}", self._delete)
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and convert errors into answers; an invalid request with a turn uses up its turn."""
        begin, path = time.monotonic(), request.path
        try:
            given = request.headers.get("X-API-Key", "")
            if not same_key(given, self._key):
                raise ServeError("api_key", "(not shown)", "is not the key of this server", "pass the key that "
                                 "`mslime serve` wrote to RUN/serve.json, as api_key or TINKER_API_KEY",
                                 UNKNOWN_KEY)  # fmt: skip
            admitted(request)
            await read_body(request)  # kept by aiohttp: a body that cannot be read is refused in one place
            response = await handler(request)
        except web.HTTPNotFound:
            response = _refusal(ServeError("path", path, "is not supported", "see docs/serve.md", UNKNOWN))
        except BodyError as error:
            response = _refusal(ServeError("body", path, error.rule, error.hint, error.status))
        except UserError as error:
            response = await self._in_turn(request, error)
        if path != f"{_ROOT}/retrieve_future" or (response.status >= 400 and response.status != 408):
            _log.debug("%s %s: %d in %.3f s", request.method, path, response.status, time.monotonic() - begin)
        return response

    async def _in_turn(self, request: web.Request, error: UserError) -> web.Response:
        """Answer with an error; as a future if the request has a number for which later ones wait."""
        refused = error if isinstance(error, ServeError) else ServeError(
            error.field, error.value, error.rule, error.hint
        )  # fmt: skip
        if refused.status in (BUSY, UNKNOWN_KEY, GONE):
            return _refusal(refused)
        model_id, number = _turn_of(request.path, await request.read())
        if model_id and number:
            try:
                return _taken(self._service.refused(model_id, number, refused), model_id)
            except ServeError as unknown:
                return _refusal(unknown)
        return _refusal(refused)

    # ------------------------------------------------------------------------------------------------ about the server

    async def _capabilities(self, request: web.Request) -> web.Response:
        served = self._service.served
        models = [
            {"model_name": name, "max_context_length": served.limits.positions, "trainable": True, "sampleable": True}
            for name in served.names
        ]
        return _json(supported_models=models)

    # -------------------------------------------------------------------------------------------------------- sessions

    def _create_session(self, body: bodies.CreateSession) -> web.Response:
        session = self._service.open_session(body)
        return _json(type="create_session", session_id=session.session_id)

    def _heartbeat(self, body: bodies.OfSession) -> web.Response:
        self._service.sessions.get(body.session_id)
        return _json(type="session_heartbeat")

    async def _finish(self, request: web.Request) -> web.Response:
        await self._service.end_session(request.match_info["session"], "ended by the client")
        return web.Response(status=204)

    async def _sessions(self, request: web.Request) -> web.Response:
        return _json(sessions=[session.session_id for session in self._service.sessions.all])

    async def _session(self, request: web.Request) -> web.Response:
        session = self._service.sessions.get(request.match_info["session"])
        return _json(
            training_run_ids=list(session.models), sampler_ids=list(session.samplers),
            user_metadata=session.user_metadata, display_name=session.display_name,
        )  # fmt: skip

    # ---------------------------------------------------------------------------------------------------------- models

    def _get_info(self, body: bodies.OfModel) -> web.Response:
        model = self._service.sessions.model(body.model_id)
        served = self._service.served
        about = {"arch": served.architecture, "model_name": model.base_model, "tokenizer_id": served.tokenizer}
        return _json(
            type="get_info", model_data=about, model_id=model.model_id, is_lora=True, lora_rank=model.ask.rank,
            model_name=model.base_model, optimizer_config={"type": "adamw"},
        )  # fmt: skip

    async def _forward_backward(self, request: web.Request) -> web.Response:
        message = read_header(await request.read())
        pass_request = await asyncio.to_thread(
            read_pass, message, self._service.served.limits, self._service.settings.stable_reinforce
        )
        return _taken(self._service.pass_over(pass_request), pass_request.model_id)

    # ------------------------------------------------------------------------------------------------ saved states

    def _weights_info(self, body: bodies.OfPath) -> web.Response:
        saved = self._service.states.find(body.tinker_path)
        return _json(
            base_model=saved.base_model, is_lora=True, lora_rank=saved.ask.rank, train_unembed=False,
            train_mlp=saved.ask.mlp, train_attn=saved.ask.attention, optimizer_config={"type": "adamw"},
        )  # fmt: skip

    async def _runs(self, request: web.Request) -> web.Response:
        runs = [self._described(model.model_id) for model in self._service.sessions.models]
        return _json(training_runs=runs, cursor={"offset": 0, "limit": len(runs), "total_count": len(runs)})

    async def _run(self, request: web.Request) -> web.Response:
        return _json(**self._described(request.match_info["model"]))

    def _described(self, model_id: str) -> dict[str, Any]:
        """A TrainingRun for an existing or former model. Raises ServeError."""
        saved = self._service.states.of_model(model_id)
        model = next((m for m in self._service.sessions.models if m.model_id == model_id), None)
        if model is None and not saved:
            raise ServeError("training_run", model_id, "unknown model without saved states",
                             "list training_runs", UNKNOWN)  # fmt: skip
        ask, base = (model.ask, model.base_model) if model is not None else (saved[-1].ask, saved[-1].base_model)
        last = model.last_request if model is not None else saved[-1].at
        of_kind = {kind: [s for s in saved if s.parts[1] == kind] for kind in TYPES}
        return {
            "training_run_id": model_id, "base_model": base, "model_owner": "mslime", "is_lora": True,
            "lora_rank": ask.rank, "last_request_time": _when(last),
            "user_metadata": model.user_metadata if model is not None else None,
            "last_checkpoint": _checkpoint(of_kind["weights"][-1]) if of_kind["weights"] else None,
            "last_sampler_checkpoint":
                _checkpoint(of_kind["sampler_weights"][-1]) if of_kind["sampler_weights"] else None,
        }  # fmt: skip

    async def _checkpoints(self, request: web.Request) -> web.Response:
        model_id = request.match_info.get("model")
        models = [model_id] if model_id else [model.model_id for model in self._service.sessions.models]
        found = [_checkpoint(saved) for each in models for saved in self._service.states.of_model(each)]
        return _json(checkpoints=found, cursor={"offset": 0, "limit": len(found), "total_count": len(found)})

    async def _delete(self, request: web.Request) -> web.Response:
        parts = request.match_info
        await self._service.remove(f"tinker://{parts['model']}/{parts['kind']}/{parts['name']}")
        return web.Response(status=204)

    # -------------------------------------------------------------------------------------------------------- samplers

    def _create_sampler(self, body: bodies.CreateSamplingSession) -> web.Response:
        sampler = self._service.create_sampler(body)
        return _json(type="create_sampling_session", sampling_session_id=sampler.sampler_id)

    async def _sampler(self, request: web.Request) -> web.Response:
        sampler = self._service.sessions.sampler(request.match_info["sampler"])
        return _json(sampler_id=sampler.sampler_id, base_model=sampler.base_model, model_path=sampler.path)

    def _sample(self, body: bodies.SampleBody) -> web.Response:
        taken, ids = self._service.sample(body)
        return _json(request_id=taken, sample_sequence_ids=ids)

    # --------------------------------------------------------------------------------------------------------- futures

    async def _retrieve(self, request: web.Request) -> web.Response:
        request_id = bodies.read(bodies.OfRequest, await request.read()).request_id
        try:
            answer = await self._service.futures.fetch(request_id, POLL_S)
        except KeyError:
            raise ServeError("request_id", request_id, "unknown request: its client has left, or its answer has "
                             "expired", "send the request again", GONE) from None  # fmt: skip
        if answer is None:
            pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return web.Response(status=408, body=orjson.dumps(pending), content_type=JSON)
        return web.Response(body=answer.body, content_type=answer.kind)

    async def _cancel(self, request: web.Request) -> web.Response:
        self._service.futures.cancel(bodies.read(bodies.OfRequest, await request.read()).request_id)
        return web.Response(status=204)


def _json(**values: Any) -> web.Response:
    return web.Response(body=orjson.dumps(values), content_type=JSON)


def _taken(request_id: str, model_id: str) -> web.Response:
    """A request of a model was accepted."""
    return _json(request_id=request_id, model_id=model_id)


def _always(**values: Any) -> Handler:
    """A handler with one answer."""

    async def handler(request: web.Request) -> web.Response:
        return _json(**values)

    return handler


def _of(kind: type[bodies.B], answer: Callable[[bodies.B], web.Response]) -> Handler:
    """A handler that parses the request's body first."""

    async def handler(request: web.Request) -> web.Response:
        return answer(bodies.read(kind, await request.read()))

    return handler


def _refusal(error: ServeError) -> web.Response:
    payload = {"detail": str(error), "error": str(error), "category": "user"}
    return web.Response(status=error.status, body=orjson.dumps(payload), content_type=JSON)


def _turn_of(path: str, raw: bytes) -> tuple[str, int]:
    """Model and number of a request; empty and 0 without."""
    try:
        if path == f"{_ROOT}/forward_backward":
            message = read_header(raw)
            return str(message.model_id), int(message.seq_id)
        body: Any = orjson.loads(raw)
        model_id, number = body.get("model_id"), body.get("seq_id")
    except (ValueError, AttributeError):  # not JSON, or not an object; a UserError of `read_header` is a ValueError
        return "", 0
    return (model_id, number) if isinstance(model_id, str) and isinstance(number, int) else ("", 0)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _checkpoint(saved: StoredState) -> dict[str, Any]:
    """A Checkpoint of the SDK."""
    _, kind, name = saved.parts
    return {
        "checkpoint_id": f"{kind}/{name}", "checkpoint_type": TYPES[kind], "time": _when(saved.at),
        "tinker_path": saved.path, "public": False,
        "expires_at": None if saved.expires is None else _when(saved.expires),
        "user_metadata": saved.user_metadata,
    }  # fmt: skip
