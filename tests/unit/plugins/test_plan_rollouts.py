"""What `mslime plan` says that the tokens of a step weigh, against samples and shards of that size."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from mslime.data.packing import build_shards
from mslime.data.routes import Routes, Supports
from mslime.data.sample import Sample
from mslime_plugins.planner.plan import RunPlan, make_plan
from mslime_plugins.planner.plan_command import plan_config
from mslime_plugins.planner.rollouts import MEASURED_IDS, RolloutBytes, expected_ids
from tests.fixtures.full_size import CONFIGS, published_config

MODEL = "moonlight-16B-A3B"  # 27 layers, the first of which is dense; top-6 of 64 experts
GROUPS, SIZE, PROMPT, SAMPLED, TOP_K = 4, 4, 240, 400, 9
MEGATRON = {"pipeline_model_parallel_size": 2, "num_layers_in_last_pipeline_stage": 13, "expert_model_parallel_size": 2}


def planned(rollout: dict[str, Any], **sections: Any) -> RunPlan:
    rollout = {"groups_per_step": GROUPS, "group_size": SIZE, "max_response_tokens": SAMPLED, **rollout}
    values = {
        "model": {"path": str(CONFIGS / MODEL)},
        "data": {"max_prompt_tokens": PROMPT},
        "megatron": MEGATRON,
        "cluster": {"device": "cuda", "trainer_ranks": 4, **sections.pop("cluster", {})},
        "rollout": rollout,
        **sections,
    }
    return make_plan(plan_config(values), published_config(MODEL))


def weighed(rollout: dict[str, Any], **sections: Any) -> RolloutBytes:
    found = planned(rollout, **sections).rollouts
    assert found is not None
    return found


def sample(group: int, index: int, layers: tuple[int, ...], ids: int) -> Sample:
    """A full response whose tokens were drawn from `ids` ids each; 0: from the whole vocabulary."""
    rng = np.random.default_rng(group * SIZE + index)
    made = Sample.from_prompt(group, index, rng.integers(0, 1000, PROMPT).tolist())
    made.routes = Routes.empty(layers, 6, 64)
    drawn = Supports.of_sizes(np.tile(np.arange(ids), SAMPLED).astype(np.int32), np.full(SAMPLED, ids)) if ids else None
    made.extend(
        rng.integers(0, max(ids, 1), SAMPLED).tolist(),
        log_probs=np.full(SAMPLED, -1.0, np.float32),
        versions=[(0, 0, SAMPLED)],
        routes=rng.integers(0, 64, (PROMPT + SAMPLED - 1, len(layers), 6)),
        supports=drawn,
    )
    made.reward = 1.0
    return made


@pytest.mark.parametrize("ids", [0, TOP_K])
def test_shards_and_samples_weigh_what_the_plan_says(ids: int) -> None:
    plan = planned({"top_k": ids} if ids else {}, train={"replay": "r3"})
    found, layout, moe = plan.rollouts, plan.layout, plan.fields.moe_layer_ids
    assert found is not None and (found.responses, found.tokens) == (GROUPS * SIZE, GROUPS * SIZE * (PROMPT + SAMPLED))
    samples = [sample(group, index, moe, ids) for group in range(GROUPS) for index in range(SIZE)]

    held = sum(len(pickle.dumps(s, 5)) for s in samples)
    assert held * 2 == pytest.approx(found.held.total, rel=0.06), "one step is made while another one is trained"

    (shards,) = build_shards(samples, [1.0] * len(samples), layout, 4096, version=0)
    stages = [range(14), range(14, 27)]
    stored = [
        [len(pickle.dumps(shard.stage_slice([i for i in stage if i in moe], has_logits=stage.stop == 27), 5))
         for shard in shards]
        for stage in stages
    ]  # fmt: skip
    assert sum(map(sum, stored)) == pytest.approx(found.store.total, rel=0.03)
    assert found.store.supports == (GROUPS * SIZE * (8 * (PROMPT + SAMPLED) + 4 * SAMPLED * ids) if ids else 0)
    # Four ranks on a machine: two data-parallel ranks of each of two stages; the larger stage is counted for both.
    assert max(map(sum, stored)) < found.machine == plan.host.shards <= found.store.total


def test_several_managers_send_groups_through_the_store_and_older_groups_are_held_longer() -> None:
    engines = {"sglang": {"num_engines": 2}}
    one, two = weighed({"top_k": 9}, **engines), weighed({"top_k": 9, "managers": 2}, **engines)
    assert one.held == two.held and two.store.supports - one.store.supports == one.held.supports // 2
    ahead = weighed({"top_k": 9, "max_staleness": 3})
    assert ahead.held.total == one.held.total * 5 // 2, "four steps may be begun, and one is in training"


def test_engines_of_others_send_wide_routes() -> None:
    wide = weighed({}, train={"replay": "r3"}, sglang={"urls": ["http://10.0.0.1:30000"]})
    narrow = weighed({}, train={"replay": "r3"})
    assert wide.answers.routes == pytest.approx(4 * narrow.answers.routes, rel=1e-6)
    assert weighed({}, train={"replay": "off"}).answers.routes == 0


@pytest.mark.slow
def test_supports_are_expected_to_be_as_large_as_measured_and_never_beyond_their_bounds() -> None:
    def ids(**draw: Any) -> float:
        return weighed(draw).support_ids

    for top_p, measured in MEASURED_IDS.items():
        assert ids(top_p=top_p, top_k=4096) == pytest.approx(measured)
    assert ids(top_p=0.9, top_k=20) == 20 and ids(top_k=300) == 300 and ids() == 0
    assert MEASURED_IDS[0.9] < ids(top_p=0.92, top_k=4096) < MEASURED_IDS[0.95]
    assert MEASURED_IDS[0.99] < ids(top_p=0.995, top_k=4096) < 4096
    assert ids(min_p=0.05, top_k=4096) == 20
    assert weighed({"top_p": 0.9, "top_k": 4096}).most_ids == 4096
    assert expected_ids(plan_config({"model": {"path": "."}}).rollout) == 0


def test_a_run_whose_supports_do_not_fit_into_host_memory_is_refused_with_a_way_out() -> None:
    large = {"groups_per_step": 512, "group_size": 16, "max_response_tokens": 16384, "top_k": 4096}
    plan = planned(large, cluster={"host_memory_gb": 1024})
    assert plan.verdict == "does not fit"
    problem = next(p for p in plan.problems if p.where.startswith("machine of the rollout managers"))
    assert problem.component == "supports" and "rollout.top_p (1)" in problem.hint
    trainer = next(p for p in plan.problems if p.where.startswith("trainer machine"))
    assert trainer.component == "shards" and "rollout.groups_per_step (512)" in trainer.hint
    fewer = planned(large | {"top_p": 0.9}, cluster={"host_memory_gb": 1024})
    assert not any("host memory" in p.where for p in fewer.problems)


def test_supervised_training_has_no_rollouts() -> None:
    assert planned({}, train={"task": "sft"}).rollouts is None
