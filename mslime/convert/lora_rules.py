"""Rules of low-rank adapters, derived from the rules of their weights.

A weight `[out, in]` gets `B A` added to it, A `[rank, in]` and B `[out, rank]`. One Megatron weight may fuse several
Hugging Face tensors; in peft and in engines each of these has its own A and B. The A are stacked, and the rows of the B
are ordered like the weight's rows. So B has the weight's layout with `rank` columns, and the weight's rule also splits
its adapter. Names are peft's, derived from the weight's name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING

from mslime.config.errors import ConfigError, nearest
from mslime.config.lora import LORA_GROUPS, LoraConfig
from mslime.convert.families.family import Family
from mslime.convert.table import BoundRule, Rule, RuleTable, of_all_experts
from mslime.convert.tensor_layouts import (
    FusedQKV,
    GatedMLP,
    Joined,
    Kind,
    OneForAll,
    Replicated,
    RowRuns,
    Run,
    Shape,
    Sharded,
    Sliceable,
    cat,
)

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
"""Prefix of every module's name in an adapter's file."""
FACTORS = ("lora_A", "lora_B")
LINEAR = (
    "linear_qkv", "linear_proj", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj",
    "linear_kv_up_proj", "linear_fc1", "linear_fc2",
)  # fmt: skip
"""Megatron's linear layers that support adapters."""


