"""Checkpoints' own chat templates as renderers: which may be extended, and that this is what the template writes."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from mslime.config.errors import ConfigError
from mslime.rollout.agents.messages import ChatError
from mslime.rollout.agents.template import USUAL, TemplateRenderer
from tests.fixtures import chat_templates
from tests.fixtures.made_tokenizer import make_tokenizer, respelled

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
USER = {"role": "user", "content": "what is 1 and 2?"}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "call_1"}
NOT_READ, DROPS = "tool calls in this template's form cannot be parsed", "the template drops the reasoning of a reply"
REWRITES, DEPENDS = (
    "the template rewrites the text before them",
    "the template's text depends on the earlier conversation",
)


def renderer(name: str, thinking: Literal["template", "keep"] = "template", **given: Any) -> TemplateRenderer:
    tokenizer = chat_templates.tokenizer_with(getattr(chat_templates, name), **given)
    return TemplateRenderer(tokenizer, thinking, harmony=name == "HARMONY")


@pytest.mark.parametrize(("name", "thinking", "refusals"), [
    ("CHATML", "template", (NOT_READ, NOT_READ, "", NOT_READ)),
    ("OLMO", "template", (NOT_READ, NOT_READ, "", NOT_READ)),
    ("NUMBERED", "template", (NOT_READ, NOT_READ, DEPENDS, NOT_READ)), ("HERMES", "template", ("", "", "", "")),
    ("THINKING", "template", ("", "", REWRITES, REWRITES)), ("THINKING", "keep", ("", "", "", "")),
    ("FORGETFUL", "template", (DROPS, DROPS, DROPS, DROPS)), ("FORGETFUL", "keep", ("", "", "", "")),
    ("NAMED", "template", ("", REWRITES, "", "")), ("HARMONY", "template", ("", "", REWRITES, "")),
])  # fmt: skip
def test_each_kind_of_tail_is_tried_before_it_is_extended(name: str, thinking: Any, refusals: tuple[str, ...]) -> None:
    made = renderer(name, thinking)
    assert tuple(made.refused(kind) for kind in USUAL) == refusals


def said(made: TemplateRenderer, messages: list[dict[str, Any]], text: str, tools: Any = ()) -> tuple[list[int], int]:
    """(a conversation with a reply that is spelled byte by byte, how many tokens are the reply's)."""
    prompt, reply = made.render(messages, tools), respelled(made._tokenizer, text)
    return prompt + reply, len(reply)


@pytest.mark.parametrize("tags", [True, False], ids=["tags are tokens", "tags are text"])
@pytest.mark.parametrize(("name", "text", "reply", "new"), [
    ("HERMES", CALL, {"calls": 1}, [RESULT]),
    ("HERMES", CALL + "\n" + CALL, {"calls": 2}, [RESULT, {**RESULT, "content": "4", "tool_call_id": "call_2"}]),
    ("HERMES", CALL, {"calls": 1}, [RESULT, USER]),
    ("HERMES", "so be it", {}, [USER]),
    ("THINKING", "<think>\nhm\n</think>\n\n" + CALL, {"calls": 1, "reasoning_content": "hm"}, [RESULT]),
    ("NAMED", CALL, {"calls": 1}, [RESULT]),
])  # fmt: skip
def test_an_extension_is_what_the_template_writes_after_the_recorded_tokens(
    name: str, text: str, reply: dict[str, Any], new: list[dict[str, Any]], tags: bool
) -> None:
    """Compared with the template's text of the whole conversation, which the extension never renders."""
    made = renderer(name, tags=tags)
    before, sampled = said(made, [USER], text + "<|im_end|>", TOOLS)
    extended = made.extend(before, sampled, new, TOOLS)
    assert extended is not None and extended[: len(before)] == before
    calls = [
        {"id": f"call_{i + 1}", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        for i in range(reply.get("calls", 0))
    ]
    content = "" if calls else text
    message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    if "reasoning_content" in reply:
        message["reasoning_content"] = reply["reasoning_content"]
    whole = made.spell(made.render([USER, message, *new], TOOLS))
    after = made.spell(extended[len(before) :])
    assert whole.endswith(after) and whole[: -len(after)].endswith("<|im_end|>")
    assert after.startswith("\n<|im_start|>"), "the template's own line end after a turn is part of it"
    assert after.count("<tool_response>") == sum(m["role"] == "tool" for m in new)


def test_a_reply_that_was_cut_is_closed_unless_its_reasoning_is_open() -> None:
    made = renderer("THINKING", "keep")
    end = made._tokenizer.convert_tokens_to_ids("<|im_end|>")
    before, sampled = said(made, [USER], "<think>hm</think>one tw")
    extended = made.extend(before, sampled, [USER], ())
    assert extended is not None and extended[: len(before) + 1] == [*before, end]
    before, sampled = said(made, [USER], "<think>never clo")
    assert made.extend(before, sampled, [USER], ()) is None


@pytest.mark.parametrize("text", ["one<|im_end|>stray", "one<|im_end|>two<|im_end|>"])
def test_tokens_after_the_end_of_a_turn_are_not_extended(text: str) -> None:
    made = renderer("HERMES")
    before, sampled = said(made, [USER], text)
    assert made.extend(before, sampled, [USER], ()) is None


def test_results_that_answer_no_call_are_not_extended() -> None:
    made = renderer("HERMES")
    before, sampled = said(made, [USER], "no call<|im_end|>", TOOLS)
    assert made.extend(before, sampled, [RESULT], TOOLS) is None


@pytest.mark.parametrize(("text", "calls", "status", "shown", "reasoning"), [
    (CALL, [("add", '{"a":1}')], ["ok"], "", ""),
    ("<think>\nhm\n</think>\n\nwell " + CALL, [("add", '{"a":1}')], ["ok"], "well", "hm"),
    (CALL + CALL.replace("1", "{,}") + CALL, [("add", '{"a":1}')] * 2, ["ok", "invalid_json", "ok"], "", ""),
    ("<tool_call>[1]</tool_call>", [], ["malformed_structure"], "", ""),
    ('<tool_call>{"arguments": {}}</tool_call>', [], ["missing_name"], "", ""),
    ('<tool_call>{"name": "add"', [], ["unclosed_block"], "", ""),
    ("<think>open", [], [], "", "open"),
    ("plain  text ", [], [], "plain  text ", ""),
    ("a <think> within", [], [], "a <think> within", ""),
])  # fmt: skip
def test_a_reply_is_read_in_parts(text: str, calls: list[Any], status: list[str], shown: str, reasoning: str) -> None:
    made = renderer("THINKING")
    before, sampled = said(made, [USER], text + "<|im_end|>", TOOLS)
    parsed = made.parse(before[-sampled:], before[:-sampled], TOOLS)
    assert [(c.name, c.arguments) for c in parsed.calls if c.callable] == calls
    assert [c.status for c in parsed.calls] == status and (parsed.text, parsed.reasoning) == (shown, reasoning)


def test_reasoning_that_the_prompt_began_is_read() -> None:
    made = renderer("THINKING")
    prompt = made.render([USER], ()) + made._encode("<think>\n")
    parsed = made.parse(made._encode("hm</think>yes<|im_end|>"), prompt, ())
    assert (parsed.reasoning, parsed.text) == ("hm", "yes")


def test_harmony_is_read_and_extended_by_the_name_of_the_tool() -> None:
    made = renderer("HARMONY")
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    before, sampled = said(made, [USER], text, TOOLS)
    parsed = made.parse(before[-sampled:], before[:-sampled], TOOLS)
    assert (parsed.reasoning, parsed.text) == ("hm", "") and parsed.calls[0].name == "add"
    assert parsed.calls[0].arguments == '{"a":1}'
    extended = made.extend(before, sampled, [RESULT], TOOLS)
    assert extended is not None and extended[: len(before)] == before
    assert made.spell(extended[len(before) :]) == (
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant'
    )
    final, n = said(made, [USER], "<|channel|>final<|message|>three<|return|>", TOOLS)
    assert made.parse(final[-n:], final[:-n], TOOLS).text == "three"
    assert made.extend(final, n, [USER], TOOLS) is None, "the template drops reasoning before a final answer"
    cut, n = said(made, [USER], "<|channel|>analysis<|message|>hm", TOOLS)
    assert made.extend(cut, n, [USER], TOOLS) is None


@pytest.mark.parametrize(("arguments", "status"), [("{,}", "invalid_json"), ("[1]", "malformed_structure")])
def test_a_broken_call_in_harmony_is_no_call(arguments: str, status: str) -> None:
    made = renderer("HARMONY")
    text = f"<|channel|>commentary to=functions.add<|message|>{arguments}<|call|>"
    before, sampled = said(made, [USER], text, TOOLS)
    assert [c.status for c in made.parse(before[-sampled:], [], TOOLS).calls] == [status]


def test_messages_that_the_template_refuses_are_the_clients_mistake() -> None:
    made = renderer("HERMES")
    made._tokenizer.chat_template = chat_templates.BROKEN
    with pytest.raises(ChatError, match="the chat template cannot render them"):
        made.render([USER], ())


@pytest.mark.parametrize(
    ("template", "rule"), [(None, "no chat template"), ("{{ 'x' }}", "ends replies without a special token"),
                           (chat_templates.BROKEN, "ends replies without a special token")],
)  # fmt: skip
def test_a_tokenizer_without_a_usable_template_is_refused(template: str | None, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        TemplateRenderer(make_tokenizer(["<|im_end|>"], "<|im_end|>", template=template), "template")


def test_results_in_another_order_than_their_calls_keep_their_tools_names() -> None:
    """By our id of the call, where a template looks the tool's name up by it."""
    looked_up = (
        "{% for p in messages %}{% for c in p.tool_calls or [] %}{% if c.id == m.tool_call_id %}"
        "{{ c.function.name }}{% endif %}{% endfor %}{% endfor %}"
    )
    tokenizer = chat_templates.tokenizer_with(
        chat_templates.HERMES.replace("<tool_response>", "<tool_response>" + looked_up)
    )
    renderer = TemplateRenderer(tokenizer, "template")
    tools = [{"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("add", "sub")]
    call = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
    prompt = renderer.render([{"role": "user", "content": "q"}], tools)
    reply = tokenizer.encode("\n".join(call % name for name in ("add", "sub")) + "<|im_end|>", add_special_tokens=False)
    results = [
        {"role": "tool", "content": said, "tool_call_id": f"call_ab_0_{i}"} for i, said in ((1, "LESS"), (0, "MORE"))
    ]
    whole = renderer.extend(prompt + reply, len(reply), results, tools)
    assert whole is not None
    text = tokenizer.decode(whole[len(prompt + reply) :])
    assert "subLESS" in text.replace("\n", "") and "addMORE" in text.replace("\n", "")
