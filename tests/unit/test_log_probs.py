"""Vocabulary-parallel log-probs and entropy against a float64 reference, in one process and over gloo."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mslime.backends.megatron.log_probs import LogProbs, vocab_parallel_log_probs
from tests.engines.megatron_ranks import run_ranks

ROWS, VOCAB, PADDED = 37, 50, 64


def reference(logits: Tensor, labels: Tensor, vocab: int, temperature: float) -> tuple[Tensor, Tensor]:
    """The definition, in float64 over the whole vocabulary."""
    log_p = torch.log_softmax(logits[:, :vocab].double() / temperature, dim=-1)
    return log_p[torch.arange(len(labels)), labels], -(log_p.exp() * log_p).sum(-1)


def make_case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits over a padded vocabulary (huge padding, so that leaking is seen), labels, and two upstream gradients."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, PADDED, generator=generator) * 4
    logits[:, VOCAB:] = 50.0
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    labels[:2] = torch.tensor([0, VOCAB - 1])
    upstream = torch.randn(2, ROWS, generator=generator)
    return logits.to(dtype), labels, upstream[0], upstream[1]


def single(logits: Tensor, labels: Tensor, **kwargs: object) -> LogProbs:
    return vocab_parallel_log_probs(logits, labels, tp_group=None, vocab_start=0, vocab_size=VOCAB, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_match_the_float64_definition(chunk: int, temperature: float) -> None:
    logits, labels, up_log_probs, up_entropy = make_case()
    ours = logits.clone().requires_grad_()
    out = single(ours, labels, temperature=temperature, with_entropy=True, chunk=chunk)
    assert out.entropy is not None and out.log_probs.dtype == out.entropy.dtype == torch.float32
    (out.log_probs * up_log_probs + out.entropy * up_entropy).sum().backward()

    exact = logits.double().requires_grad_()
    log_probs, entropy = reference(exact, labels, VOCAB, temperature)
    (log_probs * up_log_probs + entropy * up_entropy).sum().backward()
    assert ours.grad is not None and exact.grad is not None
    torch.testing.assert_close(out.log_probs.double(), log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.entropy.double(), entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=2e-6, rtol=1e-5)
    assert ours.grad[:, VOCAB:].abs().max() == 0, "padding columns get no gradient"


def test_entropy_is_absent_unless_asked_and_adds_no_gradient_unless_used() -> None:
    logits, labels, up_log_probs, _ = make_case()
    without, with_entropy = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    plain = single(without, labels)
    assert plain.entropy is None
    (plain.log_probs * up_log_probs).sum().backward()
    (single(with_entropy, labels, with_entropy=True).log_probs * up_log_probs).sum().backward()
    assert without.grad is not None and with_entropy.grad is not None
    assert torch.equal(without.grad, with_entropy.grad)


def test_bf16_logits_are_reduced_in_float32() -> None:
    logits, labels, up_log_probs, _ = make_case(torch.bfloat16)
    ours = logits.clone().requires_grad_()
    out = single(ours, labels, with_entropy=True)
    (out.log_probs * up_log_probs).sum().backward()
    exact = logits.double().requires_grad_()
    log_probs, _ = reference(exact, labels, VOCAB, 1.0)
    (log_probs * up_log_probs).sum().backward()
    assert ours.grad is not None and exact.grad is not None and ours.grad.dtype == torch.bfloat16
    torch.testing.assert_close(out.log_probs.double(), log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.grad.double(), exact.grad, atol=1e-4, rtol=1 / 128)


def test_no_rows_is_not_a_special_case() -> None:
    logits = torch.zeros(0, PADDED, requires_grad=True)
    out = single(logits, torch.zeros(0, dtype=torch.int64), with_entropy=True)
    assert out.log_probs.shape == (0,)
    out.log_probs.sum().backward()
    assert logits.grad is not None and logits.grad.shape == (0, PADDED)


@pytest.mark.parametrize("label", [-1, VOCAB, PADDED - 1])
def test_a_label_outside_the_vocabulary_is_refused(label: int) -> None:
    logits, labels, _, _ = make_case()
    labels[5] = label
    with pytest.raises(AssertionError, match="vocabulary has 50 ids"):
        single(logits, labels)


class _SavedBytes:
    """Counts what autograd keeps of the forward pass, beyond its inputs."""

    def __init__(self, inputs: list[Tensor]) -> None:
        self.known = {t.data_ptr() for t in inputs}
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in self.known:
            self.known.add(tensor.data_ptr())
            self.bytes += tensor.numel() * tensor.element_size()
        return tensor


def test_nothing_as_large_as_the_logits_is_kept_for_backward() -> None:
    logits, labels, _, _ = make_case(torch.bfloat16)
    logits.requires_grad_()
    saved = _SavedBytes([logits, labels])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t):
        single(logits, labels, with_entropy=True, chunk=4)
    assert 0 < saved.bytes <= 12 * ROWS, "three float32 numbers a row"


def _rank(rank: int, world: int, init_method: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    logits, labels, up_log_probs, up_entropy = make_case(dtype)
    width = PADDED // world
    mine = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
    result = vocab_parallel_log_probs(
        mine, labels, tp_group=dist.group.WORLD, vocab_start=rank * width, vocab_size=VOCAB, temperature=0.7,
        with_entropy=True, chunk=8,
    )  # fmt: skip
    assert result.entropy is not None
    (result.log_probs * up_log_probs + result.entropy * up_entropy).sum().backward()
    dist.destroy_process_group()
    return result.log_probs.detach(), result.entropy.detach(), mine.grad


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_every_vocabulary_split_gives_the_single_rank_result(world: int, dtype: torch.dtype) -> None:
    """With four ranks of 16 columns the last one holds two real columns and fourteen of padding."""
    parts = run_ranks(_rank, world, dtype)
    logits, labels, up_log_probs, up_entropy = make_case(dtype)
    whole = logits.clone().requires_grad_()
    out = single(whole, labels, temperature=0.7, with_entropy=True)
    assert out.entropy is not None
    (out.log_probs * up_log_probs + out.entropy * up_entropy).sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for log_probs, entropy, _ in parts:
        torch.testing.assert_close(log_probs, out.log_probs.detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, out.entropy.detach(), atol=1e-5, rtol=0)
    assert whole.grad is not None
    torch.testing.assert_close(torch.cat([p[2] for p in parts], 1), whole.grad, atol=tolerance, rtol=1e-2)


def _padding_rank(rank: int, world: int, init_method: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    logits, labels, up_log_probs, _ = make_case()
    mine = (logits[:, :VOCAB] if rank == 0 else logits[:, VOCAB:]).clone().requires_grad_()
    result = vocab_parallel_log_probs(
        mine, labels, tp_group=dist.group.WORLD, vocab_start=rank * VOCAB, vocab_size=VOCAB, with_entropy=True
    )
    (result.log_probs * up_log_probs).sum().backward()
    dist.destroy_process_group()
    return result.log_probs.detach(), None if result.entropy is None else result.entropy.detach(), mine.grad


@pytest.mark.timeout(120)
def test_a_rank_that_holds_only_padding_changes_nothing() -> None:
    parts = run_ranks(_padding_rank, 2)
    logits, labels, _, _ = make_case()
    exact, entropy = reference(logits, labels, VOCAB, 1.0)
    for rank, (log_probs, ours, grad) in enumerate(parts):
        torch.testing.assert_close(log_probs.double(), exact, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.double(), entropy, atol=1e-5, rtol=0)
        assert rank == 0 or grad.abs().max() == 0
