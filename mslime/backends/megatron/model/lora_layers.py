"""Low-rank adapters on megatron-core's linear layers, local or Transformer Engine's.

An adapter is a module inside the layer whose weight it adds to; a hook adds its output to the layer's. So the layers'
code, names and conversion rules stay unchanged.

Each rank's part of A and B follows from the rule of the weight (`convert.lora_rules`): if tensor parallelism splits the
rows of the weight, it splits B's rows; if it splits the columns, A's. The other factor is whole on every rank. Only the
`rank` features between A and B are exchanged, at the point where the layer exchanges its own.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mslime.backends.megatron.model.chunks import SHARED_BY_EXPERTS, named_factors, named_parameters
from mslime.backends.megatron.parallel import tensor_shard
from mslime.config.errors import CheckpointError
from mslime.config.lora import LORA_KEY, LoraConfig
from mslime.config.resolved import PolicySpec
from mslime.convert.families import get_family
from mslime.convert.lora_rules import FACTORS, Adapters, BoundAdapter, stored_place
from mslime.convert.peft import adapters_of_run
from mslime.convert.table import BoundRule
from mslime.convert.tensor_layouts import Sliceable
from mslime.data.checkpoints import read_manifest

Read = Callable[[str], Sliceable]
_GROUPED = re.compile(r"(.*)\.weight(\d+)")


class Adapter(torch.nn.Module):
    """`scale * B A x`, for one weight of one rank.

    Attributes:
        weight: canonical name of the weight that it is added to.
        lora_A: [parts * rank, in features of this rank].
        lora_B: [rows, rank], one row for each row of the weight that has an adapter, in the weight's order.
        off: whether it adds nothing.
    """

    def __init__(
        self, bound: BoundAdapter, config: TransformerConfig, scale: float, read: Read, like: Tensor,
        shared: dict[str, torch.nn.Parameter],
    ) -> None:  # fmt: skip
        """
        Args:
            read: returns a factor's tensor by name, as `RuleTable` reads checkpoints.
            like: the layer's weight, for dtype and device.
            shared: factors that all experts of a layer share, by canonical name; new ones are added."""
        super().__init__()
        self.weight, self.scale, self.off = bound.base.name, scale, False
        self._expert, self._axis = bound.base.is_expert, bound.base.kind.tp_axis
        self._sequence_parallel = config.sequence_parallel
        self._rows, self._out = bound.rule.rows(*tensor_shard(self._expert)), like.shape[0]

        def factor(rule: BoundRule) -> torch.nn.Parameter:
            if rule.name in shared:
                return shared[rule.name]
            value = rule.to_megatron(read, *tensor_shard(rule.is_expert))
            made = self._marked(value.to(like.dtype).to(like.device, copy=True), rule)
            if hasattr(made, SHARED_BY_EXPERTS):
                shared[rule.name] = made
            return made

        self.lora_A, self.lora_B = factor(bound.a), factor(bound.b)

    def _marked(self, value: Tensor, rule: BoundRule) -> torch.nn.Parameter:
        """A factor with megatron-core's marks for its owner: how its gradient is summed over ranks and counted once.

        A factor that every tensor-parallel rank holds covers a part of the sequence only with sequence parallelism. A
        factor shared by all experts belongs to none: each rank of a stage has a summand of its gradient, from the
        tokens and features of its experts. So it is summed over all of them, like a norm's.
        """
        factor, whole, expert = torch.nn.Parameter(value.contiguous()), rule.kind.tp_axis is None, rule.is_expert
        rank, size = tensor_shard(expert)
        marks: dict[str, bool] = {
            "allreduce": not expert,
            "sequence_parallel": whole and self._sequence_parallel and not expert,
            "tensor_model_parallel": not whole or expert,
        }
        if whole and expert and size > 1:
            marks["shared"] = rank > 0  # the gradient norm counts only one copy
        if self._expert and not expert:
            marks[SHARED_BY_EXPERTS] = True
        vars(factor).update(marks)
        return factor

    def forward(self, x: Tensor) -> Tensor:
        """The adapter's output, in the shape of the layer's: [..., in] -> [..., out].

        If an expert's columns are split, it is this rank's summand, like the expert's own output.
        """
        a, b = self.lora_A, self.lora_B
        if self._expert:
            # The dispatcher gathers the expert's tokens and sums its outputs.
            h = F.linear(x, _summed(a) if self._axis == 0 else a)
            b = _summed(b) if self._axis == 1 else b
        else:
            h = F.linear(x, a)
            # Bring the features between A and B to the ranks that hold B's rows. TP without sequence parallelism: one.
            if self._axis is not None and self._sequence_parallel:
                if self._axis == 0:
                    h = gather_from_sequence_parallel_region(h, tensor_parallel_output_grad=True)
                else:
                    h = reduce_scatter_to_sequence_parallel_region(h)
        return self._placed(F.linear(h, self._by_part(b)) * self.scale)

    def _by_part(self, b: Tensor) -> Tensor:
        """B [rows, rank] as [rows, parts * rank]: each row in the columns of its own A."""
        rank = b.shape[1]
        parts = self.lora_A.shape[0] // rank
        if parts == 1:
            return b
        blocks: list[Tensor] = []
        at = 0
        for part, _, rows in self._rows:
            blocks.append(F.pad(b[at : at + rows], (part * rank, (parts - 1 - part) * rank)))
            at += rows
        return torch.cat(blocks)

    def _placed(self, rows: Tensor) -> Tensor:
        """Scatter the outputs of rows with an adapter to their places among all rows."""
        if rows.shape[-1] == self._out:
            return rows
        whole = rows.new_zeros(*rows.shape[:-1], self._out)
        return whole.index_copy(-1, self._row_numbers(rows.device), rows)

    def _row_numbers(self, device: torch.device) -> Tensor:
        return torch.cat([torch.arange(first, first + rows, device=device) for _, first, rows in self._rows])

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """[out, in] this rank's weight with the adapter merged: computed in float32, returned in the weight's dtype."""
        added = self._by_part(self.lora_B).float() @ self.lora_A.float() * self.scale
        whole = weight.detach().float()
        if added.shape[0] == self._out:
            return (whole + added).to(weight.dtype)
        return whole.index_add(0, self._row_numbers(weight.device), added).to(weight.dtype)


class _SumOverExpertRanks(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks that share an expert."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor) -> Tensor:
        return factor.view_as(factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        whole = gradient.contiguous().clone()
        group: Any = parallel_state.get_expert_tensor_parallel_group()
        dist.all_reduce(whole, group=group)
        return whole


def _summed(factor: Tensor) -> Tensor:
    """A factor held by every rank of an expert; its gradient is summed over these ranks. If all experts share the
    factor, its gradient is summed over all ranks later."""
    if tensor_shard(True)[1] == 1 or hasattr(factor, SHARED_BY_EXPERTS):
        return factor
    return _SumOverExpertRanks.apply(factor)  # type: ignore[no-any-return]


class GroupedAdapters(torch.nn.ModuleList):
    """One adapter for each expert of a grouped layer."""

    def forward(self, x: Tensor, tokens_per_expert: Sequence[int] | Tensor) -> Tensor:
        """[tokens, in], tokens sorted by expert -> [tokens, out]."""
        counts = tokens_per_expert.tolist() if isinstance(tokens_per_expert, Tensor) else list(tokens_per_expert)
        return torch.cat([adapter(part) for adapter, part in zip(self, x.split(counts), strict=True)])


def trained_adapters(
    spec: PolicySpec, hf_config: Mapping[str, object], chunks: Sequence[GPTModel], config: TransformerConfig
) -> tuple[Adapters, PlacedAdapters] | None:
    """Freeze the chunks and put an adapter into every target layer; None if a run trains the model itself.

    Args:
        chunks: without adapters: take other adapters out first.

    Raises:
        ConfigError: a target that the model does not have, or that this layout cannot split.
        CheckpointError: the adapter to start from is of another model, rank, scale or targets.
    """
    if not spec.lora.on:
        return None
    assert next(adapters_of(chunks), None) is None, "the chunks have adapters already"
    stages = spec.megatron.stage_layers(config.num_layers)
    adapters, file = adapters_of_run(get_family(hf_config).rules(hf_config), spec.lora, spec.layout, stages)
    shapes = adapters.table.hf_shapes()
    given = (lambda name: new_factor(name, shapes[name], spec.seed)) if file is None else file.reader()
    placed, shared = PlacedAdapters(), dict[str, torch.nn.Parameter]()
    for chunk in chunks:
        chunk.requires_grad_(False)
        here = [*zip(chunk.named_parameters(), named_parameters(chunk), strict=True)]
        for (local, weight), (name, _) in here:
            bound = adapters.bound.get(name)
            if bound is not None:
                placed.add(chunk, local, Adapter(bound, config, adapters.lora.scale, given, weight, shared))
        if chunk.pre_process and config.recompute_granularity is not None:
            # A recomputed layer returns gradients only if one of its inputs requires one.
            placed.inputs.append(chunk.embedding)
    placed.put_in()
    return adapters, placed


class PlacedAdapters:
    """Adapters of one name and their layers; they can be taken out of the model for another name's, and put back.

    Attributes:
        inputs: modules whose outputs must require gradients while the adapters are in the model.
        resting: they add nothing while another adapter computes in a shared pass (`in_one_pass`).
    """

    def __init__(self) -> None:
        self.inputs: list[torch.nn.Module] = []
        self.resting = False
        self._layers: list[tuple[torch.nn.Module, Adapter | GroupedAdapters]] = []
        self._hooks: list[RemovableHandle] = []

    def add(self, chunk: GPTModel, local: str, adapter: Adapter) -> None:
        """Record the adapter of a weight of the chunk, by its local name; experts of a layer come in order."""
        grouped = _GROUPED.fullmatch(local)
        layer = chunk.get_submodule(grouped[1] if grouped else local.removesuffix(".weight"))
        if not grouped:
            self._layers.append((layer, adapter))
        elif grouped[2] == "0":
            self._layers.append((layer, GroupedAdapters([adapter])))
        else:
            owner, held = self._layers[-1]
            assert owner is layer and isinstance(held, GroupedAdapters) and len(held) == int(grouped[2])
            held.append(adapter)

    def put_in(self) -> None:
        """Make these adapters modules of the model."""
        for layer, adapter in self._layers:
            assert "adapter" not in dict(layer.named_children()), "the layer has another adapter"
            layer.add_module("adapter", adapter)
        self.hook()

    def take_out(self) -> None:
        """Remove these adapters from the model, which is then the base alone."""
        self.unhook()
        for layer, _ in self._layers:
            del layer.adapter

    def hook(self) -> None:
        """Make the layers compute with these adapters, whether or not they are modules of the model."""
        assert not self._hooks, "they are in the model already"
        for layer, adapter in self._layers:
            add = _add_grouped if isinstance(adapter, GroupedAdapters) else _add
            self._hooks.append(layer.register_forward_hook(partial(add, self, adapter)))
        self._hooks += [module.register_forward_hook(_needs_gradient) for module in self.inputs]

    def unhook(self) -> None:
        """Make the layers compute as the base does."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


