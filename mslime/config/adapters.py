"""Several adapters on one base (`adapters`): which settings an entry may have, and how it is laid over the run's.

Each adapter's run is an ordinary `RunConfig`, as if it were trained alone (`schema`): whatever follows needs not know
of the others. What they share, the model, its layout and the engines, stands in the run's own sections alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from mslime.config.base import Section
from mslime.config.errors import ConfigError, UserError

OWN_SECTIONS = ("data", "rollout", "reward", "algorithm", "train", "lora", "checkpoint", "observe", "hooks")
"""Sections that an entry may have."""
DIRECTORY = "adapters"
"""Below the run's directory: that of each adapter, by name."""
SHARED = {
    "train.task": "all adapters are trained by reinforcement learning",
    "train.replay": "routers belong to the base, which all adapters share",
    "train.fp8": "it is about how the base computes, which all adapters share",
    "train.logits_mib": "it is about how the base computes, which all adapters share",
    "lora.sync": "engines are given adapters alone",
    "lora.experts": "engines read the adapters of all in one form",
    "lora.together": "it is about the trainer, which all adapters share",
    "rollout.concurrency": "engines are shared; `weight` sets an adapter's part of them",
    "rollout.managers": "one rollout service has the engines",
    "rollout.top_p": "engines return the sampling masks of all adapters",
    "rollout.top_k": "engines return the sampling masks of all adapters",
    "rollout.min_p": "engines return the sampling masks of all adapters",
    "checkpoint.resume": "a run is resumed with all its adapters",
    "observe.progress": "one terminal shows all adapters",
    "observe.log_level": "processes are shared",
}
"""Settings of these sections that are the run's alone, and why."""
BASE = ("model", "cluster", "megatron", "sglang", "teacher", "critic", "weights", "deadlines", "output_dir", "serve")
"""What an entry cannot have at all."""


def refuse_shared(entry: Mapping[str, Any]) -> None:
    """Raise ConfigError where an entry of `adapters` names what is the run's alone."""
    at = f"adapters.{entry.get('name', '?')}"
    for section in BASE:
        if section in entry:
            raise ConfigError(f"{at}.{section}", entry[section], "it belongs to the base, which all adapters share",
                              f"set {section} of the run")  # fmt: skip
    for setting, why in SHARED.items():
        section, key = setting.split(".")
        own: Any = entry.get(section)
        if isinstance(own, dict) and key in own:
            raise ConfigError(f"{at}.{setting}", cast("dict[str, Any]", own)[key], why, f"set {setting} of the run")


def directories(run_dir: Path) -> list[Path]:
    """Where a run keeps metrics and checkpoints: its directory, and those of its adapters."""
    return [run_dir, *sorted(path for path in (run_dir / DIRECTORY).glob("*") if path.is_dir())]


def plain_entry(entry: Any) -> dict[str, Any]:
    """What was given for an entry, which may have been validated already."""
    return cast("dict[str, Any]", entry if isinstance(entry, dict) else entry.given())


def _merged(below: Any, above: Any) -> Any:
    """`above` wins, key by key; sections that were validated already are taken as what was given for them."""
    below, above = (_as_given(each) for each in (below, above))
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    known = cast("dict[str, Any]", below)
    return {**known, **{k: _merged(known[k], v) if k in known else v for k, v in cast("dict[str, Any]", above).items()}}


def _as_given(section: Any) -> Any:
    return section.given() if isinstance(section, Section) else section


def merged_entry(values: Mapping[str, Any], entry: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """One entry on top of the run's values, as if it were trained alone.

    Args:
        values: what was given for the run.
        directory: of the run's adapters.
    """
    merged = {k: v for k, v in values.items() if k not in ("adapters", "name", "output_dir")}
    for section in OWN_SECTIONS:
        if section in entry:
            merged[section] = _merged(merged.get(section, {}), entry[section])
    if entry.get("seed") is not None:
        merged["seed"] = entry["seed"]
    return merged | {"name": str(entry["name"]), "output_dir": str(directory)}


def placed(name: str, error: UserError, entry: Mapping[str, Any]) -> UserError:
    """An error of an adapter's run, at the entry's own setting where it has one."""
    section, _, key = error.field.partition(".")
    own = entry.get(section)
    at = "." if isinstance(own, dict) and key.split(".")[0] in own else ": "
    return type(error)(f"adapters.{name}{at}{error.field}", error.value, error.rule, error.way_out)


def check_names(names: Sequence[str]) -> None:
    """Refuse names of adapters that flags cannot tell apart. Raises ConfigError."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("adapters.name", name, "two adapters have it", "give each another name")
        if "." in name or name.startswith("-"):
            raise ConfigError(
                "adapters.name", name, "must have no dot, and not begin with -, so that flags can name it",
                "write for example maths or code-v2",
            )  # fmt: skip
