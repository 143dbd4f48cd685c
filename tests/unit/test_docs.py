"""The documents: nothing is missing from the index, links lead somewhere, and the picture is of this code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "docs/decisions/*.md", "examples/*/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What `#...` of a link to the page may be: its headings in small letters, with hyphens for blanks."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_to_a_file_and_a_heading(page: Path) -> None:
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs/index.md"
    named = {(index.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(index.read_text())}
    pages = {path for path in PAGES if path.is_relative_to(ROOT / "docs")} - {index}
    assert {path.resolve() for path in pages} <= named


def test_the_picture_of_the_rooms_is_drawn_from_what_the_code_imports() -> None:
    drawing = runpy.run_path(str(ROOT / "scripts/draw_packages.py"))
    assert (ROOT / "docs/images/packages.svg").read_text() == drawing["draw"](), (
        "renew: python scripts/draw_packages.py"
    )
    edges = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert drawing["without_shortcuts"](edges) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_the_picture_of_a_rollout_is_drawn_from_samples() -> None:
    drawing = runpy.run_path(str(ROOT / "scripts/draw_lifecycle.py"))
    renew = "renew: python scripts/draw_lifecycle.py"
    assert (ROOT / "docs/images/lifecycle.svg").read_text() == drawing["draw"](), renew
    masks = {event: int(sample.loss_mask.sum()) for event, _, sample in drawing["rows"]()}
    assert (masks["completed"], masks["branched at the tool call"], masks["on_stale: mask"]) == (13, 3, 7)


def test_the_picture_of_a_weight_sync_is_drawn_from_a_plan() -> None:
    drawing = runpy.run_path(str(ROOT / "scripts/draw_weight_sync.py"))
    renew = "renew: python scripts/draw_weight_sync.py"
    assert (ROOT / "docs/images/weight_sync.svg").read_text() == drawing["draw"](), renew
    assert [bucket.sender for bucket in drawing["plan"]().buckets] == [0, 1, 2, 3] * 3
