"""`mslime scale` and the endpoint that it asks: who is let in, what is refused, what is shown."""

from __future__ import annotations

import asyncio
import json
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from mslime.cli import main
from mslime.config.errors import ConfigError
from mslime.config.keys import EngineKeys
from mslime.run.endpoint import FILE_NAME, LARGEST_BODY, ControlEndpoint, EngineState, ScaleOrder, ScaleOrders, ask

SERVING = EngineState("engine0", "http://127.0.0.1:1", True, "serving")
DEAD = EngineState("engine1", "http://127.0.0.1:2", False, "gone", "the connection broke\nits log")


@pytest.fixture
def orders() -> ScaleOrders:
    orders = ScaleOrders()
    orders.show([SERVING, DEAD])
    return orders


@pytest.fixture
def run_dir(tmp_path: Path, orders: ScaleOrders) -> Iterator[Path]:
    with ControlEndpoint(tmp_path, orders):
        yield tmp_path


def record(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / FILE_NAME).read_text())


def test_the_key_is_for_the_user_of_the_run_and_the_address_for_this_machine(run_dir: Path) -> None:
    assert stat.S_IMODE((run_dir / FILE_NAME).stat().st_mode) == 0o600
    found = record(run_dir)
    assert found["url"].startswith("http://127.0.0.1:") and len(found["key"]) > 30
    for headers in ({}, {"Authorization": "Bearer other"}):
        assert httpx.get(f"{found['url']}/engines", headers=headers).status_code == 401
        assert httpx.post(f"{found['url']}/engines", headers=headers, json={"engines": 1}).status_code == 401


def test_a_body_that_is_no_order_by_its_size_is_not_read(run_dir: Path) -> None:
    found = record(run_dir)
    asked = {"headers": {"Authorization": f"Bearer {found['key']}"}, "content": b" " * (LARGEST_BODY + 1)}
    assert httpx.post(f"{found['url']}/engines", **asked).status_code == 413


