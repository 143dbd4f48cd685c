"""Renderers of the package `renderers` (PrimeIntellect), for the families that it supports.

They are selected by the run or the model's family, never by the tokenizer's path: the package treats an unknown name,
without an error, as a template that cannot be extended. Imported in the rollout's process only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Literal, cast

from mslime.config.errors import MALFORMED, ConfigError, nearest
from mslime.rollout.agents.chat.messages import ChatError, Tools, canonical_json, whole_text
from mslime.rollout.agents.chat.renderer import Parsed, ParsedCall

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
    "default": "its extension of a conversation is always refused",
    "auto": "it chooses by the tokenizer's path",
    "gpt-oss": "it downloads a vocabulary; use mslime's own renderer, harmony",
    "qwen3-vl": "mslime generates from text alone",
    "custom": "name your own renderer as module:function",
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
            why = LEFT_OUT.get(name, f"is no renderer {nearest(name, configs)}".rstrip())
            raise ConfigError(SETTING, name, why, f"name one of {', '.join(sorted(configs))}, template or harmony")
        import renderers

        try:
            config = configs[name](thinking_retention="all" if thinking == "keep" else None)
            plain = PlainTokenizer(tokenizer)
            self._inner: Any = renderers.create_renderer(plain, config)
        except MALFORMED as error:
            told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConfigError(SETTING, name, f"does not fit this checkpoint's tokenizer ({told})",
                              "name the renderer of the checkpoint's own family, or template") from error  # fmt: skip
        self.name, self._tokenizer = name, plain
        self.stop_ids = frozenset(self._inner.get_stop_token_ids())

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        try:
            return list(self._inner.render_ids(list(messages), tools=list(tools) or None, add_generation_prompt=True))
        except MALFORMED as error:
            told = f"renderer {self.name} refuses them ({type(error).__name__}: {error})"
            raise ChatError("messages", f"{len(messages)} messages", told, "mend the messages") from error

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
