"""A training step and a weight sync of one rank of a launch script, at full size, where every other rank is not there:

    python -m tests.rehearsal.full_size_step SCRIPT RANK [--ranks N]

In the GPU environment, with the fake runtime loaded. Model, routers' dispatch, schedule, loss, optimizer and weight
sender are the real ones; tensors have their true sizes and are not written (`unwritten`), collectives move nothing
(`absent_ranks`), the extension's functions allocate what they return (`extension.sizes`), weights of the checkpoint
have shapes alone. What torch's own allocator counts is printed as one line of JSON, beside what `mslime plan` says.
"""

# ruff: noqa: E402 - what is imported first changes what is imported after it

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.rehearsal import absent_ranks
from tests.rehearsal.extension import sizes

sizes.use()

import numpy as np
import torch
import triton.runtime.interpreter
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.pipeline_parallel import schedules
from transformer_engine.pytorch.triton import permutation

import tests.rehearsal.on_gpu as on_gpu
from mslime.backends.megatron.model.chunks import unwrap
from mslime.backends.megatron.step.optimizer import parts_of
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.config.keys import Endpoint, EngineInfo
from mslime.config.resolved import PolicySpec, policy_spec
from mslime.config.schema import RunConfig
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.hf import HFCheckpoint
from mslime.convert.safetensors_files import torch_dtype
from mslime.data.routes import Routes, narrowest_dtype
from mslime.data.shard import TrainShard
from mslime.weights.sync import WeightSender
from mslime.weights.transport import Link, Transport
from mslime.weights.weight_plan import Bucket, WeightPlan
from mslime_plugins.planner.activations import EXPERT_IMBALANCE
from mslime_plugins.planner.plan import make_plan
from mslime_plugins.planner.trainer_memory import longest_sequence, micro_batch_tokens, neighbours_width, sync_bytes
from tests.fixtures.full_size import make_hollow_checkpoint
from tests.fixtures.launch_scripts import launch, published
from tests.rehearsal.unwritten import Unwritten

SEQUENCES = 4
"""Of a micro-batch, equally long."""


def leave_out_kernels() -> None:
    """Triton's kernels do nothing; Transformer Engine's permutation is its own again, which `on_gpu` replaces."""
    triton.runtime.interpreter.GridExecutor.__call__ = lambda *args, **kwargs: None
    for name, function in vars(on_gpu.TRITON).items():
        setattr(permutation, name, function)


def leave_out_weights() -> None:
    """A hollow checkpoint's tensors are made without reading the file."""

    class Shapes:
        def __init__(self, checkpoint: HFCheckpoint) -> None:
            self._stored = checkpoint.stored

        def get_slice(self, name: str) -> torch.Tensor:
            return torch.zeros(self._stored[name].shape, dtype=torch_dtype(self._stored[name].dtype))

    def read(checkpoint: HFCheckpoint, name: str, first: int, count: int) -> torch.Tensor:
        return torch.zeros((count,), dtype=torch_dtype(checkpoint.stored[name].dtype))

    def opened(checkpoint: HFCheckpoint, *args: Any, **options: Any) -> None:
        made(checkpoint, *args, **options)
        checkpoint.slicer = lambda file: Shapes(checkpoint)

    made = HFCheckpoint.__init__
    HFCheckpoint.__init__ = opened
    HFCheckpoint.read = read


def routes_of(tokens: int, layers: tuple[int, ...], experts: int, top_k: int, own: range) -> Routes:
    """Routes by which this rank's experts get as many tokens as the plan counts with, all others equally many."""
    share = len(own) / experts
    wanted = min(EXPERT_IMBALANCE * share, len(own) / top_k) if share < 1 else 1.0
    ours = np.diff(np.floor(np.arange(tokens + 1) * top_k * wanted).astype(np.int64))
    others = np.setdiff1d(np.arange(experts), np.arange(own.start, own.stop))
    chosen, first, second = np.empty((tokens, top_k), np.int64), 0, 0
    for row, count in zip(chosen, ours, strict=True):
        row[:count] = own.start + (first + np.arange(count)) % len(own)
        row[count:] = others[(second + np.arange(top_k - count)) % len(others)] if count < top_k else 0
        first, second = first + int(count), second + top_k - int(count)
    rows = np.repeat(chosen[:, None].astype(narrowest_dtype(experts)), len(layers), 1)
    return Routes(rows, np.ones(tokens, np.bool_), layers)


