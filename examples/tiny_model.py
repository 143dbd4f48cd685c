"""Tiny Qwen3-MoE with random weights, and its tokenizer, for the examples on a CPU.

Most examples use 32 symbols. Those with chat have a chat template, and tokens for roles, calls and whole words.
"""

from __future__ import annotations

import argparse
import json
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

SYMBOLS = "0123456789[](){}<>=+-*/,.:; "
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHAT_SYMBOLS = string.digits + string.ascii_letters + string.punctuation + " \n"
ROLES = ("<system>", "<user>", "<assistant>", "<tool>")
TAGS = ("<tool_call>", "</tool_call>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A reply ends with `<eos>`; tool calls have Hermes' form. Tool definitions are left out to save tokens."""


Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Rows of a task's files by file name: sft, train and heldout."""


def make_task(described: str | None, make_rows: Callable[[int], Rows], words: Sequence[str] | None = None) -> None:
    """Command line of an example's `make_task`: write its model and its files below --out.

    Args:
        described: the module's docstring, for --help.
        make_rows: from a seed.
        words: tokens of a model that chats (see `make_chat_tokenizer`).
    """
    parser = argparse.ArgumentParser(description=described, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output directory; created if missing")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of weights and rows (default 1234)")
    parser.add_argument(
        "--head-dim", type=int, default=32, metavar="N",
        help="size of an attention head (default 32; 64 for engines on GPUs: SGLang has no rotary kernel for 32)",
    )  # fmt: skip
    args = parser.parse_args()
    model, tokenizer = args.out / "model", None if words is None else make_chat_tokenizer(words)
    parameters = write_model(model, args.seed, tokenizer, head_dim=args.head_dim)
    print(f"{model}: Qwen3-MoE, 4 layers, 16 experts top-2, {parameters / 1e6:.1f} M parameters, random")
    for name, rows in make_rows(args.seed).items():
        write_rows(args.out / f"{name}.jsonl", rows)
        print(f"{args.out / name}.jsonl: {len(rows)} rows, such as {json.dumps(rows[0])}")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer(symbols: str = SYMBOLS) -> PreTrainedTokenizerFast:
    """One token per symbol; decoding inserts nothing between them."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: i for i, symbol in enumerate((*SPECIAL_TOKENS, *symbols))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, bos, eos, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_chat_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token for each of `words` and per symbol, with a chat template."""
    from tokenizers import AddedToken

    tokenizer = make_tokenizer(CHAT_SYMBOLS)
    tokenizer.add_tokens([AddedToken(role, special=True, normalized=False) for role in ROLES], special_tokens=True)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in (*TAGS, *words)])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def model_config(vocab_size: int, **other: int) -> Qwen3MoeConfig:
    """2.6 M parameters, of which 0.5 M are active per token; `other`: sizes to override.

    Two KV heads and an even vocabulary let tensor parallelism of 2 divide everything. The initialisation is wide (0.06,
    near 1/sqrt(hidden)), which keeps signals large enough in such small layers.
    """
    from transformers import Qwen3MoeConfig

    pad, bos, eos = range(3)
    sizes = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
    }  # fmt: skip
    return Qwen3MoeConfig(
        vocab_size=vocab_size, **(sizes | other),
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        max_position_embeddings=512, initializer_range=0.06, tie_word_embeddings=False,
        pad_token_id=pad, bos_token_id=bos, eos_token_id=eos,
    )  # fmt: skip


def write_model(directory: Path, seed: int, tokenizer: PreTrainedTokenizerFast | None = None, **sizes: int) -> int:
    """Write a random fp32 checkpoint and its tokenizer (default: 32 symbols); return the number of parameters.

    Args:
        sizes: of the model, if different from `model_config`.
    """
    import torch
    from transformers import GenerationConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    torch.manual_seed(seed)
    tokenizer = tokenizer or make_tokenizer()
    config = model_config(len(tokenizer) + len(tokenizer) % 2, **sizes)
    model = Qwen3MoeForCausalLM(config).float()
    # transformers initialises the padding token to 0, where the gradient of RMSNorm is 1/sqrt(eps). A policy that
    # samples it once would have a gradient norm of thousands, and clipping would nullify the step.
    with torch.no_grad():
        model.model.embed_tokens.weight[config.pad_token_id].normal_(std=config.initializer_range)
    model.generation_config = GenerationConfig(pad_token_id=config.pad_token_id, eos_token_id=config.eos_token_id)
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return sum(p.numel() for p in model.parameters())
