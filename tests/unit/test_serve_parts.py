"""Parts of `mslime serve`: its configuration, its messages, and which adapter is loaded at which engine when."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mslime.backends.sglang.client import EngineDied
from mslime.config.errors import ConfigError, EngineError
from mslime.config.loader import merge, read_yaml
from mslime.config.serving import engine_spec
from mslime.config.training import policy_spec
from mslime_plugins.serve import proto
from mslime_plugins.serve.backend import AdapterAsk, Continuation, SampleAsk
from mslime_plugins.serve.engines import SGLangEngines, Shelf, name_of
from mslime_plugins.serve.settings import adapted_parts, adapter_config, base_names, served_config
from mslime_plugins.serve.start import _key

ROOT = Path(__file__).parents[2]
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


@dataclass
class FakeEngine:
    """An engine that keeps a list of what it was told; `gate` holds its answers back, `dies` breaks them."""

    name: str = "engine0"
    told: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    dies: bool = False
    busy: int = 0
    most: int = 0
    loaded: set[str] = field(default_factory=set)

    async def load(self, name: str, directory: Path) -> None:
        self.told.append(f"load {directory.name}")
        self.loaded.add(name)
        self.most = max(self.most, len(self.loaded))

    async def unload(self, name: str) -> None:
        self.told.append("unload")
        self.loaded.remove(name)

    async def continued(self, ask: SampleAsk, index: int, adapter: str | None) -> tuple[Continuation, Any, int]:
        assert adapter is None or adapter in self.loaded
        await self.gate.wait()
        if self.dies:
            raise EngineDied(self.name, "/generate", "died in the test", "read its log")
        return Continuation(np.array([index], np.int32), np.zeros(1, np.float32), stopped=True), None, 0


def asked(count: int = 1) -> SampleAsk:
    return SampleAsk("r", (1,), count, 1, 1.0, 1.0, -1, (), (), False, None, None)


def engines_of(*fakes: FakeEngine, room: int = 2) -> tuple[SGLangEngines, list[str]]:
    lost: list[str] = []
    engines = SGLangEngines(room, lambda name, error: lost.append(name))
    engines._shelves = {fake.name: Shelf(fake, room) for fake in fakes}  # type: ignore[arg-type]
    return engines, lost


def paths(count: int) -> list[Path]:
    return [Path("/adapters") / str(i) for i in range(count)]


def test_an_engine_never_has_more_adapters_than_its_room_and_unloads_the_one_used_longest_ago() -> None:
    async def work() -> None:
        fake = FakeEngine()
        fake.gate.set()
        engines, _ = engines_of(fake)
        a, b, c = paths(3)
        for path in (a, b, a, c, a, b):
            await engines.sample(path, asked())
        assert fake.told == ["load 0", "load 1", "unload", "load 2", "unload", "load 1"]
        assert fake.most == 2 and fake.loaded == {name_of(a), name_of(b)}
        await engines.forget(a)
        assert fake.loaded == {name_of(b)}

    asyncio.run(asyncio.wait_for(work(), 10))


def test_a_request_waits_while_all_adapters_are_used_and_nothing_in_use_is_unloaded() -> None:
    async def work() -> None:
        fake = FakeEngine()
        engines, _ = engines_of(fake)
        requests = [asyncio.create_task(engines.sample(path, asked(2))) for path in paths(3)]
        forgetting = asyncio.create_task(engines.forget(paths(3)[0]))
        await asyncio.sleep(0.05)
        assert fake.told == ["load 0", "load 1"] and not forgetting.done()
        fake.gate.set()
        found = await asyncio.gather(*requests)
        await forgetting
        assert [len(each.continuations) for each in found] == [2, 2, 2] and fake.most == 2
        assert name_of(paths(1)[0]) not in fake.loaded

    asyncio.run(asyncio.wait_for(work(), 10))


def test_requests_go_to_the_idler_engine_and_leave_a_dead_one() -> None:
    async def work() -> None:
        one, two = FakeEngine("engine0", dies=True), FakeEngine("engine1")
        engines, lost = engines_of(one, two)
        requests = [asyncio.create_task(engines.sample(path, asked())) for path in paths(2)]
        await asyncio.sleep(0.05)
        assert one.told == ["load 0"] and two.told == ["load 1"]
        one.gate.set()
        two.gate.set()
        assert len(await asyncio.gather(*requests)) == 2
        assert lost == ["engine0"] and two.told == ["load 1", "load 0"]

    asyncio.run(asyncio.wait_for(work(), 10))


def test_without_an_engine_requests_wait_as_long_as_one_may_come() -> None:
    async def work() -> None:
        one, two = FakeEngine("engine0", dies=True), FakeEngine("engine1")
        one.gate.set()
        two.gate.set()
        engines, lost = engines_of(one)
        waiting = asyncio.create_task(engines.sample(None, asked()))
        await asyncio.sleep(0.05)
        assert lost == ["engine0"] and not waiting.done()
        engines._shelves["engine1"] = Shelf(two, 2)  # type: ignore[arg-type]
        await waiting
        del engines._shelves["engine1"]
        engines.expected = False
        with pytest.raises(EngineError, match="none is left"):
            await engines.sample(None, asked())

    asyncio.run(asyncio.wait_for(work(), 10))
