"""Checkpoint directories: what makes one complete, its manifest and checksums, which is resumed from, which are kept.
Needs neither
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

import hashlib
import io
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

from mslime import __version__
from mslime.config.base import Resume
from mslime.config.errors import CheckpointError, ConfigError

# SHA-256 of files: summed while they are written, so that nothing is read again, and compared when they are read.
#
# Why SHA-256 and not a faster sum is in docs/decisions/0003-models-and-checkpoints.md.

_READ_BYTES = 8 << 20
_OVERLAPPED_BYTES = 1 << 20  # from here on it pays to sum in a thread while the system writes
_THREADS = 8
WAY_OUT = (
    "restore the file, delete the checkpoint, or set checkpoint.resume: older to continue from the newest undamaged one"
)


@dataclass(frozen=True)
class FileSum:
    """What a file must be.

    Attributes:
        size: in bytes.
        sha256: in hexadecimal; None in checkpoints from before files were summed.
    """

    size: int
    sha256: str | None


class SummedFile(io.RawIOBase):
    """A new file, written from front to back and summed on the way.

    Args:
        path: replaced when it exists.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb")
        self._hash = hashlib.sha256()
        self._at = 0
        self._thread: ThreadPoolExecutor | None = None

    @property
    def sum(self) -> FileSum:
        """Of everything written so far."""
        return FileSum(self._at, self._hash.hexdigest())

    def write(self, data: Any, /) -> int:
        """Append bytes; returns how many. Raises OSError when the file system refuses."""
        view = memoryview(data).cast("B")
        if len(view) < _OVERLAPPED_BYTES:
            self._file.write(view)
            self._hash.update(view)
        else:
            self._thread = self._thread or ThreadPoolExecutor(1)
            summing = self._thread.submit(self._hash.update, view)
            try:
                self._file.write(view)
            finally:
                summing.result()  # the caller may reuse the memory
        self._at += len(view)
        return len(view)

    def sync(self) -> None:
        """Bring it to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def flush(self) -> None:
        """To the system."""
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        """Of the file underneath."""
        self._file.flush()
        return self._file.fileno()

    def writable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Never: what was summed cannot be written again."""
        return False

    def tell(self) -> int:
        """Bytes written."""
        return self._at

    def close(self) -> None:
        """Close the file and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()
        self._file.close()
        super().close()


def write_summed(path: Path, data: bytes) -> FileSum:
    """Write a whole small file to the disk; returns its sum."""
    with SummedFile(path) as file:
        file.write(data)
        file.sync()
        return file.sum


def sum_file(path: Path) -> FileSum:
    """The sum of a file that is there. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(_READ_BYTES, os.fstat(file.fileno()).st_size + 1)))
        while read := file.readinto(buffer):
            digest.update(buffer[:read])
            size += read
    return FileSum(size, digest.hexdigest())


def check_sizes(directory: Path, files: Mapping[str, FileSum]) -> None:
    """Compare sizes, without reading. Raises CheckpointError naming the first file that is missing or another."""
    for name, expected in files.items():
        path, found = directory / name, None
        with suppress(OSError):  # a name that no file system takes, a directory that may not be entered
            found = path.stat().st_size if path.is_file() else None
        if found != expected.size:
            raise CheckpointError(
                str(path), "missing" if found is None else f"{found} bytes",
                f"the manifest has {expected.size} bytes", WAY_OUT,
            )  # fmt: skip


def check_sums(directory: Path, files: Mapping[str, FileSum], threads: int = _THREADS) -> None:
    """Read the files and compare them with their sums, several side by side; sizes only where there is no sum.

    Raises:
        CheckpointError: naming the first file, by name, that is missing or damaged.
    """
    check_sizes(directory, files)
    with ThreadPoolExecutor(threads) as pool:
        names = sorted(files)
        for error in list(pool.map(_damage, [directory / name for name in names], [files[name] for name in names])):
            if error is not None:
                raise error


def _damage(path: Path, expected: FileSum) -> CheckpointError | None:
    if expected.sha256 is None:
        return None
    try:
        found = sum_file(path)
    except OSError as error:
        return CheckpointError(str(path), error.strerror, "must be readable", WAY_OUT)
    if found == expected:
        return None
    return CheckpointError(
        str(path), f"sha256 {str(found.sha256)[:16]}...",
        f"the manifest has {expected.sha256[:16]}...: the file is not what was written", WAY_OUT,
    )  # fmt: skip


def share(files: Mapping[str, FileSum], rank: int, ranks: int) -> dict[str, FileSum]:
    """The files that one of several readers checks, so that each reads about as many bytes: the same on every rank."""
    loads, mine = [0] * ranks, dict[str, FileSum]()
    for name in _largest_first(files):
        lightest = loads.index(min(loads))
        loads[lightest] += files[name].size
        if lightest == rank:
            mine[name] = files[name]
    return mine


def _largest_first(files: Mapping[str, FileSum]) -> Iterable[str]:
    return sorted(files, key=lambda name: (-files[name].size, name))


# `manifest.json` of a checkpoint: every file with its size and checksum, and what belongs to the checkpoint beside its
# tensors. It is written last and carries a checksum of itself, so that a damaged one is never believed. A manifest that
# another version of mslime wrote is read, or refused by saying so; it never ends in a traceback.

