"""Calls of tools in the forms of model families: what templates write is read, by us as by SGLang and `renderers`."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.rollout.agents.call_forms import FORMS, short_id, typed
from mslime.rollout.agents.choose import _call as of_package
from mslime.rollout.agents.messages import ChatError
from mslime.rollout.agents.parsing import TaggedParser
from mslime.rollout.agents.renderer import Parsed, ParsedCall
from mslime.rollout.agents.template import USUAL, TemplateRenderer
from tests.fixtures import chat_templates, family_templates
from tests.fixtures.family_templates import FAMILIES, Family
from tests.fixtures.made_tokenizer import respelled

ROOT = Path(__file__).parents[2]
USER = {"role": "user", "content": "hi"}
PROPERTIES = {
    "text": {"type": "string"}, "count": {"type": "integer"}, "ratio": {"type": "number"}, "flag": {"type": "boolean"},
    "items": {"type": "array", "items": {}}, "nested": {"type": "object"}, "perhaps": {"type": ["integer", "null"]},
    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("add", "look_up2", "read-file")
]
NAMES = [tool["function"]["name"] for tool in TOOLS]

Calls = list[tuple[str, dict[str, Any]]]


@cache
def renderer(family: str, thinking: Literal["template", "keep"] = "template") -> TemplateRenderer:
    return TemplateRenderer(FAMILIES[family].tokenizer(), thinking)


def message(calls: Calls, content: str = "") -> dict[str, Any]:
    """A reply with calls, whose ids are as Kimi writes them."""
    written = [
        {"id": f"functions.{name}:{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": written}


def written(made: TemplateRenderer, said: dict[str, Any]) -> tuple[str, str]:
    """(text before a reply, the reply's) as the template writes them."""
    found = made._written(said, TOOLS)
    assert found is not None
    return found[0], found[1].rstrip("\n")


def parsed(made: TemplateRenderer, before: str, reply: str) -> Parsed:
    """Of a reply that is spelled byte by byte."""
    return made.parse(respelled(made._tokenizer, reply), made._encode(before), TOOLS)


def read(found: Parsed) -> Calls:
    return [(call.name, json.loads(call.arguments)) for call in found.calls if call.status == "ok"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6,
)  # fmt: skip
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text() | st.sampled_from(["5", "true", "null", '{"a": 1}', " \n x \n", "天気 é😀", "]}"]),
        "count": st.integers(-(2**60), 2**60), "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(), "items": st.lists(JSON, max_size=3),
        "nested": st.dictionaries(st.text(), JSON, max_size=3), "perhaps": st.none() | st.integers(0, 9),
        "either": st.integers(0, 9) | st.just("five"),
    },
)  # fmt: skip
TAGS = {tag for family in FAMILIES.values() for tag in (*family.specials, family.eos, "<s>")}
TAGS |= {"<parameter=", "</parameter>", "<function=", "</function>"}


def without_tags(calls: Calls) -> bool:
    """Whether no text has a tag in it, which would be encoded as one: Hypothesis also draws texts of this file."""
    told = json.dumps(calls, ensure_ascii=False)
    return not any(tag in told for tag in TAGS)


CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3).filter(without_tags)


# -------------------------------------------------------------------------------------------------- which form is read


@pytest.mark.parametrize("name", FAMILIES)
def test_the_form_is_the_one_that_the_template_writes(name: str) -> None:
    made = renderer(name)
    assert made.form == FAMILIES[name].form and made.calls_read


@pytest.mark.parametrize(("template", "form"), [("HERMES", "Hermes"), ("CHATML", ""), ("HARMONY", "")])
def test_a_template_that_writes_no_calls_has_no_form(template: str, form: str) -> None:
    made = TemplateRenderer(chat_templates.tokenizer_with(getattr(chat_templates, template)), "template")
    assert made.form == form and made.calls_read is (form != "")


