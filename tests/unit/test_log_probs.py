"""Vocabulary-parallel log-probs and entropy against a float64 reference, in one process and over gloo."""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mslime.backends.megatron.log_probs import vocab_parallel as module
from mslime.backends.megatron.log_probs.chunked import CPU_BLOCK_BYTES
from mslime.backends.megatron.log_probs.vocab_parallel import LogProbs, vocab_parallel_log_probs
from mslime.backends.megatron.log_probs.vocab_shard import LabelSupport
from tests.engines.megatron_ranks import run_ranks
from tests.fixtures.log_probs import exact, peak_bytes

ROWS, VOCAB, PADDED = 37, 50, 64


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


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.bfloat16, 1 / 128)], ids=["f32", "bf16"])
@pytest.mark.parametrize("chunk", [1, 7, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_match_the_float64_definition(
    chunk: int, temperature: float, dtype: torch.dtype, relative: float
) -> None:
    """Logits in bfloat16 are reduced in float32."""
    logits, labels, up_log_probs, up_entropy = make_case(dtype)
    ours = logits.clone().requires_grad_()
    out = single(ours, labels, temperature=temperature, with_entropy=True, chunk=chunk)
    assert out.entropy is not None and out.log_probs.dtype == out.entropy.dtype == torch.float32
    (out.log_probs * up_log_probs + out.entropy * up_entropy).sum().backward()
    want = exact(
        logits, labels, vocab=VOCAB, temperature=temperature, up_log_probs=up_log_probs, up_entropy=up_entropy
    )  # fmt: skip
    np.testing.assert_allclose(out.log_probs.detach(), want.log_probs, atol=1e-5)
    np.testing.assert_allclose(out.entropy.detach(), want.entropy, atol=1e-5)
    assert ours.grad is not None and ours.grad.dtype == dtype
    np.testing.assert_allclose(ours.grad.double(), want.gradient, atol=2e-6, rtol=relative)
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


def test_memory_is_the_stated_number_of_bytes_whatever_the_vocabulary() -> None:
    """Forward: two blocks. Backward: the gradient of the logits and two blocks. And 64 bytes a token."""
    rows = 300
    for vocab in (2_000, 8_000):
        logits = torch.randn(rows, vocab).bfloat16().requires_grad_()
        labels = torch.arange(rows)
        out: list[LogProbs] = []
        stated = 2 * CPU_BLOCK_BYTES + 64 * rows

        def forward(logits: Tensor = logits, labels: Tensor = labels, out: list[LogProbs] = out) -> None:
            out.append(vocab_parallel_log_probs(
                logits, labels, tp_group=None, vocab_start=0, vocab_size=logits.shape[1], with_entropy=True
            ))  # fmt: skip

        assert CPU_BLOCK_BYTES < peak_bytes(forward) <= stated
        assert out[0].entropy is not None
        loss = (out[0].log_probs + out[0].entropy).sum()
        assert peak_bytes(loss.backward) <= stated + 2 * logits.numel()


def test_huge_logits_lose_no_precision() -> None:
    logits, labels, up_log_probs, up_entropy = make_case()
    for huge in (logits + 1e4, logits * 1e4, torch.full_like(logits, -3e4)):
        x = huge.clone().requires_grad_()
        out = single(x, labels, temperature=0.7, with_entropy=True)
        assert out.entropy is not None
        (out.log_probs * up_log_probs + out.entropy * up_entropy).sum().backward()
        want = exact(huge, labels, vocab=VOCAB, temperature=0.7, up_log_probs=up_log_probs, up_entropy=up_entropy)
        np.testing.assert_allclose(out.log_probs.detach(), want.log_probs, atol=1e-5, rtol=1e-6)
        np.testing.assert_allclose(out.entropy.detach(), want.entropy, atol=1e-5)
        assert x.grad is not None
        np.testing.assert_allclose(x.grad, want.gradient, atol=1e-5)


def test_logits_of_minus_infinity_have_no_probability_and_no_gradient() -> None:
    logits, _, up_log_probs, up_entropy = make_case()
    logits[:, :40] = -torch.inf
    labels = torch.full((ROWS,), 45)
    x = logits.clone().requires_grad_()
    out = single(x, labels, with_entropy=True)
    assert out.entropy is not None
    (out.log_probs * up_log_probs + out.entropy * up_entropy).sum().backward()
    want = exact(logits, labels, vocab=VOCAB, up_log_probs=up_log_probs, up_entropy=up_entropy)
    np.testing.assert_allclose(out.entropy.detach(), want.entropy, atol=1e-5)
    assert x.grad is not None
    np.testing.assert_allclose(x.grad, want.gradient, atol=1e-5)


def make_supports(labels: Tensor) -> tuple[list[list[int]], LabelSupport]:
    """Of growing size, the label at different places. Row 1 is the whole vocabulary, every third row unrestricted, and
    rows 4, 7, 10... lie within one half of the padded vocabulary."""
    generator = np.random.default_rng(5)
    supports: list[list[int]] = []
    for t, label in enumerate(labels.tolist()):
        others = [i for i in generator.permutation(VOCAB).tolist() if i != label]
        if t > 1:
            others = [i for i in others if t % 3 == 2 or (i < PADDED // 2) == (label < PADDED // 2)][:t]
        supports.append([] if t % 3 == 0 else [*others[: t // 2], label, *others[t // 2 :]])
    sizes = np.cumsum([len(row) for row in supports])
    ids = torch.tensor([i for row in supports for i in row], dtype=torch.int32)
    return supports, LabelSupport(ids, torch.tensor([0, *sizes]))


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_support_restricts_the_softmax_to_its_ids(dtype: torch.dtype, reuse: bool) -> None:
    logits, labels, up_log_probs, up_entropy = make_case(dtype)
    logits[4, :VOCAB] = torch.linspace(0, 200, VOCAB)  # what is outside row 4's support is far more probable
    supports, support = make_supports(labels)
    x = logits.clone().requires_grad_()
    out = single(x * 1, labels, temperature=0.7, with_entropy=True, support=support, reuse_logits=reuse)
    assert out.entropy is not None
    (out.log_probs * up_log_probs + out.entropy * up_entropy).sum().backward()
    want = exact(
        logits, labels, vocab=VOCAB, temperature=0.7, up_log_probs=up_log_probs, up_entropy=up_entropy,
        supports=supports,
    )  # fmt: skip
    np.testing.assert_allclose(out.log_probs.detach(), want.log_probs, atol=1e-5, rtol=1e-6)
    np.testing.assert_allclose(out.entropy.detach(), want.entropy, atol=1e-5)
    assert x.grad is not None
    relative = 1e-5 if dtype == torch.float32 else 1 / 128
    np.testing.assert_allclose(x.grad.double(), want.gradient, atol=1e-5, rtol=relative)


def test_a_label_outside_its_support_is_refused() -> None:
    logits, labels, _, _ = make_case()
    _, support = make_supports(labels)
    support.ids[support.offsets[5]] = support.ids[support.offsets[5] + 1]
    wrong = labels.clone()
    wrong[4] = next(i for i in range(VOCAB) if i not in support.ids[support.offsets[4] : support.offsets[5]])
    with pytest.raises(AssertionError, match="ids of its support"):
        single(logits, wrong, support=support)


def test_reused_logits_hold_the_gradient_and_autograd_guards_them() -> None:
    logits, labels, up_log_probs, _ = make_case()
    plain = logits.clone().requires_grad_()
    (single(plain, labels).log_probs * up_log_probs).sum().backward()
    leaf = logits.clone().requires_grad_()
    y = leaf * 1
    other = (y * y).sum()
    (single(y, labels, reuse_logits=True).log_probs * up_log_probs).sum().backward(retain_graph=True)
    assert leaf.grad is not None and plain.grad is not None and torch.equal(leaf.grad, plain.grad)
    assert torch.equal(y.detach(), plain.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
    with pytest.raises(AssertionError, match="leaf"):
        single(leaf, labels, reuse_logits=True)


def test_a_cpu_run_does_not_load_the_kernels() -> None:
    """They are the only module of ours that imports triton."""
    logits, labels, _, _ = make_case()
    single(logits, labels, with_entropy=True)
    assert "mslime.backends.megatron.log_probs.fused" not in sys.modules


def test_cuda_without_triton_says_once_what_it_misses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    module._triton_is_installed.cache_clear()

    class _FakeCudaLogits:
        is_cuda = True

        def stride(self, dim: int) -> int:
            return 1

    with caplog.at_level(logging.WARNING):
        found = [module.is_fused("auto", _FakeCudaLogits()) for _ in range(2)]  # type: ignore[arg-type]
    module._triton_is_installed.cache_clear()
    assert found == [False, False]
    assert [r.message for r in caplog.records] == [
        "triton is not installed: log-probs are computed chunk by chunk, slower and with more memory"
    ]


class SaysCuda(Tensor):
    """Labels that take the ways of CUDA, on a CPU."""

    is_cuda = True  # type: ignore[assignment]


class NothingIsRead(TorchDispatchMode):
    """No value of a tensor may be asked for, nor a shape that depends on one: on CUDA either waits for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waiting = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero")
        assert func.overloadpacket.__name__ not in waiting, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reuse", [False, True])
def test_on_cuda_nothing_about_a_support_waits_for_the_device(reuse: bool) -> None:
    """Rehearsed without one."""
    logits, labels, up_log_probs, up_entropy = make_case()
    supports, support = make_supports(labels)
    ours = logits.clone().requires_grad_()
    with NothingIsRead():
        with pytest.raises(AssertionError, match="waits"):
            bool(support.is_unrestricted().all())
        out = single(ours * 1, labels.as_subclass(SaysCuda), with_entropy=True, support=support, reuse_logits=reuse)
        assert out.entropy is not None
        (out.log_probs * up_log_probs + out.entropy * up_entropy).sum().backward()
    want = exact(
        logits, labels, vocab=VOCAB, up_log_probs=up_log_probs, up_entropy=up_entropy, supports=supports
    )  # fmt: skip
    np.testing.assert_allclose(ours.grad, want.gradient, atol=1e-5)
    wrong = labels.clone()
    wrong[4] = next(i for i in range(VOCAB) if i not in supports[4])
    with pytest.raises(RuntimeError, match="among the ids of its support"):
        single(logits, wrong.as_subclass(SaysCuda), support=support)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize("edges", [[0, PADDED // 2, PADDED], [0, VOCAB, PADDED]], ids=["halves", "padding alone"])
def test_two_ranks_give_the_float64_result(edges: list[int], supported: bool) -> None:
    """Some supports lie on one rank alone, where the other has no finite logit; a rank may hold only padding."""
    logits, labels, up_log_probs, up_entropy = make_case()
    supports, _ = make_supports(labels)
    want = exact(
        logits, labels, vocab=VOCAB, temperature=0.7, up_log_probs=up_log_probs, up_entropy=up_entropy,
        supports=supports if supported else None,
    )  # fmt: skip
    assert any(row and max(row) < 32 for row in supports) and any(row and min(row) >= 32 for row in supports)
    parts = run_ranks(partial(_rank, edges=edges, supported=supported), 2)
    for log_probs, entropy, _ in parts:
        np.testing.assert_allclose(log_probs, want.log_probs, atol=1e-5, rtol=1e-6)
        np.testing.assert_allclose(entropy, want.entropy, atol=1e-5)
    gradient = torch.cat([p[2] for p in parts], 1)
    np.testing.assert_allclose(gradient, want.gradient, atol=1e-5)
    assert gradient[:, VOCAB:].abs().max() == 0


def _rank(
    rank: int, world: int, init_method: str, edges: list[int], dtype: torch.dtype = torch.float32, **given: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs, entropy and the gradient of the columns that the rank holds; `edges` are where ranks begin."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world)
    logits, labels, up_log_probs, up_entropy = make_case(dtype)
    mine = logits[:, edges[rank] : edges[rank + 1]].clone().requires_grad_()
    support = make_supports(labels)[1] if given.pop("supported", False) else None
    result = vocab_parallel_log_probs(
        mine, labels, tp_group=dist.group.WORLD, vocab_start=edges[rank], vocab_size=VOCAB, temperature=0.7,
        with_entropy=True, support=support, **given,
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
    edges = [rank * PADDED // world for rank in range(world + 1)]
    parts = run_ranks(partial(_rank, edges=edges, dtype=dtype, chunk=8), world)
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
