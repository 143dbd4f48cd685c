"""Rehearses the engines' side on a machine without a GPU, with the real SGLang of the GPU installation:

    python -m tests.rehearsal.serving OUT [--only TEXT] [--stamp STAMP]

For every launch script: the command line that mslime would start an engine with is parsed and resolved by SGLang, for
CUDA, with the model's published config.json; what was asked for must be what SGLang has decided on. And what mslime
adds to an engine's processes: its plug-ins are loaded by SGLang, and every function that they wrap is there. No server
is started, and no kernel runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from mslime.backends.sglang.flags import command_line, environment, server_fields
from mslime.config.base import Half
from mslime.config.resolved import ServerSpec, engine_spec
from mslime.config.schema import RunConfig
from tests.fixtures.launch_scripts import MODELS, launch
from tests.rehearsal.outcomes import Check, attempt, finish, options, true

ROOT = Path(__file__).parents[2]
ENGINE_MODULES = (
    "sgl_kernel", "flashinfer", "deep_gemm", "flash_mla", "torch_memory_saver", "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager", "sglang.srt.model_executor.model_runner",
    "sglang.srt.entrypoints.engine", "sglang.srt.entrypoints.http_server",
    "mslime.backends.sglang.launch", "mslime.backends.sglang.guard",
)  # fmt: skip
ASKED = (
    "device", "dtype", "tp_size", "ep_size", "mem_fraction_static", "max_running_requests", "max_total_tokens",
    "random_seed", "served_model_name", "enable_return_routed_experts", "sampling_mask_max_tokens", "nnodes",
    "weight_version", "model_path", "tokenizer_path", "disaggregation_mode", "disaggregation_transfer_backend",
    "disaggregation_bootstrap_port", "disaggregation_decode_retraction_backup",
)  # fmt: skip
"""Fields whose value must survive SGLang's resolution wherever mslime sets one."""
PAIRED = next(iter(MODELS))
"""Whose engines are also resolved as pairs (`sglang.pairs`)."""
DECIDED = ("attention_backend", "moe_runner_backend", "moe_a2a_backend", "page_size", "chunked_prefill_size")
"""What SGLang decides by itself, for the table."""


def inner(code: str, argument: Any, gpus: int, memory_gib: float) -> Any:
    """The result of a function of this module, in a process with an engine's environment and GPUs."""
    env = environment(os.environ, cpu=False, ranks=gpus, gpus=[str(i) for i in range(gpus)])
    env |= {"FAKE_CUDA_DEVICES": str(gpus), "FAKE_CUDA_GIB": str(int(memory_gib))}
    command = [sys.executable, "-W", "ignore", "-m", "tests.rehearsal.serving", "--inner", code, json.dumps(argument)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


# ------------------------------------------------------------------------------------------- in an engine's environment


def resolve(argv: list[str]) -> dict[str, Any]:
    """What SGLang makes of a command line: the fields of `ASKED` and `DECIDED`."""
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(argv)
    args.resolve_once()
    decided = args.resolved_dict()  # the record itself keeps what was asked for
    return {name: plain(decided[name]) for name in (*ASKED, *DECIDED)}


def plug_ins(_: None) -> dict[str, list[str]]:
    """The functions that mslime's plug-ins wrap, and those that SGLang has found and wrapped."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    return {"wanted": sorted(HookRegistry._hooks), "wrapped": sorted(HookRegistry._patched)}


def imports(names: list[str]) -> dict[str, str]:
    """What importing each of these says; empty where it works."""
    import importlib

    found: dict[str, str] = {}
    for name in names:
        try:
            importlib.import_module(name)
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def plain(value: Any) -> Any:
    """A value that JSON has."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)


INNER: Mapping[str, Callable[[Any], Any]] = {"resolve": resolve, "plug_ins": plug_ins, "imports": imports}


# ---------------------------------------------------------------------------------------------------------------- cases


def launched_by_mslime(config: RunConfig) -> tuple[ServerSpec, tuple[int, str] | None]:
    """The spec of a run's engines; where the script wants them started by hand, as if mslime started them."""
    spec = engine_spec(config)
    per_machine = config.cluster.gpus_per_node
    if spec.settings.tp_size <= per_machine:
        return spec, None
    machines = spec.settings.tp_size // per_machine
    settings = spec.settings.model_copy(update={"nnodes": machines, "urls": None})
    return replace(spec, settings=settings), (0, "127.0.0.1:29500")


def engine_of(script: str, root: Path, half: Half | None = None) -> list[Check]:
    """The command line of a launch script's engines, resolved; or of one half of a pair that does the same."""
    config = launch(script, root).config
    spec, part = launched_by_mslime(config)
    if half is not None:
        spec = replace(spec, settings=spec.settings.model_copy(update={"pairs": "mooncake"}))
    routes = config.train.replay == "r3"
    fields = server_fields(spec, 0, "127.0.0.1", 30000, "mslime-engine0", routes, part, half, 30001)
    argv = command_line(fields)[3:]
    gpus = min(spec.settings.tp_size, config.cluster.gpus_per_node)
    found = inner("resolve", argv, gpus, config.cluster.gpu_memory_gb)
    asked = {name: fields[name] for name in ASKED if fields.get(name) is not None}
    other = {name: (value, found[name]) for name, value in asked.items() if found[name] != value}
    decided = ", ".join(f"{name} {found[name]}" for name in DECIDED)
    return [
        true("fields that SGLang changes", str(other or 0), not other and len(asked) >= 8),
        true("it decides on", decided, True),
    ]


def engine_imports(_: Path) -> list[Check]:
    """What an engine's processes import on a GPU."""
    found = inner("imports", list(ENGINE_MODULES), 1, 80)
    return [true(name, said or "imports", not said) for name, said in found.items()]


def engine_plug_ins(_: Path) -> list[Check]:
    """mslime's plug-ins, as SGLang loads them."""
    found = inner("plug_ins", None, 1, 80)
    missing = sorted(set(found["wanted"]) - set(found["wrapped"]))
    return [true("functions that plug-ins wrap", str(len(found["wrapped"])), len(found["wrapped"]) >= 8),
            true("that are not there", ", ".join(missing) or "none", not missing)]  # fmt: skip


def in_a_directory(work: Callable[[Path], list[Check]]) -> list[Check]:
    """What the work finds, with a directory of its own."""
    with tempfile.TemporaryDirectory() as root:
        return work(Path(root))


def main() -> int:
    """Run what has not been run, and print all of it."""
    given = options(__doc__).parse_args()
    work: dict[str, Callable[[Path], list[Check]]] = {
        "engine: imports": engine_imports,
        "engine: plug-ins": engine_plug_ins,
        **{f"engine of run-{script}.sh": lambda root, script=script: engine_of(script, root) for script in MODELS},
        **{
            f"engine of run-{PAIRED}.sh that would {half} in a pair": lambda root, half=half: engine_of(
                PAIRED, root, half
            )
            for half in get_args(Half)
        },
    }
    chosen = {name: each for name, each in work.items() if given.only in name}
    return finish(
        list(chosen),
        lambda name: attempt(name, partial(in_a_directory, chosen[name])),
        given.out / "outcomes",
        given.stamp,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inner"]:
        print(json.dumps(INNER[sys.argv[2]](json.loads(sys.argv[3]))))
    else:
        sys.exit(main())
