"""Figures of `mslime plan` and the layer arithmetic, against megatron-core's functions and allocations of real
ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mslime.backends.megatron.model.chunks import layer_ids
from mslime.backends.megatron.step.batches import build_micro_batch
from mslime.backends.megatron.step.critic import MegatronCritic
from mslime.backends.megatron.step.trained_model import TrainedModel
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.errors import ConfigError
from mslime.config.layout import ParallelLayout, stage_layers
from mslime.config.resolved import critic_spec, policy_spec
from mslime.config.schema import RunConfig
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.flops import read_widths
from mslime_plugins.planner.activations import chunks_in_flight, kept_elements
from mslime_plugins.planner.parameters import StageParameters, stage_parameters
from mslime_plugins.planner.trainer_memory import optimizer_bytes, parameter_bytes

from megatron.core.optimizer import ChainedOptimizer  # isort: skip
from megatron.core.parallel_state import RankGenerator  # isort: skip
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches  # isort: skip
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # isort: skip
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # isort: skip
from tests.engines.megatron_ranks import run_ranks
from tests.engines.trainer_ranks import loss_and_gradients, make_config, make_shard, run_trainers, shard_of
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

LAYOUTS = {
    "TP2 EP2 PP2": {"tp": 2, "ep": 2, "pp": 2},
    "DP2 PP2, three layers and one": {"dp": 2, "pp": 2, "num_layers_in_last_pipeline_stage": 1},
    "TP2 DP2 EP4, float32": {"tp": 2, "dp": 2, "ep": 4, "params_dtype": "float32"},
    "TP2 DP2, state not sharded": {"tp": 2, "dp": 2, "use_distributed_optimizer": False},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("plan") / "model")


@pytest.mark.parametrize("num_layers", [24, 61])
def test_layers_of_every_chunk_are_those_of_megatron_core(num_layers: int) -> None:
    tried = 0
    for pp, vpp, first, last in itertools.product((2, 3, 4, 8), (1, 2, 3), (None, 1, 2, 6, 12), (None, 2, 5, 6, 12)):
        try:
            ours = stage_layers(num_layers, pp, vpp, first, last)
        except ConfigError:
            continue
        config = SimpleNamespace(
            num_layers=num_layers,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            num_layers_in_first_pipeline_stage=first,
            num_layers_in_last_pipeline_stage=last,
            account_for_embedding_in_pipeline_split=False,
            account_for_loss_in_pipeline_split=False,
            pipeline_model_parallel_layout=None,
        )
        for stage, chunks in enumerate(ours):
            for chunk, layers in enumerate(chunks):
                vp_stage = chunk if vpp > 1 else None
                start = get_transformer_layer_offset(config, vp_stage, stage)  # type: ignore[arg-type]
                size = get_num_layers_to_build(config, vp_stage, stage)  # type: ignore[arg-type]
                assert layers == tuple(range(start, start + size)), (pp, vpp, first, last, stage, chunk)
        tried += 1
    assert tried > 10


def test_what_the_layer_arithmetic_refuses_megatron_core_refuses_too() -> None:
    for pp, vpp, first, last in [(4, 1, None, None), (4, 1, 3, 3), (4, 2, None, 13), (2, 1, 30, 30)]:
        with pytest.raises(ConfigError):
            stage_layers(61, pp, vpp, first, last)
        with pytest.raises((ValueError, AssertionError)):
            config = TransformerConfig(
                num_layers=61, hidden_size=64, num_attention_heads=4, pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None, pipeline_dtype=torch.float32,
                num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last,
            )  # fmt: skip
            assert sum(get_num_layers_to_build(config, 0 if vpp > 1 else None, rank) for rank in range(pp)) == 61


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (8, 1), (2, 2), (4, 3)])
def test_forward_passes_in_flight_are_the_warm_up_of_megatron_core_and_one(pp: int, vpp: int) -> None:
    for stage in range(pp):
        place = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: pp, rank=lambda stage=stage: stage),
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        )
        *_, warm_up, _ = get_pp_rank_microbatches(1000, vpp, pp, p2p_communicator=place)
        assert chunks_in_flight(ParallelLayout(pp=pp, vpp=vpp), stage) == (warm_up + 1) / vpp


def allocated(trainer: MegatronTrainer) -> dict[str, Any]:
    """`sizes` on every rank, and the step's loss."""
    loss, _ = loss_and_gradients(trainer, shard_of(trainer), None)
    trainer.optimizer.step()
    return sizes(trainer) | {"loss": loss}


