"""The parts of benchmarks/quantised_engines.py that run no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.quantised_engines import COLUMNS, FORMATS, SIZES, VARIANTS, measured, settings_of, table
from examples.tiny_model import model_config
from mslime.config.loader import build


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_differs_in_what_engines_hold_correction_and_replay(name: str) -> None:
    config = build(settings_of(name, Path("out"), 7, 12))
    weights, _ = VARIANTS[name]
    assert config.model.path == Path("out") / ("sft/hf" if weights == "plain" else f"sft-{weights}")
    assert (config.algorithm.correction.preset == "tis") == name.endswith(("tis", "both"))
    assert (config.train.replay == "r3") == name.endswith(("r3", "both"))
    assert config.rollout.max_staleness == 0 and config.train.num_steps == 12, "only quantisation is between them"
    assert weights in (*FORMATS, "plain")


def test_its_sizes_are_whole_blocks() -> None:
    config = model_config(32, **SIZES)
    widths = (config.hidden_size, config.moe_intermediate_size, config.num_key_value_heads * config.head_dim)
    assert all(width and width % 128 == 0 for width in widths)
    plain = model_config(32)
    assert (plain.moe_intermediate_size, plain.num_key_value_heads) == (96, 2), "the quickstart's stay"


def test_means_leave_out_what_is_not_known_and_scores_keep_their_steps() -> None:
    rows: list[dict[str, Any]] = [
        {"step": 0, "eval/held_out/accuracy": 0.25},
        {"step": 1, "perf/step_seconds": 1.0, "reward/mean": 0.25, "mismatch/kl": 0.5, "replay/agreement": None},
        {"step": 2, "perf/step_seconds": 1.0, "reward/mean": 0.75, "mismatch/kl": 0.25, "eval/held_out/accuracy": 0.5},
    ]
    found = measured(rows)
    assert found["steps"] == 2 and found["reward"] == [0.25, 0.75] and found["held_out"] == {0: 0.25, 2: 0.5}
    assert found["means"]["mismatch/kl"] == 0.375 and found["means"]["replay/agreement"] is None
    console = Console(width=300, record=True)
    console.print(table({"fp8": found}))
    said = console.export_text()
    assert (
        "0.38" in said
        and "25.0% > 50.0%" in said
        and " - " in said
        and all(head.split()[0] in said for head in COLUMNS)
    )
