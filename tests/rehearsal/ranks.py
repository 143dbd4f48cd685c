"""What a rank of the rehearsal does: mslime's trainer on the CUDA path, from the checkpoint to a resumed step.

Runs in processes that believe in a GPU (`on_gpu`). Everything is compared with what `reference` found on the CPU path.
"""

from __future__ import annotations

import resource
import threading
import zlib
from pathlib import Path
from typing import Any

import torch

import tests.rehearsal.on_gpu
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.backends.sglang.port import SGLangPort
from mslime.config.keys import Endpoint
from mslime.config.resolved import policy_spec
from mslime.convert.hf import HFCheckpoint
from tests.engines import lora_ranks
from tests.engines.megatron_parity import Case as ParityCase
from tests.engines.trainer_ranks import (
    largest_difference,
    make_shard,
    metrics_and_gradients,
    shard_of,
    worst_logit_difference,
)
from tests.rehearsal import fp8_by_hand
from tests.rehearsal.cases import Case
from tests.rehearsal.extension.calls import CALLS
from tests.rehearsal.on_host import PAGEABLE, OnHost
from tests.rehearsal.reference import make_run

__all__ = ["tests"]

LARGEST = 12 << 30
"""Bytes that a rank may take, of all kinds: a mistake ends with an error, not with the machine's memory."""


def rehearse(rank: int, world_size: int, init_method: str, case: Case, family: Path, out: Path) -> dict[str, Any]:
    """All of a case, on one of its ranks: numbers by name, for `cases.judge`.

    Args:
        family: what `reference.make` wrote.
        out: of this case, empty.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (LARGEST, LARGEST))
    config = make_run(family / "checkpoint", out, "cuda", case.sizes, case.settings, case.ranks, case.fp8)
    expected = torch.load(family / "reference.pt")
    with OnHost():
        trainer = MegatronTrainer(policy_spec(config), rank, world_size, init_method)
        found = {"layers": layers_of(trainer), **compare(trainer, expected, case.compares_gradients)}
        if case.fp8 is not None and case.ranks == 1:
            found["by_hand"] = fp8_by_hand.differences(trainer, case.fp8)
        found |= go_on(trainer, family / "checkpoint", out, expected)
        trainer.close()
    return found | {"calls": dict(CALLS)}


def adapt(
    rank: int, world_size: int, init_method: str, checkpoint: Path, case: ParityCase, record: Path
) -> dict[str, Any]:
    """Adapters of this rank against the record of one process on the CPU path, for `adapters.judge`."""
    resource.setrlimit(resource.RLIMIT_DATA, (LARGEST, LARGEST))
    with OnHost():
        return lora_ranks.compare(rank, world_size, init_method, checkpoint, case, {}, record, "cuda")


def layers_of(trainer: MegatronTrainer) -> list[str]:
    """Classes of Transformer Engine, and of routers, in the model."""
    names = {type(module).__name__ for chunk in trainer.chunks for module in chunk.modules()}
    return sorted(name for name in names if name.startswith("TE") or "Router" in name or "Delta" in name)


def compare(trainer: MegatronTrainer, expected: dict[str, Any], gradients: bool) -> dict[str, Any]:
    """Logits with transformers', log-probs, loss and gradients with the CPU trainer's of one process."""
    shard = shard_of(trainer)
    rows, logits = worst_logit_difference(trainer, own_part(trainer, expected["logits"]))
    PAGEABLE.clear()
    log_probs = trainer.log_probs(shard)
    with trainer.routing.gradient_pass(shard, 0) as routes:
        metrics, own = metrics_and_gradients(trainer, shard, routes)
    found: dict[str, Any] = {"pageable": PAGEABLE[:1], "rows": rows, "logits": logits}
    found["loss"] = abs(metrics["loss/total"] - expected["loss"])
    found["log_probs"] = float((log_probs - own_part(trainer, expected["log_probs"])).abs().max())
    if gradients:
        on_cpu = {name: tensor.float().cpu() for name, tensor in own.items()}
        found["gradients"] = largest_difference(trainer, on_cpu, expected["gradients"])
        found["tensors"] = len(on_cpu)
    return found


def own_part(trainer: MegatronTrainer, of_all: torch.Tensor) -> torch.Tensor:
    """Rows of this data-parallel rank's sequences, in its order.

    Args:
        of_all: [tokens, ...] of the sequences of `make_shard`.
    """
    layout = trainer.spec.layout
    parts = of_all.split(make_shard().lengths.tolist())
    return torch.cat(parts[layout.dp_rank(trainer.parallel.rank) :: layout.dp])


def go_on(trainer: MegatronTrainer, checkpoint: Path, out: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Export, a step, a checkpoint, another step, the checkpoint again, the same step again."""
    trainer.weight_sender().export(out / "exported", checkpoint)
    norms = [one_step(trainer)]
    before = local_weights(trainer)
    found = {"weights": largest_difference(trainer, before, expected["weights"])}
    trainer.save(out / "saved", {"rehearsed": True})
    norms.append(one_step(trainer))
    extra = trainer.load(out / "saved")
    loaded = local_weights(trainer)
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, loaded[name])]
    norms.append(one_step(trainer))
    rounded = trainer.transformer.params_dtype == torch.bfloat16
    different = different_tensors(checkpoint, out / "exported", rounded) if trainer.parallel.rank == 0 else []
    return found | {
        "grad_norm": abs(norms[0] / expected["grad_norm"] - 1), "norm": norms[0], "again": abs(norms[1] - norms[2]),
        "changed": changed, "extra": bool(extra.get("rehearsed")), "exported": different,
    }  # fmt: skip


