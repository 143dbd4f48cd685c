"""What makes a directory a complete checkpoint, which of several is resumed from, and which are kept. Needs neither
torch nor megatron, so the driver can choose one before any trainer runs; `backends.megatron.checkpoint` fills them.

A checkpoint is written into a hidden sibling directory, its manifest last, and then renamed: under its own name it is
either absent or complete. The manifest holds every file's size and checksum, so that what is damaged later is noticed
and named; nothing is resumed from, or passed over, in silence.

    <root>/step_10/manifest.json       files with sizes and checksums, layout, extra; written last
                  /rng/rank_00000.npz  random number generators of each rank
                  /rollouts.npz        work in flight, written by the rollout service
                  /...                 megatron-core's torch_dist files (weights, optimizer, schedule)
    <root>/critic/step_10/...          likewise of PPO's critic
    <root>/damaged-step_20/...         set aside by `checkpoint.resume: older`
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mslime.config.base import Resume
from mslime.config.errors import CheckpointError, ConfigError
from mslime.data.checksums import FileSum, check_sizes, check_sums, sum_file
from mslime.data.manifest import Manifest, read_manifest, write_manifest

ROLLOUTS, OUTLINE = "rollouts.npz", "rollouts_outline.npz"
"""The rollout service's file, and the one that stands in for it when the service is gone."""
_OLD_ROLLOUTS = "extra/rollouts.bin"  # of format 1
CRITIC = "critic"
"""In `extra`: whether a critic was saved with it."""
SAVING, REPLACED, DAMAGED = ".saving-", ".replaced-", "damaged-"
_STEP = re.compile(r"step_(\d+)")


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint that continues at `step` lives."""
    return root / f"step_{step}"


def critic_directory(directory: Path) -> Path:
    """Where the critic that belongs to a checkpoint lives: a checkpoint of its own, complete before the policy's is."""
    return directory.parent / "critic" / directory.name


def saving_directory(directory: Path) -> Path:
    """Where the checkpoint is written until it is complete."""
    return directory.with_name(f"{SAVING}{directory.name}")


def rollouts_file(manifest: Manifest) -> str | None:
    """Which file of a checkpoint is the rollout service's; None of supervised training."""
    return next((name for name in (OUTLINE, ROLLOUTS, _OLD_ROLLOUTS) if name in manifest.files), None)


# ------------------------------------------------------------------------------------------------------------ writing


def begin(directory: Path) -> Path:
    """An empty hidden directory beside `directory`, to write the checkpoint into."""
    saving = saving_directory(directory)
    shutil.rmtree(saving, ignore_errors=True)
    saving.mkdir(parents=True)
    return saving


