"""The command line and environment of an SGLang 0.5.23 server, from its spec. Starts nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mslime.backends.cpu.sglang import SITE_DIR
from mslime.config.base import Half
from mslime.config.model_facts import read_hf_config
from mslime.config.resolved import ServerSpec
from mslime.engine_plugin.wire import LOADER_VARIABLE, PATH_ENTRY

CPU_MAX_TOTAL_TOKENS = 65536
"""Tokens in a CPU server's cache unless configured: the server's default takes a share of the whole machine's
memory."""

# ServerArgs fields whose flag is not the field's name (sglang/srt/arg_groups/fields).
_FLAG_NAMES = {
    "fp8_gemm_runner_backend": "fp8-gemm-backend",
    "fp4_gemm_runner_backend": "fp4-gemm-backend",
    "ep_join_mode": "elastic-ep-join-mode",
    "ep_join_rank_offset": "elastic-ep-join-rank-offset",
}
# Fields with a --no-<flag>; every other boolean is a bare flag that is off if absent.
_NEGATABLE = {
    "enable_tf32_matmul",
    "dcp_replicate_q_proj",
    "enable_tp_lm_head_all_to_all",
    "enable_fused_qk_norm_rope",
    "speculative_enable_w4a4_mxfp4_megamoe",
    "mm_enable_dp_encoder",
    "experts_shared_outer_loras",
    "lora_strict_loading",
    "dllm_fdfo",
    "ple_offload_embedding",
    "enable_decoder_swa_bounded_replay",
    "enable_dsa_fused_indexer",
}


def server_fields(
    spec: ServerSpec, index: int, host: str, port: int, identity: str | None = None, routes: bool = False,
    part: tuple[int, str] | None = None, half: Half | None = None, bootstrap_port: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """ServerArgs fields of server `index`; fields that the user passes through override our defaults.

    Args:
        identity: name under which it serves its model, which distinguishes it from other servers.
        routes: whether it returns the experts of every token.
        part: of a server that spans several hosts: index of the host, of which the first answers over HTTP, and
            `host:port` of the rendezvous there.
        half: of a pair.
        bootstrap_port: of the prefill server of a pair, to which the other one connects for each request.

    Raises:
        CheckpointError: config.json cannot be read.
    """
    engine, cpu = spec.settings, spec.device == "cpu"
    fields: dict[str, Any] = {
        "model_path": str(spec.checkpoint.resolve()),
        "tokenizer_path": str(spec.tokenizer.resolve()),
        "host": host,
        "port": port,
        "device": "cpu" if cpu else "cuda",
        "dtype": spec.dtype(read_hf_config(spec.checkpoint)),
        "tp_size": engine.tp_size,
        "ep_size": engine.ep_size,
        "mem_fraction_static": engine.mem_fraction_static,
        "max_total_tokens": engine.max_total_tokens or (CPU_MAX_TOTAL_TOKENS if cpu else None),
        "max_running_requests": engine.max_running_requests,
        "random_seed": spec.seed + index,
        "weight_version": "0",
        "served_model_name": identity,
        "log_level_http": "warning",
        "enable_return_routed_experts": routes,
        "sampling_mask_max_tokens": spec.mask_tokens,
        "sleep_on_idle": cpu,  # an idle scheduler otherwise occupies a whole core
        "enable_memory_saver": spec.gives_back and not cpu,  # on a CPU our plug-in does it (`memory_release`)
        "enable_weights_cpu_backup": spec.gives_back and spec.role == "teacher",
    }
    if (lora := spec.lora) is not None:
        fields |= {
            "enable_lora": True,
            "lora_backend": "torch_native" if cpu else None,
            "max_lora_rank": lora.rank,
            "lora_target_modules": list(lora.modules),
            "max_loras_per_batch": lora.alive,
            "max_loaded_loras": lora.alive + 1,  # the newest is loaded before the oldest is removed
            "experts_shared_outer_loras": lora.shares_outer or None,
        }
    if part is not None:
        fields |= {"nnodes": engine.nnodes, "node_rank": part[0], "dist_init_addr": part[1]}
    if half is not None:
        fields |= {"disaggregation_mode": half, "disaggregation_transfer_backend": engine.pairs}
        if half == "prefill":
            fields["disaggregation_bootstrap_port"] = bootstrap_port
        else:
            # It does not requeue requests: their routes are stored with their cache and would be lost. It fails them
            # with HTTP 503 instead, and they are sent again.
            fields["disaggregation_decode_retraction_backup"] = "none"
    return fields | engine.extra


def command_line(fields: Mapping[str, Any]) -> list[str]:
    """The server's program (see `launch`) with one flag per field; None and false mean the engine's default."""
    command = [sys.executable, "-m", "mslime.backends.sglang.launch"]
    for name, value in fields.items():
        flag = "--" + _FLAG_NAMES.get(name, name.replace("_", "-"))
        if value is True:
            command.append(flag)
        elif value is False and name in _NEGATABLE:
            command.append("--no-" + flag[2:])
        elif isinstance(value, dict):
            command += [flag, json.dumps(value)]
        elif isinstance(value, list):
            command += [flag, *map(str, value)]
        elif value is not None and value is not False:
            command += [flag, str(value)]
    return command


def environment(
    base: Mapping[str, str], *, cpu: bool, ranks: int, gpus: Sequence[str] | None, recorded: bool = True,
    masks: bool = False,
) -> dict[str, str]:  # fmt: skip
    """The server's environment variables.

    Args:
        base: the environment to start from.
        ranks: tensor-parallel processes of the server.
        gpus: visible devices (CUDA_VISIBLE_DEVICES); None keeps those of `base`.
        recorded: it loads buckets of weights by recorded copies, not by the model's own loader.
        masks: it is one of a pair, which transfers sampling masks between its servers.
    """
    env = dict(base)
    env["HF_HUB_OFFLINE"] = "1"  # checkpoints are local; without a network every look-up would time out
    env["TOKENIZERS_PARALLELISM"] = "false"
    # SGLang calls itself through libraries that read the lower-case name first
    around = env.get("no_proxy") or env.get("NO_PROXY")
    env["no_proxy"] = env["NO_PROXY"] = ",".join(filter(None, [around, "127.0.0.1,localhost"]))
    env["PYTHONUNBUFFERED"] = "1"
    # mslime must be importable for the guard and the CPU platform, even if it is not installed.
    paths = [str(Path(__file__).resolve().parents[3]), str(PATH_ENTRY), env.get("PYTHONPATH")]
    env[LOADER_VARIABLE] = "recorded" if recorded else "model"
    if cpu:
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        env["SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"] = "0"  # it waits for an event of a GPU stream
        env["OMP_NUM_THREADS"] = env.get("OMP_NUM_THREADS", "1")
        paths.insert(0, str(SITE_DIR))
        if ranks > 1:  # one NUMA node then has several ranks, and sglang needs their cores spelt out
            cores = sorted(os.sched_getaffinity(0))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(ranks))
    else:
        # Options such as expandable segments, set for the trainer, break the engine's memory saver.
        env.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        # The memory saver is preloaded into schedulers, before torch finds the CUDA runtime that pip installed.
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [env.get("LD_LIBRARY_PATH"), *_cuda_libraries()]))
    if masks:
        env["SGLANG_ENABLE_DISAGG_SAMPLING_MASK"] = "1"
    if gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    if env.get("SGLANG_PLUGINS"):  # keep the user's plug-ins; without this variable SGLang loads all
        env["SGLANG_PLUGINS"] += ",mslime"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return env


def _cuda_libraries() -> list[str]:
    """Directories of NVIDIA's wheels with the CUDA runtime."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else None
    return [str(path.parent) for root in roots or () for path in Path(root).glob("*/lib/libcudart.so.*")]
