"""Inside an SGLang server: receive buckets from the trainer rank on the same GPU by checkpoint-engine's handles.

SGLang 0.5.23 supports checkpoint-engine (`/update_weights_from_ipc`). But it gives everything to the model's own
loader, finishes the weights within an update's session and before its end, and only logs errors of that.

Here SGLang's code still finds the handle and its GPU. But it receives buckets, each one tensor named by its
`wire.IpcBucket`. They are loaded, recorded and compared like all others, and the end of the session finishes the
weights once.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mslime.engine_plugin.copy_plan import Received, buckets_of
from mslime.engine_plugin.engine_ranks import all_ranks
from mslime.engine_plugin.wire import Answer, IpcBucket, Loaded, TakeIpc, decode

UNABLE = "cannot take buckets from the trainer's rank on its GPU"
_ENDS_MODULE = "sglang.srt.checkpoint_engine.checkpoint_engine_worker"


def check() -> Answer:
    """Check whether checkpoint-engine is installed."""
    try:
        importlib.import_module(_ENDS_MODULE)
    except ImportError as error:
        return Answer(f"this server {UNABLE}: {error}")
    return Answer()


def take(updater: Any, runner: Any, request: TakeIpc) -> Loaded:
    """Load the buckets that the trainer's ranks provide.

    Args:
        updater, runner: SGLang's objects of this rank.

    Raises:
        RuntimeError: on every rank of the engine; one of them did not load all of them.
    """
    how, failed = "no bucket came", ""

    def load(named: Iterable[tuple[str, torch.Tensor]]) -> None:
        nonlocal how
        for name, flat in named:
            how = load_bucket(updater, name, flat)

    try:
        worker = _worker(runner, request.addresses)
        worker.get_model_loader, worker.get_post_hook = lambda: load, lambda: None
        worker.update_weights_from_ipc(request.addresses)
    except Exception as error:  # the other ranks wait for this report
        failed = f"{type(error).__name__}: {error}"
    if failed := all_ranks().first_failure(failed):
        raise RuntimeError(failed)
    return Loaded(how)


def _worker(runner: Any, addresses: Mapping[str, str]) -> Any:
    """SGLang's checkpoint-engine worker on this rank.

    Raises:
        RuntimeError: on every rank of the engine, if one has no trainer rank on its GPU: the others would wait for it.
    """
    worker, failed = None, ""
    try:
        worker = importlib.import_module(_ENDS_MODULE).SGLangCheckpointEngineWorkerExtensionImpl(runner)
        if (gpu := worker.get_device_uuid()) not in addresses:
            failed = f"{UNABLE}: none of {len(addresses)} trainer ranks is on {gpu}"
    except Exception as error:  # the other ranks wait for this report
        failed = f"{UNABLE}: {type(error).__name__}: {error}"
    if failed := all_ranks().first_failure(failed):
        raise RuntimeError(failed)
    return worker


def load_bucket(updater: Any, name: str, handed: torch.Tensor) -> str:
    """Load one bucket; returns a message on how it was loaded.

    Args:
        name: its `wire.IpcBucket`.
        handed: [bytes] uint8, in the memory of its sender.

    Raises:
        RuntimeError: the model could not load it.
    """
    described = decode(name)
    assert isinstance(described, IpcBucket)
    bucket = buckets_of(updater).of(described.names, described.dtypes, described.shapes)
    bucket.flat.copy_(handed)
    loaded, said = updater.load_weights_from_distributed(Received(bucket))
    if not loaded:
        raise RuntimeError(said)
    return said
