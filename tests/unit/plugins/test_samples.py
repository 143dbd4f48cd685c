"""Responses on disk: which are kept, what is said of them and their tokens, and how they are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mslime.cli import main
from mslime.config.base import Kept
from mslime.config.errors import UserError
from mslime.config.loader import build
from mslime.data.routes import Routes
from mslime.data.sample import Group, Sample, SampleStatus
from mslime.data.sample_log import BYTES_A_FILE, ROUTE_BYTES, LogBatch, SampleLog, choose, routes_row, token_texts
from mslime.data.tokenizer import HFTokenizer, load_tokenizer
from mslime.observe.samples import begin, file_of, read_samples, recorded_steps, trainer_file_of
from mslime_plugins.report.inspect_command import InspectSelection, inspect_run
from mslime_plugins.report.sample_tokens import by_source, decoded, telling, telling_of_step, tokens_of, visible
from tests.fixtures.tiny_models import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def answered(tokenizer: HFTokenizer, group: int, index: int, texts: list[str], reward: float, **values: Any) -> Sample:
    """A finished sample, each text sampled by the next weight version from 3 on."""
    sample = Sample.from_prompt(group, index, tokenizer.encode(f"prompt {group}:", special_tokens=False), "the label")
    for version, text in enumerate(texts, start=3):
        ids = tokenizer.encode(text, special_tokens=False)
        sample.extend(ids, log_probs=[-0.123456] * len(ids), versions=[(version, 0, len(ids))], engine="engine 0")
    sample.reward, sample.status = reward, SampleStatus.COMPLETED
    for name, value in values.items():
        setattr(sample, name, value)
    sample.response = tokenizer.decode(sample.tokens[sample.prompt_length :].tolist())
    return sample


def step_of(tokenizer: HFTokenizer, size: int = 4, groups: int = 6) -> list[Group]:
    """Groups whose rewards rise with the group and fall with the index, but for three that stand out."""
    made = [
        Group(
            g, [answered(tokenizer, g, i, [f"answer {g}.{i}"], g - i / 10) for i in range(size)], f"prompts.jsonl:{g}"
        )
        for g in range(groups)
    ]
    made[1].samples[2] = answered(tokenizer, 1, 2, ["begun, ", "continued ", "thrice"], 0.5)
    made[2].samples[1] = answered(tokenizer, 2, 1, ["x" * 50], 0.5, status=SampleStatus.TRUNCATED)
    made[3].samples[3] = answered(tokenizer, 3, 3, ["y" * 90], 0.5)
    return made


def write(tokenizer: HFTokenizer, path: Path, parts: list[LogBatch], keep: Kept = "some", step: int = 7) -> list[str]:
    log = SampleLog(keep, tokenizer)
    log.write(path, step, parts)
    log.close(60)
    return log.notes()


def test_the_few_that_are_kept_are_the_best_worst_longest_cut_and_continued_of_different_groups(tokenizer: HFTokenizer):
    groups = step_of(tokenizer)
    samples = [s for g in groups for s in g.samples]
    chosen = choose(samples, seed=0)
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for place, kinds in chosen.items():
        for kind in kinds:
            by_kind.setdefault(kind, []).append((samples[place].group_id, samples[place].index))
    assert by_kind["best"] == [(5, 0), (4, 0)] and by_kind["worst"] == [(0, 3), (1, 2)]
    assert by_kind["longest"] == [(3, 3), (2, 1)] and by_kind["truncated"] == [(2, 1)]
    assert by_kind["continued"] == [(1, 2)] and len({g for g, _ in by_kind["any"]}) == 2
    assert next(iter(chosen.values())) == ["best"], "the most telling stand first"
    for sample in samples:
        sample.reward = 1.0
    assert not {"best", "worst"} & {kind for kinds in choose(samples, 0).values() for kind in kinds}
    lone = [answered(tokenizer, int(i == 60), i, ["same"], 1.0) for i in range(61)]
    drawn = {lone[place].group_id for place, kinds in choose(lone, 0).items() if "any" in kinds}
    assert drawn == {0, 1}, "of different groups, also where one has a single sample among many"


def test_a_line_says_where_every_token_came_from(tokenizer: HFTokenizer, tmp_path: Path):
    sample = answered(tokenizer, 1, 0, ["héllo ", "wörld"], 0.25, scores={"reward/format/mean": 1.0}, aborts=1)
    sample.metadata = {"data_source": "math"}
    sample.extend(tokenizer.encode("<tool>", special_tokens=False))
    sample.extend([258], log_probs=[-2.0], versions=[(5, 0, 1)], engine="engine 1")
    sample.mask_before(4)
    advantage = np.where(sample.loss_mask, 0.5, 9.0)
    path = file_of(tmp_path, 6)
    assert write(tokenizer, path, [LogBatch([Group(1, [sample], "p.jsonl:1")], 5, [advantage])], step=6) == []
    (row,) = read_samples(path)
    told = {k: row[k] for k in ("step", "of", "group", "index", "source", "prompt", "label", "metadata", "reward")}
    assert told == {
        "step": 6, "of": 1, "group": 1, "index": 0, "source": "p.jsonl:1", "prompt": "prompt 1:", "label": "the label",
        "metadata": {"data_source": "math"}, "reward": 0.25,
    }  # fmt: skip
    assert row["scores"] == {"reward/format/mean": 1.0} and row["aborts"] == 1 and row["status"] == "completed"
    assert row["advantage"] == 0.5, "the mean over trained tokens"
    first, second, tool, last = row["segments"]
    assert (first["version"], first["age"], first["trained"]) == (3, 2, False), "masked as too old"
    assert (second["version"], second["age"], second["trained"], second["engine"]) == (4, 1, True, "engine 0")
    assert tool["version"] is None and (last["version"], last["age"]) == (5, 0)
    assert row["ids"] == sample.tokens[sample.prompt_length :].tolist()
    assert "".join(row["texts"]) == "héllo wörld<tool>" + tokenizer.decode([258], special_tokens=True)
    sampled = [p for p, t in zip(row["log_probs"], row["ids"], strict=True)]
    assert sampled[0] == -0.1235 and sampled[tool["start"]] is None and sampled[-1] == -2.0
    coloured: dict[Any, str] = {}
    for token in tokens_of(row):
        coloured[token.version] = coloured.get(token.version, "") + token.text
    assert coloured[3] == "héllo " and coloured[4] == "wörld" and coloured[None] == "<tool>"


@pytest.mark.parametrize("text", ["plain", "né 你好 👩‍🚀 ﷽", "\n\t  two  blanks"])
def test_texts_of_tokens_are_the_response_and_garbage_is_not_held_back(tokenizer: HFTokenizer, text: str):
    ids = tokenizer.encode(text, special_tokens=False)
    texts = token_texts(ids, tokenizer)
    assert len(texts) == len(ids) and "".join(texts) == text
    broken = [255] * 40 + tokenizer.encode("end", special_tokens=False)  # bytes that are no text in any order
    assert token_texts(broken, tokenizer)[-3:] == ["e", "n", "d"]


@pytest.mark.nightly
def test_some_stay_below_their_bytes_and_all_keep_everything_whole(tokenizer: HFTokenizer, tmp_path: Path):
    groups = [
        Group(g, [answered(tokenizer, g, i, ["\x01" * 10_000] * 2, g + i) for i in range(8)], "p:1") for g in range(4)
    ]
    for group in groups:
        group.samples[0].metadata = {"blob": "b" * 100_000}
    some, every = tmp_path / "some.jsonl", tmp_path / "all.jsonl"
    assert write(tokenizer, some, [LogBatch(groups, 3), LogBatch(groups, 3), LogBatch(groups, 3)]) == []
    assert write(tokenizer, every, [LogBatch(groups, 3)], "all") == []
    assert BYTES_A_FILE / 2 < some.stat().st_size <= BYTES_A_FILE < every.stat().st_size
    row = next(read_samples(some))
    assert len(row["response"]) < 20_000
    start, end = row["left_out"]
    assert len(row["ids"]) == len(row["texts"]) == len(row["log_probs"]) == 20_000 - (end - start)
    assert [token.id for token in tokens_of(row) if "tokens left out" in token.text] == [None]
    assert [tokens_of(row)[at].version for at in (0, -1)] == [3, 4], "what comes after it keeps its weight version"
    kept = list(read_samples(every))
    assert len(kept) == 32 and all(len(row["ids"]) == len(row["response"]) == 20_000 for row in kept)
    assert any(row["metadata"].get("blob") == "b" * 100_000 for row in kept)
    few = telling(every)
    assert 0 < len(few) < 32 and [bool(row["kinds"]) for row in kept] == [True] * len(few) + [False] * (32 - len(few))


def test_values_that_are_not_json_are_written_as_text_and_told_once(tokenizer: HFTokenizer, tmp_path: Path):
    class Rude:
        def __str__(self) -> str:
            raise RuntimeError("no")

        __repr__ = __str__

    cycle: list[Any] = []
    cycle.append(cycle)
    groups = step_of(tokenizer)
    for place, value in enumerate([{(1, 2): 3}, {"n": 1 << 80}, {"x": Rude()}, {"c": cycle}, {"s": "\ud800"}]):
        for sample in groups[place].samples:
            sample.metadata = value
    path = file_of(tmp_path, 7)
    notes = write(tokenizer, path, [LogBatch(groups, 3)], "all")
    assert len(notes) == 1 and "not JSON" in notes[0]
    assert len(list(read_samples(path))) == 24


def test_a_disk_that_takes_nothing_is_told_once_and_ends_nothing(tokenizer: HFTokenizer, tmp_path: Path):
    (tmp_path / "rollouts").write_text("a file where a directory should be")
    log = SampleLog("some", tokenizer)
    for step in range(2):
        log.write(file_of(tmp_path, step), step, [LogBatch(step_of(tokenizer), 3)])
    log.close(60)
    (note,) = log.notes()
    assert "step_000000.jsonl: responses cannot be written" in note and "continues" in note and log.notes() == []


def test_an_earlier_file_of_a_step_is_replaced_whole_and_steps_to_come_again_are_taken_away(
    tokenizer: HFTokenizer, tmp_path: Path
):
    for step in (1, 2, 3):
        write(tokenizer, file_of(tmp_path, step), [LogBatch(step_of(tokenizer), 3)], step=step)
    write(tokenizer, file_of(tmp_path, 2, evaluation=True), [LogBatch(step_of(tokenizer), 2, None, "held_out")], step=2)
    begin(tmp_path, 2)
    assert recorded_steps(tmp_path) == [1, 2] and recorded_steps(tmp_path, evaluation=True) == [2]
    write(tokenizer, file_of(tmp_path, 2), [LogBatch(step_of(tokenizer, groups=4), 3)], step=2)
    assert {row["of"] for row in read_samples(file_of(tmp_path, 2))} == {16}
    assert sorted(p.suffix for p in (tmp_path / "rollouts").iterdir()) == [".jsonl"] * 3
    begin(tmp_path, 0)
    assert recorded_steps(tmp_path) == [] and (tmp_path / "rollouts.1").is_dir()


def test_true_and_false_are_all_and_none(tmp_path: Path):
    values: dict[str, Any] = {"model": {"path": "m"}, "data": {"prompts": ["p.jsonl"]}}
    assert build(values).observe.save_rollouts == "some"
    for given, meant in ((True, "all"), (False, "none"), ("some", "some")):
        assert build(values | {"observe": {"save_rollouts": given}}).observe.save_rollouts == meant
    log = SampleLog("none", tokenizer=None)  # type: ignore[arg-type]
    log.write(file_of(tmp_path, 1), 1, [])
    log.close(1)
    assert not (tmp_path / "rollouts").exists()


@pytest.fixture
def run_dir(tokenizer: HFTokenizer, tmp_path: Path) -> Path:
    groups = step_of(tokenizer)
    for step in (1, 2, 3, 5):
        write(tokenizer, file_of(tmp_path, step), [LogBatch(groups, 5, [0.5] * 24)], "all", step)
    sets = [LogBatch(groups, 5, None, "held_out"), LogBatch(groups[:1], 5, None, "other")]
    write(tokenizer, file_of(tmp_path, 0, evaluation=True), sets, step=0)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert main(["samples", *words, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_command_shows_what_is_asked_for(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    run = str(run_dir)
    newest = shown(capsys, run)
    assert {row["step"] for row in newest} == {5} and all(row["kinds"] for row in newest)
    assert [r["reward"] for r in shown(capsys, run, "--step", "2", "--worst", "3")] == pytest.approx([-0.3, -0.2, -0.1])
    assert [r["group"] for r in shown(capsys, run, "--best", "2")] == [5, 5]
    assert [r["response_tokens"] for r in shown(capsys, run, "--longest", "2")] == [90, 50]
    assert [(r["group"], r["index"]) for r in shown(capsys, run, "--continued")] == [(1, 2)]
    assert [(r["group"], r["index"]) for r in shown(capsys, run, "--truncated")] == [(2, 1)]
    assert {r["set"] for r in shown(capsys, run, "--eval")} == {"held_out", "other"}
    assert {r["set"] for r in shown(capsys, run, "--eval", "other", "--best", "1")} == {"other"}


def test_the_terminal_gets_prompt_response_versions_and_no_control_characters(
    tokenizer: HFTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    sample = answered(tokenizer, 1, 0, ["[bold]evil\x1b[2J\u202e ", "then more"], 1.0)
    write(tokenizer, file_of(tmp_path, 4), [LogBatch([Group(1, [sample], "p:1")], 5, [0.75])], step=4)
    assert main(["samples", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    parts = [
        "step 4", "prompt 1:", "[bold]evil\u241b[2J<U+202E> then more", "reward 1", "advantage +0.75",
        "mean log-prob -0.123", "weights 3, 4, age 1 to 2", "[weights 3] [weights 4]", "1 of 1 responses",
    ]  # fmt: skip
    assert [part for part in parts if part not in out] == []
    assert "\x1b" not in out and visible("a\x9bb\tc") == "a<U+009B>b\tc"
    from mslime_plugins.report.samples_command import SampleSelection, show_samples

    console = Console(force_terminal=True, color_system="standard", width=100)
    with console.capture() as captured:
        show_samples(tmp_path, SampleSelection(), console)
    drawn = captured.get()
    assert "\x1b[36m[bold]" in drawn and "\x1b[33mthen more" in drawn, "each weight version has its colour"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--step", "4"], r"(?s)--step = 4.*choose from 1 to 3, 5"),
        (["--eval", "nope"], r"(?s)--eval = 'nope'.*held_out, other"),
        (["--best", "0"], "must be at least 1"),
        (["--step", "7", "--eval"], "choose from 0"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(
    run_dir: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["samples", str(run_dir), *words]) == 2
    import re

    assert re.search(expected, capsys.readouterr().err)


def test_a_run_without_responses_and_a_file_of_another_version_are_refused_by_name(tmp_path: Path):
    assert main(["samples", str(tmp_path / "nowhere")]) == 2 and main(["samples", str(tmp_path)]) == 2
    file_of(tmp_path, 1).parent.mkdir()
    file_of(tmp_path, 1).write_text('{"group": 1, "response": "of an older version"}\n')
    with pytest.raises(UserError, match=r"(?s)step_000001.jsonl:1.*not a response in this version's format"):
        list(read_samples(file_of(tmp_path, 1)))


def test_a_group_has_begun_as_many_rollouts_as_it_says_or_as_its_samples_are_numbered() -> None:
    samples = [Sample.from_prompt(0, index, [1, 2]) for index in (0, 2)]
    assert Group(0, samples).size == 3 and Group(0, samples, size=5).size == 5 and Group(0, []).size == 0


# ------------------------------------------------------------------------------------------------------- token by token


LAYERS = (1, 2, 5, 6, 9)


def spoken(tokenizer: HFTokenizer, parts: list[tuple[str, int | None]], group: int = 4, index: int = 1) -> Sample:
    """A finished sample with routes: texts of weight versions, or of nobody. Token t has log-prob -t/100, and the
    experts of row t in layer l are t + l and t."""
    sample = Sample.from_prompt(group, index, tokenizer.encode("prompt:", special_tokens=False), "the label")
    for text, version in parts:
        ids = tokenizer.encode(text, special_tokens=False)
        if version is None:
            sample.extend(ids)
        else:
            log_probs = [-(len(sample) + i) / 100 for i in range(len(ids))]
            sample.extend(ids, log_probs=log_probs, versions=[(version, 0, len(ids))], engine="engine 0")
    rows = np.arange(len(sample) - 1)
    experts = np.stack([(rows[:, None] + np.array(LAYERS)) % 250, np.tile(rows[:, None] % 250, len(LAYERS))], -1)
    sample.routes = Routes(experts.astype(np.uint8), np.ones(len(rows), np.bool_), LAYERS)
    sample.reward, sample.status = float(index), SampleStatus.COMPLETED
    sample.response = tokenizer.decode(sample.response_tokens.tolist())
    return sample


CALL = '<tool_call>{"name": "add"}</tool_call>'
PARTS: list[tuple[str, int | None]] = [("I add. ", 3), (CALL, 4), ("[result: 7]", None), ("It is 7", 4)]


def kept(tokenizer: HFTokenizer, run_dir: Path, samples: list[Sample], trained: Any = None, layers: int = 3) -> None:
    """A step's files; `trained`: sequence -> log-probs of the trainer."""
    log = SampleLog("some", tokenizer, layers)
    watched = log.watch(6, samples, samples)
    groups = [Group(s.group_id, [s], "p.jsonl:1") for s in samples]
    log.write(file_of(run_dir, 6), 6, [LogBatch(groups, 4, [0.5] * len(samples))])
    log.write_trained(trainer_file_of(run_dir, 6), 6, {n: trained(samples[n]) for n in watched} if trained else {})
    log.close(60)
    assert log.notes() == []


