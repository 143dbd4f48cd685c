"""What a step and a sync take beside the trainer's state, as steps at full size have shown (decision 14)."""

from __future__ import annotations

from mslime.config.layout import ParallelLayout
from mslime.config.megatron import Recompute
from mslime.convert.flops import read_widths
from mslime.weights.plan import Bucket, BufferSlot, Entry
from mslime_plugins.planner.activations import layer_elements, working_bytes
from mslime_plugins.planner.trainer import TrainerMemory, sync_bytes

GIB = 1 << 30
FULL = Recompute("full", "uniform", 1, frozenset())
DEEPSEEK = {
    "num_layers": 4, "hidden_size": 7168, "num_attention_heads": 128, "multi_latent_attention": True,
    "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "ffn_hidden_size": 18432, "num_moe_experts": 256, "moe_router_topk": 8, "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
}  # fmt: skip


def memory(working: int, logits: int) -> TrainerMemory:
    return TrainerMemory(1, 2, 3, activations=10, working=working, logits=logits, sync=0, reserve=0)


def bucket(sender: int = 0, members: tuple[int, ...] = (0,), in_order: bool = True) -> Bucket:
    return Bucket(
        0, 0, sender, members, "bfloat16", (BufferSlot(("w",), (1000,), 0),), (), (Entry("w", (1000,), 0),), in_order
    )


def test_logits_are_gone_when_the_backward_pass_comes_to_the_layers() -> None:
    assert memory(5, 7).step == 17 and memory(9, 7).step == 19


def test_gradients_of_all_local_experts_are_counted() -> None:
    """Measured at full size: 3.07 and 1.14 GiB."""
    widths = read_widths(DEEPSEEK, (0, 1, 2, 3))
    for layout, measured in ((ParallelLayout(tp=4, dp=2, ep=8), 3.072), (ParallelLayout(tp=8, dp=32, ep=32), 1.142)):
        found = working_bytes(widths, layout, (0,), FULL, 9216, 2) / GIB
        assert abs(found / measured - 1) < 0.05, (layout, found)


def test_layers_without_experts_hold_as_many_gradients_as_activations() -> None:
    widths, layout = read_widths(DEEPSEEK, ()), ParallelLayout(tp=4)
    each = layer_elements(widths, layout, 0)
    assert working_bytes(widths, layout, (0,), FULL, 10, 2) == int(20 * each + 20 * (each + 2 * 7168))


def fullest(*buckets: Bucket, neighbours: int, shares: bool = False) -> int:
    """Of the rank that needs most, in the second of two such rounds: a bucket is on its way then."""
    return max(sync_bytes([*buckets, *buckets], neighbours, shares).values())


def test_a_bucket_that_is_a_view_of_parameters_takes_nothing() -> None:
    assert fullest(bucket(), neighbours=2) == 0
    assert fullest(bucket(), neighbours=4) == fullest(bucket(), neighbours=0) == 4000
    assert fullest(bucket(in_order=False), neighbours=0) == 4000, "converted from where its shards lie"
    assert fullest(bucket(in_order=False), neighbours=2) == 4000
    assert fullest(bucket(), neighbours=2, shares=True) == 2000
    assert fullest(bucket(members=(0, 1)), neighbours=0) == 2000 + 4000


def test_a_sync_takes_what_its_fullest_rank_takes() -> None:
    found = sync_bytes([bucket(0, in_order=False), bucket(1, (1, 2))] * 2, neighbours=0)
    assert found == {0: 4000, 1: 6000, 2: 2000}, "who sends nothing packs its shards alone"
