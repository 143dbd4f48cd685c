"""Shared GPUs: which settings go together, in which order memory changes hands, and what is planned for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mslime.backends.sglang.flags import server_fields
from mslime.config.base import ENGINE_TAGS, EngineTag
from mslime.config.cluster import count_gpus, describe_gpus
from mslime.config.errors import ConfigError, EngineError, TrainerError
from mslime.config.loader import build
from mslime.config.resolved import engine_spec, policy_spec, teacher_spec
from mslime.config.schema import RunConfig
from mslime.engine_plugin.memory_release import backup_of, restore, to_release, to_resume
from mslime.engine_plugin.wire import Released
from mslime.run.placement import BundleLocation, gpus_of
from mslime.run.sharing import PHASES, SharedGpus
from tests.fixtures.full_size import CONFIGS
from tests.fixtures.least import least, refused
from tests.fixtures.remote import fake_process

COLOCATED = {"cluster": {"placement": "colocated"}, "weights": {"transport": "shm"}}


def with_colocation(sections: dict[str, Any]) -> dict[str, Any]:
    return sections | {name: {**section, **sections.get(name, {})} for name, section in COLOCATED.items()}


def config_of(**sections: Any) -> RunConfig:
    return least(**with_colocation(sections))


EIGHT = {"cluster": {"trainer_ranks": 8, "device": "cuda"}}


def taught(**settings: Any) -> dict[str, Any]:
    """By a served teacher on the trainer's GPUs."""
    return {"teacher": {"path": "/t", "placement": "colocated", **settings}, "algorithm": {"opd_coef": 1.0}}


TAUGHT = taught()
HANDED = {"weights": {"transport": "checkpoint_engine"}, "cluster": {"device": "cuda"}}


@pytest.mark.parametrize(
    ("sections", "field", "said"),
    [
        ({"weights": {"transport": "broadcast"}}, "weights.transport", "NCCL does not allow"),
        ({"weights": {"transport": "relay"}}, "weights.transport", "NCCL does not allow"),
        ({"weights": {"transport": "mooncake"}}, "weights.transport", "registered on its GPU between syncs"),
        (HANDED | {"cluster": {"placement": "separate"}}, "weights.transport", "cluster.placement: separate"),
        (HANDED | {"cluster": {"device": "cpu"}}, "weights.transport", "needs GPU memory"),
        (HANDED | {"sglang": {"urls": ["http://h:1"]}}, "weights.transport", "not on the trainer's GPUs"),
        (HANDED | {"sglang": {"speculative_algorithm": "EAGLE"}}, "weights.transport", "open the handle"),
        (HANDED | EIGHT | {"sglang": {"num_engines": 3, "tp_size": 2}}, "sglang.num_engines", "6 of 8"),
        (HANDED | EIGHT | {"sglang": {"num_engines": 3, "tp_size": 4}}, "sglang.num_engines", "12 of 8"),
        ({"train": {"task": "sft"}}, "cluster.placement", "supervised"),
        ({"lora": {"rank": 8}}, "cluster.placement", "adapters"),
        ({"rollout": {"max_staleness": 2}}, "rollout.max_staleness", "only makes tokens older"),
        ({"rollout": {"max_staleness": 1, "pause_mode": "in_place"}}, "rollout.pause_mode", "cannot keep requests"),
        ({"rollout": {"max_staleness": 1, "pause_mode": "retract"}}, "rollout.pause_mode", "cannot keep requests"),
        ({"sglang": {"urls": ["http://h:1"]}}, "cluster.placement", "attached engines"),
        ({"sglang": {"tp_size": 2}}, "sglang.tp_size", "does not fit on the trainer's 1 GPUs"),
        ({"sglang": {"num_engines": 2}}, "sglang.num_engines", "do not fit on the trainer's 1"),
        (EIGHT | {"sglang": {"num_engines": 3, "tp_size": 4}}, "sglang.num_engines", "do not fit on the trainer's 8"),
        ({"cluster": {"trainer_ranks": 12, "device": "cuda", "gpus_per_node": 6, "ray_address": "h:6379"},
          "sglang": {"tp_size": 4}, "weights": {"transport": "disk"}}, "sglang.tp_size", "do not divide the 6"),
        ({"cluster": {"trainer_ranks": 16, "device": "cuda", "ray_address": "h:6379"},
          "sglang": {"tp_size": 8, "nnodes": 2}, "weights": {"transport": "disk"}}, "sglang.nnodes", "must use all"),
        ({"cluster": {"offload_to": "memory", "offload_directory": "/x"}},
          "cluster.offload_directory", "has no effect"),
        ({"cluster": {"placement": "separate", "offload_to": "disk"}}, "cluster.offload_to", "offloaded"),
        ({"cluster": {"placement": "separate", "offload_directory": "/x"}}, "cluster.offload_directory", "offloaded"),
        ({"megatron": {"enable_cuda_graph": True}}, "megatron.enable_cuda_graph", "addresses"),
        ({"megatron": {"cuda_graph_impl": "local"}}, "megatron.cuda_graph_impl", "addresses"),
        ({"weights": {"transport": "delta", "delta_over": "broadcast"}}, "weights.delta_over", "NCCL does not allow"),
        ({"megatron": {"nccl_ub": True}}, "megatron.nccl_ub", "addresses"),
        ({"sglang": {"enable_memory_saver": False}}, "sglang.enable_memory_saver", "release their memory"),
        ({"sglang": {"weight_cache_mode": "client"}}, "sglang.weight_cache_mode", "not released"),
        (TAUGHT | {"cluster": {"placement": "separate"}}, "teacher.placement", "not shared"),
        (TAUGHT | EIGHT | {"teacher": {"urls": ["http://t"], "placement": "colocated"}}, "teacher.placement",
         "that it launches"),
        (TAUGHT | EIGHT | {"rollout": {"managers": 2}, "sglang": {"num_engines": 2}}, "teacher.placement", "managers"),
        (TAUGHT, "teacher.tp_size", "must leave some of the trainer's 1 GPUs"),
        (taught(tp_size=3) | EIGHT, "teacher.tp_size", "divide them"),
        (taught(enable_weights_cpu_backup=False) | EIGHT, "teacher.placement", "saver's backup"),
        (taught(tp_size=2) | EIGHT | {"sglang": {"num_engines": 7}}, "sglang.num_engines", "besides the teacher's 2"),
        (taught(tp_size=4) | {"cluster": {"trainer_ranks": 12, "device": "cuda", "gpus_per_node": 6,
         "ray_address": "h:6379"}, "weights": {"transport": "disk"}}, "teacher.tp_size", "do not divide the 6"),
    ],
)  # fmt: skip
def test_what_cannot_share_gpus_is_refused_by_name(sections: dict[str, Any], field: str, said: str) -> None:
    error = refused(**with_colocation(sections))
    assert error.field == field and said in error.rule


