"""Choice of a run's renderer: the configured one, or one of the model's family that matches the checkpoint's own chat
template."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mslime.config.errors import ConfigError
from mslime.extensions import check_parameters, load_function
from mslime.rollout.agents.chat.package import SETTING, PackageRenderer
from mslime.rollout.agents.chat.renderer import Renderer
from mslime.rollout.agents.chat.template import USUAL, TemplateRenderer

log = logging.getLogger(__name__)

Thinking = Literal["template", "keep"]
_CALL = {"id": "functions.lookup:0", "type": "function", "function": {"name": "lookup", "arguments": {"key": "b"}}}
_TOOLS = [{"type": "function", "function": {"name": "lookup", "description": "looks up", "parameters": {
    "type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}}}]  # fmt: skip
_QUESTION = {"role": "user", "content": "What is it?"}
_PROBES: tuple[tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], ...] = (
    ([_QUESTION], ()),
    ([{"role": "system", "content": "Be brief."}, _QUESTION], ()),
    ([_QUESTION, {"role": "assistant", "content": "That."}, {"role": "user", "content": "Which?"}], ()),
    ([_QUESTION], _TOOLS),
    (
        [
            _QUESTION,
            {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [_CALL]},
            {"role": "tool", "content": "7", "tool_call_id": "functions.lookup:0"},
        ],
        _TOOLS,
    ),
)
"""Conversations for which a family's renderer must match the checkpoint's template."""


def choose_renderer(named: str | None, family: Sequence[str], tokenizer: Any, thinking: Thinking) -> Renderer:
    """The renderer of a run.

    Args:
        named: `rollout.renderer`; None: the first renderer of the family that matches the checkpoint's chat template,
            else the template itself.
        family: renderer names of the model's family.
        tokenizer: of transformers.

    Raises:
        ConfigError: the renderer is not available.
    """
    if named is not None:
        chosen = _named(named, tokenizer, thinking)
    else:
        chosen = _of_family(family, tokenizer, thinking) or TemplateRenderer(tokenizer, thinking)
    log.info("messages are rendered by %s%s", chosen.name, _told(chosen))
    return chosen


def _named(name: str, tokenizer: Any, thinking: Thinking) -> Renderer:
    if ":" in name:
        make = load_function(name, SETTING)
        check_parameters(make, name, SETTING, "tokenizer", "thinking")
        return make(tokenizer, thinking)
    if name in ("template", "harmony"):
        return TemplateRenderer(tokenizer, thinking, harmony=name == "harmony")
    chosen = PackageRenderer(name, tokenizer, thinking)
    if tokenizer.chat_template and (differs := _difference(chosen, tokenizer)):
        log.warning("renderer %s does not write as the checkpoint's chat template does: %s", name, differs)
    return chosen


def _of_family(family: Sequence[str], tokenizer: Any, thinking: Thinking) -> Renderer | None:
    for name in family:
        try:
            if name == "harmony":
                return TemplateRenderer(tokenizer, thinking, harmony=True)
            chosen = PackageRenderer(name, tokenizer, thinking)
        except ConfigError as error:
            log.info("renderer %s: %s", name, error.rule)
            continue
        differs = _difference(chosen, tokenizer) if tokenizer.chat_template else ""
        if not differs:
            return chosen
        log.info("renderer %s does not write as the checkpoint's chat template does: %s", name, differs)
    return None


def _difference(renderer: Renderer, tokenizer: Any) -> str:
    """The first conversation for which the renderer differs from the chat template; empty if there is none."""
    for messages, tools in _PROBES:
        roles = " ".join(str(m["role"]) for m in messages) + (", with tools" if tools else "")
        try:
            text = tokenizer.apply_chat_template(
                [dict(m) for m in messages], tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # jinja's errors are Exceptions: a template that fails here is no reference
            continue
        try:
            ids = renderer.render(messages, tools)
        except ValueError as error:
            return f"{roles} ({error})"
        if ids != tokenizer.encode(text, add_special_tokens=False):
            return roles
    return ""


def _told(renderer: Renderer) -> str:
    """Log text of a template's renderer: how it reads calls, and which turns it can extend."""
    if not isinstance(renderer, TemplateRenderer):
        return ""
    kinds = {"+".join(kind): renderer.refused(kind) or "extended" for kind in USUAL}
    calls = f"calls of tools as {renderer.form} has them" if renderer.form else "calls of tools are not read"
    return f" ({calls}; {'; '.join(f'{kind}: {how}' for kind, how in kinds.items())})"
