"""Validates a run: its configuration against its checkpoint, tokenizer and data."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mslime.checks.datasets import check_data, check_supervised_data, glance_at_files
from mslime.checks.user_functions import check_functions, run_functions
from mslime.config.base import Task
from mslime.config.cluster import WHOLE, RunParts, check_machines
from mslime.config.engines import SGLangConfig
from mslime.config.errors import CheckpointError, ConfigError, UserError, reading
from mslime.config.megatron import check_model
from mslime.config.model_facts import language_model, trainer_dtype
from mslime.config.output import ObserveConfig
from mslime.config.plugins import found, load
from mslime.config.resolved import CriticSpec, ModelSpec, critic_spec, engine_spec, policy_spec
from mslime.config.rollout import RolloutConfig
from mslime.config.schema import ModelConfig, RunConfig
from mslime.config.train import TrainConfig
from mslime.config.transports import AUTO, transport_names
from mslime.convert.encoding import Encoded, Encoding, Fp8Blocks, Int4Groups, encoded_weights
from mslime.convert.families import get_family, read_hf_config, refuse_unread
from mslime.convert.families.family import Family, ModelFields
from mslime.convert.flops import quadratic_tokens
from mslime.convert.hf import HFCheckpoint
from mslime.convert.lora_rules import check_served, make_adapters, served_modules
from mslime.convert.peft import adapters_of_run
from mslime.convert.quantised import check_quantisation
from mslime.data.tokenizer import Tokenizer, check_vocabulary, first_difference, load_tokenizer, probe_texts

# Rules for a run from a quantised checkpoint: its engines hold the weights as the checkpoint stores them.


def check_quantised(config: RunConfig, checkpoint: HFCheckpoint, hf_config: Mapping[str, object]) -> None:
    """Check a run from a quantised checkpoint. Plain checkpoints pass, and attached servers: these receive plain
    weights.

    Raises:
        CheckpointError: weights are quantised in a way that syncs do not support.
        ConfigError: a setting does not fit engines that hold quantised weights.
    """
    if config.sglang.urls:
        return
    encoded = encoded_weights(checkpoint, hf_config)
    if encoded is None:
        return
    plain = f"write a plain copy with `mslime convert bf16 {config.model.path} OUT` and train from it"
    if config.weights.transport not in transport_names():  # others may not support several dtypes a bucket
        raise ConfigError(
            "weights.transport", config.weights.transport,
            f"{config.model.path} is quantised ({encoded.method}), and only {' or '.join(transport_names())} can send "
            "quantised weights with their scales", f"set weights.transport: {AUTO}, or {plain}",
        )  # fmt: skip
    if config.syncs_adapters:
        raise ConfigError(
            "lora.sync", config.lora.sync,
            f"{config.model.path} is quantised ({encoded.method}), and engines do not support separate adapters on "
            "quantised weights",
            f"set lora.sync: merged, which quantises the merged weights, or {plain}",
        )  # fmt: skip
    text = language_model(hf_config)
    if config.cluster.device == "cpu" and text.get("kv_lora_rank") is not None:
        raise CheckpointError(
            f"{config.model.path}: quantization_config", encoded.method,
            "emulation of quantised layers on a CPU does not support latent attention", plain,
        )  # fmt: skip
    _check_shares(config.sglang, text, encoded)


def _check_shares(engine: SGLangConfig, text: Mapping[str, object], encoded: Encoded) -> None:
    """Check that each GPU gets whole blocks, or groups, of an expert, as SGLang requires."""
    width, tp = text.get("moe_intermediate_size"), engine.tp_size
    tp //= int(str(engine.extra.get("ep_size") or 1))
    unit, size = _unit(encoded.encoding)
    if isinstance(width, int) and width % (size * max(tp, 1)):
        raise ConfigError(
            "sglang.tp_size", engine.tp_size,
            f"SGLang divides experts, {width} wide, in {unit} of {size}, which {tp} GPUs cannot share equally",
            "use a smaller sglang.tp_size, set sglang.ep_size to it, or use a plain checkpoint",
        )  # fmt: skip


def _unit(encoding: Encoding) -> tuple[str, int]:
    """Name of the unit that shares a scale, and its size along an expert's features."""
    match encoding:
        case Fp8Blocks():
            return "blocks", encoding.block[0]
        case Int4Groups():
            return "groups", encoding.group
        case _:
            raise AssertionError(encoding)


