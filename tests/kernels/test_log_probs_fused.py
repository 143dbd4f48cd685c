"""The fused log-probs against float64 NumPy, in Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mslime.backends.megatron.log_probs.blocks import hidden_log_probs
from mslime.backends.megatron.log_probs.vocab_parallel import LogProbs, vocab_parallel_log_probs
from mslime.backends.megatron.log_probs.vocab_shard import LabelSupport
from tests.fixtures.log_probs import exact, peak_bytes

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None,
    reason="needs triton and TRITON_INTERPRET=1",
)
BLOCK = 64
ABSOLUTE = {torch.float32: 2e-6, torch.bfloat16: 1e-4, torch.float16: 1e-4}
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 1 / 128, torch.float16: 1 / 1024}


@pytest.fixture(autouse=True, scope="module")
def _small_blocks() -> None:
    """So that small vocabularies have several blocks."""
    from mslime.backends.megatron.log_probs import fused

    fused.BLOCK = BLOCK


def fused(logits: Tensor, labels: Tensor, vocab: int, **kwargs: object) -> LogProbs:
    return vocab_parallel_log_probs(
        logits, labels, tp_group=None, vocab_start=0, vocab_size=vocab, way="fused", **kwargs  # type: ignore[arg-type]
    )  # fmt: skip


def make(rows: int, vocab: int, width: int, dtype: torch.dtype, scale: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with huge padding columns, labels, two upstream gradients."""
    generator = torch.Generator().manual_seed(rows * 1000 + vocab)
    logits = torch.randn(rows, width, generator=generator) * scale
    logits[:, vocab:] = 100.0
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    if rows:
        labels[0], labels[-1] = vocab - 1, 0
    return logits.to(dtype), labels, torch.randn(2, rows, generator=generator)


