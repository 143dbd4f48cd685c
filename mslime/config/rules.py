"""Rules that span sections of the run configuration. Each refuses one silent corruption or one senseless pair.

Those of layout and machines are in `layout_rules`, those of a section's own feature beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from mslime.config.algorithm import GROUP_RELATIVE
from mslime.config.atropos import FUNCTION, check_atropos_settings
from mslime.config.choices import check_choice, check_url
from mslime.config.colocated import check_colocated
from mslime.config.engines import MASK_LIMIT, check_teacher
from mslime.config.environments import check_environment_settings
from mslime.config.errors import ConfigError
from mslime.config.fp8 import check_fp8
from mslime.config.layout_rules import check_layout
from mslime.config.lora import check_lora
from mslime.config.pairs import check_pairs
from mslime.config.reward import check_reward

if TYPE_CHECKING:
    from mslime.config.schema import RunConfig


def check_run(config: RunConfig) -> None:
    """Raise ConfigError for the first broken rule."""
    config.megatron.layout(config.cluster.trainer_ranks)
    for rule in _RULES:
        rule(config)


def _group_size(config: RunConfig) -> None:
    advantage = config.algorithm.advantage
    if config.train.task == "rl" and advantage in GROUP_RELATIVE and config.rollout.group_size < 2:
        raise ConfigError(
            "rollout.group_size",
            config.rollout.group_size,
            f"{advantage} compares the responses of a group; in a group of one every advantage is 0",
            "use at least 2 (8 is common), or algorithm.advantage: reinforce_pp",
        )


def _urls(config: RunConfig) -> None:
    for field, urls in (("sglang.urls", config.sglang.urls), ("teacher.urls", config.teacher.urls)):
        for url in urls:
            check_url(field, url, "http://10.0.0.5:30000")


def _filtered_groups(config: RunConfig) -> None:
    r = config.rollout
    if config.train.task == "rl" and r.dynamic_filter == "zero_variance" and r.group_size == 1:
        raise ConfigError(
            "rollout.dynamic_filter",
            r.dynamic_filter,
            "the rewards of a group of one are all equal, so every group would be dropped and no step would ever fill",
            "use none, or a rollout.group_size of at least 2",
        )


def _advantage(config: RunConfig) -> None:
    algorithm = config.algorithm
    if algorithm.advantage == "none" and algorithm.opd_coef == 0:
        raise ConfigError(
            "algorithm.advantage",
            "none",
            "every advantage would be 0, so nothing would be learnt from rewards",
            "distil a teacher (algorithm.opd_coef), or choose another advantage",
        )


def _critic(config: RunConfig) -> None:
    critic, train = config.critic, config.train
    if not config.has_critic:
        defaults = type(critic)()
        given = [name for name in type(critic).model_fields if getattr(critic, name) != getattr(defaults, name)]
        if given:
            raise ConfigError(
                f"critic.{given[0]}",
                getattr(critic, given[0]),
                f"algorithm.advantage {config.algorithm.advantage} and train.task {train.task} have no critic",
                "set algorithm.advantage: gae, or remove the section",
            )
        return
    if critic.warmup_steps >= train.num_steps:
        raise ConfigError(
            "critic.warmup_steps",
            critic.warmup_steps,
            f"must be below train.num_steps = {train.num_steps}, or the policy is never trained",
            "shorten the warm-up, or raise train.num_steps",
        )
    if critic.min_lr > critic.lr:
        raise ConfigError("critic.min_lr", critic.min_lr, f"must not exceed critic.lr = {critic.lr}", "lower it")
    total = train.num_steps * train.optimizer_steps_per_rollout
    if critic.lr_warmup_steps >= total > 1:
        raise ConfigError(
            "critic.lr_warmup_steps",
            critic.lr_warmup_steps,
            f"must be below the run's {total} optimizer steps",
            "shorten it, or raise train.num_steps",
        )


def _sampling(config: RunConfig) -> None:
    """What SGLang 0.5.23 reports of a draw from a part of the vocabulary (managers/scheduler.py, layers/sampler.py)."""
    r, sglang = config.rollout, config.sglang.extra
    if r.top_k == 0:
        raise ConfigError("rollout.top_k", 0, "no token would be left to draw", "use -1 to turn it off")
    if r.top_k == 1:
        raise ConfigError(
            "rollout.top_k", 1, "the only token left always has probability 1, so nothing would be learnt",
            "use 2 or more, or -1 to turn it off",
        )  # fmt: skip
    if not r.truncated:
        return
    if r.top_k == -1:
        given, value = ("top_p", r.top_p) if r.top_p < 1 else ("min_p", r.min_p)
        raise ConfigError(
            "rollout.top_k", -1,
            f"with {given}: {value:g} the trainer needs the ids that each token was drawn from, and SGLang returns "
            "them only where their number is bounded",
            f"set rollout.top_k, for example to {MASK_LIMIT}: {given} then decides in nearly every draw",
        )  # fmt: skip
    limit = sglang.get("sampling_mask_max_tokens") or MASK_LIMIT
    if r.top_k > limit:
        raise ConfigError(
            "rollout.top_k", r.top_k, f"SGLang returns at most {limit} of the ids that a token was drawn from",
            "lower it, or raise sglang.sampling_mask_max_tokens",
        )  # fmt: skip
    fixed = next((n for n in ("enable_deterministic_inference", "rl_on_policy_target") if sglang.get(n)), None)
    if r.min_p > 0 and fixed is not None:
        raise ConfigError(
            "rollout.min_p", r.min_p, f"SGLang has no min-p draws from a seed, which sglang.{fixed} asks for",
            f"set it to 0, or remove sglang.{fixed}",
        )  # fmt: skip


def _named_functions(config: RunConfig) -> None:
    check_choice("rollout.dynamic_filter", config.rollout.dynamic_filter, ("none", "zero_variance"))
    check_choice("rollout.function", config.rollout.function, ("single_turn", "environment", FUNCTION))
    for setting, named in (
        ("data.source", config.data.source), ("hooks.step", config.hooks.step), ("hooks.sample", config.hooks.sample),
    ):  # fmt: skip
        if named is not None:
            check_choice(setting, named, ())
    if config.hooks.sample is not None and config.train.task == "sft":
        raise ConfigError("hooks.sample", config.hooks.sample, "supervised training generates no samples",
                          "use hooks.step, or leave it out")  # fmt: skip
    if config.data.source is not None and config.train.task == "sft":
        raise ConfigError("data.source", config.data.source, "supervised training reads files",
                          "write the rows to a file, and name it in data.prompts")  # fmt: skip


def _steps(config: RunConfig) -> None:
    t, r = config.train, config.rollout
    if t.min_lr > t.lr:
        raise ConfigError("train.min_lr", t.min_lr, f"must not exceed train.lr = {t.lr}", "lower it")
    total = config.policy_steps * t.optimizer_steps_per_rollout
    if t.lr_warmup_steps >= total > 1:
        raise ConfigError(
            "train.lr_warmup_steps",
            t.lr_warmup_steps,
            f"must be below the policy's {total} optimizer steps",
            "shorten the warm-up, or raise train.num_steps",
        )
    if t.task == "rl" and r.groups_per_step % t.optimizer_steps_per_rollout:
        raise ConfigError(
            "train.optimizer_steps_per_rollout",
            t.optimizer_steps_per_rollout,
            f"must divide rollout.groups_per_step = {r.groups_per_step}",
            "choose a divisor",
        )


def _sets(config: RunConfig) -> None:
    if not config.data.prompts and config.data.source is None and config.rollout.function != FUNCTION:
        raise ConfigError(
            "data.prompts",
            [],
            "at least one file of prompts is needed",
            "name a .jsonl or .parquet file in the run's file, or give --data.prompts",
        )
    names = [s.name for s in config.data.eval_sets]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise ConfigError("data.eval_sets", twice, "names of evaluation sets must differ", "rename one of them")
    for i, s in enumerate(config.data.eval_sets):
        if re.fullmatch(r"[\w.@+-]+", s.name) is None:
            raise ConfigError(
                f"data.eval_sets[{i}].name",
                s.name,
                "a name is letters, digits and _ . @ + -",
                "it becomes the metrics eval/NAME/...; write for example "
                + (re.sub(r"[^a-zA-Z0-9_.@+-]+", "_", s.name) or "test"),
            )
        if s.samples_per_prompt > 1 and s.temperature == 0:
            raise ConfigError(
                f"data.eval_sets.{s.name}.temperature",
                0.0,
                f"{s.samples_per_prompt} greedy responses would be equal, so pass@k means nothing",
                "set a temperature, or samples_per_prompt: 1",
            )


def _supervised(config: RunConfig) -> None:
    """Settings of rows of messages that would change nothing."""
    data, train = config.data, config.train
    if data.tools_key is not None and data.messages_key is None and not data.apply_chat_template:
        rule = "tools are offered by a chat template, and none is used"
        raise ConfigError("data.tools_key", data.tools_key, rule, "set data.apply_chat_template, or remove it")
    if data.messages_key is None:
        if train.sft_loss_on != "all":
            rule = "acts on conversations, and data.messages_key names none"
            raise ConfigError("train.sft_loss_on", train.sft_loss_on, rule, "set data.messages_key, or remove it")
        return
    if train.task == "rl":
        raise ConfigError(
            "data.messages_key", data.messages_key, "conversations are for train.task: sft",
            "name the prompt's messages with data.prompt_key, and set data.apply_chat_template: true",
        )  # fmt: skip
    if data.max_prompt_tokens is not None:
        raise ConfigError(
            "data.max_prompt_tokens", data.max_prompt_tokens, "a conversation has no prompt to measure",
            "set train.sft_too_long, and rollout.max_total_tokens",
        )  # fmt: skip


def _keep_best(config: RunConfig) -> None:
    """A metric of a held-out set that is never evaluated would keep nothing, in silence."""
    metric, sets = config.checkpoint.keep_best, [s.name for s in config.data.eval_sets]
    if metric is None or not metric.startswith("eval/"):
        return
    name = metric.removeprefix("eval/").rpartition("/")[0]
    if name not in sets:
        raise ConfigError(
            "checkpoint.keep_best", metric, f"names no set of data.eval_sets: {sets}",
            f"write for example eval/{sets[0] if sets else 'NAME'}/accuracy",
        )  # fmt: skip
    losses, minimum = ("nll", "perplexity"), config.checkpoint.keep_best_is == "min"
    is_loss, supervised = metric.rpartition("/")[2] in losses, config.train.task == "sft"
    if is_loss != supervised:
        rule = f"train.task {config.train.task} measures no such thing on held-out sets"
        best = f"eval/{name}/nll and checkpoint.keep_best_is: min" if supervised else f"eval/{name}/accuracy"
        raise ConfigError("checkpoint.keep_best", metric, rule, f"write for example {best}")
    if is_loss and not minimum:
        raise ConfigError("checkpoint.keep_best_is", "max", f"the best {metric} is the lowest", "set it to min")
    if config.observe.eval_every == 0:
        raise ConfigError(
            "checkpoint.keep_best", metric, "needs evaluations, and observe.eval_every is 0", "set observe.eval_every"
        )


def _managers(config: RunConfig) -> None:
    """Each rollout manager has engines of its own, and a port if there is a fixed one."""
    managers, server = config.rollout.managers, config.rollout.server
    if managers > config.sglang.servers:
        raise ConfigError(
            "rollout.managers",
            managers,
            f"each manager needs an engine, and there are {config.sglang.servers}",
            "lower it, or raise sglang.num_engines",
        )
    if server.port and server.port + managers - 1 > 65535:
        raise ConfigError(
            "rollout.server.port",
            server.port,
            f"each of the {managers} managers (rollout.managers) takes the next port, and there is none after 65535",
            "choose a lower port, or 0 for free ones",
        )


def _comparison(config: RunConfig) -> None:
    asked = config.weights.verify
    if asked in ("first", "always") and config.train.task == "rl" and not config.compares_weights:
        raise ConfigError(
            "weights.verify", asked, "engines say what they hold by what they recorded, and weights.loader is model",
            "set weights.verify: probe, or leave weights.loader alone",
        )  # fmt: skip


def _rejoin(config: RunConfig) -> None:
    config.sglang.check_rejoin(config.colocated, config.syncs_adapters)
    if config.teacher.rejoin != "sync":
        raise ConfigError("teacher.rejoin", config.teacher.rejoin, "a teacher's weights never change", "remove it")


_RULES: tuple[Callable[[RunConfig], None], ...] = (
    _supervised,
    _urls,
    check_pairs,
    check_colocated,
    _keep_best,
    check_layout,
    _comparison,
    _group_size,
    _filtered_groups,
    _advantage,
    check_teacher,
    _critic,
    check_lora,
    _rejoin,
    check_fp8,
    _sampling,
    _managers,
    _named_functions,
    check_reward,
    check_environment_settings,
    check_atropos_settings,
    _steps,
    _sets,
)
