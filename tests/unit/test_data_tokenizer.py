"""The tokenizer's narrow interface, and that it belongs to the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mslime.config.data import DataConfig
from mslime.config.errors import ConfigError, DataError
from mslime.data.source import Prompt, RowContent, tokenised
from mslime.data.supervised import labelled
from mslime.data.tokenizer import HFTokenizer, begins_with_blank, check_vocabulary, encode_after, load_tokenizer
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
    assert not begins_with_blank(tokenizer)


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


@pytest.mark.parametrize("sees", [False, True], ids=["a language model", "one that also sees"])
def test_ids_without_an_embedding_are_refused(tokenizer: HFTokenizer, tmp_path: Path, sees: bool):
    sizes = {"vocab_size": 200, "eos_token_id": 2}
    described = {"text_config": sizes, "vision_config": {}} if sees else sizes
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(DataError, match=r"ids up to 260, but the model embeds 200"):
        check_vocabulary(tokenizer, tmp_path)


def test_a_model_that_ends_with_a_foreign_id_is_refused(tokenizer: HFTokenizer, tmp_path: Path):
    with pytest.raises(DataError, match=r"ends a sequence with id 300"):
        check_vocabulary(tokenizer, checkpoint(tmp_path, eos_token_id=[258, 300]))
    with pytest.raises(DataError, match=r"ends a sequence with id -1"):
        check_vocabulary(tokenizer, checkpoint(tmp_path, eos_token_id=-1))


@pytest.mark.parametrize(("key", "value"), [("bos_token_id", ""), ("vocab_size", "x")])
def test_a_wrong_value_of_config_json_is_not_the_tokenizers(key: str, value: str, tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", key: value}))
    with pytest.raises(DataError, match=key) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.field == str(tmp_path / "config.json") and "tokenizer" not in caught.value.hint


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


def made(specials: list[str], opening: list[str]) -> HFTokenizer:
    """Of bytes, which begins every text with special tokens."""
    inner = Tokenizer(
        models.BPE(vocab={s: i for i, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    ids = [(name, inner.token_to_id(name)) for name in opening]
    inner.post_processor = processors.TemplateProcessing(single=" ".join([*opening, "$A"]), special_tokens=ids)
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=specials[-1]))


@pytest.mark.parametrize(("specials", "opening"), [
    (["<|begin_of_text|>", "<|eot_id|>"], ["<|begin_of_text|>"]),
    (["[gMASK]", "<sop>", "<|eos|>"], ["[gMASK]", "<sop>"]),
])  # fmt: skip
def test_a_prompt_that_was_rendered_before_it_was_saved_begins_once(specials: list[str], opening: list[str]) -> None:
    tokenizer, config = made(specials, opening), DataConfig(prompts=["x"])
    once, plain = (
        tokenised(RowContent(text, "x", {}, "rows:1"), config, tokenizer) for text in ("".join(opening) + "Hi", "Hi")
    )
    assert once.tokens == plain.tokens and plain.tokens[: len(opening)] == [256 + i for i in range(len(opening))]


def spaced(scheme: str) -> HFTokenizer:
    """Of SentencePiece's kind (Mixtral, Llama 2): it puts a blank before every text, but for the scheme `never`."""
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    if scheme == "legacy":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        inner.decoder = decoders.Metaspace(prepend_scheme=scheme)
    letters = list("▁\nabcdefghijklmnopqrstuvwxyzANSTI?:.,=+0123456789[]/")
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=len(letters) + 3, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    inner.train_from_iterator(["a b"], trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>"))


@pytest.mark.parametrize("scheme", ["first", "never"])
@pytest.mark.parametrize(("prompt", "label"), [("2+2=", "4"), ("Answer: ", "four"), ("[/INST]", "The answer.")])
def test_a_label_behind_its_prompt_has_the_tokens_of_one_text(scheme: str, prompt: str, label: str) -> None:
    tokenizer = spaced(scheme)
    tokens = tokenizer.encode(prompt, special_tokens=True)
    row = labelled(Prompt(tokens, label, {}, "row", prompt), tokenizer)
    assert row.tokens == [*tokenizer.encode(prompt + label, special_tokens=True), tokenizer.eos_token_id]


@pytest.mark.parametrize("scheme", ["first", "always", "legacy", "never"])
def test_a_text_after_others_has_the_tokens_of_one_text(scheme: str) -> None:
    tokenizer = spaced(scheme)
    assert begins_with_blank(tokenizer) == (scheme != "never")
    for before in ("so 2+3", "so 2+3</s>", "a\n"):
        for text in ("=5\n", " b", "\n a", "</s>[INST] a", "[INST]"):
            head = tokenizer.encode(before, special_tokens=False)
            whole = tokenizer.encode(before + text, special_tokens=False)
            assert [*head, *encode_after(tokenizer, head[-1], text)] == whole, (before, text)
