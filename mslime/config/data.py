"""Settings of prompts and held-out sets (`data`): where rows come from, in which order, and how they become tokens."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from mslime.config.base import Section
from mslime.config.reward import ScoringConfig


class EvalSetConfig(Section):
    """One held-out set."""

    name: str = Field(description="Its metrics are eval/NAME/...: letters, digits and _ . @ + -.")
    path: str = Field(description="JSONL or parquet, optionally sliced: `file@[0:200]`.")
    samples_per_prompt: int = Field(
        default=1, ge=1, description="n: responses per prompt; pass@k is reported for k <= n."
    )
    temperature: float = Field(default=0.0, le=1000, ge=0, description="Of sampling; 0 is greedy.")
    max_response_tokens: int | None = Field(default=None, ge=1, description="Default: rollout.max_response_tokens.")
    reward: ScoringConfig | None = Field(
        default=None, description="How this set is scored; default: as in training, without penalties."
    )


class DataConfig(Section):
    """Prompts in, in which order, and how they become tokens."""

    prompts: list[str] = Field(
        default_factory=list, description="JSONL or parquet files, each optionally sliced: `file@[a:b]`."
    )
    source: str | None = Field(
        default=None,
        description="rl: `module:function`(data, seed) -> an object that is iterated over for prompts, instead of the "
        "files (docs/extending.md).",
    )
    prompt_key: str = Field(default="prompt", description="A string, or a list of chat messages.")
    label_key: str | None = Field(default="label", description="Handed to the reward; null when there is none.")
    messages_key: str | None = Field(
        default=None,
        description="sft: key of a list of {role, content} messages, rendered with the chat template; the assistant's "
        "turns are trained. Stands in for prompt_key and label_key.",
    )
    tools_key: str | None = Field(
        default=None,
        description="Key of a list of tool definitions, or of one written as JSON, handed to the chat template and to "
        "rollout functions; null: none.",
    )
    metadata_key: str | None = Field(
        default=None, description="Key of an object that rewards and filters get with the sample; null: none."
    )
    apply_chat_template: bool = Field(
        default=False,
        description="Render prompts with the tokenizer's chat template; a plain string becomes a user's message.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Handed to the template, for example {enable_thinking: false}."
    )
    shuffle: bool = Field(
        default=True,
        description="Draw rows in an order that follows from the seed, anew in each pass; else in the files' order.",
    )
    max_prompt_tokens: int | None = Field(
        default=None, ge=1, description="Longer prompts are skipped, and counted in data/skipped_rows."
    )
    eval_sets: list[EvalSetConfig] = Field(
        default_factory=list[EvalSetConfig], description="Held-out sets, each a mapping of these."
    )
