"""Rows of supervised training: exactly the assistant's turns are trained, and what cannot be told apart is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mslime.cli import main
from mslime.config.errors import DataError
from mslime.config.loader import build
from mslime.config.schema import RunConfig
from mslime.data.conversation import SupervisedSequence, supervised_turns
from mslime.data.sample import Sample, check_invariants
from mslime.data.supervised import SupervisedSource
from mslime.data.tokenizer import HFTokenizer, load_tokenizer
from tests.fixtures.made_tokenizer import make_tokenizer as make_special_tokenizer
from tests.fixtures.tiny_models import make_tiny_qwen3_moe, make_tokenizer
from tests.unit.rollout_fakes import FakeTokenizer

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content or '' }}{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}"
    "{% endif %}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
) + PROMPT
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
FORGETFUL = (  # drops the thinking of all turns but the last, as Qwen3's does
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
) + PROMPT
ENDLESS = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}" + PROMPT


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
CONVERSATIONS = [
    [user("1+1="), assistant("2")],
    [{"role": "system", "content": "be brief"}, user("né?"), assistant("oui 🙂"), user("\n"), assistant("  \n\n x  ")],
    [user("a"), assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "3"}, assistant("It is 3."), user("z")],
    [user("a"), assistant("b"), assistant("c"), user("d"), assistant("")],
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def tokenizer_with(directory: Path, template: str) -> HFTokenizer:
    from transformers import AutoTokenizer

    inner: Any = AutoTokenizer.from_pretrained(str(directory))
    inner.chat_template = template
    return HFTokenizer(inner)


def turns(
    directory: Path, template: str, messages: list[dict[str, Any]], loss_on: Any = "all"
) -> list[SupervisedSequence]:
    return supervised_turns(messages, {}, tokenizer_with(directory, template), "x.jsonl:1", loss_on)


def mask(one: SupervisedSequence) -> list[int]:
    return [int(any(start <= t < end for start, end in one.spans)) for t in range(len(one.tokens))]


def trained(one: SupervisedSequence) -> list[str]:
    return [one.text[start:end] for start, end in one.characters]


@pytest.mark.parametrize("template", [MARKED, PLAIN])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_what_is_trained_is_what_transformers_marks(
    directory: Path, template: str, messages: list[dict[str, Any]]
) -> None:
    (found,) = turns(directory, template, messages)
    reference: Any = tokenizer_with(directory, MARKED)._inner.apply_chat_template(
        messages, return_assistant_tokens_mask=True, return_dict=True
    )
    assert found.tokens == reference["input_ids"] and mask(found) == reference["assistant_masks"]
    assert sum(mask(found)) == found.trained > 0
    plain = tokenizer_with(directory, template)
    for (start, end), text in zip(found.spans, trained(found), strict=True):
        assert plain._inner.decode(found.tokens[start:end]) == text and text.endswith("<|im_end|>")


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_turns_are_chosen_by_setting_and_by_row(directory: Path, template: str) -> None:
    row = [user("q1"), assistant("a1"), user("q2"), assistant("a2", train=False), user("q3"), assistant("a3", weight=1)]
    (every,) = turns(directory, template, row)
    assert trained(every) == ["a1<|im_end|>", "a3<|im_end|>"] and "a2" in every.text
    (last,) = turns(directory, template, [*row, user("thanks")], "last")
    assert trained(last) == ["a3<|im_end|>"] and last.text == every.text, "what follows the last turn is left out"
    each = turns(directory, template, row, "each")
    assert [trained(one) for one in each] == [["a1<|im_end|>"], ["a3<|im_end|>"]]
    assert each[0].text == "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"


def test_a_template_that_drops_earlier_thinking_is_refused_or_shown_each_turn_as_the_last(directory: Path) -> None:
    row = [user("q1"), assistant("<think>t1</think>a1"), user("q2"), assistant("<think>t2</think>a2")]
    with pytest.raises(DataError, match=r"x.jsonl:1 = .*changes message 2 when other messages follow") as e:
        turns(directory, FORGETFUL, row)
    assert "train.sft_loss_on" in e.value.hint
    (last,) = turns(directory, FORGETFUL, row, "last")
    assert trained(last) == ["<think>t2</think>a2<|im_end|>"] and "t1" not in last.text
    first, second = turns(directory, FORGETFUL, row, "each")
    assert trained(first) == ["<think>t1</think>a1<|im_end|>"] and second == last


@pytest.mark.parametrize(
    ("template", "row", "said"),
    [
        (PLAIN, [user("a")], "no assistant turn is selected for training"),
        (PLAIN, [user("a"), assistant("b", weight=0)], "no assistant turn is selected for training"),
        (PLAIN, [user("a"), assistant("b", weight=0.5)], "'weight' of an assistant's turn must be 0 or 1"),
        (PLAIN, [assistant("hello"), user("a")], "the first message is an assistant message"),
        (ENDLESS, [user("a"), assistant("b")], "does not write message 2 after its own generation prompt"),
        (ENDLESS.replace("<|im_start|>assistant\n", "assistant: "), [user("a"), assistant("b")], "would not learn to"),
        ("{{ raise_exception('no tools') }}", [user("a"), assistant("b")], "no tools"),
        (MARKED.replace("{% generation %}", "{% generation %}{% endgeneration %}"), [user("a"), assistant("b")], ""),
        (
            MARKED + "{% generation %}!{% endgeneration %}",
            [user("a"), assistant("b", train=0), assistant("c")],
            "3 marks",
        ),
    ],
)
def test_what_cannot_be_told_apart_is_refused_by_row(
    directory: Path, template: str, row: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(DataError) as caught:
        turns(directory, template, row)
    assert caught.value.field == "x.jsonl:1" and said in str(caught.value) and caught.value.hint


def test_a_token_across_the_border_is_refused_with_the_place(directory: Path, tmp_path: Path) -> None:
    table = json.loads((directory / "tokenizer.json").read_text())
    table["model"]["vocab"]["ĊĊ"] = 300
    table["model"]["merges"] = [["Ċ", "Ċ"]]
    table["pre_tokenizer"]["use_regex"] = False
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_text((directory / name).read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    assert turns(tmp_path, PLAIN, [user("a"), assistant("x\n\ny")])[0].tokens.count(300) == 1
    with pytest.raises(DataError, match="a token spans the boundary") as caught:
        turns(tmp_path, PLAIN, [user("a"), assistant("\nb")])
    assert "assistant\n\nb" in str(caught.value.value)


def test_a_tokenizer_that_treats_the_beginning_of_a_text_in_its_own_way_finds_the_same_turns(
    directory: Path, tmp_path: Path
) -> None:
    """Like sentencepiece's: a blank is put before the text as a whole, so pieces have other tokens than the whole."""
    table = json.loads((directory / "tokenizer.json").read_text())
    table["normalizer"] = {"type": "Prepend", "prepend": "▁"}
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_text((directory / name).read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    template = "^" + PLAIN
    row = [user("q1"), assistant("a1"), user("q2"), assistant("a2")]
    (plain,), (found,) = turns(directory, template, row), turns(tmp_path, template, row)
    assert len(found.tokens) > len(plain.tokens)
    inner = tokenizer_with(tmp_path, PLAIN)._inner
    assert [inner.decode(found.tokens[a:b]) for a, b in found.spans] == ["a1<|im_end|>", "a2<|im_end|>"]


def run(path: Path, data: dict[str, Any], **train: Any) -> RunConfig:
    rollout = {"max_total_tokens": train.pop("limit", None)}
    return build({
        "model": {"path": str(path.parent)}, "data": {"prompts": [str(path)], "shuffle": False, **data},
        "train": {"task": "sft", **train}, "rollout": rollout,
    })  # fmt: skip


def source(path: Path, tokenizer: Any, data: dict[str, Any] | None = None, **train: Any) -> SupervisedSource:
    config = run(path, data or {"messages_key": "messages"}, **train)
    return SupervisedSource(
        [str(path)], config.data, config.train, config.seed, tokenizer, config.rollout.max_total_tokens or 10_000
    )


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_openai_rows_with_parts_arguments_and_empty_keys_are_rendered_as_templates_expect(
    directory: Path, tmp_path: Path
) -> None:
    empty = {"tool_calls": None, "name": None}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'}}
    parts = [{"type": "text", "text": "what is"}, {"type": "text", "text": " 1+2"}]
    row = [user("") | {"content": parts} | empty, {"role": "assistant", "tool_calls": [call]}, assistant("3", **empty)]
    template = "{{ tools | tojson if tools else '' }}" + PLAIN
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"default": None}}}]
    data = {"messages_key": "chat.turns", "tools_key": "tools"}
    for given in (tools, json.dumps(tools)):
        path = write(tmp_path / "x.jsonl", {"chat": {"turns": row}, "tools": given})
        (sample,) = source(path, tokenizer_with(directory, template), data).next(3)
        check_invariants(sample)
        text = tokenizer_with(directory, template)._inner.decode(sample.tokens.tolist())
        assert text.startswith('[{"type": "function", "function": {"name": "add", "parameters": {}}}]')
        assert (
            'user\nwhat is 1+2<|im_end|>\n<|im_start|>assistant\n{"name": "add", "arguments": {"a": 1, "b": [2]}}'
            in text
        )
        assert sample.response == "3<|im_end|>" and sample.group_id == 3


