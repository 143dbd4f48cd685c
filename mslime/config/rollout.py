"""Section `rollout`: amount and source of generated data, staleness, agents and environments."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from mslime.config.algorithm import GROUP_RELATIVE, AlgorithmConfig
from mslime.config.base import OnError, PauseMode, Rule, Seconds, Section, Task, check_choice, refuse_first
from mslime.config.data import DataConfig
from mslime.config.errors import ConfigError
from mslime.config.keys import Secret, not_empty, read_secret
from mslime.config.plugins import found
from mslime.config.reward import RewardConfig

# Settings of runs whose rollouts come from Atropos' environments; `rollout` has their rules.

FUNCTION = "atropos"
"""`rollout.function` of such a run."""

GIVEN = "mslime.algorithms.given:advantages"
"""`algorithm.advantage` that uses advantages from an environment."""


class AtroposConfig(Section):
    """The server for Atropos' environments: the model below /v1, the trainer beside it (docs/environments.md)."""

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on, which environments connect to. An address other than loopback needs a "
        "token.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port; 0: any free port, which is logged.")
    token: Annotated[Secret, not_empty("rollout.atropos.token")] | None = Field(
        default=None,
        description="First part of every URL's path, because Atropos' environments send no key: env:NAME, file:PATH, "
        "or the token itself. null: random, in RUN/atropos.json.",
    )
    silent_s: Seconds = Field(
        default=600,
        description="Seconds without a request from any environment, while groups are needed, after which the rollout "
        "fails (rollout.on_error).",
    )
    keep_s: Seconds = Field(
        default=900,
        description="Seconds after its last reply for which an unused conversation is kept "
        "(ledger/dropped/unused_tokens).",
    )
    waiting: int = Field(
        default=256,
        ge=1,
        description="Maximum groups that wait because they arrived before they were needed. Further ones are dropped "
        "(rollout/atropos/no_room).",
    )

    def secret(self) -> str:
        """The token; empty if there is none. Raises ConfigError if it cannot be found."""
        return "" if self.token is None else read_secret(self.token, "rollout.atropos.token")

    @model_validator(mode="after")
    def _closed_to_others(self) -> Self:
        check_address("rollout.atropos", self.host, self.token is not None)
        return self


# Users' environments: their class, and limits of an episode.

Credit = Literal["auto", "episode", "steps"]
"""Relation of an environment's step rewards to the episode's reward."""

TurnsOf = Literal["text", "chat"]
"""Structure of an episode."""

TIMED_ADVANTAGES = ("reinforce_pp", "gae")
"""Advantages that use the time of a reward."""


class EnvironmentLimitsConfig(Section):
    """Limits of an episode in an environment, and the worker processes of environments."""

    turns: int = Field(
        default=16, ge=1, description="Maximum turns of the model; an unfinished episode then ends as it is."
    )
    call_s: Seconds = Field(default=60, description="Seconds for one call to the environment; a longer call fails.")
    episode_s: Seconds | None = Field(
        default=None,
        description="Seconds for all of an episode's calls to its environment, without the model's time; then the "
        "episode ends as it is. null: no limit.",
    )
    workers: int = Field(
        default=2, ge=1, le=65536, description="Worker processes for environments; each holds as many as needed."
    )
    memory_mib: float | None = Field(
        default=4096,
        gt=0,
        description="Maximum memory of a worker process, in MiB, beyond its memory after the class is imported; null: "
        "no limit.",
    )


# Settings of chat rollouts: limits of one, and the server for agents.


