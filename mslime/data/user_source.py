"""Training prompts from a function of the user's, `data.source`: what it gives is checked and tokenised here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from mslime.config.data import DataConfig
from mslime.config.errors import ConfigError, DataError, nearest
from mslime.data.source import Prompt, PromptSource, PromptStream, Row, checked_row, fitting
from mslime.data.tokenizer import Tokenizer
from mslime.extensions import calling, load_function

SETTING = "data.source"
KEYS = ("prompt", "label", "metadata")
METHODS = ("__iter__", "state_dict", "load_state_dict")
ENVIRONMENTS = "environments"
"""In a state: the run had no prompts of its own."""
MOST_TOO_LONG = 1000
"""Prompts in a row that may be too long, before none is taken to fit."""


def open_prompts(data: DataConfig, seed: int, tokenizer: Tokenizer) -> PromptStream:
    """What a run draws its training prompts from: the files of `data.prompts`, or `data.source`; nothing where
    environments bring their own. Raises UserError."""
    if data.source is None and not data.prompts:
        return NoPrompts()
    if data.source is None:
        return PromptSource(data.prompts, data, tokenizer, seed)
    return UserSource(data.source, data, tokenizer, seed)


class NoPrompts:
    """For runs whose environments bring prompts of their own: groups are numbered, and their prompt says nothing.

    Attributes:
        drawn: groups so far. skipped: none.
    """

    skipped = 0

    def __init__(self) -> None:
        self.drawn = 0

    def next(self) -> Prompt:
        """A prompt of one token, which nobody is sent."""
        self.drawn += 1
        return Prompt([0], None, {}, f"environments:{self.drawn}")

    def state_dict(self) -> dict[str, Any]:
        """How many were drawn."""
        return {"source": ENVIRONMENTS, "drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises ConfigError when it was of prompts."""
        if state.get("source") != ENVIRONMENTS:
            raise ConfigError(
                SETTING, None, f"the run was saved with {state.get('source') or 'files of data.prompts'}, and its "
                "prompts are those of environments now", "resume with the same, or start a run under another name",
            )  # fmt: skip
        self.drawn = int(state["drawn"])


class UserSource:
    """Prompts that an object of the user's iterates over: mappings with `prompt` and, where there are any, `label` and
    `metadata`.

    Raises ConfigError when the function fails or its object lacks a method; while drawing also DataError, for an item
    that is no prompt, for an end, and when no prompt fits `data.max_prompt_tokens`.

    Attributes:
        drawn: items taken so far. skipped: those of them that were too long.
    """

    def __init__(self, spec: str, config: DataConfig, tokenizer: Tokenizer, seed: int) -> None:
        self._spec, self._config, self._tokenizer = spec, config, tokenizer
        make = cast("Callable[[DataConfig, int], Any]", load_function(spec, SETTING))
        with calling(spec, SETTING):
            self._source = make(config, seed)
        for method in METHODS:
            if not callable(getattr(self._source, method, None)):
                raise ConfigError(
                    SETTING, spec, f"made a {type(self._source).__name__}, which has no {method}",
                    "give an object that can be iterated over, with state_dict and load_state_dict",
                )  # fmt: skip
        self._items: Iterator[object] | None = None  # begins after `load_state_dict`
        self.drawn, self.skipped = 0, 0

    def next(self) -> Prompt:
        """The next prompt that is not too long."""
        for _ in range(MOST_TOO_LONG):
            prompt = fitting(self._row(), self._config, self._tokenizer)
            if prompt is not None:
                return prompt
            self.skipped += 1
        raise DataError("data.max_prompt_tokens", self._config.max_prompt_tokens,
                        f"the last {MOST_TOO_LONG} prompts of {self._spec} are longer",
                        "raise it, or give shorter prompts")  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """The object's own state and our counts."""
        with calling(self._spec, SETTING, "state_dict"):
            own = self._source.state_dict()
        try:
            own = json.loads(json.dumps(own, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(SETTING, self._spec, f"state_dict returned what JSON cannot hold: {error}",
                              "return plain numbers, texts, lists and mappings") from error  # fmt: skip
        return {"source": self._spec, "drawn": self.drawn, "skipped": self.skipped, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises ConfigError when it was of another source."""
        if state.get("source") != self._spec:
            raise ConfigError(
                SETTING, self._spec, f"the run was saved with {state.get('source') or 'files of data.prompts'}",
                "resume with the same source, or start a run under another name",
            )  # fmt: skip
        with calling(self._spec, SETTING, "load_state_dict"):
            self._source.load_state_dict(state["own"])
        self.drawn, self.skipped = state["drawn"], state["skipped"]

    def _row(self) -> Row:
        where = f"{self._spec}:{self.drawn}"
        with calling(self._spec, SETTING, f"item {self.drawn}"):
            if self._items is None:
                self._items = iter(self._source)
            item = next(self._items, None)
        if item is None:
            raise DataError(SETTING, self._spec, f"ended after {self.drawn} prompts",
                            "begin again at the end of your data: training takes as many as it needs")  # fmt: skip
        self.drawn += 1
        return checked_row(_row_of(item, where), self._config)


def _row_of(item: object, where: str) -> Row:
    if not isinstance(item, Mapping):
        raise DataError(where, item, "an item of data.source must be a mapping with the key 'prompt'",
                        "yield for example {'prompt': '1+1=', 'label': '2'}")  # fmt: skip
    given = cast("Mapping[str, Any]", item)
    unknown = [str(key) for key in given if key not in KEYS]
    if unknown or "prompt" not in given:
        raise DataError(
            where, unknown or sorted(given), f"an item of data.source has the keys {', '.join(KEYS)} "
            + nearest((unknown or ["prompt"])[0], KEYS), "put anything else into metadata",
        )  # fmt: skip
    return Row(given["prompt"], given.get("label"), given.get("metadata") or {}, where)
