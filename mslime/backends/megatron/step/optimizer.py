"""The optimizer of one rank and its learning-rate schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mslime.backends.megatron.checkpoint_files import keep_own_state
from mslime.config.train import TrainConfig

# At every save megatron-core 0.16.1 formats each tensor that an optimizer does not own, and each factory of such
# tensors (of a gated MLP), into a debug message that is never shown: all their values would be copied off the GPU.
ShardedBase.__str__ = lambda part: f"{type(part).__name__}({part.key})"  # type: ignore[method-assign]

_NOBODY: Any = "nobody"
"""Placeholder for a parameter in the state of an optimizer without parameters here."""


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], optimizer_config: OptimizerConfig, train: TrainConfig, steps: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW over these chunks (sharded over data-parallel ranks if configured) and its schedule.

    The schedule counts optimizer steps; it advances before a step. So the first step of a warm-up has a learning rate
    above zero, and the last step of a decay has `min_lr`.

    Args:
        steps: optimizer steps of the whole run.
    """
    optimizer = get_megatron_optimizer(optimizer_config, list(chunks))
    for part in parts_of(optimizer):
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer:  # a stub has no parameters
            _number_as_stored(part)
            keep_own_state(part)
        if isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                group["foreach"] = True  # the same operations, without a Python loop over parameters
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=train.lr,
        min_lr=train.min_lr,
        lr_warmup_steps=min(train.lr_warmup_steps, steps - 1),
        lr_decay_steps=steps,
        lr_decay_style=train.lr_decay_style,
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        # On resume the step count comes from the checkpoint, everything else from the run configuration.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, schedule


def begin_states(optimizer: MegatronOptimizer) -> None:
    """Set Adam's moments to 0 before the first step: megatron-core 0.16.1 can neither save nor load without them."""
    for part in parts_of(optimizer):
        inner = part.optimizer
        if isinstance(inner, torch.optim.Adam):
            for parameter in (p for group in inner.param_groups for p in group["params"] if not inner.state[p]):
                moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter] = {"step": torch.tensor(0.0), **moments}
        elif inner is not None and not inner.state:
            part.init_state_fn(inner, part.config)  # type: ignore[attr-defined]


def states_of(
    optimizer: MegatronOptimizer, model: dict[str, Any], *, is_loading: bool, metadata: Any
) -> dict[Any, Any]:
    """The sharded state of an optimizer, by part number if it has several.

    Parts without parameters have no state: dense layers if only experts have adapters. megatron-core 0.16.1 fails on a
    chain with such a part. A part with parameters only on other ranks still returns its step count, because the first
    rank saves all non-tensor values.
    """
    live = _live_parts(optimizer)
    # Parts, by their number, with parameters on other ranks only: experts, if no layer of this pipeline stage has an
    # adapter on one. These parts have empty groups.
    idle = {
        number: part
        for number, part in enumerate(parts_of(optimizer))
        if part.optimizer is not None and not any(group["params"] for group in part.optimizer.param_groups)
    }
    given: dict[str, Any] = {"is_loading": is_loading, "metadata": metadata}
    with _counting(optimizer, idle):
        held: dict[Any, Any]
        if live is None:
            held = optimizer.sharded_state_dict(model, **given)
        else:
            held = {number: part.sharded_state_dict(model, **given) for number, part in live.items()}
    if step := _steps_taken(optimizer):
        for number in idle:
            _count(held.get(number, held), step)
    return held


def _live_parts(optimizer: MegatronOptimizer) -> dict[int, MegatronOptimizer] | None:
    """Parts with parameters by their number; None if all have some."""
    parts = parts_of(optimizer)
    live = {number: part for number, part in enumerate(parts) if part.optimizer is not None}
    return None if len(live) == len(parts) else live


def _steps_taken(optimizer: MegatronOptimizer) -> Any:
    """Step count of this rank's parameters in their optimizer; None before the first step."""
    for inner in (part.optimizer for part in parts_of(optimizer) if part.optimizer is not None):
        for holder in (*inner.state.values(), *(group for group in inner.param_groups if group["params"])):
            if (step := holder.get("step")) is not None:
                return step
    return None


