"""What the service asks of trainers and engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mslime.config.serve import AdamParams, LossChoice
from mslime.data.client_batch import Datum, PassResult


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


class Trainer(Protocol):
    """Trains one adapter (`control.adapter_ranks.AdapterTrainer`). A mistake of a client is a UserError that leaves the
    adapter as it was; a TrainerError may have changed it."""

    def forward(self, data: Sequence[Datum], loss: LossChoice) -> PassResult:
        """Losses and log-probs."""
        ...

    def forward_backward(self, data: Sequence[Datum], loss: LossChoice) -> PassResult:
        """The same, and the gradients are added to the adapter's."""
        ...

    def adam_step(self, params: AdamParams) -> dict[str, float]:
        """A step on them; `grad_norm` and `lr`."""
        ...

    def save(self, directory: Path, extra: dict[str, Any], others: None) -> None:
        """Write factors and the optimizer's state."""
        ...

    def load(self, directory: Path, new_run: bool, *, optimizer: bool) -> None:
        """Continue from what `save` wrote, or from its factors alone."""
        ...

    def write_adapter(self, directory: Path, verify: bool) -> object:
        """Write the factors for engines."""
        ...


class Trainers(Protocol):
    """Makes adapters. Its methods and those of `Trainer` may be called from any thread, and do one thing at a time."""

    def create(self, name: str, ask: AdapterAsk) -> Trainer:
        """Make an adapter."""
        ...

    def free(self, name: str) -> None:
        """Forget it."""
        ...


@dataclass(frozen=True)
class SampleAsk:
    """A prompt and how it is continued.

    Attributes:
        rid: unique; continuation i is `rid-i` at the engine.
        prompt: [P] token ids. count: of continuations.
        ignore_eos: nothing ends a continuation but its length.
        scored_from: first token of the prompt whose log-prob is wanted, at least 1; None: none is.
    """

    rid: str
    prompt: tuple[int, ...]
    count: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    ignore_eos: bool
    seed: int | None
    scored_from: int | None


@dataclass(frozen=True)
class Continuation:
    """What was sampled.

    Attributes:
        tokens: [n] int32, that which ended it included. log_probs: [n] float32, at the request's temperature, over the
            whole vocabulary. stopped: ended before its length.
    """

    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    stopped: bool


@dataclass(frozen=True)
class Sampled:
    """All continuations of a prompt.

    Attributes:
        scores: [P] float32, NaN where none was wanted; None where none was at all.
        cached: tokens of the prompt that the engine had computed before.
    """

    continuations: list[Continuation]
    scores: NDArray[np.float32] | None
    cached: int


class SamplingEngines(Protocol):
    """Samples with the base or with an adapter on disk."""

    async def sample(self, adapter: Path | None, ask: SampleAsk) -> Sampled:
        """Continue a prompt. Raises EngineError where no engine can."""
        ...

    async def forget(self, adapter: Path) -> None:
        """No request will name this adapter any more."""
        ...
