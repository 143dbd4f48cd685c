#!/usr/bin/env python
"""bfloat16 -> INT4 (compressed-tensors): `mslime convert int4`."""

import sys

from mslime.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "int4", *sys.argv[1:]]))
