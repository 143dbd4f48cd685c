"""The HTML report, from a synthetic run and from broken, partial and missing ones."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest

from mslime.cli import main
from mslime.config.errors import UserError
from mslime.data.sample_log import KINDS
from mslime.observe.metrics import own_description
from mslime.observe.names import METRICS, is_known
from mslime.observe.samples import file_of
from mslime.observe.timeline import Span
from mslime_plugins.api import report
from mslime_plugins.report.charts import MAX_HEAT_COLUMNS, MAX_POINTS, thin
from mslime_plugins.report.compare import write_comparison
from mslime_plugins.report.headline import model_name
from mslime_plugins.report.lanes import idle_by_step
from mslime_plugins.report.page import write_report
from mslime_plugins.report.samples_command import SampleSelection, find_file
from mslime_plugins.report.sections import DERIVED, SECTIONS
from tests.fixtures.make_run import make_synthetic_run
from tests.unit.test_several_adapters import config as several

ALL_CHARTS = [chart for charts in SECTIONS.values() for chart in charts]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_synthetic_run(tmp_path_factory.mktemp("runs") / "synthetic", steps=40)


@pytest.fixture
def own_run(run_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_dir, tmp_path / "run"))


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def rewrite_rows(run_dir: Path, change: Any) -> None:
    path = run_dir / "metrics.jsonl"
    rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class References(HTMLParser):
    """Collects what a page would load: attributes that name another resource."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_the_page_needs_nothing_but_itself(run_dir: Path) -> None:
    page = write_report(run_dir).read_text()
    parser = References()
    parser.feed(page)
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    assert parser.found and {reference.removeprefix("#") for reference in parser.found} <= ids, "links within the page"
    assert "http://" not in page and "https://" not in page and "fetch(" not in page and "import(" not in page
    assert not re.search(r"@import|url\(", page)


def test_a_full_run_has_every_chart_and_nothing_missing(run_dir: Path) -> None:
    page = write_report(run_dir).read_text()
    assert [c["id"] for c in page_data(page)["charts"]] == [c.id for c in ALL_CHARTS]
    for chart in ALL_CHARTS:
        assert f'id="{chart.id}"' in page
    assert "Not drawn" not in page and 'id="samples-section"' in page


def test_charts_ask_only_for_metrics_that_exist() -> None:
    for chart in ALL_CHARTS:
        for series in chart.series:
            for name in (series.metric, *(series.band or ())):
                assert is_known(name) or name in DERIVED, name
        assert METRICS.keys() >= chart.each.keys(), chart.each


def test_charts_draw_the_recorded_numbers(run_dir: Path) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    charts = {c["id"]: c for c in page_data(write_report(run_dir).read_text())["charts"]}
    assert charts["reward"]["steps"] == list(range(1, 41))
    assert charts["reward"]["series"][0]["values"] == pytest.approx([r["reward/mean"] for r in rows[1:]], rel=1e-5)
    assert charts["accuracy"]["steps"] == [0, 10, 20, 30, 40]
    assert [s["label"] for s in charts["accuracy"]["series"]] == ["held_out", "held_out pass@4"]
    assert [s["label"] for s in charts["mismatch-position"]["series"]] == ["from 0", "from 64", "from 256"]
    assert charts["mismatch-age"]["series"][2]["values"][:3] == [
        None,
        None,
        pytest.approx(rows[3]["mismatch/kl_age_2"], rel=1e-5),
    ]
    assert charts["agreement-layers"]["layers"] == ["0", "1", "2", "3"]
    step_time = [sum(s["values"][5] or 0 for s in charts["step-time"]["series"])]
    assert step_time == pytest.approx([rows[6]["perf/step_seconds"]], rel=1e-4)


def test_the_headline_tells_start_and_end_accuracy_and_the_layout(run_dir: Path) -> None:
    page = write_report(run_dir).read_text()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first, last = (f"{rows[i]['eval/held_out/accuracy']:.2f}" for i in (0, -1))
    assert f"{first}<i>&#8594;</i>{last}" in page
    assert "2 ranks (TP2 EP2)" in page and "16 prompts x 8 responses" in page and "<h1>synthetic</h1>" in page


