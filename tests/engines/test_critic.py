"""PPO's critic on real ranks: values and gradients equal transformers' with a value head, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mslime.algorithms.advantages_tokens import TokenColumns, gae
from mslime.backends.megatron.model.layers import is_value_head
from mslime.backends.megatron.step.critic import MegatronCritic
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.resolved import critic_spec, policy_spec
from mslime.config.schema import RunConfig
from mslime.data.shard import TrainShard
from tests.engines.megatron_ranks import run_ranks
from tests.engines.trainer_ranks import make_config, make_shard
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

pytestmark = pytest.mark.timeout(180)

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "one_distopt": {"use_distributed_optimizer": True},
    "tp2_ep2_distopt": {"tp": 2, "ep": 2, "use_distributed_optimizer": True},
    "pp2_vpp2_distopt": {"pp": 2, "vpp": 2, "use_distributed_optimizer": True},
    "cp2_dp2_distopt": {"cp": 2, "dp": 2, "use_distributed_optimizer": True},
}
CRITIC = {"lr": 1e-3, "value_clip": 0.3}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("critic") / "model"
    return make_tiny_qwen3_moe(directory, tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("critic") / "model")


def config_of(layout: str, model: Path, critic: dict[str, Any] = CRITIC, **fields: Any) -> RunConfig:
    base = make_config(model, model.parent / "output", **LAYOUTS[layout], **fields)
    algorithm = {"advantage": "gae", "gamma": 0.9, "gae_lambda": 0.8, "whiten": False}
    return RunConfig.model_validate(base.as_dict() | {"algorithm": algorithm, "critic": critic})


def head(seed: int = 5) -> tuple[Tensor, Tensor]:
    """Weight [1, hidden] and bias [1] of a trained critic."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, 64, generator=generator) * 0.3, torch.randn(1, generator=generator)


def set_head(critic: MegatronCritic) -> None:
    with torch.no_grad():
        for chunk in critic.chunks:
            for name, parameter in chunk.named_parameters():
                if is_value_head(chunk, name):
                    parameter.copy_(head()[name.endswith("bias")])
    critic.optimizer.reload_model_params()


def learning_shard(critic: MegatronCritic, seed: int = 0) -> TrainShard:
    """This rank's shard with returns and with values that clip some of the new ones."""
    layout = critic.spec.layout
    shard = make_shard(layout.dp, layout.dp_rank(critic.parallel.rank), seed=seed)
    (shard,) = critic.with_values([replace(shard, routes=None)])
    assert shard.values is not None
    # The same for a sequence on whatever rank it lies.
    owner = np.repeat(shard.sequence_ids, shard.lengths)
    shift = np.sin(owner + np.arange(len(owner)) - np.repeat(np.cumsum(shard.lengths) - shard.lengths, shard.lengths))
    returns = (2 * shift).astype(np.float32)
    return replace(shard, values=shard.values + 0.6 * shift.astype(np.float32), returns=returns)


def by_sequence(shard: TrainShard, column: np.ndarray) -> dict[int, np.ndarray]:
    return {int(i): column[a:b] for i, (a, b) in zip(shard.sequence_ids, shard.spans(), strict=True)}


def learn(rank: int, world_size: int, init_method: str, config: RunConfig) -> dict[str, Any]:
    critic = MegatronCritic(critic_spec(config), rank, world_size, init_method)
    set_head(critic)
    shard = learning_shard(critic)
    (before,) = critic.with_values([shard])
    metrics = [critic.train([learning_shard(critic, seed)])[0] for seed in range(2)]
    (after,) = critic.with_values([shard])
    critic.close()
    assert before.values is not None and after.values is not None
    return {
        "before": by_sequence(shard, before.values), "after": by_sequence(shard, after.values), "metrics": metrics,
    }  # fmt: skip


