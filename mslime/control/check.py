"""`mslime check`: everything that can be known about a run before a GPU is claimed.

Reads the configuration, the checkpoint's config.json, index and tokenizer, and the first rows of every data file;
starts no engine and no process group.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Group as RichGroup
from rich.table import Table
from rich.text import Text

from mslime.config.advice import warnings
from mslime.config.cluster import WHOLE, Parts, check_machines
from mslime.config.dtypes import engine_dtype
from mslime.config.errors import CheckpointError, ConfigError, DataError, reading
from mslime.config.layout import ParallelLayout
from mslime.config.rules import check_model
from mslime.config.schema import RunConfig
from mslime.control.check_prompts import check_held_out, check_prompts
from mslime.control.check_rewards import check_rewards
from mslime.control.check_supervised import check_supervised
from mslime.control.environment import gpu_warnings
from mslime.convert.families import get_family, read_hf_config, refuse_unread
from mslime.convert.families.family import Family, ModelFields
from mslime.convert.hf import HFCheckpoint
from mslime.data.source import PromptSource
from mslime.data.supervised import SupervisedSource
from mslime.data.tokenizer import Tokenizer, check_vocabulary, first_difference, load_tokenizer, probe_texts
from mslime.observe.metrics import free_name
from mslime.planner.work import quadratic_tokens
from mslime.rollout.gate import SubmitGate

Source = TypeVar("Source")


@dataclass(frozen=True)
class ResolvedRun:
    """A validated run: the configuration, nothing left to the model, with what the checkpoint says about it.

    Attributes:
        notes: what a person should know of the labels and the reward.
    """

    config: RunConfig
    hf_config: dict[str, object]
    family: Family
    model: ModelFields
    notes: tuple[str, ...] = ()

    @property
    def replayed_layers(self) -> tuple[int, ...]:
        """Layers whose routes the engines return and the trainer follows."""
        return self.model.moe_layer_ids if self.config.train.replay == "r3" else ()

    @property
    def weight_check(self) -> str:
        """`weights.verify`, or `never` where mslime cannot rebuild how SGLang keeps this family's weights."""
        device = self.config.cluster.device
        return self.config.weights.verify if device in (*self.family.support.compared_on, "auto") else "never"


def resolve(config: RunConfig, parts: Parts = WHOLE) -> ResolvedRun:
    """Check the run against its checkpoint, tokenizer and data. Raises UserError for the first mistake."""
    check_machines(config, parts)
    _check_paths(config)
    hf_config, checkpoint = _read_model(config, config.model.path)
    family = get_family(hf_config)
    model = family.model_fields(hf_config)
    if config.train.task == "rl":
        _refuse_quantised(config, checkpoint)
        family.refuse_for_engine(hf_config)
        _check_engine_tp(config, family)
        engine_dtype(config, hf_config)
        config.sglang.keys()
        config.teacher.keys()
    _check_lengths(config, model)
    _check_critic(config, model)
    if config.train.task == "rl" and model.num_experts == 0 and config.train.replay != "off":
        raise ConfigError(
            "train.replay",
            config.train.replay,
            "the model has no experts, so there are no routes to replay",
            "set train.replay: off",
        )
    tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path)
    check_vocabulary(tokenizer, config.model.path)
    _check_teacher(config, model, tokenizer)
    check_data = _check_supervised_data if config.train.task == "sft" else _check_data
    notes = check_data(config, tokenizer, config.rollout.max_total_tokens or model.max_positions)
    _check_optional_packages(config)
    run = ResolvedRun(with_model(config, hf_config), hf_config, family, model, tuple(notes))
    if config.weights.verify == "always" and run.weight_check == "never":
        raise ConfigError(
            "weights.verify", "always",
            f"on {config.cluster.device}, SGLang keeps weights of {family.architecture} in a layout that mslime does "
            "not rebuild for the comparison",
            "use never",
        )  # fmt: skip
    return run


