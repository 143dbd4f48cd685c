"""Checkpoint directories: completeness, manifest and checksums, choice of the one to resume from, retention. Needs
neither torch nor megatron, so the driver can choose one before any trainer runs; `backends.megatron.checkpoint` fills
them.

A checkpoint is written into a hidden sibling directory, its manifest last, and then renamed. Under its own name it is
either absent or complete. The manifest holds every file's size and checksum: later damage is detected and its file is
named. A damaged checkpoint is never resumed from or skipped silently.

    <root>/step_10/manifest.json       files with sizes and checksums, layout, extra; written last
                  /rng/rank_00000.npz  random number generators of each rank
                  /rollouts.npz        work in flight, written by the rollout service
                  /...                 megatron-core's torch_dist files (weights, optimizer, schedule)
    <root>/critic/step_10/...          the same for PPO's critic
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

from mslime import __version__
from mslime.config.base import Resume
from mslime.config.errors import CheckpointError, ConfigError

# SHA-256 of files. It is computed during the write, which saves a second read, and compared at every read.
#
# docs/decisions/0003-models-and-checkpoints.md gives the reasons for SHA-256.

_READ_BYTES = 8 << 20
_OVERLAPPED_BYTES = 1 << 20  # from this size on, summing in a thread during the write pays off
_THREADS = 8
HINT = (
    "restore the file, delete the checkpoint, or set checkpoint.resume: older to continue from the newest undamaged one"
)


@dataclass(frozen=True)
class FileSum:
    """Expected size and checksum of a file.

    Attributes:
        size: in bytes.
        sha256: in hexadecimal; None in checkpoints of format 1.
    """

    size: int
    sha256: str | None


class SummedFile(io.RawIOBase):
    """New file that is written sequentially and summed during the write.

    Args:
        path: replaced if it exists.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("wb")
        self._hash = hashlib.sha256()
        self._at = 0
        self._thread: ThreadPoolExecutor | None = None

    @property
    def sum(self) -> FileSum:
        """Sum of all bytes written so far."""
        return FileSum(self._at, self._hash.hexdigest())

    def write(self, data: Any, /) -> int:
        """Append bytes; returns how many. Raises OSError if the file system does."""
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
        """Sync to the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def flush(self) -> None:
        """Flush to the operating system."""
        if not self._file.closed:
            self._file.flush()

    def fileno(self) -> int:
        """Descriptor of the underlying file."""
        self._file.flush()
        return self._file.fileno()

    def writable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Never: summed bytes cannot be rewritten."""
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


