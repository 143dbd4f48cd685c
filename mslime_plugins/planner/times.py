"""Estimated seconds of the parts of a step, to compare layouts: operations over the GPU's rate, bytes over links.

These are rooflines with assumed fractions of nominal rates, not validated on a GPU. They rank layouts of one model on
one cluster, for which common errors cancel; they do not predict durations. All responses are assumed to have maximal
length, as everywhere in a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mslime.config.cluster import ClusterConfig, GpuSpec, nominal
from mslime.config.layout import ParallelLayout
from mslime.config.resolved import PolicySpec
from mslime.config.rollout import RolloutConfig
from mslime.config.transports import traits_of
from mslime.convert.families.family import ModelFields
from mslime.convert.flops import ModelSizes, matrix_elements_per_token
from mslime.convert.table import RuleTable
from mslime_plugins.planner.activations import EXPERT_IMBALANCE
from mslime_plugins.planner.engine import EngineMemory
from mslime_plugins.planner.parameters import StageParameters, model_parameters
from mslime_plugins.planner.sync_bytes import CHANGED, LinkRates
from mslime_plugins.planner.trainer_memory import offloaded_share

DENSE, EXPERTS, SCORES = 0.55, 0.4, 0.45
"""Fractions of nominal FLOP/s: dense matrix products, grouped products of experts, attention scores."""
DECODING, READING = 0.4, 0.7
"""Fractions of nominal FLOP/s and of memory bandwidth, in a decoding engine."""
LINK = 0.7
"""Fraction of a link's rate that collectives reach."""
SEEN = 0.5
"""Fraction of communication not hidden by computation: gradients, parameters and context parallelism."""
DISK = 1e9
"""Bytes a second of one GPU's share of a machine's NVMe disks."""
HOST_ADAM = 20e9
"""Bytes a second of host memory for one GPU's share of an optimizer on CPU."""
ADAM_BYTES = 28
"""Bytes that Adam reads and writes per parameter: gradient, main weight and two moments, the last three twice."""
KERNELS, NEAR_REDUCE, FAR_REDUCE = 15e-6, 12e-6, 30e-6
"""Seconds of a decoder layer in one decoding step beside its bytes: kernels, and each of two all-reduces within a host,
or between hosts."""


@dataclass(frozen=True)
class ClusterSpeeds:
    """Speeds of one cluster.

    Attributes:
        gpu: nominal values of its GPUs.
        nvlink, network: bytes a second of one GPU, in one direction.
        per_node: GPUs of a host.
        host: bytes a second between one GPU and its host's memory, while all GPUs of a host copy.
    """

    gpu: GpuSpec
    nvlink: float
    network: float
    per_node: int
    host: float

    @property
    def flops(self) -> float:
        """Nominal FLOP/s."""
        return self.gpu.tflops * 1e12


@dataclass(frozen=True)
class StepWork:
    """Work of a step, independent of the layout.

    Attributes:
        responses: in total.
        prompt, sampled: tokens of each, at most.
        forwards: passes for log-probs, of the policy and of a reference.
        optimizer_steps: in a step.
        active: elements that a token multiplies with.
        layers: decoder layers.
        top_k, experts: of routed layers; 0 without.
        width: bytes of an element in engines, on average.
    """

    responses: int
    prompt: int
    sampled: int
    forwards: int
    optimizer_steps: int
    active: float
    layers: int
    top_k: int
    experts: int
    width: float = 2.0

    @property
    def length(self) -> int:
        """Tokens of a response with its prompt."""
        return self.prompt + self.sampled

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.responses * self.length


def speeds_of(cluster: ClusterConfig, gpu: str) -> ClusterSpeeds:
    """Speeds of the configured cluster, with GPUs of a name in `config.cluster.GPUS`."""
    known = nominal(gpu)
    assert known is not None, gpu
    set_by_hand = "gpu_nvlink_gb_per_s" in cluster.model_fields_set
    nvlink = cluster.gpu_nvlink_gb_per_s if set_by_hand or not known.nvlink else known.nvlink
    network, host = cluster.gpu_network_gbits / 8 * 1e9, cluster.gpu_host_gb_per_s * 1e9
    return ClusterSpeeds(known, nvlink * 1e9, network, cluster.gpus_per_node, host)


