"""A run's directory: one process owns it, and its config.yaml holds the resolved configuration.

The lock lasts for the life of a session. It is a system lock (`flock`), which ends with the process for any cause. The
owner's name is written into the file for people. Over NFS it holds between machines if the mount supports it. A file
system without locks is detected, and only processes of this machine are then distinguished.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import yaml

from mslime.config.errors import ConfigError
from mslime.config.schema import RunConfig
from mslime.observe.metrics import free_name
from mslime.observe.run_lock import LOCK, lives_here, own_description, owner_in

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Own a run directory, which is created if missing.

    Raises:
        ConfigError: another process owns it (the error names it), or it cannot be written.
    """
    path = run_dir / LOCK
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(
            "output_dir", str(run_dir), f"the run's directory cannot be written: {error.strerror}",
            "choose a directory of your own with output_dir and name",
        ) from error  # fmt: skip
    try:
        _lock(descriptor, path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(own_description()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _taken(path, owner_in(os.pread(descriptor, 4096, 0))) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        owner = owner_in(os.pread(descriptor, 4096, 0))
        if owner.get("pid") != os.getpid() and lives_here(owner):
            raise _taken(path, owner) from None


def _taken(path: Path, owner: Mapping[str, Any]) -> ConfigError:
    who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')} since {owner.get('started', '?')}"
    return ConfigError(
        "output_dir/name", str(path.parent), f"another process runs in this directory: {who}",
        "wait for it, stop it, or give this run another name",
    )  # fmt: skip


def write_resolved(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration as YAML, atomically. An earlier, different file is kept under a numbered name.
    Paths are absolute, because the file is also read from other directories."""
    text = yaml.safe_dump(_absolute(config.model_dump(), config.as_dict()), sort_keys=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        if path.read_text(encoding="utf-8", errors="replace") == text:
            return
        os.link(path, free_name(path))
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _absolute(values: Any, plain: Any) -> Any:
    """The plain values with every path absolute: of type Path, or of a file of rows (with its slice)."""
    if isinstance(values, dict):
        found = {key: _absolute(value, plain[key]) for key, value in cast("dict[str, Any]", values).items()}
        if isinstance(found.get("data"), dict):
            found["data"]["prompts"] = [str(Path(path).absolute()) for path in found["data"]["prompts"]]
            for held_out in found["data"]["eval_sets"]:
                held_out["path"] = str(Path(held_out["path"]).absolute())
        return found
    if isinstance(values, list):
        both = zip(cast("list[Any]", values), plain, strict=True)
        return [_absolute(value, as_plain) for value, as_plain in both]
    return str(values.absolute()) if isinstance(values, Path) else plain


def changed_settings(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """`section.key: old -> new` of every setting that differs; nothing if the earlier value is unknown.

    Args:
        before, now: `RunConfig.as_dict`.
    """
    if not before:
        return []
    old, new = _flat(before), _flat(now)
    keys = [*new, *(key for key in old if key not in new)]
    return [
        f"{key}: {old.get(key, 'not known')} -> {new.get(key, 'gone')}" for key in keys if old.get(key) != new.get(key)
    ]


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
