"""What README and docs tell people to type: commands run, or are resolved where they would start a run; flags and
settings exist."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mslime.cli import main
from mslime.cli.commands import _command, _parse
from mslime.config.loader import parse_flags
from mslime.config.passthrough import engine_fields
from mslime.config.settings import all_settings, engine_sections, sections
from tests.fixtures.full_size import make_hollow_checkpoint
from tests.fixtures.launch_scripts import calls, make_fake_mslime, run_script
from tests.fixtures.make_run import make_synthetic_run
from tests.fixtures.tiny_models import make_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = {
    r"bash scripts/(quickstart|test|install)\.sh": "installs; the quickstart is run on its own, before a release",
    r"bash scripts/rehearse_gpu\.sh": "installs 11 GB",
    r"source |export |mkdir |echo ": "the shell's",
    r"hf download|pip install": "network",
    r"(PYTHON=\S+ )?bash scripts/bundle\.sh": "downloads 4 GB; tests/unit/test_bundle.py",
    r"bash scripts/on_gpu\.sh": "a GPU; tests/unit/test_on_gpu_script.py",
    r"ray (start|job)|sbatch ": "a cluster; tests/unit/test_deploy.py, tests/engines/test_placement.py",
    r"python -m sglang\.launch_server": "a server; its flags are SGLang's",
    r"python -m pytest tests/gpu": "GPUs",
    r"python gsm8k_server\.py": "Atropos' own environment; tests/engines/test_atropos.py runs one of its package",
    r"python examples/gsm8k/prepare\.py": "needs the download; tests/unit/test_gsm8k_example.py",
    r"mslime convert (to-|fp8|bf16|int4|compare|run)": "parsed only; tests/engines/test_convert_tools.py runs them",
    r"mslime (check|train) run\.yaml --model\.path my-model-fp8": "needs such a model; tests/e2e/test_quantised.py",
    r"mslime convert merge-lora": "parsed only; tests/unit/test_lora_convert.py merges",
    r"cp |mslime (check|train) mine\.yaml": "needs the quickstart's warm start",
    r"mslime (samples|report) outputs/quickstart/mine": "needs that run",
    r"mslime train examples/quickstart/(lora|several)\.yaml": "needs the quickstart's warm start",
    r"mslime (rollout|eval|train .*--replay) ": "parsed only; tests/e2e/test_debug.py runs them",
    r"mslime doctor": "parsed only; tests/unit/plugins/test_doctor.py and tests/e2e/test_doctor.py run it",
    r"mslime scale ": "parsed only; tests/e2e/test_engine_gone.py asks a run that trains",
    r"mslime serve ": "parsed only; tests/e2e/test_serve.py asks a server",
    r"mslime .*\.\.\.$": "parsed only; more is to be filled in",
}
"""What is not run, and why."""
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
NO_SETTINGS = {
    "sglang.launch_server": "a module of SGLang",
    "megatron.core.dist_checkpointing.load": "a function of megatron-core", "train.jsonl": "a file",
    "lora.md": "a page", "serve.yaml": "a file", "shared.yaml": "a file", "fleet.yaml": "a file",
    "serve.json": "a file", "model.layers": "names of tensors", "model.safetensors.index.json": "a file",
}  # fmt: skip


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def command_lines() -> list[tuple[str, str]]:
    """(page, command) of every shell block, comments taken off and lines that go on joined."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        for language, body in _FENCE.findall(page.read_text()):
            if language not in ("bash", "") or (not language and not body.startswith("mslime ")):
                continue
            for line in body.replace("\\\n", " ").splitlines():
                words = re.sub(r"(^|\s)#.*", "", line).strip()
                found += [(name_of(page), command.strip()) for command in words.split("&&") if command.strip()]
    return found


COMMANDS = command_lines()


def reasons(command: str) -> list[str]:
    return [why for pattern, why in NOT_RUN.items() if re.match(pattern, command)]


def readme_run() -> str:
    """The configuration that README shows."""
    return next(body for language, body in _FENCE.findall((ROOT / "README.md").read_text()) if language == "yaml")


