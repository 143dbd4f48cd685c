"""What several rooms must know of a model. Its family reads it from config.json once, and it is handed down."""

from __future__ import annotations

from dataclasses import dataclass

from mslime.config.choices import ReplayMode


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes of a model that more than its builder needs.

    Attributes:
        vocab_size: rows of the embedding, without padding. An engine that is sent a token id beyond it dies.
        max_positions: longest sequence that the checkpoint was made for, in tokens.
        num_layers: transformer layers, dense ones counted.
        moe_layer_ids: global ids of the layers that route; empty for a dense model.
        num_experts, top_k: routed experts of a layer, and of a token; 0 for a dense model.
        renderers: names of those that may know how the family's checkpoints chat (`rollout.renderer`).
    """

    vocab_size: int
    max_positions: int
    num_layers: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int
    renderers: tuple[str, ...] = ()

    def sends_routes(self, replay: ReplayMode) -> bool:
        """Whether engines are asked for the routes of this model, given `train.replay`."""
        return replay == "r3" and bool(self.moe_layer_ids)
