"""Renderers of the package `renderers`, with tokenizers made on the spot: its traps, and how mslime chooses one."""

from __future__ import annotations

from typing import Any

import pytest

from mslime.config.errors import ConfigError
from mslime.rollout.agents.choose import LEFT_OUT, PackageRenderer, choose_renderer
from mslime.rollout.agents.messages import ChatError
from mslime.rollout.agents.renderer import Parsed, Rendering
from mslime.rollout.agents.template import TemplateRenderer
from tests.fixtures import chat_templates
from tests.fixtures.made_tokenizer import make_tokenizer, respelled, tokenizer_for

TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}}}]  # fmt: skip
HEAD = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is 1 and 2?"}]
FAMILIES = ["qwen3", "qwen3.5", "glm-4.5", "glm-5", "deepseek-v3", "kimi-k2", "minimax-m2", "llama-3"]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "add", "arguments": arguments}}


def reply_of(name: str, tokenizer: Any, made: PackageRenderer) -> tuple[list[int], list[int]]:
    """(prompt, a reply with a call of a tool in the family's form, each text spelled byte by byte)."""
    message = {"role": "assistant", "content": "I add.", "reasoning_content": "let me think",
               "tool_calls": [call("functions.add:0", a=1, s="true")]}  # fmt: skip
    prompt = made.render(HEAD, TOOLS)
    whole = made._inner.render([*HEAD, message], tools=TOOLS)
    said = [
        t for t, s, i in zip(whole.token_ids, whole.sampled_mask, whole.message_indices, strict=True) if s and i == 2
    ]
    ids = [b for t in said for b in ([t] if t in tokenizer.added_tokens_decoder else respelled_ids(tokenizer, t))]
    if ids[-1] not in made.stop_ids:
        ends = [t for t in made.stop_ids if "observation" in tokenizer.convert_ids_to_tokens([t])[0]]
        ids.append((ends or sorted(made.stop_ids))[0])
    return prompt, ids


def respelled_ids(tokenizer: Any, token: int) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(b) for b in tokenizer.convert_ids_to_tokens([token])[0]]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tools_result_extends_what_was_sampled_however_it_was_spelled(name: str) -> None:
    tokenizer = tokenizer_for(name)
    made = PackageRenderer(name, tokenizer, "template")
    prompt, reply = reply_of(name, tokenizer, made)
    new = [{"role": "tool", "content": "1", "tool_call_id": "functions.add:0"}]
    extended = made.extend(prompt + reply, len(reply), new, TOOLS)
    assert extended is not None and extended[: len(prompt + reply)] == prompt + reply
    parsed = made.parse(reply, prompt, TOOLS)
    assert [(c.name, c.arguments, c.status) for c in parsed.calls] == [("add", '{"a":1,"s":"true"}', "ok")]


@pytest.mark.parametrize("name", ["qwen3", "glm-5", "minimax-m2"])
def test_a_new_query_is_extended_only_where_thinking_is_kept(name: str) -> None:
    tokenizer = tokenizer_for(name)
    new = [{"role": "user", "content": "more"}]
    for thinking, extends in (("template", False), ("keep", True)):
        made = PackageRenderer(name, tokenizer, thinking)  # type: ignore[arg-type]
        prompt, reply = reply_of(name, tokenizer, made)
        extended = made.extend(prompt + reply, len(reply), new, TOOLS)
        assert (extended is not None) is extends
        assert extended is None or extended[: len(prompt + reply)] == prompt + reply


@pytest.mark.parametrize("name", ["qwen3", "kimi-k2", "deepseek-v3"])
def test_the_packages_extension_may_drop_sampled_tokens_and_ours_never_does(name: str) -> None:
    """In 13 families whatever was sampled after a stop token vanishes from what the package returns."""
    import asyncio

    tokenizer = tokenizer_for(name)
    made = PackageRenderer(name, tokenizer, "keep")
    prompt, reply = reply_of(name, tokenizer, made)
    stray = prompt + reply + tokenizer.encode("stray", add_special_tokens=False)
    new, sampled = [{"role": "tool", "content": "1", "tool_call_id": "functions.add:0"}], len(stray) - len(prompt)
    theirs = made.extend(stray, sampled, new, TOOLS)
    assert theirs is not None and theirs[: len(stray)] != stray, "the package does not do so any more"
    added, why = asyncio.run(Rendering(made).extend(stray, sampled, new, TOOLS))
    assert added is None and why == "prefix_broken"