def shard_of(trainer: MegatronTrainer, tokens: int, micro_batches: int) -> TrainShard:
    """Full micro-batches with routes.

    Args:
        tokens: of a micro-batch, over all context-parallel ranks.
    """
    layout, model = trainer.spec.layout, trainer.model
    each, n, count = tokens // SEQUENCES, tokens * micro_batches, SEQUENCES * micro_batches
    routes = None
    if model.num_experts and trainer.spec.replay != "off":
        held, place = model.num_experts // layout.ep, layout.place(trainer.parallel.rank)
        own = range(place.ep * held, (place.ep + 1) * held)
        one = routes_of(tokens, trainer.moe_layer_ids, model.num_experts, model.top_k, own)
        routes = Routes(np.tile(one.experts, (micro_batches, 1, 1)), np.ones(n, np.bool_), one.layer_ids)
    ones = np.ones(n, np.float32)
    return TrainShard(
        tokens=(np.arange(n) % 1000).astype(np.int32), lengths=np.full(count, each), sequence_ids=np.arange(count),
        loss_mask=np.ones(n, np.bool_), weights=ones / n, advantages=ones, behaviour_log_probs=-ones, routes=routes,
        micro_batches=tuple(tuple(range(i * SEQUENCES, (i + 1) * SEQUENCES)) for i in range(micro_batches)),
    )  # fmt: skip


def alive() -> int:
    """Bytes of all tensors on the device."""
    return torch.cuda.memory_allocated()


class Meter:
    """Peaks between marks, and what they are made of.

    Attributes:
        entries: bytes at the beginning of each backward pass of a micro-batch.
        outputs: bytes that the output layer and the loss have left by then; empty on other stages.
        logits: the most that output layer and loss took, forward and backward, beside what was there before.
        working: the most that a backward pass took beside its beginning, without the output layer's part.
    """

    def __init__(self) -> None:
        self.entries: list[int] = []
        self.outputs: list[int] = []
        self.logits = self.working = self.peak = self._before = 0

    def mark(self) -> int:
        """The peak since the last mark."""
        found = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.peak = max(self.peak, found)
        return found

    def attach(self, trainer: MegatronTrainer) -> None:
        """Measure passes of this trainer from now on."""
        backward = schedules.backward_step

        def backward_step(*args: Any, **kwargs: Any) -> Any:
            self._forward_is_over()
            out = backward(*args, **kwargs)
            self.working = max(self.working, self.mark() - self.entries[-1] + (self.outputs or [0])[-1])
            return out

        schedules.backward_step = backward_step
        chunk = unwrap(trainer.wrapped[-1])
        if chunk.post_process:
            chunk.output_layer.register_forward_pre_hook(self._before_output)

    def _before_output(self, layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self.mark()
        self._before = alive()
        if args[0].requires_grad:
            args[0].register_hook(self._after_output)

    def _forward_is_over(self) -> None:
        peak = self.mark()
        self.entries.append(alive())
        if self._before:
            self.outputs.append(alive() - self._before)
            self.logits = max(self.logits, peak - self._before)

    def _after_output(self, gradient: torch.Tensor) -> None:
        self.logits = max(self.logits, self.mark() - self._before)


def bytes_of(tensors: Iterable[Any], but: dict[int, int] | None = None) -> dict[int, int]:
    """Bytes of the storages of tensors on the device, by their addresses."""
    found = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for x in tensors
        if isinstance(x, torch.Tensor) and x.is_cuda and x.numel()
    }
    return {at: size for at, size in found.items() if at not in (but or {})}


