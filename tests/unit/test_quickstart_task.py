"""The quickstart's task: what a person is shown must be learnable, disjoint, and exactly scored."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from examples.quickstart import make_task, task
from examples.tiny_model import SYMBOLS, write_model, write_rows
from mslime.config.loader import read_yaml
from mslime.config.schema import RunConfig
from mslime.data.tokenizer import check_vocabulary, load_tokenizer
from mslime.rollout.rewards.reward_kinds import exact

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quickstart"


@pytest.fixture(scope="module")
def rows() -> dict[str, list[task.Row]]:
    return make_task.make_rows(seed=7)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("task") / "model"
    write_model(directory, seed=7)
    return directory


def reward(response: str, label: str) -> float:
    return exact(response, label)


def test_no_held_out_prompt_is_trained_on(rows: dict[str, list[task.Row]]) -> None:
    held_out = {r.prompt for r in rows["heldout"]}
    assert len(held_out) == len(rows["heldout"]) == make_task.HELD_OUT_PROMPTS
    assert not held_out & {r.prompt for r in rows["train"] + rows["sft"]}


def test_every_length_is_held_out_and_trained(rows: dict[str, list[task.Row]]) -> None:
    lengths = set(range(task.MIN_DIGITS, task.MAX_DIGITS + 1))
    for name in rows:
        counts = Counter(r.metadata["digits"] for r in rows[name])
        assert set(counts) == lengths
        assert min(counts.values()) > 0.05 * len(rows[name]), (name, counts)


def test_a_label_is_the_lists_digits_in_ascending_order(rows: dict[str, list[task.Row]]) -> None:
    for row in rows["train"] + rows["heldout"]:
        digits = [int(c) for c in row.prompt[1:-1]]
        assert [int(c) for c in row.label] == sorted(digits)


def test_reward_is_one_for_ascending_and_zero_for_descending_copied_or_longer_answers() -> None:
    label = task.question("52817").label
    assert reward("12578", label) == reward(" 12578 ", label) == 1.0
    assert [reward(r, label) for r in ("87521", "52817", "125788", "1257", "", "1 2578")] == [0.0] * 6


def test_demonstrations_are_right_one_time_in_three_whatever_the_list(rows: dict[str, list[task.Row]]) -> None:
    assert 0.32 < sum(r.metadata["order"] == "ascending" for r in rows["sft"]) / len(rows["sft"]) < 0.38
    for row in rows["sft"]:
        digits = row.prompt[1:-1]
        expected = task.ascending(digits) if row.metadata["order"] == "ascending" else task.descending(digits)
        assert row.label == expected
    rng = random.Random(0)
    orders = Counter(str(task.demonstration("123", rng).metadata["order"]) for _ in range(4000))
    assert 0.32 < orders["ascending"] / 4000 < 0.38


def test_the_seed_decides_the_rows(rows: dict[str, list[task.Row]]) -> None:
    assert make_task.make_rows(seed=7) == rows
    assert make_task.make_rows(seed=8)["heldout"] != rows["heldout"]


def test_a_row_file_holds_prompt_label_and_metadata(rows: dict[str, list[task.Row]], tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", map(asdict, rows["heldout"]))
    read = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(r["prompt"], r["label"]) for r in read] == [(r.prompt, r.label) for r in rows["heldout"]]
    assert read[0]["metadata"] == rows["heldout"][0].metadata


def test_tokenizer_gives_one_token_a_symbol_and_decodes_back(checkpoint: Path, rows: dict[str, list[task.Row]]) -> None:
    tokenizer = load_tokenizer(checkpoint)
    check_vocabulary(tokenizer, checkpoint)
    texts = {SYMBOLS} | {t for r in rows["heldout"] for t in (r.prompt, r.label)}
    for text in texts:
        ids = tokenizer.encode(text, special_tokens=True)
        assert ids == tokenizer.encode(text, special_tokens=False) and len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"]


def test_the_model_is_a_qwen3_moe_that_two_ranks_can_share(checkpoint: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(checkpoint)
    assert config.architectures == ["Qwen3MoeForCausalLM"] and not config.tie_word_embeddings
    assert (config.num_experts, config.num_experts_per_tok) == (16, 2)
    for size in (config.vocab_size, config.num_key_value_heads, config.num_experts, config.num_hidden_layers):
        assert size % 2 == 0
    assert config.vocab_size == load_tokenizer(checkpoint).vocab_size
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert 2e6 < sum(p.numel() for p in model.parameters()) < 4e6


def test_the_random_router_gives_both_expert_parallel_ranks_work(
    checkpoint: Path, rows: dict[str, list[task.Row]]
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer, model = load_tokenizer(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)
    prompts = [r.prompt for r in rows["heldout"] if r.metadata["digits"] == task.MAX_DIGITS]
    ids = torch.tensor([tokenizer.encode(p, special_tokens=False) for p in prompts])
    for scores in model(input_ids=ids, output_router_logits=True).router_logits:
        load = torch.bincount(scores.topk(2).indices.flatten(), minlength=16).double()
        assert (load > 0).sum() >= 8 and 0.2 < load[:8].sum() / load.sum() < 0.8, load


@pytest.mark.parametrize("name", ["sft", "run"])
def test_the_configurations_are_valid_and_long_enough_for_every_answer(name: str) -> None:
    config = RunConfig.model_validate(read_yaml(EXAMPLE / f"{name}.yaml"))
    assert (config.layout.tp, config.layout.ep) == (2, 2)
    assert config.rollout.max_response_tokens > task.MAX_DIGITS + 1
    assert config.train.task == {"sft": "sft", "run": "rl"}[name]
