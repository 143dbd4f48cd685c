"""The server that agents speak to, with the unmodified clients of OpenAI and Anthropic, over a scripted engine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from mslime.config.errors import ConfigError, EngineError
from mslime.rollout.agents.app import ModelEndpoint, ModelServer, ServedRollout, ServerTimings
from tests.unit.test_chat_session import CALL, LIMITS, MORE, QUESTION, SYSTEM, TOOLS, Chat

ANTHROPIC_TOOLS: Any = [{"name": "add", "description": "adds", "input_schema": TOOLS[0]["function"]["parameters"]}]
RESPONSES_TOOLS: Any = [{"type": "function", "strict": False, **TOOLS[0]["function"]}]
THINK_AND_CALL = "<think>hm</think>" + CALL


class Served(Chat):
    """A session behind the server, and the clients."""

    server: ModelServer
    endpoint: ModelEndpoint
    session_: ServedRollout

    def openai(self, **given: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self.endpoint.openai_url, api_key=self.endpoint.key, **{"max_retries": 0, "timeout": 20, **given}
        )

    def anthropic(self, **given: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(
            base_url=self.endpoint.url, api_key=self.endpoint.key, **{"max_retries": 0, "timeout": 20, **given}
        )

    @asynccontextmanager
    async def post(self, path: str, **given: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Authorization": f"Bearer {self.endpoint.key}", **given.pop("headers", {})}
        async with aiohttp.ClientSession() as http, http.post(self.endpoint.url + path, headers=headers, **given) as r:
            yield r


def serve(
    work: Callable[[Served], Awaitable[None]], *texts: str, patience: ServerTimings | None = None, **given: Any
) -> None:
    async def run() -> None:
        chat = Served(*texts, **given)
        chat.server = ModelServer(patience=patience, max_body=1 << 20)
        chat.endpoint, chat.session_ = await chat.server.open(chat.session)
        try:
            await work(chat)
        finally:
            chat.engine.gate.set()
            await chat.server.close()
        chat.engine.check()

    asyncio.run(asyncio.wait_for(run(), 60))


def check_loop(chat: Served) -> None:
    """Two turns with a tool are one sequence, both trained."""
    a, b = chat.session.forest.turns
    assert b.parent is a and a.sample is b.sample and a.delivered and b.delivered
    assert a.sample.loss_mask.sum() == (a.end - a.start) + (b.end - b.start)
    assert b.reply.text == "three"


# ------------------------------------------------------------------------------------------------- chat completions


@pytest.mark.parametrize("dumped", [False, True], ids=["message object", "model_dump"])
def test_chat_completions_over_two_turns_with_a_tool(dumped: bool) -> None:
    async def work(chat: Served) -> None:
        client = chat.openai()
        messages: list[Any] = [SYSTEM, QUESTION]
        first = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS, temperature=0.3, seed=1)
        said = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls" and said.tool_calls and said.content is None
        assert json.loads(said.tool_calls[0].function.arguments) == {"a": 1, "flag": False}
        assert said.reasoning_content == "hm"  # type: ignore[attr-defined]
        messages += [said.model_dump() if dumped else said,
                     {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "3"}]  # fmt: skip
        second = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "three" and second.choices[0].finish_reason == "stop"
        assert second.usage is not None and second.usage.completion_tokens == len(chat.engine.saw[1][2])
        assert second.usage.prompt_tokens == len(chat.engine.saw[1][1])
        assert second.choices[0].token_ids == chat.engine.saw[1][2]  # type: ignore[attr-defined]
        check_loop(chat)
        assert chat.session.counts["ignored_fields"] == 2, "temperature and seed are the run's"

    serve(work, THINK_AND_CALL, "three")


def test_chat_completions_as_a_stream() -> None:
    async def work(chat: Served) -> None:
        client = chat.openai()
        messages: list[Any] = [SYSTEM, QUESTION]

        async def ask() -> tuple[dict[str, Any], str | None, Any]:
            said: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
            finish, usage = None, None
            stream = await client.chat.completions.create(
                model="m", messages=messages, tools=TOOLS, stream=True, stream_options={"include_usage": True}
            )
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    said["content"] += choice.delta.content or ""
                    said["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
                    for call in choice.delta.tool_calls or []:
                        if call.id:
                            said["tool_calls"].append({"id": call.id, "type": "function", "function": {
                                "name": call.function.name, "arguments": ""}})  # fmt: skip
                        said["tool_calls"][call.index]["function"]["arguments"] += call.function.arguments
            return said, finish, usage

        said, finish, usage = await ask()
        assert finish == "tool_calls" and usage.total_tokens == sum(map(len, chat.engine.saw[0][1:]))
        messages += [said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}]
        said, finish, _ = await ask()
        assert (said["content"], finish) == ("three", "stop")
        check_loop(chat)

    serve(work, THINK_AND_CALL, "three")


def test_several_replies_logprobs_and_stops() -> None:
    async def work(chat: Served) -> None:
        got = await chat.openai().chat.completions.create(
            model="m",
            messages=[QUESTION],
            n=2,
            logprobs=True,
            stop=[";"],
            max_completion_tokens=9,
            max_tokens=11,  # type: ignore[list-item]
        )
        assert [c.message.content for c in got.choices] == ["one", "two"]
        for choice, (_, _, said) in zip(got.choices, chat.engine.saw, strict=True):
            assert choice.logprobs is not None and choice.logprobs.content is not None
            tokens = choice.logprobs.content
            assert [t.logprob for t in tokens] == [-0.5] * len(said)
            assert "".join(t.token for t in tokens) == chat.rendering.renderer.spell(said)
        assert chat.engine.most == [9, 9], "what a client gives only shortens"
        assert [t.why for t in chat.session.forest.turns] == ["first", "new_conversation"]

    serve(work, "one;", "two;")


# ------------------------------------------------------------------------------------------------------ anthropic


def test_messages_over_two_turns_with_a_tool() -> None:
    async def work(chat: Served) -> None:
        client = chat.anthropic()
        system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
        asked: Any = {"model": "m", "max_tokens": 400, "system": system, "tools": ANTHROPIC_TOOLS}
        messages: list[Any] = [{"role": "user", "content": QUESTION["content"]}]
        first = await client.messages.create(messages=messages, **asked)
        assert [b.type for b in first.content] == ["thinking", "tool_use"] and first.stop_reason == "tool_use"
        call = first.content[1]
        assert call.type == "tool_use" and call.input == {"a": 1, "flag": False}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}]}]  # fmt: skip
        counted = await client.messages.count_tokens(model="m", messages=messages, tools=ANTHROPIC_TOOLS)
        assert counted.input_tokens > 0
        second = await client.messages.create(messages=messages, **asked)
        assert second.content[-1].text == "three" and second.stop_reason == "end_turn"  # type: ignore[union-attr]
        assert second.usage.output_tokens == len(chat.engine.saw[1][2])
        check_loop(chat)

    serve(work, THINK_AND_CALL, "three")


def test_messages_as_a_stream() -> None:
    async def work(chat: Served) -> None:
        client = chat.anthropic()
        messages: list[Any] = [{"role": "user", "content": QUESTION["content"]}]

        async def ask() -> Any:
            async with client.messages.stream(
                model="m", max_tokens=400, messages=messages, tools=ANTHROPIC_TOOLS
            ) as stream:
                return await stream.get_final_message()

        first = await ask()
        assert [b.type for b in first.content] == ["thinking", "tool_use"] and first.content[1].input["a"] == 1
        results = [{"type": "tool_result", "tool_use_id": first.content[1].id, "content": "3"}]
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        assert (await ask()).content[0].text == "three"
        check_loop(chat)

    serve(work, THINK_AND_CALL, "three")


def test_a_signature_names_the_turn_of_equal_replies() -> None:
    async def work(chat: Served) -> None:
        client = chat.anthropic()
        messages: list[Any] = [{"role": "user", "content": "q"}]
        replies = [await client.messages.create(model="m", max_tokens=400, messages=messages) for _ in range(2)]
        messages += [{"role": "assistant", "content": replies[0].content}, {"role": "user", "content": "more"}]
        await client.messages.create(model="m", max_tokens=400, messages=messages)
        a, _, c = chat.session.forest.turns
        assert c.parent is a, "not the newest"

    serve(work, "<think>a</think>x", "<think>a</think>x", "y", thinking="keep")


@pytest.mark.parametrize(
    ("text", "given", "reason", "sequence"),
    [
        ("one;two", {"stop_sequences": [";"]}, "stop_sequence", ";"),
        ("one two three", {"max_tokens": 3}, "max_tokens", None),
    ],
)
def test_why_a_message_ended_is_told(text: str, given: dict[str, Any], reason: str, sequence: str | None) -> None:
    async def work(chat: Served) -> None:
        got = await chat.anthropic().messages.create(
            **{"model": "m", "max_tokens": 400, "messages": [{"role": "user", "content": "q"}], **given}
        )
        assert (got.stop_reason, got.stop_sequence) == (reason, sequence)

    serve(work, text)


# ------------------------------------------------------------------------------------------------------- responses


@pytest.mark.parametrize("how", ["items", "previous_response_id", "stream"])
def test_responses_over_two_turns_with_a_tool(how: str) -> None:
    async def work(chat: Served) -> None:
        client = chat.openai()
        history: list[Any] = [{"role": "user", "content": QUESTION["content"]}]
        asked: Any = {"model": "m", "instructions": "be brief", "tools": RESPONSES_TOOLS}

        async def ask(**given: Any) -> Any:
            if how != "stream":
                return await client.responses.create(**given, **asked)
            async with client.responses.stream(**given, **asked) as stream:
                return await stream.get_final_response()

        first = await ask(input=history)
        assert [item.type for item in first.output] == ["reasoning", "function_call"] and first.status == "completed"
        call = first.output[1]
        answer = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        if how == "previous_response_id":
            second = await ask(input=[answer], previous_response_id=first.id)
        else:
            second = await ask(input=[*history, *first.output, answer])
        assert second.output_text == "three" and second.usage.output_tokens == len(chat.engine.saw[1][2])
        check_loop(chat)

    serve(work, THINK_AND_CALL, "three")


def test_items_of_two_replies_after_each_other_are_two_messages() -> None:
    from mslime.rollout.agents.responses import _merged

    items = [
        {"id": "rs_n0", "type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
        {"id": "msg_n0", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {"id": "rs_n1", "type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]},
        {"id": "fc_n1_0", "type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"id": "fc_n1_1", "type": "function_call", "call_id": "d", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
    ]
    first, second, result = _merged(items, {})
    assert (first.text, first.reasoning, first.echo) == ("x", "a", "n0")
    assert (len(second.calls), second.reasoning, second.echo) == (2, "b", "n1")
    assert (result.role, result.text, result.answers) == ("tool", "1", "c")


# ------------------------------------------------------------------------------------------------------ completions


def test_completions_of_a_text_go_on_from_the_recorded_tokens() -> None:
    async def work(chat: Served) -> None:
        client = chat.openai()
        first = await client.completions.create(model="m", prompt="hello ", logprobs=1)
        assert first.choices[0].text == "wor" and first.choices[0].logprobs is not None
        prompt = "hello wor<|im_end|>\nand then "
        second = await client.completions.create(model="m", prompt=prompt)
        a, b = chat.session.completions.turns
        assert b.parent is a and second.choices[0].text == "ld"
        assert chat.engine.saw[1][1][: a.end] == chat.engine.saw[0][1] + chat.engine.saw[0][2]
        third = await client.completions.create(model="m", prompt=prompt + "ld<|im_end|> edited", n=2)
        assert len(third.choices) == 2 and chat.session.reasons == {"first": 1, "sibling": 1}

    serve(work, "wor", "ld", "x", "y")


def test_completions_of_token_ids_go_on_from_the_recorded_tokens() -> None:
    async def work(chat: Served) -> None:
        client = chat.openai()
        ids = chat.engine.encode("hello ")
        first = await client.completions.create(model="m", prompt=ids)
        said = first.choices[0].token_ids  # type: ignore[attr-defined]
        await client.completions.create(model="m", prompt=[*ids, *said, *chat.engine.encode(" more")])
        await client.completions.create(model="m", prompt=[ids, [*ids, 5]])
        assert [t.why for t in chat.session.completions.turns] == [
            "first", "extends", "new_conversation", "new_conversation"
        ]  # fmt: skip

    serve(work, "wor", "ld", "x", "y")


@pytest.mark.parametrize(
    "ids", ["[5, -1]", "[5, true]", "[5, 1.5]", "[5, null]", f"[5, {1 << 31}]", f"[5, {1 << 63}]", f"[5, {10**30}]",
            f"[[5], [{1 << 31}]]", "[[true]]"],
)  # fmt: skip
def test_numbers_that_are_no_token_ids_are_refused(ids: str) -> None:
    async def work(chat: Served) -> None:
        async with chat.post("/v1/completions", data=f'{{"prompt": {ids}}}') as r:
            assert r.status == 400 and "token ids" in (await r.json())["error"]["message"]
        assert not chat.engine.samples

    serve(work, "x")


@pytest.mark.parametrize(
    ("prompts", "told"),
    [(1, "128 replies requested, 100 left"), (2000, "limit of 1024"),
     (20, "limit of 1024"), (7, "896 replies requested, 100 left")],
)  # fmt: skip
def test_more_replies_than_a_rollout_may_have_are_refused_before_anything_is_made(prompts: int, told: str) -> None:
    async def work(chat: Served) -> None:
        async with chat.post("/v1/completions", json={"prompt": ["a"] * prompts, "n": 128}) as r:
            assert r.status == 400 and told in (await r.json())["error"]["message"]
        assert not chat.engine.samples

    serve(work, "x")


# ------------------------------------------------------------------------------- waiting, leaving and asking again


PATIENCE_S = 4.0
"""Time-out of clients that must not run out of it: longer than a busy machine keeps a process from running."""


@pytest.mark.slow
def test_a_turn_that_waits_outlasts_the_clients_time_out() -> None:
    """The engines take new weights for longer than the clients would wait for a byte."""

    async def ask(chat: Served, client: str) -> str:
        said: Any = [{"role": "user", "content": client}]
        if client.startswith("openai"):
            made = chat.openai(timeout=PATIENCE_S)
            if "stream" in client:
                stream = await made.chat.completions.create(model="m", messages=said, stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in stream])
            return (await made.chat.completions.create(model="m", messages=said)).choices[0].message.content
        if client == "responses stream":
            async with chat.openai(timeout=PATIENCE_S).responses.stream(model="m", input=client) as stream:
                return (await stream.get_final_response()).output_text
        given = {"model": "m", "messages": said, "max_tokens": 100}
        if "stream" in client:
            async with chat.anthropic(timeout=PATIENCE_S).messages.stream(**given) as stream:
                return (await stream.get_final_message()).content[0].text
        return (await chat.anthropic(timeout=PATIENCE_S).messages.create(**given)).content[0].text

    clients = ("openai", "openai stream", "anthropic", "anthropic stream", "responses stream")

    async def work(chat: Served) -> None:
        chat.engine.gate.clear()
        tasks = {client: asyncio.create_task(ask(chat, client), name=client) for client in clients}
        done, _ = await asyncio.wait(tasks.values(), timeout=2.2 * PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        assert not done, done
        chat.engine.gate.set()
        assert await asyncio.gather(*tasks.values()) == ["x"] * len(clients)
        assert [turn.delivered for turn in chat.session.forest.turns] == [True] * len(clients)

    serve(work, *["x"] * len(clients), patience=ServerTimings(quiet=0.05, beat=0.05))


def test_11_12_a_marked_retry_joins_the_attempt_or_is_told_its_reply() -> None:
    async def work(chat: Served) -> None:
        chat.engine.gate.clear()
        client = chat.openai(timeout=0.5, max_retries=5)
        task = asyncio.create_task(client.chat.completions.create(model="m", messages=[QUESTION]))  # type: ignore[list-item]
        while chat.session.counts["joined_retries"] < 1:
            await asyncio.sleep(0)
        chat.engine.gate.set()
        assert (await task).choices[0].message.content == "x"
        assert len(chat.session.forest.turns) == 1 and chat.session.forest.turns[0].delivered
        body = json.dumps({"messages": [QUESTION]})
        for count, turns in (("0", 2), ("1", 2), ("0", 3)):
            async with chat.post("/v1/chat/completions", data=body, headers={"x-stainless-retry-count": count}) as r:
                assert r.status == 200
            assert len(chat.session.forest.turns) == turns

    serve(work, "x", "y", "z")


def test_a_marked_retry_with_another_body_is_sampled_anew() -> None:
    async def work(chat: Served) -> None:
        for i, body in enumerate((b'{"messages": [{"role": "user", "content": "q"}]}',
                                  b'{"messages":[{"role": "user", "content": "q"}]}')):  # fmt: skip
            async with chat.post("/v1/chat/completions", data=body, headers={"x-stainless-retry-count": str(i)}) as r:
                assert r.status == 200
        assert len(chat.session.forest.turns) == 2

    serve(work, "x", "y")


def test_14_a_client_that_left_before_the_reply_leaves_a_turn_that_is_not_trained() -> None:
    async def work(chat: Served) -> None:
        chat.engine.gate.clear()
        with pytest.raises(openai.APITimeoutError):
            await chat.openai(timeout=0.2).chat.completions.create(model="m", messages=[QUESTION])  # type: ignore[list-item]
        chat.engine.gate.set()
        while not chat.session.forest.turns:
            await asyncio.sleep(0)
        assert not chat.session.forest.turns[0].delivered
        await chat.server.end(chat.session_)
        await chat.close()
        assert not chat.engine.trained() and len(chat.engine.masked) == 1

    serve(work, "x")


def test_23_a_request_after_the_end_is_refused_once_for_all() -> None:
    async def work(chat: Served) -> None:
        await chat.server.end(chat.session_)
        client = chat.openai(max_retries=2)
        with pytest.raises(openai.BadRequestError, match="the rollout has ended") as told:
            await client.chat.completions.create(model="m", messages=[QUESTION])  # type: ignore[list-item]
        assert told.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(anthropic.BadRequestError, match="the rollout has ended"):
            await chat.anthropic().messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "q"}])

    serve(work)


@pytest.mark.parametrize("begun", [False, True], ids=["nothing was written", "blanks were written"])
@pytest.mark.parametrize("stream", [False, True])
def test_24_a_turn_under_way_at_the_end_is_refused_and_leaves_no_trace(begun: bool, stream: bool) -> None:
    async def work(chat: Served) -> None:
        chat.engine.gate.clear()

        async def ask() -> None:
            got = await chat.openai(max_retries=1).chat.completions.create(
                model="m",
                messages=[QUESTION],
                stream=stream,  # type: ignore[call-overload]
            )
            if stream:
                async for _ in got:
                    pass

        task = asyncio.create_task(ask())
        await chat.engine_waits(1)
        if begun:
            await asyncio.wait([task], timeout=0.2)
        await chat.server.end(chat.session_)
        with pytest.raises(openai.APIError, match="ended|has ended"):
            await task
        assert not chat.session.forest.turns and not any(s.loss_mask.any() for s in chat.engine.samples)

    serve(work, "x", patience=ServerTimings(quiet=0.02 if begun else 5, beat=0.02))


def test_an_engine_that_fails_is_told_as_503_and_the_clients_retry_is_answered() -> None:
    async def work(chat: Served) -> None:
        chat.engine.failures.append(EngineError("engine 0", "x", "died", "read its log"))
        got = await chat.openai(max_retries=1).chat.completions.create(model="m", messages=[QUESTION])  # type: ignore[list-item]
        assert got.choices[0].message.content == "y" and len(chat.session.forest.turns) == 1

    serve(work, "x", "y")


# -------------------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"{", 400, "is not valid JSON"),
        (b"[]", 400, "must be an object"),
        (b'{"messages": 3}', 400, "messages = '3': must be an array"),
        (b'{"messages": []}', 400, "must not end with an assistant message"),
        (b'{"messages": [{"role": "assistant", "content": "Sure"}]}', 400, "must not end with an assistant message"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400, "image_url"),
        (b'{"messages": [{"role": "user", "content": "q"}], "n": 0}', 400, "n = '0': must be a whole number"),
        (b'{"messages": [{"role": "user", "content": "q"}], "n": true}', 400, "n = 'True'"),
        (b'{"messages": [{"role": "user", "content": "q"}], "max_tokens": "9"}', 400, "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "q"}], "stop": [3]}', 400, r"stop[0]"),
        (b'{"messages": [{"role": "user", "content": "q"}], "stream": 1}', 400, "must be true or false"),
        (b'{"messages": [{"role": "user", "content": "q"}], "tools": [{}]}', 400, "tools[0].function"),
        (b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "is not valid JSON"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "is not valid JSON"),
        (b" " * (1 << 20) + b"{}", 413, "is larger than 1048576 bytes"),
    ],
)
def test_a_bad_request_is_refused_by_field_in_the_dialects_form(body: bytes, status: int, told: str) -> None:
    async def work(chat: Served) -> None:
        async with chat.post("/v1/chat/completions", data=body) as r:
            found = await r.json()
            assert r.status == status and told in found["error"]["message"] and "hint" in found["error"]["message"]
            assert r.headers["x-should-retry"] == "false"
        async with chat.post("/v1/messages", data=body if status == 413 else b'{"messages": [{"role": "x"}]}') as r:
            found = await r.json()
            assert r.status == status and found["type"] == "error" and found["error"]["message"]
        assert not chat.engine.samples

    serve(work, "x")


def test_a_number_of_a_call_beyond_64_bits_arrives_in_every_dialect() -> None:
    async def work(chat: Served) -> None:
        said = await chat.anthropic().messages.create(
            model="m", max_tokens=500, messages=[QUESTION], tools=ANTHROPIC_TOOLS  # type: ignore[list-item]
        )  # fmt: skip
        assert said.content[-1].input == {"a": 10**30}  # type: ignore[union-attr]

    serve(work, f'<tool_call>\n{{"name": "add", "arguments": {{"a": {10**30}}}}}\n</tool_call>')


def test_a_body_that_never_ends_is_given_up() -> None:
    async def work(chat: Served) -> None:
        async def endless() -> AsyncIterator[bytes]:
            yield b'{"messages": '
            await asyncio.Event().wait()

        async with chat.post("/v1/chat/completions", data=endless()) as r:
            assert r.status == 408 and "did not arrive" in (await r.json())["error"]["message"]

    serve(work, patience=ServerTimings(body=0.1))


@pytest.mark.parametrize("key", ["", "Bearer ", "Bearer wrong", "Bearer ключ"])
def test_another_key_is_refused(key: str) -> None:
    async def work(chat: Served) -> None:
        headers = {"Authorization": key.encode().decode("latin-1")} if key else {"Authorization": "x"}
        async with chat.post("/v1/chat/completions", json={"messages": [QUESTION]}, headers=headers) as r:
            assert r.status == 401 and r.headers["x-should-retry"] == "false"
        other = chat.endpoint.url.rsplit("/", 1)[0] + "/0123"
        async with aiohttp.ClientSession() as http, http.get(other + "/v1/models") as r:
            assert r.status == 404

    serve(work, "x")


def test_29_a_context_that_is_full_has_its_own_code_and_the_turns_stay() -> None:
    async def work(chat: Served) -> None:
        with pytest.raises(openai.BadRequestError) as told:
            await chat.openai(max_retries=2).chat.completions.create(model="m", messages=[QUESTION])  # type: ignore[list-item]
        assert told.value.code == "context_length_exceeded"

    serve(work, "x", room=5)


@pytest.mark.parametrize(
    ("path", "words"),
    [("/v1/chat/completions", r"^This model's maximum context length is 2\d tokens. However, your messages resulted in "
      r"\d+ tokens\.\nmessages"), ("/v1/messages", r"^prompt is too long: \d+ tokens > 2\d maximum\nmessages")],
)  # fmt: skip
@pytest.mark.parametrize("turns", [1, 2])
def test_a_full_context_is_told_in_the_words_that_clients_look_for(path: str, words: str, turns: int) -> None:
    """They shorten their history then, where they know these words."""

    async def work(chat: Served) -> None:
        said: list[Any] = [{"role": "user", "content": "q"}]
        for _ in range(turns - 1):
            async with chat.post(path, json={"max_tokens": 2, "messages": said}) as r:
                found = await r.json()
                reply = found["content"] if "content" in found else found["choices"][0]["message"]["content"]
            said += [{"role": "assistant", "content": reply}, {"role": "user", "content": "more and more " * 20}]
        said = said if turns == 2 else [{"role": "user", "content": "long and long " * 20}]
        async with chat.post(path, json={"max_tokens": 50, "messages": said}) as r:
            assert r.status == 400 and re.search(words, (await r.json())["error"]["message"])

    serve(work, "x", room=30, thinking="keep")


def test_what_holds_the_conversation_elsewhere_is_refused_by_name() -> None:
    async def work(chat: Served) -> None:
        question = {"messages": [{"role": "user", "content": "q"}], "max_tokens": 5}
        async with chat.post("/v1/messages", json={**question, "thread": {"type": "continue"}}) as r:
            error = (await r.json())["error"]
            assert r.status == 400 and error["details"]["error_code"] == "thread_unsupported_request"
        for path, field, value in (("responses", "conversation", "conv_1"), ("responses", "background", True),
                                   ("responses", "prompt", {"id": "x"}),
                                   ("chat/completions", "functions", [{}])):  # fmt: skip
            async with chat.post(f"/v1/{path}", json={**question, "input": "q", field: value}) as r:
                assert r.status == 400 and (await r.json())["error"]["param"] == field
        assert not chat.engine.samples

    serve(work, "x")


def test_items_of_ours_may_be_named_instead_of_sent() -> None:
    async def work(chat: Served) -> None:
        async def ask(items: list[Any]) -> dict[str, Any]:
            async with chat.post("/v1/responses", json={"input": items, "tools": RESPONSES_TOOLS}) as r:
                assert r.status == 200, await r.text()
                return await r.json()

        question = {"role": "user", "content": "1 and 2?"}
        first = await ask([question])
        named = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        call = next(item for item in first["output"] if item["type"] == "function_call")
        await ask([question, *named, {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}])
        check_loop(chat)
        for name in ("msg_other", "other", "fc_x_9", call["id"] + "7", 5, None):
            async with chat.post("/v1/responses", json={"input": [{"type": "item_reference", "id": name}]}) as r:
                assert r.status == 400 and "is not an item of this rollout" in (await r.json())["error"]["message"]

    serve(work, THINK_AND_CALL, "three")


def test_tools_that_are_no_functions_are_left_out_and_what_they_promise_is_counted_by_name() -> None:
    async def work(chat: Served) -> None:
        asked = {"messages": [QUESTION], "tools": [{"type": "custom", "custom": {"name": "x"}}, *TOOLS],
                 "response_format": {"type": "json_object"}, "seed": 3}  # fmt: skip
        async with chat.post("/v1/chat/completions", json=asked) as r:
            assert r.status == 200, await r.text()
        counts = chat.session.counts
        assert counts["ignored_fields"] == 3 and counts["ignored_response_format"] == counts["ignored_tools"] == 1
        assert chat.session.report()["rollout/chat/ignored_response_format"] == 1.0

    serve(work, "x")


def test_a_limit_is_told_to_the_agent() -> None:
    async def work(chat: Served) -> None:
        client = chat.openai(max_retries=2)
        await client.chat.completions.create(model="m", messages=[QUESTION])  # type: ignore[list-item]
        with pytest.raises(openai.BadRequestError, match=r"rollout.limits.turns = 1") as told:
            await client.chat.completions.create(model="m", messages=[MORE])  # type: ignore[list-item]
        assert told.value.code == "limit_reached"

    serve(work, "x", "y", limits=LIMITS.model_copy(update={"turns": 1}))


def test_fields_that_clients_send_beside_are_ignored_and_counted() -> None:
    async def work(chat: Served) -> None:
        async with chat.post("/v1/messages", json={
            "model": "claude", "max_tokens": 10, "messages": [{"role": "user", "content": "q"}], "temperature": 1,
            "thinking": {"type": "disabled"}, "context_management": {}, "metadata": {}, "output_config": {"x": "y"},
            "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        }) as r:  # fmt: skip
            assert r.status == 200, await r.text()
        assert chat.session.counts["ignored_fields"] == 6

    serve(work, "x")


def test_models_are_listed() -> None:
    async def work(chat: Served) -> None:
        assert [m.id async for m in chat.openai().models.list()] == [chat.endpoint.model]
        assert (await chat.openai().models.retrieve("org/any")).id == "org/any"

    serve(work)


def test_rollouts_at_one_server_do_not_see_each_other() -> None:
    async def work(chat: Served) -> None:
        other = Chat("y")
        endpoint, _ = await chat.server.open(other.session)
        assert endpoint.key != chat.endpoint.key and endpoint.url != chat.endpoint.url
        async with chat.post("/v1/chat/completions", json={"messages": [QUESTION]}) as r:
            assert r.status == 200
        client = openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=chat.endpoint.key, max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="m", messages=[QUESTION])  # type: ignore[list-item]
        assert len(chat.session.forest.turns) == 1 and not other.session.forest.turns

    serve(work, "x")


def test_an_address_that_cannot_be_listened_on_is_refused() -> None:
    async def work(chat: Served) -> None:
        port = int(chat.endpoint.url.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match=r"rollout.server = .*cannot listen on this address"):
            await ModelServer(port=port).open(chat.session)

    serve(work)


def test_a_token_of_the_run_begins_every_key() -> None:
    assert ServedRollout(Chat().session, "shared").key.startswith("shared.")
