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
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from mslime.config.errors import CheckpointError, ConfigError, UserError
from mslime.convert.hf import publish, staging_directory
from mslime.convert.safetensors_files import CONVERT_AGAIN, Advance, ByteRange, WrittenFile, verify
from mslime.convert.torch_dist import is_torch_dist
from mslime.data.checkpoints import NAME, FileSum, damage, read_manifest

T = TypeVar("T")
R = TypeVar("R")
Work = Callable[[T, Advance], R]
"""Picklable method that does one task in any process and counts its bytes."""
_REPORT_S = 0.2


class Workers:
    """Processes with a pipe each, started for more than one worker; a context manager that ends them.

    Args:
        size: number of processes; 1 works in this one.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._processes: dict[Connection, BaseProcess] = {}
        self._busy: dict[Connection, object] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()

    def run(self, work: Work[T, R], tasks: Sequence[T], advance: Advance) -> Iterator[R]:
        """Results of all tasks, as they finish; tasks are started in order.

        Raises:
            CheckpointError: raised by a worker, or a worker died.
        """
        if self._size <= 1 or len(tasks) <= 1:
            for task in tasks:
                yield work(task, advance)
            return
        waiting = list(reversed(tasks))
        for pipe in self._started(min(self._size, len(tasks))):
            pipe.send(("work", work))
            self._give(pipe, waiting)
        while self._busy:
            for pipe in wait(list(self._busy)):
                assert isinstance(pipe, Connection)
                kind, content = self._receive(pipe)
                if kind == "bytes":
                    advance(content)
                elif kind == "error":
                    raise content
                else:
                    del self._busy[pipe]
                    self._give(pipe, waiting)
                    yield content

    def _started(self, number: int) -> list[Connection]:
        context = multiprocessing.get_context("spawn")
        while len(self._processes) < number:
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes[ours] = process
        return list(self._processes)[:number]

    def _give(self, pipe: Connection, waiting: list[T]) -> None:
        if waiting:
            task = waiting.pop()
            self._busy[pipe] = task
            pipe.send(("task", task))

    def _receive(self, pipe: Connection) -> tuple[str, Any]:
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[pipe]
            process.join()
            raise CheckpointError(
                f"worker process {process.pid}", f"exit code {process.exitcode}",
                f"ended during its work ({self._busy[pipe]!s:.100}); the system may have killed it for its memory use",
                "run the same command again, with fewer --workers: finished files are kept",
            ) from None  # fmt: skip


def _live(pipe: Connection) -> None:
    """Main loop of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    counter = _Counter(pipe)
    work: Work[Any, Any] | None = None
    while True:
        try:
            kind, content = pipe.recv()
        except EOFError:
            return
        if kind == "work":
            work = content
            continue
        assert work is not None
        try:
            result = work(content, counter.advance)
        except Exception as error:
            if not isinstance(error, UserError):
                error.add_note(traceback.format_exc())  # tracebacks do not travel between processes
            pipe.send(("error", error))
            return
        counter.flush()
        pipe.send(("done", result))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


class _Counter:
    """Adds up bytes and sends them to the parent a few times a second."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._pending, self._sent_at = pipe, 0, time.monotonic()

    def advance(self, nbytes: int) -> None:
        """Add `nbytes`."""
        self._pending += nbytes
        if time.monotonic() - self._sent_at > _REPORT_S:
            self.flush()

    def flush(self) -> None:
        """Send bytes that are not sent yet."""
        self._pipe.send(("bytes", self._pending))
        self._pending, self._sent_at = 0, time.monotonic()


JOURNAL = "journal.jsonl"
CHECKSUMS = "checksums.json"
Checksums = FileSum | WrittenFile
"""Checksum of a whole file, or those of its tensors."""
_RESTORE_TRAINED = "restore the file, or use another checkpoint"
_RESTORE_CONVERTED = f"restore the file; if it was changed on purpose, delete {CHECKSUMS} beside it"
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


class ReopensFiles:
    """An object that is pickled without its open files, which the cached property `_opened` of a subclass holds."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_opened"}