def test_a_row_of_prompt_and_label_is_prompt_response_and_eos(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "P1", "label": "42"})
    (sample,) = source(path, FakeTokenizer(), {"prompt_key": "prompt"}).next(7)
    check_invariants(sample)
    assert sample.tokens.tolist() == [80, 49, 52, 50, FakeTokenizer.eos_token_id]
    assert sample.loss_mask.tolist() == [False, False, True, True, True] and sample.group_id == 7


def test_a_row_of_prompt_and_label_needs_text_to_learn(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "P1", "label": 42})
    with pytest.raises(DataError, match=r"a.jsonl:1 = 42: supervised training needs the response as text"):
        source(path, FakeTokenizer(), {"prompt_key": "prompt"}).next(0)


def drawn(rows: SupervisedSource, count: int) -> list[list[Sample]]:
    return [rows.next(i) for i in range(count)]


def test_rows_that_are_too_long_are_refused_skipped_or_cut_and_counted(directory: Path, tmp_path: Path) -> None:
    long = [user("q"), assistant("a" * 40), user("r"), assistant("b" * 9)]
    hopeless = [user("q" * 80), assistant("a")]
    path = write(tmp_path / "x.jsonl", {"messages": CONVERSATIONS[0]}, {"messages": long}, {"messages": hopeless})
    tokenizer = tokenizer_with(directory, PLAIN)
    with pytest.raises(
        DataError, match=r"x.jsonl:2 = '93 tokens': the limit is 60 tokens for prompt and response together"
    ):
        drawn(source(path, tokenizer, limit=60), 2)
    skipping = source(path, tokenizer, limit=60, sft_too_long="skip")
    assert len({len(s) for (s,) in drawn(skipping, 3)}) == 1
    assert skipping.metrics() == {"data/skipped_rows": 4.0, "data/cut_rows": 0.0}
    cutting = source(path, tokenizer, limit=60, sft_too_long="cut")
    (_,), (cut,), (_,) = drawn(cutting, 3)
    assert len(cut) == 60 and cut.trainable_tokens == 60 - len("suser\nqe\nsassistant\n")
    assert cutting.metrics() == {"data/skipped_rows": 1.0, "data/cut_rows": 1.0}
    again = source(path, tokenizer, limit=60, sft_too_long="cut")
    again.load_state_dict(json.loads(json.dumps(cutting.state_dict())))
    ((after,),), ((here,),) = drawn(again, 1), drawn(cutting, 1)
    assert (after.tokens == here.tokens).all() and again.metrics() == cutting.metrics()
    assert [len(s) for s in cutting.samples()] == [26, 60]
    each = source(path, tokenizer, limit=60, sft_loss_on="each", sft_too_long="cut")
    assert [len(samples) for samples in drawn(each, 3)] == [1, 1, 1] and each.metrics()["data/skipped_rows"] == 2
    only_long = write(tmp_path / "y.jsonl", {"messages": hopeless})
    with pytest.raises(DataError, match="all 1 rows are too long"):
        source(only_long, tokenizer, limit=60, sft_too_long="cut").next(0)