def _check_paths(config: RunConfig) -> None:
    """Directories that the run will write to and read from, tried before anything waits for them."""
    nearest = config.run_dir
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK) or not _takes_a_file(nearest):
        raise ConfigError("output_dir", str(config.output_dir), f"{nearest} is no directory that can be written",
                          "give a directory of yours, or mend its permissions")  # fmt: skip
    if config.checkpoint.load is not None and not (config.checkpoint.load / "manifest.json").is_file():
        raise CheckpointError("checkpoint.load", str(config.checkpoint.load), "is no checkpoint: it has no "
                              "manifest.json", "name a checkpoints/step_N directory of a run")  # fmt: skip
    for field, path in (("reference_path", config.model.reference_path), ("teacher_path", config.model.teacher_path)):
        if path is not None and not (path / "config.json").is_file():
            raise CheckpointError(f"model.{field}", str(path), "there is no config.json in this directory",
                                  "give a Hugging Face checkpoint")  # fmt: skip


def _takes_a_file(directory: Path) -> bool:
    """Whether a file can really be made there: permissions do not tell of a read-only or a virtual file system."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _read_model(config: RunConfig, path: Path) -> tuple[dict[str, object], HFCheckpoint]:
    """config.json and tensors of a checkpoint that the trainer can build in the run's layout, and load. UserError."""
    hf_config = read_hf_config(path)
    family = get_family(hf_config)
    refuse_unread(family, hf_config, config.model.ignored_config_fields)
    with reading(CheckpointError, str(path / "config.json"), "a setting has a value of another kind than transformers "
                 "writes", "download the file again"):  # fmt: skip
        family.model_fields(hf_config)
        table = family.rules(hf_config)
        table.check_layout(config.layout)
        fields = family.transformer_fields(hf_config)
    checkpoint = HFCheckpoint(path)
    table.check_hf(checkpoint.shapes, str(path))
    check_model(config, fields)
    return hf_config, checkpoint


def _check_critic(config: RunConfig, policy: ModelFields) -> None:
    """A critic of another checkpoint must read every token that the policy writes, as far as it writes."""
    path = config.critic.path
    if not config.has_critic or path is None:
        return
    hf_config, _ = _read_model(config, path)
    critic = get_family(hf_config).model_fields(hf_config)
    limit = config.rollout.max_total_tokens or policy.max_positions
    for what, has, needs in (
        ("token ids", critic.vocab_size, policy.vocab_size),
        ("positions", critic.max_positions, limit),
    ):
        if has < needs:
            raise ConfigError(
                "critic.path", str(path), f"this model has {has} {what}, and the policy uses up to {needs}",
                "start the critic from a model of the policy's family, or remove critic.path",
            )  # fmt: skip


def with_model(config: RunConfig, hf_config: dict[str, object]) -> RunConfig:
    """The configuration with what it leaves to the model filled in: `train.quadratic_tokens`."""
    if config.train.quadratic_tokens != "auto":
        return config
    counted = quadratic_tokens(hf_config)
    known = {"quadratic_tokens": None if counted is None else float(round(counted))}
    return config.model_copy(update={"train": config.train.model_copy(update=known)})


def _check_engine_tp(config: RunConfig, family: Family) -> None:
    largest = family.support.largest_engine_tp
    if largest is not None and config.sglang.tp_size > largest:
        raise ConfigError(
            "sglang.tp_size", config.sglang.tp_size,
            f"SGLang 0.5.23 computes {family.architecture} with at most {largest} GPUs an engine",
            f"set sglang.tp_size to {largest} and start more engines (sglang.num_engines)",
        )  # fmt: skip


def _refuse_quantised(config: RunConfig, checkpoint: HFCheckpoint) -> None:
    """The engines start from the checkpoint itself: they would hold quantised weights, which a sync does not write."""
    if checkpoint.quantisation is not None and not config.sglang.urls:
        raise CheckpointError(
            f"{config.model.path}: quantization_config", checkpoint.quantisation,
            "the engines would load quantised weights, and the trainer sends plain ones",
            f"write a plain copy with `mslime convert bf16 {config.model.path} OUT` and train from it",
        )  # fmt: skip


