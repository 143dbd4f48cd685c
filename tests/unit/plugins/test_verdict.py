"""What the report says of a run in sentences: each rule below and above its threshold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mslime.observe.names import METRICS
from mslime_plugins.report.sections import DERIVED, SECTIONS
from mslime_plugins.report.verdict import RULES, judge_run, markdown

STEPS = 20


def run_of(**metrics: Any) -> list[dict[str, Any]]:
    """20 rows; of a metric (`__` for `/`) one value for all steps, or one for each."""
    rows: list[dict[str, Any]] = [{"step": i + 1} for i in range(STEPS)]
    for name, values in metrics.items():
        for row, value in zip(rows, values if isinstance(values, list) else [values] * STEPS, strict=True):
            row[name.replace("__", "/")] = value
    return rows


def long_run(**metrics: tuple[float, float, float]) -> list[dict[str, Any]]:
    """1,000 rows; of a metric its value in the first 300, up to step 980, and in the last 20, which a fifth hides."""
    rows: list[dict[str, Any]] = [{"step": i + 1} for i in range(1000)]
    for name, (begins, goes_on, ends) in metrics.items():
        for row in rows:
            value = begins if row["step"] <= 300 else goes_on if row["step"] <= 980 else ends
            row[name.replace("__", "/")] = value
    return rows


def rising(start: float, end: float) -> list[float]:
    return [start + (end - start) * i / (STEPS - 1) for i in range(STEPS)]


def noisy(level: float) -> list[float]:
    return [level + 0.1 * (-1) ** i for i in range(STEPS)]


def half(value: float | None) -> list[float | None]:
    """0 in the first half, then `value`."""
    return [0.0] * (STEPS // 2) + [value] * (STEPS // 2)


@pytest.mark.parametrize(
    ("topic", "rows", "tone", "words"),
    [
        ("reward", run_of(reward__mean=rising(0.1, 0.9)), "good", "rose from 0.163 to 0.837"),
        ("reward", run_of(reward__mean=rising(0.9, 0.1)), "bad", "fell from 0.837"),
        ("reward", run_of(reward__mean=noisy(0.5)), "bad", "did not move"),
        ("reward", run_of(reward__mean=[*noisy(0.5)[:16], *noisy(0.52)[16:]]), "bad", "a standard error of 0.071"),
        ("reward", run_of(reward__mean=0.0), "bad", "did not move"),
        ("reward", run_of(reward__mean=rising(0.1, 0.9))[:9], "note", "9 steps are too few"),
        (
            "reward", long_run(reward__mean=(0.4, 0.7, 0.0)), "bad",
            "rose from 0.4 to 0.63, and then fell: 0 in the last 20 steps, 0.7 in the 20 up to step 980",
        ),
        ("reward", long_run(reward__mean=(0.1, 0.7, 0.55)), "good", "rose from 0.1 to 0.685"),
        ("held-out accuracy", run_of(**{"eval/a/accuracy": rising(0.2, 0.6)}), "good", "a from 0.2 to 0.6"),
        ("held-out accuracy", run_of(**{"eval/a/accuracy": rising(0.6, 0.2)}), "bad", "a from 0.6 to 0.2"),
        ("held-out accuracy", run_of(**{"eval/a/accuracy": 0.5}), "note", "a from 0.5 to 0.5"),
        (
            "held-out accuracy", run_of(**{"eval/a/accuracy": [*rising(0.2, 0.8)[:19], 0.3]}), "bad",
            "a from 0.2 to 0.3, highest 0.768 after step 19",
        ),
        ("held-out loss", run_of(**{"eval/a/nll": rising(3, 1)}), "good", "a from 3 to 1, lowest 1 after step 20"),
        ("held-out loss", run_of(**{"eval/a/nll": [*rising(3, 1)[:19], 1.03]}), "good", "lowest 1.03 after step 20"),
        ("held-out loss", run_of(**{"eval/a/nll": [*rising(3, 1)[:19], 1.2]}), "bad", "lowest 1.11 after step 19"),
        ("negative log-likelihood", run_of(loss__nll=rising(3, 1)), "good", "fell from 2.84 to 1.16"),
        ("negative log-likelihood", run_of(loss__nll=rising(1, 3)), "bad", "did not fall"),
        ("negative log-likelihood", long_run(loss__nll=(3.0, 1.0, 8.0)), "bad", "8 nats a token now"),
        ("groups without a signal", run_of(reward__zero_variance_share=half(0.6)), "note", "60% of the last groups"),
        ("groups without a signal", run_of(reward__zero_variance_share=half(0.4)), None, ""),
        ("entropy", run_of(entropy__mean=rising(0.9, 0.1)), "bad", "collapses: from 0.837 to 0.163"),
        ("entropy", run_of(entropy__mean=rising(0.9, 0.4)), None, ""),
        ("entropy", long_run(entropy__mean=(0.9, 0.6, 0.001)), "bad", "collapses: from 0.9 to 0.001"),
        ("truncation", run_of(rollout__truncated=half(0.2)), "bad", "20% of the last responses"),
        ("truncation", run_of(rollout__truncated=half(0.05)), None, ""),
        ("truncation", long_run(rollout__truncated=(0.0, 0.0, 0.9)), "bad", "90% of the last responses"),
        ("mismatch", run_of(mismatch__kl=half(0.002)), "note", "0.002 nats"),
        ("mismatch", run_of(mismatch__kl=half(0.02)), "bad", "0.02 nats"),
        ("mismatch", run_of(mismatch__kl=half(0.0005)), None, ""),
        ("mismatch", long_run(mismatch__kl=(0.0, 0.0, 0.02)), "bad", "0.02 nats"),
        (
            "clipped tokens",
            run_of(loss__clip_fraction_below=0.15, loss__clip_fraction_above=0.1), "bad", "25% of the last",
        ),
        ("clipped tokens", run_of(loss__clip_fraction_below=0.1, loss__clip_fraction_above=0.05), None, ""),
        ("clipped tokens", run_of(loss__clip_fraction=0.3), "bad", "30%"),
        (
            "corrected tokens",
            run_of(correction__clipped_fraction=0.08, correction__masked_fraction=0.05), "note", "13% of the last",
        ),
        ("corrected tokens", run_of(correction__clipped_fraction=0.08), None, ""),
        (
            "dropped tokens",
            run_of(
                ledger__dropped_tokens=20, ledger__generated_tokens=100,
                **{"ledger/dropped/stale_tokens": 5, "ledger/dropped/reward_tokens": 15},
            ),
            "note", "400 tokens, 20% of those generated, were dropped, most of them for `reward`",
        ),
        ("dropped tokens", run_of(ledger__dropped_tokens=5, ledger__generated_tokens=100), None, ""),
        ("idle trainers", run_of(idle__trainers=0.6), "note", "60%"),
        ("idle trainers", run_of(idle__trainers=0.4), None, ""),
        ("idle engines", run_of(idle__engines=0.7), "note", "70%"),
        ("gradient norm", run_of(grad_norm=half(None)), "bad", "not finite in 10 steps, first in step 11"),
        ("gradient norm", run_of(grad_norm=[1.0] * 19 + [500.0]), "note", "of step 20 is 500; the median is 1"),
        ("gradient norm", run_of(grad_norm=[1.0] * 19 + [50.0]), None, ""),
        ("reward errors", run_of(reward__errors=half(1)), "bad", "10 rewards"),
        ("reward errors", run_of(reward__errors=0), None, ""),
        ("routing replay", run_of(replay__coverage=[1.0] * 19 + [0.9]), "bad", "only 90%"),
        ("routing replay", run_of(replay__coverage=1.0), None, ""),
        ("routing replay", run_of(replay__coverage=0.7, replay__too_old=0.3), None, ""),
        ("routing replay", run_of(replay__coverage=0.7, replay__too_old=0.2), "bad", "only 90%"),
    ],
)  # fmt: skip
def test_a_rule_speaks_beyond_its_threshold_and_is_named_within(
    topic: str, rows: list[dict[str, Any]], tone: str | None, words: str
) -> None:
    findings, quiet = judge_run(rows)
    if tone is None:
        assert findings == [] and quiet == [topic]
        return
    (finding,) = findings
    assert quiet == [] and finding.rule.topic == topic and finding.tone == tone and words in finding.text
    assert bool(finding.advice) == (tone != "good")


@pytest.mark.parametrize(
    ("loss", "topics"), [("gspo", []), ("ppo", ["clipped tokens"]), ("mine:loss", ["clipped tokens"])]
)
def test_a_loss_that_bounds_much_by_design_is_not_told_that_it_bounds_much(loss: str, topics: list[str]) -> None:
    findings, quiet = judge_run(run_of(loss__clip_fraction=0.4), loss)
    assert [finding.rule.topic for finding in findings] == topics and not quiet


def test_a_run_that_recorded_nothing_of_a_topic_is_not_judged_by_it() -> None:
    assert judge_run([{"step": 1, "lr": 0.1}]) == ([], [])


def test_rules_name_metrics_charts_and_the_page_that_lists_them() -> None:
    charts = {chart.id for charts in SECTIONS.values() for chart in charts}
    assert {rule.chart for rule in RULES} <= charts
    assert {name for rule in RULES for name in rule.needs} <= {*METRICS, *DERIVED}
    page = (Path(__file__).parents[3] / "docs" / "report.md").read_text()
    assert markdown() in page, "python -m mslime_plugins.report.verdict prints the table"
