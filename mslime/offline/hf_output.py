"""The half of a conversion that writes Hugging Face shards: which tensors go into which file, index, side files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mslime.convert.files import Advance, TensorPlan, Written, write_safetensors
from mslime.convert.hf import copy_side_files, write_index
from mslime.offline.jobs import FileTask

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Output:
    """Tensors that are made together and lie in one file.

    Attributes:
        key: by which the job knows them.
        plans: what they will be.
    """

    key: str
    plans: tuple[TensorPlan, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(plan.nbytes for plan in self.plans)


class HFJob(ABC):
    """A job (see `jobs.ConversionJob`) whose output is a Hugging Face checkpoint.

    Args:
        outputs: everything that will be written, in order.
        side_files: directory whose config.json and tokenizer are copied.
        changes: settings of the new config.json.
        max_shard_bytes: a shard is closed when it would grow beyond this.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        side_files: Path,
        changes: Mapping[str, object],
        max_shard_bytes: int,
    ) -> None:
        self._side_files, self._changes = side_files, dict(changes)
        self._outputs = {output.key: output for output in outputs}
        self._tasks = _shards(outputs, max_shard_bytes)

    @property
    def tasks(self) -> Sequence[FileTask]:
        """One shard each."""
        return self._tasks

    @property
    def plans(self) -> Iterator[TensorPlan]:
        """Every tensor that will be written."""
        return (plan for output in self._outputs.values() for plan in output.plans)

    @abstractmethod
    def identity(self) -> Mapping[str, object]:
        """See `jobs.ConversionJob`."""

    @abstractmethod
    def make(self, output: Output) -> Sequence[Tensor]:
        """The tensors of one output, in the order of its plans, in any process."""

    def write(self, task: FileTask, path: Path, advance: Advance) -> Written:
        """See `jobs.ConversionJob`."""
        outputs = [self._outputs[key] for key in task.names]
        plans = [plan for output in outputs for plan in output.plans]
        return write_safetensors(path, plans, (tensor for output in outputs for tensor in self.make(output)), advance)

    def finish(self, directory: Path, written: Sequence[Written]) -> None:
        """Index, config.json, tokenizer."""
        weight_map = {name: done.file for done in written for name in done.spans}
        write_index(directory, weight_map, sum(task.nbytes for task in self._tasks))
        copy_side_files(self._side_files, directory, self._changes)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}


def _shards(outputs: Sequence[Output], limit: int) -> list[FileTask]:
    """Files of at most `limit` bytes, under the names that the Hugging Face libraries give them."""
    runs: list[list[Output]] = []
    total = limit + 1
    for output in outputs:
        if total + output.nbytes > limit:
            runs.append([])
            total = 0
        runs[-1].append(output)
        total += output.nbytes
    return [
        FileTask(
            f"model-{i + 1:05d}-of-{len(runs):05d}.safetensors",
            sum(output.nbytes for output in run),
            tuple(output.key for output in run),
        )
        for i, run in enumerate(runs)
    ]
