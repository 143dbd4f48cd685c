"""Rewards of kind judge, and pools of reward servers: against servers on loopback that only pretend to be such."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from mslime.config.errors import RewardError
from mslime.data.sample import Sample
from mslime.rollout.rewards.servers import number_in
from tests.fixtures.least import refused
from tests.fixtures.reward_servers import JUDGE, FakeServer, scored


def sample(response: str, label: Any = "five", prompt: str = "2+3?", index: int = 0) -> Sample:
    s = Sample.from_prompt(4, index, [ord(c) for c in prompt], label)
    s.response = response
    return s


def says(*replies: object, asked: list[Any] | None = None) -> FakeServer:
    """A fake judge: one reply after the other, the last one for ever."""
    rest = list(replies)

    async def handler(request: web.Request) -> web.Response:
        if asked is not None:
            asked.append(await request.json())
        reply = rest.pop(0) if len(rest) > 1 else rest[0]
        return web.json_response({"choices": [{"message": {"content": reply}, "finish_reason": "stop"}]})

    return handler


def scores(fakes: Sequence[FakeServer], config: dict[str, Any], *samples: Sample, kind: str = "judge") -> list[Any]:
    return scored({"kind": kind, **config}, *samples, servers=fakes)


@pytest.mark.parametrize(
    "reply",
    [
        '{"score": 5}', 'Sure:\n```json\n{"score": 5}\n```\nDone.', '```JSON\n{"score": 5}\n```',
        '<think>{"score": 1}? No.</think>\n{"score": 5}', '{"score": 5}\n\nThanks.', '{"score": 5} {"why": "{"}',
        'Here: {"why": "a {brace} in text", "score": 5}',
    ],
)  # fmt: skip
def test_the_last_object_with_the_key_counts_whatever_stands_around_it(reply: str):
    assert number_in(reply, None, "score") == 5.0


@pytest.mark.parametrize("label", [2**64, [10**30]], ids=str)
def test_a_label_of_any_size_is_told_to_the_judge(label: object):
    asked: list[Any] = []
    assert scores([says("Score: 1", asked=asked)], {}, sample("x", label)) == [1.0]
    assert str(label) in asked[0]["messages"][0]["content"]


def test_a_judge_is_asked_the_filled_template_and_its_last_number_is_the_reward():
    asked: list[Any] = []
    config = {
        "model": "judge-7b",
        "system": "You grade.",
        "template": "Q: {prompt} A: {response} Right: {label} Say {score}.",
        "options": {"temperature": 0.0, "max_tokens": 9},
    }
    given = scores([says("Score: 3. No, Score: 4", asked=asked)], {"judge": config}, sample("it is {label}"))
    assert given == [4.0]
    assert asked == [
        {
            "model": "judge-7b", "temperature": 0.0, "max_tokens": 9,
            "messages": [{"role": "system", "content": "You grade."},
                         {"role": "user", "content": "Q: 2+3? A: it is {label} Right: five Say {score}."}],
        }
    ]  # fmt: skip


@pytest.mark.parametrize(("reply", "number"), [
    ('{"score": 7}', 7.0), ('Let me think.\n```json\n{"why": "x", "score": "0.5"}\n```', 0.5),
    ("seven", "answered without a JSON object"), ('{"points": 7}', "answered without the key 'score'"),
    ('{"score": [7]}', "answered [7], which is not a number"),
])  # fmt: skip
def test_the_number_may_be_a_field_of_a_json_object(reply: str, number: object):
    assert number_in(reply, None, "score") == number


@pytest.mark.parametrize(("reply", "message"), [
    ("no idea", "answered without a match of Score: "), ("Score: high", "answered 'high', which is not a number"),
    ("Score: 11", "11, outside the range 0 to 10"), ("Score: nan", "nan, outside the range 0 to 10"),
    (None, "sent no text (finish_reason 'stop')"),
])  # fmt: skip
def test_a_reply_without_its_number_is_an_error_of_the_sample_with_what_was_said(reply: object, message: str):
    config: dict[str, Any] = {"judge": {"range": [0, 10], "retries": 3, "options": {"temperature": 0.0}}}
    asked: list[Any] = []
    (error,) = scores([says(reply, asked=asked)], config, sample("x"))
    assert isinstance(error, RewardError) and message in error.rule and "127.0.0.1" in error.rule
    assert len(asked) == 1, "at temperature 0 it would say the same again"
    assert scores([says(reply)], {**config, "on_error": "zero"}, sample("x")) == [0.0]
    assert scores([says(reply)], {**config, "on_error": "drop"}, sample("x")) == [None]


def test_a_judge_that_is_sampled_is_asked_again_when_it_says_no_number():
    config = {"judge": {"options": {"temperature": 0.7}}}
    assert scores([says("hm", "Score: 2")], config, sample("x")) == [2.0]


async def broken(request: web.Request) -> web.Response:
    return web.Response(status=503, text="busy")


def test_an_answer_that_is_no_completion_is_named():
    async def other(request: web.Request) -> web.Response:
        return web.json_response({"error": "no such model"})

    (error,) = scores([other], {}, sample("x"))
    assert isinstance(error, RewardError) and "not a chat completion: " in error.rule and "no such model" in error.rule


def test_a_pool_shares_the_work_and_a_server_that_fails_costs_no_reward():
    counts = Counter[str]()

    def counted(name: str, fake: FakeServer) -> FakeServer:
        async def handler(request: web.Request) -> web.StreamResponse:
            counts[name] += 1
            await asyncio.sleep(0.01)
            return await fake(request)

        return handler

    fakes = [counted("a", says("Score: 1")), counted("b", says("Score: 1")), counted("broken", broken)]
    given = scores(fakes, {"judge": {"retries": 1}}, *(sample("x", index=i) for i in range(30)))
    assert given == [1.0] * 30
    assert counts["broken"] > 0, "it is in the pool"
    assert counts["a"] + counts["b"] == 30, "each sample was scored by one that works"
    assert min(counts["a"], counts["b"]) > 5, "by both of them"


def test_reward_models_may_be_a_pool_too():
    async def lengths(request: web.Request) -> web.Response:
        return web.json_response({"rewards": [len(r["response"]) for r in (await request.json())["samples"]]})

    assert scores([broken, lengths], {"http": {"retries": 1}}, sample("abc"), kind="http") == [3.0]


def test_at_most_so_many_requests_are_under_way():
    under_way = Counter[str]()

    async def slow(request: web.Request) -> web.StreamResponse:
        under_way["now"] += 1
        under_way["most"] = max(under_way["most"], under_way["now"])
        await asyncio.sleep(0.01)
        under_way["now"] -= 1
        return await says("Score: 1")(request)

    scores([slow, slow], {"judge": {"concurrency": 3}}, *(sample("x", index=i) for i in range(12)))
    assert under_way["most"] == 3


def test_a_silent_judge_is_given_up_after_its_limit():
    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(1)
        return web.Response()

    (error,) = scores([silent], {"timeout_s": 0.2, "judge": {"retries": 0}}, sample("x"))
    assert isinstance(error, RewardError) and "did not answer within 0.2 s" in error.rule


@pytest.mark.parametrize(("judge", "field", "rule"), [
    ({}, "judge.url", "must be set together with reward.kind: judge"),
    ({"url": []}, "judge.url", "must be set together"),
    ({"url": ["http://a", "b:80"]}, "judge.url", "is not a URL"),
    ({"template": None}, "judge.template", "needs a template"),
    ({"template": "Is {label} right?"}, "judge.template", "{response}"),
    ({"pattern": None}, "judge.pattern", "exactly one"),
    ({"field": "score"}, "judge.pattern", "exactly one"),
    ({"pattern": "("}, "judge.pattern", "regular expression"),
    ({"pattern": "Score"}, "judge.pattern", "has no group"),
    ({"range": [1, 0]}, "judge.range", "must be [lowest, highest]"),
    ({"options": {"n": 2}}, "judge.options", "mslime sets"),
    ({"auth_env": "my token"}, "judge.auth_env", "name of an environment variable"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused(judge: dict[str, Any], field: str, rule: str):
    whole = {"url": "http://a", "template": "{response}", "pattern": JUDGE["pattern"]} if judge else {}
    error = refused(reward={"kind": "judge", "judge": {**whole, **judge}})
    assert error.field == f"reward.{field}" and rule in error.rule


def test_another_kind_refuses_a_judge():
    assert refused(reward={"judge": {"url": "http://a"}}).field == "reward.judge.url"
