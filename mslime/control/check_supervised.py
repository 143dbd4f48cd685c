"""What `mslime check` finds out about rows of supervised training: rendered, tokenised, and one of them shown."""

from __future__ import annotations

from dataclasses import dataclass

from mslime.config.errors import DataError
from mslime.config.schema import RunConfig
from mslime.control.check_prompts import TRIED_CHARACTERS, refuse_lost_text, spread
from mslime.data.conversation import wanted_turns
from mslime.data.messages import as_messages
from mslime.data.source import Row
from mslime.data.supervised import SupervisedSource, refuse_unlabelled
from mslime.data.tokenizer import Tokenizer


@dataclass
class _Found:
    tried: int = 0
    sequences: int = 0
    tokens: int = 0
    trained: int = 0
    longest: int = 0
    longest_at: str = ""
    skipped: int = 0
    cut: int = 0


def check_supervised(config: RunConfig, source: SupervisedSource, name: str, tokenizer: Tokenizer) -> list[str]:
    """Look at every row, and try them as the trainer would; returns what a person should see, of training rows the
    first one with what is trained.

    Args:
        name: of the held-out set; empty for the training rows.

    Raises:
        DataError: a row cannot be trained, its text is lost in the template, it is too long, or all are left out.
    """
    for index in range(len(source)):
        _look_at(config, source.rows.row(index), tokenizer)
    found, first = _Found(), ""
    for index in spread(len(source)):
        shown = _try(config, source, index, found)
        first = first or shown
    if found.sequences == 0:
        raise DataError("train.sft_too_long", config.train.sft_too_long, f"all {found.tried} rows tried are too long",
                        "raise rollout.max_total_tokens or data.max_prompt_tokens, or give shorter rows")  # fmt: skip
    of = "all" if found.tried == len(source) else f"{found.tried:,} of"
    counts = (
        f"{name or 'training'}: {len(source):,} rows; {of} {len(source):,} tried: {found.sequences:,} sequences of "
        f"{found.tokens:,} tokens, {found.trained:,} of them trained; the longest has {found.longest:,} tokens "
        f"({found.longest_at}); {found.skipped:,} are skipped and {found.cut:,} cut as too long"
    )
    return [counts] if name else [f"the first row, with what is trained in [[ ]]: {first}", counts]


def _look_at(config: RunConfig, row: Row, tokenizer: Tokenizer) -> None:
    """What can be told of a row without rendering it."""
    if config.data.messages_key is None:
        refuse_unlabelled(row.label, row.where, tokenizer)
    else:
        wanted_turns(as_messages(row.prompt), row.where, config.train.sft_loss_on)


def _try(config: RunConfig, source: SupervisedSource, index: int, found: _Found) -> str:
    """Count a row; returns it as text, with what is trained marked."""
    row = source.rows.row(index)
    fitted = source.fitted(row)
    found.tried, found.skipped, found.cut = found.tried + 1, found.skipped + fitted.skipped, found.cut + fitted.cut
    for one in fitted.sequences:
        found.sequences, found.tokens, found.trained = (
            found.sequences + 1, found.tokens + len(one.tokens), found.trained + one.trained,
        )  # fmt: skip
        if len(one.tokens) > found.longest:
            found.longest, found.longest_at = len(one.tokens), row.where
    if not fitted.sequences:
        return ""
    last = fitted.sequences[-1]
    if config.data.messages_key is not None or config.data.apply_chat_template:
        messages = as_messages(row.prompt)
        end = next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "assistant"), len(messages))
        refuse_lost_text(messages[:end], last.text, row.where)
    text = last.marked()
    cut = text if len(text) <= TRIED_CHARACTERS else f"{text[:TRIED_CHARACTERS]} ... ({len(text):,} characters)"
    return f"{cut!r}, {len(last.tokens):,} tokens, {last.trained:,} trained"