def work_of(
    r: RolloutConfig, spec: PolicySpec, table: RuleTable, model: ModelFields, longest: int, sent: int
) -> StepWork:
    """Work of a step of a run.

    Args:
        longest: tokens of a response with its prompt.
        sent: bytes of a sync.
    """
    sampled = min(r.max_response_tokens, longest)
    return StepWork(
        responses=r.groups_per_step * r.group_size, prompt=longest - sampled, sampled=sampled,
        forwards=1 + (spec.reference is not None),
        optimizer_steps=spec.train.optimizer_steps_per_rollout,
        active=matrix_elements_per_token(table, model.top_k), layers=model.num_layers,
        top_k=model.top_k if model.num_experts else 0, experts=model.num_experts,
        width=sent / model_parameters(table),
    )  # fmt: skip


def train_seconds(
    spec: PolicySpec,
    w: ModelSizes,
    held: Sequence[StageParameters],
    work: StepWork,
    micro_batches: int,
    speeds: ClusterSpeeds,
) -> dict[str, float]:
    """Seconds of log-probs and optimizer steps in a step, by activity.

    Args:
        held: parameters of a rank of each stage.
        micro_batches: of an optimizer step.
    """
    layout = spec.layout
    tokens = -(-work.responses // layout.dp) * work.length / layout.cp
    recomputed = spec.megatron.recompute.granularity == "full"
    passes = 3 + recomputed + work.forwards  # a backward pass counts as two
    crossings = 2 + recomputed + work.forwards  # and crosses the links once
    stages = [
        {
            "compute": passes * _products(stage, layout, w, work, tokens, speeds),
            "tensor": crossings * _tensor(stage, layout, w, tokens, speeds),
            "experts": crossings * _experts(stage, layout, w, tokens, speeds),
            "context": crossings * _context(stage, layout, w, tokens, speeds),
        }
        for stage in held
    ]
    slowest = max(stages, key=lambda parts: sum(parts.values()))
    bubble = (layout.pp - 1) / max(1, micro_batches * layout.vpp)
    largest = max(held, key=lambda stage: stage.trained)
    return slowest | {
        "pipeline": bubble * sum(slowest.values()),
        "data": work.optimizer_steps * _data(largest, layout, speeds),
        "optimizer": work.optimizer_steps * _optimizer(spec, largest, speeds),
    }


def _products(
    stage: StageParameters, layout: ParallelLayout, w: ModelSizes, work: StepWork, tokens: float, speeds: ClusterSpeeds
) -> float:
    """Seconds of matrix products in a forward pass of one rank."""
    dense = stage.dense - stage.embedding
    per_expert = stage.expert / max(1, work.experts // layout.ep)
    experts = per_expert * work.top_k * layout.etp / layout.tp * EXPERT_IMBALANCE
    full = sum(layer not in w.linear_layers for layer in stage.layers)
    scores = full * work.length / 2 * w.heads * (w.head_dim + w.rope_dim + w.value_dim) / layout.tp
    return 2 * tokens * (dense / DENSE + experts / EXPERTS + scores / SCORES) / speeds.flops


def _tensor(
    stage: StageParameters, layout: ParallelLayout, w: ModelSizes, tokens: float, speeds: ClusterSpeeds
) -> float:
    """Sequence parallelism gathers and scatters hidden states around attention, and around a dense or shared MLP."""
    if layout.tp == 1:
        return 0.0
    around = sum(4 if layer not in w.moe_layers or w.shared_mlp else 2 for layer in stage.layers)
    link = speeds.nvlink if layout.tp <= speeds.per_node else speeds.network
    return around * tokens * w.hidden * 2 * (layout.tp - 1) / layout.tp / (link * LINK)


def _experts(
    stage: StageParameters, layout: ParallelLayout, w: ModelSizes, tokens: float, speeds: ClusterSpeeds
) -> float:
    """Tokens travel to their experts and back: within a host over NVLink, to others over the network, both at once.
    Ranks of a group are consecutive."""
    routed = sum(layer in w.moe_layers for layer in stage.layers)
    size = layout.expert_size
    if not routed or size == 1:
        return 0.0
    moved = routed * 2 * tokens / layout.tp * w.top_k * w.hidden * 2 * layout.etp * EXPERT_IMBALANCE
    near = min(size, speeds.per_node)
    over_nvlink = moved * (near - 1) / size / (speeds.nvlink * LINK)
    return max(over_nvlink, moved * (size - near) / size / (speeds.network * LINK))


def _context(
    stage: StageParameters, layout: ParallelLayout, w: ModelSizes, tokens: float, speeds: ClusterSpeeds
) -> float:
    """Keys and values pass around a ring of context-parallel ranks."""
    if layout.cp == 1:
        return 0.0
    groups = w.heads if w.latent else w.groups
    widths = max(1.0, groups / layout.tp) * (w.head_dim + w.rope_dim + w.value_dim)
    link = speeds.nvlink if layout.tp * layout.cp <= speeds.per_node else speeds.network
    return SEEN * len(stage.layers) * tokens * (layout.cp - 1) * widths * 2 / (link * LINK)


def _data(stage: StageParameters, layout: ParallelLayout, speeds: ClusterSpeeds) -> float:
    """Gradients are reduced in float32 and parameters gathered in 16 bits, over the ranks with copies of them."""
    near = layout.stage_size <= speeds.per_node
    link = (speeds.nvlink if near else speeds.network) * LINK
    repeated = ((stage.dense, layout.dp * layout.cp), (stage.expert, layout.edp))
    return SEEN * sum(elements * 6 * (ranks - 1) / ranks for elements, ranks in repeated) / link


def _optimizer(spec: PolicySpec, stage: StageParameters, speeds: ClusterSpeeds) -> float:
    """Adam on a rank's share: on the GPU, or on the host with gradients down and parameters up."""
    layout, sharded = spec.layout, spec.megatron.use_distributed_optimizer
    ranks = (layout.dp * layout.cp, layout.edp) if sharded else (1, 1)
    own = stage.dense / ranks[0] + stage.expert / ranks[1]
    away = offloaded_share(spec.megatron.extra)
    on_host = own * away * (6 / speeds.host + ADAM_BYTES / HOST_ADAM)
    return on_host + own * (1 - away) * ADAM_BYTES / (speeds.gpu.memory * 1e9 * READING)


def generate_seconds(engine: EngineMemory, engines: int, tp: int, work: StepWork, speeds: ClusterSpeeds) -> float:
    """All responses of a step, on `engines` of `tp` GPUs: as many at once as fit into the cache, decoded token by
    token.

    A decoding step reads the weights (only experts with tokens) and the keys and values of all running responses, and
    multiplies. The longer of the two counts, plus the latency of its layers.
    """
    each = -(-work.responses // engines)
    together = max(1, min(each, engine.tokens // max(1, work.length)))
    touched = 1 - (1 - work.top_k / work.experts) ** together if work.experts else 1.0
    dense = min(1.0, work.active * work.width / tp / max(1, engine.weights))
    weights = engine.weights * (dense + (1 - dense) * touched)
    read = weights + together * ((work.prompt + work.sampled / 2) * engine.token_bytes + engine.state_bytes)
    reading = read / (speeds.gpu.memory * 1e9 * READING)
    multiplying = together * 2 * work.active / tp / (speeds.flops * DECODING)
    reduces = 0.0 if tp == 1 else 2 * (NEAR_REDUCE if tp <= speeds.per_node else FAR_REDUCE)
    token = max(reading, multiplying) + work.layers * (KERNELS + reduces)
    prefill = each * work.prompt * 2 * work.active / tp / (speeds.flops * DECODING)
    return each / together * work.sampled * token + prefill


def sleep_seconds(moved: int, weights: int, host: float, on_disk: bool = False) -> float:
    """Seconds of offloading in a colocated step: a rank's state to the host and back, and the weights once more for the
    probe.

    Args:
        host: see `ClusterSpeeds`.
    """
    return (2 * moved + weights) / (DISK if on_disk else host)


def file_seconds(transport: str, total: int, machines: int, rates: LinkRates) -> float:
    """Rough seconds of a sync through files: memory of one host, or a shared directory.

    Args:
        total: bytes of all weights.
        machines: hosts of engines, each of which reads everything.
    """
    if traits_of(transport).one_host or machines == 1:
        return 2 * total / rates.host
    return (1 + machines) * total * (CHANGED if traits_of(transport).sends_changes else 1.0) / rates.directory


def step_seconds(parts: Mapping[str, float], ahead: bool) -> float:
    """Seconds of a whole step.

    Args:
        parts: `generate`, `train`, `sync` and `sleep`.
        ahead: whether engines generate the next step's responses while the trainer works.
    """
    both = (parts["generate"], parts["train"])
    return (max(both) if ahead else sum(both)) + parts["sync"] + parts["sleep"]
