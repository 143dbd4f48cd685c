"""Checks of the data before a run: reads every row, renders and tokenises prompts, shows one of them.

All rows of small files are tried, and some thousands of large ones, spread over the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mslime.checks.user_functions import check_rewards
from mslime.config.data import DataConfig
from mslime.config.errors import DataError
from mslime.config.rollout import FUNCTION as ATROPOS
from mslime.config.rollout import RolloutConfig
from mslime.config.schema import RunConfig
from mslime.config.train import TrainConfig
from mslime.data.conversation import as_messages, wanted_turns
from mslime.data.row_files import glance
from mslime.data.source import Prompt, PromptSource, keys_of_rows, open_prompts, split_slice
from mslime.data.supervised import SupervisedSource, refuse_unlabelled
from mslime.data.tokenizer import Tokenizer
from mslime.network import url_of
from mslime.rollout.filters import load_filter

Source = TypeVar("Source")
TRIED = 2000
DRAWN = 16
"""Number of prompts drawn from `data.source`."""
TRIED_CHARACTERS = 400
"""Most characters shown of a rendered row."""


def glance_at_files(data: DataConfig) -> None:
    """Check that the files exist, and check their first lines, before slow imports. Raises DataError."""

    def look(specs: list[str], _shuffle: bool | None) -> None:
        for spec in specs:
            path, part = split_slice(spec)
            glance(path, [] if part.start else keys_of_rows(data))

    _in_files(data, look)


def check_data(config: RunConfig, tokenizer: Tokenizer, limit: int) -> list[str]:
    """Open every data file, which reads each row once and rejects the first invalid one by file and line, and try rows.

    Returns notes on prompts, labels and the reward.
    """

    if config.rollout.function == ATROPOS:
        return [_sent_to_environments(config.rollout, config.run_dir)]

    def open_files(specs: list[str], shuffle: bool | None) -> PromptSource:
        return PromptSource(specs, config.data, tokenizer, config.seed, shuffle=shuffle)

    sources = _in_files(config.data, open_files)
    for name, source in sources.items():
        if name:
            for index in _spread(len(source)):  # long ones are cut, not refused
                _tried(source, index, templated=config.data.apply_chat_template)
    if config.data.source is not None:
        drawn = DrawnPrompts(config.data, config.seed, tokenizer)
        notes, tried = _check_drawn(config.data.source, drawn, limit), {"": drawn, **sources}
    else:
        notes, tried = _check_prompts(config.data, sources[""], limit), sources
    return notes + check_rewards(config.rollout, config.reward, config.data, tried, tokenizer)


def _sent_to_environments(rollout: RolloutConfig, run_dir: Path) -> str:
    """Settings for the start of Atropos' environments. Raises ConfigError if a token or filter is not found."""
    settings = rollout.atropos
    settings.secret()
    load_filter(rollout.dynamic_filter)
    url = url_of(settings.host, settings.port or "PORT") + "/TOKEN"
    token = "rollout.atropos.token" if settings.token else f"in {run_dir / 'atropos.json'} when the run listens"
    return (f"prompts: from Atropos' environments; start each with rollout_server_url {url}, base_url {url}/v1, "
            f"group_size {rollout.group_size}, max_batches_offpolicy {1 + rollout.max_staleness}, total_steps -1; "
            f"TOKEN is {token}")  # fmt: skip


def check_supervised_data(
    data: DataConfig, train: TrainConfig, seed: int, tokenizer: Tokenizer, limit: int
) -> list[str]:
    """`check_data` for supervised training: rows with their trained parts, and no reward."""

    def open_files(specs: list[str], shuffle: bool | None) -> SupervisedSource:
        return SupervisedSource(specs, data, train, seed, tokenizer, limit, shuffle=shuffle)

    sources = _in_files(data, open_files)
    return [note for name, source in sources.items() for note in _check_rows(data, train, source, name, tokenizer)]


def _in_files(data: DataConfig, open_files: Callable[[list[str], bool | None], Source]) -> dict[str, Source]:
    """Open the training rows, under "", and the held-out sets by name. Raises DataError."""
    sources = {} if data.source is not None else {"": open_files(data.prompts, None)}
    for index, eval_set in enumerate(data.eval_sets):
        try:
            sources[eval_set.name] = open_files([eval_set.path], False)
        except DataError as error:
            if error.field != "data.prompts":
                raise
            raise DataError(f"data.eval_sets[{index}].path", error.value, error.rule, error.hint) from error
    return sources


# Prompts


def _check_prompts(data: DataConfig, source: PromptSource, limit: int) -> list[str]:
    """Try the training rows; returns notes, one rendered prompt first.

    Args:
        limit: sequence length; a prompt of so many tokens leaves no space for a response.

    Raises:
        DataError: a row cannot be rendered or tokenised, its text is lost in the template, or it is too long.
    """
    tried, longest, skipped, shown = 0, 0, 0, ""
    for index in _spread(len(source)):
        prompt = _tried(source, index, templated=data.apply_chat_template)
        tried, n = tried + 1, len(prompt.tokens)
        shown = shown or _shown(prompt.text, len(prompt.tokens))
        if n > (data.max_prompt_tokens or n):
            skipped += 1
            continue
        longest = max(longest, n)
        if n >= limit:
            raise _too_long(prompt, limit)
    if skipped == tried:
        raise DataError("data.max_prompt_tokens", data.max_prompt_tokens, f"all {tried} prompts tried are "
                        "longer", "raise data.max_prompt_tokens, or use shorter prompts")  # fmt: skip
    of = "all" if tried == len(source) else f"{tried:,} of"
    return [
        f"the first prompt, as the model sees it: {shown}",
        f"prompts: {len(source):,} rows; {of} {len(source):,} tried, the longest has {longest:,} tokens, "
        f"{skipped:,} are skipped as longer than data.max_prompt_tokens",
    ]


