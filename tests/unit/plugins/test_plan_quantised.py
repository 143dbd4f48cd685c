"""Engines of quantised weights in `mslime plan`: counted from config.json, compared with the bytes of real files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mslime.config.cluster import ClusterConfig, usual_gpu
from mslime.convert.encoding import encoded_weights, expected_weights
from mslime.convert.families import get_family
from mslime.convert.hf import HFCheckpoint
from mslime.convert.quantised import left_plain
from mslime.offline.jobs import ConversionJob, run_job
from mslime.offline.requantise import ToFp8, ToInt4
from mslime.weights.weight_plan import Senders, build_plan, encoded_plan
from mslime_plugins.planner.plan import RunPlan, make_plan
from mslime_plugins.planner.plan_command import plan_config
from mslime_plugins.planner.search import Search
from mslime_plugins.planner.sync_bytes import sender_syncs
from tests.fixtures.full_size import CONFIGS, published_config
from tests.fixtures.tiny_models import make_tiny_deepseek_v3, make_tiny_qwen3_moe

MAKERS: dict[str, Callable[[Path], Path]] = {
    # Sizes that are no whole blocks; a vocabulary that engines pad is counted with its zeros.
    "qwen3": lambda out: make_tiny_qwen3_moe(out, hidden_size=160, moe_intermediate_size=96),
    "deepseek": make_tiny_deepseek_v3,
}
FORMATS: dict[str, Callable[[Path], ConversionJob]] = {
    "fp8": lambda source: ToFp8(source, power_of_two=False),
    "ue8m0": lambda source: ToFp8(source, power_of_two=True),
    "int4": lambda source: ToInt4(source, group=32),
    "fp8 experts": lambda source: ToFp8(source, power_of_two=False, include=r"\.experts\.\d+\."),
}


@pytest.fixture(scope="module", params=[(model, form) for model in MAKERS for form in FORMATS], ids="-".join)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, form = request.param
    directory = tmp_path_factory.mktemp("plan")
    run_job(FORMATS[form](MAKERS[model](directory / "plain")), directory / "out")
    return directory / "out"


def config_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "config.json").read_text())


def planned(path: Path, **sections: Any) -> RunPlan:
    cluster = {"device": "cuda", **sections.pop("cluster", {})}
    config = plan_config({"model": {"path": str(path)}, "cluster": cluster, **sections})
    return make_plan(config, config_of(path))


def stored_bytes(checkpoint: Path) -> int:
    """Of the tensors in the files."""
    width = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I32": 4, "I64": 8}
    total = 0
    for info in HFCheckpoint(checkpoint).stored.values():
        elements = 1
        for size in info.shape:
            elements *= size
        total += elements * width[info.dtype]
    return total


def test_an_engine_is_planned_to_hold_the_bytes_of_the_files(checkpoint: Path) -> None:
    plan = planned(checkpoint, sglang={"dtype": "float32"})
    assert plan.engine is not None
    assert plan.engine.weights == stored_bytes(checkpoint) == plan.sync_bytes
    plain = planned(checkpoint.parent / "plain", sglang={"dtype": "float32"})
    assert plain.engine is not None
    assert plain.engine.weights - plan.engine.weights > 0.3 * plain.engine.weights
    # What they leave is the cache's, whose keys and values are as wide as before.
    assert plan.engine.token_bytes == plain.engine.token_bytes
    more = (plain.engine.weights - plan.engine.weights) // plan.engine.token_bytes
    assert plan.engine.tokens - plain.engine.tokens in (more, more + 1)


def test_config_json_names_what_the_files_hold(checkpoint: Path) -> None:
    config = config_of(checkpoint)
    table = get_family(config).rules(config)
    found, expected = encoded_weights(HFCheckpoint(checkpoint), config), expected_weights(table, config)
    assert found is not None and found == expected


def test_sharing_out_halves_what_is_shared_out(checkpoint: Path) -> None:
    whole, half = (planned(checkpoint, sglang={"dtype": "float32", "tp_size": size}).engine for size in (1, 2))
    assert whole is not None and half is not None
    assert whole.weights / 2 <= half.weights < 0.6 * whole.weights


def test_senders_read_plain_weights_and_send_few_bytes(checkpoint: Path) -> None:
    """Gathers are as before; what is sent is shorter."""
    config = config_of(checkpoint)
    table, encoded = get_family(config).rules(config), expected_weights(get_family(config).rules(config), config)
    assert encoded is not None
    layers = get_family(config).model_fields(config).num_layers
    layout = plan_config(
        {"model": {"path": str(checkpoint)}, "megatron": {"tensor_model_parallel_size": 2},
         "cluster": {"device": "cuda", "trainer_ranks": 2}}
    ).layout  # fmt: skip
    plain = build_plan(table, Senders.at_most(layout, 2), [list(range(layers))], "float32", 1 << 16)
    few = encoded_plan(plain, encoded)
    sent = [sum(each.sent for each in sender_syncs(plan, ClusterConfig())) for plan in (plain, few)]
    assert sent == [plain.total_bytes, few.total_bytes] and sent[1] < sent[0]
    assert [sum(each.gathered_near for each in sender_syncs(plan, ClusterConfig())) for plan in (plain, few)] == [
        sum(each.gathered_near for each in sender_syncs(plain, ClusterConfig()))
    ] * 2


@pytest.mark.nightly
def test_published_fp8_models_take_about_a_byte_for_each_parameter() -> None:
    for model, billions in (("deepseek-v3.1", 671.026), ("minimax-m2", 228.690), ("kimi-k2", 1026.408)):
        config = plan_config({"model": {"path": str(CONFIGS / model)}, "cluster": {"device": "cuda"}})
        plan = make_plan(config, published_config(model))
        assert plan.engine is not None and "FP8, blocks of [128, 128]" in plan.engine_dtype
        assert billions * 1e9 < plan.engine.weights < 1.02 * billions * 1e9
        assert plan.sync_bytes < 1.02 * billions * 1e9


@pytest.mark.slow
def test_what_is_not_sent_quantised_is_planned_plain() -> None:
    """MXFP4 checkpoints are trained from a plain copy; servers of others are sent plain weights."""
    config = plan_config({"model": {"path": str(CONFIGS / "gpt-oss-20b")}, "cluster": {"device": "cuda"}})
    assert make_plan(config, published_config("gpt-oss-20b")).engine_dtype == "bfloat16"
    values = {"model": {"path": str(CONFIGS / "deepseek-v3")}, "cluster": {"device": "cuda"}}
    theirs = plan_config({**values, "sglang": {"urls": ["http://10.0.0.1:30000"]}})
    plan = make_plan(theirs, published_config("deepseek-v3"))
    assert plan.engine_dtype == "bfloat16" and plan.sync_bytes > 1.9 * 671e9


def test_modules_are_left_plain_by_name_part_or_expression() -> None:
    fp8 = left_plain({"quantization_config": {"modules_to_not_convert": ["gate", "model.layers.0.mlp", "lm_head"]}})
    assert fp8("model.layers.3.mlp.gate") and fp8("model.layers.0.mlp.down_proj") and fp8("lm_head")
    assert not fp8("model.layers.3.mlp.gate_proj") and not fp8("model.layers.10.mlp.down_proj")
    int4 = left_plain({"text_config": {"quantization_config": {"ignore": ["lm_head", r"re:.*\.self_attn\..*"]}}})
    assert int4("model.layers.0.self_attn.q_proj") and not int4("model.layers.0.mlp.experts.0.up_proj")
    assert not left_plain({})("lm_head")


def test_a_search_reckons_with_few_bytes() -> None:
    path, config = CONFIGS / "minimax-m2", published_config("minimax-m2")
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    values = {"model": {"path": str(path)}, "data": {"prompts": ["p"]}, "cluster": {"device": "cuda"}}
    few, wide = (Search(values, 64, each, usual_gpu(80)) for each in (config, plain))
    assert 0.5 < few.sent / wide.sent < 0.52
    assert few.work.width == pytest.approx(2 * few.sent / wide.sent) and wide.work.width == 2
    (engines, *_), (others, *_) = few.engines(16, shared=False), wide.engines(16, shared=False)
    assert engines.memory.weights < 0.6 * others.memory.weights or engines.settings != others.settings
