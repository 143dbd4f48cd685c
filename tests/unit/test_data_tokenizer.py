"""The tokenizer's narrow interface, and that it belongs to the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mslime.config.errors import ConfigError, DataError
from mslime.data.tokenizer import HFTokenizer, check_vocabulary, load_tokenizer
from tests.fixtures.tiny_models import VOCAB_SIZE, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def checkpoint(path: Path, **config: object) -> Path:
    (path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": 258, **config}))
    return path


def test_text_survives_the_round_trip_without_special_tokens(tokenizer: HFTokenizer):
    text = "3 + 4 = 7, né?\n"
    ids = tokenizer.encode(text, special_tokens=False)
    assert tokenizer.decode([*ids, tokenizer.eos_token_id or 0]) == text
    assert tokenizer.decode(np.asarray(ids, np.int32)) == text and tokenizer.decode([]) == ""


def test_chat_messages_end_where_the_assistant_begins(tokenizer: HFTokenizer):
    text = tokenizer.render([{"role": "user", "content": "hi"}], {})
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, special_tokens=False)
    assert ids[0] >= 256, "markers are single special tokens"


def test_a_tokenizer_that_fits_the_model_is_accepted(tokenizer: HFTokenizer, tmp_path: Path):
    assert tokenizer.vocab_size == 261
    check_vocabulary(tokenizer, checkpoint(tmp_path))
    check_vocabulary(tokenizer, checkpoint(tmp_path, eos_token_id=[258, 260]))
    check_vocabulary(tokenizer, checkpoint(tmp_path, eos_token_id=None))


def test_ids_without_an_embedding_are_refused(tokenizer: HFTokenizer, tmp_path: Path):
    with pytest.raises(DataError, match=r"ids up to 260, but the model embeds 200"):
        check_vocabulary(tokenizer, checkpoint(tmp_path, vocab_size=200, eos_token_id=2))


def test_the_vocabulary_of_a_model_that_also_sees_is_its_language_model_s(tokenizer: HFTokenizer, tmp_path: Path):
    nested = {"text_config": {"vocab_size": 200, "eos_token_id": 2}}
    (tmp_path / "config.json").write_text(json.dumps({**nested, "vision_config": {}}))
    with pytest.raises(DataError, match=r"the model embeds 200"):
        check_vocabulary(tokenizer, tmp_path)


def test_a_model_that_ends_with_a_foreign_id_is_refused(tokenizer: HFTokenizer, tmp_path: Path):
    with pytest.raises(DataError, match=r"ends a sequence with id 300"):
        check_vocabulary(tokenizer, checkpoint(tmp_path, eos_token_id=[258, 300]))


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path):
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(checkpoint(tmp_path))
    with pytest.raises(DataError, match="not a directory"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_tokenizer_without_a_chat_template_says_so(tmp_path: Path):
    path = make_tokenizer(tmp_path)
    for name in ("chat_template.jinja",):
        (path / name).unlink(missing_ok=True)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"data.apply_chat_template = True: this tokenizer has no chat template"):
        load_tokenizer(path).render([{"role": "user", "content": "hi"}], {})
