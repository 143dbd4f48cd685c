"""Keys of SGLang servers: which request carries which, where they come from, and how they stay out of sight.

A server that mslime launches gets a key of its own for each run. A server that somebody else runs has its owner's,
given as `sglang.api_key`. Keys never stand in a command line, in config.yaml, in metrics or in a log.
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

# What SGLang 0.5.23 answers without its admin key (utils/auth.py: auth level NORMAL).
NORMAL_PATHS = frozenset(
    {"/generate", "/model_info", "/server_info", "/openapi.json", "/v1/loads", "/v1/models", "/tokenize", "/ready"}
)


def refuse_empty(name: str, value: SecretStr) -> SecretStr:
    """The secret of setting `name`. Raises ConfigError where it is none."""
    text = value.get_secret_value()
    if text == REDACTED:
        raise ConfigError(
            name, text, "is what a written configuration shows instead of a key",
            "write env:NAME or file:PATH",
        )  # fmt: skip
    if not text.strip():
        raise ConfigError(name, text, "a key is not empty", "remove it, or give the server's key")
    return value


def shown_secret(value: SecretStr) -> str:
    """What is written out instead of a secret: where it is, or that there is one."""
    text = value.get_secret_value()
    return text if text.startswith(FORMS) else REDACTED


Secret = Annotated[
    SecretStr, AfterValidator(partial(refuse_empty, "sglang.api_key")), PlainSerializer(shown_secret, return_type=str)
]
"""A setting that holds a secret, or (`env:NAME`, `file:PATH`) says where it is. Only the latter is ever written out."""


@dataclass(frozen=True)
class EngineKeys:
    """What a client must know to be let in; empty strings where a server asks for nothing.

    Attributes:
        api: SGLang's `api_key`, for generation and questions.
        admin: SGLang's `admin_api_key`, for weights, pauses and the like; where a server has none, `api` opens those.
    """

    api: str = field(default="", repr=False)
    admin: str = field(default="", repr=False)

    @classmethod
    def random(cls) -> EngineKeys:
        """A new key for everything."""
        key = secrets.token_urlsafe(32)
        return cls(key, key)

    def headers(self, path: str) -> dict[str, str]:
        """What a request to `path` carries."""
        key = self.api if path in NORMAL_PATHS else self.admin or self.api
        return {"Authorization": f"Bearer {key}"} if key else {}


NO_KEYS = EngineKeys()


@dataclass(frozen=True)
class Endpoint:
    """A server and what opens it."""

    url: str
    keys: EngineKeys = NO_KEYS


@dataclass(frozen=True)
class EngineInfo:
    """A server that receives weights.

    Attributes:
        ranks: processes, each of which receives.
        machines: that these lie on.
        drafts: whether it holds the weights a second time, in a draft model.
    """

    url: str
    ranks: int = 1
    keys: EngineKeys = NO_KEYS
    machines: int = 1
    drafts: bool = False

    @property
    def endpoint(self) -> Endpoint:
        """What a client of its HTTP interface needs."""
        return Endpoint(self.url, self.keys)


def read_secret(setting: SecretStr, name: str) -> str:
    """The secret that a setting holds or points to.

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
        raise ConfigError(name, text, f"the file cannot be read: {error}", "give a readable file") from None
    if not found:
        raise ConfigError(name, text, "the file is empty", "write the key into it")
    return found


class AnnouncedBucket(Protocol):
    """The tensors of a bucket (`weights.weight_plan.Bucket`) as engines receive them, in their order in the bucket."""

    @property
    def names(self) -> Sequence[str]:
        """Of each."""
        ...

    @property
    def dtypes(self) -> Sequence[str]:
        """Of each, as torch names it."""
        ...

    @property
    def shapes(self) -> Sequence[Sequence[int]]:
        """Of each."""
        ...


@dataclass(frozen=True)
class BucketVersion:
    """What is broadcast of a bucket, where changes of it may follow.

    Attributes:
        number: of the version.
        base: number of the version that was changed; None: all of the bucket is broadcast.
        changed: elements that are different from it. Broadcast are their places [changed] int32, then their values
            [changed] of the bucket's dtype, as bytes; nothing where there are none.
        sums: word sums (`tensor_sums.word_sum`) of the places, of the values, and of the whole
            bucket with the changes in it.
    """

    number: int
    base: int | None = None
    changed: int = 0
    sums: tuple[int, int, int] = (0, 0, 0)
