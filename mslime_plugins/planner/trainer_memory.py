"""Memory of a trainer GPU by component, for each pipeline stage.

Bytes per parameter are those of megatron-core's mixed-precision training with or without the distributed optimizer
(megatron-core docs, `dist_optimizer`: bf16 parameters with fp32 gradients take 6 + 12/d bytes sharded over d ranks, 18
otherwise; fp32 training 8 + 8/d and 16).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from mslime.config.fp8 import COPY_BYTES, fp8_rows
from mslime.config.layout import ParallelLayout
from mslime.config.model_facts import trainer_dtype
from mslime.config.resolved import ModelSpec, PolicySpec, TrainingSpec
from mslime.config.schema import RunConfig
from mslime.config.train import TrainConfig
from mslime.config.transports import traits_of
from mslime.convert.flops import ModelSizes
from mslime.weights.weight_plan import DTYPE_BYTES, Bucket, WeightPlan
from mslime_plugins.planner.activations import chunks_in_flight, kept_elements, working_bytes
from mslime_plugins.planner.parameters import StageParameters

CONTEXT_BYTES = 3 * 2**30
"""CUDA context, NCCL's buffers for some ten groups, cuBLAS workspaces: a round number above observed values."""
FRAGMENTATION = 0.05
"""Fraction of the GPU lost between PyTorch's blocks: an assumption."""
LOG_PROB_BYTES = 76
"""Most bytes of a token: 12 kept for the backward pass and 64 while it runs (`backends/megatron/log_probs/`)."""
PINNED_ROUNDING = 1.44
"""PyTorch's pinned blocks are powers of two: 1 / ln 2 is the mean ratio over sizes between two of them."""
IPC_BUFFERS = 3
"""Buckets that checkpoint-engine holds on every GPU: two to broadcast into, one from the host."""
UNBOUNDED_PROMPT = 1024
"""Tokens of the longest prompt without `data.max_prompt_tokens`: an assumption."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes on one GPU of a stage (of its leader, which alone fills weight-sync buckets).

    Attributes:
        weights: parameters and buffers; with `train.fp8` also the FP8 copies.
        gradients: the buffer of gradient sums.
        optimizer: main weights and Adam's two moments, this rank's share.
        activations: kept by all micro-batches in flight.
        working: additional memory of one layer's backward pass.
        logits: on the last stage, for one micro-batch: logits or a block of them, memory of log-probs, and the inputs
            of the final norm and the output layer.
        sync: buffers of the weight sync; not at the same time as activations, working and logits.
        critic: on the same GPU: its weights, gradients and optimizer, and memory of its step beyond the policy's.
        reserve: CUDA context, communication buffers and fragmentation.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    logits: int
    sync: int
    reserve: int
    critic: int = 0

    @property
    def states(self) -> int:
        """Bytes that persist from step to step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def step(self) -> int:
        """Additional bytes of a training step: a micro-batch's logits are freed before the backward pass of the
        layers."""
        return self.activations + max(self.working, self.logits)

    @property
    def at_work(self) -> int:
        """Temporary bytes: of a training step or a weight sync, whichever takes more."""
        return max(self.step, self.sync)

    @property
    def peak(self) -> int:
        """Peak bytes."""
        return self.states + self.at_work + self.critic + self.reserve

    def beside(self, critic: TrainerMemory) -> TrainerMemory:
        """The same GPU shared with a critic, whose steps alternate with the policy's."""
        return replace(self, critic=critic.states + max(critic.at_work - self.at_work, 0))

    def components(self) -> dict[str, int]:
        """Bytes by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def params_bytes(spec: ModelSpec) -> int:
    """Bytes of a parameter; the device `auto` counts as a GPU."""
    return DTYPE_BYTES[trainer_dtype(spec.megatron, cpu=spec.device == "cpu")]


def optimizer_bytes_per_parameter(width: int, extra: Mapping[str, object]) -> float:
    """Bytes of optimizer state on the GPU for each parameter that a rank updates.

    Args:
        width: bytes of the parameter; float32 ones are their own main copy.
        extra: passed-through OptimizerConfig fields: the precision-aware optimizer keeps other dtypes (and of a float32
            main weight only the 16 bits that the bfloat16 one lacks, `store_param_remainders`); CPU offload moves a
            share of the state to the host, where neither applies. The main weight stays on the GPU as well, unless the
            optimizer is the precision-aware one (`distrib_optimizer.py`, `cpu_offloading/hybrid_optimizer.py`).
    """
    main, first, second = (0 if width == 4 else 4), 4, 4
    if extra.get("optimizer_cpu_offload"):
        staying = 1 - offloaded_share(extra)
        return main * (staying if extra.get("use_precision_aware_optimizer") else 1) + (first + second) * staying
    if extra.get("use_precision_aware_optimizer"):
        first = DTYPE_BYTES.get(str(extra.get("exp_avg_dtype", "float32")), 1)
        second = DTYPE_BYTES.get(str(extra.get("exp_avg_sq_dtype", "float32")), 1)
        remainders = extra.get("store_param_remainders", True) and width == 2
        main = 2 if remainders or extra.get("main_params_dtype") == "float16" else main
    return main + first + second


def offloaded_share(extra: Mapping[str, object]) -> float:
    """Share of the parameters whose optimizer state is on the host."""
    return float(str(extra.get("optimizer_offload_fraction", 0.0))) if extra.get("optimizer_cpu_offload") else 0.0


def offloaded_bytes_per_parameter(width: int, extra: Mapping[str, object]) -> float:
    """Bytes of host memory for each parameter that a rank updates, offloaded or not.

    For an offloaded one (`HybridDeviceOptimizer`): main weight and Adam's moments in float32, the float32 gradient in
    pinned memory, and a pinned copy of the optimizer's input, which PyTorch keeps even if a float32 main weight
    replaces it.
    """
    given = width if extra.get("use_precision_aware_optimizer") else 4
    gradient = 4 * (PINNED_ROUNDING if extra.get("pin_cpu_grads", True) else 1)
    main = 0 if given == 4 else 4  # else it is the pinned copy itself
    return offloaded_share(extra) * (main + 8 + gradient + given * PINNED_ROUNDING)


def copied_bytes_per_parameter(width: int, extra: Mapping[str, object]) -> float:
    """Bytes of host memory, while a checkpoint is written or read, for each parameter that a rank updates: float32
    copies of moments that the precision-aware optimizer keeps with a scale, in float16 or fewer bits."""
    if not extra.get("use_precision_aware_optimizer") or extra.get("optimizer_cpu_offload"):
        return 0.0
    kinds = [str(extra.get(name, "float32")) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    return 4 * sum(kind not in ("float32", "bfloat16") for kind in kinds)


def longest_sequence(config: RunConfig) -> int:
    """Tokens of the longest prompt and response, regardless of the model's positions.

    For supervised rows without a limit: a full micro-batch.
    """
    r = config.rollout
    if r.max_total_tokens is not None:
        return r.max_total_tokens
    if config.train.task == "sft":
        return config.train.max_tokens_per_micro_batch * config.layout.cp
    return (config.data.max_prompt_tokens or UNBOUNDED_PROMPT) + r.max_response_tokens


def micro_batch_tokens(train: TrainConfig, layout: ParallelLayout, longest: int) -> int:
    """Tokens of the largest micro-batch on a context-parallel rank: a sequence over the budget is alone in one.

    With `train.fp8` padding counts too.
    """
    tokens = max(train.max_tokens_per_micro_batch, -(-longest // layout.cp))
    each = 1 if train.fp8 is None else layout.tp * fp8_rows(train.fp8)
    return -(-tokens // each) * each


def trainer_memory(
    spec: TrainingSpec,
    widths: ModelSizes,
    tokens: int,
    vocab_rows: int,
    held: StageParameters,
    sync: WeightPlan,
    gpu_bytes: int,
    adapters: StageParameters | None = None,
) -> TrainerMemory:
    """Memory of a GPU of one stage.

    Args:
        widths: the model's sizes.
        tokens: of the largest micro-batch on one context-parallel rank.
        vocab_rows: output rows of one tensor-parallel rank.
        held: the stage's parameters.
        sync: the plan of the weight sync; one without buckets for supervised training.
        gpu_bytes: of one GPU.
        adapters: the stage's trained parameters if the others are frozen; None: all are trained.
    """
    layout, width = spec.layout, params_bytes(spec)
    trained, added = (held, 0) if adapters is None else (adapters, parameter_bytes(spec, adapters))
    how = spec.megatron.recompute
    kept = kept_elements(widths, layout, held.chunks, how) * chunks_in_flight(layout, held.stage)
    gradient_width = 4 if spec.megatron.extra.get("grad_reduce_in_fp32", True) else 2
    return TrainerMemory(
        weights=parameter_bytes(spec, held) + held.buffers * 4 + added + fp8_copies(spec, held),
        gradients=trained.trained * gradient_width,
        optimizer=optimizer_bytes(spec, trained),
        activations=int(kept * tokens * width),
        working=working_bytes(widths, layout, held.layers, how, tokens, width),
        logits=_output_bytes(spec, tokens, vocab_rows, widths.hidden) if held.stage == layout.pp - 1 else 0,
        sync=max(
            sync_bytes(sync.stage_buckets(held.stage), neighbours_width(spec, adapters), _shares_memory(spec)).values(),
            default=0,
        )
        + _ipc_bytes(spec, sync),
        reserve=CONTEXT_BYTES + int(gpu_bytes * FRAGMENTATION),
    )


def parameter_bytes(spec: ModelSpec, held: StageParameters) -> int:
    """Bytes of one rank's parameters, without buffers; equal to the sum over a real rank's tensors."""
    return (held.trained - held.float32) * params_bytes(spec) + held.float32 * 4


def fp8_copies(spec: ModelSpec, held: StageParameters) -> int:
    """Bytes of the weights in FP8 (`config.fp8.COPY_BYTES`): of all parameters but the input embedding, at most."""
    return 0 if spec.fp8 is None else (held.trained - held.float32 - held.embedding) * COPY_BYTES


def optimizer_bytes(spec: ModelSpec, held: StageParameters) -> int:
    """Optimizer state of one rank: the mean over the ranks that share it.

    The distributed optimizer splits buffers into equal runs, so a rank's share differs from the mean only by padding
    (at most 64 elements a parameter).
    """
    return _of_own_share(spec, held, optimizer_bytes_per_parameter)


def _of_own_share(
    spec: ModelSpec, held: StageParameters, per_parameter: Callable[[int, Mapping[str, object]], float]
) -> int:
    """Sum of `per_parameter(width, extra)` over all parameters that one rank updates."""
    layout, sharded = spec.layout, spec.megatron.use_distributed_optimizer
    dense_ranks, expert_ranks = (layout.dp * layout.cp, layout.edp) if sharded else (1, 1)
    usual = held.expert / expert_ranks + (held.dense - held.float32) / dense_ranks
    each = per_parameter(params_bytes(spec), spec.megatron.extra)
    return int(each * usual + per_parameter(4, spec.megatron.extra) * held.float32 / dense_ranks)


def _output_bytes(spec: TrainingSpec, tokens: int, vocab_rows: int, hidden: int) -> int:
    """Logits [T, V/TP], overwritten by their gradient, memory of log-probs, inputs of the last layers, and the gradient
    of the output layer's weight [V/TP, H] before it is added to the buffer.

    Logits above `train.logits_mib` are made block by block (`backends/megatron/log_probs/blocks.py`). The output layer
    then keeps the hidden states of all tokens, even with sequence parallelism, and sums their gradient in float32; each
    block's product is added to it.
    """
    width = params_bytes(spec)
    logits, inputs = tokens * vocab_rows * width, tokens * (LOG_PROB_BYTES + 2 * hidden * width)
    inputs += vocab_rows * hidden * width
    if logits <= spec.train.logit_bytes:
        return logits + inputs
    return spec.train.logit_bytes + inputs + tokens * hidden * (4 + width)


def neighbours_width(spec: TrainingSpec, adapters: StageParameters | None = None) -> int:
    """Bytes of a parameter that is adjacent to others in memory and sent unchanged; 0: not adjacent, or not sent
    unchanged.

    In the distributed optimizer's buffer they are adjacent.
    """
    return params_bytes(spec) if spec.megatron.use_distributed_optimizer and adapters is None else 0


def _shares_memory(spec: TrainingSpec) -> bool:
    return isinstance(spec, PolicySpec) and traits_of(spec.weights.transport).gpu_bucket


def _ipc_bytes(spec: TrainingSpec, sync: WeightPlan) -> int:
    """`checkpoint_engine`: on every rank, two buffers for broadcasts, and one for data from the host.

    Each has the size of a bucket, or of the largest tensor. Senders have filled all buckets by then, but torch keeps
    that memory.
    """
    if not isinstance(spec, PolicySpec) or not traits_of(spec.weights.transport).on_engines_gpus:
        return 0
    largest = max((bucket.hf_bytes for bucket in sync.buckets), default=0)
    return IPC_BUFFERS * max(int(spec.weights.bucket_mib * (1 << 20)), largest)


def sync_bytes(buckets: Sequence[Bucket], neighbours: int, shares: bool = False) -> dict[int, int]:
    """Peak bytes by rank: its packed part of a bucket, and on a sender the gathered and converted bucket, beside the
    previous one, which is still in flight.

    Args:
        buckets: of any senders, in the order in which they are sent.
        neighbours: width of parameters if a bucket of the sender's own shards, in sending order, is a view of them
            (`weights/buckets.py`); 0: never.
        shares: whether it also holds a bucket that engines read.
    """
    most, on_its_way, shared = dict[int, int](), dict[int, int](), dict[int, int]()
    for bucket in buckets:
        packed, flat = _packed_bytes(bucket, neighbours), _flat_bytes(bucket, neighbours)
        for rank in bucket.members:
            needs = packed + on_its_way.get(rank, 0)
            if rank == bucket.sender:
                needs += _gathered_bytes(bucket) + flat
                on_its_way[rank] = flat
                shared[rank] = max(shared.get(rank, 0), bucket.hf_bytes if shares else 0)
            most[rank] = max(most.get(rank, 0), needs)
    return {rank: size + shared.get(rank, 0) for rank, size in most.items()}


def _packed_bytes(bucket: Bucket, neighbours: int) -> int:
    """A member's packed shards, if they are gathered and not in sending order in memory."""
    width = DTYPE_BYTES[bucket.gathered_dtype]
    as_it_lies = bucket.unmoved and width == neighbours
    return bucket.local_numel * width if len(bucket.members) > 1 and not as_it_lies else 0