class ConversionJob(ReopensFiles, ABC):
    """A conversion. It is pickled to worker processes, and opens its source anew in each.

    Attributes:
        tasks: all output files that hold tensors.
        sources: the files that it reads.
    """

    tasks: Sequence[FileTask]
    sources: Sequence[Path]

    @abstractmethod
    def identity(self) -> Mapping[str, object]:
        """JSON values that are equal for two runs exactly when they write the same files."""

    @abstractmethod
    def write(self, task: FileTask, path: Path, advance: Advance) -> WrittenFile:
        """Write one file, in any process; `advance` counts the bytes of `task.nbytes`."""

    @abstractmethod
    def finish(self, directory: Path, written: Sequence[WrittenFile]) -> None:
        """Write the small files: index or metadata, config.json, tokenizer."""


class ConversionProgress(Protocol):
    """Display of a conversion's progress."""

    def phase(self, name: str, total_bytes: int, done_bytes: int) -> None:
        """Start a new phase, of which an earlier run has done `done_bytes`."""
        ...

    def advance(self, nbytes: int) -> None:
        """Advance by `nbytes`."""
        ...


class SilentProgress:
    """Progress display that shows nothing."""

    def phase(self, name: str, total_bytes: int, done_bytes: int) -> None:
        """Does nothing."""

    def advance(self, nbytes: int) -> None:
        """Does nothing."""


@dataclass(frozen=True)
class ConversionResult:
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
) -> ConversionResult:
    """Convert into `target`, which appears complete or not at all. Source files are compared with their checksums
    first, if there are any.

    Args:
        workers: processes; 1 works in this one.
        verified: read every written file again at the end and compare checksums.

    Raises:
        ConfigError: the target exists, or another conversion is writing it.
        CheckpointError: the source is damaged, the disk full, or a worker died. The next run keeps finished files.
    """
    progress = progress or SilentProgress()
    refuse_existing(target)
    staging = staging_directory(target)
    staging.mkdir(parents=True, exist_ok=True)
    with _only_writer(staging), Workers(workers) as pool:
        refuse_existing(target)  # another run may have finished meanwhile
        if sums := _source_sums(job.sources):
            verify_files(sums, pool, progress, phase="check")
        journal = _Journal(staging, job)
        remaining = [task for task in job.tasks if task.file not in journal.written]
        nbytes, left = sum(task.nbytes for task in job.tasks), sum(task.nbytes for task in remaining)
        _check_space(staging, left)
        kept = len(journal.written)
        progress.phase("convert", nbytes, nbytes - left)
        for written in pool.run(partial(_write, job, staging), remaining, progress.advance):
            journal.add(written)
        files = [journal.written[task.file] for task in job.tasks]
        if verified:
            verify_files({staging / written.file: written for written in files}, pool, progress, discard=True)
        try:
            job.finish(staging, files)
            checksums = {written.file: _to_json(written) for written in files}  # for `inspect --verify`
            (staging / CHECKSUMS).write_text(json.dumps(checksums), encoding="utf-8")
            journal.close()
            publish(target)
        except OSError as error:
            raise CheckpointError(
                str(error.filename or staging), error.strerror, "the final small files could not be written",
                "fix the cause, then run the same command again: finished files are kept",
            ) from error  # fmt: skip
    return ConversionResult(len(files), nbytes, kept)


def verify_files(
    files: Mapping[Path, Checksums],
    pool: Workers,
    progress: ConversionProgress,
    *,
    phase: str = "verify",
    discard: bool = False,
) -> None:
    """Read files and compare their checksums.

    Args:
        phase: name in the progress.
        discard: remove a file that differs, so that it is written again.

    Raises:
        CheckpointError: naming the first file, and tensor if known, whose checksum differs.
    """
    progress.phase(phase, sum(_summed_bytes(sums) for sums in files.values()), 0)
    for _ in pool.run(partial(_verify, discard), list(files.items()), progress.advance):
        pass


def _summed_bytes(sums: Checksums) -> int:
    return sums.size if isinstance(sums, FileSum) else sum(span.length for span in sums.spans.values())


def _write(job: ConversionJob, staging: Path, task: FileTask, advance: Advance) -> WrittenFile:
    return job.write(task, staging / task.file, advance)


