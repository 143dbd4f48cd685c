"""The head of the report: facts about the run, and the most important numbers."""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mslime.config.errors import MALFORMED
from mslime.config.layout import ParallelLayout
from mslime.observe.names import Row, total
from mslime.observe.progress import format_seconds

Tile = tuple[str, str, str]
"""Label, values (one, or first and last), note."""
BETWEEN = " → "


def run_facts(config: dict[str, Any], rows: Sequence[Row]) -> dict[str, str]:
    """Facts about the run; only the time if the configuration is unknown."""
    facts: dict[str, str] = {}
    if config:
        mega, rollout = config["megatron"], config["rollout"]
        facts["model"] = model_name(Path(config["model"]["path"]))
        facts["trainer"] = _layout(mega, config["cluster"]["trainer_ranks"])
        if config["train"]["task"] == "rl":
            facts["batch"] = f"{rollout['groups_per_step']} prompts x {rollout['group_size']} responses"
            facts["max staleness"] = str(rollout["max_staleness"])
            facts["correction"] = str(config["algorithm"]["correction"]["preset"])
            facts["replay"] = str(config["train"]["replay"])
        else:
            facts["batch"] = f"{config['train']['sft_batch_size']} examples, supervised"
        facts["seed"] = str(config["seed"])
    started = next((row["time"] for row in rows if row.get("time") is not None), None)
    if started is not None:
        facts["first row"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(started))
    return facts


def model_name(path: Path) -> str:
    """Family and size, if the checkpoint is readable here: `Qwen3Moe, 30.5 B parameters`; else its path."""
    try:
        described = json.loads((path / "config.json").read_text(encoding="utf-8"))
        (architecture, *_) = described["architectures"]
        family = re.sub(r"For(CausalLM|ConditionalGeneration)$", "", str(architecture))
    except MALFORMED:
        return str(path)
    count = _parameters(path)
    return f"{family}, {short(count)} parameters" if count else family


def _parameters(path: Path) -> int | None:
    """Elements of all tensors, from the headers of the files; None if one is not readable or packs its numbers."""
    try:
        count = 0
        for file in path.glob("*.safetensors"):
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                header = json.loads(opened.read(min(length, 1 << 28)))
            for name, tensor in header.items():
                if name == "__metadata__" or "scale" in name:
                    continue
                if tensor["dtype"][:1] not in "FB":
                    return None
                elements = 1
                for size in tensor["shape"]:
                    elements *= size
                count += elements
        return count or None
    except MALFORMED + (struct.error,):
        return None


_SIZES = {
    "tp": "tensor_model", "pp": "pipeline_model", "vpp": "virtual_pipeline_model", "cp": "context",
    "ep": "expert_model", "etp": "expert_tensor",
}  # fmt: skip


def _layout(megatron: dict[str, Any], trainer_ranks: int | None) -> str:
    """`4 ranks: TP2 EP2`, without sizes of one; of a run that was checked at its start."""
    sizes = {short: megatron[f"{long}_parallel_size"] or 1 for short, long in _SIZES.items()}
    replica = sizes["tp"] * sizes["pp"] * sizes["cp"]
    layout = ParallelLayout(**sizes, dp=(trainer_ranks or replica) // replica)
    ranks = layout.world_size
    return f"{ranks} rank{'s' if ranks > 1 else ''}" + (f" ({layout.describe()})" if ranks > 1 else "")


def headline_tiles(rows: Sequence[Row], config: dict[str, Any]) -> list[Tile]:
    """The headline numbers; those without data are omitted."""
    planned = config["train"]["num_steps"] if config else None
    last = rows[-1]["step"]
    state = "" if planned is None else "finished" if last >= planned else f"of {planned}"
    tiles: list[Tile] = [("steps", str(last), state)]
    accuracy = sorted({name for row in rows for name in row if name.startswith("eval/") and name.endswith("/accuracy")})
    for name in accuracy[:2]:
        tiles += _start_end(rows, name, f"accuracy, {name.split('/')[1]}", "first to last evaluation")
    for name in sorted({name for row in rows for name in row if re.fullmatch(r"eval/[^/]+/nll", name)})[:2]:
        tiles += _start_end(rows, name, f"held-out loss, {name.split('/')[1]}", "first to last evaluation")
    tiles += _start_end(rows, "reward/mean", "reward", "first to last step")
    tiles += _start_end(rows, "loss/nll", "negative log-likelihood", "first to last step")
    step_seconds = total(rows, "perf/step_seconds")
    times = [row["time"] for row in rows if row.get("time") is not None]
    if len(times) > 1:
        tiles.append(("wall time", format_seconds(times[-1] - times[0]), "first to last row"))
    if step_seconds and (waited := total(rows, "perf/wait_seconds")) is not None:
        tiles.append(("trainer waited", f"{100 * waited / step_seconds:.0f}%", "of its time, for rollouts"))
    if trained := total(rows, "ledger/trained_tokens"):
        tiles.append(
            ("tokens trained", short(trained), f"of {short(total(rows, 'ledger/generated_tokens') or 0)} generated")
        )
    return tiles


def _start_end(rows: Sequence[Row], name: str, label: str, note: str) -> list[Tile]:
    values = [row[name] for row in rows if row.get(name) is not None]
    if not values:
        return []
    if len(values) == 1:
        return [(label, f"{values[0]:.2f}", "recorded once")]
    return [(label, f"{values[0]:.2f}{BETWEEN}{values[-1]:.2f}", note)]


def short(count: float) -> str:
    """`30.5 B`, `1.2 M`, `640`."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {suffix}"
    return f"{count:.0f}"