def _gathered_bytes(bucket: Bucket) -> int:
    """Shards of all members, if they differ from the sent buffer; and converted weights before quantisation.

    Tensors are joined in place in the bucket; only GPT-OSS's experts are rebuilt before, one at a time.
    """
    width, members = DTYPE_BYTES[bucket.gathered_dtype], len(bucket.members)
    gathered = bucket.local_numel * width * members if members > 1 and not bucket.in_order else 0
    return gathered + (bucket.converted_numel * width if bucket.packed_dtype else 0)


def _flat_bytes(bucket: Bucket, neighbours: int) -> int:
    own = bucket.in_order and len(bucket.members) == 1 and not bucket.packed_dtype
    return 0 if own and DTYPE_BYTES[bucket.dtype] == neighbours else bucket.hf_bytes


@dataclass(frozen=True)
class HostMemory:
    """Peak bytes of one host of trainer ranks.

    Attributes:
        copies: reference and teacher, and our own weights while one of them is in use.
        optimizer: state moved here by `optimizer_cpu_offload`.
        sync: memory of senders for `weights.transport`: with delta everything that they send, with shm a bucket each.
        shards: of a step, for its ranks, in Ray's store; see `rollouts.RolloutBytes`.
        offloaded: weights and optimizer of trainer and critic while engines have their GPUs (`cluster.offload_to`).
        teacher: weights of a served teacher while the trainer has its GPUs (`teacher.placement: colocated`).
        checkpoint: while it is written: on each rank a tensor in float32, and `copied_bytes_per_parameter`.
    """

    copies: int
    optimizer: int
    sync: int = 0
    shards: int = 0
    offloaded: int = 0
    teacher: int = 0
    checkpoint: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self.copies + self.optimizer + self.sync + self.shards + self.offloaded + self.teacher + self.checkpoint

    @property
    def largest(self) -> str:
        """The largest part."""
        sizes = {
            "optimizer": self.optimizer, "copies": self.copies, "sync": self.sync, "shards": self.shards,
            "offloaded": self.offloaded, "teacher": self.teacher, "checkpoint": self.checkpoint,
        }  # fmt: skip
        return max(sizes, key=lambda name: sizes[name])


