"""The engines' side of a sync: open the session, compare, close it, stamp the version.

The order, with control holding the engines' pause around it:

    begin  ->  WeightSender.send on every trainer rank  ->  check  ->  end  ->  stamp(version)

A version is stamped last, so an engine that was left in the middle never claims the new version. The comparison comes
before `end`, while the parameters lie as loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mslime.config.layout import EngineLayout
from mslime.weights.errors import sync_error
from mslime.weights.http import EngineHttp, EngineInfo, in_thread

Digests = Sequence[Mapping[str, str]]


class Commit:
    """Session calls to every engine at once, each with a deadline in seconds."""

    def __init__(self, engines: Sequence[EngineInfo], deadline_s: float) -> None:
        self.engines = tuple(engines)
        self._http = EngineHttp([engine.url for engine in engines], deadline_s)

    def _all(self, path: str, body: Mapping[str, object], phase: str) -> list[dict[str, Any]]:
        calls = [in_thread(self._http.post, engine, path, body, phase) for engine in self.engines]
        return [call.result() for call in calls]

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def begin(self) -> None:
        """Open a weight-update session on every engine. Raises WeightSyncError, as all methods here do."""
        self._all("/begin_weight_update", {}, "begin")

    def end(self) -> None:
        """Close the session: quantised weights are repacked."""
        self._all("/end_weight_update", {}, "end")

    def stamp(self, version: int) -> None:
        """Let every engine report `version` for what it samples from now on."""
        self._all("/update_weight_version", {"new_version": str(version), "abort_all_requests": False}, "stamp")

    def check(self, expected: Mapping[EngineLayout, Digests]) -> int:
        """Compare every bit of every parameter of every engine rank with what the trainer exports.

        Args:
            expected: `SendReport.expected`.

        Returns:
            Number of parameters compared, over all ranks of all engines.

        Raises:
            WeightSyncError: naming the engine, its rank and the first parameter that differs.
        """
        answers = self._all("/weights_checker", {"action": "checksum"}, "check")
        return sum(
            compare(engine.url, answer["ranks"], expected[engine.layout])
            for engine, answer in zip(self.engines, answers, strict=True)
        )


def compare(where: str, reported: Sequence[Mapping[str, Any]], expected: Digests) -> int:
    """Compare one engine's `/weights_checker` answer with the expected digests; the number of parameters compared.

    Args:
        where: the engine, for the message.
        reported: `ranks` of the answer: `checksums` by parameter, and `parallelism_info`.
        expected: digests by parameter for every tensor-parallel rank.

    Raises:
        WeightSyncError: a parameter differs, is missing, or is one that the trainer does not send.
    """
    answered = {_tp_rank(rank): rank["checksums"] for rank in reported}
    if set(answered) != set(range(len(expected))):
        raise sync_error("check", where, f"ranks {sorted(answered)} answered, {len(expected)} hold weights")
    for tp_rank, want in enumerate(expected):
        got = answered[tp_rank]
        wrong = [name for name in want if got.get(name) != want[name]]
        unknown = [name for name in got if name not in want]
        if wrong or unknown:
            name = (wrong or unknown)[0]
            raise sync_error(
                "check", f"{where} rank {tp_rank}: {name}",
                f"{len(wrong)} of {len(want)} parameters differ from the trainer's and {len(unknown)} are not the "
                f"trainer's: the engine reports {got.get(name)}, the trainer expects {want.get(name)}",
            )  # fmt: skip
    return sum(len(want) for want in expected)


def _tp_rank(rank: Mapping[str, Any]) -> int:
    info = rank["parallelism_info"]  # a list: one entry for each model (target, drafts) of the rank
    return int(info[0]["tp_rank"])
