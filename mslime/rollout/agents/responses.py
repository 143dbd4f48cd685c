"""OpenAI's responses: POST /v1/responses. Each reply consists of several items, in responses and in the history."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mslime.rollout.agents.messages import (
    ROLES,
    ChatError,
    Message,
    ToolCall,
    as_list,
    as_object,
    as_text,
    canonical_json,
    text_of,
)
from mslime.rollout.agents.openai_chat import OpenAIErrors, token_log_probs
from mslime.rollout.agents.requests import Event, Request, ServedReply, integer, refuse, request_of, tool, tools_of
from mslime.rollout.agents.session import ReplyTurn

_READ = ("input", "instructions", "tools", "max_output_tokens", "stream", "model", "previous_response_id", "include")


class Responses(OpenAIErrors):
    path = "/v1/responses"

    def read(self, body: Mapping[str, Any], recorded: Mapping[str, ReplyTurn]) -> Request:
        """See `Dialect`. `previous_response_id` selects that conversation, with its instructions unless new ones are
        sent."""
        refuse(body, conversation="stored conversations are not supported", prompt="stored prompts are not supported",
               background="background replies are not supported")  # fmt: skip
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else as_list(given, "input")
        messages = [*_before(body.get("previous_response_id"), recorded), *_merged(items, recorded)]
        if (instructions := body.get("instructions")) is not None:
            text = as_text(instructions, "instructions")
            messages = [Message("system", text), *messages[1 if messages and messages[0].role == "system" else 0 :]]
        include = as_list(body.get("include"), "include")
        return request_of(
            body,
            _READ,
            messages=tuple(messages),
            **tools_of(body, _read_tool, "tools: other than functions"),
            max_tokens=integer(body, "max_output_tokens", 1),
            logprobs="message.output_text.logprobs" in include,
        )

    def answer(self, request: Request, replies: Sequence[ServedReply]) -> Mapping[str, Any]:
        served = replies[0]
        cut = served.turn.finish == "length"
        return _response(request, served, "incomplete" if cut else "completed", _items(served))

    def events(self, request: Request, replies: Sequence[ServedReply]) -> Iterator[Event]:
        for number, (kind, data) in enumerate(self._events(request, replies[0])):
            yield kind, {"type": kind, "sequence_number": number, **data}

    def _events(self, request: Request, served: ServedReply) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "response.created", {"response": _response(request, served, "in_progress", [])}
        for index, item in enumerate(_items(served)):
            at = {"item_id": item["id"], "output_index": index}
            yield "response.output_item.added", {"output_index": index, "item": _empty(item)}
            if item["type"] == "function_call":
                arguments = item["arguments"]
                yield "response.function_call_arguments.delta", {**at, "delta": arguments}
                done = {**at, "name": item["name"], "arguments": arguments}
                yield "response.function_call_arguments.done", done
            else:
                kind = {"message": "output_text", "reasoning": "reasoning_text"}[item["type"]]
                part = item["content"][0]
                at["content_index"] = 0
                yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
                logprobs = {"logprobs": part.get("logprobs") or []} if kind == "output_text" else {}
                yield f"response.{kind}.delta", {**at, "delta": part["text"], **logprobs}
                yield f"response.{kind}.done", {**at, "text": part["text"], **logprobs}
                yield "response.content_part.done", {**at, "part": part}
            yield "response.output_item.done", {"output_index": index, "item": item}
        answer = self.answer(request, [served])
        yield f"response.{answer['status']}", {"response": answer}


def _before(name: object, recorded: Mapping[str, ReplyTurn]) -> tuple[Message, ...]:
    if name is None:
        return ()
    turn = recorded.get(as_text(name, "previous_response_id").removeprefix("resp_"))
    if turn is None:
        raise ChatError("previous_response_id", name, "is not a response of this rollout", "send the whole input")
    return turn.messages()


def _merged(items: Sequence[object], recorded: Mapping[str, ReplyTurn]) -> Iterator[Message]:
    """Messages of a list of items. Consecutive items of the model (reasoning, text, calls) form one message."""
    current: Message | None = None
    for i, value in enumerate(items):
        message = _read_item(value, f"input[{i}]", recorded)
        if message is None:
            continue
        if message.role != "assistant":
            yield from [current] if current is not None else []
            current = None
            yield message
        elif current is None or _begins_another(current, message):
            yield from [current] if current is not None else []
            current = message
        else:
            current = _joined(current, message)
    if current is not None:
        yield current


def _begins_another(current: Message, more: Message) -> bool:
    """Whether the next item belongs to another reply: its turn has another name, or its order is impossible in one
    reply."""
    if current.echo and more.echo and current.echo != more.echo:
        return True
    return more.reasoning is not None and (bool(current.text) or bool(current.calls))


def _joined(current: Message, more: Message) -> Message:
    reasoning = current.reasoning if more.reasoning is None else (current.reasoning or "") + more.reasoning
    return replace(
        current,
        text=current.text + more.text,
        calls=current.calls + more.calls,
        reasoning=reasoning,
        echo=current.echo or more.echo,
    )


def _read_item(value: object, where: str, recorded: Mapping[str, ReplyTurn]) -> Message | None:
    item = as_object(value, where)
    kind = item.get("type", "message")
    if kind == "message":
        role = "system" if item.get("role") == "developer" else item.get("role")
        if role not in ROLES:
            raise ChatError(f"{where}.role", role, f"must be one of {', '.join(ROLES)}", "correct the role")
        return Message(role, text_of(item.get("content"), f"{where}.content"), echo=_echo(item))
    if kind == "reasoning":
        parts = [as_object(p, where) for p in as_list(item.get("content"), f"{where}.content")]
        text = "".join(as_text(p.get("text"), f"{where}.content.text") for p in parts)
        return Message("assistant", reasoning=text if parts else None, echo=_echo(item))
    if kind == "function_call":
        arguments = canonical_json(as_text(item.get("arguments") or "", f"{where}.arguments"))
        call = ToolCall(
            as_text(item.get("call_id") or "", f"{where}.call_id"),
            as_text(item.get("name"), f"{where}.name"),
            arguments,
        )
        return Message("assistant", calls=(call,), echo=_echo(item))
    if kind == "function_call_output":
        answers = as_text(item.get("call_id"), f"{where}.call_id")
        return Message("tool", text_of(item.get("output"), f"{where}.output"), answers=answers)
    if kind == "item_reference":
        return _named_item(item, where, recorded)
    raise ChatError(f"{where}.type", f"{kind!r:.80}", "item type is not supported (text or function)", "remove it")


def _named_item(item: Mapping[str, Any], where: str, recorded: Mapping[str, ReplyTurn]) -> Message:
    """The recorded item that a reference names."""
    turn, parts = recorded.get(_echo(item)), str(item.get("id")).split("_")
    kind, last = parts[0], parts[-1]
    if turn is not None and kind == "rs":
        return Message("assistant", reasoning=turn.reply.reasoning or "", echo=turn.reply.echo)
    if turn is not None and kind == "msg":
        return Message("assistant", turn.reply.text, echo=turn.reply.echo)
    if turn is not None and kind == "fc" and last.isdigit() and int(last) < len(turn.reply.calls):
        return Message("assistant", calls=(turn.reply.calls[int(last)],), echo=turn.reply.echo)
    raise ChatError(f"{where}.id", f"{item.get('id')!r:.80}", "is not an item of this rollout", "send the whole item")


def _echo(item: Mapping[str, Any]) -> str:
    """Name of the turn in the id of an item from here: ids are KIND_TURN or KIND_TURN_NUMBER."""
    name = item.get("id")
    return name.split("_")[1] if isinstance(name, str) and name.count("_") else ""


def _read_tool(value: object, where: str) -> dict[str, Any] | None:
    """A function definition; None for OpenAI's own tools."""
    given = as_object(value, where)
    if given.get("type") != "function":
        return None
    return tool(given.get("name"), given.get("description"), given.get("parameters"), where)