def test_calls_in_a_form_that_nobody_reads_are_text_and_tools_are_refused() -> None:
    known = FAMILIES["kimi-k2"]
    made = TemplateRenderer(Family(family_templates.OF_ITS_OWN, "", known.specials, known.eos).tokenizer(), "template")
    assert made.form == "" and not made.calls_read
    with pytest.raises(ChatError, match=r"(?s)calls in this template's form cannot be parsed.*rollout\.renderer"):
        made.render([USER], TOOLS)
    reply = "<|tool_calls_section_begin|><|tool_call_begin|>x<|tool_call_end|><|tool_calls_section_end|>"
    assert made.parse(made._encode(reply), [], TOOLS) == Parsed(reply)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_other_form_reads_what_a_template_writes(name: str) -> None:
    made = renderer(name)
    before, reply = written(made, message([("add", {"text": "b"})]))
    ids = made._encode(reply.removesuffix(FAMILIES[name].eos))
    readers = [
        form.name
        for form in FORMS
        if read(TaggedParser(made._tokenizer, form, None).parse(ids, made._encode(before), TOOLS))
    ]
    assert readers == [FAMILIES[name].form]


def test_the_page_about_agents_has_a_row_for_each_form() -> None:
    rows = [line.split("|")[1].strip() for line in (ROOT / "docs/agents.md").read_text().splitlines() if "|" in line]
    assert {form.name for form in FORMS} <= set(rows)


# ------------------------------------------------------------------------------------------------- written and read


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(CALLS, st.sampled_from(["", "I look.", "天気 [1] {x}"]))
def test_calls_that_a_template_writes_are_read_back(name: str, calls: Calls, content: str) -> None:
    made = renderer(name)
    said = message(calls, content)
    before, reply = written(made, said)
    found = parsed(made, before, reply)
    assert read(found) == calls and len(found.calls) == len(calls)
    text = "" if name == "mistral-list" else content.strip()  # writes either a text or calls
    assert found.text in (text, f"<｜Assistant｜>{text}"), "a prompt that opens the reasoning is no prefix of history"


@pytest.mark.parametrize(
    ("name", "ids"),
    [("kimi-k2", ["functions.add:0", "functions.look_up2:1"]),
     ("mistral-list", [short_id("functions.add:0"), short_id("functions.look_up2:1")]),
     ("mistral-ids", [short_id("functions.add:0"), short_id("functions.look_up2:1")]),
     ("mistral-named", ["", ""]), ("qwen3-coder", ["", ""])],
)  # fmt: skip
def test_the_ids_that_a_model_writes_are_kept(name: str, ids: list[str]) -> None:
    made = renderer(name)
    found = parsed(made, *written(made, message([("add", {}), ("look_up2", {})])))
    assert [call.id for call in found.calls] == ids


def test_ids_are_made_short_where_the_template_demands_it_and_the_models_own_stay() -> None:
    made = renderer("mistral-list")
    said = message([("add", {})])
    answer = {"role": "tool", "content": "3", "tool_call_id": said["tool_calls"][0]["id"]}
    text = made.spell(made.render([USER, said, answer], TOOLS))
    nine = short_id("functions.add:0")
    assert text.count(f'"{nine}"') == 2 and re.fullmatch("[a-z0-9]{9}", nine)
    assert short_id("Ab3456789") == "Ab3456789" and short_id("functions.add:1") != nine


def made_cases(count: int) -> list[tuple[Calls, str]]:
    """Calls as `CALLS` draws them, of a fixed seed, without what readers of text are known to change."""
    pick = random.Random(7)
    word = lambda: "".join(pick.choice('abc é天😀{}[]":,_-') for _ in range(pick.randint(1, 8))).strip() or "x"  # noqa: E731
    values: dict[str, Any] = {
        "text": word, "count": lambda: pick.randint(-99, 10**12), "ratio": lambda: pick.randint(1, 99) / 8,
        "items": lambda: [word(), pick.randint(0, 9), {word(): [True, None]}],
        "nested": lambda: {word(): {word(): pick.random()}},
    }  # fmt: skip
    return [
        (
            [(pick.choice(NAMES), {key: values[key]() for key in pick.sample(sorted(values), pick.randint(1, 4))})
             for _ in range(pick.randint(1, 3))],
            pick.choice(["", "I look."]),
        )
        for _ in range(count)
    ]  # fmt: skip


