#!/usr/bin/env python
"""Megatron torch_dist -> Hugging Face: `mslime convert to-hf`."""

import sys

from mslime.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-hf", *sys.argv[1:]]))
