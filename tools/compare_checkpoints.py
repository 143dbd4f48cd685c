#!/usr/bin/env python
"""Are two checkpoints equal: `mslime convert compare`."""

import sys

from mslime.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "compare", *sys.argv[1:]]))
