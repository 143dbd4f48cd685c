"""The entrance to `ranks` for a process that starts ranks and does not itself need a GPU's packages in its memory."""

from __future__ import annotations

from typing import Any

from tests.fixtures.forked import preload

preload("tests.rehearsal.ranks")


def rehearse(*args: Any) -> dict[str, Any]:
    """`ranks.rehearse`, whose module the processes have been forked with."""
    from tests.rehearsal import ranks

    return ranks.rehearse(*args)


def adapt(*args: Any) -> dict[str, Any]:
    """`ranks.adapt`, likewise."""
    from tests.rehearsal import ranks

    return ranks.adapt(*args)


def send(*args: Any) -> int:
    """`ranks.send`, likewise."""
    from tests.rehearsal import ranks

    return ranks.send(*args)
