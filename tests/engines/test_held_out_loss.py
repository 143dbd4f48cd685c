"""The loss on held-out rows equals transformers', is the same in every layout, and does not affect training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mslime.config.schema import RunConfig
from mslime.data.sample import Sample
from mslime.run.assemble import assemble_supervised
from mslime.run.trainers import over_data_parallel_ranks
from tests.engines.trainer_ranks import make_config, run_trainers

SFT = {"task": "sft", "quadratic_tokens": None, "max_tokens_per_micro_batch": 48}


def rows() -> list[Sample]:
    """Eleven conversations with two trained turns each."""
    random, samples = np.random.default_rng(3), list[Sample]()
    for i in range(11):
        sample = Sample.from_prompt(i, 0, random.integers(0, 256, random.integers(1, 9)).tolist())
        for _ in range(2):
            n = int(random.integers(1, 9))
            sample.extend(random.integers(0, 256, n).tolist(), log_probs=[0.0] * n, versions=[(0, 0, n)])
            sample.extend(random.integers(0, 256, int(random.integers(0, 5))).tolist())
        samples.append(sample)
    return samples


def shards_of(trainer: Any, config: RunConfig, samples: list[Sample]) -> list[Any]:
    """This rank's."""
    (step,) = assemble_supervised(samples, config)
    return [step[trainer.spec.layout.dp_rank(trainer.parallel.rank)]]


def in_batches(trainer: Any, config: RunConfig) -> list[tuple[float, int]]:
    samples = rows()
    return [trainer.negative_log_likelihood(shards_of(trainer, config, samples[i : i + 4])) for i in (0, 4, 8)]


def mean(config: RunConfig, ranks: list[list[tuple[float, int]]]) -> tuple[float, int]:
    """(loss per token, tokens) over all ranks and batches."""
    found = [over_data_parallel_ranks([rank[i] for rank in ranks], config.layout) for i in range(3)]
    tokens = sum(n for _, n in found)
    return sum(total for total, _ in found) / tokens, tokens


@pytest.mark.parametrize("sizes", [{}, {"dp": 2, "ep": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2, "vpp": 2}])
def test_the_held_out_loss_is_that_of_transformers_in_every_layout(
    tiny_qwen3_moe: Path, tmp_path: Path, sizes: dict[str, int]
) -> None:
    config = make_config(tiny_qwen3_moe, tmp_path, train=SFT, **sizes)
    found, tokens = mean(config, run_trainers(in_batches, config, config))
    expected, count = of_transformers(tiny_qwen3_moe)
    assert tokens == count and found == pytest.approx(expected, abs=1e-5)


def of_transformers(checkpoint: Path) -> tuple[float, int]:
    """NumPy's log-softmax of transformers' logits, a row at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    total, tokens = 0.0, 0
    for sample in rows():
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.tokens).long()[None]).logits[0].double().numpy()
        top = logits.max(-1, keepdims=True)
        log_probs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        (at,) = np.nonzero(sample.loss_mask)
        total, tokens = total - float(log_probs[at - 1, sample.tokens[at]].sum()), tokens + len(at)
    return total / tokens, tokens


def trained(trainer: Any, config: RunConfig, evaluate: bool) -> dict[str, torch.Tensor]:
    """Everything that two steps leave behind: weights, optimizer state, gradients, random numbers."""
    samples = rows()
    for step in range(2):
        if evaluate:
            trainer.negative_log_likelihood(shards_of(trainer, config, samples[6:]))
        trainer.train(shards_of(trainer, config, samples[step : step + 5]))
    if evaluate:
        trainer.negative_log_likelihood(shards_of(trainer, config, samples[6:]))
    found = {name: tensor.clone() for name, tensor in trainer.named_local_params()}
    found |= {f"grad {name}": p.main_grad.clone() for name, p in trainer.chunks[0].named_parameters()}
    for i, state in enumerate(trainer.optimizer.chained_optimizers[0].optimizer.state.values()):
        found |= {f"state {i} {key}": value.clone() for key, value in state.items() if torch.is_tensor(value)}
    return found | {"random": torch.get_rng_state(), "step": torch.tensor(trainer.step)}


def test_a_run_with_evaluation_trains_bit_for_bit_like_one_without(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    fields = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    config = make_config(tiny_qwen3_moe, tmp_path, train=SFT, **fields)
    (plain,), (evaluated,) = (run_trainers(trained, config, config, evaluate) for evaluate in (False, True))
    assert plain.keys() == evaluated.keys() and any(key.startswith("state") for key in plain)
    assert [name for name in plain if not torch.equal(plain[name], evaluated[name])] == []
