"""Keys of SGLang servers: assignment to requests, sources, and protection from disclosure.

A server that mslime launches gets a new key for each run. An attached server has its owner's key, given as
`sglang.api_key`. Keys never appear in a command line, in config.yaml, in metrics or in a log.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import AfterValidator, PlainSerializer, SecretStr

from mslime.config.errors import ConfigError

REDACTED = "(redacted)"
FORMS = ("env:", "file:")

# Paths that SGLang 0.5.23 serves without its admin key (utils/auth.py: auth level NORMAL).
NORMAL_PATHS = frozenset(
    {"/generate", "/model_info", "/server_info", "/openapi.json", "/v1/loads", "/v1/models", "/tokenize", "/ready"}
)


def refuse_empty(name: str, value: SecretStr) -> SecretStr:
    """Return the secret of setting `name`. Raises ConfigError if it is empty."""
    text = value.get_secret_value()
    if text == REDACTED:
        raise ConfigError(
            name, text, "is the placeholder that a saved configuration shows in place of a key",
            "write env:NAME or file:PATH",
        )  # fmt: skip
    if not text.strip():
        raise ConfigError(name, text, "must not be empty", "remove it, or set the server's key")
    return value


def shown_secret(value: SecretStr) -> str:
    """Text shown instead of a secret: its source, or a placeholder."""
    text = value.get_secret_value()
    return text if text.startswith(FORMS) else REDACTED


Secret = Annotated[SecretStr, PlainSerializer(shown_secret, return_type=str)]
"""A setting that holds a secret, or names its source (`env:NAME`, `file:PATH`). Only a source is ever written out."""


def not_empty(name: str) -> AfterValidator:
    """Validator of the secret setting `name`."""
    return AfterValidator(partial(refuse_empty, name))


@dataclass(frozen=True)
class EngineKeys:
    """Credentials for a server; empty strings if the server requires none.

    Attributes:
        api: SGLang's `api_key`, for generation and queries.
        admin: SGLang's `admin_api_key`, for weights, pauses and similar requests; without one, `api` is used for them.
    """

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)

    @classmethod
    def random(cls) -> EngineKeys:
        """One new random key for all requests."""
        key = secrets.token_urlsafe(32)
        return cls(key, key)

    def headers(self, path: str) -> dict[str, str]:
        """Headers of a request to `path`."""
        key = self.api if path in NORMAL_PATHS else self.admin or self.api
        return {"Authorization": f"Bearer {key}"} if key else {}


NO_KEYS = EngineKeys()


@dataclass(frozen=True)
class Endpoint:
    """A server with its keys."""

    url: str
    keys: EngineKeys = NO_KEYS


@dataclass(frozen=True)
class EngineInfo:
    """A server that receives weights.

    Attributes:
        ranks: processes, each of which receives.
        machines: of these processes.
        drafts: whether it holds a second copy of the weights, in a draft model.
    """

    url: str
    ranks: int = 1
    keys: EngineKeys = NO_KEYS
    machines: int = 1
    drafts: bool = False

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint for a client of its HTTP interface."""
        return Endpoint(self.url, self.keys)


def read_secret(setting: SecretStr, name: str) -> str:
    """Secret that a setting holds or refers to.

    Args:
        name: of the setting, for messages.

    Raises:
        ConfigError: the environment variable is not set, or the file cannot be read or is empty.
    """
    text = setting.get_secret_value()
    kind, _, place = text.partition(":")
    if kind == "env" and text.startswith(FORMS):
        if not os.environ.get(place):
            raise ConfigError(name, text, f"the environment variable {place} is not set", f"export {place}=...")
        return os.environ[place]
    if not text.startswith(FORMS):
        return text
    try:
        found = Path(place).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(name, text, f"the file cannot be read: {error}", "name a readable file") from None
    if not found:
        raise ConfigError(name, text, "the file is empty", "write the key into it")
    return found


class AnnouncedBucket(Protocol):
    """The tensors of a bucket (`weights.weight_plan.Bucket`) as engines receive them, in their order in the bucket."""

    @property
    def names(self) -> Sequence[str]:
        """Name of each tensor."""
        ...

    @property
    def dtypes(self) -> Sequence[str]:
        """Dtype of each tensor, as torch names it."""
        ...

    @property
    def shapes(self) -> Sequence[Sequence[int]]:
        """Shape of each tensor."""
        ...


@dataclass(frozen=True)
class BucketVersion:
    """Description of a broadcast bucket that changes may follow.

    Attributes:
        number: of the version.
        base: number of the version that was changed; None: the whole bucket is broadcast.
        changed: number of elements that differ from it. The broadcast holds their places [changed] int32, then their
            values [changed] of the bucket's dtype, as bytes; it is skipped if there are none.
        sums: word sums (`tensor_sums.word_sum`) of the places, the values, and the whole bucket after the changes.
    """

    number: int
    base: int | None = None
    changed: int = 0
    sums: tuple[int, int, int] = (0, 0, 0)
