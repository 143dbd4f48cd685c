"""Keys of engines: which request carries which, where they come from, and where they never show."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from mslime.backends.sglang.flags import command_line, server_fields
from mslime.backends.sglang.launch import HiddenKey
from mslime.config.engines import SGLANG_RESERVED
from mslime.config.errors import ConfigError
from mslime.config.keys import REDACTED, EngineKeys
from mslime.config.loader import build
from mslime.config.passthrough import sglang_fields
from mslime.config.resolved import engine_spec
from mslime.config.schema import RunConfig
from mslime.run.run import write_resolved
from tests.fixtures.least import least

LITERAL = "sk-very-secret"


def run(**sglang: Any) -> RunConfig:
    return least(sglang=sglang)


def test_each_path_gets_the_key_that_opens_it() -> None:
    both, one, none = EngineKeys("k", "a"), EngineKeys("k"), EngineKeys()
    assert both.headers("/generate") == {"Authorization": "Bearer k"}
    assert both.headers("/pause_generation") == {"Authorization": "Bearer a"}
    assert one.headers("/pause_generation") == {"Authorization": "Bearer k"}
    assert none.headers("/generate") == {} and EngineKeys("", "a").headers("/generate") == {}


def test_every_run_has_another_key() -> None:
    drawn = {EngineKeys.random().api for _ in range(20)}
    assert len(drawn) == 20 and min(map(len, drawn)) >= 40
    assert "k" not in repr(EngineKeys("k", "k")).replace("EngineKeys", "")


def test_a_key_is_read_from_where_the_setting_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("from-a-file\n")
    monkeypatch.setenv("THE_KEY", "from-the-environment")
    assert run().sglang.keys() is None
    assert run(api_key=LITERAL).sglang.keys() == EngineKeys(LITERAL)
    found = run(api_key="env:THE_KEY", admin_api_key=f"file:{file}").sglang.keys()
    assert found == EngineKeys("from-the-environment", "from-a-file")


@pytest.mark.parametrize(
    ("setting", "says"),
    [("env:NOT_SET_ANYWHERE", "is not set"), ("file:/nowhere/key", "cannot be read"), ("file:/dev/null", "is empty")],
)
def test_a_key_that_is_not_there_is_named(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"sglang\.api_key.*{says}"):
        run(api_key=setting).sglang.keys()


def test_a_written_configuration_tells_where_a_key_is_and_never_the_key(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    config = run(api_key=LITERAL, admin_api_key="env:ADMIN", urls=["http://h:1"])
    write_resolved(config, path)
    assert LITERAL not in path.read_text() + json.dumps(config.as_dict()) + repr(config)
    written = yaml.safe_load(path.read_text())["sglang"]
    assert (written["api_key"], written["admin_api_key"]) == (REDACTED, "env:ADMIN")
    with pytest.raises(ConfigError, match="env:NAME or file:PATH"):
        build(yaml.safe_load(path.read_text()))
    assert pickle.loads(pickle.dumps(config)).sglang.keys is not None


def test_no_key_stands_in_a_servers_command_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = least(model={"path": str(tmp_path)}, sglang={"api_key": LITERAL})
    assert LITERAL not in " ".join(command_line(server_fields(engine_spec(config), 0, "h", 1)))
    hidden = HiddenKey(LITERAL)
    assert LITERAL not in f"server_args={ {'api_key': hidden} }" and hidden == LITERAL
    assert pickle.loads(pickle.dumps(hidden)) == LITERAL


@pytest.mark.parametrize("name", SGLANG_RESERVED)
def test_settings_that_would_break_a_run_are_refused_by_name(name: str) -> None:
    assert name in sglang_fields(), "the installed engine knows it"
    with pytest.raises(ConfigError, match=rf"sglang\.{name}.*mslime sets this field itself"):
        run(extra={name: 1})
