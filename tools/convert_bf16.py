#!/usr/bin/env python
"""FP8, INT4 or MXFP4 -> plain weights: `mslime convert bf16`."""

import sys

from mslime.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "bf16", *sys.argv[1:]]))
