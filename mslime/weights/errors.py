"""What goes wrong while weights travel: always with the phase, and the rank, bucket and tensor where they are known."""

from __future__ import annotations

from mslime.config.errors import EngineError


class WeightSyncError(EngineError):
    """A phase of the weight sync failed or missed its deadline.

    `field` is `weights.<phase>`; `value` says where. The version stamped on the engines is still the old one, but
    SGLang loads bucket by bucket in place: after a failure in `send` its weights may be a mixture until the next whole
    send, so generation must not resume.
    """


def sync_error(phase: str, where: str, what: str, way_out: str = "") -> WeightSyncError:
    """A `WeightSyncError` of this phase; the default way out is to look at the engine's log and restart it."""
    default = "read the engine's log, restart the engine and send again; generation must not resume before a whole send"
    return WeightSyncError(f"weights.{phase}", where, what, way_out or default)
