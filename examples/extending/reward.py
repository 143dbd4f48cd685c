"""A user-defined reward: `reward: {kind: custom, function: "examples.extending.reward:close_to_label"}`."""

from __future__ import annotations

from mslime.data.sample import Sample


def close_to_label(sample: Sample) -> dict[str, object]:
    """Share of the label's characters that are in their place, and two more numbers for the log."""
    response, label = sample.response.strip(), str(sample.label)
    right = sum(a == b for a, b in zip(response, label, strict=False)) / max(len(label), len(response), 1)
    return {"reward": right, "metrics": {"exact": float(right == 1.0), "empty": float(not response)}}
