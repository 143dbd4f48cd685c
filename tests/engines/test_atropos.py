"""Environments with Atropos' wire protocol, and a real SGLang server: transformers scores each token again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.generating import end_ids
from mslime.config.loader import build
from mslime.config.schema import RunConfig
from mslime.data.source import NoPrompts
from mslime.data.tokenizer import HFTokenizer
from mslime.network import free_port
from mslime.rollout.generation import EngineLimits
from tests.engines.conftest import SharedServer
from tests.engines.reference import Reference
from tests.engines.test_rollout_service import (
    MODEL,
    assert_scored,
    config_for,
    fresh,
    other_weights,
    publish,
    reference,
    tokenizer,
)
from tests.fixtures.atropos_environment import WireEnvironment, environment
from tests.fixtures.service_of_one import ServiceOfOne
from tests.unit.rollout_fakes import FakeScorer

__all__ = ["fresh", "other_weights", "reference", "tokenizer"]


def of_atropos(config: RunConfig) -> RunConfig:
    """The same run with rollouts of Atropos' environments."""
    values = config.model_dump(mode="json", exclude_unset=True)
    values["output_dir"] = str(Path(values["data"]["prompts"][0]).parent)
    values["data"] = {}
    values.pop("reward", None)  # the environments score
    values["rollout"] |= {"function": "atropos", "atropos": {"port": free_port(), "token": "t0ken"}}
    return build(values)


@asynccontextmanager
async def served(
    config: RunConfig, tokenizer: HFTokenizer, server: SharedServer
) -> AsyncIterator[tuple[ServiceOfOne, EnginePool]]:
    """A service without prompts, and its engine."""
    pool = EnginePool([server.client()], config.rollout.concurrency)
    limits = EngineLimits(end_ids=end_ids(config.model.path, tokenizer))
    service = ServiceOfOne(config, pool, NoPrompts(), tokenizer, FakeScorer(), MODEL, limits)
    try:
        yield service, pool
    finally:
        await service.close()
        await pool.abort()
        await pool.close()


async def two_turns(env: WireEnvironment, number: int, heard: list[int]) -> None:
    """Three rollouts of two turns, as a managed server of Atropos records them, handed in."""
    first = await env.generate([40 + number, 50, 51], n=3, max_new_tokens=120)
    second = await asyncio.gather(*(env.generate([*s.tokens, *heard], max_new_tokens=120) for s in first))
    whole = [a.then(b.tokens[len(a.tokens) + len(heard) :], heard) for a, (b,) in zip(first, second, strict=True)]
    assert await env.hand_in(whole, [float(number), 0.0, 1.0]) == (200, {"status": "received"})


@pytest.mark.nightly
async def test_what_environments_hand_in_is_exact_when_the_weights_change_within_a_turn(
    fresh: SharedServer, tokenizer: HFTokenizer, reference: Reference, other_weights: Path, tmp_path: Path
) -> None:
    config = of_atropos(config_for(fresh, tmp_path, stop_ids=0, max_staleness=1, concurrency=5,
                                   max_response_tokens=400))  # fmt: skip
    async with served(config, tokenizer, fresh) as (service, pool):
        taking = asyncio.create_task(service.take(0))
        async with environment(f"http://127.0.0.1:{config.rollout.atropos.port}/t0ken", group_size=3) as env:
            playing = [asyncio.create_task(two_turns(env, number, [60, 61])) for number in range(6)]
            first = await taking
            await publish(service, pool, 1, other_weights)
            second = await service.take(1)
            await asyncio.gather(*playing)
    by_version = {0: reference, 1: Reference(other_weights)}
    for batch in (first, second):
        for sample in batch.samples:
            assert_scored(sample, by_version)
            assert [number for _, number in sample.turns] == [1, 2]
        assert batch.metrics["ledger/trained_tokens"] == sum(s.trainable_tokens for s in batch.samples)
    versions = [[s.version for s in sample.segments if s.version is not None] for sample in second.samples]
    assert any(set(v) == {0, 1} for v in versions), "no rollout was under way when the weights changed"


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def atropos_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has atroposlib: of MSLIME_ATROPOS_PYTHON, else of a new environment."""
    if given := os.environ.get("MSLIME_ATROPOS_PYTHON"):
        return Path(given)
    home = tmp_path_factory.mktemp("atropos")
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    subprocess.run([home / "bin/pip", "install", "-q", "atroposlib==0.4.0"], check=True)
    return home / "bin/python"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_an_environment_of_the_package_itself_is_trained_exactly(
    fresh: SharedServer, tokenizer: HFTokenizer, reference: Reference, other_weights: Path, tmp_path: Path,
    atropos_python: Path,
) -> None:  # fmt: skip
    """Its own loop, clients, managed server and schedule, in a separate process and Python."""

    config = of_atropos(config_for(fresh, tmp_path, max_staleness=1))
    by_version = {0: reference, 1: Reference(other_weights)}
    async with served(config, tokenizer, fresh) as (service, pool):
        taking = asyncio.create_task(service.take(0))
        url, script = (
            f"http://127.0.0.1:{config.rollout.atropos.port}/t0ken",
            ROOT / "tests/fixtures/atropos_env/parity.py",
        )
        while not service.manager._workflow._server.address:  # type: ignore[attr-defined]
            await asyncio.sleep(0.05)
        with (tmp_path / "environment.log").open("w") as log:
            process = subprocess.Popen(
                [atropos_python, script, url, str(fresh.checkpoint)], stdout=log, stderr=log, cwd=tmp_path
            )
        try:
            first = await taking
            await publish(service, pool, 1, other_weights)
            second = await service.take(1)
            await publish(service, pool, 2)
            third = await service.take(2)
        finally:
            process.terminate()
            process.wait(30)
    by_version[2] = by_version[1]
    for batch in (first, second, third):
        assert len(batch.groups) == 3 and batch.metrics["rollout/failed_rollouts"] == 0
        for sample in batch.samples:
            assert_scored(sample, by_version)
            assert sample.metadata["data_source"] == "parity_0" and 1 <= len(sample.turns) <= 2
            assert sample.reward == float(sum(sample.tokens.tolist()) % 2)
        assert batch.metrics["ledger/trained_tokens"] == sum(s.trainable_tokens for s in batch.samples)
    assert any(len(s.turns) == 2 for s in first.samples), "no second turn went on from the first"
