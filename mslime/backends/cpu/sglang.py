"""The CPU platform of SGLang: lets the stock wheel serve on a machine without a GPU and without AMX.

SGLang imports CUDA-only packages at start and calls a few CUDA-only kernels. Each obstacle is one named entry here,
with the reason beside it: a `Stub` stands in for a package that is imported, never used on CPU and not installed, a
`SglangPatch` changes one module right after SGLang has imported it. Importing this module is cheap (no torch, no
sglang); `install` must run before sglang is imported, in every process of the server; `sglang_site/sitecustomize.py`
does this.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mslime.backends.cpu import sglang_layers
from mslime.config.errors import EngineError
from mslime.config.passthrough import installed_version


@dataclass(frozen=True)
class Stub:
    """A package that sglang imports and never uses on CPU; replaced only if it is not installed."""

    name: str
    reason: str
    install: Callable[[], None]


class _Missing:
    """A name of an absent package: it can be imported, and raises when called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not available on CPU")

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")


class _StubModule(ModuleType):
    """A module in which every public name exists."""

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on sys.meta_path: used only if the real package is not installed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != self.name:
            return None
        # Other libraries use `importlib.util.find_spec` to test whether a package is installed: report it as absent.
        if sys._getframe(2).f_code is importlib.util.find_spec.__code__:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        if module.__name__ == "torchvision":
            # Let transformers look for torchvision, and remember its absence, before the stub can be seen.
            sys.modules.pop("torchvision", None)
            from transformers.utils import import_utils

            import_utils.is_torchvision_available()
            sys.modules["torchvision"] = module


def _stub_last(name: str) -> Callable[[], None]:
    return lambda: sys.meta_path.append(_StubFinder(name))


