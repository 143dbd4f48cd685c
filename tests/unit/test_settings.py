"""Settings as flags, help and reference: all of them, everywhere, from one schema."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mslime.cli import main
from mslime.config.data import EvalSetConfig
from mslime.config.errors import ConfigError
from mslime.config.loader import load_config, parse_flags, parse_yaml
from mslime.config.schema import RunConfig
from mslime.config.settings import all_settings, as_json_schema, as_markdown, sections

ROOT = Path(__file__).parents[2]
REQUIRED = ["--model.path", "m", "--data.prompts", "p.jsonl"]


def test_every_setting_and_section_is_described() -> None:
    assert [s.path for s in all_settings() if not s.description] == []
    assert [name for name, about in sections().items() if len(about) < 10] == []
    assert [name for name, field in EvalSetConfig.model_fields.items() if not field.description] == []


def test_no_file_of_the_settings_imports_one_that_imports_it() -> None:
    """Imports for type checkers alone count: a section's rules are given what they read, and no whole run."""
    files = {path.stem: ast.parse(path.read_text("utf-8")) for path in (ROOT / "mslime/config").glob("*.py")}
    imports = {
        name: {str(n.module).removeprefix("mslime.config.") for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        for name, tree in files.items()
    }
    TopologicalSorter({name: found & set(files) for name, found in imports.items()}).prepare()  # CycleError names them


def test_the_reference_page_and_the_schema_are_those_of_the_code() -> None:
    assert (ROOT / "docs/settings.md").read_text() == as_markdown(), (
        "mslime check --fields --markdown > docs/settings.md"
    )
    assert (ROOT / "docs/mslime.schema.json").read_text() == as_json_schema(), (
        "mslime check --schema > docs/mslime.schema.json"
    )


def test_every_setting_is_in_help_and_in_the_list_of_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help", "all"])
    told = capsys.readouterr().out
    assert main(["check", "--fields"]) == 0
    listed = capsys.readouterr().out
    for setting in all_settings():
        assert "--" + setting.path.replace("_", "-") in told and f"{setting.path} " in listed


@pytest.mark.parametrize("command", ["train", "plan", "check", "rollout", "eval", "serve", "convert run"])
def test_help_fits_a_screen_and_names_every_section(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 60, "a tall terminal's"
    named = {line.split()[0] for line in lines if line.startswith("  ")}
    assert {name for name in sections() if name and "." not in name} <= named


def test_help_of_a_section_lists_its_settings_and_a_wrong_name_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help", "algorithm"])
    told = capsys.readouterr().out
    for setting in all_settings():
        assert (f"--{setting.path.replace('_', '-')} " in told) == setting.path.startswith("algorithm.")
    assert main(["train", "--help", "rolout"]) == 2 and "did you mean 'rollout'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [(["trian"], "train"), (["reprot", "RUN"], "report"), (["train", "--hepl"], "--help"),
     (["train", "--output-dri", "x"], "--output-dir"), (["plan", "--serach"], "--search")],
)  # fmt: skip
def test_a_misspelt_command_or_flag_is_answered_with_the_nearest(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2 and f"did you mean {meant!r}" in capsys.readouterr().err


def test_a_section_is_listed_by_its_name_and_a_wrong_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--fields", "algorithm.correction"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert lines and all(line.startswith("algorithm.correction.") for line in lines)
    assert main(["check", "--fields", "rolout"]) == 2 and "did you mean 'rollout'" in capsys.readouterr().err
    assert main(["check", "--fields", "sglang"]) == 0 and "chunked_prefill_size" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("path", [s.path for s in all_settings()])
def test_every_setting_can_be_given_as_a_flag_in_both_spellings(path: str) -> None:
    *_, leaf = path.split(".")
    for flag in ("--" + path, "--" + path.replace("_", "-")):
        for words in ([flag, "7"], [f"{flag}=7"]):
            value: Any = parse_flags(words)
            for part in path.split(".")[:-1]:
                value = value[part]
            assert value == {leaf: 7}


def test_the_file_may_stand_anywhere_among_the_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: nowhere}\ndata: {prompts: [p.jsonl]}\nrollout: {group_size: 4}\n")
    errors = list[str]()
    for words in (
        [str(file), "--rollout.group-size", "8"],
        ["--rollout.group-size", "8", str(file)],
        ["--rollout.group-size=8", str(file), "--seed", "3"],
    ):
        assert main(["check", *words]) == 2
        errors.append(capsys.readouterr().err)
    assert "nowhere" in errors[0] and len(set(errors)) == 1


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--rollout.stop", "a", "b"], {"rollout": {"stop": ["a", "b"]}}),
        (["--rollout.stop", "[a, b]"], {"rollout": {"stop": ["a", "b"]}}),
        (["--megatron.overlap-grad-reduce", "--seed", "1"], {"megatron": {"overlap_grad_reduce": True}, "seed": 1}),
        (["--megatron.no-overlap-grad-reduce"], {"megatron": {"overlap_grad_reduce": False}}),
        (["--megatron.overlap-grad-reduce", "false"], {"megatron": {"overlap_grad_reduce": False}}),
        (["--megatron.moe-permute-fusion", "--seed", "1"], {"megatron": {"moe_permute_fusion": True}, "seed": 1}),
        (["--megatron.no-moe-permute-fusion"], {"megatron": {"moe_permute_fusion": False}}),
        (["--rollout.top-k", "-1"], {"rollout": {"top_k": -1}}),
        (["--algorithm.entropy-coef=-1e-3"], {"algorithm": {"entropy_coef": -0.001}}),
        (["--train.lr", "1", "--train.lr", "2"], {"train": {"lr": 2}}),
        (["--data.chat-template-kwargs.think", "false"], {"data": {"chat_template_kwargs": {"think": False}}}),
        (["--sglang.attention-backend", "a"], {"sglang": {"attention_backend": "a"}}),
    ],
)
def test_flags_say_what_yaml_would(words: list[str], values: dict[str, Any]) -> None:
    assert parse_flags(words) == values


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rollout.max-staleness"], "expected one argument"),
        (["base.yaml"], "unrecognized arguments: base.yaml"),
        (["--rollout.group-size", "4", "8"], "unrecognized arguments: 8"),
        (["--model", "m", "--model.path", "m"], "as a value and as a section"),
    ],
)
def test_a_command_line_that_means_nothing_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_flags(words)


