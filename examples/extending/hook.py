"""A hook after every step: `hooks: {step: "examples.extending.hook:tell"}`."""

from __future__ import annotations

import json

from mslime.observe.hooks import StepRecord


def tell(record: StepRecord) -> dict[str, float]:
    """Write one line a step for another program, and log the cost of a response in tokens."""
    row = record.metrics
    with (record.run_dir / "progress.jsonl").open("a") as file:
        file.write(json.dumps({"done": record.step / record.num_steps, "reward": row.get("reward/mean")}) + "\n")
    # Supervised runs have no responses, and steps that warm up a critic have no loss.
    known = "loss/tokens" in row and "rollout/responses" in row
    return {"tokens_per_response": row["loss/tokens"] / row["rollout/responses"]} if known else {}
