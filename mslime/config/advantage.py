"""Settings of the advantages and of the loss's denominators; the maths lives in `mslime.algorithms.advantages*` and
`mslime.data.packing`, the formulas and papers in docs/algorithms.md."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mslime.config.base import Section

AdvantageName = Literal["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "gae", "none"]

GROUP_RELATIVE: tuple[AdvantageName, ...] = ("grpo", "rloo", "reinforce_pp_baseline", "maxrl")
"""Advantages that compare the rollouts of one prompt."""

WHITENED: tuple[AdvantageName, ...] = ("reinforce_pp", "reinforce_pp_baseline", "gae")
"""Advantages that are whitened over all ranks when `whiten` is not given."""

LossAggregation = Literal["token", "sequence", "rollout", "group", "constant"]


class AdvantageConfig(Section):
    """The first part of `algorithm`: what a token's advantage is, and what the loss is divided by."""

    advantage: AdvantageName = Field(
        default="grpo",
        description="How rewards become advantages. grpo, rloo, maxrl, reinforce_pp_baseline: relative to the group. "
        "reinforce_pp: discounted return. gae: with a critic. none: 0, for distillation alone.",
    )
    normalise_std: bool = Field(
        default=True, description="grpo: divide by the group's standard deviation (False: Dr. GRPO)."
    )
    whiten: bool | None = Field(
        default=None,
        description="Advantages to mean 0 and variance 1 over the trained tokens of all ranks. Default: on for "
        "reinforce_pp, reinforce_pp_baseline and gae.",
    )
    gamma: float = Field(
        default=1.0, ge=0, le=1, description="reinforce_pp, gae: discount of one trained token to the next."
    )
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="gae: 1 is the return minus the value.")
    opd_coef: float = Field(
        default=0.0,
        ge=0,
        description="On-policy distillation: takes this times (log pi_old - log teacher) from each token's advantage; "
        "the teacher is served (see `teacher`) or held by the trainer (model.teacher_path).",
    )
    loss_aggregation: LossAggregation = Field(
        default="token",
        description="token: mean over all trained tokens of the step. sequence: mean of per-sequence means. rollout: "
        "the same, with all sequences of a rollout as one. group: mean of per-group token means. constant: sum over "
        "tokens / (rollouts x rollout.max_response_tokens) (Dr. GRPO).",
    )

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened."""
        return self.advantage in WHITENED if self.whiten is None else self.whiten
