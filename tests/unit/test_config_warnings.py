"""`mslime check` warns of combinations that mean nothing, and is silent about usual ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mslime.config.algorithm import POLICY_LOSSES
from mslime.config.engines import SGLANG_TESTED, SGLangConfig
from mslime.config.megatron import MEGATRON_TESTED, MegatronConfig
from mslime.config.warnings import warnings
from tests.fixtures.least import least, refused


def advice(algorithm: dict[str, Any], staleness: int = 0, steps: int = 1, **train: Any) -> list[str]:
    """Warnings of a run with these settings."""
    return warnings(least(
        algorithm=algorithm, rollout={"max_staleness": staleness},
        train={"optimizer_steps_per_rollout": steps, **train},
    ))  # fmt: skip


@pytest.mark.parametrize(("algorithm", "staleness", "steps"), [
    ({}, 0, 1), ({}, 4, 2), ({"loss": "gspo"}, 0, 4), ({"loss": "dppo_tv"}, 4, 1), ({"loss": "ipo"}, 0, 1),
    ({"loss": "cispo", "correction": {"preset": "bypass"}}, 4, 1), ({"correction": {"preset": "opsm"}}, 0, 4),
    ({"correction": {"preset": "opsm"}}, 2, 1), ({"correction": {"preset": "areal_decoupled", "max_age": 2}}, 4, 1),
    ({"correction": {"preset": "tis", "level": "segment"}}, 1, 1), ({"kl_coef": 0.1}, 0, 1),
    ({"kl_coef": 0.1, "kl_type": "k1", "kl_in": "reward"}, 0, 1),
    ({"kl_coef": 0.1, "kl_type": "k1", "kl_unbiased": True}, 0, 1), ({"loss": "reinforce"}, 0, 1),
    ({"clip_dual": 3.0}, 0, 2),
])  # fmt: skip
def test_usual_runs_are_not_warned_of(algorithm: dict[str, Any], staleness: int, steps: int) -> None:
    assert advice(algorithm, staleness, steps) == []


@pytest.mark.parametrize(("algorithm", "staleness", "steps", "said"), [
    ({"loss": "gspo"}, 0, 1, "the ratio is 1"),
    ({"loss": "dppo_tv", "correction": {"preset": "tis"}}, 2, 1, "around the policy that sampled"),
    ({"loss": "reinforce", "correction": {"preset": "bypass"}}, 2, 1, "no bound"),
    ({"loss": "reinforce"}, 0, 4, "no bound"),
    ({"correction": {"preset": "mis", "high": None}}, 2, 1, "no upper bound"),
    ({"correction": {"preset": "none"}}, 2, 1, "as if the current policy"),
    ({"correction": {"preset": "opsm"}}, 0, 1, "numerical difference"),
    ({"correction": {"preset": "tis", "reference": "rollout"}}, 2, 1, "no effect with reference rollout"),
    ({"correction": {"preset": "none", "max_age": 2}}, 2, 1, "never binds"),
    ({"correction": {"preset": "tis", "level": "segment"}}, 0, 1, "one weight version"),
    ({"kl_coef": 0.1, "kl_type": "k1"}, 0, 1, "zero on average"),
    ({"kl_coef": 0.1, "kl_in": "reward", "kl_unbiased": True}, 0, 1, "nothing is differentiated"),
    ({"loss": "sapo", "clip_dual": 3.0, "correction": {"preset": "bypass"}}, 2, 1, "clip_dual has no effect"),
    ({"kimi": {"tau": 1.0}}, 0, 1, "algorithm.kimi has no effect"),
    ({"loss": "gspo", "loss_aggregation": "token"}, 0, 4, "once per token"),
])  # fmt: skip
def test_what_means_nothing_is_warned_of_with_the_reason(
    algorithm: dict[str, Any], staleness: int, steps: int, said: str
) -> None:
    found = advice(algorithm, staleness, steps)
    assert len([text for text in found if said in text]) == 1, found


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algorithm": {"gamma": 0.99}}, "algorithm.gamma has no effect"),
        ({"algorithm": {"advantage": "reinforce_pp", "gae_lambda": 0.9}}, "algorithm.gae_lambda has no effect"),
        ({"algorithm": {"advantage": "rloo", "normalise_std": False}}, "algorithm.normalise_std has no effect"),
        ({"algorithm": {"advantage": "reinforce_pp", "whiten": False}}, "every response becomes more likely"),
        (
            {"algorithm": {"advantage": "gae"}, "rollout": {"dynamic_filter": "zero_variance"}},
            "zero_variance with gae: groups of equal rewards",
        ),
        (
            {
                "algorithm": {"opd_coef": 0.1},
                "model": {"path": "unused", "teacher_path": "teacher"},
                "rollout": {"dynamic_filter": "zero_variance"},
            },
            "zero_variance with opd_coef",
        ),
        ({"train": {"replay": "r2", "replay_max_age": 1}}, "train.replay_max_age has no effect with train.replay r2"),
        ({"algorithm": {"clip_dual": 3.0}}, "clip_dual 3 never binds"),
        ({"rollout": {"max_staleness": 1, "over_sampling": 1.5}}, "over_sampling 1.5 has no effect"),
        ({"rollout": {"over_sampling": 1.5}}, "masked a step later"),
        ({"rollout": {"on_stale": "keep", "over_sampling": 1.5}}, "the run is not on-policy"),
        ({"algorithm": {"advantage": "gae"}, "critic": {"value_clip": 0.5}}, "critic.value_clip 0.5 never binds"),
        ({"algorithm": {"loss": "reinforce", "clip_high": 0.3}}, "algorithm.clip_high has no effect"),
        ({"model": {"path": "unused", "reference_path": "reference"}}, "no reference policy is loaded"),
        ({"algorithm": {"correction": {"preset": "tis", "token_cap": 3.0}}}, "token_cap has no effect"),
        ({"algorithm": {"correction": {"preset": "tis", "old_weight": 0.5}}}, "no token is too old"),
        ({"algorithm": {"correction": {"preset": "none", "normalise": True}}}, "every weight is 1"),
        ({"weights": {"transport": "shm", "directory": "there"}}, "weights.directory has no effect"),
        ({"weights": {"transport": "disk"}, "sglang": {"urls": ["http://a:1"]}}, "is rejected"),
        ({"weights": {"transport": "delta"}, "sglang": {"urls": ["http://a:1"]}}, "is rejected"),
        ({"weights": {"transport": "relay"}, "sglang": {"urls": ["http://a:1"]}}, "engine_plugin/path_entry"),
        ({"weights": {"transport": "delta", "loader": "model"}}, "every bucket will be sent"),
        ({"weights": {"delta_over": "broadcast"}}, "weights.delta_over has no effect"),
        (
            {"cluster": {"placement": "colocated", "restarts": 2}, "weights": {"transport": "shm"}},
            "cluster.restarts 2 has no effect: engines share",
        ),
        ({"weights": {"mooncake_over": "tcp"}}, "weights.mooncake_over has no effect"),
        ({"weights": {"transport": "mooncake", "directory": "there"}}, "weights.directory has no effect"),
        (
            {
                "cluster": {"placement": "colocated", "device": "cuda"},
                "weights": {"transport": "checkpoint_engine", "directory": "there"},
            },
            "weights.directory has no effect",
        ),
        ({"weights": {"transport": "mooncake"}, "sglang": {"urls": ["http://a:1"]}}, "is rejected"),
        (
            {"weights": {"transport": "delta", "delta_over": "broadcast", "directory": "there"}},
            "weights.directory has no effect: weights.delta_over is broadcast",
        ),
    ],
)
def test_what_has_no_effect_is_named(sections: dict[str, Any], said: str) -> None:
    found = warnings(least(**sections))
    assert len(found) == 1 and said in found[0], found


@pytest.mark.parametrize("shaping", [{"overlong": {"buffer_tokens": 9}}, {"repetition": {"ngram": 20}}])
def test_rewards_that_a_rollout_function_sets_are_not_shaped(shaping: dict[str, Any]) -> None:
    (said,) = warnings(least(reward=shaping, rollout={"function": "mine:play"}))
    assert said.startswith(f"reward.{next(iter(shaping))} has no effect on rewards that rollout.function mine:play")
    assert warnings(least(reward=shaping)) == []


@pytest.mark.parametrize("sections", [
    {"algorithm": {"advantage": "gae", "gamma": 0.99, "gae_lambda": 0.95}},
    {"algorithm": {"advantage": "gae"}, "critic": {"value_clip": 0.5}, "train": {"optimizer_steps_per_rollout": 2}},
    {"algorithm": {"advantage": "reinforce_pp", "gamma": 0.99}, "rollout": {"group_size": 1}},
    {"algorithm": {"normalise_std": False, "loss_aggregation": "constant"}},
    {"algorithm": {"correction": {"preset": "mis", "kept_weight": "token", "token_cap": 3.0}}},
    {"algorithm": {"kl_coef": 0.1}, "model": {"path": "unused", "reference_path": "reference"}},
    {"rollout": {"dynamic_filter": "zero_variance"}},
    {"weights": {"transport": "disk", "directory": "there"}},
    {"weights": {"transport": "delta", "directory": "there"}},
    {"weights": {"transport": "delta", "delta_over": "broadcast"}},
    {"weights": {"transport": "shm"}},
    {"cluster": {"restarts": 2}},
    {"cluster": {"placement": "colocated", "restarts": 0}, "weights": {"transport": "shm"}},
    {"weights": {"transport": "mooncake", "mooncake_over": "tcp"}},
])  # fmt: skip
def test_the_same_settings_where_they_act_are_not_warned_of(sections: dict[str, Any]) -> None:
    assert warnings(least(**sections)) == []


def test_a_filter_that_drops_every_group_of_one_is_refused() -> None:
    one = {"group_size": 1, "dynamic_filter": "zero_variance"}
    assert "no step would be complete" in refused(algorithm={"advantage": "reinforce_pp"}, rollout=one).rule


@pytest.mark.parametrize("loss", [name for name, loss in POLICY_LOSSES.items() if not loss.unbounded])
def test_the_defaults_of_a_loss_are_not_warned_of_off_policy(loss: str) -> None:
    assert advice({"loss": loss}, staleness=4, steps=4) == []


def test_supervised_runs_have_no_algorithm_to_warn_of() -> None:
    assert advice({"correction": {"preset": "opsm"}}, task="sft") == []


@pytest.mark.parametrize("task", ["rl", "sft"])
def test_engine_fields_that_nothing_of_ours_sets_are_named_in_one_warning(task: str) -> None:
    tested = {"megatron": {"moe_permute_fusion": True}, "sglang": {"attention_backend": "fa3"}}
    assert warnings(least(train={"task": task}, **tested)) == []
    given = {"megatron": {"bucket_size": 9, **tested["megatron"]}, "sglang": {"page_size": 16, **tested["sglang"]}}
    (said,) = warnings(least(train={"task": task}, **given))
    assert said.startswith("megatron.bucket_size, sglang.page_size: passed on untested")


def test_an_engine_field_is_tested_where_a_launch_script_or_a_test_with_a_real_engine_sets_it() -> None:
    root = Path(__file__).parents[2]
    layouts = [*(root / "scripts/models").glob("*.sh"), root / "scripts/lib/layouts.sh"]
    scripts = "".join(path.read_text() for path in layouts)
    given = {
        (section, name.replace("-", "_")) for section, name in re.findall(r"--(megatron|sglang)\.([\w-]+)", scripts)
    }
    own = {"megatron": MegatronConfig.model_fields, "sglang": SGLangConfig.model_fields}
    by_scripts = {section: {n for s, n in given if s == section} - set(fields) for section, fields in own.items()}
    assert by_scripts["megatron"] <= MEGATRON_TESTED and by_scripts["sglang"] <= SGLANG_TESTED
    real = [path for name in ("engines", "e2e", "rehearsal") for path in (root / "tests" / name).glob("*.py")]
    text = "".join(path.read_text() for path in [*real, root / "mslime/backends/sglang/flags.py"])
    for field in MEGATRON_TESTED | SGLANG_TESTED:
        assert field in by_scripts["megatron"] | by_scripts["sglang"] or f'"{field}"' in text, field
