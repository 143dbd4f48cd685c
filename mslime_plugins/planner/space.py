"""Search space: sizes of the trainer's parallel dimensions, memory savings, sizes of engines.

A user's setting is the only choice in its dimension. This module does not check whether a combination fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mslime.config.megatron import MegatronConfig
from mslime.config.schema import RunConfig
from mslime.convert.families.family import ModelFields
from mslime.convert.flops import ModelSizes

POWERS = (1, 2, 4, 8, 16, 32, 64)
STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
CHUNKS = (1, 2, 4)
FEWEST_TOKENS = 4096
"""Fewest tokens of a sequence on a context-parallel rank: shorter pieces are not worth the ring."""
FEW_EXPERTS = 16
"""Most experts for which expert-tensor parallelism is tried: with more, expert parallelism divides as well and sends
less."""
NARROWEST = 128
"""Fewest features of an expert on one GPU of an engine; below, experts are distributed whole."""
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
HALVED = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
OFFLOADED = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
MEASURES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("keeps activations", {}),
    ("recomputes", FULL),
    ("16-bit moments", HALVED),
    ("recomputes, 16-bit moments", FULL | HALVED),
    ("recomputes, optimizer on the host", FULL | OFFLOADED),
)
"""Memory savings in order of preference: the first that fits is used."""


@dataclass(frozen=True)
class SearchSpace:
    """The combinations of one search.

    Attributes:
        values: settings of a file and flags, each section checked alone.
        model: its sizes.
        per_node: GPUs of a host.
        longest: tokens of a response with its prompt.
    """

    values: RunConfig
    model: ModelFields
    per_node: int
    longest: int

    def given(self, section: str, name: str) -> Any:
        """The user's setting; None if not set."""
        within = getattr(self.values, section)
        return getattr(within, name) if name in within.model_fields_set else None

    def trainer_sizes(self, ranks: int) -> Iterator[dict[str, Any]]:
        """Sizes of parallel dimensions, under megatron-core's names, that may divide `ranks`."""
        experts, layers = self.model.num_experts, self.model.num_layers
        tps = self._choices("tensor_model_parallel_size", [n for n in POWERS if n <= self.per_node])
        pps = self._choices("pipeline_model_parallel_size", [n for n in STAGES if n <= layers])
        cps = self._choices("context_parallel_size", [n for n in POWERS if n == 1 or self.longest / n >= FEWEST_TOKENS])
        for tp, pp, cp in ((tp, pp, cp) for tp in tps for pp in pps for cp in cps if ranks % (tp * pp * cp) == 0):
            stage = ranks // pp
            eps = [n for n in POWERS if experts % n == 0 and n <= stage] if experts else [1]
            etps = sorted({1, tp}) if 0 < experts <= FEW_EXPERTS else [1]
            for ep in self._choices("expert_model_parallel_size", eps):
                for etp in self._choices("expert_tensor_parallel_size", etps):
                    if stage % (ep * etp) == 0:
                        yield from self._cut(tp, pp, cp, ep, etp)

    def _cut(self, tp: int, pp: int, cp: int, ep: int, etp: int) -> Iterator[dict[str, Any]]:
        """The sizes with layers distributed over stages and their chunks. Unused sizes are explicit, because the
        settings may follow others that use them."""
        layers = self.model.num_layers
        sizes: dict[str, Any] = {
            "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "context_parallel_size": cp,
            "expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp,
        }  # fmt: skip
        uneven = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
        if not any(self.given("megatron", name) for name in uneven):
            sizes |= dict.fromkeys(uneven)
            if pp > 1 and layers % pp:
                last = layers - -(-layers // pp) * (pp - 1)
                if last < 1:
                    return
                sizes["num_layers_in_last_pipeline_stage"] = last
        for vpp in self._choices("virtual_pipeline_model_parallel_size", CHUNKS if pp > 1 else [1]):
            yield sizes | {"virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None}

    def _choices(self, name: str, usual: Sequence[int]) -> Sequence[int]:
        set_by_user = self.given("megatron", name)
        return usual if set_by_user is None else [set_by_user]

    def megatron(self, sizes: Mapping[str, Any], measures: Mapping[str, Any] | None = None) -> MegatronConfig:
        """The section with the user's and the tried settings, without validation: thousands are created."""
        fields, own = MegatronConfig.model_fields, self.values.megatron
        numbers = {**own.extra, **own.given(), **sizes, **(measures or {})}
        numbers.pop("extra", None)
        known = {name: value for name, value in numbers.items() if name in fields}
        return MegatronConfig.model_construct(
            **known, extra={name: value for name, value in numbers.items() if name not in fields}
        )

    def measures(self) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Measures that do not contradict the user's settings."""
        named = {*self.values.megatron.extra, *self.values.megatron.model_fields_set}
        return [("as set", {})] if any(name in named for name in (*FULL, *HALVED, *OFFLOADED)) else MEASURES

    def unused(self, measures: str) -> Mapping[str, None]:
        """Recomputation, explicitly off, because the result may follow settings that switch it on."""
        return {} if measures == "as set" else dict.fromkeys(FULL)

    def engine_sizes(self, w: ModelSizes, gpus: int) -> Iterator[dict[str, Any]]:
        """Sizes of engines on at most this number of GPUs, under SGLang's names."""
        tp_size, count, ep_size = (self.given("sglang", name) for name in ("tp_size", "num_engines", "ep_size"))
        for tp in [tp_size] if tp_size else POWERS:
            number = count or gpus // tp
            if number < 1 or number * tp > gpus or w.heads % tp or (tp > self.per_node and tp % self.per_node):
                continue
            whole = w.experts > 0 and w.experts % tp == 0 and (w.expert_mlp // tp < NARROWEST or w.expert_mlp % tp > 0)
            ep = ep_size or (tp if whole else 1)
            yield {"num_engines": number, "tp_size": tp, "ep_size": ep, "nnodes": max(tp // self.per_node, 1)}


def engine_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The user's settings of engines, without their sizes."""
    sizes = ("num_engines", "tp_size", "ep_size", "nnodes")
    return {name: value for name, value in values.get("sglang", {}).items() if name not in sizes}
