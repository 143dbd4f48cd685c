"""Settings of prompts and held-out sets (`data`): source, order and tokenisation of rows."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from mslime.config.base import Section, check_choice, refuse_first
from mslime.config.errors import ConfigError
from mslime.config.reward import ScoringConfig, check_scoring
from mslime.config.train import TrainConfig


class EvalSetConfig(Section):
    """One held-out set."""

    name: str = Field(description="Name in the metrics eval/NAME/...; letters, digits and _ . @ + -.")
    path: str = Field(description="JSONL or parquet, optionally sliced: `file@[0:200]`.")
    samples_per_prompt: int = Field(
        default=1, ge=1, description="n: responses per prompt; pass@k is reported for k <= n."
    )
    temperature: float = Field(default=0.0, le=1000, ge=0, description="Sampling temperature; 0 is greedy.")
    max_response_tokens: int | None = Field(default=None, ge=1, description="Default: rollout.max_response_tokens.")
    reward: ScoringConfig | None = Field(
        default=None, description="Scoring of this set; default: as in training, without penalties."
    )


class DataConfig(Section):
    """Sources of prompts, their order, and how they become tokens."""

    prompts: list[str] = Field(
        default_factory=list, description="JSONL or parquet files, each optionally sliced: `file@[a:b]`."
    )
    source: str | None = Field(
        default=None,
        description="rl: `module:function`(data, seed) -> iterable of prompts, in place of files (docs/extending.md).",
    )
    prompt_key: str = Field(default="prompt", description="Key of the prompt: a string, or a list of chat messages.")
    label_key: str | None = Field(default="label", description="Key of the label for the reward; null: none.")
    messages_key: str | None = Field(
        default=None,
        description="sft: key of a list of {role, content} messages for the chat template, in place of prompt_key and "
        "label_key. The assistant's turns are trained.",
    )
    tools_key: str | None = Field(
        default=None,
        description="Key of a list of tool definitions (or the same as JSON) for the chat template and rollout "
        "functions; null: none.",
    )
    metadata_key: str | None = Field(
        default=None, description="Key of an object that is passed to rewards and filters with the sample; null: none."
    )
    apply_chat_template: bool = Field(
        default=False,
        description="Render prompts with the tokenizer's chat template; a plain string becomes a user's message.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the template, for example {enable_thinking: false}."
    )
    shuffle: bool = Field(
        default=True,
        description="Shuffle rows by the seed, differently in each pass; else keep the files' order.",
    )
    max_prompt_tokens: int | None = Field(
        default=None, ge=1, description="Longer prompts are skipped, and counted in data/skipped_rows."
    )
    eval_sets: list[EvalSetConfig] = Field(
        default_factory=list[EvalSetConfig], description="Held-out sets, each a mapping of these keys."
    )


def check_data(data: DataConfig, train: TrainConfig, *, own_prompts: bool) -> None:
    """Reject rows that the task does not read, and held-out sets that cannot be scored or have the same name.

    Args:
        own_prompts: the rollout brings its own prompts.

    Raises:
        ConfigError: the first broken rule.
    """
    _check_messages(data, train)
    if data.source is not None:
        check_choice("data.source", data.source, ())
    refuse_first("data", [
        (data.source is not None and train.task == "sft", "source", data.source, "supervised training reads files",
         "write the rows to a file, and name it in data.prompts"),
        (not data.prompts and data.source is None and not own_prompts, "prompts", [],
         "at least one file of prompts is needed",
         "name a .jsonl or .parquet file in the YAML file, or with --data.prompts"),
    ])  # fmt: skip
    names = [s.name for s in data.eval_sets]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise ConfigError("data.eval_sets", twice, "names of evaluation sets must differ", "rename one of them")
    for i, s in enumerate(data.eval_sets):
        if s.reward:
            check_scoring(f"data.eval_sets[{i}].reward", s.reward)
        usable = re.sub(r"[^a-zA-Z0-9_.@+-]+", "_", s.name) or "test"
        refuse_first("data", [
            (re.fullmatch(r"[\w.@+-]+", s.name) is None, f"eval_sets[{i}].name", s.name,
             "must consist of letters, digits and _ . @ + -",
             f"it becomes the metrics eval/NAME/...; write for example {usable}"),
            (s.samples_per_prompt > 1 and s.temperature == 0, f"eval_sets.{s.name}.temperature", 0.0,
             f"{s.samples_per_prompt} greedy responses would be equal, so pass@k is meaningless",
             "set a temperature, or samples_per_prompt: 1"),
        ])  # fmt: skip


def _check_messages(data: DataConfig, train: TrainConfig) -> None:
    """Reject settings that have no effect on rows of messages."""
    messages = data.messages_key
    refuse_first("data", [(
        data.tools_key is not None and messages is None and not data.apply_chat_template, "tools_key", data.tools_key,
        "tools need a chat template, and data.apply_chat_template is "
        "false", "set it to true, or remove data.tools_key",
    )])  # fmt: skip
    refuse_first("train", [(
        messages is None and train.sft_loss_on != "all", "sft_loss_on", train.sft_loss_on,
        "applies to conversations, and data.messages_key is not set", "set data.messages_key, or remove it",
    )])  # fmt: skip
    refuse_first("data", [
        (messages is not None and train.task == "rl", "messages_key", messages, "conversations are supported for "
        "train.task: sft only",
         "name the prompt's messages with data.prompt_key, and set data.apply_chat_template: true"),
        (messages is not None and data.max_prompt_tokens is not None, "max_prompt_tokens", data.max_prompt_tokens,
         "a conversation has no prompt to measure", "set train.sft_too_long, and rollout.max_total_tokens"),
    ])  # fmt: skip
