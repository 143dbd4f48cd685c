"""Errors that a user can act on.

Every user mistake is a `UserError`: it names the field (or file, or key), the value found, the rule that was
broken and a way out. Broken invariants of our own are assertions instead, and never end up here.
"""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

MALFORMED = (
    AssertionError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, OSError,
    EOFError, MemoryError, zlib.error,
)  # fmt: skip
"""What reading foreign bytes can raise: files and answers that others wrote. JSON's, base64's and Unicode's errors are
ValueErrors; too deep nesting and what a library has not implemented are RuntimeErrors."""


class UserError(ValueError):
    """A mistake in what the user gave us.

    Attributes:
        field: dotted path of the setting, or the file and line, that is wrong.
        value: what was found there.
        rule: what must hold instead.
        way_out: one concrete thing to do about it.
    """

    def __init__(self, field: str, value: object, rule: str, way_out: str) -> None:
        self.field, self.value, self.rule, self.way_out = field, value, rule, way_out
        super().__init__(f"{field} = {value!r}: {rule}\n  way out: {way_out}")

    @property
    def brief(self) -> str:
        """What was found, and the first line of the rule."""
        return f"{self.value}: {self.rule.partition(chr(10))[0]}"

    def __reduce__(self) -> tuple[type, tuple[str, object, str, str]]:
        """Survive pickling between processes (Ray re-raises errors on the driver)."""
        return (type(self), (self.field, self.value, self.rule, self.way_out))


class ConfigError(UserError):
    """A setting of the run configuration is wrong."""


class DataError(UserError):
    """A prompt file, a line of it, or a key in it is wrong."""


class CheckpointError(UserError):
    """A checkpoint (Hugging Face or Megatron) is missing, truncated or does not match the model."""


class RewardError(UserError):
    """A reward function raised, ran out of time, or returned something that is not a finite number."""


class RolloutError(UserError):
    """A rollout function raised, or did to its sample what it may not."""


class EngineError(UserError):
    """A generation engine lacks a feature, did not start, died, or refused a request."""


class WeightSyncError(EngineError):
    """A phase of the weight sync failed or missed its deadline.

    `field` is `weights.<phase>`; `value` says where: the rank, the bucket and the tensor where they are known. The
    version stamped on the engines is still the old one, but engines load bucket by bucket in place: after a failure in
    `send` their weights may be a mixture until the next whole send, so generation must not resume.
    """


class ChangesRefused(WeightSyncError):
    """An engine does not have, or cannot tell that it has, the weights that a bucket's changes belong to.

    It has loaded nothing of them. Sent as a whole, the bucket is welcome.
    """


class TrainerError(UserError):
    """A trainer rank failed, or missed a deadline."""


class WorkerError(TrainerError):
    """A process of the run crashed, died, or did not answer in time: an accident, and no mistake of the user's."""


def sync_error(phase: str, where: str, what: str, way_out: str = "") -> WeightSyncError:
    """A `WeightSyncError` of this phase; the default way out is to look at the engine's log and restart it."""
    default = "read the engine's log, restart the engine and send again; generation must not resume before a whole send"
    return WeightSyncError(f"weights.{phase}", where, what, way_out or default)


@contextmanager
def reading(kind: type[UserError], where: str, rule: str, way_out: str) -> Generator[None]:
    """The border for foreign bytes: whatever reading them raises inside is a `kind` outside.

    Args:
        where: the file, or whoever sent them. rule: what they are not.
    """
    try:
        yield
    except (UserError, BrokenPipeError):
        raise
    except MALFORMED as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise kind(where, told, rule, way_out) from error


def reading_run(run_dir: Path) -> AbstractContextManager[None]:
    """The border for a run's directory, whose files others may have written or damaged: a UserError, whatever it is."""
    return reading(UserError, str(run_dir), "a file of the run is not what mslime writes",
                   "move it away, or repair it; docs/resuming.md lists a run's files")  # fmt: skip


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for a misspelt name, or an empty string when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


_OUR_DIRECTORIES = {"models", "model", "data", "datasets", "checkpoints", "weights", "outputs"}
"""First parts of paths that people give to directories of their own, and that are no owner on the Hub."""


def hub_download(path: Path, options: str = "") -> tuple[str, Path]:
    """How to fetch from the Hugging Face Hub what is not at a path, and where it then is.

    Only for what looks like a name there, `owner/name`, or a directory of one's own for it, `models/name`; else an
    empty text.
    """
    if len(path.parts) != 2 or (path.parent.exists() and path.parts[0] not in _OUR_DIRECTORIES):
        return "", path
    if path.parts[0] in _OUR_DIRECTORIES:
        command = f"hf download OWNER/{path.name} {options}--local-dir {path}"
        return f"fetch it first, with its owner's name for OWNER: {command}", path
    return f"fetch it first: hf download {path} {options}--local-dir {path.name}", Path(path.name)