@pytest.mark.nightly
def test_sglang_reads_the_same_calls() -> None:
    names = [name for name in FAMILIES if name != "mistral-ids"]  # SGLang takes [CALL_ID] for a part of the name
    cases = [(name, calls, content) for name in names for calls, content in made_cases(40)]
    replies = [written(renderer(name), message(calls, content)) for name, calls, content in cases]
    asked = [
        (FAMILIES[name].form, reply.removesuffix(FAMILIES[name].eos), TOOLS)
        for (name, _, _), (_, reply) in zip(cases, replies, strict=True)
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/unit/sglang_call_readers.py")], input=json.dumps(asked), text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    wrong = []
    for (name, calls, _), (before, reply), (_, found) in zip(cases, replies, theirs, strict=True):
        ours = read(parsed(renderer(name), before, reply))
        if not ours == calls == [(call[0], call[1]) for call in found]:
            wrong.append((name, reply, ours, found))
    assert not wrong, wrong[:3]


def by_renderers(name: str, made: TemplateRenderer, ids: list[int]) -> list[ParsedCall]:
    """What the package's parser of the family says of a reply."""
    from renderers import parsing

    token = made._tokenizer.convert_tokens_to_ids
    tags = {
        "deepseek-v3": {"tool_calls_begin_id": "<｜tool▁calls▁begin｜>", "tool_calls_end_id": "<｜tool▁calls▁end｜>",
                        "tool_call_begin_id": "<｜tool▁call▁begin｜>", "tool_call_end_id": "<｜tool▁call▁end｜>",
                        "tool_sep_id": "<｜tool▁sep｜>"},
        "kimi-k2": {"tool_calls_section_begin_id": "<|tool_calls_section_begin|>",
                    "tool_calls_section_end_id": "<|tool_calls_section_end|>",
                    "tool_call_begin_id": "<|tool_call_begin|>", "tool_call_end_id": "<|tool_call_end|>",
                    "tool_call_argument_begin_id": "<|tool_call_argument_begin|>"},
        "glm": {"think_id": "<think>", "think_end_id": "</think>", "tool_call_id": "<tool_call>",
                "tool_call_end_id": "</tool_call>", "arg_key_id": "<arg_key>", "arg_key_end_id": "</arg_key>",
                "arg_value_id": "<arg_value>", "arg_value_end_id": "</arg_value>"},
        "qwen3-coder": {"think_id": "<think>", "think_end_id": "</think>", "tool_call_id": "<tool_call>",
                        "tool_call_end_id": "</tool_call>"},
    }[name]  # fmt: skip
    parse = {"deepseek-v3": parsing.parse_deepseek_v3, "kimi-k2": parsing.parse_kimi_k2, "glm": parsing.parse_glm,
             "qwen3-coder": parsing.parse_qwen35}[name]  # fmt: skip
    given = {key: token(tag) for key, tag in tags.items()}
    tools = {"tools": TOOLS} if name in ("glm", "qwen3-coder") else {}
    found = parse(made._tokenizer, ids, stop_ids=set(made.stop_ids), **given, **tools)
    return [of_package(call) for call in found.tool_calls]


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "glm", "qwen3-coder"])
def test_the_package_reads_the_same_calls(name: str) -> None:
    made = renderer(name)
    for calls, content in made_cases(40):
        before, reply = written(made, message(calls, content))
        theirs = by_renderers(name, made, made._encode(reply))
        ours = parsed(made, before, reply).calls
        facts = [[(c.name, c.arguments, c.status, c.id) for c in side] for side in (ours, theirs)]
        assert facts[0] == facts[1] and read(Parsed("", "", ours)) == calls


# ----------------------------------------------------------------------------------------------- what is written badly

CODER = "<tool_call>\n<function=add>\n<parameter=count>\n{}\n</parameter>\n</function>\n</tool_call>"
GLM_CALL = "<tool_call>add\n<arg_key>count</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
KIMI_CALLS = "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"