def test_an_unfinished_run_with_a_torn_last_line_is_reported_up_to_there(own_run: Path) -> None:
    path = own_run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:21]) + '\n{"step": 21, "reward/me')
    page = write_report(own_run).read_text()
    assert page_data(page)["charts"][0]["steps"][-1] == 20
    assert "<small>of 40</small>" in page


SECONDS_AGO = [3 * 3600 + 60 * (9 - i) + 20 for i in range(10)]
"""Of ten rows: the last is three hours old, a step takes a minute."""


def run_in(run_dir: Path, seconds_ago: list[int], **owner: Any) -> str:
    """The first sentence of the report of a run that has done 10 of its 40 steps, and whose lock says `owner`."""
    make_synthetic_run(run_dir, steps=1, planned=40)
    rows = [{"step": i + 1, "time": time.time() - ago, "lr": 1.0} for i, ago in enumerate(seconds_ago)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if owner:
        (run_dir / ".lock").write_text(json.dumps(own_description() | owner))
    found = re.search(r'<ul class="verdict"><li class="(\w+)"><b>(.*?)</b>', write_report(run_dir).read_text())
    assert found is not None
    return f"{found[1]}: {found[2]}"


def test_the_report_says_first_whether_a_run_lives_by_its_lock_and_the_age_of_its_last_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, host = "10 of 40 steps are done, the last row is 3h 00m old", socket.gethostname()
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: 1.0)
    gone = run_in(tmp_path / "gone", SECONDS_AGO, pid=9453, process_started=0.0)
    assert gone == f"bad: The run has stopped: {done}, and process 9453 on {host} has ended."
    another = run_in(tmp_path / "another", SECONDS_AGO, pid=os.getpid(), process_started=0.0)
    assert another == gone.replace("9453", str(os.getpid())), "a process of this number began later"
    hangs = run_in(tmp_path / "hangs", SECONDS_AGO, pid=os.getpid())
    assert hangs == f"note: process {os.getpid()} on {host} runs, but {done}: a step took 1m 00s."
    fresh = run_in(tmp_path / "lives", [ago - 3 * 3600 for ago in SECONDS_AGO], pid=os.getpid())
    assert fresh.startswith("good: The run is in progress: 10 of 40 steps are done, the last row is ")
    assert re.search(rf" old, process {os.getpid()} on {host} runs. Expected end in 29m \d\ds\.", fresh)
    elsewhere = run_in(tmp_path / "elsewhere", SECONDS_AGO, host="node7")
    assert elsewhere == f"note: {done}; this machine cannot see whether process {os.getpid()} on node7 still runs."
    unknown = run_in(tmp_path / "unknown", SECONDS_AGO)
    assert unknown == f"note: {done}; no lock in its directory names its process."
    (tmp_path / "several").mkdir()
    shutil.copy(tmp_path / "elsewhere" / ".lock", tmp_path / "several" / ".lock")
    assert run_in(tmp_path / "several" / "adapters" / "one", SECONDS_AGO) == elsewhere


def test_missing_metrics_are_named_as_not_recorded(own_run: Path) -> None:
    rewrite_rows(own_run, lambda row: {k: v for k, v in row.items() if k in ("step", "time", "loss/total", "lr")})
    (own_run / "timeline.jsonl").unlink()
    (own_run / "config.yaml").unlink()
    page = write_report(own_run).read_text()
    assert [c["id"] for c in page_data(page)["charts"]] == ["loss"]
    for title in ("Reward", "Mismatch KL", "Route agreement by layer", "Ledger", "Step time", "timeline.jsonl"):
        assert re.search(rf"Not recorded in this run:</b>[^<]*{title}", page), title
    assert page.count("Not recorded") == 1 and re.findall(r"<h2>(.*?)</h2>", page) == [
        "Verdict", "Learning", "Samples", "Not drawn", "Configuration",
    ], "sections without data are left out"  # fmt: skip


