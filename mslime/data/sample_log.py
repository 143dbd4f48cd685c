"""Responses as JSON lines for people: selection, content of a line, and a background writer. A failed write is reported
once and skipped; it never delays or ends a run.

Lines with `kinds` are the few responses selected to represent a step. They come first in a file: a reader of many
gigabytes may stop at the first line without.
"""

from __future__ import annotations

import base64
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from mslime.config.base import Kept
from mslime.data.sample import Group, Sample, SampleStatus, Segment
from mslime.data.tokenizer import Tokenizer

KINDS = ("best", "worst", "longest", "truncated", "continued", "any", "group")
"""Reasons for a selection: reward, length, cut at the limit, several weight versions, chance, or membership of the
group whose rewards differ most.
"""
A_KIND = 2
A_GROUP = 8
BYTES_A_FILE = 1 << 20
"""Size limit of a file of some responses. Lines that do not fit are left out."""
TOKENS_A_SIDE = 1024
CHARACTERS_A_SIDE = 8192
OTHER_BYTES = 4096
ROUTE_BYTES = 16_384
"""Size limit of one response's routes, before encoding: those of the first tokens in the selected layers."""
WAITING_FILES = 4
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


@dataclass(frozen=True)
class LogBatch:
    """Responses that go to one file together.

    Attributes:
        groups: finished and no longer changed.
        version: weight version that they are trained by, or evaluated under.
        advantages: of each sample, groups one after the other: one number, or [T]. None: unknown.
        set_name: of the held-out set; empty for training samples.
    """

    groups: Sequence[Group]
    version: int
    advantages: Sequence[float | NDArray[np.floating]] | None = None
    set_name: str = ""

    def entries(self) -> list[LoggedSample]:
        """The samples, groups one after the other."""
        owned = [(group.source, sample) for group in self.groups for sample in group.samples]
        advantages = self.advantages if self.advantages is not None else [None] * len(owned)
        return [LoggedSample(*one, advantage, len(owned)) for one, advantage in zip(owned, advantages, strict=True)]


class LoggedSample(NamedTuple):
    """A logged sample: the source of its prompt, its advantage, and the number of samples."""

    source: str
    sample: Sample
    advantage: float | NDArray[np.floating] | None
    of: int


