"""Where a response ends that an abort interrupted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mslime.backends.sglang.generating import Endings, Finish, GenerateResult, end_ids, head
from mslime.config.errors import DataError
from tests.fixtures.supports import rows_of, supports_of
from tests.unit.rollout_fakes import FakeTokenizer

EOS = 9


class Characters(FakeTokenizer):
    """One token a character, and one for `<|eom_id|>`."""

    eos_token_id = 2

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        return [7] if text == "<|eom_id|>" else super().encode(text, special_tokens=special_tokens)

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in ids)


def answer(text: str, finish: Finish = "abort", *, last: int | None = None) -> GenerateResult:
    ids = np.asarray([*map(ord, text), *([] if last is None else [last])], np.int32)
    n, old = len(ids), 3
    routes = np.arange((old + n - 1) * 2).reshape(-1, 1, 2)
    half = n // 2
    versions = tuple(v for v in ((4, 0, half), (5, half, n)) if v[1] < v[2])
    return GenerateResult(ids, -np.arange(n, dtype=np.float32), finish, versions, routes,
                          supports_of([[i] for i in range(n)]), 1, text, "engine0")  # fmt: skip


def codes(text: str) -> np.ndarray:
    return np.asarray([*map(ord, text)], np.int32)


@pytest.mark.parametrize(
    ("before", "added", "last", "finish", "expected"),
    [
        ("", "ab", EOS, "abort", (3, "stop")),  # sampled in the step of the abort
        ("xy", "", EOS, "abort", (1, "stop")),
        ("", "ab", None, "abort", (2, "abort")),
        ("", "abEND", None, "abort", (5, "stop")),
        ("xEN", "Dab", None, "abort", (1, "stop")),
        ("xE", "NDab", None, "stop", (2, "stop")),
        ("xE", "NDab", None, "length", (2, "stop")),
        ("xE", "NxDab", None, "abort", (5, "abort")),
        ("xE", "ab", None, "length", (2, "length")),
        ("E", "N", None, "abort", (1, "abort")),
    ],
)
def test_a_response_ends_where_one_request_would_have_ended_it(
    before: str, added: str, last: int | None, finish: Finish, expected: tuple[int, str]
) -> None:
    endings = Endings({EOS}, ["END"], Characters())
    got = endings.settled(codes(before), answer(added, finish, last=last))
    assert (len(got.output_ids), got.finish) == expected


def test_nothing_ends_without_tokens_or_endings() -> None:
    assert Endings({EOS}, ["END"], Characters()).settled(codes("xEND"), answer("")).finish == "abort"
    assert Endings((), (), Characters()).settled(codes("x"), answer("a", last=EOS)).finish == "abort"


def test_a_cut_answer_is_one_of_so_many_tokens() -> None:
    whole, cut = answer("abcdef", "length"), head(answer("abcdef", "length"), 4)
    assert cut.output_ids.tolist() == whole.output_ids[:4].tolist() and cut.finish == "stop"
    assert cut.log_probs.tolist() == [0, -1, -2, -3] and rows_of(cut.supports) == [[0], [1], [2], [3]]
    assert cut.versions == ((4, 0, 3), (5, 3, 4)) and head(whole, 3).versions == ((4, 0, 3),)
    assert whole.routes is not None and cut.routes is not None
    np.testing.assert_array_equal(cut.routes, whole.routes[: 3 + 4 - 1])


def test_end_ids_are_those_of_model_generation_and_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert end_ids(tmp_path, Characters()) == {2, 3, 7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert end_ids(tmp_path, Characters()) == {2, 3, 4, 7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(DataError, match=r"generation_config\.json"):
        end_ids(tmp_path, Characters())
