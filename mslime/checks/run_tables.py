"""A resolved run as tables for a person."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group as RichGroup
from rich.table import Table
from rich.text import Text

from mslime.checks.environment import gpu_warnings
from mslime.checks.resolve import ResolvedRun
from mslime.config.algorithm import CriticConfig
from mslime.config.engines import SGLangConfig, TeacherConfig
from mslime.config.layout import ParallelLayout
from mslime.config.reward import RewardConfig, RewardPartConfig
from mslime.config.rollout import FUNCTION as ATROPOS
from mslime.config.rollout import RolloutConfig
from mslime.config.train import TrainConfig
from mslime.config.warnings import warnings
from mslime.rollout.group_tracker import SubmitGate
from mslime.tables import facts_table


def describe(run: ResolvedRun) -> RichGroup:
    """Describe the resolved run in tables: layout, model, batch arithmetic, staleness, switches, warnings."""
    config = run.config
    parts: list[Any] = [_model_table(run), _layout_table(config.layout)]
    if run.adapters:
        parts += [_adapters_table(run), *(_adapter_table(own) for own in run.adapters.values())]
        texts = {text: None for own in run.adapters.values() for text in warnings(own.config)}
        parts += [Text(f"note: {text}") for text in run.notes]
        parts += [Text(f"warning: {text}", style="yellow") for text in [*texts, *gpu_warnings(config.cluster)]]
        return RichGroup(*parts)
    if config.train.task == "rl":
        parts += [_batch_table(config.rollout, config.train, config.sglang, config.layout.cp), _switch_table(run)]
    parts += [Text(f"note: {text}") for text in run.notes]
    parts += [Text(f"warning: {text}", style="yellow") for text in [*warnings(config), *gpu_warnings(config.cluster)]]
    return RichGroup(*parts)


def _adapters_table(run: ResolvedRun) -> Table:
    """Settings that the adapters share."""
    config, weights = run.config, {entry.name: entry.weight for entry in run.config.adapters}
    return facts_table(
        "Several adapters",
        [
            ("adapters", ", ".join(f"{name} (weight {weight:g})" for name, weight in weights.items())),
            (
                "engines",
                f"{config.sglang.servers} x TP{config.sglang.tp_size}, {config.rollout.concurrency} requests each; "
                f"{config.adapters_alive} adapter versions served at once",
            ),
            ("weight check", _weight_check(run)),
        ],
    )


def _adapter_table(run: ResolvedRun) -> Table:
    """Settings of one of several adapters."""
    config = run.config
    r, t, lora, a = config.rollout, config.train, config.lora, config.algorithm
    decay = "" if t.lr_decay_style == "constant" else f", {t.lr_decay_style} decay to {t.min_lr:g}"
    return facts_table(
        f"Adapter {config.name}",
        [
            ("layers", f"rank {lora.rank}, alpha {lora.alpha:g}, on {', '.join(lora.targets)}"),
            ("prompts", config.data.source or ", ".join(config.data.prompts)),
            ("reward", _reward(config.reward, r.function)),
            (
                "rollout",
                f"{r.groups_per_step} groups x {r.group_size} responses, at most {r.max_response_tokens} tokens",
            ),
            ("staleness", f"max_staleness {r.max_staleness}; older tokens are {_PAST[config.on_stale]}"),
            ("advantage and loss", f"{a.advantage}, {a.loss}"),
            ("learning rate", f"{t.lr:g}{decay}"),
            ("evaluation", ", ".join(s.name for s in config.data.eval_sets) or "off"),
            ("run", f"{t.num_steps} steps, in {config.run_dir}"),
        ],
    )


def _model_table(run: ResolvedRun) -> Table:
    model = run.model
    moe = (
        f"{len(model.moe_layer_ids)} of {model.num_layers} layers, {model.num_experts} experts, top-{model.top_k}"
        if model.num_experts
        else "none (dense)"
    )
    return facts_table(
        "Model",
        [
            ("checkpoint", str(run.config.model.path)),
            ("family", run.family.architecture),
            ("MoE", moe),
            ("vocabulary", f"{model.vocab_size:,} tokens, {model.max_positions:,} positions"),
        ],
    )


def _layout_table(layout: ParallelLayout) -> Table:
    title = f"Trainer layout: {layout.world_size} ranks, {layout.describe()}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in ("rank", "pipeline", "data", "context", "tensor", "expert data", "expert", "expert tensor"):
        table.add_column(name, justify="right")
    shown = range(layout.world_size) if layout.world_size <= 16 else [*range(8), layout.world_size - 1]
    for rank in shown:
        at = layout.place(rank)
        table.add_row(*(str(v) for v in (rank, at.pp, at.dp, at.cp, at.tp, at.edp, at.ep, at.etp)))
    return table


def _batch_table(r: RolloutConfig, t: TrainConfig, engines: SGLangConfig, cp: int) -> Table:
    responses = r.groups_per_step * r.group_size
    per_step = r.groups_per_step // t.optimizer_steps_per_rollout
    budget = t.max_tokens_per_micro_batch * cp
    in_flight, even = SubmitGate.of(r).limit(0), t.quadratic_tokens
    assert even != "auto", "`checks.resolve` counts it from the model"
    by = "tokens alone" if even is None else f"n + n^2 / {even:,.0f} for a sequence of n tokens"
    return facts_table(
        "One step",
        [
            (
                "rollout",
                f"{r.groups_per_step} groups x {r.group_size} responses, at most {r.max_response_tokens} tokens each",
            ),
            (
                "optimizer",
                f"{t.optimizer_steps_per_rollout} step(s) of {per_step} groups, {budget:,} tokens a micro-batch",
            ),
            ("balance", f"micro-batches by {by}"),
            (
                "engines",
                f"{engines.servers} x {engines.shape}, {r.concurrency} requests each; {in_flight} groups in flight"
                + (f"; {r.managers} rollout managers" if r.managers > 1 else ""),
            ),
            ("run", f"{t.num_steps} steps = {t.num_steps * responses:,} responses"),
        ],
    )


def _switch_table(run: ResolvedRun) -> Table:
    config = run.config
    r, a = config.rollout, config.algorithm
    partial = "aborted responses are continued" if r.partial else "off: aborted responses start again"
    stale = (
        "synchronous, on-policy"
        if r.max_staleness == 0
        else f"asynchronous, {r.max_staleness} version(s) ahead at most"
    )
    return facts_table(
        "On and off",
        [
            ("staleness", f"max_staleness {r.max_staleness}: {stale}; older tokens are {_PAST[config.on_stale]}"),
            ("partial rollouts", partial),
            ("over-sampling", f"{r.spare_groups} spare groups" if r.spare_groups else "off"),
            ("dynamic filter", r.dynamic_filter),
            ("routing replay", _REPLAY[config.train.replay]),
            ("advantage and loss", f"{a.advantage}, {a.loss}"),
            (
                "correction",
                a.correction.function or a.correction.preset or f"{a.correction.action} by {a.correction.level}",
            ),
            ("KL to reference", f"{a.kl_coef:g} x {a.kl_type}, in the {a.kl_in}" if a.kl_coef else "off"),
            *(
                [("critic", _critic(config.critic, config.model.path, config.critic_ranks))]
                if config.has_critic
                else []
            ),
            ("distillation", _distillation(config.teacher, a.opd_coef, config.model.teacher_path)),
            ("entropy bonus", f"{a.entropy_coef:g}" if a.entropy_coef else "off"),
            ("reward", _reward(config.reward, r.function)),
            ("evaluation", ", ".join(s.name for s in config.data.eval_sets) or "off"),
            *([("weights", f"by {config.transport}")] if config.colocated else []),
            ("weight check", _weight_check(run)),
        ],
    )


def _weight_check(run: ResolvedRun) -> str:
    mode = run.config.weights.verify
    bits = {"never": "", "always": "every bit of each sync"}.get(mode, "every bit of the first two syncs")
    probe = f"a fixed text after each, {run.probe_tolerance:g} nats" if mode in ("probe", "always") else ""
    return ", ".join(filter(None, (bits if run.config.compares_weights else "", probe))) or "none"


def _reward(reward: RewardConfig, function: str) -> str:
    if function == ATROPOS:
        return "the environments' scores"
    graders = [(f"{p.weight:g} x {p.name}: " if reward.parts else "", p) for p in reward.graders]
    summary = "; ".join(f"{head}{p.function or _served(p) or p.kind}" for head, p in graders)
    overlong, repetition = reward.overlong, reward.repetition
    if overlong.buffer_tokens:
        summary += f"; up to -{overlong.factor:g} in the last {overlong.buffer_tokens} tokens"
    if repetition.ngram:
        summary += f"; -{repetition.factor:g} x share of repeated {repetition.ngram}-grams"
    return summary


def _served(part: RewardPartConfig) -> str:
    return "" if part.servers is None else f"{part.kind} at {', '.join(part.servers[1].urls)}"


def _critic(critic: CriticConfig, policy: Path, ranks: int) -> str:
    where = f"on its own {ranks} GPUs" if ranks else "on the policy's GPUs"
    warm_up = f", alone in the first {critic.warmup_steps} step(s)" if critic.warmup_steps else ""
    return f"{critic.path or policy} with a value head, {where}, learning rate {critic.lr:g}{warm_up}"


def _distillation(teacher: TeacherConfig, coefficient: float, held: Path | None) -> str:
    if coefficient == 0:
        return "off"
    where = f"held by the trainer, {held}"
    if teacher.urls:
        where = f"served at {', '.join(teacher.urls)}; its vocabulary is compared when the run connects"
    elif teacher.path is not None:
        where = f"{teacher.num_engines} server(s) x TP{teacher.tp_size} of {teacher.path}"
    return f"{coefficient:g} x (log pi_old - log teacher); teacher {where}"


_REPLAY = {"r3": "R3, the engine's routes", "r2": "R2, the trainer's own routes", "off": "off"}
_PAST = {"keep": "trained under the correction", "mask": "masked", "reroll": "generated again", "drop": "dropped"}
