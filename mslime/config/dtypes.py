"""In which dtype trainers and engines hold weights, and checkpoints are exported: decided here and nowhere else.

The server's flag, the wire of the weight sync, the plan's memory and the exported `hf/` all ask
these functions. SGLang's own `auto` is never passed on: it would serve a float32 checkpoint in float16, which no
trainer of ours computes in, so that every sync would round (and overflow beyond 65504) without a word.
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
    """The dtype of the trainer's parameters: as configured, else float32 on a CPU and bfloat16 on a GPU."""
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
    """The dtype that servers hold weights in: the one that is asked for, and for `auto`

    - on a CPU float32, whatever the checkpoint is in (widening is exact, and float32 is what CPU ranks train in);
    - on a GPU the checkpoint's bfloat16; for a checkpoint in float32, or that names nothing, the trainer's own
      parameters' dtype (`megatron.params_dtype`, bfloat16 by default).

    Args:
        asked: `sglang.dtype`, or `teacher.dtype`.
        hf_config, checkpoint: config.json of the checkpoint that they start from, and its directory.
        trainer: dtype of the parameters of a trainer on a GPU (`trainer_dtype`), which sends them weights.
        cpu: whether they run on a CPU.
        trained: whether they are sent weights; a teacher is not, and keeps its checkpoint's float16.

    Raises:
        ConfigError: `auto`, on a GPU, for a checkpoint in float16 or another dtype that is not trained in.
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
    """The dtype that exported Hugging Face checkpoints are written in: the source checkpoint's.

    Float32 where the source names none or one that is not trained in; config.json is then made to say so.
    """
    named = checkpoint_dtype(hf_config)
    return named if named in EXPORTED else "float32"


def plain_dtype(hf_config: Mapping[str, Any]) -> str:
    """The dtype that weights of a quantised checkpoint are read in: the one that config.json names, or bfloat16."""
    named = checkpoint_dtype(hf_config)
    return named if named in ("float32", "float16", "bfloat16") else "bfloat16"


def declared_dtype(hf_config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """What of config.json must be written anew so that it names `dtype`; empty when it does already."""
    named = checkpoint_dtype(hf_config)
    if named == dtype:
        return {}
    keys = [key for key in ("dtype", "torch_dtype") if hf_config.get(key)] or ["dtype"]
    changes: dict[str, Any] = dict.fromkeys(keys, dtype)
    text = language_model(hf_config)
    inner = [key for key in ("dtype", "torch_dtype") if text is not hf_config and text.get(key)]
    return changes | ({"text_config": {**text, **dict.fromkeys(inner, dtype)}} if inner else {})
