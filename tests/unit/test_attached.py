"""Attached engines are taken over as a killed run left them, and left as the next one should find them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mslime.config.errors import EngineError, TrainerError
from mslime.config.keys import Endpoint, EngineKeys
from mslime.config.schema import RunConfig
from mslime.run.attached import RECORD, AttachedEngines, new_group


class LeftBehind:
    """A stand-in for an engine as a run left it: it knows which of the four things are to be undone."""

    def __init__(self, key: str = "") -> None:
        self.key, self.paused, self.updating, self.groups, self.aborted = key, True, True, {"old-rank0"}, False
        handler = type("Handler", (_Handler,), {"engine": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.endpoint = Endpoint(f"http://127.0.0.1:{self.server.server_port}", EngineKeys("k", key))

    @property
    def clean(self) -> bool:
        return not (self.paused or self.updating or self.groups)

    def answer(self, path: str, body: dict[str, Any]) -> int:
        if path == "/continue_generation":
            self.paused = False
        elif path == "/abort_request":
            self.aborted = body == {"abort_all": True}
        elif path == "/end_weight_update":
            self.updating, before = False, self.updating
            return 200 if before else 400
        elif path == "/destroy_weights_update_group":
            known = body["group_name"] in self.groups
            self.groups.discard(body["group_name"])
            return 200 if known else 400
        return 200


class _Handler(BaseHTTPRequestHandler):
    engine: LeftBehind

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        let_in = not self.engine.key or self.headers.get("authorization") == f"Bearer {self.engine.key}"
        self.send_response(self.engine.answer(self.path, body) if let_in else 401)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def engine() -> Iterator[LeftBehind]:
    started = LeftBehind("admin")
    yield started
    started.server.shutdown()
    started.server.server_close()


def config_of(tmp_path: Path, url: str = "http://h") -> RunConfig:
    values = {"name": "run", "output_dir": str(tmp_path), "model": {"path": "m"}, "data": {"prompts": ["x"]}}
    return RunConfig.model_validate(values | {"sglang": {"urls": [url]}, "deadlines": {"engine_control_s": 5}})


def attached_engines(config: RunConfig, engines: list[Endpoint], group: str) -> AttachedEngines:
    return AttachedEngines(engines, group, [0], config.run_dir, config.deadlines)


def test_groups_of_each_attempt_have_names_of_their_own(tmp_path: Path) -> None:
    assert len({new_group(config_of(tmp_path).name) for _ in range(10)}) == 10


def test_an_engine_is_taken_over_from_a_killed_run(tmp_path: Path, engine: LeftBehind) -> None:
    config = config_of(tmp_path)
    killed = attached_engines(config, [engine.endpoint], "old")
    killed.take_over()  # and then it is killed, in the middle of a sync:
    engine.paused, engine.updating, engine.groups = True, True, {"old-rank0"}
    following = attached_engines(config, [engine.endpoint], "new")
    following.take_over()
    assert engine.clean and engine.aborted
    engine.groups.add("new-rank0")
    left: list[float] = []
    following.leave(left.append)
    assert engine.clean and left and not (config.run_dir / RECORD).exists()


def test_leaving_goes_on_without_ranks_and_without_an_engine(tmp_path: Path, engine: LeftBehind) -> None:
    config, gone = config_of(tmp_path), Endpoint("http://127.0.0.1:9")
    attached = attached_engines(config, [gone, engine.endpoint], "old")

    def dead_ranks(_: float) -> None:
        raise TrainerError("weight sync: disconnect", "trainer rank 0", "the process died", "read its log")

    (config.run_dir).mkdir(parents=True)
    (config.run_dir / RECORD).write_text('["old-rank0"]')
    attached.leave(dead_ranks)
    assert engine.clean and (config.run_dir / RECORD).exists(), "one of them still knows our group"


def test_a_damaged_record_is_no_obstacle(tmp_path: Path, engine: LeftBehind) -> None:
    config = config_of(tmp_path)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / RECORD).write_text('{"broken')
    attached_engines(config, [engine.endpoint], "new").take_over()
    assert json.loads((config.run_dir / RECORD).read_text()) == ["new-rank0"]


@pytest.mark.parametrize(
    ("key", "says"), [("wrong", "requires an API key.*sglang.api_key"), (None, "Cannot connect.*")]
)
def test_an_engine_that_does_not_let_us_in_is_named(
    tmp_path: Path, engine: LeftBehind, key: str | None, says: str
) -> None:
    at = Endpoint(engine.endpoint.url, EngineKeys(key)) if key else Endpoint("http://127.0.0.1:9")
    with pytest.raises(EngineError, match=rf"(?s)sglang\.urls.*{says}"):
        attached_engines(config_of(tmp_path), [at], "new").take_over()
