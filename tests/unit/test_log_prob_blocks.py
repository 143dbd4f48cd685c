"""Log-probs from hidden states, block by block of the vocabulary, against float64 NumPy and against whole logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mslime.backends.megatron.log_probs.blocks import COLUMNS, block_columns, hidden_log_probs
from mslime.backends.megatron.log_probs.chunked import CPU_BLOCK_BYTES
from mslime.backends.megatron.log_probs.vocab_parallel import LogProbs, vocab_parallel_log_probs
from mslime.backends.megatron.log_probs.vocab_shard import LabelSupport
from tests.engines.megatron_ranks import run_ranks
from tests.fixtures.log_probs import exact, peak_bytes
from tests.unit.test_log_probs import NothingIsRead, SaysCuda

ROWS, HIDDEN, VOCAB, PADDED = 37, 24, 700, 768
THREE_BLOCKS = ROWS * 4 * 2 * COLUMNS  # bytes of float32 logits: columns 0 to 256, 256 to 512, 512 to 700


@dataclass(frozen=True)
class Given:
    """A padded vocabulary whose padding would win if it counted; labels in every block; two upstream gradients."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    up_log_probs: Tensor
    up_entropy: Tensor


def given(dtype: torch.dtype = torch.float32) -> Given:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    weight[VOCAB:] = 9.0
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[:6] = torch.tensor([0, 255, 256, 511, 512, VOCAB - 1])
    upstream = torch.randn(2, ROWS, generator=generator)
    return Given(hidden.to(dtype), weight.to(dtype), labels, upstream[0], upstream[1])


