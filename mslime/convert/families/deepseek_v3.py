"""DeepSeek-V3 and R1: DeepseekV3ForCausalLM (https://arxiv.org/abs/2412.19437; transformers `models/deepseek_v3`).

DeepSeek-V2's layers with a sigmoid router: a correction bias enters the choice of experts but not their weights, and
groups of experts are ranked by their two best. Moonlight (https://arxiv.org/abs/2502.16982) and Kimi-K2
(https://arxiv.org/abs/2507.20534) are of this architecture with one group.
"""

from __future__ import annotations

from dataclasses import replace

from mslime.config.errors import CheckpointError
from mslime.convert.families.deepseek_v2 import DeepseekV2
from mslime.convert.families.experts import Experts, limited_groups, read_experts
from mslime.convert.families.family import HFConfig, Support, refuse_unless, required_int
from mslime.convert.families.mtp import with_multi_token_prediction
from mslime.convert.table import RuleTable


class DeepseekV3(DeepseekV2):
    """The family."""

    architecture = "DeepseekV3ForCausalLM"
    support = Support(
        ("DeepSeek-V3", "DeepSeek-R1", "DeepSeek-V3.1", "Moonlight-16B-A3B", "Kimi-K2"),
        renderers=("deepseek-v3", "deepseek-r1", "kimi-k2"),
        notes=(
            "The router's correction bias stays as the checkpoint has it: training does not balance experts.",
            "Multi-token-prediction layers are not trained; exports copy them from the source checkpoint.",
            "Moonlight's latent norms use rms_norm_eps (1e-5) as in SGLang, where transformers has 1e-6.",
        ),
    )
    harmless = frozenset({"ep_size"})

    def experts(self, hf_config: HFConfig) -> Experts:
        refuse_unless(hf_config, "scoring_func", (None, "sigmoid"))
        refuse_unless(hf_config, "topk_method", (None, "noaux_tc"))
        refuse_unless(hf_config, "norm_topk_prob", (None, True))
        experts = read_experts(hf_config)
        return replace(experts, score="sigmoid", normalised=True, correction="gate.e_score_correction_bias")

    def group_fields(self, hf_config: HFConfig) -> dict[str, object]:
        fields, top_k = limited_groups(hf_config), required_int(hf_config, "num_experts_per_tok")
        # megatron-core ranks groups by their best top_k // topk_group experts, the model by their best two.
        if fields and top_k // required_int(hf_config, "topk_group") != 2:
            raise CheckpointError(
                "config.json: topk_group", hf_config.get("topk_group"),
                f"megatron-core ranks groups by two experts only where topk_group is half of top-{top_k}",
                "use a checkpoint with two experts a group, or with one group",
            )  # fmt: skip
        return fields

    def rules(self, hf_config: HFConfig) -> RuleTable:
        layers, hidden = required_int(hf_config, "num_hidden_layers"), required_int(hf_config, "hidden_size")
        name = "num_nextn_predict_layers"
        depth = required_int(hf_config, name) if hf_config.get(name) else 0
        return with_multi_token_prediction(super().rules(hf_config), hidden, layers, depth)
