"""The transport checkpoint_engine with the package's own code and a real SGLang server, on CPUs: the device is a
stand-in, and torch's shared-memory handles replace CUDA's."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.keys import Endpoint
from mslime_plugins.transports import checkpoint_engine
from tests.engines.conftest import serve
from tests.engines.test_weight_sync import are_those_of, config_of, sync_twice, tensors_of
from tests.engines.trainer_ranks import run_trainers
from tests.fixtures.parameter_servers import ON_CPUS

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("checkpoint_engine") is None,
        reason=f"needs checkpoint-engine {checkpoint_engine.VERSION}",
    ),
]


@pytest.fixture(scope="module")
def engine(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A server in which the package takes a CPU for its GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ON_CPUS), os.environ.get("PYTHONPATH", "")]))
        server = serve(tiny_qwen3_moe, tmp_path_factory.mktemp("sglang"))
    yield server.endpoint
    server.process.stop()


def rehearsed(trainer: MegatronTrainer, engine: Endpoint, version: int, export: Path) -> tuple[int, int]:
    """`sync_twice`, by a trainer rank in which it does the same."""
    sys.path.insert(0, str(ON_CPUS))
    checkpoint_engine.own_gpus = lambda: (1, 0)
    device: Any = importlib.import_module("rehearsed_device")
    device.rehearse_server(importlib.import_module("checkpoint_engine.ps"))
    return sync_twice(trainer, engine, version, export)


def test_a_real_server_holds_every_bit_that_it_was_handed(
    tiny_qwen3_moe: Path, engine: Endpoint, tmp_path: Path
) -> None:
    config = config_of(tiny_qwen3_moe, tmp_path, "checkpoint_engine")
    ((compared, buckets),) = run_trainers(rehearsed, config, engine, 2, tmp_path / "exported")
    assert compared == tensors_of(tiny_qwen3_moe) and buckets > 10
    assert are_those_of(engine, tmp_path / "exported")