def test_values_that_were_not_finite_leave_a_gap(own_run: Path) -> None:
    rewrite_rows(own_run, lambda row: row | ({"reward/mean": None} if row["step"] == 7 else {}))
    chart = page_data(write_report(own_run).read_text())["charts"][0]
    assert 7 not in chart["steps"] or chart["series"][0]["values"][chart["steps"].index(7)] is None


def test_rows_of_one_step_are_joined(own_run: Path) -> None:
    with (own_run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 40, "eval/other/accuracy": 0.5}) + "\n")
    charts = page_data(write_report(own_run).read_text())["charts"]
    assert [s["label"] for s in charts[1]["series"]] == ["held_out", "other", "held_out pass@4"]
    assert charts[0]["steps"].count(40) == 1


def test_steps_without_a_row_or_with_two_are_told(own_run: Path) -> None:
    path = own_run / "metrics.jsonl"
    assert "metrics.jsonl:" not in write_report(own_run).read_text()
    lines = path.read_text().splitlines()
    # As an evaluation beside training writes them.
    late_scores = json.dumps({"step": 40, "time": 1.0, "eval/held_out/accuracy@1": 0.5, "version": 40.0})
    path.write_text("\n".join([*lines[:5], *lines[8:], lines[30], *lines[35:37], late_scores]) + "\n")
    gap = "steps without a row: 3, the first is 5"
    told = f"{gap}; steps with two rows, of which the later counts: 3, the first is 30"
    assert f'<li class="note"><b>metrics.jsonl: {told}.</b></li>' in write_report(own_run).read_text()


def test_a_run_without_steps_or_directory_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)metrics.jsonl is missing.*hint"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"metrics\.jsonl is empty"):
        write_report(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        write_report(tmp_path / "nowhere")


def test_names_from_the_run_cannot_break_out_of_the_page(own_run: Path) -> None:
    evil = "</script><script>alert(1)</script>{{data}}"
    text = (own_run / "config.yaml").read_text()
    (own_run / "config.yaml").write_text(text.replace("name: synthetic", f"name: '{evil}'", 1))
    with (own_run / "timeline.jsonl").open("a") as file:
        file.write(json.dumps({"lane": evil, "name": evil, "start": 0, "end": 1, "step": 1, "attempt": 9e9}) + "\n")
    page = write_report(own_run).read_text()
    assert "<script>alert" not in page
    assert page.count("<script") == 2 and page_data(page)["charts"]


def test_a_long_run_is_thinned_and_says_so(own_run: Path) -> None:
    rows = [json.loads(line) for line in (own_run / "metrics.jsonl").read_text().splitlines()][1:]
    long = [{**rows[i % len(rows)], "step": i + 1, "staleness/max": float(i == 500)} for i in range(1000)]
    (own_run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in long))
    page = write_report(own_run).read_text()
    charts = {c["id"]: c for c in page_data(page)["charts"]}
    assert len(charts["reward"]["steps"]) <= MAX_POINTS and charts["reward"]["steps"][-1] == 1000
    assert len(charts["agreement-layers"]["steps"]) <= MAX_HEAT_COLUMNS
    assert max(charts["staleness"]["series"][1]["values"]) == 1.0, "thinning must not average a maximum away"
    assert "One point is 3 steps." in page and len(page) < 500_000


def test_the_timeline_cuts_spans_to_the_step_and_merges_overlapping_ones(own_run: Path) -> None:
    spans = [
        ("driver", "step", 10, 20, 1),
        ("engine 0", "generate", 8, 12, 0),
        ("engine 0", "generate", 11, 15, 1),
        ("engine 0", "generate", 13, 14, 1),
        ("engine 10", "generate", 10, 20, 1),
        ("engine 2", "generate", 15, 25, 1),
    ]
    keys = ("lane", "name", "start", "end", "step")
    (own_run / "timeline.jsonl").write_text("".join(json.dumps(dict(zip(keys, s, strict=True))) + "\n" for s in spans))
    (step,) = page_data(write_report(own_run).read_text())["timeline"]
    assert step["seconds"] == 10 and [lane["name"] for lane in step["lanes"]] == ["engine 0", "engine 2", "engine 10"]
    assert step["lanes"][0]["spans"] == [["generate", 0, 2, 0], ["generate", 1, 5, 1]]
    assert [lane["idle"] for lane in step["lanes"]] == pytest.approx([0.5, 0.5, 0.0])


