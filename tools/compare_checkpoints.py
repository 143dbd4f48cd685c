#!/usr/bin/env python
"""Compare two checkpoints: `mslime convert compare`."""

import sys

from mslime.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "compare", *sys.argv[1:]]))
