"""Spans of work, and who was idle."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mslime.observe.timeline import Span, Timeline, read_spans, step_window
from mslime_plugins.report.lanes import idle_shares


def test_spans_recorded_by_many_threads_all_read_back(tmp_path: Path) -> None:
    with Timeline(tmp_path) as timeline, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: timeline.record(f"engine {i % 3}", "generate", i, i + 0.5, 1), range(400)))
    spans = read_spans(tmp_path)
    assert [s.start for s in spans] == list(range(400))
    assert {s.lane for s in spans} == {"engine 0", "engine 1", "engine 2"}


def test_requests_served_side_by_side_are_written_as_one_span(tmp_path: Path) -> None:
    with Timeline(tmp_path) as timeline:
        for start in (0.0, 0.1, 0.3, 0.9, 4.0):
            timeline.record("engine 0", "generate", start, start + 0.5, 1)
        timeline.record("engine 0", "generate", 0.2, 0.8, 2)
        timeline.record("engine 1", "generate", 0.2, 0.8, 1)
        timeline.record("driver", "step", 0.0, 5.0, 1)
    found = {(s.lane, s.step, s.start, s.end) for s in read_spans(tmp_path) if s.name == "generate"}
    assert found == {("engine 0", 1, 0.0, 0.8), ("engine 0", 1, 0.9, 1.4), ("engine 0", 1, 4.0, 4.5),
                     ("engine 0", 2, 0.2, 0.8), ("engine 1", 1, 0.2, 0.8)}  # fmt: skip


def test_the_end_of_a_step_puts_its_spans_on_disk(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    timeline.record("trainer 0", "train", 1.0, 2.0, 1)
    timeline.record("driver", "step", 0.0, 3.0, 1)
    assert len(read_spans(tmp_path)) == 2
    timeline.close()


def test_after_a_resume_the_last_attempt_of_a_step_counts_and_a_torn_line_is_skipped(tmp_path: Path) -> None:
    with Timeline(tmp_path) as timeline:
        timeline.record("trainer 0", "train", 1.0, 2.0, 1)
        timeline.record("trainer 0", "train", 3.0, 4.0, 2)
    with (tmp_path / "timeline.jsonl").open("a") as file:
        file.write('{"lane": "trainer 0", "na')
    with Timeline(tmp_path) as timeline:
        timeline._attempt += 1.0
        timeline.record("trainer 0", "train", 13.0, 14.0, 2)
    assert [(s.step, s.start) for s in read_spans(tmp_path)] == [(1, 1.0), (2, 13.0)]
    assert all(json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines() if line[-1] == "}")


@given(st.lists(st.tuples(st.integers(-5, 25), st.integers(0, 12)), max_size=12))
def test_idle_is_the_share_of_moments_that_no_span_covers(parts: list[tuple[int, int]]) -> None:
    spans = [Span("engine 0", "generate", start, start + length, 1) for start, length in parts]
    free = sum(not any(s.start <= t < s.end for s in spans) for t in range(20))
    expected = {"engine 0": pytest.approx(free / 20)} if spans else {}
    assert idle_shares(spans, (0, 20)) == expected


def test_a_step_is_bounded_by_the_drivers_span_or_else_by_its_own() -> None:
    spans = [
        Span("trainer 0", "train", 2, 5, 1),
        Span("engine 0", "generate", 1, 3, 1),
        Span("driver", "step", 0, 9, 2),
    ]
    assert step_window(spans, 1) == (1, 5)
    assert step_window([*spans, Span("driver", "step", 0.5, 6, 1)], 1) == (0.5, 6)
    assert step_window(spans, 7) is None
