"""Changes of buckets in files: what `delta` writes where there is a directory that all engines read.

DIRECTORY/GROUP/version_000012/bucket_00003.safetensors          all of it
DIRECTORY/GROUP/version_000013/bucket_00003.changes.safetensors  what is different in version 13
"""

from __future__ import annotations

from pathlib import Path

import torch

from mslime.config.choices import CHANGES
from mslime.convert.writers import SAFETENSORS_DTYPES, TensorPlan, safetensors_header
from mslime.weights.differences import Differences
from mslime.weights.disk import DiskTransport
from mslime.weights.files import PendingFile
from mslime.weights.plan import Bucket


class FileCarrier(DiskTransport):
    """Every bucket, or its changes, in a file of their own."""

    kind = "base"
    lasting = False  # nobody reads them later: closing a file is enough for other machines to see it

    def start_changes(self, bucket: Bucket, base: int, found: Differences, sums: tuple[int, int, int]) -> PendingFile:
        """Write what changed, and ask every engine to read it."""
        path = self.path_of(bucket).with_suffix(".changes.safetensors")
        index, value = found.index.to("cpu", torch.int32), found.value.cpu()
        kinds = (("I64", 4), ("I32", len(index)), (SAFETENSORS_DTYPES[bucket.dtype], len(index)))
        plans = [TensorPlan(name, dtype, (size,)) for name, (dtype, size) in zip(CHANGES, kinds, strict=True)]
        parts = (part.view(torch.uint8) for part in (torch.tensor([base, *sums]), index, value))
        self.write_file(path, safetensors_header(plans), *parts)
        return PendingFile(bucket, self.announce(bucket, "changes", path), self.arrived)

    def finish(self, version: Path) -> None:
        """No index: nobody else can read a version of changes."""
