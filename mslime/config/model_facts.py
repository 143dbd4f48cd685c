"""What config.json of a checkpoint says that several packages need. Its family reads it once, and it is handed down.
Its family reads it from config.json once, and it is handed down."""

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
    """Sizes of a model that more than its builder needs.

    Attributes:
        vocab_size: rows of the embedding, without padding. An engine that is sent a token id beyond it dies.
        max_positions: longest sequence that the checkpoint was made for, in tokens.
        num_layers: transformer layers, dense ones counted.
        moe_layer_ids: global ids of the layers that route; empty for a dense model.
        num_experts, top_k: routed experts of a layer, and of a token; 0 for a dense model.
        renderers: names of those that may know how the family's checkpoints chat (`rollout.renderer`).
    """

    vocab_size: int
    max_positions: int
    num_layers: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    renderers: tuple[str, ...] = ()

    def sends_routes(self, replay: ReplayMode) -> bool:
        """Whether engines are asked for the routes of this model, given `train.replay`."""
        return replay == "r3" and bool(self.moe_layer_ids)


# What several packages read of a checkpoint's config.json; how an architecture is described is its family's to say.


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
    """The section that describes the language model: `text_config` of one that also sees or hears, else all of it."""
    text = hf_config.get("text_config")
    return cast("Mapping[str, Any]", text) if isinstance(text, Mapping) else hf_config


def checkpoint_dtype(hf_config: Mapping[str, Any]) -> str | None:
    """The dtype that a checkpoint's config.json names, as torch calls it; None when it names none."""
    sections = (hf_config, language_model(hf_config))
    named = (str(section[key]) for section in sections for key in ("dtype", "torch_dtype") if section.get(key))
    return next(named, None)


def eos_ids(section: Mapping[str, Any]) -> list[int]:
    """The end-of-sequence ids that a section or a generation_config.json names: none, one, or a list.

    Raises one of MALFORMED.
    """
    eos = section.get("eos_token_id")
    return [] if eos is None else [eos] if isinstance(eos, int) else [int(i) for i in eos]


def _fetched(path: Path) -> str:
    """For what looks like a name on the Hugging Face Hub: how to fetch it."""
    command, there = hub_download(path)
    return command if there == path else f"{command}, then --model.path {there}"
