"""Several adapters on one base (`adapters`): the run of each, resolved from the run's settings and its entry.

Each adapter's run is an ordinary `RunConfig`, as if it were trained alone: whatever follows needs not know of the
others. What they share, the model, its layout and the engines, stands in the run's own sections alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from mslime.config.errors import ConfigError, UserError

if TYPE_CHECKING:
    from mslime.config.schema import RunConfig

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
    "rollout.concurrency": "engines are shared; `weight` says which part of them an adapter has",
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


def adapter_runs(values: Mapping[str, Any], config: RunConfig) -> tuple[RunConfig, ...]:
    """The run of every entry of `adapters`, in their order.

    Args:
        values: what was given for the run, before defaults were filled in.
        config: what was made of it.

    Raises:
        ConfigError: an entry names what is the run's, or what cannot be trained beside others.
    """
    _check_names([entry.name for entry in config.adapters])
    _check_run(config)
    given = [_plain(entry) for entry in values["adapters"]]
    runs = tuple(_resolved(values, entry, config) for entry in given)
    for run in runs:
        _check_adapter(config, run)
    return runs


def refuse_several(config: RunConfig, what: str) -> None:
    """Raise ConfigError where something is done for one adapter, and the run has several."""
    if names := [entry.name for entry in config.adapters]:
        raise ConfigError(
            "adapters", ", ".join(names), f"{what} is for one adapter",
            f"give it the adapter's own file, which a run writes: {config.run_dir / DIRECTORY / names[0]}/config.yaml",
        )  # fmt: skip


def counts_over_a_step(config: RunConfig) -> bool:
    """Whether routers count their tokens over all micro-batches of a pass, whose adapter they do not know."""
    kinds: Any = config.megatron.extra.get("moe_router_load_balancing_type", "none")
    return "global_aux_loss" in ([kinds] if isinstance(kinds, str) else kinds)


def directories(run_dir: Path) -> list[Path]:
    """Where a run keeps metrics and checkpoints: its directory, and those of its adapters."""
    return [run_dir, *sorted(path for path in (run_dir / DIRECTORY).glob("*") if path.is_dir())]


def at_home(run: RunConfig, config: RunConfig) -> RunConfig:
    """An adapter's run with everything that is the base's as `config` has it now, and its directory below that."""
    shared = [name for name in type(config).model_fields if name not in (*OWN_SECTIONS, "name", "seed", "adapters")]
    changed = {name: getattr(config, name) for name in shared}
    changed["output_dir"] = config.run_dir / DIRECTORY
    if (directory := config.weights.directory) is not None:
        changed["weights"] = config.weights.model_copy(update={"directory": directory / config.name})
    return run.model_copy(update=changed)


def entry_of(run: RunConfig, weight: float) -> dict[str, Any]:
    """A resolved entry with nothing left open, as YAML would have it: from it the same run is resolved again."""
    whole = run.as_dict()
    shared = [setting.split(".") for setting in SHARED]
    sections = {
        section: {k: v for k, v in whole[section].items() if [section, k] not in shared} for section in OWN_SECTIONS
    }
    return {"name": run.name, "weight": weight, "seed": run.seed, **sections}


def _plain(entry: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", entry if isinstance(entry, dict) else entry.given())


def _resolved(values: Mapping[str, Any], entry: Mapping[str, Any], config: RunConfig) -> RunConfig:
    """One entry on top of the run's values."""
    name = str(entry["name"])
    merged = {k: v for k, v in values.items() if k not in ("adapters", "name", "output_dir")}
    for section in OWN_SECTIONS:
        if section in entry:
            merged[section] = _merged(merged.get(section, {}), entry[section])
    if entry.get("seed") is not None:
        merged["seed"] = entry["seed"]
    merged |= {"name": name, "output_dir": str(config.run_dir / DIRECTORY)}
    try:
        return type(config).model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        cause, path = first.get("ctx", {}).get("error"), ".".join(map(str, first["loc"]))
        if isinstance(cause, UserError):
            raise _placed(name, cause, entry) from None
        raise ConfigError(f"adapters.{name}.{path}", first["input"], first["msg"], "correct the value") from None
    except UserError as error:
        raise _placed(name, error, entry) from None