def _check_teacher(config: RunConfig, model: ModelFields, tokenizer: Tokenizer) -> None:
    """A teacher that mslime serves must speak the student's tokens; one that runs already is asked when it is met."""
    from mslime.backends.sglang.teacher import embedding_rows

    path = config.teacher.path
    if path is None:
        return
    rows = embedding_rows(path)
    if rows is None:
        raise CheckpointError("teacher.path", str(path), "there is no config.json in this directory that can be read",
                              "give a Hugging Face checkpoint")  # fmt: skip
    texts = probe_texts(tokenizer)
    ours, theirs = ([t.encode(text, special_tokens=False) for text in texts] for t in (tokenizer, load_tokenizer(path)))
    different = first_difference(texts, ours, theirs)
    if different or rows < model.vocab_size:
        rule = different or f"it embeds {rows} token ids, and the student may sample any of {model.vocab_size}"
        raise ConfigError("teacher.path", str(path), f"a teacher needs the student's tokenizer and vocabulary: {rule}",
                          "distil from a model of the student's family")  # fmt: skip


def _check_lengths(config: RunConfig, model: ModelFields) -> None:
    limit = config.rollout.max_total_tokens or model.max_positions
    if limit > model.max_positions:
        raise ConfigError(
            "rollout.max_total_tokens",
            limit,
            f"the model has {model.max_positions} positions",
            "lower it",
        )
    if config.train.task == "rl" and config.rollout.max_response_tokens >= limit:
        raise ConfigError(
            "rollout.max_response_tokens",
            config.rollout.max_response_tokens,
            f"leaves no room for a prompt within {limit} tokens",
            "lower it, or raise rollout.max_total_tokens",
        )


def _check_data(config: RunConfig, tokenizer: Tokenizer, limit: int) -> list[str]:
    """Open every data file, which reads each row once and refuses the first bad one by file and line, and try the rows.

    Returns what a person should know of prompts, labels and the reward.
    """

    def open_files(specs: list[str], shuffle: bool | None) -> PromptSource:
        return PromptSource(specs, config.data, tokenizer, config.seed, shuffle=shuffle)

    sources = _held_in_files(config, open_files)
    notes = check_prompts(config, sources[""], limit)
    for name, source in sources.items():
        if name:
            check_held_out(config, source)
    return notes + check_rewards(config, sources, tokenizer)


def _check_supervised_data(config: RunConfig, tokenizer: Tokenizer, limit: int) -> list[str]:
    """`_check_data` of supervised training: rows with what is trained of them, and no reward."""

    def open_files(specs: list[str], shuffle: bool | None) -> SupervisedSource:
        return SupervisedSource(specs, config, tokenizer, limit, shuffle=shuffle)

    sources = _held_in_files(config, open_files)
    return [note for name, source in sources.items() for note in check_supervised(config, source, name, tokenizer)]


def _held_in_files(config: RunConfig, open_files: Callable[[list[str], bool | None], Source]) -> dict[str, Source]:
    """The training rows, under "", and the held-out sets by name, opened. Raises DataError."""
    sources = {"": open_files(config.data.prompts, None)}
    for index, eval_set in enumerate(config.data.eval_sets):
        try:
            sources[eval_set.name] = open_files([eval_set.path], False)
        except DataError as error:
            if error.field != "data.prompts":
                raise
            raise DataError(f"data.eval_sets[{index}].path", error.value, error.rule, error.way_out) from error
    return sources


def _check_optional_packages(config: RunConfig) -> None:
    wanted = {
        "tensorboard": ("tensorboard", config.observe.tensorboard or None),
        "wandb": ("wandb_project", config.observe.wandb_project),
    }
    for package, (setting, value) in wanted.items():
        if value is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"observe.{setting}",
                value,
                f"the package {package} is not installed",
                f"pip install {package}",
            )


