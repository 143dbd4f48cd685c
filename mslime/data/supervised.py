"""Rows of supervised training: prompt and label, or messages, as samples with their trained tokens marked.

These tokens are not sampled: behaviour log-probs and versions are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from mslime.config.data import DataConfig
from mslime.config.errors import DataError
from mslime.config.train import TrainConfig
from mslime.data.conversation import SupervisedSequence, supervised_turns
from mslime.data.sample import Sample, SampleStatus
from mslime.data.source import Prompt, PromptSource, RowContent
from mslime.data.tokenizer import Tokenizer, encode_after


@dataclass(frozen=True)
class FittedRow:
    """Trained part of a row: its sequences, and how many were skipped or cut as too long."""

    sequences: Sequence[SupervisedSequence]
    skipped: int = 0
    cut: int = 0


class SupervisedSource:
    """Rows of several files as samples, one epoch after the other; a row of messages may become several samples.

    Attributes:
        rows: the files. limit: tokens of the longest sequence.
        cut: rows shortened so far (`train.sft_too_long: cut`).
    """

    def __init__(
        self,
        specs: Sequence[str],
        data: DataConfig,
        train: TrainConfig,
        seed: int,
        tokenizer: Tokenizer,
        limit: int,
        *,
        shuffle: bool | None = None,
    ) -> None:
        """
        Args:
            shuffle: default `data.shuffle`.

        Raises:
            DataError: as `PromptSource`.
        """
        self._data, self._train, self._tokenizer, self.limit = data, train, tokenizer, limit
        self.rows = PromptSource(specs, data, tokenizer, seed, shuffle=shuffle)
        self.cut = 0

    def __len__(self) -> int:
        return len(self.rows)

    def next(self, group_id: int) -> list[Sample]:
        """The next row's samples. Too long ones are skipped, cut or rejected (`train.sft_too_long`).

        Args:
            group_id: of the samples, which are one rollout.

        Raises:
            DataError: a row cannot be trained, or none fits.
        """
        for _ in range(2 * len(self)):
            row = self.rows.row(self.rows.draw())
            fitted = self.fitted(row)
            self.rows.skipped += fitted.skipped
            self.cut += fitted.cut
            if fitted.sequences:
                return [_sample(one, group_id, part, row) for part, one in enumerate(fitted.sequences)]
        raise DataError("train.sft_too_long", self._train.sft_too_long, f"all {len(self)} rows are "
                        "too long", "raise rollout.max_total_tokens, or use shorter rows")  # fmt: skip

    def fitted(self, row: RowContent) -> FittedRow:
        """Trained part of a row. Raises DataError if it has none or is too long."""
        sequences = self._sequences(row)
        long = [len(one.tokens) for one in sequences if len(one.tokens) > self.limit]
        if not sequences or not long:
            return FittedRow(sequences, skipped=int(not sequences))
        policy = self._train.sft_too_long
        if policy == "refuse":
            raise DataError(row.where, f"{max(long)} tokens", f"the limit is {self.limit} tokens for prompt and "
                            "response together", "set train.sft_too_long to skip or cut, raise "
                            "rollout.max_total_tokens, or remove the row")  # fmt: skip
        kept = [one.cut(self.limit) for one in sequences if policy == "cut" or len(one.tokens) <= self.limit]
        trained = [one for one in kept if one.spans]
        return FittedRow(trained, skipped=len(sequences) - len(trained), cut=len(trained) + len(long) - len(sequences))

    def _sequences(self, row: RowContent) -> list[SupervisedSequence]:
        """Sequences of a row, whatever their length; none if `data.max_prompt_tokens` skips it."""
        data = self._data
        if data.messages_key is None:
            prompt = self.rows.fitting(row)
            return [] if prompt is None else [labelled(prompt, self._tokenizer)]
        options = data.chat_template_kwargs | ({} if row.tools is None else {"tools": row.tools})
        messages, loss_on = cast("list[dict[str, Any]]", row.prompt), self._train.sft_loss_on
        return supervised_turns(messages, options, self._tokenizer, row.where, loss_on)

    def samples(self) -> list[Sample]:
        """Samples of all rows in file order, as `next` returns them; counters do not change. Raises DataError."""
        rows = [self.rows.row(index) for index in range(len(self))]
        return [
            _sample(one, index, part, row)
            for index, row in enumerate(rows)
            for part, one in enumerate(self.fitted(row).sequences)
        ]

    def metrics(self) -> dict[str, float]:
        """`data/*` metrics."""
        return {"data/skipped_rows": float(self.rows.skipped), "data/cut_rows": float(self.cut)}

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which `load_state_dict` continues."""
        return self.rows.state_dict() | {"cut": self.cut}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises DataError if files, slices, seed or shuffle differ."""
        self.rows.load_state_dict(state)
        self.cut = int(state.get("cut", 0))  # absent in older checkpoints


def refuse_unlabelled(label: Any, where: str, tokenizer: Tokenizer) -> None:
    """Raise DataError if a row's label cannot be a response, or the tokenizer has no EOS to end it."""
    if not isinstance(label, str) or not label:
        raise DataError(where, label, "supervised training needs the response as text in data.label_key",
                        "write the response into the row, set data.label_key to its key, or use a list of "
                        "messages with data.messages_key")  # fmt: skip
    if tokenizer.eos_token_id is None:
        raise DataError("model.tokenizer_path", None, "the tokenizer has no EOS, so a response cannot end",
                        "set eos_token in tokenizer_config.json")  # fmt: skip


def labelled(prompt: Prompt, tokenizer: Tokenizer) -> SupervisedSequence:
    """A prompt with its label as the response and EOS at the end, both trained. Raises DataError."""
    refuse_unlabelled(prompt.label, prompt.where, tokenizer)
    assert tokenizer.eos_token_id is not None
    text = prompt.text + prompt.label
    tokens = [*prompt.tokens, *_continued(prompt, text, tokenizer), tokenizer.eos_token_id]
    return SupervisedSequence(text, ((len(prompt.text), len(text)),), tokens, ((len(prompt.tokens), len(tokens)),))


def _continued(prompt: Prompt, text: str, tokenizer: Tokenizer) -> list[int]:
    """Tokens of a label after its prompt; SentencePiece would put a blank before a label encoded alone.

    Args:
        text: prompt and label.
    """
    n = len(prompt.tokens)
    for special in (False, True):
        whole = tokenizer.encode(text, special_tokens=special)
        if whole[:n] == prompt.tokens:
            return whole[n:]
    return encode_after(tokenizer, prompt.tokens[-1], prompt.label)  # a token spans the border of prompt and label


def _sample(one: SupervisedSequence, index: int, part: int, row: RowContent) -> Sample:
    """A sequence as a finished sample; samples of one row share its rollout."""
    sample = Sample.from_prompt(index, part, one.tokens[: one.spans[0][0]], row.label)
    sample.metadata, sample.rollout_id = dict(row.metadata), 0
    for (start, end), following in zip(one.spans, [*(s for s, _ in one.spans[1:]), len(one.tokens)], strict=True):
        n = end - start
        sample.extend(one.tokens[start:end], log_probs=np.zeros(n, np.float32), versions=[(0, 0, n)], engine="dataset")
        sample.extend(one.tokens[end:following])
    sample.status, sample.response = SampleStatus.COMPLETED, one.response
    return sample
