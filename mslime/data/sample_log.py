"""Every trained response as a line of JSON, for a person to read: `rollouts/step_N.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mslime.data.sample import Group, Sample


class SampleLog:
    """Writes the groups of each step to a file of its own."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / "rollouts"
        self._directory.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, groups: Sequence[Group]) -> Path:
        """One line a response; returns the file. An earlier file of the same step is replaced."""
        path = self._directory / f"step_{step:06d}.jsonl"
        rows = (json.dumps(_row(group, sample), default=str) for group in groups for sample in group.samples)
        path.write_text("".join(f"{row}\n" for row in rows))
        return path


def _row(group: Group, sample: Sample) -> dict[str, object]:
    return {
        "group": group.group_id,
        "index": sample.index,
        "source": group.source,
        "label": sample.label,
        "response": sample.response,
        "reward": sample.reward,
        "status": sample.status.value,
        "tokens": len(sample),
        "trained_tokens": sample.trainable_tokens,
        "aborts": sample.aborts,
        "segments": [[s.start, s.end, s.version, s.engine] for s in sample.segments if s.version is not None],
    }