def describe(run: ResolvedRun) -> RichGroup:
    """The resolved run as tables for a person: layout, model, batch arithmetic, staleness, switches, warnings."""
    config = run.config
    parts: list[Any] = [_model_table(run), _layout_table(config.layout)]
    if config.train.task == "rl":
        parts += [_batch_table(config), _switch_table(run)]
    parts += [Text(f"note: {text}") for text in run.notes]
    parts += [Text(f"warning: {text}", style="yellow") for text in [*warnings(config), *gpu_warnings(config)]]
    return RichGroup(*parts)


def _grid(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        show_header=False,
        box=None,
        padding=(0, 2),
        title_style="bold",
    )
    for row in rows:
        table.add_row(*row)
    return table


def _model_table(run: ResolvedRun) -> Table:
    model = run.model
    moe = (
        f"{len(model.moe_layer_ids)} of {model.num_layers} layers, {model.num_experts} experts, top-{model.top_k}"
        if model.num_experts
        else "none (dense)"
    )
    return _grid(
        "Model",
        [
            ("checkpoint", str(run.config.model.path)),
            ("family", run.family.architecture),
            ("MoE", moe),
            (
                "vocabulary",
                f"{model.vocab_size:,} tokens, {model.max_positions:,} positions",
            ),
        ],
    )


def _layout_table(layout: ParallelLayout) -> Table:
    table = Table(
        title=f"Trainer layout: {layout.world_size} ranks, {layout.describe()}",
        title_justify="left",
        title_style="bold",
    )
    for name in (
        "rank",
        "pipeline",
        "data",
        "context",
        "tensor",
        "expert data",
        "expert",
        "expert tensor",
    ):
        table.add_column(name, justify="right")
    shown = range(layout.world_size) if layout.world_size <= 16 else [*range(8), layout.world_size - 1]
    for rank in shown:
        at = layout.place(rank)
        table.add_row(*(str(v) for v in (rank, at.pp, at.dp, at.cp, at.tp, at.edp, at.ep, at.etp)))
    return table


def _batch_table(config: RunConfig) -> Table:
    r, t = config.rollout, config.train
    responses = r.groups_per_step * r.group_size
    per_step = r.groups_per_step // t.optimizer_steps_per_rollout
    engines = len(config.sglang.urls) or config.sglang.num_engines
    budget = t.max_tokens_per_micro_batch * config.layout.cp
    in_flight = SubmitGate(r.groups_per_step, r.max_staleness, config.spare_groups).limit(0)
    return _grid(
        "One step",
        [
            (
                "rollout",
                f"{r.groups_per_step} groups x {r.group_size} responses, at most {r.max_response_tokens} tokens each",
            ),
            (
                "optimizer",
                f"{t.optimizer_steps_per_rollout} step(s) of {per_step} groups, {budget:,} tokens a micro-batch",
            ),
            ("balance", _balance(t.quadratic_tokens)),
            (
                "engines",
                f"{engines} x TP{config.sglang.tp_size}, {r.concurrency} requests each; {in_flight} groups in flight",
            ),
            ("run", f"{t.num_steps} steps = {t.num_steps * responses:,} responses"),
        ],
    )


def _balance(quadratic_tokens: float | str | None) -> str:
    if quadratic_tokens is None:
        return "micro-batches by tokens alone"
    return f"micro-batches by n + n^2 / {quadratic_tokens:,.0f} for a sequence of n tokens"