EXACT_TOLERANCE, ROUNDED_TOLERANCE, QUANTISED_TOLERANCE = 5e-4, 0.25, 0.5
"""Nats. In float32, engines and trainer differ by 1e-6, or some 1e-5 with many and wide layers; in bfloat16, with some
experts chosen differently, by some hundredths. Errors of state left in an engine grow with every step.
"""


@dataclass(frozen=True)
class ResolvedRun:
    """A validated run: the complete configuration, with facts from the checkpoint.

    Attributes:
        notes: on the labels and the reward, for people.
        adapters: the run of each of several adapters by name, in their order; empty for one.
    """

    config: RunConfig
    hf_config: dict[str, object]
    family: Family
    model: ModelFields
    notes: tuple[str, ...] = ()
    adapters: Mapping[str, ResolvedRun] = field(default_factory=dict[str, "ResolvedRun"])

    @property
    def sends_routes(self) -> bool:
        """Whether engines return routes, which the trainer replays."""
        return self.model.sends_routes(self.config.train.replay)

    @property
    def adapted_modules(self) -> tuple[str, ...]:
        """Name endings of modules with an adapter, if engines hold adapters; else none."""
        if not self.config.syncs_adapters:
            return ()
        table = self.family.rules(self.hf_config)
        runs = [*self.config.adapter_runs.values()] or [self.config]
        of_each = [served_modules(make_adapters(table, run.lora)) for run in runs]
        return tuple(dict.fromkeys(module for modules in of_each for module in modules))

    @property
    def probe_tolerance(self) -> float:
        """`weights.probe_tolerance`, or its default for the dtypes of this run."""
        if (tolerance := self.config.weights.probe_tolerance) is not None:
            return tolerance
        if check_quantisation(self.hf_config) is not None and not self.config.sglang.urls:
            return QUANTISED_TOLERANCE
        trainer = trainer_dtype(self.config.megatron, cpu=self.config.cluster.device == "cpu")
        exact = trainer == engine_spec(self.config).dtype(self.hf_config) == "float32"
        return EXACT_TOLERANCE if exact else ROUNDED_TOLERANCE


def resolve(config: RunConfig, parts: RunParts = WHOLE, *, data: bool = True) -> ResolvedRun:
    """Check the run against its checkpoint, tokenizer and data. Raises UserError for the first mistake.

    Args:
        data: also check prompts and reward, which a server does not have.
    """
    run = _resolve_adapters(config, parts) if config.adapters else _resolve_one(config, parts, data)
    if parts == WHOLE:
        for name in found("mslime.checks"):
            load("mslime.checks", name, "mslime.checks")(config)
    return run


