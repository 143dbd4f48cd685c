"""Inside an SGLang server: buckets are taken from who has the same GPU, by checkpoint-engine's handles.

Part of `bucket_files`. SGLang 0.5.23 has an end for checkpoint-engine (`/update_weights_from_ipc`). It gives
everything to the model's own loader, finishes the weights by itself, within an update's session and before its end
does, and only logs when that fails. Here SGLang's end still finds the handle and its GPU. But what it is given is
buckets, each one tensor whose name is the request for it (`wire.update_request`): they are loaded, recorded and
compared like all others, and the end of the session finishes the weights, once.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mslime.engine_plugin.copy_plan import Received, buckets_of
from mslime.engine_plugin.engine_ranks import siblings
from mslime.engine_plugin.wire import MARK, UNABLE

_ENDS_MODULE = "sglang.srt.checkpoint_engine.checkpoint_engine_worker"


def can_take_handed() -> tuple[bool, str]:
    """The answer to `QUESTION`."""
    try:
        importlib.import_module(_ENDS_MODULE)
    except ImportError as error:
        return False, f"this server {UNABLE}: {error}"
    return True, "done"


def take_handed(original: Callable[..., tuple[bool, str]], self: Any, recv_req: Any) -> tuple[bool, str]:
    """Around `WeightUpdater.update_weights_from_ipc`: whether all was loaded, and what is said of that."""
    if MARK not in recv_req.zmq_handles:
        return original(self, recv_req)
    said = "no bucket came"

    def load(named: Iterable[tuple[str, torch.Tensor]]) -> None:
        nonlocal said
        for request, flat in named:
            said = load_bucket(self, request, flat)

    try:
        worker = _worker(self.get_model_runner(), recv_req.zmq_handles)
        worker.get_model_loader, worker.get_post_hook = lambda: load, lambda: None
        worker.update_weights_from_ipc(recv_req.zmq_handles)
    except Exception as error:  # what a hook raises ends the server
        return False, f"{type(error).__name__}: {error}"
    return True, said


def _worker(runner: Any, addresses: Mapping[str, str]) -> Any:
    """SGLang's end on this rank.

    Raises:
        RuntimeError: on every rank of the engine where one has nobody on its GPU: the others would wait for it.
    """
    worker, failed = None, ""
    try:
        worker = importlib.import_module(_ENDS_MODULE).SGLangCheckpointEngineWorkerExtensionImpl(runner)
        if (gpu := worker.get_device_uuid()) not in addresses:
            failed = f"{UNABLE}: none of {len(addresses) - 1} trainer ranks is on {gpu}"
    except Exception as error:  # the other ranks wait to hear of it
        failed = f"{UNABLE}: {type(error).__name__}: {error}"
    if failed := siblings().first_failure(failed):
        raise RuntimeError(failed)
    return worker


def load_bucket(updater: Any, request: str, handed: torch.Tensor) -> str:
    """Load one bucket; what is said of how.

    Args:
        handed: [bytes] uint8, in memory of whoever hands it out.

    Raises:
        RuntimeError: the model does not take it.
    """
    described: dict[str, Any] = json.loads(request)
    bucket = buckets_of(updater).of(described["names"], described["dtypes"], described["shapes"])
    bucket.flat.copy_(handed)
    loaded, said = updater.load_weights_from_distributed(Received(bucket))
    if not loaded:
        raise RuntimeError(said)
    return said
