"""The Python API: light to import, the same answers as the commands, mistakes as exceptions."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

import mslime
from mslime import api
from mslime.checks.run_tables import describe
from mslime.cli import main
from mslime.run import run as control_run
from mslime.run.stop import SIGNALS, StopSignals
from tests.fixtures.tiny_models import make_tiny_qwen3_moe


def values(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    return {
        "name": "first", "output_dir": str(tmp_path), "model": {"path": str(tmp_path / "model")},
        "data": {"prompts": [str(prompts)]}, "rollout": {"max_response_tokens": 32}, **sections,
    }  # fmt: skip


def test_importing_the_package_loads_nothing_and_every_name_is_there_when_used() -> None:
    program = (
        "import sys, mslime\n"
        "heavy = {'pydantic', 'yaml', 'torch', 'ray', 'numpy', 'mslime.config'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert set(dir(mslime)) == set(mslime.__all__)\n"
        "assert all(getattr(mslime, name) for name in mslime.__all__)\n"
        "assert not {'torch', 'ray'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        mslime.trian  # noqa: B018


def test_settings_win_over_sections_and_sections_over_the_source(tmp_path: Path) -> None:
    told = values(
        tmp_path, train={"lr": 1e-5, "num_steps": 7, "min_lr": 1e-7}, sglang={"api_key": "secret", "urls": ["http://a"]}
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(told))
    of_mapping = mslime.load_config(told)
    for source in (told, tmp_path / "run.yaml", str(tmp_path / "run.yaml"), of_mapping):
        config = mslime.load_config(source, "train.lr=1e-4", train={"lr": 1e-3, "num_steps": 8}, name="second")
        assert (config.name, config.train.lr, config.train.num_steps) == ("second", 1e-4, 8)
        assert config.train.min_lr == 1e-7, "the rest of a section stays"
        key = config.sglang.api_key
        assert key is not None and key.get_secret_value() == "secret"
    assert mslime.load_config(of_mapping) == of_mapping


def test_mistakes_are_raised_with_a_way_out(tmp_path: Path) -> None:
    told = values(tmp_path)
    for settings, sections, field, hint in (
        (("train.lrr=1",), {}, "train.lrr", "did you mean 'lr'"),
        (("train.lr",), {}, "settings", "train.lr=1e-6"),
        ((), {"train": {"num_steps": 0}}, "train.num_steps", "expected"),
    ):
        with pytest.raises(mslime.UserError) as caught:
            mslime.load_config(told, *settings, **sections)
        assert caught.value.field == field and hint in caught.value.hint
    with pytest.raises(mslime.UserError, match="config.json"):
        mslime.train(told)


def test_check_says_what_the_command_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    make_tiny_qwen3_moe(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values(tmp_path)))
    assert main(["check", str(tmp_path / "run.yaml")]) == 0
    printed = capsys.readouterr().out
    checked = mslime.check(values(tmp_path))
    assert capsys.readouterr() == ("", ""), "nothing is printed"
    Console().print(describe(checked))
    assert capsys.readouterr().out == printed
    assert checked.model.num_experts == 8


def test_a_second_run_in_one_process_is_refused(tmp_path: Path) -> None:
    with control_run._ONE_AT_A_TIME, pytest.raises(mslime.UserError, match="another run is active in this process"):
        mslime.train(values(tmp_path))
    for _ in range(2):  # and is free again, whatever the one before came to
        with pytest.raises(mslime.UserError, match="config.json"):
            mslime.train(values(tmp_path))


def test_a_run_in_a_thread_ends_when_it_is_asked_and_touches_no_handler() -> None:
    before, caught = [signal.getsignal(number) for number in SIGNALS], list[mslime.Stopped]()
    asked = threading.Event()

    def work() -> None:
        with StopSignals(asked.is_set) as stop:
            assert [signal.getsignal(number) for number in SIGNALS] == before
            stop.check()
            asked.set()
            try:
                stop.check()
            except mslime.Stopped as stopped:
                caught.append(stopped)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert caught[0].signum == signal.SIGTERM and caught[0].save


@pytest.mark.parametrize(("checkpoint", "asked"), [(None, None), (3, "3"), ("newest", "newest"), (Path("a/b"), "a/b")])
def test_an_evaluation_is_the_commands_and_silent_unless_told_otherwise(
    checkpoint: Any, asked: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str | None]] = []

    def fake_evaluated(config: mslime.RunConfig, which: str | None) -> str:
        seen.append((config.observe.progress, which))
        return "scores"

    monkeypatch.setattr("mslime.run.debug.evaluated", fake_evaluated)
    for told in ({}, {"observe": {"progress": "on"}}):
        assert mslime.evaluate(values(tmp_path, **told), checkpoint=checkpoint) == "scores"
    assert seen == [("off", asked), ("on", asked)]


def test_the_metrics_of_a_result_are_the_last_steps_with_a_late_evaluation(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss/total": 2.0}, {"step": 2, "loss/total": 1.0}, {"step": 2, "eval/a/accuracy": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = api._result(tmp_path)
    assert result.steps == 2 and result.metrics == {"loss/total": 1.0, "eval/a/accuracy": 0.5}
