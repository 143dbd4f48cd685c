"""Configuration that cannot be meant is refused in words: by its path, its value, the rule and a hint."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from mslime.cli import main
from mslime.config.errors import ConfigError, UserError
from mslime.config.loader import build, parse_yaml, read_yaml
from mslime.config.schema import RunConfig
from mslime.config.settings import all_settings
from tests.fixtures.least import LEAST, least, refused


def with_setting(path: str, value: Any) -> dict[str, Any]:
    """The least configuration with one more setting."""
    values = json.loads(json.dumps(LEAST))
    *sections, leaf = path.split(".")
    target = values
    for section in sections:
        target = target.setdefault(section, {})
    target[leaf] = value
    return values


@pytest.mark.parametrize(("path", "value"), [
    ("algorithm.entropy_coef", math.nan), ("algorithm.correction.low", math.nan), ("output_dir", ""),
    ("model.path", " "), ("megatron.main_grads_dtype", 3), ("megatron.exp_avg_dtype", "float31"),
    ("megatron.muon_momentum", 0.9), ("sglang.load_publish_endpoint", "os:system"), ("sglang.init_expert_location", ""),
    ("algorithm.correction.high", -1), ("train.lr", math.inf), ("train.lr", 1e30), ("train.weight_decay", math.inf),
    ("rollout.temperature", math.inf), ("rollout.temperature", 0), ("rollout.temperature", 1e-7),
    ("rollout.temperature", 1e30),
    ("rollout.over_sampling", math.inf), ("rollout.stop_token_ids", [-1]), ("rollout.group_size", 10**30),
    ("cluster.trainer_ranks", 1_000_000), ("seed", 2**64), ("seed", -1), ("weights.bucket_mib", True),
    ("algorithm.clip_high", False), ("rollout.group_size", True), ("rollout.partial", 1), ("rollout.partial", "yes"),
    ("train.packed", "on"), ("rollout.dynamic_filter", True), ("data.prompts", True), ("name", "../../x"),
    ("name", "/abs/path"), ("name", "a\nb"), ("name", ""), ("name", ".."), ("name", "a\\b"), ("name", "x" * 300),
    ("data.eval_sets", [{"name": "a", "path": "p", "samples_per_prompt": True}]), ("teacher", "x"),
    ("teacher.extra", [1]), ("sglang", 5), ("sglang.extra", "x"), ("algorithm", 1), ("algorithm.correction", 7),
    ("algorithm.correction.preset", 3), ("algorithm.correction.preset", ["tis"]), ("algorithm.loss", 3),
    ("megatron", [1]), ("model", "m"), ("train", None), ("weights.senders", 10**12), ("reward.workers", 10**9),
    ("algorithm.correction.token_cap", 1e30), ("deadlines.train_step_s", 1e300), ("sglang.num_engines", 10**9),
    ("name", "é" * 101), ("adapters", [{"name": "é" * 101}]), ("model.ignored_config_fields", "/dev/null"),
    ("model.ignored_config_fields", ["a", ""]), ("algorithm.correction.low", -0.5),
    ("algorithm.correction", {"preset": "mis", "low": -1}),
])  # fmt: skip
def test_a_value_that_cannot_be_meant_is_refused_by_its_path(path: str, value: Any) -> None:
    assert refused(**with_setting(path, value)).field.startswith(path.split(".")[0])


def of_adapter(**sections: Any) -> dict[str, Any]:
    return {"lora": {"rank": 4, "sync": "adapter"}, "adapters": [{"name": "two", **sections}]}


MAPPING = "write a mapping of its settings"


@pytest.mark.parametrize(("sections", "field", "hint"), [
    ({"reward": {"parts": [5]}}, "reward.parts.0", MAPPING),
    ({"data": {"eval_sets": [5]}}, "data.eval_sets.0", MAPPING),
    ({"adapters": ["x"]}, "adapters.0", MAPPING),
    (of_adapter(reward={"parts": [5]}), "adapters.two.reward.parts.0", MAPPING),
    (of_adapter(rollout=5), "adapters.two.rollout", "set one of its settings, for example "
     "adapters.two.rollout.groups_per_step or --adapters.two.rollout.groups-per-step"),
    (of_adapter(algorithm={"topr": "x"}), "adapters.two.algorithm.topr", "set one of its settings, for example "
     "adapters.two.algorithm.topr.level or --adapters.two.algorithm.topr.level"),
    ({"adapters": [{"weight": 1}]}, "adapters.0.name", "add it to the file\n"),
    ({"data": {"eval_sets": [{"path": "x"}]}}, "data.eval_sets.0.name", "add it to the file\n"),
    ({"": 5}, "''", "known keys here: adapters"), ({"rollout": {"": 5}}, "rollout.''", "known keys here: atropos"),
    ({"reward": {"parts": [{"name": "a", "http": {"url": 5}}]}}, "reward.parts.0.http.url",
     "expected: text or list of text or null"),
    ({"reward": {"parts": [{"name": "a", "weight": "x"}]}}, "reward.parts.0.weight", "expected: number"),
    ({"reward": {"parts": [{"name": "a", "wieght": 1}]}}, "reward.parts.0.wieght", "did you mean 'weight'?"),
    (of_adapter(algorithm={"topr": {"levl": 1}}), "adapters.two.algorithm.topr.levl", "did you mean 'level'?"),
    ({"cluster": {"env": {"A": [1]}}}, "cluster.env.A", "expected: mapping"),
    ({"algorithm": {"correction": {"level": "tokn"}}}, "algorithm.correction.level", "expected: token, segment,"),
    ({"sglang": {"api_key": 12345}}, "sglang.api_key", "expected: text or null"),
    ({"model": {"path": "m", "teacher_path": [1]}}, "model.teacher_path", "expected: path or null"),
    ({"rollout": {"dynamic_filter": "zerovariance"}}, "rollout.dynamic_filter", "did you mean 'zero_variance'?"),
    ({"reward": {"kind": "exakt"}}, "reward.kind", "did you mean 'exact'?"),
])  # fmt: skip
def test_a_hint_is_one_that_can_be_followed(sections: dict[str, Any], field: str, hint: str) -> None:
    error = refused(**sections)
    assert error.field == field and f"{error.hint}\n".startswith(hint)
    assert "did you mean" not in error.rule and "<class" not in error.rule and "12345" not in str(error)


@pytest.mark.parametrize(("path", "value"), [
    ("megatron.moe_aux_loss_coeff", math.nan), ("megatron.moe_aux_loss_coeff", [0.1, math.inf]),
    ("megatron.extra.moe_z_loss_coeff", math.inf), ("sglang.schedule_conservativeness", math.nan),
    ("sglang.json_model_override_args", {"a": [{"b": -math.inf}]}), ("teacher.schedule_conservativeness", math.nan),
    ("reward.judge.options", {"temperature": math.nan}), ("data.chat_template_kwargs", {"a": (math.inf,)}),
])  # fmt: skip
def test_numbers_of_free_fields_are_finite_too(path: str, value: Any) -> None:
    error = refused(**with_setting(path, value))
    assert error.field == path.replace("extra.", "") and "finite" in error.rule


def test_a_correction_may_be_named_in_one_word() -> None:
    for values in (with_setting("algorithm.correction", "mis"), with_setting("algorithm.correction.preset", "mis")):
        assert build(values).algorithm.correction.preset == "mis"
    named = with_setting("algorithm", {"loss": "dppo_tv", "correction": "icepop"})
    assert build(named).algorithm.correction.preset == "icepop"
    with pytest.raises(ConfigError, match="unknown preset"):
        build(with_setting("algorithm.correction", "tsi"))


@pytest.mark.parametrize("section", ["sglang", "teacher"])
@pytest.mark.parametrize(
    "url", ["\x00", "file:///etc/passwd", "http://user:geheim@host:1", "http://h:99999", "localhost:80"]
)
def test_what_is_no_address_of_a_server_is_refused_and_no_password_is_shown(section: str, url: str) -> None:
    error = refused(**with_setting(f"{section}.urls", [url]))
    assert error.field == f"{section}.urls" and "geheim" not in str(error)


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [("linear_attn_decode_backend", "tpu", "triton"), ("hicache_write_policy", "/dev/null", "write_back")],
)
def test_a_choice_that_the_engine_does_not_offer_is_refused(name: str, value: str, good: str) -> None:
    error = refused(**with_setting(f"sglang.{name}", value))
    assert error.field == f"sglang.{name}" and repr(good) in error.rule
    build(with_setting(f"sglang.{name}", good))


def test_every_number_of_seconds_is_one_that_a_timer_takes() -> None:
    seconds = [s for s in all_settings() if s.path.endswith("_s") and not s.path.endswith("_per_s")]
    assert len(seconds) > 20 and [s.path for s in seconds if "<= 1e+09" not in s.expected] == []


@pytest.mark.parametrize("text", [
    "base: &b {path: a.jsonl, n: 1}\none:\n  <<: *b\n  name: x\n",
    "base: &b {path: a.jsonl, n: 1}\none:\n  n: 2\n  <<: *b\ntwo: {<<: *b}\n",
    "a: &a {x: 1}\nb: &b {y: 2}\nc: &c\n  <<: [*a, *b]\n  x: 3\nd: {<<: *c}\n",
])  # fmt: skip
def test_merge_keys_are_read_as_pyyaml_reads_them(text: str) -> None:
    assert parse_yaml(text, "run.yaml") == yaml.safe_load(text)


@pytest.mark.parametrize(("text", "said"), [
    ("model: {path: a}\nmodel: {path: b}\n", "appears twice"), ("model: {path: a, path: b}\n", "appears twice"),
    ("1: x\n", "is not text"), ("model: {path: a, 3: b}\n", "is not text"), ("a: \x00\n", "not valid YAML"),
    ("[" * 5000, "not valid YAML"), ("a: !!python/object:os.system x\n", "not valid YAML"),
    ("a: &a [*a]\nb: *c\n", "not valid YAML"), ("a: &a [*a]\n", "recursive"), ("a: &a {b: *a}\n", "recursive"),
    ("? [1, 2]\n: 3\n", "is not text"),
])  # fmt: skip
def test_yaml_that_means_two_things_or_nothing_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="f.yaml") as caught:
        parse_yaml(text, "f.yaml")
    assert said in str(caught.value)


def test_two_files_joined_by_a_comma_are_two_files(tmp_path: Path) -> None:
    (one := tmp_path / "a.yaml").write_text("model: {path: x}\n")
    with pytest.raises(ConfigError, match="one configuration file"):
        read_yaml(Path(f"{one},{one}"))


def test_a_date_is_a_word_and_an_impossible_one_too() -> None:
    assert parse_yaml("a: 2020-13-45\nb: 2020-01-02\n", "f") == {"a": "2020-13-45", "b": "2020-01-02"}


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"model: \xe9\n"])
def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match="UTF-8"):
        read_yaml(tmp_path / "run.yaml")


@pytest.mark.parametrize("name", ["nope.yaml", "x" * 300, "a\0b"])
def test_a_file_that_cannot_be_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_yaml(Path(name))


def test_what_is_required_is_asked_for_by_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--model.path", "m"]) == 2
    assert "--data.prompts" in capsys.readouterr().err


_ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2**70, 1.5, -1.5, math.nan, math.inf, "", "x", "1", "\x00", "a/b", [], [1], [None],
    {}, {"x": 1}, {1: 2}, [[]], "off", "auto", "m:f", ":", -(2**70), 1e300, 1e-300, "é" * 300,
]  # fmt: skip


def _mutation(chance: random.Random) -> dict[str, Any]:
    values = dict(LEAST)
    paths = [s.path for s in all_settings()] + [s.section for s in all_settings() if s.section]
    for _ in range(chance.randint(1, 3)):
        *sections, leaf = chance.choice(paths).split(".")
        target: Any = values
        for section in sections:
            inner = target.get(section)
            target[section] = inner = dict(inner) if isinstance(inner, dict) else {}
            target = inner
        target[leaf if chance.random() < 0.9 else leaf[:-1] + "x"] = chance.choice(_ODD)
    return values


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.nightly if s else ()) for s in range(5)])
def test_no_odd_value_anywhere_brings_anything_but_a_user_error_or_a_finite_configuration(seed: int) -> None:
    chance, refused = random.Random(seed), 0
    for _ in range(300):
        values = _mutation(chance)
        try:
            config = build(values)
        except UserError:
            refused += 1
            continue
        assert isinstance(config, RunConfig) and _finite(config.as_dict()), values
        assert "/" not in config.name
    assert refused > 100


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_finite(v) for v in value.values())
    if isinstance(value, list):
        return all(_finite(v) for v in value)
    return not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize("verify", ["first", "always"])
def test_bits_are_compared_by_what_engines_recorded_so_they_must_record(verify: str) -> None:
    """Attached engines are asked when they are met: they may have the plug-in, whatever this run's setting says."""
    weights = {"weights": {"loader": "model", "verify": verify}}
    assert refused(**weights).field == "weights.verify"
    least(weights={"verify": verify})
    least(**weights, sglang={"urls": ["http://127.0.0.1:30000"]})
    least(**weights, train={"task": "sft"})