def alive_at_the_peak() -> dict[str, int]:
    """Bytes by the lines of Python that made what was alive at the peak since `_record_memory_history`."""
    (events, *_) = torch.cuda.memory._snapshot()["device_traces"]
    now: dict[int, tuple[int, str]] = {}
    total = most = 0
    at_most: dict[int, tuple[int, str]] = {}
    for event in events:
        if event["action"] == "alloc":
            lines = [
                f"{frame['filename'].split('site-packages/')[-1]}:{frame['line']}" for frame in event["frames"]
                if "/torch/" not in frame["filename"] and "rehearsal" not in frame["filename"]
            ]  # fmt: skip
            now[event["addr"]] = (event["size"], " < ".join(lines[:3]))
            total += event["size"]
            if total > most:
                most, at_most = total, dict(now)
        elif event["action"] == "free_completed" and event["addr"] in now:
            total -= now.pop(event["addr"])[0]
    found: dict[str, int] = {}
    for size, lines in at_most.values():
        found[lines] = found.get(lines, 0) + size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def states_of(trainer: MegatronTrainer) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer, as their tensors say."""
    weights = bytes_of(x for chunk in trainer.chunks for x in (*(p.data for p in chunk.parameters()), *chunk.buffers()))
    wrapped = [buffer for chunk in trainer.wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gradients = bytes_of(buffer.grad_data for buffer in wrapped)
    held: list[Any] = []
    for part in parts_of(trainer.optimizer):
        inner = part.optimizer
        held += [x for state in inner.state.values() for x in state.values()]
        held += [x for group in inner.param_groups for x in group["params"]]
        held += [x for groups in getattr(part, "shard_fp32_from_float16_groups", []) for x in groups]
    optimizer = bytes_of(held, weights | gradients)
    return {name: sum(found.values()) for name, found in
            (("weights", weights), ("gradients", gradients), ("optimizer", optimizer))}  # fmt: skip


class Arrived:
    """A bucket on its way, until somebody waits for it."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat: torch.Tensor | None = flat

    def wait(self) -> None:
        self._flat = None


class Nowhere(Transport):
    """A transport whose buckets arrive as soon as the sender waits for them."""

    def __init__(self, link: Link) -> None: ...

    def connect(self, engines: Any) -> None: ...

    def disconnect(self) -> None: ...

    def start(self, bucket: Bucket, flat: torch.Tensor) -> Arrived:
        return Arrived(flat)


class OneEngine:
    """An engine of which the sender asks nothing but what it is."""

    def describe(self, engine: Endpoint) -> EngineInfo:
        return EngineInfo(engine.url, ranks=8)

    def close(self) -> None: ...


def names_on(trainer: MegatronTrainer, mine: list[str]) -> Callable[[int], tuple[int, list[str]]]:
    """What each rank says of its parameters when senders plan: its stage, and their names by the model's rules."""
    spec, layout, hf = trainer.spec, trainer.spec.layout, trainer.hf_config
    bound = get_family(hf).rules(hf).all_bound
    stages = [
        {layer for chunk in chunks for layer in chunk}
        for chunks in spec.megatron.stage_layers(trainer.model.num_layers)
    ]

    def stage_of(name: str) -> int:
        if bound[name].layer >= 0:
            return next(i for i, layers in enumerate(stages) if bound[name].layer in layers)
        return 0 if name.startswith("embedding.") else layout.pp - 1

    names: dict[int, list[str]] = {}
    for name in bound:
        names.setdefault(stage_of(name), []).append(name)
    own = layout.pp_rank(trainer.parallel.rank)
    names[own] = mine + [name for name in names[own] if name not in set(mine)]
    return lambda rank: (layout.pp_rank(rank), names[layout.pp_rank(rank)])


def send(trainer: MegatronTrainer, meter: Meter) -> tuple[int, WeightPlan]:
    """Bytes that a sync takes on this rank at most, beside the trainer's state; and what is sent."""

    def exchange(sender: WeightSender, mine: Any) -> list[Any]:
        ranks = range(trainer.spec.layout.world_size)
        if isinstance(mine, tuple) and len(mine) == 2 and isinstance(mine[1], list):
            return list(map(names_on(trainer, mine[1]), ranks))
        return [mine for _ in ranks]

    WeightSender._exchange = exchange
    spec = trainer.spec
    trainer.spec = replace(spec, weights=spec.weights.model_copy(update={"transport": f"{__name__}:Nowhere"}))
    sender = trainer.weight_sender(OneEngine())  # type: ignore[arg-type]
    sender.connect([engine := Endpoint("http://engine:30000")])
    sender.engines = (EngineInfo(engine.url, ranks=8),)  # which a rank that sends nothing hears from the others
    sender.send(1)
    meter.mark()
    before = alive()
    sender.send(2)
    return meter.mark() - before, sender.plan


