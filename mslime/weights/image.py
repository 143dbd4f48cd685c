"""What every rank of an engine must hold, worked out from the Hugging Face tensors alone.

SGLang fuses and shards the tensors that it loads (qkv_proj, gate_up_proj, w13_weight, ...). This module builds the same
parameters from what the trainer sends, shard by shard, and keeps only their digests: comparing them with the engine's
own digests compares every bit of every parameter. The layouts are those of unquantised SGLang 0.5.23 models between
`begin_weight_update` and `end_weight_update`, when no backend has repacked them. Not foreseen: the zero padding of a
CPU server with TP > 1 whose heads or MLP sizes are no multiples of 32 x TP, that of the flashinfer_trtllm MoE backend,
and SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED. There the comparison fails although the weights are right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from mslime.convert.kinds import Shape
from mslime.weights.digest import engine_digest
from mslime.weights.plan import engine_vocabulary

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.weight")
_QKV = re.compile(r"(.+\.self_attn)\.([qkv])_proj\.(weight|bias)")
_GATE_UP = re.compile(r"(.+)\.(gate|up)_proj\.weight")
_DOWN = ("down_proj", "w2")
_FIRST = (("gate_proj", "up_proj"), ("w1", "w3"))  # an expert's gate and up, as Qwen and as Mixtral name them
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
_ROW = ("o_proj.weight", "down_proj.weight")
_COLUMN = (".q_b_proj.weight", ".kv_b_proj.weight", ".self_attn.q_proj.weight")
_JOINT_NORM = re.compile(r"(.+\.self_attn)\.([qk])_norm\.weight")


@dataclass(frozen=True)
class EngineLayout:
    """Parallel sizes of an engine: experts are shared out over `ep`, and each over `tp // ep`."""

    tp: int = 1
    ep: int = 1


def engine_parameters(hf_names: Iterable[str]) -> dict[str, list[str]]:
    """The Hugging Face tensors that are loaded into each of the engine's parameters."""
    found: dict[str, list[str]] = {}
    for name in hf_names:
        found.setdefault(engine_parameter(name), []).append(name)
    # Multi-latent attention fuses its two down projections only where the query has one.
    for latent in [name for name in found if name.endswith(".q_a_proj.weight")]:
        prefix = latent.removesuffix("q_a_proj.weight")
        second = f"{prefix}kv_a_proj_with_mqa.weight"
        found[f"{prefix}fused_qkv_a_proj_with_mqa.weight"] = found.pop(latent) + found.pop(second)
    for fused in [name for name, parts in found.items() if len(parts) == 1 and ".qkv_proj." in name]:
        names = found.pop(fused)
        found[names[0]] = names  # a query projection without key and value beside it
    return found


def engine_parameter(hf_name: str) -> str:
    """The engine's parameter that a Hugging Face tensor is loaded into, by its name alone."""
    if expert := _EXPERT.fullmatch(hf_name):
        return f"{expert[1]}.{'w2' if expert[3] in _DOWN else 'w13'}_weight"
    if qkv := _QKV.fullmatch(hf_name):
        return f"{qkv[1]}.qkv_proj.{qkv[3]}"
    if gate_up := _GATE_UP.fullmatch(hf_name):
        return f"{gate_up[1]}.gate_up_proj.weight"
    return hf_name


