"""Compiles the kernels that SGLang 0.5.23 compiles when a server of a bfloat16 Qwen3-MoE first starts.

`python scripts/lib/on_gpu_precompile.py 64 128`, with the models' head dimensions; scripts/on_gpu.sh runs it beside its
first steps. One by one, each takes some 15 seconds of the server's start.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed


def main() -> int:
    """Compile all at once; returns 1 if one failed."""
    import torch
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention import clamp_position
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.layernorm.norm import _jit_qknorm_module

    dtype = torch.bfloat16
    modules: dict[str, Callable[[], object]] = {
        "activation": lambda: activation_module(dtype),
        "clamp_position": lambda: clamp_position._jit_clamp_position_module(torch.int64),
    }
    for size in map(int, sys.argv[1:]):
        modules[f"qknorm {size}"] = lambda size=size: _jit_qknorm_module(size, dtype)
        modules[f"fused_rope {size}"] = lambda size=size: _jit_fused_rope_module(True, size, dtype, dtype)
    begin, failed = time.monotonic(), False
    with ThreadPoolExecutor(len(modules)) as pool:
        compiled = {pool.submit(compile_module): name for name, compile_module in modules.items()}
        for done in as_completed(compiled):
            error = done.exception()
            failed |= error is not None
            print(f"{time.monotonic() - begin:4.0f} s  {compiled[done]}: {error or 'compiled'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
