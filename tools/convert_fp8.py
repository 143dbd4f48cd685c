#!/usr/bin/env python
"""bfloat16 -> FP8: `mslime convert fp8`."""

import sys

from mslime.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "fp8", *sys.argv[1:]]))
