"""A real engine releases its memory and takes it back: pages are really freed, wrong calls do nothing, and samples
across an offload carry the right weight version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.generating import GenerateRequest
from mslime.config.base import ENGINE_TAGS
from mslime.config.errors import EngineError
from mslime.engine_plugin.memory_release import drop_pages
from tests.engines.conftest import SharedServer, serve
from tests.fixtures.engine_calls import load_beneath_the_cache, load_from_disk
from tests.fixtures.memory import written_bytes
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

pytestmark = pytest.mark.timeout(400)
MIB = 1 << 20
ROUNDS = 3
"""Median of three releases: a server's garbage collection in one of them returns memory of the requests before."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """An engine of 40 MB of weights that shares its GPU with a trainer."""
    model = make_tiny_qwen3_moe(
        tmp_path_factory.mktemp("colocated") / "model", hidden_size=256, moe_intermediate_size=192, num_experts=16
    )
    started = serve(
        model, tmp_path_factory.mktemp("sglang"), cluster={"placement": "colocated"}, weights={"transport": "shm"},
        sglang={"max_total_tokens": 65536},
    )  # fmt: skip
    yield started
    started.process.stop()


def own_memory(server: SharedServer) -> float:
    """MiB of the server's processes."""
    return sum(written_bytes(pid) for pid in server.process.pids) / MIB


async def fill_cache(client: EngineClient) -> None:
    """Use most of the cache's pages."""
    prompts = [[(i * 7 + j * 3) % 250 + 3 for j in range(1500)] for i in range(12)]
    await asyncio.gather(*(client.generate(GenerateRequest(f"fill{i}", p, 2)) for i, p in enumerate(prompts)))


async def sample(client: EngineClient, rid: str, tokens: int = 8) -> Any:
    return await client.generate(GenerateRequest(rid, (5, 6, 7), tokens, temperature=0.0, ignore_eos=True))


def test_memory_of_an_engine_falls_and_comes_back_and_says_the_same_under_the_same_weights(
    server: SharedServer,
) -> None:
    async def run() -> tuple[float, list[float], list[float]]:
        async with server.client() as client:
            await fill_cache(client)
            before, whole = await sample(client, "before"), own_memory(server)
            await client.pause("retract")
            held: list[float] = []
            for tags in [("weights",), ()] * ROUNDS + [("weights",)]:
                await client.hold_memory(tags)  # type: ignore[arg-type]
                assert (await client.released_memory()).tags == set(ENGINE_TAGS) - set(tags)
                held.append(own_memory(server))
            await load_from_disk(client, server.checkpoint, 0)
            await client.hold_memory(ENGINE_TAGS)
            await client.resume()
            after = await sample(client, "after")
            assert after.output_ids.tolist() == before.output_ids.tolist()
            assert after.log_probs.tolist() == before.log_probs.tolist(), "to the bit: what no tensor covers is zero"
            return whole, held[::2], held[1::2]

    whole, with_weights, without = asyncio.run(run())
    cache = 12 * 1500 * 4 * 2 * 2 * 64 * 4 / MIB  # tokens x layers x key and value x heads x width x bytes
    weights = sum(file.stat().st_size for file in server.checkpoint.glob("*.safetensors")) / MIB
    assert cache > 50 and weights > 30
    assert whole - with_weights[0] > 0.9 * cache
    released = [before - after for before, after in zip(with_weights, without, strict=False)]
    resumed = [after - before for before, after in zip(without, with_weights[1:], strict=True)]
    assert median(released) == pytest.approx(weights, rel=0.15)
    assert median(resumed) == pytest.approx(weights, rel=0.15)


async def test_weights_that_come_back_are_zeros_until_they_are_sent(server: SharedServer) -> None:
    async with server.client() as client:
        await client.pause("retract")
        await client.hold_memory(())
        await client.hold_memory(ENGINE_TAGS)
        await client.resume()
        found = await sample(client, "zeros")
        assert len(set(found.log_probs.tolist())) == 1 and found.log_probs[0] < -5, "every token is as likely"
        await load_from_disk(client, server.checkpoint, 0)


@pytest.mark.nightly
async def test_what_would_end_a_stock_server_is_refused_or_does_nothing(server: SharedServer) -> None:
    async with server.client() as client:
        running = asyncio.create_task(sample(client, "running", 400))
        await asyncio.sleep(0.5)
        with pytest.raises(EngineError, match="requests are running") as caught:
            await client.hold_memory(())
        assert caught.value.field == client.name
        assert not (await client.released_memory()).tags
        assert len((await running).output_ids) == 400, "it goes on"
        await client._control("/resume_memory_occupation", {"tags": ["weights", "kv_cache"]})
        await client.pause("retract")
        for _ in range(2):
            await client._control("/release_memory_occupation", {"tags": ["kv_cache"]})
        assert (await client.released_memory()).tags == {"kv_cache"}
        await client._control("/resume_memory_occupation", {})
        await client.resume()
        assert not (await client.released_memory()).tags and len((await sample(client, "lives")).output_ids) == 8


@pytest.mark.nightly
async def test_a_response_goes_on_across_a_sleep_and_says_which_weights_sampled_what(server: SharedServer) -> None:
    """Retracted, with its engine's memory given back and other weights in it afterwards."""
    async with server.client() as client:
        await client.stamp(1)
        running = asyncio.create_task(sample(client, "across", 400))
        await asyncio.sleep(1.0)
        await client.pause("retract")
        await client.hold_memory(())
        await client.hold_memory(("weights",))
        await load_beneath_the_cache(client, server.checkpoint, 2)
        await client.hold_memory(ENGINE_TAGS)
        await client.resume()
        result = await running
        assert len(result.output_ids) == 400
        (first, start, cut), (second, again, end) = result.versions
        assert (first, start, second, end) == (1, 0, 2, 400) and 0 < cut == again < 400


@pytest.mark.nightly
async def test_a_pool_lets_go_of_an_engine_that_refuses_and_not_of_all(server: SharedServer) -> None:
    async with server.client() as client:
        pool = EnginePool([client], 8)
        running = asyncio.create_task(sample(client, "busy", 300))
        await asyncio.sleep(0.5)
        with pytest.raises(EngineError, match="requests are running"):
            await pool.hold_memory(())
        assert not pool.dead, "where all refuse, nobody is taken for dead"
        await running


def test_only_whole_pages_are_dropped_and_addresses_stay() -> None:
    import torch

    tensor = torch.ones(3 * 1024 + 17)
    view, address = tensor[5:], tensor.data_ptr()
    dropped = drop_pages([view, tensor])
    assert dropped % 4096 == 0 and 0 < dropped <= tensor.nbytes
    assert tensor.data_ptr() == address and int((tensor == 0).sum()) * 4 == dropped
    tensor.fill_(2)
    assert bool((view == 2).all())
