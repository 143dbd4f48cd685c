"""Runs a conversion: several processes write files, a journal records finished ones, and the directory is renamed to
its target once all files are written and verified.

Everything happens in a hidden directory beside the target. Finished files of a killed run are kept there and reused by
the next run of the same conversion of the same source; anything else in it is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from mslime.config.errors import CheckpointError, ConfigError
from mslime.convert.hf import publish, staging_directory
from mslime.convert.safetensors_files import Advance, ByteRange, Written, verify
from mslime.offline.workers import Workers

JOURNAL = "journal.jsonl"
CHECKSUMS = "checksums.json"
_FORMAT = 1
_HEADROOM = 1.02


@dataclass(frozen=True)
class FileTask:
    """One output file.

    Attributes:
        file: its name.
        nbytes: of the tensors in it.
        names: its inputs, in order, in the job's own terms.
    """

    file: str
    nbytes: int
    names: tuple[str, ...]


class ConversionJob(Protocol):
    """A conversion. It is pickled to worker processes, so it opens its source only when a task needs it."""

    @property
    def tasks(self) -> Sequence[FileTask]:
        """All output files that hold tensors."""
        ...

    def identity(self) -> Mapping[str, object]:
        """JSON values that are equal for two runs exactly when they write the same files."""
        ...

    def write(self, task: FileTask, path: Path, advance: Advance) -> Written:
        """Write one file, in any process; `advance` counts the bytes of `task.nbytes`."""
        ...

    def finish(self, directory: Path, written: Sequence[Written]) -> None:
        """Write the small files: index or metadata, config.json, tokenizer."""
        ...


class ConversionProgress(Protocol):
    """Display of a conversion's progress."""

    def phase(self, name: str, total_bytes: int, done_bytes: int) -> None:
        """Start a new phase, of which an earlier run has done `done_bytes`."""
        ...

    def advance(self, nbytes: int) -> None:
        """Advance by `nbytes`."""
        ...


class Silent:
    """Progress display that shows nothing."""

    def phase(self, name: str, total_bytes: int, done_bytes: int) -> None:
        """Does nothing."""

    def advance(self, nbytes: int) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class Outcome:
    """Result of a conversion.

    Attributes:
        files, nbytes: of tensors, in total.
        kept_files: finished by an earlier run.
    """

    files: int
    nbytes: int
    kept_files: int


def run_job(
    job: ConversionJob,
    target: Path,
    *,
    workers: int = 1,
    verified: bool = True,
    progress: ConversionProgress | None = None,
) -> Outcome:
    """Convert into `target`, which appears complete or not at all.

    Args:
        workers: processes; 1 works in this one.
        verified: read every file again at the end and compare checksums.

    Raises:
        ConfigError: the target exists, or another conversion is writing it.
        CheckpointError: the source is damaged, the disk full, or a worker died. The next run keeps finished files.
    """
    progress = progress or Silent()
    refuse_existing(target)
    staging = staging_directory(target)
    staging.mkdir(parents=True, exist_ok=True)
    with _only_writer(staging), _without_leftovers(staging), Workers(workers) as pool:
        refuse_existing(target)  # another run may have finished meanwhile
        journal = _Journal(staging, job)
        remaining = [task for task in job.tasks if task.file not in journal.written]
        nbytes, left = sum(task.nbytes for task in job.tasks), sum(task.nbytes for task in remaining)
        _check_space(staging, left)
        kept = len(journal.written)
        progress.phase("convert", nbytes, nbytes - left)
        for written in pool.run(_Writing(job, staging).run, remaining, progress.advance):
            journal.add(written)
        files = [journal.written[task.file] for task in job.tasks]
        if verified:
            verify_files(staging, files, pool, progress, discard=True)
        try:
            job.finish(staging, files)
            _write_checksums(staging, files)
            journal.close()
            publish(target)
        except OSError as error:
            raise CheckpointError(
                str(error.filename or staging), error.strerror, "the last small files could not be written",
                "mend that, then run the same command again: finished files are kept",
            ) from error  # fmt: skip
    return Outcome(len(files), nbytes, kept)


def verify_files(
    directory: Path, files: Sequence[Written], pool: Workers, progress: ConversionProgress, *, discard: bool = False
) -> None:
    """Read files from the disk again.

    Args:
        discard: remove a file that differs, so that it is written again.

    Raises:
        CheckpointError: naming the first tensor whose checksum differs.
    """
    progress.phase("verify", sum(span.length for written in files for span in written.spans.values()), 0)
    for _ in pool.run(_Verifying(directory, discard).run, files, progress.advance):
        pass


