"""Compiles the kernels of log-probs to machine code for Hopper (sm_90); no GPU is needed. Prints one line per variant:
variant, registers a thread, bytes of registers spilled to memory, bytes of shared memory.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from mslime.backends.megatron.log_probs import fused

POINTERS = {
    "column": "*i64", "top_out": "*fp32", "total_out": "*fp32", "moment_out": "*fp32", "label_out": "*fp32",
    "top_in": "*fp32", "log_total_in": "*fp32", "entropy_in": "*fp32", "of_log_probs": "*fp32", "of_entropy": "*fp32",
    "stride": "i32", "out_stride": "i32", "columns": "i32", "width": "i32", "scale": "fp32",
    "inverse_temperature": "fp32",
}  # fmt: skip


def main() -> None:
    """What a run launches, with bf16 logits and with fp32 ones."""
    for entropy in (False, True):
        report(f"row_sums bf16 entropy={entropy}", fused._row_sums, "*bf16", {"WITH_ENTROPY": entropy})
        constants = {"OF_LOG_PROBS": True, "OF_ENTROPY": entropy}
        report(f"write_gradient bf16 entropy={entropy}", fused._write_gradient, "*bf16", constants)
    report("row_sums fp32", fused._row_sums, "*fp32", {"WITH_ENTROPY": True})
    report("write_gradient fp32", fused._write_gradient, "*fp32", {"OF_LOG_PROBS": True, "OF_ENTROPY": True})


def report(name: str, kernel: triton.JITFunction, logits: str, constants: dict[str, bool]) -> None:
    """Compile one variant as the launch does: strides and pointers divisible by 16."""
    types = POINTERS | {"logits": logits, "out": logits}
    constexprs = constants | {"BLOCK": fused.BLOCK}
    signature = {a: "constexpr" if a in constexprs else types[a] for a in kernel.arg_names}
    divisible = {
        (i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names)
        if signature[a].startswith("*") or a in ("stride", "out_stride", "columns", "width")
    }  # fmt: skip
    source = ASTSource(kernel, signature, constexprs, divisible)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": fused.WARPS})
    with tempfile.TemporaryDirectory() as scratch:
        ptx = Path(scratch) / "kernel.ptx"
        ptx.write_text(built.asm["ptx"])
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert registers and spilled, said
    vector = "v4.b32" in built.asm["ptx"]
    print(f"{name}: {registers[1]} {spilled[1]} {built.metadata.shared} {'16-byte loads' if vector else ''}")


if __name__ == "__main__":
    main()
