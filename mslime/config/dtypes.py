"""Dtypes of weights in trainers, engines and exported checkpoints. No other module decides them.

The server's flag, weight syncs, the plan's memory and the exported `hf/` all use these functions. SGLang never gets
`auto`: it would serve a float32 checkpoint in float16, which mslime's trainers do not use. Every sync would then round
silently (and overflow beyond 65504).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mslime.config.errors import ConfigError
from mslime.config.model_facts import checkpoint_dtype, language_model

if TYPE_CHECKING:
    from mslime.config.megatron import MegatronConfig


EXPORTED = ("float32", "bfloat16")


def trainer_dtype(megatron: MegatronConfig, *, cpu: bool) -> str:
    """Dtype of the trainer's parameters: as configured, else float32 on a CPU and bfloat16 on a GPU."""
    return megatron.params_dtype or ("float32" if cpu else "bfloat16")


def served_dtype(
    asked: str,
    hf_config: Mapping[str, Any],
    checkpoint: Path,
    trainer: str,
    *,
    cpu: bool,
    trained: bool = True,
) -> str:
    """Dtype of the weights in servers: the configured one, and for `auto`

    - on a CPU float32, for any checkpoint (widening is exact, and float32 is what CPU ranks train in);
    - on a GPU the checkpoint's bfloat16; for a checkpoint in float32, or without a dtype, that of the trainer's own
      parameters (`megatron.params_dtype`, bfloat16 by default).

    Args:
        asked: `sglang.dtype`, or `teacher.dtype`.
        hf_config, checkpoint: config.json of the checkpoint that they start from, and its directory.
        trainer: dtype of the parameters of a trainer on a GPU (`trainer_dtype`), which sends them weights.
        cpu: whether they run on a CPU.
        trained: whether they receive weights; a teacher does not, and keeps its checkpoint's float16.

    Raises:
        ConfigError: `auto`, on a GPU, for a checkpoint in float16 or another dtype without training support.
    """
    if asked != "auto":
        return asked
    if cpu:
        return "float32"
    named = checkpoint_dtype(hf_config)
    if named in (None, "float32"):
        return trainer
    if named != "bfloat16" and trained:
        raise ConfigError(
            "sglang.dtype", "auto",
            f"the checkpoint {checkpoint} is in {named}, and trainers compute in bfloat16 or float32: weights "
            f"sent to engines in {named} would be rounded, and overflow where it ends",
            "set sglang.dtype: bfloat16 (the checkpoint is rounded once), or float32",
        )  # fmt: skip
    return named


def export_dtype(hf_config: Mapping[str, Any]) -> str:
    """Dtype of exported Hugging Face checkpoints: the source checkpoint's.

    Float32 if the source names none or one without training support; config.json is changed accordingly.
    """
    named = checkpoint_dtype(hf_config)
    return named if named in EXPORTED else "float32"


def plain_dtype(hf_config: Mapping[str, Any]) -> str:
    """Dtype in which weights of a quantised checkpoint are read: from config.json, or bfloat16."""
    named = checkpoint_dtype(hf_config)
    return named if named in ("float32", "float16", "bfloat16") else "bfloat16"


def declared_dtype(hf_config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Changes to config.json that declare `dtype`; empty if it does already."""
    named = checkpoint_dtype(hf_config)
    if named == dtype:
        return {}
    keys = [key for key in ("dtype", "torch_dtype") if hf_config.get(key)] or ["dtype"]
    changes: dict[str, Any] = dict.fromkeys(keys, dtype)
    text = language_model(hf_config)
    inner = [key for key in ("dtype", "torch_dtype") if text is not hf_config and text.get(key)]
    return changes | ({"text_config": {**text, **dict.fromkeys(inner, dtype)}} if inner else {})
