"""Sections `lora` and `adapters`: low-rank adapters instead of full training (https://arxiv.org/abs/2106.09685)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import Field, model_validator

from mslime.config.base import LoraExperts, LoraSync, PauseMode, Rule, Section, refuse_first
from mslime.config.cluster import not_colocated
from mslime.config.engines import SGLangConfig
from mslime.config.errors import ConfigError, UserError
from mslime.config.megatron import MegatronConfig
from mslime.config.transports import AUTO, FALLBACK

LORA_GROUPS = ("attention", "mlp", "shared_experts", "experts")
"""Names for all linear layers of a part of the model; `mlp` covers layers without experts."""


LORA_KEY = "lora"
"""Keys of a checkpoint's description of its adapters: `LoraConfig.describe`."""


class LoraConfig(Section):
    """Low-rank adapters: the model is frozen, and A and B of `W + scale * B A` are trained in its linear layers."""

    rank: int = Field(
        default=0, ge=0, le=1024, description="Rank of every adapter; 0: no adapters, the model itself is trained."
    )
    alpha: float = Field(default=32, gt=0, le=1e6, description="B A is scaled by alpha / rank.")
    rs_lora: bool = Field(default=False, description="Scale by alpha / sqrt(rank) (https://arxiv.org/abs/2312.03732).")
    targets: tuple[str, ...] = Field(
        default=LORA_GROUPS,
        min_length=1,
        description="Linear layers: attention, mlp, shared_experts, experts; or a Hugging Face module name, its end, "
        "or a pattern (q_proj, `model.layers.[0-3].*.o_proj`). A layer's experts are targeted together.",
    )
    experts: LoraExperts = Field(
        default="per_expert",
        description="Routed experts. per_expert: each has its own A and B. shared_outer: experts of a layer share the "
        "factor of the hidden state, A of gate and up and B of down.",
    )
    dropout: float = Field(default=0.0, description="Must be 0: the engine samples without dropout.")
    use_dora: bool = Field(default=False, description="Must be false: DoRA is not supported.")
    init: Path | None = Field(
        default=None,
        description="Directory of an adapter in peft's format to start from, with this rank, alpha and targets. null: "
        "A initialised as in peft, B 0.",
    )

    sync: LoraSync = Field(
        default="merged",
        description="Form in which engines receive adapters after a step. merged: whole weights with the adapters "
        "merged in, while generation pauses. adapter: adapters alone, without a pause.",
    )
    together: bool | None = Field(
        default=None,
        description="Several adapters of a run or of `mslime serve`: ready batches share one pass through the model, "
        "micro-batch by micro-batch. null: with pipeline stages.",
    )

    @property
    def on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Factor on B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rs_lora else self.rank)

    @property
    def shares_outer(self) -> bool:
        """Whether the experts of a layer share the factors that read or write the hidden state."""
        return self.experts == "shared_outer"

    def describe(self) -> dict[str, object]:
        """Properties that two adapters must share for training to continue from one to the other, as JSON values."""
        summary: dict[str, object] = {"rank": self.rank, "alpha": self.alpha, "rs_lora": self.rs_lora}
        summary |= {"targets": sorted(self.targets)}
        return summary | ({"experts": self.experts} if self.shares_outer else {})  # absent in older checkpoints

    @model_validator(mode="after")
    def _check(self) -> LoraConfig:
        if self.dropout:
            raise ConfigError(
                "lora.dropout", self.dropout, "must be 0: with dropout, the trained policy differs from the sampling "
                "policy", "remove it",
            )  # fmt: skip
        if self.use_dora:
            raise ConfigError(
                "lora.use_dora", True, "DoRA is not supported: neither mslime nor SGLang handles its magnitudes",
                "remove it, or use lora.rs_lora",
            )  # fmt: skip
        return self


_SERVER_FIELDS = (
    "enable_lora", "lora_paths", "lora_target_modules", "max_lora_rank", "max_loaded_loras", "max_loras_per_batch",
    "lora_strict_loading", "enable_lora_overlap_loading", "experts_shared_outer_loras",
)  # fmt: skip
"""SGLang arguments derived from the run's adapters."""


def check_lora(
    lora: LoraConfig,
    engine: SGLangConfig,
    megatron: MegatronConfig,
    *,
    syncs_adapters: bool,
    pause_mode: PauseMode,
    transport: str,
    colocated: bool,
) -> None:
    """Reject settings that adapters cannot be combined with.

    Args:
        syncs_adapters: engines receive adapters alone.
        pause_mode: `rollout.pause_mode`.
        transport: `weights.transport`.
        colocated: engines and trainer take turns on the same GPUs.

    Raises:
        ConfigError: the first broken rule.
    """
    if not lora.on:
        off, hint = "has no effect with lora.rank: 0", "set lora.rank, or remove it"
        refuse_first("lora", [
            (lora.init is not None, "init", str(lora.init), off, "set lora.rank to its rank"),
            (lora.sync == "adapter", "sync", "adapter", off, hint),
            (lora.shares_outer, "experts", "shared_outer", off, hint),
        ])  # fmt: skip
        return
    if colocated:
        raise not_colocated(
            "offloading is not tested with adapters (lora.rank)", "set cluster.placement: separate, or remove lora"
        )
    if syncs_adapters:
        refuse_first("", _adapter_sync(engine, pause_mode, transport))
    refuse_first("megatron", (
        (megatron.extra.get(name), name, megatron.extra.get(name), "not supported with adapters",
         "remove it, or train without lora")
        for name in ("moe_shared_expert_overlap", "fp4", "delay_wgrad_compute")
    ))  # fmt: skip


