"""Checkpoint conversion against a plain copy of the same bytes on the same disk, and against mbridge.

    python benchmarks/convert.py                  # 8 layers of 96 experts: 2,304 expert tensors, 2.6 GB
    python benchmarks/convert.py --hidden 512 --ffn 256   # 0.7 GB

The copy is the floor: it reads every file of the checkpoint and writes it to a new one, synced to the disk. Conversion
also places, checksums and indexes every tensor; with verification it reads everything again. Each run directly follows
a copy, because the speed of disk and processors varies. mbridge loads the same files into a model on one rank, on which
mslime's loader is timed too. mbridge requests the model's whole state dict once per parameter; it is also timed with a
cached state dict.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from mslime.convert.families import get_family
from mslime.convert.hf import INDEX_NAME
from mslime.convert.torch_dist import ModelPlacement
from mslime.offline.jobs import run_job
from mslime.offline.requantise import ToFp8
from mslime.offline.to_hf import ToHf
from mslime.offline.to_megatron import ToMegatron

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.engines.megatron_ranks import run_ranks

SHARD_BYTES = 512 << 20


def synthetic_config(args: argparse.Namespace) -> dict[str, Any]:
    """config.json of a Qwen3-MoE with the requested sizes."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 4096, "vocab_size": 32000,
        "num_hidden_layers": args.layers, "hidden_size": args.hidden, "intermediate_size": 4 * args.hidden,
        "head_dim": 64, "num_attention_heads": args.hidden // 64, "num_key_value_heads": max(args.hidden // 256, 1),
        "moe_intermediate_size": args.ffn, "num_experts": args.experts, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "tie_word_embeddings": False,
    }  # fmt: skip


def write_checkpoint(directory: Path, config: dict[str, Any]) -> int:
    """Write random bfloat16 weights in shards of `SHARD_BYTES`; returns their bytes."""
    directory.mkdir()
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    total = pending = number = 0

    def flush() -> None:
        nonlocal pending, number
        file = f"model-{number:05d}.safetensors"
        save_file(shard, directory / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()
        pending, number = 0, number + 1

    for name, shape in get_family(config).rules(config).hf_shapes().items():
        shard[name] = torch.randn(shape).mul_(0.02).bfloat16()
        pending += shard[name].nbytes
        total += shard[name].nbytes
        if pending > SHARD_BYTES:
            flush()
    flush()
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config))
    return total


def copy(source: Path, out: Path) -> None:
    """Copy every byte and sync."""
    out.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, out / path.name)
        with (out / path.name).open("rb") as file:
            os.fsync(file.fileno())


def seconds(work: Callable[[Path], object], root: Path) -> float:
    """Seconds of one call, which writes into a fresh directory; the directory is then removed."""
    os.sync()
    begin = time.perf_counter()
    work(root / "out")
    taken = time.perf_counter() - begin
    shutil.rmtree(root / "out", ignore_errors=True)
    return taken


def _place(rank: int, world_size: int, init_method: str, config: dict[str, Any], source: Path) -> ModelPlacement:
    from mslime.backends.megatron.checkpoint_files import model_placement

    return model_placement(config, source)


