"""Groups of a step on disk, whether they fit, and the mistakes of the commands that run a part of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mslime.cli import main
from mslime.config.cluster import RunParts
from mslime.config.errors import CheckpointError, DataError
from mslime.config.model_facts import ModelFacts
from mslime.config.schema import RunConfig
from mslime.data.sample import Group, Sample
from mslime.rollout.group_files import StepGroups, fitted, group_files, read_groups, write_groups
from mslime.rollout.state import save_state
from tests.fixtures.least import least
from tests.fixtures.model_facts import model_facts
from tests.fixtures.supports import supports_of
from tests.unit.test_rollout_state import equal, sample

VOCABULARY = 1000


def scored(group: int, index: int) -> Sample:
    made = sample(group, index, 5, routes=True, supports=False)
    made.reward = float(index)
    return made


def model_of(made: Sample) -> ModelFacts:
    assert made.routes is not None
    routes = made.routes
    return model_facts(VOCABULARY, 64, 64, routes.layer_ids, 300, routes.experts.shape[2])


def config_of(**sections: Any) -> RunConfig:
    return least(**{"cluster": {"device": "cpu"}, **sections})


def written(directory: Path, step: int = 1) -> Path:
    groups = [Group(g, [scored(g, i) for i in range(2)], f"p.jsonl:{g + 1}") for g in range(3)]
    return write_groups(directory, StepGroups(step, step - 1, groups))


def test_the_groups_of_a_step_come_back_and_are_found_in_order(tmp_path: Path) -> None:
    for step in (10, 2, 1):
        written(tmp_path, step)
    (tmp_path / "step_3.npz.part").touch()
    assert list(group_files(tmp_path)) == [1, 2, 10]
    stored = read_groups(tmp_path / "step_10.npz")
    assert (stored.step, stored.version) == (10, 9)
    assert [g.source for g in stored.groups] == ["p.jsonl:1", "p.jsonl:2", "p.jsonl:3"]
    assert all(equal(s, scored(g.group_id, i)) for g in stored.groups for i, s in enumerate(g.samples))


def test_files_that_are_no_groups_of_a_step_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)holds no step_N.npz.*mslime rollout"):
        group_files(tmp_path)
    save_state(tmp_path / "step_1.npz", {"accepted": 0, "groups": []}, {})
    with pytest.raises(DataError, match="is a rollout service's state"):
        read_groups(tmp_path / "step_1.npz")
    path = written(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="step_2.npz"):
        read_groups(path)


def support(made: Sample) -> None:
    """The last token was drawn from two."""
    made.supports = supports_of([[]] * (len(made) - 1) + [[VOCABULARY - 1, int(made.tokens[-1])]])


def nothing(made: Sample) -> None:
    pass


@pytest.mark.parametrize(("change", "of_model", "sections", "told"), [
    (nothing, {}, {}, ""),
    (nothing, {"moe_layer_ids": (7,)}, {}, "the model routes in layers [7]"),
    (nothing, {"moe_layer_ids": (7,)}, {"train": {"replay": "r2"}}, ""),
    (nothing, {"top_k": 5}, {}, "top-5"),
    (nothing, {"num_experts": 1}, {}, "the model has 1 experts"),
    (nothing, {"max_positions": 3}, {}, "the model has 3 positions"),
    (nothing, {"vocab_size": 2}, {}, "the model has 2 tokens"),
    (support, {}, {}, ""),
    (support, {"vocab_size": 999}, {}, "in a recorded support, and the model has 999 tokens"),
    (lambda s: setattr(s, "routes", None), {}, {}, "has no routes to replay"),
    (lambda s: setattr(s, "routes", None), {}, {"train": {"replay": "off"}}, ""),
    (lambda s: setattr(s, "reward", None), {}, {}, "is not scored"),
    (Sample.mask_all, {}, {}, "no token to train"),
    (nothing, {}, {"train": {"optimizer_steps_per_rollout": 4}}, "cannot fill 4 optimizer steps"),
    (nothing, {}, {"teacher": {"urls": ["http://t:1"]}, "algorithm": {"opd_coef": 1.0}}, "of the served teacher"),
])  # fmt: skip
def test_groups_that_do_not_fit_are_refused_by_file_and_reason(
    tmp_path: Path, change: Callable[[Sample], None], of_model: dict[str, Any], sections: dict[str, Any], told: str
) -> None:
    path, config = written(tmp_path), config_of(**sections)
    stored = read_groups(path)
    info = replace(model_of(stored.groups[0].samples[0]), **of_model)
    for made in (s for g in stored.groups for s in g.samples):
        change(made)
    if told:
        with pytest.raises(DataError) as caught:
            fitted(stored, path, config.train, config.teacher.serves, info)
        assert caught.value.field == str(path) and told in caught.value.rule and caught.value.hint
    else:
        groups = fitted(stored, path, config.train, config.teacher.serves, info)
        assert [len(g.samples) for g in groups] == [2, 2, 2]


def test_routes_and_scores_that_a_run_does_not_use_are_left_out(tmp_path: Path) -> None:
    stored = read_groups(written(tmp_path))
    made = stored.groups[0].samples[0]
    for s in (s for g in stored.groups for s in g.samples):
        s.teacher_log_probs = np.zeros(len(s), np.float32)
    info = model_of(made)
    (without, *_) = fitted(stored, tmp_path, config_of(train={"replay": "r2"}).train, False, info)[0].samples
    assert without.routes is None and without.teacher_log_probs is None and made.routes is not None
    support(made)
    (kept, *_) = fitted(stored, tmp_path, config_of().train, False, info)[0].samples
    assert kept.routes is made.routes and kept.supports is made.supports, "trained as it was drawn, whatever is set now"


def test_a_part_of_a_run_claims_its_own_processes_only() -> None:
    config = config_of(cluster={"device": "cuda", "trainer_ranks": 8}, sglang={"num_engines": 2, "tp_size": 4})
    counted = {
        parts: {c.what: c.count for c in config.claims(parts)} for parts in (RunParts(), RunParts(trainers=False))
    }
    assert counted[RunParts()] == {"trainer": 8, "engines": 2} and counted[RunParts(trainers=False)] == {"engines": 2}
    assert {c.what: c.count for c in config.claims(RunParts(engines=False))} == {"trainer": 8}


RUN = ["--model.path", "m", "--data.prompts", "p.jsonl", "--cluster.device", "cpu"]
HELD_OUT = ["--data.eval-sets", "[{name: a, path: e.jsonl}]"]


@pytest.mark.parametrize(("words", "told", "hint"), [
    (["eval"], "data.eval_sets = []: no held-out data to evaluate on", "eval_sets: [{name"),
    (["eval", *HELD_OUT, "--checkpoint", "newest"], "contains no checkpoint", "leave --checkpoint out"),
    (["eval", *HELD_OUT, "--checkpoint", "4"], "step_4 is not a checkpoint", "none yet"),
    (["eval", *HELD_OUT, "--checkpoint", "x", "--sglang.urls", "http://e:1"], "attached servers", "mslime convert run"),
    (["eval", *HELD_OUT, "--train.task", "sft"], "supervised training has no engines", "--train.task rl"),
    (["rollout", "--train.task", "sft"], "supervised training has no engines", "--train.task rl"),
    (["rollout", "--steps", "0"], "--steps = 0: must be at least 1", "leave it out"),
    (["train", "--replay", "nowhere"], "holds no step_N.npz", "observe.save_groups"),
    (
        ["train", "--replay", "nowhere", "--train.task", "sft"],
        "not supported in supervised training", "leave --replay out",
    ),
])  # fmt: skip
def test_mistakes_end_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str, hint: str
) -> None:
    assert main([*words, *RUN, "--output-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert told in said and hint in said.partition("hint: ")[2]
    assert list(tmp_path.iterdir()) == []