def test_sequences_of_one_row_are_parts_of_one_rollout(directory: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"messages": CONVERSATIONS[1]}, {"messages": CONVERSATIONS[0]})
    rows = source(path, tokenizer_with(directory, PLAIN), sft_loss_on="each")
    first, second = drawn(rows, 2)
    assert [s.rollout for s in first] == [first[0].rollout] * 2 and second[0].rollout != first[0].rollout
    assert [s.index for s in first] == [0, 1]


class Check:
    """`mslime check` of supervised rows."""

    def __init__(self, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._model, self._capsys = model, capsys

    def __call__(self, path: Path, *flags: str) -> tuple[int, str]:
        base = ["check", "--model.path", str(self._model), "--data.prompts", str(path), "--train.task", "sft"]
        status = main([*base, *flags])
        printed = self._capsys.readouterr()
        return status, " ".join((printed.out + printed.err).split())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("supervised") / "model")


@pytest.fixture
def check(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    monkeypatch.setenv("COLUMNS", "400")  # else a long path is broken in the middle of a word
    return Check(model, capsys)


def test_check_shows_what_is_trained_and_counts(check: Check, tmp_path: Path) -> None:
    rows = [{"messages": c} for c in CONVERSATIONS[:2]]
    path, held_out = write(tmp_path / "x.jsonl", *rows), write(tmp_path / "h.jsonl", *rows[:1])
    sets = json.dumps([{"name": "mine", "path": str(held_out)}])
    status, said = check(path, "--data.messages-key", "messages", "--data.eval-sets", sets)
    assert status == 0
    assert "1+1=<|im_end|>\\n<|im_start|>assistant\\n[[2<|im_end|>]]\\n'," in said and "2 trained" in said
    assert "2 rows; all 2 tried: 2 sequences of" in said and "x.jsonl:2); 0 are skipped and 0 cut" in said
    assert "mine: 1 rows; all 1 tried: 1 sequences of 26 tokens, 2 of them trained" in said
    labelled = write(tmp_path / "l.jsonl", {"prompt": "1+1=", "label": "2"})
    status, said = check(labelled)
    assert status == 0 and "'1+1=[[2]]', 6 tokens, 2 trained" in said


def test_check_refuses_rows_and_settings_by_name(check: Check, tmp_path: Path, model: Path) -> None:
    good, messages = {"messages": CONVERSATIONS[0]}, ["--data.messages-key", "messages"]
    many = [good] * 2000
    path = write(tmp_path / "x.jsonl", *many, {"messages": [user("a")]}, *many)
    status, said = check(path, *messages)
    assert status == 2 and "x.jsonl:2001" in said, "every row is looked at, also those that are not rendered"
    path = write(tmp_path / "x.jsonl", good, {"messages": "text"})
    assert "x.jsonl:2 = 'text': 'messages' must be a list" in check(path, *messages)[1]
    path = write(tmp_path / "x.jsonl", good, {"messages": [user("a"), assistant("b" * 900)]})
    limited = [*messages, "--rollout.max-total-tokens", "600"]
    assert "x.jsonl:2 = '922 tokens'" in check(path, *limited)[1]
    assert "1 are skipped and 0 cut" in check(path, *limited, "--train.sft-too-long", "skip")[1]
    short = write(tmp_path / "y.jsonl", good)
    for flags, field in (
        ([*messages, "--train.task", "rl"], "data.messages_key"),
        ([*messages, "--data.max-prompt-tokens", "9"], "data.max_prompt_tokens"),
        (["--train.sft-loss-on", "last"], "train.sft_loss_on"),
        (["--data.tools-key", "tools"], "data.tools_key"),
    ):
        status, said = check(short, *flags)
        assert status == 2 and field in said
    template = tmp_path / "tokenizer"
    (inner := load_tokenizer(model)._inner).chat_template = MARKED.replace("{{ m.content }}", "")
    inner.save_pretrained(template)
    assert "omits the user's text" in check(short, *messages, "--model.tokenizer-path", str(template))[1]


GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
R1 = (
    "<|bos|>{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}<|eos|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)


@pytest.mark.parametrize("loss_on", ["all", "each", "last"])
def test_a_turn_that_the_next_one_s_mark_ends_is_trained_with_it(loss_on: Any) -> None:
    """GLM-4.5 to 4.7: `<|user|>` is among the ids that end a response."""
    specials = ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|endoftext|>"]
    tokenizer = HFTokenizer(make_special_tokenizer(specials, "<|endoftext|>", template=GLM))
    messages = [user("2+2?"), assistant("It is 4."), user("3+3?"), assistant("It is 6.")]
    found = supervised_turns(messages, {}, tokenizer, "row", loss_on)
    head = "[gMASK]<sop><|user|>\n2+2?<|assistant|>\n"
    last = "<|user|>\n3+3?<|assistant|>\n[[It is 6.<|user|>]]"
    assert [one.marked() for one in found] == {
        "all": [f"{head}[[It is 4.<|user|>]]{last.removeprefix('<|user|>')}"],
        "each": [f"{head}[[It is 4.<|user|>]]", f"{head}It is 4.{last}"], "last": [f"{head}It is 4.{last}"],
    }[loss_on]  # fmt: skip


def test_a_turn_without_thoughts_behind_a_prompt_that_opens_them_is_trained() -> None:
    """DeepSeek-R1: the template writes no thoughts, and its prompt ends with `<think>`."""
    specials = ["<|bos|>", "<|User|>", "<|Assistant|>", "<think>", "</think>", "<|eos|>"]
    tokenizer = HFTokenizer(make_special_tokenizer(specials, "<|eos|>", template=R1))
    (found,) = supervised_turns([user("2+2?"), assistant("It is 4.")], {}, tokenizer, "row", "all")
    assert found.marked() == "<|bos|><|User|>2+2?<|Assistant|>[[It is 4.<|eos|>]]"
    with pytest.raises(DataError, match="does not write message 2"):  # its thoughts would be lost
        supervised_turns([user("2+2?"), assistant("<think>2+2</think>4")], {}, tokenizer, "row", "all")