def _switch_table(run: ResolvedRun) -> Table:
    config = run.config
    r, a = config.rollout, config.algorithm
    stale = (
        "synchronous, on-policy"
        if r.max_staleness == 0
        else f"asynchronous, {r.max_staleness} version(s) ahead at most"
    )
    return _grid(
        "On and off",
        [
            (
                "staleness",
                f"max_staleness {r.max_staleness}: {stale}; older tokens are {_PAST[config.on_stale]}",
            ),
            (
                "partial rollouts",
                "aborted responses are continued" if r.partial else "off: aborted responses start again",
            ),
            (
                "over-sampling",
                f"{config.spare_groups} spare groups" if config.spare_groups else "off",
            ),
            ("dynamic filter", r.dynamic_filter),
            (
                "routing replay",
                {
                    "r3": "R3, the engine's routes",
                    "r2": "R2, the trainer's own routes",
                    "off": "off",
                }[config.train.replay],
            ),
            ("advantage and loss", f"{a.advantage}, {a.loss}"),
            (
                "correction",
                a.correction.preset or f"{a.correction.action} by {a.correction.level}",
            ),
            ("KL to reference", f"{a.kl_coef:g} x {a.kl_type}, in the {a.kl_in}" if a.kl_coef else "off"),
            *([("critic", _critic(config))] if config.has_critic else []),
            ("distillation", _distillation(config)),
            ("entropy bonus", f"{a.entropy_coef:g}" if a.entropy_coef else "off"),
            ("reward", _reward(config)),
            ("evaluation", ", ".join(s.name for s in config.data.eval_sets) or "off"),
            ("weight check", run.weight_check),
        ],
    )


def _reward(config: RunConfig) -> str:
    graders = [(f"{p.weight:g} x {p.name}: " if config.reward.parts else "", p) for p in config.reward.graders]
    said = "; ".join(f"{head}{p.function or p.http.url or p.kind}" for head, p in graders)
    overlong, repetition = config.reward.overlong, config.reward.repetition
    if overlong.buffer_tokens:
        said += f"; up to -{overlong.factor:g} in the last {overlong.buffer_tokens} tokens"
    if repetition.ngram:
        said += f"; -{repetition.factor:g} x share of repeated {repetition.ngram}-grams"
    return said


def _critic(config: RunConfig) -> str:
    critic = config.critic
    where = "on the policy's GPUs" if critic.placement == "shared" else f"on {config.critic_ranks} GPUs of its own"
    warm_up = f", alone in the first {critic.warmup_steps} step(s)" if critic.warmup_steps else ""
    return f"{critic.path or config.model.path} with a value head, {where}, learning rate {critic.lr:g}{warm_up}"


def _distillation(config: RunConfig) -> str:
    teacher, coefficient = config.teacher, config.algorithm.opd_coef
    if coefficient == 0:
        return "off"
    where = f"held by the trainer, {config.model.teacher_path}"
    if teacher.urls:
        where = f"served at {', '.join(teacher.urls)}; its vocabulary is compared when the run meets it"
    elif teacher.path is not None:
        where = f"{teacher.num_engines} server(s) x TP{teacher.tp_size} of {teacher.path}"
    return f"{coefficient:g} x (log pi_old - log teacher); teacher {where}"


_PAST = {"keep": "trained under the correction", "mask": "masked", "reroll": "generated again", "drop": "dropped"}


def write_resolved(config: RunConfig, path: Path) -> None:
    """Write the configuration that really runs, as YAML: whole or not at all. An earlier one that says something else
    is kept under a numbered name."""
    import yaml

    text = yaml.safe_dump(config.as_dict(), sort_keys=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        if path.read_text(encoding="utf-8", errors="replace") == text:
            return
        os.link(path, free_name(path))
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def changed_settings(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """`section.key: old -> new` of every setting that differs; nothing where it is not known what was.

    Args:
        before, now: `RunConfig.as_dict`.
    """
    if not before:
        return []
    old, new = _flat(before), _flat(now)
    keys = [*new, *(key for key in old if key not in new)]
    return [
        f"{key}: {old.get(key, 'not known')} -> {new.get(key, 'gone')}" for key in keys if old.get(key) != new.get(key)
    ]


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
