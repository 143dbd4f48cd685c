"""A small run as a user starts one: a trainer, an engine, two steps, weights sent and compared after each.

The run is `mslime train` in a separate process, on a generated tiny Qwen3-MoE or on your checkpoint. The test compares
the trainer's log-probs with the engine's, before the first weight sync and after it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mslime.config.transports import for_shared_gpus
from mslime.observe.metrics import FILE_NAME, read_metrics
from mslime.observe.names import by_step
from mslime_plugins.doctor.findings import Finding, Node, fail, ok, warn

if TYPE_CHECKING:
    from mslime.data.sample import Sample

DEADLINE_S = 1800
END_S = 60
"""Seconds for a run to end after a request."""
STEPS = 2
MISMATCH = {"cpu": (1e-6, 1e-4), "cuda": (1e-3, 1e-2)}
"""Thresholds of `mismatch/kl` in nats, for a warning and for a failure: float32 on both sides on a CPU, bfloat16 and
different kernels on GPUs."""
SYMBOLS = "0123456789+=. "
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def even_tokens(sample: Sample) -> float:
    """The fraction of even token ids in a response: a reward that random weights get sometimes, not always."""
    response = sample.tokens[sample.prompt_length :]
    return float((response % 2 == 0).mean()) if len(response) else 0.0


def check_step(node: Node) -> Iterator[Finding]:
    """Two steps of a real run."""
    with tempfile.TemporaryDirectory(prefix="mslime-doctor-") as scratch:
        directory = Path(scratch)
        model = node.options.model or write_tiny_model(directory / "model")
        settings = run_settings(node, model, directory)
        config = directory / "run.yaml"
        config.write_text(yaml.safe_dump(settings))
        began = time.perf_counter()
        status, printed = run_to_its_end([sys.executable, "-m", "mslime", "train", str(config)], directory, node)
        seconds = time.perf_counter() - began
        rows = read_metrics(directory / "doctor" / FILE_NAME) if (directory / "doctor" / FILE_NAME).exists() else []
        if status != 0:
            words = "\n".join(printed.strip().splitlines()[-12:])
            yield fail(f"the run ended with status {status} after {seconds:.0f} s: {words}",
                       "to keep its logs, run mslime train RUN.yaml with these settings: "
                       f"{json.dumps(settings, default=str)}")  # fmt: skip
            return
        yield from step_findings(by_step(rows), settings["cluster"]["device"], seconds)


def step_findings(rows: list[Mapping[str, Any]], device: str, seconds: float) -> Iterator[Finding]:
    """Findings from the metrics of a completed run."""
    steps = [row for row in rows if row["step"] > 0]
    if len(steps) != STEPS:
        yield fail(f"the run logged {len(steps)} steps instead of {STEPS}", "please report this")
        return
    norms = [row.get("grad_norm") for row in steps]
    text = f"trainer, engine and {STEPS} steps in {seconds:.0f} s, gradient norms {', '.join(map(_number, norms))}"
    if all(norm is not None and math.isfinite(norm) and norm > 0 for norm in norms):
        yield ok(text, seconds=round(seconds, 1))
    else:
        yield fail(text, "a gradient is zero or not finite: python -m pytest tests/gpu names the layer")
    if all("weights/bytes" in row for row in steps):
        sync = ", ".join(f"{row['weights/seconds']:.2f} s" for row in steps)
        yield ok(f"the engine's tensors equal the trainer's, bit for bit, after each of {STEPS} syncs ({sync})")
    else:
        yield fail("no weights were sent", "see weights.* in docs/settings.md")
    limit, broken = MISMATCH[device]
    for row, when in zip(steps, ("before the first sync", "after a sync"), strict=True):
        kl, most = row["mismatch/kl"], row["mismatch/abs_max"]
        text = f"trainer and engine {when}: mismatch KL {_number(kl)}, at most {_number(most)} nats for a token"
        values = {"kl": kl if kl is not None else math.nan, "abs_max": most if most is not None else math.nan}
        if kl is None or not abs(kl) <= broken:
            yield fail(text, "trainer and engine compute different models: compare config.json and attention backends "
                       "(sglang.attention_backend); docs/debugging.md", **values)  # fmt: skip
        elif abs(kl) > limit:
            yield warn(text, f"more than the usual {limit:.0e}: keep a correction on (algorithm.correction)", **values)
        else:
            yield ok(text, **values)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2g}"


def run_settings(node: Node, model: Path, directory: Path) -> dict[str, Any]:
    """Settings of a run on this host alone. One GPU is shared by trainer and engine; with two each has its own."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "label": str(2 * i)}) + "\n" for i in range(16)))
    device = "cuda" if node.gpus else "cpu"
    shared: dict[str, Any] = {"weights": {"verify": "always"}}
    if len(node.gpus) == 1:
        shared = {"weights": {"verify": "always", "transport": for_shared_gpus(1)}}
    return {
        "name": "doctor",
        "output_dir": str(directory),
        "model": {"path": str(model)},
        "data": {"prompts": [str(prompts)]},
        "cluster": {
            "device": device, "trainer_ranks": 1, "placement": "colocated" if len(node.gpus) == 1 else "separate",
            "ray_address": "local",
        },
        "sglang": {"max_total_tokens": 16384},
        "rollout": {"groups_per_step": 4, "group_size": 4, "max_response_tokens": 24, "max_staleness": 0},
        "reward": {"kind": "custom", "function": "mslime_plugins.doctor.step:even_tokens"},
        "train": {"num_steps": STEPS, "lr": 1e-4},
        "observe": {"progress": "off"},
        **shared,
    }  # fmt: skip


def run_to_its_end(command: list[str], directory: Path, node: Node) -> tuple[int, str]:
    """Exit status and output of a run. On a timeout or Ctrl-C the run is interrupted: it saves and ends all its
    processes."""
    output = directory / "driver.log"
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with output.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True)
    try:
        process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        return -1, f"{output.read_text()}\nthe run did not end within {DEADLINE_S} s"
    finally:
        end(process)
    return process.returncode, output.read_text()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a run as Ctrl-C does; kill its whole session if it does not end."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def write_tiny_model(directory: Path) -> Path:
    """Write a Qwen3-MoE with 1.1 M random parameters and sizes that GPU kernels support; one token for each symbol."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    torch.manual_seed(1234)
    pad, bos, eos = range(3)
    sizes: dict[str, Any] = {"head_dim": 64}  # missing in transformers' annotations
    config = Qwen3MoeConfig(
        **sizes, vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], max_position_embeddings=512,
        initializer_range=0.06, tie_word_embeddings=False, pad_token_id=pad, bos_token_id=bos, eos_token_id=eos,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    # transformers initialises the padding token with 0, where the gradient of RMSNorm is 1/sqrt(eps).
    with torch.no_grad():
        model.model.embed_tokens.weight[pad].normal_(std=config.initializer_range)
    model = model.bfloat16()
    model.generation_config = GenerationConfig(pad_token_id=pad, eos_token_id=eos)
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return directory


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate((*_SPECIAL, *SYMBOLS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, bos, eos, unk = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
