"""Every parallel layout trains like one process: log-probs, loss, gradients, metrics and weights after three steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.megatron_parity import Case, compare, log_probs, make_shards, record
from tests.engines.megatron_ranks import run_ranks
from tests.fixtures.tiny_models import make_tiny_qwen3_dense

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP, EP, ETP = "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
DIST, FULL = {"use_distributed_optimizer": True}, {"recompute_granularity": "full"}

LAYOUTS = {
    "dp2": Case(2),
    "dp2_distributed_optimizer_overlapped": Case(
        2, {**DIST, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ),
    "tp2": Case(2, {TP: 2}),  # EP 1 and ETP 1 under TP 2: experts need allreduce=False
    "tp2_ep2": Case(2, {TP: 2, EP: 2}),
    "tp2_ep2_recompute": Case(2, {TP: 2, EP: 2, **FULL}),
    "tp2_dp2_ep2_etp1": Case(4, {TP: 2, EP: 2}),
    "tp2_dp2_ep2_etp2": Case(4, {TP: 2, EP: 2, ETP: 2}),
    "pp2": Case(2, {PP: 2}),
    "pp2_vpp2": Case(2, {PP: 2, VPP: 2}),
    "pp2_vpp2_recompute": Case(2, {PP: 2, VPP: 2, **FULL}),
    "cp2": Case(2, {CP: 2}),
    "cp2_tp2_ep2": Case(4, {CP: 2, TP: 2, EP: 2}),
    "pp2_tp2_ep2_distributed_optimizer": Case(4, {PP: 2, TP: 2, EP: 2, **DIST}),
    "unpacked": Case(1, packed=False),
    "unpacked_dp2": Case(2, packed=False),
    "unpacked_pp2_vpp2": Case(2, {PP: 2, VPP: 2}, packed=False),
    "unpacked_cp2": Case(2, {CP: 2}, packed=False),
    "unpacked_tp2_ep2": Case(2, {TP: 2, EP: 2}, packed=False),
}

FORCED = {"train": {"replay": "r3"}, "routes": (4, 8, 2)}  # random routes that no router would choose
REPLAYED = {
    "tp2_ep2_recompute": Case(2, {TP: 2, EP: 2, **FULL}, **FORCED),
    "pp2_vpp2_recompute": Case(2, {PP: 2, VPP: 2, **FULL}, **FORCED),
    "cp2_tp2_ep2": Case(4, {CP: 2, TP: 2, EP: 2}, **FORCED),
}
RECORDED = {
    "dp2_tp2_ep2": Case(4, {TP: 2, EP: 2}, train={"replay": "r2"}),
    "pp2_vpp2_recompute": Case(2, {PP: 2, VPP: 2, **FULL}, train={"replay": "r2"}),
}

BLOCKS = {"train": {"logits_mib": 0.002}}  # less than the logits of four tokens: blocks of 128 columns
BLOCKED = {
    "one_process_with_logits_of_small_micro_batches": Case(1, train={"logits_mib": 0.04}),
    "dp2_distributed_optimizer_overlapped": Case(
        2, {**DIST, "overlap_grad_reduce": True, "overlap_param_gather": True}, **BLOCKS
    ),
    "cp2_tp2_ep2": Case(4, {CP: 2, TP: 2, EP: 2}, **BLOCKS),
    "pp2_vpp2_tp2_ep2_unpacked": Case(4, {PP: 2, VPP: 2, TP: 2, EP: 2}, packed=False, **BLOCKS),
}


Recorded = tuple[Path, Path]
"""A checkpoint, and the single process's record on it."""


def recorded_by_one(checkpoint: Path, directory: Path, case: Case) -> Recorded:
    run_ranks(record, 1, checkpoint, case, directory / "record.pt")
    return checkpoint, directory / "record.pt"


