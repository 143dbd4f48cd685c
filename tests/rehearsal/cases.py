"""Which models, layouts and settings are rehearsed, and which numbers they must keep."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from mslime.config.base import Fp8Recipe
from mslime.config.loader import load_config
from tests.engines.trainer_ranks import PARALLEL
from tests.fixtures.families import CASES as FAMILIES
from tests.rehearsal.extension.gemm import IN_FP8
from tests.rehearsal.fp8_by_hand import WITHOUT_FP8
from tests.rehearsal.outcomes import Check, at_most, true

ROOT = Path(__file__).parents[2]
WITHOUT = {"use_distributed_optimizer": False}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS: tuple[dict[str, int], ...] = (
    {"tp": 2, "ep": 2},
    {"pp": 2},
    {"pp": 2, "vpp": 2},
    {"cp": 2},
    {"dp": 2, "ep": 2},
)
THREE = ("qwen3-moe", "deepseek-v3", "gpt-oss")
BY_HAND = 4e-3
"""Of the largest number of a result of an FP8 layer: what bfloat16 rounds off it."""
GRAD_NORM = {"blockwise": 5e-2, "tensorwise": 1e-1}
"""Of a norm in float32, what FP8 rounds off it, as found: 2e-2 where a block of 128 has a scale of its own; up to 6e-2
where a whole tensor shares one, which depends on the layout, as each rank scales what it holds. That each product is
right is shown by hand (`fp8_by_hand`)."""
_ONE: dict[str, int] = {}
RECURRENT = ("qwen3-next", "qwen3.5-moe")
"""Their recurrence grows differences: on the CPU, layouts of them are held to 1e-5 (test_hybrid_families.py)."""
LIKE = {
    "deepseek-r1": "deepseek-v3", "deepseek-v3": "deepseek-v3", "glm4.5-355B-A32B": "glm-4.5",
    "deepseek-r1-128gpus": "deepseek-v3", "deepseek-v3-128gpus": "deepseek-v3", "glm4.5-355B-A32B-64gpus": "glm-4.5",
    "qwen3-30B-A3B-8gpus": "qwen3-moe",
    "glm4.5-air-106B-A12B": "glm-4.5-air", "glm4.7-355B-A32B": "glm-4.5", "gpt-oss-20b": "gpt-oss",
    "kimi-k2": "kimi-k2", "llama3.1-8B": "llama-3", "minimax-m2": "minimax-m2", "mixtral-8x7B": "mixtral",
    "moonlight-16B-A3B": "moonlight", "olmoe-1B-7B": "olmoe", "qwen2.5-0.5B": "qwen2, tied",
    "qwen3-235B-A22B": "qwen3-moe", "qwen3-30B-A3B": "qwen3-moe", "qwen3-4B": "qwen3, tied",
    "qwen3-next-80B-A3B": "qwen3-next", "qwen3.5-35B-A3B": "qwen3.5-moe",
}  # fmt: skip
"""The tiny family that stands in for the model of a launch script."""


@dataclass(frozen=True)
class Case:
    """One trainer, from its checkpoint to a resumed step.

    Attributes:
        name: unique.
        family: of `tests.fixtures.families.CASES`.
        sizes: parallel, by the names of `trainer_ranks.PARALLEL`; with `dp` where it is not 1.
        own: settings of `megatron`; float32 unless they say otherwise.
        fp8: `train.fp8`; with it parameters are bfloat16.
    """

    name: str
    family: str
    layout: Mapping[str, int] = field(default_factory=dict[str, int])
    own: Mapping[str, Any] = field(default_factory=dict[str, Any])
    fp8: Fp8Recipe | None = None

    @property
    def sizes(self) -> dict[str, int]:
        return {key: size for key, size in self.layout.items() if key != "dp"}

    @property
    def ranks(self) -> int:
        ranks = 1
        for key in ("dp", "tp", "pp", "cp"):
            ranks *= self.layout.get(key, 1)
        return ranks

    @property
    def settings(self) -> dict[str, Any]:
        return {"params_dtype": "float32" if self.fp8 is None else "bfloat16", **self.own}

    @property
    def compares_gradients(self) -> bool:
        """With the distributed optimizer each data-parallel rank holds only its shard's sum."""
        shared = self.layout.get("dp", 1) * self.layout.get("cp", 1) > 1
        return not shared or not self.settings.get("use_distributed_optimizer", True)


def cases() -> list[Case]:
    """All of them, cheap ones first."""
    found = [Case(f"float32 {name}", name) for name in FAMILIES]
    found += [Case(f"bfloat16 {name}", name, own={"params_dtype": "bfloat16"}) for name in THREE]
    found += [
        Case(
            "bfloat16 qwen3-moe without the distributed optimizer",
            "qwen3-moe",
            own={"params_dtype": "bfloat16"} | WITHOUT,
        ),
        Case("float32 deepseek-v3 without the distributed optimizer", "deepseek-v3", own=WITHOUT),
        Case("float32 qwen3-moe, full recompute", "qwen3-moe", own=RECOMPUTE),
        Case(
            "float32 qwen3-moe, selective recompute",
            "qwen3-moe",
            own={"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe_act"]},
        ),
        Case(
            "float32 qwen3-moe, PP2 VPP2, fused permutation",
            "qwen3-moe",
            {"pp": 2, "vpp": 2},
            WITHOUT | {"moe_permute_fusion": True},
        ),
        Case("float32 qwen3-moe, DP2 EP2, distributed optimizer", "qwen3-moe", {"dp": 2, "ep": 2}),
    ]
    for name in THREE:
        for layout in LAYOUTS:
            if name == "gpt-oss" and "cp" in layout:
                continue  # refused: Transformer Engine's ring takes no learnable softmax
            found.append(Case(f"float32 {name}, {describe(layout)}", name, layout, WITHOUT))
    return [*found, *in_fp8(), *launched()]


