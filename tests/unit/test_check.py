"""`mslime check` on real files: what it prints, and what it refuses before anything is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mslime.checks.resolve import check_quantised
from mslime.cli import main
from mslime.config.errors import CheckpointError
from mslime.config.loader import build
from mslime.convert.families import read_hf_config
from mslime.convert.hf import HFCheckpoint
from tests.fixtures.tiny_models import make_tiny_qwen3_dense, make_tiny_qwen3_moe


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("check") / "model")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("check") / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "label": "2"}) + "\n")
    return path


def check(capsys: pytest.CaptureFixture[str], checkpoint: Path, prompts: Path, *flags: str) -> tuple[int, str, str]:
    base = [
        "check", "--model.path", str(checkpoint), "--data.prompts", str(prompts), "--rollout.max-response-tokens", "32",
    ]  # fmt: skip
    status = main([*base, *flags])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_a_run_that_needs_more_than_a_machines_memory_is_refused_by_what_takes_most(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, prompts: Path
) -> None:
    status, _, told = check(capsys, checkpoint, prompts, "--cluster.host-memory-gb", "0.001")
    assert status == 2 and "cluster.host_memory_gb = 0.001: trainer machine, host memory: needs " in told
    assert "most of it shards" in told and "lower rollout.groups_per_step (32)" in told
    assert check(capsys, checkpoint, prompts, "--cluster.host-memory-gb", "64")[0] == 0


@pytest.mark.parametrize(("change", "said", "hint"), [
    ({"some_gate": True}, ["config.json: some_gate = True"], ["--model.ignored-config-fields", "some_gate"]),
    ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "Qwen3MoeForCausalLM"], None),
    ({"mlp_only_layers": [0]}, ["mlp_only_layers"], ["--train.task", "sft"]),
], ids=["a setting that nobody reads", "an unknown architecture", "layers that the engine would drop"])  # fmt: skip
def test_a_model_that_is_not_built_is_refused(
    capsys: pytest.CaptureFixture[str], prompts: Path, tmp_path: Path, change: dict[str, Any], said: list[str],
    hint: list[str] | None,
) -> None:  # fmt: skip
    layers = {name: value for name, value in change.items() if name == "mlp_only_layers"}
    odd = make_tiny_qwen3_moe(tmp_path / "odd", **layers)
    described = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(described | change))
    status, _, told = check(capsys, odd, prompts)
    assert status == 2 and all(part in told for part in said)
    assert hint is None or check(capsys, odd, prompts, *hint)[0] == 0


@pytest.mark.parametrize(("line", "said"), [
    (None, "no such file"), ("{'prompt': 1}", "is not valid JSON"), ('{"promt": "a", "label": "1"}', "no key 'prompt'"),
])  # fmt: skip
def test_what_the_first_line_tells_is_said_before_the_model_is_looked_at(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path, line: str | None, said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def fake_family(_config: object) -> None:
        raise AssertionError("which imports torch")

    monkeypatch.setattr("mslime.checks.resolve.get_family", fake_family)
    file = tmp_path / "p.jsonl"
    if line is not None:
        file.write_text(f"\n{line}\n")
    status, _, err = check(capsys, checkpoint, file)
    assert status == 2 and said in err
    status, _, err = check(capsys, checkpoint, file, "--data.eval-sets", f"{{name: a, path: {file}}}")
    assert status == 2 and said in err
    if said == "no key 'prompt'":  # a slice without the first line
        assert check(capsys, checkpoint, Path(f"{file}@[1:]"))[0] == 1


def test_a_good_run_prints_layout_batch_and_switches(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, prompts: Path
) -> None:
    flags = [
        "--megatron.tensor-model-parallel-size", "2", "--megatron.expert-model-parallel-size", "2",
        "--rollout.max-staleness", "1",
    ]  # fmt: skip
    status, out, _ = check(capsys, checkpoint, prompts, *flags)
    assert status == 0
    for part in (
        "TP2 EP2",
        "Qwen3MoeForCausalLM",
        "max_staleness 1",
        "routing replay",
        "32 groups x 8 responses",
        "correction",
    ):
        assert part in out, part


def test_a_meaningless_combination_is_warned_of_and_still_checks(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, prompts: Path
) -> None:
    status, out, _ = check(capsys, checkpoint, prompts, "--algorithm.loss", "gspo", "--algorithm.clip-dual", "3")
    assert status == 0 and "warning: algorithm.loss gspo" in out and "grpo, gspo" in out
    assert "warning" not in check(capsys, checkpoint, prompts)[1]


@pytest.mark.parametrize(("setting", "function", "said"), [
    ("algorithm.advantage", "takes_two", r"called with (rewards)"),
    ("algorithm.loss", "tis_agian", "has no function 'tis_agian'\n  hint: did you mean 'tis_again'"),
    ("algorithm.loss", "grpo_again", "(batch, algorithm)"),
    ("algorithm.correction.function", "too_few", "(log_ratio, batch)"),
    ("rollout.dynamic_filter", "takes_two", "(group)"),
])  # fmt: skip
def test_a_users_function_that_the_run_could_not_call_is_refused(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, prompts: Path, setting: str, function: str, said: str
) -> None:
    status, _, err = check(
        capsys, checkpoint, prompts, f"--{setting.replace('_', '-')}", f"tests.unit.user_functions:{function}"
    )
    assert status == 2 and f"{setting} = 'tests.unit.user_functions:{function}'" in err and said in err, err


def test_where_the_teacher_is_gets_said_and_one_of_other_words_is_refused(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    opd = ["--algorithm.opd-coef", "0.5"]
    status, out, _ = check(capsys, checkpoint, prompts, *opd, "--teacher.urls", "http://t1", "http://t2")
    assert status == 0 and "0.5 x (log pi_old - log teacher); teacher served at http://t1, http://t2" in " ".join(
        out.split()
    )
    status, out, _ = check(
        capsys, checkpoint, prompts, *opd, "--teacher.path", str(checkpoint), "--teacher.tp-size", "2"
    )
    assert status == 0 and "1 server(s) x TP2 of" in " ".join(out.split())
    assert "distillation off" in " ".join(check(capsys, checkpoint, prompts)[1].split())

    small = shutil.copytree(checkpoint, tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] - 1}))
    status, _, err = check(capsys, checkpoint, prompts, *opd, "--teacher.path", str(small))
    assert status == 2 and "teacher.path" in err and "token ids" in err
    words = shutil.copytree(checkpoint, tmp_path / "words")
    tokenizer = json.loads((words / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["1"], ids["2"] = ids["2"], ids["1"]
    (words / "tokenizer.json").write_text(json.dumps(tokenizer))
    status, _, err = check(capsys, checkpoint, prompts, *opd, "--teacher.path", str(words))
    assert status == 2 and "teacher.path" in err and "there" in err
    status, _, err = check(capsys, checkpoint, prompts, *opd, "--teacher.path", str(tmp_path / "nowhere"))
    assert status == 2 and "teacher.path" in err


def test_the_critic_is_described_and_one_of_fewer_tokens_or_positions_is_refused(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    gae = ["--algorithm.advantage", "gae", "--critic.warmup-steps", "5", "--critic.placement", "separate"]
    status, out, _ = check(capsys, checkpoint, prompts, *gae)
    assert status == 0 and "on its own 1 GPUs, learning rate 1e-05, alone in the first 5 step(s)" in " ".join(
        out.split()
    )
    for field, words in (("vocab_size", "token ids"), ("max_position_embeddings", "positions")):
        small = make_tiny_qwen3_moe(tmp_path / field, **{field: 64, "pad_token_id": 0})
        status, _, err = check(capsys, checkpoint, prompts, *gae, "--critic.path", str(small))
        assert status == 2 and "critic.path" in err and f"has 64 {words}" in err
    status, _, err = check(capsys, checkpoint, prompts, *gae, "--critic.path", str(tmp_path / "nowhere"))
    assert status == 2 and "nowhere" in err


@pytest.mark.parametrize(("flags", "named"), [
    (["--megatron.tensor-model-parallel-size", "3"], "megatron.tensor_model_parallel_size"),
    (["--megatron.hidden-size", "96"], "contradicts the checkpoint"),
    (["--rollout.max-response-tokens", "4096"], "rollout.max_response_tokens"),
    (["--rollout.max-total-tokens", "999999"], "rollout.max_total_tokens"),
    (["--model.path", "/nowhere"], "/nowhere"),
    (["--data.prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
    (["--data.label-key", "answer"], "answer"),
    (["--observe.wandb-project", "x"], "observe.wandb"),
    (["--weights.transport", "pigeons"], "weights.transport = 'pigeons': must be auto, broadcast"),
    (["--weights.transport", "tests.unit.user_transport:of_two"], "it is called with (link)"),
    (["--rolout.group-size", "4"], "did you mean 'rollout'"),
])  # fmt: skip
def test_mistakes_end_with_status_2_and_name_the_setting(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, prompts: Path, flags: list[str], named: str
) -> None:
    status, _, err = check(capsys, checkpoint, prompts, *flags)
    assert status == 2 and named in err and "hint" in err


def test_a_dense_model_needs_replay_off(capsys: pytest.CaptureFixture[str], prompts: Path, tmp_path: Path) -> None:
    dense = make_tiny_qwen3_dense(tmp_path / "dense")
    status, _, err = check(capsys, dense, prompts)
    assert status == 2 and "train.replay" in err
    assert check(capsys, dense, prompts, "--train.replay", "off")[0] == 0


def test_fp8_checkpoints_are_served_as_they_are(
    capsys: pytest.CaptureFixture[str], prompts: Path, tmp_path: Path
) -> None:
    plain = make_tiny_qwen3_moe(tmp_path / "plain", hidden_size=128, moe_intermediate_size=128, num_hidden_layers=1)
    fp8 = tmp_path / "fp8"
    assert main(["convert", "fp8", str(plain), str(fp8), "--workers", "1"]) == 0
    status, _, err = check(capsys, fp8, prompts)
    assert status == 0, err
    shared = ("--cluster.placement", "colocated", "--rollout.max_staleness", "0")
    for sent, *others in (("delta",), ("disk",), ("relay", "--lora.rank", "4"), ("shm", *shared)):
        status, _, err = check(capsys, fp8, prompts, "--weights.transport", sent, *others)
        assert status == 0, err
    for options, words in (
        (("--weights.transport", "examples.extending.transport:timed"), ("weights.transport", "broadcast")),
        (("--lora.rank", "4", "--lora.sync", "adapter"), ("lora.sync", "merged", "convert bf16")),
        (("--sglang.tp_size", "2"), ("sglang.tp_size", "blocks of 128")),
    ):
        status, _, err = check(capsys, fp8, prompts, *options)
        assert status == 2 and all(word in err for word in words), err


def test_quantised_weights_of_latent_attention_are_not_emulated(prompts: Path, tmp_path: Path) -> None:
    plain = make_tiny_qwen3_moe(tmp_path / "plain", hidden_size=128, moe_intermediate_size=128, num_hidden_layers=1)
    fp8 = tmp_path / "fp8"
    assert main(["convert", "fp8", str(plain), str(fp8), "--workers", "1"]) == 0
    hf_config = read_hf_config(fp8) | {"kv_lora_rank": 16}

    def judged(device: str, **sglang: object) -> None:
        config = build({
            "model": {"path": str(fp8)}, "data": {"prompts": [str(prompts)]}, "cluster": {"device": device},
            "sglang": sglang,
        })  # fmt: skip
        check_quantised(config, HFCheckpoint(fp8), hf_config)

    with pytest.raises(CheckpointError, match="does not support latent attention"):
        judged("cpu")
    judged("cuda")
    judged("cpu", urls=["http://127.0.0.1:1"])  # is sent plain weights


def test_quantised_weights_that_cannot_be_sent_are_refused_for_rl(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, prompts: Path, tmp_path: Path
) -> None:
    attention = ("--group", "16", "--include", r"self_attn\.._proj")
    for name, kind, flags, words in (
        ("fp8", "fp8", (), ("blocks of 128", "tp_size")),
        (
            "attention",
            "int4",
            attention,
            ("layers.0.self_attn.k_proj", "INT4 of routed experts", "mslime convert bf16"),
        ),
        ("groups", "int4", ("--group", "32"), ("groups of 32", "sglang.tp_size")),
    ):
        assert main(["convert", kind, str(checkpoint), str(tmp_path / name), "--workers", "1", *flags]) == 0
        tp = ("--sglang.tp_size", "2") if name == "groups" else ()
        status, _, err = check(capsys, tmp_path / name, prompts, *tp)
        assert status == 2 and all(word in err for word in words), err
        assert check(capsys, tmp_path / name, prompts, "--train.task", "sft")[0] == 0
    assert check(capsys, tmp_path / "groups", prompts)[0] == 0


def test_every_pass_through_field_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--fields", "megatron"]) == 0
    assert "megatron.recompute_granularity" in capsys.readouterr().out


def test_env_prints_the_versions_that_matter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "megatron-core: 0.16.1" in out and "sglang: 0.5.23" in out


def test_mistakes_are_named_by_the_setting_that_holds_them(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = ["--data.eval-sets", f"[{{name: a, path: {prompts}}}, {{name: b, path: nope.jsonl}}]"]
    status, _, err = check(capsys, checkpoint, prompts, *held_out)
    assert status == 2 and "data.eval_sets[1].path = 'nope.jsonl'" in err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, err = check(capsys, checkpoint, prompts, "--observe.wandb-project", "mine")
    assert status == 2 and "observe.wandb_project = 'mine'" in err
    status, _, err = check(capsys, checkpoint, prompts, "--observe.tensorboard")
    assert status == 2 and "observe.tensorboard = True" in err