class SampleLog:
    """Background writer of files of responses, one at a time."""

    def __init__(self, keep: Kept, tokenizer: Tokenizer, route_layers: int = 0) -> None:
        """
        Args:
            route_layers: MoE layers whose routes are written for selected responses; 0: none.
        """
        self._keep: Kept = keep
        self._tokenizer, self._route_layers = tokenizer, route_layers
        self._watched: dict[int, dict[int, Sample]] = {}
        self._thread = ThreadPoolExecutor(1, "samples")
        self._waiting: list[Future[None]] = []
        self._logged: set[str] = set()
        self._notes: list[str] = []

    def write(self, path: Path, step: int, parts: Sequence[LogBatch]) -> None:
        """Write the responses of a step in place of an earlier file of that name; returns immediately."""
        if self._keep == "none":
            return
        self._submit(path, self._lines(step, list(parts)))

    def watch(self, step: int, samples: Sequence[Sample], trained: Sequence[Sample]) -> tuple[int, ...]:
        """Select sequences for `write_trained`: the part of `trained` in the selection from `samples`."""
        few = [] if self._keep == "none" else [samples[place] for place in choose(samples, step)]
        numbers = {id(sample): number for number, sample in enumerate(trained)}
        found = {numbers[id(sample)]: sample for sample in few if id(sample) in numbers}
        self._watched = {step: found}  # one step is trained at a time
        return tuple(found)

    def write_trained(self, path: Path, step: int, log_probs: Mapping[int, NDArray[np.float32]]) -> None:
        """Write the trainer's log-probs of the sequences from `watch`; returns immediately.

        Args:
            log_probs: by sequence, [T] float32, NaN if unknown.
        """
        lines = [
            {"group": sample.group_id, "index": sample.index, "log_probs": self._trainers(sample, log_probs[number])}
            for number, sample in self._watched.pop(step, {}).items()
            if number in log_probs
        ]
        if lines:
            self._submit(path, (orjson.dumps(line, option=_OPTIONS) + b"\n" for line in lines))

    def _trainers(self, sample: Sample, log_probs: NDArray[np.float32]) -> NDArray[np.float32]:
        """The trainer's log-probs of the tokens in the sample's line, NaN where no policy sampled."""
        head, tail = _kept_tokens(sample.response_length, self._keep == "all")
        own = np.where(_sampled(sample), np.round(log_probs, 4), np.nan).astype(np.float32)[sample.prompt_length :]
        return np.concatenate([own[:head], own[tail:]])

    def notes(self) -> list[str]:
        """Failures since the last call, one line each; repeated failures are reported once."""
        notes, self._notes = self._notes, []
        return notes

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` for the current write; pending files are left out."""
        wait(self._waiting, timeout=seconds)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _submit(self, path: Path, lines: Iterable[bytes]) -> None:
        """Write a file in the background, unless too many are queued; `lines` is read there."""
        self._waiting = [file for file in self._waiting if not file.done()]
        if len(self._waiting) >= WAITING_FILES:
            self._note("slow", f"{path}: skipped, because earlier files are still being written")
            return
        self._waiting.append(self._thread.submit(self._write, path, lines))

    def _write(self, path: Path, lines: Iterable[bytes]) -> None:
        """Write a file atomically."""
        fresh = path.with_suffix(".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with fresh.open("wb") as file:
                for line in lines:
                    file.write(line)
            os.replace(fresh, path)
        except OSError as error:
            self._note("disk", f"{path}: responses cannot be written ({error.strerror}); the run continues")
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
        except Exception as error:  # a tokenizer or a user's object may raise anything, and these files are optional
            self._note("line", f"{path}: responses cannot be written ({type(error).__name__}: {error})"[:400])
            with suppress(OSError):
                fresh.unlink(missing_ok=True)

    def _lines(self, step: int, parts: Sequence[LogBatch]) -> Iterator[bytes]:
        left = BYTES_A_FILE
        every = [(part, part.entries()) for part in parts]
        chosen = [choose([entry.sample for entry in entries], step) for _, entries in every]
        for (part, entries), kinds in zip(every, chosen, strict=True):
            for index in kinds:
                line = self._line(step, part, entries[index], kinds[index])
                if self._keep == "all" or len(line) <= left:
                    left -= len(line)
                    yield line
        for (part, entries), kinds in zip(every, chosen, strict=True):
            for index in range(len(entries)) if self._keep == "all" else ():
                if index not in kinds:
                    yield self._line(step, part, entries[index], [])

    def _line(self, step: int, part: LogBatch, entry: LoggedSample, kinds: Sequence[str]) -> bytes:
        row_fields = sample_row(part, entry, self._tokenizer, whole=self._keep == "all", texts=bool(kinds))
        routes = routes_row(entry.sample, self._route_layers) if kinds else None
        row = {"step": step, "kinds": kinds, **row_fields, **({"routes": routes} if routes else {})}
        try:
            return orjson.dumps(row, default=str, option=_OPTIONS) + b"\n"
        except Exception as error:  # a user's values: numbers beyond 64 bits, keys that are objects, str() that raises
            self._note("values", f"labels or metadata are written as text, because they are not JSON ({error})"[:400])
            plain = {name: _as_text(row[name]) for name in ("label", "metadata")}
            return orjson.dumps(row | plain, default=str, option=_OPTIONS) + b"\n"

    def _note(self, kind: str, text: str) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            self._notes.append(text)


def choose(samples: Sequence[Sample], seed: int) -> dict[int, list[str]]:
    """Positions of the most informative samples, best first, with their KINDS.

    Up to A_KIND of a kind, of different groups if possible, and up to A_GROUP of one group; best, worst and the group
    only if rewards differ.
    """
    places = range(len(samples))
    rewards = [s.reward or 0.0 for s in samples]
    differ = len(set(rewards)) > 1
    longest = sorted(places, key=lambda i: -samples[i].response_length)
    versions = [len({g.version for g in s.segments if g.version is not None}) for s in samples]
    orders: dict[str, list[int]] = {
        "best": sorted(places, key=lambda i: -rewards[i]) if differ else [],
        "worst": sorted(places, key=lambda i: rewards[i]) if differ else [],
        "longest": longest,
        "truncated": [i for i in longest if samples[i].status is SampleStatus.TRUNCATED],
        "continued": sorted((i for i in longest if versions[i] > 1), key=lambda i: -versions[i]),
        "any": random.Random(seed).sample(places, len(places)),
    }
    picked = {kind: _apart(order, samples) for kind, order in orders.items()}
    picked["group"] = _most_different(samples) if differ else []
    chosen: dict[int, list[str]] = {}
    for turn in range(A_GROUP):
        for kind in KINDS:
            if turn < len(picked[kind]):
                chosen.setdefault(picked[kind][turn], []).append(kind)
    return chosen


def _most_different(samples: Sequence[Sample]) -> list[int]:
    """The first A_GROUP samples of the group whose rewards have the largest standard deviation."""
    members: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        members.setdefault(sample.group_id, []).append(place)
    return max(members.values(), key=lambda places: np.std([samples[i].reward or 0.0 for i in places]))[:A_GROUP]


def _apart(order: Sequence[int], samples: Sequence[Sample]) -> list[int]:
    """The first A_KIND of an order, of different groups if there are enough."""
    groups: dict[int, int] = {}
    for i in order:
        groups.setdefault(samples[i].group_id, i)
    firsts = list(groups.values())[:A_KIND]
    return [*firsts, *(i for i in order if i not in firsts)][:A_KIND]


def sample_row(
    part: LogBatch, entry: LoggedSample, tokenizer: Tokenizer, *, whole: bool = False, texts: bool = True
) -> dict[str, Any]:
    """Content of a sample's line; positions count from the first token of the response.

    `ids`, `texts` and `log_probs` are of the response's tokens without `left_out`, [start, end). `log_probs` is null
    where no policy sampled. `support_sizes`, present with truncated sampling, is the size of each token's support; 0:
    all ids. `advantage` is a mean over trained tokens, null if the trainer computes it. `texts` together are the
    response with its special tokens.

    Args:
        whole: keep long texts complete.
        texts: include the text of each token.
    """
    sample, prompt_length = entry.sample, entry.sample.prompt_length
    head, tail = _kept_tokens(sample.response_length, whole)
    ids = sample.response_tokens.tolist()
    log_probs = np.where(_sampled(sample), np.round(sample.log_probs, 4), np.nan).astype(np.float32)[prompt_length:]
    sizes = np.empty(0, np.int64) if sample.supports is None else sample.supports.sizes[prompt_length:]
    prompt = tokenizer.decode(sample.tokens[:prompt_length].tolist(), special_tokens=True)
    return {
        **({"set": part.set_name} if part.set_name else {}),
        "of": entry.of,
        "group": sample.group_id,
        "index": sample.index,
        "source": entry.source,
        "prompt": prompt if whole else _cut(prompt),
        "response": sample.response if whole else _cut(sample.response),
        "label": sample.label if whole else _small(sample.label),
        "metadata": sample.metadata if whole else _small(sample.metadata),
        "reward": sample.reward,
        "scores": sample.scores,
        "process_rewards": [[at - prompt_length, reward] for at, reward in sample.process_rewards],
        "advantage": _mean_advantage(entry.advantage, sample),
        "status": sample.status.value,
        "error": sample.error,
        "aborts": sample.aborts,
        "version": part.version,
        "prompt_tokens": prompt_length,
        "response_tokens": sample.response_length,
        "trained_tokens": sample.trainable_tokens,
        "segments": [_segment(s, prompt_length, part.version) for s in sample.segments if s.end > prompt_length],
        "left_out": [head, tail] if head < tail else None,
        "ids": ids[:head] + ids[tail:],
        **({"texts": token_texts(ids[:head], tokenizer) + token_texts(ids[tail:], tokenizer)} if texts else {}),
        "log_probs": np.concatenate([log_probs[:head], log_probs[tail:]]),
        **({"support_sizes": np.concatenate([sizes[:head], sizes[tail:]])} if sample.supports is not None else {}),
    }


def _sampled(sample: Sample) -> NDArray[np.bool_]:
    """[T] whether a policy sampled the token."""
    sampled = np.zeros(len(sample), np.bool_)
    for s in sample.segments:
        sampled[s.start : s.end] = s.version is not None
    return sampled


def routes_row(sample: Sample, layers: int) -> dict[str, Any] | None:
    """Experts of the response's first tokens in `layers` MoE layers, evenly spread, including the first and the last.

    `experts` is the base64 of [tokens, layers, top-k], unsigned little-endian integers of `bytes` bytes each. None
    without routes, or for no layers.
    """
    if sample.routes is None or layers == 0 or not sample.routes.layer_ids:
        return None
    have = len(sample.routes.layer_ids)
    columns = np.unique(np.linspace(0, have - 1, min(layers, have)).round().astype(np.int64))
    experts = sample.routes.experts[sample.prompt_length :, columns]
    experts = experts[: ROUTE_BYTES // max(experts[:1].nbytes, 1)]
    return {
        "layers": [sample.routes.layer_ids[column] for column in columns],
        "top_k": experts.shape[2],
        "bytes": experts.itemsize,
        "experts": base64.b64encode(experts.astype(experts.dtype.newbyteorder("<")).tobytes()).decode(),
    }


def _segment(s: Segment, prompt: int, version: int) -> dict[str, Any]:
    return {
        "start": max(s.start - prompt, 0),
        "end": s.end - prompt,
        "version": s.version,
        "age": None if s.version is None else version - s.version,
        "engine": s.engine,
        "trained": s.trainable,
    }


def _mean_advantage(advantage: float | NDArray[np.floating] | None, sample: Sample) -> float | None:
    if not isinstance(advantage, np.ndarray):
        return advantage
    trained = advantage[sample.loss_mask]
    return float(trained.mean()) if len(trained) else None


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Text that each token adds, special tokens included. A character of several tokens belongs to its last one."""
    texts: list[str] = []
    begin = shown = 0  # tokens from `begin` on are decoded together; `before` holds those before `shown`
    before = ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[begin:end], special_tokens=True)
        if text.endswith("\ufffd") and end - shown < 4 and end < len(ids):  # a character has at most four bytes
            texts.append("")
            continue
        texts.append(text[len(before) :])
        begin, shown = shown, end
        before = tokenizer.decode(ids[begin:shown], special_tokens=True)
    return texts


def _kept_tokens(count: int, whole: bool) -> tuple[int, int]:
    """(a, b): tokens before a and from b on are written."""
    return (count, count) if whole or count <= 2 * TOKENS_A_SIDE else (TOKENS_A_SIDE, count - TOKENS_A_SIDE)


def _cut(text: str, side: int = CHARACTERS_A_SIDE) -> str:
    """The text, shortened to its beginning and end if it is long."""
    out = len(text) - 2 * side
    return text if out <= 0 else f"{text[:side]} [... {out} characters left out ...] {text[-side:]}"


def _small(value: Any) -> Any:
    """The value, or the beginning and end of its text if it is too large."""
    try:
        size = len(orjson.dumps(value, default=str, option=_OPTIONS))
    except Exception:  # reported when the line is written
        return value
    return value if size <= OTHER_BYTES else _cut(_as_text(value), OTHER_BYTES // 2)


def _as_text(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return _cut(text, OTHER_BYTES // 2).encode(errors="replace").decode()
