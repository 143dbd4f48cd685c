"""Facts from a checkpoint's config.json for several packages. The model's family reads them once; then they are passed
on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mslime.config.base import ReplayMode
from mslime.config.errors import CheckpointError, hub_download, reading


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
        with reading(CheckpointError, str(path), "config.json is valid JSON", "download the file again"):
            parsed: object = json.loads(path.read_text(encoding="utf-8"))
    except CheckpointError as error:
        if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            raise
        raise CheckpointError(
            str(path),
            None,
            "a checkpoint directory holds a config.json",
            _fetched(directory) or "point model.path at a Hugging Face checkpoint",
        ) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(
            str(path), type(parsed).__name__, "config.json is a JSON object", "download the file again"
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


def _fetched(path: Path) -> str:
    """Hint for a path that looks like a Hugging Face Hub name: how to download it."""
    command, there = hub_download(path)
    return command if there == path else f"{command}, then --model.path {there}"
