"""Requests of the SDK, independent of HTTP: sessions, trained adapters, samplers and saved states."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from mslime.config.errors import CheckpointError, TrainerError
from mslime.config.resolved import policy_spec
from mslime.config.schema import RunConfig
from mslime.config.serve import AdamParams
from mslime.threads import in_thread
from mslime_plugins.serve import bodies
from mslime_plugins.serve.client_errors import ServeError
from mslime_plugins.serve.futures import PROTOBUF, FutureResult, Futures, Work
from mslime_plugins.serve.pass_requests import ModelLimits, PassRequest, passed_bytes, sampled_bytes
from mslime_plugins.serve.sampling import PooledEngines, requests_of
from mslime_plugins.serve.served_config import adapter_config
from mslime_plugins.serve.sessions import AdapterAsk, Model, Sampler, ServeClient, Sessions
from mslime_plugins.serve.states import States, StoredState

if TYPE_CHECKING:
    from mslime.run.adapter_ranks import AdapterRanks, AdapterTrainer

P = ParamSpec("P")
T = TypeVar("T")
EXPIRED_S = 60.0
"""Seconds between two checks for expired states."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """The served model.

    Attributes:
        names: of the base for clients; the first is reported to them.
        tokenizer: its directory. architecture: of config.json.
        limits: token ids and positions. max_rank: `lora.rank`. attention, mlp: layers that may have adapters.
    """

    names: tuple[str, ...]
    tokenizer: str
    architecture: str
    limits: ModelLimits
    max_rank: int
    attention: bool = True
    mlp: bool = True


class Service:
    """All operations for clients.

    Args:
        ranks: trainer ranks of clients' adapters.
        root: directory of saved states.
        note: called when clients connect or leave.
    """

    def __init__(
        self, served: ServedModel, config: RunConfig, ranks: AdapterRanks, engines: PooledEngines, root: Path,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.served, self.settings, self._config = served, config.serve, config
        self._ranks, self._engines, self._note = ranks, engines, note
        self.sessions, self.states = Sessions(), States(root)
        self.futures = Futures(self.settings.max_requests)
        self._checked_at = 0.0  # time of the last check of saved states

    def describe(self) -> str:
        """The current activity, as one line."""
        clients, adapters = len(self.sessions.all), len(self.sessions.models)
        return f"{clients} client(s), {adapters} adapter(s), {self.futures.unfinished} unfinished request(s)"

    # ----------------------------------------------------------------------------------------------------- sessions

    def open_session(self, body: bodies.CreateSession) -> ServeClient:
        """Open a client's session."""
        session = self.sessions.open(body.user_metadata, body.display_name)
        named = f" ({body.display_name})" if body.display_name else ""
        self._note(f"client {session.session_id[:8]}{named} connected, tinker {body.sdk_version}")
        return session

    async def end_session(self, session_id: str, why: str) -> None:
        """Remove a client: its requests, its adapters, and samplers saved for it alone."""
        session = self.sessions.close(session_id)
        if session is None:
            return
        for owner in (session_id, *session.models, *session.samplers):
            await self.futures.drop(owner)
        for model in session.models.values():
            if model.trainer is not None:
                await _in_turn(self._ranks.free, model.model_id)
        for sampler in session.samplers.values():
            if sampler.own and sampler.adapter is not None:
                await self._engines.forget(sampler.adapter)
                shutil.rmtree(sampler.adapter, ignore_errors=True)
        self._note(f"client {session_id[:8]} left ({why}): {len(session.models)} adapter(s) freed")

    async def tidy(self) -> None:
        """Remove silent clients, old answers, and expired states."""
        for session in self.sessions.silent(self.settings.silence_s):
            await self.end_session(session.session_id, f"no request for {self.settings.silence_s:g} s")
        self.futures.forget_fetched()
        if time.monotonic() - self._checked_at > EXPIRED_S:
            self._checked_at = time.monotonic()
            for saved in list(self.states.expired()):
                await self.remove(saved.path)

    async def remove(self, path: str) -> None:
        """Delete a state. Raises ServeError if there is none."""
        directory = self.states.directory(path)
        self.states.remove(path)
        await self._engines.forget(directory)

    # ------------------------------------------------------------------------------------------------------- models

    def create_model(self, body: bodies.CreateModel) -> tuple[str, str]:
        """(id of the request, id of the model)."""
        self._check_base(body.base_model)
        if body.lora_config is None:
            raise ServeError("lora_config", None, "the base is frozen: only adapters are trained",
                             "set its rank")  # fmt: skip
        self._check_adam(body.optimizer_config)
        lora = body.lora_config
        seed = random.SystemRandom().randrange(2**31) if lora.seed is None else lora.seed % 2**31
        ask = AdapterAsk(lora.rank, seed, lora.train_attn, lora.train_mlp)
        self._check_ask(ask)
        model, new = self._new_model(body.session_id, body.model_seq_id, body.base_model, ask, body.user_metadata)

        async def work() -> FutureResult:
            await self._make(model)
            return FutureResult.of(type="create_model", model_id=model.model_id)

        request_id = f"{model.model_id}:0"
        return self._take_first(model, request_id, work) if new else request_id, model.model_id

    def _new_model(
        self, session_id: str, number: int, base_model: str, ask: AdapterAsk, user_metadata: dict[str, Any] | None
    ) -> tuple[Model, bool]:
        """A model of a session, and whether it is new: a repeated request gets the same one."""
        session, model_id = self.sessions.get(session_id), f"{session_id}:train:{number}"
        if model_id in session.models:
            return session.models[model_id], False
        if len(self.sessions.models) >= self.settings.max_adapters:
            raise ServeError(
                "create_model", len(self.sessions.models), "the limit of adapters is reached (serve.max_adapters)",
                "close clients that are done (ServiceClient.close), or raise the setting",
            )  # fmt: skip
        model = Model(model_id, session_id, base_model, ask, user_metadata)
        session.models[model_id] = model
        return model, True

    def _take_first(self, model: Model, request_id: str, work: Work) -> str:
        async def made() -> FutureResult:
            try:
                return await work()
            except (Exception, asyncio.CancelledError):
                if model.trainer is not None:
                    model.trainer = None
                    await _in_turn(self._ranks.free, model.model_id)
                with suppress(ServeError):
                    self.sessions.get(model.session_id).models.pop(model.model_id, None)
                raise

        return self.futures.take(request_id, model.model_id, made, (model.turns, 0))

    async def _make(self, model: Model) -> AdapterTrainer:
        own = policy_spec(adapter_config(self._config, model.ask))
        # Clients may take its files to other engines, which do not read stacked experts.
        made = in_thread(self._ranks.create, model.model_id, own, stacked=False)
        try:
            model.trainer = trainer = await asyncio.shield(asyncio.wrap_future(made))
        except asyncio.CancelledError:  # its client has left, and the ranks continue to create it
            made.add_done_callback(lambda made: made.exception() or in_thread(self._ranks.free, model.model_id))
            raise
        layers = " and ".join(n for n, on in (("attention", model.ask.attention), ("MLP", model.ask.mlp)) if on)
        self._note(f"client {model.session_id[:8]} trains an adapter of rank {model.ask.rank} on {layers}")
        return trainer

    def pass_over(self, request: PassRequest) -> str:
        """Run a forward pass, or forward and backward; returns the id of the request."""
        model = self.sessions.model(request.model_id)

        async def work(trainer: AdapterTrainer) -> FutureResult:
            self._check_sound(model)
            if not request.backward:
                found = await _in_turn(trainer.forward, request.data, request.loss)
                return FutureResult(passed_bytes(found, request.notes), PROTOBUF)
            try:
                found = await _in_turn(trainer.forward_backward, request.data, request.loss)
            except TrainerError:
                model.gradients = False  # gradients since the last step are dropped
                raise
            model.gradients = True
            return FutureResult(passed_bytes(found, request.notes), PROTOBUF)

        return self._take(model, request.seq_id, work)

    def refused(self, model_id: str, number: int, error: ServeError) -> str:
        """The id of a request of a model that fails, in its turn: later ones wait for its number."""
        model = self.sessions.model(model_id)

        async def work(trainer: AdapterTrainer) -> FutureResult:
            raise error

        return self._take(model, number, work)

    def optim_step(self, body: bodies.OptimStep) -> str:
        """Run an optimizer step; returns the id of the request."""
        model = self.sessions.model(body.model_id)

        async def work(trainer: AdapterTrainer) -> FutureResult:
            self._check_sound(model)
            if body.adam_params is None:
                raise ServeError("optim_params", (body.optimizer_params or {}).get("type"), "only AdamW is supported",
                                 "pass AdamParams")  # fmt: skip
            if not model.gradients:
                raise ServeError("optim_step", model.model_id, "there are no gradients since the last step",
                                 "run forward_backward first; if it failed, see its error")  # fmt: skip
            adam = body.adam_params
            params = AdamParams(adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay,
                                adam.grad_clip_norm)  # fmt: skip
            model.gradients = False
            with _breaking(model, "optim_step"):
                found = await _in_turn(trainer.adam_step, params)
            return FutureResult.of(metrics={f"{name}:mean": value for name, value in found.items()})

        return self._take(model, body.seq_id, work)

    def save_weights(self, body: bodies.SaveWeights) -> str:
        """Save factors and the optimizer's state; returns the id of the request."""
        model = self.sessions.model(body.model_id)

        async def work(trainer: AdapterTrainer) -> FutureResult:
            self._check_sound(model)
            name = body.path or f"state-{body.seq_id}"
            path, directory = self.states.new(model.model_id, "weights", name, overwrite=body.overwrite)
            await _in_turn(trainer.save, directory.absolute(), {}, None)
            self._keep(model, path, body)
            return FutureResult.of(type="save_weights", path=path)

        return self._take(model, body.seq_id, work)

    def save_for_sampler(self, body: bodies.SaveForSampler) -> str:
        """Write factors for engines: under a name, or for one sampler alone; returns the id of the request."""
        model = self.sessions.model(body.model_id)

        async def work(trainer: AdapterTrainer) -> FutureResult:
            self._check_sound(model)
            if body.kind != "snapshot":
                raise ServeError("kind", body.kind, "a sampler keeps its weights",
                                 "use snapshot, the default, and a new sampler for newer weights")  # fmt: skip
            own = body.path is None
            name = body.path or f"sampler-{body.seq_id}"
            path, directory = self.states.new(model.model_id, "sampler_weights", name)
            await _in_turn(trainer.write_adapter, directory.absolute(), False)
            self._keep(model, path, body)
            if not own:
                return FutureResult.of(type="save_weights_for_sampler", path=path)
            number = body.seq_id if body.sampling_session_seq_id is None else body.sampling_session_seq_id
            sampler = self._new_sampler(model.session_id, number, model.base_model, directory, path, own=True)
            return FutureResult.of(type="save_weights_for_sampler", sampling_session_id=sampler.sampler_id)

        return self._take(model, body.seq_id, work)

    def load_weights(self, body: bodies.LoadWeights) -> tuple[str, str]:
        """Load a saved state into a model, or into a new one: (id of the request, id of the model)."""
        saved = self.states.find(body.path, "weights")
        self._check_adam(body.optimizer_config or {"type": "adamw"})
        if body.model_id is not None and body.seq_id is not None:
            model = self.sessions.model(body.model_id)

            async def load(trainer: AdapterTrainer) -> FutureResult:
                if model.ask != (same := replace(saved.ask, seed=model.ask.seed)):
                    raise ServeError("path", body.path, f"is of another adapter: {same}", f"this one is {model.ask}")
                return await self._load(model, trainer, body)

            return self._take(model, body.seq_id, load), model.model_id
        if body.session_id is None or body.model_seq_id is None:
            raise ServeError("load_weights", None, "names neither a model nor a session with a number",
                             "send a request of the tinker SDK 0.38.0")  # fmt: skip
        base = body.base_model or saved.base_model
        self._check_base(base)
        model, new = self._new_model(body.session_id, body.model_seq_id, base, saved.ask, body.user_metadata)

        async def make() -> FutureResult:
            return await self._load(model, await self._make(model), body)

        request_id = f"{model.model_id}:0"
        return self._take_first(model, request_id, make) if new else request_id, model.model_id

    async def _load(self, model: Model, trainer: AdapterTrainer, body: bodies.LoadWeights) -> FutureResult:
        directory = self.states.directory(body.path).absolute()
        with _breaking(model, "load_weights"):
            await _in_turn(trainer.load, directory, True, optimizer=body.optimizer)
        model.gradients, model.broken = False, ""
        return FutureResult.of(type="load_weights", path=body.path, model_id=model.model_id)

    def _take(self, model: Model, number: int, work: Callable[[AdapterTrainer], Awaitable[FutureResult]]) -> str:
        """Queue a request of a model for its turn."""

        async def made() -> FutureResult:
            if model.trainer is None:
                raise ServeError("model_id", model.model_id, "it was never created", "see the reply of create_model")
            return await work(model.trainer)

        return self.futures.take(f"{model.model_id}:{number}", model.model_id, made, (model.turns, number))

    # ----------------------------------------------------------------------------------------------------- samplers

    def create_sampler(self, body: bodies.CreateSamplingSession) -> Sampler:
        """Create a sampler of the base, or of a state saved for samplers."""
        self.sessions.get(body.session_id)
        if body.model_path is None:
            if body.base_model is None:
                raise ServeError("base_model", None, "is required without model_path", "set one of the two")
            self._check_base(body.base_model)
            return self._new_sampler(body.session_id, body.sampling_session_seq_id, body.base_model, None, None)
        saved = self.states.find(body.model_path, "sampler_weights")
        base, directory = body.base_model or saved.base_model, self.states.directory(body.model_path)
        self._check_base(base)
        return self._new_sampler(body.session_id, body.sampling_session_seq_id, base, directory, body.model_path)

    def _new_sampler(
        self, session_id: str, number: int, base_model: str, adapter: Path | None, path: str | None, own: bool = False
    ) -> Sampler:
        session, sampler_id = self.sessions.get(session_id), f"{session_id}:sample:{number}"
        sampler = Sampler(sampler_id, session_id, base_model, adapter, path, own)
        return session.samplers.setdefault(sampler_id, sampler)

    def sample(self, body: bodies.SampleBody) -> tuple[str, list[str]]:
        """(id of the request, ids of its future sequences)."""
        if body.sampling_session_id is None or body.seq_id is None:
            raise ServeError("sampling_session_id", body.sampling_session_id, "is required, with seq_id",
                             "create a sampling client")  # fmt: skip
        sampler = self.sessions.sampler(body.sampling_session_id)
        if sampler.path is not None:
            self.states.find(sampler.path)  # it may have been deleted meanwhile
        request_id = f"{sampler.sampler_id}:{body.seq_id}"
        requests = requests_of(body, request_id, self.served.limits)

        async def work() -> FutureResult:
            return FutureResult(sampled_bytes(await self._engines.sample(sampler.adapter, requests)), PROTOBUF)

        ids = [f"{request_id}:{i}" for i in range(body.num_samples)]
        return self.futures.take(request_id, sampler.sampler_id, work), ids

    # ------------------------------------------------------------------------------------------------------- checks

    def _keep(self, model: Model, path: str, body: bodies.SaveWeights) -> None:
        now = time.time()
        expires = None if body.ttl_seconds is None else now + body.ttl_seconds
        self.states.keep(StoredState(path, model.base_model, model.ask, now, expires, body.user_metadata))

    def _check_base(self, name: str) -> None:
        if name.split(":")[0] not in self.served.names:
            raise ServeError("base_model", name, f"this server has {' or '.join(self.served.names)}",
                             "get its name from get_server_capabilities")  # fmt: skip

    def _check_ask(self, ask: AdapterAsk) -> None:
        if ask.rank > self.served.max_rank:
            raise ServeError("lora_config.rank", ask.rank, f"this server supports ranks up to {self.served.max_rank} "
                             "(lora.rank of its configuration)", "request a lower rank")  # fmt: skip
        if not ((ask.attention and self.served.attention) or (ask.mlp and self.served.mlp)):
            raise ServeError("lora_config", "train_attn, train_mlp", "no layer would have an adapter: the unembedding "
                             "has none here", "train attention, MLP layers or both")  # fmt: skip

    @staticmethod
    def _check_adam(config: Mapping[str, Any]) -> None:
        if config.get("type") != "adamw":
            raise ServeError("optimizer_config.type", config.get("type"), "only adamw is supported", "remove it")

    @staticmethod
    def _check_sound(model: Model) -> None:
        if model.broken:
            raise ServeError("model_id", model.model_id, f"it can no longer be trained: {model.broken}",
                             "load an earlier state with create_training_client_from_state")  # fmt: skip


async def _in_turn(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """One call of the trainer, run in a thread in its turn. It continues if its client is gone, because it may serve
    others too."""
    return await asyncio.shield(asyncio.wrap_future(in_thread(call, *args, **kwargs)))


@contextmanager
def _breaking(model: Model, operation: str) -> Iterator[None]:
    """Mark the model as broken if an exception inside leaves its state undefined."""
    try:
        yield
    except (TrainerError, CheckpointError) as error:
        model.broken = f"{operation} failed, {error.brief} ({error.hint})"
        raise
