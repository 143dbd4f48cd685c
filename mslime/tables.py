"""Tables for a terminal, in the format of every command."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table


def facts_table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Titled list of facts: name and value."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return table
