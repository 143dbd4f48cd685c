"""Inside an SGLang server: the wrapped methods of SGLang, and the handlers of requests.

SGLang calls `install` in each of its processes (entry point group `sglang.srt.plugins`, `wire.PATH_ENTRY`). If that
fails, SGLang only logs it, and the server runs without the plug-in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from mslime.engine_plugin import bucket_files, checksums, copy_plan, memory_release, relay, wire
from mslime.engine_plugin.copy_plan import Named, ReceivedBucket
from mslime.engine_plugin.engine_ranks import all_ranks

READ_IN = "0.5.23"
"""The SGLang version whose methods are wrapped; check them again for another one."""
RECORDS = os.environ.get(wire.LOADER_VARIABLE) != "model"
"""Whether buckets are loaded by recorded copies."""

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"

Handler = Callable[[Any, Any], wire.Reply]


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method, around in HOOKS.items():
        HookRegistry.register(method, around, HookType.AROUND)


def check_weights(original: Callable[[Any, Any], Any], self: Any, recv_req: Any) -> Any:
    """Wrapper of the end of `/weights_checker`: handles a `wire.Request`, or one of SGLang's own actions."""
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    try:
        request = wire.decode(recv_req.action)
        reply = None if request is None else wire.encode(HANDLERS[type(request)](self, request))
    except RuntimeError as error:  # an exception in a hook would end the server
        return CheckWeightsReqOutput(success=False, message=str(error))
    except Exception as error:
        return CheckWeightsReqOutput(success=False, message=f"{type(error).__name__}: {error}")
    return original(self, recv_req) if reply is None else CheckWeightsReqOutput(success=True, message=reply)


def receive(
    original: Callable[..., Named], self: Any, *, names: Any, dtypes: Any, shapes: Any, group_name: str,
    load_format: str | None = None,
) -> Named:  # fmt: skip
    """Wrapper of the reception of a bucket; SGLang returns its exceptions as answers."""
    load = wire.decode(load_format)
    if isinstance(load, wire.RelaySync):
        return relay.receive(self, load, names, dtypes, shapes)
    if isinstance(load, wire.FromFile | wire.FromBroadcast):
        return bucket_files.receive(self, load, (names, dtypes, shapes), group_name)
    if RECORDS and load_format == wire.FLAT and group_name in self._model_update_group:
        bucket = copy_plan.buckets_of(self).of(names, dtypes, shapes)
        torch.distributed.broadcast(bucket.flat, src=0, group=self._model_update_group[group_name])
        return ReceivedBucket(bucket)
    return original(self, names=names, dtypes=dtypes, shapes=shapes, group_name=group_name, load_format=load_format)


def load(original: Callable[[Any, Named], tuple[bool, str]], self: Any, named_tensors: Named) -> tuple[bool, str]:
    """Wrapper of the loading of a received bucket; returns success and a message."""
    if isinstance(named_tensors, relay.RelayedBucket):
        return relay.load(self, named_tensors)
    if RECORDS and isinstance(named_tensors, ReceivedBucket):
        return copy_plan.load(original, self, named_tensors)
    loaded, message = original(self, list(named_tensors))
    return loaded, message if RECORDS or not loaded else f"{wire.OWN_LOADER}weights.loader is model"


def end(original: Callable[..., None], self: Any, **how: Any) -> None:
    """Wrapper of the end of an update, after which buckets have no memory. Derived weights are updated before weights
    are packed."""
    bucket_files.FILES.remote.forget()
    copy_plan.buckets_of(self).release()
    original(self, **how)


# Expert ids of tokens in one or two bytes each, instead of four.
#
# SGLang 0.5.23 sends the experts of every token and layer as base64 of int32, most of an answer's bytes; few models
# have more than 256 experts. A narrowed text begins with a tag that is invalid base64 (`wire.NARROW`), so no client
# decodes it as int32. Other ids are sent unchanged.


def narrowed(experts: torch.Tensor | None) -> tuple[str, torch.Tensor | None]:
    """The tag of the narrowest dtype for a request's experts, and the experts in it.

    Args:
        experts: int32, of any shape; None if the request needs none.
    """
    if experts is None or experts.dtype != torch.int32 or not experts.numel():
        return "", experts
    least, most = (int(found) for found in torch.aminmax(experts))
    for tag, dtype in wire.NARROW.items():
        if least >= 0 and most <= np.iinfo(dtype).max:
            return tag, torch.from_numpy(experts.numpy().astype(dtype))
    return "", experts


def narrow(original: Any, self: Any, batch: Any) -> Any:
    """Wrapper of `DetokenizerManager.handle_batch_token_id_out`."""
    if not batch.routed_experts:
        return original(self, batch)
    found = [narrowed(experts) for experts in batch.routed_experts]
    batch.routed_experts = [experts for _, experts in found]
    answers = original(self, batch)
    texts = zip((tag for tag, _ in found), answers.routed_experts, strict=True)
    answers.routed_experts = [None if text is None else tag + text for tag, text in texts]
    return answers


HOOKS: Mapping[str, Callable[..., Any]] = {
    f"{_MANAGER}.check_weights": check_weights,
    f"{_MANAGER}.release_memory_occupation": memory_release.release,
    f"{_MANAGER}.resume_memory_occupation": memory_release.resume,
    f"{_UPDATER}.receive_weights_from_distributed": receive,
    f"{_UPDATER}.load_weights_from_distributed": load,
    f"{_UPDATER}.end_weight_update": end,
    "sglang.srt.managers.detokenizer_manager.DetokenizerManager.handle_batch_token_id_out": narrow,
    "sglang.srt.lora.lora.LoRAAdapter._process_weight": checksums.note_shape,
}
"""Wrapper of each method, called with the original and its arguments."""


def _runner(manager: Any) -> Any:
    return manager.tp_worker.model_runner


def _checksums(sums: Callable[[], dict[str, str]]) -> wire.Sums:
    try:
        own = sums()
    except Exception as error:  # the other ranks wait for this rank's
        own = {wire.CANNOT: f"{type(error).__name__}: {error}"}
    return wire.Sums(tuple(all_ranks().gather(own)))


def _weight_checksums(manager: Any) -> dict[str, str]:
    if not RECORDS:
        return {wire.CANNOT: "copies are not recorded: weights.loader is model"}
    every = [buckets for _, buckets in copy_plan.BUCKETS.values()]
    return checksums.weight_sums(_runner(manager).weight_updater.get_model(), every)


HANDLERS: Mapping[type[wire.Record], Handler] = {
    wire.Ping: lambda _, request: wire.Answer(),
    wire.ReadDirectory: lambda _, request: bucket_files.FILES.see(request.directory),
    wire.ForgetDirectory: lambda _, request: bucket_files.FILES.forget(request.directory),
    wire.ReadMemory: lambda _, request: bucket_files.FILES.remote.reach(request),
    wire.CheckIpc: lambda _, request: bucket_files.check_ipc(),
    wire.TakeIpc: lambda manager, request: bucket_files.take_ipc(
        _runner(manager).weight_updater, _runner(manager), request
    ),
    wire.JoinRelayGroup: lambda manager, request: relay.join(_runner(manager).weight_updater, request),
    wire.WeightChecksums: lambda manager, request: _checksums(lambda: _weight_checksums(manager)),
    wire.AdapterChecksums: lambda manager, request: _checksums(
        lambda: checksums.adapter_sums(_runner(manager).lora_manager, request.name)
    ),
    wire.ReleasedMemory: lambda manager, request: memory_release.released(manager),
}
"""Handler of each request, called with SGLang's manager and the request on every rank of an engine."""
