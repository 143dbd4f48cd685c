"""What makes a directory a complete checkpoint, and which of several is the newest. Needs neither torch nor megatron,
so the driver can choose one before any trainer runs; `backends.megatron.checkpoint` fills them.

A checkpoint is written into a hidden sibling directory, its manifest last, and then renamed: under its own name it is
either absent or complete. The manifest lists every file with its size, so that what is lost later is noticed and named.

    <root>/step_10/manifest.json      files with sizes, layout, extra; written last
                  /extra/<key>.bin    binary values of extra
                  /rng/rank_00000.pt  random number generators of each rank
                  /...                megatron-core's torch_dist files (weights, optimizer, schedule)
    <root>/critic/step_10/...         likewise of PPO's critic
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from mslime.config.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
SAVING, REPLACED = ".saving-", ".replaced-"
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        layout: the parallel layout that wrote it, for people and for the random number generators.
        world_size: ranks that wrote it.
        extra: what the caller saved with it, JSON values; binary values are files of their own.
        files: size in bytes of every other file, by path relative to the checkpoint.
        format: of this file.
        complete: always true; the last thing that is written.
    """

    layout: str
    world_size: int
    extra: dict[str, Any]
    files: dict[str, int]
    format: int = FORMAT
    complete: bool = True


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint that continues at `step` lives."""
    return root / f"step_{step}"


def critic_directory(directory: Path) -> Path:
    """Where the critic that belongs to a checkpoint lives: a checkpoint of its own, complete before the policy's is."""
    return directory.parent / "critic" / directory.name


def saving_directory(directory: Path) -> Path:
    """Where the checkpoint is written until it is complete."""
    return directory.with_name(f"{SAVING}{directory.name}")


def latest_complete(root: Path) -> Path | None:
    """The newest complete checkpoint under `root`, or None. Directories that are not complete are passed over."""
    return next((directory for directory in reversed(_steps(root)) if _is_complete(directory)), None)


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints, and what an interrupted save or removal left behind."""
    assert keep >= 1, keep
    for directory in [d for d in _steps(root) if _is_complete(d)][:-keep]:
        discard(directory)
    for leftover in [*root.glob(f"{SAVING}*"), *root.glob(f"{REPLACED}*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def discard(directory: Path) -> None:
    """Remove a checkpoint: it stops being one at once, whatever happens during the removal."""
    doomed = directory.with_name(f"{REPLACED}{directory.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    directory.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def read_manifest(directory: Path, *, check_files: bool = True) -> Manifest:
    """The manifest of a complete checkpoint.

    Args:
        check_files: compare every file's size with the manifest; one rank of many is enough to do that.

    Raises:
        CheckpointError: there is none, a file is missing or has another size, or it was written by another format.
    """
    path = directory / MANIFEST
    try:
        parsed: object = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            str(path), "missing", "a complete checkpoint has a manifest", "choose another checkpoint"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(str(path), str(error), "the manifest is JSON", "choose another checkpoint") from error
    content = cast(dict[str, Any], parsed) if isinstance(parsed, dict) else {}
    if content.get("format") != FORMAT or content.get("complete") is not True:
        raise CheckpointError(
            str(path), "unknown format", f"this version of mslime reads checkpoints of format {FORMAT}",
            "use the version that wrote it",
        )  # fmt: skip
    manifest = Manifest(**content)
    for name, size in manifest.files.items() if check_files else ():
        found = (directory / name).stat().st_size if (directory / name).is_file() else None
        if found != size:
            raise CheckpointError(
                str(directory / name), "missing" if found is None else f"{found} bytes",
                f"the manifest says {size} bytes", "restore the file, or resume from an older checkpoint",
            )  # fmt: skip
    return manifest


def read_extra(directory: Path) -> dict[str, Any]:
    """What was saved as `extra`, binary values included. Raises CheckpointError when the checkpoint is not complete."""
    return extra_of(directory, read_manifest(directory))


def extra_of(directory: Path, manifest: Manifest) -> dict[str, Any]:
    """`extra` of a checkpoint whose manifest has been read."""
    binary = [directory / name for name in manifest.files if name.startswith("extra/")]
    return manifest.extra | {path.stem: path.read_bytes() for path in binary}


def write_extra(directory: Path, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Write the binary values of `extra` as files; returns the others, for the manifest."""
    binary = {key: value for key, value in extra.items() if isinstance(value, bytes)}
    for key, value in binary.items():
        (directory / "extra").mkdir(exist_ok=True)
        (directory / "extra" / f"{key}.bin").write_bytes(value)
    return {key: value for key, value in extra.items() if key not in binary}


def begin(directory: Path) -> Path:
    """An empty hidden directory beside `directory`, to write the checkpoint into."""
    saving = saving_directory(directory)
    shutil.rmtree(saving, ignore_errors=True)
    saving.mkdir(parents=True)
    return saving


def complete(saving: Path, directory: Path, layout: str, world_size: int, extra: dict[str, Any]) -> None:
    """Everything is written: sync it to the disk, write the manifest, and give the checkpoint its name."""
    paths = sorted(path for path in saving.rglob("*") if path.is_file())
    for path in paths:
        _sync(path)
    files = {str(path.relative_to(saving)): path.stat().st_size for path in paths}
    manifest = Manifest(layout, world_size, extra, files)
    (saving / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1))
    _sync(saving / MANIFEST)
    _sync(saving)
    replaced = directory.with_name(f"{REPLACED}{directory.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if directory.exists():  # a run that resumed from an older checkpoint reached this step again
        directory.rename(replaced)
    saving.rename(directory)
    _sync(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _is_complete(directory: Path) -> bool:
    try:
        read_manifest(directory)
    except CheckpointError:
        return False
    return True


def _steps(root: Path) -> list[Path]:
    """Everything that has a checkpoint's name, oldest first."""
    found = [(int(match[1]), path) for path in root.glob("step_*") if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
