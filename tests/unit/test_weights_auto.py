"""`weights.transport: auto` against engines that have the plug-in, that have it not, and that are gone."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from mslime.config.errors import WeightSyncError
from mslime.config.keys import Endpoint, EngineInfo
from mslime.weights.transport import Link, transport_for
from tests.fixtures.stand_in_engine import StandInEngine
from tests.fixtures.weight_engines import engines, link

__all__ = ["engines", "link"]

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("modes", "more", "chosen"),
    [
        (("obey", "obey"), {}, "relay"),
        (("obey", "no plug-in"), {}, "broadcast"),  # one that somebody else has started
        (("obey", "obey"), {"ranks": 2}, "broadcast"),
        (("obey", "obey"), {"drafts": True}, "broadcast"),
    ],
)
def test_auto_is_relay_into_engines_of_one_rank_that_have_the_plug_in(
    modes: tuple[str, ...], more: dict[str, Any], chosen: str, engines: list[StandInEngine], link: Link
) -> None:
    for engine, mode in zip(engines, modes, strict=True):
        engine.set_mode(mode)
    first, second = (EngineInfo(engine.url) for engine in engines)
    assert transport_for([first, replace(second, **more)], link.engine_port, link.deadline_s) == chosen


def test_auto_asks_engines_what_they_are_and_takes_no_silence_for_an_answer(
    engines: list[StandInEngine], link: Link
) -> None:
    (told,) = {link.engine_port.describe(Endpoint(engine.url)).drafts for engine in engines}
    assert told is False
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gone = EngineInfo(f"http://127.0.0.1:{probe.getsockname()[1]}")
    with pytest.raises(WeightSyncError, match=r"weights\.connect.*unreachable"):
        transport_for([EngineInfo(engines[0].url), gone], link.engine_port, link.deadline_s)
