"""The little of a tokenizer that renderers of the package ask for, without what transformers does around each call.

A turn is some ten short texts, and transformers spends more on the records that it returns than on the tokens. Without
character offsets, which mslime has no use for, the package also leaves out its attribution of each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

from mslime.rollout.chat.messages import whole_text

_MARKUP = 64
"""Characters. Texts that are no longer are most often markup, which every turn has again: their ids are kept."""


class PlainTokenizer:
    """What `renderers.base.Tokenizer` asks for; it gives the ids and texts of the tokenizer that it is made of.

    Args:
        inner: of transformers.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.name_or_path: str = inner.name_or_path
        self.unk_token_id: int | None = inner.unk_token_id
        self.eos_token_id: int | None = inner.eos_token_id
        self.chat_template: Any = inner.chat_template
        inner.encode("a", add_special_tokens=False)  # leaves the tokenizer as transformers wants it at each call
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
        """The ids of tokens by their names."""
        return self._inner.convert_tokens_to_ids(tokens)