@pytest.mark.parametrize(
    ("name", "reply", "statuses"),
    [
        ("qwen3-coder", CODER.format("5"), ["ok"]),
        ("qwen3-coder", CODER.format("five"), ["invalid_json"]),
        ("qwen3-coder", CODER.replace("</parameter>", ""), ["malformed_structure"]),
        ("qwen3-coder", CODER.replace("</function>", ""), ["malformed_structure"]),
        ("qwen3-coder", CODER.replace("=add", "="), ["missing_name"]),
        ("qwen3-coder", CODER.replace("</tool_call>", ""), ["unclosed_block"]),
        ("qwen3-coder", CODER.replace("<parameter", "so <parameter"), ["malformed_structure"]),
        ("qwen3-coder", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', ["malformed_structure"]),
        ("glm", GLM_CALL.format("5"), ["ok"]),
        ("glm", "<tool_call>add</tool_call>", ["ok"]),
        ("glm", GLM_CALL.format("five"), ["invalid_json"]),
        ("glm", GLM_CALL.replace("add", ""), ["missing_name"]),
        ("glm", GLM_CALL.replace("</arg_value>", ""), ["malformed_structure"]),
        ("glm", GLM_CALL.replace("<arg_key>count</arg_key>", ""), ["malformed_structure"]),
        ("glm", GLM_CALL.replace("</arg_key>", "</arg_key> so "), ["malformed_structure"]),
        ("glm", GLM_CALL.format("5") + GLM_CALL.replace("\n</tool_call>", ""), ["ok", "unclosed_block"]),
        ("deepseek-v3", V3.format('function<｜tool▁sep｜>add\n```json\n{"count": 1}\n```'), ["ok"]),
        ("deepseek-v3", V3.format('function<｜tool▁sep｜>add\n```json\n{"count": }\n```'), ["invalid_json"]),
        ("deepseek-v3", V3.format("function<｜tool▁sep｜>add\n```json\n[1]\n```"), ["malformed_structure"]),
        ("deepseek-v3", V3.format('function<｜tool▁sep｜>add\n{"count": 1}'), ["malformed_structure"]),
        ("deepseek-v3", V3.format('add<｜tool▁sep｜>{"count": 1}'), ["malformed_structure"]),
        ("deepseek-v3", V3.format("function add"), ["malformed_structure"]),
        ("deepseek-v3", V3.format("so<｜tool▁sep｜>add\n```json\n{}\n```"), ["malformed_structure"]),
        ("deepseek-v3", V3.format("function<｜tool▁sep｜>\n```json\n{}\n```"), ["missing_name"]),
        ("deepseek-v3", "<｜tool▁calls▁begin｜>so<｜tool▁calls▁end｜>", ["malformed_structure"]),
        ("deepseek-v3", "<｜tool▁calls▁begin｜>so", ["unclosed_block"]),
        ("deepseek-v3.1", V3.format('add<｜tool▁sep｜>{"count": 1}'), ["ok"]),
        ("deepseek-v3.1", V3.format("add<｜tool▁sep｜>"), ["ok"]),
        ("deepseek-v3.1", V3.format("add<｜tool▁sep｜>{"), ["invalid_json"]),
        ("deepseek-v3.1", V3.format("<｜tool▁sep｜>{}"), ["missing_name"]),
        ("deepseek-v3.1", V3.format("add<｜tool▁sep｜>{}<｜tool▁sep｜>{}"), ["malformed_structure"]),
        ("kimi-k2", KIMI_CALLS.format(f"functions.add:3{KIMI_ARGUMENTS}{{}}"), ["ok"]),
        ("kimi-k2", KIMI_CALLS.format(f"3{KIMI_ARGUMENTS}{{}}"), ["missing_name"]),
        ("kimi-k2", KIMI_CALLS.format("functions.add:3 {}"), ["malformed_structure"]),
        ("kimi-k2", KIMI_CALLS.format(f"functions.add:3{KIMI_ARGUMENTS}{{,}}"), ["invalid_json"]),
        ("kimi-k2", KIMI_CALLS.format(f"functions.add:3{KIMI_ARGUMENTS}{{}}").partition("<|tool_call_end")[0],
         ["unclosed_block"]),
        ("mistral-list", '[TOOL_CALLS] [{"name": "add", "arguments": {}}]', ["ok"]),
        ("mistral-list", '[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": "a', ["ok", "invalid_json"]),
        ("mistral-list", '[TOOL_CALLS] [{"name": "add", "arguments": {}}', ["ok", "unclosed_block"]),
        ("mistral-list", '[TOOL_CALLS] [{"arguments": {}}, [1]]', ["missing_name", "malformed_structure"]),
        ("mistral-list", "[TOOL_CALLS] []", ["invalid_json"]),
        ("mistral-list", "[TOOL_CALLS]add[ARGS]{}", ["malformed_structure"]),
        ("mistral-named", "[TOOL_CALLS]add[ARGS]{}[TOOL_CALLS]add[ARGS]{,}", ["ok", "invalid_json"]),
        ("mistral-named", "[TOOL_CALLS]add[CALL_ID][ARGS]", ["invalid_json"]),
        ("mistral-ids", "[TOOL_CALLS]add[CALL_ID]abc[ARGS]{}", ["ok"]),
        ("mistral-ids", "[TOOL_CALLS][ARGS]{}", ["missing_name"]),
        ("mistral-ids", "[TOOL_CALLS]add[ARGS][1]", ["malformed_structure"]),
        ("mistral-ids", '[TOOL_CALLS] [{"name": "add", "arguments": {}}]', ["malformed_structure"]),
        ("kimi-k2", KIMI_CALLS.format(f'functions.add:3{KIMI_ARGUMENTS}{{"ratio": NaN}}'), ["invalid_json"]),
    ],
)  # fmt: skip
def test_every_attempt_at_a_call_has_a_status(name: str, reply: str, statuses: list[str]) -> None:
    made = renderer(name)
    found = parsed(made, "", f"so {reply}")
    assert [call.status for call in found.calls] == statuses
    assert found.text == "so" and all(call.raw in reply for call in found.calls)
    assert len(statuses) > 1 or any(
        tag in found.calls[0].raw for tag in ("add", "so", "3", "[1]", "[]", "parameter", "{}")
    )


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"), ("5", {"type": "integer"}, 5), ("5", {"type": "number"}, 5), ("5", None, 5),
        ("five", None, "five"), ("5", {}, 5), ("True", None, "True"), ("True", {"type": "boolean"}, True),
        ("None", {"type": ["integer", "null"]}, None), ("['a']", {"type": "array"}, ["a"]),
        ("null", {"type": ["string", "null"]}, None), ("None", {"type": ["string", "null"]}, "None"),
        ('"a"', {"type": ["string", "null"]}, '"a"'), ("5", PROPERTIES["either"], 5), ("x", PROPERTIES["either"], "x"),
        ("true", PROPERTIES["either"], "true"), ("2", {"enum": ["1", "2"]}, "2"), ("2", {"enum": [1, 2]}, 2),
        ("5.5", {"type": "integer"}, 5.5), ("x", {"anyOf": [{"type": "integer"}, {}]}, "x"),
    ],
)  # fmt: skip
def test_a_value_has_the_type_of_its_schema(text: str, schema: Any, value: Any) -> None:
    found = typed(text, schema)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["five", "{1, 2}", "[", "1j", "(" * 9000])
