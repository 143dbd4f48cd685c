"""Which adapters SGLang 0.5.23 serves beside a model's weights (`lora.sync: adapter`).

What it does not know it skips without a word, or it ends: so what is served is what was run and compared with merged
weights, family by family (`Support.served_adapters`).
"""

from __future__ import annotations

from collections import defaultdict

from mslime.config.errors import ConfigError
from mslime.convert.families.family import Family
from mslime.convert.lora_rules import Adapters

_SERVED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Ends of the names of modules that were run."""
_TOGETHER = (("q_proj", "v_proj"), ("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj"))
"""(module, another that a layer with an adapter on the first must have one on): SGLang joins them."""
_EXPERTS = (("gate_proj", "down_proj"), ("down_proj", "gate_proj"))
"""The same of experts, which have adapters on both or on none there."""
_MERGED = "set lora.sync: merged"


def served_modules(adapters: Adapters) -> tuple[str, ...]:
    """Ends of the names of the modules that have an adapter."""
    return tuple(dict.fromkeys(name.rsplit(".", 1)[-1] for name in _adapted(adapters)))


def check_served(adapters: Adapters, family: Family) -> None:
    """SGLang serves these adapters.

    Raises:
        ConfigError: it does not, or was never run with them.
    """
    if not family.support.served_adapters:
        raise ConfigError(
            "lora.sync", "adapter", f"engines were never run with adapters of {family.architecture}", _MERGED
        )
    beside = defaultdict[str, set[str]](set)
    for name in _adapted(adapters):
        layer, _, end = name.rpartition(".")
        if end not in _SERVED:
            raise ConfigError(
                "lora.sync", "adapter", f"engines were never run with an adapter on {name}",
                f"{_MERGED}, or leave it out of lora.targets",
            )  # fmt: skip
        beside[layer].add(end)
    for layer, ends in beside.items():
        for end, other in _TOGETHER + (_EXPERTS if ".experts." in layer else ()):
            if end in ends and other not in ends:
                raise ConfigError(
                    "lora.targets", list(adapters.lora.targets),
                    f"{layer}: SGLang serves no adapter on {end} without one on {other} (lora.sync: adapter)",
                    f"add {other}, or {_MERGED}",
                )  # fmt: skip


def _adapted(adapters: Adapters) -> list[str]:
    """Hugging Face names of the modules that have an adapter."""
    bases = (base for rule in adapters.rules for base in rule.base.expand())
    return [
        base.hf_names[part].removesuffix(".weight") for base in bases for part in adapters.bound[base.name].rule.parts
    ]
