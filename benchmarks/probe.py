"""Cost of the probe after each weight sync, in a real run on real engines (tiny model, CPU).

    python benchmarks/probe.py [--steps 30] [--engines 1] [--layers 4] [--hidden 64] [--experts 8] [--ffn 64]

The run compares no bits after its second sync; with `weights.verify: probe` each engine and the trainer score a fixed
text. `ratio` in the last line, one of JSON, is the pause of the engines over the same pause without the probe, the
median of all steps from the fourth on. The floor is one prefill of 128 tokens and 8 decoding steps on an engine, then
one forward pass of 136 tokens on the trainer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from mslime.observe.names import by_step

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.e2e.harness import start_run
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

SETTLED = 3
"""Steps until engines have recorded how to load, and use the recording."""
SHOWN = ("weights/seconds", "weights/pause_seconds", "weights/send_seconds", "weights/probe_seconds",
         "weights/probe_log_probs", "weights/probe_routes")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    args = _parsed(argv)
    sizes = {"num_hidden_layers": args.layers, "hidden_size": args.hidden, "num_experts": args.experts,
             "moe_intermediate_size": args.ffn}  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        model, prompts = make_tiny_qwen3_moe(root / "model", **sizes), root / "prompts.jsonl"
        prompts.write_text(
            "".join(json.dumps({"prompt": f"{i} + {i} =", "label": str(2 * i)}) + "\n" for i in range(64))
        )
        run = start_run(
            {
                "model": {"path": str(model)},
                "data": {"prompts": [str(prompts)]},
                "cluster": {"device": "cpu"},
                "rollout": {"groups_per_step": 2, "group_size": 4, "max_response_tokens": 32},
                "sglang": {"num_engines": args.engines, "max_total_tokens": 4096},
                "reward": {"kind": "custom", "function": "tests.e2e.rewards:even_tokens"},
                "train": {"num_steps": args.steps, "lr": 1e-4},
                "weights": {"verify": "probe"},
                "checkpoint": {"save_every": 0, "save_hf": False},
            },
            root / "run",
        )
        code = run.finish(1800)
        assert code == 0, run.text()
        rows = by_step(run.rows())[SETTLED:]
    table = Table("metric", "median", "largest")
    for name in SHOWN:
        table.add_row(name, f"{median(r[name] for r in rows):.3g}", f"{max(r[name] for r in rows):.3g}")
    Console().print(table)
    found = {name.removeprefix("weights/"): median(row[name] for row in rows) for name in SHOWN}
    without = median(row["weights/pause_seconds"] - row["weights/probe_seconds"] for row in rows)
    megabytes = rows[-1]["weights/bytes"] / 1e6
    details = {"megabytes": megabytes, "engines": args.engines, "steps": len(rows), **found}
    print(json.dumps({"ratio": found["pause_seconds"] / without, **details}))
    return 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=64)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
