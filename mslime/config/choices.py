"""Choices that a setting offers and another room acts on: each is named once, here."""

from __future__ import annotations

from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
"""What trainer ranks and engines run on; `auto` is CUDA where there is a GPU."""

KLType = Literal["k1", "k2", "k3", "low_var"]
"""Per-token estimates of a KL divergence (`algorithms.kl`)."""

PauseMode = Literal["abort", "retract", "in_place"]
"""What becomes of running responses while an engine takes new weights."""

ReplayMode = Literal["r3", "r2", "off"]
"""Whose expert routes the trainer follows: the engine's, those of its own log-prob pass, or none."""

SftLossOn = Literal["all", "last", "each"]
"""Which assistant turns of a conversation are trained."""

Resume = Literal["auto", "older", "never"]
"""Which checkpoint of its own a run continues from."""

ProgressMode = Literal["auto", "on", "off"]
"""Whether the console shows live bars."""

Kept = Literal["some", "all", "none"]
"""How many of the responses are written to files."""