def test_a_section_given_as_a_value_is_refused_with_one_of_its_settings() -> None:
    with pytest.raises(ConfigError, match=r"model\.path or --model\.path") as caught:
        load_config(None, ["--model", "m", "--data.prompts", "p.jsonl"])
    assert caught.value.field == "model"


def test_single_values_are_wrapped_for_every_setting_that_is_a_list() -> None:
    config = load_config(None, [*REQUIRED, "--model.ignored-config-fields", "x", "--rollout.stop", "y"])
    assert config.model.ignored_config_fields == ("x",) and config.rollout.stop == ["y"]


@pytest.mark.slow
def test_the_schema_accepts_the_examples_and_refuses_what_the_loader_refuses() -> None:
    schema = json.loads(as_json_schema())
    for example in (ROOT / "examples").glob("**/*.yaml"):
        jsonschema.validate(parse_yaml(example.read_text(), example.name), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": {"path": "m"}, "data": {"prompts": ["p"]}, "rolout": {}}, schema)
    jsonschema.validate(
        {"model": {"path": "m"}, "data": {"prompts": ["p"]}, "sglang": {"chunked_prefill_size": 1}}, schema
    )


def test_help_starts_without_torch_or_an_engine() -> None:
    code = (
        "import sys; from mslime.cli import main\n"
        "try: main(['train', '--help', 'all'])\n"
        "except SystemExit: pass\n"
        "heavy = ('torch', 'ray', 'megatron', 'sglang', 'transformers')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]" and "--rollout.max-staleness" in done.stdout


def test_the_schema_covers_the_whole_run() -> None:
    assert {s.path.split(".")[0] for s in all_settings()} == set(RunConfig.model_fields)