def test_a_text_that_is_no_value_of_its_type_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no integer"):
        typed(text, {"type": "integer"})


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_said_after_the_calls_is_text(name: str) -> None:
    made = renderer(name)
    before, reply = written(made, message([("add", {"count": 1})]))
    found = parsed(made, before, reply.removesuffix(FAMILIES[name].eos) + " so be it")
    assert read(found) == [("add", {"count": 1})] and found.text.endswith("so be it")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_nothing_that_a_model_says_is_lost_or_breaks_the_parser(name: str, data: st.DataObject) -> None:
    """Words stand between tags in any order; each is somewhere in what was read."""
    made, family = renderer(name), FAMILIES[name]
    tags = st.sampled_from([*family.specials, '{"a": ', "}", "\n```json\n", "\n```", "[", "]", "<function=", ">"])
    words = [f"word{chr(97 + i)}" for i in range(8)]
    reply = "".join(word + data.draw(tags) + data.draw(tags | st.just("")) for word in words)
    found = parsed(made, "", reply)
    told = found.text + found.reasoning + "".join(c.raw + c.name + c.arguments + c.id for c in found.calls)
    assert [word for word in words if word not in told] == []
    callable_ = found.text + found.reasoning + "".join(c.raw for c in found.calls)
    assert [word for word in words if word not in callable_] == []


@pytest.mark.parametrize(
    ("name", "opening"),
    [("mistral-list", "[TOOL_CALLS]"), ("qwen3-coder", "<tool_call>"), ("deepseek-v3", "<｜tool▁calls▁begin｜>"),
     ("glm", "<tool_call>"), ("kimi-k2", "<|tool_calls_section_begin|>")],
)  # fmt: skip
def test_a_call_whose_tag_is_spelled_with_ordinary_tokens_is_text(name: str, opening: str) -> None:
    made = renderer(name)
    before, reply = written(made, message([("add", {})]))
    spelled = made._encode(opening[0]) + made._encode(opening[1:])
    ids = spelled + made._encode(reply[reply.index(opening) + len(opening) :])
    assert made.spell(ids).startswith(opening)
    assert made.parse(ids, made._encode(before), TOOLS).calls == ()


