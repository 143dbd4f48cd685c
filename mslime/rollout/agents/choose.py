"""Choice of a run's renderer: the configured one, or one of the model's family that matches the checkpoint's own chat
template."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Literal, cast

from mslime.config.errors import MALFORMED, ConfigError, nearest
from mslime.extensions import check_parameters, load_function
from mslime.rollout.agents.messages import ChatError, Tools, canonical_json, whole_text
from mslime.rollout.agents.renderer import Parsed, ParsedCall, Renderer
from mslime.rollout.agents.template import USUAL, TemplateRenderer

# The tokenizer interface that the package's renderers use, without transformers' overhead per call.
#
# A turn is some ten short texts, and transformers spends more time on the records that it returns than on the tokens.
# Without character offsets, which mslime does not use, the package also omits its attribution of each token.

_MARKUP = 64
"""Longest text, in characters, to cache: short texts are mostly markup that every turn repeats."""


class PlainTokenizer:
    """Implements `renderers.base.Tokenizer`, with the ids and texts of the wrapped tokenizer.

    Args:
        inner: of transformers.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.name_or_path: str = inner.name_or_path
        self.unk_token_id: int | None = inner.unk_token_id
        self.eos_token_id: int | None = inner.eos_token_id
        self.chat_template: Any = inner.chat_template
        inner.encode("a", add_special_tokens=False)  # sets the state that transformers requires at each call
        self._fast: Any = inner.backend_tokenizer if inner.is_fast else None
        self._of_markup = lru_cache(1024)(self._encoded)
        self._writes_as_it_is = self._fast is not None and not inner.clean_up_tokenization_spaces

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        if len(text) > _MARKUP:
            return self._encoded(text, add_special_tokens)
        return list(self._of_markup(text, add_special_tokens))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **how: Any) -> str:
        """The text of token ids."""
        if self._writes_as_it_is and not how:
            return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return cast("str", self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens, **how))

    def _encoded(self, text: str, special_tokens: bool) -> list[int]:
        text = whole_text(text)
        if self._fast is None:
            return cast("list[int]", self._inner.encode(text, add_special_tokens=special_tokens))
        return self._fast.encode(text, add_special_tokens=special_tokens).ids

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Ids of tokens given by name."""
        return self._inner.convert_tokens_to_ids(tokens)


SETTING = "rollout.renderer"
LEFT_OUT = {
    "default": "not supported: it cannot extend a conversation",
    "auto": "not supported: it chooses by the tokenizer's path",
    "gpt-oss": "not supported: it downloads a vocabulary; use mslime's own renderer, harmony",
    "qwen3-vl": "not supported: mslime generates from text only",
    "custom": "not supported: name your own renderer as module:function",
}
"""Renderers of the package that mslime does not support, with reasons."""


class PackageRenderer:
    """A `Renderer` of the package.

    Args:
        tokenizer: transformers' tokenizer of the checkpoint.
        thinking: keep: extend turns across a user's message even if the family's template would drop earlier reasoning
            there.

    Raises:
        ConfigError: there is no renderer of this name, or the tokenizer lacks its special tokens.
    """

    def __init__(self, name: str, tokenizer: Any, thinking: Literal["template", "keep"]) -> None:
        configs = _configs()
        if name not in configs:
            hint = f"name one of {', '.join(sorted(configs))}, template or harmony"
            raise ConfigError(SETTING, name, LEFT_OUT.get(name, "unknown renderer"), nearest(name, configs) or hint)
        import renderers

        try:
            config = configs[name](thinking_retention="all" if thinking == "keep" else None)
            plain = PlainTokenizer(tokenizer)
            self._inner: Any = renderers.create_renderer(plain, config)
        except MALFORMED as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConfigError(SETTING, name, f"does not fit this checkpoint's tokenizer ({message})",
                              "name the renderer of the checkpoint's own family, or template") from error  # fmt: skip
        self.name, self._tokenizer = name, plain
        self.stop_ids = frozenset(self._inner.get_stop_token_ids())

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        try:
            return list(self._inner.render_ids(list(messages), tools=list(tools) or None, add_generation_prompt=True))
        except MALFORMED as error:
            message = f"renderer {self.name} cannot render them ({type(error).__name__}: {error})"
            raise ChatError("messages", f"{len(messages)} messages", message, "fix the messages") from error

    def extend(
        self, before: Sequence[int], sampled: int, new: Sequence[Mapping[str, Any]], tools: Tools
    ) -> list[int] | None:
        at = len(before) - sampled
        known = _listed(before)
        bridged = self._inner.bridge_to_next_turn(known[:at], known[at:], list(new), tools=list(tools) or None)
        return None if bridged is None else _listed(bridged.token_ids)

    def parse(self, sampled: Sequence[int], prompt: Sequence[int], tools: Tools) -> Parsed:
        found = self._inner.parse_response(_listed(sampled), tools=list(tools) or None, prompt_ids=_listed(prompt))
        calls = tuple(_call(call) for call in found.tool_calls)
        return Parsed(found.content or "", found.reasoning_content or "", calls)

    def spell(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


def _listed(ids: Sequence[int]) -> list[int]:
    """The ids as a list. Lists are not copied, as they may be long and the package only reads them."""
    return ids if isinstance(ids, list) else list(ids)


def _call(found: Any) -> ParsedCall:
    """A parsed call; its arguments as canonical JSON."""
    status = str(found.status)
    if not found.name and status in ("ok", "unknown_tool"):
        status = "missing_name"
    arguments = found.arguments if isinstance(found.arguments, str) else json.dumps(found.arguments or {})
    written_id = found.id if isinstance(found.id, str) else ""
    return ParsedCall(found.name or "", canonical_json(arguments), found.raw, status, written_id)


@cache
def _configs() -> dict[str, type[Any]]:
    """Configurations of the package's supported renderers, by name."""
    import renderers.configs

    base = renderers.configs.BaseRendererConfig
    kinds = [c for c in vars(renderers.configs).values() if isinstance(c, type) and issubclass(c, base)]
    names = {str(c.model_fields["name"].default): c for c in kinds if "name" in c.model_fields}
    return {name: c for name, c in names.items() if name not in LEFT_OUT}


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
    log.info("messages are rendered by %s%s", chosen.name, _description(chosen))
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
        log.warning("renderer %s differs from the checkpoint's chat template: %s", name, differs)
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
        log.info("renderer %s differs from the checkpoint's chat template: %s", name, differs)
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


def _description(renderer: Renderer) -> str:
    """Log text of a template's renderer: how it reads calls, and which turns it can extend."""
    if not isinstance(renderer, TemplateRenderer):
        return ""
    kinds = {"+".join(kind): renderer.refused(kind) or "extended" for kind in USUAL}
    calls = f"tool calls in the form of {renderer.form}" if renderer.form else "tool calls are not parsed"
    return f" ({calls}; {'; '.join(f'{kind}: {how}' for kind, how in kinds.items())})"