def allocated_by_critic(rank: int, world_size: int, init_method: str, config: RunConfig) -> dict[str, Any]:
    critic = MegatronCritic(critic_spec(config), rank, world_size, init_method)
    shard = make_shard(config.layout.dp, config.layout.dp_rank(rank))
    zeros = np.zeros(len(shard.tokens), np.float32)
    critic.train([replace(shard, routes=None, values=zeros, returns=zeros + 1)])
    found = sizes(critic)
    critic.close()
    return found


def sizes(trainer: TrainedModel) -> dict[str, Any]:
    """After a step: layers, and bytes of parameters, gradients and optimizer state."""
    parameters = [p for chunk in trainer.chunks for p in chunk.parameters()]
    chained = trainer.optimizer
    parts = chained.chained_optimizers if isinstance(chained, ChainedOptimizer) else [chained]
    return {
        "layers": [layer for chunk in trainer.chunks for layer in layer_ids(chunk)],
        "parameters": _bytes(parameters),
        "gradients": _bytes([p.main_grad for p in parameters]),
        "optimizer": sum(_state_bytes(part) for part in parts),
        "tensors": len(parameters),
        "buffers": sum(b.numel() for c in trainer.wrapped for b in _grad_buffers(c)) * 4,
    }


def _grad_buffers(chunk: Any) -> list[torch.Tensor]:
    return [buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _state_bytes(optimizer: Any) -> int:
    """Adam's moments, and main weights where they are tensors of their own."""
    moments = [t for state in optimizer.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    main: list[torch.Tensor] = []
    for name in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
        main += [t for group in vars(optimizer).get(name, []) for t in group if t is not None]
    return _bytes([t for t in moments if t.dim()]) + _bytes(main)


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameter_gradient_and_optimizer_bytes_are_what_real_ranks_allocate(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    fields = {"params_dtype": "bfloat16", "use_distributed_optimizer": True} | LAYOUTS[name]
    config = make_config(checkpoint, tmp_path, train={"replay": "off"}, **fields)
    compare(config, run_trainers(allocated, config), planned_stages(config, checkpoint))


@pytest.mark.nightly
def test_a_critic_s_bytes_are_what_real_ranks_allocate(checkpoint: Path, tmp_path: Path) -> None:
    fields = {"params_dtype": "bfloat16", "use_distributed_optimizer": True, "tp": 2, "ep": 2, "pp": 2}
    config = make_config(checkpoint, tmp_path, **fields)
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"advantage": "gae"})})
    hf_config = read_hf_config(checkpoint)
    chunks = config.megatron.stage_layers(4)
    planned = stage_parameters(get_family(hf_config).rules(hf_config), config.layout, chunks, 64 + 1)
    compare(config, run_ranks(allocated_by_critic, 4, config), planned)


def compare(config: RunConfig, found: list[dict[str, Any]], planned: tuple[StageParameters, ...]) -> None:
    per_stage = config.layout.world_size // config.layout.pp
    for stage, held in enumerate(planned):
        ranks = found[stage * per_stage : (stage + 1) * per_stage]
        for rank in ranks:
            assert rank["layers"] == list(held.layers)
            assert rank["parameters"] == parameter_bytes(policy_spec(config), held)
            assert rank["gradients"] == held.trained * 4
            # The buffer pads every parameter to 64 elements and every bucket to 128 and the ranks that share it.
            assert 0 <= rank["buffers"] - rank["gradients"] <= (64 * rank["tensors"] + 128 * 4) * 4
        each = [rank["optimizer"] for rank in ranks]
        assert sum(each) == optimizer_bytes(policy_spec(config), held) * per_stage
        assert max(each) - min(each) <= 12 * 64 * ranks[0]["tensors"] + 12 * 128


