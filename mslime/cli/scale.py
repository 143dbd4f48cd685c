"""`mslime scale`: show and change the engines of an active run."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mslime.cli.command import Command
from mslime.config.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

LOOK_EVERY_S = 1.0
CHANGING = ("starting", "joining", "leaving")


def _add_arguments(parser: Any) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="outputs/NAME")
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--engines", type=int, metavar="N", help="start or stop engines until mslime runs N of them")
    change.add_argument("--attach", metavar="URL", help="add a running server (docs/fleet.md)")
    change.add_argument("--drain", metavar="ENGINE", help="drain and remove this engine: its name or URL")
    parser.add_argument(
        "--key", default="", metavar="WHERE", help="with --attach: the server's key, as env:NAME or file:PATH"
    )
    parser.add_argument(
        "--admin-key",
        default="",
        metavar="WHERE",
        help="with --attach: the server's admin key, if it has one, in the same form",
    )
    parser.add_argument("--no-wait", action="store_true", help="return at once, without waiting for the change")
    parser.add_argument("--json", action="store_true", help="print the engines as JSON")


def run_scale(args: argparse.Namespace) -> int:
    """Send the request, wait until it is done, show the engines; returns 1 if it was rejected."""
    from rich.console import Console

    console, order = Console(), order_of(args)
    found = asyncio.run(_ask(args.run_dir, order))
    number = found.get("number")
    if number is not None and not args.no_wait:
        found = _wait(args.run_dir, number, found, console)
    result = found["results"].get(str(number), "")
    if args.json:
        console.print_json(data=found)
    else:
        if number is not None:
            console.print(result or "the change will be made at the run's next weight sync")
        console.print(as_table(found["engines"]))
    return 1 if result.startswith("refused") else 0


def order_of(args: argparse.Namespace) -> dict[str, Any] | None:
    """Body of the request; None only shows the engines. Raises ConfigError for a missing key."""
    from pydantic import SecretStr

    from mslime.config.keys import read_secret

    if args.attach is None and (args.key or args.admin_key):
        raise ConfigError("--key", args.key or args.admin_key, "needs --attach", "name the server: --attach URL")
    order = {name: value for name in ("engines", "attach", "drain") if (value := getattr(args, name)) is not None}
    for name, flag, where in (("api_key", "--key", args.key), ("admin_api_key", "--admin-key", args.admin_key)):
        if where:
            order[name] = read_secret(SecretStr(where), flag)
    return order or None


def _wait(run_dir: Path, number: int, found: Mapping[str, Any], console: Any) -> dict[str, Any]:
    with console.status("waiting for the run's next weight sync") as status:
        while number in found["waiting"] or any(engine["state"] in CHANGING for engine in found["engines"]):
            if number not in found["waiting"]:
                names = ", ".join(f"{e['name']} {e['state']}" for e in found["engines"] if e["state"] in CHANGING)
                status.update(f"{found['results'].get(str(number), '')}; {names}")
            time.sleep(LOOK_EVERY_S)
            found = asyncio.run(_ask(run_dir, None))
    return dict(found)


async def _ask(run_dir: Path, order: dict[str, Any] | None) -> dict[str, Any]:
    from mslime.run.endpoint import ask

    return await ask(run_dir, order)


def as_table(engines: Sequence[Mapping[str, Any]]) -> Table:
    """Table of the engines, one a row."""
    from rich.table import Table

    table = Table("engine", "state", "url", "started by", "why")
    for engine in engines:
        by = "mslime" if engine["launched"] else "somebody else"
        table.add_row(engine["name"], engine["state"], engine["url"], by, engine["why"].splitlines()[0] if engine["why"]
                      else "")  # fmt: skip
    return table


SCALE = Command(
    "show, add or remove the engines of a run that is training",
    _add_arguments,
    run_scale,
    description="Shows the engines of an active run. With an option, changes them at the run's next weight sync, "
    "without losing generated tokens. Call it on the machine of the run's driver.",
)
