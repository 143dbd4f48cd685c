"""Requests and replies independent of dialect, and readers of fields that all dialects share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mslime.rollout.agents.messages import ChatError, Message, as_list, as_object, as_text
from mslime.rollout.agents.session import ReplyTurn

MODEL = "policy"
"""Name of the trained model, for clients that send none."""
MOST_REPLIES, MOST_IN_ALL = 128, 1024
"""Limits of replies: to one prompt, and to all prompts of a request."""
Event = tuple[str, Mapping[str, Any] | str]
"""Name of a server-sent event (may be empty), and its data."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A client's request.

    Attributes:
        messages, tools: the conversation; or prompts: plain ones.
        count: replies to each.
        max_tokens, stop: limits of a reply.
        logprobs: the client wants the log-probability of each token.
        usage: the client wants token counts at the end of a stream.
        ignored: fields that the run decides, or that have no meaning here.
        model: the client's name for the model.
        body: the whole JSON body.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    count: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    logprobs: bool = False
    usage: bool = False
    ignored: tuple[str, ...] = ()
    model: str = MODEL
    body: Mapping[str, Any]


@dataclass(frozen=True)
class ServedReply:
    """A reply to be sent.

    Attributes:
        spelled: text of each token, if log-probabilities are wanted.
    """

    turn: ReplyTurn
    spelled: tuple[str, ...] = ()

    @property
    def ids(self) -> list[int]:
        """The reply's tokens."""
        return self.turn.sample.tokens[self.turn.start : self.turn.end].tolist()

    @property
    def log_probs(self) -> list[float]:
        """Natural log-probability of each token, under the weights that sampled it."""
        return self.turn.sample.log_probs[self.turn.start : self.turn.end].tolist()


class Dialect(Protocol):
    """One API: reads its requests and writes its replies.

    Attributes:
        path: below the session.
    """

    path: str

    def read(self, body: Mapping[str, Any], recorded: Mapping[str, ReplyTurn]) -> Request:
        """Parse a request from its JSON.

        Args:
            recorded: turns by the name that clients use.

        Raises:
            ChatError: it is malformed, or uses an unsupported feature.
        """
        ...

    def answer(
        self, request: Request, replies: Sequence[ServedReply]
    ) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        """JSON of a complete response."""
        ...

    def events(self, request: Request, replies: Sequence[ServedReply]) -> Iterator[Event]:
        """The same response as server-sent events."""
        ...

    def too_long(self, tokens: int, most: int) -> str:
        """The API's error text for messages that are too long: clients that shorten their history search for these
        words."""
        ...

    def error(self, status: int, message: str, field: str, code: str) -> Mapping[str, Any]:
        """JSON of an error."""
        ...


def integer(body: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    """A whole number, or None if absent. Raises ChatError for any other value, or one out of bounds."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        rule = f"must be a whole number >= {least}" + ("" if most is None else f" and <= {most}")
        raise ChatError(name, f"{value!r:.80}", rule, "fix the request, or remove the field")
    return value


def flag(body: Mapping[str, Any], name: str) -> bool:
    """True or false; false if absent. Raises ChatError for any other value."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ChatError(name, f"{value!r:.80}", "must be true or false", "fix the request, or remove the field")
    return bool(value)


def texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A text, or an array of texts; empty ones are removed. Raises ChatError for any other value."""
    value = body.get(name)
    if isinstance(value, str):
        value = [value]
    return tuple(t for i, v in enumerate(as_list(value, name)) if (t := as_text(v, f"{name}[{i}]")))


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether to end a stream with token counts (`stream_options`). Raises ChatError if that is not an object."""
    options = body.get("stream_options")
    return bool(options) and flag(as_object(options, "stream_options"), "include_usage")


def request_of(body: Mapping[str, Any], read: Iterable[str], *, left_out: tuple[str, ...] = (), **rest: Any) -> Request:
    """Build a request with the fields that all dialects share. Raises ChatError if one is malformed.

    Args:
        read: names of the fields that the dialect reads; other fields are ignored, as are those in `left_out`.
        rest: the other fields of `Request`.
    """
    known, model = set(read), body.get("model")
    unread = sorted(name for name, value in body.items() if value is not None and name not in known)
    return Request(
        stream=flag(body, "stream"),
        ignored=(*unread, *left_out),
        model=model if isinstance(model, str) and model else MODEL,
        body=body,
        **rest,
    )


def tools_of(
    body: Mapping[str, Any], read: Callable[[object, str], dict[str, Any] | None], left_out: str
) -> dict[str, Any]:
    """`tools` and `left_out` of `request_of`.

    Args:
        read: reads a tool's definition at a place; None: it is left out, and `left_out` is counted as ignored.
    """
    tools = [read(value, f"tools[{i}]") for i, value in enumerate(as_list(body.get("tools"), "tools"))]
    named = tuple(tool for tool in tools if tool is not None)
    return {"tools": named, "left_out": (left_out,) if len(named) < len(tools) else ()}


def refuse(body: Mapping[str, Any], **fields: str) -> None:
    """Raise ChatError for fields that cannot be ignored, such as references to a part of the conversation.

    Args:
        fields: the error of each, by name.
    """
    for name, rule in fields.items():
        if body.get(name):
            raise ChatError(name, f"{body[name]!r:.80}", rule, "remove it, and send the whole conversation")


def tool(name: object, description: object, parameters: object, where: str) -> dict[str, Any]:
    """A tool definition in the form of chat completions, without empty fields."""
    function: dict[str, Any] = {"name": as_text(name, f"{where}.name")}
    if description:
        function["description"] = as_text(description, f"{where}.description")
    if parameters is not None:
        function["parameters"] = as_object(parameters, f"{where}.parameters")
    return {"type": "function", "function": function}


def stopped(turn: ReplyTurn) -> str:
    """Finish reason of a reply in OpenAI's words."""
    return "tool_calls" if turn.reply.calls and turn.finish == "stop" else turn.finish
