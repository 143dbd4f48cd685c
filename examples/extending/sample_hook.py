"""A function that is called for every sample: `hooks: {sample: "examples.extending.sample_hook:spread"}`."""

from __future__ import annotations

from mslime.data.sample import Sample


def spread(sample: Sample) -> dict[str, float]:
    """Log from how many weight versions a response comes, and the least likely token of it."""
    versions = {segment.version for segment in sample.segments if segment.trainable}
    trained = sample.log_probs[sample.loss_mask]
    return {"versions": float(len(versions)), **({"least_log_prob": float(trained.min())} if len(trained) else {})}
