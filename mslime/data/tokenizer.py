"""A narrow tokenizer interface, and the check that a tokenizer belongs to its model.

transformers (and with it torch) is imported only when a tokenizer is loaded; the rest of `mslime.data` needs only the
`Tokenizer` protocol.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from mslime.config.errors import ConfigError, DataError, reading
from mslime.config.model_facts import eos_ids, language_model

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def eos_token_id(self) -> int | None:
        """Id that ends a response; None when the tokenizer has none."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that the tokenizer can produce."""
        ...

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Token ids of `text`, with the tokenizer's own leading special tokens (a BOS) or without any."""
        ...

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Render a conversation in the chat template, up to the start of the assistant's turn unless `options` differ.

        Its special tokens are in the text: encode it without.
        """
        ...

    def marks(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[tuple[int, int]] | None:
        """Characters [start, end) of `render`'s text between `{% generation %}` marks; None for a template without."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are not text, such as ends of turns and of sequences."""
        ...

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Text of `ids`, without special tokens or with them."""
        ...

    def for_thread(self) -> Any:
        """A copy of transformers' tokenizer for another thread: it carries state."""
        ...


class HFTokenizer(Tokenizer):
    """A `Tokenizer` that wraps a transformers tokenizer."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._appends_eos = cast("list[int]", inner.encode("a"))[-1:] == [inner.eos_token_id]
        self._vocab_size = 1 + max(cast("dict[str, int]", inner.get_vocab()).values())

    @property
    def eos_token_id(self) -> int | None:
        return cast("int | None", self._inner.eos_token_id)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added special tokens included."""
        return self._vocab_size

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """Token ids of `text`. An EOS that a post-processor appends is removed: a prompt must stay open."""
        ids = cast("list[int]", self._inner.encode(text, add_special_tokens=special_tokens))
        return ids[:-1] if special_tokens and self._appends_eos else ids

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Raises ConfigError without a chat template, and ValueError for an error of the template."""
        if self._inner.chat_template is None:
            raise ConfigError(
                "data.apply_chat_template", True, "this tokenizer has no chat template",
                "set data.apply_chat_template to false, or model.tokenizer_path to a chat model's tokenizer",
            )  # fmt: skip
        arguments = {"add_generation_prompt": True, **options, "tokenize": False}
        try:
            return cast("str", self._inner.apply_chat_template(list(messages), **arguments))
        except Exception as error:  # a template may raise anything: jinja's own errors and Python's
            raise ValueError(f"the chat template cannot render it: {type(error).__name__}: {error}") from error

    def marks(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[tuple[int, int]] | None:
        template = cast("str", self._inner.get_chat_template(None, options.get("tools")))
        if _MARK.search(template) is None:
            return None
        templates: Any = importlib.import_module("transformers.utils.chat_template_utils")
        _, found = templates.render_jinja_template(
            conversations=[list(messages)], chat_template=template, return_assistant_tokens_mask=True,
            **{"add_generation_prompt": True, **self._inner.special_tokens_map, **options},
        )  # fmt: skip
        return [(int(start), int(end)) for start, end in found[0]]

    @property
    def special_ids(self) -> frozenset[int]:
        added = cast("dict[int, Any]", self._inner.added_tokens_decoder)
        return frozenset(self._inner.all_special_ids) | {i for i, token in added.items() if token.special}

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        array = np.asarray(ids)  # transformers inspects every item of a list
        return cast("str", self._inner.decode(array, skip_special_tokens=not special_tokens))

    def for_thread(self) -> Any:
        return copy.deepcopy(self._inner)


def special_texts(tokenizer: Tokenizer) -> list[str]:
    """Special tokens as text, the longest first."""
    texts = {tokenizer.decode([i], special_tokens=True) for i in tokenizer.special_ids}
    return sorted((text for text in texts if len(text) > 1), key=lambda text: (-len(text), text))


def begins_with_blank(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer inserts a blank before each text, as SentencePiece tokenizers do."""
    ids = tokenizer.encode("x", special_tokens=False)
    return tokenizer.decode([*ids, *ids]) != "xx"


