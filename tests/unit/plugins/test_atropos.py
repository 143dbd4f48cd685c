"""Groups that environments hand in by Atropos' protocol: what of them is trained, and what is refused.

The engine is a fake one, whose tokens tell their position; the environment speaks the wire protocol alone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from mslime.checks.datasets import check_data
from mslime.config.errors import ConfigError, RolloutError
from mslime.config.loader import build
from mslime.config.rollout import GIVEN
from mslime.config.schema import RunConfig
from mslime.data.sample import Sample, SampleStatus, check_invariants
from mslime.data.source import NoPrompts
from mslime.network import free_port
from mslime.rollout.function_contract import _Characters, _Plain
from mslime.rollout.generation import EngineLimits
from mslime.run.assemble import grouped_rewards, sample_advantages
from mslime_plugins.atropos.leases import Leases, SubmittedGroup
from tests.fixtures.atropos_environment import Sampled, WireEnvironment, environment
from tests.fixtures.least import refused
from tests.fixtures.service_of_one import ServiceOfOne
from tests.unit.rollout_fakes import MODEL, FakeScorer, FakeSlowEngine, publish

PROMPT = [ord(c) for c in "2+3?"]
LENGTH, TOKEN = 5, "t0ken"
JSON = {"Content-Type": "application/json"}


def plain(tokenizer: Any, thinking: str) -> _Plain:
    """A renderer of characters."""
    return _Plain()


def config_of(directory: Path, algorithm: dict[str, Any] | None = None, **rollout: Any) -> RunConfig:
    atropos = {"port": free_port(), "token": TOKEN, **rollout.pop("atropos", {})}
    settings = {"function": "atropos", "groups_per_step": 1, "group_size": 2, "max_response_tokens": 64,
                "renderer": "tests.unit.plugins.test_atropos:plain", "atropos": atropos, **rollout}  # fmt: skip
    return build({
        "output_dir": str(directory), "model": {"path": str(directory)}, "rollout": settings,
        "train": {"quadratic_tokens": 24576},
        "deadlines": {"rollout_step_s": 20, "engine_control_s": 5}, "algorithm": algorithm or {},
    })  # fmt: skip


def service_of(config: RunConfig, engines: FakeSlowEngine | None = None) -> ServiceOfOne:
    engines = engines or FakeSlowEngine(lambda group, index: LENGTH)
    return ServiceOfOne(config, engines, NoPrompts(), _Characters(), FakeScorer(), MODEL, EngineLimits())


@asynccontextmanager
async def running(config: RunConfig, service: ServiceOfOne) -> AsyncIterator[WireEnvironment]:
    a = config.rollout.atropos
    async with environment(f"http://127.0.0.1:{a.port}/{TOKEN}") as found:
        try:
            yield found
        finally:
            await service.close()


Play = Callable[[WireEnvironment, ServiceOfOne], Coroutine[Any, Any, None]]


def trained_step(directory: Path, play: Play, algorithm: dict[str, Any] | None = None, **rollout: Any) -> Any:
    """The first step of a run whose environment plays so."""

    async def work() -> Any:
        config = config_of(directory, algorithm, **rollout)
        service = service_of(config)
        taking = asyncio.create_task(service.take(0))
        async with running(config, service) as env:
            playing = asyncio.create_task(play(env, service))
            await asyncio.wait([taking, playing], return_when=asyncio.FIRST_COMPLETED)
            if playing.done():
                playing.result()
            batch = await taking
            await playing
            return batch

    return asyncio.run(work())


def assert_whole(sample: Sample) -> None:
    """What the fake engine says at each position is what the sample has there, with log-probs, versions and routes."""
    check_invariants(sample)
    for s in (s for s in sample.segments if s.version is not None):
        at = np.arange(s.start, s.end)
        assert (sample.tokens[s.start : s.end] == 100 + at).all()
        expected = -at / 1000 - float(s.version or 0)
        np.testing.assert_allclose(sample.log_probs[s.start : s.end], expected, rtol=1e-6)
    assert sample.routes is not None and len(sample.routes) == len(sample) - 1


def tracker_holds(metrics: dict[str, float]) -> None:
    ledger = {k.removeprefix("ledger/"): v for k, v in metrics.items() if k.startswith("ledger/")}
    gone = sum(v for k, v in ledger.items() if k.split("/")[0] in ("masked", "dropped"))
    assert ledger["generated_tokens"] == ledger["trained_tokens"] + gone + ledger["pending_tokens"], ledger


def test_a_group_is_trained_with_the_tokens_that_were_recorded_and_the_environments_scores(tmp_path: Path) -> None:
    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        replies = await env.generate(PROMPT, n=2)
        assert (await env.hand_in(replies, [1.0, -1.0], inference_logprobs=[[0.0]] * 2))[0] == 200
        assert not len(service.manager._workflow._recorded), "what was handed in is not kept"  # type: ignore[attr-defined]

    batch = trained_step(tmp_path, play)
    assert [s.reward for s in batch.samples] == [1.0, -1.0]
    for sample in batch.samples:
        assert_whole(sample)
        assert sample.tokens.tolist() == [*PROMPT, *range(104, 104 + LENGTH)]
        assert sample.loss_mask.tolist() == [False] * 4 + [True] * LENGTH and sample.metadata["data_source"] == "wire_0"
    assert batch.metrics["ledger/trained_tokens"] == batch.metrics["ledger/generated_tokens"] == 2 * LENGTH
    assert batch.metrics["rollout/atropos/groups"] == 1 and batch.metrics["reward/mean"] == 0
    tracker_holds(batch.metrics)


def test_several_turns_are_one_sequence_in_which_what_the_environment_said_is_context(tmp_path: Path) -> None:
    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        first = await env.generate(PROMPT, n=2)
        second = [(await env.generate([*s.tokens, 10, 11]))[0] for s in first]
        whole = [a.then(b.tokens[len(a.tokens) + 2 :], [10, 11]) for a, b in zip(first, second, strict=True)]
        assert (await env.hand_in(whole, [1.0, 0.0]))[0] == 200

    for sample in trained_step(tmp_path, play).samples:
        assert_whole(sample)
        assert sample.loss_mask.tolist() == [False] * 4 + [True] * LENGTH + [False] * 2 + [True] * LENGTH
        assert [number for _, number in sample.turns] == [1, 2]


def test_masks_of_the_environment_hold_and_are_in_the_ledger(tmp_path: Path) -> None:
    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        one, other = await env.generate(PROMPT, n=2)
        one.masks[5] = -100
        other_zero = [{}, {"set_advantage_to_zero": True}]
        assert (await env.hand_in([one, other], [1.0, 0.0], overrides=other_zero))[0] == 200

    batch = trained_step(tmp_path, play)
    assert [s.trainable_tokens for s in batch.samples] == [LENGTH - 1, 0] and not batch.samples[0].loss_mask[5]
    assert batch.metrics["ledger/masked/rollout_tokens"] == 1 + LENGTH and batch.metrics["reward/mean"] == 0.5
    tracker_holds(batch.metrics)


async def test_a_reply_that_crosses_a_weight_update_has_both_versions(tmp_path: Path) -> None:
    config = config_of(tmp_path, max_staleness=1)
    engines = FakeSlowEngine(lambda group, index: 40)
    service = service_of(config, engines)
    first = asyncio.create_task(service.take(0))
    async with running(config, service) as env:
        await env.hand_in(await env.generate(PROMPT, n=2), [1.0, 0.0])
        slow = asyncio.create_task(env.generate(PROMPT, n=2))
        await first
        while not engines.at_work or max(len(v) for v, _ in engines.at_work.values()) < 3:
            await asyncio.sleep(0)
        await publish(service, engines, 1)
        await env.hand_in(await slow, [1.0, 0.0])
        batch = await service.take(1)
        for sample in batch.samples:
            assert_whole(sample)
            assert [s.version for s in sample.segments] == [None, 0, 1]


async def not_trained(env: WireEnvironment, group: dict[str, Any], reason: str, said: str) -> None:
    """A group is refused by this reason; a good one follows, so that the step has an end."""
    status, told = await env.send("/scored_data", group)
    assert status == 422 and said in told["detail"] and "hint: " in told["detail"], told
    await env.hand_in(await env.generate([*PROMPT, 7], n=2), [1.0, 0.0])


Change = Callable[[list[Sampled]], dict[str, Any]]


def spliced(number: int, start: int, end: int, *ids: int) -> Change:
    """Tokens and masks of one sequence are `ids` from `start` to `end`."""

    def change(s: list[Sampled]) -> dict[str, Any]:
        s[number].tokens[start:end] = s[number].masks[start:end] = ids
        return {}

    return change


retokenised = spliced(1, 6, 7, 66)


@pytest.mark.parametrize(("change", "reason", "said"), [
    (retokenised, "unknown_sequence", "at token 6 of 9"),
    (spliced(1, 8, 9, 66), "unknown_sequence", "at token 8 of 9 it has [66]"),
    (spliced(0, 8, 9), "unknown_sequence", "at token 8 of 8 it has its end"),
    (lambda s: {"tokens": [[1, 2]] * 2, "masks": [[-100, 2]] * 2}, "unknown_sequence", "sequence 0"),
    (spliced(0, 9, 9, 65), "not_sampled", "tokens 9 to 10"),
    (lambda s: {"masks": [[-100, s[0].tokens[1], *s[0].masks[2:]], s[1].masks]}, "not_sampled", "tokens 1 to 2"),
    (lambda s: {"masks": [[*s[0].masks, -100], s[1].masks]}, "malformed", "masks[0] = '10 entries' must be as long as"),
    (lambda s: {"masks": [[*s[0].masks[:-1], 109], s[1].masks]}, "malformed", "must be -100 or the token, 108"),
    (lambda s: {"masks": [[-100] * 9] * 2}, "nothing_new", "every reply in the group is trained already"),
    (lambda s: {"scores": [1.0]}, "malformed", "scores = '1 entries' must have 2"),
    (lambda s: {"scores": [1.0, "x"]}, "malformed", "scores[1] = 'x' must be a finite number"),
    (lambda s: {"tokens": []}, "malformed", "tokens = []"),
    (lambda s: {"masks": [s[0].masks, "x"]}, "malformed", "masks[1] = 'x'"),
    (lambda s: {"tokens": [s[0].tokens, [1, -2]]}, "malformed", "tokens[1] = -2 must be token ids"),
    (lambda s: {"env_id": 7}, "unknown_environment", "env_id = 7 has not registered"),
    (lambda s: {"env_id": "x"}, "malformed", "env_id = 'x'"),
    (lambda s: {"advantages": [[0.5] * 9] * 2}, "advantages", "algorithm.advantage grpo does not use"),
    (lambda s: {"advantages": [[0.5] * 8] * 2}, "malformed", "advantages[0]"),
    (lambda s: {"images": ["a", None]}, "unsupported", "images"),
    (lambda s: {"distill_token_ids": [[[1]]]}, "unsupported", "distill_token_ids"),
    (lambda s: {"group_overrides": {"sft": True}}, "unsupported", "sft"),
    (lambda s: {"overrides": [{}, {"sft": True}]}, "unsupported", "sft"),
    (lambda s: {k: [getattr(s[0], k)] * 3 for k in ("tokens", "masks")} | {"scores": [1.0] * 3}, "too_large", "of 3"),
    (lambda s: {k: [getattr(s[0], k)] for k in ("tokens", "masks")} | {"scores": [1.0]}, "too_small", "of 1 rollouts"),
])  # fmt: skip
def test_what_was_not_recorded_so_is_dropped_and_counted_and_the_run_goes_on(
    tmp_path: Path, change: Change, reason: str, said: str
) -> None:
    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        replies = await env.generate(PROMPT, n=2)
        fields = change(replies)
        await not_trained(env, {**env.group(replies, [1.0, 0.0]), **fields}, reason, said)

    batch = trained_step(tmp_path, play, on_error="drop")
    counted = {k: v for k, v in batch.metrics.items() if k.startswith("rollout/atropos/") and v}
    assert counted == {"rollout/atropos/groups": 1, f"rollout/atropos/{reason}": 1}
    assert all(s.prompt_length == len(PROMPT) + 1 for s in batch.samples)
    tracker_holds(batch.metrics)


def test_by_default_a_run_ends_of_a_group_that_cannot_be_trained_and_says_why(tmp_path: Path) -> None:
    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        replies = await env.generate(PROMPT, n=2)
        retokenised(replies)
        assert (await env.hand_in(replies, [1.0, 0.0]))[0] == 422
        await asyncio.sleep(5)

    with pytest.raises(RolloutError, match=r"(?s)rollout.function atropos.*wire_0 submitted a group.*unknown_sequence.*"
                       r"at token 6 of 9.*server_type: sglang"):  # fmt: skip
        trained_step(tmp_path, play)


def test_what_a_template_writes_after_a_reply_is_not_trained_although_the_environment_counts_it(tmp_path: Path) -> None:
    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        replies = await env.generate(PROMPT, n=2)
        assert (await env.hand_in([r.then([10]) for r in replies], [1.0, 0.0]))[0] == 200

    batch = trained_step(tmp_path, play)
    assert [len(s) for s in batch.samples] == [4 + LENGTH] * 2
    assert batch.metrics["rollout/atropos/unsampled_tokens"] == 2


def test_a_group_that_is_handed_in_twice_is_trained_once(tmp_path: Path) -> None:
    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        replies = await env.generate(PROMPT, n=2)
        for _ in range(2):
            status, told = await env.hand_in(replies, [1.0, 0.0])
            assert (status, told["status"]) == (200, "received")
        more = await env.generate([*PROMPT, 7], n=2)
        await env.hand_in(more, [0.0, 1.0])

    batch = trained_step(tmp_path, play, groups_per_step=2)
    assert batch.metrics["rollout/atropos/repeated"] == 1 and batch.metrics["rollout/atropos/groups"] == 2
    assert batch.metrics["ledger/trained_tokens"] == 4 * LENGTH


def test_each_reply_is_trained_in_the_first_group_that_hands_it_in(tmp_path: Path) -> None:
    """As environments do that hand in a group for each step: the second has the first reply unmasked once more."""

    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        first = await env.generate(PROMPT, n=2)
        second = [(await env.generate([*s.tokens, 10]))[0] for s in first]
        whole = [a.then(b.tokens[len(a.tokens) + 1 :], [10]) for a, b in zip(first, second, strict=True)]
        groups = [env.group(first, [1.0, 0.0]), env.group(whole, [0.0, 1.0])]
        assert (await env.send("/scored_data_list", groups)) == (
            200, {"status": "received", "groups_processed": 2, "refused": []})  # fmt: skip

    batch = trained_step(tmp_path, play, groups_per_step=2)
    assert [s.trainable_tokens for s in batch.samples] == [LENGTH] * 4
    assert [int(np.flatnonzero(s.loss_mask)[0]) for s in batch.samples] == [4, 4, 10, 10]
    assert batch.metrics["rollout/atropos/repeated_tokens"] == 2 * LENGTH
    assert batch.metrics["ledger/trained_tokens"] == batch.metrics["ledger/generated_tokens"] == 4 * LENGTH


def test_a_smaller_group_counts_with_the_rollouts_that_it_has(tmp_path: Path) -> None:
    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        assert (await env.hand_in(await env.generate(PROMPT, n=2), [1.0, 0.0]))[0] == 200

    batch = trained_step(tmp_path, play, group_size=3)
    assert [s.reward for s in batch.samples] == [1.0, 0.0] and batch.metrics["rollout/failed_rollouts"] == 0


async def test_an_environment_is_told_how_many_groups_are_wanted(tmp_path: Path) -> None:
    """Atropos begins `max_batches_offpolicy * batch_size / group_size - queue_size` groups."""
    config = config_of(tmp_path, groups_per_step=3, atropos={"waiting": 1}, on_error="drop")
    service = service_of(config)
    taking = asyncio.create_task(service.take(0))
    async with running(config, service) as env:
        info = (await env.ask("GET", "/info"))[1]
        begun = info["batch_size"] // env.group_size
        assert begun - (await env.status())["queue_size"] == 3
        for left in (2, 1, 0):
            await env.hand_in(await env.generate([*PROMPT, left + 1], n=2), [1.0, 0.0])
            if left:
                await asyncio.sleep(0.05)
                assert begun - (await env.status())["queue_size"] == left
        await taking
        assert begun - (await env.status())["queue_size"] == 0
        waits = asyncio.create_task(env.generate([*PROMPT, 9], n=2))
        await asyncio.sleep(0.05)
        assert not waits.done(), "nothing is generated while the trainer works"
        await publish(service, service.manager._engines, 1)  # type: ignore[arg-type]
        second = asyncio.create_task(service.take(1))
        groups = [await waits, *[await env.generate([*PROMPT, 20 + i], n=2) for i in range(4)]]
        for i, group in enumerate(groups):
            status, told = await env.hand_in(group, [1.0, 0.0])
            assert status == (200 if i < 4 else 422), told
        assert "rollout.atropos.waiting" in told["detail"]
        assert (await env.status())["self_queue_size"] in (0, 1)
        await second
        assert service.tracker.counters.total["atropos/no_room"] == 1


async def test_environments_that_are_silent_or_missing_are_told_of(tmp_path: Path) -> None:
    config = config_of(tmp_path, atropos={"silent_s": 0.2})
    service = service_of(config)
    with pytest.raises(RolloutError, match=r"(?s)no environment has sent a request.*silent_s.*/v1"):
        await service.take(0)
    await service.close()


def test_what_nobody_hands_in_is_let_go_of_and_is_in_the_ledger(tmp_path: Path) -> None:
    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        kept = await env.generate(PROMPT, n=2)
        await env.generate([*PROMPT, 7], n=3)
        recorded = service.manager._workflow._recorded  # type: ignore[attr-defined]
        assert len(recorded) == 2
        recorded.let_go(1e18)
        assert not len(recorded) and not recorded._by_prompt and not recorded._by_key
        status, told = await env.hand_in(kept, [1.0, 0.0])
        assert status == 422 and "expired" in told["detail"]
        await env.hand_in(await env.generate(PROMPT, n=2), [1.0, 0.0])

    batch = trained_step(tmp_path, play, on_error="drop")
    assert batch.metrics["ledger/dropped/unused_tokens"] == 5 * LENGTH
    assert batch.metrics["ledger/trained_tokens"] == 2 * LENGTH
    tracker_holds(batch.metrics)


async def test_a_resumed_run_keeps_the_groups_that_it_has_and_waits_for_the_others(tmp_path: Path) -> None:
    config = config_of(tmp_path, groups_per_step=2)
    service = service_of(config)
    taking = asyncio.create_task(service.take(0))
    async with running(config, service) as env:
        await env.hand_in(await env.generate(PROMPT, n=2), [1.0, 0.0])
        await asyncio.sleep(0.05)
        await service.drain()
        taking.cancel()
        header, columns = service.state_dict()
    config = config_of(tmp_path, groups_per_step=2)
    again = service_of(config)
    await again.continue_from(header, columns)
    assert len(again.tracker.accepted) == 1
    step = asyncio.create_task(again.take(0))
    async with running(config, again) as env:
        await env.hand_in(await env.generate([*PROMPT, 7], n=2), [0.0, 1.0])
        batch = await step
    assert [s.prompt_length for s in batch.samples] == [4, 4, 5, 5]


async def test_a_group_that_an_earlier_process_began_is_not_filled_with_another(tmp_path: Path) -> None:
    config = config_of(tmp_path, groups_per_step=1, group_size=3)
    service = service_of(config)
    group = service.begin(NoPrompts().next())
    for number in (0, 1):
        sample = group.samples[number]
        sample.extend([9], log_probs=[-1.0], versions=[(0, 0, 1)], engine="e")
        sample.turns, sample.reward, sample.status = [(1, 1)], float(number), SampleStatus.COMPLETED
        service.tracker.generated(sample, 1)
    service.tracker.put_back(group)
    taking = asyncio.create_task(service.take(0))
    async with running(config, service):
        batch = await taking
    assert [s.reward for s in batch.samples] == [0.0, 1.0], "with what it has, not with another group's rollout"


def test_advantages_of_the_environment_are_those_that_are_trained(tmp_path: Path) -> None:
    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        first = await env.generate(PROMPT, n=2)
        second = [(await env.generate([*s.tokens, 10]))[0] for s in first]
        whole = [a.then(b.tokens[len(a.tokens) + 1 :], [10]) for a, b in zip(first, second, strict=True)]
        given = [[0.0] * 4 + [0.5] * LENGTH + [0.0] + [-0.25] * LENGTH, 2.0]
        assert (await env.hand_in(whole, [1.0, 0.0], advantages=given))[0] == 200

    batch = trained_step(tmp_path, play, algorithm={"advantage": GIVEN})
    grouped = grouped_rewards(batch.samples)
    algorithm = config_of(tmp_path, algorithm={"advantage": GIVEN}).algorithm
    found = sample_advantages(batch.samples, grouped, algorithm)
    for sample, advantages, (one, two) in zip(batch.samples, found, ((0.5, -0.25), (2.0, 2.0)), strict=True):
        values = np.broadcast_to(np.asarray(advantages), len(sample))
        assert values[4 : 4 + LENGTH].tolist() == [one] * LENGTH and values[10:].tolist() == [two] * LENGTH
    assert [s.reward for s in batch.samples] == [1.0, 0.0]


@pytest.mark.parametrize("given", [None, [[0.5, 0.25] + [0.0] * 7] * 2])
def test_advantages_that_are_missing_or_differ_within_a_reply_are_refused(tmp_path: Path, given: Any) -> None:
    """The second differs where nothing is trained, and is taken."""

    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        replies = await env.generate(PROMPT, n=2)
        assert (await env.hand_in(replies, [1.0, 0.0], advantages=given))[0] == (422 if given is None else 200)
        if given is None:
            uneven = [[0.0] * 8 + [1.0]] * 2
            status, told = await env.hand_in(replies, [1.0, 0.0], advantages=uneven)
            assert status == 422 and "one reply of the model, differ" in told["detail"]
            await env.hand_in(replies, [1.0, 0.0], advantages=[1.0, 0.5])

    trained_step(tmp_path, play, algorithm={"advantage": GIVEN}, on_error="drop")


def test_both_servers_speak_as_those_of_atropos(tmp_path: Path) -> None:
    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        refused = await env.register(group_size=4)
        assert "group_size of the environment is 4, but rollout.group_size of the run is 2" in refused["status"]
        assert "min_batch_allocation" in (await env.register(min_batch_allocation=0.5))["status"]
        told = await env.register()
        assert (told["env_id"], told["wandb_name"], told["starting_step"], told["status"]) == (
            1,
            "wire_1",
            0,
            "success",
        )
        assert (await env.ask("GET", "/wandb_info"))[1]["project"] == "mslime"
        assert (await env.ask("GET", "/status"))[1] == {"current_step": 0, "queue_size": 0}
        assert (await env.status())["env_weight"] == 0.5, "two of them"
        assert (await env.ask("GET", "/status-env", {"env_id": 9}))[0] == 422
        for path in ("/register", "/batch", "/reset_data"):
            assert (await env.ask("POST", path, {}))[0] == 409
        assert (await env.ask("GET", "/health"))[0] == 200 and (await env.ask("GET", "/v1/models"))[0] == 200
        before = len(service.manager._engines.requests)  # type: ignore[attr-defined]
        for path, said in (("completions", {"prompt": "hi"}),
                           ("chat/completions", {"messages": [{"role": "user", "content": "hi"}]})):  # fmt: skip
            assert (await env.ask("POST", f"/v1/{path}", {**said, "max_tokens": 1}))[0] == 200
        assert len(service.manager._engines.requests) == before, "nothing is sampled for a sign of life"  # type: ignore[attr-defined]
        vllm = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, "n": 2, "max_tokens": 3}
        status, found = await env.ask("POST", "/generate", vllm)
        ids = [[int(next(iter(at[0]))) for at in one] for one in found["logprobs"]]
        assert status == 200 and ids == [[104, 105, 106]] * 2 and found["finish_reasons"] == ["length"] * 2
        assert (await env.ask("POST", "/generate", {"prompt": "x", "prompt_logprobs": 1}))[0] == 400
        assert (await env.ask("POST", "/generate", {"input_ids": ["x"]}))[0] == 400
        assert (await env.ask("POST", "/generate", {"input_ids": [1], "stream": True}))[0] == 400
        assert (await env.send("/scored_data", 5))[0] == 422
        for headers, body, said in (
            ({"Content-Encoding": "gzip"}, b"no gzip", "cannot be read"), ({}, b"{", "not valid JSON"),
            ({}, b" " * (2 << 20), "larger than"),
        ):  # fmt: skip
            async with (
                aiohttp.ClientSession() as http,  # each of its own, as `BaseEnv` has them
                http.post(f"{env.url}/scored_data", data=body, headers={**JSON, **headers}) as response,
            ):
                assert response.status == 422 and said in (await response.json())["detail"]
        async with env._http.post(f"{env.url}/generate", data=b" " * (2 << 20), headers=JSON) as response:
            assert response.status == 400
        said = {"messages": [{"role": "user", "content": "2 + 3?"}], "n": 2, "logprobs": True}
        status, found = await env.ask("POST", "/v1/chat/completions", said)
        prompt = [ord(c) for c in "user: 2 + 3?\n"]
        both = [Sampled(prompt, [-100] * len(prompt)).then(c["token_ids"]) for c in found["choices"]]
        more = [{"role": "assistant", "content": found["choices"][0]["message"]["content"]},
                {"role": "user", "content": "so?"}]  # fmt: skip
        again = await env.ask("POST", "/v1/chat/completions", {"messages": [*said["messages"], *more]})
        heard = [ord(c) for c in "\nuser: so?\n"]
        both[0] = both[0].then(again[1]["choices"][0]["token_ids"], heard)
        assert (await env.hand_in(both, [1.0, 0.0]))[0] == 200
        assert (await env.ask("GET", "/latest_example"))[1]["scores"] == [1.0, 0.0]
        assert (await env.ask("POST", "/disconnect-env", {"env_id": 0}))[1] == {"status": "success"}
        assert (await env.ask("POST", "/disconnect-env", {"env_id": 7}))[1]["status"] == "failure"

    batch = trained_step(tmp_path, play, on_error="drop", server={"max_request_mib": 1})
    assert [s.trainable_tokens for s in batch.samples] == [2 * LENGTH, LENGTH]
    for sample in batch.samples:
        assert_whole(sample)


async def test_a_token_is_a_part_of_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_TOKEN", "s3cret")

    config = config_of(tmp_path, atropos={"token": "env:ATROPOS_TOKEN"})
    service = service_of(config)
    taking = asyncio.create_task(service.take(0))
    url = f"http://127.0.0.1:{config.rollout.atropos.port}"
    async with environment(f"{url}/s3cret") as env:
        env.url = url
        for path in ("/status", "/scored_data", "/generate", "/v1/chat/completions"):
            async with env._http.request("POST", url + path, json={}) as response:
                assert response.status == 404
        env.url = f"{url}/s3cret"
        await env.hand_in(await env.generate(PROMPT, n=2), [1.0, 0.0])
        await taking
    await service.close()


def test_without_a_token_a_random_one_is_told_to_the_runs_user_alone_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work() -> str:
        config = config_of(tmp_path, atropos={"token": None})
        service = service_of(config)
        taking = asyncio.create_task(service.take(0))
        record = config.run_dir / "atropos.json"
        while not service.manager._workflow._server.address:  # type: ignore[attr-defined]
            assert not taking.done()
            await asyncio.sleep(0.01)
        told = json.loads(record.read_text())
        assert record.stat().st_mode & 0o777 == 0o600 and len(told["key"]) >= 32
        assert told["trainer"].endswith("/" + told["key"]) and told["model"] == told["trainer"] + "/v1"
        async with environment(told["trainer"]) as env:
            await env.hand_in(await env.generate(PROMPT, n=2), [1.0, 0.0])
            await taking
        await service.close()
        return told["key"]

    key = asyncio.run(work())
    assert key not in (said := capsys.readouterr().out) and "atropos.json" in said
    assert asyncio.run(work()) == key, "its environments go on with a resumed run"


@pytest.mark.parametrize(("headers", "status"), [
    ({"Content-Type": "text/plain"}, 415), ({"Content-Type": "application/json", "Host": "evil.example:8000"}, 421),
    ({"Content-Type": "application/json", "Host": "localhost:8000"}, 422),
    ({"Content-Type": "application/json", "Host": "[::1]:8000"}, 422),
])  # fmt: skip
def test_what_a_page_in_a_browser_can_send_is_refused(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        async with env._http.post(f"{env.url}/scored_data", data=b"{}", headers=headers) as response:
            assert response.status == status
        await env.hand_in(await env.generate(PROMPT, n=2), [1.0, 0.0])

    trained_step(tmp_path, play, on_error="drop")


def test_a_client_that_leaves_before_its_reply_leaves_a_conversation_that_is_let_go_of(tmp_path: Path) -> None:
    async def play(env: WireEnvironment, service: ServiceOfOne) -> None:
        recorded = service.manager._workflow._recorded  # type: ignore[attr-defined]
        service.manager._engines.lengths = lambda group, index: 10**6  # type: ignore[attr-defined]
        asking = asyncio.create_task(env.generate([*PROMPT, 7], max_new_tokens=8))
        while not len(recorded):
            await asyncio.sleep(0)
        (left,) = recorded._all
        while not left.busy:
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        recorded.let_go(1e18)
        assert len(recorded) == 1, "its reply is still generated"
        while left.busy:
            await asyncio.sleep(0.001)
        recorded.let_go(1e18)
        assert not len(recorded) and not recorded._by_prompt
        await env.hand_in(await env.generate(PROMPT, n=2, max_new_tokens=5), [1.0, 0.0])

    trained_step(tmp_path, play)


@pytest.mark.parametrize(("sections", "field"), [
    ({"data": {"prompts": ["p.jsonl"]}}, "data.prompts"),
    ({"data": {"source": "m:f"}}, "data.source"),
    ({"reward": {"kind": "math"}}, "reward"),
    ({"reward": {"overlong": {"buffer_tokens": 8}}}, "reward"),
    ({"data": {"eval_sets": [{"name": "a", "path": "p.jsonl"}]}}, "data.eval_sets"),
    ({"rollout": {"function": "atropos", "managers": 2}, "sglang": {"num_engines": 2}}, "rollout.managers"),
    ({"rollout": {"function": "atropos", "on_stale": "reroll"}}, "rollout.on_stale"),
    ({"rollout": {"function": "atropos", "atropos": {"host": "10.0.0.1"}}}, "rollout.atropos.token"),
    ({"rollout": {"function": "atropos", "atropos": {"host": "0.0.0.0", "token": "env:T"}}}, "rollout.atropos.host"),
    ({"rollout": {"function": "single_turn"}, "data": {"prompts": ["p"]}, "algorithm": {"advantage": GIVEN}},
     "algorithm.advantage"),
    ({"rollout": {"function": "atropo"}, "data": {"prompts": ["p"]}}, "rollout.function"),
])  # fmt: skip
def test_what_does_not_go_with_such_environments_is_refused(sections: dict[str, Any], field: str) -> None:
    assert refused(**{"data": {}, "rollout": {"function": "atropos"}, **sections}).field == field


def test_check_says_how_environments_are_started(tmp_path: Path) -> None:
    config = config_of(tmp_path, max_staleness=1, atropos={"token": "abc"})
    (note,) = check_data(config, _Characters(), 64)
    port = config.rollout.atropos.port
    assert f"rollout_server_url http://127.0.0.1:{port}/TOKEN, base_url http://127.0.0.1:{port}/TOKEN/v1" in note
    assert "group_size 2, max_batches_offpolicy 2" in note


def test_a_run_with_prompts_is_not_resumed_without_them() -> None:
    source = NoPrompts()
    source.next()
    other = NoPrompts()
    other.load_state_dict(source.state_dict())
    assert other.next().where == "environments:2"
    with pytest.raises(ConfigError, match="saved with files"):
        other.load_state_dict({"epoch": 0})


async def test_a_group_is_given_when_all_its_rollouts_have_asked_and_to_nobody_before() -> None:
    leases, group = Leases(1), SubmittedGroup("wire_0")
    first = asyncio.create_task(leases.ask(0, 0, 2, whole=True))
    await asyncio.sleep(0)
    leases.submit(group)
    assert (leases.wanted, leases.waiting, leases.full) == (0, 1, True)
    await asyncio.sleep(0)
    assert not first.done()
    assert await leases.ask(0, 1, 2, whole=True) is group and await first is group
    assert (leases.wanted, leases.waiting) == (0, 0)
