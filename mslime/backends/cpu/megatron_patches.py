"""Patches that let megatron-core 0.16.1 run without CUDA, each named and with its reason beside it.

`install()` must run before anything of `megatron.core` is imported; it does nothing if CUDA is available and rejects
any other version. Megatron-core's modules get a stand-in for `torch` whose CUDA functions act on the CPU; the real
`torch` is unchanged (patching `torch.zeros` itself breaks `with torch.device("meta")`, and with it Hugging Face
loading, because torch looks the factories up by identity). No numerics are changed anywhere.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mslime.config.errors import TrainerError

PINNED = "0.16.1"

_installed: list[str] | None = None


@dataclass
class _Overrides:
    """Overrides collected by the patches that run before the first import."""

    torch: dict[str, Any] = field(default_factory=dict)
    cuda: dict[str, Any] = field(default_factory=dict)
    modules: dict[str, Callable[[types.ModuleType], None]] = field(default_factory=dict)


@dataclass(frozen=True)
class MegatronPatch:
    """One patch. `before` ones run ahead of the first megatron.core import, the others after it."""

    name: str
    reason: str
    before: bool
    apply: Callable[[_Overrides], None]


PATCHES: list[MegatronPatch] = []


def _patch(name: str, reason: str, *, before: bool = False) -> Callable[[Callable[[_Overrides], None]], None]:
    def register(apply: Callable[[_Overrides], None]) -> None:
        PATCHES.append(MegatronPatch(name, reason, before, apply))

    return register


def install(skip: Iterable[str] = ()) -> tuple[str, ...]:
    """Apply the patches; calling it again changes nothing.

    Args:
        skip: names to leave out; the tests use it to show that every patch is needed.

    Returns:
        The names applied; empty when CUDA is available.

    Raises:
        TrainerError: when the installed megatron-core is not the pinned version.
    """
    global _installed
    if _installed is not None:
        return tuple(_installed)
    if torch.cuda.is_available():
        _installed = []
        return ()
    _refuse_other_versions(importlib.metadata.version("megatron-core"))
    warnings.filterwarnings("ignore", message=r".*Apex (is|are) not installed")
    assert not any(m.startswith("megatron.core") for m in sys.modules), "install() comes before importing megatron.core"
    chosen = [patch for patch in PATCHES if patch.name not in set(skip)]
    overrides = _Overrides()
    for patch in chosen:
        if patch.before:
            patch.apply(overrides)
    cuda = _ModuleProxy(torch.cuda, overrides.cuda)
    sys.meta_path.insert(0, _ImportHook(_ModuleProxy(torch, {**overrides.torch, "cuda": cuda}), overrides.modules))
    for patch in chosen:
        if not patch.before:
            patch.apply(overrides)
    _installed = [patch.name for patch in chosen]
    return tuple(_installed)


def _refuse_other_versions(version: str) -> None:
    if version != PINNED:
        raise TrainerError(
            "megatron-core",
            version,
            f"must be {PINNED}: the CPU patches change its internals",
            f"run pip install megatron-core=={PINNED}",
        )


class _ModuleProxy(types.ModuleType):
    """A module that behaves like `real` except for the given names."""

    def __init__(self, real: types.ModuleType, overrides: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update({k: v for k, v in real.__dict__.items() if k != "__getattr__"})
        self.__dict__.update(overrides)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)  # torch loads some submodules on first use


class _ImportHook(importlib.abc.MetaPathFinder):
    """Gives megatron.core's (and mbridge's) modules the stand-in for torch right after they have run."""

    def __init__(self, stand_in: types.ModuleType, modules: dict[str, Callable[[types.ModuleType], None]]) -> None:
        self.stand_in, self.modules = stand_in, modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(("megatron.core.", "mbridge.")):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader = spec.loader if spec else None
        if not isinstance(loader, importlib.machinery.SourceFileLoader):
            return spec
        run = loader.exec_module

        def run_then_patch(module: types.ModuleType) -> None:
            run(module)
            if module.__dict__.get("torch") is sys.modules["torch"]:
                module.__dict__["torch"] = self.stand_in
            if fullname in self.modules:
                self.modules[fullname](module)

        loader.exec_module = run_then_patch
        return spec


class _Event:
    """A CUDA event on a machine where all work is already done when a call returns."""

    def __init__(self, *args: object, **options: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


class _Stream:
    """A CUDA stream on a machine that has none: work runs in program order."""

    def __init__(self, *args: object, **options: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...


@_patch(
    "no_compile",
    "jit_fuser is torch.compile: the first call of each fused function would start a C++ compiler in "
    "every process (11 s a step at first)",
    before=True,
)
def _(overrides: _Overrides) -> None:
    overrides.modules["megatron.core.jit"] = lambda module: module.disable_jit_fuser()


@_patch("current_device", "about 60 call sites pass device=torch.cuda.current_device()", before=True)
def _(overrides: _Overrides) -> None:
    overrides.cuda["current_device"] = lambda: torch.device("cpu")


@_patch(
    "factories", "device='cuda' and pin_memory literals in schedules, clip_grads, optimizer and moe_utils", before=True
)
def _(overrides: _Overrides) -> None:
    def on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def make(*args: Any, **options: Any) -> Any:
            if str(options.get("device")).startswith("cuda"):
                options["device"] = torch.device("cpu")
            options.pop("pin_memory", None)
            return factory(*args, **options)

        return make

    for name in ("tensor", "zeros", "ones", "empty", "empty_like"):
        overrides.torch[name] = on_cpu(getattr(torch, name))


@_patch("synchronize", "pipeline point-to-point calls, timers and checkpoints wait for the device", before=True)
def _(overrides: _Overrides) -> None:
    overrides.cuda["synchronize"] = lambda device=None: None


@_patch(
    "streams",
    "the all-to-all dispatcher builds a stream; gradient reduction and shared experts use streams",
    before=True,
)
def _(overrides: _Overrides) -> None:
    stream = _Stream()
    overrides.cuda.update(
        Stream=_Stream,
        Event=_Event,
        stream=contextlib.nullcontext,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
    )


@_patch("rng_device", "seeding and the RNG tracker use the CUDA generator; on CPU there is one generator", before=True)
def _(overrides: _Overrides) -> None:
    overrides.cuda.update(
        manual_seed=torch.manual_seed,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
    )


@_patch("tensor_cuda", "x.cuda() in rotary embeddings under CP and in fully parallel checkpoint loading", before=True)
def _(overrides: _Overrides) -> None:
    torch.Tensor.cuda = lambda self, *args, **options: self


@_patch("tensor_type", "optimizers and gradient clipping compare t.type() with 'torch.cuda.FloatTensor'", before=True)
def _(overrides: _Overrides) -> None:
    class EitherSpelling(str):
        """A type name that equals both its CPU and its CUDA spelling."""

        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            return str.__eq__(self, other.replace("torch.cuda.", "torch.") if isinstance(other, str) else other)

        def __ne__(self, other: object) -> bool:
            return not self == other

        __hash__ = str.__hash__

    original = torch.Tensor.type

    def type_of(self: Any, dtype: Any = None, *args: Any, **options: Any) -> Any:
        return EitherSpelling(original(self)) if dtype is None else original(self, dtype, *args, **options)

    torch.Tensor.type = type_of


@_patch(
    "uneven_all_gather",
    "gloo's all_gather refuses unequal sizes; the all-to-all dispatcher needs them with ETP > 1",
    before=True,
)
def _(overrides: _Overrides) -> None:
    import torch.distributed as dist

    original = dist.all_gather

    @functools.wraps(original)
    def all_gather(tensor_list: list[Any], tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if async_op or all(t.shape == tensor.shape for t in tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        padded = tensor.new_zeros((max(len(t) for t in tensor_list), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        received = [torch.empty_like(padded) for _ in tensor_list]
        original(received, padded, group=group)
        for target, source in zip(tensor_list, received, strict=True):
            target.copy_(source[: len(target)])
        return None

    dist.all_gather = all_gather


@_patch("rng_state", "the RNG tracker and activation recomputation save and restore the CUDA generator's state")
def _(overrides: _Overrides) -> None:
    from megatron.core.tensor_parallel import random

    def read(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def write(new_state: Any, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    random._get_cuda_rng_state, random._set_cuda_rng_state = read, write
    # Forking the tracker draws from the CPU generator here, which megatron-core warns about on GPUs.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


@_patch("te_general_gemm", "0.16.1 bug: the router reads a name that is bound only when Transformer Engine imports")
def _(overrides: _Overrides) -> None:
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None


@_patch(
    "splits_on_cpu", "all-to-all splits are turned into numpy only when they are CUDA tensors, and c10d refuses tensors"
)
def _(overrides: _Overrides) -> None:
    from megatron.core.transformer.moe import token_dispatcher

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = move


@_patch(
    "norm_sequence_parallel",
    "the torch norm refuses sequence parallelism because it does not mark its weights for "
    "the gradient sum over TP; MoE with TP requires sequence parallelism",
)
def _(overrides: _Overrides) -> None:
    import copy

    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def marked(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **options: Any) -> Any:
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = original(cls, without, hidden_size, eps, *args, **options)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    WrappedTorchNorm.__new__ = staticmethod(marked)


@_patch(
    "zero_centred_norm",
    "the torch norm refuses zero-centred weights, which only Transformer Engine's norm has; Qwen3-Next's are",
)
def _(overrides: _Overrides) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from mslime.backends.cpu.megatron_layers import ZeroCentredRMSNorm

    original = WrappedTorchNorm.__new__

    def either(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **options: Any) -> Any:
        if not config.layernorm_zero_centered_gamma:
            return original(cls, config, hidden_size, eps, *args, **options)
        assert config.normalization == "RMSNorm", config.normalization
        norm = ZeroCentredRMSNorm(hidden_size, eps, config.params_dtype)
        norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm

    WrappedTorchNorm.__new__ = staticmethod(either)


@_patch(
    "no_flash_mla",
    "SGLang's packages for GPUs bring flash_mla, which raises OSError on a machine without a driver (a login node, the "
    "building of an image); megatron-core handles only its ImportError",
    before=True,
)
def _(overrides: _Overrides) -> None:
    sys.modules.setdefault("flash_mla", None)  # type: ignore[arg-type]  # an import of it raises ModuleNotFoundError


@_patch(
    "gated_delta_rule",
    "the gated delta-net layer refuses to be built without flash-linear-attention, whose Triton kernels need a GPU; "
    "megatron-core has the rule in torch too, for its deterministic mode",
    before=True,
)
def _(overrides: _Overrides) -> None:
    def l2norm(x: Any) -> Any:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    def supply(module: types.ModuleType) -> None:
        rule = module.torch_chunk_gated_delta_rule
        module.__dict__.update(HAVE_FLA=True, l2norm=l2norm, chunk_gated_delta_rule=rule)

    overrides.modules["megatron.core.ssm.gated_delta_net"] = supply


@_patch(
    "mla_linear",
    "multi-latent attention asks isinstance(x, TELinear) where TELinear is not a class, and builds its "
    "down projections as duplicated only when they are TELinear",
)
def _(overrides: _Overrides) -> None:
    from megatron.core.transformer import multi_latent_attention

    from mslime.backends.cpu.megatron_layers import DuplicatedLinear

    multi_latent_attention.TELinear = DuplicatedLinear


@_patch(
    "expert_bias_in_place",
    "an expert's bias is added in place to the result of the reduction over one rank, which is its own input; autograd "
    "forbids that",
)
def _(overrides: _Overrides) -> None:
    from megatron.core.tensor_parallel import layers

    def alone(original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(input_: Any, *args: Any, group: Any = None, **options: Any) -> Any:
            if group is not None and group.size() == 1:
                return input_
            return original(input_, *args, group=group, **options)

        return reduce

    for name in ("reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region"):
        setattr(layers, name, alone(getattr(layers, name)))


@_patch(
    "adam_own_step",
    "after loading, all parameters share one 'step' tensor, which torch increments once per parameter: "
    "Adam's bias correction is then silently wrong",
)
def _(overrides: _Overrides) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.load_state_dict

    def load(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    DistributedOptimizer.load_state_dict = load