def in_fp8() -> Iterator[Case]:
    """Linear layers that multiply in FP8, by each recipe: dense, grouped and latent attention, experts; all layouts."""
    for recipe in get_args(Fp8Recipe):
        for family in ("qwen3, tied", "qwen3-moe", "deepseek-v3"):
            dense = family == "qwen3, tied"
            parallel = {"tp": 2} if dense else {"tp": 2, "ep": 2}
            spread = {"dp": 2} if dense else {"dp": 2, "ep": 2}
            for layout, own in ((_ONE, WITHOUT), (parallel, WITHOUT), (spread, {})):
                yield Case(f"FP8 {recipe} {family}, {describe(layout)}", family, layout, own, recipe)
        own = WITHOUT | RECOMPUTE
        yield Case(f"FP8 {recipe} qwen3-moe, PP2 VPP2", "qwen3-moe", {"pp": 2, "vpp": 2}, WITHOUT, recipe)
        yield Case(f"FP8 {recipe} deepseek-v3, CP2, full recompute", "deepseek-v3", {"cp": 2}, own, recipe)


def describe(layout: Mapping[str, int]) -> str:
    """`TP2 EP2`."""
    return " ".join(f"{key.upper()}{size}" for key, size in layout.items()) or "one rank"


def launched() -> Iterator[Case]:
    """The flags of every launch script, with parallel sizes above 2 cut to 2; the same only once."""
    seen: list[Any] = []
    for script, family in LIKE.items():
        megatron = load_config(None, script_flags(script)).megatron.model_dump(exclude_defaults=True)
        settings = megatron.pop("extra", {}) | megatron
        layout = {key: min(settings.pop(long), 2) for key, long in PARALLEL.items() if settings.get(long)}
        settings = {k: v for k, v in settings.items() if not k.startswith("num_layers_in_")}
        layout = {key: size for key, size in layout.items() if size > 1}
        if settings.get("optimizer_cpu_offload"):  # megatron-core offloads copies of 16-bit parameters alone
            settings["params_dtype"] = "bfloat16"
        if layout.get("ep") == 2 and not {"tp", "cp"} & layout.keys():
            layout["dp"] = 2
        if (family, layout, settings) not in seen:
            seen.append((family, layout, settings))
            yield Case(f"run-{script}.sh, {describe(layout)}", family, layout, settings)


def script_flags(script: str) -> list[str]:
    """What scripts/models/SCRIPT.sh says, with the two settings without a default."""
    command = f'source scripts/models/{script}.sh; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    said = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return ["--model.path", "unused", "--data.prompts", "unused.jsonl", *said.splitlines()]


def judge(case: Case, ranks: Sequence[Mapping[str, Any]]) -> list[Check]:
    """What the numbers of `ranks.rehearse` say."""

    def worst(key: str) -> float:
        return float(np.max([float(rank[key]) for rank in ranks if key in rank]))  # NaN where one is

    exact = case.settings["params_dtype"] == "float32"
    again = 1e-6 if exact or case.fp8 else 5e-2
    norm = 2e-6 if exact else GRAD_NORM.get(case.fp8 or "", 5e-2)
    rows, changed = sum(rank["rows"] for rank in ranks), sum(len(rank["changed"]) for rank in ranks)
    layers = {name for rank in ranks for name in rank["layers"]}
    pageable = [place for rank in ranks for place in rank["pageable"]]
    checks = [true("logit rows compared", str(rows), rows > 0)]
    checks += [true("passes copy from pinned memory alone", pageable[0] if pageable else "", not pageable)]
    if exact:
        checks += [at_most("logits - transformers'", worst("logits"), 2e-6)]
        checks += [at_most("log-probs - the CPU trainer's", worst("log_probs"), 5e-6)]
        if case.compares_gradients:
            bound = 5e-6 if case.family in RECURRENT else 1e-6
            checks += [at_most("gradients - the CPU trainer's", worst("gradients"), bound)]
        checks += [at_most("weights after a step - the CPU trainer's", worst("weights"), 2e-4)]
    checks += [
        at_most("loss - the CPU trainer's", worst("loss"), 2e-6 if exact else 5e-2),
        at_most("grad_norm / the CPU trainer's - 1", worst("grad_norm"), norm),
        true("weights that a checkpoint changes", str(changed), not changed),
        at_most("grad_norm of the step after it, twice", worst("again"), again),
        true("tensors that the export changes", str(len(ranks[0]["exported"])), not ranks[0]["exported"]),
        true("layers", " ".join(sorted(layers)), bool(layers)),
    ]  # fmt: skip
    return checks if case.fp8 is None else checks + list(of_fp8(ranks))


def of_fp8(ranks: Sequence[Mapping[str, Any]]) -> Iterator[Check]:
    """What shows that linear layers multiplied in FP8, and rightly."""
    products = [int(rank["calls"].get(IN_FP8, 0)) for rank in ranks]
    yield true("products of FP8", " ".join(map(str, products)), min(products) > 0)
    for layer, shares in [each for rank in ranks for each in rank.get("by_hand", {}).items()]:
        for what, share in shares.items():
            if what == WITHOUT_FP8:
                yield true(f"{layer} without FP8", f"{share:.0e} from it", share > 2 * BY_HAND)
            else:
                yield at_most(f"{layer}: {what} - by hand", share, BY_HAND)