def host_memory(
    spec: PolicySpec,
    gpus_per_node: int,
    held: Sequence[StageParameters],
    critic: Sequence[StageParameters] = (),
    sync: WeightPlan | None = None,
    trained: Sequence[StageParameters] | None = None,
    sleeps: bool = False,
) -> HostMemory:
    """Memory of the fullest host: one full of ranks of the largest stage.

    Args:
        spec: the policy's; a critic has the same layout and megatron-core settings.
        held: of a rank of each stage.
        critic: likewise, of a critic on the same GPUs.
        sync: the plan of the weight sync.
        trained: parameters in the optimizer of each stage; None: `held`.
        sleeps: whether the ranks' state is offloaded here.
    """
    ranks = min(gpus_per_node, spec.layout.world_size)
    others = (spec.reference is not None and not spec.base_is_reference) + (spec.teacher is not None)
    each = max(parameter_bytes(spec, stage) for stage in held)
    copies = (others + 1) * ranks * each if others else 0
    updated = [
        max((_of_own_share(spec, stage, offloaded_bytes_per_parameter) for stage in stages), default=0)
        for stages in (held if trained is None else trained, critic)
    ]
    moved = [
        max(map(partial(parameter_bytes, spec), stages), default=0)
        + max(map(partial(optimizer_bytes, spec), trained_stage), default=0)
        for stages, trained_stage in ((held, held if trained is None else trained), (critic, critic))
    ]
    kept = _kept_by_senders(spec, sync, gpus_per_node) if sync else 0
    stored = [  # a critic's checkpoint comes before the policy's
        4 * stage.largest + _of_own_share(spec, trained_stage, copied_bytes_per_parameter)
        for stages, trained_ones in ((held, held if trained is None else trained), (critic, critic))
        for stage, trained_stage in zip(stages, trained_ones, strict=True)
    ]
    return HostMemory(
        copies,
        ranks * sum(updated),
        kept,
        offloaded=ranks * sum(moved) if sleeps else 0,
        checkpoint=ranks * max(stored),
    )


def _kept_by_senders(spec: PolicySpec, sync: WeightPlan, gpus_per_node: int) -> int:
    """Bytes on the host whose senders keep most; pinned if they come from a GPU.

    `checkpoint_engine` pins a copy of the copy that is kept while other ranks fill.
    """
    kept, traits = dict[int, int](), traits_of(spec.weights.transport)
    for sender in sync.senders.everyone():
        sizes = [bucket.hf_bytes for bucket in sync.buckets if bucket.sender == sender]
        pinned = int(sum(sizes) * PINNED_ROUNDING)
        largest = traits.host_buckets * max(sizes, default=0)
        each = traits.pinned_copies * pinned + traits.host_copies * sum(sizes) + largest
        machine = sender // gpus_per_node
        kept[machine] = kept.get(machine, 0) + each
    return max(kept.values(), default=0)