@pytest.mark.parametrize("sections", [
    {}, {"rollout": {"max_staleness": 1}}, {"rollout": {"pause_mode": "in_place"}},
    {"weights": {"transport": "disk"}}, {"weights": {"transport": "handles"}},
    {"weights": {"transport": "delta"}}, {"weights": {"transport": "m:f"}},
    {"algorithm": {"advantage": "gae"}}, {"algorithm": {"kl_coef": 0.1}}, EIGHT | {"sglang": {"num_engines": 8}},
    EIGHT | {"sglang": {"num_engines": 2, "tp_size": 4}}, {"megatron": {"cuda_graph_impl": "none"}},
    HANDED, HANDED | EIGHT | {"sglang": {"num_engines": 2, "tp_size": 4}},
    {"cluster": {"trainer_ranks": 16, "device": "cuda", "ray_address": "h:6379"},
     "weights": {"transport": "checkpoint_engine"}, "sglang": {"num_engines": 1, "tp_size": 16, "nnodes": 2}},
    {"algorithm": {"advantage": "gae"}, "critic": {"placement": "separate"}}, {"cluster": {"offload_to": "disk"}},
    {"cluster": {"trainer_ranks": 16, "device": "cuda", "ray_address": "h:6379"}, "weights": {"transport": "disk"},
     "sglang": {"tp_size": 16, "nnodes": 2}},
])  # fmt: skip
def test_what_can_share_gpus_is_taken(sections: dict[str, Any]) -> None:
    assert config_of(**sections).colocated


def test_a_run_on_the_cpus_of_one_machine_need_not_say_that_weights_go_through_its_memory() -> None:
    values: dict[str, Any] = {"weights": {"transport": "auto"}, "cluster": {"device": "cpu", "ray_address": None}}
    config = config_of(**values)
    assert config.transport == policy_spec(config).weights.transport == "shm"
    for other in ({"device": "cuda"}, {"ray_address": "h:6379"}):
        with pytest.raises(ConfigError, match="NCCL"):
            config_of(**values | {"cluster": values["cluster"] | other})
    with pytest.raises(ConfigError, match="NCCL"):
        config_of(**values | {"weights": {"transport": "relay"}})


