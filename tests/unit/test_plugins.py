"""What installed packages add by entry points, and mslime without its own second package."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mslime.cli import main
from mslime.config.errors import ConfigError, RewardError
from mslime.config.plugins import found, load
from mslime.config.schema import RunConfig
from mslime.data.sample import Sample
from mslime.rollout.rewards.scorer import RewardScorer
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

GREETS = """
from mslime.cli.command import Command
from mslime.config.errors import ConfigError

def greet(args):
    print("hello", args.whom)
    return 7


GREET = Command("greet somebody", lambda parser: parser.add_argument("whom"), greet)


def refuse(config):
    raise ConfigError("train.lr", config.train.lr, "is above the limit of this site", "lower it")
"""
REWARDS = """
from mslime.rollout.rewards.reward_kinds import RewardKind, text_problem

HALF = RewardKind(lambda response, label: 0.5, text_problem)
RAISES = RewardKind(lambda response, label: 1 / 0, text_problem)
TEXT = RewardKind(lambda response, label: "good", text_problem)
"""
BLOCKED = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mslime_plugins":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from mslime.config import plugins
from mslime.cli import main
{before}
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("plugins")
    (directory / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    values = {
        "model": {"path": str(make_tiny_qwen3_moe(directory / "model"))},
        "data": {"prompts": [str(directory / "prompts.jsonl")]}, "rollout": {"max_response_tokens": 32},
    }  # fmt: skip
    (directory / "run.yaml").write_text(json.dumps(values))
    return str(directory / "run.yaml")


def install(path: Path, name: str, entries: str, module: str) -> None:
    """A distribution as pip would leave it in `path`."""
    (path / f"{name}.py").write_text(module)
    about = path / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entries)


def test_an_installed_package_adds_a_command_and_a_check(
    tmp_path: Path, run_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", run_file]) == 0
    install(
        tmp_path, "greets", "[mslime.commands]\ngreet = greets:GREET\n[mslime.checks]\nlr = greets:refuse\n", GREETS
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["greet", "you"]) == 7
    assert "hello you" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "greet somebody" in capsys.readouterr().out
    assert main(["check", run_file]) == 2
    assert "above the limit of this site" in capsys.readouterr().err


def test_an_installed_package_adds_a_reward_and_its_mistakes_are_what_on_error_makes_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = "[mslime.rewards]\nhalf = scores:HALF\nraises = scores:RAISES\ntext = scores:TEXT\n"
    install(tmp_path, "scores", entries, REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    sample = Sample.from_prompt(0, 0, [1], "label")
    sample.response = "answer"

    def score(kind: str, on_error: str = "fail") -> float | None:
        reward = RunConfig.model_validate(
            {"model": {"path": "m"}, "data": {"prompts": ["p"]}, "reward": {"kind": kind, "on_error": on_error}}
        ).reward
        return asyncio.run(RewardScorer(reward).score(sample))

    assert score("half") == 0.5
    for kind, said in (("raises", "ZeroDivisionError"), ("text", "good")):
        with pytest.raises(RewardError) as error:
            score(kind)
        assert said in error.value.rule
        assert score(kind, "zero") == 0.0 and score(kind, "drop") is None


def test_a_broken_package_is_named_and_takes_only_its_own_command_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "cracked", "[mslime.commands]\ncrack = cracked:CRACK\nplain = cracked.no:X\n", "1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        load("mslime.commands", "crack", "command line")
    assert error.value.value == "crack" and "cracked" in error.value.rule and "ZeroDivisionError" in error.value.rule
    assert main(["crack"]) == 2
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0 and "ZeroDivisionError" in capsys.readouterr().out


def test_a_broken_package_refuses_no_run_but_by_a_check_of_its_own(
    tmp_path: Path, run_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check that silently went missing would let through what it is for."""
    groups = ("commands", "rewards", "environments", "transports")
    install(tmp_path, "cracked", "".join(f"[mslime.{group}]\ncracked = cracked:X\n" for group in groups), "1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", run_file]) == 0, capsys.readouterr().err
    assert main(["check", run_file, "--weights.transport", "cracked"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err
    install(tmp_path, "cracks", "[mslime.checks]\nsite = cracks:X\n", "1 / 0")
    monkeypatch.syspath_prepend(tmp_path / "nothing")  # what is installed is read once for each `sys.path`
    assert main(["check", run_file]) == 2
    assert "mslime.checks = 'site'" in capsys.readouterr().err


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as error:
        load("mslime.commands", "plann", "command line")
    assert error.value.field == "command line" and "plan" in error.value.rule


@pytest.mark.parametrize(
    "group", ["mslime.commands", "mslime.checks", "mslime.rewards", "mslime.environments", "mslime.transports"]
)
def test_every_entry_point_of_our_own_distribution_can_be_loaded(group: str) -> None:
    points = found(group)  # type: ignore[arg-type]
    assert points and all(load(group, name, "x") is not None for name in points)  # type: ignore[arg-type]


def test_mslime_works_without_its_second_package(run_file: str) -> None:
    """Not installed: its commands do not exist. Named by the metadata, but gone: they say so, and the rest works."""

    def run(before: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", BLOCKED.format(before=before), *words], capture_output=True, text=True, check=False
        )

    absent = "plugins.distributions = lambda: []"
    assert run(absent, "check", run_file).returncode == 0
    without = run(absent, "--help")
    assert without.returncode == 0 and "train" in without.stdout and "doctor" not in without.stdout
    told = run(absent, "plan", run_file).stderr
    assert "unknown command" in told and "scripts/install.sh" in told
    damaged = run("", "--help")
    assert damaged.returncode == 0 and "cannot be imported" in damaged.stdout
    assert "repair or uninstall" in run("", "plan", run_file).stderr
