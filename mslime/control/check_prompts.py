"""What `mslime check` finds out about prompts: rendered and tokenised before anything is started.

All rows of small files are tried, and some thousands of large ones, spread over the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mslime.config.errors import DataError
from mslime.config.schema import RunConfig
from mslime.data.source import PromptSource, as_messages, supervised_sample
from mslime.data.tokenizer import Tokenizer

TRIED = 2000
_SHOWN = 400


@dataclass
class _Found:
    rows: int = 0
    tried: int = 0
    longest: int = 0
    skipped: int = 0


def check_prompts(config: RunConfig, source: PromptSource, tokenizer: Tokenizer, limit: int) -> list[str]:
    """Try the training rows; returns what a person should see of them, one rendered prompt first.

    Args:
        limit: a sequence of so many tokens, or more, has no room for a response; or does not fit the model, for sft.

    Raises:
        DataError: a row cannot be rendered or tokenised, its text is lost in the template, or it is too long.
    """
    found = _Found(rows=len(source))
    for index in _spread(len(source)):
        _try_row(config, source, tokenizer, index, limit, found)
    if found.skipped == found.tried:
        raise DataError("data.max_prompt_tokens", config.data.max_prompt_tokens, f"all {found.tried} prompts tried are "
                        "longer", "raise data.max_prompt_tokens, or give shorter prompts")  # fmt: skip
    of = "all" if found.tried == found.rows else f"{found.tried:,} of"
    return [
        f"the first prompt, as the model sees it: {_shown(config, source, tokenizer)}",
        f"prompts: {found.rows:,} rows; {of} {found.rows:,} tried, the longest has {found.longest:,} tokens, "
        f"{found.skipped:,} are skipped as longer than data.max_prompt_tokens",
    ]


def check_held_out(config: RunConfig, source: PromptSource, tokenizer: Tokenizer) -> None:
    """Try rows of a held-out set. Raises DataError like `check_prompts`; none is too long, the longest are cut."""
    for index in _spread(len(source)):
        source.at(index)
        _refuse_lost_text(config, source, tokenizer, index)


def _spread(rows: int) -> Iterable[int]:
    return range(rows) if rows <= TRIED else range(0, rows, -(-rows // TRIED))


def _try_row(
    config: RunConfig, source: PromptSource, tokenizer: Tokenizer, index: int, limit: int, found: _Found
) -> None:
    prompt = source.at(index)
    n = len(prompt.tokens)
    found.tried += 1
    if n > (config.data.max_prompt_tokens or n):
        found.skipped += 1
        return
    if config.train.task == "sft":
        n = len(supervised_sample(prompt, index, tokenizer))
    found.longest = max(found.longest, n)
    if n >= limit + (config.train.task == "sft"):
        raise DataError(prompt.where, f"{n} tokens", f"the model takes fewer than {limit + 1} tokens"
                        + (", prompt and response together" if config.train.task == "sft" else
                           " and needs room for a response"),
                        "leave the row out, set data.max_prompt_tokens, or raise rollout.max_total_tokens")  # fmt: skip
    _refuse_lost_text(config, source, tokenizer, index)


def _refuse_lost_text(config: RunConfig, source: PromptSource, tokenizer: Tokenizer, index: int) -> None:
    """A template that does not write the last user's words trains on prompts without the question."""
    if not config.data.apply_chat_template:
        return
    prompt, where = source.prompt(index)
    messages = as_messages(prompt)
    asked = [str(m["content"]).strip() for m in messages if m["role"] == "user" and m["content"]]
    rendered = tokenizer.render(messages, config.data.chat_template_kwargs)
    if asked and asked[-1] not in rendered:
        raise DataError(where, asked[-1][:80], f"the chat template does not write the user's text: {rendered[:200]!r}",
                        "give the model's own chat template, or content as plain text")  # fmt: skip


def _shown(config: RunConfig, source: PromptSource, tokenizer: Tokenizer) -> str:
    prompt, _ = source.prompt(0)
    if config.data.apply_chat_template:
        text = tokenizer.render(as_messages(prompt), config.data.chat_template_kwargs)
    else:
        text = str(prompt)
    cut = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ... ({len(text):,} characters)"
    return f"{cut!r}, {len(source.at(0).tokens):,} tokens"