def test_engines_on_the_trainers_gpus_claim_none_of_their_own() -> None:
    shared = config_of(**EIGHT, sglang={"num_engines": 2, "tp_size": 4})
    assert count_gpus(shared.claims()) == 8 and describe_gpus(shared.claims()) == "8 GPUs (8 trainer and engines)"
    with_teacher = config_of(**EIGHT, sglang={"num_engines": 6}, **taught(tp_size=2))
    assert count_gpus(with_teacher.claims()) == 8
    apart = build(shared.as_dict() | {"cluster": {**EIGHT["cluster"], "gpus_per_node": 16}})
    assert count_gpus(apart.claims()) == 16
    roomy = {"cluster": {**EIGHT["cluster"], "gpus_per_node": 16}}
    critic = config_of(**roomy, algorithm={"advantage": "gae"}, critic={"placement": "separate"})
    assert describe_gpus(critic.claims()) == "16 GPUs (8 trainer and engines, 8 critic)"


def test_who_shares_gpus_gives_memory_back_and_a_teacher_keeps_its_weights_meanwhile() -> None:
    model = {"path": CONFIGS / "qwen3-30B-A3B"}
    beside = config_of(model=model, **EIGHT, **taught(**model))
    roomy = {"cluster": {**EIGHT["cluster"], "gpus_per_node": 16}}
    apart = config_of(model=model, **roomy, **taught(**model, placement="separate"))
    assert engine_spec(apart).gives_back and not teacher_spec(apart).gives_back
    spec = teacher_spec(beside)
    assert spec.gives_back and server_fields(spec, 0, "h", 1)["enable_weights_cpu_backup"]
    assert server_fields(spec, 0, "h", 1)["enable_memory_saver"]
    for other in (teacher_spec(apart), engine_spec(beside)):
        assert not server_fields(other, 0, "h", 1)["enable_weights_cpu_backup"]


def test_state_sleeps_where_it_was_asked_to() -> None:
    places = [("cpu", "auto", True), ("cuda", "auto", False), ("cpu", "memory", False), ("cuda", "disk", True)]
    for device, offload_to, in_files in places:
        config = config_of(cluster={"device": device, "offload_to": offload_to})
        assert (config.offload_directory is not None) is in_files
    named = config_of(cluster={"device": "cuda", "offload_to": "disk", "offload_directory": "/fast"})
    assert str(named.offload_directory) == "/fast"


def test_an_engine_has_neighbouring_gpus_of_one_machine() -> None:
    assert gpus_of([BundleLocation("a", "n", 4), BundleLocation("a", "n", 5)]) == ("4", "5")
    with pytest.raises(ConfigError, match="would share are on"):
        gpus_of([BundleLocation("a", "n", 7), BundleLocation("b", "m", 0)])


# --------------------------------------------------------------------------------------------- what an engine is told


def test_calls_of_an_engine_are_made_harmless() -> None:
    assert to_release(["kv_cache"], set(), True) == (["kv_cache"], "")
    assert to_release(None, {"weights"}, True) == (["kv_cache", "cuda_graph"], "")
    assert to_release(["weights"], {"weights"}, False) == ([], "")
    assert to_release(["weights"], set(), False) == ([], "requests are running")
    assert to_resume(["weights", "kv_cache"], {"kv_cache"}) == ["kv_cache"] and to_resume(None, set()) == []


@pytest.mark.parametrize("released", [set[EngineTag](), {"weights"}, set(ENGINE_TAGS)])
@pytest.mark.parametrize("held", [set[EngineTag](), {"weights"}, set(ENGINE_TAGS)])
def test_what_is_released_and_resumed_leads_to_what_is_to_be_held(
    released: set[EngineTag], held: set[EngineTag]
) -> None:
    found = Released(frozenset(released))
    after = (released | set(found.to_release(held))) - set(found.to_resume(held))
    assert after == set(ENGINE_TAGS) - held
    assert not set(found.to_release(held)) & released and set(found.to_resume(held)) <= released