@dataclass(frozen=True)
class _Writing:
    """Writes the files of a job, in any process."""

    job: ConversionJob
    staging: Path

    def run(self, task: FileTask, advance: Advance) -> Written:
        return self.job.write(task, self.staging / task.file, advance)


@dataclass(frozen=True)
class _Verifying:
    """Verifies the files of a directory, in any process."""

    directory: Path
    discard: bool

    def run(self, written: Written, advance: Advance) -> None:
        try:
            verify(self.directory, written, advance)
        except CheckpointError:
            if self.discard:
                (self.directory / written.file).unlink(missing_ok=True)
            raise


def refuse_existing(target: Path) -> None:
    """Raise ConfigError if the final name exists already."""
    if target.exists():
        raise ConfigError(
            "output directory", str(target), "exists already", "choose a new directory, or remove this one first"
        )


def source_identity(files: Sequence[Path]) -> list[list[object]]:
    """Name, size and modification time of the files that a conversion reads."""
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(files)]


class _Journal:
    """Journal of a staging directory: a line that identifies the conversion, then one JSON line per finished file."""

    def __init__(self, staging: Path, job: ConversionJob) -> None:
        self._path = staging / JOURNAL
        header = {"format": _FORMAT, "job": _fingerprint(job)}
        self.written = {written.file: written for written in _finished(self._path, header)}
        for path in staging.iterdir():
            if path.name not in self.written and path.name != JOURNAL:
                path.unlink() if path.is_file() else shutil.rmtree(path)
        lines = [header, *(_to_json(written) for written in self.written.values())]
        fresh = self._path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        fresh.rename(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def add(self, written: Written) -> None:
        """Record a file that is finished and on the disk under its name."""
        self.written[written.file] = written
        self._file.write(json.dumps(_to_json(written)) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Remove the data for later runs, once the conversion is complete."""
        self._file.close()
        self._path.unlink()


def _finished(path: Path, header: Mapping[str, object]) -> list[Written]:
    """Finished files in a journal of the same conversion that exist in their full size."""
    lines = _complete_lines(path)
    if not lines or lines[0] != header:
        return []
    found = [_from_json(line) for line in lines[1:]]
    return [
        written
        for written in found
        if (path.parent / written.file).is_file() and (path.parent / written.file).stat().st_size == written.size
    ]


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines of a journal, without a truncated last line."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        try:
            found.append(cast("dict[str, Any]", json.loads(line)))
        except json.JSONDecodeError:
            break
    return found


def _to_json(written: Written) -> dict[str, Any]:
    spans = {name: [span.start, span.length, span.crc] for name, span in written.spans.items()}
    return {"file": written.file, "size": written.size, "spans": spans, "records": dict(written.records)}


def _from_json(line: Mapping[str, Any]) -> Written:
    spans = {name: ByteRange(*span) for name, span in line["spans"].items()}
    return Written(line["file"], line["size"], spans, {name: tuple(pair) for name, pair in line["records"].items()})


def _fingerprint(job: ConversionJob) -> str:
    text = json.dumps([job.identity(), [asdict(task) for task in job.tasks]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_space(staging: Path, nbytes: int) -> None:
    free = shutil.disk_usage(staging).free
    if free < nbytes * _HEADROOM:
        raise CheckpointError(
            str(staging.parent), f"{free} bytes free", f"the conversion writes {nbytes} bytes more",
            "free space there, or choose an output directory on a larger disk",
        )  # fmt: skip


def _write_checksums(directory: Path, files: Sequence[Written]) -> None:
    """Write CRC-32 of every tensor's bytes by file, for `inspect --verify`."""
    found = {written.file: _to_json(written) for written in files}
    (directory / CHECKSUMS).write_text(json.dumps(found), encoding="utf-8")


def read_checksums(directory: Path) -> list[Written] | None:
    """Checksums that a conversion left in its output, or None.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = directory / CHECKSUMS
    if not path.exists():
        return None
    try:
        return [_from_json(entry) for entry in json.loads(path.read_text(encoding="utf-8")).values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(str(path), str(error), "must be the JSON that a conversion wrote", "remove it") from error


@contextlib.contextmanager
def _only_writer(staging: Path) -> Generator[None]:
    """Hold a lock on the directory; the system releases it when this process ends, even after a crash."""
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(
            "output directory", str(staging), "another conversion is writing it", "wait for it, or end it first"
        ) from error
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _without_leftovers(staging: Path) -> Generator[None]:
    """Remove unfinished files if the block fails: the disk may be full of them."""
    try:
        yield
    except BaseException:
        for part in staging.glob(".*.part"):
            part.unlink(missing_ok=True)
        raise
