"""Inside an SGLang server: rebuild a bucket from its received changes and the model's own parameters.

Changes come in a file, or by a broadcast (`receive`). The copies that were recorded for a bucket (`copy_plan`), run
backwards, fill it from the model's parameters. The changes are applied, and the bucket is loaded like any other.

The outcome could be a mixture: through a file system, a foreign update session, or a loader that transforms its
parameters. So everything is checked. The changes name their base version, and carry checksums of themselves and of the
outcome; another checksum shows whether the model still has that base. Changes with any mismatch are rejected before
loading.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load

from mslime.config.base import CHANGES, version_name
from mslime.config.keys import BucketVersion
from mslime.engine_plugin.copy_plan import BucketCopies, LoadedVersion, ReceivedBucket, RecordedBucket
from mslime.tensor_sums import word_sum

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Delta:
    """Changes of a bucket.

    Attributes:
        version: number of the base version.
        total: word sum of the whole bucket with the changes in it.
        index: [n] int32.
        value: [n], the dtype of the bucket's tensors; if they have several, bytes.
    """

    version: int
    total: int
    index: torch.Tensor
    value: torch.Tensor


def receive(
    version: BucketVersion, name: str, group: dist.ProcessGroup, bucket: RecordedBucket, model: torch.nn.Module
) -> ReceivedBucket:
    """Receive a broadcast bucket, or apply broadcast changes to the known one.

    Args:
        name: of the connection that the versions belong to.

    Raises:
        ValueError: the data is damaged, or does not fit the model's version.
    """
    place = Path(name) / version_name(version.number)
    if version.base is None:
        dist.broadcast(bucket.flat, group=group, group_src=0)
        return ReceivedBucket(bucket, partial(record_loaded, bucket, model, place))
    dtype = _flat_as_one(bucket).dtype
    packed = bucket.flat.new_empty(version.changed * (4 + dtype.itemsize))
    if version.changed:  # all ranks take part, even those that will reject it
        dist.broadcast(packed, group=group, group_src=0)
    index, value = packed.split([4 * version.changed, dtype.itemsize * version.changed])
    of_index, of_value, total = version.sums
    if (word_sum(index), word_sum(value)) != (of_index, of_value):
        raise ValueError("the changes were damaged in transit")
    return changed(Delta(version.base, total, index.view(torch.int32), value.view(dtype)), place, bucket, model)


def changed(changes: Delta, version: Path, bucket: RecordedBucket, model: torch.nn.Module) -> ReceivedBucket:
    """The bucket with the changes applied.

    Args:
        version: the resulting version.
        bucket: one that this model has loaded before.

    Raises:
        ValueError: the changes do not fit the model's version.
    """
    copies, loaded_version = bucket.copies.get(id(model)), bucket.loaded_version
    if copies is None or not copies.fit(model):
        raise ValueError(f"copies are not recorded: {copies.why_not if copies else ''}".rstrip(": "))
    base = version.with_name(version_name(changes.version))
    if loaded_version is None or loaded_version.version != base:
        raise ValueError(
            f"the changes belong to {base.name}, and this engine has {loaded_version and loaded_version.version}"
        )
    if take_back(bucket, copies) != loaded_version.total:
        raise ValueError(f"this engine's parameters no longer match {base.name}")
    put(changes, bucket)
    if copies.are_all_of(bucket.flat) and word_sum(bucket.flat) != changes.total:
        raise ValueError("the changed bucket does not match the checksum of the sent one")
    return ReceivedBucket(bucket, partial(record_loaded, bucket, model, version, changes.total))


def read_delta(path: Path) -> Delta:
    """Read a file of changes. Raises OSError, and ValueError if it is damaged."""
    try:
        sums, index, value = (load(path.read_bytes())[name] for name in CHANGES)
        version, of_index, of_value, total = map(int, sums)
    except OSError:
        raise
    except Exception as error:  # safetensors raises its own exceptions
        raise ValueError(f"{path} is not a file of changes: {error}") from error
    if (word_sum(index), word_sum(value)) != (of_index, of_value) or index.shape != value.shape:
        raise ValueError(f"{path} is damaged")
    return Delta(version, total, index, value)


def put(changes: Delta, bucket: RecordedBucket) -> None:
    """Write the changes into the bucket's buffer. Raises ValueError if they do not fit."""
    value, flat = changes.value, _flat_as_one(bucket)
    if value.dtype != flat.dtype:
        raise ValueError(f"the changes are {value.dtype}, and the bucket is {flat.dtype}")
    if len(value) and not 0 <= int(changes.index.min()) <= int(changes.index.max()) < len(flat):
        raise ValueError(f"the changes go beyond the bucket's {len(flat)} elements")
    bits = _BITS[flat.itemsize]
    flat.view(bits)[changes.index.to(flat.device, torch.int64)] = value.view(bits).to(flat.device)


def _flat_as_one(bucket: RecordedBucket) -> torch.Tensor:
    """The bucket's buffer in the dtype of its tensors; bytes if they have several."""
    dtypes = {tensor.dtype for _, tensor in bucket.named}
    return bucket.flat.view(dtypes.pop()) if len(dtypes) == 1 else bucket.flat


def record_loaded(bucket: RecordedBucket, model: torch.nn.Module, version: Path, total: int | None = None) -> None:
    """Record that a model has loaded all of a bucket, so changes of it may follow.

    Args:
        version: as in `LoadedVersion`.
        total: word sum of the whole bucket; None: unknown.
    """
    copies, bucket.loaded_version = bucket.copies.get(id(model)), None
    if copies is None or not copies.fit(model):
        return
    keeps_bits = all(into.dtype == out_of.dtype for into, out_of in zip(copies.into, copies.out_of, strict=True))
    if keeps_bits and copies.are_all_of(bucket.flat):  # the bucket equals its restored contents
        bucket.loaded_version = LoadedVersion(version, word_sum(bucket.flat) if total is None else total)
    else:
        bucket.loaded_version = LoadedVersion(version, take_back(bucket, copies))


def take_back(bucket: RecordedBucket, copies: BucketCopies) -> int:
    """Restore a bucket from the model's parameters, with zeros elsewhere; returns the word sum."""
    copies.make_backwards(bucket.flat)
    return word_sum(bucket.flat)
