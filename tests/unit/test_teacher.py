"""A served teacher: what is asked of it, where its log-probs go, and what happens when it fails."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mslime.backends.sglang.client import EngineClient, EngineDied
from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.flags import server_fields
from mslime.backends.sglang.generating import ScoreRequest, parse_scores
from mslime.backends.sglang.handshake import connect_teacher
from mslime.config.base import ENGINE_TAGS
from mslime.config.errors import ConfigError, EngineError
from mslime.config.loader import build
from mslime.config.model_facts import ModelFacts
from mslime.config.resolved import teacher_spec
from mslime.config.schema import DeadlineConfig, RunConfig
from mslime.data.sample import Group, Sample, check_invariants
from mslime.rollout.rewards.scorer import TRIES, ServedTeacher
from mslime.rollout.state import pack_groups, unpack_groups
from mslime.run.assemble import assemble
from tests.fixtures.columns import InMemory
from tests.fixtures.model_facts import model_facts
from tests.unit.fake_engine import FakeEngine
from tests.unit.rollout_fakes import (
    FakeSlowEngine,
    FakeTeacher,
    FakeTokenizer,
    make_service,
    publish,
    run_config,
    short,
)

MODEL = model_facts(300)


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def config(**sections: Any) -> RunConfig:
    return build({"model": {"path": "student"}, "data": {"prompts": ["p.jsonl"]}, **sections})


# ------------------------------------------------------------------------------------------------- configuration

TAUGHT = {"algorithm": {"opd_coef": 1.0}}


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"teacher": {"urls": ["http://t"]}}, "teacher.urls"),
        ({"teacher": {"path": "t"}}, "teacher.path"),
        ({**TAUGHT}, "model.teacher_path"),
        ({**TAUGHT, "teacher": {"urls": ["http://t"], "path": "t"}}, "teacher.path"),
        ({**TAUGHT, "teacher": {"path": "t"}, "model": {"path": "s", "teacher_path": "t"}}, "model.teacher_path"),
        ({**TAUGHT, "teacher": {"urls": ["http://t"]}, "rollout": {"temperature": 0.7}}, "rollout.temperature"),
        ({**TAUGHT, "teacher": {"path": "t"}, "rollout": {"top_p": 0.9, "top_k": 50}}, "rollout.top_k"),
        ({**TAUGHT, "teacher": {"urls": ["http://t/"]}, "sglang": {"urls": ["http://t"]}}, "teacher.urls"),
        ({**TAUGHT, "teacher": {"path": "t", "tp_size": 16}, "cluster": {"device": "cuda"}}, "teacher.tp_size"),
        ({**TAUGHT, "teacher": {"path": "t", "model_path": "u"}}, "teacher.model_path"),
        ({**TAUGHT, "teacher": {"path": "t", "quantisation": "fp8"}}, "teacher.quantisation"),
    ],
)
def test_a_teacher_is_named_once_goes_with_its_coefficient_and_scores_the_whole_vocabulary_at_temperature_one(
    sections: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    assert caught.value.field == field and caught.value.hint


def test_a_teacher_in_the_trainer_scores_at_any_temperature_and_over_supports() -> None:
    held = {"path": "s", "teacher_path": "t"}
    assert not config(model=held, rollout={"temperature": 0.7}, **TAUGHT).teacher.serves
    assert not config(model=held, rollout={"top_k": 50}, **TAUGHT).teacher.serves
    assert config(teacher={"urls": "http://t"}, **TAUGHT).teacher.urls == ["http://t"]


def test_a_launched_teacher_runs_its_own_checkpoint_with_its_own_settings(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = {"path": str(tmp_path), "tp_size": 4, "quantization": "fp8"}
    student = {"path": "s", "tokenizer_path": "u"}
    run_ = config(teacher=settings, model=student, cluster={"device": "cuda"}, **TAUGHT)
    fields = server_fields(teacher_spec(run_), 0, "h", 1)
    assert fields["model_path"] == fields["tokenizer_path"] == str(tmp_path) and fields["quantization"] == "fp8"
    assert fields["tp_size"] == 4 and not fields["enable_return_routed_experts"]


# -------------------------------------------------------------------------------------------------------- scores


@given(n=st.integers(2, 40), start=st.integers(1, 39), seed=st.integers(0, 99))
def test_the_score_at_index_t_is_that_of_token_t(n: int, start: int, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, 300, n, np.int32)
    request = ScoreRequest("r", ids, min(start, n - 1))
    scores = parse_scores(request, FakeEngine().answer(request.payload()), 300)
    assert scores.dtype == np.float32
    assert scores.tolist() == [0.0 if t < request.start else -t for t in range(n)]


def spoil_first(pairs: list[Any]) -> None:
    pairs[0][0] = -1.0


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (list.pop, "3 log-probs for 4"),
        (lambda pairs: pairs.append([-1.0, 9, None]), "5 log-probs for 4"),
        (lambda pairs: pairs[2].__setitem__(1, 12), "other tokens"),
        (lambda pairs: pairs[2].__setitem__(1, 0), "other tokens"),
        (lambda pairs: pairs[2].__setitem__(0, float("nan")), "finite"),
        (lambda pairs: pairs[2].__setitem__(0, None), "finite|float"),
        (spoil_first, "first entry"),
    ],
)
def test_scores_that_do_not_add_up_are_refused(spoil: Callable[[list[Any]], object], why: str) -> None:
    request = ScoreRequest("r", [5, 6, 7, 8, 9])
    answer = FakeEngine().answer(request.payload())
    spoil(answer["meta_info"]["input_token_logprobs"])
    with pytest.raises((AssertionError, TypeError), match=why):
        parse_scores(request, answer, 300)


def test_the_last_id_of_the_vocabulary_comes_back_as_zero() -> None:
    request = ScoreRequest("r", [5, 299, 7])
    answer = FakeEngine().answer(request.payload())
    answer["meta_info"]["input_token_logprobs"][1][1] = 0  # what 0.5.23 does
    assert parse_scores(request, answer, 300).tolist() == [0, -1, -2]
    with pytest.raises(AssertionError, match="other tokens"):
        parse_scores(request, answer, 301)


def score(spoilt: dict[str, Any], ids: list[int], **deadlines: float) -> Any:
    async def work() -> Any:
        limits = DeadlineConfig.model_validate({"engine_request_s": 10, **deadlines})
        async with FakeEngine() as engine, EngineClient(engine.url, "teacher0", limits, MODEL) as asking:
            vars(engine).update(spoilt)
            return await asking.score(ScoreRequest("r", ids))

    return run(work())


def test_a_broken_connection_is_tried_again_and_a_dead_server_is_named() -> None:
    assert score({"drop_connections": 2}, [1, 2, 3]).tolist() == [0, -1, -2]
    with pytest.raises(EngineDied, match="teacher0"):
        score({"drop_connections": True}, [1, 2, 3])
    with pytest.raises(EngineDied, match="teacher0.*/generate.*no answer within 0.2 s"):
        score({"delay_s": 5.0}, [1, 2, 3], engine_request_s=0.2)


def test_a_wrong_count_and_a_foreign_id_name_the_server() -> None:
    with pytest.raises(EngineError, match="teacher0.*invalid answer.*3 log-probs for 2 tokens"):
        score({"scores_off": 1}, [1, 2, 3])
    with pytest.raises(EngineError, match="vocabulary of teacher0 .300 ids"):
        score({}, [1, 300, 3])


# ----------------------------------------------------------------------------------------- connecting to a teacher


def connected(**spoilt: Any) -> ModelFacts | None:
    async def work() -> ModelFacts | None:
        async with FakeEngine() as engine, EngineClient(engine.url, "teacher0") as client:
            vars(engine).update(spoilt)
            await connect_teacher(client, FakeTokenizer(), vocab_size=200, longest=20)
            return client.model

    return run(work())


def test_a_teacher_of_the_student_s_words_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 256}}))
    known = connected(info={"model_path": str(tmp_path), "max_req_input_len": 21})
    assert known is not None and known.vocab_size == 256
    elsewhere = connected(info={"model_path": "somewhere/else"})
    assert elsewhere is not None and elsewhere.vocab_size == FakeTokenizer.vocab_size


def test_a_teacher_of_other_words_or_with_too_little_room_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 199}))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"info": {"model_path": str(tmp_path)}}, "vocabulary of 199.*fewer token ids.*any of 200"),
        ({"tokens": lambda text: [ord(c) % 50 for c in text]}, "the student's tokenizer, but"),
        ({"info": {"max_req_input_len": 20}}, "at most 19 tokens.*sequences of 20 tokens"),
        ({"broken": {"/tokenize"}}, "cannot be compared.*told to fail"),
        ({"drop_connections": True}, "connection broke"),
        ({"scores_off": 2}, "invalid answer"),
    ]
    for spoilt, why in cases:
        with pytest.raises(EngineError, match=f"(?s)teacher0.*{why}"):
            connected(**spoilt)


# ------------------------------------------------------------------------------------------- retries of the service


def refusal() -> EngineError:
    return EngineError("teacher0", "HTTP 500", "told to refuse", "do not tell it")


def death() -> EngineDied:
    return EngineDied("teacher0", "/generate", "told to die", "do not tell it")


def finished(response: int = 3, untrained_tail: int = 2) -> Sample:
    sample = Sample.from_prompt(7, 0, [1, 2, 3])
    sample.extend([4] * response, log_probs=[-1.0] * response, versions=[(1, 0, response)], engine="e")
    sample.extend([9] * untrained_tail)
    return sample


def test_only_trained_tokens_are_scored_and_only_what_they_need_is_sent() -> None:
    engines = FakeTeacher()
    scores = run(ServedTeacher(engines).score(finished()))
    np.testing.assert_allclose(scores, [0, 0, 0, -0.03, -0.04, -0.05, 0, 0], rtol=1e-6)
    (request,) = engines.requests
    assert (len(request.input_ids), request.start, request.session_id) == (6, 3, "g7")
    assert not run(ServedTeacher(engines).score(finished(0))).any() and len(engines.requests) == 1


async def test_a_teacher_that_sleeps_finishes_what_it_scores_and_lets_the_rest_wait() -> None:
    class FakeSleeper(FakeTeacher):
        held, running = frozenset[str](ENGINE_TAGS), 0

        async def score(self, request: ScoreRequest) -> NDArray[np.float32]:
            assert self.held == set(ENGINE_TAGS), "nobody asks while it sleeps"
            self.running += 1
            await asyncio.sleep(0.05)
            self.running -= 1
            return await super().score(request)

        async def hold_memory(self, tags: Any) -> None:
            assert not self.running, "requests run"
            self.held = frozenset(tags)

    engines = FakeSleeper()
    teacher = ServedTeacher(engines)
    first = asyncio.create_task(teacher.score(finished()))
    await asyncio.sleep(0.01)
    await teacher.hold_memory([])
    assert first.done() or len(engines.requests) == 1
    waiting = [asyncio.create_task(teacher.score(finished())) for _ in range(3)]
    await asyncio.sleep(0.1)
    await teacher.hold_memory(("weights",))
    assert len(engines.requests) == 1 and not any(task.done() for task in waiting)
    await teacher.hold_memory(ENGINE_TAGS)
    await teacher.hold_memory([])  # before those that wait have gone on
    await asyncio.sleep(0.1)
    assert len(engines.requests) == 1
    await teacher.hold_memory(ENGINE_TAGS)
    assert all(scores.any() for scores in await asyncio.gather(first, *waiting)) and len(engines.requests) == 4


def test_refusals_are_tried_again_and_a_death_is_taken_over() -> None:
    engines = FakeTeacher([refusal(), death(), refusal()], servers=2)
    assert run(ServedTeacher(engines).score(finished())).any() and len(engines.requests) == 4
    assert len({r.rid for r in engines.requests}) == 4
    for failures, servers, seen in ((TRIES * [refusal()], 1, TRIES), ([death()], 1, 1)):
        engines = FakeTeacher(failures, servers)
        with pytest.raises(EngineError, match="teacher0"):
            run(ServedTeacher(engines).score(finished()))
        assert len(engines.requests) == seen


async def test_scores_of_a_group_share_a_server_and_leave_the_dead() -> None:
    async with FakeEngine() as left, FakeEngine() as right:
        pool = EnginePool([EngineClient(e.url, f"teacher{i}", model=MODEL) for i, e in enumerate((left, right))], 4)
        left.drop_connections = True
        await asyncio.gather(*(ServedTeacher(pool).score(finished()) for _ in range(6)))
        await pool.close()
        assert (len(pool), len(right.seen)) == (1, 6)


# ----------------------------------------------------------------------------------------------------- the service


async def test_every_sample_of_a_step_arrives_with_its_scores_in_the_shards(tmp_path: Path) -> None:
    settings, engine, teacher = run_config(tmp_path, over_sampling=2.0), FakeSlowEngine(short), FakeTeacher()
    service = make_service(settings, engine, teacher=ServedTeacher(teacher))
    for step in range(3):
        batch = await service.take(step)
        for sample in batch.samples:
            expected = np.where(sample.loss_mask, -np.arange(len(sample)) / 100, 0)
            assert sample.teacher_log_probs is not None
            np.testing.assert_allclose(sample.teacher_log_probs, expected.astype(np.float32))
        ((shard,),) = assemble(batch.groups, settings, service.version).shards
        assert shard.teacher_log_probs is not None
        position = np.concatenate([np.arange(n) for n in shard.lengths])
        wanted = np.where(shard.loss_mask, -position / 100, 0)
        np.testing.assert_allclose(shard.teacher_log_probs, wanted.astype(np.float32))
        await publish(service, engine, step + 1)
    assert len({(r.session_id, len(r.input_ids)) for r in teacher.requests}) == len(teacher.requests), "once each"


async def test_the_reward_and_the_teacher_work_on_a_response_at_the_same_time(tmp_path: Path) -> None:
    class FakeMeeting:
        """Scores when its counterpart works too, and never otherwise."""

        def __init__(self) -> None:
            self.came = asyncio.Event()
            self.other: FakeMeeting = self

        async def join(self) -> None:
            self.came.set()
            await asyncio.wait_for(self.other.came.wait(), 5)

    class FakeMeetingScorer(FakeMeeting):
        per_group = False

        async def score(self, sample: Sample) -> float:
            await self.join()
            return 1.0

    class FakeMeetingTeacher(FakeMeeting):
        async def score(self, sample: Sample) -> NDArray[np.float32]:
            await self.join()
            return np.zeros(len(sample), np.float32)

    scorer, teacher = FakeMeetingScorer(), FakeMeetingTeacher()
    scorer.other, teacher.other = teacher, scorer
    service = make_service(run_config(tmp_path), FakeSlowEngine(short), scorer, teacher=teacher)
    await service.take(0)


async def test_a_teacher_that_fails_ends_the_step_with_its_name_and_nothing_is_lost(tmp_path: Path) -> None:
    settings, engine = run_config(tmp_path), FakeSlowEngine(short)
    failing = make_service(settings, engine, teacher=ServedTeacher(FakeTeacher([death()])))
    with pytest.raises(EngineDied, match="teacher0"):
        await failing.take(0)
    await failing.drain()
    await failing.save(tmp_path / "state.npz")
    await failing.close()
    held = [s for g in failing.tracker.held() for s in g.samples]
    scored = sum(s.teacher_log_probs is not None for s in held)
    assert scored and all(s.response_length for s in held)
    asked, teacher = len(engine.requests), FakeTeacher()
    service = make_service(settings, engine, teacher=ServedTeacher(teacher))
    await service.load(tmp_path / "state.npz")
    batch = await service.take(0)
    assert all(s.teacher_log_probs is not None for s in batch.samples)
    unfinished = sum(not s.status.finished for s in held)
    assert len(engine.requests) - asked == unfinished, "a finished response was generated again"
    assert len(teacher.requests) == len(held) - scored, "a scored response was scored again"


async def test_groups_of_a_run_without_a_teacher_are_scored_before_they_are_trained(tmp_path: Path) -> None:
    settings, engine = run_config(tmp_path, max_staleness=1), FakeSlowEngine(short)
    before = make_service(settings, engine)
    await before.take(0)
    while len(before.tracker.accepted) < 4:
        await asyncio.sleep(0)
    await before.save(tmp_path / "state.npz")
    await before.close()
    asked, teacher = len(engine.requests), FakeTeacher()
    after = make_service(settings, engine, teacher=ServedTeacher(teacher))
    await after.load(tmp_path / "state.npz")
    batch = await after.take(1)
    assert all(s.teacher_log_probs is not None for s in batch.samples) and len(teacher.requests) >= 8
    assert {r.session_id for r in engine.requests[asked:]}.isdisjoint({f"g{g.group_id}" for g in batch.groups})
    await after.close()


# ------------------------------------------------------------------------------------------------------- the sample


def taught() -> Sample:
    sample = finished()
    sample.extend([4, 4], log_probs=[-1.0, -1.0], versions=[(2, 0, 2)], engine="e")
    sample.teacher_log_probs = run(ServedTeacher(FakeTeacher()).score(sample))
    sample.reward = 1.0
    return sample


@pytest.mark.parametrize(
    "spoil",
    [
        lambda scores: np.roll(scores, 1),
        lambda scores: np.roll(scores, -1),
        lambda scores: scores[:-1],
        lambda scores: -scores,
        lambda scores: scores.astype(np.float64),
        lambda scores: np.where(scores < 0, np.nan, scores).astype(np.float32),
    ],
)
def test_scores_that_are_shifted_or_no_log_probs_break_an_invariant(spoil: Callable[[Any], Any]) -> None:
    sample = taught()
    check_invariants(sample)
    sample.teacher_log_probs = spoil(sample.teacher_log_probs)
    with pytest.raises(AssertionError):
        check_invariants(sample)


def test_scores_go_with_the_tokens_they_are_of() -> None:
    masked, restarted, grown = taught(), taught(), taught()
    assert masked.mask_before(2) == 3
    check_invariants(masked)
    assert masked.teacher_log_probs is not None and np.count_nonzero(masked.teacher_log_probs) == 2
    restarted.restart()
    assert restarted.teacher_log_probs is None
    with pytest.raises(AssertionError, match="finished"):
        grown.extend([1])


def test_scores_survive_the_way_to_disk_beside_samples_without() -> None:
    plain, scored, other = finished(), taught(), taught()
    headers, arrays = pack_groups([Group(0, [plain, scored]), Group(1, [copy.deepcopy(plain), other])])
    back = [s for g in unpack_groups(headers, InMemory(arrays)) for s in g.samples]
    for before, after in zip([plain, scored, plain, other], back, strict=True):
        check_invariants(after)
        assert (before.teacher_log_probs is None) == (after.teacher_log_probs is None)
        if before.teacher_log_probs is not None and after.teacher_log_probs is not None:
            assert after.teacher_log_probs.dtype == np.float32
            np.testing.assert_array_equal(before.teacher_log_probs, after.teacher_log_probs)
    for header in (h for group in headers for h in group["samples"]):
        del header["taught"]  # as files were before teachers were served
    assert all(s.teacher_log_probs is None for g in unpack_groups(headers, InMemory(arrays)) for s in g.samples)
