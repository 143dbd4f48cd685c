"""Engines that are given adapters alone: which may be, when each is loaded, used and forgotten, and who fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mslime.backends.sglang import serving_adapters
from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.engine_pool import EnginePool, UpdateMembers
from mslime.backends.sglang.flags import command_line, server_fields
from mslime.backends.sglang.generating import GenerateRequest, GenerateResult, of_version
from mslime.backends.sglang.handshake import EngineNeeds, handshake
from mslime.backends.sglang.serving_adapters import AdapterVersion, ServingAdapters
from mslime.config.base import adapter_directory
from mslime.config.errors import ConfigError, EngineError, WeightSyncError, sync_error
from mslime.config.loader import build
from mslime.config.lora import LoraConfig
from mslime.config.resolved import ServedLora, engine_spec, served_lora
from mslime.config.schema import RunConfig
from mslime.convert.families import get_family
from mslime.convert.lora_rules import check_served, make_adapters, served_modules
from mslime.convert.peft import WEIGHTS
from mslime.engine_plugin.checksums import taken_apart
from mslime.engine_plugin.wire import AdapterChecksums, encode
from mslime.run.publish import AdapterPublisher
from mslime.run.sharing import SeparateGpus
from tests.fixtures.full_size import published_config
from tests.fixtures.model_facts import model_facts
from tests.fixtures.remote import fake_process
from tests.unit.fake_engine import LAYERS, TOP_K, VOCABULARY, FakeEngine
from tests.unit.test_sglang_pool import pool_of

LORA: dict[str, Any] = {"rank": 4, "sync": "adapter"}


def with_pool(work: Callable[[EnginePool, list[FakeEngine]], Awaitable[None]], engines: int = 2) -> None:
    """Run `work` with a pool over fake engines."""

    async def main() -> None:
        async with pool_of(engines) as (pool, fakes):
            await work(pool, fakes)

    asyncio.run(main())


def config(**sections: Any) -> RunConfig:
    return build({"model": {"path": "m"}, "data": {"prompts": ["p.jsonl"]}, "lora": LORA, **sections})


def version(number: int) -> AdapterVersion:
    return AdapterVersion(f"run-v{number}", number, Path(f"adapter{number}"))


# ------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"lora": {"sync": "adapter"}}, "lora.sync = 'adapter': has no effect with lora.rank: 0"),
        ({"rollout": {"pause_mode": "retract", "max_staleness": 1}}, "rollout.pause_mode = 'retract'"),
        ({"weights": {"transport": "disk"}}, "weights.transport = 'disk'"),
        ({"sglang": {"tp_size": 2, "ep_size": 2}}, "sglang.ep_size = 2"),
        ({"sglang": {"max_loaded_loras": 9}}, "sglang.max_loaded_loras = 9: mslime sets it"),
        ({"sglang": {"quantization": "fp8"}}, "sglang.quantization = 'fp8': not tested"),
        ({"cluster": {"placement": "colocated"}}, "cluster.placement = 'colocated'"),
    ],
    ids=str,
)
def test_what_cannot_be_combined_is_refused_by_name(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**sections)


def test_supervised_training_has_no_engines_to_give_adapters_to() -> None:
    assert config().syncs_adapters
    assert not config(lora={"rank": 4}).syncs_adapters
    assert not config(train={"task": "sft"}).syncs_adapters


@pytest.mark.parametrize(("mode", "staleness", "alive"), [("abort", 4, 2), ("in_place", 1, 3), ("in_place", 3, 5)])
def test_as_many_versions_are_served_as_running_requests_may_have(mode: str, staleness: int, alive: int) -> None:
    assert config(rollout={"pause_mode": mode, "max_staleness": staleness}).adapters_alive == alive


def adapters(model: str, *targets: str) -> Any:
    hf_config = published_config(model)
    family = get_family(hf_config)
    lora = LoraConfig(rank=4, targets=targets) if targets else LoraConfig(rank=4)
    return make_adapters(family.rules(hf_config), lora), family


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "targets", "words"),
    [
        ("deepseek-v3", (), "not tested with adapters of DeepseekV3ForCausalLM"),
        ("qwen3-30B-A3B", ("q_proj", "o_proj"), "an adapter on q_proj without one on v_proj"),
        ("qwen3-30B-A3B", ("k_proj",), "an adapter on k_proj without one on q_proj"),
        ("qwen3-30B-A3B", ("v_proj",), "an adapter on v_proj without one on q_proj"),
        ("qwen3-30B-A3B", ("gate_proj", "up_proj"), "an adapter on gate_proj without one on down_proj"),
        ("qwen3-30B-A3B", ("down_proj",), "an adapter on down_proj without one on gate_proj"),
        ("qwen3-4B", ("up_proj",), "an adapter on up_proj without one on gate_proj"),
    ],
    ids=str,
)
def test_what_the_engine_does_not_serve_is_refused(model: str, targets: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_served(*adapters(model, *targets))


@pytest.mark.slow
@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj"), ("experts",), ("gate_proj", "down_proj")], ids=str)
def test_what_was_run_is_served(targets: tuple[str, ...]) -> None:
    check_served(*adapters("qwen3-30B-A3B", *targets))


def test_dense_layers_may_have_adapters_on_one_projection() -> None:
    check_served(*adapters("qwen3-4B", "down_proj"))


def test_a_server_makes_room_for_the_versions_and_modules_of_the_run() -> None:
    made, _ = adapters("qwen3-30B-A3B", "attention")
    modules = served_modules(made)
    assert sorted(modules) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert engine_spec(config(), modules).lora == ServedLora(4, modules, 2)
    assert engine_spec(config(lora={"rank": 4})).lora is None


def test_flags_of_a_server_with_adapters(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_experts": 8, "architectures": ["Qwen3MoeForCausalLM"]}')
    run = config(model={"path": str(tmp_path)}, cluster={"device": "cpu"}, lora=LORA | {"rank": 8})
    fields = server_fields(engine_spec(run, ("q_proj", "v_proj")), 0, "h", 1)
    line = " ".join(command_line(fields))
    assert "--enable-lora" in line and "--max-lora-rank 8 --lora-target-modules q_proj v_proj" in line
    assert "--max-loras-per-batch 2 --max-loaded-loras 3" in line and "--lora-backend torch_native" in line
    assert "shared-outer" not in line
    shared = config(model={"path": str(tmp_path)}, cluster={"device": "cpu"}, lora=LORA | {"experts": "shared_outer"})
    fields = server_fields(engine_spec(shared, ("gate_proj", "down_proj")), 0, "h", 1)
    assert "--experts-shared-outer-loras" in command_line(fields)
    assert not [
        flag
        for flag in command_line(server_fields(engine_spec(run), 0, "h", 1))
        if flag.startswith("--") and "lora" in flag
    ]


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({}, "without --enable-lora"),
        ({"enable_lora": True, "max_lora_rank": 2}, "--max-lora-rank 2"),
        ({"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["q_proj"]}, "lack v_proj"),
        (
            {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["all"], "max_loaded_loras": 2},
            "--max-loaded-loras 2",
        ),
        (
            {
                "enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["all"],
                "experts_shared_outer_loras": True,
            },
            "started with --experts-shared-outer-loras",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_server_that_was_started_for_other_adapters_is_refused(info: dict[str, Any], words: str) -> None:
    async def work() -> None:
        async with FakeEngine() as fake:
            fake.info |= info
            model = model_facts(VOCABULARY, num_layers=LAYERS, top_k=TOP_K)
            async with EngineClient(fake.url, "e0", model=model) as client:
                await handshake(client, EngineNeeds(False, lora=ServedLora(4, ("q_proj", "v_proj"), 2)))

    with pytest.raises(EngineError, match=words):
        asyncio.run(work())


def test_scaling_is_written_as_alpha_over_rank() -> None:
    hf_config = published_config("qwen3-4B")
    made = make_adapters(get_family(hf_config).rules(hf_config), LoraConfig(rank=16, alpha=32, rs_lora=True))
    plain = made.with_plain_scale()
    assert (plain.lora.alpha, plain.lora.rs_lora, plain.lora.scale) == (128, False, made.lora.scale)


# ------------------------------------------------------------------------------------------- what an engine has loaded


class Adapters(ServingAdapters):
    """With a record of what is unloaded."""

    def __init__(self) -> None:
        super().__init__(self._unload_it)
        self.unloaded: list[str] = []

    async def _unload_it(self, name: str) -> None:
        self.unloaded.append(name)


def test_an_adapter_is_unloaded_when_its_last_request_has_ended_and_never_while_it_is_current() -> None:
    async def work() -> None:
        held = Adapters()
        one, two = version(1), version(2)
        with held.used("before") as adapter:
            assert adapter is None, "nothing was switched to"
        held.add(one)
        held.switch(one)
        with held.used("a") as of_a, held.used("b"):
            assert of_a == one
            held.add(two)
            with held.used("c") as of_c:
                assert of_c == one, "loaded is not switched"
            held.switch(two)
            with held.used("d") as of_d:
                assert of_d == two and sorted(held.requests_of_older()) == ["a", "b"]
            assert held.loaded == (one, two)
        await held.settled()
        assert held.unloaded == ["run-v1"] and held.loaded == (two,)
        assert held.of_version(2) == two and held.of_version(1) is None

    asyncio.run(work())


def test_an_engine_that_does_not_unload_goes_on() -> None:
    async def refuses(name: str) -> None:
        raise EngineError("e0", name, "told to fail", "")

    async def work() -> None:
        held = ServingAdapters(refuses)
        held.add(version(1))
        held.switch(version(1))
        held.add(version(2))
        held.switch(version(2))
        await held.settled()
        assert held.loaded == (version(2),)

    asyncio.run(work())


class FakeRequests:
    """A client whose requests stop after so many aborts."""

    url = "http://fake"

    def __init__(self, stubborn: int) -> None:
        self.adapters, self.stubborn = Adapters(), stubborn
        self.aborted: list[str | None] = []
        self.resumed = 0
        self.deadlines = SimpleNamespace(engine_control_s=0.6)
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, rid: str) -> None:
        self._ends[rid] = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._run(rid)))

    async def _run(self, rid: str) -> None:
        with self.adapters.used(rid):
            await self._ends[rid].wait()

    async def abort(self, rid: str | None = None) -> None:
        self.aborted.append(rid)
        for each in [rid] if rid else list(self._ends):
            if self.aborted.count(each) + self.aborted.count(None) > self.stubborn and each in self._ends:
                self._ends.pop(each).set()

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        self.adapters.add(adapter)

    async def resume(self) -> None:
        self.resumed += 1

    def error(self, what: str, rule: str) -> EngineError:
        return EngineError("fake", what, rule, "")


async def loaded(client: Any, *numbers: int, alive: int = 3) -> None:
    """Load and switch to versions, one after the other, with a request of each."""
    for number in numbers:
        await serving_adapters.load_version(client, version(number), alive)
        client.adapters.switch(version(number))
        client.begin(f"r{number}")
        await asyncio.sleep(0)


def test_requests_of_the_oldest_adapter_make_room_for_the_newest() -> None:
    async def work() -> None:
        client: Any = FakeRequests(stubborn=1)
        await loaded(client, 1, 2, 3, 4)
        assert client.aborted == ["r1", "r1"] and client.adapters.unloaded == ["run-v1"]
        assert client.adapters.loaded == (version(2), version(3), version(4)) and client.resumed == 1
        await serving_adapters.load_version(client, version(4), 3)
        assert len(client.adapters.loaded) == 3 and len(client.aborted) == 2, "it is there already"

    asyncio.run(work())


def test_an_engine_that_holds_on_to_its_requests_is_named() -> None:
    with pytest.raises(EngineError, match="run-v1 did not stop"):
        asyncio.run(loaded(FakeRequests(stubborn=99), 1, 2, alive=1))


@pytest.mark.parametrize("stubborn", [0, 2])
def test_interrupted_requests_are_told_again_until_they_stop(stubborn: int) -> None:
    async def work() -> None:
        client: Any = FakeRequests(stubborn)
        await loaded(client, 1)
        await serving_adapters.load_version(client, version(2), 3)
        client.adapters.switch(version(2))
        await serving_adapters.interrupt_older(client, 5.0)
        assert client.adapters.requests_of_older() == [] and client.aborted == [None, *["r1"] * stubborn]
        assert client.adapters.loaded == (version(2),)

    asyncio.run(work())


# ------------------------------------------------------------------------------------------------------------ the pool


def request(rid: str, adapter: str = "") -> GenerateRequest:
    return GenerateRequest(rid, [1, 2], 2, adapter=adapter)


def test_an_engine_that_cannot_load_is_dead_and_gave_no_request_the_adapter() -> None:
    async def work(pool: EnginePool, fakes: list[FakeEngine]) -> None:
        serving = await pool.load_adapter(version(1), 2)
        assert serving == UpdateMembers(tuple(f.url for f in fakes), {}, frozenset({1}))
        await pool.switch(1, interrupt=True)
        assert (await pool.generate(request("a"))).versions == ((1, 0, 2),)
        fakes[1].broken.add("/load_lora_adapter")
        serving = await pool.load_adapter(version(2), 2)
        assert serving.urls == (fakes[0].url,) and serving.adapters == {1, 2}
        assert "load_lora_adapter" in serving.gone["e1"] and "told to fail" in serving.gone["e1"]
        await pool.switch(2, interrupt=True)
        results = [await pool.generate(request(f"b{i}")) for i in range(4)]
        assert {(r.engine, r.versions) for r in results} == {("e0", ((2, 0, 2),))}
        asked = [body.get("lora_path") for path, body in fakes[1].seen if path == "/generate"]
        assert "run-v2" not in asked

    with_pool(work)


def test_an_engine_that_joins_has_the_adapter_before_it_has_requests() -> None:
    async def work(pool: EnginePool, fakes: list[FakeEngine]) -> None:
        await pool.load_adapter(version(1), 2)
        await pool.switch(1, interrupt=False)
        async with FakeEngine() as late:
            client = EngineClient(late.url, "late", model=model_facts(VOCABULARY, num_layers=LAYERS, top_k=TOP_K))
            await client.pause("retract")
            await pool.admit(client)
            assert late.url in (await pool.load_adapter(version(2), 2)).urls
            assert not late.paused, "it generates"
            await pool.switch(2, interrupt=False)
            await asyncio.gather(*(pool.generate(request(f"r{i}")) for i in range(9)))
            paths = [path for path, _ in late.seen]
            assert paths.index("/load_lora_adapter") < paths.index("/generate")
            assert {body["lora_path"] for path, body in late.seen if path == "/generate"} == {"run-v2"}
            await pool.close()

    with_pool(work)


def test_no_engine_is_paused_or_flushed_for_an_adapter() -> None:
    async def work(pool: EnginePool, fakes: list[FakeEngine]) -> None:
        for number in (1, 2, 3):
            await pool.load_adapter(version(number), 2)
            await pool.switch(number, interrupt=True)
            await pool.generate(request(f"r{number}"))
        await asyncio.gather(*(client.adapters.settled() for client in pool.clients))
        paths = [path for path, _ in fakes[0].seen]
        assert not {"/pause_generation", "/flush_cache", "/begin_weight_update"} & set(paths)
        unloaded = [body["lora_name"] for path, body in fakes[0].seen if path == "/unload_lora_adapter"]
        assert unloaded == ["run-v1", "run-v2"]

    with_pool(work, engines=1)


def of(owner: str, number: int) -> AdapterVersion:
    return AdapterVersion(f"{owner}-v{number}", number, Path(f"{owner}{number}"), owner)


async def switched(pool: EnginePool, adapter: AdapterVersion, alive: int = 2, interrupt: bool = False) -> UpdateMembers:
    serving = await pool.load_adapter(adapter, alive)
    await pool.switch(adapter.version, interrupt, adapter.owner)
    return serving


def test_several_adapters_have_versions_of_their_own() -> None:
    async def work(pool: EnginePool, fakes: list[FakeEngine]) -> None:
        await switched(pool, of("maths", 4))
        with pytest.raises(AssertionError, match="before an adapter of code"):
            await pool.generate(request("too early", "code"))
        assert (await switched(pool, of("code", 1))).adapters == {1}
        assert (await switched(pool, of("maths", 5))).adapters >= {5}
        found = [await pool.generate(request(rid, adapter)) for rid, adapter in (("m", "maths"), ("c", "code"))]
        assert [each.versions for each in found] == [((5, 0, 2),), ((1, 0, 2),)]
        bodies = {body["rid"]: body["lora_path"] for path, body in fakes[0].seen if path == "/generate"}
        assert bodies == {"m": "maths-v5", "c": "code-v1"}
        (client,) = pool.clients
        await client.adapters.settled()
        assert client.adapters.loaded == (of("code", 1), of("maths", 5))
        assert client.adapters.of_version(1, "maths") is None and client.adapters.of_version(1) is None
        fakes[0].sums = {"a": "1 2"}
        await pool.compare({"a": "1 2"}, True, 1, "code")
        assert fakes[0].seen[-1] == ("/weights_checker", {"action": encode(AdapterChecksums("code-v1"))})

    with_pool(work, engines=1)


def test_an_adapter_interrupts_its_own_requests_alone() -> None:
    async def work(pool: EnginePool, fakes: list[FakeEngine]) -> None:
        (client,), aborted = pool.clients, list[str | None]()

        async def abort(rid: str | None = None) -> None:
            aborted.append(rid)
            running.pop(str(rid)).set()

        client.abort = abort  # type: ignore[method-assign]
        await switched(pool, of("maths", 1))
        await switched(pool, of("code", 1))
        running = {f"{owner}{i}": asyncio.Event() for owner in ("maths", "code") for i in range(2)}

        async def runs(rid: str) -> None:
            with client.adapters.used(rid, rid[:-1]):
                await running[rid].wait()

        tasks = [asyncio.create_task(runs(rid)) for rid in list(running)]
        await asyncio.sleep(0)
        await pool.abort("code")
        assert sorted(map(str, aborted)) == ["code0", "code1"] and sorted(running) == ["maths0", "maths1"]
        assert sorted(client.adapters.requests_by("maths")) == ["maths0", "maths1"]
        await switched(pool, of("code", 2), interrupt=True)
        assert len(aborted) == 2, "none of its own is older"
        await switched(pool, of("maths", 2), interrupt=True)
        assert sorted(map(str, aborted)) == ["code0", "code1", "maths0", "maths1"]
        await asyncio.gather(*tasks)

    with_pool(work, engines=1)


def test_room_for_versions_is_each_adapters_own() -> None:
    async def work() -> None:
        client: Any = FakeRequests(stubborn=0)
        for adapter in (of("maths", 1), of("code", 1), of("code", 2)):
            await serving_adapters.load_version(client, adapter, 2)
            client.adapters.switch(adapter)
        with client.adapters.used("m", "maths"), client.adapters.used("c", "code"):
            await serving_adapters.load_version(client, of("code", 3), 2)
        assert client.aborted == [] and client.adapters.unloaded == ["code-v1"]
        assert client.adapters.loaded == (of("maths", 1), of("code", 2), of("code", 3))
        assert client.resumed == 1, "it joined once"

    asyncio.run(work())


def test_an_engine_that_joins_has_every_adapter_before_it_has_requests() -> None:
    async def work(pool: EnginePool, fakes: list[FakeEngine]) -> None:
        await switched(pool, of("maths", 4))
        await switched(pool, of("code", 1))
        async with FakeEngine() as late:
            client = EngineClient(late.url, "late", model=model_facts(VOCABULARY, num_layers=LAYERS, top_k=TOP_K))
            await client.pause("retract")
            await pool.admit(client)
            await pool.load_adapter(of("code", 2), 2)
            early = [asyncio.create_task(pool.generate(request(f"early{i}", "maths"))) for i in range(4)]
            await asyncio.sleep(0.05)
            assert not any(path == "/generate" for path, _ in late.seen), "code is not switched to there yet"
            await pool.switch(2, interrupt=False, owner="code")
            found = await asyncio.gather(*early)
            assert {each.engine for each in found} == {"e0", "late"}
            assert {each.versions for each in found} == {((4, 0, 2),)}
            assert {body["lora_path"] for path, body in late.seen if path == "/generate"} == {"maths-v4"}
            await pool.close()

    with_pool(work, engines=1)


def test_adapters_that_differ_are_named_with_their_engine() -> None:
    async def work(pool: EnginePool, fakes: list[FakeEngine]) -> None:
        await pool.load_adapter(version(1), 2)
        fakes[0].sums = {"a": "1 2"}
        assert await pool.compare({"a": "1 2"}, True, adapter=1) == 1
        action = [body["action"] for path, body in fakes[0].seen if path == "/weights_checker"]
        assert action == [encode(AdapterChecksums("run-v1"))]
        with pytest.raises(WeightSyncError, match="other values"):
            await pool.compare({"a": "3 2"}, True, adapter=1)
        fakes[0].sums = None
        with pytest.raises(WeightSyncError, match="engine_plugin/path_entry"):
            await pool.compare({"a": "1 2"}, True, adapter=1)

    with_pool(work, engines=1)


def test_every_token_is_of_the_version_of_its_request() -> None:
    result = GenerateResult(
        np.arange(5, dtype=np.int32), np.zeros(5, np.float32), "abort", ((0, 0, 5),), None, None, 0, "", "e"
    )
    assert of_version(result, 7).versions == ((7, 0, 5),)
    nothing = GenerateResult(result.output_ids[:0], result.log_probs[:0], "abort", (), None, None, 0, "", "e")
    assert of_version(nothing, 7).versions == ()


def test_what_sglang_joins_is_taken_apart_again() -> None:
    """As `LoRAAdapter._normalize_weights` joins it: rows of q, k, v, and of gate and up, of both factors."""
    shapes = {"q_proj": 6, "k_proj": 2, "v_proj": 2, "gate_proj": 5, "up_proj": 5}
    at = "layers.0.{}.lora_{}.weight"
    tensors = {at.format(m, "A"): torch.randn(3, 4) for m in shapes}
    tensors |= {at.format(m, "B"): torch.randn(rows, 3) for m, rows in shapes.items()}
    tensors["layers.0.o_proj.lora_A.weight"] = torch.randn(3, 4)
    kept = {"layers.0.o_proj.lora_A.weight": tensors["layers.0.o_proj.lora_A.weight"]}
    for factor in "AB":
        for whole, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            kept[at.format(whole, factor)] = torch.cat([tensors[at.format(part, factor)] for part in parts])
    found = dict(taken_apart(kept, {name: tensor.shape for name, tensor in tensors.items()}))
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
    # Without keys SGLang puts zeros of the values' shape in their place.
    without = {name: tensor.shape for name, tensor in tensors.items() if "k_proj" not in name}
    q, v = (tensors[at.format(module, "B")] for module in ("q_proj", "v_proj"))
    kept[at.format("qkv_proj", "B")] = torch.cat([q, torch.zeros_like(v), v])
    found = dict(taken_apart(kept, without))
    assert torch.equal(found[at.format("v_proj", "B")], v)
    # And of all experts at once: [experts, ...].
    shapes = {"gate_proj": 5, "up_proj": 5}
    tensors = {at.format(m, "A"): torch.randn(2, 3, 4) for m in shapes}
    tensors |= {at.format(m, "B"): torch.randn(2, rows, 3) for m, rows in shapes.items()}
    experts = {at.format("gate_up_proj", f): torch.cat([tensors[at.format(m, f)] for m in shapes], 1) for f in "AB"}
    found = dict(taken_apart(experts, {name: tensor.shape for name, tensor in tensors.items()}))
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


# ------------------------------------------------------------------------------------------------------------- control


class FakeRun:
    """Trainers, rollout service and fleet in one, which write down what they are asked."""

    def __init__(self, urls: tuple[str, ...], wrong: list[WeightSyncError | None]) -> None:
        self.urls, self.wrong, self.calls = urls, wrong, list[str]()
        self.alive, self.addresses, self.joins = frozenset[int](), (), 0

    def write_adapter(self, directory: Path, verify: bool) -> Any:
        directory.mkdir(parents=True)
        (directory / WEIGHTS).write_bytes(b"12345678")
        self.calls.append(f"write {directory.name}")
        return ({"a": "1 2"} if verify else {}), {"trainer 0": (0.0, 1.0)}

    def load_adapter(self, adapter: AdapterVersion, alive: int) -> UpdateMembers:
        self.calls.append(f"load {adapter.directory.name} {alive}")
        self.alive |= {adapter.version}
        return UpdateMembers(self.urls, {}, self.alive)

    def compare(self, expected: Any, strict: bool, adapter: int, owner: str) -> int:
        self.calls.append(f"compare {adapter}")
        if self.wrong and (error := self.wrong.pop(0)) is not None:
            raise error
        return 7

    def mark_dead(self, urls: Any, why: str) -> None:
        self.calls.append(f"leave out {' '.join(sorted(urls))}")

    def lost(self, gone: Any) -> None: ...

    def check(self) -> None: ...


def publisher(run: FakeRun, directory: Path) -> AdapterPublisher:
    made: Any = run
    return AdapterPublisher(
        config(output_dir=str(directory)), fake_process(made), made, made, made, SeparateGpus(lambda: None), run.check,
        lambda: "", made, made,
    )  # fmt: skip


def test_directories_are_kept_as_long_as_a_request_may_have_their_adapter(tmp_path: Path) -> None:
    run = FakeRun(("http://a:1",), [])
    sends = publisher(run, tmp_path)
    at = config(output_dir=str(tmp_path)).weights_directory
    (at / adapter_directory(99)).mkdir(parents=True)  # of a run that was killed

    def there() -> set[str]:
        return {path.name for path in at.iterdir()}

    sent = sends.send(0, True)
    assert (sent.report.bytes, sent.compared, len(sends._connected)) == (8, 7, 1)
    assert there() == {adapter_directory(0)}
    sends.send(1, False)
    assert there() == {adapter_directory(0), adapter_directory(1)}
    run.alive = frozenset({1})
    sends.send(2, False)
    assert there() == {adapter_directory(1), adapter_directory(2)}
    assert run.calls.count("compare 0") == 1 and run.calls[0] == f"write {adapter_directory(0)}"


def test_an_engine_that_holds_others_is_left_out_and_the_rest_is_compared_again(tmp_path: Path) -> None:
    wrong = sync_error("check", "http://b:1: layer 3", "the engine has other values")
    run = FakeRun(("http://a:1", "http://b:1"), [wrong])
    sends = publisher(run, tmp_path)
    assert sends.send(1, True).compared == 7 and len(sends._connected) == 1
    assert run.calls[-3:] == ["compare 1", "leave out http://b:1", "compare 1"]


@pytest.mark.parametrize("where", ["http://a:1: layer 3", "nobody in particular"])
def test_where_all_engines_hold_others_the_sync_fails(tmp_path: Path, where: str) -> None:
    run = FakeRun(("http://a:1",), [sync_error("check", where, "the engine has other values")])
    with pytest.raises(WeightSyncError, match="other values"):
        publisher(run, tmp_path).send(1, True)
    assert not any("leave out" in call for call in run.calls)


def test_what_a_run_says_of_its_adapters_to_servers() -> None:
    assert served_lora(config(), ()) is None
    assert served_lora(config(lora=LORA | {"rank": 9}), ("q_proj",)) == ServedLora(9, ("q_proj",), 2)
