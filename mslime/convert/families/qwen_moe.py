"""Qwen1.5, Qwen2 and Qwen3 mixture of experts, a class for each architecture, and helpers for Qwen3-Next."""

from __future__ import annotations

from mslime.convert.families.experts import Experts
from mslime.convert.families.family import HFConfig, Support, as_list, flag, refuse_unless, refused, required_int
from mslime.convert.families.gqa import Attention
from mslime.convert.families.qwen import Qwen2, Qwen3


class Qwen3Moe(Qwen3):
    """Qwen3MoeForCausalLM (https://arxiv.org/abs/2505.09388; transformers `models/qwen3_moe`).

    Qwen3's attention and norms; in routed layers a softmax router picks top-k of SwiGLU experts, without shared ones.
    """

    architecture = "Qwen3MoeForCausalLM"
    support = Support(("Qwen3-30B-A3B", "Qwen3-235B-A22B"), renderers=("qwen3",), served_adapters=True)

    def attention(self, hf_config: HFConfig) -> Attention:
        # Qwen3-Coder sets it explicitly to the architecture's value.
        refuse_unless(hf_config, "qkv_bias", (None, False))
        refuse_unless(hf_config, "use_qk_norm", (None, True))
        return super().attention(hf_config)

    def experts(self, hf_config: HFConfig) -> Experts:
        refuse_unless(hf_config, "shared_expert_intermediate_size", (None, 0))
        return Experts(
            layers=moe_layer_ids(hf_config),
            number=required_int(hf_config, "num_experts", "num_local_experts"),
            top_k=required_int(hf_config, "num_experts_per_tok"),
            ffn=required_int(hf_config, "moe_intermediate_size"),
            normalised=flag(hf_config, "norm_topk_prob", False),
        )

    def refuse_for_engine(self, hf_config: HFConfig) -> None:
        refuse_dense_layers_for_engine(hf_config, "Qwen3-MoE")


def refuse_dense_layers_for_engine(hf_config: HFConfig, family: str) -> None:
    """Reject dense layers: in SGLang's Qwen MoE models every layer routes.

    Raises:
        CheckpointError: a layer is dense.
    """
    routed, layers = moe_layer_ids(hf_config), required_int(hf_config, "num_hidden_layers")
    if len(routed) < layers:
        raise refused(
            "mlp_only_layers", [layer for layer in range(layers) if layer not in routed],
            f"SGLang 0.5.23 builds every {family} layer with experts and drops the weights of dense ones",
            "train it with train.task: sft, or use a checkpoint with experts in all layers",
        )  # fmt: skip


def moe_layer_ids(config: HFConfig) -> tuple[int, ...]:
    """Global ids of the routed layers: every `decoder_sparse_step`-th one that `mlp_only_layers` does not name.

    Raises:
        CheckpointError: no layer routes, or `mlp_only_layers` is not a list.
    """
    step = required_int(config, "decoder_sparse_step") if config.get("decoder_sparse_step") is not None else 1
    dense = as_list(config.get("mlp_only_layers") or [])
    if dense is None:
        raise refused(
            "mlp_only_layers", config["mlp_only_layers"], "must be a list of layer ids", "use the checkpoint's own"
        )
    layers = range(required_int(config, "num_hidden_layers"))
    routed = tuple(layer for layer in layers if layer not in dense and (layer + 1) % step == 0)
    if not routed:
        raise refused(
            "mlp_only_layers", dense, "at least one layer must have experts", "use the dense model's architecture"
        )
    return routed


def experts_and_a_shared_one(config: HFConfig, normalised: bool) -> Experts:
    """Routed experts and one gated shared expert beside them.

    Args:
        normalised: the family's default of `norm_topk_prob` in transformers.
    """
    return Experts(
        layers=moe_layer_ids(config),
        number=required_int(config, "num_experts"),
        top_k=required_int(config, "num_experts_per_tok"),
        ffn=required_int(config, "moe_intermediate_size"),
        normalised=flag(config, "norm_topk_prob", normalised),
        shared_ffn=required_int(config, "shared_expert_intermediate_size"),
        shared="shared_expert",
        shared_gate="shared_expert_gate",
    )


class Qwen2Moe(Qwen2):
    """Qwen2MoeForCausalLM (https://arxiv.org/abs/2407.10671; transformers `models/qwen2_moe`).

    Qwen2's attention; in routed layers a softmax router, and beside the chosen experts a large shared one. The sigmoid
    of a further linear layer weighs its output.
    """

    architecture = "Qwen2MoeForCausalLM"
    support = Support(("Qwen1.5-MoE-A2.7B", "Qwen2-57B-A14B"), served_adapters=True)

    def attention(self, hf_config: HFConfig) -> Attention:
        refuse_unless(hf_config, "qkv_bias", (None, True))
        return super().attention(hf_config)

    def experts(self, hf_config: HFConfig) -> Experts:
        return experts_and_a_shared_one(hf_config, normalised=False)

    def refuse_for_engine(self, hf_config: HFConfig) -> None:
        refuse_dense_layers_for_engine(hf_config, "Qwen2-MoE")