def _resolve_one(config: RunConfig, parts: RunParts, data: bool) -> ResolvedRun:
    """Check a run of one model or adapter, without the checks of plug-ins."""
    check_machines(config.cluster, config.claims(parts))
    check_functions(run_functions(config))
    _check_paths(config.run_dir, config.checkpoint.load, config.model)
    if data:
        read_hf_config(config.model.path)  # checked first, because a run needs it first
        glance_at_files(config.data)
    hf_config, checkpoint = _read_model(policy_spec(config), config.model.ignored_config_fields)
    family = get_family(hf_config)
    model = replace(family.model_fields(hf_config), renderers=family.support.renderers)
    if config.train.task == "rl":
        check_quantised(config, checkpoint, hf_config)
        family.refuse_for_engine(hf_config)
        _check_engine_tp(config.sglang.tp_size, family)
        engine_spec(config).dtype(hf_config)
        config.sglang.keys()
        config.teacher.keys()
    if config.lora.on:
        stages = config.megatron.stage_layers(model.num_layers)
        adapters, _ = adapters_of_run(family.rules(hf_config), config.lora, config.layout, stages)
        if config.syncs_adapters:
            check_served(adapters, family)
    _check_lengths(config.rollout, config.train.task, model)
    if config.has_critic and config.critic.path is not None:
        longest = config.rollout.longest(model.max_positions)
        _check_critic(critic_spec(config), config.model.ignored_config_fields, model.vocab_size, longest)
    if config.train.task == "rl" and model.num_experts == 0 and config.train.replay != "off":
        raise ConfigError(
            "train.replay",
            config.train.replay,
            "the model has no experts, so there are no routes to replay",
            "set train.replay: off",
        )
    tokenizer = load_tokenizer(config.model.tokenizer)
    check_vocabulary(tokenizer, config.model.path)
    if foreign := [i for i in config.rollout.stop_token_ids if i >= tokenizer.vocab_size]:
        rule = f"the largest id of the tokenizer is {tokenizer.vocab_size - 1}"
        raise ConfigError("rollout.stop_token_ids", foreign[0], rule, "use ids of this tokenizer")
    _check_teacher(config.teacher.path, model, tokenizer)
    notes, limit = list[str](), config.rollout.longest(model.max_positions)
    if data and config.train.task == "sft":
        notes = check_supervised_data(config.data, config.train, config.seed, tokenizer, limit)
    elif data:
        notes = check_data(config, tokenizer, limit)
    _check_optional_packages(config.observe)
    config = config.model_copy(update={"train": with_quadratic_tokens(config.train, hf_config)})
    return ResolvedRun(config, hf_config, family, model, tuple(notes))


def _resolve_adapters(config: RunConfig, parts: RunParts) -> ResolvedRun:
    """Check the run of each of several adapters."""
    found: dict[str, ResolvedRun] = {}
    for name, own in config.adapter_runs.items():
        try:
            found[name] = _resolve_one(own, parts, data=True)
        except UserError as error:
            raise type(error)(f"adapters.{name}: {error.field}", error.value, error.rule, error.hint) from error
    first = next(iter(found.values()))
    notes = tuple(f"{name}: {note}" for name, run in found.items() for note in run.notes)
    config = config.model_copy(update={"train": with_quadratic_tokens(config.train, first.hf_config)})
    return ResolvedRun(config, first.hf_config, first.family, first.model, notes, found)


def _check_paths(run_dir: Path, load: Path | None, model: ModelConfig) -> None:
    """Test the directories that the run will write to and read from, before anything waits for them.

    Args:
        load: `checkpoint.load`.
    """
    nearest = run_dir
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK) or not _takes_a_file(nearest):
        raise ConfigError("output_dir", str(run_dir.parent), f"{nearest} is not a writable directory",
                          "choose a writable directory, or fix its permissions")  # fmt: skip
    if load is not None and not (load / "manifest.json").is_file():
        raise CheckpointError("checkpoint.load", str(load), "is not a checkpoint: it has no "
                              "manifest.json", "name a checkpoints/step_N directory of a run")  # fmt: skip
    for key, path in (("reference_path", model.reference_path), ("teacher_path", model.teacher_path)):
        if path is not None and not (path / "config.json").is_file():
            raise CheckpointError(f"model.{key}", str(path), "has no config.json",
                                  "give a Hugging Face checkpoint")  # fmt: skip