def test_a_tag_that_an_argument_spells_is_part_of_it() -> None:
    made = renderer("deepseek-v3.1")
    head = made._encode('<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"text": "')
    end = made._encode('"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>')
    within = made._encode("<｜tool▁call▁") + made._encode("end｜>")
    assert read(made.parse(head + within + end, [], TOOLS)) == [("add", {"text": "<｜tool▁call▁end｜>"})]
    glm = renderer("glm")
    ids = glm._encode("<tool_call>add<arg_key>text</arg_key><arg_value>a<think>b</arg_value></tool_call>")
    assert read(glm.parse(ids, [], TOOLS)) == [("add", {"text": "a<think>b"})], "no tag of a call's"


# ---------------------------------------------------------------------------------------- reasoning, and what follows


@pytest.mark.parametrize(("name", "reply", "reasoning", "calls", "text"), [
    ("glm", "<think>hm</think>so" + GLM_CALL.format("5"), "hm", 1, "so"),
    ("glm", "<think>hm " + GLM_CALL.format("5") + " no</think>so", "hm " + GLM_CALL.format("5") + " no", 0, "so"),
    ("glm", "<think>hm" + GLM_CALL.format("5"), "hm", 1, ""),
    ("mistral-thinks", "[THINK]hm[/THINK]so[TOOL_CALLS]add[ARGS]{}", "hm", 1, "so"),
    ("deepseek-r1", "hm</think>so" + V3.format("function<｜tool▁sep｜>add\n```json\n{}\n```"), "hm", 1, "so"),
])  # fmt: skip
def test_reasoning_is_read_before_calls_and_a_call_in_it_is_a_draft(
    name: str, reply: str, reasoning: str, calls: int, text: str
) -> None:
    known = FAMILIES["mistral-named"]
    thinks = Family("{# [THINK] #}" + known.template, "", known.specials, "</s>")
    made = TemplateRenderer(thinks.tokenizer(), "template") if name == "mistral-thinks" else renderer(name)
    found = parsed(made, made.spell(made.render([USER], TOOLS)), reply)
    assert (found.reasoning, len(found.calls), found.text) == (reasoning, calls, text)
    assert all(call.status == "ok" for call in found.calls)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "deepseek-r1"])
def test_a_tools_result_is_appended_as_the_template_writes_it(name: str) -> None:
    """Compared with the template's text of the whole conversation, which the extension never renders."""
    made = renderer(name)
    said = message([("add", {"count": 1}), ("look_up2", {})])
    before, reply = written(made, said)
    opener = "<|observation|>" if name == "glm" else ""
    prompt, sampled = made._encode(before), respelled(made._tokenizer, reply + opener)
    new = [{"role": "tool", "content": f"{i}", "tool_call_id": said["tool_calls"][i]["id"]} for i in range(2)]
    extended = made.extend(prompt + sampled, len(sampled), new, TOOLS)
    assert extended is not None and extended[: len(prompt + sampled)] == prompt + sampled
    assert made.spell(extended) == made.spell(made.render([USER, said, *new], TOOLS))


def test_a_turn_that_ends_with_the_next_messages_token_is_extended_by_that_message_alone() -> None:
    """GLM: the model says who speaks next, and whoever else speaks is no continuation."""
    made = renderer("glm", "keep")
    assert {made.spell([i]) for i in made.stop_ids} == {"<|user|>", "<|observation|>"}
    prompt = made.render([USER], TOOLS)
    for stop, extends in (("<|user|>", True), ("<|observation|>", False), ("", True), ("<|user|><|user|>", False)):
        sampled = made._encode("\n<think></think>\nthree" + stop)
        extended = made.extend(prompt + sampled, len(sampled), [USER], ())
        assert (extended is not None) is extends
        assert extended is None or made.spell(extended).endswith("three<|user|>\nhi<|assistant|>")
    open_ = made._encode("\n<think>never clo")
    assert made.extend(prompt + open_, len(open_), [USER], ()) is None


def test_histories_that_a_template_refuses_do_not_forbid_an_extension() -> None:
    known = FAMILIES["kimi-k2"]
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + known.template
    made = TemplateRenderer(Family(template, "", known.specials, known.eos).tokenizer(), "template")
    assert [made.refused(kind) for kind in USUAL] == [""] * 4


def test_a_prompt_that_ends_the_reasoning_leaves_none_to_drop() -> None:
    made = renderer("deepseek-v3.1")
    assert [made.refused(kind) for kind in USUAL] == [""] * 4
    assert "drops the reasoning" in renderer("deepseek-r1").refused(("tool",))