def _merged(below: Any, above: Any) -> Any:
    """`above` wins, key by key; sections that were validated already are taken as what was given for them."""
    below, above = (_as_given(each) for each in (below, above))
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    known = cast("dict[str, Any]", below)
    return {**known, **{k: _merged(known[k], v) if k in known else v for k, v in cast("dict[str, Any]", above).items()}}


def _as_given(section: Any) -> Any:
    from mslime.config.base import Section

    return section.given() if isinstance(section, Section) else section


def _placed(name: str, error: UserError, entry: Mapping[str, Any]) -> UserError:
    """An error of an adapter's run, at the entry's own setting where it has one."""
    section, _, key = error.field.partition(".")
    own = entry.get(section)
    at = "." if isinstance(own, dict) and key.split(".")[0] in own else ": "
    return type(error)(f"adapters.{name}{at}{error.field}", error.value, error.rule, error.way_out)


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("adapters.name", name, "two adapters have it", "give each a name of its own")
        if "." in name or name.startswith("-"):
            raise ConfigError(
                "adapters.name", name, "must have no dot, and not begin with -, so that flags can name it",
                "write for example maths or code-v2",
            )  # fmt: skip


def _check_run(config: RunConfig) -> None:
    """What a run of several adapters is not made for. Raises ConfigError."""
    refused: tuple[tuple[bool, str, object, str, str], ...] = (
        (config.train.task != "rl", "train.task", config.train.task, "supervised training has one adapter",
         "train each adapter in a run of its own"),
        (config.lora.sync != "adapter", "lora.sync", config.lora.sync,
         "engines hold several adapters beside the base only where they are given adapters alone",
         "set lora.sync: adapter"),
        (bool(config.lora.together) and counts_over_a_step(config), "lora.together", True,
         "routers count tokens over a whole pass (moe_router_load_balancing_type: global_aux_loss)", "remove it"),
        (config.colocated, "cluster.placement", "colocated", "a trainer of adapters was never put to sleep",
         "set separate"),
        (config.rollout.managers > 1, "rollout.managers", config.rollout.managers,
         "one rollout service has the engines for all adapters", "remove it"),
        (config.teacher.path is not None or bool(config.teacher.urls), "teacher", "a served teacher",
         "several adapters were never run with one", "remove the section, or train this adapter in a run of its own"),
        (config.model.teacher_path is not None, "model.teacher_path", str(config.model.teacher_path),
         "several adapters were never run with a teacher", "remove it, or train this adapter in a run of its own"),
        (config.model.reference_path is not None, "model.reference_path", str(config.model.reference_path),
         "the reference of several adapters is the base without them", "remove it"),
        (config.observe.wandb_project is not None, "observe.wandb_project", config.observe.wandb_project,
         "one process logs one run to Weights & Biases", "remove it, and set observe.tensorboard: true"),
    )  # fmt: skip
    for applies, field, value, rule, way_out in refused:
        if applies:
            raise ConfigError(field, value, f"{rule} (adapters)", way_out)


def _check_adapter(config: RunConfig, run: RunConfig) -> None:
    """What one of several adapters cannot have. Raises ConfigError."""
    at = f"adapters.{run.name}"
    if run.has_critic:
        raise ConfigError(f"{at}.algorithm.advantage", "gae", "a critic is trained in a run of its own",
                          "choose another advantage")  # fmt: skip
    if run.rollout.function == "atropos":
        raise ConfigError(f"{at}.rollout.function", "atropos", "Atropos' environments were never run with several "
                          "adapters", "train this adapter in a run of its own")  # fmt: skip
    if run.rollout.server.port and len(config.adapters) > 1:
        raise ConfigError(f"{at}: rollout.server.port", run.rollout.server.port, "every adapter has a server of its "
                          "own, on a port of its own", "remove it: free ports are found")  # fmt: skip
    if run.observe.wandb_project is not None:
        raise ConfigError(f"{at}.observe.wandb_project", run.observe.wandb_project, "one process logs one run to "
                          "Weights & Biases", "remove it, and set observe.tensorboard: true")  # fmt: skip
    if run.checkpoint.load is not None and config.checkpoint.load is not None:
        same = run.checkpoint.load == config.checkpoint.load
        if same and len(config.adapters) > 1:
            raise ConfigError("checkpoint.load", str(config.checkpoint.load), "all adapters would start from one "
                              "checkpoint", "set it for each adapter that it is for")  # fmt: skip