def sum_file(path: Path, advance: Callable[[int], object] = lambda nbytes: None) -> FileSum:
    """Sum of an existing file; `advance` counts its bytes. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(_READ_BYTES, os.fstat(file.fileno()).st_size + 1)))
        while read := file.readinto(buffer):
            digest.update(buffer[:read])
            size += read
            advance(read)
    return FileSum(size, digest.hexdigest())


def check_sizes(directory: Path, files: Mapping[str, FileSum]) -> None:
    """Compare sizes only. Raises CheckpointError naming the first file that is missing or has another size."""
    for name, expected in files.items():
        path, found = directory / name, None
        with suppress(OSError):  # an invalid file name, or a directory without access
            found = path.stat().st_size if path.is_file() else None
        if found != expected.size:
            raise CheckpointError(
                str(path), "missing" if found is None else f"{found} bytes",
                f"the manifest has {expected.size} bytes", HINT,
            )  # fmt: skip


def check_sums(directory: Path, files: Mapping[str, FileSum], threads: int = _THREADS) -> None:
    """Compare files with their checksums in several threads; only sizes for files without a checksum.

    Raises:
        CheckpointError: naming the first file, by name, that is missing or damaged.
    """
    check_sizes(directory, files)
    with ThreadPoolExecutor(threads) as pool:
        names = sorted(files)
        for error in list(pool.map(damage, [directory / name for name in names], [files[name] for name in names])):
            if error is not None:
                raise error


def damage(
    path: Path, expected: FileSum, advance: Callable[[int], object] = lambda nbytes: None, hint: str = HINT
) -> CheckpointError | None:
    """Error of a file that differs from its checksum; None if it is equal, or has no checksum."""
    if expected.sha256 is None:
        return None
    try:
        found = sum_file(path, advance)
    except OSError as error:
        return CheckpointError(str(path), error.strerror, "must be readable", hint)
    if found == expected:
        return None
    return CheckpointError(
        str(path), f"sha256 {str(found.sha256)[:16]}...",
        f"the manifest has {expected.sha256[:16]}...: the file is damaged", hint,
    )  # fmt: skip


def share(files: Mapping[str, FileSum], rank: int, ranks: int) -> dict[str, FileSum]:
    """Files that one of several readers checks, balanced by bytes. The result is the same on every rank."""
    loads, mine = [0] * ranks, dict[str, FileSum]()
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        lightest = loads.index(min(loads))
        loads[lightest] += files[name].size
        if lightest == rank:
            mine[name] = files[name]
    return mine


# `manifest.json` of a checkpoint: every file with its size and checksum, and the data saved beside the tensors. It is
# written last and carries its own checksum, which reveals damage. The manifest of another version of mslime is read, or
# rejected with a CheckpointError; it never causes a traceback.

FORMAT = 2
"""1: sizes of files only. 2: checksums of files and of the manifest itself."""
NAME = "manifest.json"
_TYPES: dict[str, type] = {"layout": str, "world_size": int, "extra": dict, "files": dict, "complete": bool}
_NEWER = f"resume with the version of mslime that wrote it; else {HINT}"


@dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`.

    Attributes:
        layout: the parallel layout that wrote it, for people and for the random number generators.
        world_size: ranks that wrote it.
        extra: JSON values saved by the caller; binary values are separate files.
        files: expected size and checksum of every other file, by path relative to the checkpoint.
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
        """Whether its files carry checksums; files of format 1 do not."""
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
    content = json.loads(json.dumps(content))  # as it is read back: keys are text, tuples are lists
    write_summed(directory / NAME, json.dumps(content | {"sha256": _digest(content)}, indent=1).encode())


def read_manifest(directory: Path, *, check_files: bool = True) -> Manifest:
    """Manifest of a complete checkpoint.

    Args:
        check_files: compare every file's size with the manifest; one rank is enough for this.

    Raises:
        CheckpointError: it is missing, damaged, or of an unsupported version; or a file is missing or has another size.
    """
    path = directory / NAME
    content = _read(path)
    version: object = content.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(str(path), version, "the format is missing: the file is damaged", HINT)
    if version > FORMAT:
        raise CheckpointError(
            str(path), f"format {version}",
            f"was written by a newer mslime ({_writer(content)}); this one, {__version__}, reads formats 1 to {FORMAT}",
            _NEWER,
        )  # fmt: skip
    if version > 1 and content.pop("sha256", None) != _digest(content):
        raise CheckpointError(str(path), "wrong checksum", "the manifest is damaged", HINT)
    manifest = _parsed(path, content, version)
    if check_files:
        check_sizes(directory, manifest.files)
    return manifest


def _read(path: Path) -> dict[str, Any]:
    try:
        parsed: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(str(path), "missing", "a complete checkpoint has a manifest", HINT) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(str(path), str(error), "is not valid JSON: the manifest is damaged", HINT) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(str(path), type(parsed).__name__, "must be a JSON object", HINT)
    return cast("dict[str, Any]", parsed)


def _parsed(path: Path, content: Mapping[str, Any], version: int) -> Manifest:
    """Manifest from undamaged content. Raises CheckpointError if its version is not supported."""
    known = {*_TYPES, "format", "written_by"} if version > 1 else {*_TYPES, "format"}
    if known != set(content):
        unknown, missing = sorted(content.keys() - known), sorted(known - content.keys())
        raise CheckpointError(
            str(path), f"unknown keys {unknown}, missing keys {missing}",
            f"was written by another mslime ({_writer(content)}) than this one, {__version__}", _NEWER,
        )  # fmt: skip
    for key, kind in _TYPES.items():
        if not isinstance(content[key], kind) or (kind is int and isinstance(content[key], bool)):
            raise CheckpointError(f"{path}: {key}", content[key], f"must be a {kind.__name__}", HINT)
    if content["complete"] is not True:
        raise CheckpointError(f"{path}: complete", False, "the checkpoint is not marked as complete", HINT)
    files = {name: _file_sum(path, name, entry, version) for name, entry in content["files"].items()}
    return Manifest(
        content["layout"], content["world_size"], content["extra"], files, version,
        str(content.get("written_by", "before checksums")),
    )  # fmt: skip


def _file_sum(path: Path, name: str, entry: object, version: int) -> FileSum:
    """Sum from one entry of `files`. Raises CheckpointError if it is malformed or its path leaves the checkpoint."""
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
            HINT,
        )
    return FileSum(cast(int, size), cast("str | None", digest))


def _writer(content: Mapping[str, Any]) -> str:
    return str(content.get("written_by", "unknown version"))[:40]


def _digest(content: Mapping[str, Any]) -> str:
    """Digest of the content that ignores white space and the order of keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


ROLLOUTS, OUTLINE = "rollouts.npz", "rollouts_outline.npz"
"""File of the rollout service, or of its outline if the service is lost."""
_OLD_ROLLOUTS = "extra/rollouts.bin"  # of format 1
CRITIC = "critic"
"""Key in `extra`: whether a critic was saved too."""
SAVING, REPLACED, DAMAGED = ".saving-", ".replaced-", "damaged-"
_STEP = re.compile(r"step_(\d+)")


def step_directory(root: Path, step: int) -> Path:
    """Directory of the checkpoint that continues at `step`."""
    return root / f"step_{step}"


def critic_directory(directory: Path) -> Path:
    """Directory of the critic that belongs to a checkpoint: a checkpoint of its own, completed before the policy's."""
    return directory.parent / "critic" / directory.name