def supports_of(labels: Tensor) -> tuple[list[list[int]], LabelSupport]:
    """Every third row is unrestricted, every third lies in its label's block, the others in all blocks."""
    generator, rows = np.random.default_rng(5), []
    for t, label in enumerate(labels.tolist()):
        others = [i for i in generator.permutation(VOCAB).tolist() if i != label]
        if t % 3 == 1:
            others = [i for i in others if i // 256 == label // 256]
        rows.append([] if t % 3 == 0 else [*others[: t // 2], label, *others[t // 2 : 2 * t]])
    sizes = np.cumsum([len(row) for row in rows])
    ids = torch.tensor([i for row in rows for i in row], dtype=torch.int32)
    return rows, LabelSupport(ids, torch.tensor([0, *sizes]))


def run(case: Given, most_bytes: int = THREE_BLOCKS, **kwargs: Any) -> tuple[LogProbs, Tensor, Tensor]:
    """Log-probs and entropy, and the gradients of hidden states and weight."""
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    out = hidden_log_probs(
        hidden, weight, case.labels, tp_group=None, vocab_start=0, vocab_size=VOCAB, with_entropy=True,
        most_bytes=most_bytes, **kwargs,
    )  # fmt: skip
    assert out.entropy is not None
    (out.log_probs * case.up_log_probs + out.entropy * case.up_entropy).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return out, hidden.grad, weight.grad


@pytest.mark.parametrize("supported", [False, True], ids=["whole vocabulary", "supports"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("most_bytes", [1, THREE_BLOCKS, 10**12], ids=["six", "three", "one"])
def test_values_and_gradients_are_the_float64_definition_s(
    most_bytes: int, temperature: float, supported: bool
) -> None:
    case = given()
    rows, support = supports_of(case.labels) if supported else (None, None)
    out, of_hidden, of_weight = run(case, most_bytes, temperature=temperature, support=support)
    hidden, weight = case.hidden.double().numpy(), case.weight.double().numpy()
    want = exact(
        torch.from_numpy(hidden @ weight.T), case.labels, vocab=VOCAB, temperature=temperature,
        up_log_probs=case.up_log_probs, up_entropy=case.up_entropy, supports=rows,
    )  # fmt: skip
    assert out.entropy is not None
    np.testing.assert_allclose(out.log_probs.detach(), want.log_probs, atol=1e-5)
    np.testing.assert_allclose(out.entropy.detach(), want.entropy, atol=1e-5)
    np.testing.assert_allclose(of_hidden, want.gradient @ weight, atol=2e-5)
    np.testing.assert_allclose(of_weight, want.gradient.T @ hidden, atol=2e-5)
    assert of_weight[VOCAB:].abs().max() == 0, "padding gets no gradient"


def test_bf16_is_within_the_rounding_of_whole_logits_in_bf16() -> None:
    case = given(torch.bfloat16)
    out, of_hidden, of_weight = run(case, THREE_BLOCKS // 2)
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    whole = vocab_parallel_log_probs(
        hidden @ weight.t(), case.labels, tp_group=None, vocab_start=0, vocab_size=VOCAB, with_entropy=True
    )
    assert out.entropy is not None and whole.entropy is not None
    (whole.log_probs * case.up_log_probs + whole.entropy * case.up_entropy).sum().backward()
    torch.testing.assert_close(out.log_probs, whole.log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.entropy, whole.entropy, atol=1e-5, rtol=0)
    assert of_hidden.dtype == of_weight.dtype == torch.bfloat16
    torch.testing.assert_close(of_weight, weight.grad, atol=1e-3, rtol=1 / 64)
    torch.testing.assert_close(of_hidden, hidden.grad, atol=4e-2, rtol=1 / 64)


def test_all_blocks_but_one_are_made_again_in_the_backward_pass() -> None:
    """Counted in products with the weight: three forward, two again, and two gradients of each."""
    products: list[tuple[int, ...]] = []

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in ("mm", "addmm_", "addmm"):
                products.append(func)
            return func(*args, **(kwargs or {}))

    with Counted():
        run(given())
    assert len(products) == 3 + 2 + 2 * 3


def test_a_second_backward_pass_finds_the_same_gradients() -> None:
    case = given()
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    out = hidden_log_probs(
        hidden, weight, case.labels, tp_group=None, vocab_start=0, vocab_size=VOCAB, most_bytes=THREE_BLOCKS
    )
    loss = (out.log_probs * case.up_log_probs).sum()
    loss.backward(retain_graph=True)
    assert hidden.grad is not None and weight.grad is not None
    first = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    loss.backward()
    assert torch.equal(first[0], hidden.grad) and torch.equal(first[1], weight.grad)


def test_a_frozen_weight_gets_no_gradient_and_hidden_states_the_same() -> None:
    case = given()
    _, of_hidden, _ = run(case)
    hidden = case.hidden.clone().requires_grad_()
    out = hidden_log_probs(
        hidden, case.weight, case.labels, tp_group=None, vocab_start=0, vocab_size=VOCAB, most_bytes=THREE_BLOCKS,
        with_entropy=True,
    )  # fmt: skip
    assert out.entropy is not None
    (out.log_probs * case.up_log_probs + out.entropy * case.up_entropy).sum().backward()
    assert case.weight.grad is None and hidden.grad is not None and torch.equal(hidden.grad, of_hidden)


def test_the_weight_s_gradient_is_one_that_megatron_core_s_wrapper_adds() -> None:
    """Its linear layer marks weights whose gradient it has added itself; the wrapper drops what is returned then."""
    case = given()
    weight = case.weight.clone().requires_grad_()
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    hidden_log_probs(
        case.hidden, weight, case.labels, tp_group=None, vocab_start=0, vocab_size=VOCAB, most_bytes=THREE_BLOCKS
    ).log_probs.sum().backward()
    assert weight.grad is not None and not weight.grad_added_to_main_grad  # type: ignore[attr-defined]


def test_memory_beside_the_weight_s_gradient_is_the_stated_number_of_bytes_whatever_the_vocabulary() -> None:
    rows, hidden_size, limit = 300, 32, 2**20
    peaks, labels = [], torch.arange(rows)
    for vocab in (4_096, 32_768):
        hidden, weight = torch.randn(rows, hidden_size).requires_grad_(), torch.randn(vocab, hidden_size)
        weight.requires_grad_()
        out: list[LogProbs] = []

        def forward(hidden: Tensor = hidden, weight: Tensor = weight, out: list[LogProbs] = out) -> None:
            out.append(hidden_log_probs(
                hidden, weight, labels, tp_group=None, vocab_start=0, vocab_size=weight.shape[0], with_entropy=True,
                most_bytes=limit,
            ))  # fmt: skip

        forward_peak = peak_bytes(forward)
        assert out[0].entropy is not None
        loss = (out[0].log_probs + out[0].entropy).sum()
        backward_peak = peak_bytes(loss.backward) - weight.numel() * 4
        stated = 2 * CPU_BLOCK_BYTES + 100 * rows
        assert forward_peak <= limit + stated
        assert backward_peak <= limit + stated + 2 * rows * hidden_size * 4
        peaks.append((forward_peak, backward_peak))
    assert peaks[1][0] <= peaks[0][0] * 1.1 and peaks[1][1] <= peaks[0][1] * 1.1, "flat in the vocabulary"


@pytest.mark.parametrize("columns", [0, 1, 127, 128, 129, 700, 151_936])
@pytest.mark.parametrize("most_bytes", [1, 100_000, 10**9, 10**12])
def test_blocks_are_within_the_limit_and_as_few_as_it_allows(columns: int, most_bytes: int) -> None:
    column_bytes = 600
    width = block_columns(columns, column_bytes, most_bytes)
    assert width > 0 and width % COLUMNS == 0
    assert width * column_bytes <= most_bytes or width == COLUMNS
    widest = max(int(most_bytes // column_bytes) // COLUMNS * COLUMNS, COLUMNS)
    assert -(-columns // width) == -(-columns // widest)


def test_no_tokens_are_not_a_special_case() -> None:
    hidden, weight = torch.zeros(0, HIDDEN, requires_grad=True), torch.ones(PADDED, HIDDEN, requires_grad=True)
    out = hidden_log_probs(
        hidden, weight, torch.zeros(0, dtype=torch.int64), tp_group=None, vocab_start=0, vocab_size=VOCAB,
        most_bytes=THREE_BLOCKS,
    )  # fmt: skip
    out.log_probs.sum().backward()
    assert weight.grad is not None and weight.grad.abs().max() == 0


def test_a_label_outside_the_vocabulary_or_its_support_is_refused() -> None:
    case = given()
    _, support = supports_of(case.labels)
    case.labels[4] = VOCAB
    with pytest.raises(AssertionError, match="vocabulary has 700 ids"):
        run(case)
    case.labels[4] = next(i for i in range(VOCAB) if i not in support.ids[support.offsets[4] : support.offsets[5]])
    with pytest.raises(AssertionError, match="ids of its support"):
        run(case, support=support)


def test_on_cuda_nothing_waits_for_the_device() -> None:
    """Rehearsed without one."""
    case = given()
    _, support = supports_of(case.labels)
    expected = run(case, support=support)
    rehearsed = Given(case.hidden, case.weight, case.labels.as_subclass(SaysCuda), case.up_log_probs, case.up_entropy)
    with NothingIsRead():
        found = run(rehearsed, support=support)
    assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])


def _rank(rank: int, world: int, init_method: str, supported: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    case, width = given(), PADDED // world
    hidden = case.hidden.clone().requires_grad_()
    weight = case.weight[rank * width : (rank + 1) * width].clone().requires_grad_()
    out = hidden_log_probs(
        hidden, weight, case.labels, tp_group=dist.group.WORLD, vocab_start=rank * width, vocab_size=VOCAB,
        most_bytes=1, temperature=0.7, with_entropy=True, support=supports_of(case.labels)[1] if supported else None,
    )  # fmt: skip
    assert out.entropy is not None
    (out.log_probs * case.up_log_probs + out.entropy * case.up_entropy).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    dist.all_reduce(hidden.grad)
    dist.destroy_process_group()
    return out.log_probs.detach(), out.entropy.detach(), hidden.grad, weight.grad


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("supported", [False, True], ids=["whole vocabulary", "supports"])
def test_ranks_that_share_the_vocabulary_find_what_one_rank_finds(supported: bool) -> None:
    """The last rank of four has 124 real columns of 192, in one block; the others two blocks."""
    case = given()
    support = supports_of(case.labels)[1] if supported else None
    one, of_hidden, of_weight = run(case, temperature=0.7, support=support)
    parts = run_ranks(_rank, 4, supported)
    for log_probs, entropy, hidden_gradient, _ in parts:
        torch.testing.assert_close(log_probs, one.log_probs.detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, one.entropy, atol=1e-5, rtol=0)
        torch.testing.assert_close(hidden_gradient, of_hidden, atol=3e-5, rtol=0)
    torch.testing.assert_close(torch.cat([part[3] for part in parts]), of_weight, atol=2e-5, rtol=0)
