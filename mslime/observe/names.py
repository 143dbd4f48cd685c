"""Every metric that a run may record: stable name, unit, meaning, denominator. `{...}` is a variable part of a name.

This list is the only definition. `MetricsLogger.log` asserts that each name is in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple


class Metric(NamedTuple):
    """Definition of a metric.

    Attributes:
        unit: empty for shares, ratios and rewards.
        meaning: description.
        per: denominator of a mean or share: the name of the metric that counts it, or words. Empty: not a mean.
        over_steps: how the numbers of a rollout's optimizer steps are merged (`over_optimizer_steps`); a mean is
            weighted by `per` if that is counted.
    """

    unit: str
    meaning: str
    per: str = ""
    over_steps: Literal["mean", "sum", "max", "last"] = "mean"


TOKENS = "loss/tokens"
WEIGHTS = "algorithm.loss_aggregation"
"""Denominator of the loss's terms: the sum of the weights of all tokens."""

_SUPPORTED = "rollout/support_tokens"

METRICS: dict[str, Metric] = {
    "step": Metric("", "steps done; 0 is the state before training"),
    "version": Metric("", "weight version after the step"),
    "time": Metric("s", "seconds since the epoch at the end of the step"),
    "reward/mean": Metric("", "mean reward of the trained rollouts", "rollout/rollouts"),
    "reward/std": Metric("", "standard deviation of rewards", "rollout/rollouts"),
    "reward/min": Metric("", "lowest reward of a rollout"),
    "reward/max": Metric("", "highest reward of a rollout"),
    "reward/zero_variance_groups": Metric("groups", "groups with equal rewards"),
    "reward/zero_variance_share": Metric("", "share of groups with equal rewards", "rollout/groups"),
    "reward/group_std": Metric("", "mean standard deviation within a group", "rollout/groups"),
    "reward/source/{source}/mean": Metric("", "mean reward of one data source", "reward/source/{source}/rollouts"),
    "reward/source/{source}/rollouts": Metric("rollouts", "rollouts of one data source"),
    "reward/errors": Metric("responses", "whose reward raised, hung, was not finite or took too long"),
    "reward/{part}/mean": Metric("", "mean of a part of the reward, or of a penalty", "rollouts that have it"),
    "user/{name}": Metric("", "returned by your reward, loss or hook", "rollouts, tokens or steps that have it"),
    "advantage/mean": Metric("", "mean, as used by the loss", "trained tokens of the rollout"),
    "advantage/std": Metric("", "standard deviation", "trained tokens of the rollout"),
    "advantage/min": Metric("", "lowest value of a trained token"),
    "advantage/max": Metric("", "highest value of a trained token"),
    "eval/{set}/accuracy": Metric("", "share with a reward above 0.5", "responses to a held-out set"),
    "eval/{set}/reward": Metric("", "mean reward", "responses to a held-out set"),
    "eval/{set}/pass@{k}": Metric("", "chance that one of k responses is right", "prompts of a held-out set"),
    "eval/{set}/response_len_mean": Metric("tokens", "mean response length", "responses to a held-out set"),
    "eval/{set}/truncated": Metric("", "share cut at the length limit", "responses to a held-out set"),
    "eval/{set}/seconds": Metric("s", "duration of the evaluation, beside training or not"),
    "eval/{set}/nll": Metric("nats", "negative log-likelihood (supervised)", "eval/{set}/tokens"),
    "eval/{set}/perplexity": Metric("", "exp of eval/{set}/nll"),
    "eval/{set}/tokens": Metric("tokens", "tokens of a held-out set inside its loss (supervised)"),
    "data/skipped_rows": Metric("rows", "skipped as too long so far; sequences with sft_loss_on each"),
    "data/cut_rows": Metric("rows", "cut as too long so far; sequences with sft_loss_on each"),
    "loss/tokens": Metric("tokens", "trained tokens, including those that a correction rejects", "", "sum"),
    "loss/sequences": Metric("sequences", "sequences with a trained token", "", "sum"),
    "loss/total": Metric("", "the minimised loss", WEIGHTS),
    "loss/policy": Metric("", "corrected policy-gradient term", WEIGHTS),
    "loss/kl": Metric("nats", "KL to the reference over the support, before its coefficient", WEIGHTS),
    "loss/entropy": Metric("nats", "entropy over the support, before its coefficient", WEIGHTS),
    "loss/nll": Metric("nats", "negative log-likelihood (supervised)", WEIGHTS),
    "loss/value": Metric("", "half the squared error of the critic", WEIGHTS),
    "loss/value_clip_fraction": Metric("", "share whose value left the clipping band", TOKENS),
    "loss/explained_variance": Metric("", "1 - var(return - value) / var(return)", TOKENS),
    "loss/clip_fraction": Metric("", "share of tokens that the loss's trust region bounded", TOKENS),
    "loss/clip_fraction_below": Metric("", "share bounded on the lower side: less likely than before", TOKENS),
    "loss/clip_fraction_above": Metric("", "share bounded on the upper side: more likely than before", TOKENS),
    "loss/ppo_kl": Metric("nats", "KL(policy before the update || updated), k3 estimate", TOKENS),
    "loss/ratio_p01": Metric("", "1st percentile of r, the loss's ratio", TOKENS),
    "loss/ratio_p50": Metric("", "median of r", TOKENS),
    "loss/ratio_p99": Metric("", "99th percentile of r", TOKENS),
    "loss/tokens_age_{age}": Metric("tokens", "trained tokens, by age in versions; 8: 8 and older", "", "sum"),
    "loss/tokens_position_{start}": Metric("tokens", "trained tokens, by position in the response", "", "sum"),
    "loss/clip_fraction_age_{age}": Metric("", "share bounded, by age", "loss/tokens_age_{age}"),
    "loss/clip_fraction_position_{start}": Metric("", "share bounded, by position", "loss/tokens_position_{start}"),
    "entropy/mean": Metric("nats", "entropy of the next-token distribution over the support", TOKENS),
    "entropy/age_{age}": Metric("nats", "mean entropy, by age", "loss/tokens_age_{age}"),
    "entropy/position_{start}": Metric("nats", "mean entropy, by position", "loss/tokens_position_{start}"),
    "grad_norm": Metric("", "gradient norm before clipping"),
    "lr": Metric("", "learning rate", "", "last"),
    "critic/grad_norm": Metric("", "the critic's gradient norm before clipping"),
    "critic/lr": Metric("", "the critic's learning rate", "", "last"),
    "mismatch/kl": Metric("nats", "KL(sampler || trainer), k3 estimate", TOKENS),
    "mismatch/kl_k1": Metric("nats", "KL(sampler || trainer), k1 estimate: unbiased, signed", TOKENS),
    "mismatch/abs_max": Metric("nats", "largest difference of log-probabilities", "", "max"),
    "mismatch/ratio_p99": Metric("", "99th percentile of max(rho, 1 / rho)", TOKENS),
    "mismatch/kl_age_{age}": Metric("nats", "mismatch/kl, by age", "loss/tokens_age_{age}"),
    "mismatch/kl_position_{start}": Metric("nats", "mismatch/kl, by position", "loss/tokens_position_{start}"),
    "correction/mean_weight": Metric("", "mean correction weight", TOKENS),
    "correction/clipped_fraction": Metric("", "share whose weight was bounded", TOKENS),
    "correction/masked_fraction": Metric("", "share that the correction removed from the loss", TOKENS),
    "correction/masked_sequences": Metric("", "share that the correction removed from the loss", "loss/sequences"),
    "correction/effective_share": Metric("", "effective sample size (sum w)^2 / sum w^2, over sample size", TOKENS),
    "replay/coverage": Metric("", "share of (token, layer) pairs that were replayed", TOKENS),
    "replay/too_old": Metric("", "share of these pairs whose routes are too old", TOKENS),
    "replay/agreement": Metric("", "share of replayed tokens for which the trainer's router agrees", "layers"),
    "replay/agreement_min_layer": Metric("", "lowest agreement of a layer"),
    "replay/agreement_layer_{layer}": Metric("", "agreement of one layer, by global layer id", "replayed tokens"),
    "staleness/mean": Metric("versions", "mean age", "ledger/trained_tokens"),
    "staleness/max": Metric("versions", "largest age of trained tokens"),
    "ledger/generated_tokens": Metric("tokens", "sampled in this step"),
    "ledger/trained_tokens": Metric("tokens", "entered the loss in this step"),
    "ledger/masked_tokens": Metric("tokens", "kept in a sequence, but out of the loss"),
    "ledger/dropped_tokens": Metric("tokens", "discarded"),
    "ledger/pending_tokens": Metric("tokens", "not yet trained, masked or dropped at the end of the step"),
    "ledger/masked/{reason}_tokens": Metric("tokens", "masked for this reason"),
    "ledger/dropped/{reason}_tokens": Metric("tokens", "dropped for this reason"),
    "rollout/tokens_per_s": Metric("tokens/s", "generated by all engines", "seconds between two steps' batches"),
    "rollout/prompt_len_mean": Metric("tokens", "mean prompt length", "rollout/responses"),
    "rollout/response_len_mean": Metric("tokens", "mean response length", "rollout/responses"),
    "rollout/response_len_p10": Metric("tokens", "10th percentile of the response length", "rollout/responses"),
    "rollout/response_len_p50": Metric("tokens", "median response length", "rollout/responses"),
    "rollout/response_len_p90": Metric("tokens", "90th percentile of the response length", "rollout/responses"),
    "rollout/response_len_max": Metric("tokens", "longest response"),
    "rollout/truncated": Metric("", "share cut at the length limit", "rollout/responses"),
    "rollout/support_tokens": Metric("tokens", "trained tokens drawn with truncated sampling"),
    "rollout/support_mean": Metric("ids", "mean size of the support", _SUPPORTED),
    "rollout/support_p99": Metric("ids", "99th percentile of the support's size", _SUPPORTED),
    "rollout/support_max": Metric("ids", "largest support"),
    "rollout/aborted": Metric("responses", "interrupted during generation"),
    "rollout/recycled": Metric("responses", "continued from an earlier step"),
    "rollout/failed_rollouts": Metric("rollouts", "dropped: their function failed (rollout.on_error: drop)"),
    "rollout/sequences_per_rollout": Metric("", "mean number of samples per rollout"),
    "rollout/turns": Metric("turns", "mean number of model replies", "rollouts that chat"),
    "rollout/new_sequence/{reason}": Metric(
        "sequences", "mean number begun for this reason (docs/agents.md)", "rollouts that chat"
    ),
    "rollout/chat/{event}": Metric(
        "",
        "mean count of malformed_calls, unknown_tools, undelivered_turns, joined_retries, ignored_fields, "
        "ignored_NAME (fields that affect replies) or limits_reached",
        "rollouts that chat",
    ),
    "rollout/atropos/{event}": Metric(
        "",
        "submitted groups, or groups not trained for one reason (docs/environments.md)",
        "rollout.function: atropos",
    ),
    "rollout/failed_groups": Metric("groups", "dropped: they failed twice to be sent, scored or trained"),
    "rollout/filtered_groups": Metric("groups", "rejected by the dynamic filter"),
    "rollout/truncated_groups": Metric("groups", "not trained: all responses were truncated and masked"),
    "rollout/groups": Metric("groups", "accepted for training"),
    "rollout/responses": Metric("responses", "accepted for training"),
    "rollout/rollouts": Metric("rollouts", "accepted for training"),
    "rollout/cached_tokens": Metric("tokens", "prompt tokens found in the engines' prefix caches"),
    "packing/micro_batches": Metric("micro-batches", "of each rank in an optimizer step"),
    "packing/empty_micro_batches": Metric("micro-batches", "without a sequence, over ranks and optimizer steps"),
    "packing/fill": Metric("", "share filled with tokens", "token budgets of all micro-batches"),
    "packing/padding": Metric("", "share that is padding", "rows of the model"),
    "packing/imbalance": Metric("", "waiting for other ranks' micro-batches (estimated)", "time at work"),
    "packing/expert_imbalance": Metric(
        "",
        "tokens of the busiest expert-parallel ranks, less 1",
        "mean tokens",
    ),
    "packing/expert_imbalance_least": Metric(
        "",
        "the part of it that no packing can remove",
        "mean tokens",
    ),
    "packing/rank_imbalance": Metric("", "work of the busiest rank, less 1 (estimated); worst step", "mean work"),
    "weights/seconds": Metric("s", "duration of the weight sync"),
    "weights/bytes": Metric("bytes", "sent to each engine"),
    "weights/changed": Metric("", "share that changed (transport delta)", "elements"),
    "weights/gb_per_s": Metric("GB/s", "sent to each engine", "seconds of sending"),
    "weights/pause_seconds": Metric("s", "generation pause of the engines"),
    "weights/buckets": Metric("buckets", "sent in the sync"),
    "weights/engines": Metric("engines", "that received the weights"),
    "weights/repeats": Metric("", "failed attempts that were repeated"),
    "weights/fill_seconds": Metric("s", "gathering and converting on the slowest sender; writing adapters"),
    "weights/turn_seconds": Metric("s", "longest wait for other senders' buckets"),
    "weights/probe_seconds": Metric("s", "duration of the probe"),
    "weights/probe_log_probs": Metric("nats", "median difference on the probe; the worst engine"),
    "weights/probe_routes": Metric("", "share of pairs with the same experts on the probe; the worst engine"),
    "weights/send_seconds": Metric("s", "sending and loading, on the slowest sender; loading adapters"),
    "perf/step_seconds": Metric("s", "wall time of the step"),
    "perf/wait_seconds": Metric("s", "the trainer waits for samples"),
    "perf/turn_seconds": Metric("s", "several adapters: waiting for the trainer"),
    "perf/adapters_together": Metric("", "adapters whose steps shared the pass, if several"),
    "perf/log_prob_seconds": Metric("s", "passes for log-probs, and token advantages"),
    "perf/train_seconds": Metric("s", "forward, backward and optimizer", "", "sum"),
    "perf/critic_seconds": Metric("s", "the critic's forward, backward and optimizer", "", "sum"),
    "perf/eval_seconds": Metric("s", "the loop waits for an evaluation"),
    "perf/checkpoint_seconds": Metric("s", "saving a checkpoint, after the previous step"),
    "perf/release_seconds": Metric("s", "colocated: engines release memory; also after the previous step"),
    "perf/sleep_seconds": Metric("s", "colocated: offload of the trainer's state; also after the previous step"),
    "perf/wake_seconds": Metric("s", "colocated: reload of the trainer's state; also after the previous step"),
    "perf/resume_seconds": Metric("s", "colocated: engines reallocate memory; also after the previous step"),
    "perf/train_tokens_per_s": Metric("tokens/s", "tokens through the trainer while it trains", "perf/train_seconds"),
}


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/]+)", re.escape(template)))


