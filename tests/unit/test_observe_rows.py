"""Rows put together: what several optimizer steps report, and what a step's time is made of."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mslime.observe.names import METRICS, REST, by_step, metric_of, over_optimizer_steps


def test_counts_and_seconds_are_added_extremes_kept_and_means_weighted_by_their_denominators() -> None:
    steps = [
        {"loss/tokens": 10.0, "loss/clip_fraction": 0.1, "mismatch/abs_max": 3.0, "lr": 1.0, "grad_norm": 1.0}
        | {"loss/tokens_age_4": 2.0, "mismatch/kl_age_4": 0.5, "perf/train_seconds": 2.0, "loss/total": 1.0}
        | {"perf/train_tokens_per_s": 100.0, "advantage/mean": 0.25},
        {"loss/tokens": 30.0, "loss/clip_fraction": 0.3, "mismatch/abs_max": 1.0, "lr": 2.0, "grad_norm": 3.0}
        | {"perf/train_seconds": 3.0, "perf/train_tokens_per_s": 200.0, "loss/total": 2.0, "advantage/mean": 0.25},
    ]
    assert over_optimizer_steps(steps) == {
        "loss/tokens": 40.0,
        "loss/clip_fraction": pytest.approx((1 + 9) / 40),
        "mismatch/abs_max": 3.0,
        "lr": 2.0,
        "grad_norm": 2.0,
        "loss/tokens_age_4": 2.0,
        "mismatch/kl_age_4": 0.5,  # the second step had no token of that age
        "perf/train_seconds": 5.0,
        "perf/train_tokens_per_s": pytest.approx((200 + 600) / 5),
        "loss/total": 1.5,
        "advantage/mean": 0.25,
    }


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=5), min_size=1, max_size=4))
def test_a_share_over_several_optimizer_steps_is_that_of_all_their_tokens(steps: list[list[float]]) -> None:
    reported = [{"loss/tokens": float(len(s)), "loss/clip_fraction": sum(s) / len(s)} for s in steps]
    every = [value for step in steps for value in step]
    assert over_optimizer_steps(reported)["loss/clip_fraction"] == pytest.approx(sum(every) / len(every))


def test_steps_without_a_token_have_a_mean_too() -> None:
    found = over_optimizer_steps([{"loss/tokens": 0.0, "loss/clip_fraction": 0.0}] * 2)
    assert found == {"loss/tokens": 0.0, "loss/clip_fraction": 0.0}


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(AssertionError, match="loss/tokns"):
        over_optimizer_steps([{"loss/tokns": 1.0}])


def test_denominators_are_filled_with_the_open_parts_of_the_name() -> None:
    metric = metric_of("mismatch/kl_age_3")
    assert metric is not None and metric.per == "loss/tokens_age_3"
    for name, metric in METRICS.items():
        if metric.per in METRICS:
            assert set(re.findall(r"{\w+}", metric.per)) <= set(re.findall(r"{\w+}", name)), name
        else:
            assert "/" not in metric.per, f"{name}: {metric.per} is not a metric"


def test_what_no_part_of_a_step_explains_is_the_rest_and_a_checkpoint_is_no_part() -> None:
    row = {"step": 1, "perf/step_seconds": 10.0, "perf/train_seconds": 4.0, "weights/seconds": 1.0}
    found = by_step([row | {"perf/checkpoint_seconds": 3.0}, {"step": 0}, {"step": 1, "perf/eval_seconds": 2.0}])
    assert found[0] == {"step": 0} and found[1][REST] == 3.0
