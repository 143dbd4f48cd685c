"""The Python API of the plug-ins: the same answers as the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mslime
from mslime.cli import main
from mslime_plugins import api
from tests.fixtures.full_size import CONFIGS
from tests.fixtures.make_run import make_synthetic_run


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(mslime.UserError, match="does not exist"):
        api.report(tmp_path / "nothing")


@pytest.mark.slow
def test_a_plan_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    model, layout = str(CONFIGS / "qwen3-30B-A3B"), {"expert_model_parallel_size": 8}
    told = {"model": {"path": model}, "megatron": layout, "cluster": {"device": "cuda"}}
    flags = ["--model.path", model, "--megatron.expert-model-parallel-size", "8", "--cluster.device", "cuda"]
    main(["plan", *flags, "--gpus", "17", "--gpu-memory-gb", "141", "--json"])
    printed = json.loads(capsys.readouterr().out)
    for source in (told, mslime.load_config(told, "data.prompts=p.jsonl", "cluster.trainer_ranks=8")):
        found = api.plan(source, gpus=17, gpu_memory_gb=141)
        assert json.loads(json.dumps(found.as_dict(), default=str)) == printed
        assert found.trainer_gpus == 16


def test_a_report_is_of_one_run_or_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "2026-01-01 00:00")  # the minute of writing stands in the page
    one, other = (make_synthetic_run(tmp_path / name, steps=3) for name in ("one", "other"))
    assert api.report(one) == api.report(str(one), one) == one / "report.html"
    assert api.report(one, other) == one / "compare.html"
    assert api.report(one, out=tmp_path / "page.html").read_text() == (one / "report.html").read_text()
