"""Stand-ins for packages that SGLang imports and never uses on a CPU (`sglang.py` beside this file installs them).

A stand-in is used only if the real package is not installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


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
            _settle_torchvision_absence(module)


def _settle_torchvision_absence(stub: ModuleType) -> None:
    """Let transformers look for torchvision (and remember its absence) before the stub can be seen."""
    sys.modules.pop("torchvision", None)
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    sys.modules["torchvision"] = stub


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
    triton.language.constexpr = type("constexpr", (), {"__init__": _remember_value})
    for module, names in _TRITON_CLASSES.items():
        for name in names:
            setattr(sys.modules[f"triton.{module}"], name, type(name, (stubs._StubBase,), {}))
    for name in ("OutOfResources", "PTXASError"):
        setattr(triton.runtime.autotuner, name, type(name, (Exception,), {}))
    triton.runtime.cache.triton_key = triton.compiler.compiler.triton_key = stubs._triton_key
    sys.meta_path.append(stubs._TritonFinder())
    return triton


def _remember_value(self: Any, value: Any = None) -> None:
    self.value = value


_TRITON_MODULES = (
    "language",
    "language.extra",
    "language.extra.libdevice",
    "runtime",
    "runtime.jit",
    "runtime.cache",
    "runtime.autotuner",
    "runtime.driver",
    "compiler",
    "compiler.compiler",
    "testing",
    "tools",
    "tools.tensor_descriptor",
    "backends",
    "backends.compiler",
)
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