def less(sample: Sample) -> np.ndarray:
    """The trainer gives every token a fifth of a nat less, and knows nothing of the first of the sequence."""
    found = (sample.log_probs - 0.2).astype(np.float32)
    found[0] = np.nan
    return found


def test_tokens_have_their_weights_turn_tool_call_routes_and_both_log_probs(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    sample = spoken(tokenizer, PARTS)
    sample.mask_before(4)
    kept(tokenizer, tmp_path, [sample], less)
    (row,) = telling_of_step(tmp_path, 6)
    tokens = tokens_of(row)
    assert [t.id for t in tokens] == sample.response_tokens.tolist() and "".join(t.text for t in tokens) == "".join(
        text for text, _ in PARTS
    )
    first, call, result, last = (
        [t for t in tokens if t.text and start <= t.position < start + length] for start, length in spans(tokenizer)
    )
    assert {(t.version, t.age, t.trained, t.turn, t.in_call) for t in first} == {(3, 1, False, 1, False)}
    assert {(t.version, t.age, t.trained, t.turn, t.in_call) for t in call} == {(4, 0, True, 1, True)}
    assert {(t.version, t.trained, t.turn, t.outside, t.difference) for t in result} == {(None, False, 1, True, None)}
    assert {(t.version, t.turn, t.in_call) for t in last} == {(4, 2, False)}
    for token in [*first, *call, *last]:
        at = token.position + sample.prompt_length
        assert token.log_prob == pytest.approx(-at / 100, abs=1e-4)
        assert token.difference == pytest.approx(-0.2, abs=2e-4)
    for token in tokens[:-1]:
        at = token.position + sample.prompt_length
        assert token.experts == {layer: [(at + layer) % 250, at % 250] for layer in (1, 5, 9)}, "first, middle, last"
    assert tokens[-1].experts is None, "the newest token has not been through the model"
    assert [(b[0].turn, b[0].outside) for b in by_source(tokens)] == [(1, False), (1, True), (2, False)]


def spans(tokenizer: HFTokenizer) -> list[tuple[int, int]]:
    """(start, length) in tokens of each of PARTS."""
    lengths = [len(tokenizer.encode(text, special_tokens=False)) for text, _ in PARTS]
    return [(sum(lengths[:i]), n) for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>a\nb</tool_call>",
        "<minimax:tool_call>a</minimax:tool_call>",
        "<|tool_calls_section_begin|>a<|tool_calls_section_end|>",
        "<\uff5ctool\u2581calls\u2581begin\uff5c>a<\uff5ctool\u2581calls\u2581end\uff5c>",
        "<|channel|>commentary to=functions.add<|message|>{}<|call|>",
        "<|python_tag|>add(1)<|eom_id|>",
        "[TOOL_CALLS][{}]</s>",
    ],
)
def test_tool_calls_are_found_by_the_marks_of_the_families_also_when_they_are_cut(
    tokenizer: HFTokenizer, tmp_path: Path, call: str
) -> None:
    for name, text in (("whole", f"so {call} and"), ("cut", f"so {call[:-3]}")):
        run_dir = tmp_path / name
        kept(tokenizer, run_dir, [spoken(tokenizer, [(text, 3)])])
        tokens = tokens_of(telling_of_step(run_dir, 6)[0])
        inside = "".join(t.text for t in tokens if t.in_call)
        assert inside == (call if name == "whole" else call[:-3])