def measure(
    config: RunConfig, spec: PolicySpec, rank: int, tokens: int, meet: Path, peak: bool = False
) -> dict[str, int]:
    """Bytes by component of a step (the second one) and a sync of this rank."""
    fields = get_family(read_hf_config(spec.checkpoint)).transformer_fields(read_hf_config(spec.checkpoint))
    layout, hidden = spec.layout, int(str(fields["hidden_size"]))
    with Unwritten(absent_ranks.AbsentRanks((tokens // layout.tp, 1, hidden))):
        trainer = MegatronTrainer(spec, rank, layout.world_size, f"file://{meet}")
        trainer.routing.report = lambda shard: None  # what all ranks have replayed together is known to all of them
        shard = shard_of(trainer, tokens * layout.cp, layout.pp + 1)
        trainer.train([shard])
        static, meter = alive(), Meter()
        meter.attach(trainer)
        meter.mark()
        meter.peak = 0
        if peak:
            torch.cuda.memory._record_memory_history(max_entries=10**7, stacks="python")
        trainer.train([shard])
        meter.mark()
        if peak:
            for lines, size in alive_at_the_peak().items():
                print(f"{size / (1 << 20):10.1f} MiB  {lines}")
            torch.cuda.memory._record_memory_history(enabled=None)
        output = max(meter.outputs, default=0)
        found = states_of(trainer)
        # The output layer's input of all tensor-parallel ranks, for which megatron-core keeps memory.
        gathered = sum(bytes_of(get_global_memory_buffer().buffer.values()).values())
        others = static - sum(found.values()) - gathered
        found |= {
            "activations": max(meter.entries) - output - static, "working": meter.working,
            "logits": meter.logits and meter.logits + gathered, "others": others, "left": alive() - static,
            "step": meter.peak - others,
        }  # fmt: skip
        found["sync"], sent = send(trainer, meter)
        found["sync as planned"] = sync_bytes(sent.buckets, neighbours_width(spec)).get(rank, 0)
        found["reserved"] = torch.cuda.max_memory_reserved()
        return found


def planned(config: RunConfig, rank: int) -> dict[str, int]:
    """What `mslime plan` says of the rank's stage."""
    plan = make_plan(config, read_hf_config(config.model.path))
    memory = plan.stages[config.layout.pp_rank(rank)].memory
    parts = memory.components()
    return parts | {"step": memory.states + memory.step, "peak": memory.peak, "gpu": plan.gpu_bytes}


def main() -> None:
    """Measure, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", help="of scripts/models, without .sh")
    parser.add_argument("rank", type=int)
    parser.add_argument("--peak", action="store_true", help="print what a step adds at its peak, by lines of Python")
    parser.add_argument("--ranks", type=int, help="trainer ranks; as the script says if left out")
    given = parser.parse_args()
    absent_ranks.be_alone()
    leave_out_kernels()
    leave_out_weights()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        told = launch(given.script, root).config.model_dump(exclude_unset=True)
        told["model"]["path"] = make_hollow_checkpoint(published(given.script), root / "hollow")
        if given.ranks:
            told["cluster"]["trainer_ranks"] = given.ranks
        config = RunConfig.model_validate(told)
        positions = get_family(hf := read_hf_config(config.model.path)).model_fields(hf).max_positions
        tokens = micro_batch_tokens(config.train, config.layout, min(positions, longest_sequence(config)))
        found = measure(config, policy_spec(config), given.rank, tokens, root / "meet", given.peak)
        layout = config.layout
        place = {"layout": layout.describe(), "stage": layout.pp_rank(given.rank), "tokens": tokens}
        print(json.dumps({**place, "measured": found, "planned": planned(config, given.rank)}))


if __name__ == "__main__":
    main()