def open_parts(template: str, name: str) -> dict[str, str] | None:
    """Values in `name` for the `{...}` of a template; None if it does not match."""
    found = _pattern(template).fullmatch(name)
    return None if found is None else found.groupdict()


@lru_cache(maxsize=4096)  # variable parts come from data
def metric_of(name: str) -> Metric | None:
    """Definition of a metric, with the variable parts of `per` filled in; None for an unknown name."""
    for template, metric in METRICS.items():
        if (parts := open_parts(template, name)) is not None:
            return metric._replace(per=metric.per.format(**parts))
    return None


def is_known(name: str) -> bool:
    """Whether `name` is one of METRICS, with its variable parts filled in."""
    return metric_of(name) is not None


HEAD = """# Metrics

Written by `python -m mslime.observe.names`. `metrics.jsonl` holds one JSON object a step, and another one if
evaluations end later (`rollout.max_staleness` above 0). Values that are not finite are null.

Units are in square brackets, denominators of means and shares after "per". Metrics of the loss are sums over all ranks,
divided once, so they do not depend on the layout. With several optimizer steps a rollout, counts and seconds are added,
`mismatch/abs_max` is the largest, `lr` the last, and all others the mean, weighted by their denominators.

"""


def markdown() -> str:
    """Text of docs/metrics.md."""
    return HEAD + "".join(f"- {_line(name, metric)}\n" for name, metric in METRICS.items())


