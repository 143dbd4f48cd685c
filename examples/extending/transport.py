"""A user-defined transport for weights: `weights.transport: examples.extending.transport:timed`."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from mslime.weights.broadcast import BroadcastTransport
from mslime.weights.transport import Link, Pending, Transport
from mslime.weights.weight_plan import Bucket


def timed(link: Link) -> Transport:
    """mslime's broadcast, with a line in the sending rank's log for each bucket."""
    return TimedBroadcast(link)


class TimedBroadcast(BroadcastTransport):
    def start(self, bucket: Bucket, flat: torch.Tensor) -> Pending:
        return Timed(bucket, super().start(bucket, flat), time.monotonic())


@dataclass
class Timed:
    bucket: Bucket
    pending: Pending
    begin: float

    def wait(self) -> None:
        self.pending.wait()
        seconds = time.monotonic() - self.begin
        print(f"{self.bucket.describe()}: {self.bucket.hf_bytes} bytes in {seconds:.3f} s", flush=True)
