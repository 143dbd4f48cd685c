"""What a client asks of the memory of an engine that shares its GPU, and what the answer means (`memory_release`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from mslime.config.choices import EngineTag
from mslime.engine_plugin.wire import RELEASE_REFUSED, RELEASED

TAGS: tuple[EngineTag, ...] = get_args(EngineTag)


@dataclass(frozen=True)
class Released:
    """What an engine does not hold.

    Attributes:
        tags: in SGLang's words.
        refused: why its last release did nothing; empty where it did what it was asked.
    """

    tags: frozenset[EngineTag]
    refused: str = ""

    @classmethod
    def read(cls, ranks: Sequence[Mapping[str, Any]]) -> Released:
        """An answer's ranks, of which the first speaks for all: they are asked together. Raises as readers do."""
        said: Mapping[str, str] = ranks[0]["checksums"]
        return cls(frozenset(tag for tag in TAGS if said.get(tag) == RELEASED), said.get(RELEASE_REFUSED, ""))

    def to_release(self, held: Collection[EngineTag]) -> list[EngineTag]:
        """What is to be given back so that nothing but `held` is held."""
        return [tag for tag in TAGS if tag not in held and tag not in self.tags]

    def to_resume(self, held: Collection[EngineTag]) -> list[EngineTag]:
        """What is to be taken again so that all of `held` is held."""
        return [tag for tag in TAGS if tag in held and tag in self.tags]
