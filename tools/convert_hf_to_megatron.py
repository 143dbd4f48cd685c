#!/usr/bin/env python
"""Hugging Face -> Megatron torch_dist: `mslime convert to-megatron`."""

import sys

from mslime.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-megatron", *sys.argv[1:]]))
