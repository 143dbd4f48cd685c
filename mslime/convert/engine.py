"""How an engine keeps a model's parameters: which tensors it joins in one, and what each of its ranks holds of it.

Worked out from the rules of the family: what goes into one Megatron parameter goes into one of the engine's too, and is
cut at the same places. A family whose engine joins other tensors says so in `Family.engine_parameters`. The layouts are
those of unquantised SGLang 0.5.23 models between `begin_weight_update` and `end_weight_update`, when no backend has
repacked them. Not foreseen: the zero padding of a CPU server with TP > 1 whose heads or MLP sizes are no multiples of
32 x TP, that of the flashinfer_trtllm MoE backend, and SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED. There the comparison fails
although the weights are right. Nor are experts that the file stacks, and projections of gated delta-nets: families with
those are not compared (`Support.compared_on`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mslime.config.layout import EngineLayout
from mslime.convert.kinds import FusedGatedMLP, FusedQKV, GatedMLP, Heads, Kind, Sharded, Vocabulary, cat
from mslime.convert.kinds_delta import GatedQKV
from mslime.convert.table import BoundRule, RuleTable

if TYPE_CHECKING:
    from torch import Tensor

_VOCABULARY = 64
_JOINED = (FusedQKV, GatedQKV, GatedMLP)
"""Layouts whose tensors are one parameter in the engine too; the tensors of other kinds stay apart."""


def engine_vocabulary(rows: int, tp: int) -> int:
    """Rows that an engine of `tp` ranks holds of a vocabulary, zeros included.

    A multiple of 64, or of 64 x TP where that does not divide (sglang's VocabParallelEmbedding).
    """
    padded = -(-rows // _VOCABULARY) * _VOCABULARY
    return padded if padded % tp == 0 else -(-rows // (_VOCABULARY * tp)) * _VOCABULARY * tp


class Cut(ABC):
    """What one rank of an engine holds of a parameter."""

    @abstractmethod
    def local(self, parts: Sequence[Tensor], rank: int, layout: EngineLayout) -> Tensor:
        """The rank's parameter.

        Args:
            parts: the whole Hugging Face tensors, in the order of `EngineParameter.parts`.
        """


@dataclass(frozen=True)
class Whole(Cut):
    """Every rank holds everything: norms, routers. Several tensors follow each other in the rows."""

    def local(self, parts: Sequence[Tensor], rank: int, layout: EngineLayout) -> Tensor:
        return cat(parts)


@dataclass(frozen=True)
class Share(Cut):
    """Ranks hold equal runs of each tensor, which follow each other in the rows.

    Attributes:
        dim: that is cut.
        heads: where a run is of whole heads: how many heads each tensor has. Several ranks hold the same head when they
            are more than heads. Empty: rows are cut whatever they belong to.
    """

    dim: int = 0
    heads: tuple[int, ...] = ()

    def local(self, parts: Sequence[Tensor], rank: int, layout: EngineLayout) -> Tensor:
        heads = self.heads or (layout.tp,) * len(parts)
        return cat([self._run(part, n, rank, layout.tp) for part, n in zip(parts, heads, strict=True)])

    def _run(self, part: Tensor, heads: int, rank: int, tp: int) -> Tensor:
        replicas = max(1, tp // heads)
        return _run(part, rank // replicas, tp // replicas, self.dim)


@dataclass(frozen=True)
class Halves(Cut):
    """A tensor of two halves, each of which is cut like a tensor of its own: gate and up projections in one."""

    def local(self, parts: Sequence[Tensor], rank: int, layout: EngineLayout) -> Tensor:
        return Share().local(parts[0].chunk(2), rank, layout)


@dataclass(frozen=True)
class Padded(Cut):
    """A vocabulary: rows are shared out after zeros have been added."""

    def local(self, parts: Sequence[Tensor], rank: int, layout: EngineLayout) -> Tensor:
        (rows,) = parts
        missing = engine_vocabulary(rows.shape[0], layout.tp) - rows.shape[0]
        padded = cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows
        return _run(padded, rank, layout.tp)


@dataclass(frozen=True)
class Experts(Cut):
    """[local experts, rows, columns]: whole experts are shared out over `ep`, and each is cut over `tp // ep` ranks.

    Attributes:
        number: of experts, each of which has the same number of tensors, one expert after the other.
        dim: that is cut inside an expert.
    """

    number: int
    dim: int = 0

    def local(self, parts: Sequence[Tensor], rank: int, layout: EngineLayout) -> Tensor:
        import torch

        each, within = len(parts) // self.number, layout.tp // layout.ep
        per_rank = self.number // layout.ep
        first = rank // within * per_rank
        of_experts = [parts[expert * each : (expert + 1) * each] for expert in range(first, first + per_rank)]
        return torch.stack([cat([_run(p, rank % within, within, self.dim) for p in own]) for own in of_experts])


@dataclass(frozen=True)
class EngineParameter:
    """One parameter of an engine.

    Attributes:
        name: in the engine.
        parts: the Hugging Face tensors that it is loaded from, in the order that `cut` expects.
        cut: what each rank holds.
        float32: whether the engine holds it in float32 whatever its dtype is.
    """

    name: str
    parts: tuple[str, ...]
    cut: Cut
    float32: bool = False

    def local(self, parts: Mapping[str, Tensor], rank: int, layout: EngineLayout) -> Tensor:
        """What tensor-parallel rank `rank` of an engine of this layout holds.

        Args:
            parts: whole tensors by Hugging Face name.
        """
        whole = [parts[name].float() if self.float32 else parts[name] for name in self.parts]
        return self.cut.local(whole, rank, layout)


def engine_parameters(table: RuleTable, float32: tuple[str, ...] = ()) -> tuple[EngineParameter, ...]:
    """The engine's parameters for all that is trained, as the rules give them.

    Args:
        float32: ends of the names of those tensors that the engine holds in float32.
    """
    found: list[EngineParameter] = []
    experts: dict[str, list[BoundRule]] = {}
    seen: set[str] = set()
    for rule in table.bound.values():
        if not rule.exported or seen.issuperset(rule.hf_names):
            continue  # a copy, or one more slice of a tensor that the file stacks
        if rule.is_expert and not rule.stack:
            experts.setdefault(_expert_parameter(rule), []).append(rule)
            continue
        seen.update(rule.hf_names)
        parts = [rule.hf_names] if isinstance(rule.kind, _JOINED) else [(name,) for name in rule.hf_names]
        found += [EngineParameter(_name(rule, p[0]), p, _cut(rule), p[0].endswith(float32)) for p in parts]
    return (*found, *(_joined_experts(name, rules) for name, rules in experts.items()))


def joined(
    parameters: Iterable[EngineParameter], ends: tuple[str, ...], end: str, cut: Cut
) -> tuple[EngineParameter, ...]:
    """Parameters of which those whose names end in `ends`, with the same beginning, are one in the engine.

    For `Family.engine_parameters`. Where a beginning has not all of them, its parameters stay as they are.

    Args:
        ends: of the names of what is joined, in the order in which it is.
        end: of the name of the whole.
        cut: of the whole.
    """
    left = {parameter.name: parameter for parameter in parameters}
    found: list[EngineParameter] = []
    for name in list(left):
        start = name.removesuffix(ends[0])
        parts = [start + each for each in ends]
        if name.endswith(ends[0]) and all(part in left for part in parts):
            names = tuple(hf for part in parts for hf in left.pop(part).parts)
            found.append(EngineParameter(start + end, names, cut))
    return (*left.values(), *found)


def _name(rule: BoundRule, first: str) -> str:
    """The engine's parameter of a rule that is not of an expert; the tensor's own name where it is alone."""
    if isinstance(rule.kind, FusedQKV | GatedQKV):
        return first.replace(".q_proj.", ".qkv_proj.")
    return first.replace(".gate_proj.", ".gate_up_proj.") if isinstance(rule.kind, GatedMLP) else first


def _cut(rule: BoundRule) -> Cut:
    kind: Kind = rule.kind
    if rule.stack:
        return Whole()
    if isinstance(kind, FusedQKV | GatedQKV):
        return Share(heads=(kind.heads, kind.groups, kind.groups))
    if isinstance(kind, Heads):
        return Share(heads=(kind.heads,))
    if isinstance(kind, GatedMLP):
        return Share()
    if isinstance(kind, FusedGatedMLP):
        return Halves()
    if isinstance(kind, Vocabulary):
        return Padded()
    return Share(kind.axis) if isinstance(kind, Sharded) else Whole()


def _expert_parameter(rule: BoundRule) -> str:
    """`w13` joins gate and up projections of all experts, `w2` the projections back."""
    block = rule.hf_names[0].partition(f".experts.{rule.expert}.")[0]
    return f"{block}.experts.{'w13' if isinstance(rule.kind, GatedMLP) else 'w2'}_weight"


def _joined_experts(name: str, rules: Sequence[BoundRule]) -> EngineParameter:
    ordered = sorted(rules, key=lambda rule: rule.expert)
    dim = 0 if isinstance(rules[0].kind, GatedMLP) else 1
    return EngineParameter(name, tuple(hf for rule in ordered for hf in rule.hf_names), Experts(len(rules), dim))


def _run(tensor: Tensor, rank: int, ranks: int, dim: int = 0) -> Tensor:
    return tensor.chunk(ranks, dim)[rank] if ranks > 1 else tensor