def transformers_values(model: Path, shard: TrainShard) -> tuple[Any, Tensor, tuple[Tensor, Tensor]]:
    """(model, value of each token's state [N], head); first tokens have 0."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    weight, bias = (part.double().requires_grad_() for part in head())
    columns: list[Tensor] = []
    for start, stop in shard.spans():
        hidden = reference.model(torch.from_numpy(shard.tokens[start:stop].astype(np.int64))[None]).last_hidden_state[0]
        states = hidden[:-1] @ weight[0] + bias
        columns.append(torch.cat([states.new_zeros(1), states]))
    return reference, torch.cat(columns), (weight, bias)


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Any]:
    return run_ranks(learn, 1, config_of("one", model))[0]


def test_values_loss_and_gradient_are_those_of_transformers(model: Path, alone: dict[str, Any]) -> None:
    shard = make_shard()
    reference, values, own_head = transformers_values(model, shard)
    for i, (start, stop) in enumerate(shard.spans()):
        expected = values[start:stop].detach().numpy()
        np.testing.assert_allclose(alone["before"][i], expected, atol=2e-5, rtol=0)
    positions = np.concatenate([np.arange(n) for n in shard.lengths])
    shift = torch.from_numpy(np.sin(np.repeat(np.arange(8), shard.lengths) + positions))
    old, returns = values.detach() + 0.6 * shift, 2 * shift
    mask, weights = torch.from_numpy(shard.loss_mask), torch.from_numpy(shard.weights).double()
    bounded = old + (values - old).clamp(-0.3, 0.3)
    worst = torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)
    loss = 0.5 * (weights * worst)[mask].sum()
    loss.backward()
    squares = [float(p.grad.square().sum()) for p in [*reference.parameters(), *own_head] if p.grad is not None]
    first = alone["metrics"][0]
    assert first["loss/value"] == pytest.approx(float(loss), rel=1e-5)
    assert first["critic/lr"] == CRITIC["lr"], "its own, not the policy's"
    assert first["critic/grad_norm"] == pytest.approx(float(np.sqrt(sum(squares))), rel=1e-4)
    clipped = ((bounded - returns) ** 2 > (values - returns) ** 2)[mask].double().mean()
    assert first["loss/value_clip_fraction"] == pytest.approx(float(clipped)) and 0.1 < float(clipped) < 0.9
    residual, spread = (returns - values)[mask].var(correction=0), returns[mask].var(correction=0)
    assert first["loss/explained_variance"] == pytest.approx(float(1 - residual / spread), abs=1e-4)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("one")])
def test_every_layout_learns_what_one_process_learns(layout: str, model: Path, alone: dict[str, Any]) -> None:
    config = config_of(layout, model)
    results = run_ranks(learn, config.layout.world_size, config)
    for found in results:
        for name in ("loss/value", "critic/grad_norm", "loss/explained_variance", "loss/value_clip_fraction"):
            assert [m[name] for m in found["metrics"]] == pytest.approx(
                [m[name] for m in alone["metrics"]], rel=2e-5, abs=2e-6
            ), name
        for when in ("before", "after"):
            for i, values in found[when].items():
                np.testing.assert_allclose(values, alone[when][i], atol=2e-4 if when == "after" else 2e-5, rtol=0)
    assert {i for found in results for i in found["after"]} == set(range(8))
    moved = max(float(np.abs(alone["after"][i] - alone["before"][i]).max()) for i in range(8))
    assert moved > 0.05


def save_or_load(
    rank: int, world_size: int, init_method: str, config: RunConfig, directory: Path, saving: bool
) -> dict[str, Any]:
    critic = MegatronCritic(critic_spec(config), rank, world_size, init_method)
    if saving:
        set_head(critic)
        critic.train([learning_shard(critic)])
        critic.save(directory, {"next_step": 1})
    else:
        assert critic.load(directory) == {"next_step": 1} and critic.step == 1
    metrics = critic.train([learning_shard(critic, 1)])[0]
    critic.close()
    return metrics


@pytest.mark.nightly
def test_a_critic_that_is_resumed_in_another_layout_learns_on(untied: Path, tmp_path: Path) -> None:
    first = run_ranks(save_or_load, 2, config_of("tp2_ep2_distopt", untied), tmp_path / "step_1", True)[0]
    (second,) = run_ranks(save_or_load, 1, config_of("one_distopt", untied), tmp_path / "step_1", False)
    for name in ("loss/value", "critic/grad_norm", "critic/lr"):
        assert second[name] == pytest.approx(first[name], rel=2e-5), name


def beside_the_policy(rank: int, world_size: int, init_method: str, config: RunConfig, critic_first: bool) -> Any:
    """PPO's step in one process: metrics of the policy, the prepared shard, and the critic's loss step by step."""
    trainer = MegatronTrainer(policy_spec(config), rank, world_size, init_method)
    critic = MegatronCritic(critic_spec(config), rank, world_size, None)
    shard = make_shard().stage_slice(trainer.moe_layer_ids)
    ends = np.array([np.flatnonzero(shard.loss_mask[a:b])[-1] + a for a, b in shard.spans()])
    rewards = np.zeros(len(shard.tokens), np.float32)
    rewards[ends] = np.linspace(-1, 1, len(ends))
    prepared, found = trainer.prepare(critic.with_values([replace(shard, rewards=rewards)]))
    updates: list[Callable[[], Any]] = [lambda: critic.train(prepared), lambda: trainer.update(prepared)]
    results = {i: updates[i]() for i in ((0, 1) if critic_first else (1, 0))}
    losses = [m["loss/value"] for m in results[0]]
    losses += [critic.train(prepared)[0]["loss/value"] for _ in range(5)]
    weights = {name: tensor.clone() for name, tensor in trainer.named_local_params()}
    trainer.close()
    return {"metrics": found | results[1][0], "shard": prepared[0], "losses": losses, "weights": weights}


def test_beside_the_policy_the_critic_gives_values_and_learns_returns_and_changes_nothing_else(untied: Path) -> None:
    config = config_of("one", untied, {"lr": 1e-2, "value_clip": None})
    first, second = (run_ranks(beside_the_policy, 1, config, order)[0] for order in (True, False))
    shard = first["shard"]
    assert np.abs(shard.values).max() == 0, "the head starts at 0"
    columns = TokenColumns(shard.lengths, shard.loss_mask, shard.advantages)
    expected = gae(shard.rewards, np.zeros(len(shard.tokens)), columns, 0.9, 0.8)
    np.testing.assert_allclose(shard.advantages, expected, atol=1e-6)
    np.testing.assert_allclose(shard.returns, np.where(shard.loss_mask, expected, 0), atol=1e-6)
    assert first["losses"][-1] < 0.5 * first["losses"][0]
    kept = [name for name in first["metrics"] if not name.startswith("perf/")]
    assert [first["metrics"][name] for name in kept] == [second["metrics"][name] for name in kept]
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])


def in_bfloat16(rank: int, world_size: int, init_method: str, config: RunConfig) -> Any:
    critic = MegatronCritic(critic_spec(config), rank, world_size, init_method)
    heads = {name: p for chunk in critic.chunks for name, p in chunk.named_parameters() if is_value_head(chunk, name)}
    metrics = [critic.train([learning_shard(critic)])[0]["loss/value"] for _ in range(4)]
    others = {p.dtype for chunk in critic.chunks for n, p in chunk.named_parameters() if not is_value_head(chunk, n)}
    critic.close()
    return {n: (p.dtype, float(p.abs().max())) for n, p in heads.items()}, others, metrics


@pytest.mark.nightly
def test_the_head_stays_in_float32_beside_a_bfloat16_model(untied: Path) -> None:
    config = config_of("tp2_ep2_distopt", untied, {"lr": 1e-2, "value_clip": None}, params_dtype="bfloat16")
    for heads, others, losses in run_ranks(in_bfloat16, 2, config):
        assert set(heads) == {"output_layer.weight", "output_layer.bias"}
        assert all(dtype == torch.float32 and size > 1e-3 for dtype, size in heads.values())
        assert torch.bfloat16 in others and losses[-1] < losses[0]