def test_what_an_environment_says_is_no_tool_call(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    kept(tokenizer, tmp_path, [spoken(tokenizer, [("so ", 3), (CALL, None), ("yes", 3)])])
    assert not any(t.in_call for t in tokens_of(telling_of_step(tmp_path, 6)[0]))


def test_what_is_left_out_stays_in_its_turn_and_shifts_nothing(tokenizer: HFTokenizer, tmp_path: Path) -> None:
    sample = spoken(tokenizer, [("x" * 1500, 3), ("y" * 1000, None), ("z" * 500, 4)])
    kept(tokenizer, tmp_path, [sample], less)
    tokens = tokens_of(telling_of_step(tmp_path, 6)[0])
    gap = next(t for t in tokens if t.id is None)
    assert gap.text == " [... 952 tokens left out ...] " and (gap.position, gap.turn, gap.outside) == (1024, 1, False)
    after = tokens[tokens.index(gap) + 1]
    assert (after.position, after.outside, tokens[-1].version) == (1976, True, 4)
    assert tokens[-1].difference == pytest.approx(-0.2, abs=2e-3)


def test_routes_are_bounded_in_bytes_and_may_be_wide_or_absent(tokenizer: HFTokenizer) -> None:
    sample = spoken(tokenizer, [("x" * 9000, 3)])
    found = routes_row(sample, 4)
    assert found is not None and found["layers"] == [1, 2, 6, 9] and found["bytes"] == 1
    assert len(found["experts"]) <= 4 * (ROUTE_BYTES // 3 + 1)
    assert routes_row(sample, 0) is None and routes_row(Sample.from_prompt(0, 0, [1]), 4) is None
    assert sample.routes is not None
    wide = Routes(sample.routes.experts.astype(np.uint16) + 300, sample.routes.mask, LAYERS)
    sample.routes = wide
    found = routes_row(sample, 99)
    assert found is not None and found["layers"] == list(LAYERS)
    back = decoded({**found})  # type: ignore[typeddict-item]
    np.testing.assert_array_equal(back, wide.experts[sample.prompt_length :][: len(back)])
    assert len(back) == ROUTE_BYTES // (len(LAYERS) * 2 * 2)


def test_a_whole_group_whose_rewards_differ_most_is_kept(tokenizer: HFTokenizer) -> None:
    samples: list[Sample] = []
    for group, rewards in enumerate([[0.0, 0.1] * 6, [0.0, 1.0] * 6, [1.0] * 12]):
        for index, reward in enumerate(rewards):
            samples.append(spoken(tokenizer, [("answer", 3)], group, index))
            samples[-1].reward = reward
    chosen = choose(samples, 0)
    kept_group = sorted(samples[i].index for i, kinds in chosen.items() if "group" in kinds)
    assert kept_group == list(range(8)) and {
        samples[i].group_id for i, kinds in chosen.items() if "group" in kinds
    } == {1}
    for sample in samples:
        sample.reward = 1.0
    assert not any("group" in kinds for kinds in choose(samples, 0).values())


def test_only_trained_ones_of_the_few_are_watched_and_a_file_of_another_length_is_not_joined(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    samples = [spoken(tokenizer, [(f"answer {i}", 3)], i, 0) for i in range(3)]
    for sample, reward in zip(samples, (0.0, 0.5, 1.0), strict=True):
        sample.reward = reward
    log = SampleLog("some", tokenizer)
    assert sorted(log.watch(6, samples, samples[1:])) == [0, 1], "numbers count trained sequences"
    assert SampleLog("none", tokenizer).watch(6, samples, samples) == ()
    log.write_trained(trainer_file_of(tmp_path, 6), 5, {0: less(samples[1])})
    log.close(60)
    assert not trainer_file_of(tmp_path, 6).exists(), "of a step that is not watched"
    kept(tokenizer, tmp_path, samples, less)
    text = trainer_file_of(tmp_path, 6).read_text()
    trainer_file_of(tmp_path, 6).write_text(text.replace('"log_probs":[', '"log_probs":[0,', 1))
    joined = ["trainer_log_probs" in row for row in telling_of_step(tmp_path, 6)]
    assert joined.count(False) == 1 and joined.count(True) == 2
    trainer_file_of(tmp_path, 6).write_text("torn")
    with pytest.raises(UserError, match=r"(?s)trainer_step_000006.jsonl:1.*not a line of trainer log-probs"):
        telling_of_step(tmp_path, 6)


@pytest.fixture
def inspected(tokenizer: HFTokenizer, tmp_path: Path) -> Path:
    samples = [spoken(tokenizer, PARTS, 4, 1), spoken(tokenizer, [("short\x1b[2J", 4)], 4, 0)]
    samples += [spoken(tokenizer, [("other", 4)], 7, 0)]
    kept(tokenizer, tmp_path, samples, less)
    return tmp_path


def printed(inspected: Path, **wanted: Any) -> str:
    console = Console(force_terminal=True, color_system="standard", width=140)
    with console.capture() as captured:
        inspect_run(inspected, InspectSelection(**wanted), console)
    return captured.get()


def test_inspect_shows_turns_in_the_colours_that_are_asked_for(inspected: Path) -> None:
    by_version = printed(inspected, group=4, sample=1)
    assert "\x1b[36mI add. " in by_version and "\x1b[4;33m<tool_call>" in by_version and "33mIt is 7" in by_version
    order = [
        by_version.index(text) for text in ("turn 1 · engine 0", "from outside", "[result: 7]", "turn 2", "It is 7")
    ]
    assert order == sorted(order) and "[weights 3]" in by_version and "[tool call]" in by_version
    by_mask = printed(inspected, group=4, sample=1, colour="mask")
    assert "\x1b[32mI add. " in by_mask and "\x1b[2m[result: 7]" in by_mask and "[sampled, not trained]" in by_mask
    by_difference = printed(inspected, group=4, sample=1, colour="difference")
    assert "\x1b[31mI add. " in by_difference and "[trainer higher by 0.01]" in by_difference, "a fifth of a nat lower"
    (inspected / "rollouts" / "trainer_step_000006.jsonl").unlink()
    assert "trainer's log-probs unknown" in printed(inspected, group=4, sample=1, colour="difference")


def test_inspect_lists_what_is_kept_and_shows_tokens_with_experts(
    inspected: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(inspected), "--step", "6"]) == 0
    out = capsys.readouterr().out
    assert "kept responses" in out and out.count("group 4 · sample 1") == 1 and "1 of 3 kept responses" in out
    assert main(["inspect", str(inspected), "--group", "4"]) == 0
    out = capsys.readouterr().out
    assert "sample 0" in out and "sample 1" in out and "group 7" not in out and "\x1b" not in out
    table = printed(inspected, group=4, sample=0, tokens=True)
    at = len("prompt:")
    assert f"1:{at + 1},{at} 5:{at + 5},{at} 9:{at + 9},{at}" in table and "-0.2000" in table and "yes" in table


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--group", "5"], "--group = 5"),
        (["--group", "7", "--sample", "3"], "--sample = 3"),
        (["--step", "7"], "choose from 6"),
        (["--eval"], "holds no responses of any evaluation"),
    ],
)
def test_what_is_not_kept_is_answered_with_what_is(
    inspected: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(inspected), *words]) == 2
    assert expected in capsys.readouterr().err
