"""Installed packages, their imports, and the correctness of kernels."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator

from mslime.checks.environment import failure
from mslime.config.passthrough import installed_version
from mslime_plugins.doctor.findings import Finding, Node, fail, ok, unseen, warn
from mslime_plugins.doctor.measure import TOLERANCE
from mslime_plugins.doctor.speeds import measured

NEEDED = ("torch", "megatron.core", "ray", "transformers", "sglang.srt.server_args")
ON_GPUS = {
    "triton": "mslime's log-prob kernels",
    "transformer_engine.pytorch": "the trainer's layers and grouped experts",
    "fla.ops.gated_delta_rule": "the gated delta-net families (Qwen3-Next, Qwen3.5)",
}
OPTIONAL = {
    "flash_attn": "Transformer Engine uses cuDNN's attention instead, which is as fast on Hopper",
    "grouped_gemm": "Transformer Engine's grouped products are used instead",
    "amp_C": "NVIDIA's apex: Transformer Engine's fused Adam and norms are used instead",
    "deep_ep": "needed only for megatron.moe_token_dispatcher_type flex",
}
"""Consequence of each missing package."""
_PIN = re.compile(r"^([\w.-]+)==([\w.]+)")


def check_packages(node: Node) -> Iterator[Finding]:
    """Compare versions with the pins, and import the packages."""
    extra = "gpu" if node.gpus else "cpu"
    yield versions_finding(pins(extra), installed_version, extra)
    broken = {name: failure(_importing(name, node)) for name in (*NEEDED, *(ON_GPUS if node.gpus else ()))}
    for name, why in broken.items():
        if why:
            meaning = f" ({ON_GPUS[name]})" if name in ON_GPUS else ""
            yield fail(f"{name} cannot be imported{meaning}: {why}", f"bash scripts/install.sh --{extra}")
    if not any(broken.values()):
        yield ok(f"{', '.join(broken)} can be imported")
    if not node.gpus:
        yield unseen(f"{', '.join(ON_GPUS)}: {node.blind}")
        return
    missing = {name: meaning for name, meaning in OPTIONAL.items() if failure(_importing(name, node))}
    for name, meaning in missing.items():
        yield ok(f"{name} is not installed, and is optional: {meaning}")


def _importing(name: str, node: Node) -> str:
    """Import order: torch first, which loads CUDA's libraries for the others; without GPUs SGLang needs its CPU
    platform."""
    before = "" if node.gpus else "from mslime.backends.cpu.sglang import install; install(); "
    return f"{before}import torch, {name}"


def pins(extra: str) -> dict[str, str]:
    """Versions required by mslime's own metadata, by package, including those of an extra."""
    found: dict[str, str] = {}
    for line in importlib.metadata.requires("mslime") or ():
        requirement, _, condition = line.partition(";")
        pin = _PIN.match(requirement.strip())
        if pin and (not condition.strip() or f"'{extra}'" in condition.replace('"', "'")):
            found[pin[1]] = pin[2]
    return found


def versions_finding(wanted: dict[str, str], installed: Callable[[str], str | None], extra: str) -> Finding:
    """Finding about pinned packages.

    Args:
        installed: returns the version of a package without a local part (+cpu), or None if it is missing.
    """
    others = {name: (installed(name) or "not installed").partition("+")[0] for name in wanted}
    wrong = [f"{name} {found} instead of {wanted[name]}" for name, found in others.items() if found != wanted[name]]
    if not wrong:
        return ok(f"{len(wanted)} pinned packages have the pinned versions")
    todo = f"bash scripts/install.sh --{extra}: other versions may work, but are not tested"
    return warn(f"{'; '.join(wrong[:6])}{f' and {len(wrong) - 6} more' if len(wrong) > 6 else ''}", todo)


def check_kernels(node: Node) -> Iterator[Finding]:
    """Compare kernels with plain torch."""
    device, tolerance = ("cuda:0", TOLERANCE["bfloat16"]) if node.gpus else ("cpu", TOLERANCE["float32"])
    [found] = measured([["kernels", "--device", device]])
    for name, differs in found.items():
        bound = TOLERANCE["float32"] if name.startswith("log-probs") else tolerance
        yield kernel_finding(name, differs, bound)
    if not node.gpus:
        yield unseen(f"kernels of Triton and Transformer Engine: {node.blind}; the log-probs above use the CPU kernels")


def kernel_finding(name: str, differs: float | str, bound: float) -> Finding:
    """Finding about one kernel.

    Args:
        differs: the largest difference over the largest value, or an error.
    """
    if isinstance(differs, str):
        return fail(f"{name}: {differs}", "see the lines of packages; for the traceback run python -m "
                    "mslime_plugins.doctor.measure kernels --device cuda:0")  # fmt: skip
    text = f"{name}: largest difference from plain torch {differs:.1e}, limit {bound:.0e}"
    if not differs <= bound:
        return fail(text, "do not train: its results are wrong on this machine; please report it with `mslime env`")
    return ok(text, difference=differs)
