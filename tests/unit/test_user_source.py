"""Prompts from a user's object: drawn, tokenised, resumed at the next one, and every mistake named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mslime.config.data import DataConfig
from mslime.config.errors import ConfigError, UserError
from mslime.config.loader import build
from mslime.data.source import PromptSource, UserSource, open_prompts
from tests.unit import user_functions
from tests.unit.rollout_fakes import FakeSlowEngine, FakeTokenizer, make_service, publish, run_config, write_prompts

LETTERS = "tests.unit.user_functions:Letters"


def source(spec: str = LETTERS, **data: object) -> UserSource:
    return UserSource(spec, DataConfig(source=spec, **data), FakeTokenizer(), 7)  # pyright: ignore


def test_items_become_prompts_that_say_where_they_are_from() -> None:
    first, second = (prompt := source()).next(), prompt.next()
    assert first.tokens == [65] and second.tokens == [66, 66] and second.label == 1 and second.metadata == {}
    assert [first.where, second.where] == [f"{LETTERS}:0", f"{LETTERS}:1"]


def test_prompts_that_are_too_long_are_skipped_and_counted() -> None:
    short = source(max_prompt_tokens=2)
    assert [short.next().label for _ in range(4)] == [0, 1, 7, 8] and short.skipped == 5


@given(before=st.integers(0, 40), again=st.integers(0, 10))
def test_a_resumed_source_gives_what_the_first_would_have(before: int, again: int) -> None:
    first = source(max_prompt_tokens=5)
    for _ in range(before):
        first.next()
    state = json.loads(json.dumps(first.state_dict()))
    for _ in range(2):  # resumed, and resumed again
        other = source(max_prompt_tokens=5)
        other.load_state_dict(state)
        assert other.state_dict() == state
        expected = [first.next() for _ in range(again)]
        assert [other.next() for _ in range(again)] == expected and other.skipped == first.skipped
        state = json.loads(json.dumps(other.state_dict()))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("ends", r"(?s)data.source.*ended after 3 prompts.*repeat your data"),
        ("raises", r"(?s)data.source.*raised OSError: no network for item 2 .*user_functions.py:\d+"),
        ("text", r"(?s)Letters:0.*keys prompt, label, metadata"),
        ("a list", r"must be a mapping with the key 'prompt'"),
        ("empty", r"the prompt is empty"),
        ("odd", r"did you mean 'label'"),
        ("metadata", r"must be an object"),
    ],
)
def test_an_item_that_is_no_prompt_is_named(bad: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_functions.Letters, "bad", bad)
    drawn = source()
    with pytest.raises(UserError, match=said):
        for _ in range(5):
            drawn.next()


def test_a_state_that_cannot_be_saved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_functions.Letters, "bad", "state")
    with pytest.raises(ConfigError, match="state_dict returned a value that is not JSON"):
        source().state_dict()


def test_an_object_that_cannot_resume_is_refused() -> None:
    with pytest.raises(ConfigError, match="returned a list without state_dict"):
        source("tests.unit.user_functions:no_source")


def test_a_run_does_not_continue_with_prompts_of_another_kind(tmp_path: Path) -> None:
    data = DataConfig(prompts=[str(write_prompts(tmp_path / "p.jsonl"))])
    files = PromptSource(data.prompts, data, FakeTokenizer(), 7)
    with pytest.raises(UserError, match=r"(?s)data.source.*was saved with files of data.prompts"):
        source().load_state_dict(files.state_dict())
    with pytest.raises(UserError, match=r"(?s)data.prompts.*saved with other prompts"):
        files.load_state_dict(source().state_dict())


async def test_the_service_draws_from_the_source_and_resumes_it(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    config = build({**config.given(), "data": {"source": LETTERS}})

    engines = FakeSlowEngine(lambda *_: 4)
    service = make_service(config, engines)
    await publish(service, engines, 0)
    first = [sample.label for sample in (await service.take(0)).samples]
    await service.save(tmp_path / "state.npz", 1)
    await service.close()
    service = make_service(config, engines)
    await service.load(tmp_path / "state.npz")
    await publish(service, engines, 1)
    second = [sample.label for sample in (await service.take(1)).samples]
    await service.close()
    assert sorted(first + second) == sorted([*range(8)] * 2), "every prompt once, with two responses"


def test_files_and_source_open_what_the_settings_name(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    assert isinstance(open_prompts(config.data, config.seed, FakeTokenizer()), PromptSource)
    with_source = build({**config.given(), "data": {"source": LETTERS}})
    assert isinstance(open_prompts(with_source.data, with_source.seed, FakeTokenizer()), UserSource)
    with pytest.raises(ConfigError, match="supervised training reads files"):
        build({**with_source.given(), "train": {"task": "sft"}})
    with pytest.raises(ConfigError, match="at least one file"):
        build({**config.given(), "data": {}})