def _takes_a_file(directory: Path) -> bool:
    """Whether a file can be created there: permissions do not reveal a read-only or a virtual file system."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _read_model(spec: ModelSpec, ignored: Sequence[str]) -> tuple[dict[str, object], HFCheckpoint]:
    """config.json and tensors of a checkpoint that the trainer can build in its layout, and load. Raises UserError.

    Args:
        ignored: `model.ignored_config_fields`.
    """
    path = spec.checkpoint
    hf_config = read_hf_config(path)
    family = get_family(hf_config)
    refuse_unread(family, hf_config, ignored)
    with reading(CheckpointError, str(path / "config.json"), "a field has a value of an unexpected "
                 "type", "download the file again"):  # fmt: skip
        family.model_fields(hf_config)
        table = family.rules(hf_config)
        table.check_layout(spec.layout)
        fields = family.transformer_fields(hf_config)
    checkpoint = HFCheckpoint(path)
    table.check_hf(checkpoint.shapes, str(path))
    check_model(spec.megatron, spec.device, fields, spec.fp8)
    return hf_config, checkpoint


def _check_critic(spec: CriticSpec, ignored: Sequence[str], vocab_size: int, longest: int) -> None:
    """Check that a critic of another checkpoint can read all tokens and lengths that the policy writes.

    Args:
        ignored: `model.ignored_config_fields`. vocab_size: of the policy. longest: sequence that it writes, in tokens.
    """
    hf_config, _ = _read_model(spec, ignored)
    critic = get_family(hf_config).model_fields(hf_config)
    for unit, has, needs in (
        ("token ids", critic.vocab_size, vocab_size),
        ("positions", critic.max_positions, longest),
    ):
        if has < needs:
            raise ConfigError(
                "critic.path", str(spec.checkpoint), f"this model has {has} {unit}, but the policy uses up to {needs}",
                "start the critic from a model of the policy's family, or remove critic.path",
            )  # fmt: skip


def with_quadratic_tokens(train: TrainConfig, hf_config: dict[str, object]) -> TrainConfig:
    """The section with its model-dependent settings filled in."""
    if train.quadratic_tokens != "auto":
        return train
    counted = quadratic_tokens(hf_config)
    return train.model_copy(update={"quadratic_tokens": None if counted is None else float(round(counted))})


def _check_engine_tp(tp: int, family: Family) -> None:
    largest = family.support.largest_engine_tp
    if largest is not None and tp > largest:
        raise ConfigError(
            "sglang.tp_size", tp,
            f"SGLang 0.5.23 supports at most {largest} GPUs per engine for {family.architecture}",
            f"set sglang.tp_size to {largest} and start more engines (sglang.num_engines)",
        )  # fmt: skip


def _check_teacher(path: Path | None, model: ModelFields, tokenizer: Tokenizer) -> None:
    """Check that a teacher served by mslime has the student's tokens; a running one is checked when it is connected."""
    from mslime.backends.sglang.handshake import embedding_rows

    if path is None:
        return
    rows = embedding_rows(path)
    if rows is None:
        raise CheckpointError("teacher.path", str(path), "has no readable config.json",
                              "give a Hugging Face checkpoint")  # fmt: skip
    texts = probe_texts(tokenizer)
    ours, theirs = ([t.encode(text, special_tokens=False) for text in texts] for t in (tokenizer, load_tokenizer(path)))
    different = first_difference(texts, ours, theirs)
    if different or rows < model.vocab_size:
        rule = different or f"it has {rows} token ids, and the student may sample any of {model.vocab_size}"
        raise ConfigError("teacher.path", str(path), f"a teacher needs the student's tokenizer and vocabulary: {rule}",
                          "distil from a model of the student's family")  # fmt: skip


def _check_lengths(rollout: RolloutConfig, task: Task, model: ModelFields) -> None:
    limit = rollout.longest(model.max_positions)
    if limit > model.max_positions:
        raise ConfigError(
            "rollout.max_total_tokens",
            limit,
            f"exceeds the model's {model.max_positions} positions",
            "lower it",
        )
    if task == "rl" and rollout.max_response_tokens >= limit:
        raise ConfigError(
            "rollout.max_response_tokens",
            rollout.max_response_tokens,
            f"leaves no room for a prompt within {limit} tokens",
            "lower it, or raise rollout.max_total_tokens",
        )


def _check_optional_packages(observe: ObserveConfig) -> None:
    wanted = {
        "tensorboard": ("tensorboard", observe.tensorboard or None),
        "wandb": ("wandb_project", observe.wandb_project),
    }
    for package, (setting, value) in wanted.items():
        if value is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"observe.{setting}",
                value,
                f"the package {package} is not installed",
                f"pip install {package}",
            )