def _line(name: str, metric: Metric) -> str:
    unit = f" [{metric.unit}]" if metric.unit else ""
    per = f"; per {_denominator(metric.per)}" if metric.per else ""
    return f"`{name}`{unit}: {metric.meaning}{per}"


def _denominator(per: str) -> str:
    return f"`{per}`" if per in METRICS or per == WEIGHTS else per


# Rows of `metrics.jsonl`, merged: optimizer steps of a rollout, and rows of a step.

Row = Mapping[str, Any]

STEP_PARTS = (
    "perf/wait_seconds",
    "perf/log_prob_seconds",
    "perf/train_seconds",
    "perf/critic_seconds",
    "weights/seconds",
    "perf/eval_seconds",
)
"""Parts of a step's wall time. Saving a checkpoint happens between steps and belongs to neither."""
WHOLE = "perf/step_seconds"
REST = "rest"
"""Wall time of a step outside all parts: not recorded, computed for the report."""


def over_optimizer_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the trainer's rows of a rollout's optimizer steps into one, as `METRICS` defines for each metric.

    Sums, the largest, the last, or the mean weighted by the metric's own denominator. A step without tokens for a
    metric leaves it out.
    """
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: _joined([step for step in steps if name in step], name) for name in names}


def _joined(steps: Sequence[Mapping[str, float]], name: str) -> float:
    metric, values = metric_of(name), [step[name] for step in steps]
    assert metric is not None, f"unknown metric {name!r}"
    if metric.over_steps == "sum":
        return sum(values)
    if metric.over_steps == "max":
        return max(values)
    if metric.over_steps == "last":
        return values[-1]
    weights = [step.get(metric.per, 1.0) for step in steps]
    if not sum(weights):
        weights = [1.0] * len(steps)
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


EVERY_ROW = {"step", "time", "version"}
"""Additional metrics in rows of scores on held-out sets."""


def are_scores(row: Row) -> bool:
    """Whether a row holds scores on held-out sets."""
    return any(name.startswith("eval/") for name in row)


def by_step(rows: Sequence[Row]) -> list[Row]:
    """One row per step, in order: rows of one step are joined, and the unexplained time is added."""
    joined: dict[int, dict[str, Any]] = {}
    for row in rows:
        joined.setdefault(row["step"], {}).update(row)
    return [{**joined[step], **_rest(joined[step])} for step in sorted(joined)]


def _rest(row: Row) -> dict[str, float]:
    if row.get(WHOLE) is None:
        return {}
    known = sum(row.get(part) or 0.0 for part in STEP_PARTS)
    return {REST: max(row[WHOLE] - known, 0.0)}


def total(rows: Sequence[Row], name: str) -> float | None:
    """Sum of a metric over rows; None if none has it."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) if values else None


if __name__ == "__main__":
    print(markdown(), end="")
