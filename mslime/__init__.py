"""mslime: reinforcement-learning post-training for large Mixture-of-Experts language models.

Importing this package is cheap and pulls in no engine: torch, megatron, sglang and ray are imported
inside the process that runs them.
"""

__version__ = "0.1.0"
