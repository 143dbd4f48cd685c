"""What engines and trainer say of a fixed text: when it counts as the same, and what follows when it is not."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mslime.backends.sglang.client import EngineClient, EngineDied
from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.generating import GenerateRequest, GenerateResult, ProbeRequest, parse_probe
from mslime.checks.resolve import resolve
from mslime.config.base import PauseMode
from mslime.config.errors import EngineError, WeightSyncError
from mslime.config.loader import build
from mslime.data.probe import (
    NEW_TOKENS,
    TEXT,
    ProbeDifferences,
    ProbeScores,
    RoutedRows,
    fitted,
    joined_routes,
    shard_of,
)
from mslime.data.routes import Routes
from mslime.data.tokenizer import load_tokenizer
from mslime.run.sharing import SeparateGpus
from mslime.run.weight_probe import WeightProbe
from tests.fixtures.model_facts import model_facts
from tests.fixtures.remote import fake_process
from tests.fixtures.tiny_models import make_tiny_qwen3_moe
from tests.unit.test_publisher import COMPARED, Fakes, connected, publisher_of

TOKENS = np.arange(10, 22, dtype=np.int32)  # 4 given, 8 added
LOG_PROBS = np.linspace(-3, -1, 12, dtype=np.float32)
ROUTES = np.random.default_rng(0).permuted(np.tile(np.arange(8), (12, 2, 1)), axis=-1)[:, :, :2]


def probed(log_probs: Any = LOG_PROBS, routes: Any = ROUTES, tokens: Any = TOKENS) -> ProbeScores:
    return ProbeScores(tokens, 4, np.asarray(log_probs, np.float32), routes)


def off(places: slice, by: float) -> ProbeScores:
    changed = LOG_PROBS.copy()
    changed[places] += by
    return probed(changed)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (probed(), ProbeDifferences(0.0, 1.0)),
        (probed(routes=ROUTES[:11, :, ::-1]), ProbeDifferences(0.0, 1.0)),  # no order; an engine's newest has none
        (probed(routes=(ROUTES + 1) % 8), ProbeDifferences(0.0, 0.0)),
        (probed(routes=None), ProbeDifferences(0.0, 1.0)),
        (off(slice(1, 4), -0.5), ProbeDifferences(0.5, 1.0)),
        (off(slice(4, 12), 0.25), ProbeDifferences(0.25, 1.0)),  # only those that an engine decodes
        (off(slice(4, 7), 9.0), ProbeDifferences(0.0, 1.0)),  # where rounding chose other experts
    ],
)
def test_differences(engine: ProbeScores, expected: ProbeDifferences) -> None:
    found = ProbeDifferences.between(engine, probed())
    assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-6)
    assert found.routes == pytest.approx(expected.routes, abs=0.1)


def test_half_of_the_routes_are_enough_and_no_number_is_not() -> None:
    assert not ProbeDifferences(0.001, 0.5).too_large(0.001)
    assert ProbeDifferences(0.0011, 1.0).too_large(0.001) and ProbeDifferences(0.0, 0.49).too_large(0.001)
    assert ProbeDifferences(float("nan"), 1.0).too_large(0.001)
    assert ProbeDifferences.between(off(slice(5, 6), float("nan")), probed()).too_large(1e9)


def test_the_first_token_is_nobodys_prediction() -> None:
    engine, trainer = (ProbeScores(TOKENS[:3], 2, np.asarray([first, -1, -2], np.float32)) for first in (9, 0))
    assert ProbeDifferences.between(engine, trainer).log_probs == 0


@pytest.mark.parametrize("other", [probed(tokens=TOKENS + 1), probed(routes=ROUTES[:, :1])])
def test_what_is_of_something_else_is_not_compared(other: ProbeScores) -> None:
    with pytest.raises(AssertionError):
        ProbeDifferences.between(probed(), other)


def test_routes_of_all_ranks_are_joined_and_none_may_be_missing() -> None:
    experts = ROUTES.astype(np.int16)
    even, odd = np.arange(0, 12, 2), np.arange(1, 12, 2)
    parts = [RoutedRows(rows, (layer,), experts[rows, column : column + 1])
             for rows in (odd, even) for column, layer in enumerate((3, 5))]  # fmt: skip
    assert np.array_equal(joined_routes(parts, 12), experts)
    with pytest.raises(AssertionError, match="no rank computed"):
        joined_routes(parts[:-1], 12)
    assert joined_routes([], 12) is None


@pytest.mark.parametrize(("longest", "tokens"), [(8, 0), (17, 0), (18, 0), (20, 2), (100, 42), (4096, 128)])
def test_the_text_takes_at_most_half_of_a_sequence(longest: int, tokens: int) -> None:
    found = fitted([*range(300), 7], vocab_size=200, longest=longest)
    assert found == [*range(200), 7][:tokens]


def test_a_shard_of_several_texts_trains_nothing() -> None:
    shard = shard_of([TOKENS, TOKENS[:5]])
    assert shard.micro_batches == ((0,), (1,)) and shard.lengths.tolist() == [12, 5] and not shard.loss_mask.any()
    assert shard.tokens[12:].tolist() == [10, 11, 12, 13, 14]


# ------------------------------------------------------------------------------------------------ the engine's answer


REQUEST = ProbeRequest("r", [3, 4, 5], version=7, want_routes=False)


def answer(**changes: Any) -> dict[str, Any]:
    ids = list(range(20, 20 + NEW_TOKENS))
    meta = {
        "finish_reason": {"type": "length"}, "weight_version": "7",
        "input_token_logprobs": [[None, 3, None], [-1.0, 4, None], [-2.0, 5, None]],
        "output_token_logprobs": [[-0.5, i, None] for i in ids],
        "weight_versions": [{"version": "7", "start": 0, "end": NEW_TOKENS}],
    } | changes  # fmt: skip
    return {"output_ids": ids, "text": "", "meta_info": meta}


def test_text_and_continuation_are_one_sequence() -> None:
    found = parse_probe(REQUEST, answer(), "e", model_facts())
    assert found.tokens.tolist() == [3, 4, 5, *range(20, 20 + NEW_TOKENS)] and found.given == 3
    assert found.log_probs.tolist() == [0, -1, -2, *[-0.5] * NEW_TOKENS]
    body = REQUEST.payload()
    assert body["logprob_start_len"] == 0 and body["extra_key"] and body["sampling_params"]["temperature"] == 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"weight_versions": [{"version": "6", "start": 0, "end": NEW_TOKENS}]}, r"weights of version \{6\}"),
        ({"input_token_logprobs": [[None, 3, None], [-1.0, 4, None]]}, "1 log-probs for 2 tokens"),
        ({"output_token_logprobs": []}, "0 log-probs for 8 tokens"),
    ],
)
def test_an_answer_that_does_not_add_up_is_no_answer(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        parse_probe(REQUEST, answer(**changes), "e", model_facts())


class FakeClient(EngineClient):
    """Writes down what it is asked; refuses when a test says so. Answers requests when `answered` is set."""

    def __init__(self, name: str, fails: EngineError | None = None) -> None:
        super().__init__(f"http://{name}", name)
        self.calls: list[str] = []
        self.fails = fails
        self.answered = asyncio.Event()

    async def resume(self) -> None:
        self.calls.append("resume")

    async def pause(self, mode: Any) -> None:
        self.calls.append(f"pause {mode}")

    async def flush_cache(self, patience_s: float = 0.0) -> None:
        self.calls.append("flush")

    async def abort(self, rid: str | None = None) -> None:
        self.calls.append("abort")

    async def begin_weight_update(self) -> None:
        self.calls.append("begin")

    async def end_weight_update(self) -> None:
        self.calls.append("end")

    async def probe(self, request: ProbeRequest) -> ProbeScores:
        self.calls.append("probe")
        if self.fails is not None:
            raise self.fails
        return probed()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await self.answered.wait()
        ids, log_probs = np.zeros(1, np.int32), np.zeros(1, np.float32)
        return GenerateResult(ids, log_probs, "length", ((7, 0, 1),), None, None, 0, "", self.name)


def test_engines_answer_between_two_pauses() -> None:
    refusal = EngineError("b", "r", "HTTP 400", "")
    clients = [FakeClient("a"), FakeClient("b", refusal)]

    async def main() -> tuple[dict[str, ProbeScores], list[str]]:
        pool = EnginePool(clients, 1)
        await pool.pause("in_place")
        return await pool.probe(REQUEST), [*pool.dead]

    found, dead = asyncio.run(main())
    assert [*found] == ["http://a"] and dead == ["b"]
    assert clients[0].calls == ["pause in_place", "resume", "probe", "pause in_place"]


KEPT_ON: dict[PauseMode, list[str]] = {"retract": ["flush", "resume", "probe"], "in_place": ["resume", "probe"]}
"""What an engine is asked that kept requests; they are prefilled anew on nothing that older weights computed."""


class Kept:
    """A pool of an engine that keeps a request through its pause, and of an idle one."""

    def __init__(self, mode: PauseMode) -> None:
        self.clients = [FakeClient("a"), FakeClient("b")]
        self.pool, self.mode = EnginePool(self.clients, 1), mode

    async def probed(self, fails: EngineError | None = None) -> asyncio.Task[GenerateResult]:
        """The request after a probe, which its engine has answered."""
        request = GenerateRequest("kept", [1], 4)
        asked = asyncio.create_task(self.pool.generate(request))
        await asyncio.sleep(0)
        await self.pool.pause(self.mode)
        self.clients[0].fails = fails
        assert {"http://a", "http://b"} - set(await self.pool.probe(REQUEST)) == ({"http://a"} if fails else set())
        self.clients[0].answered.set()
        await asyncio.sleep(0.01)
        return asked


@pytest.mark.parametrize("mode", KEPT_ON)
def test_what_an_engine_with_requests_answers_beside_a_probe_is_handed_out_when_engines_go_on(mode: PauseMode) -> None:
    async def main() -> Kept:
        kept = Kept(mode)
        asked = await kept.probed()
        assert not asked.done(), "handed out before the trainer has said what it thinks of the probe"
        await kept.pool.flush_cache()
        await kept.pool.resume()
        assert (await asked).engine == "a"
        assert (await kept.pool.generate(GenerateRequest("next", [1], 4))).engine == "a"
        return kept

    first, second = asyncio.run(main()).clients
    assert first.calls == [f"pause {mode}", *KEPT_ON[mode], "resume"]
    assert second.calls == [f"pause {mode}", "resume", "probe", f"pause {mode}", "flush", "resume"]


@pytest.mark.parametrize("mode", KEPT_ON)
def test_what_an_engine_answers_beside_a_probe_that_fails_is_lost_and_the_engine_is_not(mode: PauseMode) -> None:
    async def main() -> Kept:
        kept = Kept(mode)
        asked = await kept.probed()
        serving = await kept.pool.restart_update()
        assert serving.urls == ("http://a", "http://b") and not serving.gone
        with pytest.raises(EngineDied, match="weights that failed the probe"):
            await asked
        await kept.pool.resume()
        assert (await kept.pool.generate(GenerateRequest("next", [1], 4))).engine == "a"
        return kept

    first, second = asyncio.run(main()).clients
    rest = [f"pause {mode}", "abort", "end", "begin", "resume"]
    assert first.calls == [f"pause {mode}", *KEPT_ON[mode], *rest]
    assert second.calls == [f"pause {mode}", "resume", "probe", f"pause {mode}", *rest]


async def test_an_engine_with_requests_that_refuses_its_probe_is_left_out_with_what_it_answered() -> None:
    kept = Kept("retract")
    asked = await kept.probed(EngineError("a", "r", "HTTP 400", ""))
    with pytest.raises(EngineDied):
        await asked
    assert [*kept.pool.dead] == ["a"]


# ------------------------------------------------------------------------------------------------------- the decision


class Model:
    """The trainer: it knows the right answer to two texts, and what it says where its routers follow others."""

    def __init__(self, following: Any) -> None:
        self.asked: list[int] = []
        self.followed: list[Routes] = []
        self.following = following

    def probe(self, sequences: Any, routes: Routes | None = None) -> Any:
        self.asked.append(len(sequences))
        if routes is not None:
            self.followed.append(routes)
            return [(self.following, None) for _ in sequences], {"trainer 0": (1.0, 2.0)}
        return [(LOG_PROBS, ROUTES) for _ in sequences], {"trainer 0": (1.0, 2.0)}


def ask(found: dict[str, ProbeScores], trainers: Model | None = None, follows: bool = True) -> tuple[Any, Model]:
    rollouts = fake_process(SimpleNamespace(probe=lambda version: found))
    asked = trainers or Model(LOG_PROBS)
    facts = model_facts(moe_layer_ids=(3, 5), num_experts=8, top_k=2)
    probe = WeightProbe(rollouts, cast("Any", asked), 0.01, SeparateGpus(lambda: None), facts, follows=follows)
    return probe.ask(3), asked


def flipped(by: float = 0.02) -> ProbeScores:
    """An engine for which rounding chose another expert of the first token: all tokens after it differ."""
    routes = ROUTES[:11].copy()
    routes[0, 0, 0] = next(expert for expert in range(8) if expert not in routes[0, 0])
    return probed(off(slice(1, 12), by).log_probs, routes)


def test_an_engine_with_another_expert_is_compared_by_its_own_routes() -> None:
    engine = flipped()
    answered, trainers = ask({"a": engine, "b": probed(routes=ROUTES[:11])}, Model(engine.log_probs + 0.001))
    assert answered.metrics()["weights/probe_log_probs"] == pytest.approx(0.001, rel=1e-2)
    assert answered.metrics()["weights/probe_routes"] == pytest.approx(1 - 1 / 22)
    (routes,) = trainers.followed
    assert np.array_equal(routes.experts[:11], engine.routes) and routes.layer_ids == (3, 5)
    assert routes.mask.tolist() == [True] * 11 + [False], "the newest token has no route yet"
    assert trainers.asked == [1, 1], "those that agree are not asked about again"


@pytest.mark.parametrize(
    ("engine", "follows", "asked"),
    [
        (flipped(), True, [1, 1]),  # by its own routes it differs, too
        (flipped(), False, [1]),  # the trainer routes by itself
        (off(slice(1, 12), 0.02), True, [1]),  # the same experts: nothing is explained
        (replace(flipped(), routes=(ROUTES[:11] + 1) % 8), True, [1]),  # other experts altogether
        (replace(flipped(), routes=np.where(np.arange(11)[:, None, None] < 1, 9, ROUTES[:11])), True, [1]),  # no expert
        (replace(flipped(), routes=np.where(np.arange(11)[:, None, None] < 1, 7, ROUTES[:11])), True, [1]),  # one twice
    ],
)
def test_no_routes_excuse_an_engine_that_computes_something_else(
    engine: ProbeScores, follows: bool, asked: list[int]
) -> None:
    trainers = Model(LOG_PROBS)
    with pytest.raises(WeightSyncError, match="http://a: log-probs off by 0.0"):
        ask({"http://a": engine}, trainers, follows=follows)
    assert trainers.asked == asked


def asking(trainers: Model, answers: list[dict[str, ProbeScores]], memory: SeparateGpus) -> WeightProbe:
    """A probe after each of several syncs; what engines say each time comes when the trainer was asked."""
    facts = model_facts(moe_layer_ids=(3, 5), num_experts=8, top_k=2)
    rollouts = fake_process(SimpleNamespace(probe=lambda version: answers[version]))
    return WeightProbe(rollouts, cast("Any", trainers), 0.01, memory, facts, follows=True)


def test_the_trainer_scores_beside_the_engines_what_they_added_the_last_time() -> None:
    same, other = {"a": probed()}, {"a": probed(tokens=TOKENS + 1)}
    trainers = Model(LOG_PROBS)
    probe = asking(trainers, [same, same, other, other], SeparateGpus(lambda: None))
    found = [(probe.ask(version), [*trainers.asked]) for version in range(4)]
    assert [asked for _, asked in found] == [[1], [1, 1], [1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert all(answered is not None and answered.spans for answered, _ in found)


def test_what_was_scored_beside_the_engines_is_what_they_are_compared_with() -> None:
    trainers = Model(LOG_PROBS)
    probe = asking(trainers, [{"a": probed()}, {"a": off(slice(1, 12), 0.02)}], SeparateGpus(lambda: None))
    probe.ask(0)
    with pytest.raises(WeightSyncError, match="a: log-probs off by 0.02"):
        probe.ask(1)
    assert trainers.asked == [1, 1]


class OnSharedGpus(SeparateGpus):
    shared = True


@pytest.mark.parametrize(("memory", "both"), [(SeparateGpus, True), (OnSharedGpus, False)])
def test_the_two_are_at_work_at_the_same_time_except_on_shared_gpus(memory: type[SeparateGpus], both: bool) -> None:
    trainers, begun, seen = Model(LOG_PROBS), threading.Event(), list[bool]()
    probe = asking(trainers, [{"a": probed()}], memory(lambda: None))
    probe.ask(0)
    score = trainers.probe

    def scored(*asked: Any) -> Any:
        begun.set()
        return score(*asked)

    def answered(_: int) -> dict[str, ProbeScores]:
        seen.append(begun.wait(10 if both else 0.2))
        return {"a": probed()}

    probe._trainers = cast("Any", SimpleNamespace(probe=scored))
    probe._rollouts = fake_process(SimpleNamespace(probe=answered))
    probe.ask(0)
    assert seen == [both]


def test_where_engines_fail_the_ranks_are_waited_for() -> None:
    trainers, ended = Model(LOG_PROBS), threading.Event()
    probe = asking(trainers, [{"a": probed()}], SeparateGpus(lambda: None))
    probe.ask(0)

    def slow(*_: Any) -> Any:
        time.sleep(0.3)
        ended.set()
        return [(LOG_PROBS, ROUTES)], {}

    def refuse(_: int) -> Any:
        raise EngineError("a", "r", "HTTP 400", "")

    probe._trainers = cast("Any", SimpleNamespace(probe=slow))
    probe._rollouts = fake_process(SimpleNamespace(probe=refuse))
    with pytest.raises(EngineError):
        probe.ask(1)
    assert ended.is_set()


def test_the_worst_engine_is_told_and_each_text_is_scored_once() -> None:
    other, mixed = probed(tokens=TOKENS + 1), ROUTES.copy()
    mixed[:3, 0] = (mixed[:3, 0] + 1) % 8
    found = {"a": off(slice(1, 12), 0.004), "b": probed(routes=None), "c": other, "d": other, "e": probed(routes=mixed)}
    answered, trainers = ask(found)
    assert trainers.asked == [2]
    assert answered.metrics()["weights/probe_log_probs"] == pytest.approx(0.004, rel=1e-3)
    assert answered.metrics()["weights/probe_routes"] == 1 - 3 / 24 and answered.metrics()["weights/probe_seconds"] > 0


def test_nothing_is_asked_where_no_engine_answers() -> None:
    answered, trainers = ask({})
    assert answered is None and trainers.asked == []


def test_all_engines_that_say_something_else_are_named() -> None:
    wrong = {"http://a:1": off(slice(4, 12), 0.02), "http://b:1": probed(), "http://c:1": probed(routes=7 - ROUTES)}
    with pytest.raises(WeightSyncError, match="version 3") as caught:
        ask(wrong)
    told = str(caught.value)
    assert "http://a:1: log-probs off by 0.02" in told and "http://c:1: log-probs off by 0" in told
    assert "http://b:1" not in told and "weights.probe_tolerance" in told


# --------------------------------------------------------------------------------------------------- what a sync does


def different(*names: str) -> WeightSyncError:
    return WeightSyncError("weights.probe", "; ".join(f"http://{name}: off" for name in names), "is off", "look")


def delivered(there: list[Any], outcomes: list[Any], proven: str = "abc") -> tuple[Fakes, Any]:
    """One sync; `outcomes` of its probes, None or an error."""
    fakes = Fakes(there, [None] * 9)
    publisher = publisher_of(fakes)
    publisher._proven = frozenset(f"http://{name}" for name in proven)
    left = iter(outcomes)

    def probe(version: int) -> Any:
        fakes.calls.append(f"probe {version}, {fakes.ends.pop(0)}, {fakes.ends.pop(0)}")
        if (error := next(left)) is not None:
            raise error
        return "answered"

    publisher._probe = SimpleNamespace(ask=probe)  # type: ignore[assignment]
    publisher.connect("g0")
    fakes.calls.clear()
    return fakes, publisher.send(0, False)


PROBED = "probe 0, end, stamp 0"


def test_a_probe_follows_the_version() -> None:
    fakes, sent = delivered(["abc"], [None])
    assert fakes.calls == ["begin", "send 0", PROBED] and sent.probed == "answered"


def test_after_a_probe_that_fails_all_is_sent_and_compared_again() -> None:
    fakes, sent = delivered(["abc", "abc"], [different("b"), None])
    again = ["check", "leave", "again", "sending all weights again: http://b: off: is off"]
    assert fakes.calls == ["begin", "send 0", PROBED, *again, *connected("abc", 1), "send 0", COMPARED, PROBED]
    assert sent.repeats == 1


def test_an_engine_whose_probe_fails_twice_is_left_out() -> None:
    fakes, sent = delivered(["abc", "abc", "abc", "ac"], [different("b"), different("b"), None])
    assert "leave out http://b: http://b: off: is off" in fakes.calls and sent.repeats == 2


def test_a_run_that_begins_with_wrong_engines_ends() -> None:
    with pytest.raises(WeightSyncError, match="http://a: off"):
        delivered(["abc", "abc"], [different("a", "b", "c")], proven="")


def test_engines_that_cannot_be_compared_are_not_when_all_is_sent_again() -> None:
    fakes = Fakes(["abc", "abc"], [different("b"), None])
    publisher = publisher_of(fakes)
    publisher._config = build(
        {"model": {"path": "."}, "data": {"prompts": ["p.jsonl"]}, "weights": {"loader": "model"}}
    )
    publisher.connect("g0")
    assert publisher.send(0, True).compared is None and COMPARED not in fakes.calls


# -------------------------------------------------------------------------------------------------------------- a run


def test_tolerance_follows_the_dtypes(tmp_path: Path) -> None:
    model, prompts = make_tiny_qwen3_moe(tmp_path / "model"), tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a", "label": "b"}\n')

    def tolerance(**sections: Any) -> float:
        values = {"model": {"path": str(model)}, "data": {"prompts": [str(prompts)]},
                  "output_dir": str(tmp_path), "cluster": {"device": "cpu"}}  # fmt: skip
        return resolve(build({**values, **sections})).probe_tolerance

    assert tolerance() == 5e-4
    assert tolerance(sglang={"dtype": "bfloat16"}) == tolerance(megatron={"params_dtype": "bfloat16"}) == 0.25
    assert tolerance(weights={"probe_tolerance": 0.5}) == 0.5


def test_the_text_is_more_than_a_few_tokens(tmp_path: Path) -> None:
    assert len(load_tokenizer(make_tiny_qwen3_moe(tmp_path)).encode(TEXT, special_tokens=True)) > 64
