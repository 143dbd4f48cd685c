"""Qwen1.5 and Qwen2 mixture of experts: Qwen2MoeForCausalLM (https://arxiv.org/abs/2407.10671; transformers
`models/qwen2_moe`).

Qwen2's attention. In routed layers a softmax router, and beside the chosen experts a large shared one whose output a
sigmoid of one more linear layer weighs.
"""

from __future__ import annotations

from mslime.convert.families.experts import Experts
from mslime.convert.families.family import HFConfig, Support, flag, refuse_unless, required_int
from mslime.convert.families.gqa import Attention
from mslime.convert.families.qwen2 import Qwen2
from mslime.convert.families.qwen3_moe import moe_layer_ids, refuse_dense_layers_for_engine


class Qwen2Moe(Qwen2):
    """The MoE family."""

    architecture = "Qwen2MoeForCausalLM"
    support = Support(("Qwen1.5-MoE-A2.7B", "Qwen2-57B-A14B"), served_adapters=True)

    def attention(self, hf_config: HFConfig) -> Attention:
        refuse_unless(hf_config, "qkv_bias", (None, True))
        return super().attention(hf_config)

    def experts(self, hf_config: HFConfig) -> Experts:
        return Experts(
            layers=moe_layer_ids(hf_config),
            number=required_int(hf_config, "num_experts"),
            top_k=required_int(hf_config, "num_experts_per_tok"),
            ffn=required_int(hf_config, "moe_intermediate_size"),
            normalised=flag(hf_config, "norm_topk_prob", False),
            shared_ffn=required_int(hf_config, "shared_expert_intermediate_size"),
            shared="shared_expert",
            shared_gate="shared_expert_gate",
        )

    def refuse_for_engine(self, hf_config: HFConfig) -> None:
        refuse_dense_layers_for_engine(hf_config, "Qwen2-MoE")
