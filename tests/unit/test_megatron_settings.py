"""megatron-core's configuration objects: architecture from the checkpoint, rules against silent corruption, and the
user's further fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mslime.backends.megatron.model.megatron_config import (
    OptimizerConfig,
    ddp_config,
    device_of,
    optimizer_config,
    params_dtype,
    passthrough,
    transformer_config,
)
from mslime.config.errors import ConfigError
from mslime.config.resolved import policy_spec
from mslime.config.schema import RunConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HF = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": 320,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "moe_intermediate_size": 32, "num_experts": 8,
    "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip


def run(ranks: int = 1, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": Path("model")},
            "data": {"prompts": ["x.jsonl"]},
            "cluster": {"trainer_ranks": ranks},
            **sections,
        }
    )


def built(ranks: int = 1, device: torch.device = CPU, **sections: Any) -> Any:
    return transformer_config(policy_spec(run(ranks, **sections)), HF, device)


def test_architecture_comes_from_the_checkpoint_and_what_would_be_wrong_is_off() -> None:
    config = built()
    assert (config.num_layers, config.hidden_size, config.num_moe_experts, config.moe_router_topk) == (4, 64, 8, 2)
    assert config.activation_func is torch.nn.functional.silu and not config.calculate_per_token_loss
    assert config.moe_router_dtype == "fp32" and config.hidden_dropout == config.attention_dropout == 0.0
    full = built(megatron={"recompute_granularity": "full"})
    assert (full.recompute_method, full.recompute_num_layers) == ("uniform", 1)


def test_interleaved_stages_do_not_batch_their_communication() -> None:
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    config = built(2, megatron=sizes)
    assert config.overlap_p2p_comm and not config.batch_p2p_comm
    plain = built(2, megatron={"pipeline_model_parallel_size": 2})
    assert not plain.overlap_p2p_comm and plain.batch_p2p_comm
    assert config.variable_seq_lengths and plain.variable_seq_lengths


def test_sequence_parallelism_follows_tensor_parallelism() -> None:
    assert built(2, megatron={"tensor_model_parallel_size": 2}).sequence_parallel
    assert not built().sequence_parallel


@pytest.mark.parametrize(("replay", "on"), [("r3", True), ("r2", True), ("off", False)])
def test_routers_have_a_replay_slot_exactly_when_replay_is_on(replay: str, on: bool) -> None:
    config = built(train={"replay": replay})
    assert config.moe_enable_routing_replay is on and not config.moe_router_fusion


@pytest.mark.parametrize(
    ("sizes", "ranks"), [({"pipeline_model_parallel_size": 2}, 2), ({"expert_model_parallel_size": 2}, 2)]
)
def test_an_allgather_dispatcher_over_unequal_micro_batches_is_refused(sizes: dict[str, int], ranks: int) -> None:
    config = run(ranks, megatron={**sizes, "moe_token_dispatcher_type": "allgather"})
    with pytest.raises(ConfigError, match="use alltoall"):
        transformer_config(policy_spec(config), HF, CPU)


def test_an_allgather_dispatcher_within_one_micro_batch_is_allowed() -> None:
    sizes = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}
    config = run(2, megatron={**sizes, "moe_token_dispatcher_type": "allgather"})
    assert transformer_config(policy_spec(config), HF, CPU).moe_token_dispatcher_type == "allgather"


def test_sizes_that_do_not_divide_the_model_are_refused_with_their_field() -> None:
    with pytest.raises(ConfigError, match=r"expert_model_parallel_size = 3.*8 experts"):
        built(3, megatron={"expert_model_parallel_size": 3})
    with pytest.raises(ConfigError, match=r"pipeline_model_parallel_size = 3.*4 layers"):
        built(3, megatron={"pipeline_model_parallel_size": 3})


def test_a_flag_that_contradicts_the_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"megatron\.hidden_size = 128.*has 64"):
        built(megatron={"hidden_size": 128})


def test_further_fields_reach_the_object_that_has_them() -> None:
    config = run(
        megatron={
            "moe_aux_loss_coeff": 0.01,
            "moe_router_load_balancing_type": "aux_loss",
            "attention_backend": "flash",
            "bucket_size": 1000,
        }
    )
    transformer = transformer_config(policy_spec(config), HF, CPU)
    assert (transformer.moe_aux_loss_coeff, transformer.attention_backend.name) == (0.01, "flash")
    assert ddp_config(config.megatron).bucket_size == 1000


def test_names_of_dtypes_become_dtypes() -> None:
    assert passthrough({"exp_avg_dtype": "bfloat16"}, OptimizerConfig) == {"exp_avg_dtype": torch.bfloat16}


def test_what_megatron_core_refuses_is_a_config_error_with_its_words() -> None:
    config = run(megatron={"exp_avg_dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"OptimizerConfig rejects.*exp_avg_dtype can only be fp32"):
        optimizer_config(config.train, config.megatron, CPU)


def test_a_field_of_two_objects_reaches_both() -> None:
    config = run(megatron={"use_distributed_optimizer": False})
    assert not optimizer_config(config.train, config.megatron, CPU).use_distributed_optimizer
    assert not ddp_config(config.megatron).use_distributed_optimizer


def test_no_clipping_still_measures_the_gradient_norm() -> None:
    config = run(train={"clip_grad": 0.0})
    assert optimizer_config(config.train, config.megatron, CPU).clip_grad == float("inf")


def test_the_dtype_follows_the_device_unless_given() -> None:
    assert params_dtype(run().megatron, CPU) is torch.float32
    assert params_dtype(run().megatron, CUDA) is torch.bfloat16
    assert params_dtype(run(megatron={"params_dtype": "float32"}).megatron, CUDA) is torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    assert device_of("cpu", 0).type == "cpu"
    with pytest.raises(ConfigError, match="no GPU"):
        device_of("cuda", 0)
