"""What several rooms read of a checkpoint's config.json; how an architecture is described is its family's to say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast


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
