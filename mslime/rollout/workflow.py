"""Interface of rollout functions: async functions of a task and an engine (`rollout.function: module:function`).

    async def rollout(task: Task, engine: Engine) -> Sample | list[Sample] | Episode | None

The function may take several turns, call tools and wait for them, start sub-agents, and branch: a rollout is one
sequence or several, which share one reward. It is independent of Ray, SGLang, weight updates and ages:
`engine.generate` waits while the engines take new weights, and continues interrupted responses. It runs in the rollout
service's process, in one event loop with all others, so it must await long operations. The same function serves
training and evaluation. `single_turn` is the built-in one.

Generated sequences that the function does not return are dropped from training, and are in the ledger as `unused`. A
per-sample reward scores the last returned sequence.

The state of a function is not saved. After a resume, or if the function raised, an unfinished rollout starts again, and
its earlier tokens are in the ledger as dropped (`restarted`); `single_turn` continues its response instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mslime.config.errors import ConfigError
from mslime.data.sample import Sample
from mslime.extensions import check_parameters, load_function

if TYPE_CHECKING:
    from mslime.rollout.agents.app import ModelEndpoint
    from mslime.rollout.agents.session import Reply

SETTING = "rollout.function"


@dataclass(frozen=True)
class Task:
    """Input of a rollout.

    Attributes:
        prompt: [prompt] int32 token ids, in the chat template if there is one.
        label, metadata: of the prompt's row; the function may add to `sample.metadata`, in JSON values.
        messages, tools: the prompt as chat messages, and the tools of its row; None if it has none.
        group_id, index: of the prompt, and of the rollout among those of the prompt.
        evaluation: whether this is for a held-out set, and nothing is trained.
        seed: constant over all attempts of this rollout, different for every other rollout of the run.
        decode: text of token ids.
    """

    prompt: NDArray[np.int32]
    label: Any
    metadata: Mapping[str, Any]
    group_id: int
    index: int
    evaluation: bool
    seed: int
    decode: Callable[[Sequence[int]], str]
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None

    @property
    def text(self) -> str:
        """Text of the prompt, without special tokens."""
        return self.decode(self.prompt.tolist())


@dataclass(frozen=True)
class Turn:
    """Tokens that one `generate` added to a sample.

    Attributes:
        tokens: [n] int32 ids, including the one that ended the turn.
        finish: stop: the model ended its turn, or a stop text came. length: a limit was reached.
        decode: text of token ids.
    """

    tokens: NDArray[np.int32]
    finish: Literal["stop", "length"]
    decode: Callable[[Sequence[int]], str]

    @property
    def text(self) -> str:
        """Text of the turn, without special tokens."""
        return self.decode(self.tokens.tolist())


class Engine(Protocol):
    """Interface to the engines for one rollout."""

    def new_sample(self, prompt: Sequence[int] | None = None) -> Sample:
        """Create a sequence of this rollout. It grows in `generate` and `append` only.

        Args:
            prompt: initial token ids; None: the task's. The first call without a prompt returns the sequence that an
                earlier process may have begun.

        Raises:
            RolloutError: `prompt` is empty, or leaves no room for a response.
        """
        ...

    def branch(self, sample: Sample, at: int | None = None) -> Sample:
        """Create a sequence that begins with the first `at` tokens of `sample`, or with all.

        They are context here, with their versions, log-probs and routes, and are trained in `sample` alone. `sample`
        may grow meanwhile if `at` is not beyond the turn that is being generated.
        """
        ...

    async def generate(self, sample: Sample, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        """Generate a turn after the sample's present tokens, and add it.

        Waits while the engines take new weights. A response interrupted by an update continues afterwards; each token
        keeps the weight version that sampled it. Without room for another token it returns an empty turn. Several
        sequences of a rollout may be generated at once, each by one call at a time. If a call is cancelled, the
        sequence keeps the partial turn, and the next call continues it; see `cut`.

        Args:
            max_tokens: limit of this turn, in addition to the limits of the run.
            stop: texts that end this turn, in addition to `rollout.stop`; they are part of the turn.

        Raises:
            EngineError: no engine is left, or one refused.
        """
        ...

    def append(self, sample: Sample, added: str | Sequence[int]) -> None:
        """Add the environment's output, as text or token ids. It is never trained.

        Raises:
            NoRoomError: it does not fit. If the function does not catch this, the rollout ends as truncated.
        """
        ...

    def cut(self, sample: Sample, at: int) -> None:
        """Remove the tokens from `at` on. Sampled ones among them are dropped in the ledger, as `cut`."""
        ...

    def mask(self, sample: Sample, start: int, end: int) -> None:
        """Mask tokens [start, end) out of the loss; they stay as context, and are masked in the ledger as `rollout`."""
        ...

    def room(self, sample: Sample) -> int:
        """Tokens that the model may still add."""
        ...

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *,
        max_tokens: int | None = None, stop: Sequence[str] = (),
    ) -> Reply:  # fmt: skip
        """The model's reply to messages, in the form of OpenAI's chat completions; begin with `task.messages`.

        Send `reply.message` back unchanged, followed by new messages: they are added to the tokens of the turn.
        Messages that do not continue a recorded turn begin a sequence (docs/agents.md). Waits and continues like
        `generate`; concurrent calls are allowed.

        Raises:
            NoRoomError: the messages leave no room for a reply, or a limit of `rollout.limits` is reached.
            ChatError: the messages cannot be answered.
        """
        ...

    async def endpoint(self) -> ModelEndpoint:
        """Address and API key of this rollout's model for an agent, valid until the function returns.

        It serves OpenAI's API (chat completions, responses, completions) and Anthropic's (messages). Requests of the
        agent are recorded as by `chat`; undelivered replies are not trained.
        """
        ...

    def encode(self, text: str, after: int | None = None) -> list[int]:
        """Token ids of a text, without special tokens at its beginning. Special tokens spelled out in the text are
        encoded.

        Args:
            after: the preceding token; None: the text begins a sequence, with a blank if the tokenizer adds one.
        """
        ...


@dataclass(frozen=True)
class Episode:
    """Full result of a rollout: sequences, rewards and metrics.

    Attributes:
        samples: the sequences that are trained; None: all generated ones, in the order of their newest turns.
        reward: of the whole rollout; None: `reward` scores the last of the sequences.
        step_rewards: (sequence, position of the token that ends a step, reward), in addition to `reward`; or (id of a
            response that an agent got from `endpoint`, index of the choice, reward) for the step that ends with its
            reply. A step in a turn that several sequences share counts for the turn, whichever sequence is named; see
            `algorithm.credit`.
        metrics: numbers that are logged as `user/<name>`.
        failed: reason why the rollout is invalid, for example a broken environment; see `rollout.on_error`.
    """

    samples: Sequence[Sample] | None = None
    reward: float | None = None
    step_rewards: Sequence[tuple[Sample | str, int, float]] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    failed: str = ""


Workflow = Callable[[Task, Engine], Awaitable[Sample | list[Sample] | Episode | None]]
"""A sample or a list means an `Episode` of these sequences, None one of all sequences."""


class NoRoomError(Exception):
    """The environment's output does not fit into the sample any more."""


class AbsentError(Exception):
    """The rollout does not exist: its group is smaller than others, which is not a failure. For mslime's own functions
    with external rollouts."""


async def single_turn(task: Task, engine: Engine) -> Sample:
    """One response to the prompt."""
    sample = engine.new_sample()
    await engine.generate(sample)
    return sample


def load_workflow(spec: str) -> Workflow:
    """Load the function of `rollout.function`.

    Raises:
        ConfigError: it was not found, takes other arguments, or is not async.
    """
    if spec == "single_turn":
        return single_turn
    function = load_function(spec, SETTING)
    check_parameters(function, spec, SETTING, "task", "engine")
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(SETTING, spec, "must be async: it waits for the engine", "write it as async def")
    return function
