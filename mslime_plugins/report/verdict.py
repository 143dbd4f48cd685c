"""Findings at the head of the report: sentences derived from the metrics by rules with stated thresholds.

A rule gives a finding if its threshold is passed; rules with data and without a finding are listed together. `early`
and `late` are means over the first and the last fifth of the steps with a metric. In a long run the last fiftieth (at
least ten steps) also counts as late if it is worse: a fifth of 5,000 steps hides a failure in the last 200.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median, pvariance
from typing import Literal

from mslime.config.algorithm import LossTraits, loss_traits
from mslime.observe.names import EVERY_ROW, Row, total
from mslime_plugins.report.charts import filled
from mslime_plugins.report.headline import short

Tone = Literal["good", "note", "bad"]
Verdict = tuple[Tone, str] | None

FEWEST = 10
"""Fewest steps for a comparison of early and late."""
LATELY = 0.02
REWARD_ERRORS = 2.0
FALLEN_ERRORS = 4.0
"""A fall is more than this many `REWARD_ERRORS`: the best of many windows is above the mean by chance."""
FALLEN_PART = 1 / 3
ACCURACY_BY = 0.02
ACCURACY_LOST = 0.5
OVERFIT_BY = 0.02
SIGNAL_SHARE = 0.5
ENTROPY_PART = 1 / 3
TRUNCATED = 0.1
MISMATCH, MISMATCH_HIGH = 0.001, 0.01
CLIPPED = 0.2
CORRECTED = 0.1
DROPPED = 0.1
IDLE = 0.5
SPIKE = 100.0


@dataclass(frozen=True)
class ReportRule:
    """One question about a run.

    Attributes:
        topic: its subject; the only part shown of rules without a finding.
        chart: id of its chart.
        threshold: condition of a finding, as text.
        advice: for a finding.
        needs: metrics, of which at least one must be recorded; templates of `names.METRICS`.
        judge: returns the sentence, or None if the threshold is not passed.
        unless: losses to which the rule does not apply.
    """

    topic: str
    chart: str
    threshold: str
    advice: str
    needs: Sequence[str]
    judge: Callable[[Sequence[Row]], Verdict]
    unless: Callable[[LossTraits], bool] = lambda loss: False


@dataclass(frozen=True)
class ReportFinding:
    """A finding of a rule. `advice` is empty if all is well."""

    rule: ReportRule
    tone: Tone
    text: str

    @property
    def advice(self) -> str:
        """The advice; empty for good news."""
        return "" if self.tone == "good" else self.rule.advice


def judge_run(rows: Sequence[Row], loss: str = "") -> tuple[list[ReportFinding], list[str]]:
    """(findings, topics within their thresholds).

    Args:
        loss: `algorithm.loss` of the run; empty if unknown.
    """
    findings: list[ReportFinding] = []
    quiet: list[str] = []
    for rule in RULES:
        if rule.unless(loss_traits(loss)):
            continue
        if not any(row.get(name) is not None for t in rule.needs for name, _ in filled(t, rows) for row in rows):
            continue
        verdict = rule.judge(rows)
        if verdict is None:
            quiet.append(rule.topic)
        else:
            findings.append(ReportFinding(rule, *verdict))
    return findings, quiet


def values_of(rows: Sequence[Row], name: str) -> list[float]:
    """The recorded values of a metric, in order of the steps."""
    return [row[name] for row in rows if row.get(name) is not None]


def _fifth(values: Sequence[float]) -> int:
    return max(1, len(values) // 5)


def early(values: Sequence[float]) -> float:
    """Mean over the first fifth."""
    return fmean(values[: _fifth(values)])


def late(values: Sequence[float]) -> float:
    """Mean over the last fifth."""
    return fmean(values[-_fifth(values) :])


def lately(values: Sequence[float]) -> float:
    """Mean over the last fiftieth, at least ten values; in a short run over the last fifth."""
    return fmean(values[-min(_window(values), _fifth(values)) :])


def _window(values: Sequence[float]) -> int:
    return max(FEWEST, int(len(values) * LATELY))


def _trend(values: Sequence[float]) -> tuple[float, float]:
    """(late minus early, its standard error)."""
    n = _fifth(values)
    return late(values) - early(values), ((pvariance(values[:n]) + pvariance(values[-n:])) / n) ** 0.5


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


# The rules


def _reward(rows: Sequence[Row]) -> Verdict:
    values = values_of(rows, "reward/mean")
    if len(values) < FEWEST:
        return "note", f"{len(values)} steps are too few to judge whether the reward rises; {FEWEST} are needed."
    (change, error), numbers = _trend(values), f"from {early(values):.3g} to {late(values):.3g}"
    if abs(change) <= REWARD_ERRORS * error or change == 0:
        return "bad", f"The reward did not move: {numbers}, {change:+.2g}, with a standard error of {error:.2g}."
    if change < 0:
        return "bad", f"The reward fell {numbers}."
    fallen = _fallen([row for row in rows if row.get("reward/mean") is not None])
    if fallen:
        return "bad", f"The reward rose {numbers}, and then fell: {fallen}."
    return "good", f"The reward rose {numbers}."


def _fallen(rows: Sequence[Row]) -> str:
    """How far the last steps are below the best stretch of as many; empty if that is within noise."""
    values = [row["reward/mean"] for row in rows]
    n = _window(values)
    if len(values) < 2 * n:
        return ""
    sums = [0.0, *accumulate(values)]
    means = [(sums[end] - sums[end - n]) / n for end in range(n, len(values) + 1)]
    best, last = max(means), fmean(values[-n:])
    rounding = 1e-9 * abs(best)
    start = max(i for i, mean in enumerate(means) if mean >= best - rounding)
    error = ((pvariance(values[start : start + n]) + pvariance(values[-n:])) / n) ** 0.5
    if best - last <= max(FALLEN_ERRORS * error, FALLEN_PART * (best - min(means)), rounding):
        return ""
    until = rows[start + n - 1]["step"]
    return f"{last:.3g} in the last {n} steps, {best:.3g} in the {n} up to step {until}"


def _accuracy(rows: Sequence[Row]) -> Verdict:
    parts: list[str] = []
    changes: list[float] = []
    lost = False
    for name, open_part in filled("eval/{set}/accuracy", rows):
        found = [(row[name], row["step"]) for row in rows if row.get(name) is not None]
        if len(found) < 2:
            continue
        (first, _), (last, _), (highest, at) = found[0], found[-1], max(found)
        lost = lost or highest - last > max(ACCURACY_BY, ACCURACY_LOST * (highest - first))
        changes.append(last - first)
        parts.append(f"{open_part['set']} from {first:.3g} to {last:.3g}, highest {highest:.3g} after step {at}")
    if not parts:
        return None
    tone: Tone = "bad" if lost else "good" if max(changes) > ACCURACY_BY else "note"
    return tone, f"Held-out accuracy, first to last evaluation: {'; '.join(parts)}."


def _held_out_loss(rows: Sequence[Row]) -> Verdict:
    parts: list[str] = []
    overfit = False
    for name, open_part in filled("eval/{set}/nll", rows):
        found = [(row[name], row["step"]) for row in rows if row.get(name) is not None]
        if len(found) < 2:
            continue
        (lowest, at), (last, _) = min(found), found[-1]
        overfit = overfit or last > lowest * (1 + OVERFIT_BY)
        parts.append(f"{open_part['set']} from {found[0][0]:.3g} to {last:.3g}, lowest {lowest:.3g} after step {at}")
    return ("bad" if overfit else "good", f"Held-out loss: {'; '.join(parts)}.") if parts else None


def _nll(rows: Sequence[Row]) -> Verdict:
    values = values_of(rows, "loss/nll")
    if len(values) < FEWEST:
        return None
    (change, error), numbers = _trend(values), f"from {early(values):.3g} to {late(values):.3g} nats a token"
    if (risen := lately(values)) > max(early(values), late(values)):
        return "bad", f"The negative log-likelihood is {risen:.3g} nats a token now, above its start: {numbers}."
    if change < -REWARD_ERRORS * error:
        return "good", f"The negative log-likelihood fell {numbers}."
    return "bad", f"The negative log-likelihood did not fall: {numbers}."


def _above(values: Sequence[float], limit: float, tone: Tone, sentence: str) -> Verdict:
    """The sentence for a fraction above its limit, late or lately; it replaces the `{}` of `sentence`."""
    share = max(late(values), lately(values)) if values else 0.0
    return None if share <= limit else (tone, sentence.format(_percent(share)))


def _entropy(rows: Sequence[Row]) -> Verdict:
    values = values_of(rows, "entropy/mean") or values_of(rows, "loss/entropy")
    if len(values) < FEWEST or (last := min(late(values), lately(values))) >= early(values) * ENTROPY_PART:
        return None
    return "bad", f"Entropy collapses: from {early(values):.3g} to {last:.3g} nats."


def _mismatch(rows: Sequence[Row]) -> Verdict:
    values = values_of(rows, "mismatch/kl")
    last = max(late(values), lately(values))
    if last <= MISMATCH:
        return None
    return "bad" if last > MISMATCH_HIGH else "note", f"Sampler and trainer disagree by {last:.2g} nats."


def _clipped(rows: Sequence[Row]) -> Verdict:
    sides = ("loss/clip_fraction_below", "loss/clip_fraction_above")
    shares = [sum(row.get(name) or 0.0 for name in sides) for row in rows if row.get(sides[0]) is not None]
    sentence = "The loss's trust region bounded {} of the last tokens."
    return _above(shares or values_of(rows, "loss/clip_fraction"), CLIPPED, "bad", sentence)


def _corrected(rows: Sequence[Row]) -> Verdict:
    names = ("correction/clipped_fraction", "correction/masked_fraction")
    shares = [sum(row.get(name) or 0.0 for name in names) for row in rows if row.get(names[0]) is not None]
    return _above(shares, CORRECTED, "note", "The correction bounded or masked {} of the last tokens.")


def _dropped(rows: Sequence[Row]) -> Verdict:
    dropped, generated = total(rows, "ledger/dropped_tokens"), total(rows, "ledger/generated_tokens")
    if not dropped or not generated or dropped / generated <= DROPPED:
        return None
    reasons = {
        parts["reason"]: total(rows, name) or 0 for name, parts in filled("ledger/dropped/{reason}_tokens", rows)
    }
    main = max(reasons, key=lambda reason: reasons[reason], default="")
    why = f", most of them for `{main}`" if main else ""
    return "note", f"{short(dropped)} tokens, {_percent(dropped / generated)} of those generated, were dropped{why}."


def _idle(rows: Sequence[Row], name: str, workers: str) -> Verdict:
    share = fmean(values_of(rows, name))
    return None if share <= IDLE else ("note", f"{workers} were idle for {_percent(share)} of a step, on average.")


def _spikes(rows: Sequence[Row]) -> Verdict:
    lost = [row["step"] for row in rows if "grad_norm" in row and row["grad_norm"] is None]
    if lost:
        return "bad", f"The gradient was not finite in {len(lost)} steps, first in step {lost[0]}."
    norms = [(row["grad_norm"], row["step"]) for row in rows if row.get("grad_norm") is not None]
    largest, step = max(norms)
    if len(norms) < FEWEST or largest <= SPIKE * median(norm for norm, _ in norms):
        return None
    return (
        "note",
        f"The gradient norm of step {step} is {largest:.3g}; the median is {median(n for n, _ in norms):.3g}.",
    )


def _reward_errors(rows: Sequence[Row]) -> Verdict:
    errors = total(rows, "reward/errors")
    return ("bad", f"{errors:.0f} rewards raised, hung or were not finite.") if errors else None


def _coverage(rows: Sequence[Row]) -> Verdict:
    lowest = min(row["replay/coverage"] + row.get("replay/too_old", 0.0) for row in rows if "replay/coverage" in row)
    if lowest > 1.0 - 1e-9:  # the two shares are rounded separately
        return None
    return "bad", f"In one step, only {_percent(lowest)} of the routes were replayed, or omitted for their age."


RULES = (
    ReportRule(
        "reward", "reward", f"it changes by no more than {REWARD_ERRORS:g} standard errors, or falls; or it rose, "
        f"and is now below its best by {FALLEN_ERRORS:g} standard errors and {_percent(FALLEN_PART)} of its range",
        "Read the worst responses: is the reward what you meant? Can the model earn it? Else raise train.lr. After "
        "a fall: continue from a checkpoint before it, with a lower train.lr.",
        ("reward/mean",), _reward,
    ),
    ReportRule(
        "held-out accuracy", "accuracy",
        f"always; bad when it has lost over {ACCURACY_BY:g} and {_percent(ACCURACY_LOST)} of its gain",
        "A reward that rises without it is gamed or memorised: read the best responses.",
        ("eval/{set}/accuracy",), _accuracy,
    ),
    ReportRule(
        "held-out loss", "held-out-loss", f"always; bad when it ends more than {_percent(OVERFIT_BY)} above its lowest",
        "The model memorises its rows: stop there (checkpoint.keep_best keeps the step), or lower train.lr.",
        ("eval/{set}/nll",), _held_out_loss,
    ),
    ReportRule(
        "negative log-likelihood", "loss", "always in supervised training; bad when it does not fall",
        "Change train.lr, and check that labels follow from prompts.", ("loss/nll",), _nll,
    ),
    ReportRule(
        "groups without a signal", "groups", f"more than {_percent(SIGNAL_SHARE)} of the groups, late",
        "Take harder prompts if the reward is high, easier ones if it is low, or set rollout.dynamic_filter.",
        ("reward/zero_variance_share",),
        lambda rows: _above(values_of(rows, "reward/zero_variance_share"), SIGNAL_SHARE, "note",
                            "{} of the last groups have no signal: all their responses have the same reward."),
    ),
    ReportRule(
        "entropy", "entropy", f"late below {_percent(ENTROPY_PART)} of early",
        "Fine if the task is solved. Else raise algorithm.clip_high or algorithm.entropy_coef, or lower train.lr.",
        ("entropy/mean", "loss/entropy"), _entropy,
    ),
    ReportRule(
        "truncation", "length", f"more than {_percent(TRUNCATED)} of the responses, late",
        "Raise rollout.max_response_tokens, or penalise length (reward.overlong).",
        ("rollout/truncated",),
        lambda rows: _above(values_of(rows, "rollout/truncated"), TRUNCATED, "bad",
                            "{} of the last responses were cut at the length limit."),
    ),
    ReportRule(
        "mismatch", "mismatch", f"KL above {MISMATCH:g} nats, late; bad above {MISMATCH_HIGH:g}",
        "If it climbs with staleness, lower rollout.max_staleness. If not, engine and trainer compute differently.",
        ("mismatch/kl",), _mismatch,
    ),
    ReportRule(
        "clipped tokens", "clip",
        f"more than {_percent(CLIPPED)} of the tokens, late; never of gspo, whose narrow band bounds many by design",
        "Updates leave the trust region: lower train.lr or train.optimizer_steps_per_rollout.",
        ("loss/clip_fraction", "loss/clip_fraction_below"), _clipped, lambda loss: loss.clips_much,
    ),
    ReportRule(
        "corrected tokens", "correction", f"more than {_percent(CORRECTED)} of the tokens, late",
        "The trained policy is far from the sampler: lower rollout.max_staleness, and check the mismatch.",
        ("correction/clipped_fraction",), _corrected,
    ),
    ReportRule(
        "dropped tokens", "ledger", f"more than {_percent(DROPPED)} of the generated tokens",
        "Generated, but not used. If stale: raise rollout.max_staleness or keep them. If filtered: use other prompts.",
        ("ledger/dropped_tokens",), _dropped,
    ),
    ReportRule(
        "idle trainers", "idle", f"more than {_percent(IDLE)} of the time",
        "Raise rollout.max_staleness, give the engines more GPUs, or evaluate less often.",
        ("idle/trainers",), lambda rows: _idle(rows, "idle/trainers", "Trainer ranks"),
    ),
    ReportRule(
        "idle engines", "idle", f"more than {_percent(IDLE)} of the time",
        "Raise rollout.max_staleness, or give the trainer more GPUs.",
        ("idle/engines",), lambda rows: _idle(rows, "idle/engines", "Engines"),
    ),
    ReportRule(
        "gradient norm", "grad-norm", f"not finite, or more than {SPIKE:g} times its median",
        "docs/report.md explains single spikes. Several: lower train.lr.", ("grad_norm",), _spikes,
    ),
    ReportRule(
        "reward errors", "reward", "any", "The messages are in logs/rollouts.log; see reward.on_error.",
        ("reward/errors",), _reward_errors,
    ),
    ReportRule(
        "routing replay", "agreement", "not all routes replayed, except routes beyond train.replay_max_age",
        "Routes were lost on the way from the engine; please report it.", ("replay/coverage",), _coverage,
    ),
)  # fmt: skip


def markdown() -> str:
    """The rules as the table of docs/report.md."""
    rows = [f"| {rule.topic} | {rule.threshold} | {rule.advice} |" for rule in RULES]
    return "\n".join(["| topic | shown if | action |", "|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")


def irregular(rows: Sequence[Row]) -> str:
    """Irregular steps in the metrics: missing rows between others, or duplicate numbers; empty if there are none.

    Args:
        rows: as in the file, before `by_step`.
    """
    names: dict[int, set[str]] = {}
    twice: set[int] = set()
    for row in rows:
        known, own = names.setdefault(row["step"], set()), row.keys() - EVERY_ROW
        if known & own:
            twice.add(row["step"])
        known |= own
    gaps = [(a, b) for a, b in pairwise(sorted(names)) if b > a + 1]
    missing = sum(b - a - 1 for a, b in gaps)
    found = [f"steps without a row: {missing}, the first is {gaps[0][0] + 1}"] if gaps else []
    found += (
        [f"steps with two rows, of which the later counts: {len(twice)}, the first is {min(twice)}"] if twice else []
    )
    return "; ".join(found)