@pytest.fixture(scope="module")
def moe(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return recorded_by_one(tiny_qwen3_moe, tmp_path_factory.mktemp("moe"), Case())


@pytest.fixture(scope="module")
def forced(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """With forced routes."""
    return recorded_by_one(tiny_qwen3_moe, tmp_path_factory.mktemp("forced"), Case(**FORCED))


@pytest.fixture(scope="module")
def recorded(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """With routes of a separate old-log-prob pass."""
    return recorded_by_one(tiny_qwen3_moe, tmp_path_factory.mktemp("recorded"), Case(train={"replay": "r2"}))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Of a dense checkpoint with tied embeddings, whose vocabulary needs padding."""
    directory = tmp_path_factory.mktemp("tied")
    model = make_tiny_qwen3_dense(directory / "model", tie_word_embeddings=True, vocab_size=321)
    return recorded_by_one(model, directory, Case())


def check(checkpoint: Path, path: Path, case: Case) -> None:
    """fp32 tolerance; Adam's first steps divide small gradients by themselves, hence the wider bound on weights."""
    for rank, found in enumerate(run_ranks(compare, case.world, checkpoint, case, path)):
        where = f"rank {rank}: {found}"
        assert found["log_probs"] < 2e-5, where
        assert found["loss"] < 1e-5, where
        assert (found["gradients"] is None) == bool(case.megatron.get("use_distributed_optimizer")), where
        assert found["gradients"] is None or found["gradients"] < 1e-5, where
        assert found["compared"] > 0, where
        assert found["weights"] < 1e-4, where
        for step, (mine, recorded) in enumerate(zip(found["metrics"], found["recorded"], strict=True)):
            assert mine.keys() == recorded.keys(), where
            for name in (name for name in recorded if not name.startswith("perf/")):
                assert mine[name] == pytest.approx(recorded[name], rel=2e-4, abs=2e-5), f"{name}, step {step}, {where}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_like_one_process(name: str, moe: Recorded) -> None:
    check(*moe, LAYOUTS[name])


@pytest.mark.parametrize("name", BLOCKED)
def test_log_probs_from_hidden_states_train_like_those_of_logits(name: str, moe: Recorded) -> None:
    check(*moe, BLOCKED[name])


@pytest.mark.nightly
def test_interleaved_stages_do_not_mix_up_micro_batches_of_equal_length(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """The silent form of the batched point-to-point trap: with equal shapes nothing crashes, gradients are wrong."""
    equal = {"lengths": (17,) * 8, "packed": False}
    check(*recorded_by_one(tiny_qwen3_moe, tmp_path, Case(**equal)), Case(2, {PP: 2, VPP: 2}, **equal))


@pytest.mark.parametrize("name", REPLAYED)
def test_forced_random_routes_train_like_one_process(name: str, forced: Recorded) -> None:
    check(*forced, REPLAYED[name])


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_routes_train_like_one_process(name: str, recorded: Recorded) -> None:
    check(*recorded, RECORDED[name])


TIED = {
    "pp2": Case(2, {PP: 2}),
    "tp2_pp2": Case(4, {TP: 2, PP: 2}),
    "blocks": Case(1, **BLOCKS),
    "tp2_pp2_blocks": Case(4, {TP: 2, PP: 2}, **BLOCKS),
}


@pytest.mark.parametrize("name", TIED)
def test_tied_embeddings_of_a_dense_model_train_like_one_process(name: str, tied: Recorded) -> None:
    check(*tied, TIED[name])


def test_log_probs_are_those_of_transformers(tiny_qwen3_moe: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    case = Case(2, {TP: 2, EP: 2})
    shard = make_shards(case, 1, 0, None)[0]
    found = run_ranks(log_probs, 2, tiny_qwen3_moe, case)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3_moe, dtype=torch.float32, attn_implementation="eager")
    for start, stop in shard.spans():
        tokens = torch.from_numpy(shard.tokens[start:stop]).long()[None]
        with torch.no_grad():
            logits = model(tokens).logits[0, :-1] / 0.8
        expected = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        for rank in range(2):
            assert torch.allclose(found[rank][start + 1 : stop], expected, rtol=0, atol=1e-5)
            assert found[rank][start] == 0
