"""Draws docs/images/packages.svg: the packages of mslime on their layers, and their imports.

    python scripts/draw_packages.py

Layers come from the import rules in pyproject.toml, arrows from the imports in the code. An arrow that follows from two
others is left out. `tests/unit/test_docs.py` keeps the picture equal to the code.
"""

from __future__ import annotations

import html
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/images/packages.svg"
WIDTH, LAYER, BOX, HEIGHT = 960, 84, 168, 40
Package = str
Edges = Mapping[Package, set[Package]]


def layers() -> list[list[Package]]:
    """Packages from the top layer down, by the import rules."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    found = next(rule["layers"] for rule in rules if rule["type"] == "layers")
    named = [[package.strip() for package in layer.split("|")] for layer in found]
    return [level for level in named if not _is_small(level)]


def _is_small(level: Sequence[Package]) -> bool:
    """Whether a layer has only single modules for every package: they would only add arrows."""
    return len(level) > 2 and all((ROOT / f"{package.replace('.', '/')}.py").exists() for package in level)


def imports(packages: Sequence[Package]) -> dict[Package, set[Package]]:
    """Imports of each package, without those for type checkers."""
    graph = grimp.build_graph("mslime", exclude_type_checking_imports=True, cache_dir=None)
    edges: dict[Package, set[Package]] = {package: set() for package in packages}
    for module in graph.modules:
        importer = _package_of(module, packages)
        for imported in graph.find_modules_directly_imported_by(module):
            found = _package_of(imported, packages)
            if importer is not None and found is not None and found != importer:
                edges[importer].add(found)
    return edges


def _package_of(module: str, packages: Iterable[Package]) -> Package | None:
    return next((package for package in packages if module == package or module.startswith(f"{package}.")), None)


def without_shortcuts(edges: Edges) -> dict[Package, set[Package]]:
    """Edges without an alternative path of two or more to the same package."""
    return {package: {to for to in found if not any(_reaches(edges, via, to) for via in found - {to})}
            for package, found in edges.items()}  # fmt: skip


def _reaches(edges: Edges, package: Package, target: Package) -> bool:
    return target in edges[package] or any(_reaches(edges, via, target) for via in edges[package])


def draw() -> str:
    """The picture, as SVG."""
    levels = layers()
    packages = [package for level in levels for package in level]
    at = _positions(levels)
    arrows = [
        _arrow(at[package], at[to])
        for package, found in without_shortcuts(imports(packages)).items()
        for to in sorted(found)
    ]
    boxes = [_box(package, at[package]) for package in packages]
    height = LAYER * len(levels) + 8
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
            "<title>Packages of mslime, and which imports which</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0 8 4 0 8z" fill="#7a8699"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            *arrows,
            *boxes,
            "</svg>",
            "",
        ]
    )


def _positions(levels: Sequence[Sequence[Package]]) -> dict[Package, tuple[float, float]]:
    """Centres of the boxes."""
    return {
        package: (WIDTH * (column + 0.5) / len(level), LAYER * (row + 0.5) + 4)
        for row, level in enumerate(levels)
        for column, package in enumerate(level)
    }


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x0, y0), (x1, y1) = start, end
    y0, y1 = y0 + HEIGHT / 2, y1 - HEIGHT / 2
    bend = (y1 - y0) / 2
    path = f"M{x0:.0f} {y0:.0f}C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"
    return f'<path d="{path}" fill="none" stroke="#7a8699" stroke-width="1.2" marker-end="url(#tip)"/>'


def _box(package: Package, centre: tuple[float, float]) -> str:
    x, y = centre
    name = html.escape(package.removeprefix("mslime."))
    return (
        f'<rect x="{x - BOX / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{BOX}" height="{HEIGHT}" rx="6" fill="#eaf1fb" '
        f'stroke="#2f5d9b"/><text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle" font-size="15" fill="#1c2733">'
        f"{name}</text>"
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(PICTURE)
