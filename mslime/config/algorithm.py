"""Settings of `algorithm` and `critic`: advantages, policy losses, off-policy corrections and the loss's denominators.

The maths is in `mslime.algorithms` and, for denominators, in `mslime.data.shard`; formulas and papers are in
docs/algorithms.md.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from mslime.config.base import KLType, KnownValues, Rule, Section, check_choice, is_function, refuse_first
from mslime.config.errors import ConfigError
from mslime.config.train import TrainConfig

AdvantageName = Literal["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "gae", "none"]

SAME_REWARD = 1e-6
"""Relative difference up to which rewards are equal: float32 rounding is not a signal."""
GROUP_RELATIVE: tuple[AdvantageName, ...] = ("grpo", "rloo", "reinforce_pp_baseline", "maxrl")
"""Advantages that compare the rollouts of one prompt."""

WHITENED: tuple[AdvantageName, ...] = ("reinforce_pp", "reinforce_pp_baseline", "gae")
"""Advantages that are whitened over all ranks if `whiten` is not given."""

LossAggregation = Literal["token", "sequence", "rollout", "group", "constant"]

Credit = Literal["sequences", "turns"]


class AdvantageConfig(Section):
    """First part of `algorithm`: advantages of tokens, and the normalisation of the loss."""

    advantage: AdvantageName | str = Field(
        default="grpo",
        description="How rewards become advantages. grpo, rloo, maxrl, reinforce_pp_baseline: relative to the group. "
        "reinforce_pp: discounted return. gae: with a critic. none: 0, for distillation alone. Or "
        "`module:function`(GroupRewards) -> [rollouts], or TurnAdvantages (docs/extending.md).",
    )
    normalise_std: bool = Field(
        default=True, description="grpo: divide by the group's standard deviation (False: Dr. GRPO)."
    )
    whiten: bool | None = Field(
        default=None,
        description="Normalise advantages to mean 0 and variance 1 over all trained tokens. Default: on for "
        "reinforce_pp, reinforce_pp_baseline and gae.",
    )
    gamma: float = Field(
        default=1.0, ge=0, le=1, description="reinforce_pp, gae: discount from one trained token to the next."
    )
    credit: Credit = Field(
        default="sequences",
        description="Time order in rollouts of several sequences, for step rewards, discounts, values and a KL in the "
        "reward. sequences: each sequence has its own time. turns: all turns in order of generation, as one sequence "
        "(docs/algorithms.md#advantages).",
    )
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="gae: 1 is the return minus the value.")
    opd_coef: float = Field(
        default=0.0,
        ge=0,
        description="On-policy distillation: subtract this times (log pi_old - log teacher) from each token's "
        "advantage. The teacher is `teacher` or model.teacher_path.",
    )
    loss_aggregation: LossAggregation = Field(
        default="token",
        description="token: mean over the step's trained tokens. sequence, rollout, group: mean of the token means of "
        "each. constant: sum over tokens / (rollouts x rollout.max_response_tokens) (Dr. GRPO).",
    )

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened."""
        return self.advantage in WHITENED if self.whiten is None else self.whiten


@dataclass(frozen=True)
class LossTraits:
    """Properties of a policy loss for settings and warnings.

    Attributes:
        defaults: its defaults for `algorithm`; given fields override them.
        section: of `algorithm`, with settings that only this loss has.
        clips: it reads clip_low and clip_high.
        clips_dual: it reads clip_dual.
        of_responses: its objective is one number per response, so the paper's loss_aggregation is sequence.
        clips_much: it bounds a large part of the tokens by design, which does not indicate updates that are too large.
        plain_at_one: at ratio 1 it equals the plain policy gradient.
        around_sampler: its trust region is meant to be around the policy that sampled.
        unbounded: its importance weight has no bound.
    """

    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    section: str = ""
    clips: bool = True
    clips_dual: bool = False
    of_responses: bool = False
    clips_much: bool = False
    plain_at_one: bool = False
    around_sampler: bool = False
    unbounded: bool = False


_BYPASS = {"correction": {"preset": "bypass"}}

