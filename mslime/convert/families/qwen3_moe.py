"""Qwen3 mixture of experts: Qwen3MoeForCausalLM (https://arxiv.org/abs/2505.09388; transformers `models/qwen3_moe`).

Qwen3's attention and norms; in routed layers a softmax router picks top-k of SwiGLU experts, without shared experts.
"""

from __future__ import annotations

from dataclasses import replace

from mslime.config.errors import CheckpointError
from mslime.convert.families.family import HFConfig, ModelFields, Support, as_list, flag, refuse_unless, required_int
from mslime.convert.families.qwen3 import Qwen3, assemble, dense_mlp_rules
from mslime.convert.kinds import GatedMLP, Replicated, Row
from mslime.convert.table import Rule, RuleTable

_M, _H = "decoder.layers.{layer}.mlp.", "model.layers.{layer}.mlp."


class Qwen3Moe(Qwen3):
    """The MoE family."""

    architecture = "Qwen3MoeForCausalLM"
    support = Support(("Qwen3-30B-A3B", "Qwen3-235B-A22B"))

    def transformer_fields(self, hf_config: HFConfig) -> dict[str, object]:
        moe_layers, top_k = moe_layer_ids(hf_config), required_int(hf_config, "num_experts_per_tok")
        layers = required_int(hf_config, "num_hidden_layers")
        # norm_topk_prob: dividing the top-k softmax values by their sum is the softmax over the top-k logits alone.
        normalised = flag(hf_config, "norm_topk_prob", False)
        if normalised and top_k == 1:
            refuse_unless(hf_config, "norm_topk_prob", (False,))
        return super().transformer_fields(hf_config) | {
            "num_moe_experts": _experts(hf_config),
            "moe_router_topk": top_k,
            "moe_ffn_hidden_size": required_int(hf_config, "moe_intermediate_size"),
            "moe_layer_freq": [int(layer in moe_layers) for layer in range(layers)],
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": not normalised,
        }

    def model_fields(self, hf_config: HFConfig) -> ModelFields:
        return replace(
            super().model_fields(hf_config),
            moe_layer_ids=moe_layer_ids(hf_config),
            num_experts=_experts(hf_config),
            top_k=required_int(hf_config, "num_experts_per_tok"),
        )

    def refuse_for_engine(self, hf_config: HFConfig) -> None:
        routed, layers = moe_layer_ids(hf_config), required_int(hf_config, "num_hidden_layers")
        if len(routed) < layers:
            raise CheckpointError(
                "config.json: mlp_only_layers",
                [layer for layer in range(layers) if layer not in routed],
                "SGLang 0.5.23 builds every Qwen3-MoE layer with experts and drops the weights of dense ones",
                "train it with train.task: sft, or use a checkpoint whose layers all route",
            )

    def rules(self, hf_config: HFConfig) -> RuleTable:
        hidden, ffn = required_int(hf_config, "hidden_size"), required_int(hf_config, "moe_intermediate_size")
        experts, routed = _experts(hf_config), moe_layer_ids(hf_config)
        layers = range(required_int(hf_config, "num_hidden_layers"))
        dense = tuple(layer for layer in layers if layer not in routed)
        m, h = f"{_M}experts.local_experts.{{expert}}.", f"{_H}experts.{{expert}}."
        gate_up = (f"{h}gate_proj.weight", f"{h}up_proj.weight")
        return assemble(hf_config, (
            *dense_mlp_rules(hf_config, dense),
            Rule(f"{_M}router.weight", (f"{_H}gate.weight",), Replicated((experts, hidden)), routed),
            Rule(f"{m}linear_fc1.weight", gate_up, GatedMLP(ffn, hidden), routed, experts),
            Rule(f"{m}linear_fc2.weight", (f"{h}down_proj.weight",), Row((hidden, ffn)), routed, experts),
        ))  # fmt: skip


def moe_layer_ids(config: HFConfig) -> tuple[int, ...]:
    """Global ids of the routed layers: every `decoder_sparse_step`-th one that `mlp_only_layers` does not name.

    Raises:
        CheckpointError: no layer routes, or `mlp_only_layers` is not a list.
    """
    step = required_int(config, "decoder_sparse_step") if config.get("decoder_sparse_step") is not None else 1
    dense = as_list(config.get("mlp_only_layers") or [])
    if dense is None:
        raise CheckpointError(
            "config.json: mlp_only_layers",
            config["mlp_only_layers"],
            "must be a list of layer ids",
            "use the checkpoint's own",
        )
    layers = range(required_int(config, "num_hidden_layers"))
    routed = tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)
    if not routed:
        raise CheckpointError(
            "config.json: mlp_only_layers",
            dense,
            "at least one layer must route",
            "use Qwen3ForCausalLM for a dense model",
        )
    return routed


def _experts(config: HFConfig) -> int:
    return required_int(config, "num_experts", "num_local_experts")