@dataclass(frozen=True)
class StackedTensors(Kind):
    """Stacked tensors of one shape, the same on every rank."""

    shape: Shape
    number: int
    tp_axis: int | None = None

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return (self.shape,) * self.number

    @property
    def full_shape(self) -> Shape:
        return (self.number * self.shape[0], *self.shape[1:])

    def shard(self, parts: Sequence[Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        return cat([part[...] for part in parts])

    def joined(self, shards: Sequence[Tensor]) -> list[Joined]:
        return [([part], 0) for part in shards[0].chunk(self.number)]


@dataclass(frozen=True)
class PartRows(RowRuns):
    """Rows of a fused weight that come from some of its parts, in the weight's order."""

    whole: RowRuns
    parts: tuple[int, ...]

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        return tuple(self.whole.hf_shapes[part] for part in self.parts)

    def shared_out(self, tp_size: int) -> dict[str, int]:
        groups = {"key-value groups": self.whole.groups} if isinstance(self.whole, FusedQKV) else {}
        return self.whole.shared_out(tp_size) | groups

    def runs(self, tp_rank: int, tp_size: int) -> Iterator[Run]:
        for part, first, rows in self.whole.runs(tp_rank, tp_size):
            if part in self.parts:
                yield self.parts.index(part), first, rows


@dataclass(frozen=True)
class AdapterRule:
    """Adapter of the weights of one rule, in some of its layers.

    Attributes:
        base: the weights' rule, for those layers.
        parts: indices of its Hugging Face tensors with an adapter.
        a, b: rules of the two factors; a factor shared by all experts of a layer has a rule without experts.
    """

    base: Rule
    parts: tuple[int, ...]
    a: Rule
    b: Rule

    @property
    def split_in_halves(self) -> bool:
        """Whether a rank's rows of B are a part of its first half and a part of its second."""
        return isinstance(self.b.kind, GatedMLP)

    def rows(self, tp_rank: int, tp_size: int) -> list[Run]:
        """(which of `parts`, first row, number of rows) of one rank's weight that have an adapter; B's rows, in order.

        A linear layer that is not fused has one part.
        """
        kind = self.base.kind
        if not isinstance(kind, RowRuns):
            return [(0, 0, kind.local_shape(tp_size)[0])]
        found: list[Run] = []
        at = 0
        for part, _, rows in kind.runs(tp_rank, tp_size):
            if part in self.parts:
                found.append((self.parts.index(part), at, rows))
            at += rows
        return found


@dataclass(frozen=True)
class BoundAdapter:
    """Adapter of one Megatron parameter.

    Attributes:
        rule: that it is bound from.
        base: the parameter's rule.
        a, b: rules of the factors.
    """

    rule: AdapterRule
    base: BoundRule
    a: BoundRule
    b: BoundRule


@dataclass(frozen=True)
class Adapters:
    """All adapters of a model.

    Attributes:
        lora: their settings.
        rules: in the order of the table.
        modules: Hugging Face names of all modules with a matrix.
        stacked: in files, the factors of all experts of a layer are one tensor, [experts, ...].
    """

    lora: LoraConfig
    rules: tuple[AdapterRule, ...]
    modules: tuple[str, ...]
    stacked: bool = False

    @cached_property
    def table(self) -> RuleTable:
        """Rule table of the factors, for saving, sending and exporting."""
        rules = (rule for each in self.rules for rule in (each.a, each.b))
        return RuleTable(tuple(map(_stacked, rules) if self.stacked else rules))

    @cached_property
    def bound(self) -> Mapping[str, BoundAdapter]:
        """Bound adapters by the canonical name of their weight."""
        found: dict[str, BoundAdapter] = {}
        for rule in self.rules:
            a, b = ({(each.layer, each.expert): each for each in factor.expand()} for factor in (rule.a, rule.b))
            for base in rule.base.expand():
                own, shared = (base.layer, base.expert), (base.layer, -1)
                found[base.name] = BoundAdapter(rule, base, a.get(own) or a[shared], b.get(own) or b[shared])
        return found

    @property
    def as_files(self) -> Adapters:
        """The same adapters in file format: peft's, or, with factors shared by experts, which peft does not support,
        SGLang's.
        """
        return self.with_stacked_experts() if self.lora.shares_outer else self

    def with_plain_scale(self) -> Adapters:
        """The same adapters scaled by alpha / rank, for readers without other scales."""
        plain = self.lora.model_copy(update={"alpha": self.lora.scale * self.lora.rank, "rs_lora": False})
        return replace(self, lora=plain)

    def with_stacked_experts(self) -> Adapters:
        """The same adapters with one tensor in the file for all experts of a layer, which SGLang reads too. This is not
        peft's format.
        """
        return replace(self, stacked=True)

    def check_stages(self, stages: Sequence[Sequence[Sequence[int]]]) -> None:
        """Check that every pipeline stage has trainable parameters, as megatron-core's optimizer requires.

        Args:
            stages: global layer ids `[stage][chunk]`.

        Raises:
            ConfigError: a stage has no adapter.
        """
        trained = {layer for rule in self.rules for layer in rule.base.layers}
        for stage, chunks in enumerate(stages):
            if not trained & {layer for chunk in chunks for layer in chunk}:
                raise ConfigError(
                    "lora.targets", list(self.lora.targets), f"no layer of pipeline stage {stage} has an adapter",
                    "name layers of every stage, or lower megatron.pipeline_model_parallel_size",
                )  # fmt: skip

    @cached_property
    def adapted(self) -> tuple[str, ...]:
        """Hugging Face names of the modules with an adapter."""
        bases = (base for rule in self.rules for base in rule.base.expand())
        return tuple(
            dict.fromkeys(_module(base.hf_names[part]) for base in bases for part in self.bound[base.name].rule.parts)
        )

    @cached_property
    def target_modules(self) -> tuple[str, ...]:
        """Modules with an adapter as peft's `target_modules`: name endings if these suffice, else whole names."""
        ends = served_modules(self)
        meant = sum(_end(name) in ends for name in self.modules)
        return ends if meant == len(self.adapted) else self.adapted


def _stacked(rule: Rule) -> Rule:
    """Rule of a factor whose experts are stacked in one tensor."""
    return replace(rule, hf=tuple(name.replace(".{expert}.", ".") for name in rule.hf))


def stored_place(rule: Rule, bound: BoundRule) -> tuple[str, list[tuple[int, int, int]]]:
    """Location of a factor in a checkpoint: (key of the stored tensor, (axis, place, places) in it).

    Layers and experts are stacked in one tensor, so its name does not depend on the ranks that hold them.

    Args:
        rule, bound: of the factor.
    """
    parts = "-".join(name.split(".")[-3] for name in rule.hf)
    key = f"adapters.{rule.megatron.replace('{layer}.', '').replace('{expert}.', '')}.{parts}"
    places = [(0, rule.layers.index(bound.layer), len(rule.layers))]
    return key, places + ([(1, bound.expert, rule.experts)] if rule.experts else [])


def is_factor(name: str) -> bool:
    """Whether a parameter, by its Megatron name, is a factor of an adapter."""
    return name.rsplit(".", 1)[-1] in FACTORS


def make_adapters(table: RuleTable, lora: LoraConfig) -> Adapters:
    """Build the adapters of a model.

    Args:
        table: the model's conversion rules.
        lora: their targets and ranks.

    Raises:
        ConfigError: a target that matches nothing, or a layer without adapter support.
    """
    modules = {
        _module(name): rule for rule in table.rules for bound in rule.expand() for name in bound.hf_names
        if not bound.untrained and name.endswith(".weight") and len(rule.kind.full_shape) == 2
    }  # fmt: skip
    stacked = {name for rule in table.rules if rule.stacked for name in rule.hf}
    chosen = {name for target in lora.targets for name in _named_by(target, modules, bool(stacked))}
    rules: list[AdapterRule] = []
    for rule in table.rules:
        for parts, layers in _chosen_parts(rule, chosen).items():
            rules.append(_adapter(replace(rule, layers=layers), parts, lora))
    if not rules:
        raise ConfigError(
            "lora.targets", list(lora.targets), "the model has none of these layers", "add attention, or remove it"
        )
    return Adapters(lora, tuple(rules), tuple(modules))


def _named_by(target: str, modules: Mapping[str, Rule], stacked: bool) -> set[str]:
    """Modules that a target selects."""
    built = {name for name, rule in modules.items() if _is_built(rule)}
    if target in LORA_GROUPS:
        if target == "experts" and stacked:
            raise ConfigError(
                "lora.targets", target, "this model's checkpoints hold all experts of a layer in one tensor, and "
                "peft's format does not support adapters on parts of a tensor", "remove experts from lora.targets",
            )  # fmt: skip
        return {name for name in built if _group(modules[name]) == target}
    found = {name for name in modules if name == target or name.endswith(f".{target}") or fnmatchcase(name, target)}
    if not found:
        ends = sorted({_end(name) for name in built})
        raise ConfigError(
            "lora.targets", target, "no linear layer of the model has this name",
            nearest(target, ends) or f"use {', '.join(LORA_GROUPS)}, or of this model: {', '.join(ends)}",
        )  # fmt: skip
    if wrong := sorted(found - built):
        raise ConfigError(
            "lora.targets", target, f"{wrong[0]} cannot have an adapter: embeddings, the output layer, routers and "
            "delta-net layers are not supported", f"use {', '.join(LORA_GROUPS)}",
        )  # fmt: skip
    return found


def _is_built(rule: Rule) -> bool:
    """Whether the layer of these weights supports adapters."""
    kinds = FusedQKV | GatedMLP | Sharded | Replicated
    return rule.megatron.split(".")[-2] in LINEAR and isinstance(rule.kind, kinds) and not rule.stacked


def _group(rule: Rule) -> str:
    if rule.experts:
        return "experts"
    if ".shared_experts." in rule.megatron:
        return "shared_experts"
    return "attention" if ".self_attention." in rule.megatron else "mlp"


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _end(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _chosen_parts(rule: Rule, chosen: set[str]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Layers of a rule by the indices of its selected tensors.

    Raises:
        ConfigError: only some experts of a layer are selected.
    """
    found: dict[int, tuple[int, ...]] = {}
    for bound in rule.expand():
        parts = tuple(i for i, name in enumerate(bound.hf_names) if _module(name) in chosen and not bound.stack)
        if found.setdefault(bound.layer, parts) != parts:
            raise ConfigError(
                "lora.targets", _module(bound.hf_names[0]), "either all experts of a layer must have an adapter, or "
                "none",
                "write * for the expert's number",
            )  # fmt: skip
    by_parts: dict[tuple[int, ...], tuple[int, ...]] = {}
    for layer, parts in found.items():
        if parts:
            by_parts[parts] = (*by_parts.get(parts, ()), layer)
    return by_parts


def _adapter(base: Rule, parts: tuple[int, ...], lora: LoraConfig) -> AdapterRule:
    a, b = _factor_kinds(base.kind, parts, lora.rank)
    module = base.megatron.removesuffix(".weight")
    # A if the layer reads the hidden state, B if it writes it.
    outer = FACTORS[base.megatron.split(".")[-2] == "linear_fc2"] if base.experts and lora.shares_outer else None

    def rule(factor: str, kind: Kind) -> Rule:
        names = tuple(f"{PREFIX}{_module(base.hf[part])}.{factor}.weight" for part in parts)
        own = Rule(f"{module}.adapter.{factor}", names, kind, base.layers, base.experts)
        return _of_all_experts(own) if factor == outer else own

    return AdapterRule(base, parts, rule(FACTORS[0], a), rule(FACTORS[1], b))


def _of_all_experts(rule: Rule) -> Rule:
    """Rule of one factor for all experts of a layer: one tensor, whole on every rank."""
    assert rule.kind.tp_axis is None, rule
    return replace(_stacked(rule), megatron=of_all_experts(rule.megatron), kind=OneForAll(rule.kind), experts=0)


def _factor_kinds(kind: Kind, parts: tuple[int, ...], rank: int) -> tuple[Kind, Kind]:
    """Layouts of A and B."""
    if isinstance(kind, Sharded | Replicated):
        out, features = kind.shape
        if kind.tp_axis is None:
            return Replicated((rank, features)), Replicated((out, rank))
        if kind.tp_axis == 0:
            return Replicated((rank, features)), Sharded((out, rank), 0)
        return Sharded((rank, features), 1), Replicated((out, rank))
    assert isinstance(kind, FusedQKV | GatedMLP) and kind.hidden is not None, kind
    narrow = replace(kind, hidden=rank)
    a = StackedTensors((rank, kind.hidden), len(parts))
    return a, narrow if len(parts) == len(kind.hf_shapes) else PartRows(narrow, parts)


# Adapters that SGLang 0.5.23 serves beside a model's weights (`lora.sync: adapter`).
#
# It silently skips unknown adapters, or exits. So only adapters are allowed that were compared with merged weights,
# family by family (`Support.served_adapters`).

_SERVED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Name endings of tested modules."""
_TOGETHER = (("q_proj", "v_proj"), ("k_proj", "q_proj"), ("v_proj", "q_proj"), ("up_proj", "gate_proj"))
"""(module, its partner): SGLang joins them, so a layer with an adapter on one must have one on the other."""
_EXPERTS = (("gate_proj", "down_proj"), ("down_proj", "gate_proj"))
"""The same pairs in experts: adapters on both or on neither."""
_MERGED = "set lora.sync: merged"


def served_modules(adapters: Adapters) -> tuple[str, ...]:
    """Name endings of the modules with an adapter."""
    return tuple(dict.fromkeys(map(_end, adapters.adapted)))


def check_served(adapters: Adapters, family: Family) -> None:
    """Check that SGLang serves these adapters.

    Raises:
        ConfigError: it does not, or they are not tested.
    """
    if not family.support.served_adapters:
        raise ConfigError(
            "lora.sync", "adapter", f"engines are not tested with adapters of {family.architecture}", _MERGED
        )
    beside = defaultdict[str, set[str]](set)
    for name in adapters.adapted:
        layer, _, end = name.rpartition(".")
        if end not in _SERVED:
            raise ConfigError(
                "lora.sync", "adapter", f"engines are not tested with an adapter on {name}",
                f"{_MERGED}, or remove it from lora.targets",
            )  # fmt: skip
        beside[layer].add(end)
    for layer, ends in beside.items():
        for end, other in _TOGETHER + (_EXPERTS if ".experts." in layer else ()):
            if end in ends and other not in ends:
                raise ConfigError(
                    "lora.targets", list(adapters.lora.targets),
                    f"{layer}: SGLang does not support an adapter on {end} without one on {other} (lora.sync: adapter)",
                    f"add {other}, or {_MERGED}",
                )  # fmt: skip
