"""Adapters that SGLang 0.5.23 serves beside a model's weights (`lora.sync: adapter`).

It silently skips unknown adapters, or exits. So only adapters are allowed that were compared with merged weights,
family by family (`Support.served_adapters`).
"""

from __future__ import annotations

from collections import defaultdict

from mslime.config.errors import ConfigError
from mslime.convert.families.family import Family
from mslime.convert.lora_rules import Adapters

_SERVED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Name endings of tested modules."""
_TOGETHER = (("q_proj", "v_proj"), ("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj"))
"""(module, its partner): SGLang joins them, so a layer with an adapter on one must have one on the other."""
_EXPERTS = (("gate_proj", "down_proj"), ("down_proj", "gate_proj"))
"""The same pairs in experts: adapters on both or on neither."""
_MERGED = "set lora.sync: merged"


def served_modules(adapters: Adapters) -> tuple[str, ...]:
    """Name endings of the modules with an adapter."""
    return tuple(dict.fromkeys(name.rsplit(".", 1)[-1] for name in _adapted(adapters)))


def check_served(adapters: Adapters, family: Family) -> None:
    """Check that SGLang serves these adapters.

    Raises:
        ConfigError: it does not, or they are not tested.
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
    """Hugging Face names of the modules with an adapter."""
    bases = (base for rule in adapters.rules for base in rule.base.expand())
    return [
        base.hf_names[part].removesuffix(".weight") for base in bases for part in adapters.bound[base.name].rule.parts
    ]
