"""One decision about the dtype of engines and exports, which every room that needs it asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mslime.backends.sglang.flags import server_fields
from mslime.config.errors import ConfigError
from mslime.config.model_facts import checkpoint_dtype, declared_dtype, export_dtype
from mslime.config.resolved import engine_spec, teacher_spec
from mslime.config.schema import RunConfig
from tests.fixtures.least import least

BF16, FP32, FP16 = {"torch_dtype": "bfloat16"}, {"dtype": "float32"}, {"torch_dtype": "float16"}


def on(device: str, **sections: Any) -> RunConfig:
    return least(cluster={"device": device}, **sections)


@pytest.mark.parametrize("hf_config", [BF16, FP32, FP16, {}, {"text_config": BF16}])
def test_engines_on_a_cpu_are_float32_whatever_the_checkpoint_is(hf_config: dict[str, Any]) -> None:
    assert engine_spec(on("cpu")).dtype(hf_config) == "float32"


def test_engines_on_a_gpu_are_never_float16_by_themselves() -> None:
    assert engine_spec(on("cuda")).dtype(BF16) == engine_spec(on("auto")).dtype({"text_config": BF16}) == "bfloat16"
    assert engine_spec(on("cuda")).dtype(FP32) == engine_spec(on("cuda")).dtype({}) == "bfloat16"
    assert engine_spec(on("cuda", megatron={"params_dtype": "float32"})).dtype(FP32) == "float32"
    with pytest.raises(ConfigError, match=r"sglang\.dtype.*float16.*rounded"):
        engine_spec(on("cuda")).dtype(FP16)
    assert engine_spec(on("cuda", sglang={"dtype": "bfloat16"})).dtype(FP16) == "bfloat16"


def test_a_teacher_is_sent_nothing_and_may_keep_its_float16(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FP16))
    teacher = teacher_spec(on("cuda", teacher={"path": str(tmp_path)}, algorithm={"opd_coef": 1.0}))
    assert server_fields(teacher, 0, "h", 1)["dtype"] == "float16"
    (tmp_path / "config.json").write_text(json.dumps(FP32))
    assert server_fields(teacher, 0, "h", 1)["dtype"] == "bfloat16"


def test_servers_return_all_that_tie_with_the_last_token_of_top_k(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BF16))
    model = {"model": {"path": str(tmp_path)}}

    def limit(**sections: Any) -> Any:
        return server_fields(engine_spec(on("cpu", **model, **sections)), 0, "h", 1)["sampling_mask_max_tokens"]

    assert limit() is None and limit(rollout={"top_k": 50, "top_p": 0.9}) == 100
    assert limit(rollout={"top_k": 50}, sglang={"sampling_mask_max_tokens": 70}) == 70


def test_exports_are_in_the_dtype_that_config_json_names() -> None:
    assert [export_dtype(c) for c in (BF16, FP32, FP16, {})] == ["bfloat16", "float32", "float32", "float32"]
    assert declared_dtype(BF16, "bfloat16") == {}
    for config in ({}, FP16, {"text_config": FP16}, FP16 | {"text_config": {"dtype": "float16", "a": 1}}):
        declared = config | declared_dtype(config, "float32")
        assert checkpoint_dtype(declared) == "float32" and "float16" not in json.dumps(declared)
