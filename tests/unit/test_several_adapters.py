"""Settings of a run of several adapters: each has a run of its own, and what they share is refused by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from mslime.config.errors import ConfigError
from mslime.config.loader import build, merge, parse_flags
from mslime.config.lora import BASE, OWN_SECTIONS, SHARED, directories
from mslime.config.resolved import ServedLora, engine_spec, policy_spec
from mslime.config.schema import AdapterConfig, RunConfig
from mslime.config.settings import all_settings
from mslime.run.adapter_session import with_base

VALUES: dict[str, Any] = {
    "name": "several",
    "model": {"path": "m"},
    "data": {"prompts": ["all.jsonl"], "label_key": "answer"},
    "lora": {"rank": 4, "sync": "adapter"},
    "algorithm": {"kl_coef": 0.1},
    "adapters": [
        {"name": "maths", "train": {"lr": 1e-3, "num_steps": 7}},
        {
            "name": "code-v2",
            "weight": 2,
            "seed": 5,
            "data": {"prompts": "code.jsonl"},
            "rollout": {"max_staleness": 2, "pause_mode": "in_place"},
            "algorithm": {"loss": "gspo", "correction": {"preset": "tis"}},
            "lora": {"rank": 8, "targets": ["attention"]},
        },
    ],
}


def config(**sections: Any) -> RunConfig:
    return build({**VALUES, **sections})


def test_an_adapters_run_has_the_runs_settings_and_its_own() -> None:
    maths, code = config().adapter_runs.values()
    assert (maths.name, maths.train.lr, maths.train.num_steps, maths.seed) == ("maths", 1e-3, 7, 1234)
    assert (code.train.lr, code.train.num_steps, code.seed) == (1e-6, 100, 5)
    assert (maths.lora.rank, code.lora.rank, code.lora.targets) == (4, 8, ("attention",))
    assert code.data.prompts == ["code.jsonl"] and code.data.label_key == "answer"
    assert maths.algorithm.kl_coef == code.algorithm.kl_coef == 0.1
    assert all(run.lora.sync == "adapter" and run.syncs_adapters and not run.adapters for run in (maths, code))
    assert maths.run_dir == Path("outputs/several/adapters/maths")


def test_an_adapters_run_is_that_of_the_same_settings_alone() -> None:
    """Defaults that follow from what is given, as those of a loss, are filled in after the merge and not before."""
    code = config().adapter_runs["code-v2"]
    alone = {k: v for k, v in VALUES.items() if k != "adapters"} | {"name": "code-v2", "seed": 5}
    alone["output_dir"] = "outputs/several/adapters"
    for section in ("data", "rollout", "algorithm", "lora"):
        alone[section] = alone.get(section, {}) | VALUES["adapters"][1][section]
    assert code.as_dict() == build(alone).as_dict()
    clipped = {"algorithm": {"kl_coef": 0.1, "clip_low": 0.3}}
    assert config(**clipped).adapter_runs["maths"].algorithm.clip_low == 0.3


def test_an_entry_changes_one_setting_of_a_section_within_a_section() -> None:
    entry = {"name": "x", "reward": {"overlong": {"factor": 0.5}}}
    overlong = config(reward={"overlong": {"buffer_tokens": 16}}, adapters=[entry]).adapter_runs["x"].reward.overlong
    assert (overlong.buffer_tokens, overlong.factor) == (16, 0.5)


def test_a_resolved_run_is_written_and_read_again() -> None:
    run = config()
    again = build(json.loads(json.dumps(run.as_dict())))
    assert again.as_dict() == run.as_dict() and again.adapter_runs == run.adapter_runs
    assert pickle.loads(pickle.dumps(run)).adapter_runs == run.adapter_runs


def test_adapters_follow_their_base_wherever_it_is_changed() -> None:
    run = config(weights={"directory": "/shared"}).model_copy(update={"output_dir": Path("/elsewhere"), "name": "n"})
    maths, code = run.adapter_runs.values()
    assert maths.run_dir == Path("/elsewhere/n/adapters/maths")
    assert maths.weights_directory == Path("/shared/n/maths") != code.weights_directory
    assert config().adapter_runs["maths"].weights_directory.parts[-3:] == ("adapters", "maths", "weights")
    moved = run.model_copy(update={"cluster": run.cluster.model_copy(update={"device": "cpu"})})
    assert {each.cluster.device for each in moved.adapter_runs.values()} == {"cpu"}


def test_engines_make_room_for_all_versions_of_all_adapters() -> None:
    run = config()
    assert [each.adapters_alive for each in run.adapter_runs.values()] == [2, 4] and run.adapters_alive == 6
    assert engine_spec(run, ("q_proj",)).lora == ServedLora(8, ("q_proj",), 6)


def test_the_base_of_the_trainer_has_what_all_adapters_need_and_their_specs_share_it() -> None:
    run = config()
    base = policy_spec(with_base(run))
    assert base.lora.on and base.base_is_reference
    for each in run.adapter_runs.values():
        spec = policy_spec(each)
        assert (spec.checkpoint, spec.layout, spec.megatron, spec.replay, spec.train.logits_mib) == (
            base.checkpoint, base.layout, base.megatron, base.replay, base.train.logits_mib,
        )  # fmt: skip
        assert spec.base_is_reference


def test_rules_hold_for_each_adapter_and_not_for_what_all_of_them_override() -> None:
    sizes = [{"name": n, "rollout": {"group_size": 4}} for n in ("a", "b")]
    assert config(rollout={"group_size": 1}, adapters=sizes).adapter_runs["a"].rollout.group_size == 4
    with pytest.raises(ConfigError, match=r"adapters.b: rollout.group_size = 1: grpo compares"):
        config(rollout={"group_size": 1}, adapters=[sizes[0], {"name": "b"}])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"train": {"lrr": 1}}, "adapters.x.train.lrr = 1: unknown key\n.*'lr'"),
        ({"train": {"lr": -1}}, "adapters.x.train.lr = -1: .*greater than 0\n.*number > 0"),
        ({"rollout": {"group_size": 1}}, "adapters.x.rollout.group_size = 1: grpo compares"),
        ({"algorithm": {"advantage": "gae"}}, "adapters.x.algorithm.advantage = 'gae': "),
        ({"lora": {"rank": 0}}, "adapters.x: lora.sync = 'adapter': has no effect with lora.rank: 0"),
        ({"lora": {"experts": "shared_outer"}}, "adapters.x.lora.experts = 'shared_outer': engines read"),
        ({"rollout": {"function": "atropos"}, "reward": {}}, "adapters.x.*atropos"),
        ({"rollout": {"server": {"port": 9000}}}, "adapters.x: rollout.server.port = 9000: every adapter"),
        ({"rollout": {"pause_mode": "retract"}}, "adapters.x.rollout.pause_mode = 'retract': a request keeps"),
        ({"observe": {"wandb_project": "p"}}, "adapters.x.observe.wandb_project = 'p': one process"),
        ({"nonsense": 1}, "adapters.x.nonsense = 1: unknown key"),
        ({"weight": 0}, "adapters.x.weight = 0: .*greater than 0"),
        ({"name": "x.y"}, "adapters.name = 'x.y': must not contain a dot"),
        ({"name": "other"}, "adapters.name = 'other': two adapters have this name"),
        ({"name": "a/b"}, "adapters.a/b.name = 'a/b': must be the name of one directory"),
    ],
    ids=str,
)  # fmt: skip
def test_a_mistake_in_an_entry_is_named_with_its_adapter(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        config(adapters=[{"name": "other"}, {"name": "x", **entry}])


@pytest.mark.parametrize("section", BASE)
def test_a_section_of_the_base_is_refused_in_an_entry(section: str) -> None:
    with pytest.raises(
        ConfigError, match=f"adapters.x.{section} = .*belongs to the base(?s:.*)set {section} of the run"
    ):
        config(adapters=[{"name": "x", section: {}}])


@pytest.mark.parametrize("setting", SHARED)
def test_a_setting_that_adapters_share_is_refused_in_an_entry(setting: str) -> None:
    section, key = setting.split(".")
    assert any(each.path == setting for each in all_settings()), "there is such a setting"
    with pytest.raises(ConfigError, match=f"adapters.x.{setting} = (?s:.*)set {setting} of the run"):
        config(adapters=[{"name": "x", section: {key: 1}}])


def test_every_section_of_a_run_is_an_adapters_or_the_bases() -> None:
    apart = {"name", "seed", "adapters"}
    assert set(RunConfig.model_fields) - apart == {*OWN_SECTIONS, *BASE}
    assert set(AdapterConfig.model_fields) == {*OWN_SECTIONS, "name", "seed", "weight"}


def counting(kinds: str | list[str], together: bool | None) -> dict[str, Any]:
    """Sections of a run whose routers balance by these losses."""
    lora = VALUES["lora"] | ({} if together is None else {"together": together})
    return {"lora": lora, "megatron": {"moe_router_load_balancing_type": kinds}}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"lora": {"rank": 4}}, "lora.sync = 'merged': several adapters"),
        ({"train": {"task": "sft"}}, "train.task = 'sft': supervised training has one"),
        ({"cluster": {"placement": "colocated"}}, "cluster.placement = 'colocated'"),
        ({"rollout": {"managers": 2}, "sglang": {"num_engines": 2}}, "rollout.managers = 2: one rollout service"),
        ({"teacher": {"path": "t"}}, "teacher = 'a served teacher'"),
        ({"model": {"path": "m", "teacher_path": "t"}}, "model.teacher_path = 't'"),
        ({"model": {"path": "m", "reference_path": "t"}}, "model.reference_path = 't'"),
        ({"observe": {"wandb_project": "p"}}, "observe.wandb_project = 'p'"),
        ({"checkpoint": {"load": "c"}}, "checkpoint.load = 'c': all adapters would start from one"),
        (counting("global_aux_loss", together=True), "lora.together = True: routers count(?s:.*)remove it"),
        (counting(["seq_aux_loss", "global_aux_loss"], together=True), "lora.together = True: routers count"),
    ],
    ids=str,
)
def test_what_several_adapters_were_not_made_for_is_refused_by_name(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**sections)


def test_steps_share_a_pass_by_default_where_stages_drain_and_routers_tell_adapters_apart() -> None:
    stages = {"megatron": {"pipeline_model_parallel_size": 2}, "cluster": {"trainer_ranks": 2}}
    assert config(**stages).steps_together and not config().steps_together
    assert config(lora=VALUES["lora"] | {"together": True}).steps_together
    assert not config(**stages, lora=VALUES["lora"] | {"together": False}).steps_together
    plain = config(**counting("global_aux_loss", None))
    deeper = plain.megatron.model_copy(update={"pipeline_model_parallel_size": 2})
    assert not plain.model_copy(update={"megatron": deeper, "cluster": config(**stages).cluster}).steps_together
    assert config(**counting("aux_loss", together=True)).steps_together


def flagged(*flags: str) -> RunConfig:
    return build(merge(VALUES, parse_flags(list(flags))))


def test_flags_change_one_adapter_or_all() -> None:
    run = flagged(
        "--train.lr", "0.5", "--adapters.maths.train.num-steps", "3", "--adapters.code_v2.data.prompts", "a", "b",
        "--adapters.code-v2.rollout.no-partial", "--adapters.maths.weight", "3",
    )  # fmt: skip
    maths, code = run.adapter_runs.values()
    assert (maths.train.lr, code.train.lr) == (1e-3, 0.5), "an entry's own is not the run's"
    assert maths.train.num_steps == 3 and run.adapters[0].weight == 3
    assert code.data.prompts == ["a", "b"] and not code.rollout.partial and maths.rollout.partial
    assert (
        flagged("--adapters.maths.rollout.partial", "--adapters.maths.train.lr=0.1").adapter_runs["maths"].train.lr
        == 0.1
    )


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        (
            "--adapters.mathes.train.lr=1",
            "adapters.mathes = .*must name an adapter of the run .maths, code_v2.(?s:.*)'maths'",
        ),
        ("--adapters.maths.train.lrr=1", "adapters.maths.train.lrr = 1: unknown key"),
        ("--adapters.maths=1", "adapters.maths = 1"),
        ("--adapters.maths.sglang.tp-size=2", "adapters.maths.sglang = .*belongs to the base"),
    ],
)
def test_a_flag_for_an_adapter_that_is_none_is_refused(flag: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        flagged(flag)


def test_what_is_done_for_one_adapter_says_which_file_to_give() -> None:
    with pytest.raises(
        ConfigError, match="adapters = 'maths, code-v2': mslime eval supports one(?s:.*)maths/config.yaml"
    ):
        config().refuse_several("mslime eval")
    config().adapter_runs["maths"].refuse_several("mslime eval")


def test_the_directories_of_a_run_are_its_own_and_its_adapters(tmp_path: Path) -> None:
    run = config(output_dir=str(tmp_path))
    for each in run.adapter_runs.values():
        each.run_dir.mkdir(parents=True)
        (each.run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    assert directories(run.run_dir) == [run.run_dir, *sorted(each.run_dir for each in run.adapter_runs.values())]
