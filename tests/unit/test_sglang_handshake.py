"""The capability handshake fails with the name of what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.handshake import DECLARED, EngineNeeds, handshake
from mslime.config.errors import EngineError
from mslime.config.schema import DeadlineConfig
from tests.fixtures.model_facts import model_facts
from tests.unit.fake_engine import LAYERS, TOP_K, VOCABULARY, FakeEngine

DRAWS = {"top_p": 0.9, "top_k": 20, "min_p": 0.01}
ALL = EngineNeeds(routes=True, architectures=("Qwen3MoeForCausalLM",), truncation=DRAWS)


def shake(spoil: Callable[[FakeEngine], Any], needs: EngineNeeds = ALL) -> None:
    async def work() -> None:
        async with FakeEngine() as engine:
            spoil(engine)
            model = model_facts(VOCABULARY, num_layers=LAYERS, top_k=TOP_K)
            async with EngineClient(engine.url, "engine0", model=model) as client:
                await handshake(client, needs)

    asyncio.run(asyncio.wait_for(work(), 30))


@pytest.mark.parametrize("declared", DECLARED, ids=lambda d: d.route.strip("/") + ":" + d.feature)
def test_a_missing_route_is_named_by_its_feature(declared: Any) -> None:
    with pytest.raises(EngineError, match=f"needs the engine feature '{declared.feature}'|'log-probs'"):
        shake(lambda engine: engine.schema["paths"].pop(declared.route))


@pytest.mark.parametrize(
    ("feature", "spoil"),
    [
        ("sglang 0.5.23", lambda e: e.info.update(version="0.5.9")),
        ("the model Qwen3MoeForCausalLM", lambda e: e.model.update(architectures=["LlamaForCausalLM"])),
        ("prefill and decode in one server", lambda e: e.model.update(disaggregation_mode="prefill")),
        ("prefill and decode in one server", lambda e: e.model.update(disaggregation_mode="decode")),
        ("routed experts", lambda e: e.info.update(enable_return_routed_experts=False)),
        ("routed experts", lambda e: setattr(e, "routes_rows_off", -1)),
        ("routed experts", lambda e: fields(e, "/generate").pop("return_routed_experts")),
        ("sampling mask", lambda e: fields(e, "/generate").pop("return_sampling_mask")),
        ("cache keys", lambda e: fields(e, "/generate").pop("extra_key")),
        ("sampling mask", lambda e: setattr(e, "masks", False)),
        ("min-p draws", lambda e: e.info.update(enable_deterministic_inference=True)),
        ("flattened buckets", lambda e: fields(e, "/update_weights_from_distributed").pop("load_format")),
        ("pause modes", lambda e: fields(e, "/pause_generation")["mode"]["enum"].remove("in_place")),
        ("pause modes", lambda e: setattr(e, "pause_works", False)),
        ("weight-update sessions", lambda e: e.schema["paths"].pop("/end_weight_update")),
    ],
)
def test_what_is_missing_is_named(feature: str, spoil: Callable[[FakeEngine], Any]) -> None:
    with pytest.raises(EngineError) as caught:
        shake(spoil)
    assert caught.value.field == "engine0" and caught.value.value == f"without {feature}"


def test_a_server_without_the_plug_in_cannot_be_asked_what_it_has_released() -> None:
    with pytest.raises(EngineError, match="memory release.*without mslime's plug-in"):
        shake(lambda engine: setattr(engine, "sums", None), replace(ALL, memory=True))


def test_one_half_of_a_pair_is_told_its_role_and_is_asked_to_generate_nothing() -> None:
    asked: list[FakeEngine] = []

    def spoil(engine: FakeEngine) -> None:
        engine.model["disaggregation_mode"] = "decode"
        asked.append(engine)

    with pytest.raises(EngineError, match="--disaggregation-mode decode"):
        shake(spoil)
    assert not asked[0].seen


def test_a_server_that_names_no_pair_is_taken() -> None:
    shake(lambda engine: engine.model.update(disaggregation_mode="null"))


async def test_an_engine_that_answers_questions_and_no_request_is_told_before_a_response_would_be_due() -> None:
    with pytest.raises(EngineError, match=r"a small request was not answered within 0.3 s") as caught:
        async with FakeEngine() as engine:
            engine.delay_s = 20.0
            limits = DeadlineConfig.model_validate({"engine_silence_s": 0.3})
            model = model_facts(VOCABULARY, num_layers=LAYERS, top_k=TOP_K)
            async with EngineClient(engine.url, "engine0", limits, model=model) as client:
                await handshake(client, ALL)
    assert caught.value.value == "without log-probs"


def test_no_weights_are_processed_that_were_not_loaded() -> None:
    """The end of a session processes all weights again, and quantised ones bear it once."""
    asked: list[FakeEngine] = []
    shake(asked.append)
    assert not [path for path, _ in asked[0].seen if "weight_update" in path]


def test_draws_are_tried_as_the_run_will_make_them() -> None:
    asked: list[FakeEngine] = []
    shake(asked.append)
    tried = [body["sampling_params"] for path, body in asked[0].seen if path == "/generate"]
    assert sum(DRAWS.items() <= sampling.items() for sampling in tried) == 1


def test_features_that_the_run_does_not_use_are_not_demanded() -> None:
    def spoil(engine: FakeEngine) -> None:
        engine.info["enable_return_routed_experts"] = engine.masks = False
        engine.info["enable_deterministic_inference"] = True

    shake(spoil, EngineNeeds(routes=False))


def fields(engine: FakeEngine, route: str) -> dict[str, Any]:
    return engine.schema["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
