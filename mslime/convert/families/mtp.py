"""Multi-token prediction: rules of the layers that DeepSeek-V3 and similar models publish behind the last one.

Training does not build them. They are declared so that checkpoints are checked, converted and exported completely. A
layer is a decoder layer like the last one, between the projection of [embedding of the next token; hidden state], in
this order in both spellings, and a norm before the shared output layer. Hugging Face continues the numbers of the
layers, and some checkpoints repeat the embedding and the output layer inside them.
"""

from __future__ import annotations

from dataclasses import replace

from mslime.convert.table import Rule, RuleTable
from mslime.convert.tensor_layouts import Column, Replicated

_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."


def with_multi_token_prediction(table: RuleTable, hidden: int, layers: int, depth: int) -> RuleTable:
    """The table with `depth` prediction layers behind its `layers` decoder layers.

    Args:
        table: of the decoder alone; each prediction layer has the rules of its last layer.
        hidden: features of a hidden state.
    """
    last = [rule for rule in table.rules if layers - 1 in rule.layers]
    output = next(rule for rule in table.rules if rule.megatron == "output_layer.weight")
    norm, rules, aliases = Replicated((hidden,)), list(table.rules), dict(table.aliases)
    for k in range(depth):
        m, h = f"mtp.layers.{k}.", f"model.layers.{layers + k}."
        rules += [
            Rule(f"{m}enorm.weight", (f"{h}enorm.weight",), norm),
            Rule(f"{m}hnorm.weight", (f"{h}hnorm.weight",), norm),
            Rule(f"{m}eh_proj.weight", (f"{h}eh_proj.weight",), Column((hidden, 2 * hidden))),
            *(_moved(rule, f"{m}transformer_layer.", h) for rule in last),
            Rule(f"{m}final_layernorm.weight", (f"{h}shared_head.norm.weight",), norm),
        ]
        aliases |= {f"{h}embed_tokens.weight": "model.embed_tokens.weight", f"{h}shared_head.head.weight": output.hf[0]}
    return replace(table, rules=tuple(rules), aliases=aliases)


def _moved(rule: Rule, megatron: str, hf: str) -> Rule:
    """A decoder layer's rule under the names of one prediction layer."""
    names = tuple(name.replace(_H, hf) for name in rule.hf)
    return replace(rule, megatron=rule.megatron.replace(_M, megatron), hf=names, layers=())


def mtp_depth(table: RuleTable) -> int:
    """Number of prediction layers."""
    return len({name.split(".")[2] for name, rule in table.all_bound.items() if rule.is_mtp})
