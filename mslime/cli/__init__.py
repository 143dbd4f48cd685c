"""The `mslime` command line: parses arguments, calls the package that owns the work, prints."""

from mslime.cli.commands import main as main
