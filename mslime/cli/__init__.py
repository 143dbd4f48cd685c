"""The `mslime` command: what a person types and reads. Parses, calls the package that owns the work, prints."""

from mslime.cli.commands import main as main
