"""Adapters around the trainer: what settings are refused, what `mslime plan` counts, norms that stand alone."""

from __future__ import annotations

from typing import Any

import pytest

from mslime.backends.cpu.megatron_patches import install
from mslime.config.lora import LoraConfig
from tests.fixtures.full_size import published_config
from tests.fixtures.least import refused

install()

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.transformer.identity_op import IdentityOp  # noqa: E402

from mslime.backends.megatron.model.chunks import fake_process_group, stand_norms_alone  # noqa: E402
from mslime.backends.megatron.model.megatron_config import transformer_config  # noqa: E402
from mslime.config.layout import ParallelLayout  # noqa: E402
from mslime.config.megatron import MegatronConfig  # noqa: E402
from mslime.config.resolved import ModelSpec  # noqa: E402


@pytest.mark.parametrize(("sections", "words"), [
    ({"lora": {"rank": 4, "dropout": 0.1}}, "lora.dropout = 0.1: must be 0"),
    ({"lora": {"rank": 4, "use_dora": True}}, "lora.use_dora = True: DoRA"),
    ({"lora": {"init": "there"}}, "lora.init = 'there': has no effect with lora.rank: 0"),
    ({"lora": {"experts": "shared_outer"}}, "lora.experts = 'shared_outer': has no effect with lora.rank: 0"),
    ({"lora": {"rank": 4, "experts": "shared"}}, "lora.experts"),
    ({"lora": {"rank": 4}, "megatron": {"moe_shared_expert_overlap": True}}, "moe_shared_expert_overlap"),
    ({"lora": {"rank": 4, "targets": []}}, "lora.targets"),
    ({"lora": {"rank": 4, "alpha": 0}}, "lora.alpha"),
], ids=str)  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(sections: dict[str, Any], words: str) -> None:
    assert words in str(refused(**sections))


@pytest.mark.parametrize(("rs_lora", "scale"), [(False, 2.0), (True, 8.0)])
def test_the_scale_is_that_of_the_papers(rs_lora: bool, scale: float) -> None:
    assert LoraConfig(rank=16, alpha=32, rs_lora=rs_lora).scale == scale


class Fused:
    """A layer that norms what it is given."""


class Plain:
    """A layer that does not."""


class Norm:
    """A norm."""


@pytest.mark.parametrize("model", ["qwen3-4B", "deepseek-v3"])
def test_norms_that_are_fused_into_layers_stand_alone(model: str) -> None:
    """In the places where megatron-core's Transformer Engine specs fuse them, shown on stand-ins for its classes."""
    from pathlib import Path

    hf_config = published_config(model)
    spec = ModelSpec(checkpoint=Path("x"), layout=ParallelLayout(), megatron=MegatronConfig(), device="cpu")
    with fake_process_group(spec.layout):
        import torch

        config = transformer_config(spec, hf_config, torch.device("cpu"))
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    latent = config.multi_latent_attention
    for layer in block.layer_specs or []:
        modules: Any = layer.submodules
        attention, mlp = modules.self_attention.submodules, modules.mlp.submodules
        if latent:
            attention.linear_q_up_proj = attention.linear_kv_up_proj = Fused
            attention.q_layernorm = attention.kv_layernorm = IdentityOp
        else:
            attention.linear_qkv, modules.input_layernorm = Fused, IdentityOp
        if "linear_fc1" in vars(mlp):
            mlp.linear_fc1, modules.pre_mlp_layernorm = Fused, IdentityOp
    stand_norms_alone(block, Fused, Plain, Norm)
    dense = 0
    for layer in block.layer_specs or []:
        modules = layer.submodules
        attention, mlp = modules.self_attention.submodules, modules.mlp.submodules
        if latent:
            assert (attention.linear_q_up_proj, attention.q_layernorm) == (Plain, Norm)
            assert (attention.linear_kv_up_proj, attention.kv_layernorm) == (Plain, Norm)
            assert modules.input_layernorm is not Norm
        else:
            assert (attention.linear_qkv, modules.input_layernorm) == (Plain, Norm)
        if "linear_fc1" in vars(mlp):
            dense += 1
            assert (mlp.linear_fc1, modules.pre_mlp_layernorm) == (Plain, Norm)
        else:
            assert modules.pre_mlp_layernorm is not Norm
    assert dense == (3 if latent else config.num_layers)
