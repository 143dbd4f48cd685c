"""Section `train`: the optimizer's side of a step, supervised batches, routing replay, memory for logits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mslime.config.base import Fp8Recipe, ReplayMode, Section, SftLossOn, Task, refuse_first


class TrainConfig(Section):
    """The training step: task, steps, optimizer, micro-batches, replay."""

    task: Task = Field(
        default="rl", description="sft: supervised training on rows of prompt and label, or of messages."
    )
    num_steps: int = Field(
        default=100, le=10**9, ge=1, description="Steps of the run: rollouts for rl, batches for sft."
    )
    optimizer_steps_per_rollout: int = Field(
        default=1, ge=1, description="Optimizer steps that each rollout is divided into."
    )
    max_tokens_per_micro_batch: int = Field(
        default=4096, ge=1, description="Token budget of a packed micro-batch, per CP rank."
    )
    quadratic_tokens: Annotated[float, Field(gt=0)] | Literal["auto"] | None = Field(
        default="auto",
        description="Sequence length n at which attention costs as much as the rest; micro-batches balance n + n^2 / "
        "this. auto: from config.json. null: by tokens alone.",
    )
    packed: bool = Field(
        default=True, description="Pack sequences without padding (thd). False: one sequence a micro-batch."
    )
    balance_experts: bool = Field(
        default=True,
        description="With expert parallelism and replay r3: exchange sequences of similar length between "
        "micro-batches, so that ranks wait less for each other's experts. No token's weight changes.",
    )
    lr: float = Field(default=1e-6, le=1, gt=0, description="Peak learning rate.")
    min_lr: float = Field(default=0.0, le=1, ge=0, description="Final learning rate.")
    lr_warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer steps in which the learning rate rises from 0."
    )
    lr_decay_style: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="How the learning rate falls after the warm-up, until the last step."
    )
    weight_decay: float = Field(default=0.0, le=1, ge=0, description="AdamW's weight decay, for matrices only.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of Adam's mean of gradients.")
    adam_beta2: float = Field(default=0.98, ge=0, lt=1, description="Decay of Adam's mean of their squares.")
    adam_eps: float = Field(default=1e-8, gt=0, description="Added to Adam's denominator.")
    clip_grad: float = Field(
        default=1.0,
        le=1e9,
        ge=0,
        description="Maximum gradient norm; larger gradients are scaled down. 0: no clipping.",
    )
    replay: ReplayMode = Field(
        default="r3",
        description="Routing replay: r3 uses the rollout's routes, r2 the trainer's own old-log-prob pass.",
    )
    replay_max_age: int | None = Field(
        default=None,
        ge=0,
        description="r3: routes of weights more than this many versions old are not replayed. null: all are replayed.",
    )
    log_prob_chunk_tokens: int = Field(
        default=1024,
        ge=1,
        description="Tokens whose logits are held in fp32 at once if Triton is missing; with Triton there are none.",
    )
    logits_mib: float = Field(
        default=1024,
        gt=0,
        description="Maximum size of a micro-batch's logits on a GPU, in MiB. Larger ones are computed in blocks of "
        "the vocabulary (at least 128 ids): up to a third more work in the output layer.",
    )
    fp8: Fp8Recipe | None = Field(
        default=None,
        description="On GPUs: FP8 products in linear layers by Transformer Engine, with a scale for each block of 128 "
        "(blockwise) or each tensor (tensorwise). Parameters stay bfloat16.",
    )
    sft_batch_size: int = Field(default=64, ge=1, description="sft: rows of one step.")
    sft_loss_on: SftLossOn = Field(
        default="all",
        description="sft with data.messages_key: train all assistant turns, the last one, or each as its own sequence, "
        "rendered as the last (for templates that drop earlier thinking).",
    )
    sft_too_long: Literal["refuse", "skip", "cut"] = Field(
        default="refuse",
        description="sft: treatment of rows longer than rollout.max_total_tokens (default: the model's positions); "
        "skipped and cut rows are counted in data/skipped_rows and data/cut_rows.",
    )

    @property
    def logit_bytes(self) -> int:
        """`logits_mib` in bytes."""
        return int(self.logits_mib * 2**20)


def check_train(train: TrainConfig, *, policy_steps: int, groups_per_step: int) -> None:
    """Reject invalid learning rates and numbers of optimizer steps.

    Args:
        policy_steps: steps of the run that train the policy.
        groups_per_step: of the rollout.

    Raises:
        ConfigError: the first broken rule.
    """
    total, steps = policy_steps * train.optimizer_steps_per_rollout, train.optimizer_steps_per_rollout
    refuse_first("train", [
        (train.min_lr > train.lr, "min_lr", train.min_lr, f"must not exceed train.lr = {train.lr}", "lower it"),
        (train.lr_warmup_steps >= total > 1, "lr_warmup_steps", train.lr_warmup_steps,
         f"must be below the policy's {total} optimizer steps", "shorten the warm-up, or raise train.num_steps"),
        (train.task == "rl" and groups_per_step % steps, "optimizer_steps_per_rollout", steps,
         f"must divide rollout.groups_per_step = {groups_per_step}", "choose a divisor"),
    ])  # fmt: skip
