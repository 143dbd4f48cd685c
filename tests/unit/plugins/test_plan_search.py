"""`mslime plan --search`: what it finds is what `mslime plan` says of it, nothing that fits is faster, and what the
user has set is kept."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mslime.cli import main
from mslime.config.cluster import GPUS, usual_gpu
from mslime.config.errors import ConfigError
from mslime.config.loader import build, load_config, merge
from mslime.config.resolved import policy_spec
from mslime.convert.families import get_family, read_hf_config
from mslime.convert.flops import read_widths
from mslime_plugins.planner import times
from mslime_plugins.planner.parameters import stage_parameters
from mslime_plugins.planner.plan import make_plan
from mslime_plugins.planner.plan_command import as_flags, as_yaml, found_by, plan_of
from mslime_plugins.planner.problems import GIB
from mslime_plugins.planner.search import NothingFits, Search, _order
from mslime_plugins.planner.space import MEASURES
from mslime_plugins.planner.times import ClusterSpeeds, StepWork, generate_seconds, train_seconds
from tests.fixtures.marks import nightly_except

CONFIGS = Path(__file__).parents[2] / "fixtures/configs"
LONG = {
    "data": {"prompts": ["unread"], "max_prompt_tokens": 1024},
    "rollout": {"max_response_tokens": 8192, "groups_per_step": 32, "group_size": 8},
    "train": {"max_tokens_per_micro_batch": 9216},
}


def values(model: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
    return merge({**LONG, "model": {"path": str(CONFIGS / model)}}, dict(sections))


CASES = {
    "30B on one machine": ("qwen3-30B-A3B", 8, 80.0, {}),
    "30B on three, apart": ("qwen3-30B-A3B", 24, 80.0, {"cluster": {"placement": "separate"}}),
    "a dense model": ("qwen3-4B", 8, 80.0, {}),
    "layers that no stages divide": ("deepseek-v3", 128, 80.0, {"sglang": {"dtype": "bfloat16"}}),
    "few experts": ("mixtral-8x7B", 16, 80.0, {}),
}


@pytest.mark.parametrize("case", nightly_except(["30B on one machine", "a dense model"], CASES))
@pytest.mark.slow
def test_what_is_found_is_what_the_plan_says_of_its_settings(case: str, tmp_path: Path) -> None:
    model, gpus, memory, sections = CASES[case]
    given = values(model, **sections)
    found, gpu = found_by(given, gpus, memory, 2)
    assert found and gpu == "NVIDIA H100"
    assert (found[0].plan.fields.num_experts > 0) == any(each.plan.layout.ep > 1 for each in found)
    keys = [(each.plan.verdict != "fits", each.seconds["step"]) for each in found]
    assert keys == sorted(keys) and len({str(each.settings) for each in found}) == len(found)
    for each in found:
        by_file = build(merge(merge(given, {"cluster": {"device": "cuda", "gpu_memory_gb": memory}}),
                              yaml.safe_load(as_yaml(each.settings))))  # fmt: skip
        again = make_plan(by_file, read_hf_config(CONFIGS / model))
        assert again == each.plan and again.fits
        used = again.trainer_gpus + (0 if by_file.colocated else again.engine_gpus)
        assert used <= gpus and by_file.layout == again.layout
        assert each.seconds["step"] >= max(each.seconds["generate"], each.seconds["train"])


@pytest.mark.slow
def test_the_flags_that_are_printed_are_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--model.path",
        str(CONFIGS / "qwen3-30B-A3B"),
        "--gpu-memory-gb",
        "80",
        "--cluster.device",
        "cuda",
    ]
    words += ["--rollout.max-response-tokens", "8192", "--data.max-prompt-tokens", "1024"]
    assert main([*words, "--search", "--gpus", "8", "--top", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gpu"] == "NVIDIA H100" and len(told["found"]) == 2
    for each in told["found"]:
        assert "--megatron.use-precision-aware-optimizer" in as_flags(each["settings"])
        assert not {"True", "False"} & set(as_flags(each["settings"])), "a switch is a word of its own"
        assert main([*words, *as_flags(each["settings"]), "--json"]) == 0
        planned = json.loads(capsys.readouterr().out)
        assert planned["verdict"] == each["verdict"] == "fits"
        assert planned["layout"] == each["layout"] and planned["host_bytes"] == each["host_bytes"]
    assert main([*words, "--search", "--gpus", "8", "--top", "1"]) == 0
    printed = capsys.readouterr().out
    assert " ".join(as_flags(told["found"][0]["settings"])) in printed.replace("\n", " ").replace("  ", " ")
    assert as_yaml(told["found"][0]["settings"]).splitlines()[1] in printed


def brute_force(given: dict[str, Any], hf: Mapping[str, Any], gpus: int) -> tuple[float, dict[str, Any]]:
    """The shortest step of all colocated layouts that `mslime plan` lets fit with a twentieth to spare, each planned
    whole: slow, and with none of the search's short cuts."""
    best: tuple[float, dict[str, Any]] = (float("inf"), {})
    wanted = Search(given, gpus, hf, "NVIDIA H100")
    layers, experts = wanted.model.num_layers, wanted.model.num_experts
    for tp, pp, cp, ep, vpp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2), (1, 2, 4, 8), (1, 2, 4)):
        if gpus % (tp * pp * cp) or (gpus // pp) % ep or (experts % ep if experts else ep > 1) or (vpp > 1 and pp == 1):
            continue
        if layers % (pp * vpp):
            continue
        for (_, measures), engine_tp in itertools.product(MEASURES, (1, 2, 4, 8)):
            megatron = {
                "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "context_parallel_size": cp,
                "expert_model_parallel_size": ep, **measures,
            } | ({"virtual_pipeline_model_parallel_size": vpp} if vpp > 1 else {})  # fmt: skip
            sections = {
                "cluster": {"placement": "colocated", "trainer_ranks": gpus}, "weights": {"transport": "shm"},
                "megatron": megatron, "sglang": {"num_engines": gpus // engine_tp, "tp_size": engine_tp},
                "rollout": {"max_staleness": 0},
            }  # fmt: skip
            try:
                config = build(merge(given, sections))
                plan = make_plan(config, hf)
            except ConfigError:
                continue
            if not plan.fits or max(stage.memory.peak for stage in plan.stages) > 0.95 * (plan.gpu_bytes - 3 * GIB):
                continue
            held, memory = [stage.held for stage in plan.stages], [stage.memory for stage in plan.stages]
            assert plan.engine is not None
            seconds = {
                "generate": generate_seconds(plan.engine, gpus // engine_tp, engine_tp, wanted.work, wanted.speeds),
                "train": sum(train_seconds(policy_spec(config), wanted.widths, held, wanted.work, plan.micro_batches,
                                           wanted.speeds).values()),
                "sync": times.file_seconds("shm", 2 * plan.parameters, 1, plan.rates),
                "sleep": times.sleep_seconds(max(m.weights + m.optimizer for m in memory),
                                             max(m.weights for m in memory), plan.rates.host),
            }  # fmt: skip
            best = min(best, (times.step_seconds(seconds, False), sections), key=lambda pair: pair[0])
            break  # as the search: the first measures that fit
    return best


@pytest.mark.parametrize("model", ["olmoe-1B-7B", "qwen3-4B"])
@pytest.mark.nightly
def test_no_layout_that_fits_is_faster_than_the_best_that_is_found(model: str) -> None:
    given = values(model, cluster={"device": "cuda", "gpus_per_node": 4, "gpu_memory_gb": 80.0})
    given = merge(given, {"rollout": {"max_response_tokens": 2048}, "data": {"max_prompt_tokens": 512}})
    hf = read_hf_config(CONFIGS / model)
    seconds, settings = brute_force(given, hf, 4)
    colocated = merge(given, {"cluster": {"placement": "colocated"}})
    [best] = found_by(colocated, 4, None, 1)[0]
    assert settings and best.seconds["step"] <= seconds * (1 + 1e-9)


@pytest.mark.slow
def test_what_the_user_has_set_is_kept() -> None:
    given = values(
        "qwen3-30B-A3B", cluster={"placement": "colocated"}, sglang={"tp_size": 8, "mem_fraction_static": 0.7},
        megatron={"tensor_model_parallel_size": 2, "expert_model_parallel_size": 8, "recompute_granularity": "full",
                  "use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16",
                  "moe_permute_fusion": True},
    )  # fmt: skip
    found, _ = found_by(given, 8, 80, 5)
    for each in found:
        assert (each.plan.layout.tp, each.plan.layout.ep) == (2, 8) and each.settings["sglang"]["tp_size"] == 8
        assert each.settings["cluster"]["placement"] == "colocated" and each.measures == "as set"
    ahead = merge(values("qwen3-4B"), {"rollout": {"max_staleness": 2}})
    assert {each.settings["cluster"]["placement"] for each in found_by(ahead, 8, 80, 5)[0]} == {"separate"}
    by_one = merge(given, {"rollout": {"max_staleness": 1}})
    assert all(each.settings["sglang"]["tp_size"] == 8 for each in found_by(by_one, 8, 80, 5)[0])


@pytest.mark.nightly
def test_host_memory_is_counted_by_machine_and_bounds_what_is_found() -> None:
    given = values("qwen3-30B-A3B", cluster={"placement": "colocated"})
    plenty = found_by(given, 8, 56, 1)[0][0]
    assert "optimizer on the host" in plenty.measures and plenty.plan.host.total > 600 * GIB
    with pytest.raises(NothingFits):
        found_by(merge(given, {"cluster": {"host_memory_gb": 128}}), 8, 56, 1)
    small = merge(values("qwen3-30B-A3B"), {"cluster": {"host_memory_gb": 280, "placement": "colocated"}})
    for each in found_by(small, 8, 80, 5)[0]:
        assert each.plan.host.total <= 0.9 * 280 * GIB
        assert each.plan.host_share == pytest.approx(each.plan.host.total / (0.9 * 280 * GIB))
    on_disk = merge(small, {"cluster": {"offload_to": "disk", "host_memory_gb": 120}})
    assert found_by(on_disk, 8, 80, 1)[0][0].seconds["sleep"] > 10


@pytest.mark.slow
def test_a_plan_is_tight_where_the_host_is(capsys: pytest.CaptureFixture[str]) -> None:
    given = merge(values("qwen3-30B-A3B"), {"cluster": {"placement": "colocated", "device": "cuda"}})
    best = found_by(given, 8, 80, 1)[0][0]
    need = best.plan.host.total / GIB / 0.9
    for share, verdict in ((0.9, "fits"), (0.97, "tight"), (1.02, "does not fit")):
        config = build(merge(merge(given, dict(best.settings)), {"cluster": {"host_memory_gb": need / share}}))
        plan = make_plan(config, read_hf_config(CONFIGS / "qwen3-30B-A3B"))
        assert plan.verdict == verdict and plan.as_dict()["host_verdict"] == verdict


@pytest.mark.nightly
def test_what_is_tight_comes_last() -> None:
    found = found_by(values("qwen3-30B-A3B", cluster={"placement": "colocated"}), 8, 57, 5)[0]
    verdicts = [each.plan.verdict for each in found]
    assert verdicts == sorted(verdicts, key=("fits", "tight").index) and set(verdicts) == {"fits", "tight"}
    given = values("qwen3-30B-A3B", cluster={"device": "cuda", "gpu_memory_gb": 57.0})
    weighed = Search(given, 8, read_hf_config(CONFIGS / "qwen3-30B-A3B"), "NVIDIA H100").weighed()
    tight, roomy = ([each.seconds["step"] for each in weighed if each.tight is which] for which in (True, False))
    assert [each.tight for each in weighed] == [False] * len(roomy) + [True] * len(tight)
    assert min(tight) < max(roomy), "one that is tight is faster than one that is not, and comes after it all the same"


def test_nothing_that_fits_is_said_with_the_nearest_miss(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--search", "--model.path", str(CONFIGS / "qwen3-30B-A3B"), "--gpu-memory-gb", "40"]
    assert main([*words, "--gpus", "4"]) == 1
    told = capsys.readouterr().err
    assert "no layout fits; the nearest, " in told and "of a GPU for the trainer" in told and "hint" in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "needs the number of GPUs"),
        (["--gpus", "8", "--top", "0"], "must be at least 1"),
        (["--gpus", "8", "--gpu", "NVIDIA Z1"], "one of NVIDIA B300"),
        (["--gpus", "8", "--train.task", "sft"], "train.task: rl"),
        (["--gpus", "8", "--sglang.urls", "http://10.0.0.1:30000"], "sglang.urls"),
        (["--gpus", "8", "--algorithm.advantage", "gae"], "only layouts of policy and engines"),
    ],
)
def test_what_cannot_be_searched_is_a_mistake(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--search", "--model.path", str(CONFIGS / "qwen3-4B"), *words]) == 2
    assert says in capsys.readouterr().err


WRONG: list[tuple[str, object]] = [
    ("cluster", None), ("cluster", 5), ("cluster", "x"), ("cluster", [1]), ("cluster.gpu_memory_gb", "x"),
    ("cluster.trainer_ranks", "x"), ("cluster.trainer_ranks", 0), ("cluster.placement", "x"),
    ("teacher", None), ("teacher", "x"), ("model.path", 5), ("rollout.max_staleness", "x"),
    ("sglang", None), ("sglang.tp_size", "x"), ("sglang.tp_size", 0), ("sglang.tp_size", -1), ("sglang.ep_size", 0),
    ("sglang.num_engines", "x"), ("sglang.num_engines", 0), ("sglang.mem_fraction_static", 2),
    ("megatron", None), ("megatron.extra", "x"), ("megatron.extra", None),
    *((f"megatron.{name}_parallel_size", value)
      for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
      for value in (0, "x", [1])),
    *(("megatron.virtual_pipeline_model_parallel_size", value) for value in (0, -1, "x", float("nan"))),
]  # fmt: skip


def with_setting(given: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    section, _, name = path.partition(".")
    wrong = {**given.get(section, {}), name: value} if name else value
    return {**given, section: wrong}


@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize(("path", "value"), WRONG)
def test_a_wrong_section_is_refused_as_in_a_check(path: str, value: object, search: bool) -> None:
    given = with_setting(values("qwen3-4B"), path, value)
    if path == "megatron.extra" and value is None:
        given = with_setting(given, "megatron.moe_aux_loss_coeff", 0.1)
    with pytest.raises(ConfigError) as checked:
        build(given)
    with pytest.raises(ConfigError) as planned:
        found_by(given, 8, 80.0, 1) if search else plan_of(given, 8, 80.0)
    assert str(planned.value) == str(checked.value) and planned.value.field.startswith(path)
    assert not isinstance(planned.value, NothingFits)


def test_numbers_in_quotes_are_numbers() -> None:
    given = values("qwen3-4B", megatron={"tensor_model_parallel_size": "2"}, rollout={"max_staleness": "0"})
    given = merge(given, {"cluster": {"gpu_memory_gb": "80", "trainer_ranks": "4", "placement": "separate"}})
    [found] = found_by(given, 8, None, 1)[0]
    assert found.plan.layout.tp == 2 and found.plan.trainer_gpus == 4


def test_a_refusal_of_all_layouts_names_the_setting() -> None:
    given = values("qwen3-4B", megatron={"sequence_parallel": False, "tensor_model_parallel_size": 2})
    with pytest.raises(ConfigError, match="is invalid: megatron.sequence_parallel = False"):
        found_by(given, 8, 80.0, 1)


# ------------------------------------------------------------------------------------------------------------- times


def setting(model: str, ranks: int, **megatron: Any) -> tuple[Any, Any, Any, StepWork]:
    """(spec, widths, parameters of the stages, work) of a layout."""
    hf = read_hf_config(CONFIGS / model)
    family = get_family(hf)
    fields, table = family.model_fields(hf), family.rules(hf)
    config = build(values(model, megatron=megatron, cluster={"trainer_ranks": ranks, "device": "cuda"}))
    spec = policy_spec(config)
    held = stage_parameters(table, spec.layout, config.megatron.stage_layers(fields.num_layers))
    work = StepWork(256, 1024, 8192, 1, 1, 3e9, fields.num_layers, fields.top_k, fields.num_experts)
    return spec, read_widths(family.transformer_fields(hf), fields.moe_layer_ids), held, work


H100 = ClusterSpeeds(GPUS["NVIDIA H100"], 450e9, 50e9, 8, 25e9)


def test_computing_is_operations_over_the_rate() -> None:
    spec, widths, [held], work = setting("qwen3-4B", 8)
    seconds = train_seconds(spec, widths, [held], work, 32, H100)
    tokens = 256 / 8 * 9216  # of one of eight data-parallel ranks
    products = 2 * (held.dense - held.embedding) / 0.55  # two operations for each element
    scores = 2 * 36 * (9216 / 2) * 32 * (128 + 128) / 0.45  # 36 layers, 32 heads of 128; half of them masked
    assert seconds["compute"] == pytest.approx(4 * tokens * (products + scores) / 989.4e12)
    assert (seconds["tensor"], seconds["experts"], seconds["context"], seconds["pipeline"]) == (0, 0, 0, 0)
    gradients = 0.5 * held.dense * 6 * 7 / 8 / (450e9 * 0.7)
    assert seconds["data"] == pytest.approx(gradients)


def test_tokens_go_to_experts_of_their_machine_over_nvlink_and_to_others_over_the_network() -> None:
    inside = setting("qwen3-30B-A3B", 16, expert_model_parallel_size=8)
    across = setting("qwen3-30B-A3B", 16, expert_model_parallel_size=16)
    near, far = (train_seconds(*each[:3], each[3], 16, H100)["experts"] for each in (inside, across))
    tokens, hidden, layers = 256 / 16 * 9216, 2048, 48
    moved = 3 * layers * 2 * tokens * 8 * hidden * 2 * 1.25  # forward, backward, log-probs; there and back; top-8
    assert near == pytest.approx(moved * 7 / 8 / (450e9 * 0.7))
    assert far == pytest.approx(moved * 8 / 16 / (50e9 * 0.7)) and far > 4 * near
    slow = replace(H100, network=25e9)
    assert train_seconds(*across[:3], across[3], 16, slow)["experts"] == pytest.approx(2 * far)
    assert train_seconds(*inside[:3], inside[3], 16, slow)["experts"] == near


def test_recomputing_offloading_and_stages_cost_what_they_do() -> None:
    plain = train_seconds(*setting("qwen3-4B", 8), 32, H100)
    again = train_seconds(*setting("qwen3-4B", 8, recompute_granularity="full"), 32, H100)
    assert again["compute"] == pytest.approx(plain["compute"] * 5 / 4)
    away = train_seconds(*setting("qwen3-4B", 8, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0), 32, H100)
    assert away["optimizer"] > 50 * plain["optimizer"] and away["compute"] == plain["compute"]
    staged = setting("qwen3-4B", 8, pipeline_model_parallel_size=4)
    few, many = (train_seconds(*staged, count, H100)["pipeline"] for count in (4, 32))
    assert few == pytest.approx(8 * many) and many > 0
    chunked = setting("qwen3-4B", 8, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=3)
    assert train_seconds(*chunked, 32, H100)["pipeline"] == pytest.approx(many / 3)
    tp = train_seconds(*setting("qwen3-4B", 8, tensor_model_parallel_size=4), 32, H100)
    assert tp["tensor"] > 0 and tp["compute"] < 1.2 * plain["compute"]
    cp = train_seconds(*setting("qwen3-4B", 8, context_parallel_size=2), 32, H100)
    assert cp["context"] > 0


def test_decoding_reads_weights_and_cache_and_more_engines_are_faster() -> None:
    plan = plan_of(values("qwen3-4B", cluster={"device": "cuda"}), 8, 80)
    assert plan.engine is not None
    work = setting("qwen3-4B", 8)[3]
    one, two = (generate_seconds(plan.engine, count, 1, work, H100) for count in (1, 2))
    assert one > two > one / 4
    weightless = replace(plan.engine, weights=1, token_bytes=0)
    assert generate_seconds(weightless, 1, 1, work, H100) < one
    together = min(256, plan.engine.tokens // 9216)
    reading = (plan.engine.weights + together * (1024 + 4096) * plan.engine.token_bytes) / (3352e9 * 0.7)
    multiplying = together * 2 * work.active / (989.4e12 * 0.4)
    prefill = 256 * 1024 * 2 * work.active / (989.4e12 * 0.4)
    each = max(reading, multiplying) + 36 * 15e-6
    assert one == pytest.approx(256 / together * 8192 * each + prefill)


def test_a_step_ahead_hides_the_shorter_half() -> None:
    parts = {"generate": 5.0, "train": 3.0, "sync": 1.0, "sleep": 0.5}
    assert times.step_seconds(parts, ahead=True) == 6.5 and times.step_seconds(parts, ahead=False) == 9.5


@pytest.mark.parametrize(("memory", "name"), [(40, "A100-SXM4-40GB"), (80, "H100"), (141, "H200"), (192, "B200")])
def test_memory_names_the_usual_gpu(memory: float, name: str) -> None:
    assert usual_gpu(memory) == f"NVIDIA {name}"


def test_one_of_each_kind_is_kept_the_best() -> None:
    wanted = Search(
        values("qwen3-4B", cluster={"device": "cuda"}), 8, read_hf_config(CONFIGS / "qwen3-4B"), "NVIDIA H100"
    )
    weighed = wanted.weighed()
    assert len({each.kind for each in weighed}) == len(weighed) > 10
    assert [_order(each) for each in weighed] == sorted(_order(each) for each in weighed)


def test_what_is_found_wins_over_every_size_and_recomputing_of_a_launch_script(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "--model.path", str(CONFIGS / "qwen3-4B"), "--data.prompts", "unused.jsonl"]
    assert main([*words, "--search", "--gpus", "8", "--top", "1", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["found"][0]
    sizes = ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")
    script = [word for size in sizes for word in (f"--megatron.{size}-parallel-size", "2")]
    script += [
        *("--megatron.virtual-pipeline-model-parallel-size", "2"),
        *("--megatron.num-layers-in-first-pipeline-stage", "17", "--megatron.num-layers-in-last-pipeline-stage", "19"),
        *("--megatron.recompute-granularity", "full", "--megatron.recompute-method", "uniform"),
        *("--megatron.recompute-num-layers", "1", "--sglang.tp-size", "2", "--sglang.ep-size", "2"),
        *("--sglang.nnodes", "2", "--cluster.trainer-ranks", "2"),
    ]
    found = load_config(None, [*words[1:], *as_flags(best["settings"])]).as_dict()
    assert load_config(None, [*words[1:], *script, *as_flags(best["settings"])]).as_dict() == found