def saving_directory(directory: Path) -> Path:
    """Directory for the checkpoint until it is complete."""
    return directory.with_name(f"{SAVING}{directory.name}")


def rollouts_file(manifest: Manifest) -> str | None:
    """Name of the rollout service's file in a checkpoint; None for supervised training."""
    return next((name for name in (OUTLINE, ROLLOUTS, _OLD_ROLLOUTS) if name in manifest.files), None)


# ------------------------------------------------------------------------------------------------------------ writing


def begin(directory: Path) -> Path:
    """Create an empty hidden directory beside `directory`, to write the checkpoint into."""
    saving = saving_directory(directory)
    shutil.rmtree(saving, ignore_errors=True)
    saving.mkdir(parents=True)
    return saving


def complete(
    saving: Path, directory: Path, layout: str, world_size: int, extra: dict[str, Any], files: Mapping[str, FileSum]
) -> None:
    """Write the manifest and rename the directory, once everything else is written and synced.

    Args:
        extra: JSON values.
        files: sums that the writers computed. All other files are small: they are read, summed and synced here.

    Raises:
        CheckpointError: a file has changed since its writer finished.
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
class ChosenCheckpoint:
    """Checkpoint from which a run continues.

    Attributes:
        directory: the checkpoint; None if there is none.
        passed_over: newer, damaged ones under their new names, each with its damage.
    """

    directory: Path | None
    passed_over: tuple[tuple[Path, CheckpointError], ...] = field(default=())


def choose(root: Path, resume: Resume) -> ChosenCheckpoint:
    """Choose the checkpoint under `root` to continue from, by `checkpoint.resume`.

    `auto` takes the newest, whose manifest and sizes must be right. Ranks compare its checksums in parallel when they
    load it. `older` reads whole checkpoints, newest first, until one is undamaged, and sets the damaged ones aside.
    `never` allows none.

    Raises:
        CheckpointError: the newest is damaged (`auto`), or all are (`older`).
        ConfigError: a checkpoint exists (`never`).
    """
    found = steps(root)
    if not found:
        return ChosenCheckpoint(None)
    if resume == "never":
        raise ConfigError(
            "checkpoint.resume", "never", f"{found[-1]} exists, and a new run would overwrite it",
            "give the run another name, or move the directory away",
        )  # fmt: skip
    return ChosenCheckpoint(newest(root)) if resume == "auto" else _undamaged(found)


def newest(root: Path) -> Path | None:
    """Newest checkpoint under `root`; None if there is none. Raises CheckpointError if it is damaged."""
    found = steps(root)
    if not found:
        return None
    _manifests(found[-1])
    return found[-1]


def check_checkpoint(directory: Path) -> None:
    """Read all of a checkpoint, its critic included, and compare checksums. Raises CheckpointError naming the file."""
    for part, manifest in _manifests(directory).items():
        check_sums(part, manifest.files)


def _manifests(directory: Path) -> dict[Path, Manifest]:
    """Manifests of a checkpoint and of its critic, whose files have the right sizes. Raises CheckpointError."""
    found = {directory: read_manifest(directory)}
    if found[directory].extra.get(CRITIC):
        critic = critic_directory(directory)
        found[critic] = read_manifest(critic)
    return found


def _undamaged(found: Sequence[Path]) -> ChosenCheckpoint:
    """Newest undamaged checkpoint; damaged newer ones are renamed, which hides them from later starts."""
    damaged: list[tuple[Path, CheckpointError]] = []
    for directory in reversed(found):
        try:
            check_checkpoint(directory)
        except CheckpointError as error:
            damaged.append((directory, error))
            continue
        return ChosenCheckpoint(directory, tuple((_set_aside(path), error) for path, error in damaged))
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
    """Select the steps of `saved` to keep: the newest `keep`, multiples of `keep_every` (0: none), and the best.

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
    """Remove complete checkpoints that `keep` does not select, and leftovers of interrupted saves or removals."""
    complete_ones = {step_of(d): d for d in steps(root) if _is_complete(d)}
    kept = keep(list(complete_ones))
    for step, directory in complete_ones.items():
        if step not in kept:
            discard(directory)
    for leftover in [*root.glob(f"{SAVING}*"), *root.glob(f"{REPLACED}*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def discard(directory: Path) -> None:
    """Remove a checkpoint. It is invalid from the first moment, even if the removal is interrupted."""
    doomed = directory.with_name(f"{REPLACED}{directory.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    directory.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def steps(root: Path) -> list[Path]:
    """Paths named like checkpoints, complete or not, oldest first."""
    found = [(step, path) for path in root.glob("step_*") if (step := step_of(path)) >= 0]
    return [path for _, path in sorted(found) if path.is_dir()]


def newest_step(run_dir: Path) -> int:
    """Step of a run's newest checkpoint; 0 without one."""
    found = steps(run_dir / "checkpoints")
    return step_of(found[-1]) if found else 0


def step_of(directory: Path) -> int:
    """Step in a checkpoint's name; -1 for any other name."""
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
