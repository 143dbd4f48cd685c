"""An offloaded trainer learns bit for bit the same as one that is never offloaded, and really releases as much memory
as the plan states."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mslime.backends.megatron.model.chunks import named_local_params
from mslime.backends.megatron.step.critic import MegatronCritic
from mslime.backends.megatron.step.offload import FileStore, MemoryStore, optimizer_tensors
from mslime.backends.megatron.step.trained_model import TrainedModel
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.base import TrainerPart
from mslime.config.errors import TrainerError
from mslime.config.resolved import critic_spec, policy_spec
from mslime.config.schema import RunConfig
from mslime.convert.families import get_family, read_hf_config
from mslime_plugins.planner.parameters import stage_parameters
from mslime_plugins.planner.trainer_memory import optimizer_bytes, parameter_bytes
from tests.engines.megatron_ranks import run_ranks
from tests.engines.trainer_ranks import make_config, make_shard, shard_of
from tests.fixtures.memory import written_bytes
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

pytestmark = pytest.mark.timeout(240)
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank, float32": {},
    "TP2 EP2, sharded state": {"tp": 2, "ep": 2, "use_distributed_optimizer": True},
    "DP2 EP2 in bfloat16, main weights, gathers that overlap": {
        "dp": 2, "ep": 2, "params_dtype": "bfloat16", **OVERLAP
    },
    "PP2 in bfloat16, state not sharded": {"pp": 2, "params_dtype": "bfloat16"},
}  # fmt: skip
PHASES: tuple[tuple[TrainerPart, ...], ...] = (
    ("weights",), (), ("weights",), (), ("weights", "optimizer"), (), ("weights", "optimizer", "gradients"),
)  # fmt: skip
"""Of a step: a sync, generation, a probe, generation, a save, generation, and the next step."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("asleep") / "model")


def config_of(model: Path, layout: str, offload_to: str, directory: Path) -> RunConfig:
    """With a reference policy, whose weights are swapped in and out."""
    base = make_config(model, directory, algorithm={"kl_coef": 0.1}, **LAYOUTS[layout])
    cluster = base.cluster.model_copy(update={"placement": "colocated", "offload_to": offload_to})
    return base.model_copy(update={"cluster": cluster})


def digest(model: TrainedModel) -> str:
    """Digest of every trained bit."""
    total = hashlib.sha256()
    for tensor in [t for _, t in named_local_params(model.chunks)] + [*optimizer_tensors(model.optimizer)]:
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def learn(
    rank: int, world_size: int, init_method: str, config: RunConfig, sleeps: bool
) -> tuple[list[dict[str, float]], str]:
    """(metrics of three steps, digest of the trained state)."""
    trainer = MegatronTrainer(policy_spec(config), rank, world_size, init_method)
    rows: list[dict[str, float]] = []
    for step in range(3):
        if sleeps:
            for parts in PHASES:
                trainer.hold(parts)
        rows += trainer.train([shard_of(trainer, seed=step)])
    trainer.sync_params()
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows], digest(trainer)


@pytest.mark.parametrize(
    ("layout", "offload_to"),
    [
        ("one rank, float32", "memory"),
        ("DP2 EP2 in bfloat16, main weights, gathers that overlap", "disk"),
        ("TP2 EP2, sharded state", "memory"),
        ("PP2 in bfloat16, state not sharded", "disk"),
    ],
)
def test_a_trainer_that_sleeps_learns_the_same_bits(model: Path, layout: str, offload_to: str, tmp_path: Path) -> None:
    awake = config_of(model, layout, "memory", tmp_path)
    expected = run_ranks(learn, awake.layout.world_size, awake, False)
    assert expected[0][0][0] != expected[0][0][1], "it learns something"
    asleep = config_of(model, layout, offload_to, tmp_path)
    assert run_ranks(learn, asleep.layout.world_size, asleep, True) == expected


def memory(rank: int, world_size: int, init_method: str, config: RunConfig) -> dict[str, Any]:
    """Bytes of this process before, during and after the offload, and its report of the parts."""
    trainer = MegatronTrainer(policy_spec(config), rank, world_size, init_method)
    trainer.train([shard_of(trainer)])
    trainer.hold(("weights", "optimizer", "gradients"))
    sizes = {part: trainer._state.size_of(part) for part in trainer._state.here}
    found = {"awake": written_bytes(os.getpid())}
    for name, parts in (("send", ("weights",)), ("asleep", ()), ("again", ("weights", "optimizer", "gradients"))):
        trainer.hold(parts)  # type: ignore[arg-type]
        found[name] = written_bytes(os.getpid())
    return {"pss": found, "sizes": sizes, "digest": digest(trainer), "parts": trainer._state.here}


