#!/usr/bin/env python
"""Contents of a checkpoint: `mslime convert inspect`."""

import sys

from mslime.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "inspect", *sys.argv[1:]]))