def encode_after(tokenizer: Tokenizer, last: int, text: str) -> list[int]:
    """Token ids of a text after another token, as if encoded together: without the inserted leading blank."""
    texts = [tokenizer.decode([last], special_tokens=True)] if last in tokenizer.special_ids else ["\n", ".", "a"]
    for before in texts:  # a token that does not merge with the text
        head = tokenizer.encode(before, special_tokens=False)
        whole = tokenizer.encode(before + text, special_tokens=False)
        if whole[: len(head)] == head:
            return whole[len(head) :]
    return tokenizer.encode(text, special_tokens=False)


def load_tokenizer(path: Path | str) -> HFTokenizer:
    """Load the tokenizer of a checkpoint directory. Raises DataError if it is missing or unreadable."""
    directory = Path(path)
    if not directory.is_dir():
        raise DataError("model.tokenizer_path", str(directory), "is not a directory", "name a checkpoint directory")
    hint = "copy tokenizer.json and tokenizer_config.json into it, or set model.tokenizer_path"
    if not any((directory / name).is_file() for name in _FILES) and not any(directory.glob("*.tiktoken")):
        rule = f"holds no tokenizer files (none of {', '.join(_FILES)})"
        raise DataError("model.tokenizer_path", str(directory), rule, hint)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    try:
        inner = cast("Any", AutoTokenizer).from_pretrained(str(directory), local_files_only=True)
        return HFTokenizer(inner)
    except StrictDataclassError as error:  # of transformers' configurations alone
        raise DataError(str(directory / "config.json"), " ".join(str(error).split())[:300],
                        "transformers rejects a value in it", "correct the value, or download the file again"
                        ) from error  # fmt: skip
    except Exception as error:  # readers raise anything for a damaged file, plain Exceptions included
        message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        rule = f"holds no tokenizer that transformers can read ({message})"
        raise DataError("model.tokenizer_path", str(directory), rule, hint) from error


def check_vocabulary(tokenizer: Tokenizer, checkpoint: Path | str) -> None:
    """Raise DataError if the tokenizer and the model in `checkpoint` have different vocabularies.

    Every id of the tokenizer must have a row in the embedding (models may have more rows, as padding). The model's
    end-of-sequence ids must be tokens of this tokenizer, otherwise generation would not stop.
    """
    config_file = Path(checkpoint) / "config.json"
    with reading(DataError, str(config_file), "is not a configuration with a vocab_size and integer eos_token_ids",
                 "download the file again"):  # fmt: skip
        config: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
        model = language_model(config)
        rows = int(model["vocab_size"])
        ids = eos_ids(model)
    if tokenizer.vocab_size > rows:
        raise DataError(
            "model.tokenizer_path",
            tokenizer.vocab_size,
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the model embeds {rows} (vocab_size in "
            f"{config_file})",
            "use the tokenizer that belongs to the checkpoint",
        )
    foreign = [i for i in ids if not 0 <= i < tokenizer.vocab_size]
    if foreign:
        raise DataError(
            "model.tokenizer_path",
            foreign[0],
            f"the model ends a sequence with id {foreign[0]} (eos_token_id in {config_file}), which the tokenizer of "
            f"{tokenizer.vocab_size} ids does not have",
            "use the tokenizer that belongs to the checkpoint",
        )


def probe_texts(tokenizer: Tokenizer) -> list[str]:
    """Texts that give different ids in different tokenizers: tokens from the whole vocabulary, and all of the last
    ones.

    Models of one family share most of a vocabulary and differ in its end, with the added tokens.
    """
    size = tokenizer.vocab_size
    ids = sorted({*range(0, size, max(1, size // 256)), *range(max(0, size - 256), size)})
    texts = dict.fromkeys(tokenizer.decode([i]) for i in ids)
    return ["".join(texts), *(text for text in texts if text)]


def first_difference(texts: Sequence[str], ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> str:
    """The first text with different ids in two tokenizers, with both; empty if there is none."""
    for text, left, right in zip(texts, ours, theirs, strict=True):
        if left != right:
            at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), 0)
            return f"{text[:40]!r} is {left[at : at + 4]} here and {right[at : at + 4]} there"
    return ""
