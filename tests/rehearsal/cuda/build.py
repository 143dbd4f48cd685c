"""Builds the GPU that is not there:  python -m tests.rehearsal.cuda.build OUT

    OUT/libfakecuda.so    the CUDA runtime and its libraries (runtime.cpp), to be LD_PRELOADed
    OUT/libcuda.so.1      the driver (driver.c)

and puts `transformer_engine_torch.so` (extension.c), whose contents are tests/rehearsal/extension, where the
Transformer Engine of this Python looks for it. Only for an environment of the rehearsal's own: one with the real
extension is refused. A symbol that torch or one of its companions asks for and that is not written in the sources gets
a function that returns 0, which is CUDA's word for success.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = (
    "torch/lib/lib*.so",
    "transformer_engine/wheel_lib/lib*.so",
    "sgl_kernel/**/*.so",
    "deep_gemm/**/*.so",
    "deep_ep/**/*.so",
    "deep_ep*.so",
    "flash_mla/**/*.so",
    "torch_memory_saver*.so",
    "torchvision/*.so",
)
"""What is installed with torch and asks for CUDA; under site-packages."""
RUNTIME = re.compile(r"(cuda[A-Z]|__cuda|cublas|cudnn|nccl[A-Z]|cusparse|curand|cufft|cusolver|cuFile)")
DRIVER = re.compile(r"cu[A-Z][A-Za-z0-9_]*$")
WRITTEN = re.compile(r"^[\w*: ]*?\b((?:__)?cu[a-zA-Z]\w+|nccl\w+)\(", re.MULTILINE)


def undefined_symbols(libraries: Iterable[Path]) -> set[str]:
    """Names that these libraries expect others to define."""
    found: set[str] = set()
    for library in libraries:
        command = ["nm", "-D", "--undefined-only", str(library)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        found |= {words[1].split("@")[0] for line in lines if len(words := line.split()) == 2}
    return found


def written_in(source: str) -> set[str]:
    """Names of the CUDA functions that a source of ours defines."""
    return set(WRITTEN.findall(source))


def with_stubs(source: str, names: Iterable[str], cpp: bool) -> str:
    """The source, and a function that returns 0 for every one of `names` that it does not define."""
    missing = sorted(set(names) - written_in(source))
    if not cpp:
        return source + "".join(f"int {name}() {{ return 0; }}\n" for name in missing)
    # By assembler name: the headers declare some of them with other types.
    stubs = (f'long long {name}_stub() asm("{name}");\nlong long {name}_stub() {{ return 0; }}\n' for name in missing)
    return source + 'extern "C" {\n' + "".join(stubs) + "}\n"


def driver_symbols(header: str) -> set[str]:
    """Every function of cuda.h, in both versions where there may be two."""
    names = set(re.findall(r"CUresult CUDAAPI\s+(cu\w+)\s*\(", header))
    return names | {f"{name}_v2" for name in names if not name.endswith("_v2")}


def compile_to(out: Path, source: str, *flags: str) -> None:
    """One shared library from one source text; a process that has loaded an older one keeps it."""
    compiler, fresh = "g++" if "-xc++" in flags else "gcc", out.with_suffix(".new")
    command = [compiler, "-O1", "-shared", "-fPIC", "-w", *flags, "-", "-o", str(fresh)]
    subprocess.run(command, input=source, text=True, check=True)
    fresh.rename(out)


def refuse_real_extension(site: Path) -> None:
    """Ends the program where Transformer Engine's own extension is installed."""
    if real := sorted(site.glob("transformer_engine_torch*")):
        sys.exit(
            f"error: {real[0]} is Transformer Engine's own extension\n"
            "  hint: rehearse in an environment of its own: scripts/rehearse_gpu.sh --venv DIR"
        )


def main(out: Path) -> None:
    """Build everything for the environment of the Python that runs this."""
    site = Path(sysconfig.get_path("purelib"))
    refuse_real_extension(site)
    out.mkdir(parents=True, exist_ok=True)
    include = site / "nvidia/cu13/include"
    wanted = undefined_symbols(path for pattern in LIBRARIES for path in sorted(site.glob(pattern)))
    runtime = {name for name in wanted if RUNTIME.match(name)}
    driver = {name for name in wanted - runtime if DRIVER.match(name)} | driver_symbols(
        (include / "cuda.h").read_text()
    )
    source = with_stubs((HERE / "runtime.cpp").read_text(), runtime, cpp=True)
    compile_to(out / "libfakecuda.so", source, "-xc++", f"-I{include}")
    source = with_stubs((HERE / "driver.c").read_text(), driver, cpp=False)
    compile_to(out / "libcuda.so.1", source, "-xc", "-Wl,-soname,libcuda.so.1")
    headers = sysconfig.get_path("include")
    extension = site / "transformer_engine/wheel_lib/transformer_engine_torch.so"
    compile_to(extension, (HERE / "extension.c").read_text(), "-xc", f"-I{headers}")
    print(f"{len(runtime)} symbols of the CUDA runtime and its libraries, {len(driver)} of the driver -> {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
