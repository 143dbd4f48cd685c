"""The rule table: which Hugging Face tensors make which Megatron parameter, declared once and read in both directions.

Names on the Megatron side are canonical: those of the local layer spec with global layer and expert ids (`spelling`
maps other spellings onto them). A table is pure data, expanded for one model; it opens no file and needs no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mslime.config.errors import CheckpointError, ConfigError, nearest
from mslime.config.layout import ParallelLayout
from mslime.convert.kinds import FusedQKV, GatedMLP, Kind, Shape, Sliceable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """One line of a family's declaration.

    Attributes:
        megatron: canonical name, with `{layer}` and `{expert}` as wildcards.
        hf: Hugging Face names with the same wildcards, in the order the kind expects.
        kind: how the tensors are laid out and shared out.
        layers: global layer ids that the rule stands for; empty when the name has no `{layer}`.
        experts: number of experts; 0 when the name has no `{expert}`.
        exported: False for a copy of a tensor that another rule exports (tied embeddings on the last stage).
    """

    megatron: str
    hf: tuple[str, ...]
    kind: Kind
    layers: tuple[int, ...] = ()
    experts: int = 0
    exported: bool = True

    def expand(self) -> Iterable[BoundRule]:
        """One bound rule for every layer and expert."""
        for layer in self.layers if "{layer}" in self.megatron else (-1,):
            for expert in range(self.experts) if self.experts else (-1,):
                names = [name.format(layer=layer, expert=expert) for name in (self.megatron, *self.hf)]
                yield BoundRule(names[0], tuple(names[1:]), self.kind, layer, expert, self.exported)


@dataclass(frozen=True)
class BoundRule:
    """The rule of one Megatron parameter.

    Attributes:
        name: canonical Megatron name.
        hf_names: Hugging Face tensors it is made of.
        kind: layout.
        layer, expert: global ids, -1 where the parameter belongs to none.
        exported: whether it is written when exporting.
    """

    name: str
    hf_names: tuple[str, ...]
    kind: Kind
    layer: int
    expert: int
    exported: bool

    @property
    def is_expert(self) -> bool:
        """Whether expert and expert-tensor parallelism share it out, instead of tensor parallelism."""
        return self.expert >= 0

    @property
    def tp_axis(self) -> int | None:
        """Dimension that (expert-)tensor parallelism splits."""
        return self.kind.tp_axis

    @property
    def full_shape(self) -> Shape:
        """Shape on one tensor-parallel rank, without vocabulary padding."""
        return self.kind.full_shape

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        """Shapes of `hf_names`."""
        return self.kind.hf_shapes

    def local_shape(self, tp_size: int) -> Shape:
        """Shape of one rank's shard, vocabulary padding included."""
        return self.kind.local_shape(tp_size)

    def to_megatron(self, read: Callable[[str], Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        """This rank's shard.

        Args:
            read: gives a tensor, or a lazy view of one, by Hugging Face name (`HFCheckpoint.view`).
            tp_rank, tp_size: position among tensor-parallel ranks (expert-tensor-parallel ones for an expert).
        """
        return self.kind.shard([read(name) for name in self.hf_names], tp_rank, tp_size)

    def to_hf(self, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """The Hugging Face tensors, from the shards of all tensor-parallel ranks in rank order."""
        return list(zip(self.hf_names, self.kind.unshard(shards), strict=True))


@dataclass(frozen=True)
class RuleTable:
    """All rules of one model.

    Attributes:
        rules: the family's declaration for this model, in the order in which tensors are exported.
        ignored: Hugging Face names that a checkpoint may hold and that mean nothing (a tied output layer).
    """

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()

    @cached_property
    def bound(self) -> Mapping[str, BoundRule]:
        """Every bound rule by canonical name, in model order: embedding, layer 0, layer 1, ..., head."""
        found: dict[str, BoundRule] = {}
        depth = -1  # before the first rule with layers: the embedding; after the last: the head
        placed: list[tuple[float, BoundRule]] = []
        for rule in self.rules:
            depth = math.inf if "{layer}" in rule.megatron else depth
            placed += [(bound.layer if bound.layer >= 0 else depth, bound) for bound in rule.expand()]
        for _, bound in sorted(placed, key=lambda pair: pair[0]):
            assert bound.name not in found, f"two rules for {bound.name}"
            found[bound.name] = bound
        exported = Counter(name for bound in found.values() if bound.exported for name in bound.hf_names)
        twice = [name for name, count in exported.items() if count > 1]
        assert not twice, f"two rules write {twice[:3]}"
        return found

    def bind(self, canonical_name: str) -> BoundRule:
        """The rule of one Megatron parameter.

        Raises:
            CheckpointError: no rule covers the name.
        """
        bound = self.bound.get(canonical_name)
        if bound is None:
            hint = nearest(canonical_name, self.bound)
            raise CheckpointError(
                "megatron parameter", canonical_name, f"no conversion rule covers it {hint}".strip(),
                "add a rule to the model's file in mslime/convert/families",
            )  # fmt: skip
        return bound

    def megatron_names(self) -> tuple[str, ...]:
        """Canonical names of every parameter."""
        return tuple(self.bound)

    def hf_shapes(self) -> dict[str, Shape]:
        """Every Hugging Face tensor that the model needs, with its shape."""
        return {
            name: shape
            for bound in self.bound.values()
            for name, shape in zip(bound.hf_names, bound.hf_shapes, strict=True)
        }

    def check_model(self, canonical_names: Iterable[str]) -> None:
        """Every parameter of a whole model has exactly one rule, and every exporting rule has its parameter.

        Args:
            canonical_names: parameters of all stages and experts; a tied copy may or may not be among them.

        Raises:
            CheckpointError: a parameter without a rule or a rule without its parameter.
        """
        names = set(canonical_names)
        for name in names:
            self.bind(name)
        absent = [name for name, bound in self.bound.items() if bound.exported and name not in names]
        if absent:
            raise CheckpointError(
                "megatron parameter", absent[0], f"the model lacks {len(absent)} parameters that its rules name",
                "the model was built from another config.json than the rules were",
            )  # fmt: skip

    def check_hf(self, shapes: Mapping[str, Shape], where: str) -> None:
        """A checkpoint holds exactly the tensors that the rules read, in their shapes.

        Args:
            shapes: shape of every tensor of the checkpoint.
            where: directory, for the message.

        Raises:
            CheckpointError: naming the first missing, misshapen or unexpected tensor.
        """
        for name, shape in self.hf_shapes().items():
            if name not in shapes:
                raise CheckpointError(
                    f"{where}: {name}", None, f"the tensor is missing {nearest(name, shapes)}".strip(),
                    "download the checkpoint again, or point model.path at a complete one",
                )  # fmt: skip
            if tuple(shapes[name]) != shape:
                raise CheckpointError(
                    f"{where}: {name}", tuple(shapes[name]), f"config.json promises the shape {shape}",
                    "use the config.json that belongs to these weights",
                )  # fmt: skip
        known = self.hf_shapes().keys() | set(self.ignored)
        for name in shapes:
            if name not in known and not name.endswith(".rotary_emb.inv_freq"):
                raise CheckpointError(
                    f"{where}: {name}", tuple(shapes[name]), "no conversion rule reads this tensor",
                    "the checkpoint is of another architecture than config.json says, or carries an adapter",
                )  # fmt: skip

    def check_layout(self, layout: ParallelLayout) -> None:
        """The parallel layout divides this model.

        Raises:
            ConfigError: naming the size that does not divide.
        """
        for rule in self.rules:
            if rule.experts:
                _check_tensor_parallel(rule, layout.etp, "megatron.expert_tensor_parallel_size")
            else:
                _check_tensor_parallel(rule, layout.tp, "megatron.tensor_model_parallel_size")
            if rule.experts % layout.ep:
                raise ConfigError(
                    "megatron.expert_model_parallel_size", layout.ep, f"must divide the model's {rule.experts} experts",
                    "choose a divisor of the number of experts",
                )  # fmt: skip


def _check_tensor_parallel(rule: Rule, size: int, field: str) -> None:
    """One rule's tensor divides over `size` ranks (the vocabulary always does: it is padded)."""
    kind = rule.kind
    numbers: dict[str, int] = {}
    if isinstance(kind, FusedQKV):
        numbers["attention heads"] = kind.heads
        if kind.groups % size and size % kind.groups:
            numbers["key-value groups"] = kind.groups
    elif isinstance(kind, GatedMLP):
        numbers["MLP features"] = kind.ffn
    for what, number in numbers.items():
        if number % size:
            raise ConfigError(field, size, f"must divide the model's {number} {what}", f"choose a divisor of {number}")
