"""Which parameters the gradient norm counts on every tensor-parallel rank: those of which each rank holds its own part.

megatron-core reads the attribute `tensor_model_parallel`. On the CPU its own layers set it; on CUDA those of
Transformer Engine do, and mark other parameters. Both are put right by `mark_parameters`, for every family.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mslime.backends.cpu.megatron_patches import install

install()

from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402

from mslime.backends.megatron.model.chunks import (  # noqa: E402
    build_chunks,
    fake_process_group,
    mark_parameters,
    named_local_params,
)
from mslime.backends.megatron.model.megatron_config import transformer_config  # noqa: E402
from mslime.config.resolved import policy_spec  # noqa: E402
from mslime.config.schema import RunConfig  # noqa: E402
from mslime.convert.families import get_family, read_hf_config  # noqa: E402
from tests.fixtures.families import CASES  # noqa: E402


@pytest.fixture(params=CASES)
def second_rank(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[GPTModel, set[str]]]:
    """The model of the second of two tensor-parallel ranks, and the names of what its rules split."""
    checkpoint = CASES[request.param].make(tmp_path)
    hf = read_hf_config(checkpoint)
    family = get_family(hf)
    ep = 2 if family.model_fields(hf).num_experts else 1
    config = RunConfig.model_validate(
        {
            "model": {"path": checkpoint},
            "data": {"prompts": ["unused.jsonl"]},
            "cluster": {"device": "cpu", "trainer_ranks": 2},
            "megatron": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": ep},
        }
    )
    with fake_process_group(config.layout, 1):
        settings = transformer_config(policy_spec(config), hf, torch.device("cpu"))
        (chunk,) = build_chunks(settings, family.model_fields(hf), torch.device("cpu"))
        bound = {name: family.rules(hf).bind(name) for name, _ in named_local_params([chunk])}
        yield chunk, {name for name, rule in bound.items() if rule.is_expert or rule.kind.tp_axis is not None}


def marked(chunk: GPTModel) -> set[str]:
    found = named_local_params([chunk])
    return {name for name, p in found if isinstance(p, torch.nn.Parameter) and getattr(p, "tensor_model_parallel", 0)}


def mark_as_transformer_engine_does(chunk: GPTModel) -> None:
    """Transformer Engine 2.20: every weight of a linear layer, split or not; neither grouped experts nor sinks."""
    for path, module in chunk.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if ".experts." in f"{path}." or name == "softmax_offset":
                parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
            elif "Linear" in type(module).__name__ and name == "weight":
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_gradient_norm_counts_what_a_rank_holds_of_its_own_and_nothing_twice(
    second_rank: tuple[GPTModel, set[str]],
) -> None:
    chunk, split = second_rank
    assert marked(chunk) == split


@pytest.mark.slow
def test_marks_of_transformer_engine_are_put_right(second_rank: tuple[GPTModel, set[str]]) -> None:
    chunk, split = second_rank
    mark_as_transformer_engine_does(chunk)
    mark_parameters(chunk)
    assert marked(chunk) == split