def test_nothing_is_left_when_a_run_ends_that_has_only_just_begun(
    tmp_path: Path, orders: ScaleOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = web.AppRunner.setup

    async def slow_setup(self: web.AppRunner) -> None:
        await asyncio.sleep(0.3)
        await setup(self)

    monkeypatch.setattr(web.AppRunner, "setup", slow_setup)
    before = threading.active_count()
    with ControlEndpoint(tmp_path, orders) as kept:
        url = record(tmp_path)["url"]
    assert kept is not None and not (tmp_path / FILE_NAME).exists() and threading.active_count() == before
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/engines")


@pytest.mark.parametrize(("body", "said"), [
    ("no json", "not valid JSON"), ("[1]", "JSON object"), ("{}", "one of engines, attach and drain"),
    ('{"engines": 1, "drain": "a"}', "one of engines, attach and drain"), ('{"engines": true}', "integer >= 0"),
    ('{"engines": -1}', "integer >= 0"), ('{"engines": 1.5}', "integer >= 0"), ('{"drain": 1}', "must be a string"),
    ('{"engines": 99999}', "at most 4096"), ('{"engins": 1}', "unknown field"),
])  # fmt: skip
def test_what_is_no_order_is_refused_by_name(run_dir: Path, orders: ScaleOrders, body: str, said: str) -> None:
    found = record(run_dir)
    headers = {"Authorization": f"Bearer {found['key']}"}
    answer = httpx.post(f"{found['url']}/engines", headers=headers, content=body)
    assert answer.status_code == 400 and said in answer.json()["error"] and orders.take() == []


def test_an_order_waits_for_the_run_and_its_result_is_shown(run_dir: Path, orders: ScaleOrders) -> None:
    found = asyncio.run(ask(run_dir, {"attach": "http://x/", "api_key": "secret"}))
    assert found["number"] == 1 and found["waiting"] == [1] and "secret" not in json.dumps(found)
    ((number, order),) = orders.take()
    assert asyncio.run(ask(run_dir))["waiting"] == [1], "until its result is recorded"
    assert (order.attach, order.keys.api, order.keys.admin) == ("http://x", "secret", "secret")
    assert "secret" not in repr(order) + order.describe()
    orders.record(number, "attached as engine2")
    found = asyncio.run(ask(run_dir))
    assert found["waiting"] == [] and found["results"] == {"1": "attached as engine2"}
    assert [engine["name"] for engine in found["engines"]] == ["engine0", "engine1"]


def test_a_run_that_is_not_there_or_has_died_is_said_to_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run is training"):
        asyncio.run(ask(tmp_path))
    file = tmp_path / FILE_NAME
    file.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        asyncio.run(ask(tmp_path))
    with ControlEndpoint(tmp_path, ScaleOrders()):
        killed = file.read_text()
    file.write_text(killed)
    with pytest.raises(ConfigError, match="has ended, or was killed"):
        asyncio.run(ask(tmp_path))
    file.write_text(json.dumps({**json.loads(killed), "host": "elsewhere"}))
    with pytest.raises(ConfigError, match="runs on elsewhere"):
        asyncio.run(ask(tmp_path))


def test_a_new_session_replaces_the_record_of_one_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("of a killed one")
    with ControlEndpoint(tmp_path, ScaleOrders()):
        assert asyncio.run(ask(tmp_path))["engines"] == []


def obey(orders: ScaleOrders, told: str, states: list[list[EngineState]]) -> None:
    """The run's side, which goes through these states of its engines."""
    while not (taken := orders.take()):
        time.sleep(0.02)
    for engines in states:
        orders.show(engines)
        orders.record(taken[0][0], told)
        time.sleep(0.3)


def test_the_command_shows_the_engines(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "engine0" in shown and "serving" in shown and "broke" in shown and "its log" not in shown


def test_the_command_waits_until_it_is_done(
    run_dir: Path, orders: ScaleOrders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mslime.cli.scale.LOOK_EVERY_S", 0.05)
    third = [EngineState("engine2", "", True, "starting"), EngineState("engine2", "http://c", True, "joining")]
    done = EngineState("engine2", "http://c", True, "serving")
    states = [[SERVING, third[0]], [SERVING, third[1]], [SERVING, done]]
    run = threading.Thread(target=obey, args=(orders, "starting engine2", states))
    run.start()
    assert main(["scale", str(run_dir), "--engines", "2", "--json"]) == 0
    run.join()
    assert [engine["state"] for engine in json.loads(capsys.readouterr().out)["engines"]] == ["serving", "serving"]


def test_the_command_fails_when_the_run_refuses(
    run_dir: Path, orders: ScaleOrders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mslime.cli.scale.LOOK_EVERY_S", 0.05)
    run = threading.Thread(target=obey, args=(orders, "refused: no other engine is serving", [[SERVING]]))
    run.start()
    assert main(["scale", str(run_dir), "--drain", "engine0"]) == 1
    run.join()
    assert "no other engine is serving" in capsys.readouterr().out


def test_the_command_returns_at_once_when_asked_to(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", str(run_dir), "--engines", "2", "--no-wait"]) == 0
    assert "at the run's next weight sync" in capsys.readouterr().out


def test_keys_are_read_where_they_are_and_belong_to_an_attached_server(
    run_dir: Path, orders: ScaleOrders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTHER_KEY", "the-key")
    assert main(["scale", str(run_dir), "--attach", "http://x", "--key", "env:OTHER_KEY", "--no-wait"]) == 0
    assert orders.take()[0][1] == ScaleOrder(attach="http://x", keys=EngineKeys("the-key", "the-key"))
    assert main(["scale", str(run_dir), "--engines", "2", "--key", "env:OTHER_KEY"]) == 2
    assert main(["scale", str(run_dir), "--attach", "http://x", "--key", "env:NOT_SET"]) == 2
    told = capsys.readouterr().err
    assert "needs --attach" in told and "NOT_SET is not set" in told and orders.take() == []