FORMAT = 2
"""1: sizes of files only. 2: checksums of files and of the manifest itself."""
NAME = "manifest.json"
_TYPES: dict[str, type] = {"layout": str, "world_size": int, "extra": dict, "files": dict, "complete": bool}
_NEWER = f"resume with the version of mslime that wrote it; else {WAY_OUT}"


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        layout: the parallel layout that wrote it, for people and for the random number generators.
        world_size: ranks that wrote it.
        extra: what the caller saved with it, JSON values; binary values are files of their own.
        files: what every other file must be, by path relative to the checkpoint.
        format: of this file.
        written_by: version of mslime.
    """

    layout: str
    world_size: int
    extra: dict[str, Any]
    files: dict[str, FileSum]
    format: int = FORMAT
    written_by: str = __version__

    @property
    def summed(self) -> bool:
        """Whether its files carry checksums; those of format 1 do not."""
        return self.format > 1


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write it to the disk. Raises TypeError when `extra` is not JSON."""
    content: dict[str, Any] = {
        "format": manifest.format,
        "complete": True,
        "written_by": manifest.written_by,
        "layout": manifest.layout,
        "world_size": manifest.world_size,
        "extra": manifest.extra,
        "files": {name: {"bytes": s.size, "sha256": s.sha256} for name, s in sorted(manifest.files.items())},
    }
    content = json.loads(json.dumps(content))  # what a reader will find: keys are text, tuples are lists
    write_summed(directory / NAME, json.dumps(content | {"sha256": _digest(content)}, indent=1).encode())


def read_manifest(directory: Path, *, check_files: bool = True) -> Manifest:
    """The manifest of a complete checkpoint.

    Args:
        check_files: compare every file's size with the manifest; one rank of many is enough to do that.

    Raises:
        CheckpointError: there is none, it is damaged or of a version that this one cannot read, or a file is missing
            or has another size.
    """
    path = directory / NAME
    content = _read(path)
    version: object = content.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(str(path), version, "must name its format: the file is damaged", WAY_OUT)
    if version > FORMAT:
        raise CheckpointError(
            str(path), f"format {version}",
            f"was written by a newer mslime ({_writer(content)}); this one, {__version__}, reads formats 1 to {FORMAT}",
            _NEWER,
        )  # fmt: skip
    if version > 1 and content.pop("sha256", None) != _digest(content):
        raise CheckpointError(str(path), "another checksum", "must be as it was written: it is damaged", WAY_OUT)
    manifest = _parsed(path, content, version)
    if check_files:
        check_sizes(directory, manifest.files)
    return manifest


def _read(path: Path) -> dict[str, Any]:
    try:
        parsed: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            str(path),
            "missing",
            "a complete checkpoint has a manifest",
            WAY_OUT,
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(str(path), str(error), "the manifest is JSON: it is damaged", WAY_OUT) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(str(path), type(parsed).__name__, "the manifest is a JSON object", WAY_OUT)
    return cast("dict[str, Any]", parsed)


def _parsed(path: Path, content: Mapping[str, Any], version: int) -> Manifest:
    """The manifest of a content that is as it was written. Raises CheckpointError when it is another version's."""
    known = {*_TYPES, "format", "written_by"} if version > 1 else {*_TYPES, "format"}
    if known != set(content):
        unknown, missing = sorted(content.keys() - known), sorted(known - content.keys())
        raise CheckpointError(
            str(path), f"unknown keys {unknown}, missing keys {missing}",
            f"is of another version of mslime ({_writer(content)}) than {__version__}", _NEWER,
        )  # fmt: skip
    for key, kind in _TYPES.items():
        if not isinstance(content[key], kind) or (kind is int and isinstance(content[key], bool)):
            raise CheckpointError(f"{path}: {key}", content[key], f"must be a {kind.__name__}", WAY_OUT)
    if content["complete"] is not True:
        raise CheckpointError(f"{path}: complete", False, "the checkpoint is not marked as complete", WAY_OUT)
    files = {name: _file_sum(path, name, entry, version) for name, entry in content["files"].items()}
    return Manifest(
        content["layout"], content["world_size"], content["extra"], files, version,
        str(content.get("written_by", "before checksums")),
    )  # fmt: skip


def _file_sum(path: Path, name: str, entry: object, version: int) -> FileSum:
    """Of one entry of `files`. Raises CheckpointError when it is not one, or the file would lie elsewhere."""
    size: object = entry
    digest: object = None
    if version > 1:
        fields = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
        size, digest = fields.get("bytes"), fields.get("sha256")
    inside = not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts and "\0" not in name
    whole = isinstance(size, int) and not isinstance(size, bool) and size >= 0
    if not inside or not whole or not (isinstance(digest, str) if version > 1 else digest is None):
        raise CheckpointError(
            f"{path}: files: {name!r}",
            str(cast(object, entry))[:80],
            "must be a file inside the checkpoint with its size and checksum",
            WAY_OUT,
        )
    return FileSum(cast(int, size), cast("str | None", digest))


def _writer(content: Mapping[str, Any]) -> str:
    return str(content.get("written_by", "its version is not given"))[:40]


def _digest(content: Mapping[str, Any]) -> str:
    """Of the content whatever its white space and the order of its keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


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
