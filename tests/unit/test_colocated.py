"""Shared GPUs: which settings go together, in which order memory changes hands, and what is planned for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mslime.backends.sglang.memory import to_release, to_resume
from mslime.backends.sglang.released import REFUSED, RELEASED, TAGS, Released
from mslime.config.choices import EngineTag
from mslime.config.cluster import claims, count_gpus, describe_gpus
from mslime.config.errors import ConfigError, EngineError, TrainerError
from mslime.config.loader import build
from mslime.config.schema import RunConfig
from mslime.config.serving import engine_spec, teacher_spec
from mslime.config.training import asleep_directory
from mslime.control.placement import Spot, gpus_of
from mslime.control.sharing import PHASES, Shared
from mslime.planner.phases import ENGINE_ASLEEP_BYTES, TRAINER_ASLEEP_BYTES
from mslime.planner.plan import RunPlan
from mslime.planner.problems import GIB
from tests.unit.test_plan import planned

COLOCATED = {"cluster": {"placement": "colocated"}, "weights": {"transport": "shm"}}


def config_of(**sections: Any) -> RunConfig:
    values: dict[str, Any] = {"model": {"path": "."}, "data": {"prompts": ["p.jsonl"]}}
    for given in (COLOCATED, sections):
        for name, section in given.items():
            values[name] = {**values.get(name, {}), **section}
    return build(values)


EIGHT = {"cluster": {"trainer_ranks": 8, "device": "cuda"}}


@pytest.mark.parametrize(
    ("sections", "field", "said"),
    [
        ({"weights": {"transport": "broadcast"}}, "weights.transport", "one process group on one GPU"),
        ({"weights": {"transport": "relay"}}, "weights.transport", "one process group on one GPU"),
        ({"train": {"task": "sft"}}, "cluster.placement", "supervised"),
        ({"lora": {"rank": 8}}, "cluster.placement", "adapters"),
        ({"rollout": {"max_staleness": 2}}, "rollout.max_staleness", "only makes tokens older"),
        ({"rollout": {"max_staleness": 1, "pause_mode": "in_place"}}, "rollout.pause_mode", "can keep no request"),
        ({"rollout": {"max_staleness": 1, "pause_mode": "retract"}}, "rollout.pause_mode", "can keep no request"),
        ({"sglang": {"urls": ["http://h:1"]}}, "cluster.placement", "somebody else"),
        ({"sglang": {"tp_size": 2}}, "sglang.tp_size", "does not fit on the trainer's 1 GPUs"),
        ({"sglang": {"num_engines": 2}}, "sglang.num_engines", "do not fit on the trainer's 1"),
        (EIGHT | {"sglang": {"num_engines": 3, "tp_size": 4}}, "sglang.num_engines", "do not fit on the trainer's 8"),
        ({"cluster": {"trainer_ranks": 12, "device": "cuda", "gpus_per_node": 6, "ray_address": "h:6379"},
          "sglang": {"tp_size": 4}, "weights": {"transport": "disk"}}, "sglang.tp_size", "do not divide the 6"),
        ({"cluster": {"trainer_ranks": 16, "device": "cuda", "ray_address": "h:6379"},
          "sglang": {"tp_size": 8, "nnodes": 2}, "weights": {"transport": "disk"}}, "sglang.nnodes", "two of its"),
        ({"cluster": {"asleep_in": "memory", "asleep_directory": "/x"}}, "cluster.asleep_directory", "nothing is put"),
        ({"cluster": {"placement": "separate", "asleep_in": "disk"}}, "cluster.asleep_in", "never sleeps"),
        ({"cluster": {"placement": "separate", "asleep_directory": "/x"}}, "cluster.asleep_directory", "never sleeps"),
        ({"megatron": {"enable_cuda_graph": True}}, "megatron.enable_cuda_graph", "addresses"),
        ({"megatron": {"cuda_graph_impl": "local"}}, "megatron.cuda_graph_impl", "addresses"),
        ({"megatron": {"nccl_ub": True}}, "megatron.nccl_ub", "addresses"),
        ({"sglang": {"enable_memory_saver": False}}, "sglang.enable_memory_saver", "gives its memory back"),
        ({"sglang": {"weight_cache_mode": "client"}}, "sglang.weight_cache_mode", "not given back"),
    ],
)  # fmt: skip
def test_what_cannot_share_gpus_is_refused_by_name(sections: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(**sections)
    assert caught.value.field == field and said in caught.value.rule and caught.value.way_out


@pytest.mark.parametrize("sections", [
    {}, {"rollout": {"max_staleness": 1}}, {"rollout": {"pause_mode": "in_place"}},
    {"weights": {"transport": "disk"}}, {"weights": {"transport": "delta"}}, {"weights": {"transport": "m:f"}},
    {"algorithm": {"advantage": "gae"}}, {"algorithm": {"kl_coef": 0.1}}, EIGHT | {"sglang": {"num_engines": 8}},
    EIGHT | {"sglang": {"num_engines": 2, "tp_size": 4}}, {"megatron": {"cuda_graph_impl": "none"}},
    {"algorithm": {"advantage": "gae"}, "critic": {"placement": "separate"}}, {"cluster": {"asleep_in": "disk"}},
    {"cluster": {"trainer_ranks": 16, "device": "cuda", "ray_address": "h:6379"}, "weights": {"transport": "disk"},
     "sglang": {"tp_size": 16, "nnodes": 2}},
])  # fmt: skip
def test_what_can_share_gpus_is_taken(sections: dict[str, Any]) -> None:
    assert config_of(**sections).colocated


def test_engines_on_the_trainers_gpus_claim_none_of_their_own() -> None:
    shared = config_of(**EIGHT, sglang={"num_engines": 2, "tp_size": 4})
    assert count_gpus(claims(shared)) == 8 and describe_gpus(claims(shared)) == "8 GPUs (8 trainer and engines)"
    apart = build(shared.as_dict() | {"cluster": {**EIGHT["cluster"], "gpus_per_node": 16}})
    assert count_gpus(claims(apart)) == 16
    roomy = {"cluster": {**EIGHT["cluster"], "gpus_per_node": 16}}
    critic = config_of(**roomy, algorithm={"advantage": "gae"}, critic={"placement": "separate"})
    assert describe_gpus(claims(critic)) == "16 GPUs (8 trainer and engines, 8 critic)"


def test_only_engines_give_memory_back_and_state_sleeps_where_it_was_asked_to() -> None:
    taught = config_of(teacher={"path": "/t"}, algorithm={"opd_coef": 1.0})
    assert engine_spec(taught).gives_back and not teacher_spec(taught).gives_back
    places = [("cpu", "auto", True), ("cuda", "auto", False), ("cpu", "memory", False), ("cuda", "disk", True)]
    for device, asleep_in, in_files in places:
        config = config_of(cluster={"device": device, "asleep_in": asleep_in})
        assert (asleep_directory(config) is not None) is in_files
    named = config_of(cluster={"device": "cuda", "asleep_in": "disk", "asleep_directory": "/fast"})
    assert str(asleep_directory(named)) == "/fast"


def test_an_engine_has_neighbouring_gpus_of_one_machine() -> None:
    assert gpus_of([Spot("a", "n", 4), Spot("a", "n", 5)]) == ("4", "5")
    with pytest.raises(ConfigError, match="would share are on"):
        gpus_of([Spot("a", "n", 7), Spot("b", "m", 0)])


# --------------------------------------------------------------------------------------------- what an engine is told


def test_calls_of_an_engine_are_made_harmless() -> None:
    assert to_release(["kv_cache"], set(), True) == (["kv_cache"], "")
    assert to_release(None, {"weights"}, True) == (["kv_cache", "cuda_graph"], "")
    assert to_release(["weights"], {"weights"}, False) == ([], "")
    assert to_release(["weights"], set(), False) == ([], "requests run")
    assert to_resume(["weights", "kv_cache"], {"kv_cache"}) == ["kv_cache"] and to_resume(None, set()) == []


@pytest.mark.parametrize("released", [set[str](), {"weights"}, {"weights", "kv_cache", "cuda_graph"}])
@pytest.mark.parametrize("held", [set[EngineTag](), {"weights"}, set(TAGS)])
def test_what_is_released_and_resumed_leads_to_what_is_to_be_held(released: set[str], held: set[EngineTag]) -> None:
    said = {"checksums": dict.fromkeys(sorted(released), RELEASED) | {REFUSED: "why"}}
    found = Released.read([said])
    assert found.tags == released and found.refused == "why"
    after = (released | set(found.to_release(held))) - set(found.to_resume(held))
    assert after == set(TAGS) - held
    assert not set(found.to_release(held)) & released and set(found.to_resume(held)) <= released


# ------------------------------------------------------------------------------------------------- who has the memory


class FakeSides:
    """Engines, trainers and the rollout service in one; `largest` is the most that was ever held together."""

    def __init__(self) -> None:
        self.trainer, self.engines, self.calls = set[str](), {"weights", "kv_cache", "cuda_graph"}, list[str]()
        self.largest: list[tuple[set[str], set[str]]] = []
        self.starting, self.begun, self.may = list[str](), list[str](), True
        self.gone, self.silent = dict[str, str](), False
        self.fails: Callable[[], None] = lambda: None

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.largest.append((set(self.trainer), set(self.engines)))

    def hold_memory(self, tags: Any) -> None:
        if self.silent:
            raise EngineError("e", "memory", "none is left", "read its log")
        self.engines = set(tags)
        self._note(f"engines {' '.join(sorted(tags))}".rstrip())

    def hold(self, parts: Any) -> None:
        self.fails()
        self.trainer = set(parts)
        self._note(f"trainer {' '.join(sorted(parts))}".rstrip())

    def dead(self) -> dict[str, str]:
        return dict(self.gone)

    def stranded(self) -> bool:
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

    def tend(self) -> None:
        self._note("tend")
        self.starting = self.starting[1:]


def shared_of(sides: FakeSides) -> Shared:
    made: Any = sides
    return Shared(made, made, made, sides.tend, lambda: None)


def fits(sides: FakeSides) -> bool:
    """Whether no more was ever held than one phase has."""
    return all(
        any(trainer <= phase.trainer and engines <= phase.engines for phase in PHASES.values())
        for trainer, engines in sides.largest
    )


@pytest.mark.parametrize("before", PHASES)
@pytest.mark.parametrize("after", PHASES)
def test_no_gpu_ever_holds_more_than_one_phase_needs(before: Any, after: Any) -> None:
    sides = FakeSides()
    shared = shared_of(sides)
    shared.enter(before)
    shared.enter(after)
    assert (sides.trainer, sides.engines) == (set(PHASES[after].trainer), set(PHASES[after].engines)) and fits(sides)


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
    monkeypatch.setattr("mslime.control.sharing.LOOK_EVERY_S", 0)
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
    shared, sides.stranded = shared_of(sides), lambda: False  # type: ignore[method-assign]
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


# ------------------------------------------------------------------------------------------------------------- plan

LAYOUT = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 8, "recompute_granularity": "full"}
ENGINES = {"num_engines": 2, "tp_size": 4}


def plan_of(placement: str, memory: float = 141, **sections: Any) -> RunPlan:
    cluster = {"placement": placement, "trainer_ranks": 8, "gpu_memory_gb": memory, **sections.pop("cluster", {})}
    weights = {"transport": "shm" if placement == "colocated" else "broadcast", "bucket_mib": 1024}
    given = {"megatron": LAYOUT, "sglang": ENGINES, "weights": weights, **sections}
    return planned("qwen3-30B-A3B", cluster=cluster, **given)


def test_a_shared_gpu_needs_the_larger_of_its_phases_and_not_their_sum() -> None:
    shared, apart = plan_of("colocated"), plan_of("separate", cluster={"gpus_per_node": 8})
    assert (shared.nodes, apart.nodes) == (1, 2) and not apart.phases and shared.engine_gpus == 8
    assert shared.engine is not None and apart.engine is not None
    memory, phases = shared.stages[0].memory, {phase.phase: phase for phase in shared.phases}
    assert memory == apart.stages[0].memory and list(phases) == list(PHASES)
    train, send, save, generate = (phases[name] for name in ("train", "send", "save", "generate"))
    at_work = memory.activations + memory.working + memory.logits
    assert train.trainer == memory.weights + memory.gradients + memory.optimizer + at_work + memory.reserve
    assert train.engine == ENGINE_ASLEEP_BYTES
    assert send.total == memory.weights + memory.sync + memory.reserve + (
        shared.engine.weights + shared.engine.bucket + ENGINE_ASLEEP_BYTES
    )
    assert save.trainer == memory.weights + memory.optimizer + memory.reserve
    assert save.engine == shared.engine.weights + ENGINE_ASLEEP_BYTES
    assert generate.trainer == TRAINER_ASLEEP_BYTES and generate.total == pytest.approx(shared.gpu_bytes, abs=1e6)
    assert shared.engine.weights == apart.engine.weights and shared.engine.tokens < apart.engine.tokens
    assert shared.fullest == train.total > apart.fullest
    assert shared.fullest < apart.fullest + shared.engine.weights + shared.engine.cache


def test_state_that_sleeps_in_memory_is_counted_there_and_on_a_disk_is_not() -> None:
    shared = plan_of("colocated")
    memory = shared.stages[0].memory
    assert shared.host.asleep == pytest.approx(8 * (memory.weights + memory.optimizer), rel=1e-3)
    assert plan_of("colocated", cluster={"asleep_in": "disk"}).host.asleep == 0 == plan_of("separate").host.asleep
    [problem] = plan_of("colocated", cluster={"host_memory_gb": 256}).problems
    assert problem.component == "asleep" and "asleep_in: disk" in problem.way_out


def test_a_phase_that_does_not_fit_is_named() -> None:
    tight = {"num_engines": 8, "tp_size": 1}
    problems = plan_of("colocated", 90, sglang=tight).problems
    named = [problem for problem in problems if problem.where == "shared GPU of stage 0, phase save"]
    assert len(named) == 1 and named[0].needs > named[0].has > 0 and "sglang.tp_size (1)" in named[0].way_out
    assert named[0].needs / GIB == pytest.approx(57.8 + 56.9 + 3 + 90 * 0.99 * 0.05 - 79.2 * 0.05, abs=1.5)


def test_gpus_without_an_engine_are_remarked_upon() -> None:
    [remark] = plan_of("colocated", sglang={"num_engines": 1, "tp_size": 4}).remarks
    assert remark.startswith("4 of the trainer's GPUs have no engine on them")