def test_a_thousand_trainers_show_the_first_and_count_the_rest(own_run: Path) -> None:
    rows = [{"lane": f"trainer {i}", "name": "train", "start": 1, "end": 2, "step": 1} for i in range(1000)]
    (own_run / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (step,) = page_data(write_report(own_run).read_text())["timeline"]
    assert [lane["name"] for lane in step["lanes"]] == [f"trainer {i}" for i in range(12)] and step["hidden"] == 988


def test_the_page_allows_a_browser_its_own_script_and_nothing_else(run_dir: Path) -> None:
    page = write_report(run_dir).read_text()
    script = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert len(script) == len(policy) == 1
    assert policy[0].startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy[0]


def test_charts_that_never_change_or_repeat_another_are_named_once_with_their_values(own_run: Path) -> None:
    still = {
        "loss/clip_fraction_below": 0.0, "loss/clip_fraction_above": 0.0, "loss/ratio_p01": 1.0, "loss/ratio_p50": 1.0,
        "loss/ratio_p99": 1.0, "staleness/mean": 0.5, "staleness/max": 1.0, "reward/mean": 0.25,
    }  # fmt: skip
    repeated = ("reward/source/words", "entropy/position_64", "entropy/position_256")
    rewrite_rows(
        own_run,
        lambda row: {k: still.get(k, v) for k, v in row.items() if not k.startswith(repeated)},
    )
    page = write_report(own_run).read_text()
    drawn = {c["id"] for c in page_data(page)["charts"]}
    assert not drawn & {"clip", "ratio", "staleness", "reward-sources", "entropy-position"}
    assert {"reward", "clip-age", "entropy", "mismatch-position"} <= drawn, "a reward that stands still is news"
    assert re.search(
        r"Never changed:</b> Clipped tokens \(0\), Ratio \(1\), Staleness \(mean 0.5, oldest 1\)</p>", page
    )
    lines = (own_run / "metrics.jsonl").read_text().splitlines()
    (own_run / "metrics.jsonl").write_text("\n".join(lines[:3]) + "\n")
    assert "clip" in {c["id"] for c in page_data(write_report(own_run).read_text())["charts"]}, (
        "two points are not flat"
    )
    assert "Reward by data source (see Reward), Entropy by position (see Entropy)</p>" in page


def test_responses_are_in_the_page_as_data_escaped_and_bounded(own_run: Path) -> None:
    page = write_report(own_run).read_text()
    steps = page_data(page)["samples"]
    assert [step["title"] for step in steps] == [
        *(f"step {step}" for step in (40, 34, 29, 23, 18, 12, 7, 1)),
        *(f"evaluation after step {step}" for step in (40, 30, 10, 0)),
    ]
    best, worst, continued = steps[0]["samples"]
    assert best["prompt"] == "What is 40 & 0?" and "advantage +0.5" in best["known"] and best["group"] == "640"
    assert steps[-1]["samples"][0]["group"] == "held_out, 0"
    assert (best["name"], worst["name"]) == ("0: best (1)", "1: worst (0)")
    sources = [(source["version"], source["age"], source["turn"]) for source in continued["sources"]]
    assert sources == [(38, 1, 1), (39, 0, 1)]
    assert continued["tokens"][3] == [" <b>", 0, 3, 3, -5.0, -4.5, 0, None] and continued["tokens"][4][1] == 1
    assert '" <b>"' not in page and '" \\u003cb>"' in page
    path = file_of(own_run, 40)
    row = json.loads(path.read_text().splitlines()[0])
    counts = {"ids": [1] * 5000, "log_probs": [-4.0] * 5000, "response_tokens": 5000}
    counts["segments"] = [row["segments"][0] | {"start": 0, "end": 5000}]
    long = counts | {"texts": ["\u202e<i>" * 20] * 5000, "prompt": "<i>" * 50_000}
    path.write_text("".join(json.dumps(row | long | {"kinds": [kind]}) + "\n" for kind in KINDS))
    page = write_report(own_run).read_text()
    assert "<i>" * 2 not in page and "\u202e" not in page and len(page) < 3_000_000
    assert re.search(r"responses of 11 steps and evaluations, .* at most 2 MB \(7 more did not fit\)", page)
    path.write_text(json.dumps(row | counts | {"texts": ["t"] * 5000}) + "\n")
    (shown,) = page_data(write_report(own_run).read_text())["samples"][0]["samples"]
    assert len(shown["tokens"]) == 801 and shown["tokens"][400] == [" [... 4200 tokens not shown ...] ", 0]
    assert [token[2] for token in shown["tokens"][399:402] if len(token) > 2] == [399, 4600]
    path.write_text(json.dumps(row | {"reward": "much"}) + "\n")
    page = write_report(own_run).read_text()
    assert "samples-section" not in page and re.search(
        r"Not recorded in this run:</b> responses [^<]*step_000040", page
    )


def test_the_model_is_called_by_family_and_size_where_its_files_can_be_read(tmp_path: Path) -> None:
    assert model_name(tmp_path / "some" / "model") == str(tmp_path / "some" / "model")
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    assert model_name(tmp_path) == "Qwen3Moe"
    tensors = {"a": {"dtype": "BF16", "shape": [3, 500]}, "b": {"dtype": "F32", "shape": []}, "__metadata__": {}}
    header = json.dumps(tensors).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert model_name(tmp_path) == "Qwen3Moe, 1.5 k parameters"
    packed = json.dumps({"a": {"dtype": "I32", "shape": [3, 500]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(packed).to_bytes(8, "little") + packed)
    assert model_name(tmp_path) == "Qwen3Moe", "how many numbers are packed in one is not known"
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    assert model_name(tmp_path) == "Qwen3Moe"


def test_runs_side_by_side_share_charts_numbers_and_the_settings_that_differ(
    own_run: Path, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (own_run / "config.yaml").read_text()
    (own_run / "config.yaml").write_text(
        text.replace("name: synthetic", "name: <b>second", 1).replace("seed: 0", "seed: 7", 1)
    )
    rewrite_rows(own_run, lambda row: row | ({"reward/mean": row["reward/mean"] / 2} if "reward/mean" in row else {}))
    lines = (own_run / "metrics.jsonl").read_text().splitlines()
    (own_run / "metrics.jsonl").write_text("\n".join(lines[:31]) + "\n")
    out = tmp_path / "pages" / "both.html"
    assert main(["report", str(run_dir), str(own_run), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    page = out.read_text()
    reward = next(c for c in page_data(page)["charts"] if c["id"] == "reward")
    first, second = reward["series"]
    assert reward["steps"] == list(range(1, 41)) and (first["label"], second["label"]) == ("synthetic", "<b>second")
    assert first["colour"] != second["colour"] and second["values"][30:] == [None] * 10
    assert second["values"][:30] == pytest.approx([value / 2 for value in first["values"][:30]], rel=1e-4)
    differ = page.partition('settings-that-differ-section"><h2>')[2].partition("</section>")[0].partition("<tbody>")[2]
    assert re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td><td>(.*?)</td>", differ) == [("seed", "0", "7")]
    assert "&lt;b&gt;second" in page and "<b>second" not in page.partition('id="data"')[0]
    assert "<tr><th>steps</th><td>40</td><td>30</td></tr>" in page and "Content-Security-Policy" in page
    default = write_comparison([own_run, run_dir])
    assert default == own_run / "compare.html"
    with pytest.raises(UserError, match="at most 8"):
        write_comparison([run_dir] * 9)
    with pytest.raises(UserError, match=r"(?s)metrics.jsonl is missing"):
        write_comparison([run_dir, tmp_path])


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser here")
def test_a_browser_draws_every_chart_without_an_error(run_dir: Path, tmp_path: Path) -> None:
    page = write_report(run_dir).read_text()
    other = write_comparison([run_dir, run_dir], tmp_path / "compare.html")
    trap = "<script>window.onerror = (m) => { document.title = 'ERROR ' + m; };</script>"
    copy = tmp_path / "report.html"
    # With the trap the policy must go; as it is, the page must draw the same.
    copy.write_text(re.sub(r"<meta http-equiv=[^>]*>", "", page).replace("<body>", "<body>" + trap))
    dom = _drawn(copy, tmp_path)
    assert "<title>ERROR" not in dom
    for drawn in (dom, _drawn(run_dir / "report.html", tmp_path)):
        assert drawn.count('<pre class="answer">') == 1, "the newest step's best response"
        plots = re.findall(r'<div class="plot"[^>]*>(.*?)</div>', drawn, re.S)
        assert len(plots) == len(ALL_CHARTS) + 1
        assert all(re.search(r"<(path|rect)[^>]*style=", plot) for plot in plots)
        assert "NaN" not in "".join(plots)
    compared = re.findall(r'<div class="plot"[^>]*>(.*?)</div>', _drawn(other, tmp_path), re.S)
    assert len(compared) == len(page_data(other.read_text())["charts"]) > 20
    assert all(re.search(r"<path[^>]*style=", plot) and "NaN" not in plot for plot in compared)


DRIVE = """<script>
window.onload = () => {
  const card = document.getElementById("samples"), out = [];
  const say = (what) => out.push(what);
  const set = (of, value) => { const s = card.querySelector(`[data-of=${of}]`); s.value = value; s.onchange(); };
  const by = (value) => { const r = card.querySelector(`input[value=${value}]`); r.checked = true; r.onchange(); };
  const spans = () => [...card.querySelectorAll(".answer span")];
  const looks = () => spans().map((s) => s.className + "|" + s.style.background);
  say(card.querySelector("[data-of=step]").options.length);
  set("group", 2);
  say([...card.querySelectorAll("h4")].map((h) => h.textContent));
  say(spans().map((s) => s.textContent).join(""));
  say(looks());
  by("mask"); say(looks());
  by("difference"); say(looks());
  const box = spans()[3].getBoundingClientRect();
  spans()[3].dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: box.x, clientY: box.y }));
  say([...document.querySelectorAll("#tip div")].map((d) => d.textContent));
  say([...card.querySelectorAll(".legend span")].map((d) => d.textContent));
  say(document.querySelectorAll("img, b.evil").length);
  set("step", 8); say(card.querySelector("[data-of=group]").options[0].textContent);
  const told = document.createElement("pre");
  told.id = "told"; told.textContent = JSON.stringify(out); document.body.append(told);
};
</script>"""
HOSTILE = ["</script><img src=x onerror=alert(1)>", "<b class=evil>", "\u202e", "<tool_call>", "{}", "</tool_call>"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser here")
def test_a_browser_shows_tokens_by_version_mask_and_difference_and_what_is_known_of_each(
    own_run: Path, tmp_path: Path
) -> None:
    path = file_of(own_run, 40)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    outside = {"start": 2, "end": 3, "version": None, "age": None, "engine": "", "trained": False}
    spans = [{**rows[2]["segments"][0], "end": 2}, outside, {**rows[2]["segments"][1], "start": 3, "trained": False}]
    rows[2] |= {"texts": HOSTILE, "segments": spans, "log_probs": [-0.1, -0.2, None, -5.0, -0.1, -0.01]}
    rows[2] |= {"prompt": HOSTILE[0], "support_sizes": [0, 0, 0, 17, 0, 0]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(own_run).read_text()
    copy = tmp_path / "driven.html"  # with a second script the policy must go
    copy.write_text(re.sub(r"<meta http-equiv=[^>]*>", "", page).replace("<body>", "<body>" + DRIVE))
    told = re.findall(r'<pre id="told">(.*?)</pre>', _drawn(copy, tmp_path), re.S)
    assert told, "the page's script did not come to its end"
    steps, heads, text, version, mask, difference, tip, legend, injected, group = json.loads(html.unescape(told[0]))
    assert steps == 12 and heads == ["turn 1", "from outside (tool or environment)", "turn 2"]
    assert text == "".join(HOSTILE).replace("\u202e", "<U+202E>"), "text stays text"
    assert version == ["by0|", "by0|", "|", "call by1 untrained|", "call by1 untrained|", "call by1 untrained|"]
    assert mask == ["by2|", "by2|", "plain|", "call by1|", "call by1|", "call by1|"]
    assert difference[2] == "plain|" and "var(--c0) 75%" in difference[3], "the largest difference"
    assert tip == [
        "position, id3, 3", "weights39, engine 0", "trainedno", "log-prob, sampler\u22125.0000",
        "log-prob, trainer\u22124.5000", "difference0.5000", "drawn from17 ids", "part ofa tool call",
        "experts, layer 06 7", "experts, layer 37 0",
    ]  # fmt: skip
    assert "trainer minus sampler" in legend[-2] and legend[-1].endswith("tool call")
    assert injected == 0 and group == "held_out, 640"


def _drawn(page: Path, tmp_path: Path) -> str:
    """The page after a browser has run its script."""
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        f"file://{page}",
    ]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60).stdout


def not_a_number(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[-1]) | {"eval/held_out/accuracy": "high", "reward/mean": "high"}
    (run / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(row)]) + "\n")


def in_the_place_of(name: str, text: str | None) -> Callable[[Path], None]:
    """A file that says this, or a directory, where a file of the run is."""

    def damage(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir() if text is None else (run / name).write_text(text)

    return damage


@pytest.mark.parametrize(
    "damage",
    [not_a_number, in_the_place_of("config.yaml", "a: [1\nb: }"), in_the_place_of("metrics.jsonl", None),
     in_the_place_of("timeline.jsonl", '{"lane": "driver"}\n')],
    ids=["text for a number", "broken configuration", "a directory for a file", "a span without its times"],
)  # fmt: skip
def test_a_damaged_file_of_a_run_is_a_users_error(
    own_run: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(own_run)
    assert main(["report", str(own_run)]) == 2
    told = capsys.readouterr().err
    assert "hint" in told and "Traceback" not in told


def test_idle_by_step_sees_spans_of_other_steps_and_means_over_lanes() -> None:
    spans = [
        Span("engine 0", "generate", 0, 30, 1),
        Span("driver", "step", 0, 10, 1),
        Span("engine 1", "generate", 5, 10, 1),
        Span("driver", "step", 10, 20, 2),
        Span("trainer 0", "train", 12, 14, 2),
    ]
    assert idle_by_step(spans) == {1: {"idle/engines": 0.25}, 2: {"idle/engines": 0.0, "idle/trainers": 0.8}}


def test_thinning_keeps_extremes() -> None:
    rows = [{"step": i, "reward/min": float(i != 3), "reward/max": float(i == 4), "lr": float(i)} for i in range(8)]
    found, every = thin(rows, ("reward/min", "reward/max", "lr"), 2)
    assert every == 4 and [row["step"] for row in found] == [3, 7]
    assert [(row["reward/min"], row["reward/max"], row["lr"]) for row in found] == [(0, 0, 1.5), (1, 1, 5.5)]


def test_a_report_of_a_run_of_several_adapters_compares_them(tmp_path: Path) -> None:
    run = several(output_dir=str(tmp_path))
    for each in run.adapter_runs.values():
        each.run_dir.mkdir(parents=True)
        (each.run_dir / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, "reward/mean": 0.5}) + "\n")
        (each.run_dir / "config.yaml").write_text(json.dumps(each.as_dict()))
    page = report(run.run_dir)
    assert page == run.run_dir / "compare.html" and "maths" in page.read_text() and "code-v2" in page.read_text()
    assert report(run.adapter_runs["maths"].run_dir).name == "report.html"
    with pytest.raises(UserError, match="is a run of several adapters(?s:.*)maths"):
        find_file(run.run_dir, SampleSelection(None, False, "", "", 0, ""))


def test_a_report_is_written_without_torch_and_without_sinks() -> None:
    code = (
        "import sys, mslime_plugins.report.page\n"
        "sys.exit(bool({'torch', 'tensorboard', 'wandb', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
