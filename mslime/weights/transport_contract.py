"""Contract test of transports: a sender's calls, applied to a user's transport (interface: `transport.Transport`)."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from mslime.config.errors import WeightSyncError
from mslime.config.keys import EngineInfo
from mslime.convert.safetensors_files import torch_dtype
from mslime.weights.buckets import named_tensors
from mslime.weights.transport import Link, MakeTransport, Transport
from mslime.weights.weight_plan import Bucket, BucketEntry

Received = Callable[[], Sequence[Mapping[str, torch.Tensor]]]
"""Returns the tensors that each engine holds now, by name."""

SHAPES = (
    ("float32", {"a.weight": (5, 3), "a.bias": (5,), "b.weight": (1, 7)}),
    ("bfloat16", {"c.weight": (3, 3)}),
    ("float32", {"d.weight": (2, 2, 2)}),
)
"""Shapes of the test's buckets: odd sizes, two dtypes, one tensor and several."""

GRACE_S = 10.0
"""Seconds after its deadline within which a transport must give up."""


def check_transport(make: MakeTransport, link: Link, engines: Sequence[EngineInfo], received: Received) -> list[str]:
    """Run a transport through all the calls of a sender.

    Args:
        make: the transport, as `weights.transport` names it.
        link: the transport's argument. `deadline_s` should be a few seconds.
        engines: receivers, or their stand-ins in your test.
        received: returns the tensors that these hold now.

    Returns:
        The tested cases, one line each.

    Raises:
        AssertionError: names the violated rule.
        WeightSyncError: it could not send to these engines.
    """
    buckets = _buckets()
    first = make(link)
    first.disconnect()  # before any connection
    first.connect(engines)
    for version in (1, 2):
        _send(first, buckets, version)
        _compare(buckets, version, received())
    first.disconnect()
    first.disconnect()
    again = make(replace(link, name=f"{link.name}-again"))
    again.connect(engines)
    _send(again, buckets, 3)
    _compare(buckets, 3, received())
    again.disconnect()
    _gives_up(make, replace(link, name=f"{link.name}-nobody", deadline_s=min(link.deadline_s, 2.0)))
    return [
        f"{len(buckets)} buckets reached {len(engines)} engine(s) bit for bit, twice over one connection",
        "disconnect worked twice, and so did a new connection",
        "an unreachable engine raised a WeightSyncError",
    ]


def _buckets() -> list[Bucket]:
    found: list[Bucket] = []
    for index, (dtype, shapes) in enumerate(SHAPES):
        entries: list[BucketEntry] = []
        at = 0
        for name, shape in shapes.items():
            entries.append(BucketEntry(name, shape, at))
            at += math.prod(shape)
        found.append(Bucket(index, 0, 0, (0,), dtype, (), tuple(entries), tuple(entries), in_order=True))
    return found


def _filled(bucket: Bucket, version: int) -> torch.Tensor:
    numbers = torch.randn(bucket.hf_numel, generator=torch.Generator().manual_seed(100 * version + bucket.index))
    return numbers.to(torch_dtype(bucket.dtype))


def _send(transport: Transport, buckets: Sequence[Bucket], version: int) -> None:
    transport.begin(version, buckets)
    for bucket in buckets:
        flat = _filled(bucket, version)
        transport.prepare_bucket(bucket, flat)
        transport.start(bucket, flat).wait()
        assert torch.equal(flat, _filled(bucket, version)), f"the transport wrote to the buffer of {bucket.describe()}"
        flat.zero_()  # the sender may write to it again
    transport.complete()


def _compare(buckets: Sequence[Bucket], version: int, received: Sequence[Mapping[str, torch.Tensor]]) -> None:
    for number, held in enumerate(received):
        for bucket in buckets:
            for name, sent in named_tensors(bucket, _filled(bucket, version)):
                assert name in held, f"engine {number} never received {name} of {bucket.describe()}"
                assert held[name].dtype == sent.dtype, f"engine {number} received {name} as {held[name].dtype}"
                assert torch.equal(held[name].cpu(), sent), f"engine {number} received wrong values of {name}"


def _gives_up(make: MakeTransport, link: Link) -> None:
    """Check the deadline, with a port that was free a moment ago and on which no server listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = EngineInfo(f"http://127.0.0.1:{probe.getsockname()[1]}")
    transport, begin, before = make(link), time.monotonic(), threading.enumerate()
    try:
        transport.connect([nobody])
    except WeightSyncError:
        pass
    else:
        raise AssertionError("connect returned although the engine is unreachable")
    finally:
        transport.disconnect()
    late = time.monotonic() - begin - link.deadline_s
    assert late < GRACE_S, f"the transport gave up {late:.0f} s after its deadline of {link.deadline_s:.0f} s"
    for thread in threading.enumerate():  # they wait until the deadline; a process that ends meanwhile is aborted
        if thread not in before:
            thread.join(link.deadline_s + 1)