def complete(
    saving: Path, directory: Path, layout: str, world_size: int, extra: dict[str, Any], files: Mapping[str, FileSum]
) -> None:
    """Everything is written and on the disk: write the manifest, and give the checkpoint its name.

    Args:
        extra: JSON values.
        files: sums of files as their writers know them. What else is there is small: it is read, summed and synced.

    Raises:
        CheckpointError: a file is not as its writer left it.
    """
    check_sizes(saving, files)
    others = [path for path in saving.rglob("*") if path.is_file() and str(path.relative_to(saving)) not in files]
    for path in others:
        _sync(path)
    sums = dict(files) | {str(path.relative_to(saving)): sum_file(path) for path in others}
    write_manifest(saving, Manifest(layout, world_size, extra, sums))
    _sync(saving)
    replaced = directory.with_name(f"{REPLACED}{directory.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if directory.exists():  # a run that resumed from an older checkpoint reached this step again
        directory.rename(replaced)
    saving.rename(directory)
    _sync(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


# ----------------------------------------------------------------------------------------------------------- choosing


@dataclass(frozen=True)
class Chosen:
    """What a run continues from.

    Attributes:
        directory: the checkpoint; None where there is none.
        passed_over: newer ones that are damaged, now under another name, with what is wrong.
    """

    directory: Path | None
    passed_over: tuple[tuple[Path, CheckpointError], ...] = field(default=())


def choose(root: Path, resume: Resume) -> Chosen:
    """The checkpoint under `root` to continue from, as `checkpoint.resume` says.

    `auto` takes the newest, whose manifest and sizes must be right (its checksums are compared by the ranks, side by
    side, when they load it). `older` reads whole checkpoints, newest first, until one is undamaged, and sets aside
    those before it. `never` wants none to be there.

    Raises:
        CheckpointError: the newest is damaged (`auto`), or all are (`older`).
        ConfigError: there is one (`never`).
    """
    found = steps(root)
    if not found:
        return Chosen(None)
    if resume == "never":
        raise ConfigError(
            "checkpoint.resume", "never", f"{found[-1]} would be overwritten by a run that starts again",
            "give the run another name, or move the directory away",
        )  # fmt: skip
    return Chosen(newest(root)) if resume == "auto" else _undamaged(found)


def newest(root: Path) -> Path | None:
    """The newest checkpoint under `root`; None when there is none. Raises CheckpointError when it is damaged."""
    found = steps(root)
    if not found:
        return None
    _check_one(found[-1], check_sizes)
    return found[-1]


def check_checkpoint(directory: Path) -> None:
    """Read all of a checkpoint, its critic included, and compare checksums. Raises CheckpointError naming the file."""
    _check_one(directory, check_sums)


def _check_one(directory: Path, check: Callable[[Path, Mapping[str, FileSum]], None]) -> None:
    manifest = read_manifest(directory)
    check(directory, manifest.files)
    if manifest.extra.get(CRITIC):
        critic = critic_directory(directory)
        check(critic, read_manifest(critic).files)


def _undamaged(found: Sequence[Path]) -> Chosen:
    """The newest undamaged one; the damaged ones after it get another name, so that no later start meets them."""
    damaged: list[tuple[Path, CheckpointError]] = []
    for directory in reversed(found):
        try:
            check_checkpoint(directory)
        except CheckpointError as error:
            damaged.append((directory, error))
            continue
        return Chosen(directory, tuple((_set_aside(path), error) for path, error in damaged))
    raise CheckpointError(
        str(found[0].parent), [path.name for path, _ in damaged], f"all checkpoints are damaged; {damaged[0][1]}",
        "restore one, or give the run another name to start again",
    )  # fmt: skip


def _set_aside(directory: Path) -> Path:
    for path in (critic_directory(directory), directory):
        if path.is_dir():
            aside = path.with_name(f"{DAMAGED}{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    return directory.with_name(f"{DAMAGED}{directory.name}")


# ------------------------------------------------------------------------------------------------------------ keeping


def retained(
    saved: Sequence[int], keep: int, keep_every: int = 0, scores: Mapping[int, float] | None = None
) -> set[int]:
    """Which steps of `saved` are kept: the newest `keep`, multiples of `keep_every` (0: none), and the best.

    Args:
        scores: of steps, larger is better; the newest of equals wins, NaN never does.
    """
    assert keep >= 1, keep
    kept = set(sorted(saved)[-keep:])
    kept |= {step for step in saved if keep_every and step % keep_every == 0}
    scored = [step for step in saved if scores and not math.isnan(scores.get(step, math.nan))]
    if scores and scored:
        kept.add(max(scored, key=lambda step: (scores[step], step)))
    return kept


def prune(root: Path, keep: Callable[[Sequence[int]], set[int]]) -> None:
    """Remove complete checkpoints that `keep` does not choose, and what an interrupted save or removal left behind."""
    complete_ones = {step_of(d): d for d in steps(root) if _is_complete(d)}
    kept = keep(list(complete_ones))
    for step, directory in complete_ones.items():
        if step not in kept:
            discard(directory)
    for leftover in [*root.glob(f"{SAVING}*"), *root.glob(f"{REPLACED}*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def discard(directory: Path) -> None:
    """Remove a checkpoint: it stops being one at once, whatever happens during the removal."""
    doomed = directory.with_name(f"{REPLACED}{directory.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    directory.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def steps(root: Path) -> list[Path]:
    """Everything that has a checkpoint's name, complete or not, oldest first."""
    found = [(step, path) for path in root.glob("step_*") if (step := step_of(path)) >= 0]
    return [path for _, path in sorted(found) if path.is_dir()]


def newest_step(run_dir: Path) -> int:
    """The steps that a run's newest checkpoint holds; 0 without one."""
    found = steps(run_dir / "checkpoints")
    return step_of(found[-1]) if found else 0


def step_of(directory: Path) -> int:
    """The steps that a checkpoint's name tells of; -1 for any other name."""
    match = _STEP.fullmatch(directory.name)
    return int(match[1]) if match else -1


def _is_complete(directory: Path) -> bool:
    try:
        read_manifest(directory)
    except CheckpointError:
        return False
    return True


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
