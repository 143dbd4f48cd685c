"""`manifest.json` of a checkpoint: every file with its size and checksum, and what belongs to the checkpoint beside its
tensors. It is written last and carries a checksum of itself, so that a damaged one is never believed. A manifest that
another version of mslime wrote is read, or refused by saying so; it never ends in a traceback.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from mslime import __version__
from mslime.config.errors import CheckpointError
from mslime.data.checksums import WAY_OUT, FileSum, check_sizes, write_summed

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
