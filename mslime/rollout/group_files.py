"""Finished groups of training steps on disk, one file a step, for training a step again without engines.

`DIRECTORY/step_N.npz` holds all training data of step N (counted from 1, as in `metrics.jsonl`), in the lossless format
of `rollout.state`. Files may come from another run: `fitted` checks that they fit the model before training.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mslime.config.errors import DataError, reading
from mslime.config.model_facts import ModelFacts
from mslime.config.train import TrainConfig
from mslime.data.sample import Group, Sample
from mslime.rollout.state import check_stored, open_state, pack_groups, save_state, unpack_groups

_NAME = re.compile(r"step_(\d+)\.npz")


Refuse = Callable[[str, str, str], DataError]
"""Makes the error of a file from a value, a rule and a hint."""


@dataclass(frozen=True)
class StepGroups:
    """Groups of one training step.

    Attributes:
        step: counted from 1.
        version: weight version that the trainer held when it took the groups.
    """

    step: int
    version: int
    groups: list[Group]


def write_groups(directory: Path, stored: StepGroups) -> Path:
    """Write a step's groups atomically; an earlier file of the step is replaced. Returns the file.

    Raises:
        DataError: a label or metadata value is not JSON, or the file cannot be written.
    """
    path = directory / f"step_{stored.step}.npz"
    headers, columns = pack_groups(stored.groups)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_state(path, {"step": stored.step, "version": stored.version, "groups": headers}, columns)
    except OSError as error:
        hint = "free some space, choose another directory, or turn observe.save_groups off"
        raise DataError(str(path), error.strerror, "groups cannot be written", hint) from error
    return path


def group_files(directory: Path) -> dict[int, Path]:
    """Files of a directory by step, in order. Raises DataError if there are none."""
    found = {int(match[1]): path for path in directory.glob("step_*.npz") if (match := _NAME.fullmatch(path.name))}
    if not found:
        raise DataError(
            "--replay", str(directory), "holds no step_N.npz with finished groups",
            "write some with `mslime rollout RUN.yaml --out DIR`, or let a run write its own with observe.save_groups",
        )  # fmt: skip
    return dict(sorted(found.items()))


def read_groups(path: Path) -> StepGroups:
    """Read a file of `write_groups`. Raises CheckpointError if it is damaged, DataError if it is of another kind."""
    with open_state(path) as (header, stored):
        if "accepted" in header or "step" not in header:
            raise DataError(str(path), sorted(header), "is a rollout service's state, not the groups of a step",
                            "name a directory of `mslime rollout` or of observe.save_groups")  # fmt: skip
        groups = unpack_groups(header["groups"], stored)
        check_stored(groups)
        step, version = header["step"], header["version"]
        if type(step) is not int or type(version) is not int:
            raise TypeError(f"step {step!r}, version {version!r}")
    return StepGroups(step, version, groups)


def fitted(stored: StepGroups, path: Path, train: TrainConfig, has_teacher: bool, model: ModelFacts) -> list[Group]:
    """The groups as this run trains them: without unused routes and unused teacher scores. Supports are kept: a token
    is trained under the distribution that it was drawn from, whatever the run's own sampling is.

    Args:
        has_teacher: a served teacher scores the run's responses.
        model: of the trainer.

    Raises:
        DataError: they are of another model, or lack data that the run needs.
    """
    with reading(DataError, str(path), "cannot be trained", "write the groups again with this version of mslime"):
        refuse = partial(DataError, str(path))
        routed, steps = train.replay == "r3", train.optimizer_steps_per_rollout
        if len(stored.groups) < steps:
            raise refuse(f"{len(stored.groups)} groups", f"cannot fill {steps} optimizer steps",
                           "lower train.optimizer_steps_per_rollout")  # fmt: skip
        samples = [s for g in stored.groups for s in g.samples]
        if not any(s.trainable_tokens for s in samples):
            raise refuse("0 tokens", "the groups have no token to train", "check rollout.mask_truncated and the reward")
        groups = [replace(g, samples=[_used(s, routed, has_teacher) for s in g.samples]) for g in stored.groups]
        for sample in (s for g in groups for s in g.samples):
            _check_model(sample, refuse, model)
            _check_complete(sample, refuse, routed, has_teacher)
    return groups


def _check_model(sample: Sample, refuse: Refuse, model: ModelFacts) -> None:
    where = f"group {sample.group_id}, response {sample.index}"
    other = "name the run's model in model.path, or write the groups with this model"
    if (largest := int(sample.tokens.max())) >= model.vocab_size:
        raise refuse(f"token {largest} ({where})", f"the model has {model.vocab_size} tokens", other)
    if len(sample) > model.max_positions:
        raise refuse(f"{len(sample)} tokens ({where})", f"the model has {model.max_positions} positions", other)
    kept = 0 if sample.supports is None else int(sample.supports.ids.max(initial=0))
    if kept >= model.vocab_size:
        rule = f"it is in a recorded support, and the model has {model.vocab_size} tokens"
        raise refuse(f"token {kept} ({where})", rule, other)
    routes = sample.routes
    if routes is None:
        return
    has, wants = (routes.layer_ids, routes.experts.shape[2]), (model.moe_layer_ids, model.top_k)
    if has != wants:
        raise refuse(f"routes of layers {list(has[0])}, top-{has[1]} ({where})",
                       f"the model routes in layers {list(wants[0])}, top-{wants[1]}", other)  # fmt: skip
    if (largest := int(routes.experts.max(initial=0))) >= model.num_experts:
        raise refuse(f"expert {largest} ({where})", f"the model has {model.num_experts} experts", other)


def _check_complete(sample: Sample, refuse: Refuse, routed: bool, has_teacher: bool) -> None:
    where = f"group {sample.group_id}, response {sample.index}"
    if sample.reward is None:
        raise refuse(where, "is not scored", "write the groups again")
    if routed and sample.routes is None:
        raise refuse(where, "has no routes to replay (train.replay: r3)",
                       "set train.replay to r2 or off, or write the groups with r3")  # fmt: skip
    if has_teacher and sample.teacher_log_probs is None:
        raise refuse(where, "has no scores of the served teacher",
                       "write groups with this teacher, or load it into the trainer (model.teacher_path)")  # fmt: skip


def _used(sample: Sample, routed: bool, has_teacher: bool) -> Sample:
    """The sample without data that the run does not use."""
    return replace(
        sample,
        routes=sample.routes if routed else None,
        teacher_log_probs=sample.teacher_log_probs if has_teacher else None,
    )