class DrawnPrompts:
    """First prompts of `data.source`, from a separate object: the run starts again with a new one."""

    def __init__(self, data: DataConfig, seed: int, tokenizer: Tokenizer) -> None:
        source = open_prompts(data, seed, tokenizer)
        self._prompts = [source.next() for _ in range(DRAWN)]
        self.skipped = source.skipped

    def __len__(self) -> int:
        return len(self._prompts)

    def at(self, index: int) -> Prompt:
        """Prompt with draw number `index`."""
        return self._prompts[index]

    def labels(self) -> Iterator[tuple[str, Any]]:
        """(row, label) of each prompt."""
        return ((prompt.where, prompt.label) for prompt in self._prompts)


def _check_drawn(named: str, drawn: DrawnPrompts, limit: int) -> list[str]:
    """`_check_prompts` for the first prompts of `data.source`."""
    prompts = [drawn.at(index) for index in range(len(drawn))]
    longest = max(prompts, key=lambda prompt: len(prompt.tokens))
    if len(longest.tokens) >= limit:
        raise _too_long(longest, limit)
    return [
        f"the first prompt, as the model sees it: {_shown(prompts[0].text, len(prompts[0].tokens))}",
        f"prompts: {named}; {len(drawn)} drawn, the longest has {len(longest.tokens):,} tokens, "
        f"{drawn.skipped:,} were skipped as longer than data.max_prompt_tokens",
    ]


def _too_long(prompt: Prompt, limit: int) -> DataError:
    return DataError(prompt.where, f"{len(prompt.tokens)} tokens", f"the model supports at most {limit} tokens, "
                     "including the response", "remove the row, set data.max_prompt_tokens, or raise "
                     "rollout.max_total_tokens")  # fmt: skip


def _spread(rows: int) -> Iterable[int]:
    """Indices of the rows that are tried."""
    return range(rows) if rows <= TRIED else range(0, rows, -(-rows // TRIED))


def _tried(source: PromptSource, index: int, *, templated: bool) -> Prompt:
    """A prompt, rendered and tokenised."""
    row = source.row(index)
    prompt = source.tokenised(row)
    if templated:
        _refuse_lost_text(as_messages(row.prompt), prompt.text, row.where)
    return prompt


def _refuse_lost_text(messages: Sequence[Mapping[str, Any]], rendered: str, where: str) -> None:
    """Raise DataError if a template omits the user's last message: training would miss the question."""
    texts = [str(m["content"]).strip() for m in messages if m["role"] == "user" and m["content"]]
    if texts and texts[-1] not in rendered:
        raise DataError(where, texts[-1][:80], f"the chat template omits the user's text: {rendered[:200]!r}",
                        "use the model's own chat template, or plain text as content")  # fmt: skip


def _shown(text: str, tokens: int) -> str:
    cut = text if len(text) <= TRIED_CHARACTERS else f"{text[:TRIED_CHARACTERS]} ... ({len(text):,} characters)"
    return f"{cut!r}, {tokens:,} tokens"


# Rows of supervised training


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


def _check_rows(
    data: DataConfig, train: TrainConfig, source: SupervisedSource, name: str, tokenizer: Tokenizer
) -> list[str]:
    """Check every row, and try some as the trainer would. Returns notes; for training rows also the first row with its
    trained parts.

    Args:
        name: of the held-out set; empty for the training rows.

    Raises:
        DataError: a row cannot be trained, its text is lost in the template, it is too long, or all are left out.
    """
    for index in range(len(source)):
        row = source.rows.row(index)
        if data.messages_key is None:
            refuse_unlabelled(row.label, row.where, tokenizer)
        else:
            wanted_turns(as_messages(row.prompt), row.where, train.sft_loss_on)
    found, first = _Found(), ""
    for index in _spread(len(source)):
        shown = _try(data, source, index, found)
        first = first or shown
    if found.sequences == 0:
        raise DataError("train.sft_too_long", train.sft_too_long, f"all {found.tried} rows tried are too long",
                        "raise rollout.max_total_tokens or data.max_prompt_tokens, or use shorter rows")  # fmt: skip
    of = "all" if found.tried == len(source) else f"{found.tried:,} of"
    counts = (
        f"{name or 'training'}: {len(source):,} rows; {of} {len(source):,} tried: {found.sequences:,} sequences of "
        f"{found.tokens:,} tokens, {found.trained:,} of them trained; the longest has {found.longest:,} tokens "
        f"({found.longest_at}); {found.skipped:,} are skipped and {found.cut:,} cut as too long"
    )
    return [counts] if name else [f"the first row, trained parts in [[ ]]: {first}", counts]


def _try(data: DataConfig, source: SupervisedSource, index: int, found: _Found) -> str:
    """Count a row; returns its text with the trained parts marked."""
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
    if data.messages_key is not None or data.apply_chat_template:
        messages = as_messages(row.prompt)
        end = next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "assistant"), len(messages))
        _refuse_lost_text(messages[:end], last.text, row.where)
    return f"{_shown(last.marked(), len(last.tokens))}, {last.trained:,} trained"