class AgentLimits(Section):
    """Limits of one chat rollout. A request beyond a limit is refused with an error that names it; the conversation is
    kept."""

    turns: int = Field(default=200, ge=1, description="Maximum replies of the model.")
    sequences: int = Field(
        default=32,
        ge=1,
        description="Maximum training samples of a rollout. An edited history, or a template that drops reasoning, "
        "starts a new one; the error counts the reasons (docs/agents.md).",
    )
    tokens: int = Field(default=1_000_000, ge=1, description="Maximum sampled tokens, over all sequences.")
    idle_s: Seconds = Field(
        default=3600,
        description="Seconds without a request after which an agent counts as dead: the rollout ends with an error "
        "(rollout.on_error).",
    )
    wall_s: Seconds = Field(
        default=4 * 3600,
        description="Seconds from the first request to the last accepted one. The tokens are kept; without a running "
        "request the rollout ends as with a dead agent.",
    )


class AgentServer(Section):
    """Server for OpenAI's and Anthropic's clients; it starts when a rollout requests its endpoint."""

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on, which agents connect to. An address other than loopback needs a token.",
    )
    port: int = Field(default=0, ge=0, le=65535, description="Port; 0: any free port.")
    token: Annotated[Secret, not_empty("rollout.server.token")] | None = Field(
        default=None,
        description="First part of every rollout's key, so that a proxy can refuse other requests: env:NAME, "
        "file:PATH, or the token itself.",
    )
    max_request_mib: int = Field(default=64, ge=1, le=4096, description="Largest request, in MiB.")

    def secret(self) -> str:
        """The token; empty if there is none. Raises ConfigError if it cannot be found."""
        return "" if self.token is None else read_secret(self.token, "rollout.server.token")

    @model_validator(mode="after")
    def _closed_to_others(self) -> Self:
        check_address("rollout.server", self.host, self.token is not None)
        return self


def check_address(section: str, host: str, has_token: bool) -> None:
    """Raise ConfigError for an address that other machines can reach without a token, or an unusable one."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not has_token and not loopback:
        raise ConfigError(f"{section}.token", None, f"other machines can reach the server at {host} without a token",
                          f"set a token (env:NAME), or leave {section}.host at 127.0.0.1")  # fmt: skip
    if host in ("", "0.0.0.0", "::", "*"):
        raise ConfigError(f"{section}.host", host, "is not an address that agents can connect to",
                          "set an address of this machine")  # fmt: skip


FUNCTIONS = ("single_turn", "environment")
"""Built-in rollout functions; entry points of the group `mslime.environments` name the others."""

DynamicFilter = Literal["none", "zero_variance"]
"""Built-in filters of groups, besides users' functions."""

OnStale = Literal["keep", "mask", "reroll", "drop"]
"""Treatment of tokens older than the bound, with `auto` resolved."""