class _TritonFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on sys.meta_path: puts the mock in place when triton is first imported.

    Not earlier, because sglang's stubs import torch; processes that never use triton avoid that cost.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if fullname == "triton" else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        sys.meta_path.remove(self)
        return _mock_triton()

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the mock is complete."""


def _mock_triton() -> ModuleType:
    """The mock of Triton that sglang ships for Apple machines, completed with what torch 2.13 needs."""
    stubs = _load_sglang_platform_stubs()
    triton = stubs._make_mock("triton")
    triton.__version__ = "3.0.0"
    triton.cdiv, triton.next_power_of_2, triton.Config = stubs._cdiv, stubs._next_power_of_2, stubs._Config
    for name in _TRITON_MODULES:
        parent, _, leaf = f"triton.{name}".rpartition(".")
        setattr(sys.modules[parent], leaf, stubs._make_mock(f"triton.{name}"))
    triton.language.constexpr = type(
        "constexpr", (), {"__init__": lambda self, value=None: setattr(self, "value", value)}
    )
    for module, names in _TRITON_CLASSES.items():
        for name in names:
            setattr(sys.modules[f"triton.{module}"], name, type(name, (stubs._StubBase,), {}))
    for name in ("OutOfResources", "PTXASError"):
        setattr(triton.runtime.autotuner, name, type(name, (Exception,), {}))
    triton.runtime.cache.triton_key = triton.compiler.compiler.triton_key = stubs._triton_key
    sys.meta_path.append(stubs._TritonFinder())
    return triton


_TRITON_MODULES = (
    "language", "language.extra", "language.extra.libdevice", "runtime", "runtime.jit", "runtime.cache",
    "runtime.autotuner", "runtime.driver", "compiler", "compiler.compiler", "testing", "tools",
    "tools.tensor_descriptor", "backends", "backends.compiler",
)  # fmt: skip
_TRITON_CLASSES = {
    "runtime.jit": ("JITFunction", "KernelInterface"),
    "compiler": ("CompiledKernel",),
    "compiler.compiler": ("ASTSource",),
    "backends.compiler": ("GPUTarget",),
}


def _load_sglang_platform_stubs() -> Any:
    """sglang/_platform_stubs.py as a module, without importing sglang itself."""
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.submodule_search_locations, "sglang is not installed"
    path = Path(package.submodule_search_locations[0]) / "_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


STUBS: tuple[Stub, ...] = (
    Stub("sgl_kernel", "imported unconditionally on CPU; PyPI has a CUDA wheel only", _stub_last("sgl_kernel")),
    Stub(
        "torchvision",
        "imported by sglang's model configs; its PyPI wheel needs a CUDA torch and breaks transformers without one",
        _stub_last("torchvision"),
    ),
    Stub(
        "triton",
        "kernels are defined at import; none runs on CPU, and the wheel takes 1 GB",
        lambda: sys.meta_path.append(_TritonFinder()),
    ),
)

SGLANG_VERSION = "0.5.23"
SITE_DIR = Path(__file__).with_name("sglang_site")
"""Directory to put on PYTHONPATH of a server: its sitecustomize installs the platform in every child process."""


def check_version() -> None:
    """Reject any sglang version but the pinned one: the patches below reach into its internals. Raises EngineError."""
    found = installed_version("sglang")
    if found != SGLANG_VERSION:
        raise EngineError(
            "sglang",
            found,
            f"must be {SGLANG_VERSION}: the CPU platform patches its internals",
            "install with `bash scripts/install.sh --cpu`, or run on a GPU",
        )


# ------------------------------------------------------------------------------------------------------- patches


@dataclass(frozen=True)
class SglangPatch:
    """A change to one sglang module, applied right after that module has run."""

    name: str
    module: str
    reason: str
    apply: Callable[[Any], None]


def _host_alloc(module: Any) -> None:
    def allocate(dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any, *_: Any, **__: Any) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _shared_expert_gate(module: Any) -> None:
    import torch

    def fused_gate_sigmoid_mul_add(hidden: Any, gate_weight: Any, shared: Any, output: Any) -> None:
        gate = torch.sigmoid(torch.nn.functional.linear(hidden, gate_weight.reshape(1, -1)))
        output.add_(gate * shared)

    module.fused_gate_sigmoid_mul_add = fused_gate_sigmoid_mul_add


def _joint_norms(module: Any) -> None:
    import torch

    def rms_sumsq_serial(q: Any, k: Any) -> Any:
        return torch.cat([q.float().square().sum(-1), k.float().square().sum(-1)])

    def rms_apply_serial(
        q: Any, k: Any, q_weight: Any, k_weight: Any, sum_sq: Any, tp_world: int = 1, eps: float = 1e-5
    ) -> Any:
        def apply(x: Any, weight: Any, squares: Any) -> Any:
            scale = torch.rsqrt(squares / x.shape[-1] / tp_world + eps)[:, None]
            return (x.float() * scale * weight.float()).to(x.dtype)

        return apply(q, q_weight, sum_sq[: len(q)]), apply(k, k_weight, sum_sq[len(q) :])

    module.rms_sumsq_serial, module.rms_apply_serial = rms_sumsq_serial, rms_apply_serial


def _plain_rope(module: Any) -> None:
    original = module.get_rope_wrapper
    signature = inspect.signature(original)

    def get_rope_wrapper(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options).arguments
        scaling = given.get("rope_scaling")
        if scaling is None or scaling.get("rope_type", "default") == "default":
            given["device"] = None  # selects the generic rope, which runs anywhere
        return original(**given)

    module.get_rope_wrapper = get_rope_wrapper


def _absorbed_mla(module: Any) -> None:
    def handler(attention: Any, forward_batch: Any) -> Any:
        return module._dispatch_mla_subtype(attention, forward_batch)

    module.AttentionBackendRegistry.register("torch_native", handler)


def _remote_experts(module: Any) -> None:
    original = module.moe_forward_native

    def moe_forward_native(layer: Any, x: Any, topk_output: Any, moe_runner_config: Any) -> Any:
        ids, weights = topk_output.topk_ids, topk_output.topk_weights
        if not bool((ids < 0).any()):
            return original(layer, x, topk_output, moe_runner_config)
        import torch
        from torch.nn import functional

        assert moe_runner_config.activation == "silu" and moe_runner_config.gemm1_alpha is None
        output = torch.zeros(x.shape, dtype=weights.dtype)
        for expert in range(layer.w13_weight.shape[0]):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            if token.numel():
                gate, up = functional.linear(x[token], layer.w13_weight[expert]).chunk(2, -1)
                down = functional.linear(functional.silu(gate) * up, layer.w2_weight[expert])
                output.index_add_(0, token, down.to(weights.dtype) * weights[token, slot, None])
        return output.to(x.dtype)

    module.moe_forward_native = moe_forward_native


def _deterministic_choices(module: Any) -> None:
    for backends in (
        module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        module.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if "torch_native" not in backends:
            backends.append("torch_native")


def _no_triton_matmuls(module: Any) -> None:
    module.enable_batch_invariant_mode = lambda *args, **kwargs: None


def _murmur_hash(module: Any) -> None:
    import numpy as np
    import torch

    u32 = np.uint32

    def rotate(x: Any, bits: int) -> Any:
        return (x << u32(bits)) | (x >> u32(32 - bits))

    def murmur_hash32(seed: Any, positions: Any, col_indices: Any) -> Any:
        """[rows] seeds and positions, [columns] indices -> [rows, columns] int64 hashes below 2**32."""
        words = seed.view(torch.int64).numpy().view(np.uint64)
        blocks = [
            (words & np.uint64(0xFFFFFFFF)).astype(u32)[:, None],
            (words >> np.uint64(32)).astype(u32)[:, None],
            positions.to(torch.int64).numpy().astype(u32)[:, None],
            col_indices.to(torch.int64).numpy().astype(u32)[None, :],
        ]
        state: Any = np.zeros((1, 1), u32)
        with np.errstate(over="ignore"):
            for block in blocks:
                mixed = rotate(block * u32(0xCC9E2D51), 15) * u32(0x1B873593)
                state = rotate(state ^ mixed, 13) * u32(5) + u32(0xE6546B64)
            state = state ^ u32(16)
            state = (state ^ (state >> u32(16))) * u32(0x85EBCA6B)
            state = (state ^ (state >> u32(13))) * u32(0xC2B2AE35)
            state = state ^ (state >> u32(16))
        return torch.from_numpy(state.astype(np.int64))

    module.murmur_hash32 = murmur_hash32


PATCHES: tuple[SglangPatch, ...] = (
    SglangPatch(
        "host_alloc",
        "sglang.srt.mem_cache.pool_host.common",
        "the capture of routed experts pins its host buffer through cudaHostRegister; there is no CUDA runtime",
        _host_alloc,
    ),
    SglangPatch(
        "shared_expert_gate",
        "sglang.kernels.ops.elementwise.elementwise",
        "the sigmoid gate of Qwen2-MoE's shared expert exists as a Triton kernel only",
        _shared_expert_gate,
    ),
    SglangPatch(
        "joint_norms",
        "sglang.srt.models.minimax_m2",
        "MiniMax-M2's norms over all query and all key heads exist as Triton kernels, and for CPUs with AMX",
        _joint_norms,
    ),
    SglangPatch(
        "plain_rope",
        "sglang.srt.layers.rotary_embedding.factory",
        "the CPU branch supports deepseek_yarn only; DeepSeek models without rope scaling need the plain rope",
        _plain_rope,
    ),
    SglangPatch(
        "absorbed_mla",
        "sglang.srt.models.deepseek_common.attention_backend_handler",
        "torch_native has no MLA handler and inherits one that prefills with expanded heads while the backend reads "
        "the latent cache: silently wrong logits",
        _absorbed_mla,
    ),
    SglangPatch(
        "remote_experts",
        "sglang.srt.layers.moe.fused_moe_native",
        "with expert parallelism, experts of other ranks arrive as id -1 and the native loop indexes with them",
        _remote_experts,
    ),
    SglangPatch(
        "deterministic_choices",
        "sglang.srt.arg_groups.choices",
        "sampling_seed needs deterministic inference, which rejects the torch_native attention",
        _deterministic_choices,
    ),
    SglangPatch(
        "no_triton_matmuls",
        "sglang.srt.batch_invariant_ops",
        "deterministic inference swaps in Triton matmuls; on CPU ATen's stay (without guaranteed batch invariance)",
        _no_triton_matmuls,
    ),
    SglangPatch(
        "murmur_hash",
        "sglang.kernels.ops.sampling.murmur_hash",
        "seeded sampling hashes (seed, position, column) with an op of sgl_kernel; the same arithmetic in numpy",
        _murmur_hash,
    ),
    SglangPatch(
        "adapters_unpinned",
        "sglang.srt.lora.layers",
        "layers with adapters pin their offsets' memory",
        sglang_layers.unpinned,
    ),
    SglangPatch(
        "adapter_batches_unpinned",
        "sglang.srt.lora.backend.torch_backend",
        "tables of batches pin their memory",
        sglang_layers.unpinned,
    ),
    SglangPatch(
        "merged_segments",
        "sglang.srt.lora.backend.base_backend",
        "a check for a GPU kernel ends the server when requests of one adapter have more than 256 tokens together",
        sglang_layers.merged_segments,
    ),
    SglangPatch(
        "expert_adapters",
        "sglang.srt.lora.layers",
        "experts with adapters exist as Triton and Marlin kernels only",
        sglang_layers.expert_adapters,
    ),
    SglangPatch(
        "emulated_fp8",
        "sglang.srt.layers.quantization.fp8",
        "FP8 layers need kernels of a GPU or of AMX; the bits are kept, and computed with as floats",
        sglang_layers.emulated_fp8,
    ),
    SglangPatch(
        "emulated_int4",
        "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16_moe",
        "INT4 experts need Marlin or Triton kernels; the bits are kept, and computed with as floats",
        sglang_layers.emulated_int4,
    ),
    SglangPatch(
        "every_dtype_beside_int4",
        "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors",
        "kernels need 16 bits, and the CPU platform also serves float32",
        sglang_layers.every_dtype_beside_int4,
    ),
    SglangPatch(
        "plain_indices",
        "sglang.srt.disaggregation.mooncake.conn",
        "a prefill server pins the numbers of its pages, and waits for a stream",
        sglang_layers.plain_indices,
    ),
)


class _PatchFinder(importlib.abc.MetaPathFinder):
    """First on sys.meta_path: finds the patched modules as usual; a module is patched right after it has run."""

    def __init__(self, patches: Sequence[SglangPatch]) -> None:
        self.patches = {module: [p for p in patches if p.module == module] for module in {p.module for p in patches}}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.patches:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            run = loader.exec_module

            def run_then_patch(module: ModuleType) -> None:
                run(module)
                for patch in self.patches[fullname]:
                    patch.apply(module)

            loader.exec_module = run_then_patch
        return spec


def names() -> tuple[str, ...]:
    """Every stub and patch, in the order in which they are installed."""
    return tuple(entry.name for entry in (*STUBS, *PATCHES))


def install(skip: Collection[str] = ()) -> None:
    """Make sglang importable and correct on CPU. Call before the first `import sglang`.

    Args:
        skip: names of stubs and patches to leave out; only for tests, which show that each is needed.

    Raises:
        EngineError: the installed sglang is not the pinned version.
    """
    check_version()
    unknown = set(skip) - set(names())
    assert not unknown, f"no such CPU patch: {sorted(unknown)}"
    sys.meta_path.insert(0, _PatchFinder([p for p in PATCHES if p.name not in skip]))
    for stub in STUBS:
        if stub.name not in skip:
            stub.install()
