"""Anthropic's messages: POST /v1/messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mslime.rollout.agents.messages import (
    ChatError,
    Message,
    ToolCall,
    as_list,
    as_object,
    as_text,
    canonical_json,
    parsed_json,
    text_of,
)
from mslime.rollout.agents.requests import (
    Event,
    Request,
    ServedReply,
    integer,
    refuse,
    request_of,
    texts,
    tool,
    tools_of,
)
from mslime.rollout.agents.session import ReplyTurn

_READ = ("messages", "system", "tools", "max_tokens", "stop_sequences", "stream", "model")
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class Messages:
    path = "/v1/messages"

    def read(self, body: Mapping[str, Any], recorded: Mapping[str, ReplyTurn]) -> Request:
        refuse(body, thread="threads are not supported")
        system = text_of(body.get("system"), "system")
        sent = as_list(body.get("messages"), "messages")
        messages = [m for i, value in enumerate(sent) for m in _read_message(value, f"messages[{i}]")]
        return request_of(
            body,
            _READ,
            messages=(*((Message("system", system),) if system else ()), *messages),
            **tools_of(body, _read_tool, "tools: without input_schema"),
            max_tokens=integer(body, "max_tokens", 1),
            stop=texts(body, "stop_sequences"),
        )

    def answer(self, request: Request, replies: Sequence[ServedReply]) -> Mapping[str, Any]:
        turn = replies[0].turn
        return {**_base(request, turn), "content": _blocks(turn), **_ending(turn), "usage": _usage(turn)}

    def events(self, request: Request, replies: Sequence[ServedReply]) -> Iterator[Event]:
        turn = replies[0].turn
        begun = {**_base(request, turn), "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**begun, "usage": {**_usage(turn), "output_tokens": 0}})
        for i, block in enumerate(_blocks(turn)):
            empty, deltas = _streamed(block)
            yield _event("content_block_start", index=i, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=i, delta=delta)
            yield _event("content_block_stop", index=i)
        yield _event("message_delta", delta=_ending(turn), usage={"output_tokens": turn.end - turn.start})
        yield _event("message_stop")

    def error(self, status: int, message: str, field: str, code: str) -> Mapping[str, Any]:
        details: dict[str, Any] = {"type": _KINDS.get(status, "api_error"), "message": message}
        if field == "thread":  # on this code Anthropic's client resends the whole conversation
            details["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"type": "error", "error": details}

    def too_long(self, tokens: int, most: int) -> str:
        return f"prompt is too long: {tokens} tokens > {most} maximum"


def _read_message(value: object, where: str) -> Iterator[Message]:
    """Split one message of the API into several: a user's message there may also contain tool results."""
    message = as_object(value, where)
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ChatError(f"{where}.role", role, "must be user or assistant", "correct the role")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else as_list(content, f"{where}.content")
    if role == "assistant":
        yield _assistant(blocks, f"{where}.content")
        return
    collected = list[object]()
    for i, block in enumerate(blocks):
        at = f"{where}.content[{i}]"
        if as_object(block, at).get("type") != "tool_result":
            collected.append(block)
            continue
        if collected:
            yield Message(role, text_of(collected, f"{where}.content"))
            collected = []
        answers = as_text(block.get("tool_use_id"), f"{at}.tool_use_id")
        yield Message("tool", text_of(block.get("content"), f"{at}.content"), answers=answers)
    if collected or not blocks:
        yield Message(role, text_of(collected, f"{where}.content"))


def _assistant(blocks: Sequence[object], where: str) -> Message:
    collected, thoughts, calls, echo = list[object](), list[str](), list[ToolCall](), ""
    for i, value in enumerate(blocks):
        at = f"{where}[{i}]"
        block = as_object(value, at)
        if block.get("type") == "thinking":
            thoughts.append(as_text(block.get("thinking"), f"{at}.thinking"))
            echo = as_text(block.get("signature") or "", f"{at}.signature")
        elif block.get("type") == "tool_use":
            arguments = canonical_json(json.dumps(as_object(block.get("input"), f"{at}.input")))
            name = as_text(block.get("name"), f"{at}.name")
            calls.append(ToolCall(as_text(block.get("id") or "", f"{at}.id"), name, arguments))
        elif block.get("type") != "redacted_thinking":
            collected.append(block)
    text = text_of(collected, where)
    return Message("assistant", text, tuple(calls), "".join(thoughts) if thoughts else None, echo=echo)


def _read_tool(value: object, where: str) -> dict[str, Any] | None:
    """A tool definition; None for Anthropic's own tools, which have no schema."""
    given = as_object(value, where)
    if "input_schema" not in given:
        return None
    return tool(given.get("name"), given.get("description"), given.get("input_schema"), where)


def _blocks(turn: ReplyTurn) -> list[dict[str, Any]]:
    """Content blocks of a reply. The signature contains the turn's name, so a copy identifies the turn."""
    reply, blocks = turn.reply, list[dict[str, Any]]()
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": reply.echo})
    if reply.text or not reply.calls:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)})
    return blocks


def _object(arguments: str) -> dict[str, Any]:
    """Arguments as an object, as the API requires. Other JSON is put below a private key that never matches a recorded
    call."""
    found = parsed_json(arguments, otherwise=arguments)
    return found if isinstance(found, dict) else {"arguments": found}


def _streamed(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block without content, and the deltas that follow."""
    if block["type"] == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    written = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    return {**block, "input": {}}, [written]


def _base(request: Request, turn: ReplyTurn) -> dict[str, Any]:
    return {"id": f"msg_{turn.reply.echo}", "type": "message", "role": "assistant", "model": request.model}


def _ending(turn: ReplyTurn) -> dict[str, Any]:
    if turn.finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if turn.reply.calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    reason = "stop_sequence" if turn.stopped else "end_turn"
    return {"stop_reason": reason, "stop_sequence": turn.stopped or None}


def _usage(turn: ReplyTurn) -> dict[str, int]:
    return {"input_tokens": turn.start, "output_tokens": turn.end - turn.start}


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}