def saved_for_backward(trainer: MegatronTrainer) -> float:
    """Elements a token that the forward pass of the first micro-batch keeps, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for chunk in trainer.wrapped for p in chunk.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    shard, rows = make_shard(layers=trainer.moe_layer_ids), trainer.parallel.rows
    batch = build_micro_batch(shard, 0, rows, packed=trainer.runner.packed, device=trainer.device)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = trainer.wrapped[0](**trainer.runner.model_inputs(batch, embeds=True))
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 4 / batch.tokens.numel()


def measured_and_planned(directory: Path, layers: int, **megatron: Any) -> tuple[float, float]:
    """Elements a token that a real model on the CPU keeps, and those that the plan counts for its layers."""
    checkpoint = make_tiny_qwen3_moe(
        directory / f"{layers}", hidden_size=256, moe_intermediate_size=256, head_dim=64, num_hidden_layers=layers
    )
    config = make_config(checkpoint, directory / "out", train={"replay": "off"}, **megatron)
    [measured] = run_trainers(saved_for_backward, config)
    hf_config = read_hf_config(checkpoint)
    family = get_family(hf_config)
    widths = read_widths(family.transformer_fields(hf_config), family.model_fields(hf_config).moe_layer_ids)
    return measured, kept_elements(
        widths, config.layout, config.megatron.stage_layers(layers)[0], config.megatron.recompute
    )


@pytest.mark.nightly
def test_with_full_recompute_every_further_layer_keeps_what_the_plan_counts(tmp_path: Path) -> None:
    three, six = (measured_and_planned(tmp_path, layers, recompute_granularity="full") for layers in (3, 6))
    assert six[0] - three[0] == pytest.approx(six[1] - three[1], rel=0.05)


@pytest.mark.nightly
def test_without_recompute_the_count_is_that_of_fused_kernels_below_what_cpu_layers_keep(tmp_path: Path) -> None:
    # The CPU's norms, rotary embedding, SwiGLU and attention are unfused and keep intermediates; what the fused ones
    # keep, their inputs, is more than half of it.
    three, six = (measured_and_planned(tmp_path, layers) for layers in (3, 6))
    assert 0.5 < (six[1] - three[1]) / (six[0] - three[0]) < 1


def planned_stages(config: RunConfig, checkpoint: Path) -> tuple[StageParameters, ...]:
    hf_config = read_hf_config(checkpoint)
    family = get_family(hf_config)
    chunks = config.megatron.stage_layers(family.model_fields(hf_config).num_layers)
    return stage_parameters(family.rules(hf_config), config.layout, chunks)


def test_an_uneven_pipeline_has_the_loss_of_one_process(checkpoint: Path, tmp_path: Path) -> None:
    losses = [
        run_trainers(allocated, make_config(checkpoint, tmp_path, train={"replay": "off"}, **sizes))[-1]["loss"]
        for sizes in ({}, {"pp": 2, "num_layers_in_first_pipeline_stage": 1})
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(tp=2, pp=2, cp=2, dp=2, ep=4),
        ParallelLayout(tp=2, pp=3, dp=4, ep=2, etp=2),
        ParallelLayout(tp=4, cp=2, dp=3, ep=8),
        ParallelLayout(dp=6, pp=2, ep=3, etp=1),
    ],
)
def test_a_ranks_place_is_where_megatron_core_groups_it(layout: ParallelLayout) -> None:
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=order)
    expert = RankGenerator(tp=layout.etp, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=order)
    for ours, generator, theirs in (
        ("tp", dense, "tp"), ("cp", dense, "cp"), ("dp", dense, "dp"), ("pp", dense, "pp"),
        ("etp", expert, "tp"), ("ep", expert, "ep"), ("edp", expert, "dp"),
    ):  # fmt: skip
        for group in generator.get_ranks(theirs):
            assert [getattr(layout.place(rank), ours) for rank in group] == list(range(len(group))), (ours, group)
    assert [layout.leader(layout.place(rank).pp) + layout.place(rank).within for rank in range(layout.world_size)] == [
        *range(layout.world_size)
    ]