def test_weights_that_are_kept_come_back_bit_for_bit_whenever_they_are_wanted() -> None:
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(5, 3, generator=draw), torch.randn(7, generator=draw).bfloat16(), torch.ones(2, 2)]
    held = [torch.nn.Parameter(each.clone()) for each in made]
    held.append(torch.nn.Parameter(made[2].to(torch.float8_e4m3fn), requires_grad=False))
    kept = backup_of(held)
    for _ in range(2):
        with torch.no_grad():
            for parameter in held:
                parameter.zero_()
        restore(held, kept)
        assert all(torch.equal(parameter, each) for parameter, each in zip(held, made, strict=False))
        assert torch.equal(held[3].float(), made[2])


# ------------------------------------------------------------------------------------------------- who has the memory


class FakeSides:
    """Engines, trainers and the rollout service in one; `largest` is the most that was ever held together."""

    def __init__(self) -> None:
        self.trainer, self.engines, self.calls = set[str](), {"weights", "kv_cache", "cuda_graph"}, list[str]()
        self.teachers, self.hung = {*self.engines}, list[str]()
        self.largest: list[tuple[set[str], set[str], set[str]]] = []
        self.starting, self.begun, self.may = list[str](), list[str](), True
        self.gone, self.silent, self.teacher_died = dict[str, str](), False, False
        self.fails: Callable[[], None] = lambda: None

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.largest.append((set(self.trainer), set(self.engines), set(self.teachers)))

    def hold_memory(self, tags: Any) -> None:
        if self.silent:
            raise EngineError("e", "memory", "none is left", "read its log")
        self.engines = set(tags)
        self._note(f"engines {' '.join(sorted(tags))}".rstrip())

    def hold_teachers(self, tags: Any) -> list[str]:
        if self.teacher_died:
            raise EngineError("teacher0", "/weights_checker", "connection refused", "read its log")
        self.teachers = set(tags)
        self._note(f"teachers {' '.join(sorted(tags))}".rstrip())
        return self.hung

    def hold(self, parts: Any) -> None:
        self.fails()
        self.trainer = set(parts)
        self._note(f"trainer {' '.join(sorted(parts))}".rstrip())

    def dead(self) -> dict[str, str]:
        return dict(self.gone)

    def no_engine_alive(self) -> bool:
        return self.silent

    def halt(self, name: str) -> None:
        self._note(f"halt {name}")

    def pause(self) -> None:
        self._note("pause")

    def resume(self, version: int) -> None:
        self._note(f"resume {version}")

    def let_start(self, may: bool) -> None:
        self.may = may
        self._note("may start" if may else "may not start")

    def stop(self) -> None:
        self._note("stop engines")

    def update_engines(self) -> None:
        self._note("tend")
        self.starting = self.starting[1:]


def shared_of(sides: FakeSides, teacher: bool = False) -> SharedGpus:
    made: Any = sides
    sides.teachers = sides.teachers if teacher else set()
    return SharedGpus(fake_process(made), made, made, sides.update_engines, lambda: None, made if teacher else None)


def fits(sides: FakeSides) -> bool:
    """Whether no more was ever held than one phase has."""
    return all(
        any(trainer <= p.trainer and engines <= p.engines and teachers <= p.teachers for p in PHASES.values())
        for trainer, engines, teachers in sides.largest
    )


@pytest.mark.parametrize("teacher", [False, True])
@pytest.mark.parametrize("before", PHASES)
@pytest.mark.parametrize("after", PHASES)
def test_no_gpu_ever_holds_more_than_one_phase_needs(before: Any, after: Any, teacher: bool) -> None:
    sides, wanted = FakeSides(), PHASES[after]
    shared = shared_of(sides, teacher)
    shared.enter(before)
    shared.enter(after)
    assert (sides.trainer, sides.engines) == (wanted.trainer, wanted.engines)
    assert sides.teachers == (wanted.teachers if teacher else set())
    assert teacher or (fits(sides) and not any("teacher" in call for call in sides.calls))
    sides.largest = [(trainer, set(), teachers) for trainer, _, teachers in sides.largest if trainer]
    assert fits(sides), "a teacher is on other GPUs than an engine"


def test_a_teacher_that_hangs_is_ended_and_a_rescue_ends_all_of_them() -> None:
    sides = FakeSides()
    sides.hung = ["teacher1"]
    shared = shared_of(sides, teacher=True)
    shared.begin_training()
    assert sides.calls.index("halt teacher1") < sides.calls.index("trainer gradients optimizer weights")
    shared = shared_of(sides := FakeSides(), teacher=True)
    with shared.awake("save", 3, last=True):
        assert sides.calls.count("stop engines") == 2


