"""Makes what the quickstart starts from: a tiny Qwen3-MoE with random weights, its tokenizer, and the files of prompts.

    python examples/quickstart/make_task.py --out outputs/quickstart/task --seed 1234

writes `model/` (config.json, model.safetensors, generation_config.json, tokenizer), `sft.jsonl` (demonstrations, most
of them wrong), `train.jsonl` (prompts for reinforcement learning) and `heldout.jsonl` (prompts that are in neither).
The same seed makes the same files.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from task import SYMBOLS, Row, demonstration, held_out_lists, question, training_lists

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
DEMONSTRATIONS, TRAINING_PROMPTS, HELD_OUT_PROMPTS = 4096, 4096, 256


def main() -> None:
    """Write everything below --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write; made when missing")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="of weights and prompts (default 1234)")
    args = parser.parse_args()
    parameters = write_model(args.out / "model", args.seed)
    print(f"{args.out / 'model'}: Qwen3-MoE, 4 layers, 16 experts top-2, {parameters / 1e6:.1f} M parameters, random")
    for name, rows in make_rows(args.seed).items():
        write_rows(args.out / f"{name}.jsonl", rows)
        print(f"{args.out / name}.jsonl: {len(rows)} rows, such as {rows[0].prompt} -> {rows[0].label}")


def make_rows(seed: int) -> dict[str, list[Row]]:
    """Rows of the files sft, train and heldout. No held-out list occurs in the other two."""
    rng = random.Random(seed)
    held_out = held_out_lists(HELD_OUT_PROMPTS, rng)
    avoid = frozenset(held_out)
    return {
        "sft": [demonstration(digits, rng) for digits in training_lists(DEMONSTRATIONS, avoid, rng)],
        "train": [question(digits) for digits in training_lists(TRAINING_PROMPTS, avoid, rng)],
        "heldout": [question(digits) for digits in held_out],
    }


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per symbol; decoding puts nothing between them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate((*SPECIAL_TOKENS, *SYMBOLS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, bos, eos, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def model_config() -> Qwen3MoeConfig:
    """2.6 M parameters, of which 0.5 M work on a token.

    Two KV heads and an even vocabulary let tensor parallelism of 2 divide everything. The initialisation is wide (0.06,
    near 1/sqrt(hidden)), so that layers of so few units hand on signals of a useful size.
    """
    from transformers import Qwen3MoeConfig

    pad, bos, eos = range(3)
    return Qwen3MoeConfig(
        vocab_size=len(SPECIAL_TOKENS) + len(SYMBOLS),
        hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        num_experts=16, num_experts_per_tok=2, moe_intermediate_size=96,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        max_position_embeddings=512, initializer_range=0.06, tie_word_embeddings=False,
        pad_token_id=pad, bos_token_id=bos, eos_token_id=eos,
    )  # fmt: skip


def write_model(directory: Path, seed: int) -> int:
    """Write a random fp32 checkpoint with its tokenizer; return the number of parameters."""
    import torch
    from transformers import GenerationConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    torch.manual_seed(seed)
    config = model_config()
    model = Qwen3MoeForCausalLM(config).float()
    # transformers starts the padding token at 0, where the gradient of RMSNorm is 1/sqrt(eps): a policy that samples it
    # once would have a gradient norm of thousands, and clipping would throw the step away.
    with torch.no_grad():
        model.model.embed_tokens.weight[config.pad_token_id].normal_(std=config.initializer_range)
    model.generation_config = GenerationConfig(pad_token_id=config.pad_token_id, eos_token_id=config.eos_token_id)
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())


if __name__ == "__main__":
    main()