def one_step(trainer: MegatronTrainer) -> float:
    """The gradient norm of an optimizer step."""
    return float(trainer.train([shard_of(trainer)])[0]["grad_norm"])


def local_weights(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """This rank's parameters, copied."""
    return {name: tensor.detach().float().cpu().clone() for name, tensor in trainer.named_local_params()}


def different_tensors(source: Path, exported: Path, rounded: bool) -> list[str]:
    """Names that one of two checkpoints lacks, or whose bits differ after rounding to the exported dtype.

    Multi-token-prediction layers, which are not trained, are copied from the source.
    """
    first, second = HFCheckpoint(source), HFCheckpoint(exported)
    apart = list(first.info.keys() ^ second.info.keys())
    for name in first.info.keys() & second.info.keys():
        theirs, ours = first.tensor(name), second.tensor(name)
        held = theirs.to(torch.bfloat16).to(ours.dtype)  # by a trainer in bfloat16, where it keeps none in float32
        if not torch.equal(theirs.to(ours.dtype), ours) and not (rounded and torch.equal(held, ours)):
            apart.append(name)
    return sorted(apart)


def send(
    rank: int, world_size: int, init_method: str, case: Case, family: Path, out: Path, transport: str, urls: list[str]
) -> int:
    """Two syncs to stand-in engines, the second with changed weights, which are also exported; how many buckets.

    Threads of mslime, which convert and send, compute on the host like everything else.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (LARGEST, LARGEST))
    config = make_run(family / "checkpoint", out, "cuda", case.sizes, case.settings, case.ranks, case.fp8)
    config = config.model_copy(update={"weights": config.weights.model_copy(update={"transport": transport})})
    run = threading.Thread.run

    def run_on_host(thread: threading.Thread) -> None:
        with OnHost():
            run(thread)

    threading.Thread.run = run_on_host
    with OnHost():
        trainer = MegatronTrainer(policy_spec(config), rank, world_size, init_method)
        sender = trainer.weight_sender(SGLangPort(config.deadlines))
        sender.connect([Endpoint(url) for url in urls])
        for version in (1, 2):
            change_weights(trainer, 0.01 * version)
            if case.fp8 is not None:
                one_step(trainer)
            sender.send(version)
        sender.disconnect()
        sender.export(out / "exported", family / "checkpoint")
        buckets = len(sender.plan.buckets)
        trainer.close()
    return buckets


def change_weights(trainer: MegatronTrainer, amount: float) -> None:
    """Scale every tensor by a factor of its own, the same on every rank that holds a part of it."""
    with torch.no_grad():
        for name, parameter in trainer.named_local_params():
            parameter.mul_(1 + amount * (1 + zlib.crc32(name.encode()) % 5))