def shown_runs() -> list[tuple[str, str]]:
    """(file name, text) of the configurations whose first line names their file; `run.yaml` is README's."""
    blocks = (body for page in PAGES for language, body in _FENCE.findall(page.read_text()) if language == "yaml")
    return [(named[1], body) for body in blocks if (named := re.match(r"# (?!run)([\w-]+\.yaml)\n", body))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory where the pages' names are: hollow checkpoints, prompts, README's run.yaml, finished runs."""
    place = tmp_path_factory.mktemp("place")
    row = json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}) + "\n"
    for name in ("math", "aime", "gsm8k/train", "gsm8k/test"):
        path = place / "data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(row)
    for model, called in (("qwen3-30B-A3B", "Qwen3-30B-A3B"), ("qwen2.5-0.5B", "Qwen2.5-0.5B-Instruct")):
        make_hollow_checkpoint(model, place / "models" / called)
        make_tokenizer(place / "models" / called)
    (place / "Qwen3-30B-A3B").symlink_to(place / "models" / "Qwen3-30B-A3B")
    (place / "examples").symlink_to(ROOT / "examples")
    for name in ("run.yaml", "RUN.yaml"):
        (place / name).write_text(in_place(readme_run(), place))
    for name, text in shown_runs():
        (place / name).write_text(in_place(text, place))
    for run in {run for _, command in COMMANDS for run in re.findall(r"\boutputs/([\w-]+)", command)}:
        make_synthetic_run(place / "outputs" / run, steps=10)
    return place


def in_place(text: str, place: Path) -> str:
    """Absolute paths of the pages as ours."""
    return re.sub(r"(?<![\w.])/(?:shared/)?(models|data|outputs)\b", rf"{place}/\1", text)


@pytest.fixture
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(place)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    yield place


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {command[:60]}" for page, command in COMMANDS])
def test_a_command_does_what_the_page_says(
    page: str, command: str, there: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = shlex.split(in_place(command, there))
    if words[0] == "mslime" and reasons(command):
        _parse([word for word in words[1:] if word != "..."])
    elif words[0] == "mslime":
        # What would start a run is resolved instead.
        words = ["check", *words[2:]] if words[1] == "train" else words[1:]
        try:
            assert main(words) == 0, capsys.readouterr()
        except SystemExit as end:  # --help
            assert end.code == 0
        assert capsys.readouterr().out
    elif words[0].startswith("--"):
        assert parse_flags(words)
    elif not reasons(command) and (script := re.search(r"\bbash scripts/run-(\S+)\.sh", command)):
        at = words.index("bash")
        environment = dict(word.split("=", 1) for word in words[:at])
        done = run_script(script[1], make_fake_mslime(tmp_path), *words[at + 2 :], CHECK_ONLY="1", **environment)
        assert done.returncode == 0, done.stderr
        [check] = calls(done)
        assert main(check) == 0, capsys.readouterr()
    else:
        assert reasons(command), "run it here, or say in NOT_RUN why not"
        for named in re.findall(r"\b(?:scripts|examples|deploy|tests)/[\w./-]+", command):
            assert (ROOT / named).exists(), named
        if words[:1] == ["bash"] and words[1].startswith("scripts/"):
            known = (ROOT / words[1]).read_text()
            assert all(flag in known for flag in words[2:] if flag.startswith("--")), command


def test_every_exception_is_still_needed() -> None:
    for pattern in NOT_RUN:
        assert any(re.match(pattern, command) for _, command in COMMANDS), pattern


def exists(path: str) -> bool:
    """Whether `path` is a setting, a section, a field of an engine's own, or within a setting that is a mapping."""
    path = re.sub(r"\[.*?\]", "", path).replace("-", "_")
    paths = {setting.path for setting in all_settings()}
    section, _, leaf = path.rpartition(".")
    head, _, negated = leaf.partition("no_")
    if path in paths | set(sections()) or section in paths or (not head and f"{section}.{negated}" in paths):
        return True
    engines = engine_sections()
    return section in engines and bool({leaf, negated} & set(engine_fields(engines[section].engine)))


def texts(page: Path) -> Iterator[str]:
    """Everything on a page that is code: inline and in blocks other than of Python."""
    text = page.read_text()
    yield from (body for language, body in _FENCE.findall(text) if language != "python")
    yield from _INLINE.findall(_FENCE.sub("", text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_setting_and_flag_of_a_section_exists(page: Path) -> None:
    heads = "|".join(sorted({name.partition(".")[0] for name in sections() if name}))
    token = re.compile(rf"(?<![\w./-])(?:--)?((?:{heads})(?:\.[A-Za-z_][\w-]*(?:\[\w*\])?)+)(?![\w(]|\.\w)")
    named = {match[1] for text in texts(page) for match in token.finditer(text)} - set(NO_SETTINGS)
    unknown = sorted(path for path in named if not exists(path))
    assert not unknown, unknown


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_key_of_a_yaml_block_exists(page: Path) -> None:
    known = {name.partition(".")[0] for name in sections() if name} | {"name", "output_dir", "seed"}

    def keys(tree: dict[str, Any], prefix: str) -> Iterator[str]:
        for key, value in tree.items():
            path = f"{prefix}{key}"
            yield path
            if isinstance(value, dict) and path in sections():
                yield from keys(value, f"{path}.")

    for language, body in _FENCE.findall(page.read_text()):
        tree = yaml.safe_load(body) if language == "yaml" else None
        if isinstance(tree, dict) and set(tree) & known:
            unknown = [path for path in keys(tree, "") if not exists(path)]
            assert not unknown, unknown


def told_by(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    everything = ["all"] if command == ["convert", "run"] or _command(command[0]).takes_settings else []
    with pytest.raises(SystemExit) as end:
        main([*command, "--help", *everything])
    assert end.value.code == 0, command
    return capsys.readouterr().out


def test_every_command_that_is_named_exists_with_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[tuple[str, ...], set[str]] = {}
    typed = [command for _, command in COMMANDS]
    for page in PAGES:
        for text in (*typed, *_INLINE.findall(_FENCE.sub("", page.read_text()))):
            for command, sub, rest in re.findall(r"(?<![\w./-])mslime ([a-z]\w*)(?: ([a-z][\w-]+))?([^\n|&#]*)", text):
                name = (command, sub) if command == "convert" and sub else (command,)
                flags = re.findall(r"(?<!\S)--[a-z][a-z-]*(?=[\s=]|$)", rest)
                seen.setdefault(name, set()).update(flags)
    assert {("train",), ("check",), ("plan",), ("report",), ("convert", "run")} <= set(seen)
    for name, flags in seen.items():
        told = told_by(list(name), capsys)
        assert all(flag in told for flag in flags), (name, flags)


def test_a_name_that_is_wrong_is_found() -> None:
    for wrong in ("rollout.max_stale", "train.lrr", "megatron.no_such_field", "algorithm.corection.preset"):
        assert not exists(wrong)
    for right in ("rollout.max_staleness", "megatron.no-moe-permute-fusion", "cluster.env.NCCL_DEBUG",
                  "data.eval_sets[0].path", "algorithm.correction", "sglang.chunked_prefill_size"):  # fmt: skip
        assert exists(right), right
    assert not reasons("mslime trian run.yaml") and os.path.isabs(in_place("/models/x", Path("/place")))
