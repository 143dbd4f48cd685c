"""Renderers get the ids and the texts that transformers would give them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mslime.rollout.agents.choose import PlainTokenizer
from tests.fixtures.made_tokenizer import SPECIALS, make_tokenizer

INNER = make_tokenizer(SPECIALS, "<|im_end|>")
PIECES = st.lists(st.one_of(st.sampled_from([*SPECIALS, " .", "\n", " n't"]), st.text(max_size=8)), max_size=6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(pieces=PIECES, skip=st.booleans())
def test_ids_and_texts_are_those_of_transformers(pieces: list[str], skip: bool) -> None:
    plain, text = PlainTokenizer(INNER), "".join(pieces)
    ids = INNER.encode(text, add_special_tokens=False)
    assert plain.encode(text, add_special_tokens=False) == ids
    assert plain.decode(ids, skip_special_tokens=skip) == INNER.decode(ids, skip_special_tokens=skip)


CLEANED = ("clean_up_tokenization_spaces", "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")


@pytest.mark.parametrize("changed", [("split_special_tokens",), CLEANED], ids=["special tokens split", "texts cleaned"])
def test_what_transformers_does_beside_is_left_to_it(changed: tuple[str, ...]) -> None:
    inner = make_tokenizer(SPECIALS, "<|im_end|>")
    for name in changed:
        setattr(inner, name, True)
    plain, text = PlainTokenizer(inner), "hello <|im_end|> world . it is n't"
    ids = plain.encode(text, add_special_tokens=False)  # before transformers is asked, which sets its tokenizer right
    assert ids == inner.encode(text, add_special_tokens=False)
    assert plain.decode(ids) == inner.decode(ids)


def test_it_cannot_be_asked_for_offsets() -> None:
    """The package looks for `__call__`, and attributes each token by offsets where it finds it."""
    assert not callable(PlainTokenizer(INNER))
