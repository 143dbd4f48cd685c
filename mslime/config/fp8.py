"""Setting `train.fp8`: the trainer's linear layers use Transformer Engine's FP8 products; parameters stay bfloat16.

Sources: megatron-core 0.16.1 (`transformer_config.py`, `fp8_utils.py`) and Transformer Engine 2.20 (`utils.py`:
`assert_dim_for_fp8_exec`; `tensor/float8_blockwise_tensor.py`: `is_quantizable`; `common/recipe`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

from mslime.config.base import Device, Fp8Recipe, refuse_first
from mslime.config.errors import ConfigError

FORMATS: Mapping[Fp8Recipe, str] = {"blockwise": "e4m3", "tensorwise": "hybrid"}
"""Transformer Engine's default of each recipe; hybrid: gradients are e5m2."""
ROWS: Mapping[Fp8Recipe, int] = {"blockwise": 128, "tensorwise": 16}
"""Granularity of a micro-batch's rows in a rank's layers. A weight's gradient sums over rows, and sequence-parallel
ranks gather them in FP8 only if blocks do not cross ranks.
"""
WIDTH = 16
"""Granularity of both dimensions of a rank's share of a matrix, for every recipe."""
COPY_BYTES = 2
"""FP8 bytes per weight: Transformer Engine keeps it as it is and transposed, between micro-batches."""
_REMOVE = "remove train.fp8"


def fp8_rows(recipe: Fp8Recipe | None) -> int:
    """Granularity of the rows of a micro-batch in a rank's layers."""
    return 1 if recipe is None else ROWS[recipe]


def fp8_fields(recipe: Fp8Recipe | None, *, cpu: bool) -> dict[str, str]:
    """Fields for `TransformerConfig`.

    Raises:
        ConfigError: on a CPU.
    """
    if recipe is None:
        return {}
    if cpu:
        raise _on_cpu(recipe)
    return {"fp8": FORMATS[recipe], "fp8_recipe": recipe}


def check_fp8(
    recipe: Fp8Recipe | None, device: Device, params_dtype: str | None, *, adapters: bool, colocated: bool
) -> None:
    """Reject settings that FP8 layers cannot be combined with.

    Args:
        recipe: `train.fp8`.
        params_dtype: `megatron.params_dtype`.
        adapters: only adapters are trained.
        colocated: engines and trainer take turns on the same GPUs.

    Raises:
        ConfigError: the first broken rule.
    """
    if recipe is None:
        return
    if device == "cpu":
        raise _on_cpu(recipe)
    refuse_first("train", [
        (params_dtype == "float32", "fp8", recipe,
         "FP8 layers need bfloat16 parameters, and megatron.params_dtype is float32",
         f"set megatron.params_dtype: bfloat16, or {_REMOVE}"),
        (adapters, "fp8", recipe, "not supported with adapters", f"{_REMOVE}, or lora.rank"),
        (colocated, "fp8", recipe,
         "Transformer Engine's FP8 copies of the weights stay on the GPU while engines use it",
         f"set cluster.placement: separate, or {_REMOVE}"),
    ])  # fmt: skip


def _on_cpu(recipe: Fp8Recipe) -> ConfigError:
    return ConfigError("train.fp8", recipe, "needs CUDA kernels, and the trainer is on the CPU", _REMOVE)


def check_fp8_model(recipe: Fp8Recipe | None, tp: int, etp: int, derived: Mapping[str, object]) -> None:
    """Raise ConfigError if a rank's share of a linear layer has a size that FP8 products do not support.

    Args:
        tp, etp: tensor-parallel and expert-tensor-parallel sizes.
        derived: every TransformerConfig field that mslime derives from the checkpoint's config.json.
    """
    if recipe is None:
        return
    if derived.get("experimental_attention_variant"):
        raise ConfigError(
            "train.fp8",
            recipe,
            "delta-nets have projections to a few features per head, which FP8 products do not support",
            _REMOVE,
        )
    for name, size, ranks in _widths(tp, etp, derived):
        if size % (ranks * WIDTH):
            raise ConfigError(
                "train.fp8", recipe,
                f"each rank's share of {name} must be a multiple of {WIDTH}, and {size} on {ranks} ranks is not",
                f"lower the parallel size, or {_REMOVE}" if size % WIDTH == 0 else _REMOVE,
            )  # fmt: skip


def _widths(tp: int, etp: int, derived: Mapping[str, object]) -> Iterator[tuple[str, int, int]]:
    """(name, features, ranks that share them) of the linear layers of decoder layers."""

    def size(name: str) -> int:
        return cast("int", derived.get(name) or 0)

    heads = size("num_attention_heads")
    yield "hidden_size", size("hidden_size"), 1
    yield "ffn_hidden_size", size("ffn_hidden_size"), tp
    yield "moe_ffn_hidden_size", size("moe_ffn_hidden_size"), etp
    yield "moe_shared_expert_intermediate_size", size("moe_shared_expert_intermediate_size"), tp
    if derived.get("multi_latent_attention"):
        yield "q_lora_rank", size("q_lora_rank"), 1
        yield "kv_lora_rank", size("kv_lora_rank"), 1
        yield "kv_lora_rank + qk_pos_emb_head_dim", size("kv_lora_rank") + size("qk_pos_emb_head_dim"), 1
        yield "the queries", heads * (size("qk_head_dim") + size("qk_pos_emb_head_dim")), tp
        yield "keys and values", heads * (size("qk_head_dim") + size("v_head_dim")), tp
        yield "attention's output", heads * size("v_head_dim"), tp
        return
    each = size("kv_channels") or size("hidden_size") // heads
    groups = max(size("num_query_groups") or heads, tp)
    yield "queries, keys and values", (heads + 2 * groups) * each, tp
    yield "attention's output", heads * each, tp