def _verify(discard: bool, file: tuple[Path, Checksums], advance: Advance) -> None:
    path, sums = file
    try:
        if isinstance(sums, WrittenFile):
            verify(path.parent, sums, advance, CONVERT_AGAIN if discard else _RESTORE_CONVERTED)
        elif (error := damage(path, sums, advance, _RESTORE_TRAINED)) is not None:
            raise error
    except CheckpointError:
        if discard:
            path.unlink(missing_ok=True)
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
        text = json.dumps([job.identity(), [asdict(task) for task in job.tasks]], sort_keys=True)
        header = {"format": _FORMAT, "job": hashlib.sha256(text.encode()).hexdigest()}
        self.written = {written.file: written for written in _finished(self._path, header)}
        for path in staging.iterdir():
            if path.name not in self.written and path.name != JOURNAL:
                path.unlink() if path.is_file() else shutil.rmtree(path)
        lines = [header, *(_to_json(written) for written in self.written.values())]
        fresh = self._path.with_suffix(".new")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        fresh.rename(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def add(self, written: WrittenFile) -> None:
        """Record a file that is finished and on the disk under its name."""
        self.written[written.file] = written
        self._file.write(json.dumps(_to_json(written)) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Remove the data for later runs, once the conversion is complete."""
        self._file.close()
        self._path.unlink()


def _finished(path: Path, header: Mapping[str, object]) -> Iterator[WrittenFile]:
    """Finished files in a journal of the same conversion that exist in their full size."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the last line, cut off
            return
        if number == 0:
            if entry != header:
                return
            continue
        written = _from_json(entry)
        file = path.parent / written.file
        if file.is_file() and file.stat().st_size == written.size:
            yield written


def _to_json(written: WrittenFile) -> dict[str, Any]:
    spans = {name: [span.start, span.length, span.crc] for name, span in written.spans.items()}
    return {"file": written.file, "size": written.size, "spans": spans, "records": dict(written.records)}


def _from_json(line: Mapping[str, Any]) -> WrittenFile:
    spans = {name: ByteRange(*span) for name, span in line["spans"].items()}
    return WrittenFile(line["file"], line["size"], spans, {name: tuple(pair) for name, pair in line["records"].items()})


def _check_space(staging: Path, nbytes: int) -> None:
    free = shutil.disk_usage(staging).free
    if free < nbytes * _HEADROOM:
        raise CheckpointError(
            str(staging.parent), f"{free} bytes free", f"the conversion needs {nbytes} more bytes",
            "free space there, or choose an output directory on a larger disk",
        )  # fmt: skip


def read_checksums(directory: Path) -> dict[str, Checksums]:
    """Checksums that lie beside the files of a checkpoint, by name of the file: in the manifest of a training
    checkpoint, or in the output of a conversion. Empty without any.

    Raises:
        CheckpointError: the checksums are damaged.
    """
    if is_torch_dist(directory) and (directory / NAME).exists():
        manifest = read_manifest(directory, check_files=False)
        return {name: total for name, total in manifest.files.items() if total.sha256 is not None}
    path = directory / CHECKSUMS
    if not path.exists():
        return {}
    try:
        found = [_from_json(entry) for entry in json.loads(path.read_text(encoding="utf-8")).values()]
        return {written.file: written for written in found}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(str(path), str(error), "is not a checksum file of a conversion", "remove it") from error


def _source_sums(files: Sequence[Path]) -> dict[Path, Checksums]:
    """Checksums of those files that have one."""
    stored = {directory: read_checksums(directory) for directory in {path.parent for path in files}}
    return {path: stored[path.parent][path.name] for path in sorted(files) if path.name in stored[path.parent]}


@contextlib.contextmanager
def _only_writer(staging: Path) -> Generator[None]:
    """Hold a lock on the directory; the system releases it when this process ends, even after a crash.

    Removes unfinished files if the block fails: the disk may be full of them.
    """
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(
            "output directory", str(staging), "another conversion is writing it", "wait for it, or stop it first"
        ) from error
    try:
        yield
    except BaseException:
        for part in staging.glob(".*.part"):
            part.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # finished files are kept
            staging.rmdir()
        raise
    finally:
        os.close(descriptor)