def test_the_only_teacher_dies_while_it_sleeps_and_the_error_says_so_and_a_rescue_has_its_room() -> None:
    sides = FakeSides()
    shared = shared_of(sides, teacher=True)
    shared.begin_training()
    sides.teacher_died = True
    with pytest.raises(
        EngineError, match=r"(?s)teachers are not restarted.*teacher0.*connection refused.*teacher.num_engines"
    ):
        shared.enter("generate")
    with shared.awake("save", 3, last=True):
        assert sides.trainer == PHASES["save"].trainer and sides.calls.count("stop engines") == 2


def test_a_step_is_in_this_order_and_what_is_held_already_is_not_asked_for_again() -> None:
    sides = FakeSides()
    shared = shared_of(sides)
    shared.begin_training()
    shared.begin_sync()
    for phase in ("send", "send", "generate"):
        shared.enter(phase)
    shared.end_sync()
    assert sides.calls == [
        "tend", "may not start", "pause", "engines", "trainer gradients optimizer weights", "trainer weights",
        "engines weights", "trainer", "engines cuda_graph kv_cache weights", "may start",
    ]  # fmt: skip
    told = shared.metrics()
    assert set(told) == {f"perf/{what}_seconds" for what in ("release", "sleep", "wake", "resume")}
    assert min(told.values()) > 0
    assert set(shared.metrics().values()) == {0.0}, "each is told once"


def test_engines_that_start_are_waited_for_before_the_trainer_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mslime.run.sharing.LOOK_EVERY_S", 0)
    sides = FakeSides()
    sides.starting = ["engine1", "engine1"]
    shared = shared_of(sides)
    shared.begin_training()
    assert sides.calls[:4] == ["tend", "tend", "may not start", "pause"] and not sides.starting


def test_an_engine_that_is_dead_to_us_is_ended_before_the_trainer_wakes() -> None:
    sides = FakeSides()
    sides.gone = {"engine1": "it hangs"}
    shared = shared_of(sides)
    shared.begin_training()
    assert sides.calls.index("halt engine1") < sides.calls.index("trainer gradients optimizer weights")


def test_the_trainer_goes_on_where_no_engine_is_left_and_sleeps_before_one_is_started() -> None:
    sides = FakeSides()
    shared, sides.silent = shared_of(sides), True
    shared.begin_training()
    assert sides.trainer == PHASES["train"].trainer
    shared.revive()
    assert sides.calls[-2:] == ["trainer", "may start"]
    sides.silent = False  # one is back, with all of its memory
    shared.enter("send")
    assert sides.engines == PHASES["send"].engines and sides.calls[-2:] == ["engines weights", "trainer weights"]


def test_engines_that_all_refuse_end_it() -> None:
    sides = FakeSides()
    shared, sides.no_engine_alive = shared_of(sides), lambda: False  # type: ignore[method-assign]
    sides.silent = True
    with pytest.raises(EngineError, match="none is left"):
        shared.begin_training()
    assert not any(call.startswith("trainer") for call in sides.calls)


def test_a_save_leaves_engines_their_weights_and_a_rescue_needs_none() -> None:
    sides = FakeSides()
    shared = shared_of(sides)
    with shared.awake("save", 3):
        assert sides.trainer == {"weights", "optimizer"} and sides.engines == {"weights"}
    assert sides.calls[-3:] == ["engines cuda_graph kv_cache weights", "resume 3", "may start"] and fits(sides)
    with shared.awake("save", 3, last=True):
        assert sides.trainer == {"weights", "optimizer"} and "stop engines" in sides.calls
    shared = shared_of(sides := FakeSides())
    shared.begin_training()
    calls = list(sides.calls)
    with shared.awake("save", 3, last=True):
        assert sides.calls == calls, "it is awake, and holds all that is needed"


def test_a_trainer_that_could_not_wake_is_not_taken_for_awake() -> None:
    sides = FakeSides()

    def fail() -> None:
        raise TrainerError("trainer rank 0", "memory", "it is gone", "read its log")

    shared, sides.fails = shared_of(sides), fail
    with pytest.raises(TrainerError):
        shared.begin_training()
    sides.fails = lambda: None
    with shared.awake("save", 1, last=True):
        assert sides.trainer == {"weights", "optimizer"}
