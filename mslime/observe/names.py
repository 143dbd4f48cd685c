"""Every metric that a run may record: its stable name, unit and meaning. `{...}` stands for an open part of a name.

This list is the one definition. A name that is not here is a misspelling, and `MetricsLogger.log` asserts.
"""

from __future__ import annotations

import re
from functools import cache

METRICS: dict[str, tuple[str, str]] = {
    "step": ("", "optimizer updates from rollouts done so far; 0 is the state before training"),
    "version": ("", "weight version after the step"),
    "time": ("s", "seconds since the epoch at the end of the step"),
    "reward/mean": ("", "mean over the step's trained responses"),
    "reward/std": ("", "standard deviation over responses"),
    "reward/min": ("", "lowest"),
    "reward/max": ("", "highest"),
    "reward/zero_variance_groups": ("groups", "complete groups whose rewards are all equal"),
    "reward/zero_variance_share": ("", "share of groups whose rollouts all have the same reward"),
    "reward/group_std": ("", "standard deviation of the rewards within a group, mean over groups"),
    "reward/source/{source}/mean": ("", "mean over the rollouts of one data source"),
    "reward/source/{source}/rollouts": ("rollouts", "of one data source"),
    "advantage/mean": ("", "mean over trained tokens, as the loss sees it"),
    "advantage/std": ("", "standard deviation over trained tokens"),
    "advantage/min": ("", "lowest of a trained token"),
    "advantage/max": ("", "highest of a trained token"),
    "reward/errors": ("responses", "rewards that raised, hung or were not finite"),
    "eval/{set}/accuracy": ("", "share of responses to a held-out set whose reward exceeds 0.5"),
    "eval/{set}/pass@{k}": ("", "probability that one of k responses is right"),
    "eval/{set}/response_len_mean": ("tokens", "mean response length on a held-out set"),
    "eval/{set}/truncated": ("", "share of responses cut at the length limit"),
    "eval/{set}/seconds": ("s", "duration of the evaluation"),
    "loss/total": ("", "what was minimised"),
    "loss/policy": ("", "corrected policy-gradient term"),
    "loss/value": ("", "half the squared error of the critic"),
    "loss/value_clip_fraction": ("", "share of tokens whose value left the band around the one before the update"),
    "loss/explained_variance": ("", "1 - variance of return minus value, over the variance of returns; over tokens"),
    "loss/kl": ("nats", "KL to the reference policy, before its coefficient"),
    "loss/entropy": ("nats", "entropy of the next-token distribution"),
    "loss/nll": ("nats", "negative log-likelihood (supervised)"),
    "loss/aux": ("", "load-balancing loss of the routers"),
    "loss/clip_fraction": ("", "share of tokens that the loss's trust region bounded"),
    "loss/clip_fraction_below": ("", "share of tokens bounded on the lower side: less likely than before"),
    "loss/clip_fraction_above": ("", "share of tokens bounded on the upper side: more likely than before"),
    "loss/clip_fraction_age_{age}": ("", "share of tokens of an age in versions that were bounded; 8: 8 and older"),
    "loss/clip_fraction_position_{start}": ("", "share of tokens bounded, from this position of the response on"),
    "loss/ratio_p01": ("", "1st percentile over tokens of r, the current policy over what the loss compares it with"),
    "loss/ratio_p50": ("", "median of r"),
    "loss/ratio_p99": ("", "99th percentile of r"),
    "loss/ppo_kl": ("nats", "KL between the policy before the update and the one being updated"),
    "loss/tokens": ("tokens", "tokens in the loss"),
    "grad_norm": ("", "gradient norm before clipping"),
    "lr": ("", "learning rate"),
    "mismatch/kl": ("nats", "KL(sampler || trainer) per token, k3 estimate"),
    "mismatch/kl_k1": ("nats", "KL(sampler || trainer) per token, k1 estimate"),
    "mismatch/abs_max": ("nats", "largest difference of log-probabilities"),
    "mismatch/ratio_p99": ("", "99th percentile of max(rho, 1 / rho)"),
    "mismatch/kl_age_{age}": ("nats", "mismatch/kl over the tokens of an age in versions; 8: 8 and older"),
    "mismatch/kl_position_{start}": ("nats", "mismatch/kl over tokens from this position of the response on"),
    "correction/mean_weight": ("", "mean correction weight of a token"),
    "correction/clipped_fraction": ("", "share of tokens whose weight was bounded"),
    "correction/masked_fraction": ("", "share of tokens that the correction took out of the loss"),
    "correction/masked_sequences": ("", "share of sequences that the correction took out of the loss whole"),
    "correction/effective_share": ("", "effective sample size over sample size"),
    "replay/coverage": ("", "share of tokens whose routes were replayed"),
    "replay/agreement": ("", "share of replayed experts that the trainer's own router would have chosen"),
    "replay/agreement_min_layer": ("", "agreement of the layer that agrees least"),
    "replay/agreement_layer_{layer}": ("", "agreement of one layer, by global layer id"),
    "replay/fingerprint": ("", "checksum of the routes consumed"),
    "staleness/mean": ("versions", "mean age of trained tokens"),
    "staleness/max": ("versions", "largest age of trained tokens"),
    "ledger/generated_tokens": ("tokens", "sampled in this step"),
    "ledger/trained_tokens": ("tokens", "entered the loss in this step"),
    "ledger/masked_tokens": ("tokens", "kept in a sequence, but out of the loss"),
    "ledger/dropped_tokens": ("tokens", "thrown away"),
    "ledger/pending_tokens": ("tokens", "fate open at the end of the step"),
    "ledger/masked/{reason}_tokens": ("tokens", "masked for this reason"),
    "ledger/dropped/{reason}_tokens": ("tokens", "dropped for this reason"),
    "rollout/tokens_per_s": ("tokens/s", "generated by all engines"),
    "rollout/prompt_len_mean": ("tokens", "mean prompt length"),
    "rollout/response_len_mean": ("tokens", "mean response length"),
    "rollout/response_len_p10": ("tokens", "10th percentile of the response length"),
    "rollout/response_len_p50": ("tokens", "median response length"),
    "rollout/response_len_p90": ("tokens", "90th percentile of the response length"),
    "rollout/response_len_max": ("tokens", "longest response"),
    "rollout/truncated": ("", "share of responses cut at the length limit"),
    "rollout/aborted": ("responses", "stopped in mid-generation"),
    "rollout/recycled": ("responses", "continued from an earlier step"),
    "rollout/filtered_groups": ("groups", "complete groups that the dynamic filter refused"),
    "rollout/groups": ("groups", "accepted for training"),
    "rollout/responses": ("responses", "accepted for training"),
    "rollout/rollouts": ("rollouts", "accepted for training; one may have become several responses"),
    "rollout/cached_tokens": ("tokens", "prompt tokens that the engines had in their cache"),
    "packing/micro_batches": ("micro-batches", "of each rank in an optimizer step"),
    "packing/empty_micro_batches": ("micro-batches", "without a sequence, on all ranks and in all optimizer steps"),
    "packing/fill": ("", "tokens over the token budgets of all micro-batches"),
    "packing/padding": ("", "share of the model's rows that are padding"),
    "packing/imbalance": ("", "time that ranks wait for each other's micro-batches, over time at work (estimated)"),
    "packing/rank_imbalance": ("", "work of the busiest rank over the mean, less 1 (estimated); of the worst step"),
    "weights/seconds": ("s", "duration of the weight sync"),
    "weights/bytes": ("bytes", "sent to each engine"),
    "weights/gb_per_s": ("GB/s", "bytes sent to each engine over the duration"),
    "weights/pause_seconds": ("s", "time in which the engines did not generate"),
    "weights/buckets": ("buckets", "sent in the sync"),
    "perf/step_seconds": ("s", "wall time of the step"),
    "perf/wait_seconds": ("s", "trainer waits for samples"),
    "perf/log_prob_seconds": ("s", "old and reference log-prob passes"),
    "perf/train_seconds": ("s", "forward, backward and optimizer"),
    "perf/eval_seconds": ("s", "evaluation on held-out sets"),
    "perf/checkpoint_seconds": ("s", "saving"),
    "perf/train_tokens_per_s": ("tokens/s", "tokens through the trainer while it trains"),
}


@cache
def _pattern() -> re.Pattern[str]:
    templates = [re.sub(r"\\\{\w+\\\}", r"[^/]+", re.escape(name)) for name in METRICS]
    return re.compile("|".join(templates))


def is_known(name: str) -> bool:
    """Whether `name` is one of METRICS, with its open parts filled in."""
    return _pattern().fullmatch(name) is not None


def markdown() -> str:
    """The list as the text of docs/metrics.md."""
    rows = [f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in METRICS.items()]
    head = [
        "# Metrics",
        "",
        "What `metrics.jsonl` holds: one JSON object a step. Values that are not finite are null.",
        "",
    ]
    table = ["| name | unit | meaning |", "|---|---|---|", *rows]
    return "\n".join([*head, *table]) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