def _adapter_sync(engine: SGLangConfig, pause_mode: PauseMode, transport: str) -> Iterator[Rule]:
    """Settings that engines with unmerged adapters do not support."""
    merged = "set lora.sync: merged"
    yield (
        pause_mode == "retract", "rollout.pause_mode", "retract",
        "a request keeps its adapter as long as it runs (lora.sync: adapter)",
        "set abort to continue it with the new one, or in_place to finish it with its own",
    )  # fmt: skip
    yield (
        transport not in (AUTO, FALLBACK), "weights.transport", transport,
        "no weights are sent: engines read adapters from weights.directory (lora.sync: adapter)",
        f"remove it, or {merged}",
    )  # fmt: skip
    yield (
        engine.ep_size > 1, "sglang.ep_size", engine.ep_size,
        "expert parallelism in engines is not tested with adapters (lora.sync: adapter)",
        f"set it to 1, or {merged}",
    )  # fmt: skip
    for name in _SERVER_FIELDS:
        yield (
            name in engine.extra, f"sglang.{name}", engine.extra.get(name),
            "mslime sets it from the section lora (lora.sync: adapter)", "remove it",
        )  # fmt: skip
    for name in ("quantization", "speculative_algorithm"):
        yield (
            name in engine.extra, f"sglang.{name}", engine.extra.get(name),
            "not tested with adapters (lora.sync: adapter)", f"remove it, or {merged}",
        )  # fmt: skip


# Several adapters on one base (`adapters`): allowed settings of an entry, and its merge with the run's.
#
# Each adapter's run is an ordinary `RunConfig`, as if it were trained alone (`schema`); later code needs no special
# cases. Shared settings, such as the model, its layout and the engines, are only in the run's own sections.

OWN_SECTIONS = ("data", "rollout", "reward", "algorithm", "train", "lora", "checkpoint", "observe", "hooks")
"""Sections that an entry may have."""
DIRECTORY = "adapters"
"""Directory of the adapters' directories, below the run's."""
SHARED = {
    "train.task": "all adapters are trained by reinforcement learning",
    "train.replay": "routers belong to the base, which all adapters share",
    "train.fp8": "it is a setting of the base, which all adapters share",
    "train.logits_mib": "it is a setting of the base, which all adapters share",
    "lora.sync": "engines receive adapters alone",
    "lora.experts": "engines read all adapters in one form",
    "lora.together": "it is a setting of the trainer, which all adapters share",
    "rollout.concurrency": "engines are shared; `weight` sets an adapter's share of them",
    "rollout.managers": "one rollout service uses the engines",
    "rollout.top_p": "engines return sampling masks in one way for all adapters",
    "rollout.top_k": "engines return sampling masks in one way for all adapters",
    "rollout.min_p": "engines return sampling masks in one way for all adapters",
    "checkpoint.resume": "a run is resumed with all its adapters",
    "observe.progress": "one terminal shows all adapters",
    "observe.log_level": "all adapters share the processes",
}
"""Settings of these sections that only the run may have, and why."""
BASE = ("model", "cluster", "megatron", "sglang", "teacher", "critic", "weights", "deadlines", "output_dir", "serve")
"""Settings that an entry cannot have."""


def refuse_shared(entry: Mapping[str, Any]) -> None:
    """Raise ConfigError if an entry of `adapters` has settings that only the run may have."""
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
    """Directories with metrics and checkpoints of a run: its own, and those of its adapters."""
    return [run_dir, *sorted(path for path in (run_dir / DIRECTORY).glob("*") if path.is_dir())]


def plain_entry(entry: Any) -> dict[str, Any]:
    """Given values of an entry, which may have been validated already."""
    return cast("dict[str, Any]", entry if isinstance(entry, dict) else entry.given())


def _merged(below: Any, above: Any) -> Any:
    """Merge key by key, `above` takes precedence; validated sections are replaced by their given values."""
    below, above = (each.given() if isinstance(each, Section) else each for each in (below, above))
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    known = cast("dict[str, Any]", below)
    return {**known, **{k: _merged(known[k], v) if k in known else v for k, v in cast("dict[str, Any]", above).items()}}


def merged_entry(values: Mapping[str, Any], entry: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """One entry merged over the run's values, as if it were trained alone.

    Args:
        values: given for the run.
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
    """Move an error of an adapter's run to the entry's own setting, if the entry has it."""
    section, _, key = error.field.partition(".")
    own = entry.get(section)
    at = "." if isinstance(own, dict) and key.split(".")[0] in own else ": "
    return type(error)(f"adapters.{name}{at}{error.field}", error.value, error.rule, error.hint)


def check_names(names: Sequence[str]) -> None:
    """Reject names of adapters that are equal as flags. Raises ConfigError."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("adapters.name", name, "two adapters have this name", "rename one of them")
        if "." in name or name.startswith("-"):
            raise ConfigError(
                "adapters.name", name, "must not contain a dot or begin with -, because flags contain it",
                "for example maths or code-v2",
            )  # fmt: skip
