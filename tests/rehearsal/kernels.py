"""Rehearses what runs as Triton kernels, without a GPU:

    python -m tests.rehearsal.kernels OUT [--only TEXT] [--stamp STAMP] [--sources DIR]

mslime's log-prob kernels are compiled to machine code for Hopper; Transformer Engine's permutation of tokens, by
Triton's interpreter, is compared with the indexing that stands in for it in the rehearsal's steps; every function of
its extension that Transformer Engine's Python names is one that the stand-in knows; and what the stand-in computes has
as many parameters as the extension's C++ declares, in its sources.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from tests.rehearsal.outcomes import Check, at_most, attempt, finish, options, true

ROOT = Path(__file__).parents[2]


def compiled_for_hopper() -> list[Check]:
    """Registers and spills of each variant of the log-prob kernels."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.kernels.compile_for_hopper"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[Check] = []
    for line in done.stdout.splitlines():
        name, _, numbers = line.rpartition(": ")
        registers, spilled, shared = map(int, numbers.split()[:3])
        found.append(true(name, f"{registers} registers, {spilled} bytes spilled, {shared} shared", spilled == 0))
    return found


def permutation_of_tokens() -> list[Check]:
    """Transformer Engine's Triton kernels and the rehearsal's indexing."""
    import torch

    from tests.rehearsal import on_gpu
    from tests.rehearsal.on_host import OnHost
    from tests.rehearsal.permutation import differences

    with OnHost():
        found = differences(on_gpu.TRITON, torch.device("cuda", 0))
    return [at_most(name, value, 1e-6) for name, value in found.items()]


def functions_of_the_extension() -> list[Check]:
    """Every `tex.NAME` in Transformer Engine's Python."""
    import torch  # noqa: F401  (loads NCCL, which Transformer Engine wants)
    import transformer_engine.pytorch

    from tests.rehearsal import extension

    assert transformer_engine.pytorch.__file__ is not None
    sources = sorted(Path(transformer_engine.pytorch.__file__).parent.rglob("*.py"))
    # Of ONNX, which has operators called tex, and of expert parallelism by NCCL, a build of its own.
    sources = [path for path in sources if path.name not in ("onnx_extensions.py", "ep.py")]
    named = {name for path in sources for name in re.findall(r"(?<!ops\.)\btex\.([A-Za-z_]\w*)", path.read_text())}
    unknown = sorted(name for name in named if name not in vars(extension))
    computed = len(named & set(extension.IMPLEMENTED))
    said = f"{len(named)} in {len(sources)} files; the stand-in computes {computed}"
    return [
        true("functions and enumerations that Transformer Engine names", said, len(named) > 50 and computed > 15),
        true("that the stand-in does not know", ", ".join(unknown) or "none", not unknown),
    ]


def declared(header: str, function: str) -> list[str]:
    """The names of a C++ function's parameters, in order."""
    found = re.search(rf"\b{function}\(([^;]*?)\);", header)
    assert found is not None, f"the headers do not declare {function}"
    parameters, depth, words = found[1], 0, [""]
    for letter in parameters:
        depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return [re.split(r"[\s&*]+", word.split("=")[0].strip())[-1] for word in words if word.strip()]


def signatures_of_the_extension(sources: Path) -> list[Check]:
    """The stand-in's parameters and those of the C++ functions that pybind11 binds under the same names."""
    from tests.rehearsal import extension

    (archive,) = sources.glob("transformer_engine_torch-*.tar.gz")
    with tarfile.open(archive) as files:
        texts = {m.name: files.extractfile(m) for m in files.getmembers() if m.name.endswith((".h", ".cpp"))}
        text = {name: file.read().decode() for name, file in texts.items() if file is not None}
    (bindings,) = [body for name, body in text.items() if name.endswith("/pybind.cpp")]
    (header,) = [body for name, body in text.items() if name.endswith("csrc/extensions.h")]
    bound = dict(re.findall(r'm\.def\(\s*"(\w+)",\s*&(?:[\w]+::)*(\w+)', bindings))
    different: list[str] = []
    compared = 0
    for name in extension.IMPLEMENTED:
        if name not in bound or bound[name].startswith(
            "nvte_"
        ):  # a lambda, or of the common library: without parameters
            continue
        theirs = declared(header, bound[name])
        ours = list(inspect.signature(vars(extension)[name]).parameters)
        compared += 1
        if len(theirs) != len(ours):
            different.append(f"{name}({', '.join(theirs)})")
    unknown = sorted(set(bound) ^ (set(bound) & set(extension.FUNCTIONS)))
    return [
        true("functions whose parameters are those of the C++ sources", str(compared), compared > 15),
        true("that differ", "; ".join(different) or "none", not different),
        true("bound functions that the stand-in does not know", ", ".join(unknown) or "none", not unknown),
    ]


def without_a_driver() -> list[Check]:
    """The GPU packages where no runtime pretends anything: a login node that converts checkpoints."""
    env = {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "LD_LIBRARY_PATH")}
    code = "import mslime.backends.cpu.megatron_patches as cpu; print(len(cpu.install())); import mslime.offline.jobs"
    code += "; import mslime.backends.megatron.model.chunks"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
    return [true("patches of megatron-core, and the model that conversions build, import", said, done.returncode == 0)]


WORK: dict[str, Callable[[], list[Check]]] = {
    "Transformer Engine: a machine without a driver": without_a_driver,
    "Triton: log-prob kernels compiled for Hopper": compiled_for_hopper,
    "Triton: Transformer Engine's permutation of tokens": permutation_of_tokens,
    "Transformer Engine: names of its extension": functions_of_the_extension,
}


def main() -> int:
    """Run what has not been run, and print all of it."""
    parser = options(__doc__)
    parser.add_argument("--sources", type=Path, help="directory with the source archive of transformer_engine_torch")
    given = parser.parse_args()
    work = dict(WORK)
    if given.sources is not None:
        work["Transformer Engine: signatures of its extension"] = lambda: signatures_of_the_extension(given.sources)
    chosen = {name: check for name, check in work.items() if given.only in name}
    return finish(list(chosen), lambda name: attempt(name, chosen[name]), given.out / "outcomes", given.stamp)


if __name__ == "__main__":
    sys.exit(main())
