"""What the families say of themselves is what the tests try, and the page about it is theirs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from mslime.cli import main
from mslime.convert.families import FAMILIES
from mslime.convert.support import as_markdown

ROOT = Path(__file__).parents[2]


def test_the_page_about_models_is_what_the_families_say() -> None:
    written = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert written == as_markdown(), "renew it: mslime models --markdown > docs/models.md"


def test_every_named_checkpoint_has_its_published_configuration_among_the_fixtures() -> None:
    configs = [json.loads(path.read_text()) for path in (ROOT / "tests/fixtures/configs").glob("*/config.json")]
    tried = Counter(config["architectures"][0] for config in configs)
    assert tried == {name: len(family.support.models) for name, family in FAMILIES.items()}


def test_a_terminal_of_80_columns_shows_every_family_by_its_whole_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for family in FAMILIES.values():
        assert family.architecture in shown
        assert all(name in shown for model in family.support.models for name in model.split())
