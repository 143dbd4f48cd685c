"""Qwen3 dense: Qwen3ForCausalLM (https://arxiv.org/abs/2505.09388; transformers `models/qwen3`).

Grouped-query attention with an RMS norm on every query and key head, SwiGLU MLP, no biases.
"""

from __future__ import annotations

from mslime.convert.families.family import (
    Family,
    HFConfig,
    ModelFields,
    Support,
    flag,
    refuse_unless,
    required_int,
    required_number,
    rotary,
)
from mslime.convert.kinds import FusedQKV, GatedMLP, Replicated, Row, Vocabulary
from mslime.convert.table import Rule, RuleTable

_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."


class Qwen3(Family):
    """The dense family; the MoE family shares its attention, norms and embeddings."""

    architecture = "Qwen3ForCausalLM"
    support = Support(("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B", "Qwen3-32B"))
    harmless = frozenset({"max_window_layers", "sliding_window"})

    def transformer_fields(self, hf_config: HFConfig) -> dict[str, object]:
        refuse_unless(hf_config, "hidden_act", ("silu",))
        refuse_unless(hf_config, "attention_bias", (None, False))
        refuse_unless(hf_config, "attention_dropout", (None, 0, 0.0))
        refuse_unless(hf_config, "use_sliding_window", (None, False))
        refuse_unless(hf_config, "dual_chunk_attention_config", (None,))
        layers = required_int(hf_config, "num_hidden_layers")
        refuse_unless(hf_config, "layer_types", (None, ["full_attention"] * layers))
        heads = required_int(hf_config, "num_attention_heads")
        return {
            "num_layers": layers,
            "hidden_size": required_int(hf_config, "hidden_size"),
            "ffn_hidden_size": required_int(hf_config, "intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": _groups(hf_config),
            "kv_channels": _head_dim(hf_config),
            "qk_layernorm": True,
            "normalization": "RMSNorm",
            "layernorm_epsilon": required_number(hf_config, "rms_norm_eps"),
            "activation_func": "silu",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "rotary_interleaved": False,
        }

    def model_fields(self, hf_config: HFConfig) -> ModelFields:
        rope = rotary(hf_config)
        return ModelFields(
            vocab_size=required_int(hf_config, "vocab_size"),
            max_positions=required_int(hf_config, "max_position_embeddings"),
            rotary_base=rope.base,
            rotary_percent=rope.percent,
            tie_embeddings=flag(hf_config, "tie_word_embeddings", False),
            num_layers=required_int(hf_config, "num_hidden_layers"),
            moe_layer_ids=(),
            num_experts=0,
            top_k=0,
        )

    def rules(self, hf_config: HFConfig) -> RuleTable:
        layers = tuple(range(required_int(hf_config, "num_hidden_layers")))
        return assemble(hf_config, dense_mlp_rules(hf_config, layers))


def assemble(config: HFConfig, mlp_rules: tuple[Rule, ...]) -> RuleTable:
    """Embedding, attention and norms of every Qwen3 model around the given MLP rules."""
    hidden, vocab = required_int(config, "hidden_size"), required_int(config, "vocab_size")
    heads, groups, head_dim = required_int(config, "num_attention_heads"), _groups(config), _head_dim(config)
    layers = tuple(range(required_int(config, "num_hidden_layers")))
    tied = flag(config, "tie_word_embeddings", False)
    norm, head_norm, vocabulary = Replicated((hidden,)), Replicated((head_dim,)), Vocabulary(vocab, hidden)
    qkv = tuple(f"{_H}self_attn.{part}_proj.weight" for part in "qkv")
    output = ("model.embed_tokens.weight" if tied else "lm_head.weight",)
    rules = (
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary),
        Rule(f"{_M}input_layernorm.weight", (f"{_H}input_layernorm.weight",), norm, layers),
        Rule(f"{_M}self_attention.linear_qkv.weight", qkv, FusedQKV(heads, groups, head_dim, hidden), layers),
        Rule(f"{_M}self_attention.q_layernorm.weight", (f"{_H}self_attn.q_norm.weight",), head_norm, layers),
        Rule(f"{_M}self_attention.k_layernorm.weight", (f"{_H}self_attn.k_norm.weight",), head_norm, layers),
        Rule(f"{_M}self_attention.linear_proj.weight", (f"{_H}self_attn.o_proj.weight",),
             Row((hidden, heads * head_dim)), layers),
        Rule(f"{_M}pre_mlp_layernorm.weight", (f"{_H}post_attention_layernorm.weight",), norm, layers),
        *mlp_rules,
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), norm),
        # With tied embeddings the last pipeline stage holds a copy under this name: loaded, never exported.
        Rule("output_layer.weight", output, vocabulary, exported=not tied),
    )  # fmt: skip
    return RuleTable(rules, ignored=("lm_head.weight",) if tied else ())


def dense_mlp_rules(config: HFConfig, layers: tuple[int, ...]) -> tuple[Rule, ...]:
    """A SwiGLU MLP in each of `layers`."""
    hidden, ffn = required_int(config, "hidden_size"), required_int(config, "intermediate_size")
    gate_up = (f"{_H}mlp.gate_proj.weight", f"{_H}mlp.up_proj.weight")
    return (
        Rule(f"{_M}mlp.linear_fc1.weight", gate_up, GatedMLP(ffn, hidden), layers),
        Rule(f"{_M}mlp.linear_fc2.weight", (f"{_H}mlp.down_proj.weight",), Row((hidden, ffn)), layers),
    )


def _groups(config: HFConfig) -> int:
    return required_int(config, "num_key_value_heads", "num_attention_heads")


def _head_dim(config: HFConfig) -> int:
    if config.get("head_dim") is not None:
        return required_int(config, "head_dim")
    return required_int(config, "hidden_size") // required_int(config, "num_attention_heads")