POLICY_LOSSES: dict[str, LossTraits] = {
    "ppo": LossTraits({"clip_low": 0.2, "clip_high": 0.28}, clips_dual=True),  # DAPO's clip-higher
    "gspo": LossTraits(
        {"clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "sequence"},  # of a response's mean ratio
        clips_dual=True, of_responses=True, clips_much=True, plain_at_one=True,
    ),
    "gmpo": LossTraits(
        {"clip_low": 0.4, "clip_high": 0.4, "loss_aggregation": "sequence"},  # of the log-ratio
        of_responses=True, plain_at_one=True,
    ),
    "cispo": LossTraits({"clip_low": 1.0, "clip_high": 4.0}, plain_at_one=True),  # weights in [0, 5]
    "sapo": LossTraits({"loss_aggregation": "sequence"}, "sapo", clips=False, plain_at_one=True),
    "topr": LossTraits({}, "topr", clips=False, plain_at_one=True),
    "kimi": LossTraits({}, "kimi", clips=False, plain_at_one=True),
    # The trust region of these two is around the policy that sampled: there is no recomputed one to correct for.
    "dppo_tv": LossTraits({"clip_low": 0.2, "clip_high": 0.2, **_BYPASS}, "dppo", around_sampler=True),
    "ipo": LossTraits({"clip_low": 0.1, "clip_high": 0.1, **_BYPASS}, "ipo", around_sampler=True),
    "reinforce": LossTraits(clips=False, unbounded=True),
}  # fmt: skip
"""The built-in losses; `algorithms.policies.LOSSES` has their functions."""

_OWN_LOSS = LossTraits(clips_dual=True)
"""Traits of a user's loss: it may read any setting, with unknown effect."""


def loss_traits(loss: str) -> LossTraits:
    """Traits of a built-in loss, or of a user's function."""
    return POLICY_LOSSES.get(loss, _OWN_LOSS)


def with_loss_defaults(values: dict[str, object]) -> dict[str, object]:
    """Values given for `algorithm`, merged over the defaults of their loss."""
    defaults = loss_traits(str(values.get("loss", "ppo"))).defaults
    merged = {**defaults, **values}
    base, given = defaults.get("correction"), values.get("correction")
    if isinstance(given, str):
        given = merged["correction"] = {"preset": given}
    if isinstance(base, dict) and isinstance(given, dict):
        own = cast("dict[str, object]", given)
        merged["correction"] = own if own.get("function") else {**base, **own}
    return merged


class SAPOConfig(Section):
    """Temperatures of SAPO's soft gate (arXiv 2511.20347)."""

    tau_positive: float = Field(default=1.0, gt=0, description="For tokens with a positive advantage.")
    tau_negative: float = Field(
        default=1.05, gt=0, description="For all other tokens: higher, so their weights decay faster."
    )


class TOPRConfig(Section):
    """TOPR (arXiv 2503.14286)."""

    level: Literal["token", "sequence"] = Field(
        default="sequence", description="What the tapered ratio is over: the whole response (the paper's), or a token."
    )


class KimiConfig(Section):
    """The quadratic trust region of Kimi k1.5 (arXiv 2501.12599)."""

    tau: float = Field(default=0.1, ge=0, description="Strength of the penalty tau / 2 * log-ratio^2.")
    level: Literal["token", "sequence"] = Field(
        default="sequence", description="What the log-ratio is over: the whole response (the paper's), or a token."
    )


class DPPOConfig(Section):
    """DPPO with a binary total-variation trust region (arXiv 2602.04879); its bounds are clip_low and clip_high."""

    ratio_cap: float = Field(default=20.0, gt=0, description="Cap of the importance ratio inside the trust region.")


class IPOConfig(Section):
    """IPO-style masking as in prime-rl; its bounds are clip_low and clip_high."""

    kl_tau: float = Field(default=1e-3, ge=0, description="Strength of the penalty on the squared log-ratio.")


PRESETS: dict[str, dict[str, object]] = {
    # Truncated importance sampling, Yao et al. 2025 ("Your Efficient RL Framework Secretly Brings You Off-Policy RL").
    "tis": {"level": "token", "action": "truncate", "high": 2.0},
    # The product over the sequence instead of each token (unbiased before truncation, high variance), same source.
    "seq_tis": {"level": "sequence", "action": "truncate", "high": 2.0},
    # Masked importance sampling: tokens outside the band leave the loss (Liu & Li et al. 2025).
    "mis": {"level": "token", "action": "mask", "low": 0.5, "high": 2.0},
    # The same over whole sequences; the bound is TRL's default.
    "seq_mis": {"level": "sequence", "action": "mask", "high": 3.0},
    # IcePop (Ring team, 2025): keep weights inside [0.5, 5], zero the others.
    "icepop": {"level": "token", "action": "mask", "low": 0.5, "high": 5.0},
    # KPop (Ring team, 2026): mask a token whose binary KL, in either direction, exceeds the bound.
    "kpop": {"level": "token", "action": "mask", "metric": "binary_kl", "high": 2.0, "kept_weight": "token"},
    # Geometric-mean rejection (Liu & Li et al. 2025) over token TIS; the band is SkyRL's.
    "geo_rs": {"level": "geometric", "action": "drop", "low": 0.99, "high": 1.01, "kept_weight": "token"},
    # Rejection by the sequence's mean k3 over token TIS; the bound is verl's.
    "k3_rs": {"level": "geometric", "action": "drop", "metric": "k3", "high": 0.01, "kept_weight": "token"},
    # Off-policy sequence masking, DeepSeek-V3.2 (arXiv 2512.02556, eq. 9), over token TIS. The paper gives no delta;
    # published defaults range from 1e-4 to 0.5, values reported to work from 0.05 to 0.2.
    "opsm": {
        "level": "geometric",
        "action": "drop",
        "metric": "k1",
        "high": 0.1,
        "policy": "current",
        "negative_advantage_only": True,
        "kept_weight": "token",
    },
    # One token that is (nearly) impossible for the trainer vetoes its sequence; token TIS for the others.
    "veto": {"level": "token", "action": "drop", "low": 1e-4, "kept_weight": "token"},
    # Decoupled PPO (Hilton et al. 2110.00641, AReaL 2505.24298): the weight is pi_old / mu, tokens beyond 5 leave.
    "areal_decoupled": {"level": "token", "action": "mask", "high": 5.0},
    # DPPO's trust region (arXiv 2602.04879) before any loss: tokens that the update has already moved by more than 0.2
    # in probability away from the sampler, in the direction of their advantage, leave the loss.
    "dppo_tv": {
        "level": "token",
        "reference": "rollout",
        "action": "mask",
        "metric": "tv",
        "policy": "current",
        "high": 0.2,
        "outward_only": True,
    },
    # No weights: the loss's own ratio is over the policy that sampled.
    "bypass": {"reference": "rollout", "action": "none"},
    "none": {"action": "none"},
}


class CorrectionConfig(Section):
    """Off-policy correction: weight of a token, given the ratio of the trainer's policy to the sampler's."""

    shorthand: ClassVar[str] = "preset"

    preset: str | None = Field(
        default="tis",
        description="Named preset; other fields of this section override its values. Also accepts a `function`.",
    )
    function: str | None = Field(
        default=None,
        description="`module:function`(log_ratio, TokenBatch) -> (weights, mask), in place of action, level, metric "
        "and bounds (docs/extending.md).",
    )
    level: Literal["token", "segment", "sequence", "geometric"] = Field(
        default="token",
        description="Unit of a ratio or divergence: a token, the product (sum) over a weight-version segment or a "
        "sequence, or the geometric (arithmetic) mean over a sequence.",
    )
    reference: Literal["recompute", "rollout"] = Field(
        default="recompute",
        description="Old policy of the clipped ratio. recompute: the trainer's log-probs. rollout: the engine's; the "
        "ratio itself corrects, so no weights apply, and only mask and drop have an effect.",
    )
    action: Literal["truncate", "mask", "clip", "drop", "none"] = Field(
        default="truncate",
        description="truncate: min(rho, high). clip: rho into [low, high]. mask: remove a token outside the band from "
        "the loss. drop: remove its whole sequence.",
    )
    metric: Literal["ratio", "k1", "k2", "k3", "binary_kl", "tv"] = Field(
        default="ratio",
        description="Quantity compared with the bounds. ratio: rho. k1, k2, k3: estimates of KL(mu || pi). binary_kl: "
        "the larger binary KL of the sampled token. tv: its difference of probabilities.",
    )
    policy: Literal["old", "current"] = Field(
        default="old",
        description="Numerator of rho: the trainer's policy before this update, or the one being updated.",
    )
    low: float | None = Field(default=None, description="Lower bound; null: none.")
    high: float | None = Field(default=None, description="Upper bound; null: none.")
    kept_weight: Literal["ratio", "one", "token"] = Field(
        default="ratio",
        description="Weight of tokens kept by mask or drop. ratio: rho of `level`. one: 1. token: min(token rho, "
        "token_cap).",
    )
    token_cap: float = Field(default=2.0, gt=0, le=1e6, description="Cap of the token's rho when kept_weight is token.")
    normalise: bool = Field(default=False, description="Divide weights by their mean over the step.")
    negative_advantage_only: bool = Field(
        default=False, description="mask and drop: remove only sequences with a negative advantage."
    )
    outward_only: bool = Field(
        default=False,
        description="mask and drop, level token: remove only tokens that moved in the direction of their advantage, "
        "(pi - mu) A > 0.",
    )
    max_age: int | None = Field(
        default=None,
        ge=0,
        description="Weights of tokens more than this many versions old are multiplied by `old_weight`; null: no "
        "bound.",
    )
    old_weight: float = Field(
        default=0.0, ge=0, lt=1, description="Factor on weights of tokens beyond max_age; 0 masks them."
    )

    @classmethod
    def prepare(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Given values merged over the preset's; for a `module:function` preset, the function."""
        preset = values.get("preset", "tis")
        if isinstance(preset, str) and is_function(preset):
            values = {**values, "function": values.get("function") or preset, "preset": None}
        elif values.get("function") and "preset" not in values:
            values = {**values, "preset": None}
        if values.get("function"):
            return {"action": "none", **values}
        if preset is None:
            return values
        if not isinstance(preset, str) or preset not in PRESETS:
            raise ConfigError(
                "algorithm.correction.preset",
                preset,
                f"unknown preset. Known: {', '.join(PRESETS)}",
                "choose one, or set preset: null with level, action and bounds",
            )
        return {**PRESETS[preset], **values}

    @property
    def corrects(self) -> bool:
        """Whether a correction or the loss accounts for tokens from another policy."""
        return self.function is not None or self.action != "none" or self.reference == "rollout"

    @model_validator(mode="after")
    def _check(self) -> CorrectionConfig:
        if self.function is not None:
            check_choice("algorithm.correction.function", self.function, ())
        refuse_first("algorithm.correction", self._rules())
        return self

    def _rules(self) -> Iterator[Rule]:
        action, low, high, level, metric = self.action, self.low, self.high, self.level, self.metric
        if self.function is not None:
            unused = {"preset": None, "action": "none"}
            for name in ("level", "metric", "low", "high", "kept_weight", "negative_advantage_only", "outward_only"):
                unused[name] = type(self).model_fields[name].default
            for name, idle in unused.items():
                yield (
                    getattr(self, name) != idle, name, getattr(self, name),
                    f"has no effect with function = {self.function}, which returns weights and mask",
                    "remove it, or remove function",
                )  # fmt: skip
        yield (  # only k1 can be negative
            high is not None and high < 0 and metric != "k1", "high", high,
            f"the metric {metric} is never negative, so no value is within the bounds",
            "give a bound above 0, or null for none",
        )  # fmt: skip
        yield (
            low is not None and low < 0 and metric != "k1", "low", low,
            f"the metric {metric} is never negative, so the bound has no effect",
            "give a bound above 0, or null for none",
        )  # fmt: skip
        yield (
            low is not None and high is not None and low >= high, "low", low, f"must be below high = {high}",
            "swap or widen the bounds",
        )  # fmt: skip
        weighs, leaves = action in ("truncate", "clip"), action in ("mask", "drop")
        yield weighs and high is None, "high", None, f"{action} needs an upper bound", "set high: 2.0"
        yield (
            action == "clip" and low is None, "low", None, "clip needs a lower bound",
            "set low, or use action: truncate",
        )  # fmt: skip
        yield leaves and low is None and high is None, "high", None, f"{action} needs a bound", "set low, high or both"
        yield (
            weighs and metric != "ratio", "metric", metric, f"{action} bounds the ratio itself",
            "use metric: ratio, or action: mask or drop",
        )  # fmt: skip
        for name in ("negative_advantage_only", "outward_only"):
            yield (
                weighs and getattr(self, name), name, True, "applies to mask and drop only",
                "use action: drop, or leave it false",
            )  # fmt: skip
        yield (
            self.outward_only and level != "token", "outward_only", True,
            f"applies to single tokens, but level is {level}", "use level: token, or leave it false",
        )  # fmt: skip
        yield (
            self.normalise and self.reference == "rollout", "normalise", True,
            "no weights apply with reference: rollout", "set normalise: false, or reference: recompute",
        )  # fmt: skip


class AlgorithmConfig(AdvantageConfig):
    """Advantage, loss and off-policy correction."""

    loss: Annotated[str, KnownValues(tuple(POLICY_LOSSES))] = Field(
        default="ppo",
        description="The policy loss; each is one formula in docs/algorithms.md. Or "
        "`module:function`(TokenBatch, algorithm) -> TokenLoss (docs/extending.md).",
    )
    clip_low: float = Field(
        default=0.2,
        ge=0,
        description="Lower width of the trust region, for the ratio (ppo, cispo, gspo; lower bound 1 - clip_low), "
        "log-ratio (gmpo) or probability (dppo_tv, ipo). The default is ppo's; each loss has its own.",
    )
    clip_high: float = Field(
        default=0.28,
        ge=0,
        description="Upper width of the trust region; ppo's default is clip-higher (DAPO, arXiv 2503.14476).",
    )
    clip_dual: float | None = Field(
        default=None,
        gt=1,
        description="ppo, gspo: dual clip; the loss of a token with negative advantage A is at most -clip_dual A.",
    )
    sapo: SAPOConfig = Field(default_factory=SAPOConfig)
    topr: TOPRConfig = Field(default_factory=TOPRConfig)
    kimi: KimiConfig = Field(default_factory=KimiConfig)
    dppo: DPPOConfig = Field(default_factory=DPPOConfig)
    ipo: IPOConfig = Field(default_factory=IPOConfig)
    kl_coef: float = Field(default=0.0, ge=0, description="Weight of the KL to the reference policy.")
    kl_type: KLType = Field(default="low_var", description="Per-token estimate of the KL; low_var is k3, at most 10.")
    kl_in: Literal["loss", "reward"] = Field(
        default="loss",
        description="Where the KL is applied: added to the loss, or subtracted from the tokens' rewards.",
    )
    kl_unbiased: bool = Field(
        default=False,
        description="kl_in loss: multiply the estimate by pi / mu; its gradient is then the KL's gradient (arXiv "
        "2512.02556).",
    )
    entropy_coef: float = Field(default=0.0, le=1e6, description="Weight of an entropy bonus in the loss.")
    old_log_probs: Literal["auto", "always"] = Field(
        default="auto",
        description="auto: a separate old-log-prob pass only if it is needed (several optimizer steps per rollout, "
        "sequence-level corrections).",
    )
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)

    @classmethod
    def prepare(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Given values merged over the loss's defaults."""
        return with_loss_defaults(values)

    @model_validator(mode="after")
    def _check_names(self) -> AlgorithmConfig:
        check_choice("algorithm.loss", self.loss, POLICY_LOSSES)
        check_choice("algorithm.advantage", self.advantage, typing.get_args(AdvantageName))
        return self


class CriticConfig(Section):
    """The value model of `algorithm.advantage: gae`: a Megatron model with a value head, in the policy's layout."""

    path: Path | None = Field(
        default=None,
        description="Hugging Face checkpoint to start from, of any family with the policy's vocabulary; the value "
        "head starts at 0. Default: model.path.",
    )
    placement: Literal["shared", "separate"] = Field(
        default="shared",
        description="shared: on the policy's GPUs, in the same processes. separate: on its own GPUs, as many as the "
        "policy has.",
    )
    lr: float = Field(default=1e-5, gt=0, description="Peak learning rate of the critic.")
    min_lr: float = Field(default=0.0, ge=0, description="Final learning rate of the critic.")
    lr_warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer steps of warm-up. `train` sets decay and Adam."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps at the start of the run that train only the critic.")
    value_clip: float | None = Field(
        default=0.2,
        gt=0,
        description="Clip range of a value around its old value, with gradient 0 beyond it; null: no clipping.",
    )


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Reject settings with which nothing is learned. Raises ConfigError."""
    if algorithm.advantage == "none" and algorithm.opd_coef == 0:
        raise ConfigError(
            "algorithm.advantage", "none", "all advantages would be 0, so rewards would have no effect",
            "distil a teacher (algorithm.opd_coef), or choose another advantage",
        )  # fmt: skip


def check_critic(critic: CriticConfig, algorithm: AlgorithmConfig, train: TrainConfig, *, trained: bool) -> None:
    """Reject a critic that is not trained, or that leaves the policy no steps.

    Args:
        trained: the run has a critic.

    Raises:
        ConfigError: the first broken rule.
    """
    defaults, total = CriticConfig(), train.num_steps * train.optimizer_steps_per_rollout
    if not trained:
        refuse_first("critic", (
            (value != getattr(defaults, name), name, value,
             f"algorithm.advantage {algorithm.advantage} and train.task {train.task} have no critic",
             "set algorithm.advantage: gae, or remove the section")
            for name, value in critic
        ))  # fmt: skip
        return
    refuse_first("critic", [
        (critic.warmup_steps >= train.num_steps, "warmup_steps", critic.warmup_steps,
         f"must be below train.num_steps = {train.num_steps}, or the policy is never trained",
         "shorten the warm-up, or raise train.num_steps"),
        (critic.min_lr > critic.lr, "min_lr", critic.min_lr, f"must not exceed critic.lr = {critic.lr}", "lower it"),
        (critic.lr_warmup_steps >= total > 1, "lr_warmup_steps", critic.lr_warmup_steps,
         f"must be below the run's {total} optimizer steps", "shorten it, or raise train.num_steps"),
    ])  # fmt: skip