class _TransformerEngineNames:
    """View of a local-spec model under the names that mbridge expects; names are computed once."""

    def __init__(self, model: Any, cached: bool) -> None:
        self._model, self.decoder, self.config, self._cached = model, model.decoder, model.config, cached
        self._names = {name: _renamed(name) for name in model.state_dict()}
        self._state = {self._names[name]: value for name, value in model.state_dict().items()}

    def named_parameters(self) -> Any:
        return ((self._names[name], parameter) for name, parameter in self._model.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        if not self._cached:
            self._model.state_dict()  # the cost of a state dict with these names
        return self._state


def _renamed(name: str) -> str:
    parts = name.split(".")
    if name.endswith(".input_layernorm.weight"):
        return ".".join([*parts[:3], "self_attention.linear_qkv.layer_norm_weight"])
    if "local_experts" in parts:
        return ".".join([*parts[:5], parts[7], f"{parts[8]}{parts[6]}"])
    return name


def _load_both(rank: int, world_size: int, init_method: str, source: Path, rounds: int) -> dict[str, list[float]]:
    """Time the loading by mslime and by mbridge into one model in this process."""
    from mbridge import AutoBridge
    from transformers import AutoConfig

    from mslime.backends.megatron.model.chunks import build_chunks, load_hf_weights
    from mslime.backends.megatron.model.megatron_config import transformer_config
    from mslime.backends.megatron.parallel import start_process_groups
    from mslime.config.resolved import policy_spec
    from mslime.config.schema import RunConfig
    from mslime.convert.families import read_hf_config

    hf_config = read_hf_config(source)
    values = {
        "model": {"path": source}, "data": {"prompts": ["unused.jsonl"]}, "cluster": {"device": "cpu"},
        "megatron": {"use_distributed_optimizer": False, "params_dtype": "bfloat16"},
    }  # fmt: skip
    spec = policy_spec(RunConfig.model_validate(values))
    start_process_groups(spec, rank, world_size, init_method, torch.device("cpu"))
    chunks = build_chunks(
        transformer_config(spec, hf_config, torch.device("cpu")), get_family(hf_config).model_fields(hf_config),
        torch.device("cpu"),
    )  # fmt: skip
    hf: Any = AutoConfig.from_pretrained(source)
    hf.rope_theta, hf.rope_scaling = hf.rope_parameters["rope_theta"], None
    bridge = AutoBridge.from_config(hf, dtype=torch.bfloat16)
    views: dict[bool, list[Any]] = {
        cached: [_TransformerEngineNames(chunk, cached) for chunk in chunks] for cached in (False, True)
    }
    taken: dict[str, list[float]] = {"mslime": [], "mbridge": [], "mbridge, state dict cached": []}
    expected: dict[str, torch.Tensor] = {}
    for _ in range(rounds):
        for name, work in (
            ("mslime", lambda: load_hf_weights(chunks, hf_config, source)),
            ("mbridge", lambda: bridge.load_weights(views[False], str(source))),
            ("mbridge, state dict cached", lambda: bridge.load_weights(views[True], str(source))),
        ):
            with torch.no_grad():
                for parameter in chunks[0].parameters():
                    parameter.zero_()
                begin = time.perf_counter()
                work()
                taken[name].append(time.perf_counter() - begin)
            state = {key: value for key, value in chunks[0].state_dict().items() if isinstance(value, torch.Tensor)}
            expected = expected or {key: value.clone() for key, value in state.items()}
            assert all(torch.equal(expected[key], value) for key, value in state.items()), name
    return taken


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=96)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--ffn", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="directory for temporary files (default: the system's)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = synthetic_config(args)
    with TemporaryDirectory(dir=args.directory) as root_name:
        root = Path(root_name)
        source = root / "source"
        nbytes = write_checkpoint(source, config)
        tensors = len(get_family(config).rules(config).hf_shapes())
        experts = 3 * args.layers * args.experts
        print(f"{tensors} tensors, {experts} of them experts', {nbytes / 1e6:.0f} MB")
        placement = run_ranks(_place, 1, config, source)[0]
        compare_with_copy(root, source, config, placement, nbytes, args.rounds)
        compare_with_mbridge(source, nbytes, args.rounds)


def compare_with_copy(
    root: Path, source: Path, config: dict[str, Any], placement: ModelPlacement, nbytes: int, rounds: int
) -> None:
    """Time every conversion, each right after a copy."""
    megatron = root / "megatron"
    run_job(ToMegatron(source, config, placement, max_file_bytes=SHARD_BYTES), megatron)

    def to_megatron(workers: int, verified: bool) -> Callable[[Path], object]:
        return lambda out: run_job(
            ToMegatron(source, config, placement, max_file_bytes=SHARD_BYTES), out, workers=workers, verified=verified
        )

    def to_hf(out: Path) -> None:
        job = ToHf(megatron, megatron / "hf", config, placement, max_shard_bytes=SHARD_BYTES)
        run_job(job, out, verified=False)

    def fp8(out: Path) -> None:
        run_job(ToFp8(source, power_of_two=False, max_shard_bytes=SHARD_BYTES), out, verified=False)

    ways: dict[str, Callable[[Path], object]] = {
        "to-megatron": to_megatron(1, False),
        "to-megatron, 2 workers": to_megatron(2, False),
        "to-megatron, verified": to_megatron(1, True),
        "to-hf": to_hf,
        "fp8 (half the bytes written)": fp8,
    }
    print(f"{'':30s} median of {rounds}   fastest   share of the copy's speed, median of pairs (from, to)")
    for name, work in ways.items():
        pairs = [(seconds(lambda out: copy(source, out), root), seconds(work, root)) for _ in range(rounds)]
        shares = sorted(100 * floor / taken for floor, taken in pairs)
        runs = [taken for _, taken in pairs]
        best = 100 * min(floor for floor, _ in pairs) / min(runs)
        print(f"{name:30s} {nbytes / statistics.median(runs) / 1e9:8.2f} GB/s {nbytes / min(runs) / 1e9:5.2f} GB/s "
              f"{statistics.median(shares):6.0f}%  ({shares[0]:.0f}%, {shares[-1]:.0f}%), fastest of each {best:.0f}%; "
              f"copy {nbytes / statistics.median(floor for floor, _ in pairs) / 1e9:.2f} GB/s")  # fmt: skip


def compare_with_mbridge(source: Path, nbytes: int, rounds: int) -> None:
    """Time loading into a model on one rank."""
    taken = run_ranks(_load_both, 1, source, rounds, deadline_s=3600)[0]
    ours = statistics.median(taken["mslime"])
    for name, runs in taken.items():
        middle = statistics.median(runs)
        print(
            f"load, {name:30s} {middle:6.2f} s  {nbytes / middle / 1e9:5.2f} GB/s  {middle / ours:5.1f} x mslime's time"
        )


if __name__ == "__main__":
    main()
