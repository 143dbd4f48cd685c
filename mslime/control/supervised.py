"""The rows of a supervised run: batches and held-out sets as shards for every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from mslime.config.errors import CheckpointError, DataError
from mslime.control.assemble import assemble_supervised
from mslime.data.sample import Sample
from mslime.data.supervised import SupervisedSource
from mslime.data.tokenizer import load_tokenizer
from mslime.preflight.resolve import ResolvedRun

Shards = Sequence[Sequence[Any]]
"""[ranks][optimizer steps] of Ray references to TrainShard."""

HeldOutLoss = Callable[[Shards], tuple[float, int]]
"""(sum of the negative log-likelihood, tokens) of shards, over all ranks."""


class SupervisedRows:
    """Training rows in their order, and held-out rows, which are tokenised once."""

    def __init__(self, run: ResolvedRun) -> None:
        """Raises DataError for files that cannot be read, and held-out rows that cannot be trained on."""
        config = self._config = run.config
        limit = config.rollout.longest(run.model.max_positions)
        tokenizer = load_tokenizer(config.model.tokenizer)
        self.source = SupervisedSource(config.data.prompts, config.data, config.train, config.seed, tokenizer, limit)
        self._held_out: dict[str, list[Sample]] = {}
        for index, held_out in enumerate(config.data.eval_sets):
            samples = SupervisedSource(
                [held_out.path], config.data, config.train, config.seed, tokenizer, limit, shuffle=False
            ).samples()
            if not samples:
                raise DataError(f"data.eval_sets[{index}].path", held_out.path, "every row is too long",
                                "raise rollout.max_total_tokens, or give shorter rows")  # fmt: skip
            self._held_out[held_out.name] = samples

    def batch(self) -> Shards:
        """The next `train.sft_batch_size` rows."""
        return self._shards([s for i in range(self._config.train.sft_batch_size) for s in self.source.next(i)])

    def evaluate(self, held_out_loss: HeldOutLoss) -> dict[str, float]:
        """`eval/NAME/nll`, `perplexity` and `tokens` of every held-out set, a batch at a time."""
        metrics: dict[str, float] = {}
        for name, samples in self._held_out.items():
            found = [held_out_loss(shards) for shards in self._in_batches(samples)]
            tokens = sum(n for _, n in found)
            nll = math.fsum(total for total, _ in found) / tokens
            head = f"eval/{name}"
            perplexity = math.exp(min(nll, 700.0))  # beyond it there are no floats
            metrics |= {f"{head}/nll": nll, f"{head}/perplexity": perplexity, f"{head}/tokens": float(tokens)}
        return metrics

    def resume(self, directory: Path | None, extra: Mapping[str, Any]) -> None:
        """Continue at the position that a checkpoint holds. Raises CheckpointError when it is of another kind of run,
        DataError when the rows are others."""
        if not isinstance(extra.get("source"), dict):
            raise CheckpointError(
                str(directory), "no position in the prompts", "is not of supervised training (train.task: sft)",
                "give the run another name, and the checkpoint as checkpoint.load",
            )  # fmt: skip
        self.source.load_state_dict(extra["source"])

    def _in_batches(self, samples: Sequence[Sample]) -> Iterator[Shards]:
        size = self._config.train.sft_batch_size
        return (self._shards(samples[start : start + size]) for start in range(0, len(samples), size))

    def _shards(self, samples: Sequence[Sample]) -> Shards:
        shards, layout = assemble_supervised(samples, self._config), self._config.layout
        refs = [[ray.put(shard) for shard in step] for step in shards]
        return [[step[layout.dp_rank(rank)] for step in refs] for rank in range(layout.world_size)]
