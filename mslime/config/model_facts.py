"""Facts from a checkpoint's config.json for several packages, and the dtypes of weights. The model's family reads the
facts once; then they are passed on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mslime.config.base import ReplayMode
from mslime.config.errors import CheckpointError, ConfigError, hub_download, reading


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes of a model that are used outside of its builder.

    Attributes:
        vocab_size: rows of the embedding, without padding. A token id beyond it crashes an engine.
        max_positions: longest supported sequence, in tokens.
        num_layers: transformer layers, dense ones counted.
        moe_layer_ids: global ids of the layers that route; empty for a dense model.
        num_experts, top_k: routed experts of a layer, and of a token; 0 for a dense model.
        renderers: candidates for the checkpoints' chat format (`rollout.renderer`).
    """

    vocab_size: int
    max_positions: int
    num_layers: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    renderers: tuple[str, ...] = ()

    def sends_routes(self, replay: ReplayMode) -> bool:
        """Whether engines return the routes of this model, given `train.replay`."""
        return replay == "r3" and bool(self.moe_layer_ids)


# Readers of config.json for several packages; families read the architecture.


def read_hf_config(directory: Path) -> dict[str, object]:
    """config.json of a Hugging Face checkpoint directory.

    Raises:
        CheckpointError: it is missing or not a JSON object.
    """
    path = directory / "config.json"
    try:
        with reading(CheckpointError, str(path), "config.json is not valid JSON", "download the file again"):
            parsed: object = json.loads(path.read_text(encoding="utf-8"))
    except CheckpointError as error:
        if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise
        raise CheckpointError(
            str(path),
            None,
            "no such file; a checkpoint directory must contain it",
            _download_hint(directory) or "name the directory of a Hugging Face checkpoint",
        ) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(
            str(path), type(parsed).__name__, "config.json must be a JSON object", "download the file again"
        )
    return cast("dict[str, object]", parsed)


def language_model(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Section of the language model: `text_config` of a multimodal model, else the whole file."""
    text = hf_config.get("text_config")
    return cast("Mapping[str, Any]", text) if isinstance(text, Mapping) else hf_config


def checkpoint_dtype(hf_config: Mapping[str, Any]) -> str | None:
    """Dtype in a checkpoint's config.json, as torch names it; None if there is none."""
    sections = (hf_config, language_model(hf_config))
    named = (str(section[key]) for section in sections for key in ("dtype", "torch_dtype") if section.get(key))
    return next(named, None)


def eos_ids(section: Mapping[str, Any]) -> list[int]:
    """End-of-sequence ids in a section or a generation_config.json: none, one, or a list.

    Raises one of MALFORMED.
    """
    eos = section.get("eos_token_id")
    return [] if eos is None else [eos] if isinstance(eos, int) else [int(i) for i in eos]


def _download_hint(path: Path) -> str:
    """Hint for a path that looks like a Hugging Face Hub name: how to download it."""
    command, there = hub_download(path)
    return command if there == path else f"{command}, then --model.path {there}"


# Dtypes of weights in trainers, engines and exported checkpoints. No other module decides them.
#
# The server's flag, weight syncs, the plan's memory and the exported `hf/` all use these functions. SGLang never gets
# `auto`: it would serve a float32 checkpoint in float16, which mslime's trainers do not use. Every sync would then
# round silently (and overflow beyond 65504).

if TYPE_CHECKING:
    from mslime.config.megatron import MegatronConfig


EXPORTED = ("float32", "bfloat16")


def trainer_dtype(megatron: MegatronConfig, *, cpu: bool) -> str:
    """Dtype of the trainer's parameters: as configured, else float32 on a CPU and bfloat16 on a GPU."""
    return megatron.params_dtype or ("float32" if cpu else "bfloat16")


def served_dtype(
    setting: str,
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
        setting: `sglang.dtype`, or `teacher.dtype`.
        hf_config, checkpoint: config.json of the checkpoint that they start from, and its directory.
        trainer: dtype of the parameters of a trainer on a GPU (`trainer_dtype`), which sends them weights.
        cpu: whether they run on a CPU.
        trained: whether they receive weights; a teacher does not, and keeps its checkpoint's float16.

    Raises:
        ConfigError: `auto`, on a GPU, for a checkpoint in float16 or another dtype without training support.
    """
    if setting != "auto":
        return setting
    if cpu:
        return "float32"
    named = checkpoint_dtype(hf_config)
    if named in (None, "float32"):
        return trainer
    if named != "bfloat16" and trained:
        raise ConfigError(
            "sglang.dtype", "auto",
            f"the checkpoint {checkpoint} is in {named}, and trainers compute in bfloat16 or float32: weights sent to "
            f"engines would be rounded to {named}, and overflow outside its range",
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