def test_memory_of_a_trainer_that_sleeps_falls_and_comes_back(model: Path, tmp_path: Path) -> None:
    """The model is large enough to stand out from the process's other memory."""
    large = make_tiny_qwen3_moe(tmp_path / "large", hidden_size=256, moe_intermediate_size=192, num_experts=16)
    config = config_of(large, "one rank, float32", "disk", tmp_path)
    (found,) = run_ranks(memory, 1, config)
    pss, sizes, hf_config = found["pss"], found["sizes"], read_hf_config(large)
    rules, chunks, spec = get_family(hf_config).rules(hf_config), config.megatron.stage_layers(4), policy_spec(config)
    (held,) = stage_parameters(rules, config.layout, chunks)
    planned = {"weights": parameter_bytes(spec, held), "optimizer": optimizer_bytes(spec, held)}
    planned["gradients"] = held.trained * 4
    assert sizes == {part: pytest.approx(size, rel=0.01) for part, size in planned.items()}
    whole = sum(sizes.values())
    assert whole > 100 << 20
    slack = 0.1 * whole
    assert pss["awake"] - pss["send"] == pytest.approx(sizes["optimizer"] + sizes["gradients"], abs=slack)
    assert pss["awake"] - pss["asleep"] == pytest.approx(whole, abs=slack)
    assert pss["again"] == pytest.approx(pss["awake"], abs=slack)


def learn_values(rank: int, world_size: int, init_method: str, config: RunConfig, sleeps: bool) -> tuple[Any, str]:
    critic = MegatronCritic(critic_spec(config), rank, world_size, init_method)
    rows: list[dict[str, float]] = []
    for step in range(2):
        if sleeps:
            for parts in PHASES:
                critic.hold(parts if "optimizer" in parts else ())
        (shard,) = critic.with_values([make_shard(seed=step)])
        rows += critic.train([_with_returns(shard)])
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows], digest(critic)


def _with_returns(shard: Any) -> Any:
    return replace(shard, returns=np.linspace(-1, 1, len(shard.tokens), dtype=np.float32))


@pytest.mark.nightly
def test_a_critic_that_sleeps_learns_the_same_bits(model: Path, tmp_path: Path) -> None:
    base = config_of(model, "one rank, float32", "disk", tmp_path)
    algorithm = {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.8}
    values = base.as_dict() | {"algorithm": algorithm, "critic": {"lr": 1e-3}}
    values["cluster"] |= {"placement": "separate", "offload_to": "auto"}
    config = RunConfig.model_validate(values)
    cluster = config.cluster.model_copy(update={"placement": "colocated", "offload_to": "disk"})
    config = config.model_copy(update={"cluster": cluster})
    (awake,) = run_ranks(learn_values, 1, config, False)
    assert run_ranks(learn_values, 1, config, True) == [awake]


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_store_gives_back_what_it_was_given(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across borders of its blocks, including the last write."""
    monkeypatch.setattr("mslime.backends.megatron.step.offload.CHUNK", 1000)
    made = MemoryStore(pinned=False) if store == "memory" else FileStore(tmp_path / "new")
    first, second, third = (
        torch.randint(0, 256, (n,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
        for n in (2500, 1, 999)
    )
    made.write(0, torch.zeros(3500, dtype=torch.uint8))
    for at, flat in ((0, first), (2500, second), (2501, third)):
        made.write(at, flat)
    for at, flat in ((2501, third), (0, first), (2500, second)):
        made.read(at, found := torch.empty_like(flat))
        assert torch.equal(found, flat)
    assert not list(tmp_path.rglob("*.*")) and not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_disk_without_room_is_named(tmp_path: Path) -> None:
    store, before = FileStore(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(TrainerError, match=r"cluster\.offload_directory.*cannot be offloaded there") as caught:
            store.write(0, torch.zeros(10000, dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "offload_to: memory" in caught.value.hint
