"""What `mslime check` finds out about prompts: rendered and tokenised before anything is started.

All rows of small files are tried, and some thousands of large ones, spread over the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mslime.config.errors import DataError
from mslime.config.schema import RunConfig
from mslime.data.messages import as_messages
from mslime.data.source import Prompt, PromptSource

TRIED = 2000
TRIED_CHARACTERS = 400
"""Of a rendered row, as far as it is shown."""


def check_prompts(config: RunConfig, source: PromptSource, limit: int) -> list[str]:
    """Try the training rows; returns what a person should see of them, one rendered prompt first.

    Args:
        limit: a sequence of so many tokens, or more, has no room for a response.

    Raises:
        DataError: a row cannot be rendered or tokenised, its text is lost in the template, or it is too long.
    """
    tried, longest, skipped, shown = 0, 0, 0, ""
    for index in spread(len(source)):
        prompt = _tried(config, source, index)
        tried, n = tried + 1, len(prompt.tokens)
        shown = shown or _shown(prompt)
        if n > (config.data.max_prompt_tokens or n):
            skipped += 1
            continue
        longest = max(longest, n)
        if n >= limit:
            raise DataError(prompt.where, f"{n} tokens", f"the model takes fewer than {limit + 1} tokens and needs "
                            "room for a response", "leave the row out, set data.max_prompt_tokens, or raise "
                            "rollout.max_total_tokens")  # fmt: skip
    if skipped == tried:
        raise DataError("data.max_prompt_tokens", config.data.max_prompt_tokens, f"all {tried} prompts tried are "
                        "longer", "raise data.max_prompt_tokens, or give shorter prompts")  # fmt: skip
    of = "all" if tried == len(source) else f"{tried:,} of"
    return [
        f"the first prompt, as the model sees it: {shown}",
        f"prompts: {len(source):,} rows; {of} {len(source):,} tried, the longest has {longest:,} tokens, "
        f"{skipped:,} are skipped as longer than data.max_prompt_tokens",
    ]


def check_held_out(config: RunConfig, source: PromptSource) -> None:
    """Try rows of a held-out set. Raises DataError like `check_prompts`; none is too long, the longest are cut."""
    for index in spread(len(source)):
        _tried(config, source, index)


def spread(rows: int) -> Iterable[int]:
    """Indices of the rows that are tried."""
    return range(rows) if rows <= TRIED else range(0, rows, -(-rows // TRIED))


def _tried(config: RunConfig, source: PromptSource, index: int) -> Prompt:
    """A prompt, rendered and tokenised."""
    row = source.row(index)
    prompt = source.tokenised(row)
    if config.data.apply_chat_template:
        refuse_lost_text(as_messages(row.prompt), prompt.text, row.where)
    return prompt


def refuse_lost_text(messages: Sequence[Mapping[str, Any]], rendered: str, where: str) -> None:
    """A template that does not write the last user's words trains on prompts without the question. DataError."""
    asked = [str(m["content"]).strip() for m in messages if m["role"] == "user" and m["content"]]
    if asked and asked[-1] not in rendered:
        raise DataError(where, asked[-1][:80], f"the chat template does not write the user's text: {rendered[:200]!r}",
                        "give the model's own chat template, or content as plain text")  # fmt: skip


def _shown(prompt: Prompt) -> str:
    text = prompt.text
    cut = text if len(text) <= TRIED_CHARACTERS else f"{text[:TRIED_CHARACTERS]} ... ({len(text):,} characters)"
    return f"{cut!r}, {len(prompt.tokens):,} tokens"
