"""Errors that a user can act on.

Every user mistake is a `UserError`: it names the field (or file, or key), the value found, the broken rule and a
remedy. Broken internal invariants are assertions instead.
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
"""Exceptions from reading foreign data: files and replies of others. Errors of JSON, base64 and Unicode are
ValueErrors; too deep nesting and unimplemented features of a library are RuntimeErrors.
"""


class UserError(ValueError):
    """A mistake in the user's input.

    Attributes:
        field: dotted path of the setting, or the file and line, that is wrong.
        value: found there; None if it is missing, which the text leaves out.
        rule: condition that the value breaks.
        hint: one concrete remedy.
    """

    def __init__(self, field: str, value: object, rule: str, hint: str) -> None:
        self.field, self.value, self.rule, self.hint = field, value, rule, hint
        found = field if value is None else f"{field} = {value!r}"
        super().__init__(f"{found}: {rule}\n  hint: {hint}")

    @property
    def brief(self) -> str:
        """The value, and the first line of the rule."""
        return f"{self.value}: {self.rule.partition(chr(10))[0]}"

    def __reduce__(self) -> tuple[type, tuple[str, object, str, str]]:
        """Support pickling between processes (Ray re-raises errors on the driver)."""
        return (type(self), (self.field, self.value, self.rule, self.hint))


class ConfigError(UserError):
    """A setting of the run configuration is wrong."""


class DataError(UserError):
    """A prompt file, a line of it, or a key in it is wrong."""


class CheckpointError(UserError):
    """A checkpoint (Hugging Face or Megatron) is missing, truncated or does not match the model."""


class RewardError(UserError):
    """A reward function raised, ran out of time, or returned something that is not a finite number."""


class RolloutError(UserError):
    """A rollout function raised, or made a forbidden change to its sample."""


class EngineError(UserError):
    """A generation engine lacks a feature, did not start, died, or rejected a request."""


class WeightSyncError(EngineError):
    """A phase of the weight sync failed or missed its deadline.

    `field` is `weights.<phase>`; `value` is the place: the rank, the bucket and the tensor if they are known. The
    engines keep the stamp of the old version, but they load bucket by bucket in place. After a failure in `send` their
    weights may be a mixture until the next complete send, so generation must not resume.
    """


class ChangesRefused(WeightSyncError):
    """An engine does not hold, or cannot verify, the weights that a bucket's changes are based on.

    It has loaded none of them. The complete bucket can be sent instead.
    """


class TrainerError(UserError):
    """A trainer rank failed, or missed a deadline."""


class WorkerError(TrainerError):
    """A process of the run crashed, died, or did not reply in time: an accident, not a user mistake."""


def sync_error(phase: str, where: str, rule: str, hint: str = "") -> WeightSyncError:
    """A `WeightSyncError` of this phase; the default remedy is to check the engine's log and restart it."""
    default = (
        "read the engine's log, restart the engine and send again; generation must not resume before a complete send"
    )
    return WeightSyncError(f"weights.{phase}", where, rule, hint or default)


@contextmanager
def reading(kind: type[UserError], where: str, rule: str, hint: str) -> Generator[None]:
    """Convert exceptions from reading foreign data inside the block to `kind`.

    Args:
        where: the file, or the sender. rule: condition that the data breaks.
    """
    try:
        yield
    except (UserError, BrokenPipeError):
        raise
    except MALFORMED as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise kind(where, message, rule, hint) from error


def reading_run(run_dir: Path) -> AbstractContextManager[None]:
    """Convert exceptions from reading a run's directory, whose files others may have changed, to a UserError."""
    return reading(UserError, str(run_dir), "a file of the run is damaged",
                   "move it away, or repair it; docs/resuming.md lists a run's files")  # fmt: skip


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for a misspelt name, or an empty string if no name is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


_OUR_DIRECTORIES = {"models", "model", "data", "datasets", "checkpoints", "weights", "outputs"}
"""First parts of local paths that are common and not owners on the Hub."""


def hub_download(path: Path, options: str = "") -> tuple[str, Path]:
    """Command that downloads a missing path from the Hugging Face Hub, and its target directory.

    Only for names like those on the Hub, `owner/name`, or a local directory for one, `models/name`; else an empty text.
    """
    if len(path.parts) != 2 or (path.parent.exists() and path.parts[0] not in _OUR_DIRECTORIES):
        return "", path
    if path.parts[0] in _OUR_DIRECTORIES:
        command = f"hf download OWNER/{path.name} {options}--local-dir {path}"
        return f"download it first, with its owner's name for OWNER: {command}", path
    return f"download it first: hf download {path} {options}--local-dir {path.name}", Path(path.name)
