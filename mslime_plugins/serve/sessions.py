"""Sessions of clients, with their trained models and samplers."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mslime_plugins.serve.client_errors import GONE, ServeError
from mslime_plugins.serve.futures import RequestOrder

if TYPE_CHECKING:
    from mslime.run.adapter_ranks import AdapterTrainer


@dataclass(frozen=True)
class AdapterAsk:
    """The adapter that a client trains.

    Attributes:
        rank: at most `lora.rank`. seed: of A. attention, mlp: whether these layers have one.
    """

    rank: int
    seed: int
    attention: bool = True
    mlp: bool = True


@dataclass
class Model:
    """An adapter that a client trains.

    Attributes:
        model_id: `SESSION:train:NUMBER`, which the SDK computes by itself.
        base_model: name used by the client.
        turns: of its requests, whose numbers begin at 1.
        trainer: of the adapter, once created.
        gradients: whether there are any since its last step.
        broken: why it can no longer be trained; empty if it can.
    """

    model_id: str
    session_id: str
    base_model: str
    ask: AdapterAsk
    user_metadata: dict[str, Any] | None = None
    turns: RequestOrder = field(default_factory=RequestOrder)
    trainer: AdapterTrainer | None = None
    gradients: bool = False
    broken: str = ""
    last_request: float = field(default_factory=time.time)


@dataclass
class Sampler:
    """A client's sampler.

    Attributes:
        adapter: its directory; None: the base alone.
        path: its tinker path. own: whether it was saved for this sampler alone, and is deleted with its session.
    """

    sampler_id: str
    session_id: str
    base_model: str
    adapter: Path | None
    path: str | None = None
    own: bool = False


@dataclass
class ServeClient:
    """A client. seen: time of its last sign of life, in monotonic seconds."""

    session_id: str
    user_metadata: dict[str, Any] | None
    display_name: str | None
    seen: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict[str, Model])
    samplers: dict[str, Sampler] = field(default_factory=dict[str, Sampler])


class Sessions:
    """All open sessions."""

    def __init__(self) -> None:
        self._all: dict[str, ServeClient] = {}

    def open(self, user_metadata: dict[str, Any] | None, display_name: str | None) -> ServeClient:
        """Open a session."""
        session = ServeClient(uuid.uuid4().hex, user_metadata, display_name)
        self._all[session.session_id] = session
        return session

    def get(self, session_id: str) -> ServeClient:
        """A session; this counts as a sign of life. Raises ServeError."""
        if session_id not in self._all:
            raise ServeError(
                "session_id", session_id, "unknown session: it ended, sent no request for too long, or the "
                "server was restarted", "create a new ServiceClient; saved states can be loaded", GONE,
            )  # fmt: skip
        session = self._all[session_id]
        session.seen = time.monotonic()
        return session

    def model(self, model_id: str) -> Model:
        """A model of an open session. Raises ServeError."""
        session = self.get(model_id.partition(":")[0])
        if model_id not in session.models:
            raise ServeError("model_id", model_id, "unknown model", "create it with create_lora_training_client", GONE)
        model = session.models[model_id]
        model.last_request = time.time()
        return model

    def sampler(self, sampler_id: str) -> Sampler:
        """A sampler of an open session. Raises ServeError."""
        session = self.get(sampler_id.partition(":")[0])
        if sampler_id not in session.samplers:
            raise ServeError("sampling_session_id", sampler_id, "unknown sampler", "create a sampling client", GONE)
        return session.samplers[sampler_id]

    @property
    def models(self) -> list[Model]:
        """Models of all sessions."""
        return [model for session in self._all.values() for model in session.models.values()]

    def silent(self, longer_than_s: float) -> list[ServeClient]:
        """Sessions without a sign of life for this long."""
        now = time.monotonic()
        return [session for session in self._all.values() if now - session.seen > longer_than_s]

    def close(self, session_id: str) -> ServeClient | None:
        """Remove a session; None if it is already gone."""
        return self._all.pop(session_id, None)

    @property
    def all(self) -> list[ServeClient]:
        """All sessions, oldest first."""
        return list(self._all.values())
