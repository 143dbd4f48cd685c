"""Graders beside mathematics, several rewards with weights, served reward models, and what a configuration may say."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from aiohttp import web

from mslime.config.errors import ConfigError, RewardError
from mslime.config.reward import RewardConfig, ScoringConfig
from mslime.data.sample import Sample
from mslime.rollout.rewards.reward_kinds import exact, reward_kind
from mslime.rollout.rewards.scorer import RewardScorer
from mslime.rollout.rewards.servers import proxy_of
from mslime.rollout.step_metrics import score_metrics
from mslime_plugins.graders.kinds import chosen_letter, f1, letters
from tests.fixtures.least import refused
from tests.fixtures.reward_servers import scored

USER = "tests.unit.user_rewards"


def sample(response: str, label: Any = None, index: int = 0, **metadata: Any) -> Sample:
    s = Sample.from_prompt(4, index, [1, 2], label)
    s.response, s.metadata = response, metadata
    return s


def test_exact_match_takes_a_list_of_labels_as_alternatives():
    assert exact(" 12\n", ["11", 12]) == 1.0 and exact("13", ["11", 12]) == 0.0


CHOSEN = {
    r"\boxed{B}": "B", r"\boxed{\text{(c)}}": "C", r"\boxed{A} no, \boxed{D}": "D", r"\boxed{\textbf{(E)}\ 5}": "E",
    r"\boxed{}": "", "The answer is (C).": "C", "The correct answer is B": "B", "Answer: D": "D",
    "**Answer:** **A**": "A", "answer is option C": "C", "So the answer is: (b)": "B",
    "A) 5\nB) 6\nI choose...\nB": "B", "B": "B", "(B)": "B", "B. because": "B", "It must be (A), as (B) fails": "B",
    "The answer is a matter of taste": "", "no idea": "", "": "", "<think>The answer is A</think> The answer is B": "B",
    "Answer: $\\boxed{C}$": "C", "Answer is A. Wait, the answer is D.": "D", "the correct choice is E": "E",
    "答案：C": "C", "答案是C。": "C", "因此，正确答案为 C": "C", "所以选（b）。": "B",
}  # fmt: skip


@pytest.mark.parametrize("response", CHOSEN)
def test_the_chosen_letter_is_found(response: str):
    assert chosen_letter(response) == CHOSEN[response]
    if CHOSEN[response]:
        assert letters(response, f"({CHOSEN[response].lower()})") == 1.0
    assert letters(response, "J") == 0.0


def reference_f1(said: str, wanted: str) -> float:
    """As the SQuAD script does it, word by word."""
    import re
    import string

    def words(text: str) -> list[str]:
        text = "".join(c for c in text.lower() if c not in set(string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split()).split()

    p, g = words(said), words(wanted)
    if not p or not g:
        return float(p == g)
    common = sum((Counter(p) & Counter(g)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(p), common / len(g)
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(("response", "label", "share"), [
    ("我喜欢苹果和梨", "我喜欢苹果", 10 / 12), ("北京", "北京", 1.0), ("“Paris”", "Paris", 1.0),
    ("Paris, France", "Paris", 2 / 3),
])  # fmt: skip
def test_f1_takes_a_chinese_character_for_a_word_and_no_punctuation(response: str, label: str, share: float):
    assert f1(response, label) == pytest.approx(share)


def test_f1_is_squads_and_takes_the_best_of_several_labels():
    texts = ["the cat", "A cat sat.", "", "dog", "cat cat", "The Cat, sat on the mat!", "an", "sat cat"]
    for said in texts:
        for wanted in [t for t in texts if t]:
            assert f1(said, wanted) == pytest.approx(reference_f1(said, wanted), abs=1e-12), (said, wanted)
    assert f1("the cat", ["dog", "cat"]) == 1.0 and f1("<think>dog</think>cat", "cat") == 1.0


@pytest.mark.parametrize(("kind", "label"), [
    ("exact", None), ("exact", {"ground_truth": "5"}), ("exact", []), ("letters", "AB"), ("letters", 3),
    ("letters", ["A", "B"]), ("f1", None), ("math", None), ("answer_line", {}), ("exact", ""), ("f1", b"bytes"),
])  # fmt: skip
def test_labels_that_a_grader_cannot_use_are_errors_of_the_row(kind: str, label: object):
    found = reward_kind(kind, "reward")
    assert found is not None and found.label_problem(label)
    (error,) = scored({"kind": kind}, sample("5", label))
    assert isinstance(error, RewardError) and "label" in error.rule and "mslime check" in error.hint
    assert scored({"kind": kind, "on_error": "zero"}, sample("5", label)) == [0.0]


def test_a_label_is_not_asked_of_graders_that_need_none():
    assert [reward_kind(kind, "reward") for kind in ("custom", "http")] == [None, None]


PARTS = {
    "parts": [
        {"name": "right", "kind": "exact", "weight": 1.0},
        {"name": "words", "kind": "f1", "weight": 0.5},
        {"name": "length", "kind": "custom", "function": f"{USER}:length", "weight": -0.1},
    ]
}


def test_several_rewards_are_added_with_their_weights_and_reported_by_name():
    samples = [sample("a b", "a b"), sample("a c", "a b", 1)]
    assert scored(PARTS, *samples) == pytest.approx([1 + 0.5 - 0.3, 0 + 0.5 * f1("a c", "a b") - 0.3])
    assert samples[0].scores == {"reward/right/mean": 1.0, "reward/words/mean": 1.0, "reward/length/mean": 3.0}
    assert score_metrics(samples)["reward/right/mean"] == 0.5


def test_a_rollout_of_several_samples_has_one_vote_in_a_parts_mean():
    samples = [sample("x", index=i) for i in range(3)]
    samples[1].rollout_id = samples[2].rollout_id = 7
    for s, value in zip(samples, (1.0, 0.0, 0.0), strict=True):
        s.scores = {"reward/a/mean": value}
    samples[0].scores["user/b"] = 5.0
    assert score_metrics(samples) == {"reward/a/mean": 0.5, "user/b": 5.0}


def test_a_part_that_fails_counts_zero_when_errors_do_and_the_others_still_count():
    parts = {"parts": [{"name": "a", "kind": "exact"}, {"name": "b", "kind": "custom", "function": f"{USER}:moody"}]}
    s = sample("raise", "raise")
    assert scored({**parts, "on_error": "zero"}, s) == [1.0] and "KeyError" in s.error
    (error,) = scored(parts, sample("raise", "raise"))
    assert isinstance(error, RewardError) and f"{USER}:moody" in error.field
    assert scored({**parts, "on_error": "drop"}, sample("raise", "raise")) == [None]


def test_a_function_may_return_metrics_beside_its_reward():
    s = sample("abc", index=1)
    assert scored({"kind": "custom", "function": f"{USER}:with_metrics"}, s) == [3.0]
    assert s.scores == {"user/letters": 3.0, "user/odd": 1.0}


@pytest.mark.parametrize(("answer", "message"), [
    ("keys", "keys score"), ("missing", "without the key 'reward'"), ("names", "named 'a/b'"), ("values", "a = nan"),
    ("many", "returned 100 metrics"), ("list", "not a mapping"),
])  # fmt: skip
def test_metrics_that_cannot_be_logged_are_errors(answer: str, message: str):
    (error,) = scored({"kind": "custom", "function": f"{USER}:odd_answers"}, sample(answer))
    assert isinstance(error, RewardError) and message in error.rule


def test_names_of_metrics_are_bounded_over_a_run():
    results = scored({"kind": "custom", "function": f"{USER}:unbounded"}, *(sample("", index=i) for i in range(70)))
    assert any(isinstance(r, RewardError) and "64 at most" in r.rule for r in results)


# ------------------------------------------------------------------------------------------------------------- http


async def lengths(request: web.Request) -> web.Response:
    rows = (await request.json())["samples"]
    return web.json_response({"rewards": [len(r["response"]) for r in rows]})


def test_a_served_reward_model_scores_in_batches_and_each_sample_gets_its_own():
    sizes: list[int] = []

    async def handler(request: web.Request) -> web.Response:
        sizes.append(len((await request.json())["samples"]))
        return await lengths(request)

    samples = [sample("x" * i, "label", i, source="m") for i in range(50)]
    assert scored({"http": {"batch_size": 8}}, *samples, servers=[handler]) == list(range(50))
    assert sum(sizes) == 50 and max(sizes) == 8 and len(sizes) <= 12


def test_the_server_sees_prompt_label_and_metadata_and_the_token_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.headers.get("Authorization"), (await request.json())["samples"]))
        return web.json_response([{"reward": 2.0, "metrics": {"helpful": 0.5}}])

    monkeypatch.setenv("REWARD_TOKEN", "geheim")
    s = sample("r", ["a", "b"], source="m")
    assert scored({"http": {"auth_env": "REWARD_TOKEN"}}, s, servers=[handler]) == [2.0]
    assert seen == [
        ("Bearer geheim", [{"prompt": None, "response": "r", "label": ["a", "b"], "metadata": {"source": "m"}}])
    ]
    assert s.scores == {"user/helpful": 0.5}


@pytest.mark.parametrize("value", [2**64, -(10**30), [10**30], "\ud800", {1: 2}], ids=ascii)
def test_what_a_row_may_hold_is_sent_as_it_is(value: Any):
    """Integers beyond 64 bits, half a surrogate pair, keys that are no text: JSON has them all."""
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        rows = json.loads(await request.read())["samples"]
        seen.extend(row["metadata"]["value"] for row in rows)
        return web.json_response([1.0] * len(rows))

    samples = [sample("a", "x", value=value), sample("b", "x", 1, value=3)]
    assert scored({}, *samples, servers=[handler]) == [1.0, 1.0]
    assert seen == [{"1": 2} if isinstance(value, dict) else value, 3]


def test_a_row_that_no_json_holds_is_an_error_of_its_samples():
    """An integer of more digits than Python writes; and nobody waits for ever, or is cancelled."""
    assert scored({"on_error": "zero"}, sample("a", "x", value=10**5000), servers=[lengths]) == [0.0]
    (error,) = scored({}, sample("a", "x", value=10**5000), servers=[lengths])
    assert isinstance(error, RewardError) and "cannot be written as JSON" in str(error)


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("https://judge.example.com/v1", "http://proxy:1"), ("http://judge.example.com/v1", "http://proxy:2"),
        ("http://127.0.0.1:5/", None), ("http://[::1]:5/", None), ("http://10.1.2.3/", None),
        ("http://judge:80/", None), ("https://inside.example.org/", None),
    ],
)  # fmt: skip
def test_a_server_beyond_the_own_network_is_asked_through_the_proxy(
    url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
):
    for name, value in (
        ("https_proxy", "http://proxy:1"),
        ("http_proxy", "http://proxy:2"),
        ("no_proxy", "example.org"),
    ):
        monkeypatch.setenv(name, value)
    assert proxy_of(url) == proxy


def test_a_reward_server_is_really_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch):
    """A request to a proxy names the whole URL."""
    asked = list[str]()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readline()).decode().split()[1])
        writer.write(b"HTTP/1.1 418 I'm a teapot\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        http = {"url": "http://rewards.example/score", "retries": 0}
        scorer = RewardScorer(RewardConfig.model_validate({"kind": "http", "http": http}))
        await scorer.start()
        with pytest.raises(RewardError, match="418"):
            await scorer.score(sample("x", "y"))
        await scorer.close()
        server.close()

    asyncio.run(asyncio.wait_for(work(), 60))
    assert set(asked) == {"http://rewards.example/score"}


def test_a_busy_server_is_asked_again():
    times = Counter[str]()

    async def handler(request: web.Request) -> web.Response:
        times["asked"] += 1
        return web.Response(status=503, text="busy") if times["asked"] < 3 else await lengths(request)

    assert scored({"http": {"retries": 3}}, sample("abc"), servers=[handler]) == [3.0] and times["asked"] == 3


@pytest.mark.parametrize(("status", "body", "message", "asked"), [
    (503, "busy", "answered HTTP 503: 'busy'", 2), (404, "where?", "answered HTTP 404", 1),
    (200, "no json", "sent invalid JSON", 1), (200, "[1, 2]", "answered 2 rewards to 1 samples", 1),
    (200, '{"reward": 1}', "to 1 samples", 1), (200, '["1"]', "not a number", 1),
    (200, '{"rewards": [NaN]}', "sent invalid JSON", 1), (200, '{"rewards": [null]}', "not a number", 1),
    (302, "", "answered HTTP 302", 1),
])  # fmt: skip
def test_answers_that_are_no_rewards_are_errors_that_name_the_server(status: int, body: str, message: str, asked: int):
    times = Counter[str]()

    async def handler(request: web.Request) -> web.Response:
        times["asked"] += 1
        return web.Response(status=status, text=body)

    (error,) = scored({"http": {"retries": 1}}, sample("abc"), servers=[handler])
    assert isinstance(error, RewardError) and message in error.rule
    assert times["asked"] == asked
    assert scored({"http": {"retries": 0}, "on_error": "zero"}, sample("abc"), servers=[handler]) == [0.0]


def test_a_silent_server_is_given_up_after_its_limit():
    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(1)
        return web.Response()

    (error,) = scored({"timeout_s": 0.3, "http": {"retries": 1}}, sample("abc"), servers=[handler])
    assert isinstance(error, RewardError) and "did not answer within 0.3 s" in error.rule


def test_a_server_that_is_not_there_is_named():
    config = {"kind": "http", "http": {"url": "http://127.0.0.1:9/score", "retries": 0}}
    (error,) = scored(config, sample("abc"))
    assert isinstance(error, RewardError) and "http://127.0.0.1:9/score cannot be reached" in error.rule


def test_an_endless_body_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    from mslime.rollout.rewards import servers

    monkeypatch.setattr(servers, "MOST_BYTES", 10_000)

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(100_000):
            await response.write(b"1" * 1000)
        return response

    (error,) = scored({"http": {"retries": 0}}, sample("abc"), servers=[handler])
    assert isinstance(error, RewardError) and "sent more than 10000 bytes" in error.rule


def test_a_missing_token_is_known_before_generation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    config = {"kind": "http", "http": {"url": "http://127.0.0.1:9/", "auth_env": "REWARD_TOKEN"}}
    with pytest.raises(ConfigError, match="this environment variable is not set"):
        scored(config, sample("abc"))


# --------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(("reward", "field", "rule"), [
    ({"kind": "custom"}, "reward.function", "must be set together with reward.kind: custom"),
    ({"function": "a:b"}, "reward.function", "must be set together"),
    ({"kind": "custom", "function": "a.b"}, "reward.function", "module:function"),
    ({"kind": "http"}, "reward.http.url", "must be set together"),
    ({"kind": "http", "http": {"url": "localhost:80"}}, "reward.http.url", "is not a URL"),
    ({"kind": "http", "http": {"url": "http://x", "auth_env": "my token!"}}, "reward.http.auth_env", "environment"),
    ({"parts": [{"name": "a b"}]}, "reward.parts[0].name", "must consist of"),
    ({"parts": [{"name": "source"}]}, "reward.parts[0].name", "must consist of"),
    ({"parts": [{"name": "a"}, {"name": "a"}]}, "reward.parts[0].name", "two parts have this name"),
    ({"kind": "math", "parts": [{"name": "a"}]}, "reward.kind", "no effect with parts"),
    ({"parts": [{"name": "a"}, {"name": "b", "kind": "custom"}]}, "reward.parts[1].function", "must be set together"),
    ({"parts": [{"nam": "a"}]}, "reward.parts.0.nam", "unknown key"),
    ({"overlong": {"buffer_tokens": 1024}}, "reward.overlong.buffer_tokens", "must be below rollout.max_response"),
])  # fmt: skip
def test_rewards_that_make_no_sense_are_refused_by_field(reward: dict[str, Any], field: str, rule: str):
    error = refused(reward=reward)
    assert error.field == field and rule in error.rule


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a\nb", "x{y}"])
def test_names_of_held_out_sets_that_cannot_be_metrics_are_refused(name: str):
    error = refused(data={"prompts": ["x"], "eval_sets": [{"name": name, "path": "x.jsonl"}]})
    assert error.field == "data.eval_sets[0].name" and "must consist of" in error.rule


def test_the_reward_of_a_held_out_set_is_checked_like_the_runs():
    held_out = [{"name": "gpqa", "path": "x.jsonl", "reward": {"kind": "custom"}}]
    error = refused(data={"prompts": ["x"], "eval_sets": held_out})
    assert error.field == "data.eval_sets[0].reward.function"


def test_grading_mathematics_has_five_seconds_and_everything_else_thirty():
    assert [kind.limit_s for name in ("math", "answer_line") if (kind := reward_kind(name, "reward"))] == [5, 5]
    assert [ScoringConfig(kind=kind).limit_s for kind in ("custom", "http")] == [30, 30]
    assert ScoringConfig(kind="http", timeout_s=1).limit_s == 1
