"""Rule table: maps Megatron parameters to Hugging Face tensors, declared once for both directions.

Names on the Megatron side are canonical: those of the local layer spec with global layer and expert ids (`spelling`
maps other spellings onto them). A table is pure data, expanded for one model; it opens no file and needs no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from mslime.config.errors import CheckpointError, ConfigError, nearest
from mslime.config.layout import ParallelLayout
from mslime.convert.tensor_layouts import Kind, Shape, Sliceable

if TYPE_CHECKING:
    from torch import Tensor


UNTRAINED = ("mtp", "vision")
"""First parts of canonical names that training does not build: multi-token prediction and vision."""


@dataclass(frozen=True)
class Rule:
    """One line of a family's declaration.

    Attributes:
        megatron: canonical name, with `{layer}` and `{expert}` as wildcards.
        hf: Hugging Face names with the same wildcards, in the order the kind expects.
        kind: layout of the tensors, and their split over ranks.
        layers: global layer ids of the rule; empty if the name has no `{layer}`.
        experts: number of experts; 0 if the name has no `{expert}`. With a Hugging Face name without `{expert}`, the
            file holds one tensor for all experts, [experts, ...]: it is stacked.
        exported: False for a copy of a tensor that another rule exports (tied embeddings on the last stage).
        dtype: as torch names it, for a tensor with its own dtype (a router's correction bias).
        bundle: rules of one layer with the same word are sent to engines in one request: SGLang's loader joins their
            tensors into one parameter, and loses the first if the second arrives separately.
    """

    megatron: str
    hf: tuple[str, ...]
    kind: Kind
    layers: tuple[int, ...] = ()
    experts: int = 0
    exported: bool = True
    dtype: str | None = None
    bundle: str = ""

    @property
    def stacked(self) -> bool:
        """Whether the file holds one tensor for all experts."""
        return self.experts > 0 and "{expert}" not in self.hf[0]

    @property
    def parameters(self) -> int:
        """Parameters of the whole model that the rule covers."""
        return (len(self.layers) if "{layer}" in self.megatron else 1) * (self.experts or 1)

    @property
    def trained(self) -> bool:
        """Whether the trainer builds these parameters; the others are only kept in checkpoints."""
        return self.megatron.split(".")[0] not in UNTRAINED

    def expand(self) -> Iterable[BoundRule]:
        """One bound rule for every layer and expert."""
        stack = self.experts if self.stacked else 0
        for layer in self.layers if "{layer}" in self.megatron else (-1,):
            for expert in range(self.experts) if self.experts else (-1,):
                names = [name.format(layer=layer, expert=expert) for name in (self.megatron, *self.hf)]
                yield BoundRule(
                    names[0], tuple(names[1:]), self.kind, layer, expert, self.exported, stack, self.dtype, self.bundle
                )


@dataclass(frozen=True)
class BoundRule:
    """The rule of one Megatron parameter.

    Attributes:
        name: canonical Megatron name.
        hf_names: its Hugging Face tensors.
        kind: layout.
        layer, expert: global ids, -1 if it has none.
        exported: whether it is written when exporting.
        stack: number of experts that share each Hugging Face tensor, this one being slice `expert` of it; 0: none do.
        dtype: its own, None for the model's.
        bundle: see `Rule`.
    """

    name: str
    hf_names: tuple[str, ...]
    kind: Kind
    layer: int
    expert: int
    exported: bool
    stack: int = 0
    dtype: str | None = None
    bundle: str = ""

    @property
    def untrained(self) -> str:
        """Part of the model, one of `UNTRAINED`, outside of training; empty for trained parameters."""
        part = self.name.split(".", 1)[0]
        return part if part in UNTRAINED else ""

    @property
    def is_expert(self) -> bool:
        """Whether it is split by expert and expert-tensor parallelism, instead of tensor parallelism."""
        return self.expert >= 0

    @property
    def hf_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the tensors `hf_names`."""
        return tuple((self.stack, *shape) for shape in self.kind.hf_shapes) if self.stack else self.kind.hf_shapes

    def to_megatron(self, read: Callable[[str], Sliceable], tp_rank: int, tp_size: int) -> Tensor:
        """Shard of one rank.

        Args:
            read: returns a tensor, or a lazy view of one, by Hugging Face name (`HFCheckpoint.view`).
            tp_rank, tp_size: position among tensor-parallel ranks (expert-tensor-parallel ones for an expert).
        """
        parts = [read(name) for name in self.hf_names]
        return self.kind.shard([_Slice(part, self.expert) for part in parts] if self.stack else parts, tp_rank, tp_size)

    def to_hf(self, shards: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
        """Hugging Face tensors from the shards of all tensor-parallel ranks, in rank order.

        For a stacked tensor, this expert's slice: shape `hf_shapes` without the first dimension.
        """
        return list(zip(self.hf_names, self.kind.unshard(shards), strict=True))


@dataclass(frozen=True)
class _Slice:
    """Slice `index` of a stacked tensor, read when indexed itself."""

    stack: Sliceable
    index: int

    def __getitem__(self, index: Any, /) -> Tensor:
        mine = slice(self.index, self.index + 1)
        if index is Ellipsis:
            return self.stack[mine][0]
        return self.stack[(mine, *index) if isinstance(index, tuple) else (mine, index)][0]


@lru_cache(maxsize=4)
def _all_bound(rules: tuple[Rule, ...]) -> Mapping[str, BoundRule]:
    """Cached `RuleTable.all_bound`. Tables of one model are built repeatedly, and the largest has 46,000 rules."""
    found: dict[str, BoundRule] = {}
    depth = -1  # before the first rule with layers: the embedding; after the last: the head
    placed: list[tuple[float, BoundRule]] = []
    for rule in rules:
        depth = math.inf if "{layer}" in rule.megatron else depth
        placed += [(bound.layer if bound.layer >= 0 else depth, bound) for bound in rule.expand()]
    for _, bound in sorted(placed, key=lambda pair: pair[0]):
        assert bound.name not in found, f"two rules for {bound.name}"
        found[bound.name] = bound
    written: set[tuple[str, int]] = set()
    for bound in found.values():
        for name in bound.hf_names if bound.exported else ():
            piece = (name, bound.expert if bound.stack else -1)
            assert piece not in written, f"two rules write {name}"
            written.add(piece)
    return found


@dataclass(frozen=True)
class RuleTable:
    """All rules of one model.

    Attributes:
        rules: the family's declaration for this model, in the order in which tensors are exported.
        ignored: optional, meaningless Hugging Face names of a checkpoint (a tied output layer).
        aliases: Hugging Face names that a checkpoint may hold as repetitions of another tensor, with that tensor's name
            (the embedding of a multi-token-prediction layer).
        undivided: parallel sizes, `cp` or `etp`, that must be 1 for this model, and why.
    """

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    undivided: Mapping[str, str] = field(default_factory=dict[str, str])

    @cached_property
    def bound(self) -> Mapping[str, BoundRule]:
        """Bound rules of all trained parameters, by canonical name in model order."""
        return {name: bound for name, bound in self.all_bound.items() if not bound.untrained}

    @cached_property
    def untrained_names(self) -> Mapping[str, str]:
        """Hugging Face tensors that training neither builds nor changes, with their part of the model."""
        return {
            name: bound.untrained for bound in self.all_bound.values() if bound.untrained for name in bound.hf_names
        }

    @cached_property
    def all_bound(self) -> Mapping[str, BoundRule]:
        """Every bound rule by canonical name, in model order: embedding, layer 0, layer 1, ..., head."""
        return _all_bound(self.rules)

    def bind(self, canonical_name: str) -> BoundRule:
        """The rule of one Megatron parameter.

        Raises:
            CheckpointError: no rule covers the name.
        """
        bound = self.all_bound.get(canonical_name)
        if bound is None:
            hint = nearest(canonical_name, self.all_bound)
            raise CheckpointError(
                "megatron parameter", canonical_name, f"no conversion rule covers it {hint}".strip(),
                "add a rule to the model's file in mslime/convert/families",
            )  # fmt: skip
        return bound

    def hf_shapes(self) -> dict[str, Shape]:
        """Every Hugging Face tensor that the model needs, with its shape."""
        return {
            name: shape
            for bound in self.all_bound.values()
            for name, shape in zip(bound.hf_names, bound.hf_shapes, strict=True)
        }

    def check_model(self, canonical_names: Iterable[str]) -> None:
        """Check that every parameter of a whole model has exactly one rule, and every exporting rule its parameter.

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
                "megatron parameter", absent[0], f"the model lacks {len(absent)} parameters of its rules",
                "build the model and its rules from the same config.json",
            )  # fmt: skip

    def check_hf(self, shapes: Mapping[str, Shape], where: str) -> None:
        """Check that a checkpoint holds exactly the tensors of the rules, in their shapes.

        Args:
            shapes: shape of every tensor of the checkpoint.
            where: directory, for the message.

        Raises:
            CheckpointError: naming the first missing, misshapen or unexpected tensor.
        """
        expected = self.hf_shapes()
        present = {part for name, part in self.untrained_names.items() if name in shapes}
        for name, shape in expected.items():
            if self.untrained_names.get(name, "") not in {"", *present}:
                continue  # published without this part, or removed by a tool: all or none
            if name not in shapes:
                hint = "download the checkpoint again, or use a complete one"
                raise CheckpointError(f"{where}: {name}", None, "the tensor is missing",
                                      f"{nearest(name, shapes)} {hint}".lstrip())  # fmt: skip
            if tuple(shapes[name]) != shape:
                raise CheckpointError(
                    f"{where}: {name}", tuple(shapes[name]), f"config.json requires the shape {shape}",
                    "use the config.json that belongs to these weights",
                )  # fmt: skip
        for name, original in self.aliases.items():
            if name in shapes and tuple(shapes[name]) != expected[original]:
                raise CheckpointError(
                    f"{where}: {name}", tuple(shapes[name]), f"must have the shape of {original}, {expected[original]}",
                    "use the config.json that belongs to these weights",
                )  # fmt: skip
        known = expected.keys() | set(self.ignored) | self.aliases.keys()
        for name in shapes:
            if name not in known and not name.endswith(".rotary_emb.inv_freq"):
                raise CheckpointError(
                    f"{where}: {name}", tuple(shapes[name]), "no conversion rule reads this tensor",
                    "use a config.json of the checkpoint's architecture, and a checkpoint without adapters",
                )  # fmt: skip

    def check_layout(self, layout: ParallelLayout) -> None:
        """Check that the parallel layout divides this model.

        Raises:
            ConfigError: naming the size that does not divide, or that must be 1.
        """
        sizes = {
            "cp": ("megatron.context_parallel_size", layout.cp),
            "etp": ("megatron.expert_tensor_parallel_size", layout.etp),
        }
        for axis, reason in self.undivided.items():
            name, size = sizes[axis]
            if size > 1:
                raise ConfigError(name, size, reason, f"set {name} to 1")
        for rule in self.rules:
            name, size = sizes["etp"] if rule.experts else ("megatron.tensor_model_parallel_size", layout.tp)
            for unit, number in rule.kind.shared_out(size).items():
                if number % size:
                    raise ConfigError(
                        name, size, f"must divide the model's {number} {unit} ({rule.megatron})",
                        f"choose a divisor of {number}",
                    )  # fmt: skip
            if rule.experts % layout.ep:
                raise ConfigError(
                    "megatron.expert_model_parallel_size", layout.ep, f"must divide the model's {rule.experts} experts",
                    "choose a divisor of the number of experts",
                )  # fmt: skip


# Spellings of Megatron parameter names: all of them are mapped to the canonical ones here.
#
# Canonical is the local layer spec with global layer and expert ids. Transformer Engine fuses norms into the linear
# layer after them and numbers the weights of a grouped GEMM, as adapters here do; pipeline stages and expert ranks
# count from zero.

_LAYER = re.compile(r"(?:module\.)*(?:decoder\.layers\.(\d+)|(mtp\.layers\.\d+\.transformer_layer))\.(.+)")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_GROUPED_ADAPTER = re.compile(r"mlp\.experts\.(linear_fc[12])\.adapter\.(\d+)\.(lora_[AB])")
_SEQUENTIAL = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(mlp\.experts\.)local_experts\.[^.]+\.")
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    # Multi-latent attention: Transformer Engine norms a latent vector in the projection up from it.
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def canonical_name(local_name: str, first_expert: int = 0, global_layers: Collection[int] | None = None) -> str:
    """Canonical name of a parameter of one model chunk.

    Args:
        local_name: from `named_parameters()` of a local-spec or Transformer Engine model, wrappers' `module.` allowed.
        first_expert: global id of this rank's expert 0.
        global_layers: global (0-based) id of each of the chunk's layers in order; default: they are global already.
            Multi-token-prediction layers have their own global ids.
    """
    match = _LAYER.fullmatch(local_name)
    if match is None:
        return re.sub(r"^(?:module\.)+", "", local_name)
    prefix = match[2] or f"decoder.layers.{match[1] if global_layers is None else tuple(global_layers)[int(match[1])]}"
    rest = _FUSED_NORMS.get(match[3], match[3])
    if grouped := _GROUPED.fullmatch(rest):
        rest = f"mlp.experts.local_experts.{grouped[3]}.{grouped[1]}.{grouped[2]}"
    if adapter := _GROUPED_ADAPTER.fullmatch(rest):
        rest = f"mlp.experts.local_experts.{adapter[2]}.{adapter[1]}.adapter.{adapter[3]}"
    if sequential := _SEQUENTIAL.fullmatch(rest):
        rest = f"mlp.experts.local_experts.{int(sequential[1]) + first_expert}.{sequential[2]}"
    return f"{prefix}.{rest}"


def of_all_experts(name: str) -> str:
    """Canonical name of a tensor shared by all experts of a layer, from its name in one of them."""
    return _EXPERT.sub(r"\1", name)
