"""A hook for every sample: `hooks: {sample: "examples.extending.sample_hook:spread"}`."""

from __future__ import annotations

from mslime.data.sample import Sample


def spread(sample: Sample) -> dict[str, float]:
    """Log the number of weight versions of a response, and the log-prob of its least likely token."""
    versions = {segment.version for segment in sample.segments if segment.trainable}
    trained = sample.log_probs[sample.loss_mask]
    return {"versions": float(len(versions)), **({"least_log_prob": float(trained.min())} if len(trained) else {})}
