"""A function that is called after every step: `hooks: {step: "examples.extending.hook:tell"}`."""

from __future__ import annotations

import json

from mslime.observe.hooks import StepRecord


def tell(record: StepRecord) -> dict[str, float]:
    """Write one line a step for another program, and log how many tokens a response costs."""
    tokens = record.metrics["loss/tokens"] / record.metrics["rollout/responses"]
    with (record.run_dir / "progress.jsonl").open("a") as file:
        file.write(json.dumps({"done": record.step / record.num_steps, "reward": record.metrics["reward/mean"]}) + "\n")
    return {"tokens_per_response": tokens}
