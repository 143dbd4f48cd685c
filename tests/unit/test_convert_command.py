"""`mslime convert` as a person uses it: bad input named by file and tensor, dry runs, inspect, compare, help."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mslime.cli import main
from mslime.convert.hf import INDEX_NAME, HFCheckpoint, staging_directory
from mslime.convert.torch_dist import METADATA
from mslime.data.checkpoints import complete
from mslime.run import run_checkpoints
from tests.fixtures.convert_tools import CONFIG, fake_placement, write_model

ROOT = Path(__file__).parents[2]
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(autouse=True)
def no_megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Parameters are placed without megatron-core; tests/engines shows the real thing."""
    monkeypatch.setattr(run_checkpoints, "placement", fake_placement)
    yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "source")


def run(*words: object) -> int:
    quiet = () if words[0] in ("run",) else ("--quiet", "--workers", "1")
    return main(["convert", *map(str, words), *quiet])


def shard_of(source: Path, name: str) -> Path:
    return source / json.loads((source / INDEX_NAME).read_text())["weight_map"][name]


def change(source: Path, name: str, to: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the shard that holds a tensor."""
    path = shard_of(source, name)
    tensors = load_file(path)
    to(tensors)
    save_file(tensors, path)


def remove_shard(source: Path) -> str:
    path = shard_of(source, DOWN)
    path.unlink()
    return f"{path.name}.*missing"


def truncate_shard(source: Path) -> str:
    path = shard_of(source, DOWN)
    os.truncate(path, path.stat().st_size - 100)
    return f"{path.name}: .*truncated"


def wrong_shape(source: Path) -> str:
    change(source, DOWN, lambda tensors: tensors.update({DOWN: tensors[DOWN][:, :32].contiguous()}))
    return f"{re.escape(DOWN)} = \\(128, 32\\)"


def extra_tensor(source: Path) -> str:
    change(source, DOWN, lambda tensors: tensors.update({"adapter.lora_A": torch.zeros(3)}))
    index = json.loads((source / INDEX_NAME).read_text())
    index["weight_map"]["adapter.lora_A"] = shard_of(source, DOWN).name
    (source / INDEX_NAME).write_text(json.dumps(index))
    return "adapter.lora_A"


def missing_tensor(source: Path) -> str:
    index = json.loads((source / INDEX_NAME).read_text())
    del index["weight_map"][DOWN]
    (source / INDEX_NAME).write_text(json.dumps(index))
    return f"{re.escape(DOWN)}.*missing"


def lying_index(source: Path) -> str:
    index = json.loads((source / INDEX_NAME).read_text())
    index["weight_map"][DOWN] = index["weight_map"]["model.embed_tokens.weight"]
    (source / INDEX_NAME).write_text(json.dumps(index))
    return f"{index['weight_map'][DOWN]}: {re.escape(DOWN)}"


def described(change: dict[str, Any], said: str) -> Callable[[Path], str]:
    """Damage of config.json."""

    def damage(source: Path) -> str:
        (source / "config.json").write_text(json.dumps(CONFIG | change))
        return said

    return damage


unknown_setting = described({"attention_twist": 3}, "attention_twist.*\\n.*--ignore-field")


BAD = {
    "no shard": remove_shard, "a cut shard": truncate_shard, "another shape": wrong_shape, "one more": extra_tensor,
    "one less": missing_tensor, "a lying index": lying_index, "a setting": unknown_setting,
    "vocabulary": described({"vocab_size": 97}, r"model.embed_tokens.weight = \(96, 128\)"),
    "rope": described({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
    "quantisation": described({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    "architecture": described({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize("damage", BAD.values(), ids=BAD)
def test_bad_input_is_named_by_file_and_tensor_and_nothing_is_written(
    damage: Callable[[Path], str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named, out = damage(source), tmp_path / "out"
    assert run("to-megatron", source, out) == 2
    said = capsys.readouterr().err
    assert re.search(named, said) and "hint: " in said, said
    assert not out.exists() and not staging_directory(out).exists()


@pytest.mark.parametrize("words", [("to-hf", "nowhere", "out"), ("compare", "nowhere", "."), ("inspect", "nowhere"),
                                   ("to-megatron", "nowhere", "out"), ("fp8", "nowhere", "out")])  # fmt: skip
def test_a_checkpoint_that_does_not_exist_is_named(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*words) == 2
    message = capsys.readouterr().err
    assert re.match(r"error: nowhere(/config.json)?: no such (directory|file)", message), message


def bad_chunk(megatron: Path) -> str:
    path = sorted(megatron.glob("*.distcp"))[1]
    os.truncate(path, path.stat().st_size - 7)
    return rf"{path.name}: .*\n? *.*ends at byte"


def lost_file(megatron: Path) -> str:
    path = sorted(megatron.glob("*.distcp"))[0]
    path.unlink()
    return f"{path.name}: .*missing"


def no_metadata(megatron: Path) -> str:
    (megatron / METADATA).unlink()
    return r"\.metadata"


def other_model(megatron: Path) -> str:
    (megatron / "hf" / "config.json").write_text(json.dumps(CONFIG | {"moe_intermediate_size": 32}))
    return r"linear_fc1.* = \(128, 128\).*\(64, 128\)"


@pytest.mark.parametrize("damage", [bad_chunk, lost_file, no_metadata, other_model])
def test_a_damaged_megatron_checkpoint_is_named_by_file_and_tensor(
    damage: Callable[[Path], str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("to-megatron", source, tmp_path / "megatron", "--max-shard-gib", "0.0001") == 0
    named = damage(tmp_path / "megatron")
    capsys.readouterr()
    assert run("to-hf", tmp_path / "megatron", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert re.search(named, said), said
    assert not (tmp_path / "out").exists() and not staging_directory(tmp_path / "out").exists()


def test_the_way_to_megatron_and_back_keeps_every_bit_and_the_tokenizer(source: Path, tmp_path: Path) -> None:
    assert run("to-megatron", source, tmp_path / "megatron") == 0
    assert run("to-hf", tmp_path / "megatron", tmp_path / "back") == 0
    assert run("compare", source, tmp_path / "back") == 0
    assert run("compare", source, tmp_path / "megatron") == 0
    assert (tmp_path / "back" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == CONFIG


def test_a_setting_that_changes_nothing_can_be_named(source: Path, tmp_path: Path) -> None:
    unknown_setting(source)
    assert run("to-megatron", source, tmp_path / "megatron", "--ignore-field", "attention_twist") == 0


def test_a_dtype_can_be_chosen(source: Path, tmp_path: Path) -> None:
    assert run("to-megatron", source, tmp_path / "megatron", "--dtype", "float32") == 0
    assert run("compare", source, tmp_path / "megatron") == 1
    assert run("compare", source, tmp_path / "megatron", "--values") == 0
    assert run("to-hf", tmp_path / "megatron", tmp_path / "back") == 0
    assert run("compare", source, tmp_path / "back") == 0


def test_compare_names_what_differs_and_by_how_much(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_model(tmp_path / "other")
    assert run("compare", source, other) == 0
    assert "equal: 45 tensors" in capsys.readouterr().out

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[DOWN][3, 4] = tensors[DOWN][3, 4] + 2
        tensors[DOWN][0, 0] = 0.0

    change(other, DOWN, add)
    assert run("compare", source, other) == 1
    said = capsys.readouterr().out
    assert f"{DOWN}: values: 2 of 8192 elements, largest difference 2" in said and "1 of 45 tensors differ" in said


def test_compare_tells_missing_tensors_shapes_dtypes_and_zeros_of_two_signs(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(name: str, tensors: dict[str, torch.Tensor]) -> Path:
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        return tmp_path / name

    nan = torch.tensor([float("nan"), 1.0])
    a = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "d": torch.zeros(2), "e": nan}
    b = {"a": torch.ones(3), "b": torch.ones(2).bfloat16(), "x": torch.ones(2), "d": -torch.zeros(2), "e": nan.clone()}
    assert run("compare", write("a", a), write("b", b)) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a: shape: (2,) and (3,)",
        "b: dtype: float32 and bfloat16",
        "c: only in A: (2,)",
        "d: values: 2 of 2 elements, largest difference 0",
        "x: only in B: (2,)",
        "5 of 6 tensors differ",
    ]


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for what in ("to-megatron", "fp8", "int4"):
        assert run(what, source, tmp_path / "out", "--dry-run", "--max-shard-gib", "0.0001") == 0
        assert "nothing written" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_an_existing_directory_is_never_touched(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    for what in ("to-megatron", "to-hf", "fp8", "bf16", "int4"):
        assert run(what, source, tmp_path / "out") == 2, what
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_fp8_and_back_changes_projections_only(source: Path, tmp_path: Path, scale: str) -> None:
    assert run("fp8", source, tmp_path / "fp8", "--scale", scale) == 0
    assert run("bf16", tmp_path / "fp8", tmp_path / "plain") == 0
    assert run("compare", tmp_path / "fp8", tmp_path / "plain") == 0
    before, after = HFCheckpoint(source), HFCheckpoint(tmp_path / "plain")
    changed = {name for name in before.info if not torch.equal(before.tensor(name), after.tensor(name))}
    assert changed == {name for name in before.info if name.endswith("_proj.weight")}
    section = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert section.get("scale_fmt") == ("ue8m0" if scale == "ue8m0" else None)
    plain = {"model.embed_tokens", "lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}
    assert set(section["modules_to_not_convert"]) == plain
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_int4_quantises_routed_experts_and_a_group_must_fit(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("int4", source, tmp_path / "int4", "--group", "32") == 0
    stored = HFCheckpoint(tmp_path / "int4").stored
    packed = [name for name in stored if name.endswith("weight_packed")]
    assert len(packed) == 2 * 4 * 3 and all(".experts." in name for name in packed)
    assert HFCheckpoint(tmp_path / "int4").shapes == HFCheckpoint(source).shapes
    assert run("int4", source, tmp_path / "other", "--group", "128") == 2
    assert "down_proj" in capsys.readouterr().err
    assert run("int4", source, tmp_path / "other", "--group", "12") == 2
    assert run("bf16", source, tmp_path / "other") == 2
    assert "nothing to dequantise" in capsys.readouterr().err


def test_inspect_says_what_a_checkpoint_is(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", source, "--tensors") == 0
    said = capsys.readouterr().out
    nbytes = sum(torch.Size(shape).numel() for shape in HFCheckpoint(source).shapes.values()) * 2
    for part in ("Hugging Face", "Qwen3MoeForCausalLM", "45 in 3 files", f"({nbytes})", "bfloat16: 45 tensors", DOWN):
        assert part in said
    assert run("inspect", source, "--verify") == 2, "nobody left checksums"
    assert run("fp8", source, tmp_path / "fp8") == 0 and run("to-megatron", source, tmp_path / "megatron") == 0
    capsys.readouterr()
    assert run("inspect", tmp_path / "fp8", "--verify") == 0
    said = capsys.readouterr().out
    assert "FP8, blocks of [128, 128]" in said and "float8_e4m3fn: 32 tensors" in said and "files match" in said
    assert run("inspect", tmp_path / "megatron", "--verify") == 0
    said = capsys.readouterr().out
    assert "torch_dist, converted" in said and "Qwen3MoeForCausalLM" in said and "bfloat16" in said


def turn_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 64
    path.write_bytes(content)


@pytest.mark.parametrize("what", ["to-hf", "to-megatron", "bf16", "merge-lora"])
def test_a_damaged_output_of_a_conversion_is_no_source_of_another(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    made, out = tmp_path / "made", tmp_path / "out"
    options = ("--adapter", write_adapter(tmp_path / "adapter")) if what == "merge-lora" else ()
    assert run("to-megatron" if what == "to-hf" else "fp8", source, made) == 0
    assert run(what, made, tmp_path / "undamaged", *options) == 0
    path = next(path for path in made.iterdir() if path.name in ("__0_0.distcp", "model-00001-of-00001.safetensors"))
    turn_a_bit(path)
    capsys.readouterr()
    assert run(what, made, out, *options) == 2
    said = capsys.readouterr().err
    assert f"{path}: " in said and "different checksum" in said and "checksums.json" in said, said
    assert not out.exists() and not staging_directory(out).exists()


def write_adapter(directory: Path) -> Path:
    """An adapter of one weight, in peft's format."""
    directory.mkdir()
    weight = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{weight}.lora_A.weight": torch.ones(2, 128), f"{weight}.lora_B.weight": torch.ones(128, 2)}
    save_file(factors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def test_a_training_checkpoint_is_compared_with_its_manifest(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("to-megatron", source, tmp_path / "megatron") == 0
    saving, trained, out = tmp_path / "saving", tmp_path / "step_1", tmp_path / "out"
    saving.mkdir()
    for name in (METADATA, "__0_0.distcp", "__1_0.distcp", "common.pt", "metadata.json"):
        (tmp_path / "megatron" / name).rename(saving / name)
    (saving / "rng").mkdir()
    (saving / "rng" / "rank_00000.npz").write_bytes(b"random")
    complete(saving, trained, "tp1", 1, {}, {})
    assert run("inspect", trained, "--verify") == 0 and "all 6 files match" in capsys.readouterr().out
    turn_a_bit(trained / "rng" / "rank_00000.npz")
    assert run("inspect", trained, "--verify") == 2 and "rank_00000.npz" in capsys.readouterr().err
    assert run("to-hf", trained, tmp_path / "undamaged", "--source", source) == 0, "it does not read that file"
    for name in ("__0_0.distcp", METADATA):
        turn_a_bit(trained / name)
        capsys.readouterr()
        if name != METADATA:  # torch may be unable to read it
            assert run("to-hf", trained, out, "--source", source) == 2
            said = capsys.readouterr().err
            assert f"{trained / name} = 'sha256" in said and "the file is damaged" in said, said
        assert run("inspect", trained, "--verify") == 2
        assert not out.exists() and not staging_directory(out).exists()


def test_inspect_verify_finds_what_changed_later(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("to-megatron", source, tmp_path / "megatron") == 0
    turn_a_bit(tmp_path / "megatron" / "__0_0.distcp")
    assert run("inspect", tmp_path / "megatron", "--verify") == 2
    assert re.search(r"__0_0.distcp: \S+ at \[.*different checksum", capsys.readouterr().err)


@pytest.mark.parametrize(
    "words", [("--workers", "0"), ("--max-shard-gib", "0"), ("--include", "(")], ids=lambda words: words[0]
)
def test_an_option_that_cannot_be_is_refused(source: Path, tmp_path: Path, words: tuple[str, str]) -> None:
    assert main(["convert", "fp8", str(source), str(tmp_path / "out"), *words]) == 2
    assert not (tmp_path / "out").exists()


def test_every_tool_answers_help_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    tools = sorted((ROOT / "tools").glob("*.py"))
    assert len(tools) >= 7
    for tool in tools:
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        said: Any = subprocess.run(
            [sys.executable, str(tool), "--help"], check=False, capture_output=True, text=True, env=environment,
            timeout=60,
        )  # fmt: skip
        assert said.returncode == 0 and "usage: " in said.stdout and os.access(tool, os.X_OK), (tool, said)
