"""The documents: nothing is missing from the index, links lead somewhere, and the picture is of this code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

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


def drawn(what: str) -> dict[str, Any]:
    """The script that draws a picture of docs/images, which is as it is drawn now."""
    drawing = runpy.run_path(str(ROOT / f"scripts/draw_{what}.py"))
    assert (ROOT / f"docs/images/{what}.svg").read_text() == drawing["draw"](), f"renew: python scripts/draw_{what}.py"
    return drawing


def test_the_pictures_are_drawn_from_imports_samples_and_a_plan() -> None:
    edges = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert drawn("packages")["without_shortcuts"](edges) == {"a": {"b"}, "b": {"c"}, "c": set()}
    masks = {event: int(sample.loss_mask.sum()) for event, _, sample in drawn("lifecycle")["rows"]()}
    assert (masks["completed"], masks["branched at the tool call"], masks["on_stale: mask"]) == (13, 3, 7)
    assert [bucket.sender for bucket in drawn("weight_sync")["plan"]().buckets] == [0, 1, 2, 3] * 3