def test_a_call_that_is_spelled_with_ordinary_tokens_is_none() -> None:
    tokenizer = tokenizer_for("qwen3")
    made = PackageRenderer("qwen3", tokenizer, "template")
    ids = respelled_text(tokenizer, '<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    assert made.parse(ids, made.render(HEAD, TOOLS), TOOLS).calls == ()


def respelled_text(tokenizer: Any, text: str) -> list[int]:
    from tokenizers.pre_tokenizers import ByteLevel

    pieces = ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [tokenizer.convert_tokens_to_ids(b) for piece, _ in pieces for b in piece]


def test_kimis_own_id_of_a_call_is_what_its_template_gets() -> None:
    tokenizer = tokenizer_for("kimi-k2")
    made = PackageRenderer("kimi-k2", tokenizer, "template")
    prompt, reply = reply_of("kimi-k2", tokenizer, made)
    assert [c.id for c in made.parse(reply, prompt, TOOLS).calls] == ["functions.add:0"]


@pytest.mark.parametrize(
    ("status", "text"), [("invalid_json", '{"name": "add", "arguments": {,}}'), ("ok", '{"name": "add"}')]
)
def test_every_attempt_at_a_call_is_told_with_its_status(status: str, text: str) -> None:
    tokenizer = tokenizer_for("qwen3")
    made = PackageRenderer("qwen3", tokenizer, "template")
    ids = respelled(tokenizer, f"<tool_call>\n{text}\n</tool_call><|im_end|>")
    assert [c.status for c in made.parse(ids, made.render(HEAD, TOOLS), TOOLS).calls] == [status]


@pytest.mark.parametrize("name", sorted(LEFT_OUT))
def test_renderers_that_would_do_something_else_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=LEFT_OUT[name]):
        PackageRenderer(name, tokenizer_for("qwen3"), "template")


def test_a_misspelt_renderer_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'qwen3'"):
        PackageRenderer("qwen", tokenizer_for("qwen3"), "template")


def test_a_tokenizer_of_another_family_is_refused_by_the_token_it_lacks() -> None:
    with pytest.raises(ConfigError, match="does not fit this checkpoint's tokenizer .*not found"):
        PackageRenderer("glm-5", make_tokenizer(["<|im_end|>"], "<|im_end|>"), "template")


def test_messages_that_a_renderer_refuses_are_the_clients_mistake() -> None:
    made = PackageRenderer("qwen3", tokenizer_for("qwen3"), "template")
    with pytest.raises(ChatError, match="renderer qwen3 cannot render them"):
        made.render([], ())


# ----------------------------------------------------------------------------------------------------------- choosing


def test_the_familys_renderer_is_taken_where_it_writes_as_the_template_does(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tokenizer_for("qwen3")
    made = PackageRenderer("qwen3", tokenizer, "template")
    text = made.spell(made.render(HEAD[1:], ()))
    assert text == "<|im_start|>user\nwhat is 1 and 2?<|im_end|>\n<|im_start|>assistant\n"
    tokenizer.chat_template = chat_templates.CHATML
    with caplog.at_level("INFO"):
        chosen = choose_renderer(None, ["qwen3"], tokenizer, "template")
    assert isinstance(chosen, TemplateRenderer), "CHATML writes no tools"
    assert "differs from the checkpoint's chat template: user, with tools" in caplog.text
    tokenizer.chat_template = None
    assert choose_renderer(None, ["glm-5", "qwen3"], tokenizer, "template").name == "qwen3", "glm-5 lacks its tokens"


def test_the_templates_own_renderer_says_what_it_extends(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        choose_renderer(None, [], chat_templates.tokenizer_with(chat_templates.THINKING), "template")
    assert "tool: extended" in caplog.text and "user: the template rewrites the text before them" in caplog.text


def test_gpt_oss_has_a_renderer_without_a_download() -> None:
    tokenizer = chat_templates.tokenizer_with(chat_templates.HARMONY)
    assert choose_renderer(None, ["harmony"], tokenizer, "template").name == "harmony"
    assert choose_renderer("harmony", [], tokenizer, "template").name == "harmony"


def test_a_renderer_that_was_named_is_taken_with_a_warning_where_it_differs(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tokenizer_for("qwen3")
    tokenizer.chat_template = chat_templates.CHATML
    assert choose_renderer("qwen3", [], tokenizer, "template").name == "qwen3"
    assert "differs from the checkpoint's chat template" in caplog.text


class Own:
    """A renderer as users write them."""

    def __init__(self, tokenizer: Any, thinking: str) -> None:
        self.name, self.stop_ids, self.tokenizer = "own", frozenset({1}), tokenizer

    def render(self, messages: Any, tools: Any) -> list[int]:
        return [1]

    def extend(self, before: Any, sampled: int, new: Any, tools: Any) -> None:
        return None

    def parse(self, sampled: Any, prompt: Any, tools: Any) -> Parsed:
        return Parsed("own")

    def spell(self, ids: Any) -> str:
        return ""


def test_a_renderer_of_the_users_own_is_taken() -> None:
    assert choose_renderer("tests.unit.test_chat_renderers:Own", [], None, "template").name == "own"
    with pytest.raises(ConfigError, match=r"rollout.renderer = .*has no function"):
        choose_renderer("tests.unit.test_chat_renderers:Other", [], None, "template")