@contextmanager
def in_one_pass(every: Sequence[PlacedAdapters]) -> Iterator[Callable[[PlacedAdapters], None]]:
    """Context manager: adapters of several names on the layers at once, of which one computes at a time.

    Args:
        every: all the adapters; none may be in the model.

    Yields:
        A function that makes the layers compute with the given adapters.
    """

    def choose(chosen: PlacedAdapters) -> None:
        for placed in every:
            placed.resting = placed is not chosen

    for placed in every:
        placed.resting = True
        placed.hook()
    try:
        yield choose
    finally:
        for placed in every:
            placed.unhook()
            placed.resting = False


Output = tuple[Tensor, Tensor | None]


def _add(placed: PlacedAdapters, adapter: Adapter, layer: Any, inputs: tuple[Any, ...], output: Output) -> Output:
    return output if placed.resting or adapter.off else (output[0] + adapter(inputs[0]), output[1])


def _add_grouped(
    placed: PlacedAdapters, adapters: GroupedAdapters, layer: Any, inputs: tuple[Any, ...], output: Output
) -> Output:
    first: Any = adapters[0]
    if placed.resting or first.off:
        return output
    return output[0] + adapters(inputs[0], inputs[1]), output[1]


def _needs_gradient(module: torch.nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def new_factor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A whole factor, initialised as in peft: A uniform in +-1/sqrt(in), B 0. Seeded by its name, so equal in every
    layout."""
    if name.endswith(f".{FACTORS[1]}.weight"):
        return torch.zeros(shape)
    # Torch's CPU generator uses 32 bits of a seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return (torch.rand(shape, generator=generator) * 2 - 1) / shape[-1] ** 0.5


def adapters_of(chunks: Sequence[torch.nn.Module]) -> Iterator[Adapter]:
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter))


@contextmanager
def adapters_off(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Switch off the adapters inside this context."""
    every = list(adapters_of(chunks))
    for adapter in every:
        adapter.off = True
    try:
        yield
    finally:
        for adapter in every:
            adapter.off = False


class MergedWeights(Mapping[str, Tensor]):
    """This rank's parameters by canonical name, with adapters merged in on access."""

    def __init__(self, chunks: Sequence[GPTModel], params: Mapping[str, Tensor]) -> None:
        self._params = params
        self._adapters = {adapter.weight: adapter for adapter in adapters_of(chunks)}

    def __getitem__(self, name: str) -> Tensor:
        adapter = self._adapters.get(name)
        return self._params[name] if adapter is None else adapter.merged(self._params[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


class StoredAdapters(torch.nn.Module):
    """Checkpoint contents of a chunk with adapters: the adapters alone, under names independent of the layout."""

    def __init__(self, chunk: GPTModel, adapters: Adapters) -> None:
        super().__init__()
        self._factors = dict(named_factors([chunk]))
        self._rules = {
            bound.name: (line, rule)
            for line in adapters.rules
            for rule in (line.a, line.b)
            for bound in rule.expand()
            if bound.name in self._factors
        }
        self._bound = adapters.table.bound

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Every factor as megatron-core stores tensors: layers, and experts, stacked in one tensor."""
        return {name: self._sharded(name, tensor, metadata) for name, tensor in self._factors.items()}

    def _sharded(self, name: str, tensor: Tensor, metadata: dict[str, Any]) -> Any:
        (line, rule), bound = self._rules[name], self._bound[name]
        rank, size = tensor_shard(bound.is_expert)
        key, offsets = stored_place(rule, bound)
        axis, stacked = bound.kind.tp_axis, len(offsets)
        data: Any = parallel_state.get_expert_data_parallel_group() if rule.experts else metadata["dp_cp_group"]
        sharded = ShardedTensor.from_rank_offsets(
            key, tensor, *offsets, *([] if axis is None else [(stacked + axis, rank, size)]),
            replica_id=(0, rank if axis is None else 0, data.rank()), prepend_axis_num=stacked,
        )  # fmt: skip
        if rule is line.b and line.split_in_halves:
            return apply_swiglu_sharded_factory(sharded, tuple(offsets))
        return sharded

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:  # type: ignore[override]
        assert state.keys() == self._factors.keys() or not strict
        with torch.no_grad():
            for name, tensor in self._factors.items():
                tensor.copy_(state[name])


def check_same_adapters(directory: Path, lora: LoraConfig) -> None:
    """Check that a checkpoint has the adapters that are trained now.

    Raises:
        CheckpointError: it has adapters of other settings, or a whole model.
    """
    saved = read_manifest(directory, check_files=False).extra.get(LORA_KEY)
    wanted = lora.describe() if lora.on else None
    if saved != wanted:
        raise CheckpointError(
            f"{directory}: lora", saved or "none",
            f"it was saved with these adapters, and the run has {wanted or 'none'}",
            "restore the section lora, or start from an exported adapter with lora.init",
        )  # fmt: skip
