"""Real engines: one that is back gets all that another one holds, bit for bit, and serves it; whoever gives goes on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mslime.backends.sglang.catching_up import catch_up
from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.generating import GenerateRequest
from mslime.backends.sglang.pool import EnginePool
from mslime.config.errors import EngineError
from mslime.engine_plugin.wire import Offered, Transfer, Transferred
from tests.engines.conftest import SharedServer, serve
from tests.fixtures.engine_calls import load_from_disk
from tests.unit.fake_engine import FakeEngine

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def pair(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SharedServer]]:
    """Two engines that were started alike, at the same time."""
    logs = [tmp_path_factory.mktemp(name) for name in ("giver", "taker")]
    with ThreadPoolExecutor() as threads:
        started = list(threads.map(lambda log: serve(tiny_qwen3_moe, log, sglang={"rejoin": "peer"}), logs))
    yield started
    for server in started:
        server.process.stop()


@pytest.fixture(scope="module")
def trained(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with other numbers in every tensor."""
    directory = tmp_path_factory.mktemp("trained") / "model"
    shutil.copytree(tiny_qwen3_moe, directory)
    generator = torch.Generator().manual_seed(5)
    for file in directory.glob("*.safetensors"):
        tensors = {
            name: t + 0.02 * torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t.dtype)
            for name, t in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})
    return directory


def client_of(server: SharedServer, name: str) -> EngineClient:
    client = server.client()
    client.name = name
    return client


async def sample(client: EngineClient | EnginePool, rid: str, tokens: int = 24) -> tuple[list[int], list[float]]:
    found = await client.generate(GenerateRequest(rid, (5, 6, 7), tokens, temperature=0.0, ignore_eos=True))
    return list(found.output_ids), list(found.log_probs)


async def held(client: EngineClient) -> Any:
    """SGLang's own sums of all its parameters."""
    answer = await client._call("POST", "/weights_checker", {"action": "checksum"}, 60)
    return [rank["checksums"] for rank in answer["ranks"]]


@pytest.mark.nightly
def test_an_engine_that_is_back_serves_what_the_other_one_holds_bit_for_bit(
    pair: list[SharedServer], trained: Path
) -> None:
    async def run() -> None:
        giver, taker = client_of(pair[0], "engine0"), client_of(pair[1], "engine1")
        await load_from_disk(giver, trained, 7)
        before, expected = await sample(taker, "before"), await sample(giver, "expected")
        assert before != expected and await held(taker) != await held(giver), "or it would show nothing"
        pool = EnginePool([giver], 8)
        try:
            await taker.pause("abort")
            await pool.admit(taker)
            long = asyncio.create_task(pool.generate(GenerateRequest("long", (9, 8), 400, ignore_eos=True)))
            await asyncio.sleep(0.2)
            assert await pool.catch_up("engine1") == "engine0"
            assert not long.done(), "the giver generates meanwhile"
            assert len(pool) == 2 and not pool._admitted
            assert await taker.version() == 7
            assert await held(taker) == await held(giver)
            assert await sample(taker, "after") == expected
            done = await long
            assert len(done.output_ids) == 400 and {version for version, _, _ in done.versions} == {7}
            both = await asyncio.gather(*(pool.generate(GenerateRequest(f"r{i}", (5, 6), 8)) for i in range(4)))
            assert {each.engine for each in both} == {"engine0", "engine1"}, "both have requests"
        finally:
            await pool.close()

    asyncio.run(run())


@pytest.mark.nightly
def test_a_giver_whose_peer_never_comes_refuses_and_goes_on(pair: list[SharedServer]) -> None:
    async def run() -> None:
        async with pair[0].client() as giver:
            port = (await giver.ask(Transfer("offer", "alone", "127.0.0.1", 2), Offered)).port
            with pytest.raises(EngineError, match="wait timeout after 2000ms"):
                await giver.ask(Transfer("give", "alone", "127.0.0.1", 2, port), Transferred)
            assert len((await sample(giver, "goes-on"))[0]) == 24

    asyncio.run(run())


@pytest.mark.nightly
def test_an_engine_without_the_plug_in_is_given_nothing_and_keeps_its_version(pair: list[SharedServer]) -> None:
    """What engines answer that hold other tensors is in the unit tests."""

    async def run() -> None:
        async with pair[0].client() as giver, FakeEngine() as fake, EngineClient(fake.url, "stranger") as stranger:
            fake.sums = None
            stranger.deadlines = giver.deadlines = giver.deadlines.model_copy(update={"weight_sync_s": 8})
            with pytest.raises(EngineError, match="without mslime's plug-in"):
                await catch_up(stranger, giver)
            assert fake.model["weight_version"] == "default"

    asyncio.run(run())
