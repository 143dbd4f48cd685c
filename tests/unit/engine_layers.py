"""What SGLang's own layers hold of a tensor on every rank of an engine, beside what `convert.engine` says.

For layouts that no CPU server can have: it pads heads that are fewer than ranks, where GPUs hold them several times.
`python engine_layers.py` prints one JSON object: layer and ranks -> the ranks on which the two differ.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from mslime.backends.cpu import sglang as platform
from mslime.config.layout import EngineLayout
from mslime.convert.engine import Cut, Padded, Share

HIDDEN, HEAD, HEADS, GROUPS = 16, 4, 16, 4
SIZES = (1, 2, 4, 8, 16)


def main() -> None:
    platform.install()
    from sglang.srt.layers import linear, vocab_parallel_embedding

    def place(rank: int, tp: int) -> None:
        group = linear._LogicalGroup(rank, tp)
        parallel = SimpleNamespace(tp_rank=rank, tp_size=tp)
        for module in (linear, vocab_parallel_embedding):
            module._resolve_linear_group = lambda name: group  # type: ignore[attr-defined]
            module.get_parallel = lambda: parallel  # type: ignore[attr-defined]

    def loaded(layer: torch.nn.Module, parts: list[torch.Tensor], shards: list[str] | list[int] | None) -> torch.Tensor:
        (weight,) = layer.parameters()
        for number, part in enumerate(parts):
            weight.weight_loader(weight, part, *([shards[number]] if shards else []))  # type: ignore[attr-defined]
        return weight.detach()

    def differing(make: object, parts: list[torch.Tensor], shards: list[str] | list[int] | None, cut: Cut) -> dict:
        found = {}
        for tp in SIZES:
            found[str(tp)] = []
            for rank in range(tp):
                place(rank, tp)
                held = loaded(make(), parts, shards)  # type: ignore[operator]
                if not torch.equal(held, cut.local(parts, rank, EngineLayout(tp, 1))):
                    found[str(tp)].append(rank)
        return found

    floats = {"params_dtype": torch.float32}
    projections = [torch.randn(n * HEAD, HIDDEN) for n in (HEADS, GROUPS, GROUPS)]
    halves = [torch.randn(32, HIDDEN) for _ in range(2)]
    print(
        json.dumps(
            {
                "qkv": differing(
                    lambda: linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, GROUPS, bias=False, **floats),
                    projections, ["q", "k", "v"], Share(heads=(HEADS, GROUPS, GROUPS)),
                ),
                "gate and up": differing(
                    lambda: linear.MergedColumnParallelLinear(HIDDEN, [32, 32], bias=False, **floats),
                    halves, [0, 1], Share(),
                ),
                "rows": differing(
                    lambda: linear.RowParallelLinear(32, HIDDEN, bias=False, **floats), [halves[0].T.contiguous()],
                    None, Share(1),
                ),
                "vocabulary": differing(
                    lambda: vocab_parallel_embedding.VocabParallelEmbedding(1000, HIDDEN, **floats),
                    [torch.randn(1000, HIDDEN)], None, Padded(),
                ),
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
