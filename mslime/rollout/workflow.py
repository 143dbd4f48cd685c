"""What a rollout does, as a function of a task and an engine: `rollout.function: module:function`.

    async def rollout(task: Task, engine: Engine) -> Sample | list[Sample] | Episode | None

The function may take several turns, call tools and wait for them, start sub-agents, and branch: a rollout is one
sequence or several, which share one reward. It knows nothing of Ray, SGLang, weight updates or
ages: `engine.generate` waits while the engines take new weights, and continues what was interrupted. It runs in the
rollout service's process, in one event loop with all others, so it awaits what takes long. The same function serves
training and evaluation. `single_turn` is the built-in one.

Sequences that were generated and are not among the samples of what the function returns are dropped from training, and
are in the ledger as `unused`. A reward of one sample is asked about the last of them.

A function lives in its process only. After a resume, or when it raised, an unfinished rollout begins anew, and the
tokens it had are in the ledger as dropped (`restarted`); `single_turn` continues its response instead.
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
    from mslime.rollout.agents.chat.session import Reply
    from mslime.rollout.agents.server.served_rollouts import ModelEndpoint

SETTING = "rollout.function"


@dataclass(frozen=True)
class Task:
    """What a rollout is asked to do.

    Attributes:
        prompt: [prompt] int32 token ids, in the chat template if there is one.
        label, metadata: of the prompt's row; the function may add to `sample.metadata`, in JSON values.
        messages, tools: the prompt as chat messages, and the tools that its row offers; None where it has none.
        group_id, index: of the prompt, and of the rollout among those of the prompt.
        evaluation: whether this is for a held-out set, and nothing is trained.
        seed: the same at every try of this rollout, and another for every other rollout of the run.
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
        """What the prompt says, without special tokens."""
        return self.decode(self.prompt.tolist())


@dataclass(frozen=True)
class Turn:
    """What one `generate` added to a sample.

    Attributes:
        tokens: [n] int32 ids, the one that ended the turn included.
        finish: stop: the model ended its turn, or a stop text came. length: a limit was reached.
        decode: text of token ids.
    """

    tokens: NDArray[np.int32]
    finish: Literal["stop", "length"]
    decode: Callable[[Sequence[int]], str]

    @property
    def text(self) -> str:
        """What was said, without special tokens."""
        return self.decode(self.tokens.tolist())


class Engine(Protocol):
    """The engines as one rollout sees them."""

    def new_sample(self, prompt: Sequence[int] | None = None) -> Sample:
        """A sequence of this rollout. It grows in `generate` and `append` only.

        Args:
            prompt: token ids that it begins with; None: the task's. The first call without one gives the sequence that
                an earlier process may have begun.

        Raises:
            RolloutError: `prompt` is empty, or leaves no room for a response.
        """
        ...

    def branch(self, sample: Sample, at: int | None = None) -> Sample:
        """A new sequence that begins with the first `at` tokens of `sample`, or with all.

        They are context here, with their versions, log-probs and routes, and are trained in `sample` alone. `sample`
        may be growing meanwhile, where `at` is not beyond the turn that is generated.
        """
        ...

    async def generate(self, sample: Sample, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        """Let the model go on after what the sample holds, and add what it says.

        Waits while the engines take new weights. A response that is interrupted by that goes on afterwards; each token
        keeps the weight version that sampled it. Without room for another token it returns an empty turn. Several
        sequences of a rollout may be generated at once, each by one call at a time. When a call is cancelled, the
        sequence keeps what it has of the turn, with which the next call goes on; see `cut`.

        Args:
            max_tokens: of this turn; the limits of the run hold as well.
            stop: texts that end this turn, beside `rollout.stop`; they are part of the turn.

        Raises:
            EngineError: no engine is left, or one refused.
        """
        ...

    def append(self, sample: Sample, added: str | Sequence[int]) -> None:
        """Add what the environment says, as text or token ids. It is never trained.

        Raises:
            NoRoomError: it does not fit. Where the function lets this through, the rollout ends as truncated.
        """
        ...

    def cut(self, sample: Sample, at: int) -> None:
        """Throw away the tokens from `at` on. The sampled ones among them are dropped in the ledger, as `cut`."""
        ...

    def mask(self, sample: Sample, start: int, end: int) -> None:
        """Take tokens [start, end) out of the loss; they stay as context, and are masked in the ledger as `rollout`."""
        ...

    def room(self, sample: Sample) -> int:
        """Tokens that the model may still add."""
        ...

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *,
        max_tokens: int | None = None, stop: Sequence[str] = (),
    ) -> Reply:  # fmt: skip
        """The model's reply to messages, in the form of OpenAI's chat completions; `task.messages` to begin with.

        Send `reply.message` back as it is, followed by new messages: they are added to the tokens of the turn. What
        does not go on from a recorded turn begins a sequence (docs/agents.md). Waits and continues like `generate`;
        several may be asked at once.

        Raises:
            NoRoomError: the messages leave no room for a reply, or a limit of `rollout.limits` is reached.
            ChatError: the messages cannot be answered.
        """
        ...

    async def endpoint(self) -> ModelEndpoint:
        """Where an agent finds the model of this rollout, with an API key of its own, until the function returns.

        It is OpenAI's API (chat completions, responses, completions) and Anthropic's (messages). What the agent asks
        is recorded as by `chat`; replies that it did not receive are not trained.
        """
        ...

    def encode(self, text: str, after: int | None = None) -> list[int]:
        """Token ids of a text, without special tokens at its beginning. Those that are written out in it are read.

        Args:
            after: the token that it follows; None: it begins a sequence, with a blank where the tokenizer puts one.
        """
        ...


@dataclass(frozen=True)
class Episode:
    """What came of a rollout, where there is more to tell than its sequences.

    Attributes:
        samples: the sequences that are trained; None: all that were generated, in the order of their newest turns.
        reward: of the whole rollout; None: `reward` scores the last of the sequences.
        step_rewards: (sequence, position of the token that ends a step, reward), beside `reward`; or (id of a response
            that an agent got from `endpoint`, index of the choice, reward) for the step that ends with its reply. A
            step of a turn that sequences share counts for the turn, whichever of them is named; see
            `algorithm.credit`.
        metrics: numbers that are logged as `user/<name>`.
        failed: why the rollout is worth nothing, when an environment broke, for example; see `rollout.on_error`.
    """

    samples: Sequence[Sample] | None = None
    reward: float | None = None
    step_rewards: Sequence[tuple[Sample | str, int, float]] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    failed: str = ""


Workflow = Callable[[Task, Engine], Awaitable[Sample | list[Sample] | Episode | None]]
"""A sample or a list stands for the `Episode` of these sequences, None for that of all."""


class NoRoomError(Exception):
    """What the environment said does not fit into the sample any more."""


class AbsentError(Exception):
    """The rollout is not there: its group is smaller than others, and that is nobody's failure. For functions of
    mslime, whose rollouts come from elsewhere."""


async def single_turn(task: Task, engine: Engine) -> Sample:
    """One response to the prompt."""
    sample = engine.new_sample()
    await engine.generate(sample)
    return sample


def load_workflow(spec: str) -> Workflow:
    """The function of `rollout.function`.

    Raises:
        ConfigError: it cannot be found, takes other arguments, or is not async.
    """
    if spec == "single_turn":
        return single_turn
    function = load_function(spec, SETTING)
    check_parameters(function, spec, SETTING, "task", "engine")
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(SETTING, spec, "must be async: it waits for the engine", "write it as async def")
    return function