def compare(
    logits: Tensor, labels: Tensor, ups: Tensor, vocab: int, temperature: float, *, g: bool = True, h: bool = True
) -> None:
    x = logits.clone().requires_grad_()
    out = fused(x, labels, vocab, temperature=temperature, with_entropy=True)
    assert out.entropy is not None and out.log_probs.dtype == out.entropy.dtype == torch.float32
    used = [out.log_probs] * g + [out.entropy] * h
    torch.autograd.backward(used, [ups[0]] * g + [ups[1]] * h)
    want = exact(
        logits, labels, vocab=vocab, temperature=temperature,
        up_log_probs=ups[0] if g else None, up_entropy=ups[1] if h else None,
    )  # fmt: skip
    assert x.grad is not None
    np.testing.assert_allclose(out.log_probs.detach(), want.log_probs, atol=1e-5, rtol=1e-6)
    np.testing.assert_allclose(out.entropy.detach(), want.entropy, atol=1e-5, rtol=1e-6)
    np.testing.assert_allclose(
        x.grad.double(), want.gradient, atol=ABSOLUTE[logits.dtype] * 4, rtol=RELATIVE[logits.dtype]
    )
    assert (x.grad[:, vocab:] == 0).all(), "padding columns get no gradient"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_hidden_states_use_the_kernels_as_they_use_chunks(dtype: torch.dtype) -> None:
    """Three blocks of 128 ids or fewer, with padding behind the last; a third of the rows has a support."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, 16, generator=generator).to(dtype)
    weight = torch.randn(320, 16, generator=generator).to(dtype)
    labels = torch.randint(0, 300, (9,), generator=generator)
    rows = [[] if t % 3 else sorted({int(label), 5, 140, 290}) for t, label in enumerate(labels)]
    offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
    support = LabelSupport(torch.tensor([i for row in rows for i in row]), offsets)
    ups = torch.randn(2, 9, generator=generator)
    found = []
    for way in ("fused", "chunked"):
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = hidden_log_probs(
            *inputs, labels, tp_group=None, vocab_start=0, vocab_size=300, most_bytes=1, temperature=0.7,
            with_entropy=True, support=support, way=way,
        )  # fmt: skip
        assert out.entropy is not None
        torch.autograd.backward([out.log_probs, out.entropy], [ups[0], ups[1]])
        found.append([out.log_probs.detach(), out.entropy.detach(), *(x.grad for x in inputs)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=RELATIVE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab", "width"), [(1, 1), (63, 64), (64, 64), (65, 65), (128, 192), (130, 256), (200, 200)])
def test_values_and_gradients_match_float64_at_every_border_of_blocks(
    vocab: int, width: int, dtype: torch.dtype
) -> None:
    for rows in (1, 3):
        compare(*make(rows, vocab, width, dtype), vocab, 1.0)


@pytest.mark.parametrize("temperature", [0.3, 1.7])
@pytest.mark.parametrize(("g", "h"), [(True, False), (False, True), (True, True)])
def test_each_gradient_alone_and_both_match_float64_at_any_temperature(temperature: float, g: bool, h: bool) -> None:
    compare(*make(5, 130, 140, torch.float32), 130, temperature, g=g, h=h)


def test_equal_logits_are_the_uniform_distribution() -> None:
    labels = torch.tensor([0, 129])
    for value in (0.0, -3e4, 3e4):
        out = fused(torch.full((2, 130), value), labels, 130, temperature=0.5, with_entropy=True)
        assert out.entropy is not None
        np.testing.assert_allclose(out.log_probs, -np.log(130), rtol=1e-6)
        np.testing.assert_allclose(out.entropy, np.log(130), rtol=1e-6)


def test_huge_logits_lose_no_precision() -> None:
    logits, labels, ups = make(4, 130, 130, torch.float32, scale=1.0)
    compare(logits + 1e4, labels, ups, 130, 0.7)
    compare(logits * 1e4, labels, ups, 130, 0.7)


def test_logits_of_minus_infinity_have_no_probability_and_no_gradient() -> None:
    logits, labels, ups = make(3, 130, 130, torch.float32)
    labels[:] = torch.tensor([100, 70, 129])
    logits[:, :65] = -torch.inf  # a whole block, and one more
    compare(logits, labels, ups, 130, 1.0)


def test_a_logit_that_is_no_number_is_not_hidden() -> None:
    logits, labels, _ = make(3, 130, 130, torch.float32)
    logits[1, 80] = torch.nan
    out = fused(logits, labels, 130, with_entropy=True)
    assert out.entropy is not None
    assert out.log_probs.isnan().tolist() == out.entropy.isnan().tolist() == [False, True, False]


def test_no_rows_is_not_a_special_case() -> None:
    x = torch.zeros(0, 130, requires_grad=True)
    out = fused(x, torch.zeros(0, dtype=torch.int64), 130, with_entropy=True)
    out.log_probs.sum().backward()
    assert out.log_probs.shape == (0,) and x.grad is not None and x.grad.shape == (0, 130)


def test_rows_without_an_upstream_gradient_get_zeros() -> None:
    logits, labels, ups = make(6, 130, 140, torch.float32)
    ups[:, ::2] = 0
    compare(logits, labels, ups, 130, 1.0)


def test_rows_that_are_not_adjacent_in_memory() -> None:
    logits, labels, ups = make(6, 130, 300, torch.float32)
    wide = logits.clone().requires_grad_()
    out = fused(wide[:, :140], labels, 130)
    (out.log_probs * ups[0]).sum().backward()
    want = exact(logits[:, :140], labels, vocab=130, up_log_probs=ups[0])
    np.testing.assert_allclose(out.log_probs.detach(), want.log_probs, atol=1e-5)
    assert wide.grad is not None
    np.testing.assert_allclose(wide.grad[:, :140], want.gradient, atol=1e-5)


@pytest.mark.parametrize("reuse", [False, True])
def test_the_gradient_over_the_logits_is_the_same(reuse: bool) -> None:
    logits, labels, ups = make(5, 130, 140, torch.float32)
    x = logits.clone().requires_grad_()
    y = x * 1
    storage = y.data_ptr()
    received: list[int] = []
    y.register_hook(lambda grad: received.append(grad.data_ptr()))
    (fused(y, labels, 130, reuse_logits=reuse).log_probs * ups[0]).sum().backward()
    assert (received == [storage]) == reuse
    want = exact(logits, labels, vocab=130, up_log_probs=ups[0])
    assert x.grad is not None
    np.testing.assert_allclose(x.grad, want.gradient, atol=1e-5)


def test_a_kernel_that_overwrites_the_logits_is_noticed_by_autograd() -> None:
    logits, labels, _ = make(5, 130, 140, torch.float32)
    y = logits.requires_grad_() * 1
    other = (y * y).sum()
    fused(y, labels, 130, reuse_logits=True).log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reuse", [False, True])
def test_a_support_restricts_the_softmax(dtype: torch.dtype, reuse: bool) -> None:
    logits, labels, ups = make(4, 130, 140, dtype)
    supports = [[], [int(labels[1]), 3, 77], [int(labels[2])], [5, 128, int(labels[3]), 64]]
    ids = torch.tensor([i for s in supports for i in s])
    offsets = torch.tensor([0, *np.cumsum([len(s) for s in supports])])
    x = logits.clone().requires_grad_()
    out = fused(x * 1, labels, 130, with_entropy=True, support=LabelSupport(ids, offsets), reuse_logits=reuse)
    assert out.entropy is not None
    (out.log_probs * ups[0] + out.entropy * ups[1]).sum().backward()
    want = exact(logits, labels, vocab=130, supports=supports, up_log_probs=ups[0], up_entropy=ups[1])
    np.testing.assert_allclose(out.log_probs.detach(), want.log_probs, atol=1e-5)
    np.testing.assert_allclose(out.entropy.detach(), want.entropy, atol=1e-5)
    assert x.grad is not None
    np.testing.assert_allclose(x.grad.double(), want.gradient, atol=4 * ABSOLUTE[dtype], rtol=RELATIVE[dtype])


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 4), vocab=st.integers(1, 200), padding=st.integers(0, 70),
    temperature=st.floats(0.2, 3), scale=st.sampled_from([0.0, 1.0, 30.0]),
)  # fmt: skip
def test_both_ways_agree(rows: int, vocab: int, padding: int, temperature: float, scale: float) -> None:
    logits, labels, ups = make(rows, vocab, vocab + padding, torch.float32, scale)
    found = []
    for way in ("chunked", "fused"):
        x = logits.clone().requires_grad_()
        out = vocab_parallel_log_probs(
            x, labels, tp_group=None, vocab_start=0, vocab_size=vocab, temperature=temperature, with_entropy=True,
            chunk=2, way=way,
        )  # fmt: skip
        assert out.entropy is not None
        (out.log_probs * ups[0] + out.entropy * ups[1]).sum().backward()
        found.append((out.log_probs.detach(), out.entropy.detach(), x.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


def test_a_call_takes_at_most_64_bytes_a_token_beyond_the_gradient() -> None:
    rows, vocab = 10, 300
    logits, labels, ups = make(rows, vocab, vocab, torch.bfloat16)
    logits.requires_grad_()
    fused(logits[:1], labels[:1], vocab)  # what the first call of a process allocates for good
    out: list[LogProbs] = []
    forward = peak_bytes(lambda: out.append(fused(logits, labels, vocab, with_entropy=True)))
    assert out[0].entropy is not None
    loss = (out[0].log_probs * ups[0] + out[0].entropy * ups[1]).sum()
    backward = peak_bytes(loss.backward)
    assert forward <= 64 * rows and backward <= logits.numel() * 2 + 64 * rows, (forward, backward)


class _FakeGroup:
    """Ranks as threads of this process that take turns: one runs until a collective, because Triton's interpreter is
    not made for threads. Replaces torch.distributed.all_reduce."""

    def __init__(self, world: int) -> None:
        self.world, self.turn, self.meeting = world, threading.Lock(), threading.Barrier(world, timeout=60)
        self.parts: dict[int, Tensor] = {}

    def size(self) -> int:
        return self.world

    def all_reduce(self, tensor: Tensor, op: object = dist.ReduceOp.SUM, group: object = None) -> None:
        assert group is self
        self.parts[threading.get_ident()] = tensor
        self.turn.release()
        self.meeting.wait()
        parts = torch.stack(list(self.parts.values()))
        self.meeting.wait()
        tensor.copy_(parts.amax(0) if op == dist.ReduceOp.MAX else parts.sum(0))
        self.turn.acquire()

    def run(self, work: Callable[[int], object]) -> list[object]:
        def rank(i: int) -> object:
            with self.turn:
                return work(i)

        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(rank, range(self.world)))


@pytest.mark.parametrize("width", [80, 160], ids=["four ranks, one padding only", "two ranks"])
def test_ranks_that_share_the_vocabulary_match_float64(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, ups = make(7, 230, 320, torch.float32)
    want = exact(logits, labels, vocab=230, temperature=0.7, up_log_probs=ups[0], up_entropy=ups[1])
    group = _FakeGroup(320 // width)
    monkeypatch.setattr(dist, "all_reduce", group.all_reduce)
    parts = [logits[:, i : i + width].clone().requires_grad_() for i in range(0, 320, width)]

    def rank(i: int) -> LogProbs:
        return vocab_parallel_log_probs(
            parts[i], labels, tp_group=group, vocab_start=i * width, vocab_size=230, temperature=0.7,  # type: ignore[arg-type]
            with_entropy=True, way="fused",
        )  # fmt: skip

    for out in group.run(rank):
        assert isinstance(out, LogProbs) and out.entropy is not None
        np.testing.assert_allclose(out.log_probs.detach(), want.log_probs, atol=1e-5)
        np.testing.assert_allclose(out.entropy.detach(), want.entropy, atol=1e-5)
        (out.log_probs * ups[0] + out.entropy * ups[1]).sum().backward()
    np.testing.assert_allclose(torch.cat([p.grad for p in parts], 1), want.gradient, atol=1e-5)  # type: ignore[arg-type]


def test_every_variant_compiles_for_hopper_without_spilling(tmp_path: Path) -> None:
    """The interpreter accepts what the compiler does not; this is the compiler, to the last step before a GPU."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for_hopper"],
        capture_output=True, text=True, timeout=200, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.rpartition(": ")[2].split() for line in done.stdout.splitlines()]
    assert len(lines) == 6
    for registers, spilled, *rest in lines:
        assert int(registers) <= 64 and int(spilled) == 0 and "16-byte" in rest
