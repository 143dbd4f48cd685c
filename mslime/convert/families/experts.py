"""A layer's experts in family declarations: megatron-core's settings, and the rules of their tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mslime.convert.families.family import HFConfig, refused, required_int, required_number
from mslime.convert.table import Rule
from mslime.convert.tensor_layouts import GatedMLP, Replicated, Row

_M, _H = "decoder.layers.{layer}.mlp.", "model.layers.{layer}."


@dataclass(frozen=True)
class Experts:
    """Gated MLPs, of which each token uses some, and optionally a shared one for all tokens.

    Attributes:
        layers: global ids of the layers that have them.
        number, top_k: experts of a layer, and experts of a token.
        ffn: features inside an expert.
        score: function of the router's logits.
        normalised: the weights of the chosen experts sum to `scale`, which multiplies them.
        block: Hugging Face name of the whole, after the layer's.
        names: of an expert's gate, up and down projections.
        correction: name, inside the block, of the bias that is added to the scores for choosing experts but not for
            weighting them; empty: there is none.
        shared_ffn: features inside the shared expert; 0: there is none.
        shared, shared_gate: names of the shared expert, and of the sigmoid gate on its output if it has one.
    """

    layers: tuple[int, ...]
    number: int
    top_k: int
    ffn: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    scale: float = 1.0
    block: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    correction: str = ""
    shared_ffn: int = 0
    shared: str = "shared_experts"
    shared_gate: str = ""

    def transformer_fields(self, num_layers: int) -> dict[str, object]:
        """Fields of megatron-core's TransformerConfig (for the scores: `moe_utils.topk_routing_with_score_function`).

        Raises:
            CheckpointError: megatron-core does not build this router.
        """
        if self.normalised and self.top_k == 1:
            raise refused(
                "num_experts_per_tok", 1, "the normalised weight of a single expert is always 1, so the router gets no "
                "gradient", "use a checkpoint with more experts per token",
            )  # fmt: skip
        assert self.normalised or self.score == "softmax", "megatron-core normalises sigmoid scores"
        return {
            "num_moe_experts": self.number,
            "moe_router_topk": self.top_k,
            "moe_ffn_hidden_size": self.ffn,
            "moe_layer_freq": [int(layer in self.layers) for layer in range(num_layers)],
            "moe_router_score_function": self.score,
            # Dividing the top-k softmax values by their sum equals the softmax over the top-k logits.
            "moe_router_pre_softmax": self.score == "softmax" and not self.normalised,
            "moe_router_topk_scaling_factor": None if self.scale == 1.0 else self.scale,
            "moe_router_enable_expert_bias": bool(self.correction),
            # Balancing is for pretraining: the bias does not change, which keeps the engine's router the same.
            "moe_router_bias_update_rate": 0.0,
            "moe_shared_expert_intermediate_size": self.shared_ffn or None,
            "moe_shared_expert_gate": bool(self.shared_gate),
        }

    def rules(self, hidden: int) -> tuple[Rule, ...]:
        """Router, experts and shared expert of every layer that has them."""
        h, at = f"{_H}{self.block}.", self.layers
        m_expert, h_expert = f"{_M}experts.local_experts.{{expert}}.", f"{h}experts.{{expert}}."
        gate, up, down = (f"{name}.weight" for name in self.names)
        rules = [Rule(f"{_M}router.weight", (f"{h}gate.weight",), Replicated((self.number, hidden)), at)]
        if self.correction:
            bias = Replicated((self.number,))
            rules += [Rule(f"{_M}router.expert_bias", (f"{h}{self.correction}",), bias, at, dtype="float32")]
        if self.shared_ffn:
            m_shared, h_shared = f"{_M}shared_experts.", f"{h}{self.shared}."
            gate_up = (f"{h_shared}gate_proj.weight", f"{h_shared}up_proj.weight")
            rules += [
                Rule(f"{m_shared}linear_fc1.weight", gate_up, GatedMLP(self.shared_ffn, hidden), at),
                Rule(f"{m_shared}linear_fc2.weight", (f"{h_shared}down_proj.weight",),
                     Row((hidden, self.shared_ffn)), at),
            ]  # fmt: skip
        if self.shared_gate:
            gate_name = (f"{h}{self.shared_gate}.weight",)
            rules += [Rule(f"{_M}shared_experts.gate_weight", gate_name, Replicated((1, hidden)), at)]
        return (
            *rules,
            Rule(f"{m_expert}linear_fc1.weight", (h_expert + gate, h_expert + up), GatedMLP(self.ffn, hidden), at,
                 self.number),
            Rule(f"{m_expert}linear_fc2.weight", (h_expert + down,), Row((hidden, self.ffn)), at, self.number),
        )  # fmt: skip


def limited_groups(config: HFConfig) -> dict[str, object]:
    """Fields for choosing experts from the best groups only; empty for one group.

    Raises:
        CheckpointError: the chosen groups hold too few experts.
    """
    groups, chosen = required_int(config, "n_group"), required_int(config, "topk_group")
    experts, top_k = required_int(config, "n_routed_experts"), required_int(config, "num_experts_per_tok")
    if experts % groups or chosen > groups or top_k > experts // groups * chosen:
        raise refused("n_group", groups, f"{chosen} of the groups must contain {top_k} of {experts} experts")
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen} if groups > 1 else {}


def read_experts(config: HFConfig, *, sigmoid: bool = False) -> Experts:
    """Experts of DeepSeek-V2 and similar models: in all layers but the first `first_k_dense_replace`.

    Args:
        sigmoid: DeepSeek-V3's router, with normalised sigmoid scores and a correction bias.
    """
    dense, layers = config.get("first_k_dense_replace"), required_int(config, "num_hidden_layers")
    if not isinstance(dense, int) or not 0 <= dense < layers:
        raise refused("first_k_dense_replace", dense, f"must be a number of layers below {layers}")
    ffn = required_int(config, "moe_intermediate_size")
    return Experts(
        layers=tuple(range(dense, layers)),
        number=required_int(config, "n_routed_experts"),
        top_k=required_int(config, "num_experts_per_tok"),
        ffn=ffn,
        score="sigmoid" if sigmoid else "softmax",
        normalised=sigmoid,
        correction="gate.e_score_correction_bias" if sigmoid else "",
        scale=required_number(config, "routed_scaling_factor"),
        shared_ffn=required_int(config, "n_shared_experts") * ffn,
    )
