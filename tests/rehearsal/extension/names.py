"""What the pybind11 module `transformer_engine_torch` 2.20.2 defines (its pybind.cpp)."""

from __future__ import annotations

from pathlib import Path

FUNCTIONS = Path(__file__).with_name("functions.txt").read_text().split()
CLASSES = ["CommOverlap", "CommOverlapBase", "CommOverlapCore", "CommOverlapHelper", "CommOverlapP2P"]
CLASSES += ["CommOverlapP2PBase", "FP8TensorMeta", "grouped_mlp_experimental"]  # the last is a module of functions