class RolloutConfig(Section):
    """Generation: groups per step, sampling, staleness, and work in flight at a weight update."""

    groups_per_step: int = Field(default=32, le=1_000_000, ge=1, description="Prompt groups of one training step.")
    group_size: int = Field(default=8, le=1_000_000, ge=1, description="Responses per prompt.")
    function: str = Field(
        default="single_turn",
        description="single_turn, environment, atropos (docs/environments.md#atropos), or an async "
        "`module:function`(task, engine) of several turns, for training and evaluation (docs/rollout_functions.md).",
    )
    environment: str | None = Field(
        default=None,
        description="`module:Class` with reset(task) and step(action), sync or async, for function: environment "
        "(docs/environments.md).",
    )
    environment_options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of that class's constructor."
    )
    environment_turns: TurnsOf = Field(
        default="text",
        description="text: one sequence, to which observations are added (in the chat template with "
        "data.apply_chat_template). chat: messages; a template that drops earlier thinking starts a new sequence, "
        "unless rollout.thinking is keep.",
    )
    environment_limits: EnvironmentLimitsConfig = Field(default_factory=EnvironmentLimitsConfig)
    environment_credit: Credit = Field(
        default="auto",
        description="Rewards of an environment to use. episode: only the episode's. steps: also each step's, at the "
        "step's end (grpo: beside the episode's; reinforce_pp, gae: in its place). auto: steps for reinforce_pp and "
        "gae.",
    )
    atropos: AtroposConfig = Field(
        default_factory=AtroposConfig, description="Server for environments, for function: atropos."
    )
    on_error: OnError = Field(
        default="fail",
        description="If a rollout function raises or fails. fail: the run ends; a second failure after a resume drops "
        "the group. drop: the rollout is removed from its group; in an evaluation it counts as wrong.",
    )
    renderer: str | None = Field(
        default=None,
        description="Converts chat messages to tokens and back: a renderer of the package `renderers`, template, "
        "harmony (gpt-oss), or `module:function`(tokenizer, thinking). Default: the family's if it equals the "
        "checkpoint's template, else template (docs/agents.md).",
    )
    thinking: Literal["template", "keep"] = Field(
        default="template",
        description="Earlier reasoning in chats. template: as the chat template renders it; if it drops reasoning, "
        "each query starts a new sequence. keep: keep it, in one sequence.",
    )
    read_special_tokens: bool = Field(
        default=False,
        description="Parse special tokens in texts of users, tools and environments. false: a space splits them, so no "
        "tool can end the model's turn.",
    )
    limits: AgentLimits = Field(default_factory=AgentLimits, description="Limits of one chat rollout.")
    server: AgentServer = Field(default_factory=AgentServer, description="Server for agents of rollout functions.")
    max_staleness: int = Field(
        default=0,
        le=1_000_000,
        ge=0,
        description="0: on-policy and synchronous. 1: one step ahead. k: asynchronous, at most k versions old.",
    )
    over_sampling: float = Field(
        default=1.0,
        le=1000,
        ge=1,
        description="Spare groups: 1.5 starts half a step more than needed. Takes effect only if a filter can refuse "
        "groups (dynamic_filter) or max_staleness is 0.",
    )
    partial: bool = Field(default=True, description="Keep the tokens of aborted responses and continue them later.")
    on_stale: Literal["auto", "keep", "mask", "reroll", "drop"] = Field(
        default="auto",
        description="Tokens older than max_staleness. keep: train under the correction, up to correction.max_age. "
        "mask: do not train. reroll: generate again. drop: drop the group. auto: keep with max_staleness > 0 and a "
        "correction, else mask.",
    )
    dynamic_filter: DynamicFilter | str = Field(
        default="none",
        description="zero_variance drops groups whose rewards are all equal; or `module:function`(Group) -> bool.",
    )
    mask_truncated: bool = Field(
        default=False,
        description="Do not train responses cut at a length limit (DAPO's overlong filtering, "
        "ledger/masked/truncated_tokens); they count in their group's advantages.",
    )
    max_response_tokens: int = Field(
        default=1024, ge=1, description="Longest response; longer ones are truncated, and counted."
    )
    max_total_tokens: int | None = Field(
        default=None, ge=1, description="Prompt + response limit; default: the model's."
    )
    temperature: float = Field(
        default=1.0,
        ge=0.001,  # SGLang samples greedily below 1e-6, and log-probs over so small a number overflow
        le=1000,
        description="Sampling temperature; log-probs are computed at it, too.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Draw from the most likely tokens with this total probability, and train the distribution over "
        "them. Below 1 it needs top_k.",
    )
    top_k: int = Field(
        default=-1,
        ge=-1,
        description="Draw from this many most likely tokens, 2 to 4096 (sglang.sampling_mask_max_tokens), and train "
        "likewise. -1: off.",
    )
    min_p: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Draw from tokens with at least this fraction of the most likely token's probability, and train "
        "likewise. Above 0 it needs top_k; 0: off.",
    )
    stop: list[str] = Field(default_factory=list, description="Texts that end a response.")
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list[int], description="Token ids that end a response, besides the model's own."
    )
    concurrency: int = Field(default=256, le=1_000_000, ge=1, description="Requests in flight per engine.")
    managers: int = Field(
        default=1,
        le=1024,
        ge=1,
        description="Rollout processes; each has a share of the engines, its own `reward.workers`, environments and "
        "the next port after `rollout.server.port`. A core reads 200,000 tokens/s or more (docs/clusters.md).",
    )
    pause_mode: PauseMode = Field(
        default="abort",
        description="Treatment of running requests in a weight update with max_staleness > 0. abort: continue as new "
        "requests. retract: prefill again, old tokens get new routes. in_place: continue on the old cache.",
    )

    @field_validator("temperature", mode="before")
    @classmethod
    def _refuse_greedy(cls, value: object) -> object:
        if value == 0:
            raise ConfigError("rollout.temperature", value, "greedy responses of a group are identical, so there is "
            "nothing to learn",
                              "set 1.0; held-out sets have their own temperature")  # fmt: skip
        return value

    def longest(self, max_positions: int) -> int:
        """Most tokens of prompt and response together; `max_positions` is the model's limit."""
        return self.max_total_tokens or max_positions

    @property
    def spare_groups(self) -> int:
        """Groups begun beyond what the steps need, see `over_sampling`."""
        if self.max_staleness > 0 and self.dynamic_filter == "none":
            return 0
        return int((self.over_sampling - 1.0) * self.groups_per_step)

    @property
    def truncated(self) -> bool:
        """Whether sampling is truncated to a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def check_rollout(
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    data: DataConfig,
    reward: RewardConfig,
    *,
    task: Task,
    servers: int,
    colocated: bool,
) -> None:
    """Reject rollouts that cannot run, teach nothing, or need engines that are missing.

    Args:
        servers: engines of the run.
        colocated: engines and trainer take turns on the same GPUs.

    Raises:
        ConfigError: the first broken rule.
    """
    if colocated:
        _check_turns(rollout)
    if task == "rl":
        refuse_first("rollout", _groups(rollout, algorithm.advantage))
    managers, port = rollout.managers, rollout.server.port
    refuse_first("rollout", [
        (rollout.top_k == 0, "top_k", 0, "leaves no token to draw", "use -1 to turn it off"),
        (rollout.top_k == 1, "top_k", 1, "leaves one token, always with probability 1, so there is nothing to learn",
         "use 2 or more, or -1 to turn it off"),
        (managers > servers, "managers", managers, f"each manager needs an engine, and there are {servers}",
         "lower it, or raise sglang.num_engines"),
        (port and port + managers - 1 > 65535, "server.port", port,
         f"each of the {managers} managers (rollout.managers) takes the next port, and there is none after 65535",
         "choose a lower port, or 0 for free ones"),
    ])  # fmt: skip
    check_choice("rollout.dynamic_filter", rollout.dynamic_filter, get_args(DynamicFilter))
    check_choice("rollout.function", rollout.function, (*FUNCTIONS, *found("mslime.environments")))
    _check_environment(rollout, algorithm, data)
    _check_atropos(rollout, algorithm, data, reward, task)


def _check_turns(rollout: RolloutConfig) -> None:
    """Check settings of colocated runs: generation for later steps is interrupted at the end of each turn."""
    refuse_first("rollout", [
        (rollout.max_staleness > 1, "max_staleness", rollout.max_staleness,
         "with cluster.placement: colocated nothing is generated while the trainer works; one step ahead keeps the "
         "engines busy to the end of their turn, and more only makes tokens older",
         "set it to 1 or 0, or give engines their own GPUs (cluster.placement: separate)"),
        (rollout.max_staleness and rollout.pause_mode != "abort", "pause_mode", rollout.pause_mode,
         "colocated engines cannot keep requests when they release their memory, and with rollout.max_staleness 1 some "
         "are running then", "set pause_mode: abort, the default, or max_staleness: 0"),
    ])  # fmt: skip


def _groups(rollout: RolloutConfig, advantage: str) -> Iterator[Rule]:
    """Settings that groups of one do not support."""
    alone = rollout.group_size < 2
    yield (
        advantage in GROUP_RELATIVE and alone, "group_size", rollout.group_size,
        f"{advantage} compares the responses of a group; in a group of one every advantage is 0",
        "use at least 2 (8 is common), or algorithm.advantage: reinforce_pp",
    )  # fmt: skip
    yield (
        rollout.dynamic_filter == "zero_variance" and alone, "dynamic_filter", rollout.dynamic_filter,
        "the rewards of a group of one are all equal, so every group would be dropped and no step would be complete",
        "use none, or a rollout.group_size of at least 2",
    )  # fmt: skip


def _check_environment(rollout: RolloutConfig, algorithm: AlgorithmConfig, data: DataConfig) -> None:
    """Check that an environment has its rollout function, and its rewards an advantage that uses them."""
    environment, credit, usable = rollout.environment, rollout.environment_credit, ("grpo", *TIMED_ADVANTAGES)
    refuse_first("rollout", [(
        (rollout.function == "environment") != (environment is not None), "environment", environment,
        f"must be set together with rollout.function: environment (it is {rollout.function!r})", "set both, or neither",
    )])  # fmt: skip
    if environment is not None:
        check_choice("rollout.environment", environment, ())
    chat, timed = rollout.environment_turns == "chat", algorithm.advantage in TIMED_ADVANTAGES and credit != "episode"
    refuse_first("rollout", [
        (environment is None and rollout.environment_options, "environment_options", rollout.environment_options,
         "has no effect without rollout.environment", "set rollout.environment, or remove it"),
        (chat and not data.apply_chat_template, "environment_turns", "chat",
         "needs messages, and data.apply_chat_template is false", "set it to true, or use text"),
        (chat and timed and algorithm.credit != "turns", "environment_turns", "chat",
         f"an episode may be several sequences, and algorithm.advantage {algorithm.advantage} spreads its reward over "
         "the steps of all of them", "set algorithm.credit: turns, or rollout.environment_credit: episode"),
        (credit == "steps" and algorithm.advantage not in usable, "environment_credit", "steps",
         f"algorithm.advantage {algorithm.advantage} uses only rewards of whole rollouts",
         f"use episode, or one of the advantages {', '.join(usable)}"),
    ])  # fmt: skip


def _check_atropos(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, data: DataConfig, reward: RewardConfig, task: Task
) -> None:
    """Reject settings that Atropos' environments do not support, and settings that have no effect without them."""
    if rollout.function != FUNCTION:
        if algorithm.advantage == GIVEN:
            raise ConfigError("algorithm.advantage", GIVEN, "uses advantages from Atropos' environments, and "
                              f"rollout.function is {rollout.function!r}",
                              f"set rollout.function: {FUNCTION}, or another advantage")  # fmt: skip
        return
    for setting, value, rule, hint in (
        ("data.prompts", data.prompts, "Atropos' environments provide the prompts", "remove it"),
        ("data.source", data.source, "Atropos' environments provide the prompts", "remove it"),
        ("data.eval_sets", [s.name for s in data.eval_sets], "Atropos' environments evaluate by themselves, and cannot "
         "use rows of a run", "remove them; see steps_per_eval of the environment"),
        ("rollout.managers", rollout.managers - 1 and rollout.managers, "environments can submit groups to one manager "
         "only", "set it to 1"),
        ("rollout.on_stale", rollout.on_stale if rollout.on_stale == "reroll" else None, "an environment cannot repeat "
         "a single rollout", "use keep, mask or drop"),
        ("reward", "" if reward == RewardConfig() else reward.kind, "Atropos' environments score "
         "by themselves", "remove it"),
        ("train.task", task if task == "sft" else None, "supervised training reads files",
         "use train.task: rl"),
    ):  # fmt: skip
        if value:
            raise ConfigError(setting, value, f"{rule} (rollout.function: {FUNCTION})", hint)