@contextmanager
def _counting(optimizer: MegatronOptimizer, idle: Mapping[int, MegatronOptimizer]) -> Iterator[None]:
    """Inside, distributed idle parts have a step count: megatron-core 0.16.1 reads it from a parameter's state."""
    step = _steps_taken(optimizer)
    counting = [part.optimizer for part in idle.values() if isinstance(part, DistributedOptimizer)]
    counting = [inner for inner in counting if isinstance(inner, torch.optim.Adam)]
    for inner in counting:
        inner.state[_NOBODY] = {"step": step}
    try:
        yield
    finally:
        for inner in counting:
            inner.state.clear()


def _count(state: dict[str, Any], step: Any) -> None:
    """Write the step count into an idle part's state, wherever its kind of optimizer reads it."""
    inner = state.get("optimizer", state)
    if "state" in inner:  # an optimizer that is not distributed
        inner["state"]["common_step"] = step
    else:
        for group in inner["param_groups"]:
            group["step"] = step.item() if isinstance(step, torch.Tensor) else step


def load_states(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """Load a state, and restore a step count of 0, which megatron-core 0.16.1 omits when it saves.

    Only torch's Adam counts per parameter. Fused Adams count per group, and Transformer Engine's fails on a parameter
    with its own count.
    """
    if any(isinstance(part.optimizer, torch.optim.Adam) for part in parts_of(optimizer)):
        _count_from_0(state)
    live = _live_parts(optimizer)
    if live is None:
        optimizer.load_state_dict(state)
    else:
        for number, part in live.items():
            part.load_state_dict(state[number])
    for inner in (part.optimizer for part in parts_of(optimizer) if part.optimizer is not None):
        for group in inner.param_groups:
            for name, value in inner.defaults.items():
                if isinstance(value, type):
                    group.setdefault(name, value)


def without_classes(state: Any) -> Any:
    """A state without the optimizer classes that megatron-core's offloading optimizer keeps in a group.

    Checkpoints contain no code, which torch refuses to load. `load_states` restores the classes.
    """
    if isinstance(state, dict):
        return {k: without_classes(v) for k, v in cast("dict[Any, Any]", state).items() if not isinstance(v, type)}
    if isinstance(state, list):
        return [without_classes(each) for each in cast("list[Any]", state)]
    return state


def _count_from_0(state: dict[Any, Any]) -> None:
    parameters = state.get("state", {})
    if any("exp_avg" in own and "step" not in own for own in parameters.values() if isinstance(own, dict)):
        parameters.setdefault("common_step", torch.tensor(0.0))
    for inner in state.values():  # chained optimizers, also inside one with main weights
        if isinstance(inner, dict):
            _count_from_0(inner)


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """An optimizer's parts; an optimizer that is not chained is its only part."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _number_as_stored(optimizer: DistributedOptimizer) -> None:
    """Correct the optimizer's index of each parameter in its group.

    megatron-core 0.16.1 counts in the order of the gradient buffers, and then puts the float32 parameters of a group
    before those of a lower precision: in a group with both, checkpoints would save one parameter's state for another's.
    """
    places: dict[torch.nn.Parameter, tuple[int, int]] = optimizer.model_param_group_index_map
    held = sorted(places, key=lambda p: (places[p][0], p.dtype != torch.float32, places[p][1]))
    count: dict[int, int] = {}
    for parameter in held:
        group = places[parameter][0]
        places[parameter] = (group, count.setdefault(group, 0))
        count[group] += 1


def follow_config(
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    rates: Sequence[tuple[float, float]],
    *,
    restart: bool,
) -> None:
    """Restore the configured learning rates after loading a checkpoint, which contains those of its own run.

    Args:
        rates: from `rates_of` before the checkpoint was loaded.
        restart: begin the schedule at its first step (the checkpoint is another run's).
    """
    for group, (largest, smallest) in zip(optimizer.param_groups, rates, strict=True):
        group["max_lr"], group["min_lr"] = largest, smallest
    if restart:
        schedule.num_steps = 0
    schedule.step(0)


def rates_of(optimizer: MegatronOptimizer) -> list[tuple[float, float]]:
    """The largest and the smallest learning rate of each group; with `decoupled_lr` embeddings have separate ones."""
    return [(group["max_lr"], group["min_lr"]) for group in optimizer.param_groups]
