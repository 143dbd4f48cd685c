"""Parts of `mslime serve`: its configuration, its messages, and which adapter is loaded at which engine when."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mslime.backends.sglang.client import EngineDied
from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.generating import GenerateRequest, GenerateResult
from mslime.backends.sglang.serving_adapters import AdapterVersion, ServingAdapters
from mslime.config.errors import ConfigError, EngineError
from mslime.config.loader import merge, read_yaml
from mslime.config.resolved import engine_spec, policy_spec
from mslime_plugins.serve import bodies, proto
from mslime_plugins.serve.client_errors import ServeError
from mslime_plugins.serve.sampling import PooledEngines
from mslime_plugins.serve.served_config import adapted_parts, adapter_config, base_names, served_config
from mslime_plugins.serve.sessions import AdapterAsk
from mslime_plugins.serve.start import _key

ROOT = Path(__file__).parents[3]
PLAIN: dict[str, Any] = {"model": {"path": "models/tiny"}, "lora": {"rank": 8}}


def test_a_training_run_can_be_served_as_it_is() -> None:
    values = read_yaml(ROOT / "examples/quickstart/lora.yaml")
    config = served_config(values)
    assert config.syncs_adapters and config.train.replay == "off" and config.algorithm.kl_coef == 0
    assert config.lora.rank == values["lora"]["rank"] and config.model.path == Path(values["model"]["path"])


EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*.yaml")) if "model" in read_yaml(path)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_of_a_run_can_be_served(path: Path) -> None:
    over = {"lora": {"rank": 8}, "cluster": {"placement": "separate"}, "train": {"packed": False}}
    config = served_config(merge(read_yaml(path), over))
    assert not config.train.packed and config.train.task == "rl" and config.data.prompts == ["(of clients)"]


def test_the_example_of_the_page_is_a_server() -> None:
    text = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/serve.md").read_text(), re.DOTALL)
    assert text is not None
    config = served_config(yaml.safe_load(text[1]))
    assert base_names(config.model.path, config.serve.model_name)[0] == "Qwen/Qwen3-30B-A3B"
    assert config.layout.describe() == "TP2 DP2 EP4"


def test_engines_make_room_for_as_many_adapters_as_the_setting_says() -> None:
    for room in (1, 2, 8):
        config = served_config({**PLAIN, "serve": {"engine_adapters": room}})
        lora = engine_spec(config, ("q_proj",)).lora
        assert lora is not None and lora.rank == 8 and lora.alive == max(room, 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lora": {"rank": 0}}, "lora.rank = 0"),
        ({"cluster": {"placement": "colocated"}}, "cluster.placement"),
        ({"lora": {"rank": 8, "init": "somewhere"}}, "lora.init"),
        ({"lora": {"rank": 8, "experts": "shared_outer"}}, "lora.experts"),
        ({"serve": {"max_adapters": 0}}, "serve.max_adapters"),
        ({"serve": {"max_adaptors": 1}}, "did you mean 'max_adapters'"),
        ({"train": {"pakced": True}}, "train.pakced"),
        ({"rollout": {"max_totl_tokens": 3}}, "did you mean 'max_total_tokens'"),
        (
            {"lora": {"rank": 8, "together": True}, "megatron": {"moe_router_load_balancing_type": "global_aux_loss"}},
            "lora.together = True: routers count",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        served_config({**PLAIN, **values})


def test_a_missing_field_of_a_body_has_no_value() -> None:
    with pytest.raises(ServeError) as caught:
        bodies.read(bodies.CreateModel, b'{"session_id": "s", "base_model": "secret"}')
    assert (caught.value.field, caught.value.value) == ("model_seq_id", None)
    with pytest.raises(ServeError, match="model_seq_id = 'x'"):
        bodies.read(bodies.CreateModel, b'{"session_id": "s", "model_seq_id": "x", "base_model": "b"}')


def test_a_key_of_ones_own_begins_as_the_sdk_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "tml-ours")
    monkeypatch.setenv("THEIRS", "theirs")
    assert _key(served_config({**PLAIN, "serve": {"key": "env:OURS"}}).serve.key) == "tml-ours"
    with pytest.raises(ConfigError, match="begin with tml-"):
        _key(served_config({**PLAIN, "serve": {"key": "env:THEIRS"}}).serve.key)
    drawn = {_key(served_config(PLAIN).serve.key) for _ in range(2)}
    assert len(drawn) == 2 and all(key.startswith("tml-") and len(key) > 40 for key in drawn)


def test_an_adapter_has_the_layers_rank_and_seed_that_its_client_asked_for() -> None:
    config = served_config(PLAIN)
    spec = policy_spec(adapter_config(config, AdapterAsk(3, 17, attention=False)))
    assert (spec.lora.rank, spec.seed, spec.lora.alpha) == (3, 17, 32)
    assert spec.lora.targets == ("mlp", "shared_experts", "experts")
    assert adapter_config(config, AdapterAsk(3, 17, mlp=False)).lora.targets == ("attention",)
    assert adapter_config(config, AdapterAsk(3, 17)).lora.targets == config.lora.targets
    assert policy_spec(config).lora.rank == 8
    named = served_config({**PLAIN, "lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}})
    assert adapted_parts(named.lora) == (True, True) and adapted_parts(config.lora) == (True, True)
    with pytest.raises(ConfigError, match="q_proj, v_proj by name"):
        adapter_config(named, AdapterAsk(3, 17, mlp=False))


def test_messages_are_those_of_the_sdk() -> None:
    pb = pytest.importorskip("tinker.proto.tinker_public_pb2")
    theirs = pb.DESCRIPTOR.message_types_by_name
    compared = 0
    for name in proto._MESSAGES:
        if name == "Other":
            continue
        ours, known = proto._CLASSES[name].DESCRIPTOR, theirs[name]
        for one in ours.fields:
            other = known.fields_by_name[one.name]
            assert (one.number, one.type, one.is_repeated) == (other.number, other.type, other.is_repeated), one.name
            if one.message_type is not None and one.message_type.name not in ("Other",):
                assert one.message_type.name == other.message_type.name
            if one.enum_type is not None:
                assert dict(one.enum_type.values_by_number).keys() == dict(other.enum_type.values_by_number).keys()
            compared += 1
    assert compared > 30


# ------------------------------------------------------------------------------------------------ adapters at engines


class FakeClient:
    """A client of an engine with a list of what it was told; `gate` holds its answers back, `dies` breaks them."""

    def __init__(self, name: str = "engine0", dies: bool = False) -> None:
        self.name, self.url, self.dies = name, f"http://{name}", dies
        self.told, self.loaded, self.most = list[str](), dict[str, Path](), 0
        self.aborted = list[str | None]()
        self.gate, self.adapters = asyncio.Event(), ServingAdapters(self.unload)

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        self.told.append(f"load {adapter.directory.name}")
        self.loaded[adapter.name] = adapter.directory
        self.most = max(self.most, len(self.loaded))
        self.adapters.add(adapter)

    async def unload(self, name: str) -> None:
        self.told.append("unload")
        del self.loaded[name]

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        with self.adapters.used(request.rid, request.adapter) as adapter:
            assert adapter is None or str(self.loaded[adapter.name]) == request.adapter
            await self.gate.wait()
            assert adapter is None or adapter.name in self.loaded
        if self.dies:
            raise EngineDied(self.name, "/generate", "died in the test", "read its log")
        ids, zero = np.array([int(request.rid[-1])], np.int32), np.zeros(1, np.float32)
        return GenerateResult(ids, zero, "stop", (), None, None, 0, "", self.name)

    async def abort(self, rid: str | None = None) -> None:
        self.aborted.append(rid)

    async def resume(self) -> None:
        self.told.append("resume")

    async def close(self) -> None:
        self.told.append("close")


def asked(count: int = 1, rid: str = "r") -> list[GenerateRequest]:
    return [GenerateRequest(f"{rid}-{index}", (1,), 1, session_id=rid) for index in range(count)]


def engines_of(
    *fakes: FakeClient, room: int = 2, may_come: Callable[[], bool] = lambda: True
) -> tuple[PooledEngines, EnginePool]:
    pool = EnginePool(fakes, 100)  # type: ignore[arg-type]
    return PooledEngines(pool, room, may_come), pool


def paths(count: int) -> list[Path]:
    return [Path("/adapters") / str(i) for i in range(count)]


def test_an_engine_never_has_more_adapters_than_its_room_and_unloads_the_one_used_longest_ago() -> None:
    async def work() -> None:
        fake = FakeClient()
        fake.gate.set()
        engines, _ = engines_of(fake)
        a, b, c = paths(3)
        for number, path in enumerate((a, b, a, c, a, b)):
            await engines.sample(path, asked(rid=f"r{number}"))
        assert fake.told == ["load 0", "load 1", "unload", "load 2", "unload", "load 1"]
        assert fake.most == 2 and {*fake.loaded.values()} == {a, b}
        await engines.forget(a)
        assert [*fake.loaded.values()] == [b]

    asyncio.run(asyncio.wait_for(work(), 10))


def test_a_request_waits_while_all_adapters_are_used_and_nothing_in_use_is_unloaded() -> None:
    async def work() -> None:
        fake = FakeClient()
        engines, _ = engines_of(fake)
        requests = [
            asyncio.create_task(engines.sample(path, asked(2, f"r{number}"))) for number, path in enumerate(paths(3))
        ]
        await asyncio.sleep(0)
        forgetting = asyncio.create_task(engines.forget(paths(3)[0]))
        await asyncio.sleep(0.05)
        assert fake.told == ["load 0", "load 1"] and not forgetting.done()
        fake.gate.set()
        found = await asyncio.gather(*requests)
        await forgetting
        assert [[int(each.output_ids[0]) for each in of_prompt] for of_prompt in found] == [
            [0, 1]
        ] * 3 and fake.most == 2
        assert paths(1)[0] not in fake.loaded.values()

    asyncio.run(asyncio.wait_for(work(), 10))


def test_requests_go_to_the_idler_engine_and_leave_a_dead_one() -> None:
    async def work() -> None:
        one, two = FakeClient("engine0", dies=True), FakeClient("engine1")
        engines, pool = engines_of(one, two)
        requests = [
            asyncio.create_task(engines.sample(path, asked(rid=f"r{number}"))) for number, path in enumerate(paths(2))
        ]
        await asyncio.sleep(0.05)
        assert one.told == ["load 0"] and two.told == ["load 1"]
        one.gate.set()
        two.gate.set()
        assert len(await asyncio.gather(*requests)) == 2
        assert [*pool.dead] == ["engine0"] and two.told == ["load 1", "load 0"]

    asyncio.run(asyncio.wait_for(work(), 10))


def test_of_idle_engines_one_that_has_the_adapter_is_asked_and_all_continuations_go_to_one() -> None:
    async def work() -> None:
        one, two = FakeClient("engine0"), FakeClient("engine1")
        engines, _ = engines_of(one, two)
        both = [asyncio.create_task(engines.sample(p, asked(3, f"r{n}"))) for n, p in enumerate(paths(2))]
        await asyncio.sleep(0.05)
        one.gate.set()
        two.gate.set()
        await asyncio.gather(*both)
        await engines.sample(paths(2)[1], asked(3, "late"))
        assert one.told == ["load 0"] and two.told == ["load 1"]

    asyncio.run(asyncio.wait_for(work(), 10))


def test_without_an_engine_requests_wait_as_long_as_one_may_come() -> None:
    async def work() -> None:
        one, two = FakeClient("engine0", dies=True), FakeClient("engine0")
        one.gate.set()
        two.gate.set()
        hope = [True]
        engines, pool = engines_of(one, may_come=lambda: hope[0])
        waiting = asyncio.create_task(engines.sample(paths(1)[0], asked()))
        await asyncio.sleep(0.3)
        assert [*pool.dead] == ["engine0"] and not waiting.done()
        await pool.admit(two)  # type: ignore[arg-type]
        await pool.join()
        await waiting
        assert one.told == ["load 0", "close"] and two.told == ["resume", "load 0"]
        two.dies = True
        hope[0] = False
        with pytest.raises(EngineError, match="all engines have died"):
            await engines.sample(None, asked())

    asyncio.run(asyncio.wait_for(work(), 10))


def test_a_request_that_its_client_gives_up_is_aborted_and_lets_go_of_its_adapter() -> None:
    async def work() -> None:
        fake = FakeClient()
        engines, _ = engines_of(fake, room=1)
        given_up = asyncio.create_task(engines.sample(paths(1)[0], asked(2)))
        await asyncio.sleep(0.05)
        given_up.cancel()
        await asyncio.sleep(0.05)
        assert given_up.cancelled() and sorted(map(str, fake.aborted)) == ["r-0", "r-1"]
        fake.gate.set()
        await engines.sample(paths(2)[1], asked())
        assert fake.told == ["load 0", "unload", "load 1"]

    asyncio.run(asyncio.wait_for(work(), 10))
