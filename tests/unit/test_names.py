"""One class name, one meaning: a reader who greps a class finds one definition."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_top_level_classes_have_unique_names() -> None:
    files = [path for package in ("mslime", "mslime_plugins") for path in sorted((ROOT / package).rglob("*.py"))]
    nodes = (node for path in files for node in ast.parse(path.read_text(encoding="utf-8")).body)
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []
    assert "Sample" in names
