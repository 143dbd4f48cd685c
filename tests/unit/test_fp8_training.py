"""`train.fp8`: what is accepted, what megatron-core is told, how micro-batches are padded, what the plan counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from mslime.backends.megatron.model.megatron_config import transformer_config
from mslime.backends.megatron.model.moe import share_empty_states
from mslime.backends.megatron.step.batches import PADDING, RowLayout, SequenceSlicer
from mslime.config.errors import ConfigError
from mslime.config.fp8 import WIDTH, check_fp8_model, fp8_fields, fp8_rows
from mslime.config.resolved import critic_spec, policy_spec
from mslime.config.schema import RunConfig
from mslime.data.packing import padded_lengths
from tests.unit.test_megatron_settings import HF

DENSE = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 32,
}  # fmt: skip
LATENT = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4,
    "multi_latent_attention": True,
    "q_lora_rank": 32, "kv_lora_rank": 48, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip


def run(recipe: str | None = "blockwise", **sections: Any) -> RunConfig:
    train = {"fp8": recipe, **sections.pop("train", {})}
    cluster = {"device": "cuda", **sections.pop("cluster", {})}
    base = {"model": {"path": Path("model")}, "data": {"prompts": ["x.jsonl"]}}
    return RunConfig.model_validate({**base, "train": train, "cluster": cluster, **sections})


@pytest.mark.parametrize(("recipe", "number"), [("blockwise", "e4m3"), ("tensorwise", "hybrid")])
def test_megatron_core_is_told_the_recipe_and_keeps_plain_parameters(
    recipe: str, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Machines without a GPU have no Transformer Engine, whose version megatron-core asks for.
    monkeypatch.setattr("megatron.core.transformer.transformer_config.is_te_min_version", lambda *_: True)
    config = run(recipe)
    built = transformer_config(policy_spec(config), HF, torch.device("cuda", 0))
    assert (built.fp8, built.fp8_recipe, built.fp8_param) == (number, recipe, False)
    assert built.params_dtype is torch.bfloat16
    assert critic_spec(config).fp8 == recipe


def test_without_it_nothing_is_multiplied_in_fp8() -> None:
    assert not transformer_config(policy_spec(run(None)), HF, torch.device("cuda", 0)).fp8


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"cluster": {"device": "cpu"}}, "needs CUDA kernels.*remove train.fp8"),
        ({"megatron": {"params_dtype": "float32"}}, "params_dtype: bfloat16"),
        ({"lora": {"rank": 4}}, "not supported with adapters.*lora.rank"),
        (
            {"cluster": {"placement": "colocated"}, "weights": {"transport": "shm"}, "rollout": {"max_staleness": 0}},
            "placement: separate",
        ),
    ],
)
def test_what_cannot_go_together_is_refused_by_name(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s)train.fp8.*{message}"):
        run(**sections)
    run(None, **sections)


def test_a_trainer_that_finds_no_gpu_refuses_too() -> None:
    with pytest.raises(ConfigError, match="needs CUDA kernels"):
        transformer_config(policy_spec(run(cluster={"device": "auto"})), HF, torch.device("cpu"))
    assert fp8_fields(None, cpu=True) == {}


@pytest.mark.parametrize("name", ["fp8", "fp8_recipe", "fp8_quantizer_factory", "fp8_param"])
def test_megatron_cores_own_names_lead_to_the_setting(name: str) -> None:
    with pytest.raises(ValidationError, match="use train.fp8|parameters stay bfloat16"):
        run(None, megatron={name: "e4m3"})


def test_delayed_scaling_is_no_choice() -> None:
    with pytest.raises(ValidationError, match="blockwise"):
        run("delayed")


@pytest.mark.parametrize(
    ("fields", "sizes", "what"),
    [
        ({**DENSE, "hidden_size": 72}, {}, "hidden_size"),
        ({**DENSE, "ffn_hidden_size": 96}, {"tensor_model_parallel_size": 4}, "ffn_hidden_size"),
        ({**DENSE, "moe_ffn_hidden_size": 32}, {"expert_tensor_parallel_size": 4}, "moe_ffn_hidden_size"),
        ({**DENSE, "moe_shared_expert_intermediate_size": 40}, {}, "moe_shared_expert_intermediate_size"),
        ({**DENSE, "kv_channels": 10}, {}, "attention's output"),
        ({**DENSE, "kv_channels": 8}, {"tensor_model_parallel_size": 4}, "queries, keys and values"),
        ({**LATENT, "q_lora_rank": 40}, {}, "q_lora_rank"),
        ({**LATENT, "kv_lora_rank": 40}, {}, "kv_lora_rank"),
        ({**LATENT, "qk_pos_emb_head_dim": 8}, {}, "qk_pos_emb_head_dim"),
        ({**LATENT, "v_head_dim": 8}, {"tensor_model_parallel_size": 4}, "keys and values|attention's output"),
        ({**DENSE, "experimental_attention_variant": "gated_delta_net"}, {}, "delta-nets"),
    ],
)  # fmt: skip
def test_sizes_that_fp8_products_do_not_take_are_refused(fields: Any, sizes: dict[str, int], what: str) -> None:
    tp, etp = (sizes.get(f"{kind}_parallel_size", 1) for kind in ("tensor_model", "expert_tensor"))
    with pytest.raises(ConfigError, match=what):
        check_fp8_model("blockwise", tp, etp, fields)
    check_fp8_model(None, tp, etp, fields)


@pytest.mark.parametrize("fields", [DENSE, LATENT])
def test_sizes_that_are_multiples_are_taken(fields: dict[str, Any]) -> None:
    check_fp8_model("blockwise", 2, 1, fields)
    assert WIDTH == 16


@pytest.mark.parametrize("multiple", [16, 128])
@pytest.mark.parametrize(("cp", "sp"), [(1, 1), (2, 1), (1, 2), (2, 4), (3, 2)])
def test_the_rows_of_each_rank_s_layers_are_a_multiple(cp: int, sp: int, multiple: int) -> None:
    for spans in ([(0, 5), (5, 6), (6, 140)], [(0, 128)], []):
        layouts = [RowLayout(cp, c, sp, s, multiple) for c in range(cp) for s in range(sp)]
        slicers = [SequenceSlicer.build(spans, layout) for layout in layouts]
        assert {len(s.layer_rows) % multiple for s in slicers} == {0}
        assert all(cp == 1 or n % (2 * cp) == 0 for n in slicers[0].padded_lengths)
        rows = np.concatenate([s.layer_rows for s in slicers])
        assert sorted(rows[rows != PADDING]) == [t for a, b in spans for t in range(a, b)]
        wanted, fewest = sum(b - a for a, b in spans), cp * sp * multiple
        assert len(rows) < wanted + fewest + len(spans) * 2 * cp + 1


def test_without_it_lengths_are_as_they_were() -> None:
    assert padded_lengths([5, 1], 2, 2) == [8, 8]
    assert padded_lengths([5, 1], 1, 2) == [5, 1]
    assert padded_lengths([], 1, 1) == [1]
    assert padded_lengths([5, 1], 1, 2, 16) == [5, 27]


def test_rows_are_whole_blocks_of_the_recipe() -> None:
    """Transformer Engine 2.20: blocks of 128 rows, and 16 for a product's dimensions."""
    assert (fp8_rows("blockwise"), fp8_rows("tensorwise"), fp8_rows(None)) == (128, 16, 1)


class FakeGroupedLayer(torch.nn.Module):
    """In the place of megatron-core's, whose Transformer Engine is for GPUs: a layer without a state of FP8 fails."""

    num_gemms = 3

    def _split_extra_state(self, state: torch.Tensor) -> list[torch.Tensor]:
        if not len(state):
            raise TypeError("'NoneType' object is not subscriptable")
        return [*state.split(1)]


def test_experts_without_a_state_of_fp8_are_saved_and_others_as_before() -> None:
    layer = FakeGroupedLayer()
    with pytest.raises(TypeError):
        layer._split_extra_state(torch.empty(0))
    share_empty_states(torch.nn.Sequential(torch.nn.Linear(1, 1), layer))
    assert [len(state) for state in layer._split_extra_state(torch.empty(0))] == [0, 0, 0]
    assert [state.tolist() for state in layer._split_extra_state(torch.arange(3))] == [[0], [1], [2]]