def _items(served: ServedReply) -> list[dict[str, Any]]:
    """Output items of a reply. Their ids contain the turn's name, so a copy identifies the turn."""
    reply, name, items = served.turn.reply, served.turn.reply.echo, list[dict[str, Any]]()
    if reply.reasoning:
        thought = {"type": "reasoning_text", "text": reply.reasoning}
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": [], "content": [thought]})
    if reply.text or not reply.calls:
        part: dict[str, Any] = {"type": "output_text", "text": reply.text, "annotations": []}
        if served.spelled:
            part["logprobs"] = token_log_probs(served)
        message = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**message, "content": [part]})
    for i, call in enumerate(reply.calls):
        called = {"id": f"fc_{name}_{i}", "type": "function_call", "call_id": call.id, "status": "completed"}
        items.append({**called, "name": call.name, "arguments": call.arguments})
    return items


def _empty(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item without content, for the start of a stream."""
    begun = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return {**item, "status": "in_progress", **begun}


def _response(
    request: Request, served: ServedReply, status: str, output: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    turn, over = served.turn, status != "in_progress"
    prompt, sampled = turn.start, turn.end - turn.start
    usage = {
        "input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled,
        "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    return {
        "id": f"resp_{turn.reply.echo}", "object": "response", "created_at": int(time.time()), "status": status,
        "model": request.model, "output": list(output), "parallel_tool_calls": True, "tool_choice": "auto",
        "tools": request.body.get("tools") or [], "instructions": request.body.get("instructions"),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "error": None, "metadata": {}, "usage": usage if over else None,
    }  # fmt: skip
