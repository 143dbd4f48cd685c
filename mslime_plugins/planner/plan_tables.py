"""Print a plan as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mslime.config.transports import traits_of
from mslime.tables import facts_table
from mslime_plugins.planner.activations import EXPERT_IMBALANCE
from mslime_plugins.planner.plan import RunPlan
from mslime_plugins.planner.problems import GIB, TIGHT, Verdict, verdict_of
from mslime_plugins.planner.rollouts import RolloutBytes, TokenBytes
from mslime_plugins.planner.stages import StagePlan
from mslime_plugins.planner.sync_bytes import lane_bytes

_STYLES: dict[Verdict, str] = {"fits": "green", "tight": "yellow", "does not fit": "red"}


def describe(plan: RunPlan) -> Group:
    """The whole plan, with the verdict last, so that it stays visible on a terminal."""
    parts: list[Table | Text] = [_overview(plan), _trainer(plan, plan.stages, "Trainer")]
    if plan.critic_stages:
        parts.append(_trainer(plan, plan.critic_stages, "Critic"))
    parts.append(_balance(plan))
    if plan.engine is not None:
        parts += [_engine(plan), *([_phases(plan)] if plan.phases else []), _sync(plan)]
    if plan.rollouts is not None:
        parts.append(_rollouts(plan.rollouts))
    parts.append(_disk(plan))
    remarks = [Text(f"remark: {remark}", style="yellow") for remark in plan.remarks]
    return Group(*parts, *remarks, _verdict(plan))


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _cell(size: float) -> str:
    """A table cell for bytes; a dash for 0."""
    return _gib(size) if size else "–"


def _range(values: Sequence[float], form: str) -> str:
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def _overview(plan: RunPlan) -> Table:
    model = plan.fields
    experts = (
        f", {model.num_experts} experts in {len(model.moe_layer_ids)} of them, top-{model.top_k}"
        if model.num_experts
        else ""
    )
    return facts_table(
        "Plan",
        [
            ("model", f"{plan.model}, {plan.parameters / 1e9:.2f} B parameters, {model.num_layers} layers{experts}"),
            ("trainer", f"{plan.trainer_gpus} GPUs, {plan.layout.describe()}"),
            *([("critic", f"{plan.trainer_gpus} separate GPUs")] if plan.critic_stages else []),
            ("engines", _engines(plan)),
            ("machines", f"{plan.nodes}, each GPU with {plan.gpu_bytes / GIB:.1f} usable GiB"),
        ],
    )


def _engines(plan: RunPlan) -> str:
    if not plan.engine_gpus:
        return "none"
    return f"{plan.engine_gpus} of the trainer's GPUs" if plan.phases else f"{plan.engine_gpus} GPUs"


def _phases(plan: RunPlan) -> Table:
    table = Table(
        title="Shared GPUs: GiB of the fullest one, by phase of a step", title_justify="left", title_style="bold"
    )
    for name in ("phase", "stage", "trainer", "server", "both", "of the GPU"):
        table.add_column(name, justify="right" if name != "phase" else "left")
    for phase in plan.phases:
        verdict, whose = plan.phase_verdict(phase), ", a teacher's" if phase.server == "teacher" else ""
        table.add_row(
            phase.phase + whose, str(phase.stage), _gib(phase.trainer), _gib(phase.engine), _gib(phase.total),
            Text("all: SGLang's cache uses the rest") if phase.phase == "generate"
            else share_of(phase.total / plan.gpu_bytes, verdict),
        )  # fmt: skip
    return table


def share_of(share: float, verdict: Verdict) -> Text:
    """A fraction with its verdict; a fraction that fits has none."""
    return Text(f"{share:.0%}" + ("" if verdict == "fits" else f" {verdict}"), style=_STYLES[verdict])


def _trainer(plan: RunPlan, stages: tuple[StagePlan, ...], who: str) -> Table:
    table = Table(
        title=f"{who}: GiB of one GPU at its peak, by pipeline stage", title_justify="left", title_style="bold"
    )
    shared = any(stage.memory.critic for stage in stages)
    names = [name for name in stages[0].memory.components() if shared or name != "critic"]
    for name in ("stage", "layers", *names, "peak", "of the GPU"):
        table.add_column(name, justify="right")
    for first, last in _runs(stages):
        memory = first.memory
        which = f"{first.held.stage}" if first is last else f"{first.held.stage} to {last.held.stage}"
        table.add_row(
            which, str(len(first.held.layers)), *(_cell(memory.components()[name]) for name in names),
            _gib(memory.peak), share_of(memory.peak / plan.gpu_bytes, plan.verdict_of(memory.peak)),
        )  # fmt: skip
    return table


def _runs(stages: tuple[StagePlan, ...]) -> list[tuple[StagePlan, StagePlan]]:
    """First and last stage of every run of stages with identical rows."""
    runs: list[tuple[StagePlan, StagePlan]] = []
    for stage in stages:
        if runs and _same(runs[-1][0], stage):
            runs[-1] = (runs[-1][0], stage)
        else:
            runs.append((stage, stage))
    return runs


def _same(one: StagePlan, other: StagePlan) -> bool:
    return len(one.held.layers) == len(other.held.layers) and one.memory == other.memory


def _balance(plan: RunPlan) -> Table:
    few, many = plan.responses
    sizes, work = [stage.held.trained for stage in plan.stages], [stage.work for stage in plan.stages]
    layers = [len(stage.held.layers) for stage in plan.stages]
    rows = [
        ("layers of a stage", _range(layers, "d")),
        ("parameters of a rank", f"{_range([size / 1e9 for size in sizes], '.3f')} B"),
    ]
    if any(stage.adapters for stage in plan.stages):
        trained = [stage.trained / 1e6 for stage in plan.stages]
        rows.append(("trained of them", f"{_range(trained, '.2f')} M in addition, in adapters"))
    if len(layers) > 1:
        rows.append(("work of a token", f"{_range(work, '.2f')} of the mean stage, without attention scores"))
    if plan.experts_per_rank:
        rows.append(
            (
                "experts of a rank",
                f"{plan.experts_per_rank}, {plan.layout.edp} replica(s); the fullest rank gets {EXPERT_IMBALANCE:g} "
                "times the mean tokens",
            )
        )
    rows += [
        ("sequences of a rank", f"{_range((few, many), 'd')} per optimizer step"),
        ("micro-batches", f"at most {plan.micro_batches}, if all sequences have maximal length"),
    ]
    if plan.layout.pp > 1:
        rows.append(("pipeline bubble", f"{plan.bubble:.0%} of a step with this number"))
    if plan.host.total:
        parts = (
            ("the optimizer", plan.host.optimizer),
            ("reference and teacher", plan.host.copies),
            ("the weight sync", plan.host.sync),
            ("the shards of a step", plan.host.shards),
            ("an offloaded trainer", plan.host.offloaded),
            ("an offloaded teacher", plan.host.teacher),
            ("a checkpoint being written", plan.host.checkpoint),
        )
        whose = ", ".join(f"{_gib(size)} for {name}" for name, size in parts if size)
        of = f", {plan.host_share:.0%} of usable memory" if plan.host_usable else ""
        note = "" if (verdict := verdict_of(plan.host_share)) == "fits" else f" ({verdict})"
        rows.append(("host memory", f"{_gib(plan.host.total)} GiB of a trainer machine{of}{note}: {whose}"))
    return facts_table("Balance", rows)


def _engine(plan: RunPlan) -> Table:
    engine = plan.engine
    assert engine is not None
    sent = "buckets" if traits_of(plan.transport).passes_on else "a bucket"
    rows = [
        ("weights", f"{_gib(engine.weights)} GiB in {plan.engine_dtype}"),
        ("cache", f"{_gib(engine.cache)} GiB: {engine.tokens:,} tokens of {engine.token_bytes / 1024:.1f} KiB"),
        ("outside", f"{_gib(engine.runtime)} GiB, {_gib(engine.bucket)} of it for {sent} of the weight update"),
    ]
    if engine.adapters:
        rows.insert(1, ("adapters", f"{_mib(engine.adapters)} MiB for all adapters served at once"))
    if engine.state:
        per_request = f"{engine.state_bytes / 2**20:.0f} MiB per request"
        rows.insert(2, ("linear attention", f"{_gib(engine.state)} GiB of states, {per_request}"))
    return facts_table("Engine: one GPU", rows)


def _rollouts(found: RolloutBytes) -> Table:
    rows = [("tokens of a step", f"at most {found.tokens:,}, in {found.responses:,} responses")]
    if found.support_ids:
        how = f"{found.support_ids:,.0f} assumed, at most {found.most_ids:,}"
        rows.append(("candidate ids per token", how))
    rows += [
        ("replies of the engines", _of_parts(found.answers)),
        ("held by the rollout managers", _of_parts(found.held)),
        ("in Ray's store", _of_parts(found.store)),
    ]
    return facts_table("Rollouts, with all responses of maximal length", rows)


def _disk(plan: RunPlan) -> Table:
    saved = plan.saved
    parts = (("weights", saved.weights), ("main weights", saved.main), ("moments", saved.moments))
    of = ", ".join(f"{_gib(size)} of {name}" for name, size in parts if size)
    often = f", every {saved.every} steps" if saved.every else ", after the last step"
    share = f" of about {plan.seconds['step']:.0f} s each: {plan.save_share:.1%} overhead" if plan.save_share else ""
    many, export = saved.exports
    ever = f", and {saved.for_ever} kept forever" if saved.for_ever else ""
    rows = [
        ("a checkpoint", f"{_gib(saved.checkpoint)} GiB of all ranks: {of}"),
        (
            "written in",
            f"{saved.seconds:,.1f} s at {plan.rates.directory / 1e9:g} GB/s, while all ranks wait{often}{share}",
        ),
        ("at once", f"at most {saved.at_once}, including the one being written{ever}"),
        *([("exports", f"{many} of {_gib(export)} GiB")] if many else []),
        *([("weight sync", f"{_gib(saved.sync)} GiB in weights.directory: all weights twice")] if saved.sync else []),
        ("in total", f"at most {_gib(saved.total)} GiB, besides responses and logs"),
    ]
    return facts_table("Disk", rows)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def _of_parts(size: TokenBytes) -> str:
    parts = [f"{_gib(part)} of {name}" for name, part in (("routes", size.routes), ("supports", size.supports)) if part]
    return f"{_gib(size.total)} GiB" + (f", {' and '.join(parts)}" if parts else "")


def _sync(plan: RunPlan) -> Table:
    if plan.engine is not None and plan.engine.adapters:
        return facts_table(
            "Sync of adapters",
            [
                ("written by the trainer", f"{_mib(plan.sync_bytes)} MiB, in a file"),
                ("read by every engine rank", f"{_mib(plan.sync_bytes)} MiB, while it generates"),
            ],
        )
    gathered = sum(sender.gathered_near + sender.gathered_far for sender in plan.syncs)
    far, count = sum(sender.gathered_far for sender in plan.syncs), len(plan.syncs)
    from_others = f", {_gib(far)} of it from other machines" if far else ""
    return facts_table(
        "Weight sync",
        [
            ("transport", plan.transport),
            ("gathered by senders", f"{_gib(gathered)} GiB{from_others}"),
            (f"sent by {count} ranks", f"at most {_gib(max(s.sent for s in plan.syncs))} GiB each"),
            ("to a sender, by another rank", f"at most {_gib(max(s.contributed for s in plan.syncs))} GiB"),
            ("to every engine GPU", f"{_gib(plan.sync_bytes)} GiB in {sum(s.buckets for s in plan.syncs)} buckets"),
            *(
                [("into every engine machine", f"{_gib(plan.sync_bytes)} GiB, and as much from it to the next")]
                if traits_of(plan.transport).joins_engines
                else []
            ),
            *_bound(plan),
        ],
    )


def _bound(plan: RunPlan) -> list[tuple[str, str]]:
    if not traits_of(plan.transport).passes_on:
        over = f" over {plan.rates.network / 1e9:g} GB/s for each GPU's adapter"
        parts = over if traits_of(plan.transport).way in ("network", "adapters") else f" (s: {_seconds(plan.bounds)})"
        return [("at least", f"{plan.sync_seconds:.1f} s{parts}")]
    lanes = lane_bytes(plan.syncs, plan.near_ranks, plan.sent_share)
    used, fullest = f"{len(lanes)} of the {plan.near_ranks} ranks of an engine on a machine", _gib(max(lanes.values()))
    return [
        ("received from senders by", f"{used}, at most {fullest} GiB each"),
        ("at least", f"{plan.sync_seconds:.1f} s (s: {_seconds(plan.bounds)})"),
    ]  # fmt: skip


def _seconds(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())


def _verdict(plan: RunPlan) -> Text:
    free = f"{_gib(plan.gpu_bytes - plan.fullest)} GiB of GPU memory free on the fullest trainer GPU"
    if plan.phases:
        free += f", in phase {plan.fullest_phase}" if plan.fullest_phase else ", of the critic's"
    if plan.verdict == "tight":
        host = f", {1 - plan.host_share:.0%} of a machine's memory" if verdict_of(plan.host_share) == "tight" else ""
        rule = f"above {TIGHT:.0%} the plan's error may exceed the free memory"
        return Text(f"\ntight: {free}{host}; {rule}", style="bold yellow")
    if plan.verdict == "fits":
        return Text(f"\nfits: {free}", style="bold green")
    lines = [
        f"{p.where}: needs {_gib(p.needs)} GiB of {_gib(p.has)}, most of it {p.component}\n  hint: {p.hint}"
        for p in plan.problems
    ]
    return Text("\ndoes not fit\n" + "\n".join(lines), style="bold red")
