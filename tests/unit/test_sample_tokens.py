"""Kept responses token by token: turns, tool calls, routes, the trainer's log-probs, and how a terminal shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mslime.cli import main
from mslime.config.errors import UserError
from mslime.data.routes import Routes
from mslime.data.sample import Group, Sample, SampleStatus
from mslime.data.sample_log import ROUTE_BYTES, Logged, SampleLog, choose, routes_row
from mslime.data.tokenizer import HFTokenizer, load_tokenizer
from mslime.observe.samples import file_of, trainer_file_of
from mslime_plugins.report.inspect_command import Inspected, inspect_run
from mslime_plugins.report.responses import telling_of_step
from mslime_plugins.report.sample_tokens import by_source, decoded, tokens_of
from tests.fixtures.tiny_models import make_tokenizer

LAYERS = (1, 2, 5, 6, 9)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


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
    log.write(file_of(run_dir, 6), 6, [Logged(groups, 4, [0.5] * len(samples))])
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
    with pytest.raises(UserError, match=r"(?s)trainer_step_000006.jsonl:1.*not a trainer's line"):
        telling_of_step(tmp_path, 6)


@pytest.fixture
def run_dir(tokenizer: HFTokenizer, tmp_path: Path) -> Path:
    samples = [spoken(tokenizer, PARTS, 4, 1), spoken(tokenizer, [("short\x1b[2J", 4)], 4, 0)]
    samples += [spoken(tokenizer, [("other", 4)], 7, 0)]
    kept(tokenizer, tmp_path, samples, less)
    return tmp_path


def printed(run_dir: Path, **wanted: Any) -> str:
    console = Console(force_terminal=True, color_system="standard", width=140)
    with console.capture() as captured:
        inspect_run(run_dir, Inspected(**wanted), console)
    return captured.get()


def test_inspect_shows_turns_in_the_colours_that_are_asked_for(run_dir: Path) -> None:
    by_version = printed(run_dir, group=4, sample=1)
    assert "\x1b[36mI add. " in by_version and "\x1b[4;33m<tool_call>" in by_version and "33mIt is 7" in by_version
    order = [
        by_version.index(text) for text in ("turn 1 · engine 0", "from outside", "[result: 7]", "turn 2", "It is 7")
    ]
    assert order == sorted(order) and "[weights 3]" in by_version and "[tool call]" in by_version
    by_mask = printed(run_dir, group=4, sample=1, colour="mask")
    assert "\x1b[32mI add. " in by_mask and "\x1b[2m[result: 7]" in by_mask and "[sampled, not trained]" in by_mask
    by_difference = printed(run_dir, group=4, sample=1, colour="difference")
    assert "\x1b[31mI add. " in by_difference and "[trainer higher by 0.01]" in by_difference, "a fifth of a nat lower"
    (run_dir / "rollouts" / "trainer_step_000006.jsonl").unlink()
    assert "log-probs of this response are not known" in printed(run_dir, group=4, sample=1, colour="difference")


def test_inspect_lists_what_is_kept_and_shows_tokens_with_experts(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(run_dir), "--step", "6"]) == 0
    out = capsys.readouterr().out
    assert "kept responses" in out and out.count("group 4 · sample 1") == 1 and "1 of 3 kept responses" in out
    assert main(["inspect", str(run_dir), "--group", "4"]) == 0
    out = capsys.readouterr().out
    assert "sample 0" in out and "sample 1" in out and "group 7" not in out and "\x1b" not in out
    table = printed(run_dir, group=4, sample=0, tokens=True)
    at = len("prompt:")
    assert f"1:{at + 1},{at} 5:{at + 5},{at} 9:{at + 9},{at}" in table and "-0.2000" in table and "yes" in table


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--group", "5"], "--group = 5"),
        (["--group", "7", "--sample", "3"], "--sample = 3"),
        (["--step", "7"], "there are: 6"),
        (["--eval"], "holds no responses of any evaluation"),
    ],
)
def test_what_is_not_kept_is_answered_with_what_is(
    run_dir: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(run_dir), *words]) == 2
    assert expected in capsys.readouterr().err
