"""Draws docs/images/weight_sync.svg: filling and sending of buckets in a weight sync.

    python scripts/draw_weight_sync.py

The buckets come from a real plan of a small Qwen3-MoE in TP2 EP2 PP2, so the picture matches the code.
`tests/unit/test_docs.py` keeps it equal.
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from mslime.config.layout import ParallelLayout
from mslime.convert.families import get_family
from mslime.weights.weight_plan import Bucket, Senders, WeightPlan, build_plan

PICTURE = Path(__file__).parents[1] / "docs/images/weight_sync.svg"
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 180, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "rms_norm_eps": 1e-6,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
    "rope_theta": 1e4, "max_position_embeddings": 512,
}  # fmt: skip
CELL, ROW, LEFT, TOP = 66, 62, 300, 92
EXPERTS, SHARED, FILL = "#f2b56b", "#8fb8ea", "#e4e8ee"


def plan() -> WeightPlan:
    """Three or four buckets for each of four senders."""
    layout, rules = ParallelLayout(tp=2, ep=2, pp=2), get_family(MODEL).rules(MODEL)
    return build_plan(rules, Senders.at_most(layout, 8), [[0, 1], [2, 3]], "bfloat16", bucket_bytes=100_000)


def draw() -> str:
    """The picture, as SVG."""
    shown = plan()
    senders = shown.senders.everyone()
    width, height = LEFT + CELL * len(shown.buckets) + 20, TOP + ROW * (len(senders) + 1)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
            "<title>A weight sync: who fills and who sends, bucket by bucket</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *_legend(),
            *(line for number, sender in enumerate(senders) for line in _row(shown, sender, TOP + ROW * number)),
            *_engines(shown, TOP + ROW * len(senders)),
            "</svg>",
            "",
        ]
    )


def _legend() -> list[str]:
    names = {EXPERTS: "sends own experts", SHARED: "sends shared tensors", FILL: "fills its next bucket, or waits"}
    lines = [_text(20, 28, "time, one bucket a column", 14)]
    for place, (colour, name) in enumerate(names.items()):
        x = LEFT + 215 * place
        lines += [_box(x, 14, 26, colour), _text(x + 34, 30, name, 13)]
    return [
        *lines,
        _text(
            LEFT,
            68,
            "a bucket's number in the plan, and the ranks that it is gathered from (own: nothing is gathered)",
            12,
            "#5a6676",
        ),
    ]


def _row(shown: WeightPlan, sender: int, y: int) -> list[str]:
    own = {bucket.index: bucket for bucket in shown.buckets if bucket.sender == sender}
    stage = next(iter(own.values())).stage
    lines = [
        _text(20, y + 20, f"trainer rank {sender}", 15),
        _text(20, y + 38, f"pipeline stage {stage}", 12, "#5a6676"),
    ]
    for index in range(max(own) + 1):
        x = LEFT + CELL * index
        lines += _bucket(own[index], x, y) if index in own else [_box(x + 2, y + 8, CELL - 4, FILL)]
    return lines


def _bucket(bucket: Bucket, x: int, y: int) -> list[str]:
    """A bucket of experts is recognised by its names."""
    experts = ".experts." in bucket.entries[0].name
    held = ", ".join(map(str, bucket.members))
    return [
        _box(x + 2, y, CELL - 4, EXPERTS if experts else SHARED, 44),
        _text(x + 10, y + 19, f"{bucket.index}", 14),
        _text(x + 10, y + 36, "own" if len(bucket.members) == 1 else f"of {held}", 12),
    ]


def _engines(shown: WeightPlan, y: int) -> list[str]:
    lines = [
        _text(20, y + 20, "every engine", 15),
        _text(20, y + 38, "receives and loads, in the plan's order", 12, "#5a6676"),
    ]
    return lines + [
        line
        for bucket in shown.buckets
        for line in (
            _box(LEFT + CELL * bucket.index + 2, y + 8, CELL - 4, "#9ccf8d"),
            _text(LEFT + CELL * bucket.index + 10, y + 26, f"{bucket.index}", 14),
        )
    ]


def _box(x: int, y: int, width: int, colour: str, height: int = 28) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}"/>'


def _text(x: int, y: int, text: str, size: int, colour: str = "#1c2733") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}">{html.escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(PICTURE)
