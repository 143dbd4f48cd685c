"""States saved by clients in files of the run: `tinker://MODEL/weights/NAME` and `tinker://MODEL/sampler_weights/NAME`.

A path always names a directory below `RUN/serve`. Beside the trainer's files, `saved.json` contains the model and rank,
so a restarted server serves earlier states.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mslime.config.errors import CheckpointError, reading
from mslime_plugins.serve.client_errors import UNKNOWN, ServeError
from mslime_plugins.serve.sessions import AdapterAsk

Kind = Literal["weights", "sampler_weights"]
TYPES: dict[str, str] = {"weights": "training", "sampler_weights": "sampler"}
SAVED = "saved.json"
_MODEL = re.compile(r"[0-9a-f]{32}:train:\d{1,9}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PATH = re.compile(rf"tinker://({_MODEL.pattern})/(weights|sampler_weights)/({_NAME.pattern})")


@dataclass(frozen=True)
class StoredState:
    """One saved state.

    Attributes:
        path: its tinker path. ask: the adapter. base_model: name used by its client. at, expires: Unix seconds.
    """

    path: str
    base_model: str
    ask: AdapterAsk
    at: float
    expires: float | None = None
    user_metadata: dict[str, Any] | None = None

    @property
    def parts(self) -> tuple[str, Kind, str]:
        """Model, kind and name."""
        found = _PATH.fullmatch(self.path)
        assert found is not None, self.path
        return found[1], found[2], found[3]  # type: ignore[return-value]


class States:
    """All states saved under a directory.

    Args:
        root: `RUN/serve`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def directory(self, path: str) -> Path:
        """The directory of a tinker path. Raises ServeError for an invalid path, or one outside the root."""
        found = _PATH.fullmatch(path)
        if found is None:
            raise ServeError("path", path, "must be tinker://MODEL/weights/NAME or "
                             "tinker://MODEL/sampler_weights/NAME", "use a path that a save returned")  # fmt: skip
        return self._place(found[1], found[2], found[3])

    def new(self, model_id: str, kind: Kind, name: str, *, overwrite: bool = False) -> tuple[str, Path]:
        """Path and directory of a new state. Raises ServeError for an invalid or existing name."""
        if _NAME.fullmatch(name) is None:
            raise ServeError("path", name, "must have letters, digits and . _ - only, begin with a letter or a "
                             "digit, and have at most 200 characters", "choose another name")  # fmt: skip
        directory = self._place(model_id, kind, name)
        if directory.exists():
            if not overwrite:
                hint = "choose another name" + (", or overwrite it" if kind == "weights" else "")
                raise ServeError("path", name, "this model already has a saved state of that name", hint)
            shutil.rmtree(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        return f"tinker://{model_id}/{kind}/{name}", directory

    def keep(self, saved: StoredState) -> None:
        """Record a directory's contents, which makes it loadable."""
        directory = self.directory(saved.path)
        part = directory / f".{SAVED}.part"
        part.write_text(json.dumps(asdict(saved), indent=1) + "\n", encoding="utf-8")
        part.rename(directory / SAVED)

    def find(self, path: str, kind: Kind | None = None) -> StoredState:
        """The state saved there. Raises ServeError if there is none, or one of another kind."""
        file = self.directory(path) / SAVED
        if not file.is_file():
            raise ServeError("path", path, "no state is saved there", "use a path that a save returned", UNKNOWN)
        saved = _read(file)
        if kind is not None and saved.parts[1] != kind:
            made = "save_state" if kind == "weights" else "save_weights_for_sampler"
            raise ServeError("path", path, f"is of kind {saved.parts[1]}, but {kind} is needed", f"use {made}")
        return saved

    def of_model(self, model_id: str) -> list[StoredState]:
        """All states of a model, oldest first."""
        if _MODEL.fullmatch(model_id) is None:
            return []
        files = (self.root / model_id.replace(":", "-")).glob(f"*/*/{SAVED}")
        return sorted((_read(file) for file in files), key=lambda saved: saved.at)

    def remove(self, path: str) -> None:
        """Delete a state. Raises ServeError if there is none."""
        self.find(path)
        shutil.rmtree(self.directory(path))

    def expired(self) -> Iterator[StoredState]:
        """States whose time to live has passed."""
        now = time.time()
        for file in self.root.glob(f"*/*/*/{SAVED}"):
            saved = _read(file)
            if saved.expires is not None and saved.expires < now:
                yield saved

    def _place(self, model_id: str, kind: str, name: str) -> Path:
        return self.root / model_id.replace(":", "-") / kind / name


def _read(file: Path) -> StoredState:
    with reading(CheckpointError, str(file), "is not a file written by mslime serve", "remove its directory"):
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return StoredState(**{**values, "ask": AdapterAsk(**values["ask"])})
