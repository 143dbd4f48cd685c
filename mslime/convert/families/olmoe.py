"""OLMoE: OlmoeForCausalLM (https://arxiv.org/abs/2409.02060; transformers `models/olmoe`).

Queries and keys are normed over all heads jointly. Every layer has experts, weighted by a softmax over all.
`intermediate_size` is an expert's.
"""

from __future__ import annotations

from mslime.convert.families.experts import Experts
from mslime.convert.families.family import HFConfig, Support, flag, refuse_unless, refused, required_int
from mslime.convert.families.gqa import Attention, Decoder, read_attention


class Olmoe(Decoder):
    """The OLMoE family."""

    architecture = "OlmoeForCausalLM"
    support = Support(
        ("OLMoE-1B-7B",),
        largest_engine_tp=1,  # SGLang's joint norms of queries and keys are computed per rank
        notes=("An engine has one GPU: SGLang 0.5.23 does not divide this family's query and key norms.",),
    )

    def attention(self, hf_config: HFConfig) -> Attention:
        refuse_unless(hf_config, "attention_bias", (None, False))
        refuse_unless(hf_config, "clip_qkv", (None,))
        return read_attention(hf_config, norm="projection")

    def refuse_for_engine(self, hf_config: HFConfig) -> None:
        heads = required_int(hf_config, "num_attention_heads")
        for name, built in (("rms_norm_eps", 1e-5), ("num_key_value_heads", heads), ("norm_topk_prob", False)):
            if hf_config.get(name) not in (None, built):
                raise refused(
                    name, hf_config[name], f"SGLang 0.5.23 computes OLMoE with {built} only",
                    "train it with train.task: sft, or use a checkpoint with that setting",
                )  # fmt: skip

    def experts(self, hf_config: HFConfig) -> Experts:
        return Experts(
            layers=tuple(range(required_int(hf_config, "num_hidden_layers"))),
            number=required_int(hf_config, "num_experts", "num_local_experts"),
            top_k=required_int(hf_config, "num_experts_per_tok"),
            ffn=required_int(hf_config, "intermediate_size"),
            normalised=flag(hf_config, "norm_topk_prob", False),
        )
