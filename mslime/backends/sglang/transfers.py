"""How one engine is asked to give all that its model holds to another one (`peers`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

PREFIX = "mslime-peer:"


@dataclass(frozen=True)
class Transfer:
    """What one of the two engines is asked to do.

    Attributes:
        part: `offer` a place to meet at, `give` what it holds, `take` that.
        name: of this transfer among all.
        host, port: where they meet; the giver listens there. With `offer`, the port is not known yet.
        limit_s: for which one waits for the other.
    """

    part: Literal["offer", "give", "take"]
    name: str
    host: str
    limit_s: float
    port: int = 0

    def as_group(self) -> str:
        """What an engine is asked to leave."""
        return PREFIX + json.dumps(asdict(self), separators=(",", ":"))


def parse_transfer(group: str) -> Transfer | None:
    """What leaving this group means; None for a process group."""
    return Transfer(**json.loads(group.removeprefix(PREFIX))) if group.startswith(PREFIX) else None
