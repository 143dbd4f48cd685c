"""The rollout service on a real SGLang server: transformers scores every returned token again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.generating import end_ids
from mslime.config.data import EvalSetConfig
from mslime.config.schema import RunConfig
from mslime.data.sample import Sample, SampleStatus, check_invariants
from mslime.data.source import PromptSource
from mslime.data.tokenizer import HFTokenizer, load_tokenizer
from mslime.rollout.generation import EngineLimits
from mslime.rollout.rewards.scorer import RewardScorer
from tests.engines.conftest import SharedServer, cpu_run, serve
from tests.engines.reference import Reference, as_told, makers_of, scores, versions_of
from tests.fixtures.engine_calls import drain, load_beneath_the_cache, load_from_disk
from tests.fixtures.model_facts import model_facts
from tests.fixtures.service_of_one import ServiceOfOne
from tests.fixtures.tiny_models import make_tiny_qwen3_moe
from tests.unit import user_rollouts

DEADLINE_S = 240
MODEL = model_facts(320, 2048, 4, (0, 1, 2, 3), 8, 2)


@pytest.fixture(scope="module")
def tokenizer(sglang_server: SharedServer) -> HFTokenizer:
    return load_tokenizer(sglang_server.checkpoint)


@pytest.fixture(scope="module")
def reference(sglang_server: SharedServer) -> Reference:
    return Reference(sglang_server.checkpoint)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("checkpoints") / "other", seed=1)


@pytest.fixture
def fresh(sglang_server: SharedServer) -> Iterator[SharedServer]:
    """The shared server; idle, and with its own weights at version 0, before and after."""
    yield sglang_server

    async def calm() -> None:
        async with sglang_server.client() as client:
            await client.resume()
            await drain(client)

    asyncio.run(calm())
    sglang_server.restore()


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


def config_for(server: SharedServer, directory: Path, stop_ids: int = 12, **rollout: Any) -> RunConfig:
    """Responses of a random model end when one of `stop_ids` + 1 of its 320 tokens comes, so their lengths differ."""
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} + {i % 7} = ", "label": "x"}) + "\n" for i in range(60)))
    settings = {"groups_per_step": 3, "group_size": 3, "max_response_tokens": 200, **rollout}
    settings["stop_token_ids"] = list(range(32, 32 + stop_ids))
    return cpu_run(
        server.checkpoint,
        data={"prompts": [str(path)], "shuffle": False},
        rollout=settings,
        train={"quadratic_tokens": 24576},
        reward={"kind": "custom", "function": "tests.unit.user_rewards:parity"},
        deadlines={"rollout_step_s": 90},
    )


@asynccontextmanager
async def service_for(config: RunConfig, tokenizer: HFTokenizer, *servers: SharedServer):
    """A service over real clients and a real reward process; everything is closed afterwards."""
    clients = [server.client() for server in servers]
    for number, client in enumerate(clients):
        client.name = f"engine{number}"
    pool, scorer = EnginePool(clients, config.rollout.concurrency), RewardScorer(config.reward)
    source = PromptSource(config.data.prompts, config.data, tokenizer, config.seed)
    limits = EngineLimits(end_ids=end_ids(config.model.path, tokenizer))
    service = ServiceOfOne(config, pool, source, tokenizer, scorer, MODEL, limits)
    try:
        await scorer.start()  # else the engine finishes every response while the reward's process starts
        yield service, pool
    finally:
        await service.close()
        await pool.abort()
        await scorer.close()
        await pool.close()


async def publish(service: ServiceOfOne, pool: EnginePool, version: int, weights: Path | None = None) -> None:
    """A weight update: new weights from disk, or only a new number for the old ones."""
    await service.pause_for_update()
    if weights is None:
        await pool.stamp(version)
    else:
        await pool.broadcast(lambda client: load_from_disk(client, weights, version))
    await service.resume_after_update(version)


def assert_scored(
    sample: Sample, by_version: dict[int, Reference], routes_before: int | None = None, atol: float = 2e-5
) -> None:
    """Each segment's log-probs and routes are those of the weights of its version, read over the whole sequence.

    Args:
        routes_before: version whose weights made the routes of older segments, if it is not the segment's own.
        atol: nats by which log-probs may differ.
    """
    check_invariants(sample)
    assert sample.routes is not None and len(sample.routes) == len(sample) - 1 and sample.routes.mask.all()
    makers, versions = makers_of(sample, routes_before), versions_of(sample)
    for version in sorted(set(versions.tolist()) - {-1}):
        at, made = np.flatnonzero(versions == version), makers == version
        log_probs, routes = as_told(by_version[version], sample, made, at, scores)
        np.testing.assert_allclose(sample.log_probs[at], log_probs[at], atol=atol, err_msg=f"version {version}")
        held = np.sort(sample.routes.experts.astype(np.int64), -1)
        np.testing.assert_array_equal(held[made], np.sort(routes, -1)[:-1][made], err_msg=f"version {version}")


async def test_interrupted_responses_are_those_of_one_uninterrupted_pass(
    fresh: SharedServer, tokenizer: HFTokenizer, reference: Reference, tmp_path: Path
):
    config = config_for(fresh, tmp_path, stop_ids=4, over_sampling=3.0, dynamic_filter="zero_variance")
    async with service_for(config, tokenizer, fresh) as (service, pool):
        continued, filtered = 0, 0.0
        for step in range(3):
            batch = await service.take(step)
            assert len(batch.groups) == 3 and batch.version == step
            assert batch.metrics["staleness/max"] == 0 and batch.metrics["reward/zero_variance_groups"] == 0
            filtered += batch.metrics["rollout/filtered_groups"]
            for sample in batch.samples:
                versions = [s.version for s in sample.segments[1:]]
                assert versions == sorted({v for v in versions if v is not None})
                assert all(s.trainable == (s.version == step) for s in sample.segments[1:])
                continued += len(versions) > 1
                assert_scored(sample, dict.fromkeys(range(step + 1), reference))
                assert sample.reward == sample.response_length % 2
            await publish(service, pool, step + 1)
        assert continued, "nothing was interrupted and continued"
        assert service.ledger.masked["stale"] > 0
        assert bool(filtered) == bool(service.ledger.dropped["zero_variance"])


async def test_a_response_that_ends_in_the_step_of_an_abort_is_not_continued(
    fresh: SharedServer, tokenizer: HFTokenizer, tmp_path: Path
):
    """Every fifth token ends a response, so many responses have just ended at an abort."""
    config = config_for(fresh, tmp_path, stop_ids=64, over_sampling=4.0, group_size=4)
    ends = {*config.rollout.stop_token_ids, *end_ids(fresh.checkpoint, tokenizer)}
    async with service_for(config, tokenizer, fresh) as (service, pool):
        for step in range(6):
            for sample in (await service.take(step)).samples:
                *inner, last = sample.response_tokens.tolist()
                assert not ends.intersection(inner), "the response goes on after its end"
                assert (last in ends) == (sample.status is SampleStatus.COMPLETED)
            await publish(service, pool, step + 1)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_response_that_crosses_a_weight_update_holds_what_each_version_made(
    fresh: SharedServer, tokenizer: HFTokenizer, reference: Reference, other_weights: Path, tmp_path: Path, mode: str
):
    # Long responses: on a busy machine short ones are over before the update begins.
    long = {"stop_ids": 1, "max_response_tokens": 800}
    config = config_for(fresh, tmp_path, **long, max_staleness=1, pause_mode=mode, group_size=2)
    async with service_for(config, tokenizer, fresh) as (service, pool):
        await service.take(0)
        # A busy machine may finish all responses between a step's last group and the update: then the next update.
        for version in range(1, 9):
            weights = other_weights if version % 2 else fresh.checkpoint
            await publish(service, pool, version, None if mode == "in_place" else weights)
            samples = (await service.take(version)).samples
            crossed = [s for s in samples if [g.version for g in s.segments] == [None, version - 1, version]]
            if crossed:
                break
        assert crossed, "no response was under way at eight updates"
        newer = Reference(other_weights)
        for sample in crossed:
            assert all(s.trainable for s in sample.segments[1:]) and sample.aborts == (mode == "abort")
            # Weights that change in place leave old caches under new tokens, so only the number changes there.
            made_by = {v: newer if mode != "in_place" and v % 2 else reference for v in (version - 1, version)}
            assert_scored(sample, made_by, routes_before=version if mode == "retract" else None)


async def test_no_response_begins_on_a_prefix_that_older_weights_computed(
    fresh: SharedServer, tokenizer: HFTokenizer, reference: Reference, other_weights: Path, tmp_path: Path
):
    """`in_place` keeps the cache across the update, and every group has the same long prompt."""
    config = config_for(fresh, tmp_path, max_response_tokens=60, max_staleness=1, pause_mode="in_place")
    prompts = Path(config.data.prompts[0])
    prompts.write_text('{"prompt": "the same long prompt for every group: 1 + 1 = ", "label": "x"}\n' * 60)
    newer = Reference(other_weights)
    async with service_for(config, tokenizer, fresh) as (service, pool):
        for sample in (await service.take(0)).samples:
            assert_scored(sample, {0: reference})
        begun = service.joined.next_group_id
        await service.pause_for_update()
        await pool.broadcast(lambda client: load_beneath_the_cache(client, other_weights, 1))
        await service.resume_after_update(1)
        batches = [await service.take(1), await service.take(2)]
        later = [sample for batch in batches for sample in batch.samples if sample.group_id >= begun]
        assert len(later) >= 9, "begun under the newer weights"
        for sample in later:
            assert [s.version for s in sample.segments] == [None, 1]
            assert_scored(sample, {1: newer})


@pytest.mark.nightly
async def test_a_resumed_service_continues_what_was_interrupted(
    fresh: SharedServer, tokenizer: HFTokenizer, reference: Reference, tmp_path: Path
):
    # The groups of three steps begin together: when those of the first are complete, others are still at work.
    config = config_for(fresh, tmp_path, stop_ids=1, max_response_tokens=800, max_staleness=2, group_size=2)
    async with service_for(config, tokenizer, fresh) as (service, _):
        first = await service.take(0)
        await service.drain()
        await service.save(tmp_path / "rollouts.npz")
        held = {(s.group_id, s.index): s for g in service.tracker.held() for s in g.samples}
    interrupted = {key for key, s in held.items() if s.prompt_length < len(s) and not s.status.finished}
    assert interrupted, "everything was finished before the checkpoint"
    async with service_for(config, tokenizer, fresh) as (service, pool):
        await service.load(tmp_path / "rollouts.npz")
        await publish(service, pool, 1)
        # All groups that may begin, the held ones among them: one of the others can be complete before they are.
        batches = [await service.take(step) for step in (1, 2, 3)]
        samples = {(s.group_id, s.index): s for batch in batches for s in batch.samples}
        assert not {g.group_id for g in first.groups} & {group for group, _ in samples}
        assert held.keys() <= samples.keys()
        for key, sample in samples.items():
            old = held[key].tokens if key in held else sample.tokens[:0]
            np.testing.assert_array_equal(sample.tokens[: len(old)], old)
            assert_scored(sample, {0: reference, 1: reference})
        assert all(len(samples[key]) > len(held[key]) for key in interrupted)


async def test_evaluation_reports_accuracy_and_pass_at_k_beside_running_rollouts(
    fresh: SharedServer, tokenizer: HFTokenizer, tmp_path: Path
):
    config = config_for(fresh, tmp_path, max_staleness=1, max_response_tokens=60)
    sampled = EvalSetConfig(name="s", path=f"{config.data.prompts[0]}@[:6]", samples_per_prompt=5, temperature=1.0)
    greedy = EvalSetConfig(name="g", path=f"{config.data.prompts[0]}@[-4:]", max_response_tokens=7)
    async with service_for(config, tokenizer, fresh) as (service, _):
        await service.take(0)
        generated = service.ledger.generated
        several, one = await asyncio.gather(service.evaluate(sampled), service.evaluate(greedy))
        assert several.prompts == 6 and list(several.pass_at) == [1, 2, 4]
        assert several.pass_at[1] == pytest.approx(several.accuracy) and 0 < several.accuracy < 1
        assert several.accuracy <= several.pass_at[2] <= several.pass_at[4]
        again = await service.evaluate(greedy)
        assert (one.accuracy, one.response_len_mean, one.truncated) == (
            again.accuracy,
            again.response_len_mean,
            again.truncated,
        ), "greedy responses repeat"
        assert one.response_len_mean <= 7 and list(one.pass_at) == [1] and service.ledger.generated >= generated
        batch = await service.take(1)
        assert batch.metrics["ledger/trained_tokens"] == sum(s.trainable_tokens for s in batch.samples)


def test_an_engine_killed_in_mid_generation_hands_over_and_loses_nothing_held(
    fresh: SharedServer, tokenizer: HFTokenizer, reference: Reference, tmp_path: Path
):
    doomed = serve(fresh.checkpoint, tmp_path / "doomed")
    try:

        async def work() -> None:
            config = config_for(fresh, tmp_path, stop_ids=0, groups_per_step=4, group_size=2)
            async with service_for(config, tokenizer, fresh, doomed) as (service, pool):
                waiting = asyncio.create_task(service.take(0))
                while min(slot.assigned for slot in pool._slots) == 0:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                for pid in doomed.process.pids:  # no time to answer what it is asked
                    os.kill(pid, signal.SIGKILL)
                batch = await waiting
                assert list(pool.dead) == ["engine1"] and len(batch.groups) == 4
                for sample in batch.samples:
                    assert_scored(sample, {0: reference})
                await publish(service, pool, 1)
                assert len((await service.take(1)).groups) == 4

        run(work)
    finally:
        doomed.process.stop()


async def test_two_turns_with_an_environment_between_them_are_those_of_one_pass(
    fresh: SharedServer, tokenizer: HFTokenizer, reference: Reference, tmp_path: Path
):
    """Log-probs and routes of both turns, including second turns interrupted by an abort, which the function does not
    notice."""
    user_rollouts.forget()
    config = config_for(
        fresh, tmp_path, stop_ids=6, max_response_tokens=600, over_sampling=3.0, groups_per_step=2, group_size=2,
        function="tests.unit.user_rollouts:two_turns",
    )  # fmt: skip
    said = tokenizer.encode("OK", special_tokens=False)
    async with service_for(config, tokenizer, fresh) as (service, pool):
        continued = 0
        for step in range(3):
            for sample in (await service.take(step)).samples:
                spoken = [s for s in sample.segments[1:] if s.version is None]
                assert [sample.tokens[s.start : s.end].tolist() for s in spoken] == [said]
                second = [s.version for s in sample.segments if s.start >= spoken[0].end]
                continued += len(second) > 1
                assert sample.trainable_tokens == sum(s.end - s.start for s in sample.segments if s.trainable)
                assert not sample.loss_mask[spoken[0].start : spoken[0].end].any()
                assert_scored(sample, dict.fromkeys(range(step + 1), reference))
            await publish(service, pool, step + 1)
        assert continued, "no second turn was interrupted and continued"
        assert set(user_rollouts.calls.values()) == {1}, "a function was begun again"
