"""Sync of adapters alone, from a real trainer to a real engine that keeps generating: bits, log-probs, versions,
failures.

Four ranks write two versions of the adapters of one model. The engine's results under each are compared with the
trainer, and with transformers on merged weights.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.generating import GenerateRequest, ProbeRequest
from mslime.backends.sglang.port import SGLangPort
from mslime.backends.sglang.serving_adapters import AdapterVersion
from mslime.config.base import adapter_directory
from mslime.config.errors import EngineError, WeightSyncError
from mslime.config.schema import DeadlineConfig, RunConfig
from mslime.convert.peft import CONFIG, WEIGHTS
from mslime.data.probe import joined_routes
from mslime.data.sample import Sample
from mslime.data.tokenizer import load_tokenizer
from mslime.engine_plugin.wire import CANNOT, AdapterChecksums, Sums
from mslime.offline.jobs import run_job
from mslime.offline.lora_checkpoints import MergeLora
from tests.engines.conftest import SharedServer, serve
from tests.engines.lora_ranks import factor, fill_factors, held_factors
from tests.engines.reference import Reference
from tests.engines.test_rollout_service import assert_scored, config_for, service_for
from tests.engines.trainer_ranks import make_config, run_trainers
from tests.fixtures.engine_calls import drain
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

pytestmark = pytest.mark.timeout(400)
LORA: dict[str, Any] = {"rank": 4, "alpha": 6, "rs_lora": True, "sync": "adapter"}
PROMPT = list(range(40, 88))


@dataclass(frozen=True)
class Written:
    """Output of the trainer: directories and expected sums of both versions, and checkpoints with them merged."""

    root: Path
    sums: dict[int, dict[str, str]]
    merged: dict[int, Path]

    def version(self, version: int, name: str = "v") -> AdapterVersion:
        return AdapterVersion(f"{name}{version}", version, self.root / adapter_directory(version))


def with_lora(config: RunConfig, **lora: Any) -> RunConfig:
    return RunConfig.model_validate(config.model_dump() | {"lora": {**LORA, **lora}})


def hold_version(trainer: MegatronTrainer, version: int) -> None:
    fill_factors(trainer)
    with torch.no_grad():
        for _, tensor, _, _ in held_factors(trainer):
            tensor.mul_(1.0 if version == 1 else -0.7)


def write_versions(trainer: MegatronTrainer, root: Path) -> dict[int, dict[str, str]]:
    trainer.weight_sender(SGLangPort(DeadlineConfig()))
    sums: dict[int, dict[str, str]] = {}
    for version in (1, 2):
        hold_version(trainer, version)
        sums[version] = trainer.write_adapter(root / adapter_directory(version), verify=True)
        trainer.export(root / f"peft{version}")
    return sums


def of_single_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of all experts, [experts, ...], as those of each under peft's names."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        each = {name.replace(".experts.", f".experts.{i}."): part for i, part in enumerate(tensor.unbind())}
        found |= each if ".experts." in name else {name: tensor}
    return found


@pytest.fixture(scope="module")
def written(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    root = tmp_path_factory.mktemp("adapters")
    return write_both(tiny_qwen3_moe, root)


def write_both(checkpoint: Path, root: Path, **lora: Any) -> Written:
    config = with_lora(make_config(checkpoint, root, tp=2, pp=2, ep=2), **lora)
    first, *others = run_trainers(write_versions, config, root)
    assert all(other == first for other in others)
    merged = {version: root / f"merged{version}" for version in (1, 2)}
    for version, directory in merged.items():
        run_job(MergeLora(checkpoint, root / f"peft{version}"), directory)
    return Written(root, first, merged)


@pytest.fixture(scope="module")
def server(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """An engine that serves adapters of all linear layers."""
    served = serve(tiny_qwen3_moe, tmp_path_factory.mktemp("adapted"), lora=LORA)
    yield served
    served.process.stop()


def with_engine(server: SharedServer, work: Callable[[EngineClient, EnginePool], Awaitable[None]]) -> None:
    """`work` with a pool of this engine, which has no adapters before and after."""

    async def main() -> None:
        client = server.client()
        pool = EnginePool([client], 32)
        try:
            await work(client, pool)
        finally:
            await drain(client)
            for adapter in client.adapters.loaded:
                await client._unload_adapter(adapter.name)
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), 200))


def request(rid: str, tokens: int = 8, **options: Any) -> GenerateRequest:
    return GenerateRequest(rid, PROMPT, tokens, temperature=0.8, ignore_eos=True, **options)


async def load(pool: EnginePool, adapter: AdapterVersion, alive: int = 2) -> None:
    assert len((await pool.load_adapter(adapter, alive)).urls) == 1


@pytest.mark.nightly
def test_what_four_ranks_write_is_what_they_hold(written: Written) -> None:
    for version, sign in ((1, 1.0), (2, -0.7)):
        tensors = load_file(written.root / adapter_directory(version) / WEIGHTS)
        assert tensors.keys() == written.sums[version].keys() and len(tensors) == 4 * 2 * (4 + 3)
        single = of_single_experts(tensors)
        for name, tensor in single.items():
            assert torch.equal(tensor, factor(name, tuple(tensor.shape)) * sign), name
        exported = load_file(written.root / f"peft{version}" / WEIGHTS)
        assert single.keys() == exported.keys() and all(torch.equal(single[name], exported[name]) for name in single)
    served = json.loads((written.root / adapter_directory(1) / CONFIG).read_text())
    assert (served["r"], served["lora_alpha"], served["use_rslora"]) == (4, 12, False), "6 / sqrt(4) is 12 / 4"


def test_an_engine_holds_every_bit_and_says_what_the_trainer_says(
    written: Written, server: SharedServer, tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    found = held_and_said(server, written)
    config = with_lora(make_config(tiny_qwen3_moe, tmp_path))
    said = run_trainers(say, config, {version: probed.tokens for version, probed in found.items()})[0]
    for version, probed in found.items():
        log_probs, chosen = said[version]
        assert np.abs(probed.log_probs - log_probs).max() < 1e-4
        assert np.array_equal(np.sort(probed.routes, -1), np.sort(chosen, -1)[: len(probed.routes)])
    assert np.abs(said[1][0] - said[2][0])[: len(PROMPT)].max() > 0.1, "two versions are two models"


@pytest.mark.nightly
@pytest.mark.parametrize("experts", ["per_expert", "shared_outer"])
def test_an_engine_of_two_ranks_holds_every_bit_and_says_what_the_trainer_says(experts: str, tmp_path: Path) -> None:
    # On a CPU, SGLang pads experts that are not a multiple of 64 on each rank.
    checkpoint = make_tiny_qwen3_moe(tmp_path / "model", moe_intermediate_size=128)
    written = write_both(checkpoint, tmp_path, experts=experts)
    server = serve(checkpoint, tmp_path / "logs", lora=LORA | {"experts": experts}, sglang={"tp_size": 2})
    try:
        found = held_and_said(server, written)
    finally:
        server.process.stop()
    config = with_lora(make_config(checkpoint, tmp_path), experts=experts)
    said = run_trainers(say, config, {version: probed.tokens for version, probed in found.items()})[0]
    for version, probed in found.items():
        assert np.abs(probed.log_probs - said[version][0]).max() < 1e-4


@pytest.mark.nightly
def test_experts_that_share_factors_are_served(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """Bits, and log-probs of both versions: those of the trainer, and of transformers with the adapter merged."""
    written = write_both(tiny_qwen3_moe, tmp_path, experts="shared_outer")
    tensors = load_file(written.version(1).directory / WEIGHTS)
    assert tensors.keys() == written.sums[1].keys() and len(tensors) == 4 * 2 * (4 + 3)
    alone = [name for name, tensor in tensors.items() if ".experts." in name and len(tensor) == 1]
    assert len(alone) == 4 * 3 and all("lora_B" in name if "down_proj" in name else "lora_A" in name for name in alone)
    server = serve(tiny_qwen3_moe, tmp_path, lora=LORA | {"experts": "shared_outer"})
    try:
        found = held_and_said(server, written)
    finally:
        server.process.stop()
    config = with_lora(make_config(tiny_qwen3_moe, tmp_path), experts="shared_outer")
    said = run_trainers(say, config, {version: probed.tokens for version, probed in found.items()})[0]
    for version, probed in found.items():
        assert np.abs(probed.log_probs - said[version][0]).max() < 1e-4
        ids = [int(token) for token in probed.tokens]
        logits, _ = Reference(written.merged[version])(ids, probed.routes)
        merged = torch.from_numpy(logits).log_softmax(-1).numpy()[np.arange(len(ids) - 1), ids[1:]]
        assert np.abs(probed.log_probs[1:] - merged).max() < 1e-4
    assert np.abs(said[1][0] - said[2][0])[: len(PROMPT)].max() > 0.1, "two versions are two models"


def held_and_said(server: SharedServer, written: Written) -> dict[int, Any]:
    """An engine's results with each version, of which it holds every bit, and none of the other's."""
    found: dict[int, Any] = {}

    async def work(client: EngineClient, pool: EnginePool) -> None:
        for version in (1, 2):
            await load(pool, written.version(version))
            assert await pool.compare(written.sums[version], strict=True, adapter=version) == len(written.sums[1])
            with pytest.raises(WeightSyncError, match="other values"):
                await pool.compare(written.sums[3 - version], strict=True, adapter=version)
            probed = await pool.probe(ProbeRequest(f"probe{version}", PROMPT, version, want_routes=True))
            found[version] = probed[server.url]

    with_engine(server, work)
    return found


def say(trainer: MegatronTrainer, tokens: dict[int, Any]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for version, sequence in tokens.items():
        hold_version(trainer, version)
        log_probs, rows = trainer.probe([sequence])
        assert rows is not None
        found[version] = (log_probs, joined_routes([rows], len(sequence)))
    return found


def test_a_bit_that_changed_on_the_way_is_found(written: Written, server: SharedServer, tmp_path: Path) -> None:
    shutil.copytree(written.root / adapter_directory(1), tmp_path / "changed")
    tensors = load_file(tmp_path / "changed" / WEIGHTS)
    name = next(name for name in tensors if "experts.up_proj.lora_B" in name)
    tensors[name].view(torch.int32)[5, 3, 2] ^= 1
    save_file(tensors, tmp_path / "changed" / WEIGHTS)

    async def work(client: EngineClient, pool: EnginePool) -> None:
        await load(pool, AdapterVersion("changed", 1, tmp_path / "changed"))
        with pytest.raises(WeightSyncError, match=r"experts\.up_proj\.lora_B.*1 of 56") as caught:
            await pool.compare(written.sums[1], strict=True, adapter=1)
        assert server.url in str(caught.value)

    with_engine(server, work)


@pytest.mark.nightly
def test_a_running_request_keeps_its_adapter_which_is_unloaded_when_it_has_ended(
    written: Written, server: SharedServer
) -> None:
    async def work(client: EngineClient, pool: EnginePool) -> None:
        await load(pool, one := written.version(1))
        await pool.switch(1, interrupt=False)
        running = asyncio.create_task(pool.generate(request("long", 400)))
        while not client.adapters.requests_of(one):
            await asyncio.sleep(0.01)
        await load(pool, two := written.version(2))
        await pool.switch(2, interrupt=False)
        new = await pool.generate(request("new", 4))
        assert not running.done(), "it was over before the other began"
        assert new.versions == ((2, 0, 4),) and client.adapters.loaded == (one, two)
        old = await running
        assert old.versions == ((1, 0, 400),) and len(old.output_ids) == 400
        await client.adapters.settled()
        assert client.adapters.loaded == (two,)
        for adapter, is_there in ((one, False), (two, True)):
            (rank,) = (await client.ask(AdapterChecksums(adapter.name), Sums, repeat=True)).ranks
            assert (CANNOT not in rank) == is_there, "the engine has forgotten the older one"

    with_engine(server, work)


def test_a_request_that_is_interrupted_returns_what_it_has_and_the_next_has_the_new_adapter(
    written: Written, server: SharedServer
) -> None:
    async def work(client: EngineClient, pool: EnginePool) -> None:
        await load(pool, written.version(1))
        await pool.switch(1, interrupt=True)
        running = asyncio.create_task(pool.generate(request("long", 1500)))
        await asyncio.sleep(0.5)
        await load(pool, two := written.version(2))
        await pool.switch(2, interrupt=True)
        old = await asyncio.wait_for(running, 60)
        assert old.finish == "abort" and 0 < len(old.output_ids) < 1500
        assert old.versions == ((1, 0, len(old.output_ids)),)
        await client.adapters.settled()
        assert client.adapters.loaded == (two,)

    with_engine(server, work)


def test_prefixes_are_never_shared_between_versions(written: Written, server: SharedServer) -> None:
    """By the name of the adapter alone: the requests have one key of the cache."""

    async def work(client: EngineClient, pool: EnginePool) -> None:
        cached: list[int] = []
        for number, version in enumerate((1, 1, 2, 2)):
            await load(pool, written.version(version))
            await pool.switch(version, interrupt=False)
            result = await pool.generate(request(f"r{number}", 1, cache_key="same"))
            cached.append(result.cached_tokens)
        assert cached[0] == cached[2] == 0 and cached[1] == cached[3] > 0, cached

    with_engine(server, work)


def test_an_adapter_that_cannot_be_read_leaves_the_engine_on_its_own(
    written: Written, server: SharedServer, tmp_path: Path
) -> None:
    shutil.copytree(written.root / adapter_directory(2), tmp_path / "broken")
    (tmp_path / "broken" / WEIGHTS).write_bytes(b"no tensors")

    async def work(client: EngineClient, pool: EnginePool) -> None:
        await load(pool, one := written.version(1))
        await pool.switch(1, interrupt=False)
        with pytest.raises(EngineError, match="load_lora_adapter"):
            await pool.load_adapter(AdapterVersion("broken", 2, tmp_path / "broken"), 2)
        assert client.adapters.loaded == (one,) and not pool.dead, "the only engine is not given up"
        assert (await pool.generate(request("after", 3))).versions == ((1, 0, 3),)

    with_engine(server, work)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_a_response_across_versions_holds_what_each_made(
    written: Written, server: SharedServer, tmp_path: Path, mode: str
) -> None:
    """Every token and route equals a pass of merged weights of its version, even if one response has both."""
    references = {version: Reference(path) for version, path in written.merged.items()}
    crossed: list[Sample] = []

    async def work() -> None:
        config = with_lora(
            config_for(
                server, tmp_path, stop_ids=1, max_response_tokens=600, max_staleness=1, pause_mode=mode, group_size=2
            )
        )
        async with service_for(config, load_tokenizer(server.checkpoint), server) as (service, pool):
            try:
                batches = [await step(service, pool, 1), await step(service, pool, 2)]
                batches.append(await service.take(2))
            finally:
                await service.close()
                await unload_all(pool)
            samples = [sample for batch in batches for sample in batch.samples]
            for sample in samples:
                assert_scored(sample, references, atol=1e-4)
            versions = [[s.version for s in sample.segments[1:]] for sample in samples]
            assert [1] in versions and any(2 in each for each in versions)
            crossed.extend(sample for sample, each in zip(samples, versions, strict=True) if each == [1, 2])
            assert all(sample.aborts == 1 for sample in crossed)
            assert bool(crossed) == (mode == "abort"), "a request keeps its adapter"

    async def step(service: Any, pool: EnginePool, version: int) -> Any:
        await service.pause_for_update()
        await load(pool, written.version(version, mode), 2 if mode == "abort" else 3)
        await service.resume_after_update(version)
        return await service.take(version - 1)

    asyncio.run(asyncio.wait_for(work(), 240))


async def unload_all(pool: EnginePool) -> None:
    for client in pool.clients:
        assert isinstance(client, EngineClient)
        await drain(client)
        await client.adapters.settled()
        for adapter in client.adapters.loaded:
            await client._unload_adapter(adapter.name)