class EngineImage:
    """Collects Hugging Face tensors in any order; a parameter's digests are taken when its last tensor arrives.

    Args:
        hf_shapes: the tensors that will arrive, with their shapes.
        kv_heads: key-value heads of the model.
        layout: the engine's.
        float32: ends of the names of tensors that the engine holds in float32 whatever they arrive in.

    Attributes:
        digests: for each rank of the engine, the digest of every parameter completed so far.
    """

    def __init__(
        self, hf_shapes: Mapping[str, Shape], kv_heads: int, layout: EngineLayout, float32: tuple[str, ...] = ()
    ) -> None:
        self._layout, self._kv_heads, self._float32 = layout, kv_heads, float32
        # One norm of all heads goes with them to their ranks; a norm of every head is the same on all ranks.
        self._joint_norms = {
            name
            for name, shape in hf_shapes.items()
            if (norm := _JOINT_NORM.fullmatch(name)) and shape == hf_shapes[f"{norm[1]}.{norm[2]}_proj.weight"][:1]
        }
        self._wanted = engine_parameters(hf_shapes)
        self._parameter = {name: parameter for parameter, names in self._wanted.items() for name in names}
        self._parts: dict[str, dict[str, torch.Tensor]] = {}
        self.digests: list[dict[str, str]] = [{} for _ in range(layout.tp)]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One Hugging Face tensor; copied when it has to wait for others."""
        parameter = self._parameter[name]
        wanted = self._wanted[parameter]
        parts = self._parts.setdefault(parameter, {})
        last = len(parts) + 1 == len(wanted)
        if name.endswith(self._float32):
            tensor = tensor.float()
        parts[name] = tensor if last else tensor.clone()
        if last:
            del self._parts[parameter]
            for rank, digests in enumerate(self.digests):
                digests[parameter] = engine_digest(self._local(parameter, parts, rank))

    def _local(self, parameter: str, parts: Mapping[str, torch.Tensor], rank: int) -> torch.Tensor:
        """What one rank of the engine holds of a parameter."""
        tp = self._layout.tp
        if parameter.endswith(("w13_weight", "w2_weight")):
            return self._experts(parts, rank)
        if parameter.endswith("fused_qkv_a_proj_with_mqa.weight"):
            return torch.cat([_one(parts, ".q_a_proj.weight"), _one(parts, ".kv_a_proj_with_mqa.weight")])
        if parameter.endswith((".qkv_proj.weight", ".qkv_proj.bias")):
            suffix = parameter.rsplit(".", 1)[1]
            q, k, v = (_one(parts, f".{letter}_proj.{suffix}") for letter in "qkv")
            return torch.cat([_share(q, rank, tp), self._of_kv_heads(k, rank), self._of_kv_heads(v, rank)])
        if parameter.endswith("gate_up_proj.weight"):
            fused = parts.get(parameter)  # GLM-4's files hold it as one tensor
            if fused is not None:
                return torch.cat([_share(half, rank, tp) for half in fused.chunk(2)])
            return torch.cat([_share(_one(parts, f".{part}_proj.weight"), rank, tp) for part in ("gate", "up")])
        tensor = parts[parameter]
        if parameter in self._joint_norms:
            return _share(tensor, rank, tp) if ".q_norm." in parameter else self._of_kv_heads(tensor, rank)
        if parameter in _VOCABULARY:
            return _share(_padded_vocabulary(tensor, tp), rank, tp)
        if parameter.endswith(_COLUMN):
            return _share(tensor, rank, tp)
        return _share(tensor, rank, tp, 1) if parameter.endswith(_ROW) else tensor

    def _of_kv_heads(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A rank's rows of what goes with key-value heads, which several ranks hold when they are more than heads."""
        replicas = max(1, self._layout.tp // self._kv_heads)
        return _share(tensor, rank // replicas, self._layout.tp // replicas)

    def _experts(self, parts: Mapping[str, torch.Tensor], rank: int) -> torch.Tensor:
        """[local experts, rows, columns]: this rank's experts, each cut over the ranks that share it."""
        by_expert: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in parts.items():
            match = _EXPERT.fullmatch(name)
            assert match is not None, name
            by_expert.setdefault(int(match[2]), {})[match[3]] = tensor
        moe_tp = self._layout.tp // self._layout.ep
        ep_rank, tp_rank = rank // moe_tp, rank % moe_tp
        per_rank = len(by_expert) // self._layout.ep
        local: list[torch.Tensor] = []
        for expert in range(ep_rank * per_rank, (ep_rank + 1) * per_rank):
            projections = by_expert[expert]
            second = next((name for name in _DOWN if name in projections), None)
            if second is not None:
                local.append(_share(projections[second], tp_rank, moe_tp, 1))
            else:
                first = next(names for names in _FIRST if names[0] in projections)
                local.append(torch.cat([_share(projections[part], tp_rank, moe_tp) for part in first]))
        return torch.stack(local)


def _one(parts: Mapping[str, torch.Tensor], suffix: str) -> torch.Tensor:
    return next(tensor for name, tensor in parts.items() if name.endswith(suffix))


def _share(tensor: torch.Tensor, rank: int, ranks: int, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(ranks, dim)[rank] if ranks > 1 else tensor


def _padded_vocabulary(tensor: torch.Tensor, tp: int) -> torch.Tensor:
    missing = engine_vocabulary(tensor.shape[0], tp) - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, tensor.shape[1])]) if missing else tensor
