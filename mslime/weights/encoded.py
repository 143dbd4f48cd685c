"""Buckets of quantised weights: what is gathered is plain, what is sent is a weight of few bits and its scales.

Plans only, without torch; `buckets.encode` fills them. A sender quantises what it has gathered and converted, bucket by
bucket, so that no rank holds the model twice. A weight and its scales go in one bucket: an engine never holds new
numbers under old scales for longer than it takes to copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mslime.convert.encoding import Encoded
from mslime.convert.writers import SAFETENSORS_DTYPES, TORCH_DTYPES, TensorPlan
from mslime.weights.plan import DTYPE_BYTES, Bucket, Entry, WeightPlan


def encoded_plan(plan: WeightPlan, encoded: Encoded) -> WeightPlan:
    """The same buckets, with quantised weights in place of the plain ones; those that have none stay as they are."""
    return replace(plan, buckets=tuple(_encoded_bucket(bucket, encoded) for bucket in plan.buckets))


def _encoded_bucket(bucket: Bucket, encoded: Encoded) -> Bucket:
    chosen = {entry.name for entry in bucket.entries} & encoded.names
    if not chosen:
        return bucket
    assert bucket.entries == bucket.pieces, "a stacked tensor is no matrix, so it is not quantised"
    short = SAFETENSORS_DTYPES[bucket.dtype]
    plans = [
        plan
        for entry in bucket.entries
        for plan in (
            encoded.encoding.plans(entry.name, short, entry.shape)
            if entry.name in chosen
            else (TensorPlan(entry.name, short, entry.shape),)
        )
    ]
    return replace(bucket, dtype="uint8", packed_dtype=bucket.dtype, entries=_entries(plans, TORCH_DTYPES))


def _entries(plans: list[TensorPlan], names: Mapping[str, str]) -> tuple[Entry, ...]:
    """One after the other without gaps, wide elements first, so that each begins at a multiple of its size."""
    entries: list[Entry] = []
    at = 0
    for plan in sorted(plans, key=lambda plan: -DTYPE_BYTES[names[plan.dtype]]):
        entries.append(Entry(plan.name, plan.shape, at, names[plan.dtype]))
        at += entries[-1].size
    return tuple(entries)
